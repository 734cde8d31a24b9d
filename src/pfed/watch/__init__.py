"""`pfed watch`: the report of runs, live in the browser while they go on.

It looks at the runs' files and never at their processes, has a lower priority than these, and writes nothing but the
request to stop a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import warnings
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from pfed.errors import UserError
from pfed.watch.app import application
from pfed.watch.guard import LOOPBACK, WILD, Guard
from pfed.watch.runs import Runs

PORT = 8777
NICE = 10  # runs go first
CONNECTIONS = 64


class Server(uvicorn.Server):
    """The live page of a runs folder. It listens from the beginning, so that its address is known before it runs."""

    def __init__(self, folder: Path, names: Sequence[str] = (), host: str = LOOPBACK[0], port: int | None = None):
        runs = Runs(folder)
        runs.look()
        self._query = [("run", runs.find(name).shown["run"]) for name in names]
        self._listening = _listen(host, port)
        self._port = self._listening.getsockname()[1]
        self._host, self._token = host, secrets.token_urlsafe(32)
        app, self._watcher = application(runs)
        self._guard = Guard(app, host, self._port, self._token)
        super().__init__(
            uvicorn.Config(
                self._guard,
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
                limit_concurrency=CONNECTIONS,
            )
        )

    def address(self, once: bool = False) -> str:
        """Where the page is, with the token, or with one that opens it `once`."""
        named = socket.gethostname() if self._host in WILD else f"[{self._host}]" if ":" in self._host else self._host
        token = self._guard.once() if once else self._token
        return f"http://{named}:{self._port}/?{urlencode([('token', token), *self._query])}"

    def go(self) -> None:
        """Serve until Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            self.run([self._listening])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End at once, whoever is still connected."""
        self._watcher.end()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that nobody waits for a report is no error
        await super().shutdown(sockets)


def serve(
    folder: Path, names: Sequence[str], host: str, port: int | None, open_browser: bool = True, as_json: bool = False
) -> None:
    """Print the address, open the browser, and serve the live page; `names` are the runs that are selected at first."""
    server = Server(folder, names, host, port)
    if host not in LOOPBACK:
        warnings.warn(
            f"The live page is open to the network at {host}, without encryption: whoever gets its address with the"
            " token can see all runs and stop them.",
            stacklevel=2,
        )
    address = server.address()
    print(json.dumps({"address": address}) if as_json else f"{folder} is shown at {address}", flush=True)
    if open_browser and _has_display():
        threading.Thread(target=webbrowser.open, args=[server.address(once=True)], daemon=True).start()
    os.nice(NICE)
    server.go()


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at this port; where none is asked for, at ours, or at a free one if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port is None:
            with contextlib.suppress(OSError):
                return socket.create_server((host, PORT), family=family)
        return socket.create_server((host, port or 0), family=family)
    except OSError as error:
        where = f"{host!r}, port {port}" if port else repr(host)
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UserError(f"The live page can't be served at {where}: {reason}.") from error


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
