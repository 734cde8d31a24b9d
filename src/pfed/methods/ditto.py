from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pfed.anatomy import snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.losses import sqdist
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("ditto")
@dataclass(frozen=True)
class Ditto(Method):
    """Ditto: a personal model held near the global one (Li et al., ICML 2021).

    Beside FedAvg each client keeps v_k and trains it by v ← v − η(∇F_k(v) + λ(v − w^t)), with w^t as received.

    >>> from pfed import Experiment
    >>> result = Experiment("ditto", clients=4, rounds=1, hyper={"lam": 0.5}).run()

    Deviations from the paper: none. Both branches see the same batches in the same order.
    """

    lam: float = option(1.0, "pull of the personal model towards the global one", ge=0, tries=(0.1, 0.3, 1.0))
    agg: Aggregation = "samples"
    tasks = ANY_TASK

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return client.loss(model, batch) + self.lam / 2 * sqdist(model, params)

        v = client.model(client.state.get("v"))
        client.fit(v, loss if self.lam else None, memory="v")
        client.state["v"] = snapshot(v)
        shared = joint(client, params)
        client.trained(v)
        return {"params": shared}

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        return {"personal": client.model(client.state.get("v")), "global": client.model(params)}
