"""What tests of the live page share: a server, someone who asks it, and runs that wait at each round for a sign."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pfed.watch import Server

METHOD = '''
import os, time
from dataclasses import dataclass
from pathlib import Path
from pfed import Method, params, step

@dataclass(frozen=True)
class Gated(Method):
    """Averages, and begins a round when the file of that round or of a later one is there (nobody)."""

    def init(self, model):
        return {"params": params(model)}

    def download(self, server):
        return dict(server)

    def round(self, server, cohort):
        gate = os.environ.get("GATE")
        while gate and not any(int(path.name) >= cohort.round for path in Path(gate).iterdir()):
            time.sleep(0.01)
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client, params):
        model = client.model(params)
        client.fit(model)
        return {"params": client.share(model)}

    def predictor(self, client, params):
        return client.model(params)
'''
SMALL = ["--clients", "3", "--model", "mlp", "--train-cap", "20", "--test-fraction", "0.9", "--local.momentum", "0.5"]
NAME = "gated-digits-s0-1"


class Answer:
    """What a server answered."""

    def __init__(self, response: http.client.HTTPResponse):
        self.code, self.headers, self.text = response.status, response.headers, response.read().decode()


class Visitor:
    """Someone with the server's cookie, or without."""

    def __init__(self, address: str, enter: bool = True):
        self.address = address
        self.port = urlsplit(address).port
        self.cookie = self.get(f"/?{urlsplit(address).query}").headers["Set-Cookie"].split(";")[0] if enter else ""

    def send(self, method: str, path: str, headers: Mapping[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": getattr(self, "cookie", ""), **headers}
        for name, value in given.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        return connection

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with contextlib.closing(self.send(method, path, headers)) as connection:
            return Answer(connection.getresponse())

    def stop(self, run: str) -> Answer:
        return self.get(f"/stop?run={run}", "POST", Origin=f"http://127.0.0.1:{self.port}")

    @contextlib.contextmanager
    def events(self) -> Iterator[Iterator[dict[str, Any]]]:
        """What the stream tells, as long as it is listened to."""
        with contextlib.closing(self.send("GET", "/events", {})) as connection, connection.getresponse() as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            yield (json.loads(line[6:]) for line in _within(response, 60) if line.startswith(b"data: "))


def _within(lines: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """The lines of a stream that tells now and then that it is there."""
    deadline = time.monotonic() + seconds
    for line in lines:
        yield line
        assert time.monotonic() < deadline, "what was waited for was not told"


@contextlib.contextmanager
def serving(folder: Path, *names: str, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server in a thread of this process."""
    server = Server(folder, names, host, 0)
    thread = threading.Thread(target=server.go)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


class Gate:
    """The rounds that runs may begin."""

    def __init__(self, folder: Path):
        self.folder = folder / "gate"
        self.folder.mkdir()
        self.method = folder / "gated.py"
        self.method.write_text(METHOD)

    def open(self, upto: int) -> None:
        (self.folder / str(upto)).touch()

    @contextlib.contextmanager
    def run(self, runs: Path, rounds: int, *more: str) -> Iterator[subprocess.Popen[str]]:
        """A run in a process of its own."""
        argv = [f"{self.method}:Gated", *SMALL, "--rounds", str(rounds), "--runs", str(runs), *more]
        with process("run", *argv, GATE=str(self.folder)) as started:
            yield started


@contextlib.contextmanager
def process(*argv: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which does not outlive the test."""
    started = subprocess.Popen(
        [sys.executable, "-m", "pfed", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def until(holds: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)
    return found
