"""A results table of a paper: its rows and columns, the published figures, and the settings that make them anew.

A table is a TOML file. `[run]` and `[methods.NAME]` are as in any preset; `[columns]` names what each column shows,
`[[rows]]` the method of each row with what it has of its own, and the paper's figures. `[small]` says how the table is
reduced for two CPU cores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pfed.errors import UserError, unknown
from pfed.presets import Preset, read_toml

FOLDER = Path(__file__).parent.parent / "presets" / "papers"
SMALL = "-small"
Scale = Literal["full", "small"]
SCALES: tuple[Scale, ...] = ("full", "small")

_KEYS = (
    "about",
    "paper",
    "claim",
    "open",
    "differs",
    "seeds",
    "time",
    "main",
    "columns",
    "run",
    "methods",
    "rows",
    "small",
)
_ROW = ("name", "method", "run", "local", "hyper", "paper", "figure", "note")
_COLUMN = ("figure", "run", "methods")
_SMALL = ("about", "time", "seeds", "run", "methods", "columns", "rows", "models", "without")
_FIGURE = re.compile(r"client:.+|cost:[0-9.]+:(sent|paper)|bytes:(sent|paper)|[\w-]+(/[\w-]+)+")
_PUBLISHED = re.compile(r"([0-9.]+)(?:±([0-9.]+))?(\?)?")


@dataclass(frozen=True)
class Published:
    """A figure as it is printed; `doubtful` where the paper contradicts itself or the print is unclear."""

    value: float
    spread: float | None = None
    doubtful: bool = False


@dataclass(frozen=True)
class Column:
    """What a column shows, and the settings in which its runs differ from those of other columns."""

    name: str
    figure: str
    own: Preset = field(default_factory=Preset)

    @property
    def unit(self) -> str:
        kind = self.figure.partition(":")[0]
        return {"cost": "MiB", "bytes": "MB"}.get(kind, "%")


@dataclass(frozen=True)
class Row:
    """A method with what it has of its own, and what the paper has of it, by column."""

    name: str
    method: str
    run: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    hyper: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Published] = field(default_factory=dict)
    figure: Mapping[str, str] = field(default_factory=dict)  # by column, where it is not the column's
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table at one scale."""

    name: str
    source: str  # what it is asked for by: its name, or a file
    about: str
    paper: str
    claim: str
    open: Sequence[str]
    differs: Sequence[str]
    seeds: Sequence[int]
    time: str
    main: str
    columns: Mapping[str, Column]
    rows: Mapping[str, Row]
    common: Preset
    scale: Scale = "full"
    reduced: str = ""
    over: Preset = field(default_factory=Preset)  # of a reduction: wins over all else
    models: Mapping[str, str] = field(default_factory=dict)  # what stands for which of the paper's, in a reduction
    without: Sequence[str] = ()  # options of the paper's run that a reduction has no use for
    stands_in: str = ""  # the data that a reduction takes, where they are not the paper's

    @property
    def label(self) -> str:
        """The name with what is not the paper's."""
        there = f"-{self.stands_in}" if self.stands_in else ""
        return self.name if self.scale == "full" else f"{self.name}-{self.scale}{there}"

    def missing(self) -> dict[str, str]:
        """The columns whose data are not here and can't be fetched, and which."""
        from pfed.data import sources
        from pfed.data.catalog import SOURCES

        def lacks(name: str) -> bool:
            return name in SOURCES and not sources.can_be_had(name)

        needs = {column.name: self.data([column]) for column in self.columns.values()}
        return {column: ", ".join(filter(lacks, names)) for column, names in needs.items() if any(map(lacks, names))}

    @property
    def by_column(self) -> bool:
        """Whether columns are runs of their own."""
        return any(column.own != Preset() for column in self.columns.values())

    def settings(self, row: Row, column: Column) -> dict[str, Any]:
        """The configuration of the run that a cell of the table is taken from."""
        layers = [self.common.of(row.method), column.own.of(row.method)]
        layers += [{**row.run, "local": row.local, "hyper": row.hyper}, self.over.of(row.method)]
        merged: dict[str, Any] = {"method": row.method, "local": {}, "hyper": {}}
        for layer in layers:
            tables = {key: {**merged[key], **layer.get(key, {})} for key in ("local", "hyper")}
            merged = {**merged, **layer, **tables}
        merged["model"] = self.models.get(merged.get("model", "auto"), merged.get("model", "auto"))
        return {key: value for key, value in merged.items() if key not in self.without}

    def data(self, columns: Sequence[Column] = ()) -> list[str]:
        """The data sets that it needs, or some of its columns."""
        pairs = [(row, column) for row in self.rows.values() for column in columns or self.columns.values()]
        settings = [self.settings(row, column) for row, column in pairs]
        return list(dict.fromkeys(s[key] for s in settings for key in ("data", "external") if s.get(key)))

    def preset(self) -> Preset:
        """The settings of the table's first column, with those of each method's first row."""
        column = next(iter(self.columns.values()))
        first: dict[str, Row] = {}
        for row in self.rows.values():
            first.setdefault(row.method, row)
        settings = {method: self.settings(row, column) for method, row in first.items()}
        common = next(iter(settings.values()))
        run = {key: value for key, value in common.items() if key not in ("method", "hyper")}
        methods = {
            method: {
                "run": {key: own[key] for key in own.keys() - {"method", "local", "hyper"} if run.get(key) != own[key]},
                "local": dict(own["local"]),
                "hyper": dict(own["hyper"]),
            }
            for method, own in settings.items()
        }
        return Preset(self.about if self.scale == "full" else f"{self.about} {self.reduced}", run, methods)


def names() -> list[str]:
    """The tables of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, scale: Scale = "full") -> Table:
    """A table of the package by name, or a file (.toml), in the paper's setting or reduced."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if scale not in SCALES:
        raise UserError(f"scale must be full or small. Got {scale!r}.")
    if not path.is_file():
        raise (
            UserError(f"There is no table file {name!r}.")
            if name.endswith(".toml")
            else unknown("table", name, names())
        )
    return _table(read_toml(path), path.stem, name, scale)


def _table(values: dict[str, Any], name: str, source: str, scale: Scale) -> Table:
    where = f"the table {name!r}"
    _known(values, _KEYS, where)
    for key in ("about", "paper", "time"):
        if not isinstance(values.get(key), str):
            raise UserError(f"{key} of {where} must be a text. Got {values.get(key)!r}.")
    columns = {key: _column(key, value, where) for key, value in _mapping(values, "columns", where).items()}
    rows = _rows(values.get("rows"), columns, where)
    if not columns or not rows:
        raise UserError(f"{where} must have columns and rows.")
    table = Table(
        name=name,
        source=source,
        about=values["about"],
        paper=values["paper"],
        claim=values.get("claim", ""),
        open=tuple(values.get("open", ())),
        differs=tuple(values.get("differs", ())),
        seeds=_seeds(values.get("seeds", [0]), where),
        time=values["time"],
        main=values.get("main", next(reversed(columns))),
        columns=columns,
        rows=rows,
        common=_preset(values, where),
    )
    if table.main not in columns:
        raise unknown(f"column of {where}", table.main, columns)
    return table if scale == "full" else _reduced(table, _mapping(values, "small", where))


def _reduced(table: Table, small: Mapping[str, Any]) -> Table:
    where = f"small of the table {table.name!r}"
    _known(small, _SMALL, where)
    for key in ("about", "time"):
        if not isinstance(small.get(key), str):
            raise UserError(f"{key} of {where} must be a text. Got {small.get(key)!r}.")
    columns: dict[str, Column] = {}
    for item in small.get("columns", table.columns):
        columns |= (
            {name: _column(name, value, where) for name, value in item.items()}
            if isinstance(item, dict)
            else {item: _chosen(table.columns, item, "column", where)}
        )
    rows: dict[str, Row] = {}
    for item in small.get("rows", table.rows):
        rows |= (
            _rows([item], table.columns, where)
            if isinstance(item, dict)
            else {item: _chosen(table.rows, item, "row", where)}
        )
    over = _preset(small, where)
    made = replace(
        table,
        columns=columns,
        rows=rows,
        scale="small",
        reduced=small["about"],
        time=small["time"],
        seeds=_seeds(small.get("seeds", [0]), where),
        main=table.main if table.main in columns else next(reversed(columns)),
        over=over,
        models=_mapping(small, "models", where),
        without=tuple(small.get("without", ())),
    )
    given = {table.settings(row, column)["data"] for row in rows.values() for column in columns.values()}
    return replace(made, stands_in=over.run["data"] if {over.run.get("data")} - given - {None} else "")


def _chosen(known: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    if name not in known:
        raise unknown(f"{kind} of {where}", name, known)
    return known[name]


def _column(name: str, value: Any, where: str) -> Column:
    given = {"figure": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise UserError(f"columns.{name} of {where} must be a figure or a table. Got {value!r}.")
    _known(given, _COLUMN, f"columns.{name} of {where}")
    return Column(name, _figure(given.get("figure"), f"columns.{name} of {where}"), _preset(given, where))


def _rows(values: Any, columns: Mapping[str, Column], where: str) -> dict[str, Row]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UserError(f"rows of {where} must be a list of tables.")
    rows: dict[str, Row] = {}
    for value in values:
        name, method = value.get("name"), value.get("method")
        if not isinstance(name, str) or not isinstance(method, str) or name in rows:
            raise UserError(f"Each row of {where} must have a name of its own and a method. Got {name!r}, {method!r}.")
        row = f"the row {name!r} of {where}"
        _known(value, _ROW, row)
        published = {key: _published(text, row) for key, text in _mapping(value, "paper", row).items()}
        figure = {key: _figure(text, row) for key, text in _mapping(value, "figure", row).items()}
        for key in (published.keys() | figure.keys()) - columns.keys():
            raise unknown(f"column of {where}", key, columns)
        settings = {key: _mapping(value, key, row) for key in ("run", "local", "hyper")}
        rows[name] = Row(name, method, **settings, paper=published, figure=figure, note=value.get("note", ""))
    return rows


def _published(value: Any, where: str) -> Published:
    found = _PUBLISHED.fullmatch(str(value).replace(" ", ""))
    if found is None:
        raise UserError(f"A figure of {where} must look like 58.99±1.50, or with ? behind it. Got {value!r}.")
    number, spread, doubt = found.groups()
    return Published(float(number), None if spread is None else float(spread), doubt is not None)


def _figure(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _FIGURE.fullmatch(value):
        forms = "a metric such as personal/local-test, client:NAME, cost:0.85:sent or bytes:sent (or :paper)"
        raise UserError(f"figure of {where} must be {forms}. Got {value!r}.")
    return value


def _preset(values: Mapping[str, Any], where: str) -> Preset:
    from pfed.presets import checked

    return checked({key: values[key] for key in ("run", "methods") if key in values}, where)


def _mapping(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"{key} of {where} must be a table. Got {found!r}.")
    return found


def _known(values: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in values:
        if key not in keys:
            raise unknown(f"entry in {where}", key, keys)


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int and seed >= 0 for seed in value):
        raise UserError(f"seeds of {where} must be a list of whole numbers. Got {value!r}.")
    return tuple(value)
