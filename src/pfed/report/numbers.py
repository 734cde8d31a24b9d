"""What the report shows, as plain numbers: runs in groups that can be compared, curves, gains, events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean as mean
from typing import Any

from pfed.config import SplitOptions
from pfed.data.show import distinct
from pfed.engines.base import POOLED
from pfed.result import MAIN, Comparison, Result

SPLIT = {field.name: field.default for field in fields(SplitOptions)}
POINTS = 200  # of a curve, more can't be told apart

Row = dict[str, Any]


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
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(str(result.method), []).append(result)
    return found


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
        for round in _thinned(sorted(rounds)):
            accuracies = [100 * accuracy for accuracy, _ in rounds[round]]
            row = {"method": method, "round": round, "bytes": mean(sent for _, sent in rounds[round])}
            rows.append({**row, "mean": mean(accuracies), "low": min(accuracies), "high": max(accuracies)})
    return rows


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
        for round in _thinned(sorted(rounds)):
            sums = {name: mean(row[f"bytes_{name}"] for row in rounds[round]) for name in ("up", "down")}
            if round or any(sums.values()):  # few methods send anything at the start
                rows.append({"method": method, "round": round, **sums})
    return rows


def _thinned(rounds: Sequence[int]) -> list[int]:
    """At most so many rounds as a curve needs, the last among them."""
    stride = -(-len(rounds) // POINTS) or 1
    return list(rounds[::-stride][::-1])


def gains(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Gain over Local in points of percent, by method and client.

    A client that the data name is the same in every run, and its gain the mean over runs; `client-3` is another
    client under every seed.
    """
    found: dict[str, dict[str, float]] = {}
    for method, runs in by_method(comparison.results).items():
        if method == "local":
            continue
        several = len({run.seed for run in runs}) > 1
        values: dict[str, list[float]] = {}
        for run in runs:
            ids, names = [row["client"] for row in run.clients], distinct([row["name"] for row in run.clients])
            named = dict(zip(ids, names, strict=True))
            for client, gain in (comparison.gain(run) or {}).items():
                name = named[client]
                if several and re.fullmatch(r"client-\d+", name):
                    name = f"{name}, seed {run.seed}"
                values.setdefault(name, []).append(100 * gain)
        if values:
            found[method] = {name: mean(gain) for name, gain in values.items()}
    return found


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
