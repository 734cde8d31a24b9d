from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy, simplex, streams
from pfed.anatomy import ALL
from pfed.client import Client, Loss
from pfed.codistillation import combine, predict, public_images, public_labels, replicated, shared_batch, shared_batches
from pfed.cohort import Cohort
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.errors import UserError
from pfed.forward import Batch, quiet
from pfed.losses import kl
from pfed.method import Method, Reduction, Replies, step
from pfed.metrics import correct
from pfed.options import option
from pfed.registry import register
from pfed.wire import Payload, State


@register("fedcd")
@dataclass(frozen=True)
class FedCD(Method):
    """FedCD: personalized models by collaborative distillation of logits (UCC 2022).

    Client j sends its logits z_j on B images of a common set. The server takes γ = argmin CE(Σ_j γ_j z_j, y) over the
    simplex and returns z_t = Σ_j γ_j z_j. In the next round the client adds λ T² KL(softmax(z_t/T) || softmax(f_j/T))
    on those images to the loss of each private batch. Models never leave; each may be of another architecture.

    >>> from pfed import Experiment
    >>> result = Experiment("fedcd", model="mlp,cnn-small", clients=4, rounds=2, public=0.1).run()

    Deviations from the paper: cross-entropy is of private and distillation of common images (its algorithm has both on
    one private batch, whose logits other clients cannot have); T, λ and the local steps, not given there, are 2, 1 and
    the run's epochs. Not the FedCD that clones and deletes global models (arXiv 2006.09637).
    """

    lam: float = option(1.0, "weight of the distillation", ge=0, tries=(0.3, 1.0, 3.0))
    tau: float = option(2.0, "temperature T of the distillation", gt=0)
    batch: int = option(64, "common images in a batch", ge=2)
    common_batches: int = option(1, "batches of common images in a round", ge=1)
    kd_every: int = option(1, "distil in every so many steps", ge=1)
    local_steps: int = option(0, "local steps in a round (0: the run's local.epochs)", ge=0)
    ensemble: Literal["linear", "mean", "best", "softmax_loss"] = option(
        "linear", "the teacher: best combination, mean, best client, or weights exp(-loss)"
    )
    common: Literal["validation", "public_unlabelled", "shared_batch"] = option(
        "validation", "what is distilled on: the public set, that set without labels, or each training batch"
    )
    kl_direction: Literal["teacher_student", "student_teacher"] = option("teacher_student", "order of the divergence")
    same_architecture = False
    keep_optimizer = True
    needs = frozenset({"public", "replies"})
    reduces_to = (Reduction({"lam": 0.0}, "local"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.common == "public_unlabelled" and self.ensemble != "mean":
            raise UserError(
                f"FedCD.ensemble must be 'mean' where the common images have no labels. Got {self.ensemble!r}."
            )

    def check(self, options: RunOptions, federation: Federation) -> None:
        public = 0 if federation.public is None else len(federation.public)
        if public < self.batch:
            raise UserError(f"FedCD.batch must be <= the number of public samples ({public}). Got {self.batch}.")
        if self.common == "shared_batch" and not replicated(federation):
            raise UserError(
                "FedCD.common 'shared_batch' needs the same training data at every client: partition replicated."
            )
        if self.common == "shared_batch" and options.local.batch_size < 2:
            raise UserError("FedCD.common 'shared_batch' needs local.batch_size >= 2. Got 1.")

    def init(self, model: nn.Module) -> State:
        return {"teacher": None}

    def download(self, server: State) -> Payload:
        return {}

    def round(self, server: State, cohort: Cohort) -> None:
        if self.common == "shared_batch":
            self._together(cohort)
        else:
            replies = cohort.call(self.update, "logits", teacher=server["teacher"])
            server["teacher"] = combine(self._gamma(cohort, replies), replies)

    @step
    def update(self, client: Client, teacher: Tensor | None) -> Payload:
        model = client.model()
        client.fit(model, self._loss(client, teacher), steps=self.local_steps or None)
        client.keep(model, ALL)
        return {"logits": predict(model, self._images(client, client.round))}

    def finish(self, server: State, cohort: Cohort) -> None:
        if server["teacher"] is not None:
            cohort.call(self.receive, teacher=server["teacher"])

    @step
    def receive(self, client: Client, teacher: Tensor) -> None:
        """The last teacher arrives, as in the paper's count of bytes; no training follows that could use it."""

    def predictor(self, client: Client) -> nn.Module:
        return client.model()

    def _loss(self, client: Client, teacher: Tensor | None) -> Loss:
        """The task's loss on a private batch, and the distillation on one of the previous round's common batches."""
        if teacher is None or not self.lam:
            return client.loss
        images, targets = (torch.split(t, self.batch) for t in (self._images(client, client.round - 1), teacher))

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            own = client.loss(model, batch)
            turn, pause = divmod(batch.step, self.kd_every)
            if pause:
                return own
            with quiet(model):
                student = model(images[turn % len(images)])
            kd = self._distil(student, targets[turn % len(images)])
            client.log_mean(kd=kd.detach())
            return own + self.lam * kd

        return loss

    def _distil(self, student: Tensor, teacher: Tensor) -> Tensor:
        order = (teacher, student) if self.kl_direction == "teacher_student" else (student, teacher)
        return self.tau**2 * kl(*order, self.tau)

    def _images(self, client: Client, round: int) -> Tensor:
        return public_images(client, round, self.common_batches, self.batch)

    def _gamma(self, cohort: Cohort, replies: Replies) -> dict[int, float]:
        """Each client's weight in the teacher; one that could not train has none, unless nobody could."""
        logits = replies.each("logits")
        ids = [client for client in logits if replies.weights[client] > 0] or list(logits)
        if self.common == "public_unlabelled":
            gamma = dict.fromkeys(ids, 1 / len(ids))
        else:
            labels = public_labels(cohort, cohort.round, self.common_batches, self.batch)
            found = simplex.weigh(torch.stack([logits[client] for client in ids]), labels, self.ensemble)
            gamma = dict(zip(ids, found.gamma.tolist(), strict=True))
            right = correct(combine(gamma, replies), labels).double().mean()
            cohort.log(teacher_accuracy=float(right), teacher_loss=found.loss, duality_gap=found.gap)
            for client, own in logits.items():
                cohort.log(client, common_accuracy=float(correct(own, labels).double().mean()))
        for client in logits:
            cohort.log(client, gamma=gamma.get(client, 0.0))
        return gamma

    def _together(self, cohort: Cohort) -> None:
        """All clients take the same training batch in each step, as in KDCL, with weights from the public set."""
        replies = cohort.call(self.judge, "logits")
        gamma = self._gamma(cohort, replies)
        for number in range(max(replies.each("steps").values())):
            teacher = None
            if number % self.kd_every == 0:
                teacher = combine(gamma, cohort.call(self.look, "logits", number=number))
            cohort.call(self.learn, number=number, teacher=teacher)

    @step
    def judge(self, client: Client) -> Payload:
        steps = self.local_steps or client.local.epochs * shared_batches(client)
        logits = predict(client.model(), self._images(client, client.round))
        return {"logits": logits, "steps": steps if shared_batches(client) else 0}

    @step
    def look(self, client: Client, number: int) -> Payload:
        return {"logits": predict(client.model(), shared_batch(client, number).x)}

    @step
    def learn(self, client: Client, number: int, teacher: Tensor | None) -> None:
        model, batch = client.model(), shared_batch(client, number)
        sgd = client.sgd(anatomy.trainable(model))
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, f"shared/{number}"):
            logits = model(batch)
            loss = F.cross_entropy(logits, batch.y)
            if teacher is not None and self.lam:
                kd = self._distil(logits, teacher)
                client.log(kd=kd.item())
                loss = loss + self.lam * kd
            loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        client.keep(model, ALL)
        if client.keeps_optimizer and sgd.buffers:
            client.state["momentum"] = {"train": sgd.buffers}
        client.samples += len(batch.index)
