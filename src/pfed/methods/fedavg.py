from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg: one global model (McMahan et al., AISTATS 2017).

    Each client of a round starts from w and trains E epochs to w_k; then w = Σ a_k w_k with a_k = n_k / Σ n_j.

    >>> from pfed import Experiment
    >>> result = Experiment("fedavg", clients=4, rounds=1).run()

    Deviations from the paper: none.
    """

    agg: Aggregation = "samples"
    tasks = ANY_TASK

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)
