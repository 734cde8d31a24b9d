"""Classification: cross-entropy, class probabilities, and the metrics of `pfed.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import metrics
from pfed.data.base import Samples
from pfed.forward import Batch
from pfed.shortcuts import SLICE
from pfed.tasks import Augment


class Classification:
    """One label per sample."""

    main = "accuracy"
    names: tuple[str, ...] = metrics.SCORES
    shortcuts = True

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch), batch.y)

    def predict(self, model: nn.Module, samples: Samples) -> Tensor:
        """Class probabilities. (n, classes)"""
        model.eval()
        with torch.no_grad():
            parts = [
                F.softmax(model(samples.take(slice(i, i + SLICE))[0]), dim=1) for i in range(0, len(samples), SLICE)
            ]
        return torch.cat(parts)

    def scores(
        self, predictions: Tensor, samples: Samples, names: Sequence[str], classes: Sequence[str] = ()
    ) -> Mapping[str, float | None]:
        return metrics.scores(predictions, samples.labels, names)

    def correct(self, predictions: Tensor, samples: Samples) -> Tensor:
        return (predictions.argmax(1) == samples.labels).to(torch.uint8)

    def augment(self, rule: str) -> Augment | None:
        change = {"none": None, "flip": flip, "crop-flip": crop_flip, "flip-rotate": flip_rotate}[rule]
        return None if change is None else lambda x, y, rng: (change(x, rng), y)


def flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Each image mirrored or not."""
    mirrored = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


def crop_flip(x: Tensor, rng: np.random.Generator, pad: int = 4) -> Tensor:
    """Each image cut at random out of itself with a border of `pad`, then mirrored or not."""
    height, width = x.shape[-2:]
    wide = F.pad(x, (pad, pad, pad, pad))
    top, left = (torch.from_numpy(rng.integers(0, 2 * pad + 1, len(x))).to(x.device) for _ in range(2))
    rows = top.view(-1, 1, 1) + torch.arange(height).view(1, -1, 1)
    columns = left.view(-1, 1, 1) + torch.arange(width).view(1, 1, -1)
    image = torch.arange(len(x)).view(-1, 1, 1)
    return flip(wide.permute(0, 2, 3, 1)[image, rows, columns].permute(0, 3, 1, 2), rng)


def flip_rotate(x: Tensor, rng: np.random.Generator, degrees: float = 30) -> Tensor:
    """Each image mirrored or not, then turned by up to so many degrees: nearest pixels, zeros where none was."""
    x = flip(x, rng)
    height, width = x.shape[-2:]
    angle = torch.from_numpy(np.radians(rng.uniform(-degrees, degrees, len(x)))).to(x)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = (cos, -sin * height / width, zero, sin * width / height, cos, zero)
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)
