"""From a data set and the options of a split to a federation: every client with its own data."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfed import streams
from pfed.config import SplitOptions
from pfed.data import partition, shift
from pfed.data.base import ClientData, Dataset, Federation, Samples, class_counts, skew
from pfed.data.partition import Parts, Rows
from pfed.errors import UserError
from pfed.options import validate

DEFAULTS = {field.name: field.default for field in fields(SplitOptions)}

# Options that only one partition reads: with any other partition they would be silently without effect.
OWNER = {
    "classes_per_client": "classes",
    "distinct_classes": "classes",
    "alpha": "dirichlet",
    "balance_cap": "dirichlet",
    "min_size": "dirichlet",
    "sigma": "quantity",
    "femnist_pointer": "femnist",
    "groups": "concept",
    "shift": "feature",
}

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and spread of its red, green and blue


def federate(dataset: Dataset, options: SplitOptions, seed: int) -> Federation:
    """Divide a data set among clients.

    In this order: the official test set, or a stratified share; the public set, a stratified share of the training
    data, taken out of them unless `public_in_train`; the partition, of which each client keeps at most `train_cap`
    training samples; the shift of pixels or labels; each client's validation data, a stratified share of its own. All
    of it depends on the data, these options and the seed alone, so every method sees the same federation.
    """
    validate(options, "run")
    kind = partition_of(options, dataset.domains)
    if dataset.group_classes and kind not in ("domain", "natural"):
        raise UserError(
            f"The groups of {dataset.name} have classes of their own: only partition domain fits. Got {kind}."
        )
    if dataset.boxes is not None and kind in ("concept", "feature"):
        raise UserError(f"Partition {kind} is for labelled images, and {dataset.name} has boxes.")
    y = _labels(dataset)
    strata = y if dataset.groups is None else dataset.groups.numpy() * len(dataset.classes) + y
    train, test = _split(dataset, strata, options.test_fraction, seed)
    without, public = _carve(train, strata, options.public, streams.rng(seed, "partition", "public"))
    train = train if options.public_in_train else without
    parts = _divide(kind, dataset, train, test, options, seed)
    own = [_capped(train[rows], y, options.train_cap, seed, _owner(kind, k)) for k, rows in enumerate(parts.train)]
    tests = [test[rows] for rows in parts.test]
    pool = _shifted(kind, dataset, [np.concatenate(rows) for rows in zip(own, tests, strict=True)], options, seed)
    whole, external = _beside(kind, dataset, parts, train, test)
    if options.test_split == "global" or (options.test_split == "auto" and kind == "dirichlet"):
        tests = [whole] * len(own)

    def samples(rows: Rows) -> Samples:
        return Samples(*pool, torch.from_numpy(rows), dataset.mean, dataset.std, dataset.boxes)

    clients = []
    for k, rows in enumerate(own):
        generator = streams.rng(seed, "partition", "validation", _owner(kind, k))
        rest, held_out = _carve(rows, y, options.validation, generator)
        validation = samples(held_out) if options.validation else None
        own_classes = () if dataset.boxes is None else dataset.classes
        if dataset.group_classes:
            own_classes = dataset.group_classes[parts.groups[k]]
        clients.append(ClientData(_name(dataset, parts, k), samples(rest), samples(tests[k]), validation, own_classes))
    common = replace(samples(public), x=dataset.x, y=dataset.y)  # a shift is its owners' alone
    return Federation(
        clients=tuple(clients),
        classes=dataset.classes,
        test=samples(whole),
        public=common if options.public else None,
        external=samples(external) if len(external) else None,
        source=dataset.name,
        notes=parts.notes + _notes(dataset, tests, options),
    )


def _owner(kind: str, client: int) -> int:
    """Whose stream draws a client's own splits: with replicated data one client's validation is nobody's training."""
    return 0 if kind == "replicated" else client


def _capped(rows: Rows, y: Rows, cap: int | None, seed: int, client: int) -> Rows:
    """At most so many of a client's training rows, a stratified choice."""
    if cap is None or len(rows) <= cap:
        return rows
    return _carve(rows, y, cap / len(rows), streams.rng(seed, "partition", "cap", client))[1]


def partition_of(options: SplitOptions, domains: bool = False) -> str:
    """The partition that the options ask for, of data with or without domains; options that contradict are an error."""
    kind: str = options.partition
    if kind == "auto":
        usual = "domain" if domains else "iid"
        kind = "classes" if options.classes_per_client else "dirichlet" if options.alpha else usual
    for name, owner in OWNER.items():
        if owner != kind and getattr(options, name) != DEFAULTS[name]:
            raise UserError(
                f"{name} is an option of partition {owner}, but the partition is {kind}; "
                f"leave {name} out or set partition to {owner}."
            )
    if kind == "classes" and options.classes_per_client is None:
        raise UserError("Partition classes needs classes_per_client, for example 2.")
    if kind == "dirichlet" and options.alpha is None:
        raise UserError("Partition dirichlet needs alpha, for example 0.5.")
    if options.public_in_train and not options.public:
        raise UserError("run.public_in_train needs run.public > 0. Got 0.")
    if kind == "concept" and options.test_split == "global":
        raise UserError("Partition concept needs test_split matched: a label means something else to each group.")
    return kind


def _labels(dataset: Dataset) -> Rows:
    y: Rows = dataset.y.numpy()
    if len(y) == 0 or len(dataset.x) != len(y):
        raise UserError(
            f"{dataset.name} needs samples, and a label for each. Got {len(dataset.x)} and {len(y)} labels."
        )
    if y.min() < 0 or y.max() >= len(dataset.classes):
        raise UserError(
            f"Labels of {dataset.name} must lie in 0..{len(dataset.classes) - 1}. Got {y.min()}..{y.max()}."
        )
    return y


def _split(dataset: Dataset, strata: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Training and test rows: the official ones, or a stratified share of every class (and group) for testing."""
    rows = np.arange(len(strata)) if dataset.train is None else dataset.train.numpy()
    if dataset.test is None:
        return _carve(rows, strata, fraction, streams.rng(seed, "partition", "test"))
    test: Rows = dataset.test.numpy()
    return (np.setdiff1d(rows, test) if dataset.train is None else rows), test


def _carve(rows: Rows, strata: Rows, share: float, generator: np.random.Generator) -> tuple[Rows, Rows]:
    """Rows that stay and rows taken out: the nearest number to the share, evenly from every stratum.

    The rows are sorted by stratum, shuffled within, and every (1/share)-th is taken, so that a stratum of m rows gives
    m * share, rounded up or down. Some rows always stay; where there are two or more, some are taken.
    """
    if share == 0 or len(rows) < 2:
        return rows, rows[:0]
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    order = generator.permutation(len(rows))
    order = order[np.argsort(strata[rows[order]], kind="stable")]
    taken = np.zeros(len(rows), dtype=bool)
    taken[order[(np.arange(count) * 2 + 1) * len(rows) // (2 * count)]] = True
    return rows[~taken], rows[taken]


def _divide(kind: str, dataset: Dataset, train: Rows, test: Rows, options: SplitOptions, seed: int) -> Parts:
    if kind in ("domain", "natural"):
        return _divide_by_group(kind, dataset, train, test, options.clients, seed)
    labels = dataset.y.numpy()
    common = (labels[train], labels[test], options.clients)
    if kind == "classes" and options.classes_per_client is not None:
        return partition.classes(*common, options.classes_per_client, seed, distinct=options.distinct_classes)
    if kind == "dirichlet" and options.alpha is not None:
        cap, least = options.balance_cap, options.min_size
        return partition.dirichlet(*common, options.alpha, seed, balance_cap=cap, min_size=least)
    if kind == "replicated":
        return partition.replicated(*common)
    if kind == "quantity":
        return partition.quantity(*common, options.sigma, seed)
    if kind == "femnist":
        return partition.femnist(*common, seed, pointer=options.femnist_pointer)
    if kind == "concept":
        return partition.concept(*common, options.groups, seed)
    if kind == "feature":
        return partition.feature(*common, seed)
    return partition.iid(*common, seed)


def _divide_by_group(kind: str, dataset: Dataset, train: Rows, test: Rows, clients: int, seed: int) -> Parts:
    if dataset.groups is None:
        raise UserError(
            f"Partition {kind} needs to know the group (domain, writer, hospital) of each sample, and {dataset.name} "
            "has none; partition iid works with any data."
        )
    groups: Rows = dataset.groups.numpy()
    cap = None if clients == DEFAULTS["clients"] else clients
    if kind == "domain":
        return partition.domain(groups[train], groups[test], cap)
    return partition.natural(groups[train], groups[test], seed, cap)


def _shifted(kind: str, dataset: Dataset, owned: list[Rows], options: SplitOptions, seed: int) -> tuple[Tensor, Tensor]:
    """The pool as its owners see it. These deals give each row one owner, so one pool serves all clients."""
    x, y = dataset.x, dataset.y
    if kind == "feature":
        x = x.clone()
        for k, rows in enumerate(owned):
            x[rows] = shift.shift_images(x[rows], options.shift, k, len(owned), seed)
    if kind == "concept":
        y = y.clone()
        table = shift.label_permutations(options.groups, len(dataset.classes), seed)
        for k, rows in enumerate(owned):
            y[rows] = shift.permute_labels(y[rows], table[k % options.groups])
    return x, y


def _beside(kind: str, dataset: Dataset, parts: Parts, train: Rows, test: Rows) -> tuple[Rows, Rows]:
    """The whole test set, and external data: where clients are groups, test rows of groups that are not clients.

    Users left out by a cap on their number (partition natural) are no unseen domain: their rows are not used at all.
    """
    if not parts.groups or dataset.groups is None:
        return test, test[:0]
    groups: Rows = dataset.groups.numpy()
    unseen = ~np.isin(groups[test], parts.groups if kind == "domain" else groups[train])
    return test[np.isin(groups[test], parts.groups)], test[unseen]


def _name(dataset: Dataset, parts: Parts, client: int) -> str:
    if not parts.groups:
        return f"client-{client}"
    group = parts.groups[client]
    return dataset.group_names[group] if group < len(dataset.group_names) else f"group-{group}"


def _notes(dataset: Dataset, tests: list[Rows], options: SplitOptions) -> tuple[str, ...]:
    notes = list(dataset.notes)
    if dataset.test is None:
        notes.append(f"no official test set: {options.test_fraction:.0%} of the samples were set apart for testing")
    if options.public_in_train:
        notes.append("the public set is part of the training samples too")
    untested = sum(len(rows) == 0 for rows in tests)
    if untested:
        notes.append(f"{untested} of {len(tests)} clients have no test samples")
    return tuple(notes)


def describe(federation: Federation) -> dict[str, Any]:
    """Sizes, class counts and the measured skew of a federation, as plain numbers."""
    counts = [class_counts(federation, client) for client in federation.clients]
    label_skew, quantity_skew = skew(counts)
    return {
        "source": federation.source,
        "clients": [client.name for client in federation.clients],
        "classes": list(federation.classes),
        "sizes": [sum(row) for row in counts],
        "test_sizes": [len(client.test) for client in federation.clients],
        "validation_sizes": [len(client.validation or ()) for client in federation.clients],
        "class_counts": counts,  # (clients, classes)
        "label_skew": label_skew,
        "quantity_skew": quantity_skew,
        "test": len(federation.test),
        "public": len(federation.public or ()),
        "external": len(federation.external or ()),
        "notes": list(federation.notes),
    }


def normalised(federation: Federation, rule: str) -> Federation:
    """The same data with the pixels normalised in another way; `data` leaves them as they are."""
    if rule == "data":
        return federation
    channels = federation.shape[0] if len(federation.shape) == 3 else 0
    if not channels or (rule == "imagenet" and channels != 3):
        colour = "colour " if rule == "imagenet" else ""
        raise UserError(f"run.normalise {rule!r} needs {colour}images. Got samples of shape {federation.shape}.")
    mean, std = {"none": ((), ()), "half": ((0.5,) * channels,) * 2, "imagenet": IMAGENET}[rule]

    def other(samples: Samples) -> Samples:
        return replace(samples, mean=mean, std=std)

    clients = []
    for client in federation.clients:
        held_out = None if client.validation is None else other(client.validation)
        clients.append(replace(client, train=other(client.train), test=other(client.test), validation=held_out))
    public = None if federation.public is None else other(federation.public)
    external = None if federation.external is None else other(federation.external)
    return replace(federation, clients=tuple(clients), test=other(federation.test), public=public, external=external)


def with_validation(federation: Federation, share: float, seed: int) -> Federation:
    """A federation that came with its clients, with a stratified share of each client's training data held out."""
    clients = []
    for k, client in enumerate(federation.clients):
        rows, generator = client.train.rows.numpy(), streams.rng(seed, "partition", "validation", k)
        rest, held_out = _carve(rows, client.train.y.numpy(), share, generator)
        train = replace(client.train, rows=torch.from_numpy(rest))
        clients.append(replace(client, train=train, validation=replace(train, rows=torch.from_numpy(held_out))))
    return replace(federation, clients=tuple(clients))
