"""The report's sections about runs that can be compared: texts, tables and figures, in the order of the page."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pfed import pictures
from pfed.data.base import skew
from pfed.data.show import printable
from pfed.report import charts, commands, numbers
from pfed.report.details import details
from pfed.report.figures import Figure, Row
from pfed.report.gains import LEAST, Gains, Interval, gains, span
from pfed.report.markup import Html, data, figure, table, tag
from pfed.report.parts import parts
from pfed.result import Comparison, Result
from pfed.tables import bytes_text


@dataclass(frozen=True)
class Section:
    """A heading and what is below it; a list of figures stands side by side."""

    title: str
    parts: Sequence[Html | Sequence[Figure]]

    @property
    def figures(self) -> list[Figure]:
        return [one for part in self.parts if not isinstance(part, Html) for one in part]


def sections(group: Sequence[Result], methods: Sequence[str], place: int = 0) -> Iterator[Section]:
    """Everything about runs that can be compared; `place` tells several such groups of a page apart."""
    measured = [result for result in group if result.values]
    if measured:
        score = measured[0].score
        yield Section("Does federating help?", _gains(Comparison(measured)))
        rows = numbers.curves(measured)
        yield Section(f"{title(score)} over rounds and bytes", _curves(rows, methods, score))
        yield Section("What a target costs", _targets(rows, score, place))
    if known := details(group):
        yield Section("What each method knows", known)
    if drawn := _pictures(group):
        yield Section("What is found", drawn)
    if any(result.rounds for result in group):
        yield Section("What is sent", _traffic(group, methods))
    yield Section("The clients' data", _clients(group))


def title(score: str) -> str:
    return score[:1].upper() + score[1:]


def _gains(comparison: Comparison) -> list[Html | Sequence[Figure]]:
    found = gains(comparison)
    if not found:
        return [_no_local(comparison)]
    score = title(comparison.results[0].score)
    note = f"{score} minus that of training alone, in points of percent, for each client. One scale for all methods."
    if any(each.apart for each in found.values()):
        note += " Clients that are only numbered are others under each seed, and all of them are counted."
    reasons = dict.fromkeys(each.why for each in found.values() if each.why)
    return [
        tag("p", " ".join([note, _intervals(found), *reasons]).strip(), class_="soft"),
        table(*_summary(found), kind="numbers sortable"),
        [charts.gains(method, each, span(found), _helped(each)) for method, each in found.items()],
    ]


def _intervals(found: dict[str, Gains]) -> str:
    if not any(each.intervals for each in found.values()):
        return ""
    few = any(each.intervals and len(each.intervals) < len(each.values) for each in found.values())
    return (
        "A thin line is the 95 % interval of a paired bootstrap over the client's test samples; a bar is pale where it "
        "holds 0. Surely: the interval is clear of 0, which by chance alone happens to one client in twenty. The "
        "interval of the mean is of these clients, over their test samples."
        + (f" A client with fewer than {LEAST} test samples has no interval." if few else "")
    )


def _summary(found: dict[str, Gains]) -> tuple[list[str], list[list[str]]]:
    header = ["method", "mean gain", "95 % interval", "worst decile", "best decile"]
    header += ["clients", "gain", "surely gain", "lose", "surely lose"]
    rows = []
    for method, each in found.items():
        summary = each.summary()
        cells = [f"{summary['mean']:+.2f}", _between(each.overall)]
        cells += [f"{summary[key]:+.2f}" for key in ("worst-decile", "best-decile")]
        counts = each.counts()
        cells += [f"{len(each.values):,}"]
        cells += [f"{n:,}" if each.intervals or "surely" not in key else "–" for key, n in counts.items()]
        rows.append([method, *cells])
    return header, rows


def _between(interval: Interval | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"


def _helped(found: Gains) -> str:
    counts = found.counts()
    worst = min(found.values, key=lambda name: found.values[name])
    text = f"{counts['gain']} of {len(found.values)} clients gain, {counts['lose']} lose."
    if found.intervals:
        text += f" Surely: {counts['surely gain']} gain, {counts['surely lose']} lose."
    return f"{text} The least: {found.values[worst]:+.2f} ({worst})."


def _no_local(comparison: Comparison) -> Html:
    others = [run for run in comparison.results if run.method != "local"]
    if not others:
        return tag("p", "Only training alone was run. To compare: ", tag("code", "pfed compare local METHOD …"))
    unknown = "No run of Local on the same clients is among these, so nobody knows yet. Make one: "
    command = commands.local(others)
    if command is None:
        return tag("p", unknown, tag("code", 'Experiment("local", …)'), " with the same data, model and options.")
    return tag("p", unknown, tag("code", command), " Then name it in ", tag("code", "pfed report"), ", too.")


def _curves(rows: Sequence[Row], methods: Sequence[str], score: str) -> list[Sequence[Figure]]:
    shown = numbers.thin(rows)
    caption = "Mean over clients and seeds; the band spans the seeds."
    drawn = [charts.curves(shown, "round", methods, score, caption)]
    if any(row["bytes"] for row in shown):
        caption = "The same by what each client has sent and received. A method that sends nothing is a level line."
        drawn.append(charts.curves(shown, "bytes", methods, score, caption))
    return [drawn]


def _targets(rows: Sequence[Row], score: str, place: int) -> list[Html | Sequence[Figure]]:
    """Rounds and bytes until the mean score first reaches a target: a table of a few, and a slider for the script."""
    found = numbers.reached(rows)
    few = numbers.targets(found)
    note = f"The first evaluated round whose mean {score} reaches the target, and what a client has sent and received."
    cells = []
    for method, points in found.items():
        costs = [numbers.cost(points, target) for target in few]
        texts = ["not reached" if c is None else f"{c['round']}, {bytes_text(c['bytes'])}" for c in costs]
        cells.append([method, *texts])
    least = math.floor(min(row["mean"] for row in rows))
    most = max(least + 1, math.ceil(max(row["mean"] for row in rows)))
    curves = [
        {"method": method, "points": [[p["round"], round(p["mean"], 3), round(p["bytes"])] for p in points]}
        for method, points in found.items()
    ]
    name = f"target-{place}"
    slider = Html(
        f'<input type="range" id="{name}" min="{least}" max="{most}" step="0.5" value="{few[len(few) // 2]}">'
    )
    label = tag("label", f"Target {score}: ", tag("output", for_=name), for_=name)
    moved = tag("div", tag("p", label, slider), Html('<div class="costs"></div>'), class_="slider", hidden="")
    static = tag("div", table(["method", *(f"{target} %" for target in few)], cells), class_="static")
    return [tag("p", note, class_="soft"), tag("div", data(curves), moved, static, class_="target")]


def _pictures(group: Sequence[Result]) -> list[Html | Sequence[Figure]]:
    """Test images with true and found boxes, of each method's first run that has some."""
    drawn: list[Html | Sequence[Figure]] = []
    for method, runs in numbers.by_method(group).items():
        files = next((found for run in runs if (found := pictures.files(run.folder))), [])
        for name, path in files:
            content = base64.b64encode(path.read_bytes()).decode()
            image = Html(f'<img src="data:image/png;base64,{content}" alt="Test images of {escape(name)} with boxes">')
            colours = f"green what is there, orange what the model says, from a score of {pictures.SHOWN} on"
            drawn.append(figure(image, f"{method}, {name}: {colours}."))
    return drawn


def _traffic(group: Sequence[Result], methods: Sequence[str]) -> list[Html | Sequence[Figure]]:
    rows = numbers.traffic(group)
    if not any(row["up"] or row["down"] for row in rows):
        return [tag("p", "Nothing was sent."), *parts(group)]
    end = max(row["round"] for row in rows) > max(result.config.get("rounds", 0) for result in group)
    last = " A round after the last is what a method does at the end." if end else ""
    captions = {"up": f"From the clients, all together, in each round.{last}", "down": "To the clients."}
    return [[charts.traffic(rows, way, methods, caption) for way, caption in captions.items()], *parts(group)]


def _clients(group: Sequence[Result]) -> list[Html | Sequence[Figure]]:
    """The data of the first run: those of other seeds are divided in the same way."""
    first = group[0]
    counts = [row["counts"] for row in first.clients]
    sizes = sorted(row["train"] for row in first.clients)
    if not any(sizes):
        return [tag("p", "The clients have not told how many samples they have.")]
    size = f"Every client trains on {sizes[0]:,} samples."
    if sizes[0] < sizes[-1]:
        size = f"A client trains on {sizes[0]:,} to {sizes[-1]:,} samples, {sizes[len(sizes) // 2]:,} in the middle."
    drawn = [charts.sizes(sizes, size)] if len(sizes) > 1 else []
    if not any(map(sum, counts)):
        return [drawn or tag("p", size)]
    shown = charts.shown(first.clients)
    some = "" if shown == len(counts) else f" The first {shown} of {len(counts):,} clients are shown."
    seed = f" Seed {first.seed}." if len({result.seed for result in group}) > 1 else ""
    classes = first.classes or [str(i) for i in range(len(counts[0]))]
    unit = first.counted
    caption = f"Training {unit} of each client by class.{some}{seed}"
    return [*_skew(first), [charts.data(first.clients, classes, unit, caption), *drawn]]


def _skew(run: Result) -> list[Html]:
    """How unlike the clients are, in numbers."""
    counts, sizes = [row["counts"] for row in run.clients], [row["train"] for row in run.clients]
    label, _ = skew(counts)
    feature = "not known" if run.feature_skew is None else f"{run.feature_skew:.2f}"
    times = f"{max(sizes) / min(sizes):,.1f} times" if min(sizes) else "many times"
    rows = [
        [
            "label",
            f"{label:.2f}",
            "mean distance (total variation) of a client's shares of the classes from everyone's",
        ],
        [
            "quantity",
            f"{numbers.gini(sizes):.2f}",
            f"Gini coefficient of the sizes; the largest is {times} the smallest",
        ],
        ["feature", feature, "share of the inputs' variation, within a class, that lies between clients"],
    ]
    shape = f"{sum(sizes):,} training samples, {len(sizes):,} clients, {len(counts[0]):,} classes."
    name = printable(str(run.config.get("data", "data")))
    return [tag("p", f"{name}: {shape}"), table(["skew", "0 to 1", "what it is"], rows, "words")]
