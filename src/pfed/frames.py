"""Results as pandas frames: one row per thing, columns under the names that the record has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pfed import compat
from pfed.engines.base import POOLED
from pfed.errors import unknown

if TYPE_CHECKING:
    import pandas as pd

    from pfed.result import Comparison, Result

Row = dict[str, Any]


def frame(comparison: Comparison, kind: str, several: bool = True) -> pd.DataFrame:
    """Rows of one kind of all runs; where there are several, each begins with run, method and seed."""
    if kind not in KINDS:
        raise unknown("kind of frame", kind, KINDS)
    pandas = compat.optional("pandas", "notebook")
    rows: list[Row] = []
    for result in comparison.results:
        of: Row = {"run": result.run, "method": comparison.label(result), "seed": result.seed} if several else {}
        rows += [{**of, **row} for row in KINDS[kind](comparison, result)]
    return pandas.DataFrame(rows)


def _clients(comparison: Comparison, result: Result) -> list[Row]:
    rows = [{key: value for key, value in row.items() if key != "counts"} for row in result.clients]
    gains = comparison.gain(result)
    return rows if gains is None else [{**row, "gain": gains.get(row["client"])} for row in rows]


def _rounds(comparison: Comparison, result: Result) -> list[Row]:
    found: dict[int, Row] = {row["round"]: dict(row) for row in result.rounds}
    for name, series in result.series.items():
        for round, values in series:
            found[round] |= result.summary(name, values)
    return list(found.values())


def _history(comparison: Comparison, result: Result) -> list[Row]:
    names = {row["client"]: row["name"] for row in result.clients}
    found: dict[tuple[int, int], Row] = {}
    for metric, series in result.series.items():
        for round, values in series:
            for client in values.keys() - {POOLED}:
                place: Row = {"round": round, "client": client, "name": names[client]}
                found.setdefault((round, client), place)[metric] = values[client]
    return [found[key] for key in sorted(found)]


def _runs(comparison: Comparison, result: Result) -> list[Row]:
    told = comparison.told(result)
    plain = {key: value for key, value in told.items() if not isinstance(value, (Mapping, list))}
    return [{**plain, "method": comparison.label(result), **told["metrics"]}]


KINDS: dict[str, Callable[[Comparison, Result], list[Row]]] = {
    "clients": _clients,
    "rounds": _rounds,
    "history": _history,
    "runs": _runs,
}
