"""Plain text tables and units."""

from __future__ import annotations

import time
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns under a header: the first `left` to the left, the others to the right.

    >>> print(table(["name", "n"], [["a", "10"], ["bcdef", "7"]]))
    name    n
    -----  --
    a      10
    bcdef   7
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])


def bytes_text(count: float) -> str:
    """Bytes with a unit, in powers of ten.

    >>> bytes_text(1_228_768)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def age_text(created: float | None) -> str:
    """How long ago that was, roughly; a clock may have been set back since.

    >>> age_text(time.time() - 7300)
    '2 h'
    """
    if created is None:
        return "–"
    return duration_text(max(0.0, time.time() - created))


def duration_text(seconds: float) -> str:
    """A time in the largest unit that fits.

    >>> duration_text(12.3), duration_text(100)
    ('12 s', '1 min')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(value: float | None) -> str:
    """A share as percent with two digits."""
    return "–" if value is None else f"{100 * value:.2f} %"
