"""`pfed reproduce`: its options, and what it does with them. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfed import config, options
from pfed.errors import UserError
from pfed.reproduce import paper
from pfed.reproduce.paper import SCALES, Scale, Table

if TYPE_CHECKING:
    from pfed.reproduce.cells import Bench, Cell
    from pfed.reproduce.output import Made

OUT = "reproduce"
WAYS = ("engine", "workers", "device")


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", metavar="list|page|TABLE|FILE.toml")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="page: where the tables lie that were made")
    parser.add_argument("--scale", choices=SCALES, default="small", help="the paper's setting, or reduced [small]")
    parser.add_argument("--methods", metavar="A,B,…", help="rows by name or method [all]")
    parser.add_argument("--seeds", metavar="N|A,B,…", help="how many seeds, or which [as the table says]")
    parser.add_argument("--seed", metavar="int", help="the first one [0]")
    parser.add_argument("--out", metavar="FOLDER", help=f"where it is kept [{OUT}/TABLE-SCALE]")
    helps = {field.name: field.metadata["help"] for field in fields(config.RunOptions)}
    for way in WAYS:
        form = options.form(config.RunOptions, way)
        parser.add_argument(f"--{way}", metavar=form, help=f"{helps[way]} [what there is]")


def run(arguments: argparse.Namespace) -> None:
    if arguments.folder is not None and arguments.name != "page":
        raise UserError(f"There is nothing to do with {arguments.folder!r}. See 'pfed reproduce --help'.")
    if arguments.name == "list":
        _list(arguments.json)
    elif arguments.name == "page":
        _page(arguments.folder)
    else:
        _make(arguments)


def _list(as_json: bool) -> None:
    from pfed.tables import table

    found = [_entry(name) for name in paper.names()]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        [entry["table"], entry["about"], entry["source"], _needs(entry), *(entry[scale]["time"] for scale in SCALES)]
        for entry in found
    ]
    print(table(["table", "what", "paper", "data (small)", "full", "small"], rows, left=6))
    print("\nTimes are estimates for all rows and seeds on two CPU cores. Data: + is here, - is not (see 'pfed data').")


def _entry(name: str) -> dict[str, Any]:
    scaled = {scale: paper.load(name, scale) for scale in SCALES}
    full = scaled["full"]
    short = re.sub(r" \([^)]*\)", "", full.paper)
    about = {"table": name, "about": full.about, "paper": full.paper, "source": short}
    return about | {scale: {"data": _here(table), "time": table.time} for scale, table in scaled.items()}


def _here(table: Table) -> dict[str, bool]:
    """The data sets of a table, and whether they are here."""
    from pfed.data import sources

    cached = {source.name for source in sources.sources() if source.cached}
    return {name: name in cached or Path(name).exists() for name in table.data()}


def _needs(entry: dict[str, Any]) -> str:
    """The data of the full table, and in brackets those of the small one where they are others."""
    full, small = (
        ", ".join(f"{'+' if here else '-'}{name}" for name, here in entry[scale]["data"].items()) for scale in SCALES
    )
    return full if full == small else f"{full} ({small})"


def _make(arguments: argparse.Namespace) -> None:
    from pfed.reproduce import cells

    table = paper.load(arguments.name, arguments.scale)
    rows = cells.chosen(table, _split(arguments.methods))
    first = options.parse(config.RunOptions, "seed", arguments.seed or "0", "run")
    given = arguments.seeds or ("1" if arguments.seed else None)
    seeds = options.seeds(given, first) if given else list(table.seeds)
    folder = Path(arguments.out or Path(OUT, f"{table.name}-{table.scale}"))
    runs = Path(arguments.runs) if arguments.runs else folder / cells.RUNS
    bench = cells.Bench(table, folder, runs, _ways(arguments, table.scale))
    _gathered(bench)  # a mistake in what is kept shows before anything is run
    _say(f"{table.label}: {table.time} on two CPU cores for all rows and seeds of the table; kept in {folder}.")
    bench.all(_possible(table, cells.plan(table, rows, seeds)), _say)
    made = _gathered(bench)
    _write(made, bench)
    print(json.dumps(made.json(), indent=2) if arguments.json else made.text())


def _possible(table: Table, planned: list[Cell]) -> list[Cell]:
    """The runs of the columns whose data are here or can be fetched; an error if there are none."""
    from pfed.data import sources

    missing = table.missing()
    if len(missing) == len(table.columns):
        sources.load(next(iter(missing.values())).partition(",")[0])  # says what to do
    if missing:
        named = ", ".join(f"{column} ({data})" for column, data in missing.items())
        _say(f"Left out, for the data are not here: {named}.")
    return [cell for cell in planned if set(cell.columns) - missing.keys()]


def _split(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _ways(arguments: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Engine, workers and device: as asked for, else a GPU at full scale where there is one, else all cores."""
    given = {name: getattr(arguments, name) for name in WAYS if getattr(arguments, name) is not None}
    ways = {name: options.parse(config.RunOptions, name, text, "run") for name, text in given.items()}
    if scale == "full" and "device" not in ways:
        import torch

        ways["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if "engine" not in ways and ways.get("device", "cpu") == "cpu":
        from pfed import machine

        ways["engine"] = "processes" if machine.cores() > 1 else "serial"
    return ways


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gathered(bench: Bench) -> Made:
    """The table of all its runs that are finished, whichever command made them."""
    from pfed.reproduce import cells
    from pfed.reproduce.output import Made

    table, rows = bench.table, list(bench.table.rows.values())
    kept: dict[tuple[str, str, int], Any] = {}
    for cell in cells.plan(table, rows, bench.seeds()):
        if (found := bench.kept(cell)) is not None:
            kept |= {(row, column, cell.seed): found for row in cell.rows for column in cell.columns}
    cells.check_data(bench.folder, kept.values())
    ran, seeds = {row for row, _, _ in kept}, sorted({seed for _, _, seed in kept})
    again = f"pfed reproduce {table.source} --scale {table.scale}"
    if ran != set(table.rows):
        again += f" --methods {shlex.quote(','.join(name for name in table.rows if name in ran))}"
    again += f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else f" --seeds 1 --seed {(seeds or [0])[0]}"
    missing = {name: data for name, data in table.missing().items() if name not in {key[1] for key in kept}}
    return Made(table, [row for row in rows if row.paper or row.name in ran], kept, again, missing)


def _write(made: Made, bench: Bench) -> None:
    """Markdown and CSV beside the cells, and a report of the runs that are still there."""
    from pfed import report
    from pfed.reproduce import cells

    _put(bench.folder / "table.md", made.markdown())
    _put(bench.folder / "table.csv", made.csv())
    planned = cells.plan(made.table, list(made.table.rows.values()), bench.seeds())
    if results := list(bench.results(planned)):
        shown = [made.cells(column) for column in made.columns]
        report.write(results, bench.folder / "report.html", report.tables(made.head(), shown, made.foot()))


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be written: {error.strerror}.") from error


def _page(folder: str | None) -> None:
    """One page of all tables below a folder, from what is kept there; nothing is run."""
    from pfed.reproduce import cells

    if folder is None or not Path(folder).is_dir():
        raise UserError(f"'pfed reproduce page' takes the folder in which tables were made. Got {folder!r}.")
    made = []
    for path in sorted(Path(folder).glob(f"*/{cells.CELLS}")):
        bench = cells.Bench(cells.table_of(path), path.parent, path.parent / cells.RUNS, {})
        made.append(_gathered(bench))
        _put(path.parent / "table.md", made[-1].markdown())
        _put(path.parent / "table.csv", made[-1].csv())
    if not made:
        raise UserError(f"There are no finished runs of tables below {folder!r}.")
    from pfed.reproduce.output import page

    out = Path(folder) / "tables.md"
    _put(out, page(made))
    print(out)
