"""The machine: its processors and devices, and how its C library deals with memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from pfed.errors import UserError

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST, KEPT = 64 * 2**20, 512 * 2**20  # bytes


def cores() -> int:
    """The processors that this process may use, by its affinity and its control group."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def free_memory() -> int | None:
    """Bytes that this process may still take without swapping; None where that is not known."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        found.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used))
    return min(found, default=None)


def device(name: str, number: int = 0) -> torch.device:
    """A device by name; of several GPUs under the name `cuda` the one for the worker of this number."""
    try:
        found = torch.device(name)
    except RuntimeError:
        raise UserError(f"run.device must be cpu, cuda or cuda:N. Got {name!r}.") from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    if count <= (found.index or 0):
        raise UserError(f"run.device {name!r} is not there: torch finds {count} GPUs.")
    return torch.device("cuda", number % count if found.index is None else found.index)


def die_with_parent() -> None:
    """When the parent of this process dies, in whatever way, the system is to kill this one too; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread: float sums do not depend on the machine's cores, and processes are the way to use those."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
