"""The report's charts: inline SVG in the page's own colours, narrow enough for a phone."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import altair as alt

from pfed.data.show import chart, heat_map, printable
from pfed.report.markup import Html
from pfed.report.numbers import Row

WIDTH, HEIGHT = 260, 170
INK = "currentColor"  # follows the page from light to dark
UP, DOWN = "#4c8bd6", "#e08214"  # a gain, a loss: blue and orange are told apart by all eyes
PALETTE = ("#4c8bd6", "#e08214", "#2ca25f", "#c25fb0", "#d9534f", "#17a2b8", "#96785f", "#7f7fd5", "#a09a2b", "#808890")
POINTS = "points over Local"
DASHES = ([8, 4], [4, 4], [2, 4], [8, 3, 2, 3])
NAMED, BARS, CELLS = 30, 200, 6000  # clients with names; clients with a bar each; cells of the heat map

_WORDS = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11}
_GRID = {"gridColor": INK, "gridOpacity": 0.15, "domainColor": INK, "domainOpacity": 0.5}
LOOK: dict[str, Any] = {
    "background": "transparent",
    "padding": {"left": 14, "right": 8, "top": 2, "bottom": 2},  # room for a font that is wider than the one measured
    "font": "Arial, Helvetica, sans-serif",
    "axis": {**_WORDS, **_GRID, "ticks": False, "labelPadding": 4},
    "legend": _WORDS,
    "title": {"color": INK, "anchor": "start", "fontSize": 13},
    "view": {"stroke": None},
    "aria": False,  # the label speaks for the whole; a word on every mark would triple the page
}


def svg(drawn: alt.Chart | alt.LayerChart | alt.HConcatChart, label: str) -> Html:
    """A chart as an inline SVG; `label` is what a screen reader says."""
    text = io.StringIO()
    drawn.configure(**LOOK).save(text, format="svg")
    # Inline, the element needs no namespace, so that the page names no address at all.
    opening = f'<svg role="img" aria-label="{escape(label)}"'
    named = re.sub(r"^<svg[^>]*?(?= width=)", lambda _: opening, text.getvalue())
    return Html(re.sub(r'(<path [^>]*?d=")([^"]*)', _rounded, named))


def _rounded(path: re.Match[str]) -> str:
    """A path to a hundredth of a pixel: a quarter of the length, and no eye can tell."""
    return path[1] + re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[2])


def curves(rows: Sequence[Row], across: str, methods: Sequence[str], score: str = "accuracy") -> Html:
    """The mean score across "round" or "bytes"; the band goes from the worst to the best run of a method."""
    rows = rows if across == "round" else _to_the_edge(rows)
    base = chart(rows)
    x, y = _across(across), alt.Y("mean:Q").title(f"{score} %").scale(zero=False).axis(tickCount=5)
    color = _color(rows, methods)
    few = max(Counter(row["method"] for row in rows).values()) <= NAMED
    line = base.mark_line(point={"size": 16} if few else False).encode(x=x, y=y, color=color)
    band = base.mark_area(opacity=0.18).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
    label = f"Mean {score} by {'round' if across == 'round' else 'bytes sent per client'} and method"
    return svg((band + line).properties(width=WIDTH, height=HEIGHT), label)


def _to_the_edge(rows: Sequence[Row]) -> list[Row]:
    """A method that sends nothing has no curve over bytes: a level line at its last accuracy instead."""
    most = max(row["bytes"] for row in rows)
    silent = {row["method"] for row in rows} - {row["method"] for row in rows if row["bytes"]}
    last = {row["method"]: row for row in rows if row["method"] in silent}
    level = [{**row, "bytes": edge} for row in last.values() for edge in (0, most)]
    return [row for row in rows if row["method"] not in silent] + level


def traffic(rows: Sequence[Row], direction: str, methods: Sequence[str]) -> Html:
    """Bytes of all clients in each round, "up" or "down"."""
    y = alt.Y(f"{direction}:Q").title(f"bytes {direction}").axis(tickCount=5, labelExpr=_BYTES)
    # Methods often send the same: dashes let the lines below show.
    dashes = [DASHES[i % len(DASHES)] if i else [1, 0] for i in range(len(methods))]
    dash = alt.StrokeDash("method:N").scale(domain=list(map(printable, methods)), range=dashes).legend(None)
    points = {"size": 16} if len({row["round"] for row in rows}) == 1 else False
    x, color = _across("round"), _color(rows, methods)
    lines = chart(rows).mark_line(point=points).encode(x=x, y=y, color=color, strokeDash=dash)
    return svg(lines.properties(width=WIDTH, height=HEIGHT), f"Bytes {direction} by round and method")


def gains(method: str, values: Mapping[str, float], span: tuple[float, float]) -> Html:
    """Gain over Local of each client, sorted: bars with names, bars without for more, a histogram for many.

    `span` is common to all methods, so that their charts can be compared.
    """
    ranked = sorted(values.items(), key=lambda item: -item[1])
    rows = [{"client": name, "gain": gain, "rank": rank} for rank, (name, gain) in enumerate(ranked)]
    scale = alt.Scale(domain=list(span), nice=True)
    color = alt.condition("datum.gain < 0", alt.value(DOWN), alt.value(UP))
    size: dict[str, Any] = {"width": WIDTH, "height": HEIGHT}
    if len(rows) <= NAMED:
        names = [printable(name) for name, _ in ranked]
        y = alt.Y("client:N").sort(names).title(None).axis(labelLimit=100, domain=False)
        x = alt.X("gain:Q").scale(scale).title(POINTS).axis(tickCount=5)
        bars = chart(rows).mark_bar().encode(x=x, y=y, color=color)
        size = {"width": WIDTH - 60, "height": 14 * len(rows)}  # the names take place
    elif len(rows) <= BARS:
        x = alt.X("rank:O").title(f"{len(rows)} clients, sorted").axis(labels=False, domain=False)
        y = alt.Y("gain:Q").scale(scale).title(POINTS).axis(tickCount=5)
        bars = chart(rows).mark_bar().encode(x=x, y=y, color=color)
    else:
        x = alt.X("gain:Q").scale(scale).bin("binned").title(POINTS).axis(tickCount=5, grid=False)
        y = alt.Y("clients:Q").axis(tickCount=5)
        bars = chart(histogram(list(values.values()), span)).mark_bar().encode(x=x, x2="end:Q", y=y, color=color)
    return svg(bars.properties(title=printable(method), **size), f"Gain over Local of each client, {method}")


def histogram(values: Sequence[float], span: tuple[float, float], bins: int = 24) -> list[Row]:
    """Counts in equal bins, one of which starts at 0, so that none holds both gains and losses.

    >>> histogram([-1.0, 0.0, 0.5, 3.0], (-1.0, 3.0), bins=4)[:2]
    [{'gain': -1.0, 'end': 0.0, 'clients': 1}, {'gain': 0.0, 'end': 1.0, 'clients': 2}]
    """
    width = (span[1] - span[0]) / bins or 1.0
    places = [math.floor(value / width) for value in values]
    return [
        {"gain": place * width, "end": (place + 1) * width, "clients": places.count(place)}
        for place in range(min(places), max(places) + 1)
    ]


def data(clients: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> tuple[Html, int]:
    """The heat map of class counts, and how many clients it shows: so many that the page stays small."""
    shown, cells = 0, 0
    while shown < min(BARS, len(clients)) and cells < CELLS:
        cells += sum(count > 0 for count in clients[shown]["counts"])
        shown += 1
    some = clients[:shown]
    drawn = heat_map([row["name"] for row in some], classes, [row["counts"] for row in some])
    return svg(drawn, "Training samples per client and class"), shown


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
    symbol: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 3, "symbolOpacity": 1}
    legend = alt.Legend(title=None, orient="bottom", columns=2, labelLimit=130, **symbol)
    scale = alt.Scale(domain=[name for name, _ in shown], range=[color for _, color in shown])
    return alt.Color("method:N").scale(scale).legend(legend)
