"""What data look like inside pfed: samples of one pool, a client's splits, a federation of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Counts = Sequence[Sequence[int]]  # (clients, classes)


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled samples: some rows of a pool that many clients share, so that a part is never a copy.

    Images in uint8 are scaled to [0, 1] when taken; `mean` and `std` (per channel) normalise after that.
    """

    x: Tensor  # (pool, ...) uint8 or float32
    y: Tensor  # (pool,) int64
    rows: Tensor  # (n,) int64
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    boxes: Tensor | None = None  # (pool, most, 6): what is to be found in an image, in place of its label

    @classmethod
    def of(cls, x: Any, y: Any) -> Samples:
        """All rows of two arrays (NumPy or torch)."""
        x, y = torch.as_tensor(x), torch.as_tensor(y).long()
        x = x if x.dtype == torch.uint8 else x.float()
        return cls(x, y, torch.arange(len(y)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def labels(self) -> Tensor:
        return self.y[self.rows]  # (n,)

    def take(self, index: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs as float32, and labels or boxes, of the given positions in this part."""
        rows = self.rows[index]
        x = self.x[rows]
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        if self.mean:
            view = (1, -1) + (1,) * (x.dim() - 2)
            x = (x - x.new_tensor(self.mean).view(view)) / x.new_tensor(self.std).view(view)
        return x, self.y[rows] if self.boxes is None else self.boxes[rows]

    def part(self, index: Tensor | Sequence[int]) -> Samples:
        """The samples at these positions."""
        return replace(self, rows=self.rows[torch.as_tensor(index, dtype=torch.int64)])

    def counts(self, classes: int) -> Tensor:
        """How many samples, or boxes, of each class. (classes,)"""
        labels = self.labels
        if self.boxes is not None:
            labels = self.boxes[self.rows][..., 0].flatten().long()
            labels = labels[labels >= 0]
        return labels.new_zeros(classes).index_add_(0, labels, torch.ones_like(labels))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set before it is divided: one pool, its official split if it has one, and natural groups."""

    name: str
    x: Tensor  # (pool, ...) uint8 or float32
    y: Tensor  # (pool,) int64
    classes: tuple[str, ...]
    train: Tensor | None = None  # rows of the official training set; None: no official split
    test: Tensor | None = None
    groups: Tensor | None = None  # (pool,) int64: the domain, writer or hospital of each sample
    group_names: tuple[str, ...] = ()
    domains: bool = False  # the groups are domains: partition auto makes each a client
    boxes: Tensor | None = None  # (pool, most, 6) float32: class, x1, y1, x2, y2, difficult; class -1: no box
    group_classes: tuple[tuple[str, ...], ...] = ()  # of each group, where they differ: what its boxes' classes mean
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()  # what must be said wherever figures on it stand


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds."""

    name: str
    train: Samples
    test: Samples
    validation: Samples | None = None
    classes: tuple[str, ...] = ()  # its own, where they are not the federation's


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of all clients, and what lies beside them."""

    clients: tuple[ClientData, ...]
    classes: tuple[str, ...]
    test: Samples  # the whole test set, for tests in which a sample's owner is unknown
    public: Samples | None = None  # a common labelled set, taken out of training unless public_in_train
    external: Samples | None = None  # a domain that no client has
    source: str = "own data"
    notes: tuple[str, ...] = field(default=())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.clients[0].train.shape


def class_counts(federation: Federation, client: ClientData) -> list[int]:
    """A client's training samples, or boxes, of each class of the federation."""
    if not client.classes:
        return [int(count) for count in client.train.counts(len(federation.classes))]
    own = dict(zip(client.classes, client.train.counts(len(client.classes)).tolist(), strict=True))
    return [own.get(name, 0) for name in federation.classes]


def pooled(federation: Federation) -> ClientData:
    """All clients' data as one client's, what several of them hold only once: for central training in a simulation."""
    return ClientData(
        "all clients",
        _distinct(union([client.train for client in federation.clients])),
        _distinct(union([client.test for client in federation.clients])),
    )


def _distinct(samples: Samples) -> Samples:
    rows: Tensor = samples.rows.unique()  # type: ignore[no-untyped-call]
    return samples if len(rows) == len(samples) else replace(samples, rows=rows)


def union(parts: Sequence[Samples]) -> Samples:
    """Several parts as one; a copy only where they do not share a pool."""
    first = parts[0]
    if all(part.x is first.x and part.y is first.y and part.boxes is first.boxes for part in parts):
        return replace(first, rows=torch.cat([part.rows for part in parts]))
    x = torch.cat([part.x[part.rows] for part in parts])
    y = torch.cat([part.labels for part in parts])
    boxes = None if first.boxes is None else torch.cat([part.boxes[part.rows] for part in parts])  # type: ignore[index]
    return replace(first, x=x, y=y, boxes=boxes, rows=torch.arange(len(y)))


def skew(counts: Counts) -> tuple[float, float]:
    """Label skew and size variation.

    Label skew is the mean over clients of the total-variation distance, half of sum_c |p_k(c) - p(c)|, between the
    client's class distribution p_k and that of all samples together. Size variation is the standard deviation of the
    clients' sizes divided by their mean. Clients without samples have no class distribution.

    >>> skew([[10, 0], [0, 10]])
    (0.5, 0.0)
    """
    table = np.asarray(counts, dtype=np.float64)
    sizes = table.sum(-1)
    if not sizes.sum():
        return 0.0, 0.0
    held = table[sizes > 0]
    distances = np.abs(held / held.sum(1, keepdims=True) - table.sum(0) / table.sum()).sum(1) / 2
    return float(distances.mean()), float(sizes.std() / sizes.mean())
