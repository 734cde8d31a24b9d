from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.losses import sqdist
from pfed.method import ANY_TASK, Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedprox")
@dataclass(frozen=True)
class FedProx(Method):
    """FedProx: FedAvg with a pull towards the received model (Li et al., MLSys 2020).

    The local loss is F_k(w) + μ/2 ‖w − w^t‖² over the trainable parameters.

    >>> from pfed import Experiment
    >>> result = Experiment("fedprox", clients=4, rounds=1, hyper={"mu": 0.1}).run()

    Deviations from the paper: every client does all its epochs; the paper also allows incomplete work.
    """

    mu: float = option(0.1, "weight of the proximal term", ge=0, tries=(0.01, 0.1, 1.0))
    agg: Aggregation = "samples"
    reduces_to = (Reduction({"mu": 0.0}, "fedavg"),)
    tasks = ANY_TASK

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return client.loss(model, batch) + self.mu / 2 * sqdist(model, params)

        return {"params": joint(client, params, loss=loss if self.mu else None)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)
