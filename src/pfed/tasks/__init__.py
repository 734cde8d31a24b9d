"""A task supplies data, loss, predictions and scores; the core stays the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from pfed.data.base import Samples
from pfed.errors import unknown
from pfed.forward import Batch

Augment = Callable[[Tensor, np.random.Generator], Tensor]


class Task(Protocol):
    """What differs between classification and other tasks."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss of a batch: a mean over its samples."""
        ...

    def predict(self, model: nn.Module, samples: Samples) -> Tensor:
        """Predictions for all samples: eval mode, no gradient, no augmentation."""
        ...

    def scores(self, predictions: Tensor, samples: Samples, names: Sequence[str]) -> Mapping[str, float | None]: ...

    def correct(self, predictions: Tensor, samples: Samples) -> Tensor:
        """Which samples were right. (n,) uint8"""
        ...

    def augment(self, rule: str) -> Augment | None:
        """The random change of training inputs by this rule."""
        ...


def task(name: str) -> Task:
    """A task by name."""
    from pfed.tasks.classification import Classification

    tasks: dict[str, type[Task]] = {"classification": Classification}
    if name not in tasks:
        raise unknown("task", name, tasks)
    return tasks[name]()
