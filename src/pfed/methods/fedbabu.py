from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pfed import anatomy
from pfed.anatomy import ALL, BACKBONE, HEAD, params, snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.errors import UserError
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedbabu")
@dataclass(frozen=True)
class FedBABU(Method):
    """FedBABU: only the body is trained together, under a head that never changes (Oh et al., ICLR 2022).

    All clients have the same random head and train the body under it; w_b = Σ a_k w_b,k. After the last round each
    client tunes its model on its own data.

    >>> from pfed import Experiment
    >>> result = Experiment("fedbabu", clients=4, rounds=1, hyper={"ft_epochs": 2}).run()

    Deviations from the paper: none.
    """

    ft_epochs: int = option(10, "epochs of tuning after the last round", ge=0)
    ft_scope: Literal["all", "head", "body"] = option("all", "what is tuned")
    agg: Aggregation = "samples"
    tasks = ANY_TASK

    def build(self, spec: Spec) -> nn.Module:
        model = spec.base()
        spec.add("head", lambda: _draw(model.get_submodule(anatomy.head_name(model))), common=True)
        return model

    def check_models(self, models: Sequence[nn.Module]) -> None:
        super().check_models(models)
        heads = [model.get_submodule(anatomy.head_name(model)) for model in models]
        for head in heads if len(heads) > 1 else ():
            for name in _left(head):
                numbers = torch.cat([other.state_dict()[name].flatten() for other in heads])
                if (numbers != numbers[:1]).any():  # one number everywhere, as a scale, is not left to chance
                    raise UserError(
                        "FedBABU draws one head for several models, by its reset_parameters(). "
                        f"Got {type(head).__name__}, whose {name} is not drawn by it and would differ."
                    )

    def init(self, model: nn.Module) -> State:
        return {"body": params(model, BACKBONE)}

    def download(self, server: State) -> Payload:
        return {"body": server["body"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["body"] = cohort.mean(self.update, "body", **self.download(server))

    @step
    def update(self, client: Client, body: Tensors) -> Payload:
        model = client.model(body)
        client.fit(model, only=BACKBONE)
        client.keep(model)
        return {"body": client.share(model, BACKBONE)}

    def finish(self, server: State, cohort: Cohort) -> None:
        if self.ft_epochs:
            cohort.call(self.tune, **self.download(server))

    @step
    def tune(self, client: Client, body: Tensors) -> None:
        model = client.model(body)
        scope = {"all": ALL, "head": HEAD, "body": BACKBONE}[self.ft_scope]
        client.fit(model, epochs=self.ft_epochs, only=scope, stream="tune")
        client.state["tuned"] = snapshot(model)

    def predictor(self, client: Client, body: Tensors) -> dict[str, nn.Module]:
        untuned, tuned = client.model(body), client.state.get("tuned")
        return {"personal": untuned if tuned is None else client.model(tuned), "untuned": untuned}


def _draw(head: nn.Module) -> None:
    """Initial values anew, from the stream that is in use."""
    for module in _drawable(head):
        module.reset_parameters()  # type: ignore[operator]


def _drawable(head: nn.Module) -> list[nn.Module]:
    return [module for module in head.modules() if callable(getattr(module, "reset_parameters", None))]


def _left(head: nn.Module) -> list[str]:
    """The names of the tensors that nobody draws anew."""
    drawn = {id(t) for module in _drawable(head) for t in [*module.parameters(), *module.buffers()]}
    return [name for name, t in head.state_dict(keep_vars=True).items() if id(t) not in drawn]
