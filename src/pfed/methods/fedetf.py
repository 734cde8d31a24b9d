from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.anatomy import Part, snapshot
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

    Deviations from the paper: none.
    """

    scale: float = option(1.0, "the scale s at the start", gt=0)
    width: int = option(0, "width of the projection (0: that of the features)", ge=0)
    alternations: int = option(20, "turns of the personalization after the last round (0: none)", ge=0)
    turn_epochs: int = option(3, "epochs on the prototypes and on the projection in a turn", ge=1)
    prototype_lr: float = option(0.1, "learning rate of the prototypes", gt=0)
    projection_lr: float = option(0.05, "learning rate of the projection", gt=0)
    agg: Aggregation = "samples"

    def build(self, spec: Spec) -> nn.Module:
        def head(width: int, classes: int) -> nn.Module:
            inner = max(self.width or width, classes)
            return Projected(nn.Linear(width, inner), FixedHead(simplex_frame(inner, classes), self.scale))

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
            self._tune(client, model, frame, SGD(anatomy.trainable(model, frame), self.prototype_lr), f"frame/{turn}")
            opt = SGD(anatomy.trainable(model, projection), self.projection_lr, 0.9, weight_decay=5e-4)
            self._tune(client, model, projection, opt, f"projection/{turn}")
        client.trained(model)
        client.state["personal"] = snapshot(model)

    def _tune(self, client: Client, model: nn.Module, part: Part, opt: SGD, stream: str) -> None:
        """A few epochs on one part, which may be the fixed one."""
        names = part.names(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        model.eval()
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, stream):
            for batch in client.batches(self.turn_epochs, stream):
                opt.zero_grad()
                client.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                opt.step()
        for parameter in model.parameters():
            parameter.requires_grad_(True)

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        general, own = client.model(params), client.state.get("personal")
        return {"personal": general if own is None else client.model(own), "global": general}
