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

from pfed.errors import UserError
from pfed.report.page import render
from pfed.result import Result

__all__ = ["write"]


def write(results: Sequence[Result], out: Path | str) -> Path:
    """Write one self-contained HTML file about these runs; it needs no network and no script."""
    out = Path(out)
    if not results:
        raise UserError("A report needs at least one run. Got none.")
    page = render(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A file name of a client need not be valid Unicode, and must not cost the report.
        out.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"The report can't be written to {str(out)!r}: {error.strerror or error}.") from error
    return out
