"""One drawing, for the page and as a file: inline SVG in the page's own colours; PNG, SVG and CSV for a paper."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import vl_convert
from altair.utils.schemapi import debug_mode

from pfed.errors import UserError
from pfed.report.markup import Html

Row = dict[str, Any]
Drawing = Any  # altair's charts and their combinations

INK = "currentColor"  # follows the page from light to dark
FORMATS = ("png", "svg", "csv")
COLUMN, PAGE, DPI = 3.3, 7.0, 300  # inches of a paper's column, of its page; dots per inch
NARROW = 420  # pixels of a figure that goes into a column

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


@dataclass(frozen=True)
class Figure:
    """What is drawn from which numbers. Nothing is drawn before it is asked for."""

    name: str  # of a file, without its suffix
    label: str  # what a screen reader says
    rows: Sequence[Row]
    draw: Callable[[], Drawing]
    caption: str = ""

    def inline(self) -> Html:
        """As an element of the page. It needs no namespace there, so that the page names no address at all."""
        opening = f'<svg role="img" aria-label="{escape(self.label)}"'
        return Html(re.sub(r"^<svg[^>]*?(?= width=)", lambda _: opening, _svg(self.draw)))

    def save(self, folder: Path, form: str) -> Path:
        """As a file for a paper: black on white, as wide as a column, or as a page if it is wide."""
        path = folder / f"{self.name}.{form}"
        if form == "csv":
            path.write_text(_csv(self.rows), encoding="utf-8", errors="replace")
            return path
        drawn = _svg(self.draw).replace(INK, "black")
        width, height = (float(re.search(rf'{side}="([\d.]+)"', drawn)[1]) for side in ("width", "height"))  # type: ignore[index]
        inches = COLUMN if width <= NARROW else PAGE
        white = '<rect width="100%" height="100%" fill="white"/>'
        size = f'width="{inches}in" height="{inches * height / width:.4g}in"'
        framed = re.sub(r' width="[\d.]+" height="[\d.]+"([^>]*>)', rf" {size}\1{white}", drawn, count=1)
        if form == "svg":
            path.write_text(framed, encoding="utf-8")
        else:
            pixels = drawn.replace(">", f">{white}", 1)
            path.write_bytes(vl_convert.svg_to_png(pixels, scale=72 * inches / width, ppi=DPI))
        return path


def save(figures: Sequence[Figure], folder: Path, form: str) -> list[Path]:
    """Every figure as a file of one of `FORMATS`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [figure.save(folder, form) for figure in figures]
    except OSError as error:
        raise UserError(f"The figures can't be written to {str(folder)!r}: {error.strerror or error}.") from error


def slug(*words: str) -> str:
    """Words as a file's name.

    >>> slug("gains", "fedavg+ft, mu 0.1")
    'gains-fedavg+ft-mu-0.1'
    """
    return re.sub(r"[^\w.+-]+", "-", "-".join(words)).strip("-.")[:80] or "figure"


def _svg(draw: Callable[[], Drawing]) -> str:
    text = io.StringIO()
    # A check of every chart against its schema takes as long as the drawing; the tests draw each kind.
    with debug_mode(False):
        draw().configure(**LOOK).save(text, format="svg", validate=False)
    return re.sub(r'(<path [^>]*?d=")([^"]*)', _rounded, text.getvalue())


def _rounded(path: re.Match[str]) -> str:
    """A path to a hundredth of a pixel: a quarter of the length, and no eye can tell."""
    return path[1] + re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[2])


def _csv(rows: Sequence[Row]) -> str:
    """A spreadsheet takes a text that begins with = for a formula; a quote before it keeps it a text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"'{v}" if isinstance(v, str) and v[:1] in "=+-@\t\r" else v for k, v in row.items()})
    return text.getvalue()
