"""What came out of runs: numbers by name, per client, as tables and as JSON."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pfed import display, frames, metrics, store
from pfed.config import SplitOptions, runs_folder
from pfed.display import Clients
from pfed.engines.base import POOLED
from pfed.record import RECORD, Record
from pfed.tables import bytes_text, percent, table

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

MAIN = "personal/local-test"
SCORES = {"classification": "accuracy", "detection": "AP50"}  # what the main metric is, by task
DOMAINS = 11  # at most so many clients have a column each


class Log(NamedTuple):
    """What was logged under one name: a value for each round and client, -1 for the server."""

    rounds: np.ndarray[Any, Any]
    clients: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


class Result:
    """One run, read from its record."""

    def __init__(self, record: Record, run: str, folder: Path | None = None):
        self.run, self.folder = run, folder
        self.config: dict[str, Any] = record.get("config", {})
        self.method: str = record.get("method")
        self.state: str = record.get("state")
        self.seed: int = record.get("seed")
        self.engine: str = record.get("engine")
        self.versions: dict[str, str] = record.get("versions", {})
        self.classes: list[str] = record.get("classes", [])
        self.feature_skew: float | None = record.get("feature_skew")
        self.crossing: dict[str, Any] = record.get("crossing", {})
        self.rounds = record.rounds()
        self.taken_rounds: int = record.get("taken_rounds", -1)  # up to which another run did them
        self.events = record.events()
        self._logs = record.logs() if folder is None else []
        self.traffic = record.traffic()
        self.correct = record.correct(MAIN)
        names = record.metric_names()
        self.series = {name: record.series(name) for name in names}
        described = record.clients()
        self._sizes = {row["client"]: row["test"] for row in described}
        self.metrics, self._values = self._summary()
        self.clients = self._clients(described)

    @classmethod
    def load(cls, run: str | Path, runs: str | Path | None = None) -> Result:
        """Read a run by its name in the runs folder (PFED_RUNS, or ./runs), or by its own folder."""
        folder = store.find(runs_folder(runs), str(run))
        with contextlib.closing(Record(folder / RECORD, readonly=True)) as record:
            return cls(record, folder.name, folder)

    @property
    def score(self) -> str:
        """What the main metric is called."""
        return SCORES[self.config.get("task", "classification")]

    @property
    def counted(self) -> str:
        """What `counts` of the clients count."""
        return "boxes" if self.config.get("task") == "detection" else "samples"

    @property
    def logs(self) -> list[tuple[int, int, str, float]]:
        """What the method logged: (round, client or -1 for the server, name, value). Of a kept run, read when asked."""
        return self._read_logs()

    def logged(self, most: int) -> dict[str, Log]:
        """The same by name, of at most so many rounds, the last among them."""
        rounds = thinned([row["round"] for row in self.rounds], most)
        found: dict[str, list[tuple[int, int, float]]] = {}
        for round, client, name, value in self._read_logs(rounds):
            found.setdefault(name, []).append((round, client, value))
        return {name: Log(*map(np.array, zip(*rows, strict=True))) for name, rows in sorted(found.items())}

    def _read_logs(self, rounds: Sequence[int] | None = None) -> list[tuple[int, int, str, float]]:
        if self.folder is None:
            return self._logs if rounds is None else [row for row in self._logs if row[0] in set(rounds)]
        with contextlib.closing(Record(self.folder / RECORD, readonly=True)) as record:
            return record.logs(rounds)

    def _summary(self) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
        found: dict[str, float] = {}
        values: dict[str, dict[int, float]] = {}
        for name, series in self.series.items():
            chosen = series[-1][1]
            if set(chosen) != {POOLED}:
                values[name] = chosen = self._select(name)
            found |= self.summary(name, chosen)
        return dict(sorted(found.items())), values

    def summary(self, name: str, values: Mapping[int, float]) -> dict[str, float]:
        """A metric's values in a few numbers by name: the mean under the metric's own."""
        if set(values) == {POOLED}:
            return {name: values[POOLED]}
        summary = metrics.summarise(values, self._sizes)
        found = {name: summary.pop("mean")}
        if name.count("/") == 1:
            found |= {f"{name}/{key}": value for key, value in summary.items()}
        return found

    def _select(self, name: str) -> dict[int, float]:
        """The values that are reported, per client, by the run's rule; never-mixed metrics use the last round."""
        series = self.series[name]
        rule = self.config.get("select", "last")
        if not name.endswith("/local-test"):
            return dict(series[-1][1])
        rounds = [item for item in series if item[0] <= self.config["rounds"]] if rule == "mean_last_10" else series
        validation = self.series.get(name.replace("/local-test", "/validation"))
        return metrics.select(rounds or series, rule, validation)

    def _clients(self, described: Sequence[Mapping[str, Any]]) -> Clients:
        rows = []
        for row in described:
            client = row["client"]
            up, down = self.traffic.get(client, (0, 0))
            values = {name: series[client] for name, series in self._values.items() if client in series}
            rows.append({**row, "bytes_up": up, "bytes_down": down, **values})
        return Clients(rows, MAIN, self.score)

    @property
    def values(self) -> dict[int, float]:
        """The reported accuracy of each client's personal model."""
        return self._values.get(MAIN, {})

    @property
    def bytes_up(self) -> int:
        return sum(row["bytes_up"] for row in self.rounds)

    @property
    def bytes_down(self) -> int:
        return sum(row["bytes_down"] for row in self.rounds)

    @property
    def bytes_eval(self) -> int:
        return sum(row["bytes_eval"] for row in self.rounds)

    @property
    def seconds(self) -> float:
        return float(sum(row["seconds"] for row in self.rounds))

    def json(self) -> dict[str, Any]:
        """Everything that `--json` prints."""
        return {
            "run": self.run,
            "method": self.method,
            "seed": self.seed,
            "engine": self.engine,
            "state": self.state,
            "rounds": self.config.get("rounds"),
            "eval_point": self.config.get("eval_point"),
            "select": self.config.get("select"),
            "metrics": self.metrics,
            "per_client": [{key: row[key] for key in row if key != "counts"} for row in self.clients],
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_eval": self.bytes_eval,
            "seconds": self.seconds,
        }

    def notes(self) -> list[str]:
        """What a reader of the numbers must know: about the data, the choice of the round, the failures."""
        found = [event["text"] for event in self.events if event["kind"] in ("note", "damaged checkpoint")]
        if self.config.get("select", "last").startswith("best_"):
            found.append(f"select={self.config['select']} chooses on test data: the accuracy is optimistic.")
        failures = [event for event in self.events if event["client"] != POOLED]
        for kind in sorted({event["kind"] for event in failures}):
            same = [event for event in failures if event["kind"] == kind]
            found.append(
                f"{len(same)} times a client was lost ({kind}), first in round {same[0]['round']}: {same[0]['text']}."
            )
        return found

    def table(self) -> str:
        """The run in a few lines."""
        return Comparison([self]).table()

    def frame(self, kind: str = "clients") -> pd.DataFrame:
        """A pandas frame with a row per client, or by kind: "rounds", "history" (round and client), "runs" (one)."""
        return frames.frame(Comparison([self]), kind, several=False)

    def plot(self, kind: str = "rounds") -> alt.TopLevelMixin:
        """The accuracy over "rounds" or over "bytes", or the clients' "data", as an altair chart."""
        return Comparison([self]).plot(kind)

    def __repr__(self) -> str:
        return f"<Result {self.run}: {percent(self.metrics.get(MAIN))}>"

    def _repr_html_(self) -> str:
        return Comparison([self])._repr_html_()


class Comparison:
    """Several runs side by side: methods as rows, seeds folded into mean and spread."""

    def __init__(self, results: Sequence[Result]):
        self.results = list(results)
        self._local = {self._setting(r): r for r in results if r.method == "local"}

    @staticmethod
    def _setting(result: Result) -> tuple[Any, ...]:
        """What two runs must have in common for a client to be the same client, with the same data, in both."""
        keys = ("data", "seed", *(field.name for field in fields(SplitOptions)))
        return (*(result.config.get(key) for key in keys), len(result.clients))

    def alone(self, result: Result) -> Result | None:
        """The Local run of the same setting, if there is one."""
        return self._local.get(self._setting(result))

    def gain(self, result: Result) -> dict[int, float] | None:
        """Accuracy minus that of training alone, per client; None without a Local run of the same setting."""
        local = self.alone(result)
        if local is None:
            return None
        alone = local.values
        return {client: value - alone[client] for client, value in result.values.items() if client in alone}

    def json(self) -> list[dict[str, Any]]:
        return [self.told(result) for result in self.results]

    def told(self, result: Result) -> dict[str, Any]:
        """All that is known of one run, here beside Local."""
        row = result.json()
        if gains := self.gain(result):
            row["metrics"] = {**row["metrics"], "gain-over-local": sum(gains.values()) / len(gains)}
            row["metrics"]["harmed-clients"] = sum(g < 0 for g in gains.values()) / len(gains)
        return row

    def label(self, result: Result) -> str:
        """The method, and its options where runs of the same method differ in them."""
        own = result.config.get("hyper", {})
        differing = [key for key in own if key in self._differing[result.method]]
        return " ".join([str(result.method), *(f"{key}={own[key]}" for key in differing)])

    @functools.cached_property
    def _differing(self) -> dict[str, set[str]]:
        """By method, the options in which its runs are not all alike."""
        found: dict[str, set[str]] = {}
        first: dict[str, Any] = {}
        for result in self.results:
            own = result.config.get("hyper", {})
            like = first.setdefault(result.method, own)
            odd = {key for key in own.keys() | like.keys() if own.get(key) != like.get(key)}
            found.setdefault(result.method, set()).update(odd)
        return found

    def domains(self) -> list[str]:
        """The clients, where they are few and have names of their own."""
        named = {tuple(row["name"] for row in result.clients) for result in self.results}
        if len(named) != 1:
            return []
        (names,) = named
        numbered = any(re.fullmatch(r"client[- ]?\d+", name) for name in names)
        return [] if numbered or len(names) > DOMAINS else list(names)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method: mean and spread over seeds of what the table shows."""
        names = self.domains()
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(self.label(result), []).append(result)

        def over_seeds(group: Sequence[Result], metric: str) -> tuple[float, float] | None:
            values = [result.metrics[metric] for result in group if metric in result.metrics]
            return metrics.over_seeds(values) if values else None

        def over_clients(group: Sequence[Result], client: int) -> tuple[float, float] | None:
            values = [result.values[client] for result in group if client in result.values]
            return metrics.over_seeds(values) if values else None

        rows = []
        for method, group in groups.items():
            gains = [sum(g.values()) / len(g) for r in group if r.method != "local" and (g := self.gain(r))]
            rows.append(
                {
                    "method": method,
                    "seeds": len(group),
                    "mean": over_seeds(group, MAIN),
                    "worst": over_seeds(group, f"{MAIN}/worst-decile"),
                    "least": over_seeds(group, f"{MAIN}/min"),
                    "new": over_seeds(group, "ensemble/new-test"),
                    "external": over_seeds(group, "ensemble/external"),
                    "domains": {name: over_clients(group, i) for i, name in enumerate(names)},
                    "gain": metrics.over_seeds(gains) if gains else None,
                    "bytes": sum(r.bytes_up + r.bytes_down for r in group) / sum(len(r.clients) for r in group),
                    "seconds": sum(r.seconds for r in group) / len(group),
                }
            )
        return rows

    def notes(self) -> list[str]:
        """What the runs' notes say, each once, with the methods and seeds where only some say it."""
        said: dict[str, list[Result]] = {}
        for result in self.results:
            for note in result.notes():
                said.setdefault(note, []).append(result)

        def only(key: Callable[[Result], Any], runs: Sequence[Result]) -> list[str]:
            some = {key(run) for run in runs}
            return [] if some == {key(run) for run in self.results} else [", ".join(map(str, sorted(some)))]

        lines = []
        for note, runs in said.items():
            seeds = [f"seed {seed}" for seed in only(lambda run: run.seed, runs)]
            where = [*only(lambda run: run.method, runs), *seeds]
            lines.append(f"{', '.join(where)}: {note}" if where else note)
        return lines

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table's header and rows as texts: scores in percent (± over seeds), gain, bytes per client, time."""
        rows, names = self.rows(), self.domains()
        score = self.results[0].score if self.results else SCORES["classification"]
        titles = {"mean": f"{score} %", "worst": "worst decile", "new": "new test", "external": "external"}
        always = {"mean"} if names else {"mean", "worst"}  # of few clients each has a column, and the worst is one
        shown = [k for k in titles if k in always or (k != "worst" and any(row[k] for row in rows))]
        least = ["worst client"] if names else []
        header = ["method", *(titles[key] for key in shown), *names, *least, "gain over Local", "per client", "time"]
        body = [
            [
                row["method"],
                *(spread(row[key]) for key in shown),
                *(spread(row["domains"][name]) for name in names),
                *(spread(row["least"]) for _ in least),
                spread(row["gain"], sign=True),
                bytes_text(row["bytes"]),
                f"{row['seconds']:.1f} s",
            ]
            for row in rows
        ]
        return header, body

    def table(self) -> str:
        """The comparison as text."""
        return table(*self.cells())

    def frame(self, kind: str = "clients") -> pd.DataFrame:
        """A pandas frame with a row per run and client, or by kind: "rounds", "history" (round and client), "runs"."""
        return frames.frame(self, kind)

    def plot(self, kind: str = "rounds") -> alt.TopLevelMixin:
        """Accuracy over "rounds" or over "bytes", each client's "gains" over Local, or "data", as an altair chart."""
        from pfed import plots  # here, for altair takes a while to import, and the report's numbers come from results

        return plots.plot(self, kind)

    __repr__ = table

    def _repr_html_(self) -> str:
        return display.html(*self.cells(), self.notes())


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, the last among them.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    stride = -(-len(rounds) // most) or 1
    return list(rounds[::-stride][::-1])


def spread(value: tuple[float, float] | None, sign: bool = False) -> str:
    """Mean ± deviation over seeds, in percent."""
    if value is None:
        return "–"
    mean, deviation = value
    text = f"{100 * mean:+.2f}" if sign else f"{100 * mean:.2f}"
    return text if math.isnan(deviation) or deviation == 0 else f"{text} ± {100 * deviation:.2f}"
