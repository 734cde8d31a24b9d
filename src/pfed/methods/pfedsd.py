from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfed.anatomy import snapshot
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.losses import kl
from pfed.method import Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("pfedsd")
@dataclass(frozen=True)
class PFedSD(Method):
    """pFedSD: a client's last model teaches its next one (Jin et al., IEEE TPDS 2023).

    From the received w a client trains by CE + λ T² KL(softmax(p_k(x)/T) || softmax(f(x)/T)), where p_k is the model
    that its last training left; without one by CE alone. It sends the model and keeps it as p_k, with which it is
    judged. The server takes the simple mean.

    >>> from pfed import Experiment
    >>> result = Experiment("pfedsd", clients=4, rounds=2).run()

    Deviations from the paper: none. λ and T are those of the authors' code.
    """

    lam: float = option(1.0, "weight of the distillation", ge=0, tries=(0.3, 1.0, 3.0))
    tau: float = option(1.0, "its temperature T", gt=0)
    agg: Aggregation = "uniform"
    sends_all = True

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        model, before = client.model(params), client.state.get("personal")
        loss = self._loss(client, client.model(before).eval()) if before is not None and self.lam else None
        if client.fit(model, loss).steps:
            client.state["personal"] = snapshot(model)
        client.keep(model)
        return {"params": client.share(model)}

    def _loss(self, client: Client, teacher: nn.Module) -> Loss:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            with torch.no_grad():
                target = teacher(batch)
            logits = model(batch)
            own = torch.nn.functional.cross_entropy(logits, batch.y)
            distance = kl(target, logits, self.tau)
            client.log_mean(distillation=distance.detach())
            return own + self.lam * self.tau**2 * distance

        return loss

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        general = client.model(params)
        own = client.state.get("personal")
        return {"personal": general if own is None else client.model(own), "global": general}
