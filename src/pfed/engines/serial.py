"""One client after another, in this process."""

from __future__ import annotations

from collections.abc import Iterator

from pfed import machine
from pfed.engines.base import Call, Failure, Reply, States
from pfed.runner import Runner


class Serial:
    """The reference engine."""

    def __init__(self, runner: Runner, states: States):
        self.ids = list(runner.ids)
        self._runner, self._states = runner, states
        runner.move(machine.device(runner.options.device))

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        for client in sorted(call.own):
            yield client, self._answer(call, client)

    def _answer(self, call: Call, client: int) -> Reply | Failure:
        state = self._states.load(client, call.base[client])
        try:
            reply, after = self._runner(call.step, client, call.round, {**call.common, **call.own[client]}, state)
        except Exception as error:
            return Failure.of(error, call.step)
        if call.version is not None:
            self._states.save(client, call.version, after.state)
        return reply

    def close(self) -> None:
        pass
