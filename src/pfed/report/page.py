"""The report's page, section by section."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from html import escape
from importlib import resources
from typing import Any

from pfed import pictures
from pfed.data.show import headline
from pfed.report import charts, numbers
from pfed.report.markup import Html, figure, join, table, tag
from pfed.result import Comparison, Result, spread

EVENTS = 40  # rows of the table of events


def render(results: Sequence[Result]) -> str:
    """The whole page about one or more runs."""
    described = [result for result in results if result.clients]
    grouped = numbers.groups(described)
    methods = list(numbers.by_method(described))
    title = f"{', '.join(methods) or 'no method'} on {_data(described)}"
    body = [tag("h1", title), tag("p", _count(results, len(grouped)))]
    body += [tag("p", sentence) for sentence in _unmeasured(results)]
    for name, group in grouped.items():
        body.append(tag("h2", name))
        body += _group(group, methods)
    body += [tag("h2", "What happened"), _events(results), tag("h2", "How it was run"), *_settings(results)]
    style = resources.files("pfed.report").joinpath("style.css").read_text(encoding="utf-8")
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"pfed: {title}"),
        tag("style", Html(style)),
    ]
    page = tag("html", tag("head", join(head)), tag("body", tag("main", join(body))), lang="en")
    return f"<!doctype html>\n{page}\n"


def _data(results: Sequence[Result]) -> str:
    return ", ".join(dict.fromkeys(str(result.config.get("data", "unknown data")) for result in results)) or "no data"


def _count(results: Sequence[Result], settings: int) -> str:
    seeds = sorted({result.seed for result in results if result.seed is not None})
    runs = f"{len(results)} runs" if len(results) > 1 else "1 run"
    named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "no seed"
    apart = f"; {settings} settings, which are not to be compared with each other" if settings > 1 else ""
    return f"{runs}, {named}{apart}."


def _unmeasured(results: Sequence[Result]) -> list[str]:
    return [
        f"Run {result.run} ({result.method or 'unknown method'}, {result.state or 'stopped'}) has no evaluation: "
        "it ended before the first one, and is in no table or curve of accuracy."
        for result in results
        if not result.values
    ]


def _group(group: Sequence[Result], methods: Sequence[str]) -> list[Html]:
    """Everything about runs that can be compared."""
    measured = [result for result in group if result.values]
    parts = []
    if measured:
        comparison = Comparison(measured)
        rows = comparison.rows()
        parts += [
            tag("p", _verdict(rows, measured[0].score)),
            table(*comparison.cells()),
            tag("p", _meaning(measured), class_="soft"),
        ]
        parts += [tag("p", sentence) for sentence in _mixed(measured)]
        parts += [tag("h3", "Does federating help?"), *_gains(comparison)]
        parts += [tag("h3", f"{_title(measured[0].score)} over rounds and bytes"), _curves(measured, methods)]
    if drawn := _pictures(group):
        parts += [tag("h3", "What is found"), *drawn]
    if any(result.rounds for result in group):
        parts += [tag("h3", "What is sent"), _traffic(group, methods)]
    return [*parts, tag("h3", "The clients' data"), *_clients(group)]


def _title(score: str) -> str:
    return score[:1].upper() + score[1:]


def _verdict(rows: Sequence[dict[str, Any]], score: str) -> str:
    best = max(rows, key=lambda row: row["mean"][0])
    name = "training alone (local)" if best["method"] == "local" else best["method"]
    gain = f", {spread(best['gain'], sign=True)} points over training alone" if best["gain"] else ""
    if len(rows) == 1:
        return f"The mean {score} of {name} is {spread(best['mean'])} %{gain}."
    return f"Of {len(rows)} methods {name} has the highest mean {score}, {spread(best['mean'])} %{gain}."


def _meaning(measured: Sequence[Result]) -> str:
    rules = list(dict.fromkeys(str(result.config.get("select", "last")) for result in measured))
    flattering = ", chosen on the test data, which flatters" if any(rule.startswith("best") for rule in rules) else ""
    return (
        f"{_title(measured[0].score)} is that of each client's own model on its own test data, the mean over clients; "
        "± is the standard deviation over seeds. Worst decile: the tenth of the clients that does worst. Per client: "
        f"bytes up and down in the whole run. Reported round: {', '.join(rules)}{flattering}."
    )


def _mixed(measured: Sequence[Result]) -> list[str]:
    """A mean over runs that differ in more than the seed is none over seeds, and must not look like one."""
    found = []
    for method, runs in numbers.by_method(measured).items():
        differing = [name for name, values in numbers.options(runs).items() if len(values) > 1 and name != "seed"]
        if differing:
            found.append(f"The runs of {method} differ in {', '.join(differing)}: their mean mixes settings.")
    return found


def _gains(comparison: Comparison) -> list[Html]:
    gains = numbers.gains(comparison)
    if not gains:
        others = [method for method in numbers.by_method(comparison.results) if method != "local"]
        if not others:
            return [tag("p", "Only training alone was run. To compare: ", tag("code", "pfed compare local METHOD …"))]
        unknown = "No run of Local on the same clients is among these, so nobody knows yet. Make one: "
        return [tag("p", unknown, tag("code", f"pfed compare local {' '.join(others)} …"))]
    values = [gain for by_client in gains.values() for gain in by_client.values()]
    span = (min(0.0, *values), max(0.0, *values))
    score = _title(comparison.results[0].score)
    note = f"{score} minus that of training alone, in points of percent, for each client. One scale for all methods."
    drawn = [figure(charts.gains(method, by_client, span), _helped(by_client)) for method, by_client in gains.items()]
    return [tag("p", note, class_="soft"), tag("div", *drawn, class_="charts")]


def _helped(gains: dict[str, float]) -> str:
    helped, harmed = (sum(gain * sign > 0 for gain in gains.values()) for sign in (1, -1))
    worst = min(gains, key=lambda name: gains[name])
    return f"{helped} of {len(gains)} clients gain, {harmed} lose. The least: {gains[worst]:+.2f} ({worst})."


def _curves(measured: Sequence[Result], methods: Sequence[str]) -> Html:
    rows = numbers.curves(measured)
    drawn = [
        figure(
            charts.curves(rows, "round", methods, measured[0].score),
            "Mean over clients and seeds; the band spans the seeds.",
        )
    ]
    if any(row["bytes"] for row in rows):
        caption = "The same by what each client has sent and received. A method that sends nothing is a level line."
        drawn.append(figure(charts.curves(rows, "bytes", methods, measured[0].score), caption))
    return tag("div", *drawn, class_="charts")


def _pictures(group: Sequence[Result]) -> list[Html]:
    """Test images with true and found boxes, of each method's first run that has some."""
    drawn = []
    for method, runs in numbers.by_method(group).items():
        files = next((found for run in runs if (found := pictures.files(run.folder))), [])
        for name, path in files:
            content = base64.b64encode(path.read_bytes()).decode()
            image = Html(f'<img src="data:image/png;base64,{content}" alt="Test images of {escape(name)} with boxes">')
            drawn.append(figure(image, f"{method}, {name}: green what is there, orange what the model says."))
    return drawn


def _traffic(group: Sequence[Result], methods: Sequence[str]) -> Html:
    rows = numbers.traffic(group)
    if not any(row["up"] or row["down"] for row in rows):
        return tag("p", "Nothing was sent.")
    captions = {"up": "From the clients, all together, in each round.", "down": "To the clients."}
    drawn = [figure(charts.traffic(rows, way, methods), caption) for way, caption in captions.items()]
    return tag("div", *drawn, class_="charts")


def _clients(group: Sequence[Result]) -> list[Html]:
    """The data of the first run: those of other seeds are divided in the same way."""
    first = group[0]
    counts = [row["counts"] for row in first.clients]
    sizes = sorted(row["train"] for row in first.clients)
    size = f"A client trains on {sizes[0]:,} to {sizes[-1]:,} samples, {sizes[len(sizes) // 2]:,} in the middle."
    if not any(map(sum, counts)):
        return [tag("p", size)]
    drawn, shown = charts.data(first.clients, first.classes or [str(i) for i in range(len(counts[0]))])
    some = "" if shown == len(counts) else f" The first {shown} of {len(counts):,} clients are shown."
    seed = f" Seed {first.seed}." if len({result.seed for result in group}) > 1 else ""
    told = headline(str(first.config.get("data", "data")), counts)
    return [tag("p", f"{told}."), figure(drawn, f"{size}{some}{seed}")]


def _events(results: Sequence[Result]) -> Html:
    events = numbers.events(results)
    if not events:
        return tag("p", "No client failed or dropped out, and there are no notes.")
    rows = []
    for event in events[:EVENTS]:
        first, last = min(event["rounds"]), max(event["rounds"])
        when = str(first) if first == last else f"{first} to {last}"
        who, where = _few(event["clients"], "clients"), _few(event["runs"], "runs")
        rows.append([event["kind"], event["text"], f"{event['times']:,}", when, who, where])
    more = len(events) - len(rows)
    listed = table(["kind", "what", "times", "rounds", "clients", "runs"], rows, "words")
    return join([listed, tag("p", f"… and {more:,} more.")] if more else [listed])


def _few(names: Collection[str], what: str) -> str:
    return f"{len(names):,} {what}" if len(names) > 3 else ", ".join(sorted(names)) or "–"


def _settings(results: Sequence[Result]) -> list[Html]:
    rows = []
    for result in results:
        planned = result.config.get("rounds", 0)
        done = min(planned, max((row["round"] for row in result.rounds), default=0))
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        row = [result.run, result.method, result.seed, result.state, f"{done} of {planned}", result.engine, versions]
        rows.append(["–" if cell is None else str(cell) for cell in row])
    runs = table(["run", "method", "seed", "state", "rounds", "engine", "versions"], rows, "words")
    parts = [tag("details", tag("summary", "Runs and versions"), runs)]
    for method, group in numbers.by_method([result for result in results if result.config]).items():
        listed = [[name, ", ".join(given)] for name, given in numbers.options(group).items()]
        values = table(["option", "value"], listed, "words")
        parts.append(tag("details", tag("summary", f"Configuration of {method}"), values))
    return parts
