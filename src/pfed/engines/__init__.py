"""Engines: each is one file with one verb, `map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pfed.engines.base import Engine, States
from pfed.errors import UserError, unknown

if TYPE_CHECKING:
    from pfed.runner import Runner


def engine(name: str, runner: Runner, states: States) -> Engine:
    """An engine by name."""
    from pfed.engines.debug import Debug
    from pfed.engines.processes import Processes
    from pfed.engines.ray import Ray
    from pfed.engines.serial import Serial

    engines: dict[str, Callable[[Runner, States], Engine]] = {
        "serial": Serial,
        "processes": Processes,
        "ray": Ray,
        "debug": Debug,
    }
    if name == "nvflare":
        raise UserError(
            "run.engine 'nvflare' is for real sites, which 'pfed deploy run' reaches. Got it in a simulation."
        )
    if name not in engines:
        raise unknown("engine", name, engines)
    if runner.options.together > 1:
        from pfed.engines.together import Together

        if name != "serial":
            raise UserError(f"run.together > 1 needs engine serial. Got {name}.")
        return Together(runner, states)
    return engines[name](runner, states)
