"""Class prototypes: the mean features of a class, at a client or over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from pfed import anatomy
from pfed.client import Client
from pfed.errors import UserError
from pfed.forward import SLICE
from pfed.pool import Spec

Prototypes = Mapping[str, Tensor]  # by class, as a text


@torch.no_grad()
def all_features(client: Client, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The features of all training examples in eval mode, and their labels. (n, d), (n,)"""
    model.eval()
    examples = client.examples()
    parts = [anatomy.features(model, examples.x[i : i + SLICE]).flatten(1) for i in range(0, client.n, SLICE)]
    width = anatomy.features(model, torch.zeros(1, *client.data.train.shape)).flatten(1).shape[1]
    return torch.cat(parts) if parts else torch.zeros(0, width), examples.y


def class_sums(client: Client, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum of the features of each class, and how many samples it has. (classes, d), (classes,)"""
    z, y = all_features(client, model)
    sums = torch.zeros(client.classes, z.shape[1]).index_add_(0, y, z)
    return sums, client.counts.to(z.dtype)


def pull(z: Tensor, y: Tensor, prototypes: Prototypes, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """The squared distance of features to their classes' prototypes; nothing for a class that has none."""
    z = z.flatten(1)
    known = torch.tensor([f"{label}" in prototypes for label in y.tolist()])
    if not known.any():
        return z.sum() * 0.0
    targets = torch.stack([prototypes[f"{label}"] for label in y[known].tolist()])
    squares = (z[known] - targets) ** 2
    return squares.sum() if reduction == "sum" else squares.sum() / (len(y) * z.shape[1])


class Nearest(nn.Module):
    """A head without weights: the score of a class is minus the squared distance to its prototype."""

    def __init__(self, prototypes: Prototypes, classes: int):
        super().__init__()
        width = len(next(iter(prototypes.values())))
        table = torch.stack([prototypes.get(f"{y}", torch.full((width,), torch.inf)) for y in range(classes)])
        self.register_buffer("table", table, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        table: Tensor = self.table  # type: ignore[assignment]
        return -((z.flatten(1)[:, None] - table) ** 2).sum(-1)


def widened(spec: Spec, width: int) -> nn.Module:
    """The base model, with a linear layer to so many features before its head where a width is given."""
    model = spec.base()
    if not width:
        return model
    name = anatomy.head_name(model)
    head = model.get_submodule(name)
    if not isinstance(head, nn.Linear) or head is model:
        raise UserError(f"A width needs an encoder with a linear head. Got {type(head).__name__} as the head.")
    layer = spec.add("width", lambda: nn.Linear(head.in_features, width))
    last = spec.add("head", lambda: nn.Linear(width, head.out_features, head.bias is not None))
    model.set_submodule(name, nn.Sequential(layer, nn.ReLU(), last))
    return anatomy.set_head(model, f"{name}.2")
