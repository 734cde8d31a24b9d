"""Clients in parallel: worker processes of one thread each that take one client after another.

Workers are forked, so that they have the data, the models and the method without a copy, wherever the method was
defined. What goes to them and comes back lies in nameless shared memory, which is gone when the last process is; the
payload that all clients share is put there once. Which worker runs a client makes no difference: its state comes with
the call and goes back with the answer.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from pfed import files, machine, wire
from pfed.engines.base import Call, Failure, Reply, States
from pfed.engines.parallel import AHEAD, Line, Received, accept, job, work
from pfed.errors import RunError, UserError
from pfed.runner import Runner


class Processes:
    """Persistent workers, started when the first call comes. A worker that dies is replaced, its client tried again."""

    def __init__(self, runner: Runner, states: States):
        if sys.platform != "linux":
            raise UserError("run.engine 'processes' needs Linux. Got 'processes'; 'serial' runs everywhere.")
        self.ids = list(runner.ids)
        self._runner, self._states = runner, states
        here = machine.device(runner.options.device)
        usual = torch.cuda.device_count() if here.type == "cuda" else machine.cores()
        self._size = min(runner.options.workers or usual, max(1, len(self.ids)))
        self._common = Mailbox("pfed-common")
        self._calls = 0
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._busy: dict[Connection, tuple[Worker, int]] = {}  # with the place of its client in the call

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        line = Line(sorted(call.own), AHEAD * self._size)
        self._calls += 1
        shared = self._common.put(wire.pieces(call.common))
        try:
            while not line.over:
                self._hand_out(call, shared, line)
                for ready in wait(list(self._busy)):
                    assert isinstance(ready, Connection)
                    worker, place = self._busy.pop(ready)
                    answer = self._answer(call, worker, line.order[place])
                    if answer is None:
                        if line.again(place):
                            continue
                        answer = Failure("died", f"the process that ran {call.step} died ({worker.end()}), twice")
                    line.done(place)
                    self._hand_out(call, shared, line)  # before anything is done with the answer
                    yield line.order[place], answer
        finally:
            self._busy.clear()
            for worker in set(self._workers) - set(self._idle):  # somebody lost interest in the middle
                self._bury(worker)

    def _hand_out(self, call: Call, shared: int, line: Line) -> None:
        """Work for every worker, as long as there is some."""
        while len(self._busy) < self._size and (place := line.next()) is not None:
            client = line.order[place]
            known = bool(self._idle)
            worker = self._idle.pop() if known else self._fork()
            state = self._states.load(client, call.base[client])
            own = wire.encode(dict(call.own[client]))
            alive = worker.give(job(call, self._calls, client), shared, own, wire.encode(state))
            if known and not alive:  # it died while it was idle: not this client's fault
                self._bury(worker)
                line.queue.appendleft(place)
            else:
                self._busy[worker.connection] = worker, place

    def _answer(self, call: Call, worker: Worker, client: int) -> Reply | Failure | None:
        """What a worker says of its client; None if it died."""
        try:
            found, payload, state = worker.take()
        except (EOFError, OSError):
            self._bury(worker)
            return None
        self._idle.append(worker)
        return accept(call, client, self._states, found, payload, state)

    def _fork(self) -> Worker:
        taken = {worker.number for worker in self._workers}
        number = next(n for n in itertools.count() if n not in taken)
        worker = Worker(number, self._runner, self._common, [worker.connection for worker in self._workers])
        self._workers.append(worker)
        return worker

    def _bury(self, worker: Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

    def close(self) -> None:
        self._idle.clear()
        self._busy.clear()
        while self._workers:
            self._bury(self._workers[0])


class Worker:
    """The parent's side of a worker process."""

    def __init__(self, number: int, runner: Runner, common: Mailbox, others: list[Connection]):
        self.number = number
        self.connection, theirs = Pipe()
        self._inbox, self._outbox = Mailbox("pfed-in"), Mailbox("pfed-out")
        self._status: int | None = None
        self._pid = _fork()
        if self._pid:
            theirs.close()
            return
        try:
            for connection in [self.connection, *others]:
                connection.close()
            _work(number, runner, theirs, common, self._inbox, self._outbox)
        finally:
            os._exit(1)

    def give(self, job: dict[str, Any], shared: int, own: bytes, state: bytes) -> bool:
        """Send a job; False if nobody is there to do it."""
        self._inbox.put([own, state])
        try:
            self.connection.send_bytes(json.dumps({**job, "sizes": [shared, len(own), len(state)]}).encode())
        except OSError:
            return False
        return True

    def take(self) -> tuple[dict[str, Any], bytearray, bytearray]:
        """What it found, its payload and the client's new state."""
        found = json.loads(self.connection.recv_bytes())
        payload, state = found["sizes"]
        return found, self._outbox.copy(0, payload), self._outbox.copy(payload, state)

    def kill(self) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            _, self._status = os.waitpid(self._pid, 0)
            self.connection.close()

    def end(self) -> str:
        """How it ended."""
        code = os.waitstatus_to_exitcode(self._status or 0)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Mailbox:
    """Memory that two processes see: a file without a name, gone when the last of them is."""

    def __init__(self, name: str):
        self._file = os.memfd_create(name)

    def __del__(self) -> None:
        os.close(self._file)

    def put(self, parts: Sequence[bytes | memoryview]) -> int:
        """Write these one after another; how many bytes they are."""
        files.write(self._file, parts, 0)
        return sum(map(len, parts))

    def copy(self, start: int, length: int) -> bytearray:
        return files.read(self._file, length, start)

    def view(self, length: int) -> mmap.mmap:
        """The first bytes without a copy."""
        return mmap.mmap(self._file, length, access=mmap.ACCESS_COPY)


def _fork() -> int:
    """Fork a process that ends with this one; Ctrl-C is not for it. Its number here, 0 there."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # else it could strike the new one too early
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on threads, none of which is ours
            pid = os.fork()
        if pid == 0:
            _settle(parent)
    except OSError as error:
        raise RunError(f"A worker process can't be started: {error.strerror}.") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _settle(parent: int) -> None:
    """In a new worker: when the parent dies, in whatever way, the system is to kill it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        machine.die_with_parent()
        if os.getppid() == parent:
            return
    except BaseException:  # nothing may go back to where the parent is
        os._exit(1)
    os._exit(1)


def _work(
    number: int, runner: Runner, connection: Connection, common: Mailbox, inbox: Mailbox, outbox: Mailbox
) -> None:
    """A worker's life."""
    gc.freeze()  # what was there before the fork stays shared with the parent
    torch.set_num_threads(1)
    runner.move(machine.device(runner.options.device, number))
    received = Received()
    while True:
        asked = json.loads(connection.recv_bytes())
        shared, own, state = asked["sizes"]
        letter = memoryview(inbox.view(own + state))
        found, parts = work(runner, asked, received, functools.partial(common.view, shared), letter[:own], letter[own:])
        outbox.put(parts)
        sys.stdout.flush()
        connection.send_bytes(json.dumps({**found, "sizes": [len(part) for part in parts]}).encode())
