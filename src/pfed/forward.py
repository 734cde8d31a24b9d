"""Running a model on a batch: `model(batch)`, `features(model, batch)`, `head(model, z)`.

All three consult the phase's cache by `batch.index`, so that what is frozen is computed once without any code in a
method (exact shortcuts).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed import anatomy

SLICE = 512  # rows per forward pass where no gradient is needed


@dataclass
class Cache:
    """Features of frozen modules over all of a client's examples, made at first use."""

    examples: Callable[[], Tensor]  # all inputs in order
    frozen: list[nn.Module] = field(default_factory=list)
    _features: dict[int, Tensor] = field(default_factory=dict)
    _heads: dict[int, nn.Module] = field(default_factory=dict)

    def output(self, model: nn.Module, index: Tensor) -> Tensor | None:
        """The model's output by way of its features, if it is one of the frozen ones."""
        z = self.features(model, index)
        if z is None:
            return None
        if id(model) not in self._heads:
            self._heads[id(model)] = model.get_submodule(anatomy.head_name(model))
        out: Tensor = self._heads[id(model)](z)
        return out

    def features(self, model: nn.Module, index: Tensor) -> Tensor | None:
        if not any(module is model for module in self.frozen):
            return None
        if id(model) not in self._features:
            with torch.no_grad():
                x = self.examples()
                parts = [anatomy.features(model, x[i : i + SLICE]) for i in range(0, len(x), SLICE)]
            self._features[id(model)] = torch.cat(parts)
        return self._features[id(model)][index]


@dataclass
class Batch:
    """Some of a client's examples; `index` are their positions in the client's data."""

    x: Tensor
    y: Tensor
    index: Tensor
    step: int = 0
    epoch: int = 0
    cache: Cache | None = None


def features(model: nn.Module, batch: Batch | Tensor) -> Tensor:
    """The input of the head."""
    if isinstance(batch, Tensor):
        return anatomy.features(model, batch)
    cached = batch.cache.features(model, batch.index) if batch.cache else None
    return anatomy.features(model, batch.x) if cached is None else cached


def head(model: nn.Module, z: Tensor) -> Tensor:
    """The head applied to features."""
    return anatomy.head(model, z)


class View(nn.Module):
    """A model under another head: what it says is `head(features(model, x))`.

    Where a method has itself judged by several heads on one body, evaluation computes the body's features once.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(anatomy.features(self.model, x))
        return out


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm in train mode takes the batch's statistics and leaves the running ones alone.

    For passes beside the one that trains: sub-networks, distillation on other images.
    """
    tracking = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def _forward(self: nn.Module, batch: Batch | Tensor) -> Tensor:
    if isinstance(batch, Batch):
        cached = batch.cache.output(self, batch.index) if batch.cache else None
        if cached is not None:
            return cached
        batch = batch.x
    out: Tensor = type(self).forward(self, batch)
    return out


def accept_batches(model: nn.Module) -> nn.Module:
    """Let `model(batch)` work beside `model(x)`; names, tensors and copies of the model stay as they are."""
    model.forward = types.MethodType(_forward, model)
    return model
