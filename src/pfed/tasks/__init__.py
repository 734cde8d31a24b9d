"""A task supplies data, loss, predictions and scores; the core stays the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from pfed.data.base import Samples
from pfed.errors import unknown
from pfed.forward import Batch

Augment = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]  # (x, y, rng) -> x, y


class Task(Protocol):
    """What differs between classification and other tasks."""

    main: str  # the score by which models are compared
    names: tuple[str, ...]  # the scores of a final evaluation
    shortcuts: bool  # whether what frozen parts say may be computed once

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss of a batch: a mean over its samples."""
        ...

    def predict(self, model: nn.Module, samples: Samples) -> Tensor:
        """Predictions for all samples: eval mode, no gradient, no augmentation."""
        ...

    def scores(
        self, predictions: Tensor, samples: Samples, names: Sequence[str], classes: Sequence[str] = ()
    ) -> Mapping[str, float | None]:
        """Scores by name, None where there is nothing to judge; `classes` are for scores of single classes."""
        ...

    def correct(self, predictions: Tensor, samples: Samples) -> Tensor:
        """Which samples were right. (n,) uint8"""
        ...

    def augment(self, rule: str) -> Augment | None:
        """The random change of training inputs, and with them of what is true of them, by this rule."""
        ...


def task(name: str) -> Task:
    """A task by name."""
    from pfed.tasks.classification import Classification
    from pfed.tasks.detection import Detection

    tasks: dict[str, type[Task]] = {"classification": Classification, "detection": Detection}
    if name not in tasks:
        raise unknown("task", name, tasks)
    return tasks[name]()
