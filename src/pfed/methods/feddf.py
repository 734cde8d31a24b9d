from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.errors import UserError
from pfed.losses import kl
from pfed.method import Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.shortcuts import SLICE
from pfed.solvers import joint
from pfed.tensors import Mean, Tensors
from pfed.wire import Payload, State

LOOK = 10  # steps between two looks at the images held out


@register("feddf")
@dataclass(frozen=True)
class FedDF(Method):
    """FedDF: FedAvg, then the server distils the clients' models into the mean (Lin et al., NeurIPS 2020).

    From w = Σ a_k w_k the server minimises KL(softmax(mean_k f_k(x)) || softmax(f_w(x))) over public images, whose
    labels it does not use, by Adam with a cosine schedule; it stops early when images held out of them agree no
    better.

    >>> from pfed import Experiment
    >>> result = Experiment("feddf", clients=4, rounds=1, public=0.1, hyper={"server_steps": 10}).run()

    Deviations from the paper: one architecture; early stopping watches the distillation loss on held-out public images,
    not the accuracy on labelled ones; fewer steps by default.
    """

    server_steps: int = option(200, "steps of distillation at the server, at most", ge=0)
    server_lr: float = option(1e-3, "learning rate of Adam", gt=0, tries=(1e-4, 1e-3))
    server_batch: int = option(128, "public images per step", ge=1)
    patience: int = option(50, "steps without improvement on held-out images that end it (0: never)", ge=0)
    agg: Aggregation = "samples"
    needs = frozenset({"public", "replies"})
    reduces_to = (Reduction({"server_steps": 0}, "fedavg"),)

    def check(self, options: RunOptions, federation: Federation) -> None:
        if options.bn != "share":
            raise UserError(f"FedDF runs models at the server, which needs run.bn 'share'. Got {options.bn!r}.")

    def round(self, server: State, cohort: Cohort) -> None:
        replies = cohort.call(self.update, "params", **self.download(server))
        mean = replies.mean("params")
        trained = [replies[client]["params"] for client in cohort.trained]
        if self.server_steps and trained:
            mean = self._distil(cohort, mean, trained)  # type: ignore[arg-type]
        server["params"] = mean

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params)}

    def _distil(self, cohort: Cohort, mean: Tensors, models: list[Tensors]) -> Tensors:
        """The mean, after the steps with which it agrees best with its teachers on images held out."""
        assert cohort.public is not None
        x = cohort.public.take()[0]
        student = cohort.model(mean)
        fold = Mean()
        for params in models:
            _load(student, params)
            fold.add(_eval(student, x), 1.0)
        teacher: Tensor = fold.value()  # type: ignore[assignment]
        _load(student, mean)
        order = torch.from_numpy(cohort.rng("distillation").permutation(len(x)))
        held, used = (order[: len(x) // 10], order[len(x) // 10 :]) if self.patience else (order[:0], order)
        best, best_at, kept = self._apart(student, teacher, x, held), 0, mean
        adam = torch.optim.Adam(student.parameters(), self.server_lr)
        batches = cohort.rng("distillation_batches")
        with streams.torch_scope(cohort.seed, "server", cohort.round, "dropout"):
            for number in range(1, self.server_steps + 1):
                for group in adam.param_groups:
                    group["lr"] = self.server_lr * (1 + math.cos(math.pi * (number - 1) / self.server_steps)) / 2
                index = used[torch.from_numpy(batches.permutation(len(used))[: self.server_batch])]
                if len(index) == 1 and anatomy.has_batchnorm(student):
                    break
                adam.zero_grad()
                kl(teacher[index], student.train()(x[index])).backward()  # type: ignore[no-untyped-call]
                adam.step()
                if number % LOOK and number < self.server_steps:
                    continue
                apart = self._apart(student, teacher, x, held)
                if apart < best or not len(held):
                    best, best_at, kept = apart, number, anatomy.params(student).only(mean)
                elif number - best_at >= self.patience:
                    break
        return kept

    def _apart(self, student: nn.Module, teacher: Tensor, x: Tensor, index: Tensor) -> float:
        return float(kl(teacher[index], _eval(student, x[index]))) if len(index) else math.inf

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)


@torch.no_grad()
def _load(model: nn.Module, params: Tensors) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in params:
            tensor.copy_(params[name])


@torch.no_grad()
def _eval(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    return torch.cat([model(part) for part in torch.split(x, SLICE)])
