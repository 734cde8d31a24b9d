from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from pfed.anatomy import BACKBONE, HEAD, params
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedrep")
@dataclass(frozen=True)
class FedRep(Method):
    """FedRep: shared representation, private head (Collins et al., ICML 2021).

    A client first trains its head on the received, frozen body, then the body under the frozen head, and sends the
    body; the server takes the simple mean.

    >>> from pfed import Experiment
    >>> result = Experiment("fedrep", clients=4, rounds=1, hyper={"head_epochs": 2}).run()

    Deviations from the paper: a fresh optimiser for each of the two phases (the authors' code has one for both);
    while the head trains, a body with BatchNorm is in eval mode (theirs leaves it in train mode: `head_phase_bn`).
    """

    head_epochs: int = option(10, "epochs on the head", ge=0, tries=(1, 5, 10))
    body_epochs: int = option(1, "epochs on the body", ge=0)
    head_phase_bn: Literal["eval", "train"] = option("eval", "BatchNorm of the body while the head trains")
    agg: Aggregation = "uniform"
    tasks = ANY_TASK

    def init(self, model: nn.Module) -> State:
        return {"body": params(model, BACKBONE)}

    def download(self, server: State) -> Payload:
        return {"body": server["body"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["body"] = cohort.mean(self.update, "body", **self.download(server))

    @step
    def update(self, client: Client, body: Tensors) -> Payload:
        model = client.model(body)
        client.fit(model, epochs=self.head_epochs, only=HEAD, frozen=self.head_phase_bn, stream="head")
        client.fit(model, epochs=self.body_epochs, only=BACKBONE)
        client.keep(model, HEAD)
        return {"body": client.share(model, BACKBONE)}

    def predictor(self, client: Client, body: Tensors) -> nn.Module:
        return client.model(body)
