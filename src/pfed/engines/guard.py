"""Sees that nothing is left of a Ray cluster that an engine has started, however the engine's process ends.

Run as a process of its own: `python guard.py MARK FOLDER`. When its standard input ends or its parent is gone, it kills
every process that has the mark in its environment, and deletes the folder. The kernel ends only the first of Ray's
processes with their parent, and some of the others wait for a minute before they give up. Those that give themselves a
title write it over the beginning of their environment, perhaps over the mark: they are known by their open files.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

BEAT = 1.0  # seconds between two looks at the parent
LIMIT = 10.0  # seconds for processes to be gone
TITLE = b"ray::"


def marked(mark: str, folder: str = "") -> list[int]:
    """The processes with this mark in their environment, or with a title of Ray's and a file of this folder open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and (pid := int(process.name)) != os.getpid():
            try:
                titled = folder and (process / "cmdline").read_bytes().startswith(TITLE)
                if mark.encode() in (process / "environ").read_bytes() or (titled and holds(pid, folder)):
                    found.append(pid)
            except OSError:  # gone, or another user's
                continue
    return found


def holds(pid: int, folder: str) -> bool:
    """Whether a process has a file of this folder open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link).startswith(f"{folder}/"):
                return True
    return False


def sweep(mark: str, folder: str) -> None:
    """Kill them all, and those that they start meanwhile."""
    end = time.monotonic() + LIMIT
    while (found := marked(mark, folder)) and time.monotonic() < end:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main(mark: str, folder: str) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], BEAT)[0] and not os.read(0, 1):
            break
    sweep(mark, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
