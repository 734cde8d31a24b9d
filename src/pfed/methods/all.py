from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pfed.client import Client
from pfed.cohort import Cohort
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.errors import UserError
from pfed.method import ANY_TASK, Method, step
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("all")
@dataclass(frozen=True)
class All(Method):
    """All: one model on the union of the data (central training, the bound that privacy forbids).

    E epochs a round over everybody's data with one continuous optimiser; judged on each client's test data.

    >>> from pfed import Experiment
    >>> result = Experiment("all", clients=4, rounds=1).run()

    Deviations from the paper: none. It needs the data in one place, so it runs in simulations only, and no bytes are
    counted.
    """

    needs = frozenset({"pooled"})
    keep_optimizer = True
    tasks = ANY_TASK

    def check(self, options: RunOptions, federation: Federation) -> None:
        lists = {client.classes: client for client in federation.clients}
        if len(lists) > 1:
            found = " and ".join(f"{len(classes)} of {client.name}" for classes, client in lists.items())
            raise UserError(f"all needs the same classes at every client. Got {found}.")

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.pooled().mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)
