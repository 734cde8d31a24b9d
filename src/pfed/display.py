"""How results show themselves, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pfed.tables import bytes_text, percent, table

SHOWN = 30  # clients; a frame has them all
# No colours: the table takes those of the notebook, light or dark.
STYLE = (
    ".pfed .scroll {overflow-x: auto} .pfed td, .pfed th {white-space: nowrap; text-align: right}"
    " .pfed th:first-child {text-align: left} .pfed p {margin: 0.5em}"
)


class Clients(list[dict[str, Any]]):
    """One row per client: its data, its bytes, its metrics. Shows itself as a table."""

    def __init__(self, rows: Iterable[dict[str, Any]], metric: str, score: str):
        super().__init__(rows)
        self._metric, self._score = metric, score

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table's header and rows as texts."""
        header = ["client", "train", "test", f"{self._score} %", "sent", "received"]
        rows = [
            [
                row["name"],
                f"{row['train']:,}",
                f"{row['test']:,}",
                percent(row.get(self._metric)).removesuffix(" %"),
                bytes_text(row["bytes_up"]),
                bytes_text(row["bytes_down"]),
            ]
            for row in self[:SHOWN]
        ]
        return header, rows

    def notes(self) -> list[str]:
        return [f"… and {len(self) - SHOWN:,} more clients"] if len(self) > SHOWN else []

    def __repr__(self) -> str:
        return "\n".join([table(*self.cells()), *self.notes()])

    def _repr_html_(self) -> str:
        return html(*self.cells(), self.notes())


def html(header: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """A table and sentences below it, for a notebook."""
    from pfed.report import markup  # here, for the report's charts take a while to import

    style = markup.tag("style", markup.Html(STYLE))
    below = [markup.tag("p", note) for note in notes]
    return markup.tag("div", style, markup.table(header, rows), *below, class_="pfed")
