"""What came out of runs: numbers by name, per client, as tables and as JSON."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pfed import metrics
from pfed.engines.base import POOLED
from pfed.record import Record
from pfed.tables import bytes_text, percent, table

MAIN = "personal/local-test"
SCORES = {"classification": "accuracy", "detection": "AP50"}  # what the main metric is, by task
DOMAINS = 11  # at most so many clients have a column each


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
        self.clients = record.clients()
        self.rounds = record.rounds()
        self.events = record.events()
        self.logs = record.logs()
        self.traffic = record.traffic()
        self.correct = record.correct(MAIN)
        names = record.metric_names()
        self.series = {name: record.series(name) for name in names}
        self.metrics, self._values = self._summary()

    @classmethod
    def load(cls, folder: Path) -> Result:
        """Read a run's folder."""
        with contextlib.closing(Record(folder / "record.sqlite", readonly=True)) as record:
            return cls(record, folder.name, folder)

    @property
    def score(self) -> str:
        """What the main metric is called."""
        return SCORES[self.config.get("task", "classification")]

    def _summary(self) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
        sizes = {row["client"]: row["test"] for row in self.clients}
        found: dict[str, float] = {}
        values: dict[str, dict[int, float]] = {}
        for name, series in self.series.items():
            if set(series[-1][1]) == {POOLED}:
                found[name] = series[-1][1][POOLED]
                continue
            values[name] = chosen = self._select(name)
            summary = metrics.summarise(chosen, sizes)
            found[name] = summary.pop("mean")
            if name.count("/") == 1:
                found |= {f"{name}/{key}": value for key, value in summary.items()}
        return dict(sorted(found.items())), values

    def _select(self, name: str) -> dict[int, float]:
        """The values that are reported, per client, by the run's rule; never-mixed metrics use the last round."""
        series = self.series[name]
        rule = self.config.get("select", "last")
        if not name.endswith("/local-test"):
            return dict(series[-1][1])
        rounds = [item for item in series if item[0] <= self.config["rounds"]] if rule == "mean_last_10" else series
        validation = self.series.get(name.replace("/local-test", "/validation"))
        return metrics.select(rounds or series, rule, validation)

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """One row per client: its data, its metrics, its bytes."""
        rows = []
        for row in self.clients:
            client = row["client"]
            up, down = self.traffic.get(client, (0, 0))
            values = {name: series[client] for name, series in self._values.items() if client in series}
            data = {key: row[key] for key in ("client", "name", "train", "test")}
            rows.append({**data, **values, "bytes_up": up, "bytes_down": down})
        return rows

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
            "per_client": self.per_client,
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

    def __repr__(self) -> str:
        return f"<Result {self.run}: {percent(self.metrics.get(MAIN))}>"


class Comparison:
    """Several runs side by side: methods as rows, seeds folded into mean and spread."""

    def __init__(self, results: Sequence[Result]):
        self.results = list(results)
        self._local = {self._setting(r): r.values for r in results if r.method == "local"}

    @staticmethod
    def _setting(result: Result) -> tuple[Any, ...]:
        """What two runs must have in common for a client to be the same client in both."""
        keys = ("data", "seed", "clients", "partition", "classes_per_client", "alpha", "public", "validation")
        return (*(result.config.get(key) for key in keys), len(result.clients))

    def gain(self, result: Result) -> dict[int, float] | None:
        """Accuracy minus that of training alone, per client; None without a Local run of the same setting."""
        alone = self._local.get(self._setting(result))
        if alone is None:
            return None
        return {client: value - alone[client] for client, value in result.values.items() if client in alone}

    def json(self) -> list[dict[str, Any]]:
        rows = []
        for result in self.results:
            row = result.json()
            if gains := self.gain(result):
                row["metrics"] = {**row["metrics"], "gain-over-local": sum(gains.values()) / len(gains)}
                row["metrics"]["harmed-clients"] = sum(g < 0 for g in gains.values()) / len(gains)
            rows.append(row)
        return rows

    def label(self, result: Result) -> str:
        """The method, and its options where runs of the same method differ in them."""
        others = [r.config.get("hyper", {}) for r in self.results if r.method == result.method]
        own = result.config.get("hyper", {})
        differing = [key for key, value in own.items() if any(other.get(key) != value for other in others)]
        return " ".join([result.method, *(f"{key}={own[key]}" for key in differing)])

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
        always = {"mean"} if names else {"mean", "worst"}  # of few clients each has a column, and none is a decile
        shown = [k for k in titles if k in always or (k != "worst" and any(row[k] for row in rows))]
        header = ["method", *(titles[key] for key in shown), *names, "gain over Local", "per client", "time"]
        body = [
            [
                row["method"],
                *(spread(row[key]) for key in shown),
                *(spread(row["domains"][name]) for name in names),
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

    __repr__ = table


def spread(value: tuple[float, float] | None, sign: bool = False) -> str:
    """Mean ± deviation over seeds, in percent."""
    if value is None:
        return "–"
    mean, deviation = value
    text = f"{100 * mean:+.2f}" if sign else f"{100 * mean:.2f}"
    return text if math.isnan(deviation) or deviation == 0 else f"{text} ± {100 * deviation:.2f}"
