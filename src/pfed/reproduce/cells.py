"""The runs of a table: one for each method and seed, kept as a JSON file when it is finished and not run again."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfed.errors import UserError, unknown
from pfed.reproduce import origin
from pfed.reproduce.paper import Row, Table, load

if TYPE_CHECKING:
    from pfed.data.base import Federation
    from pfed.experiment import Experiment
    from pfed.result import Result

CELLS, RUNS = "cells", "runs"


@dataclass
class Cell:
    """A run that one or several places of the table are taken from."""

    name: str
    seed: int
    settings: Mapping[str, Any]
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.rows[0]}, seed {self.seed}" if len(self.rows) == 1 else f"{self.name} ({len(self.rows)} rows)"


def chosen(table: Table, methods: Sequence[str] | None) -> list[Row]:
    """The rows of these names or methods, in the table's order; all of them where none are given."""
    if not methods:
        return list(table.rows.values())
    known = [name for row in table.rows.values() for name in (row.name, row.method)]
    wanted = set()
    for name in methods:
        found = [k for k in known if k == name] or [k for k in known if k.lower() == name.lower()]
        if not found:
            raise unknown(f"row or method of {table.name}", name, known)
        wanted |= set(found)
    return [row for row in table.rows.values() if {row.name, row.method} & wanted]


def plan(table: Table, rows: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """The runs that these rows need; places with the same settings share one. What is fine-tuned comes last."""
    found: dict[str, Cell] = {}
    taken: set[str] = set()
    for seed in seeds:
        for row in table.rows.values():  # all of them, so that a cell has one name whatever rows are asked for
            for column in table.columns.values():
                settings = {**table.settings(row, column), "seed": seed}
                key = json.dumps(settings, sort_keys=True)
                if key not in found:
                    place = f"{row.name}-{column.name}" if table.by_column else row.name
                    found[key] = Cell(_free(f"{_slug(place)}-s{seed}", taken), seed, settings)
                cell = found[key]
                cell.rows += [row.name] * (row.name not in cell.rows)
                cell.columns += [column.name] * (column.name not in cell.columns)
    names = {row.name for row in rows}
    asked = [cell for cell in found.values() if names & set(cell.rows)]
    return sorted(asked, key=lambda cell: (cell.seed, cell.settings["method"].endswith("+ft")))


def _free(name: str, taken: set[str]) -> str:
    """The name, or one with a number before it, where names differ in signs or capitals only."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{number}-{name}", number + 1
    taken.add(free)
    return free


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9+]+", "-", text.lower()).strip("-")


@dataclass
class Bench:
    """Where the cells of a table are run and kept."""

    table: Table
    folder: Path
    runs: Path
    ways: Mapping[str, Any]  # engine, workers, device
    _sources: dict[tuple[str, str | None], str | None] = field(default_factory=dict)

    def all(self, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
        """Run the cells that are not finished. Mistakes in the settings of any show before the first begins."""
        before: Experiment | None = None
        waiting = [cell for cell in cells if not self._is_there(cell)]
        for cell in waiting:
            self._experiment(cell)
        say(f"{self.table.label}: {len(cells) - len(waiting)} of {len(cells)} runs are there already.")
        self._warn(cells, say)
        for number, cell in enumerate(waiting, 1):
            say(f"{cell.title}: {number} of {len(waiting)}")
            experiment = self._experiment(cell)
            if before is not None and before.division() == experiment.division():
                experiment.adopt(before.federation())
            self._keep(cell, experiment, self._run(cell, experiment))
            before = experiment

    def _is_there(self, cell: Cell) -> bool:
        """Whether it is finished, here or for another table beside this one; one of other data is an error."""
        found, here = self.kept(cell), self._source(cell)
        if found is None:
            if (taken := self._elsewhere(cell)) is None:
                return False
            self._write(cell, taken)
        elif here not in (None, found["source"]):
            raise UserError(
                f"{str(self.path(cell))!r} is of other data: {found['source']}, and here is {here}."
                " Delete it, or take another folder with --out."
            )
        return True

    def _elsewhere(self, cell: Cell) -> dict[str, Any] | None:
        """A finished cell of another table in the same folder, of the same settings, data and version."""
        import pfed

        source = self._source(cell)
        counted = {figure.partition(":")[0] for figure in self._figures(cell) if figure.endswith(":paper")}
        for path in sorted(self.folder.parent.glob(f"*/{CELLS}/*-s{cell.seed}.json")) if source else ():
            try:
                found = read(path)
            except UserError:
                continue
            if (found["source"], found["version"]) != (source, pfed.__version__) or counted - found["counted"].keys():
                continue
            # The same table lies in another folder to be made anew.
            other = found["table"] != self.table.source and "taken" not in found
            alike = all(found["settings"].get(key) == cell.settings.get(key) for key in ("method", "data", "rounds"))
            if other and alike and complete(found["settings"]) == complete(cell.settings):
                return {**found, "taken": f"{path.parent.parent.name}/{CELLS}/{path.name}"}
        return None

    def _warn(self, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
        import pfed

        versions = [kept["version"] for cell in cells if (kept := self.kept(cell)) is not None]
        if old := sorted({version for version in versions if version != pfed.__version__}):
            count = sum(version in old for version in versions)
            say(f"Of the finished runs {count} are of pfed {', '.join(old)}, not of {pfed.__version__}.")

    def kept(self, cell: Cell) -> dict[str, Any] | None:
        """What is kept of a finished cell; one of other settings is an error."""
        path = self.path(cell)
        if not path.is_file():
            return None
        found = read(path)
        theirs, ours = complete(found["settings"]), complete(cell.settings)
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key):
                raise UserError(
                    f"{str(path)!r} is of other settings: {key} is {theirs.get(key)}, not {ours.get(key)}."
                    " Delete it, or take another folder with --out."
                )
        return found

    def _source(self, cell: Cell) -> str | None:
        """What the data of a cell call themselves as they are here, if they are."""
        from pfed.data import sources

        names = cell.settings.get("data", "digits"), cell.settings.get("external")
        if names not in self._sources:
            self._sources[names] = sources.labels(*names)
        return self._sources[names]

    def seeds(self) -> list[int]:
        """Those of all finished cells."""
        found = [path.stem.rpartition("-s")[2] for path in (self.folder / CELLS).glob("*-s*.json")]
        return sorted({int(seed) for seed in found if seed.isdecimal()})

    def path(self, cell: Cell) -> Path:
        return self.folder / CELLS / f"{cell.name}.json"

    def results(self, cells: Sequence[Cell]) -> Iterator[Result]:
        """The finished runs whose folders are still there, under the names of their rows."""
        from pfed.result import Result

        for cell in cells:
            kept = self.kept(cell)
            if kept is None:
                continue
            runs = self.runs / cell.name
            if "taken" in kept:
                table, _, file = Path(kept["taken"]).parts
                runs = self.folder.parent / table / RUNS / Path(file).stem
            folder = runs / kept["result"]["run"]
            if folder.is_dir():
                result = Result.load(folder)
                if result.method != "local" and len(cell.rows) == 1:
                    result.method = cell.rows[0]
                yield result

    def _figures(self, cell: Cell) -> set[str]:
        shown = {self.table.columns[name].figure for name in cell.columns}
        return shown.union(*(self.table.rows[name].figure.values() for name in cell.rows))

    def _experiment(self, cell: Cell) -> Experiment:
        from pfed.data import sources
        from pfed.experiment import Experiment

        data = str(cell.settings.get("data", "digits"))
        if not Path(data).exists():
            sources.find(data)
        return Experiment.from_config({**cell.settings, **self.ways})

    def _run(self, cell: Cell, experiment: Experiment) -> Result:
        """Go on with the cell's run where it was stopped, or with its base run's end, or from the start."""
        from pfed import branch, store

        runs, config = self.runs / cell.name, experiment.config()
        for folder in store.folders(runs):
            store.mend(folder)
        if (found := store.same(runs, config)) is not None:
            return experiment.resume(found)
        for base in sorted(self.runs.iterdir()) if self.runs.is_dir() else ():
            if (found := branch.finished(base, config)) is not None:
                return branch.finetune(experiment, found, runs)
        return experiment.run(runs)

    def _keep(self, cell: Cell, experiment: Experiment, result: Result) -> None:
        """All that is kept of a run. Its clients, with their names and sample counts, are in the result."""
        import pfed
        from pfed import costs

        found = {
            "command": origin.command(self.table, cell.rows, cell.seed, self.ways),
            "version": pfed.__version__,
            "commit": origin.commit(),
            "versions": result.versions,
            "processor": origin.processor(self.ways.get("device", "cpu")),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": sum(row["seconds"] for row in result.rounds if row["round"] > result.taken_rounds),
            "source": experiment.federation().source,
            "chance": chance(experiment.federation()),
            "counted": costs.counted(experiment, self._figures(cell)),
            "notes": result.notes(),
            "settings": cell.settings,
            "result": result.json(),
            "curve": costs.curve(result),
        }
        self._write(cell, found)

    def _write(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Write the cell's file: whole, or not at all."""
        about = {
            "table": self.table.source,
            "scale": self.table.scale,
            "rows": cell.rows,
            "columns": cell.columns,
        }
        path = self.path(cell)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps({**found, **about}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise UserError(f"{str(path)!r} can't be written: {error.strerror}.") from error


def check_data(folder: Path, kept: Iterable[Mapping[str, Any]]) -> None:
    """Refuse finished runs that divide the same data set in the same way, and yet had different data."""
    from pfed.experiment import Experiment

    found: dict[str, set[str]] = {}
    for one in kept:
        key = json.dumps(Experiment.from_config(one["settings"]).division(), sort_keys=True)
        train, test = (sum(client[what] for client in one["result"]["per_client"]) for what in ("train", "test"))
        found.setdefault(key, set()).add(f"{one['source']} ({train} training and {test} test samples)")
    for data in found.values():
        if len(data) > 1:
            raise UserError(
                f"The finished runs in {str(folder)!r} are of different data: {' and '.join(sorted(data))}."
                " Delete those of one, or take another folder with --out."
            )


def table_of(folder: Path) -> Table:
    """The table whose finished cells lie in a folder."""
    for path in sorted(folder.glob("*.json")):
        found = read(path)
        return load(found["table"], found["scale"])
    raise UserError(f"There are no finished runs in {str(folder)!r}.")


def read(path: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if lacking := {"table", "scale", "settings", "source", "version", "counted"} - found.keys():
            raise KeyError(*lacking)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{str(path)!r} can't be read as a finished run: delete it to run it again.") from error
    return found


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run that make a difference, those that were left out among them, by name such as local.lr."""
    from pfed import store
    from pfed.experiment import Experiment

    found: dict[str, Any] = store.settings(Experiment.from_config(settings).config())
    inner = {f"{key}.{name}": value for key in ("local", "hyper") for name, value in found.pop(key).items()}
    return found | inner


def chance(federation: Federation) -> float:
    """The mean score of clients that always name the most frequent class of their training data, or find nothing."""
    found = []
    for client in federation.clients:
        if client.train.boxes is not None:
            return 0.0
        if len(client.test):
            most = client.train.labels.bincount().argmax()
            found.append(float((client.test.labels == most).double().mean()))
    return sum(found) / max(1, len(found))
