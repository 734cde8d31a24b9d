from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from pfed import forward
from pfed.anatomy import ALL, BACKBONE, HEAD, head_name, params, snapshot
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.errors import UserError
from pfed.forward import Batch
from pfed.losses import kl, sqdist
from pfed.method import Aggregation, Each, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedbsd")
@dataclass(frozen=True)
class FedBSD(Method):
    """FedBSD: FedRep with the received backbone as a teacher of features (Wang et al., ACM MM Asia 2023).

    On the received backbone w_g a client trains its head h, then the backbone b, which starts from w_g, by
    L = CE(h(b(x)), y) + λ KL(softmax(g(x)/τ) || softmax(b(x)/τ)), where g is w_g, frozen, and the softmax is taken over
    the features. It sends b; the server takes the simple mean. Heads stay with the clients.

    >>> from pfed import Experiment
    >>> result = Experiment("fedbsd", clients=4, rounds=1, hyper={"head_epochs": 2, "lam": 10}).run()

    Deviations from the paper: the divergence has a plus sign (as printed, minimising it would drive the backbone away
    from the teacher); backbones are averaged, not whole models; a fresh optimiser for each of the two phases; while the
    head trains, a backbone with BatchNorm is in eval mode; features are compared before a dropout layer.
    """

    head_epochs: int = option(10, "epochs on the head", ge=0)
    body_epochs: int = option(1, "epochs on the backbone", ge=0)
    lam: float = option(1.0, "weight of the distillation; 0 is FedRep", ge=0, tries=(1.0, 10.0))
    tau: float = option(2.0, "temperature of the softmax", gt=0)
    kl_direction: Literal["teacher_student", "student_teacher"] = option("teacher_student", "KL(first || second)")
    tau2_scaling: bool = option(False, "multiply the divergence by tau squared")
    target: Literal["features_softmax", "features_mse", "logits"] = option("features_softmax", "what is distilled")
    student_init: Literal["global", "local"] = option("global", "where the backbone starts: as received, or as it was")
    eval_backbone: Literal["global", "local"] = option("global", "the backbone that is judged: the newest, or the own")
    unseen_head: Literal["init", "averaged"] = option("init", "the head before the first round; averaged sends heads")
    head_phase_bn: Literal["eval", "train"] = option("eval", "BatchNorm of the backbone while the head trains")
    feature_tap: Literal["before_dropout", "head_input"] = option("before_dropout", "where features are compared")
    agg: Aggregation = "uniform"
    reduces_to = (Reduction({"lam": 0.0}, "fedrep"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == "features_mse" and (self.tau2_scaling or self.kl_direction != "teacher_student"):
            raise UserError("FedBSD: target=features_mse has no temperature and no direction; leave both as they are.")

    def init(self, model: nn.Module) -> State:
        server: State = {"body": params(model, BACKBONE)}
        return {**server, "head": None, "seen": {}} if self.unseen_head == "averaged" else server

    def download(self, server: State) -> dict[str, Any]:
        if self.unseen_head == "init":
            return {"body": server["body"]}
        return {"body": server["body"], "head": Each(lambda k: None if k in server["seen"] else server["head"])}

    def round(self, server: State, cohort: Cohort) -> None:
        mean = cohort.mean(self.update, "body", **self.download(server))
        server["body"] = mean.only(server["body"])
        if self.unseen_head == "averaged":
            server["head"] = mean.drop(server["body"])
            server["seen"] = {**server["seen"], **dict.fromkeys(cohort.answered, True)}

    @step
    def update(self, client: Client, body: Tensors, head: Tensors | None = None) -> Payload:
        teacher, model = client.model(body).eval(), client.model(body, head)
        client.fit(model, epochs=self.head_epochs, only=HEAD, frozen=self.head_phase_bn, stream="head")
        if self.student_init == "local":
            model = client.model(snapshot(model), client.state.get("body"))
        client.fit(model, self.loss(client, teacher), epochs=self.body_epochs, only=BACKBONE)
        client.log(drift=sqdist(model, body).sqrt().item())
        client.keep(model, HEAD)
        if "local" in (self.student_init, self.eval_backbone):
            client.state["body"] = client.share(model, BACKBONE)
        return {"body": client.share(model, ALL if self.unseen_head == "averaged" else BACKBONE)}

    def predictor(self, client: Client, body: Tensors, head: Tensors | None = None) -> nn.Module:
        return client.model(body, head, client.state.get("body") if self.eval_backbone == "local" else None)

    def loss(self, client: Client, teacher: nn.Module) -> Loss:
        """CE + λ L_BSD."""

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            with torch.no_grad():
                g = forward.features(teacher, batch)
            with tapped(model, self.feature_tap == "before_dropout") as taken:
                ce = client.loss(model, batch)
            bsd = self.distance(model, g, taken[-1])
            client.log_mean(bsd_loss=bsd.detach(), ce_loss=ce.detach())
            if batch.step == 0:
                client.log(bsd_loss_first=bsd.item())
            return ce + self.lam * bsd if self.lam else ce

        return loss

    def distance(self, model: nn.Module, g: Tensor, b: Tensor) -> Tensor:
        """L_BSD: how far the student's features b are from the teacher's g. (batch, features)"""
        g, b = (forward.head(model, z) if self.target == "logits" else z.flatten(1) for z in (g, b))
        if self.target == "features_mse":
            return F.mse_loss(b, g)
        first, second = (g, b) if self.kl_direction == "teacher_student" else (b, g)
        return kl(first, second, self.tau) * (self.tau**2 if self.tau2_scaling else 1)


@contextlib.contextmanager
def tapped(model: nn.Module, before_dropout: bool) -> Iterator[list[Tensor]]:
    """Inside, a forward pass puts the head's input on the list, or what a dropout layer right before it was given."""
    taken: list[Tensor] = []
    given: list[Tensor] = []
    dropped: list[tuple[Tensor, Tensor]] = []  # output and input

    def enter(module: _DropoutNd, args: tuple[Tensor, ...]) -> None:
        given.append(args[0].clone() if module.inplace else args[0])

    def leave(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        dropped.append((output, given.pop()))

    def reach(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        z = args[0]
        for output, source in reversed(dropped):
            z = source if output is z else z
        taken.append(z)

    hooks = [model.get_submodule(head_name(model)).register_forward_pre_hook(reach)]
    for module in model.modules() if before_dropout else ():
        if isinstance(module, _DropoutNd):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()
