from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from pfed.anatomy import ALL
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.wire import State


@register("local")
@dataclass(frozen=True)
class Local(Method):
    """Local: every client trains alone (the baseline of all the others).

    E epochs a round on its own data with one continuous optimiser; nothing is sent.

    >>> from pfed import Experiment
    >>> result = Experiment("local", clients=4, rounds=1).run()

    Deviations from the paper: none. By default every client trains in every round, as much as a client that always
    takes part; `matched_participation` lets it train only in the rounds in which it would have been chosen.
    """

    matched_participation: bool = option(False, "train only in rounds in which the client is sampled")
    same_architecture = False
    keep_optimizer = True
    tasks = ANY_TASK

    @property
    def participation(self) -> Literal["sampled", "all"]:
        return "sampled" if self.matched_participation else "all"

    def init(self, model: nn.Module) -> State:
        return {}

    def download(self, server: State) -> dict[str, object]:
        return {}

    def round(self, server: State, cohort: Cohort) -> None:
        cohort.call(self.update)

    @step
    def update(self, client: Client) -> None:
        model = client.model()
        client.fit(model)
        client.keep(model, ALL)

    def predictor(self, client: Client) -> nn.Module:
        return client.model()
