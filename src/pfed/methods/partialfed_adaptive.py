from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pfed import loading, selection, streams
from pfed.anatomy import snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.composite import Pair, mix
from pfed.errors import UserError
from pfed.method import ANY_TASK, Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("partialfed-adaptive")
@dataclass(frozen=True)
class PartialFedAdaptive(Method):
    """PartialFed-Adaptive: learn which groups to start from the global model (Sun et al., NeurIPS 2021).

    A client trains two copies, L from its own W^c_{t-1} and G from W_t. Each batch runs on a composite that takes every
    group i from G with probability alpha[i, 1] (alpha = softmax theta), by a Gumbel-softmax sample u at temperature
    tau. Of f_m + f_s batches the first f_m move the chosen copies, the others theta by the straight-through gradient
    of Σ u_ij <dl/dW[i], L[i] or G[i]>. W^c_t = alpha_0 L + alpha_1 G, and W_{t+1} = Σ (n_c/n) W^c_t.

    >>> from pfed import Experiment
    >>> result = Experiment("partialfed-adaptive", clients=4, rounds=1).run()

    Deviations from the paper: theta are logits and move by Adam, as SGD leaves alpha at one half; tau ends at tau_min,
    not 0; both copies are trained; f_m, f_s and F = E are choices, as the paper's appendix is not public.
    """

    granularity: Literal["stage", "block", "layer"] = option("block", "what is chosen as one")
    sampling: Literal["soft", "hard"] = option("soft", "W^c is the mean of L and G by alpha, or the likelier of them")
    f_m: int = option(4, "batches in a row that train weights", ge=1)
    f_s: int = option(1, "batches after them that train theta", ge=0)
    tau0: float = option(5.0, "temperature in round 1", gt=0)
    tau_min: float = option(0.1, "temperature in the last round", gt=0)
    anneal: Literal["exp", "linear"] = option("exp", "how the temperature falls")
    theta_optimizer: Literal["adam", "sgd"] = option("adam", "what moves theta")
    lr_theta: float = option(0.01, "learning rate of theta", gt=0, tries=(0.01, 0.1))
    theta_persist: bool = option(True, "theta goes on from round to round, or starts anew in each")
    alpha_param: Literal["logits", "projected"] = option(
        "logits", "theta are logits of alpha, or alpha itself, projected on the simplex after each step"
    )
    initial_gap: float = option(0.0, "theta[i, 1] - theta[i, 0] at the start, as logits", ge=-1000, le=1000)
    two_copies: bool = option(True, "a step moves the chosen copy; false: both alike, so that they keep their distance")
    finetune_epochs: int | None = option(None, "epochs of tuning (none: local.epochs)", ge=0)
    finetune_lr: float | None = option(None, "learning rate of the tuning (none: local.lr)", gt=0)
    finetune_when: Literal["end", "every_round"] = option(
        "end", "tune after the last round, or W^c in every round before it is sent"
    )
    stem_group: Literal["with_s1", "own"] = option("with_s1", "granularity stage: the stem is part of s1, or a group")
    layer_conv_bn: Literal["joint", "separate"] = option(
        "separate", "granularity layer: a BatchNorm joins its convolution, or is a group of its own"
    )
    agg: Aggregation = "samples"
    same_architecture = False
    fixed_rounds = True
    sends_all = True
    reduces_to = (Reduction({"initial_gap": -200.0, "f_s": 0, "finetune_epochs": 0}, "local"),)
    tasks = ANY_TASK

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_min > self.tau0:
            raise UserError(f"PartialFedAdaptive.tau_min must be <= tau0 ({self.tau0}). Got {self.tau_min}.")

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        own = client.state.get("own")
        copies = client.model(own), client.model(own, params)  # L and G
        groups = loading.cut(copies[0], self.granularity, self.stem_group, self.layer_conv_bn)
        theta = self.train(client, Pair(client, copies, groups, self.two_copies))
        alpha = selection.probabilities(theta, self.alpha_param)
        model = mix(copies, groups, alpha, self.sampling)
        if self.finetune_when == "every_round" and self.finetune_epochs != 0:
            client.fit(model, epochs=self.finetune_epochs, lr=self.finetune_lr or 0.0, stream="finetune")
        client.state["own"] = snapshot(model)
        client.log(**{f"load_global/{label}": float(a) for label, a in zip(groups, alpha[:, 1], strict=True)})
        client.trained(model)
        return {"params": params if client.starved else client.share(model)}

    def train(self, client: Client, pair: Pair) -> Tensor:
        """E epochs on composites of the two copies: weights f_m times, then theta f_s times. Returns theta."""
        state = client.state if self.theta_persist else {}
        theta: Tensor = state.get("theta", selection.initial(pair.groups, self.initial_gap, self.alpha_param))
        moments, q = state.get("moments", Tensors()), client.state.get("q", 0)
        tau = selection.temperature(client.round, client.rounds, self.tau0, self.tau_min, self.anneal)
        gumbel = client.rng("gumbel")
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, "train"):
            for batch in client.batches(client.local.epochs):
                noise = torch.from_numpy(gumbel.gumbel(size=theta.shape)).to(theta.device)
                u = selection.relaxed(theta, noise, tau, self.alpha_param)
                choice = u.argmax(1).tolist()
                if q % (self.f_m + self.f_s) < self.f_m:
                    pair.descend(choice, batch)
                else:
                    loss, c = pair.products(choice, batch)
                    theta, moments = self.move(theta, selection.gradient(theta, u, c, tau, self.alpha_param), moments)
                    client.log_mean(strategy_loss=loss)
                q += 1
        pair.remember()
        client.state |= {"theta": theta, "moments": moments, "q": q}
        client.log(tau=tau)
        return theta

    def move(self, theta: Tensor, grad: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """One step of theta."""
        if self.theta_optimizer == "adam":
            theta, moments = selection.Adam(self.lr_theta)(theta, grad, moments)
        else:
            theta = theta - self.lr_theta * grad
        return theta if self.alpha_param == "logits" else selection.project(theta), moments

    def finish(self, server: State, cohort: Cohort) -> None:
        if self.finetune_epochs != 0 and self.finetune_when == "end":
            cohort.call(self.tune, **self.download(server))

    @step
    def tune(self, client: Client, params: Tensors) -> None:
        model = self.last(client, params)
        client.fit(model, epochs=self.finetune_epochs, lr=self.finetune_lr or 0.0, stream="finetune")
        client.state["finetuned"] = snapshot(model)

    def last(self, client: Client, params: Tensors) -> nn.Module:
        """W^c as it was left; the global model for a client that never took part."""
        return client.model(client.state.get("own", params))

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        return loading.judged(client, self.last(client, params))
