from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy, simplex
from pfed.anatomy import BACKBONE, HEAD, NONE
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.forward import Batch, features
from pfed.method import Aggregation, Each, Method, Reduction, Replies, step
from pfed.options import option
from pfed.prototypes import Prototypes, all_features, class_means, merged
from pfed.registry import register
from pfed.tensors import Mean, Tensors
from pfed.wire import Payload, State


@register("fedpac")
@dataclass(frozen=True)
class FedPAC(Method):
    """FedPAC: features aligned to common prototypes, heads combined for each client (Xu et al., ICLR 2023).

    A client tunes its combined head, then the base by CE + λ MSE(z, c_y) with the global prototypes c_y, and sends
    base, head, its classes' mean features and, of the received base before training, H_y = p_y mean_y(z) and V = (Σ_y
    p_y E_y‖z‖² − Σ_y p_y² ‖mean_y‖²)/n. The base is averaged by samples; head_i = Σ_j α_j h_j, where α minimises
    αᵀ(diag(V) + D_i)α on the simplex, D_i,jk = Σ_y ⟨H_i,y − H_j,y, H_i,y − H_k,y⟩.

    >>> from pfed import Experiment
    >>> result = Experiment("fedpac", clients=4, rounds=2).run()

    Deviations from the paper: none. Prototypes are averaged by class counts, as the authors do; a class without one is
    pulled to the client's own from before training; weights below 0.001 are set to zero. The head's phase has the
    run's momentum and weight decay, and its learning rate unless it has an own.
    """

    lam: float = option(1.0, "weight of the alignment", ge=0, tries=(0.1, 1.0))
    head_epochs: int = option(1, "epochs on the head", ge=0)
    head_lr: float = option(0.0, "their learning rate (0: the run's local.lr)", ge=0)
    combine: bool = option(True, "combine heads; else each client keeps its own")
    agg: Aggregation = "samples"
    needs = frozenset({"replies"})
    reduces_to = (Reduction({"lam": 0.0, "combine": False, "agg": "uniform"}, "fedrep", {"head_epochs": 1}),)

    def init(self, model: nn.Module) -> State:
        return {"body": anatomy.params(model, BACKBONE), "heads": {}, "prototypes": None}

    def download(self, server: State) -> dict[str, Any]:
        heads = server["heads"]
        return {"body": server["body"], "head": Each(heads.get), "prototypes": server["prototypes"]}

    def round(self, server: State, cohort: Cohort) -> None:
        replies = cohort.call(self.update, "body", **self.download(server))
        if not replies:
            return
        server["body"] = replies.mean("body")
        server["prototypes"] = merged(server["prototypes"], [replies[client] for client in cohort.trained])
        if self.combine:
            server["heads"].update(self._combined(replies, cohort.trained))

    @step
    def update(self, client: Client, body: Tensors, head: Tensors | None, prototypes: Tensors | None) -> Payload:
        model = client.model(body, head)
        variance, shares = _statistics(client, model) if self.combine else (0.0, None)
        targets = self._targets(client, model, prototypes)
        client.fit(model, epochs=self.head_epochs, only=HEAD, lr=self.head_lr, stream="head")
        client.fit(model, self._loss(client, targets) if targets else None, only=BACKBONE)
        client.keep(model, NONE if self.combine else HEAD)  # a combined head comes from the server
        sent: Payload = {"body": client.share(model, BACKBONE), **class_means(client, model)}
        if self.combine:
            sent |= {"head": client.share(model, HEAD), "variance": variance, "shares": shares}
        return sent

    def _targets(self, client: Client, model: nn.Module, prototypes: Tensors | None) -> Prototypes | None:
        """The global prototypes, and the client's own where there is none; nothing in the first round."""
        if not prototypes or not self.lam:
            return None
        return Prototypes(merged(None, [class_means(client, model)]) | prototypes, client.classes)

    def _loss(self, client: Client, targets: Prototypes) -> Loss:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            z = features(model, batch)
            distance = targets.distance(z, batch.y)
            client.log_mean(alignment=distance.detach())
            return F.cross_entropy(anatomy.head(model, z), batch.y) + self.lam * distance

        return loss

    def _combined(self, replies: Replies, ids: Sequence[int]) -> dict[int, Tensors]:
        """The head of each client, as the best combination of all heads."""
        if not ids:
            return {}
        h = torch.stack([replies[k]["shares"] for k in ids]).double()  # type: ignore[misc]
        v = torch.tensor([float(replies[k]["variance"]) for k in ids], dtype=torch.float64)  # type: ignore[arg-type]
        heads = {}
        for i, client in enumerate(ids):
            alpha = combination(v, h, i)
            fold = Mean()
            for weight, k in zip(alpha.tolist(), ids, strict=True):
                fold.add(replies[k]["head"], weight)  # type: ignore[arg-type]
            heads[client] = fold.value()
        return heads  # type: ignore[return-value]

    def predictor(self, client: Client, body: Tensors, head: Tensors | None, prototypes: Tensors | None) -> nn.Module:
        return client.model(body, head)


def combination(variance: Tensor, means: Tensor, i: int) -> Tensor:
    """The weights of all heads in client i's: least αᵀ(diag(V) + D_i)α on the simplex. (clients,)"""
    apart = (means[i] - means).flatten(1)  # (clients, classes * d)
    q = torch.diag(variance) + apart @ apart.T
    values, vectors = torch.linalg.eigh(q)
    if values.min() < -1e-12 * values.max():  # a negative estimate of a variance
        sound = values >= 0.01
        q = vectors[:, sound] @ torch.diag(values[sound]) @ vectors[:, sound].T
    alpha = simplex.quadratic(q)
    alpha = torch.where(alpha < 1e-3, 0.0, alpha)
    return alpha / alpha.sum()


def _statistics(client: Client, model: nn.Module) -> tuple[float, Tensor]:
    """V and H of the received base: how uncertain and where the client's class means are."""
    z, y = all_features(client, model)
    z, counts = z.double(), client.counts.double()
    share = counts / max(client.n, 1)
    mean = z.new_zeros(client.classes, z.shape[1]).index_add_(0, y, z) / counts.clamp(min=1)[:, None]
    square = z.new_zeros(client.classes).index_add_(0, y, (z**2).sum(1)) / counts.clamp(min=1)
    variance = ((share * square).sum() - (share**2 * (mean**2).sum(1)).sum()) / max(client.n, 1)
    return max(float(variance), 0.0), (share[:, None] * mean).float()  # a difference, which may round to below zero
