"""What the report shows, as plain numbers: runs in groups that can be compared, curves, gains, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean as mean
from typing import Any

from pfed.config import SplitOptions
from pfed.engines.base import POOLED
from pfed.report.figures import Row
from pfed.result import MAIN, Comparison, Result, thinned

SPLIT = {field.name: field.default for field in fields(SplitOptions)}
POINTS = 200  # of a curve, more can't be told apart


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs on the same data, divided in the same way, under a name that says both."""
    found: dict[str, list[Result]] = {}
    for result in results:
        config = result.config
        special = [
            f"{name} {config[name]}"
            for name in SPLIT
            if name != "clients" and config.get(name, SPLIT[name]) != SPLIT[name]
        ]
        name = ", ".join([str(config.get("data", "unknown data")), f"{len(result.clients):,} clients", *special])
        found.setdefault(name, []).append(result)
    return found


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs by method, and by its options where some of these runs differ in them, as in the table."""
    comparison = Comparison(results)
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(comparison.label(result), []).append(result)
    return found


def methods(results: Sequence[Result]) -> list[str]:
    """What `by_method` calls the runs of all groups."""
    return list(dict.fromkeys(label for group in groups(results).values() for label in by_method(group)))


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested options under dotted names.

    >>> flat({"rounds": 3, "local": {"lr": 0.1}})
    {'rounds': 3, 'local.lr': 0.1}
    """
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return out


def options(results: Sequence[Result]) -> dict[str, list[str]]:
    """Every option of these runs, with its values."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, value in flat(result.config).items():
            values = found.setdefault(name, [])
            if str(value) not in values:
                values.append(str(value))
    return found


def curves(results: Sequence[Result]) -> list[Row]:
    """Accuracy by round, mean over clients; mean, least and largest over the runs of a method."""
    rows = []
    for method, runs in by_method(results).items():
        rounds: dict[int, list[tuple[float, float]]] = {}
        for run in runs:
            sent = _sent(run)
            for round, values in run.series.get(MAIN, []):
                rounds.setdefault(round, []).append((mean(values.values()), sent.get(round, 0.0)))
        for round in sorted(rounds):
            accuracies = [100 * accuracy for accuracy, _ in rounds[round]]
            row = {"method": method, "round": round, "bytes": mean(sent for _, sent in rounds[round])}
            rows.append({**row, "mean": mean(accuracies), "low": min(accuracies), "high": max(accuracies)})
    return rows


def thin(rows: Sequence[Row]) -> list[Row]:
    """Of each method so many points as a curve needs."""
    found: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(row["method"], []).append(place)
    return [rows[place] for places in found.values() for place in thinned(places, POINTS)]


def reached(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By method the rounds in which its mean score was higher than ever before: the cost of any target."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        points = found.setdefault(row["method"], [])
        if not points or row["mean"] > points[-1]["mean"]:
            points.append(row)
    return {method: [points[i] for i in thinned(range(len(points)), POINTS)] for method, points in found.items()}


def cost(points: Sequence[Row], target: float) -> Row | None:
    """The first of these points that reaches the target; None: it is not reached."""
    return next((row for row in points if row["mean"] >= target), None)


def targets(found: Mapping[str, Sequence[Row]]) -> list[int]:
    """A few whole percents to look at: what the worst, the middle and the best method reach."""
    best = sorted(math.floor(points[-1]["mean"]) for points in found.values())
    return sorted({best[0], best[len(best) // 2], best[-1]})


def _sent(result: Result) -> dict[int, float]:
    """Bytes up and down per client until the end of each round."""
    total, found = 0, {}
    for row in result.rounds:
        total += row["bytes_up"] + row["bytes_down"]
        found[row["round"]] = total / max(1, len(result.clients))
    return found


def traffic(results: Sequence[Result]) -> list[Row]:
    """Bytes up and down of all clients by round, mean over the runs of a method."""
    rows = []
    for method, runs in by_method(results).items():
        rounds: dict[int, list[Mapping[str, Any]]] = {}
        for row in (row for run in runs for row in run.rounds):
            rounds.setdefault(row["round"], []).append(row)
        for round in thinned(sorted(rounds), POINTS):
            sums = {name: mean(row[f"bytes_{name}"] for row in rounds[round]) for name in ("up", "down")}
            if round or any(sums.values()):  # few methods send anything at the start
                rows.append({"method": method, "round": round, **sums})
    return rows


def gini(sizes: Sequence[int]) -> float:
    """How unevenly samples are spread over clients: 0, all have as many; towards 1, one has them all.

    >>> gini([1, 3])
    0.25
    """
    ranked, total = sorted(sizes), sum(sizes)
    if not total:
        return 0.0
    weighed = sum((2 * rank - len(ranked) + 1) * size for rank, size in enumerate(ranked))
    return weighed / (len(ranked) * total)


def events(results: Sequence[Result]) -> list[Row]:
    """Failures and notes, those of one kind and text together: first those of clients, and the frequent ones."""
    found: dict[tuple[str, str], Row] = {}
    for result in results:
        names = {row["client"]: row["name"] for row in result.clients}
        for event in result.events:
            empty: Row = {"times": 0, "rounds": set(), "clients": set(), "runs": set()}
            row = found.setdefault((event["kind"], event["text"]), empty)
            row["times"] += 1
            row["rounds"].add(event["round"])
            row["runs"].add(result.run)
            if event["client"] != POOLED:
                row["clients"].add(names.get(event["client"], str(event["client"])))
    rows = [{"kind": kind, "text": text, **row} for (kind, text), row in found.items()]
    return sorted(rows, key=lambda row: (not row["clients"], -row["times"]))
