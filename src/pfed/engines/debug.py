"""The engine for writing methods: serial, everything through bytes, mistakes caught where they happen."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pfed import machine, wire
from pfed.engines.base import Call, Failure, Reply, States
from pfed.runner import Runner
from pfed.wire import Payload


class StepError(RuntimeError):
    """A step broke a rule of the contract, or raised: says which step, client and round."""


class Debug:
    """Sends payloads, replies and states through bytes; refuses in-place changes and shared random streams."""

    def __init__(self, runner: Runner, states: States):
        self.ids = list(runner.ids)
        self._runner, self._states = runner, states
        runner.move(machine.device(runner.options.device))
        self._streams: dict[tuple[int, int, str], str] = {}

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        for client in sorted(call.own):
            yield client, self._answer(call, client)

    def _answer(self, call: Call, client: int) -> Reply:
        where = f"{type(self._runner.method).__name__}.{call.step} on client {client} in round {call.round}"
        payload: Payload = wire.decode(wire.encode({**call.common, **call.own[client]}))
        state = wire.decode(wire.encode(self._states.load(client, call.base[client])))
        received = _versions("the received ", payload) | _versions("client.state ", state)
        try:
            reply, after = self._runner(call.step, client, call.round, payload, state)
        except Exception as error:
            raise StepError(f"{where} raised {type(error).__name__}: {error}") from error
        for label, (tensor, version) in received.items():
            if tensor._version != version:
                raise StepError(f"{where} changed {label} in place; make a copy first.")
        if call.version is not None:
            self._claim_streams(call, client, after.streams_used, where)
            self._states.save(client, call.version, wire.decode(wire.encode(after.state)))
        answer: Payload = wire.decode(wire.encode(reply.payload))
        return Reply(answer, reply.weight, reply.samples, reply.records, reply.notes)

    def _claim_streams(self, call: Call, client: int, used: set[str], where: str) -> None:
        for stream in sorted(used):
            owner = self._streams.setdefault((call.round, client, stream), call.step)
            if owner != call.step:
                raise StepError(f"{where} draws from stream {stream!r}, which {owner} used in the same round.")

    def close(self) -> None:
        pass


def _versions(label: str, tree: object) -> dict[str, tuple[Tensor, int]]:
    """Every tensor of a tree with its version counter, by a readable path."""
    if isinstance(tree, Tensor):
        return {label: (tree, tree._version)}
    found: dict[str, tuple[Tensor, int]] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            found |= _versions(f"{label}[{key!r}]", value)
    return found
