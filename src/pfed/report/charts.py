"""The report's charts of accuracy, gains, bytes and data, narrow enough for a phone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import altair as alt

from pfed.data.show import chart, heat_map, printable
from pfed.report.figures import Drawing, Figure, Row, slug
from pfed.report.gains import Gains

WIDTH, HEIGHT = 260, 170
UP, DOWN = "#4c8bd6", "#cf7411"  # a gain, a loss: blue and orange are told apart by all eyes
PALETTE = ("#4c8bd6", "#c9720f", "#279455", "#c25fb0", "#d9534f", "#128fa3", "#96785f", "#7f7fd5", "#8f8926", "#808890")
GREY = "#777777"  # seen on white and on black, and in a notebook, which knows no colour of the page
POINTS = "points over Local"
_TOLD = {"gain": POINTS, "low": "at least", "high": "at most"}  # below the mouse, in a notebook
DASHES = ([8, 4], [4, 4], [2, 4], [8, 3, 2, 3])
UNSURE = 0.45  # opacity of a gain whose interval holds 0
NAMED, BARS, CELLS = 30, 200, 6000  # clients with names; clients with a bar each; cells of the heat map


def curves(
    rows: Sequence[Row],
    across: str,
    methods: Sequence[str],
    score: str = "accuracy",
    caption: str = "",
    told: bool = False,
) -> Figure:
    """The mean score across "round" or "bytes"; the band goes from the worst to the best run of a method.

    `told` names each point's numbers below the mouse, which only a notebook shows.
    """
    rows = rows if across == "round" else _to_the_edge(rows)

    def draw() -> Drawing:
        base = chart(rows)
        x, y = _across(across), alt.Y("mean:Q").title(f"{score} %").scale(zero=False).axis(tickCount=5)
        color, dash = _color(rows, methods), _dash(rows, methods)
        few = max(Counter(row["method"] for row in rows).values()) <= NAMED
        line = base.mark_line(point={"size": 16} if few else False).encode(x=x, y=y, color=color, strokeDash=dash)
        band = base.mark_area(opacity=0.18).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
        drawn: alt.LayerChart = (band + line).properties(width=WIDTH, height=HEIGHT)
        if told:
            names = {"mean": f"{score} %", "low": "lowest run", "high": "highest run"}
            points = [alt.Tooltip(f"{key}:Q", title=title, format=".2f") for key, title in names.items()]
            drawn += base.mark_circle(size=80, opacity=0).encode(x=x, y=y, tooltip=["method:N", "round:Q", *points])
        return drawn

    label = f"Mean {score} by {'round' if across == 'round' else 'bytes sent per client'} and method"
    return Figure(slug(score, "by", across), label, rows, draw, caption)


def _to_the_edge(rows: Sequence[Row]) -> list[Row]:
    """A method that sends nothing has no curve over bytes: a level line at its last accuracy instead."""
    most = max(row["bytes"] for row in rows)
    silent = {row["method"] for row in rows} - {row["method"] for row in rows if row["bytes"]}
    last = {row["method"]: row for row in rows if row["method"] in silent}
    level = [{**row, "bytes": edge} for row in last.values() for edge in (0, most)]
    return [row for row in rows if row["method"] not in silent] + level


def traffic(rows: Sequence[Row], direction: str, methods: Sequence[str], caption: str = "") -> Figure:
    """Bytes of all clients in each round, "up" or "down"."""

    def draw() -> Drawing:
        y = alt.Y(f"{direction}:Q").title(f"bytes {direction}").axis(tickCount=5, labelExpr=_BYTES)
        # Methods often send the same: dashes let the lines below show.
        dashes = [DASHES[i % len(DASHES)] if i else [1, 0] for i in range(len(methods))]
        dash = alt.StrokeDash("method:N").scale(domain=list(map(printable, methods)), range=dashes).legend(None)
        points = {"size": 16} if len({row["round"] for row in rows}) == 1 else False
        x, color = _across("round"), _color(rows, methods)
        lines = chart(rows).mark_line(point=points).encode(x=x, y=y, color=color, strokeDash=dash)
        return lines.properties(width=WIDTH, height=HEIGHT)

    return Figure(f"bytes-{direction}", f"Bytes {direction} by round and method", rows, draw, caption)


def gains(method: str, found: Gains, span: tuple[float, float], caption: str = "") -> Figure:
    """Gain over Local of each client, sorted: bars with names, bars without for more, a histogram for many.

    `span` is common to all methods, so that their charts can be compared. A thin line is the interval; a bar whose
    interval holds 0 is pale.
    """
    rows: list[Row] = []
    for name, gain in sorted(found.values.items(), key=lambda item: -item[1]):
        low, high = found.intervals.get(name, (None, None))
        rows.append({"client": name, "gain": gain, "low": low, "high": high, "sure": _sure(found, name)})

    def draw() -> Drawing:
        scale = alt.Scale(domain=list(span), nice=True)
        drawn, size = _bars(rows, scale) if len(rows) <= BARS else _histogram(found, span, scale)
        return drawn.properties(title=printable(method), **size)

    return Figure(slug("gains", method), f"Gain over Local of each client, {method}", rows, draw, caption)


def _sure(found: Gains, name: str) -> bool:
    """Whether the interval is clear of 0; where no interval is known, no bar is pale."""
    low, high = found.intervals.get(name, (0.0, 0.0))
    return not found.intervals or low > 0 or high < 0


def _bars(rows: Sequence[Row], scale: alt.Scale) -> tuple[Drawing, dict[str, Any]]:
    ranked = [{**row, "rank": rank} for rank, row in enumerate(rows)]
    color = alt.condition("datum.gain < 0", alt.value(DOWN), alt.value(UP))
    pale = alt.condition("datum.sure", alt.value(1.0), alt.value(UNSURE))
    base, known = chart(ranked), chart([row for row in ranked if row["low"] is not None])
    whisker: dict[str, Any] = {"color": GREY, "strokeWidth": 1}
    told = ["client:N", *(alt.Tooltip(f"{key}:Q", title=title, format="+.2f") for key, title in _TOLD.items())]
    if len(rows) <= NAMED:
        y = alt.Y("client:N").sort([printable(row["client"]) for row in rows]).title(None)
        y = y.axis(labelLimit=100, domain=False)
        x = alt.X("gain:Q").scale(scale).title(POINTS).axis(tickCount=5)
        bars = base.mark_bar().encode(x=x, y=y, color=color, opacity=pale, tooltip=told)
        lines = known.mark_rule(**whisker).encode(x=alt.X("low:Q"), x2="high:Q", y=y)
        return bars + lines, {"width": WIDTH - 60, "height": 14 * len(rows)}  # the names take place
    x = alt.X("rank:O").title(f"{len(rows)} clients, sorted").axis(labels=False, domain=False)
    y = alt.Y("gain:Q").scale(scale).title(POINTS).axis(tickCount=5)
    bars = base.mark_bar().encode(x=x, y=y, color=color, opacity=pale, tooltip=told)
    lines = known.mark_rule(**whisker, opacity=UNSURE).encode(x=x, y=alt.Y("low:Q"), y2="high:Q")
    return lines + bars, {"width": WIDTH, "height": HEIGHT}  # so many lines would hide the bars


def _histogram(found: Gains, span: tuple[float, float], scale: alt.Scale) -> tuple[Drawing, dict[str, Any]]:
    sure = [_sure(found, name) for name in found.values]
    base = chart(histogram(list(found.values.values()), span, sure=sure))
    color = alt.condition("datum.gain < 0", alt.value(DOWN), alt.value(UP))
    x = alt.X("gain:Q").scale(scale).bin("binned").title(POINTS).axis(tickCount=5, grid=False)
    title = "clients" if all(sure) else "clients (surely: full colour)"
    all_ = base.mark_bar(opacity=UNSURE).encode(
        x=x, x2="end:Q", y=alt.Y("clients:Q").title(title).axis(tickCount=5), color=color
    )
    those = base.mark_bar().encode(x=x, x2="end:Q", y=alt.Y("surely:Q"), color=color)
    return all_ + those, {"width": WIDTH, "height": HEIGHT}


def histogram(
    values: Sequence[float], span: tuple[float, float], bins: int = 24, sure: Collection[bool] = ()
) -> list[Row]:
    """Counts in equal bins, one of which starts at 0, so that none holds both gains and losses.

    >>> histogram([-1.0, 0.0, 0.5, 3.0], (-1.0, 3.0), bins=4)[:1]
    [{'gain': -1.0, 'end': 0.0, 'clients': 1, 'surely': 1}]
    """
    width = (span[1] - span[0]) / bins or 1.0
    places = [math.floor(value / width) for value in values]
    all_ = Counter(places)
    surely = Counter(place for place, is_sure in zip(places, sure or [True] * len(places), strict=True) if is_sure)
    return [
        {"gain": place * width, "end": (place + 1) * width, "clients": all_[place], "surely": surely[place]}
        for place in range(min(places), max(places) + 1)
    ]


def data(clients: Sequence[Mapping[str, Any]], classes: Sequence[str], unit: str, caption: str = "") -> Figure:
    """The heat map of samples or boxes by class, of so many clients that the page stays small."""
    some = clients[: shown(clients)]
    counts = [row["counts"] for row in some]
    rows = [{"client": row["name"], **dict(zip(classes, row["counts"], strict=True))} for row in some]
    names = [row["name"] for row in some]
    label = f"Training {unit} per client and class"
    return Figure("class-counts", label, rows, lambda: heat_map(names, classes, counts, unit), caption)


def shown(clients: Sequence[Mapping[str, Any]]) -> int:
    """How many clients the heat map has place for."""
    count, cells = 0, 0
    while count < min(BARS, len(clients)) and cells < CELLS:
        cells += sum(held > 0 for held in clients[count]["counts"])
        count += 1
    return count


def sizes(samples: Sequence[int], caption: str = "") -> Figure:
    """Training samples of each client, the largest first; of very many clients every so-manieth."""
    ranked = sorted(samples, reverse=True)
    stride = -(-len(ranked) // BARS)
    rows = [{"rank": rank + 1, "samples": ranked[rank]} for rank in range(0, len(ranked), stride)]

    def draw() -> Drawing:
        x = alt.X("rank:O").title(f"{len(ranked):,} clients, sorted").axis(labels=False, domain=False)
        y = alt.Y("samples:Q").title("training samples").axis(tickCount=5, format="~s")
        return chart(rows).mark_bar(color=UP).encode(x=x, y=y).properties(width=WIDTH, height=HEIGHT)

    return Figure("client-sizes", "Training samples of each client, sorted", rows, draw, caption)


# As `pfed.tables.bytes_text` writes them.
_BYTES = "datum.value < 1000 ? datum.value + ' B' : replace(format(datum.value, '.3~s'), /([kMGT])$/, ' $1B')"


def _across(name: str) -> alt.X:
    if name == "round":
        return alt.X("round:Q").title("round").axis(tickCount=5, tickMinStep=1, format="d", grid=False)
    return alt.X("bytes:Q").title("bytes per client, up and down").axis(tickCount=4, labelExpr=_BYTES, grid=False)


def _color(rows: Sequence[Row], methods: Sequence[str]) -> alt.Color:
    """A method has one colour in the whole report."""
    present = {row["method"] for row in rows}
    shown = [(printable(method), PALETTE[i % len(PALETTE)]) for i, method in enumerate(methods) if method in present]
    scale = alt.Scale(domain=[name for name, _ in shown], range=[color for _, color in shown])
    return alt.Color("method:N").scale(scale).legend(_names([name for name, _ in shown]))


def _names(methods: Sequence[str]) -> alt.Legend:
    """In two columns, or in one if that leaves no place for a name."""
    long = any(len(name) > 22 for name in methods)
    return legend(columns=1, labelLimit=280) if long else legend()


def legend(**changes: Any) -> alt.Legend:
    """Below the chart, where a phone has place; its symbols are lines unless asked otherwise."""
    symbol: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 3, "symbolOpacity": 1}
    place: dict[str, Any] = {"title": None, "orient": "bottom", "columns": 2, "labelLimit": 130}
    return alt.Legend(**{**symbol, **place, **changes})


def _dash(rows: Sequence[Row], methods: Sequence[str]) -> alt.StrokeDash:
    """Methods beyond the palette have its colours again, with dashes."""
    present = {row["method"] for row in rows}
    lines = [[1, 0], *DASHES]
    dashes = {printable(m): lines[i // len(PALETTE) % len(lines)] for i, m in enumerate(methods) if m in present}
    scale = alt.Scale(domain=list(dashes), range=list(dashes.values()))
    return alt.StrokeDash("method:N").scale(scale).legend(_names(list(dashes)))
