"""What a folder holds of the data sets that pfed knows: which are whole, which lack what, and what is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfed.data.catalog import SOURCES
from pfed.data.fetch import locate, matches
from pfed.data.forms import AnyForm, Archive, Form, Source
from pfed.errors import UserError

State = Literal["complete", "reduced", "incomplete", "damaged", "not there"]


@dataclass(frozen=True)
class Finding:
    """One data set in a folder."""

    name: str
    state: State
    place: Path | None = None  # where it is, or most of it
    there: tuple[str, ...] = ()  # files and folders that it needs
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # a sentence each

    def __str__(self) -> str:
        """What there is to say beside the state."""
        if self.problems:
            return " ".join(self.problems)
        if self.place is None:
            return f"needs {' or '.join(map(str, SOURCES[self.name].forms))}"
        lacks = f": missing {', '.join(self.missing)}; there: {', '.join(self.there)}" if self.missing else ""
        return f"{self.place}{lacks}"


def survey(folder: str | Path) -> list[Finding]:
    """Every data set that has files of its own, as it is in this folder or below it."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}.")
    return [_found(source, root) for source in SOURCES.values() if source.forms]


def text(findings: Sequence[Finding], width: int = 110) -> str:
    """What is there first, then what is not."""
    names, states = (
        max(len(str(value)) for value in column) for column in zip(*((f.name, f.state) for f in findings), strict=True)
    )
    lines = []
    for finding in sorted(findings, key=lambda finding: finding.state == "not there"):
        start = f"{finding.name:{names}}  {finding.state:{states}}  "
        lines += textwrap.wrap(
            start + str(finding),
            width,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def bad(findings: Sequence[Finding]) -> bool:
    """Is something damaged or incomplete, or nothing there at all?"""
    states = {finding.state for finding in findings}
    return bool(states & {"damaged", "incomplete"}) or states == {"not there"}


def _found(source: Source, root: Path) -> Finding:
    best = Finding(source.name, "not there")
    for form in source.forms:
        for place in dict.fromkeys(_places(source, root)):
            meant = place != root or root.name.lower() == source.name
            parts = form.parts(place) if meant else _own_parts(form, place)
            there, missing = ([name for name, here in parts.items() if here is yes] for yes in (True, False))
            if not missing:
                problems = form.problems(place, "put the original file there")
                whole: State = "reduced" if isinstance(form, Archive) else "complete"
                return Finding(source.name, "damaged" if problems else whole, place, tuple(there), (), tuple(problems))
            # A folder that many data sets share may hold a name of another one.
            if len(there) > len(best.there) and (meant or len(there) >= len(missing)):
                best = Finding(source.name, "incomplete", place, tuple(there), tuple(missing))
    return best


def _places(source: Source, root: Path) -> list[Path]:
    """Where `pfed.data.sources` looks when PFED_DATA is this folder."""
    own = root / source.name
    above = own if own.is_dir() else root
    return [path for path in (above, *(above / name for name in source.folders)) if path.is_dir()]


def _own_parts(form: AnyForm, place: Path) -> dict[str, bool]:
    """As `form.parts`, without files of another content: MNIST's and Fashion-MNIST's have the same names."""
    parts = form.parts(place)
    for file in form.files if isinstance(form, Form) else ():
        path = locate(place, file)
        if path is not None and path.name == file.name and file.digest:
            parts[file.name] = matches(path, file.digest)
    return parts
