"""Small charts of what methods log: lines with a band, heat maps, clouds of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from pfed.data.show import HUE, chart, printable
from pfed.report.charts import HEIGHT, PALETTE, WIDTH, legend
from pfed.report.figures import Drawing, Figure, Row
from pfed.result import thinned

DOTS = 600  # of a cloud
NAMES = 24  # rows or columns of a heat map that have their names beside them

Array = np.ndarray[Any, Any]


def lines(name: str, label: str, title: str, rows: Sequence[Row], caption: str) -> Figure:
    """A line for each name: the mean by round, and a band from low to high."""

    def draw() -> Drawing:
        names = [printable(name) for name in dict.fromkeys(row["name"] for row in rows)]
        rounds = sorted({row["round"] for row in rows})
        x = alt.X("round:Q").title("round").axis(values=thinned(rounds, 5), format="d", grid=False)
        form = ",.3~r" if max(row["high"] for row in rows) >= 1000 else ".3~g"
        y = alt.Y("mean:Q").title(None).scale(zero=False).axis(tickCount=5, format=form)
        scale = alt.Scale(domain=names, range=[PALETTE[i % len(PALETTE)] for i in range(len(names))])
        color = alt.Color("name:N").scale(scale).legend(legend() if len(names) > 1 else None)
        line = chart(rows).mark_line(point={"size": 16} if len(rounds) <= 30 else False).encode(x=x, y=y, color=color)
        band = chart(rows).mark_area(opacity=0.18).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
        return (band + line).properties(title=title, width=WIDTH - 20, height=HEIGHT - 30)

    return Figure(name, label, rows, draw, caption)


def heat(
    name: str,
    label: str,
    title: str,
    rows: Sequence[Row],
    down: Sequence[str],
    across: Sequence[Any],
    what: tuple[str, str],
    caption: str,
) -> Figure:
    """Rows and columns in the given order, values as opacity of one hue, which reads on white and on black.

    `what` is in each row and column. A comma ends a line of the title, which may be wider than the cells.
    """

    def draw() -> Drawing:
        texts = [{**row, "column": str(row["column"])} for row in rows]
        columns = [printable(str(column)) for column in across]
        named: dict[str, Any] = {"ticks": False, "domain": False, "labelLimit": 90}
        bare: dict[str, Any] = {"ticks": False, "domain": False, "labels": False}
        y_axis = named if len(down) <= NAMES else bare
        x_axis = {**named, "labelAngle": 0 if max(map(len, columns)) <= 2 else -90, "labelLimit": 70}
        x_title = what[1]
        if isinstance(across[0], int):  # of numbers a few tell the others
            x_axis |= {"labelAngle": 0, "values": [columns[i] for i in thinned(range(len(columns)), 6)]}
        elif len(columns) > NAMES:
            x_axis, x_title = bare, f"{len(columns)} {what[1]}s"
        x = alt.X("column:N").sort(columns).title(x_title).axis(**x_axis)
        y = alt.Y("row:N").sort([printable(row) for row in down])
        y = y.title(None if len(down) <= NAMES else f"{len(down)} {what[0]}s").axis(**y_axis)
        most = max(max(row["value"] for row in rows), 1e-9)
        shades: dict[str, Any] = {
            "symbolType": "square",
            "symbolFillColor": HUE,
            "symbolStrokeWidth": 0,
            "orient": "bottom",
        }
        shown = alt.Legend(title=None, tickCount=4, format="~g", direction="horizontal", **shades)
        opacity = alt.Opacity("value:Q").scale(domain=[0, most], range=[0, 1]).legend(shown)
        width = min(18.0, (WIDTH - 60) / len(columns))
        height = min(16.0, max(4.0, 360 / len(down)))
        cells = chart(texts).mark_rect(color=HUE).encode(x=x, y=y, opacity=opacity)
        return cells.properties(title=title.split(", "), width=width * len(columns), height=height * len(down))

    return Figure(name, label, rows, draw, caption)


def dots(name: str, label: str, title: str, rows: Sequence[Row], by: str, caption: str) -> Figure:
    """A cloud of points in the colours of their class or client; the colours come again where there are more."""

    def draw() -> Drawing:
        kinds = [printable(kind) for kind in dict.fromkeys(sorted(str(row[by]) for row in rows))]
        colours = [PALETTE[i % len(PALETTE)] for i in range(len(kinds))]
        scale = alt.Scale(domain=kinds, range=colours)
        few = legend(symbolType="square", columns=5) if len(kinds) <= len(PALETTE) else None
        color = alt.Color(f"{by}:N").scale(scale).legend(few)
        x, y = (alt.X("x:Q").axis(None), alt.Y("y:Q").axis(None))
        # A hundredth of a pixel is no picture's business: short numbers keep the page small.
        some = [{"x": round(row["x"], 2), "y": round(row["y"], 2), by: row[by]} for row in rows]
        cloud = chart(some).mark_square(size=10, opacity=0.8).encode(x=x, y=y, color=color)
        return cloud.properties(title=title, width=WIDTH - 40, height=WIDTH - 40)

    return Figure(name, label, rows, draw, caption)


def embedded(points: Array) -> Array:
    """Points in the plane by t-SNE, the same at every call."""
    from sklearn.manifold import TSNE

    if len(points) < 5 or not np.ptp(points, axis=0).any():
        return np.zeros((len(points), 2))
    perplexity = min(30.0, (len(points) - 1) / 3)
    found: Array = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(points)
    return found
