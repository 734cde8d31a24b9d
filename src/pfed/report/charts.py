"""The report's charts: inline SVG in the page's own colours, narrow enough for a phone."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import altair as alt

from pfed.data.show import heat_map, printable
from pfed.report.markup import Html
from pfed.report.numbers import Row

WIDTH, HEIGHT = 260, 170
FONT = "Arial, Helvetica, sans-serif"  # as wide on most machines as where the chart is laid out
INK = "currentColor"  # follows the page from light to dark
UP, DOWN = "#4c8bd6", "#e08214"  # a gain, a loss: blue and orange are told apart by all eyes
PALETTE = ("#4c8bd6", "#e08214", "#2ca25f", "#c25fb0", "#d9534f", "#17a2b8", "#96785f", "#7f7fd5", "#a09a2b", "#808890")
DASHES = ([8, 4], [4, 4], [2, 4], [8, 3, 2, 3])
NAMED, BARS, CELLS = 30, 200, 6000  # clients with names; clients with a bar each; cells of the heat map


def svg(chart: alt.Chart | alt.LayerChart | alt.HConcatChart, label: str) -> Html:
    """A chart as an inline SVG; `label` is what a screen reader says."""
    line = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11}
    axis = {
        **line,
        "gridColor": INK,
        "gridOpacity": 0.15,
        "domainColor": INK,
        "domainOpacity": 0.5,
        "ticks": False,
        "labelPadding": 4,
    }
    title = {"color": INK, "anchor": "start", "fontSize": 13}
    view = {"stroke": None}
    config = {"axis": axis, "legend": line, "title": title, "view": view, "background": "transparent", "aria": False}
    text = io.StringIO()
    chart.properties(
        config=alt.Config.from_dict(
            {"padding": {"left": 14, "right": 8, "top": 2, "bottom": 2}, "font": FONT, **config}
        )
    ).save(text, format="svg")
    drawn = re.sub(r"^<svg[^>]*?(?= width=)", f'<svg role="img" aria-label="{escape(label)}"', text.getvalue())
    return Html(re.sub(r'(<path [^>]*?d=")([^"]*)', _rounded, drawn))


def _rounded(path: re.Match[str]) -> str:
    """A path to a hundredth of a pixel: a quarter of the length, and no eye can tell."""
    return path[1] + re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[2])


def curves(rows: Sequence[Row], across: str, methods: Sequence[str]) -> Html:
    """Mean accuracy across "round" or "bytes"; the band goes from the worst to the best run of a method."""
    rows = rows if across == "round" else _to_the_edge(rows)
    chart = _chart(rows)
    x, y = _across(across), alt.Y("mean:Q").title("accuracy %").scale(zero=False).axis(tickCount=5)
    color = _color(rows, methods)
    points = max(sum(row["method"] == method for row in rows) for method in {row["method"] for row in rows})
    line = chart.mark_line(point=points <= NAMED and {"size": 16}).encode(x=x, y=y, color=color)
    band = chart.mark_area(opacity=0.18).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
    label = f"Mean accuracy by {'round' if across == 'round' else 'bytes sent per client'} and method"
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
    few = len({row["round"] for row in rows}) <= 2 and {"size": 16}
    chart = (
        _chart(rows).mark_line(point=few).encode(x=_across("round"), y=y, color=_color(rows, methods), strokeDash=dash)
    )
    return svg(chart.properties(width=WIDTH, height=HEIGHT), f"Bytes {direction} by round and method")


def gains(method: str, values: Mapping[str, float], span: tuple[float, float]) -> Html:
    """Gain over Local of each client, sorted: bars with names, bars without for more, a histogram for many.

    `span` is common to all methods, so that their charts can be compared.
    """
    ranked = sorted(values.items(), key=lambda item: -item[1])
    rows: list[Row] = [
        {"client": printable(name), "gain": gain, "rank": rank} for rank, (name, gain) in enumerate(ranked)
    ]
    scale = alt.Scale(domain=list(span), nice=True)
    color = alt.condition("datum.gain < 0", alt.value(DOWN), alt.value(UP))
    if len(rows) <= NAMED:
        x = alt.X("gain:Q").scale(scale).title("points over Local").axis(tickCount=5)
        y = alt.Y("client:N").sort([row["client"] for row in rows]).title(None).axis(labelLimit=100, domain=False)
        chart = (
            _chart(rows).mark_bar().encode(x=x, y=y, color=color).properties(width=WIDTH - 60, height=14 * len(rows))
        )
    elif len(rows) <= BARS:
        x = alt.X("rank:O").title(f"{len(rows)} clients, sorted").axis(labels=False, domain=False)
        y = alt.Y("gain:Q").scale(scale).title("points over Local").axis(tickCount=5)
        chart = _chart(rows).mark_bar().encode(x=x, y=y, color=color).properties(width=WIDTH, height=HEIGHT)
    else:
        x = alt.X("gain:Q").scale(scale).bin("binned").title("points over Local").axis(tickCount=5, grid=False)
        y = alt.Y("clients:Q").title("clients").axis(tickCount=5)
        chart = _chart(histogram(list(values.values()), span)).mark_bar()
        chart = chart.encode(x=x, x2="end:Q", y=y, color=color).properties(width=WIDTH, height=HEIGHT)
    return svg(chart.properties(title=printable(method)), f"Gain over Local of each client, {method}")


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
    chart = heat_map([row["name"] for row in some], classes, [row["counts"] for row in some])
    return svg(chart, "Training samples per client and class"), shown


# As `pfed.tables.bytes_text` writes them.
_BYTES = "datum.value < 1000 ? datum.value + ' B' : replace(format(datum.value, '.3~s'), /([kMGT])$/, ' $1B')"


def _chart(rows: Sequence[Row]) -> alt.Chart:
    clean = [{key: printable(v) if isinstance(v, str) else v for key, v in row.items()} for row in rows]
    return alt.Chart(alt.Data.from_dict({"values": clean}, validate=False))


def _across(name: str) -> alt.X:
    if name == "round":
        return alt.X("round:Q").title("round").axis(tickCount=5, tickMinStep=1, format="d", grid=False)
    return alt.X("bytes:Q").title("bytes per client, up and down").axis(tickCount=4, labelExpr=_BYTES, grid=False)


def _color(rows: Sequence[Row], methods: Sequence[str]) -> alt.Color:
    """A method has one colour in the whole report."""
    present = {row["method"] for row in rows}
    shown = [(printable(method), PALETTE[i % len(PALETTE)]) for i, method in enumerate(methods) if method in present]
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=2,
        labelLimit=130,
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
    )
    scale = alt.Scale(domain=[name for name, _ in shown], range=[color for _, color in shown])
    return alt.Color("method:N").scale(scale).legend(legend)
