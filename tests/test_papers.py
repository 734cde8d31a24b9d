"""The papers' tables as files: every published figure is there, and every setting is one that its method takes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from papers_figures import FIGURES

from pfed import Experiment, UserError, presets
from pfed.config import SplitOptions
from pfed.data.base import Dataset
from pfed.data.catalog import SOURCES
from pfed.data.federate import OWNER, federate, partition_of
from pfed.reproduce import cells, paper
from pfed.reproduce.paper import SCALES, Table

ALONE = ("fedcd-iid", "fedcd-dir05", "fedcd-users", "partialfed-bottomup", "partialfed-topdown")
SAME = [name for name in paper.names() if name in FIGURES and name not in ALONE]


def lines(name: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in FIGURES[name].strip().splitlines()]


def printed(table: Table) -> list[list[str]]:
    """The table's published figures as the paper prints them, row by row."""
    found = []
    for row in table.rows.values():
        shown = [row.paper[name] for name in table.columns if name in row.paper]
        if shown:
            spreads = ["" if p.spread is None else f"±{p.spread:.2f}" for p in shown]
            found.append([f"{p.value:.2f}{s}{'?' * p.doubtful}" for p, s in zip(shown, spreads, strict=True)])
    return found


def plain(values: list[str]) -> list[str]:
    """Without marks of doubt, with two digits."""
    found = [re.fullmatch(r"([0-9.]+)(±[0-9.]+)?\??", value) for value in values]
    return [f"{float(m[1]):.2f}{m[2] or ''}" for m in found if m]


@pytest.mark.parametrize("name", [name for name in SAME if name not in ("fedcd-comm", "dualfed-strategy")])
def test_every_published_figure_is_in_its_table(name: str) -> None:
    table = paper.load(name)
    columns = len(next(row.paper for row in table.rows.values() if row.paper))
    assert [plain(row) for row in printed(table)] == [plain(line[-columns:]) for line in lines(name)]
    named = [line[0] for line in lines(name)]
    if named[0] in table.rows:
        assert [row.name for row in table.rows.values() if row.paper] == named


def test_every_published_figure_of_tables_that_are_laid_out_otherwise() -> None:
    by_column = list(zip(*(line[1:] for line in lines("fedbsd")), strict=True))
    for i, name in enumerate(
        ("cifar10-100-2", "cifar10-100-5", "cifar10-1000-2", "cifar100-100-5", "cifar100-100-20", "femnist-150-3")
    ):
        table = paper.load(f"fedbsd-{name}")
        assert [row[0] for row in printed(table)] == list(by_column[i])
        assert list(table.rows) == [line[0] for line in lines("fedbsd")]
    users = paper.load("fedcd-users")
    models = [line[0] for line in lines("fedcd-users")]
    assert [row[0] for row in printed(users)] == [line[i] for i in range(1, 7) for line in lines("fedcd-users")]
    assert list(users.rows) == [f"{m} {n}" for n in ("alone", *(f"of {k}" for k in (2, 4, 6, 8, 10))) for m in models]
    for name, line in zip(("fedcd-iid", "fedcd-dir05"), lines("fedcd-table2"), strict=True):
        assert [row[0] for row in printed(paper.load(name))] == line[1:]
    assert [row[0] for row in printed(paper.load("fedcd-comm"))] == ["37928.40", "16.00", "10.24"]
    stages = {line[0]: line[1:] for line in lines("partialfed-stages")}
    for name, rows in (("bottomup", "s1 s1-s2 s1-s3 s1-s4 Full"), ("topdown", "fc s4-fc s3-fc s2-fc Full")):
        table = paper.load(f"partialfed-{name}")
        assert printed(table) == [stages[row] for row in rows.split()]
    assert [plain(row) for row in printed(paper.load("dualfed-strategy"))] == [
        plain(line[2:]) for line in lines("dualfed-strategy")
    ]


def test_every_table_of_the_papers_has_a_file() -> None:
    made = {name for name in FIGURES if name not in ("fedcd-table2", "fedbsd", "partialfed-stages")}
    made |= {
        "fedcd-iid",
        "fedcd-dir05",
        "partialfed-bottomup",
        "partialfed-topdown",
        "fedbsd-digits",
        "fedbsd-domainnet",
    }
    made |= {f"fedbsd-cifar10-{n}" for n in ("100-2", "100-5", "1000-2")} | {"fedbsd-femnist-150-3"}
    made |= {"fedbsd-cifar100-100-5", "fedbsd-cifar100-100-20"}
    assert set(paper.names()) == made


@pytest.mark.parametrize("name", ["dualfed-pacs", "partialfed-bottomup"])
def test_figures_in_doubt_are_marked(name: str) -> None:
    source = {"partialfed-bottomup": "partialfed-stages"}.get(name, name)
    doubtful = [cell for line in lines(source) for cell in line if cell.endswith("?")]
    assert [cell for row in printed(paper.load(name)) for cell in row if cell.endswith("?")] == doubtful
    assert doubtful


def settings(name: str, scale: Any) -> list[dict[str, Any]]:
    table = paper.load(name, scale)
    planned = cells.plan(table, list(table.rows.values()), [0])
    return [dict(cell.settings) for cell in planned]


@pytest.mark.parametrize("name", paper.names())
def test_every_setting_is_one_that_its_method_takes(name: str) -> None:
    for scale in SCALES:
        for values in settings(name, scale):
            experiment = Experiment.from_config(values)
            assert partition_of(experiment.options, domains=True) == values["partition"]
            made = experiment.config()
            for key in ("local", "hyper"):
                assert {k: made[key][k] for k in values[key]} == {
                    k: tuple(v) if isinstance(v, list) else v for k, v in values[key].items()
                }
            assert {k: made[k] for k in values if k not in ("local", "hyper")} == {
                k: v for k, v in values.items() if k not in ("local", "hyper")
            }


EVERYWHERE = {
    *("data", "task", "partition", "test_split", "model", "pretrained", "rounds", "fraction", "normalise", "augment"),
    *("bn", "eval_point", "eval_every", "eval_last", "select", "new_test"),
}


def applying(values: dict[str, Any], needs: frozenset[str]) -> set[str]:
    """The options of a run that change its figures, in this setting."""
    kind, source = values["partition"], SOURCES[values["data"]]
    found = EVERYWHERE | {key for key, owner in OWNER.items() if owner == kind}
    found |= {"public", "public_in_train"} if "public" in needs else set()
    found |= {"validation"} if "validation" in needs or values["select"] == "validation" else set()
    if kind != "domain":
        found |= {"clients"}
    if kind in ("domain", "natural") and not source.test and not source.boxes:
        found |= {"test_fraction", "image_size"}
    return found


@pytest.mark.parametrize("name", paper.names())
def test_every_setting_is_said(name: str) -> None:
    """Nothing is left to defaults that may change: of the run, of local training, and of each method."""
    for scale in SCALES:
        for values in settings(name, scale):
            made = Experiment.from_config(values)
            assert values["local"].keys() == made.config()["local"].keys()
            left_open = {key for key, value in made.method.hyperparameters().items() if value is not None}
            assert values["hyper"].keys() >= left_open
            assert applying(values, made.method.needs) <= values.keys()


def test_thirty_raters_are_clients() -> None:
    (values, *_) = settings("cd2-flickr", "full")
    split = {key: values[key] for key in ("clients", "partition", "test_split", "test_fraction")}
    owners = torch.arange(400) % 40
    ratings = tuple("12345")
    rated = Dataset("raters", torch.rand(400, 3, 8, 8), torch.arange(400) % 5, ratings, groups=owners)
    made = [federate(rated, SplitOptions(**split), seed) for seed in (0, 1)]
    assert [len(federation.clients) for federation in made] == [30, 30]
    first, second = ({client.name for client in federation.clients} for federation in made)
    assert first != second


def test_what_shares_batchnorm_and_what_keeps_it() -> None:
    """Else FedAvg would be FedBN."""
    for name in ("fedbsd-digits", "fedbsd-domainnet"):
        found = {values["method"]: values["bn"] for values in settings(name, "full")}
        assert {method for method, bn in found.items() if bn == "share"} == {"fedavg", "fedprox"}
        assert found["fedbsd"] == "local-all"


@pytest.mark.parametrize("name", paper.names())
def test_a_table_as_a_preset_gives_each_method_what_its_first_row_has(name: str) -> None:
    """Also where that is other than the other rows' model, BatchNorm or number of clients."""
    for scale in SCALES:
        table, column = paper.load(name, scale), next(iter(paper.load(name, scale).columns.values()))
        preset = presets.load(name if scale == "full" else name + paper.SMALL)
        first = {row.method: row for row in reversed(table.rows.values())}
        for method, row in first.items():
            assert {"method": method, **preset.of(method)} == table.settings(row, column)


def test_small_tables_have_runs_in_common() -> None:
    def runs(*names: str) -> tuple[int, int]:
        """How many are planned, and how many differ."""
        planned = [json.dumps(cells.complete(values), sort_keys=True) for n in names for values in settings(n, "small")]
        return len(planned), len(set(planned))

    assert runs("dualfed-pacs", "dualfed-personal") == (19, 16)
    home = [f"partialfed-{name}" for name in ("officehome", "skip", "bn", "bottomup", "topdown")]
    planned, different = runs(*home)
    assert planned - different == 3 + 2 * 2  # Single, Full and a strategy in two of them; Single and Full in the others


@pytest.mark.parametrize("name", paper.names())
def test_data_and_models_are_known(name: str) -> None:
    from pfed import models

    for scale in SCALES:
        data = set(paper.load(name, scale).data())
        assert data <= set(SOURCES)
        used = {m.removesuffix("+projector") for s in settings(name, scale) for m in s["model"].split(",")}
        own = {model for model in used if ":" not in model}
        assert own <= set(models.names())


@pytest.mark.parametrize("name", paper.names())
def test_a_reduction_keeps_the_question_and_says_what_it_reduces(name: str) -> None:
    full, small = paper.load(name), paper.load(name, "small")
    assert small.reduced
    assert small.open
    assert small.claim
    assert re.fullmatch(r"[1-5][05]|60|5", small.time.removesuffix(" min"))
    assert small.main == full.main or small.main in small.columns
    rounds = [max(values["rounds"] for values in settings(name, scale)) for scale in SCALES]
    assert small.stands_in or (set(small.columns) <= set(full.columns) and rounds[1] <= rounds[0])
    data = {values["data"] for values in settings(name, "small")}
    if small.stands_in:
        assert data == {small.stands_in}
        assert small.label == f"{name}-small-{small.stands_in}"
    else:
        assert data <= set(full.data())


@pytest.mark.parametrize("name", [name for name in paper.names() if name.startswith(("cd2", "fedbsd", "partialfed"))])
def test_it_is_judged_every_ten_rounds_and_in_the_last_ten(name: str) -> None:
    for values in settings(name, "full"):
        assert (values["eval_every"], values["eval_last"]) == (10, 10)


def test_a_table_is_a_preset_too() -> None:
    """pfed run METHOD --preset TABLE has the settings of the method's first row, in both scales."""
    full, small = presets.load("fedbsd-cifar10-100-2"), presets.load("fedbsd-cifar10-100-2-small")
    assert (full.of("fedbsd")["rounds"], small.of("fedbsd")["rounds"]) == (100, 40)
    assert full.of("l2gd")["local"]["lr"] == 0.1
    assert full.of("fedavg+ft")["hyper"]["ft_epochs"] == 10
    assert presets.load("dualfed-strategy").of("dualfed")["data"] == "pacs"
    assert {"fedbsd-cifar10-100-2", "fedbsd-cifar10-100-2-small", "original"} <= set(presets.names())


def test_places_with_the_same_settings_share_a_run() -> None:
    users = paper.load("fedcd-users")
    planned = cells.plan(users, list(users.rows.values()), [0])
    by_users = {
        n: [c for c in planned if c.settings["clients"] == n and c.settings["method"] == "fedcd"] for n in (2, 4)
    }
    assert [len(by_users[n]) for n in (2, 4)] == [5, 3]
    assert sum(c.settings["method"] == "local" for c in planned) == 1
    for cell in planned:
        models = cell.settings["model"].split(",")
        for row in cell.rows:
            client = int(users.rows[row].figure["accuracy"].partition(":")[2])
            assert models[client] == row.split()[0].lower()
    comm = paper.load("dualfed-comm")
    assert len(cells.plan(comm, list(comm.rows.values()), [0])) == 9 * 3  # both countings of each data set


def test_names_of_cells_are_their_own() -> None:
    for name, scale in itertools.product(paper.names(), SCALES):
        table = paper.load(name, scale)
        planned = cells.plan(table, list(table.rows.values()), [0, 1])
        assert len({cell.name for cell in planned}) == len(planned)


GOOD = """
about = "a"
paper = "p"
time = "t"
[columns]
A = "personal/local-test"
[run]
data = "digits"
[[rows]]
name = "Local"
method = "local"
paper = { A = "1.5±0.2" }
[small]
about = "s"
time = "t"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('about = "a"', "abut = 3", "There is no entry in the table 'mine' 'abut'. Did you mean 'about'?"),
        ('paper = "p"', "paper = 3", "paper of the table 'mine' must be a text. Got 3."),
        ('"personal/local-test"', '"personal"', "figure of columns.A of the table 'mine' must be a metric"),
        ('A = "1.5±0.2"', 'B = "1.5"', "There is no column of the table 'mine' 'B'. Known: A."),
        ('A = "1.5±0.2"', 'A = "many"', "must look like 58.99±1.50, or with ? behind it. Got 'many'."),
        ('method = "local"', "", "Each row of the table 'mine' must have a name of its own and a method."),
        ('about = "s"', 'rows = ["Lokal"]\nabout = "s"', "no row of small of the table 'mine' 'Lokal'. Did you mean"),
        ('about = "s"', 'columns = ["B"]\nabout = "s"', "There is no column of small of the table 'mine' 'B'."),
        ('about = "s"', 'runs = 3\nabout = "s"', "no entry in small of the table 'mine' 'runs'. Did you mean 'run'?"),
        ('time = "t"\n[columns]', 'time = "t"\nseeds = 3\n[columns]', "seeds of the table 'mine' must be a list"),
    ],
)
def test_a_mistake_in_a_table_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(message)):
        paper.load(str(path), "small")


def test_the_file_without_a_mistake_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    table = paper.load(str(path), "small")
    assert (table.label, table.data(), table.main) == ("mine-small", ["digits"], "A")
    assert json.loads(json.dumps(table.settings(table.rows["Local"], table.columns["A"])))["method"] == "local"
