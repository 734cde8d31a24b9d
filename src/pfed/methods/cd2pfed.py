from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import absence, anatomy
from pfed.channels import Channels, Split, channels, layout, n_private
from pfed.client import Client, Loss
from pfed.cohort import Cohort
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.errors import UserError
from pfed.forward import Batch
from pfed.losses import kl
from pfed.method import Aggregation, Method, Reduction, step
from pfed.metrics import correct, entropy
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.smoothing import Smoothing, rampup
from pfed.subnets import pair
from pfed.tensors import Tensors, pack, put, unpack
from pfed.wire import Payload, State


@register("cd2pfed")
@dataclass(frozen=True)
class CD2pFed(Method):
    """CD2-pFed: private and shared channels in every layer, which teach each other (Shen et al., CVPR 2022).

    In round t of T a share p_t = p t/T of each layer's channels is private; the rest is averaged, Σ a_k w_k. With the
    logits z of all, zL of the private and zG of the shared channels alone, a client trains L = CE(z, y) + lam L_CD with
    L_CD = (KL(zL ‖ zG) + KL(zG ‖ zL)) / 2. After each epoch private weights become β_t v + (1 − β_t) v_before, where
    β_t = β exp(−5 (1 − t/t0)²) up to t0 = T/10, then β.

    >>> from pfed import Experiment
    >>> result = Experiment("cd2pfed", clients=4, rounds=1, hyper={"p": 0.5}).run()

    Deviations from the paper: where it is silent (which channels, the last layer, BatchNorm, the sub-networks' passes)
    there are switches. The classifier is divided by its inputs, so that both sub-networks know all classes. L_CD is
    left out while a sub-network would have a layer without channels.
    """

    p: float = option(0.5, "share of private channels, at the end", ge=0, le=1, tries=(0.25, 0.5, 0.75))
    layer_p: tuple[float, ...] = option((), "the same for each channel group, in place of p", ge=0, le=1)
    lam: float = option(1.0, "weight of the distillation", ge=0)
    beta: float = option(0.5, "weight of the new private weights in the moving average", ge=0, le=1)
    progressive: bool = option(True, "LI: the private share grows linearly; else it is p from the start")
    smoothing: bool = option(True, "TA: private weights are averaged with those before")
    distillation: bool = option(True, "CD: private and shared channels are distilled into each other")
    private_side: Literal["first", "last", "random-fixed"] = option("first", "which channels are private")
    classifier_split: Literal["input", "output", "private", "shared"] = option("input", "how the classifier is divided")
    bn_buffers: Literal["follow", "local", "shared"] = option(
        "follow", "running statistics follow their channel, or not"
    )
    bn_subnet: Literal["batch_noupdate", "update", "eval"] = option("batch_noupdate", "BatchNorm in sub-networks")
    t_offset: Literal[0, 1] = option(1, "the number of the first round in the formulas")
    ema_reading: Literal["literal", "swapped"] = option("literal", "β_t weighs the new weights, or the old ones")
    ema_every: Literal["epoch", "step"] = option("epoch", "when private weights are averaged")
    cd_targets: Literal["mutual", "from_full"] = option("mutual", "distil each from the other, or from all channels")
    cd_stopgrad: Literal["none", "teacher"] = option("none", "whether the target of a KL term gets no gradient")
    cd_temperature: float = option(1.0, "temperature of the distillation", gt=0)
    subnet_ce: float = option(0.0, "weight of cross-entropy on both sub-networks", ge=0)
    judge_subnets: bool = option(False, "judge the sub-networks, too")
    agg: Aggregation = "samples"
    fixed_rounds = True
    reduces_to = (
        Reduction({"p": 0.0}, "fedavg"),
        Reduction({"p": 0.0, "progressive": False, "ema_every": "step", "subnet_ce": 1.0}, "fedavg"),
        Reduction(
            {"p": 0.0, "smoothing": False, "distillation": False, "agg": "uniform"}, "fedavg", {"agg": "uniform"}
        ),
        Reduction({"p": 0.0, "bn_buffers": "local"}, "silobn"),
        Reduction({"p": 0.0, "classifier_split": "private", "smoothing": False}, "fedper"),
        Reduction({"p": 1.0, "progressive": False, "smoothing": False}, "local"),
        Reduction(
            {"p": 1.0, "progressive": False, "smoothing": False, "classifier_split": "shared", "agg": "uniform"},
            "lg-fedavg",
            {"shared": 1},
        ),
    )

    def check(self, options: RunOptions, federation: Federation) -> None:
        if self.bn_buffers == "shared" and options.bn != "share":
            kept = f"the run keeps them at the clients: bn={options.bn}"
            raise UserError(f"CD2pFed.bn_buffers can't be 'shared' where {kept}.")

    def build(self, spec: Spec) -> nn.Module:
        model = spec.base()
        groups = len(channels(model, torch.zeros(1, *spec.shape)).groups)
        if self.layer_p and len(self.layer_p) != groups:
            wanted = f"one number for each of the model's {groups} channel groups"
            raise UserError(f"CD2pFed.layer_p must be {wanted}. Got {len(self.layer_p)} of them.")
        return model

    def init(self, model: nn.Module) -> State:
        return {"params": anatomy.params(model), "channels": layout(model).text(), "rounds": 0, "newest": 0, "last": {}}

    def start(self, server: State, cohort: Cohort) -> None:
        server["rounds"] = cohort.rounds

    def download(self, server: State) -> dict[str, Any]:
        """What was shared when the client last answered, all if it never did; and the number of that round."""
        found, params, rounds = Channels.from_text(server["channels"]), server["params"], server["rounds"]
        shared = absence.since(server, lambda last: pack(params, self.split(found, last, rounds).shared))
        return {"shared": shared, "last": absence.since(server, int)}

    def round(self, server: State, cohort: Cohort) -> None:
        mean = cohort.mean(self.update, "shared", **self.download(server))
        found = Channels.from_text(server["channels"])
        shared = self.split(found, cohort.round, cohort.rounds).shared
        server["params"] = unpack(mean, shared, onto=server["params"])
        absence.note(server, cohort)
        p, *each = self.shares(cohort.round, cohort.rounds)
        parameters = mean.drop(found.statistics).numel
        cohort.log(p=float(max(each, default=p)), shared_elements=mean.numel, shared_parameters=parameters)
        if self.smoothing:
            cohort.log(beta=self.beta_t(cohort.round, cohort.rounds))

    @step
    def update(self, client: Client, shared: Tensors, last: int) -> Payload:
        model = self.received(client, shared, last)
        split = self.split(layout(model), client.round, client.rounds)
        average = Smoothing(model, split, self.new_weight(client.round, client.rounds), self.ema_every)
        client.fit(model, self.loss(client, model, split), extra=[average], each_epoch=average.epoch)
        client.trained(self.judged(client, model, split))
        client.state["own"] = anatomy.snapshot(model)
        return {"shared": pack(client.share(model), split.shared)}

    def loss(self, client: Client, model: nn.Module, split: Split) -> Loss | None:
        """L = CE + lam L_CD; the task's loss alone where there are no two sub-networks."""
        distilled = self.distillation and self.lam > 0
        if split.degenerate or not (distilled or self.subnet_ce):
            return None
        subnets = pair(model, split, self.bn_subnet, client.options.exact_shortcuts)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            z = model(batch)
            private, shared = (subnet(batch.x) for subnet in subnets.values())
            total = F.cross_entropy(z, batch.y)
            if distilled:
                l_cd = self.l_cd(z, private, shared)
                total = total + self.lam * l_cd
                client.log_mean(cd_loss=l_cd.detach())
            if self.subnet_ce:
                total = total + self.subnet_ce * sum(F.cross_entropy(own, batch.y) for own in (private, shared))
            for name, own in {"private": private, "shared": shared}.items():
                right = correct(own, batch.y).float().mean()
                client.log_mean(**{f"{name}_accuracy": right, f"{name}_entropy": entropy(own)})
            return total

        return loss

    def l_cd(self, z: Tensor, private: Tensor, shared: Tensor) -> Tensor:
        """Half the sum of two KL terms, by default KL(private ‖ shared) and KL(shared ‖ private)."""
        full, tau = self.cd_targets == "from_full", self.cd_temperature
        pairs = [(z, private), (z, shared)] if full else [(private, shared), (shared, private)]
        if full or self.cd_stopgrad == "teacher":
            pairs = [(target.detach(), learner) for target, learner in pairs]
        first, second = (kl(target, learner, tau) for target, learner in pairs)
        return tau**2 * (first + second) / 2

    def predictor(self, client: Client, shared: Tensors, last: int) -> dict[str, nn.Module]:
        model = self.received(client, shared, last)
        return self.judged(client, model, self.split(layout(model), last, client.rounds))

    def received(self, client: Client, shared: Tensors, last: int) -> nn.Module:
        """The client's own model with the newest of what it shared in round `last`."""
        model = client.model(client.state.get("own"))
        put(shared, self.split(layout(model), last, client.rounds).shared, onto=model.state_dict())
        return model

    def shares(self, round: int, rounds: int) -> tuple[Fraction, ...]:
        """p_t and, where layers have their own, that of each: exact. Before the first round nothing is private."""
        t = Fraction(round - 1 + self.t_offset, rounds) if self.progressive and round else Fraction(min(round, 1))
        return tuple(Fraction(str(p)) * t for p in (self.p, *self.layer_p))

    def split(self, found: Channels, round: int, rounds: int) -> Split:
        """What is private and what is shared in a round; before the first all is shared."""
        p, *each = self.shares(round, rounds)
        whose = self.classifier_split if round else "shared"
        counts = found.counts(each or p)
        return found.split(counts, n_private(found.classes, p), whose, self.private_side, self.bn_buffers)

    def beta_t(self, round: int, rounds: int) -> float:
        """β_t grows until t0, a tenth of the rounds."""
        return self.beta * rampup(round - 1 + self.t_offset, rounds)

    def new_weight(self, round: int, rounds: int) -> float:
        """How much of a private weight is new."""
        beta_t = self.beta_t(round, rounds) if self.ema_reading == "literal" else 1 - self.beta_t(round, rounds)
        return beta_t if self.smoothing else 1.0

    def judged(self, client: Client, model: nn.Module, split: Split) -> dict[str, nn.Module]:
        subnets = pair(model, split, self.bn_subnet, client.options.exact_shortcuts) if self.judge_subnets else {}
        return {"personal": model, **subnets}
