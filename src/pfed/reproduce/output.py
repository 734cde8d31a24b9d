"""A table as text, Markdown, CSV and JSON. A reduced one has no gap, and says of itself that it is reduced."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pfed.reproduce import figures, origin
from pfed.reproduce.figures import Kept, Place, Verdict, duration
from pfed.reproduce.paper import Column, Published, Row, Table, load
from pfed.tables import table as aligned

NONE = "–"
NOT_HERE = "data not here"
REDUCED = "REDUCED, not the paper's {}: figures can't be compared with the paper's, only the order of the rows."


@dataclass(frozen=True)
class Made:
    """A table as it came out here."""

    table: Table
    rows: Sequence[Row]
    kept: Mapping[tuple[str, str, int], Kept]  # by row, column and seed
    command: str
    missing: Mapping[str, str] = field(default_factory=dict)  # columns whose data are not here, and which

    @property
    def label(self) -> str:
        """The table's name with what is not the paper's: the scale, and the data as they were read."""
        scale = [] if self.table.scale == "full" else [self.table.scale]
        return "-".join([self.table.name, *scale, *self._foreign()])

    def _foreign(self) -> list[str]:
        """The data that were read and are not the paper's, or not all of them."""
        full = load(self.table.source)
        pairs = [(row, column) for row in full.rows.values() for column in full.columns.values()]
        return sorted(set(self.sources()) - {origin.whole(full.settings(*pair)) for pair in pairs})

    def sources(self, column: Column | None = None) -> list[str]:
        """The data that were read, for a column or for all."""
        kept = [one for (_, name, _), one in self.kept.items() if column is None or name == column.name]
        return sorted({one["source"] for one in kept})

    def other_data(self, column: Column) -> str:
        """In how far the data of a column are not the paper's, in the paper's setting, where that matters."""
        if column.figure.startswith("bytes:"):  # of so many rounds, whatever the data
            return ""
        own = [kept for (_, name, _), kept in self.kept.items() if name == column.name]
        return next((text for kept in own if (text := origin.other_data(self.table, kept))), "")

    def comparable(self, column: Column) -> bool:
        """Whether the figures of a column can be compared with the paper's."""
        return self.table.scale == "full" and not self.other_data(column)

    @property
    def columns(self) -> list[Column]:
        """The main one first."""
        return sorted(self.table.columns.values(), key=lambda column: column.name != self.table.main)

    @property
    def places(self) -> dict[str, list[Place]]:
        return figures.table_of(self.table, self.rows, self.kept)

    def verdicts(self) -> list[Verdict]:
        """Of the main column, or of each where columns are runs of their own; costs are not judged."""
        places = self.places
        asked = self.columns if self.table.by_column else self.columns[:1]
        judged = [column for column in asked if column.unit == "%" and column.name not in self.missing]
        return [
            figures.verdict(
                column,
                places[column.name],
                {(row, seed): kept for (row, name, seed), kept in self.kept.items() if name == column.name},
            )
            for column in judged
        ]

    def head(self) -> list[str]:
        """What stands above every form of the table."""
        table = self.table
        title = f"{self.label}: {table.paper}. {table.about}"
        if table.scale == "small":
            place = " in place of the paper's data" if self._foreign() else ""
            on = f" On {', '.join(self.sources())}{place}." if self.kept else ""
            return [title, f"{REDUCED.format('setting')}{on} {table.reduced}"]
        others = dict.fromkeys(text for column in self.columns if (text := self.other_data(column)))
        return [title, f"{REDUCED.format('data')} There is {'; '.join(others)}."] if others else [title]

    def foot(self) -> list[str]:
        """What a reader must know: verdicts, how it was judged, what is open, notes of rows and runs."""
        places = self.places
        lines = [f"Column {v.column} {v.text}" for v in self.verdicts()]
        lines += [text for column in self.columns[:1] if (text := figures.leaders(column, places[column.name]))]
        lines += [f"The paper says: {self.table.claim}"] if self.table.claim else []
        lines += [self._judged()]
        lines += [f"Not as in the paper: {text}" for text in self.table.differs]
        lines += [f"Left open by the paper: {text}" for text in self.table.open]
        lines += [f"{row.name}: {row.note}" for row in self.rows if row.note]
        notes: dict[str, set[str]] = {}
        for (row, _, _), kept in self.kept.items():
            for note in kept["notes"]:
                notes.setdefault(note, set()).add(row)
        every = {row for row, _, _ in self.kept}
        lines += [note if rows == every else f"{', '.join(sorted(rows))}: {note}" for note, rows in notes.items()]
        return [*lines, self._made_by(), f"Command: {self.command}"]

    def _judged(self) -> str:
        """Which evaluation the figures are of."""
        found = []
        for kept in self.kept.values():
            result = kept["result"]
            found.append(f"{result['select']} ({result['eval_point']})")
        rule = ", ".join(dict.fromkeys(found)) or "not run"
        shown = ", ".join(f"{column.name} is {column.figure}" for column in self.columns)
        return f"Reported round and point: {rule}. {shown}. Spread: standard deviation over seeds."

    def _made_by(self) -> str:
        def said(key: str) -> str:
            return ", ".join(sorted({kept[key] for kept in self.kept.values() if kept[key] is not None}))

        torch = ", ".join(sorted({kept["versions"].get("torch", NONE) for kept in self.kept.values()}))
        runs = {id(kept): kept for kept in self.kept.values()}.values()
        taken = [kept for kept in runs if "taken" in kept]
        spent = sum(kept["seconds"] for kept in runs if "taken" not in kept)
        also = f", {len(taken)} of them taken from other tables" if taken else ""
        commit = f"commit {said('commit')}, " if said("commit") else ""
        return (
            f"pfed {said('version') or NONE}, {commit}torch {torch or NONE}, {said('processor') or NONE}; "
            f"{len(runs)} run{'s' * (len(runs) != 1)}{also}, {duration(spent)} of training."
        )

    def cells(self, column: Column) -> tuple[list[str], list[list[str]]]:
        """Header and rows of one column's table."""
        places = self.places[column.name]
        unit = f"{column.name} {column.unit}"
        if column.name in self.missing:
            return [unit, "paper", "ours"], [[p.row.name, _paper(p.paper), NOT_HERE] for p in places]
        if self.comparable(column):
            body = [[p.row.name, _paper(p.paper), _ours(p), _signed(p.gap), _plain(p.spread)] for p in places]
            return [unit, "paper", "ours", "gap", "spread"], body
        best = max if column.unit == "%" else min  # of costs the least
        here = figures.ranks([p.ours for p in places], best)
        there = figures.ranks([p.paper.value if p.paper else None for p in places], best)
        body = [
            [p.row.name, _ours(p), _plain(p.spread), str(a or NONE), str(b or NONE)]
            for p, a, b in zip(places, here, there, strict=True)
        ]
        return [unit, "here, reduced", "spread", "rank here", "rank in the paper"], body

    def text(self) -> str:
        parts = [*self.head(), ""]
        for column in self.columns:
            parts += [aligned(*self.cells(column)), ""]
        return "\n".join([*parts, *self.foot()])

    def markdown(self) -> str:
        label, *about = self.head()
        name, _, rest = label.partition(": ")
        parts = [f"## {name}", "", rest, ""]
        for text in about:
            parts += [f"**{text}**", ""]
        for column in self.columns:
            header, rows = self.cells(column)
            parts += [_line(header), _line(["---", *["---:"] * (len(header) - 1)]), *map(_line, rows), ""]
        *foot, command = self.foot()
        parts += [f"- {line}" for line in foot]
        return "\n".join([*parts, "", "```bash", command.removeprefix("Command: "), "```", ""])

    def csv(self) -> str:
        """One line for each place; without the paper's figures where they can't be compared."""
        file = io.StringIO()
        names = ["table", "scale", "data", "row", "column", "unit", "paper", "paper_spread"]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, "ours", "spread", "gap", "seeds", "comparable"])
        for column in self.columns:
            full, data = self.comparable(column), ", ".join(self.sources(column))
            for place in self.places[column.name]:
                paper = place.paper if full else None
                writer.writerow(
                    [
                        *(self.table.name, self.table.scale, data, place.row.name, column.name),
                        *(column.unit, _exact(paper.value if paper else None)),
                        *(_exact(paper.spread if paper else None), _exact(place.ours), _exact(place.spread)),
                        *(_exact(place.gap if full else None), len(place.values), "yes" if full else "no"),
                    ]
                )
        return file.getvalue()

    def json(self) -> dict[str, Any]:
        comparable = {column.name: self.comparable(column) for column in self.columns}
        rows = [
            {
                "row": place.row.name,
                "method": place.row.method,
                "column": column.name,
                "unit": column.unit,
                "data": self.sources(column),
                "paper": place.paper.value if comparable[column.name] and place.paper else None,
                "ours": place.ours,
                "gap": place.gap if comparable[column.name] else None,
                "spread": place.spread,
                "seeds": {str(seed): value for seed, value in place.values.items()},
            }
            for column in self.columns
            for place in self.places[column.name]
        ]
        verdicts = [{"column": v.column, "counts": v.counts, "text": v.text, **v.numbers} for v in self.verdicts()]
        about = {
            "table": self.table.name,
            "scale": self.table.scale,
            "comparable": all(comparable.values()),
            "command": self.command,
        }
        found: dict[str, Any] = json.loads(json.dumps({**about, "rows": rows, "verdicts": verdicts}))
        return found


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _paper(published: Published | None) -> str:
    if published is None:
        return NONE
    spread = "" if published.spread is None else f" ± {published.spread:.2f}"
    return f"{published.value:.2f}{spread}{' ?' if published.doubtful else ''}"


def _ours(place: Place) -> str:
    return "not reached" if place.unreached else _plain(place.ours)


def _plain(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}"


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}".rstrip("0").rstrip(".")


def page(tables: Sequence[Made]) -> str:
    """All tables on one page, with a line for each at its head."""
    header = ["table", "paper", "setting", "seeds", "verdict", "leaders"]
    lines = []
    for made in tables:
        main = made.columns[0]
        seeds = len({seed for _, _, seed in made.kept})
        verdict = "; ".join(v.text.partition(":")[0].removeprefix("is ") for v in made.verdicts()) or NONE
        first = figures.leaders(main, made.places[main.name]) or NONE
        setting = "the paper's" if all(map(made.comparable, made.columns)) else "reduced"
        lines.append([made.label, made.table.paper, setting, str(seeds), verdict, first])
    summary = [_line(header), _line(["---"] * len(header)), *map(_line, lines)]
    return "\n".join(["# Tables of the papers, made again", "", *summary, "", *(made.markdown() for made in tables)])
