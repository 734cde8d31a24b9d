"""Tables in CSV: a row per sample, with its label, its client if there are clients, and features or an image."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfed.data.folders import read_images
from pfed.data.pool import Pool
from pfed.errors import UserError, unknown

_IMAGE_COLUMNS = ("path", "file")
_SPLITS = {"train": False, "test": True}


class Table:
    """The cells of a CSV file by column, and the words to complain about one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = _rows(path)
        if not rows:
            raise UserError(f"{path} must have a header and at least one row. Got an empty file.")
        self.header = [name.strip() for name in rows[0][1]]
        _check_header(path, self.header)
        self.lines = [line for line, _ in rows[1:]]
        if not self.lines:
            raise UserError(f"{path} must have a header and at least one row. Got only a header.")
        for line, cells in rows[1:]:
            if len(cells) != len(self.header):
                raise UserError(f"{path}, line {line} must have {len(self.header)} cells. Got {len(cells)}.")
        self._columns = list(zip(*(cells for _, cells in rows[1:]), strict=True))

    def name(self, wanted: str) -> str | None:
        """The column of this name, whatever its case."""
        exact = [name for name in self.header if name == wanted]
        return next(iter(exact or [name for name in self.header if name.lower() == wanted.lower()]), None)

    def require(self, wanted: str) -> str:
        """As `name`, for a column that must be there; numbers among the names are the mark of a missing header."""
        found = self.name(wanted)
        if found is None and not all(np.isnan(_number(name)) for name in self.header):
            start = ", ".join(self.header[:3])
            raise UserError(f"The first line of {self.path} must name the columns, {wanted!r} too. Got {start!r}.")
        if found is None:
            raise unknown(f"column in {self.path.name} named", wanted, self.header)
        return found

    def texts(self, column: str) -> list[str]:
        """A column in which no cell is empty."""
        cells = [cell.strip() for cell in self._columns[self.header.index(column)]]
        if "" in cells:
            raise self.complaint(column, cells.index(""), "must not be empty")
        return cells

    def numbers(self, column: str) -> NDArray[np.float32]:
        """A column of finite numbers."""
        cells = self._columns[self.header.index(column)]
        try:
            values = np.array(cells, np.float64)
        except ValueError:
            values = np.array([_number(cell) for cell in cells])
        bad = ~(np.abs(values) <= np.finfo(np.float32).max)
        if bad.any():
            raise self.complaint(column, int(bad.argmax()), "must be a finite number")
        return values.astype(np.float32)

    def complaint(self, column: str, row: int, rule: str) -> UserError:
        cell = self._columns[self.header.index(column)][row]
        return UserError(f"{self.path}, line {self.lines[row]}, column {column!r} {rule}. Got {cell!r}.")


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """The lines that hold something, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        first = text.split("\n", 1)[0]
        delimiter = max(",;\t", key=first.count)  # spreadsheets of some countries write semicolons
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {error}.") from error


def _check_header(path: Path, header: list[str]) -> None:
    if "" in header:
        raise UserError(
            f"Every column of {path} must have a name. Got none for column {header.index('') + 1} "
            f"(pandas writes such a one unless index=False)."
        )
    lower = [name.lower() for name in header]
    twice = next((name for name in header if lower.count(name.lower()) > 1), None)
    if twice is not None:
        raise UserError(f"The columns of {path} must have different names. Got {twice!r} twice.")


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def read_table(path: Path, label: str = "label", client: str | None = None, image_size: int | None = None) -> Pool:
    """All rows of a CSV file, with owners if it has a client column (`client` unless another is named)."""
    table = Table(path)
    label_column = table.require(label)
    client_column = table.name("client") if client is None else table.require(client)
    split_column = table.name("split")
    image_column = next((name for name in map(table.name, _IMAGE_COLUMNS) if name is not None), None)
    known = {label_column, client_column, split_column, image_column}
    rest = [name for name in table.header if name not in known]
    if image_column is not None:
        x = read_images([path.parent / cell for cell in table.texts(image_column)], image_size)
    else:
        x = _features(table, rest)
    owners = table.texts(client_column) if client_column is not None else []
    clients = tuple(sorted(set(owners)))
    position = {name: index for index, name in enumerate(clients)}
    return Pool(
        x=x,
        labels=np.array(table.texts(label_column), np.str_),
        test=_split(table, split_column),
        owner=np.array([position[name] for name in owners] or [0] * len(x), np.int64),
        clients=clients,
        notes=_unused(rest) if image_column is not None else (),
    )


def _features(table: Table, columns: Sequence[str]) -> Tensor:  # (n, columns)
    if not columns:
        raise UserError(f"{table.path} must have columns of features, or a path column of images. Got neither.")
    return torch.from_numpy(np.stack([table.numbers(name) for name in columns], axis=1))


def _split(table: Table, column: str | None) -> NDArray[np.bool_]:
    if column is None:
        return np.zeros(len(table.lines), np.bool_)
    cells = [cell.lower() for cell in table.texts(column)]
    strange = next((row for row, cell in enumerate(cells) if cell not in _SPLITS), None)
    if strange is not None:
        raise table.complaint(column, strange, "must be train or test")
    return np.array([_SPLITS[cell] for cell in cells], np.bool_)


def _unused(columns: Sequence[str]) -> tuple[str, ...]:
    return (f"Beside images, the columns {', '.join(columns)} were left out.",) if columns else ()
