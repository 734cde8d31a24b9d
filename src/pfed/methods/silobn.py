from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from pfed.anatomy import STATS, has_batchnorm, params
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("silobn")
@dataclass(frozen=True)
class SiloBN(Method):
    """SiloBN: running statistics of BatchNorm stay at the client (Andreux et al., DART 2020).

    FedAvg of all parameters, BatchNorm's affine ones included; its running means and variances are private.

    >>> from pfed import Experiment
    >>> result = Experiment("silobn", model="cnn-small-bn", clients=4, rounds=1).run()

    Deviations from the paper: none.
    """

    agg: Aggregation = "samples"
    tasks = ANY_TASK

    def init(self, model: nn.Module) -> State:
        if not has_batchnorm(model):
            warnings.warn("SiloBN: the model has no BatchNorm layer to keep, so this is FedAvg.", stacklevel=2)
        return {"params": params(model, ~STATS)}

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params, ~STATS)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)
