from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from pfed import anatomy, groups
from pfed.anatomy import Part
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(Method):
    """LG-FedAvg: private bottom layers, shared top layers (Liang et al., 2020).

    A client trains all layers jointly and sends the top ones; the server takes their simple mean.

    >>> from pfed import Experiment
    >>> result = Experiment("lg-fedavg", clients=4, rounds=1).run()

    Deviations from the paper: training starts from the initial model, not from a FedAvg checkpoint.
    `lg_variant="authors_code"` shares the bottom layers, as the authors' released CIFAR script does.
    """

    shared: int = option(2, "layers that are shared", ge=0, tries=(1, 2))
    lg_variant: Literal["paper_top", "authors_code"] = option("paper_top", "share the top, or the bottom layers")
    agg: Aggregation = "uniform"
    reduces_to = (
        Reduction({"shared": 1000}, "fedavg", {"agg": "uniform"}),
        Reduction({"shared": 0}, "local"),
    )
    tasks = ANY_TASK

    def top(self, model: nn.Module) -> Part:
        layers = list(groups.layers(model, joint_bn=True).values())
        n = min(self.shared, len(layers))
        part = anatomy.NONE
        for layer in layers[len(layers) - n :] if self.lg_variant == "paper_top" else layers[:n]:
            part = part | layer
        return part

    def init(self, model: nn.Module) -> State:
        return {"top": anatomy.params(model, self.top(model))}

    def download(self, server: State) -> Payload:
        return {"top": server["top"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["top"] = cohort.mean(self.update, "top", **self.download(server))

    @step
    def update(self, client: Client, top: Tensors) -> Payload:
        return {"top": joint(client, top, self.top)}

    def predictor(self, client: Client, top: Tensors) -> nn.Module:
        return client.model(top)
