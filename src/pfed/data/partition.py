"""How training and test samples are divided among clients: pure functions of labels (or groups) and a seed.

Each rule returns `Parts`: row numbers into the training labels and into the test labels, one array per client. Each
checks what it promises before it returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pfed import streams
from pfed.errors import UserError

Rows = NDArray[np.int64]

FEW_TESTS = 100  # below this many test samples per client, clients of partition classes share them
ATTEMPTS = 1000  # Dirichlet draws before giving up on min_size


@dataclass(frozen=True, eq=False)
class Parts:
    """Which rows each client trains on and is tested on, and what a reader of the results should know."""

    train: list[Rows]
    test: list[Rows]
    notes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()  # the group of each client, where clients are groups


def classes(train: Rows, test: Rows, clients: int, per_client: int, seed: int, *, distinct: bool = False) -> Parts:
    """`per_client` shards for each client, each of one class (LG-FedAvg, FedRep).

    With C classes, each is cut into q = per_client * clients / C shards in data-set order. The list of all classes,
    each q times, is shuffled and dealt out as rows of a table: row k names the classes of client k. A row may name a
    class twice, unless `distinct`. Test samples follow the same table, so that they match.
    """
    labels = np.unique(train)
    shards = _shards_per_class(len(labels), clients, per_client)
    smallest = int(np.bincount(train)[labels].min())
    if shards > smallest:
        step = len(labels) // math.gcd(len(labels), per_client)
        fit = smallest * len(labels) // per_client // step * step
        raise UserError(
            f"Partition classes cuts each class into {shards} shards (classes_per_client * clients / classes), but the "
            f"smallest class has {smallest} training samples; {fit or 'no'} clients would fit."
        )
    generator = streams.rng(seed, "partition", "classes")
    if distinct:
        table = _distinct_rows(len(labels), clients, per_client, generator)
    else:
        table = generator.permutation(np.repeat(np.arange(len(labels)), shards)).reshape(clients, per_client)
    table = labels[table]  # (clients, per_client)
    notes = []
    single = sum(len(set(row)) == 1 for row in table.tolist())
    if single and len(labels) > 1:
        notes.append(f"{single} of {clients} clients hold one class only, which is trivially right for them")
    train_rows = _deal_shards(train, table, shards, generator)
    if len(test) < FEW_TESTS * clients:
        test_rows = [np.flatnonzero(np.isin(test, row)) for row in table]
        notes.append(f"test samples are shared: fewer than {FEW_TESTS} per client, so each has all of its classes")
    else:
        test_rows = _deal_shards(test, table, shards, generator)
    parts = Parts(train_rows, test_rows, tuple(notes))
    _check_deal("classes", parts, train, clients)
    _check_classes(parts, train, test, table, shards)
    return parts


def _shards_per_class(n_classes: int, clients: int, per_client: int) -> int:
    """q, or the error that names the nearest options for which q is a whole number."""
    if per_client > n_classes:
        raise UserError(f"classes_per_client must be <= {n_classes}, the number of classes. Got {per_client}.")
    if per_client * clients % n_classes == 0:
        return per_client * clients // n_classes
    s_step = n_classes // math.gcd(n_classes, clients)
    n_step = n_classes // math.gcd(n_classes, per_client)
    near_s = min(range(s_step, n_classes + 1, s_step), key=lambda s: abs(s - per_client))
    near_n = min(range(n_step, clients + n_step + 1, n_step), key=lambda n: abs(n - clients))
    raise UserError(
        f"classes_per_client * clients must be a multiple of the number of classes ({n_classes}). Got {per_client} * "
        f"{clients}; classes_per_client {near_s} or clients {near_n} would work."
    )


def _distinct_rows(n_classes: int, clients: int, per_client: int, generator: np.random.Generator) -> Rows:
    """A random table whose rows repeat no class and whose columns together hold each class equally often."""
    left = np.full(n_classes, per_client * clients // n_classes)
    table = []
    for rows_left in range(clients, 0, -1):
        must = np.flatnonzero(left == rows_left)  # needed in every row that is left, this one included
        may = np.where(left == rows_left, 0, left)
        more = per_client - len(must)
        drawn = generator.choice(n_classes, more, replace=False, p=may / may.sum()) if more else must[:0]
        table.append(np.concatenate([must, drawn]))
        left[table[-1]] -= 1
    return np.stack(table)


def _deal_shards(labels: Rows, table: Rows, shards: int, generator: np.random.Generator) -> list[Rows]:
    """Give each entry of the table a random shard of its class that nobody has yet."""
    piles = {}
    for c in np.unique(table):
        cut = np.array_split(np.flatnonzero(labels == c), shards)  # the remainder goes one each to the first shards
        piles[int(c)] = [cut[i] for i in generator.permutation(shards)]
    return [np.concatenate([piles[c].pop() for c in row]) for row in table.tolist()]


def dirichlet(
    train: Rows, test: Rows, clients: int, alpha: float, seed: int, *, balance_cap: bool = True, min_size: int = 10
) -> Parts:
    """Class by class, proportions p ~ Dir(alpha) over the clients; client k gets the share p_k of the class.

    With `balance_cap`, p_k = 0 for clients that already hold their fair share (total / clients), and the rest is
    scaled up. Drawn again until every client has `min_size` samples. Test samples follow the same proportions.
    """
    _need_samples(train, clients, min_size)
    generator = streams.rng(seed, "partition", "dirichlet")
    counts = np.bincount(train, minlength=max(train.max(), test.max(initial=0)) + 1)
    best = -1
    for _ in range(ATTEMPTS):
        shares, sizes = _draw_shares(counts, clients, alpha, balance_cap, generator)
        best = max(best, int(sizes.min()))
        if best >= min_size:
            break
    else:
        remedy = f"min_size {best}" if best > 0 else "fewer clients"
        raise UserError(
            f"No draw of Dirichlet(alpha={alpha:g}) over {clients} clients out of {ATTEMPTS} gave each of them "
            f"min_size = {min_size} samples; {remedy} or a larger alpha would work."
        )
    parts = Parts(_by_shares(train, shares, generator), _by_shares(test, shares, generator))
    _check_deal("dirichlet", parts, train, clients, len(test), least=min_size)
    return parts


def _draw_shares(
    counts: Rows, clients: int, alpha: float, cap: bool, generator: np.random.Generator
) -> tuple[NDArray[np.float64], Rows]:
    """Shares of each class (classes, clients) and the sizes of the clients that follow from them."""
    sizes = np.zeros(clients, dtype=np.int64)
    shares = np.empty((len(counts), clients))
    for c, count in enumerate(counts):
        p = generator.dirichlet(np.full(clients, alpha))
        if cap:
            has_room = sizes < counts.sum() / clients
            p = p * has_room
            p = p / p.sum() if p.sum() > 0 else has_room / max(1, has_room.sum())
        shares[c] = p
        sizes += np.diff(_cuts(p, count), prepend=0, append=count)
    return shares, sizes


def _cuts(p: NDArray[np.float64], count: int) -> Rows:
    # The small addition keeps a sum that should be exactly 1 from losing a sample to the next client.
    return np.floor(np.cumsum(p)[:-1] * count + 1e-9).astype(np.int64)


def _by_shares(labels: Rows, shares: NDArray[np.float64], generator: np.random.Generator) -> list[Rows]:
    rows: list[list[Rows]] = [[] for _ in range(shares.shape[1])]
    for c, p in enumerate(shares):
        of_class = generator.permutation(np.flatnonzero(labels == c))
        for mine, piece in zip(rows, np.split(of_class, _cuts(p, len(of_class))), strict=True):
            mine.append(piece)
    return [np.concatenate(pieces) for pieces in rows]


def iid(train: Rows, test: Rows, clients: int, seed: int) -> Parts:
    """A class-balanced deal, like cards: sizes, and the counts of each class, differ by at most one."""
    _need_samples(train, clients)
    parts = Parts(
        _deal(train, clients, streams.rng(seed, "partition", "iid", "train")),
        _deal(test, clients, streams.rng(seed, "partition", "iid", "test")),
    )
    _check_deal("iid", parts, train, clients, len(test))
    counts = np.stack([np.bincount(train[rows], minlength=train.max() + 1) for rows in parts.train])
    _require("iid", bool((np.ptp(counts, axis=0) <= 1).all()), "class counts differ by more than one")
    return parts


def _deal(labels: Rows, clients: int, generator: np.random.Generator) -> list[Rows]:
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, shuffled within
    return [order[k::clients] for k in range(clients)]


def concept(train: Rows, test: Rows, clients: int, groups: int, seed: int) -> Parts:
    """The iid deal; client k belongs to group k mod `groups`, whose labels are permuted (see `shift.py`)."""
    if groups > clients:
        raise UserError(f"groups must be <= clients ({clients}). Got {groups}.")
    note = f"labels mean different things in each of {groups} groups of clients"
    return replace(iid(train, test, clients, seed), notes=(note,))


def feature(train: Rows, test: Rows, clients: int, seed: int) -> Parts:
    """The iid deal; each client's images are changed in its own way (see `shift.py`)."""
    return replace(iid(train, test, clients, seed), notes=("each client's images are changed in a way of its own",))


def replicated(train: Rows, test: Rows, clients: int) -> Parts:
    """Every client holds all training samples and is tested on all test samples."""
    notes = ("every client holds all training samples",)
    return Parts([np.arange(len(train))] * clients, [np.arange(len(test))] * clients, notes)


def quantity(train: Rows, test: Rows, clients: int, sigma: float, seed: int) -> Parts:
    """Sizes in proportion to exp(sigma * normal), at least one sample each; every client has the same class mix."""
    _need_samples(train, clients)
    generator = streams.rng(seed, "partition", "quantity")
    weights = generator.lognormal(0.0, sigma, clients)
    parts = Parts(_by_weight(train, weights, generator), _by_weight(test, weights, generator))
    _check_deal("quantity", parts, train, clients, len(test))
    return parts


def _by_weight(labels: Rows, weights: NDArray[np.float64], generator: np.random.Generator) -> list[Rows]:
    return np.split(_interleave(labels, generator), np.cumsum(_apportion(len(labels), weights))[:-1])


def _apportion(total: int, weights: NDArray[np.float64]) -> Rows:
    """Whole numbers with this total, near the weights (largest remainders), each at least 1 if there are enough."""
    least = 1 if total >= len(weights) else 0
    ideal = (total - least * len(weights)) * weights / weights.sum()
    sizes: Rows = np.floor(ideal).astype(np.int64) + least
    largest = np.argsort(sizes - ideal, kind="stable")[: total - sizes.sum()]
    sizes[largest] += 1
    return sizes


def _interleave(labels: Rows, generator: np.random.Generator) -> Rows:
    """A shuffled order in which every stretch has about the class mix of the whole."""
    place = np.empty(len(labels))
    for c in np.unique(labels):
        of_class = generator.permutation(np.flatnonzero(labels == c))
        place[of_class] = (np.arange(len(of_class)) + generator.random()) / len(of_class)
    return np.argsort(place, kind="stable")


MOST_PER_CLASS = {"train": 3600, "test": 400}  # 4,000 images of a letter, 90 % of them for training


def femnist(
    train: Rows, test: Rows, clients: int, seed: int, *, pointer: Literal["wrap", "released"] = "wrap"
) -> Parts:
    """Three neighbouring classes each, of log-normal size: FedRep's resampling of FEMNIST.

    Client u draws n = lognormal(4, 1) + 100 and takes m = max(2, n // 3) samples of each of the classes u, u+1, u+2
    (mod the number of classes): the next slice of that class, a tenth of it for testing. A class that is used up
    starts again (`wrap`); in the released script every client reads from the start (`released`). Test slices come
    from the test set, so clients that overlap still never train on each other's test samples.
    """
    labels = np.unique(train)
    if len(labels) < 3:
        raise UserError(f"Partition femnist gives each client 3 classes, but the data have {len(labels)}.")
    lists = {"train": _class_lists(train, labels, "train"), "test": _class_lists(test, labels, "test")}
    fewest = {kind: min(map(len, rows)) for kind, rows in lists.items()}
    if fewest["train"] < 9 or fewest["test"] < 1:
        raise UserError(
            "Partition femnist needs at least 9 training samples and 1 test sample of each class. "
            f"Got {fewest['train']} and {fewest['test']} of the smallest."
        )
    drawn = (streams.rng(seed, "partition", "femnist").lognormal(4.0, 1.0, clients) + 100) / 3
    fits = min(fewest["train"] * 10 // 9, fewest["test"] * 10)
    scale = min(1.0, fits / drawn.max())  # the largest slice must fit into the smallest class
    slices = np.maximum(2, (drawn * scale + 1e-9).astype(np.int64))
    tests = np.maximum(1, slices // 10)
    takes = {"train": slices - tests, "test": tests}
    rows = {kind: _slices(lists[kind], takes[kind], pointer) for kind in ("train", "test")}
    notes = [] if scale == 1 else [f"sizes scaled by {scale:.2f} to fit the smallest class"]
    repeats = 1 - len(np.unique(np.concatenate(rows["train"]))) / sum(map(len, rows["train"]))
    if repeats > 0:
        notes.append(f"{repeats:.0%} of the training samples are also held by an earlier client")
    parts = Parts(rows["train"], rows["test"], tuple(notes))
    _check_femnist(parts, train, test, labels)
    return parts


def _class_lists(labels: Rows, of: Rows, kind: str) -> list[Rows]:
    return [np.flatnonzero(labels == c)[: MOST_PER_CLASS[kind]] for c in of]


def _slices(lists: list[Rows], takes: Rows, pointer: str) -> list[Rows]:
    start = [0] * len(lists)
    rows = []
    for u, take in enumerate(takes.tolist()):
        mine = []
        for c in ((u + i) % len(lists) for i in range(3)):
            if pointer == "released" or start[c] + take > len(lists[c]):
                start[c] = 0
            mine.append(lists[c][start[c] : start[c] + take])
            start[c] += take
        rows.append(np.concatenate(mine))
    return rows


def domain(train_groups: Rows, test_groups: Rows, clients: int | None = None) -> Parts:
    """One group (domain, hospital) per client: all groups with training data, or the first `clients` of them."""
    found = np.unique(train_groups)
    return _by_group(train_groups, test_groups, found[: _up_to(len(found), clients)])


def natural(train_groups: Rows, test_groups: Rows, seed: int, clients: int | None = None) -> Parts:
    """One group (writer, user) per client: all groups with training data, or a random `clients` of them."""
    found = streams.rng(seed, "partition", "natural").permutation(np.unique(train_groups))
    return _by_group(train_groups, test_groups, np.sort(found[: _up_to(len(found), clients)]))


def _up_to(groups: int, clients: int | None) -> int:
    if clients is not None and clients > groups:
        raise UserError(f"clients must be <= {groups}, the number of groups in the data. Got {clients}.")
    return clients or groups


def _by_group(train: Rows, test: Rows, chosen: Rows) -> Parts:
    parts = Parts(
        [np.flatnonzero(train == g) for g in chosen],
        [np.flatnonzero(test == g) for g in chosen],
        groups=tuple(chosen.tolist()),
    )
    used = np.flatnonzero(np.isin(train, chosen))
    _require("domain", np.array_equal(np.sort(np.concatenate(parts.train)), used), "a sample is lost or doubled")
    return parts


def _need_samples(train: Rows, clients: int, least: int = 1) -> None:
    if clients * least > len(train):
        rule = "one each" if least == 1 else f"min_size = {least} each"
        raise UserError(
            f"{len(train)} training samples are too few for {clients} clients ({rule}); "
            f"{len(train) // least} clients would fit."
        )


def _require(rule: str, holds: bool, what: str) -> None:
    """A promise of a partition; breaking it is a bug of this module, not of the user's."""
    if not holds:
        raise AssertionError(f"partition {rule}: {what}")


def _check_deal(
    rule: str, parts: Parts, train: Rows, clients: int, n_test: int | None = None, *, least: int = 1
) -> None:
    """Each training sample has exactly one client and each client has samples; with `n_test`, test samples too."""
    _require(rule, len(parts.train) == len(parts.test) == clients, "wrong number of clients")
    _require(rule, min(map(len, parts.train)) >= least, f"a client has fewer than {least} samples")
    given = np.sort(np.concatenate(parts.train))
    _require(rule, np.array_equal(given, np.arange(len(train))), "a training sample is lost or doubled")
    if n_test is not None:
        given = np.sort(np.concatenate(parts.test))
        _require(rule, np.array_equal(given, np.arange(n_test)), "a test sample is lost or doubled")


def _check_classes(parts: Parts, train: Rows, test: Rows, table: Rows, shards: int) -> None:
    """Each client holds the classes of its row and no others; its size is that of its shards, up to remainders."""
    counts = np.bincount(train)
    for rows, tested, row in zip(parts.train, parts.test, table, strict=True):
        _require("classes", set(train[rows]) == set(row), "a client's classes differ from its row of the table")
        _require("classes", set(test[tested]) <= set(row), "test classes differ from training classes")
        low, high = (counts[row] // shards).sum(), (-(-counts[row] // shards)).sum()
        _require("classes", bool(low <= len(rows) <= high), "a client's size differs from that of its shards")


def _check_femnist(parts: Parts, train: Rows, test: Rows, labels: Rows) -> None:
    """Client u holds the classes u, u+1, u+2, equally many of each, and is tested on the same."""
    for u, (rows, tested) in enumerate(zip(parts.train, parts.test, strict=True)):
        want = sorted(labels[[(u + i) % len(labels) for i in range(3)]])
        for held in (train[rows], test[tested]):
            found, counts = np.unique(held, return_counts=True)
            _require("femnist", found.tolist() == want, "a client's classes are not its three neighbours")
            _require("femnist", len(set(counts)) == 1, "a client's classes differ in size")
