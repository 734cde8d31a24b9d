"""What a table says here: the value of each place over seeds, beside the paper's, and whether it says anything."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfed import costs
from pfed.reproduce.paper import Column, Published, Row, Table

Kept = Mapping[str, Any]  # what is kept of a finished cell
LEAST = 2  # seeds without which there is no spread
MOST = 100  # seeds that anyone would run


@dataclass(frozen=True)
class Place:
    """One place of the table."""

    row: Row
    column: Column
    values: Mapping[int, float | None]  # by seed; None where a target was not reached

    @property
    def paper(self) -> Published | None:
        return self.row.paper.get(self.column.name)

    @property
    def ours(self) -> float | None:
        """The mean over seeds; none if there is no seed, or one has no value."""
        found = list(self.values.values())
        return None if not found or None in found else sum(v for v in found if v is not None) / len(found)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return deviation([v for v in self.values.values() if v is not None])

    @property
    def gap(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours - self.paper.value

    @property
    def unreached(self) -> bool:
        return bool(self.values) and None in self.values.values()


def deviation(values: Sequence[float]) -> float | None:
    """Over seeds, of the sample; None where there are fewer than two."""
    if len(values) < LEAST:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def value(kept: Kept, figure: str) -> float | None:
    """A figure of a finished run, in the unit of its column; None where a target was not reached.

    A KeyError says that the run has none: an external test without external data.
    """
    kind, _, rest = figure.partition(":")
    result = kept["result"]
    if kind == "client":
        rows = result["per_client"]
        row = {key: r for r in rows for key in (str(r["client"]), r["name"])}[rest]
        return 100 * float(row["personal/local-test"])
    if kind == "cost":
        target, _, counting = rest.partition(":")
        at = costs.reached(kept["curve"], float(target))
        if at is None:
            return None
        by_count = counting == "paper" and costs.by_rounds(at, kept["counted"]["cost"])
        return (by_count or costs.sent(kept["curve"], at)) / costs.MIB
    if kind == "bytes":
        if rest == "paper":
            return costs.by_rounds(result["rounds"], kept["counted"]["bytes"]) / costs.MB
        return costs.sent(kept["curve"], kept["curve"][-1][0]) / costs.MB
    return 100 * float(result["metrics"][figure])


@dataclass(frozen=True)
class Verdict:
    """Whether a column counts: Local's gain over chance and Local's distance to FedAvg, against their spreads."""

    column: str
    counts: bool
    text: str
    numbers: Mapping[str, float | None]


def verdict(column: Column, places: Sequence[Place], kept: Mapping[tuple[str, int], Kept]) -> Verdict:
    """`kept` has the finished runs by row and seed."""
    local = next((p for p in places if p.row.method == "local"), None)
    fedavg = next((p for name in ("fedavg", "fedavg+ft") for p in places if p.row.method == name), None)
    named = fedavg.row.name if fedavg else ""
    if local is not None and fedavg is None and (mixed := _mixed(column, places, kept)) is not None:
        local, fedavg = mixed
        named = f"the same models with {fedavg.row.method}, for models of different kinds have no FedAvg"
    if local is None or fedavg is None:
        return Verdict(column.name, False, "is not judged: it takes Local and FedAvg, and the table lacks one.", {})
    seeds = [s for s in local.values if s in fedavg.values]
    if not seeds:
        return Verdict(column.name, False, "is not judged: Local or FedAvg is not run yet.", {})
    chance = {s: kept[local.row.name, s]["chance"] for s in seeds}
    gains = [_number(local.values[s]) - 100 * chance[s] for s in seeds]
    apart = [_number(local.values[s]) - _number(fedavg.values[s]) for s in seeds]
    gain, distance = sum(gains) / len(gains), sum(apart) / len(apart)
    numbers = {
        "seeds": float(len(seeds)),
        "gain": gain,
        "gain spread": deviation(gains),
        "distance": distance,
        "distance spread": deviation(apart),
    }
    said = (
        f"Local is {gain:+.2f} points over chance ({_plus_minus(deviation(gains))}) and {distance:+.2f} points over "
        f"{named} ({_plus_minus(deviation(apart))}), {len(seeds)} seed{'s' * (len(seeds) > 1)}."
    )
    once = {id(one): one["seconds"] for one in kept.values()}  # several rows may share a run
    seconds = sum(once.values()) / len({seed for _, seed in kept})
    need = _need(gain, distance, deviation(gains), deviation(apart), len(seeds), seconds)
    return Verdict(column.name, not need, f"{'is undecided' if need else 'counts'}: {said}{need}", numbers)


def _mixed(column: Column, places: Sequence[Place], kept: Mapping[tuple[str, int], Kept]) -> tuple[Place, Place] | None:
    """Of a table of clients with models of different kinds: Local, and the table's own method with the same models.

    Both over all clients, by the column's figure, where a row shows one client's.
    """

    def models(row: Row) -> str:
        return next((one["settings"].get("model", "") for (name, _), one in kept.items() if name == row.name), "")

    def over_all(row: Row) -> Place:
        return Place(row, column, {s: value(one, column.figure) for (name, s), one in kept.items() if name == row.name})

    rows = [place.row for place in places if "," in models(place.row)]
    local = next((row for row in rows if row.method == "local"), None)
    other = next((row for row in rows if row.method != "local" and local and models(row) == models(local)), None)
    return None if local is None or other is None else (over_all(local), over_all(other))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plus_minus(spread: float | None) -> str:
    return "no spread" if spread is None else f"± {spread:.2f}"


def _need(
    gain: float, distance: float, of_gain: float | None, of_distance: float | None, seeds: int, seconds: float
) -> str:
    """What would decide it, if it is not decided: how many seeds, and their time."""
    if of_gain is None or of_distance is None:
        more = " or ".join(duration((n - seeds) * seconds) for n in (LEAST, LEAST + 1))
        return f" One seed has no spread: {LEAST} or {LEAST + 1} seeds would have one, about {more} more."
    weak = [(q, s) for q, s in ((gain, of_gain), (abs(distance), of_distance)) if q <= s]
    if not weak:
        return ""
    least, spread = min(weak, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)
    if least <= 0:
        return " Local does not learn here: more rounds or more data would have to come first."
    wanted = math.ceil((2 * spread / least) ** 2)
    if wanted > MOST:
        return " The difference is next to nothing: more rounds or more data would have to come first."
    told = " A seed moves it by more than it is, and more seeds alone will not change that."
    if wanted <= seeds:
        return f"{told} It is no noise, though: the mean is more than twice its standard error."
    return (
        f"{told} Whether the mean is noise would be decided by {wanted} seeds, which would bring it to twice its "
        f"standard error, about {duration((wanted - seeds) * seconds)} more."
    )


def duration(seconds: float) -> str:
    """Roughly.

    >>> duration(5400), duration(130)
    ('1.5 h', '2 min')
    """
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"


def leaders(column: Column, places: Sequence[Place]) -> str:
    """Which row is first in the paper and which here, and how far apart they are here."""
    printed = [p for p in places if p.paper is not None]
    ran = [p for p in places if p.ours is not None]
    if len(printed) < 2 or len(ran) < 2 or column.unit != "%":
        return ""
    first = max(printed, key=lambda p: p.paper.value if p.paper else 0.0)
    here = max(ran, key=lambda p: _number(p.ours))
    if first.ours is None:
        return f"First in the paper: {first.row.name}, which is not run here. First here: {here.row.name}."
    if first is here:
        second = max((p for p in ran if p is not here), key=lambda p: _number(p.ours))
        return f"First in the paper and here: {here.row.name}, {_apart(here, second)} over {second.row.name}."
    return f"First in the paper: {first.row.name}. First here: {here.row.name}, {_apart(here, first)} over it."


def _apart(a: Place, b: Place) -> str:
    """The difference of two rows, by seed where they have the same."""
    seeds = [s for s in a.values if s in b.values]
    pairs = [_number(a.values[s]) - _number(b.values[s]) for s in seeds]
    spread = deviation(pairs)
    mean = sum(pairs) / len(pairs) if pairs else _number(a.ours) - _number(b.ours)
    return f"{mean:.2f} points" + ("" if spread is None else f" (± {spread:.2f} over seeds)")


def ranks(numbers: Sequence[float | None], best: Callable[[float, float], float] = max) -> list[int | None]:
    """The place of each, the best first; equal ones share the better place.

    >>> ranks([1.0, 3.0, None, 3.0]), ranks([1.0, 3.0], min)
    ([3, 1, None, 1], [1, 2])
    """

    def better(a: float | None, b: float) -> bool:
        return a is not None and a != b and best(a, b) == a

    return [None if n is None else 1 + sum(better(other, n) for other in numbers) for n in numbers]


def table_of(table: Table, rows: Sequence[Row], kept: Mapping[tuple[str, str, int], Kept]) -> dict[str, list[Place]]:
    """The places by column; `kept` has the finished runs by row, column and seed."""

    def values(row: Row, column: Column) -> dict[int, float | None]:
        found = {}
        for (name, place, seed), one in sorted(kept.items(), key=lambda item: item[0][2]):
            if (name, place) == (row.name, column.name):
                with contextlib.suppress(KeyError):
                    found[seed] = value(one, row.figure.get(column.name, column.figure))
        return found

    columns = table.columns.values()
    return {column.name: [Place(row, column, values(row, column)) for row in rows] for column in columns}
