"""Clients that miss rounds: what each is to be sent depends on the round in which it last answered.

The server's state tells: `newest` is the last round that was held, `last` has the round of those that were absent then.

>>> server = {"newest": 3, "last": {1: 2}}
>>> [last_answer(server, client) for client in (0, 1)]
[3, 2]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from pfed.cohort import Cohort
from pfed.method import Each
from pfed.wire import State

V = TypeVar("V")


def last_answer(server: State, client: int) -> int:
    """The round in which a client last answered: the newest, unless it was absent then; 0 if it never did."""
    return int(server["last"].get(client, server["newest"]))


def since(server: State, work: Callable[[int], V]) -> Each[V]:
    """For each client what `work` makes of the round of its last answer, worked out once for every such round."""
    cached = functools.cache(work)
    return Each(lambda client: cached(last_answer(server, client)))


def note(server: State, cohort: Cohort) -> None:
    """After a round: who has answered in it."""
    absent = sorted(set(range(cohort.total)) - set(cohort.answered))
    server["last"] = {client: last_answer(server, client) for client in absent}
    server["newest"] = cohort.round
