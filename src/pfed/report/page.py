"""The report's page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from pfed.engines.base import POOLED
from pfed.report import markup, numbers
from pfed.report.figures import Figure, slug
from pfed.report.markup import Html, join, table, tag
from pfed.report.sections import sections, title
from pfed.result import Comparison, Result, spread

EVENTS = 40  # rows of the table of events
THEME = """<p class="theme" hidden><label>Colours <select>
<option value="">as the system</option><option>light</option><option>dark</option></select></label></p>"""


def render(results: Sequence[Result], first: Sequence[Html] = ()) -> str:
    """The whole page about one or more runs; what is `first` stands before all else."""
    described = [result for result in results if result.clients]
    methods = dict.fromkeys(str(result.method) for result in described)
    title = f"{', '.join(methods) or 'no method'} on {_data(described)}"
    style, script = (_resource(name) for name in ("style.css", "script.js"))
    # Nothing but this style and this script can have any effect, whatever a name of a client looks like.
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = [
        Html('<meta charset="utf-8">'),
        Html(
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
        ),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"pfed: {title}"),
        tag("style", Html(style)),
    ]
    main = tag("main", tag("h1", title), *first, *body(results))
    whole = tag("body", Html(THEME), main, tag("script", Html(script)))
    return f"<!doctype html>\n{tag('html', tag('head', join(head)), whole, lang='en')}\n"


def _resource(name: str) -> str:
    return resources.files("pfed.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def body(results: Sequence[Result]) -> list[Html]:
    """All that is on the page below its title."""
    described = [result for result in results if result.clients]
    grouped, methods = numbers.groups(described), numbers.methods(described)
    parts = [tag("p", _count(results, len(grouped)))]
    parts += [tag("p", sentence) for sentence in _unmeasured(results)]
    for place, (name, group) in enumerate(grouped.items()):
        parts += [tag("h2", name), *_methods([result for result in group if result.values])]
        for section in sections(group, methods, place):
            parts += [tag("h3", section.title), *map(_part, section.parts)]
    return [*parts, tag("h2", "What happened"), _events(results), tag("h2", "How it was run"), *_settings(results)]


def figures(results: Sequence[Result]) -> list[Figure]:
    """Every figure of the page, each with a name of its own."""
    described = [result for result in results if result.clients]
    grouped, methods = numbers.groups(described), numbers.methods(described)
    found: dict[str, Figure] = {}
    for place, (name, group) in enumerate(grouped.items()):
        for figure in (figure for section in sections(group, methods, place) for figure in section.figures):
            own = slug(name, figure.name) if len(grouped) > 1 else figure.name
            again = 2
            while own in found:
                own, again = f"{figure.name}-{again}", again + 1
            found[own] = replace(figure, name=own)
    return list(found.values())


def _part(part: Html | Sequence[Figure]) -> Html:
    if isinstance(part, Html):
        return part
    return tag("div", *(markup.figure(figure.inline(), figure.caption) for figure in part), class_="charts")


def tables(
    head: Sequence[str], shown: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]], foot: Sequence[str]
) -> list[Html]:
    """Tables (header, rows) between paragraphs, to stand before a report."""
    middle = [table(header, rows) for header, rows in shown]
    return [*(tag("p", text) for text in head), *middle, *(tag("p", text, class_="soft") for text in foot)]


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
        f"Run {result.run} ({result.method or 'unknown method'}, {result.state or 'stopped'}) has no evaluation"
        f"{' yet' if result.state == 'running' else ': it ended before the first one'}, and is in no table or curve"
        " of accuracy."
        for result in results
        if not result.values
    ]


def _methods(measured: Sequence[Result]) -> list[Html]:
    """The table of all methods, and what it says in words."""
    if not measured:
        return []
    comparison = Comparison(measured)
    return [
        tag("p", _verdict(comparison.rows(), measured[0].score)),
        table(*comparison.cells(), kind="numbers sortable filterable"),
        tag("p", _meaning(measured), class_="soft"),
        *(tag("p", sentence) for sentence in _mixed(measured)),
    ]


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
        f"{title(measured[0].score)} is that of each client's own model on its own test data, the mean over clients; "
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
        samples, lost = sum(row["samples"] for row in result.rounds), sum(e["client"] != POOLED for e in result.events)
        speed = f"{samples / result.seconds:,.0f}" if samples and result.seconds else "–"
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        row = [result.run, result.method, result.seed, result.state, f"{done} of {planned}", result.engine]
        row += [f"{result.seconds:.1f} s", speed, f"{lost:,}", versions]
        rows.append(["–" if cell is None else str(cell) for cell in row])
    header = ["run", "method", "seed", "state", "rounds", "engine"]
    header += ["time", "samples/s", "answers lost", "versions"]
    note = (
        "Time is that of the rounds, without evaluation; samples/s is how many training samples were taken in a second "
        "of it. An answer is lost when a client drops out, fails or is late."
    )
    listed = join([table(header, rows, "words sortable filterable"), tag("p", note, class_="soft")])
    parts = [tag("details", tag("summary", "Runs and versions"), listed)]
    for method, group in numbers.by_method([result for result in results if result.config]).items():
        options = [[name, ", ".join(given)] for name, given in numbers.options(group).items()]
        values = table(["option", "value"], options, "words")
        parts.append(tag("details", tag("summary", f"Configuration of {method}"), values))
    return parts
