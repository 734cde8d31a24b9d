"""Reading and writing at a place of an open file: all of it, or an error."""

from __future__ import annotations

import os
from collections.abc import Sequence


def write(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """All parts one after another, from an offset on."""
    waiting = [memoryview(part).cast("B") for part in parts if len(part)]
    while waiting:
        done = os.pwritev(descriptor, waiting[:512], offset)
        offset += done
        while waiting and done >= len(waiting[0]):
            done -= len(waiting.pop(0))
        if done:
            waiting[0] = waiting[0][done:]


def read(descriptor: int, length: int, offset: int = 0) -> bytearray:
    """So many bytes from an offset on, or what there is."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            return data[:done]
        done += count
    return data
