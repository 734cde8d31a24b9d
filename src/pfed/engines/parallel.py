"""What engines with workers have in common: who is next, and what a worker does for one client."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any

from pfed import wire
from pfed.engines.base import Call, Failure, Reply, States
from pfed.runner import Runner
from pfed.wire import State

AHEAD = 4  # how many clients per worker may be ahead of the slowest: what bounds the answers that wait for it
TRIES = 2
Letter = bytearray | mmap.mmap | memoryview


class Line:
    """The clients of a call in their order: who is next, who is to be tried again, who is done."""

    def __init__(self, order: list[int], ahead: int):
        """Nobody begins who is more than `ahead` places behind one that is not done."""
        self.order, self._ahead = order, ahead
        self.queue = deque(range(len(order)))
        self._open = [True] * len(order)
        self._tries = [0] * len(order)
        self._slowest = 0

    @property
    def over(self) -> bool:
        return self._slowest == len(self.order)

    def next(self) -> int | None:
        """The place of the next client that may begin."""
        return self.queue.popleft() if self.queue and self.queue[0] <= self._slowest + self._ahead else None

    def again(self, place: int) -> bool:
        """Whether a client gets another try."""
        self._tries[place] += 1
        if self._tries[place] < TRIES:
            self.queue.appendleft(place)
        return self._tries[place] < TRIES

    def done(self, place: int) -> None:
        self._open[place] = False
        while not self.over and not self._open[self._slowest]:
            self._slowest += 1


class Received:
    """What a worker has got for all clients of a call: read once, unless a client has changed it in place."""

    def __init__(self) -> None:
        self._call = 0
        self._payload: State = {}
        self._versions: list[int] = []

    def of(self, call: int, read: Callable[[], Letter]) -> State:
        if call != self._call or self._versions != self._now():
            self._call, self._payload = call, wire.decode(read())
            self._versions = self._now()
        payload: State = wire.copy_tree(self._payload)
        return payload

    def _now(self) -> list[int]:
        return [tensor._version for tensor in wire.tensors(self._payload)]


def job(call: Call, number: int, client: int) -> dict[str, Any]:
    """What a worker must know of a call, the engine's so many-th, to run it on a client."""
    keeps = call.version is not None
    return {"call": number, "step": call.step, "client": client, "round": call.round, "keeps": keeps}


def work(
    runner: Runner, job: dict[str, Any], received: Received, read: Callable[[], Letter], own: Letter, state: Letter
) -> tuple[dict[str, Any], list[bytes]]:
    """One step of one client, in a worker: what is known of it, its payload and its new state.

    `read` reads what the call has for all its clients.
    """
    try:
        payload = {**received.of(job["call"], read), **wire.decode(own)}
        reply, client = runner(job["step"], job["client"], job["round"], payload, wire.decode(state))
        parts = [wire.encode(reply.payload), wire.encode(client.state) if job["keeps"] else b""]
    except Exception as error:
        failure = Failure.of(error, job["step"])
        return {"failure": [failure.reason, failure.detail]}, [b"", b""]
    found = {"weight": reply.weight, "samples": reply.samples, "records": dict(reply.records)}
    return {**found, "notes": sorted(reply.notes)}, parts


def accept(
    call: Call, client: int, states: States, found: dict[str, Any], payload: bytearray, state: bytearray
) -> Reply | Failure:
    """What a worker found, as the engine's answer; the client's new state is in its place then."""
    if "failure" in found:
        return Failure("error", *found["failure"])
    if call.version is not None:
        states.save(client, call.version, wire.decode(state))
    return Reply(wire.decode(payload), found["weight"], found["samples"], found["records"], found["notes"])
