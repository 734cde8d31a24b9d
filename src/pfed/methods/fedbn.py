from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from pfed.anatomy import NORM, has_batchnorm, params
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedbn")
@dataclass(frozen=True)
class FedBN(Method):
    """FedBN: BatchNorm stays at the client (Li et al., ICLR 2021).

    FedAvg of all tensors but those of BatchNorm layers, whose affine parameters and running statistics are private.

    >>> from pfed import Experiment
    >>> result = Experiment("fedbn", model="cnn-small-bn", clients=4, rounds=1).run()

    Deviations from the paper: none.
    """

    agg: Aggregation = "uniform"
    tasks = ANY_TASK

    def init(self, model: nn.Module) -> State:
        if not has_batchnorm(model):
            warnings.warn("FedBN: the model has no BatchNorm layer to keep, so this is FedAvg.", stacklevel=2)
        return {"params": params(model, ~NORM)}

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params, ~NORM)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)
