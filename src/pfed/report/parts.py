"""Which parts of the model are shared and which stay, drawn on the model's parts, and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pfed.data.show import chart, printable
from pfed.report.charts import DOWN, UP, WIDTH, legend
from pfed.report.figures import INK, Drawing, Figure, Row, slug
from pfed.report.markup import Html, table, tag
from pfed.report.numbers import by_method
from pfed.result import Result

SHARED, STAYS = "crosses", "stays at the client"
LISTED = 8  # parts that a cell of the table names
LETTERS = 14  # of a part's name above its block


def parts(results: Sequence[Result]) -> list[Html | Sequence[Figure]]:
    """By method, from its first run that knows what crossed: blocks in the order of the network, and a table."""
    known = {}
    for method, runs in by_method(results).items():
        if crossing := next((run.crossing for run in runs if run.crossing), None):
            known[method] = crossing
    if not known:
        return []
    shares = {method: _shares(crossing) for method, crossing in known.items()}
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for method, rows in shares.items():
        alike.setdefault(tuple((row["part"], row["elements"]) for row in rows), []).append(method)
    note = (
        "What a client sent or received of each part of the model, in a step's last round: a block is a part, in the "
        "order of the network, the wider the more elements (by their logarithm)."
    )
    drawn = [_blocks([(method, shares[method]) for method in methods]) for methods in alike.values()]
    words = [[method, *_words(shares[method]), _beside(known[method])] for method in known]
    header = ["method", SHARED, "crosses in part", STAYS, "messages"]
    return [tag("p", note, class_="soft"), drawn, table(header, words, "words")]


def _shares(crossing: Mapping[str, Any]) -> list[Row]:
    """Of each part, the largest share that crossed in any step and direction."""
    found: dict[str, Row] = {}
    for step in crossing.values():
        for part, elements, down, up in step["parts"]:
            row = found.setdefault(part, {"part": part, "elements": elements, "share": 0.0})
            row["share"] = max(row["share"], down / elements, up / elements)
    return list(found.values())


def _blocks(named: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """A row of blocks for each of some methods whose models have the same parts."""
    rows: list[Row] = []
    places: list[Row] = []
    for method, parts in named:
        at, places = 0.0, []
        for row in parts:
            width = math.log10(10 + row["elements"])
            cut, end = at + width * row["share"], at + width - 0.15
            rows += [
                {"method": method, **row, "where": where, "from": a, "to": b}
                for where, a, b in ((SHARED, at, min(cut, end)), (STAYS, cut, end))
                if b > a
            ]
            places.append({"part": row["part"], "middle": at + width / 2})
            at += width

    def draw() -> Drawing:
        x = alt.X("from:Q").axis(None).scale(domain=[0, max(row["to"] for row in rows)], nice=False)
        y = alt.Y("method:N").sort([printable(method) for method, _ in named]).title(None)
        y = y.axis(domain=False, labelLimit=110).scale(paddingInner=0.25)
        scale = alt.Scale(domain=[SHARED, STAYS], range=[UP, DOWN])
        color = alt.Color("where:N").scale(scale).legend(legend(symbolType="square"))
        blocks = chart(rows).mark_bar().encode(x=x, x2="to:Q", y=y, color=color)
        short = [{**row, "part": printable(_tail(row["part"]), LETTERS)} for row in places]
        words = chart(short).mark_text(angle=270, align="left", fontSize=10, color=INK, baseline="middle")
        labels = words.encode(x=alt.X("middle:Q"), y=alt.value(-4), text="part:N")
        return (blocks + labels).properties(width=WIDTH - 40, height=20 * len(named))

    caption = "" if len(named) > 1 else f"The model of {named[0][0]} has parts of its own."
    label = f"Shared and private parts of the model: {', '.join(method for method, _ in named)}"
    return Figure(slug("parts", named[0][0]), label, rows, draw, caption)


def _tail(part: str) -> str:
    """The end of a dotted name tells parts apart.

    >>> _tail("heads.personal_head")
    'personal_head'
    """
    while len(part) > LETTERS and "." in part:
        part = part.partition(".")[2]
    return part


def _words(rows: Sequence[Row]) -> list[str]:
    """The parts that cross, cross in part and stay."""
    texts = []
    for chosen in (
        [row["part"] for row in rows if row["share"] == 1],
        [f"{row['part']} ({100 * row['share']:.0f} %)" for row in rows if 0 < row["share"] < 1],
        [row["part"] for row in rows if row["share"] == 0],
    ):
        every = f"all {len(rows)} parts" if len(rows) > 1 else "all"
        more = f", … ({len(chosen)} parts)" if len(chosen) > LISTED else ""
        listed = ", ".join(chosen[:LISTED]) + more
        texts.append(every if len(chosen) == len(rows) and "%" not in listed else listed or "–")
    return texts


def _beside(crossing: Mapping[str, Any]) -> str:
    """What a client gets and sends in each step."""
    texts = [
        f"{step}, {way}: {key} ({what})"
        for step, message in crossing.items()
        for way in ("down", "up")
        for key, what in message[way]
    ]
    return "; ".join(texts) or "none"
