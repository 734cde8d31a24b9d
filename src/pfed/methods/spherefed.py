from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.method import Aggregation, Method, step
from pfed.models.fixedheads import FixedHead, orthonormal, with_fixed_head
from pfed.options import option
from pfed.pool import Spec
from pfed.prototypes import all_features
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("spherefed")
@dataclass(frozen=True)
class SphereFed(Method):
    """SphereFed: features on a sphere under a fixed orthonormal classifier (Dong et al., ECCV 2022).

    The score of a class is ⟨W_y, z/‖z‖⟩, where the rows of W are orthonormal, made from the run's seed, and never
    change. Clients train the rest by the mean squared error to one-hot targets; w = Σ a_k w_k. After the last round
    the classifier is fitted anew by ridge regression from Σ_k Z_kᵀZ_k and Σ_k Z_kᵀY_k.

    >>> from pfed import Experiment
    >>> result = Experiment("spherefed", clients=4, rounds=1).run()

    Deviations from the paper: none. The error is a mean over classes, for which the learning rate grows with their
    number: 0.01 C unless given.
    """

    lr: float = option(
        0.0, "learning rate (0: 0.01 times the classes, or with sum_classes local.lr)", ge=0, tries=(0.1, 0.3, 1.0)
    )
    reduction: Literal["mean", "sum_classes"] = option("mean", "squared error: mean, or sum over the classes")
    calibrate: bool = option(True, "fit the classifier anew after the last round")
    rho: float = option(1.0, "ridge of that fit", gt=0)
    agg: Aggregation = "samples"
    own_rates = True

    def build(self, spec: Spec) -> nn.Module:
        def head(width: int, classes: int) -> nn.Module:
            return FixedHead(spec.add("frame", lambda: orthonormal(width, classes), common=True))

        return with_fixed_head(spec, head, "SphereFed")

    def init(self, model: nn.Module) -> State:
        return {"params": anatomy.params(model), "classifier": None}

    def download(self, server: State) -> Payload:
        return {"params": server["params"], "classifier": server["classifier"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors, classifier: Tensor | None) -> Payload:
        model = client.model(params)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            error: Tensor = (model(batch) - F.one_hot(batch.y, client.classes)) ** 2
            return error.mean() if self.reduction == "mean" else error.sum(1).mean()

        client.fit(model, loss, lr=self.lr or (0.01 * client.classes if self.reduction == "mean" else 0.0))
        client.keep(model)
        return {"params": client.share(model)}

    def finish(self, server: State, cohort: Cohort) -> None:
        if not self.calibrate:
            return
        zz, zy = (part.double() for part in cohort.sum(self.statistics, "zz", "zy", **self.download(server)))
        ridge = self.rho * torch.eye(len(zz), dtype=torch.float64)
        server["classifier"] = torch.linalg.solve(zz + ridge, zy).float()

    @step
    def statistics(self, client: Client, params: Tensors, classifier: Tensor | None) -> Payload:
        z, y = all_features(client, client.model(params))
        z = F.normalize(z, dim=1).double()
        return {"zz": (z.T @ z).float(), "zy": (z.T @ F.one_hot(y, client.classes).double()).float()}

    def predictor(self, client: Client, params: Tensors, classifier: Tensor | None) -> nn.Module:
        model = client.model(params)
        if classifier is not None:
            with torch.no_grad():
                head = model.get_submodule(anatomy.head_name(model))
                head.weight.copy_(classifier.T)  # type: ignore[operator]
        return model
