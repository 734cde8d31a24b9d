"""The Ray cluster of a run: started on this machine and gone with the run, or joined."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch

from pfed import compat, machine
from pfed.config import RunOptions
from pfed.engines import guard
from pfed.errors import RunError, UserError

MARK = "PFED_RAY"
LOOPBACK = "127.0.0.2"  # for 127.0.0.1 Ray takes the address by which others see this machine, which may change
LONGEST = 20  # characters of the folder for temporary files: names of sockets in it must be short
STARTS = 3  # tries
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no report on its use
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no remark on devices that nobody asked for
    "RAY_worker_niceness": "0",  # workers are as important as the process that waits for them
}


def check(options: RunOptions) -> None:
    """Whether a run with these options can be on Ray, or is not and need not."""
    address = options.ray_address
    if options.engine != "ray":
        if address is not None:
            raise UserError(f"run.ray_address is for engine ray. Got it with run.engine {options.engine!r}.")
        return
    host, _, port = (address or "auto").rpartition(":")
    if address not in (None, "auto") and not (host and "/" not in host and port.isdigit()):
        raise UserError(f"run.ray_address must be auto or HOST:PORT. Got {address!r}.")
    if options.device not in ("cpu", "cuda"):
        raise UserError(f"run.device must be cpu or cuda with engine ray. Got {options.device!r}.")
    package()


def package() -> Any:
    """Ray itself, with our settings where the user has none."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return compat.optional("ray", "ray")


class Cluster:
    """Where workers get their place: how many, and which share of the processors and devices each."""

    def __init__(self, options: RunOptions, clients: int):
        self.ray = package()
        self.size = 0  # workers
        self._options, self._clients = options, clients
        self._gpus = 0
        self._mine = False  # whether it is up to us to leave
        self._after = contextlib.ExitStack()
        self._guard: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start or join it. One that this process is in already is taken as it is."""
        if not self.ray.is_initialized():
            self._mine = True
            logging.getLogger("ray").setLevel(logging.ERROR)
            with _same_signals():
                self._join() if self._options.ray_address else self._start()
        there = self.ray.cluster_resources()
        self._gpus = int(there.get("GPU", 0)) if self._options.device == "cuda" else 0
        if self._options.device == "cuda" and not self._gpus:
            raise UserError("run.device 'cuda' is not there: Ray finds no GPU.")
        places = int(there.get("CPU", 1))
        wanted = self._options.workers or self._gpus or places
        self.size = max(1, min(wanted, places, self._clients))

    def _start(self) -> None:
        """Start one on this machine. A very busy one may need several tries: Ray gives its processes half a minute."""
        for number in range(1, STARTS + 1):
            try:
                self._launch()
                return
            except Exception as error:  # whatever Ray raises
                self._leave()
                if number == STARTS:
                    raise RunError(f"Ray can't be started: {_first_line(error)}.") from error

    def _launch(self) -> None:
        gpus = torch.cuda.device_count() if self._options.device == "cuda" else 0
        size = self._options.workers or gpus or machine.cores()
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST else "/tmp"
        folder, mark = tempfile.mkdtemp(prefix="pfed-ray-", dir=base), secrets.token_hex(16)
        linux = sys.platform == "linux"
        if linux:
            self._guard = _guard(f"{MARK}={mark}", folder)
        self._after.enter_context(_environment({MARK: mark, **_lock()}))
        self.ray.init(
            num_cpus=min(size, max(1, self._clients)),
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            _node_ip_address=LOOPBACK if linux else None,
        )

    def _join(self) -> None:
        address = str(self._options.ray_address)
        host, _, port = address.rpartition(":")
        try:
            if host:  # Ray would try for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # whatever Ray raises
            raise UserError(f"run.ray_address {address!r} can't be joined: {_first_line(error)}.") from error

    def share(self) -> dict[str, Any]:
        """What a worker gets of a machine, and that Ray is not to replace it: the engine does."""
        gpus = 1 / math.ceil(self.size / self._gpus) if self._gpus else 0
        return {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}

    def has(self, node: str | None) -> bool:
        """Whether a machine is still in it."""
        return any(known["NodeID"] == node and known["Alive"] for known in self.ray.nodes())

    def close(self) -> None:
        if self._mine:
            self._mine = False
            self._leave()

    def _leave(self) -> None:
        self.ray.shutdown()
        self._after.close()
        if self._guard is not None:
            self._guard.communicate()  # it ends when nothing is left
            self._guard = None


def _guard(mark: str, folder: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", guard.__file__, mark, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _lock() -> dict[str, str]:
    """A token that keeps strangers out, since Ray listens at every address of the machine; none if the user has one.

    Else Ray would make one and leave it in the user's home, where all users of the machine can read it.
    """
    theirs = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return {} if theirs else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Inside, these are in the environment too; afterwards it is as before, also where Ray has changed it."""
    before = dict(os.environ)
    os.environ.update(values)
    _forget_token()
    try:
        yield
    finally:
        for name in [name for name in os.environ.keys() - before if name in values or name.startswith("RAY_")]:
            del os.environ[name]
        _forget_token()


def _forget_token() -> None:
    """Let Ray look for its token anew: it is another one in each cluster that a process starts."""
    with contextlib.suppress(ImportError, AttributeError):
        compat.optional("ray._raylet", "ray").AuthenticationTokenLoader.instance().reset_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Afterwards signals do what they did before: Ray has its own way with SIGTERM."""
    kept = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.getsignal(number) for number in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
