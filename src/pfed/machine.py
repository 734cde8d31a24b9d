"""The machine: its processors, and how its C library deals with memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST, KEPT = 64 * 2**20, 512 * 2**20  # bytes


def cores() -> int:
    """The processors that this process may use, by its affinity and its control group."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT of what is freed, in pieces of at most LARGEST.

    Every training step asks for the same memory as the one before. To give it back and get it anew, page by page and
    cleared, costs a small network up to a fifth of its time. To be called when the data are loaded, not before: they
    would be kept too when they are freed.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
            libc.mallopt(M_TRIM_THRESHOLD, KEPT)
