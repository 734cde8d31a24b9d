"""The process in which a site trains, and the executor's side of it.

NVFlare gives up a whole run when a site's process of it dies. So that process trains nothing itself: it asks a worker,
which may run out of memory or be killed; the question is then put again to a new one.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from pfed import machine, wire
from pfed.wire import Payload

TRIES = 2
LOG = "worker.log"  # what is printed at the site, and the traceback of every error
Answer = tuple[dict[str, Any], Payload]


class Worker:
    """A worker process as its user sees it: questions go in, answers come out."""

    def __init__(self, kit: Path):
        self._kit = kit
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._begun: bytes | None = None  # the question that began the run, for a new process

    def start(self) -> None:
        """Have one ready before the first question: it takes its time to come up."""
        if self._process is None:
            self._start()

    def ask(self, about: dict[str, Any], payload: Payload, stopped: Callable[[], bool]) -> Answer:
        """The answer to a question; a worker that dies over it is replaced once."""
        question = _frame(about, payload)
        for deaths in range(TRIES):
            answer = self._put(question, about.get("kind") != "begin", stopped)
            if answer is not None:
                if about.get("kind") == "begin":
                    self._begun = question
                return {**answer[0], "deaths": deaths}, answer[1]
            if stopped():
                return {"code": "stopped"}, {}
        return {"code": "died"}, {}

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _put(self, question: bytes, begun: bool, stopped: Callable[[], bool]) -> Answer | None:
        """What a worker answers; None if it died or nobody wants to know any more."""
        try:
            if self._process is None:
                self.start()
                if begun and self._begun is not None:
                    self._exchange(self._begun, stopped)
            return self._exchange(question, stopped)
        except (EOFError, OSError):
            self.kill()
            return None

    def _exchange(self, question: bytes, stopped: Callable[[], bool]) -> Answer:
        assert self._connection is not None
        self._connection.send_bytes(question)
        while not self._connection.poll(0.2):
            if stopped():
                raise EOFError
        return _read(self._connection.recv_bytes())

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "pfed.deploy.worker", str(self._kit), str(theirs.fileno())]
        environment = {key: value for key, value in os.environ.items() if key != "PFED_RUNS"}
        with open(self._kit / LOG, "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=[theirs.fileno()]
            )
        theirs.close()


def main(kit: Path, descriptor: int) -> None:
    """A worker's life: it ends with who asks it."""
    machine.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import torch

    from pfed.deploy.site import Site

    torch.set_num_threads(1)
    site = Site(kit)
    with contextlib.suppress(EOFError), Connection(descriptor) as connection:
        while True:
            connection.send_bytes(_frame(*answer(site.answer, *_read(connection.recv_bytes()))))


def answer(ask: Callable[[dict[str, Any], Payload], Answer], about: dict[str, Any], payload: Payload) -> Answer:
    """What may be said of a question: an answer, or a code and a type. Texts of errors stay in the site's log."""
    from pfed.deploy import Refused
    from pfed.deploy.versions import Lost

    try:
        told, found = ask(about, payload)
        return {"code": "ok", **told}, found
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr, flush=True)
        return {"code": "refused", "why": str(refusal)}, {}
    except Lost:
        traceback.print_exc()
        return {"code": "lost"}, {}
    except Exception as error:
        traceback.print_exc()
        return {"code": "raised", "type": known_type(error)}, {}


def _frame(about: dict[str, Any], payload: Payload) -> bytes:
    return wire.encode({"about": json.dumps(about), "payload": payload})


def _read(frame: bytes) -> Answer:
    found = wire.decode(frame)
    about: dict[str, Any] = json.loads(found["about"])
    return about, found["payload"]


def known_type(error: BaseException) -> str:
    """The nearest class of an error that everybody knows: a name of one's own may tell something."""
    names = (str(cls.__name__) for cls in type(error).__mro__ if vars(builtins).get(cls.__name__) is cls)
    return next(names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
