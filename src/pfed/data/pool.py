"""From labelled samples of any origin to a `Federation` or a `Dataset`: class indices and test sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfed.data.base import ClientData, Dataset, Federation, Samples
from pfed.errors import UserError

Classes = Sequence[object] | int | None  # names, how many, or whatever labels occur


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of all clients in one place, each with its label, its owner and its split."""

    x: Tensor  # (n, ...) uint8 or float32
    labels: NDArray[np.str_]  # (n,) as texts: whole numbers and names are treated alike
    test: NDArray[np.bool_]  # (n,) given as test data
    owner: NDArray[np.int64]  # (n,) position in `clients`
    clients: tuple[str, ...] = ()  # none: the samples are not divided among clients
    notes: tuple[str, ...] = ()


def class_indices(labels: NDArray[np.str_], classes: Classes) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as positions in the list of classes, and that list.

    Without `classes` it is every label that occurs, in numerical order where all are numbers. With it, a label is
    one of its names or, where no label is, a position in it.
    """
    found, inverse = np.unique(labels, return_inverse=True)
    if classes is None:
        classes = _in_order(found.tolist())
    names = tuple(str(name) for name in (range(classes) if isinstance(classes, int) else classes))
    if len(set(names)) != len(names):
        raise UserError(f"The names of classes must differ. Got {', '.join(names)}.")
    if len(names) < 2:
        raise UserError(f"Classification needs at least two classes. Got {', '.join(names) or 'none'}.")
    position = {name: index for index, name in enumerate(names)}
    if position.keys().isdisjoint(found.tolist()):
        position = {str(index): index for index in range(len(names))}
    strange = [label for label in found.tolist() if label not in position]
    if strange:
        raise UserError(f"Every label must be one of the classes {', '.join(names)}. Got {strange[0]!r}.")
    y = np.array([position[label] for label in found.tolist()], np.int64)[inverse.reshape(-1)]
    return torch.from_numpy(y), names


def _in_order(labels: list[str]) -> list[str]:
    try:
        return sorted(labels, key=lambda label: (float(label), label))
    except ValueError:
        return sorted(labels)


def stratified(y: NDArray[np.int64], fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which samples to test on: about `fraction` of each class, but never the last sample of a class."""
    _, inverse, counts = np.unique(y, return_inverse=True, return_counts=True)
    quota = fraction * counts
    take = np.floor(quota).astype(np.int64)
    total = min(max(1, round(fraction * len(y))), len(y) - len(counts))
    order = np.lexsort((rng.random(len(counts)), take - quota))  # largest remainder first, ties at random
    while take.sum() < total:
        for index in order:
            if take[index] < counts[index] - 1 and take.sum() < total:
                take[index] += 1
    shuffled = np.lexsort((rng.random(len(y)), inverse))  # class by class, at random within each
    rank = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    test = np.zeros(len(y), np.bool_)
    test[shuffled] = rank < np.repeat(take, counts)
    return test


def to_federation(pool: Pool, classes: Classes, test_fraction: float, seed: int, source: str) -> Federation:
    """Each client with its own samples; who has no test data gives some of its samples for that."""
    if not 0 < test_fraction < 1:
        raise UserError(f"test_fraction must be > 0 and < 1. Got {test_fraction}.")
    if seed < 0:
        raise UserError(f"seed must be >= 0. Got {seed}.")
    y, names = class_indices(pool.labels, classes)
    # One sort instead of a search per client: there may be many thousands.
    by_owner = np.argsort(pool.owner, kind="stable")
    owned = np.split(by_owner, np.cumsum(np.bincount(pool.owner, minlength=len(pool.clients)))[:-1])
    everything = Samples(pool.x, y, torch.arange(len(y)))
    test, clients, divided = pool.test.copy(), [], 0
    for index, name in enumerate(pool.clients):
        rows = owned[index]
        if pool.test[rows].all():
            raise UserError(f"Client {name!r} must hold at least one training sample. Got none.")
        if not pool.test[rows].any():
            test[rows] = held_out_rows(y[rows], test_fraction, seed, index)
            divided += 1
        train, held_out = (everything.part(torch.from_numpy(rows[mask])) for mask in (~test[rows], test[rows]))
        clients.append(ClientData(name, train, held_out))
    notes = (*pool.notes, *_notes(clients, divided, test_fraction, seed))
    union = everything.part(torch.from_numpy(np.flatnonzero(test)))
    return Federation(tuple(clients), names, test=union, source=source, notes=notes)


def to_client(
    pool: Pool, classes: Classes, test_fraction: float, seed: int, index: int, name: str
) -> tuple[ClientData, tuple[str, ...]]:
    """What one client holds, divided as it is where it is number `index` of a federation; and its classes."""
    y, names = class_indices(pool.labels, classes)
    if pool.test.all():
        raise UserError(f"{name} must hold at least one training sample. Got none.")
    test = pool.test if pool.test.any() else held_out_rows(y, test_fraction, seed, index)
    everything = Samples(pool.x, y, torch.arange(len(y)))
    train, held_out = (everything.part(torch.from_numpy(np.flatnonzero(mask))) for mask in (~test, test))
    return ClientData(name, train, held_out), names


def held_out_rows(y: Tensor, test_fraction: float, seed: int, index: int) -> NDArray[np.bool_]:
    """Which of a client's samples become its test data."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
    return stratified(y.numpy(), test_fraction, rng)


def _notes(clients: Sequence[ClientData], divided: int, test_fraction: float, seed: int) -> list[str]:
    notes = []
    if divided:
        share = f"{test_fraction:.0%} of their samples were set apart with seed {seed}"
        notes.append(f"{divided} of {len(clients)} clients came without test data: {share}.")
    without = [client.name for client in clients if not len(client.test)]
    if without:
        notes.append(f"{len(without)} of {len(clients)} clients have too few samples to test on, such as {without[0]}.")
    return notes


def to_dataset(pool: Pool, classes: Classes, name: str) -> Dataset:
    """Samples to be divided among clients, with their owners as groups and their official split if they have these."""
    y, names = class_indices(pool.labels, classes)
    if pool.test.all():
        raise UserError(f"{name} must hold at least one training sample. Got none.")
    groups = torch.from_numpy(pool.owner) if pool.clients else None
    dataset = Dataset(name, pool.x, y, names, groups=groups, group_names=pool.clients)
    if not pool.test.any():
        return dataset
    train, test = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~pool.test, pool.test))
    return replace(dataset, train=train, test=test)
