"""What each method knows: what it logged and how its models were judged, in the panels that suit it.

Which panel a number is in depends on its name alone. What no panel of `LOGS` or `METRICS` asks for is drawn by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from pfed import embedding
from pfed.data.show import distinct
from pfed.engines.base import POOLED
from pfed.report import panels
from pfed.report.figures import Figure, Row, slug
from pfed.report.markup import Html, tag
from pfed.report.numbers import by_method
from pfed.result import MAIN, Log, Result, thinned

ROUNDS = 60  # of a panel's curve
CELLS = 1500  # of a panel's heat map


@dataclass(frozen=True)
class Panel:
    """Numbers that belong together, by the patterns of their names."""

    title: str
    names: tuple[str, ...]
    kind: Literal["lines", "clients", "groups"] = "lines"
    note: str = ""


LOGS = (
    Panel("Private share and smoothing", ("p", "beta"), note="p: share of private channels; beta: weight of the new."),
    Panel("Distillation between the channels", ("cd_loss",)),
    Panel("Accuracy of the sub-networks, training", ("private_accuracy", "shared_accuracy")),
    Panel("Entropy of the sub-networks", ("private_entropy", "shared_entropy")),
    Panel("What is shared", ("shared_elements", "shared_parameters")),
    Panel("Weights of the clients in the teacher", ("gamma",), "clients"),
    Panel("The teacher and the clients, common images", ("teacher_accuracy", "common_accuracy")),
    Panel("Loss of the teacher", ("teacher_loss",)),
    Panel("Distillation from the teacher", ("kd",)),
    Panel("Contrastive loss", ("contrastive",)),
    Panel("Chance to load the global group", ("load_global/*",), "groups"),
    Panel("Temperature of the choice", ("tau",)),
    Panel("Loss of the choice", ("strategy_loss",)),
    Panel("Distillation of features", ("bsd_loss", "bsd_loss_first"), note="first: of the first batch."),
    Panel("Cross-entropy", ("ce_loss",)),
    Panel("Drift from the received backbone", ("drift",)),
    Panel("Weight of the own model", ("alpha",)),
)
METRICS = (
    Panel("Models of a client, each on its test data", ("*/local-test",)),
    Panel("Separation of the classes", ("separation/*",), note="1: each class in one point; 0: none to tell apart."),
    Panel("Likeness of the clients' features", ("cka/*",), note="Linear CKA, mean over pairs of clients; 1: alike."),
)


def details(results: Sequence[Result]) -> list[Html | Sequence[Figure]]:
    """A heading and figures for each method that left something to show."""
    parts: list[Html | Sequence[Figure]] = []
    for method, runs in by_method(results).items():
        drawn = [*_metrics(method, runs), *_logs(method, runs), *_embeddings(method, runs)]
        if drawn:
            parts += [tag("h4", method), drawn]
    return parts


def _logs(method: str, runs: Sequence[Result]) -> Iterator[Figure]:
    logs = [run.logged(ROUNDS) for run in runs]
    names = list(dict.fromkeys(name for log in logs for name in log))
    for panel, chosen in _assigned(LOGS, names):
        if panel.kind == "lines":
            rows = [row for name in chosen for row in _by_round(name, [log[name] for log in logs if name in log])]
            yield _lines(method, panel, rows)
        else:
            first = next(i for i, log in enumerate(logs) if chosen[0] in log)
            draw = _clients if panel.kind == "clients" else _groups
            yield from draw(method, panel, {name: logs[first][name] for name in chosen}, runs[first])


def _metrics(method: str, runs: Sequence[Result]) -> Iterator[Figure]:
    """Nothing for a method whose only number is the accuracy that the page has above."""
    names = [n for run in runs for n, s in run.series.items() if (n != MAIN and len(s) > 1) or n.startswith("cka/")]
    for panel, chosen in _assigned(METRICS, list(dict.fromkeys(names)), rest=False):
        wanted = [MAIN, *chosen] if panel.names == ("*/local-test",) else chosen
        rows = []
        for name in wanted:
            series = [run.series[name] for run in runs if name in run.series]
            rows += _by_round(name, [_log(found) for found in series])
        yield _lines(method, panel, rows)


def _log(series: Sequence[tuple[int, Mapping[int, float]]]) -> Log:
    kept = [series[i] for i in thinned(range(len(series)), ROUNDS)]
    flat = [(round, client, value) for round, values in kept for client, value in values.items()]
    return Log(*map(np.array, zip(*flat, strict=True)))


def _assigned(panels: Sequence[Panel], names: Sequence[str], rest: bool = True) -> Iterator[tuple[Panel, list[str]]]:
    """The panels that have some of these names; what is in none has one of its own, if the rest is wanted."""
    left = list(names)
    for panel in panels:
        chosen = [name for pattern in panel.names for name in left if fnmatchcase(name, pattern)]
        if chosen:
            left = [name for name in left if name not in chosen]
            yield panel, chosen
    for name in left if rest else []:
        yield Panel(name.replace("_", " ").replace("/", " "), (name,)), [name]


def _by_round(name: str, logs: Sequence[Log]) -> list[Row]:
    """Mean and the middle four fifths over clients and runs, in every round."""
    rounds, values = (np.concatenate([log[i] for log in logs]) for i in (0, 2))
    order = np.argsort(rounds, kind="stable")
    marks, starts = np.unique(rounds[order], return_index=True)
    rows = []
    for t, own in zip(marks.tolist(), np.split(values[order], starts[1:]), strict=True):
        low, high = np.quantile(own, [0.1, 0.9])
        rows.append({"name": name, "round": t, "mean": float(own.mean()), "low": float(low), "high": float(high)})
    return rows


def _lines(method: str, panel: Panel, rows: list[Row]) -> Figure:
    last = {row["name"]: row for row in rows}
    said = [f"{name} {_spread(row)}" for name, row in last.items()]
    caption = f"{panel.note} In the last round: {', '.join(said)}.".strip()
    label = f"{method}: {panel.title}, mean by round and the middle four fifths of the clients"
    return panels.lines(slug(method, panel.title), label, panel.title, rows, caption)


def _spread(row: Row) -> str:
    mean, low, high = (f"{row[key]:,.0f}" if row[key] >= 1000 else f"{row[key]:.3g}" for key in ("mean", "low", "high"))
    return mean if low == high else f"{mean} ({low} to {high})"


def _clients(method: str, panel: Panel, logs: Mapping[str, Log], run: Result) -> Iterator[Figure]:
    """A row for each client, those with the largest mean first; a column for each round."""
    (log,) = logs.values()
    names = _names(run)
    rounds = np.unique(log.rounds)
    rounds = rounds[rounds > 0]
    kept = thinned(rounds.tolist(), 30)
    ids, place = np.unique(log.clients, return_inverse=True)
    ids, mean = ids.tolist(), (np.bincount(place, log.values) / np.bincount(place)).tolist()
    ranked = sorted(zip(mean, ids, strict=True), key=lambda pair: -pair[0])
    few = [client for _, client in ranked[: max(1, min(40, CELLS // max(1, len(kept))))]]
    cells = [
        {"row": names[client], "column": t, "value": value}
        for t, client, value in zip(log.rounds.tolist(), log.clients.tolist(), log.values.tolist(), strict=True)
        if client in few and t in kept
    ]
    some = f" The {len(few)} of {len(ids):,} clients with the largest." if len(few) < len(ids) else ""
    some += " Empty: it took no part in that round." if len(cells) < len(few) * len(kept) else ""
    top = ", ".join(f"{names[client]} {mean:.2f}" for mean, client in ranked[:3])
    caption = f"{panel.note}{some} Largest in the mean over rounds: {top}. Seed {run.seed}.".strip()
    label = f"{method}: {panel.title}, by client and round"
    order = [names[client] for client in few]
    yield panels.heat(slug(method, panel.title), label, panel.title, cells, order, kept, ("client", "round"), caption)


def _groups(method: str, panel: Panel, logs: Mapping[str, Log], run: Result) -> Iterator[Figure]:
    """A row for each group of the model; columns are the clients at the end, and the rounds in the clients' mean."""
    network = [part[0] for step in run.crossing.values() for part in step["parts"]]
    labels = {name.partition("/")[2]: log for name, log in logs.items()}
    order = sorted(labels, key=lambda label: (network.index(label) if label in network else len(network), _key(label)))
    names = _names(run)
    last: dict[str, dict[int, float]] = {}
    for label, log in labels.items():
        final: dict[int, float] = {}
        for client, value in zip(log.clients.tolist(), log.values.tolist(), strict=True):
            final[client] = value  # rounds ascend
        last[label] = final
    clients = sorted(last[order[0]])[: max(1, CELLS // len(order))]
    cells = [
        {"row": label, "column": names[client], "value": last[label][client]}
        for label in order
        for client in clients
        if client in last[label]
    ]
    said = ", ".join(f"{label} {np.mean(list(last[label].values())):.2f}" for label in order[:8])
    some = f" The first {len(clients)} clients." if len(clients) < len(last[order[0]]) else ""
    title, what = f"{panel.title}, at the end", f"{method}: {panel.title} by group"
    columns = [names[client] for client in clients]
    caption = f"Means over clients: {said}{', …' if len(order) > 8 else ''}.{some} Seed {run.seed}."
    yield panels.heat(
        slug(method, title), f"{what} and client", title, cells, order, columns, ("group", "client"), caption
    )
    means = [
        {"row": label, "column": row["round"], "value": row["mean"]}
        for label in order
        for row in _by_round(label, [labels[label]])
    ]
    rounds = sorted({row["column"] for row in means})
    caption = f"Mean over the clients. Seed {run.seed}."
    title = f"{panel.title}, by round"
    yield panels.heat(
        slug(method, title), f"{what} and round", title, means, order, rounds, ("group", "round"), caption
    )


def _key(label: str) -> list[tuple[int, str]]:
    """So that s10 comes after s9."""
    return [(int(word), "") if word.isdecimal() else (0, word) for word in re.split(r"(\d+)", label)]


def _names(run: Result) -> dict[int, str]:
    ids = [row["client"] for row in run.clients]
    named = dict(zip(ids, distinct([row["name"] for row in run.clients]), strict=True))
    return {**named, POOLED: "server"}


def _embeddings(method: str, runs: Sequence[Result]) -> Iterator[Figure]:
    """t-SNE of the representations of a method that has several, by class and by client; of its first such run."""
    for run in runs:
        found = embedding.load(run.folder)
        if found is None or len(found.named) < 2:
            continue
        names, classes = _names(run), run.classes
        for name, points in found.named.items():
            kept = np.array(thinned(range(len(points)), panels.DOTS))
            at = panels.embedded(points[kept])
            rows = [
                {
                    "x": float(x),
                    "y": float(y),
                    "class": classes[label] if label < len(classes) else str(label),
                    "client": names.get(client, str(client)),
                }
                for (x, y), label, client in zip(at, found.labels[kept], found.clients[kept].tolist(), strict=True)
            ]
            for by in ("class", "client"):
                title = f"Features {name}, by {by}"
                caption = f"t-SNE of {len(rows)} test samples, each by its own client's model. Seed {run.seed}."
                label = f"{method}: t-SNE of the features {name}, coloured by {by}"
                yield panels.dots(slug(method, "tsne", name, by), label, title, rows, by, caption)
        return
