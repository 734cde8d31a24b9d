from __future__ import annotations

from dataclasses import dataclass

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


@register("fedper")
@dataclass(frozen=True)
class FedPer(Method):
    """FedPer: shared base, private last layers, trained together (Arivazhagan et al., 2019).

    A client trains base and head jointly and sends the base; w_b = Σ a_k w_b,k. Heads never leave.

    >>> from pfed import Experiment
    >>> result = Experiment("fedper", clients=4, rounds=1).run()

    Deviations from the paper: private layers are counted in blocks from the end, the head being the first.
    """

    private: int = option(1, "private blocks, counted from the head", ge=0)
    agg: Aggregation = "samples"
    reduces_to = (Reduction({"private": 0}, "fedavg"),)
    tasks = ANY_TASK

    def base(self, model: nn.Module) -> Part:
        blocks = list(groups.blocks(model).values())
        private = anatomy.NONE
        for block in blocks[len(blocks) - min(self.private, len(blocks)) :]:
            private = private | block
        return ~private

    def init(self, model: nn.Module) -> State:
        return {"base": anatomy.params(model, self.base(model))}

    def download(self, server: State) -> Payload:
        return {"base": server["base"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["base"] = cohort.mean(self.update, "base", **self.download(server))

    @step
    def update(self, client: Client, base: Tensors) -> Payload:
        return {"base": joint(client, base, self.base)}

    def predictor(self, client: Client, base: Tensors) -> nn.Module:
        return client.model(base)
