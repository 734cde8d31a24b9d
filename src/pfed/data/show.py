"""Pictures of a federation: who holds how many samples, or boxes, of which class, for the terminal and as an image."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfed.data.base import Counts, Federation, class_counts, skew
from pfed.errors import UserError

if TYPE_CHECKING:
    import altair as alt


SHADES = "░▒▓█"
ROWS, COLUMNS, WIDE, NAME = 40, 64, 16, 20  # what fits a terminal: clients, columns, wide columns, letters of a name
HUE = "#4c8bd6"  # dark enough on white, light enough on black


def text(federation: Federation) -> str:
    """Class counts per client for the terminal: a row per client, a column per class, the darker the more samples.

    >>> import pfed
    >>> two = pfed.federation({"Oslo": ([[0.0]] * 10, [0] * 10), "Rome": ([[1.0]] * 5, [1] * 5)})
    >>> print(text(two).splitlines()[-1])
    Rome    ·· ▓▓        4
    """
    counts = _counts(federation)
    names = [printable(client.name, NAME) for client in federation.clients[:ROWS]]
    merged = -(-len(federation.classes) // COLUMNS)  # classes in one column
    cells = [[sum(row[i : i + merged]) for i in range(0, len(row), merged)] for row in counts[:ROWS]]
    most = max(count for row in cells for count in row)
    steps = _steps(most)
    key, ruler, width = _columns(federation.classes, merged)
    gap = " " * (width > 1)
    left = max(map(len, [*names, "client"]))
    unit = _unit(federation)
    lines = [*textwrap.wrap(headline(federation.source, counts, unit), 100), _legend(most, unit), *key, ""]
    lines.append(f"{'client':<{left}}  {ruler}  {unit:>7}")
    for name, row in zip(names, cells, strict=True):
        shades = gap.join((SHADES[bisect_left(steps, count)] if count else "·") * width for count in row)
        lines.append(f"{name:<{left}}  {shades}  {sum(row):>7,}")
    more = len(counts) - len(cells)
    return "\n".join([*lines, f"… and {more:,} more clients"] if more else lines)


def save(federation: Federation, path: Path | str) -> Path:
    """Write class counts per client as a heat map, a PNG or an SVG by the path's suffix."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise UserError(f"The picture's file must end in .png or .svg. Got {path.name!r}.")
    counts = _counts(federation)
    unit = _unit(federation)
    drawn = heat_map([client.name for client in federation.clients], federation.classes, counts, unit)
    title = textwrap.wrap(headline(federation.source, counts, unit), 70)
    drawn = drawn.properties(title=title).configure_title(anchor="start", fontSize=11, fontWeight="normal", offset=12)
    try:
        drawn.configure_view(stroke=None).save(path, format="png" if kind == ".png" else "svg", scale_factor=2)
    except OSError as error:
        raise UserError(f"The picture can't be written to {str(path)!r}: {error.strerror or error}.") from error
    return path


def headline(source: str, counts: Counts, unit: str) -> str:
    """Samples or boxes, clients, classes and how uneven the clients are, in one line."""
    label, size = skew(counts)
    samples, clients, classes = sum(map(sum, counts)), len(counts), len(counts[0])
    shape = f"{samples:,} training {unit}, {clients:,} clients, {classes:,} classes"
    uneven = f"label skew {label:.2f} (0: all alike), size variation {size:.2f} (std / mean)"
    return f"{printable(source)}: {shape}; {uneven}"


def heat_map(names: Sequence[str], classes: Sequence[str], counts: Counts, unit: str) -> alt.HConcatChart:
    """Classes across, clients down, the samples or boxes of each cell as opacity of one hue; sizes as bars beside.

    Opacity rather than a colour scale, since it reads on a white page and on a black one.
    """
    import altair as alt  # here, for `text` need not wait for it

    rows, columns = distinct(names), distinct(classes)
    height, width = min(14.0, max(1.0, 600 / len(rows))), min(14.0, max(1.0, 280 / len(columns)))  # pixels of a cell
    bare: dict[str, Any] = {"ticks": False, "domain": False, "labels": False}
    named: dict[str, Any] = {"ticks": False, "domain": False, "labelLimit": 100}
    named_x = {**named, "title": "class", "labelAngle": 0 if max(map(len, columns)) <= 2 else -90}
    y_axis = {**named, "title": None} if height > 9 else {**bare, "title": f"{len(rows):,} clients"}
    x_axis = named_x if width > 9 else {**bare, "title": f"{len(columns):,} classes"}
    y = alt.Y("client:N").sort(rows).scale(domain=rows)
    x = alt.X("class:N").sort(columns).scale(domain=columns).axis(**x_axis)
    cells = [
        {"client": row, "class": column, unit: count}
        for row, line in zip(rows, counts, strict=True)
        for column, count in zip(columns, line, strict=True)
        if count  # most cells of skewed data are empty, and an empty cell needs no mark
    ]
    legend: dict[str, Any] = {"symbolType": "square", "symbolFillColor": HUE, "symbolStrokeWidth": 0, "format": "~s"}
    opacity = alt.Opacity(f"{unit}:Q").scale(type="sqrt", domainMin=0, range=[0, 1]).legend(tickCount=4, **legend)
    map_ = chart(cells).mark_rect(color=HUE, tooltip=True).encode(x=x, y=y.axis(**y_axis), opacity=opacity)
    sizes = [{"client": row, unit: sum(line)} for row, line in zip(rows, counts, strict=True)]
    total = alt.X(f"{unit}:Q").axis(values=[0, max(map(sum, counts))], format=".3~s", grid=False)
    bars = chart(sizes).mark_bar(color="#888888").encode(x=total, y=y.axis(None))
    size: dict[str, Any] = {"height": height * len(rows)}
    return alt.hconcat(map_.properties(width=width * len(columns), **size), bars.properties(width=50, **size))


def chart(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """A chart of any number of rows. Control characters in their text would end the process."""
    import altair as alt

    clean = [{key: printable(v) if isinstance(v, str) else v for key, v in row.items()} for row in rows]
    return alt.Chart(alt.Data(values=clean))  # type: ignore[no-untyped-call]


def printable(name: str, most: int = 60) -> str:
    """A name without control characters, cut to fit: they move a terminal's cursor, and a chart ends the process.

    >>> printable("Oslo\\n\\x1b[2J")
    'Oslo ?[2J'
    """
    name = "".join(" " if letter.isspace() else letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def distinct(names: Sequence[str]) -> list[str]:
    """Names that differ, for a chart draws what has the same name at the same place."""
    seen: Counter[str] = Counter()
    out = []
    for name in map(printable, names):
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out


def _unit(federation: Federation) -> str:
    """What is counted."""
    return "samples" if federation.clients[0].train.boxes is None else "boxes"


def _counts(federation: Federation) -> list[list[int]]:
    return [class_counts(federation, client) for client in federation.clients]


def _steps(most: int) -> list[int]:
    """The largest count of each shade, in equal steps of the square root: beside one large client, small ones show.

    >>> _steps(160)
    [10, 40, 90, 160]
    """
    return [most * step**2 // len(SHADES) ** 2 for step in range(1, len(SHADES) + 1)]


def _legend(most: int, unit: str) -> str:
    parts, low = [f"{unit}:  · none"], 1
    for shade, high in zip(SHADES, _steps(most), strict=True):
        if low <= high:
            parts.append(f"{shade} {low:,}–{high:,}" if low < high else f"{shade} {high:,}")
        low = high + 1
    return "  ".join(parts)


def _columns(classes: Sequence[str], merged: int) -> tuple[list[str], str, int]:
    """The key to the columns, what stands above them, and the letters of a cell."""
    columns = -(-len(classes) // merged)
    if columns > WIDE:
        ruler = "".join(str(i * merged).ljust(10) for i in range(0, columns - 2, 10))  # the last number has room
        plural = f"each column is {merged} classes, " if merged > 1 else ""
        return [f"classes:  {plural}numbered 0 to {len(classes) - 1}"], f"{ruler:<{columns}}"[:columns], 1
    if all(len(name) <= 2 for name in classes):
        return [], " ".join(f"{printable(name):<2}" for name in classes), 2
    names = ", ".join(f"{i} {printable(name, NAME)}" for i, name in enumerate(classes))
    key = textwrap.wrap(f"classes:  {names}", 100, subsequent_indent=" " * 10)
    return key, " ".join(f"{i:<2}" for i in range(columns)), 2
