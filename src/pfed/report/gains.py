"""Does federating help? The gain over training alone of each client, with its interval, and of all together.

The interval is a paired bootstrap over the client's test samples: of each sample it is known whether the run's model
and Local's were right. The mean of a resample depends on how often each difference (+1, 0, -1) is drawn, so it is a
draw of these counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pfed import metrics, streams
from pfed.data.show import distinct
from pfed.report.numbers import by_method
from pfed.result import SCORES, Comparison, Result

DRAWS = 1000  # resamples
LEVEL = 0.95
LEAST = 10  # test samples; of fewer a bootstrap makes too much
AT_ONCE = 500  # clients whose resamples are in memory together

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Gains:
    """The gains of one method, in points of percent, by client; intervals where they are known."""

    values: dict[str, float]
    intervals: dict[str, Interval] = field(default_factory=dict)
    overall: Interval | None = None  # of the mean over clients
    why: str = ""  # there are no intervals
    apart: bool = False  # whether clients that are only numbered stand once for each seed

    def summary(self) -> dict[str, float]:
        """Mean, worst and best decile."""
        return metrics.summarise(dict(enumerate(self.values.values())), dict.fromkeys(range(len(self.values)), 1))

    def counts(self) -> dict[str, int]:
        """Who gains and who loses, and who does so surely: the interval is clear of 0."""
        gains, known = self.values.values(), self.intervals.values()
        return {
            "gain": sum(gain > 0 for gain in gains),
            "surely gain": sum(low > 0 for low, _ in known),
            "lose": sum(gain < 0 for gain in gains),
            "surely lose": sum(high < 0 for _, high in known),
        }


def gains(comparison: Comparison) -> dict[str, Gains]:
    """By method.

    A client that the data name is the same in every run, and its gain the mean over runs; `client-3` is another
    client under every seed.
    """
    found = {}
    for method, runs in by_method(comparison.results).items():
        if runs[0].method == "local":
            continue
        several = len({run.seed for run in runs}) > 1
        values: dict[str, list[float]] = {}
        differences: dict[str, list[Array]] = {}
        reasons: dict[str, None] = {}
        apart = False
        for run in runs:
            gained = comparison.gain(run) or {}
            seen = _differences(run, comparison.alone(run))
            known = {} if isinstance(seen, str) else seen
            if gained and isinstance(seen, str):
                reasons[seen] = None
            for row, name in zip(run.clients, distinct([row["name"] for row in run.clients]), strict=True):
                client = row["client"]
                if client not in gained:
                    continue
                if several and re.fullmatch(r"client-\d+", name):
                    name, apart = f"{name}, seed {run.seed}", True
                values.setdefault(name, []).append(100 * gained[client])
                if client in known:
                    differences.setdefault(name, []).append(known[client])
        if values:
            mean = {name: float(np.mean(given)) for name, given in values.items()}
            intervals = _intervals(mean, {} if reasons else differences)
            found[method] = Gains(mean, *intervals, " ".join(reasons), apart)
    return found


def span(found: Mapping[str, Gains]) -> Interval:
    """From the least to the most of all methods and intervals, with 0: one scale for all charts."""
    values = [value for each in found.values() for value in each.values.values()]
    values += [bound for each in found.values() for interval in each.intervals.values() for bound in interval]
    return min(0.0, *values), max(0.0, *values)


def _differences(run: Result, local: Result | None) -> dict[int, Array] | str:
    """For each client and test sample: 1 if only the run's model was right, -1 if only Local's; or why that is unknown.

    Which samples were right is known of the last evaluation alone; where another round is reported, that is no answer.
    """
    if run.score != SCORES["classification"]:
        return f"No intervals: {run.score} is no mean over test images."
    if local is None or not (run.correct and local.correct):
        return "No intervals: it is not known which test samples were right."
    found = {}
    for client, value in run.values.items():
        if client not in local.values:
            continue
        bits = [np.frombuffer(each.correct.get(client, b""), dtype=np.int8) for each in (run, local)]
        if not len(bits[0]) == len(bits[1]) > 0:
            return "No intervals: the runs were not judged on the same test samples."
        reported = value, local.values[client]
        if not np.allclose([own.mean() for own in bits], reported, rtol=0, atol=1e-6):
            return (
                "No intervals: the reported round is not the last one, and which test samples were right is known "
                "of the last one only."
            )
        found[client] = bits[0] - bits[1]
    return found


def _intervals(
    means: Mapping[str, float], differences: Mapping[str, Sequence[Array]]
) -> tuple[dict[str, Interval], Interval | None]:
    """Of each client with enough samples, and of the mean over all clients where every one of them has enough.

    Under several seeds a sample's difference is the mean over them.
    """
    alike = {name: given for name, given in differences.items() if len({len(d) for d in given}) == 1}
    sums = {name: np.sum(given, axis=0, dtype=np.int64) for name, given in alike.items() if len(given[0]) >= LEAST}
    if not sums:
        return {}, None
    runs = np.array([len(alike[name]) for name in sums])
    most = int(runs.max())
    counts = np.stack([np.bincount(d + most, minlength=2 * most + 1) for d in sums.values()])  # (clients, values)
    low, high, total = bootstrap(counts, np.arange(-most, most + 1), 100 / runs)
    overall = _bounds(total / len(sums)) if len(sums) == len(means) else None
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    return dict(zip(sums, pairs, strict=True)), overall


def bootstrap(counts: Array, values: Array, scale: Array, draws: int = DRAWS) -> tuple[Array, Array, Array]:
    """Bounds of each row's mean of `values`, seen `counts` times, times its scale; and the draws' sums over rows."""
    rng = streams.rng(0, "paired bootstrap")
    total = np.zeros(draws)
    bounds = []
    for i in range(0, len(counts), AT_ONCE):
        some = counts[i : i + AT_ONCE]
        n = some.sum(1, keepdims=True)
        drawn = rng.multinomial(n, (some / n)[:, None, :], size=(len(some), draws))  # (clients, draws, values)
        means = drawn @ values / n * scale[i : i + AT_ONCE, None]
        bounds.append(_bounds(means))
        total += means.sum(0)
    low, high = np.concatenate(bounds, axis=1)
    return low, high, total


def _bounds(draws: Array) -> Any:
    return np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=-1)
