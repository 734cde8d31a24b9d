"""Reports of runs, to read offline and to hand on.

>>> import tempfile
>>> from pfed import compare
>>> both = compare(["local", "fedavg"], clients=4, rounds=1)
>>> write(both.results, Path(tempfile.mkdtemp()) / "report.html").name
'report.html'
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfed.errors import UserError, unknown
from pfed.report import page
from pfed.report.figures import FORMATS, save
from pfed.report.markup import Html
from pfed.report.page import tables
from pfed.result import Result

__all__ = ["export", "tables", "write"]


def write(results: Sequence[Result], out: Path | str, first: Sequence[Html] = ()) -> Path:
    """Write one self-contained HTML file about these runs; it needs no network, and can be read without its script.

    What is `first` stands before all else.
    """
    out = Path(out)
    text = page.render(_some(results), first)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A file name of a client need not be valid Unicode, and must not cost the report.
        out.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"The report can't be written to {str(out)!r}: {error.strerror or error}.") from error
    return out


def export(results: Sequence[Result], folder: Path | str, form: str) -> list[Path]:
    """Write the report's figures as files for a paper, "png" (300 dpi) or "svg"; "csv" has the numbers behind them."""
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    return save(page.figures(_some(results)), Path(folder), form)


def _some(results: Sequence[Result]) -> Sequence[Result]:
    if not results:
        raise UserError("A report needs at least one run. Got none.")
    return results
