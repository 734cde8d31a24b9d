"""The private states of all clients, by client and version: up to a cap in memory, the rest in append-only files.

A state is written when memory is needed or a checkpoint is made, never twice in one file, and never changed. A file's
record says whose state it is and of which version, and has a checksum. Where more than half of what the files hold is
no longer needed, what is needed moves to a new file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pfed import files, wire
from pfed.errors import RunError
from pfed.wire import State

HEAD = struct.Struct("<4sIqqQ")  # mark, checksum of all that follows, client, version, bytes
MARK = b"pfed"
FLOOR = 2**20  # bytes of waste that are not worth moving anything
CAP = 2**30  # bytes in memory unless told
ENTRY = 1024  # bytes of memory that a state takes beside its tensors, roughly


class Place(NamedTuple):
    """Where a state lies: segment 0 is nowhere, for a state that is empty."""

    segment: int
    offset: int
    length: int


NOWHERE = Place(0, 0, 0)


class ClientStates:
    """Client states behind a cache of at most `cap` bytes. Without a folder the rest is in a nameless file."""

    def __init__(self, folder: Path | None = None, cap: int = CAP):
        self._folder, self._cap = folder, cap
        self._memory: OrderedDict[tuple[int, int], State] = OrderedDict()  # the longest unused first
        self._sizes: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], Place] = {}
        self._files: dict[int, int] = {}  # segment -> file descriptor
        self._ends: dict[int, int] = {}  # segment -> bytes
        self._active = 0
        self._unsynced = False
        self.held = 0  # bytes in memory

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def load(self, client: int, version: int) -> State:
        """A state; version 0 is the empty one."""
        key = client, version
        if version == 0:
            return {}
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        state = self._read(key)
        with _written():
            self._hold(key, state)
        return state

    def save(self, client: int, version: int, state: State) -> None:
        """Remember a state; it is on disk only after `flush`."""
        key = client, version
        self._places.pop(key, None)
        if state:
            with _written():
                self._hold(key, state)
        else:
            self._drop(key)
            self._places[key] = NOWHERE

    def retain(self, versions: Mapping[int, int]) -> None:
        """Forget every version but these, and move them together if most of what is on disk is not needed."""
        kept = versions.items()
        for key in [key for key in self._memory if key not in kept]:
            self._drop(key)
        self._places = {key: place for key, place in self._places.items() if key in kept}
        live = sum(place.length for place in self._places.values())
        if sum(self._ends.values()) > 2 * live + FLOOR:
            with _written():
                self._move()

    def flush(self, versions: Mapping[int, int]) -> None:
        """These versions are on disk after this."""
        for key in versions.items():
            if key not in self._places:
                self._places[key] = self._append(key, self._memory[key])
        if self._unsynced:
            os.fsync(self._files[self._active])
            self._unsynced = False

    def index(self, versions: Mapping[int, int]) -> Tensor:
        """Where these versions lie: client, version, segment, offset, length. (states, 5)"""
        rows = [[*key, *self._places[key]] for key in sorted(versions.items())]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)

    def restore(self, index: Tensor) -> None:
        """Take over what an index names; ValueError or OSError if any of it is not whole."""
        self._memory.clear()
        self._sizes.clear()
        self.held = 0
        self._places = {}
        for client, version, *place in index.tolist():
            self._places[client, version] = Place(*place)
            if place[0]:
                self._record((client, version))

    @property
    def segments(self) -> set[int]:
        """The files that hold something that is remembered, and the one that is written to."""
        return {place.segment for place in self._places.values() if place.segment} | ({self._active} - {0})

    def discard(self, segments: Iterable[int]) -> None:
        """Delete files that nobody names."""
        assert self._folder is not None
        for segment in segments:
            if segment in self._files:
                os.close(self._files.pop(segment))
                self._ends.pop(segment)
            path(self._folder, segment).unlink(missing_ok=True)

    def _hold(self, key: tuple[int, int], state: State) -> None:
        self._drop(key)
        self._memory[key] = state
        self._sizes[key] = size(state)
        self.held += self._sizes[key]
        while self.held > self._cap and self._memory:
            oldest, value = next(iter(self._memory.items()))
            if oldest not in self._places:
                self._places[oldest] = self._append(oldest, value)
            self._drop(oldest)

    def _drop(self, key: tuple[int, int]) -> None:
        if self._memory.pop(key, None) is not None:
            self.held -= self._sizes.pop(key)

    def _move(self) -> None:
        """All that is needed into a new file."""
        old, before = self._active, dict(self._places)
        self._begin()
        try:
            for key, place in before.items():
                if place.segment:
                    record = self._record(key)
                    self._places[key] = Place(self._active, self._ends[self._active], len(record))
                    self._put([memoryview(record)])
        except BaseException:
            self._places, self._active = before, old
            raise
        for segment in set(self._files) - {self._active}:
            os.close(self._files.pop(segment))
            self._ends.pop(segment)

    def _begin(self) -> None:
        """A new file to write to."""
        if self._folder is None:
            number = self._active + 1
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        else:
            number = 1 + max([0, self._active, *numbers(self._folder)])
            descriptor = os.open(path(self._folder, number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._files[number], self._ends[number], self._active = descriptor, 0, number

    def _append(self, key: tuple[int, int], state: State) -> Place:
        if not self._active:
            self._begin()
        body = wire.pieces(state)
        length = sum(map(len, body))
        text = HEAD.pack(MARK, 0, *key, length)[8:]
        checksum = zlib.crc32(text)
        for piece in body:
            checksum = zlib.crc32(piece, checksum)
        place = Place(self._active, self._ends[self._active], HEAD.size + length)
        self._put([MARK + checksum.to_bytes(4, "little") + text, *body])
        return place

    def _put(self, parts: list[bytes | memoryview]) -> None:
        """Write at the end; the end moves only when all is written, so that a failure leaves no hole."""
        end = self._ends[self._active]
        files.write(self._files[self._active], parts, end)
        self._ends[self._active] = end + sum(map(len, parts))
        self._unsynced = True

    def _record(self, key: tuple[int, int]) -> bytearray:
        """The bytes of a record, checked."""
        segment, offset, length = self._places[key]
        if segment not in self._files:
            assert self._folder is not None
            self._files[segment] = os.open(path(self._folder, segment), os.O_RDONLY)
            self._ends[segment] = os.fstat(self._files[segment]).st_size
        data = files.read(self._files[segment], length, offset)
        if len(data) < max(length, HEAD.size):
            raise ValueError(f"the state of client {key[0]} is cut short")
        mark, checksum, *owner, size = HEAD.unpack_from(data)
        whole = (mark, tuple(owner), size) == (MARK, key, length - HEAD.size)
        if not whole or zlib.crc32(memoryview(data)[8:]) != checksum:
            raise ValueError(f"the checksum of client {key[0]}'s state does not match")
        return data

    def _read(self, key: tuple[int, int]) -> State:
        if self._places[key] == NOWHERE:
            return {}
        try:
            return wire.decode(memoryview(self._record(key))[HEAD.size :])
        except (OSError, ValueError) as error:
            raise RunError(f"A stored state can't be read: {error}. 'pfed resume' goes on from a good one.") from error


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """An error of the disk inside stops the run with one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Client states can't be written: {error.strerror}. Make room and go on with 'pfed resume'."
        ) from error


def size(tree: object) -> int:
    """The memory that a state takes, about: its tensors, and something for the rest."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    return ENTRY + sum(map(size, tree.values())) if isinstance(tree, dict) else 0


def path(folder: Path, segment: int) -> Path:
    return folder / f"states-{segment:06d}"


def numbers(folder: Path) -> list[int]:
    """The segments that are there."""
    return sorted(int(found.name[7:]) for found in folder.glob("states-??????"))
