from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pfed import anatomy, streams
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch, quiet
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.sgd import SGD
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("perfedavg")
@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg: an initial model from which one step of its own suits each client (Fallah et al., NeurIPS 2020).

    A local step takes disjoint batches D, D', D'': w̃ = w − α ∇(w; D) and d = ∇(w̃; D'). First order: w ← w − β d.
    Hessian-free: w ← w − β (d − α h) with h = (∇(w + δd; D'') − ∇(w − δd; D'')) / 2δ. The server takes the simple mean;
    a client is judged after adapting w to its training data by an epoch of plain SGD with step α.

    >>> from pfed import Experiment
    >>> result = Experiment("perfedavg", clients=4, rounds=1, hyper={"variant": "hf"}).run()

    Deviations from the paper: β is the run's learning rate unless given (the original 0.001 hardly learns in so few
    rounds); its steps have no momentum; the adaptation is an epoch, and `adapt=step` one step; batches at the end of
    the epochs that are too few for a step are left out, unless a client has no others, which then uses some of them
    again.
    """

    variant: Literal["fo", "hf"] = option("fo", "first order, or Hessian-free")
    alpha: float = option(0.01, "step of the adaptation", ge=0, tries=(0.01, 0.03, 0.1))
    beta: float = option(0.0, "step of the initial model (0: the run's local.lr)", ge=0)
    delta: float = option(0.001, "distance of the two gradients that make a Hessian product", gt=0)
    adapt: Literal["epoch", "step"] = option("epoch", "how long a client adapts before it is judged")
    agg: Aggregation = "uniform"
    tasks = ANY_TASK

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        model = client.model(params)
        w = anatomy.trainable(model, ~anatomy.of(anatomy.marks(model).fixed))
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, "train"):
            for batches in self._triples(client):
                self._meta_step(client, model, w, batches)
        client.keep(model)
        client.trained(model)
        return {"params": client.share(model)}

    def _triples(self, client: Client) -> Iterator[list[Batch]]:
        """The batches of the epochs, two or three at a time."""
        size = 2 if self.variant == "fo" else 3
        source = client.batches(client.local.epochs)
        done = False
        while taken := list(itertools.islice(source, size)):
            if len(taken) == size or not done:
                yield (taken * size)[:size]
            done = True

    def _meta_step(self, client: Client, model: nn.Module, w: dict[str, torch.Tensor], batches: list[Batch]) -> None:
        beta = client.rate(self.beta)
        start = Tensors({name: p.detach().clone() for name, p in w.items()})

        def gradient(at: Tensors, batch: Batch) -> Tensors:
            _put(w, at)
            found = torch.autograd.grad(client.loss(model, batch), list(w.values()), allow_unused=True)
            return Tensors(
                {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(w.items(), found, strict=True)}
            )

        with quiet(model):
            first = gradient(start, batches[0])
        d = gradient(start - self.alpha * first, batches[1])
        if self.variant == "hf":
            with quiet(model):
                above, below = (
                    self._same_chance(client, gradient, start + sign * self.delta * d, batches[2]) for sign in (1, -1)
                )
            d = d - self.alpha * ((above - below) / (2 * self.delta))
        _put(w, start - beta * d)

    def _same_chance(
        self, client: Client, gradient: Callable[[Tensors, Batch], Tensors], at: Tensors, batch: Batch
    ) -> Tensors:
        """A gradient under the dropout that belongs to the batch."""
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, f"hessian/{batch.step}"):
            return gradient(at, batch)

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        model = client.model(params)
        opt = SGD(anatomy.trainable(model), self.alpha)
        steps = 1 if self.adapt == "step" else None
        if self.alpha:
            client.fit(model, epochs=1, steps=steps, opt=opt, stream="adapt")
        return {"personal": model, "global": client.model(params)}


@torch.no_grad()
def _put(w: dict[str, torch.Tensor], values: Tensors) -> None:
    for name, parameter in w.items():
        parameter.copy_(values[name])
