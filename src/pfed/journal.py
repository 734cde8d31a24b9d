"""An append-only file of JSON entries, each with its checksum: what is in it is whole, or known not to be."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pfed import files


class Journal:
    """One file, open for appending. Entries are in the file when `add` returns, and on the disk after `flush`."""

    def __init__(self, path: Path):
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.end = os.fstat(self._file).st_size

    def read(self) -> tuple[list[Any], bool]:
        """All whole entries from the beginning, and whether anything but the last was damaged.

        A last entry that is not whole was being written when its process died; it is cut off.
        """
        data = self._path.read_bytes()
        entries, good = [], 0
        for line in data.splitlines(keepends=True):
            entry = _parse(line)
            if entry is None:
                break
            entries.append(entry)
            good += len(line)
        rest = data[good:]
        damaged = b"\n" in rest
        if rest and not damaged:
            self.cut(good)
        return entries, damaged

    def add(self, entry: Any) -> None:
        line = _line(entry)
        files.write(self._file, [line], self.end)
        self.end += len(line)

    def cut(self, end: int) -> None:
        """Forget what was added beyond this length."""
        os.ftruncate(self._file, end)
        self.end = end

    def replace(self, entries: Iterable[Any]) -> None:
        """Write the file anew."""
        self.cut(0)
        for entry in entries:
            self.add(entry)

    def flush(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _line(entry: Any) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> Any:
    """The entry of a line, or None if it is not whole."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    return json.loads(text)
