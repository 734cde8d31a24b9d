"""Class prototypes: the mean features of a class, at a client or over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from pfed import anatomy
from pfed.client import Client
from pfed.pool import Spec
from pfed.shortcuts import SLICE
from pfed.tensors import Mean, Tensors
from pfed.wire import Payload


@torch.no_grad()
def all_features(client: Client, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The features of all training examples in eval mode, and their labels. (n, d), (n,)"""
    model.eval()
    examples = client.examples()
    parts = [anatomy.features(model, examples.x[i : i + SLICE]).flatten(1) for i in range(0, client.n, SLICE)]
    return torch.cat(parts) if parts else torch.zeros(0, anatomy.width(model)), examples.y


def class_means(client: Client, model: nn.Module) -> Payload:
    """The mean features of the classes that a client has, and how many samples each has."""
    z, y = all_features(client, model)
    present = torch.unique(y).tolist()
    means = Tensors({f"{label}": z[y == label].mean(0) for label in present})
    return {"means": means, "counts": Tensors({f"{label}": (y == label).sum().float() for label in present})}


def merged(before: Tensors | None, replies: Iterable[Payload], by_samples: bool = True) -> Tensors:
    """The prototypes of all classes: for each the mean over the clients that have it, else what it was before.

    A class of which a client claims a number of samples that is not above zero and finite is left out.
    """
    folds: dict[str, Mean] = {}
    for reply in replies:
        means, counts = reply["means"], reply["counts"]
        assert isinstance(means, Tensors)
        assert isinstance(counts, Tensors)
        for label, mean in means.items():
            count = float(counts[label])
            if 0 < count < math.inf:
                folds.setdefault(label, Mean()).add(mean, count if by_samples else 1.0)
    return Tensors({**(before or {}), **{label: fold.value() for label, fold in folds.items()}})  # type: ignore[misc]


class Prototypes:
    """Prototypes as a table; a class may have none."""

    def __init__(self, known: Mapping[str, Tensor], classes: int):
        width = len(next(iter(known.values())))
        self.table = torch.stack([known.get(f"{y}", torch.zeros(width)) for y in range(classes)])
        self.known = torch.tensor([f"{y}" in known for y in range(classes)])

    def distance(self, z: Tensor, y: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """The squared distance of features to their classes' prototypes; nothing for a class that has none."""
        z = z.flatten(1)
        squares = (z - self.table[y]) ** 2 * self.known[y, None]
        return squares.sum() if reduction == "sum" else squares.mean()

    def nearest(self) -> nn.Module:
        """A head without weights: the score of a class is minus the squared distance to its prototype."""
        return _Nearest(torch.where(self.known[:, None], self.table, torch.inf))


class _Nearest(nn.Module):
    def __init__(self, table: Tensor):
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        table: Tensor = self.table  # type: ignore[assignment]
        return -((z.flatten(1)[:, None] - table) ** 2).sum(-1)


def widened(spec: Spec, width: int) -> nn.Module:
    """The base model, with a linear layer to so many features before its head where a width is given."""
    model = spec.base()
    if not width:
        return model
    name, head = anatomy.linear_head(model, "A width")
    layer = spec.add("width", lambda: nn.Linear(head.in_features, width))
    last = spec.add("head", lambda: nn.Linear(width, head.out_features, head.bias is not None))
    model.set_submodule(name, nn.Sequential(layer, nn.ReLU(), last))
    return anatomy.set_head(model, f"{name}.2")
