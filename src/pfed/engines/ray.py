"""Clients on a Ray cluster, of this machine or of many: actors of one thread each that take one client after another.

An actor gets once what it needs to run any client (`parcel`). The payload that all clients of a call share is put into
the object store once and read once by each actor. A client's state comes with the call and goes back with the answer:
any actor can run any client, and one that dies, or whose machine does, takes nothing with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pfed
from pfed import compat, machine, wire
from pfed.engines.base import Call, Failure, Reply, States
from pfed.engines.cluster import Cluster
from pfed.engines.parallel import AHEAD, TRIES, Line, Received, accept, job, work
from pfed.engines.parcel import Parcel, pack, unpack
from pfed.errors import RunError
from pfed.runner import Runner

PATIENCE = 300.0  # seconds without any worker, after which a warning says so
Array = NDArray[np.uint8]  # large ones are not copied on their way to and from the object store


class Ray:
    """Persistent actors, started when the first call comes. One that dies is replaced, its client tried again."""

    def __init__(self, runner: Runner, states: States):
        self.ids = list(runner.ids)
        self._runner, self._states = runner, states
        self._cluster = Cluster(runner.options, len(self.ids))
        self._ray = self._cluster.ray
        self._actors: Any = None  # their class, as Ray has it
        self._parcel: Any = None
        self._calls = 0
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._busy: dict[Any, tuple[Worker, int | None]] = {}  # with the place of its client, by what it will answer
        self._stillborn = 0  # how many in a row died before they were ready

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        self._open()
        line = Line(sorted(call.own), AHEAD * self._cluster.size)
        self._calls += 1
        common = self._ray.put(_array(wire.encode(call.common)))
        try:
            while not line.over:
                self._hand_out(call, common, line)
                for ready in self._wait():
                    worker, place = self._busy.pop(ready)
                    if place is None:
                        self._begin(worker, ready)
                    elif (answer := self._answer(call, line, worker, place, ready)) is not None:
                        line.done(place)
                        self._hand_out(call, common, line)  # before anything is done with the answer
                        yield line.order[place], answer
        finally:
            for worker in [worker for worker, place in self._busy.values() if place is not None]:
                self._bury(worker)  # somebody lost interest in the middle
            self._busy = {ready: pair for ready, pair in self._busy.items() if pair[1] is None}

    def _open(self) -> None:
        if self._actors is None:
            self._cluster.open()
            self._parcel = self._ray.put(pack(self._runner))
            self._actors = self._ray.remote(**self._cluster.share())(Actor)

    def _hand_out(self, call: Call, common: Any, line: Line) -> None:
        """Work for every worker, as long as there is some."""
        while len(self._workers) < self._cluster.size:
            worker = Worker(self._actors.remote())
            self._workers.append(worker)
            self._busy[worker.actor.begin.remote(self._parcel)] = worker, None
        while self._idle and (place := line.next()) is not None:
            client, worker = line.order[place], self._idle.pop()
            own = _array(wire.encode(dict(call.own[client])))
            state = _array(wire.encode(self._states.load(client, call.base[client])))
            # In a list, so that the actor fetches the common payload itself, once for all its clients.
            ready = worker.actor.run.remote(job(call, self._calls, client), [common], own, state)
            self._busy[ready] = worker, place

    def _wait(self) -> list[Any]:
        """What has come in."""
        while not (found := self._ray.wait(list(self._busy), timeout=PATIENCE)[0]):
            if not any(worker.node for worker in self._workers):
                warnings.warn(f"Ray has found no place for a worker in {PATIENCE:.0f} seconds; waiting.", stacklevel=2)
        return list(found)

    def _begin(self, worker: Worker, ready: Any) -> None:
        """A new worker is ready, or never will be."""
        try:
            worker.node, versions, worker.note = self._ray.get(ready)
        except self._ray.exceptions.RayTaskError as error:
            raise RunError(f"A worker on Ray can't begin: {error.cause}.") from error
        except self._ray.exceptions.RayError as error:
            self._bury(worker)
            self._stillborn += 1
            if self._stillborn >= self._cluster.size + TRIES:
                end = type(error).__name__
                raise RunError(f"Ray's workers die before they can begin, {self._stillborn} by now ({end}).") from error
            return
        if versions != _versions():
            raise RunError(f"All machines need the same versions. Got {versions} on one, {_versions()} here.")
        self._stillborn = 0
        self._idle.append(worker)

    def _answer(self, call: Call, line: Line, worker: Worker, place: int, ready: Any) -> Reply | Failure | None:
        """What a worker says of its client; None if it died and another is to try."""
        try:
            found, payload, state = self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            self._bury(worker)
            if not self._cluster.has(worker.node):  # its machine is gone: not this client's fault
                line.queue.appendleft(place)
                return None
            end = type(error).__name__
            return (
                None if line.again(place) else Failure("died", f"the process that ran {call.step} died ({end}), twice")
            )
        self._idle.append(worker)
        if worker.note and "notes" in found:
            found["notes"].append(worker.note)
        return accept(call, line.order[place], self._states, found, bytearray(payload), bytearray(state))

    def _bury(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)

    def close(self) -> None:
        self._idle.clear()
        self._busy.clear()
        while self._workers and self._ray.is_initialized():
            self._bury(self._workers[0])
        self._workers.clear()
        self._actors = self._parcel = None
        self._cluster.close()


class Worker:
    """The engine's side of an actor."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.node: str | None = None  # none: it has not begun
        self.note: str | None = None  # to be said of what it answers


class Actor:
    """A worker's life, in a process of Ray's."""

    def begin(self, parcel: Parcel) -> tuple[str, str, str | None]:
        """Get ready. Says on which machine, with which versions, and what is to be noted of it."""
        machine.keep_freed_memory()
        torch.set_num_threads(1)
        self._runner, kind = unpack(parcel)
        self._runner.move(machine.device(self._runner.options.device))
        self._received = Received()
        here = torch.backends.cpu.get_cpu_capability()
        note = f"Some workers have other processors ({here}, not {kind}): last bits may differ from other runs'."
        return self._ray.get_runtime_context().get_node_id(), _versions(), None if here == kind else note

    def run(
        self, asked: dict[str, Any], common: list[Any], own: Array, state: Array
    ) -> tuple[dict[str, Any], Array, Array]:
        """One step of one client: what is known of it, its payload and its new state."""

        def read() -> bytearray:
            return bytearray(self._ray.get(common[0]))

        found, (payload, after) = work(self._runner, asked, self._received, read, bytearray(own), bytearray(state))
        return found, _array(payload), _array(after)

    @property
    def _ray(self) -> Any:
        return compat.optional("ray", "ray")


def _array(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _versions() -> str:
    return f"pfed {pfed.__version__} with torch {torch.__version__}"
