from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed.anatomy import ALL
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.losses import kl_each
from pfed.method import Each, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.wire import Payload, State


@register("feddistill")
@dataclass(frozen=True)
class FedDistill(Method):
    """Federated distillation: clients share their mean logits by label, no weights (Jeong et al., 2018).

    While it trains its own model a client keeps the mean of its logits for each label, F_k (C × C), and sends it.
    Client k gets G_k, by label the mean over the other clients that have it, and trains by CE + λ KL(softmax(G_k,y) ||
    softmax(f)).

    >>> from pfed import Experiment
    >>> result = Experiment("feddistill", model="mlp,cnn-small", clients=4, rounds=2).run()

    Deviations from the paper: of clients that do not take part in a round the newest logits are used.
    """

    lam: float = option(0.1, "weight of the distillation", ge=0, tries=(0.1, 0.3, 1.0))
    distance: Literal["kl", "mse"] = option("kl", "how the logits are compared")
    leave_one_out: bool = option(True, "a client's own logits are not in its mean")
    same_architecture = False
    keep_optimizer = True
    needs = frozenset({"replies"})
    reduces_to = (Reduction({"lam": 0.0}, "local", {"matched_participation": True}),)

    def init(self, model: nn.Module) -> State:
        return {"logits": {}, "seen": {}}

    def download(self, server: State) -> dict[str, Any]:
        return {}

    def round(self, server: State, cohort: Cohort) -> None:
        sums = self._sums(server)
        means = {client: self._mean(server, sums, client) for client in cohort.ids}
        logits = Each({client: mean[0] for client, mean in means.items()})
        known = Each({client: mean[1] for client, mean in means.items()})
        replies = cohort.call(self.update, "logits", logits=logits, known=known)
        for client in cohort.trained:
            server["logits"][client], server["seen"][client] = replies[client]["logits"], replies[client]["seen"]

    def _sums(self, server: State) -> tuple[Tensor, Tensor] | None:
        """All clients' logits by label, and how many have the label. (classes, classes), (classes,)"""
        if not server["logits"]:
            return None
        classes = len(next(iter(server["logits"].values())))
        logits, seen = (torch.zeros(shape, dtype=torch.float64) for shape in ((classes, classes), (classes,)))
        for client in sorted(server["logits"]):  # one by one: together they may be many
            logits += server["logits"][client]
            seen += server["seen"][client]
        return logits, seen

    def _mean(
        self, server: State, sums: tuple[Tensor, Tensor] | None, client: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """G_k and for which labels there is one."""
        if sums is None:
            return None, None
        total, count = sums
        if self.leave_one_out and client in server["logits"]:
            total, count = total - server["logits"][client], count - server["seen"][client].double()
        return (total / count.clamp(min=1)[:, None]).float(), count > 0

    @step
    def update(self, client: Client, logits: Tensor | None, known: Tensor | None) -> Payload:
        model = client.model()
        sums, counts = torch.zeros(client.classes, client.classes), torch.zeros(client.classes)
        client.fit(model, self._loss(client, logits, known, sums, counts))
        client.keep(model, ALL)
        return {"logits": sums / counts.clamp(min=1)[:, None], "seen": counts > 0}

    def _loss(self, client: Client, mean: Tensor | None, known: Tensor | None, sums: Tensor, counts: Tensor) -> Loss:
        """The loss, which on the way adds up the logits by label."""

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            out = model(batch)
            sums.index_add_(0, batch.y, out.detach())
            counts.index_add_(0, batch.y, torch.ones(len(batch.y)))
            own = F.cross_entropy(out, batch.y)
            if mean is None or known is None or not self.lam:
                return own
            target = mean[batch.y]
            each = kl_each(target, out) if self.distance == "kl" else ((out - target) ** 2).mean(1)
            far = each * known[batch.y]  # nothing for labels that no other client has
            client.log_mean(distillation=far.detach().sum() / known[batch.y].sum().clamp(min=1))
            return own + self.lam * far.mean()

        return loss

    def predictor(self, client: Client) -> nn.Module:
        return client.model()
