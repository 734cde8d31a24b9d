from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from pfed import anatomy
from pfed.anatomy import ALL
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.errors import UserError
from pfed.forward import Batch, View, features
from pfed.method import Method, Reduction, step
from pfed.options import option
from pfed.pool import Spec
from pfed.prototypes import Prototypes, class_means, merged, widened
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedproto")
@dataclass(frozen=True)
class FedProto(Method):
    """FedProto: clients share the mean features of their classes, no weights (Tan et al., AAAI 2022).

    A client trains its own model by CE + λ MSE(z, C_y), where C_y is the global prototype of the sample's class, if
    there is one. It sends the mean of its features and the number of its samples by class; C_y is the mean over the
    clients that have the class, by samples.

    >>> from pfed import Experiment
    >>> result = Experiment("fedproto", model="mlp,cnn-small", clients=4, rounds=2, hyper={"width": 32}).run()

    Deviations from the paper: the squared distance is a mean over batch and dimensions, as public codes have it (the
    printed sum hardly trains at large batches: `reduction=sum`); momentum survives between rounds unless the run has
    `keep_optimizer=false`.
    """

    lam: float = option(1.0, "weight of the distance to the prototypes", ge=0, tries=(0.1, 1.0, 10.0))
    reduction: Literal["mean", "sum"] = option("mean", "squared distance: mean over the batch and dimensions, or sum")
    weighting: Literal["samples", "uniform"] = option("samples", "how clients count in a class's prototype")
    width: int = option(0, "features of a linear layer before the head (0: none), so that architectures fit", ge=0)
    same_architecture = False
    needs = frozenset({"replies"})
    keep_optimizer = True
    reduces_to = (Reduction({"lam": 0.0}, "local", {"matched_participation": True}),)

    def build(self, spec: Spec) -> nn.Module:
        return widened(spec, self.width)

    def check_models(self, models: Sequence[nn.Module]) -> None:
        widths = {anatomy.width(model) for model in models}
        if len(widths) > 1:
            found = ", ".join(str(width) for width in sorted(widths))
            raise UserError(f"FedProto needs features of one width at all clients. Got {found}; set width, as to 64.")

    def init(self, model: nn.Module) -> State:
        return {"prototypes": None}

    def download(self, server: State) -> Payload:
        return {"prototypes": server["prototypes"]}

    def round(self, server: State, cohort: Cohort) -> None:
        replies = cohort.call(self.update, **self.download(server))
        trained = [replies[client] for client in cohort.trained]
        server["prototypes"] = merged(server["prototypes"], trained, self.weighting == "samples")

    @step
    def update(self, client: Client, prototypes: Tensors | None) -> Payload:
        model = client.model()
        known = Prototypes(prototypes, client.classes) if prototypes else None
        client.fit(model, self._loss(client, known) if known and self.lam else None)
        client.keep(model, ALL)
        return class_means(client, model)

    def _loss(self, client: Client, prototypes: Prototypes) -> Loss:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            z = features(model, batch)
            own = nn.functional.cross_entropy(anatomy.head(model, z), batch.y)
            distance = prototypes.distance(z, batch.y, self.reduction)
            client.log_mean(distance=distance.detach())
            return own + self.lam * distance

        return loss

    def predictor(self, client: Client, prototypes: Tensors | None) -> dict[str, nn.Module]:
        model = client.model()
        if not prototypes:
            return {"personal": model}
        return {"personal": model, "nearest-prototype": View(model, Prototypes(prototypes, client.classes).nearest())}
