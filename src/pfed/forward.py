"""Running a model on a batch: `model(batch)`, `features(model, batch)`, `head(model, z)`.

All three look up by `batch.index` what the phase knows already, so that what is frozen is computed once without any
code in a method (exact shortcuts).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed import anatomy
from pfed.shortcuts import Phase


@dataclass
class Batch:
    """Some of a client's examples; `index` are their positions in the client's data."""

    x: Tensor
    y: Tensor
    index: Tensor
    step: int = 0
    epoch: int = 0
    phase: Phase | None = None  # None: nothing is known to stay as it is


def features(model: nn.Module, batch: Batch | Tensor) -> Tensor:
    """The input of the head."""
    if isinstance(batch, Tensor):
        return anatomy.features(model, batch)
    cached = batch.phase.features(model, batch.index) if batch.phase else None
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
        cached = batch.phase.output(self, batch.index) if batch.phase else None
        if cached is not None:
            return cached
        batch = batch.x
    out: Tensor = type(self).forward(self, batch)
    return out


def accept_batches(model: nn.Module) -> nn.Module:
    """Let `model(batch)` work beside `model(x)`; names, tensors and copies of the model stay as they are."""
    model.forward = types.MethodType(_forward, model)
    return model
