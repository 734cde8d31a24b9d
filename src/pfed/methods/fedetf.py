from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.anatomy import snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.losses import balanced
from pfed.method import Aggregation, Method, step
from pfed.models.fixedheads import FixedHead, simplex_frame, with_fixed_head
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.sgd import SGD
from pfed.tensors import Tensors
from pfed.wire import Payload, State


class Projected(nn.Module):
    """A learned projection before a classifier."""

    def __init__(self, projection: nn.Linear, classifier: FixedHead):
        super().__init__()
        self.projection, self.classifier = projection, classifier

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.projection(z))
        return out


@register("fedetf")
@dataclass(frozen=True)
class FedETF(Method):
    """FedETF: a fixed classifier whose prototypes are as far apart as can be (Li et al., ICCV 2023).

    Logits are s ⟨M_y, p/‖p‖⟩ with p a learned projection of the features, M a simplex equiangular tight frame made
    from the run's seed and never changed, s learned. Clients train by the balanced softmax; w = Σ a_k w_k. After the
    last round each trains the model on its own data, then tunes the prototypes and the projection by turns.

    >>> from pfed import Experiment
    >>> result = Experiment("fedetf", clients=4, rounds=1, hyper={"alternations": 1}).run()

    Deviations from the paper: none. The two rates of the personalization are the authors'; it runs with plain
    cross-entropy, the projection with momentum 0.9 and weight decay 5e-4.
    """

    scale: float = option(1.0, "the scale s at the start", gt=0, tries=(1.0, 10.0))
    width: int = option(0, "width of the projection (0: that of the features)", ge=0)
    alternations: int = option(20, "turns of the personalization after the last round (0: none)", ge=0)
    turn_epochs: int = option(3, "epochs on the prototypes and on the projection in a turn", ge=1)
    prototype_lr: float = option(0.1, "learning rate of the prototypes", gt=0)
    projection_lr: float = option(0.05, "learning rate of the projection", gt=0)
    agg: Aggregation = "samples"

    def build(self, spec: Spec) -> nn.Module:
        def head(width: int, classes: int) -> nn.Module:
            inner = max(self.width or width, classes)
            frame = spec.add("frame", lambda: simplex_frame(inner, classes), common=True)
            return Projected(nn.Linear(width, inner), FixedHead(frame, self.scale))

        return with_fixed_head(spec, head, "FedETF")

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        model = client.model(params)
        self._train(client, model)
        client.keep(model)
        return {"params": client.share(model)}

    def _train(self, client: Client, model: nn.Module, stream: str = "train") -> None:
        counts = client.counts

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return F.cross_entropy(balanced(model(batch), counts), batch.y)

        client.fit(model, loss, stream=stream)

    def finish(self, server: State, cohort: Cohort) -> None:
        if self.alternations:
            cohort.call(self.personalize, **self.download(server))

    @step
    def personalize(self, client: Client, params: Tensors) -> None:
        model = client.model(params)
        self._train(client, model, "personal")
        head = anatomy.head_name(model)
        frame = anatomy.of({f"{head}.classifier.weight"})
        projection = anatomy.under(f"{head}.projection", "projection")
        for turn in range(self.alternations):
            opt = SGD(anatomy.trainable(model, frame), self.prototype_lr)
            client.fit(model, epochs=self.turn_epochs, only=frame, thaw=True, opt=opt, stream=f"frame/{turn}")
            opt = SGD(anatomy.trainable(model, projection), self.projection_lr, 0.9, weight_decay=5e-4)
            client.fit(model, epochs=self.turn_epochs, only=projection, opt=opt, stream=f"projection/{turn}")
        client.state["personal"] = snapshot(model)

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        general, own = client.model(params), client.state.get("personal")
        return {"personal": general if own is None else client.model(own), "global": general}
