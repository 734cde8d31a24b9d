from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import SLICE
from pfed.losses import kl
from pfed.method import Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.solvers import joint
from pfed.tensors import Tensors
from pfed.wire import Payload, State


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
    server_lr: float = option(1e-3, "learning rate of Adam", gt=0)
    server_batch: int = option(128, "public images per step", ge=1)
    patience: int = option(50, "steps without improvement on held-out images that end it (0: never)", ge=0)
    agg: Aggregation = "samples"
    needs = frozenset({"public", "replies"})
    reduces_to = (Reduction({"server_steps": 0}, "fedavg"),)

    def round(self, server: State, cohort: Cohort) -> None:
        replies = cohort.call(self.update, "params", **self.download(server))
        mean = replies.mean("params")
        if self.server_steps:
            mean = self._distil(cohort, mean, list(replies.each("params").values()))
        server["params"] = mean

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        return {"params": joint(client, params)}

    def _distil(self, cohort: Cohort, mean: Tensors, models: list[Tensors]) -> Tensors:
        assert cohort.public is not None
        x = cohort.public.take()[0]
        teacher = torch.stack([_logits(cohort, params, x) for params in models]).mean(0)  # (public, classes)
        order = torch.from_numpy(cohort.rng("distillation").permutation(len(x)))
        held, used = order[: len(x) // 10], order[len(x) // 10 :]
        student = cohort.model(mean).train()
        adam = torch.optim.Adam(student.parameters(), self.server_lr)
        best, best_at, kept = math.inf, 0, mean
        batches = cohort.rng("distillation_batches")
        with streams.torch_scope(cohort.seed, "server", cohort.round, "dropout"):
            for number in range(self.server_steps):
                for group in adam.param_groups:
                    group["lr"] = self.server_lr * (1 + math.cos(math.pi * number / self.server_steps)) / 2
                index = used[torch.from_numpy(batches.permutation(len(used))[: self.server_batch])]
                adam.zero_grad()
                kl(teacher[index], student(x[index])).backward()  # type: ignore[no-untyped-call]
                adam.step()
                if self.patience and len(held) and (number + 1) % 10 == 0:
                    loss = float(kl(teacher[held], _eval(student, x[held])))
                    if loss < best:
                        best, best_at, kept = loss, number, anatomy.params(student)
                    elif number - best_at >= self.patience:
                        break
        found = kept if best < math.inf else anatomy.params(student)
        return found.only(mean)

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)


def _logits(cohort: Cohort, params: Tensors, x: Tensor) -> Tensor:
    return _eval(cohort.model(params), x)


@torch.no_grad()
def _eval(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    out = torch.cat([model(part) for part in torch.split(x, SLICE)])
    model.train()
    return out
