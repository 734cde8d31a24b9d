"""A federation of real processes for tests: NVFlare's server and sites on this machine, with certificates."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy_helpers import TINY

from pfed import Result
from pfed.deploy import jobs, kits, parents

PATIENCE = 240.0  # seconds


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def until(true: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.1)


class Federation:
    """Kits and processes below a folder whose `data` and `public` are there."""

    def __init__(self, root: Path, names: tuple[str, ...]):
        self.root, self.names = root, names
        self.folder = root / "federation"
        kits.init(self.folder, names, "localhost", free_port())
        self._thread = ThreadPoolExecutor(1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start_server(self) -> None:
        kits.settle(self.folder / "server", runs=str(self.root / "runs"), public=str(self.root / "public"))
        self._processes.append(parents.start(self.folder / "server"))

    def start_site(self, name: str, **settings: Any) -> None:
        told = {"data": str(self.root / "data" / name), "public": str(self.root / "public"), "approve_within": 1000.0}
        kits.settle(self.folder / name, **{**told, **settings})
        self._processes.append(parents.start(self.folder / name))

    def start(self) -> None:
        self.start_server()
        for name in self.names:
            self.start_site(name)

    def run(self, config: Mapping[str, Any], tell: Callable[[str], None] = print, **more: Any) -> Result:
        run = self.plan(config, **more)
        return jobs.follow(self.folder, run, tell)

    def plan(self, config: Mapping[str, Any], **more: Any) -> Path:
        return jobs.create(self.folder, {**TINY, **config}, **{"records": False, "privacy": None, **more})

    def follow(self, run: Path) -> Future[Result]:
        """The run in the background."""
        return self._thread.submit(jobs.follow, self.folder, run, print)

    def kill(self, part: str, command: str = "") -> None:
        """What kill -9 does to the processes of a part whose command line has this text; all of them by default."""
        found = [pid for pid in parents.running(self.folder / part) if command in _command(pid)]
        assert found, f"{part} has no process {command!r}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for part in (*self.names, "server"):
            parents.stop(self.folder / part)
        for process in self._processes:
            process.wait(10)

    def left(self) -> list[int]:
        return [pid for part in (*self.names, "server") for pid in parents.running(self.folder / part)]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def rounds(run: Path) -> int:
    """How many rounds a run has done; -1 before the first."""
    return jobs._round(run)


def show(result: Result) -> None:
    """What the record says of faults; `pytest -rP` prints it."""
    for event in result.events:
        who = "" if event["client"] is None else f" client {event['client']}"
        print(f"seen: round {event['round']}{who}: {event['kind']}: {event['text']}")
