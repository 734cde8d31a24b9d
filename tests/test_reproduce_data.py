"""Tables of the papers say which data they were made of, and never mix or compare what is not the same."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfed import Experiment, UserError, cli, compare
from pfed.data import sources
from pfed.data.base import Federation
from pfed.data.catalog import SOURCES
from pfed.reproduce import cells, figures, origin, paper
from pfed.reproduce.output import Made

TABLE = """
about = "CIFAR-100"
paper = "Somebody (2020), Table 1"
seeds = [0]
time = "1 min"

[columns]
accuracy = "personal/local-test"

[run]
data = "cifar100"
model = "mlp"
partition = "iid"
clients = 2
rounds = 1

[[rows]]
name = "Local"
method = "local"
paper = { accuracy = 50.0 }

[[rows]]
name = "FedAvg"
method = "fedavg"
paper = { accuracy = 60.0 }

[small]
about = "The same."
time = "1 min"
"""
SMALL: dict[str, Any] = {"data": "cifar100", "model": "mlp", "partition": "iid", "clients": 2, "rounds": 1}
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32)).astype(np.uint8)
LABELS = np.arange(40) % 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a table, a pool of CIFAR-100 in the place for data, and tables to be made in `out`."""
    (tmp_path / "mine.toml").write_text(TABLE)
    (tmp_path / "data").mkdir()
    split = (np.arange(40) >= 30).astype(np.uint8)
    np.savez(tmp_path / "data" / "cifar100_12k.npz", images=PIXELS.transpose(0, 2, 3, 1), labels=LABELS, split=split)
    monkeypatch.setenv("PFED_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_original(folder: Path, train: int = 30) -> None:
    """The binary files, which come before the pool."""
    rows = np.concatenate([np.zeros((40, 1)), LABELS[:, None], PIXELS.reshape(40, -1)], 1).astype(np.uint8)
    (folder / "data" / "train.bin").write_bytes(rows[:train].tobytes())
    (folder / "data" / "test.bin").write_bytes(rows[30:].tobytes())


def reproduce(*argv: str) -> int:
    return cli.main(["reproduce", *argv, "--engine", "serial"])


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_reduced_data_have_no_gap_at_full_scale(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mine.toml", "--scale", "full", "--out", "out/a") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine-cifar100 (12k pool): ")
    assert "REDUCED, not the paper's data" in shown
    assert "There is cifar100 (12k pool) in place of all of cifar100." in shown
    assert "gap" not in shown
    rows = list(csv.DictReader(Path("out/a/table.csv").read_text().splitlines()))
    assert {(row["data"], row["paper"], row["gap"], row["comparable"]) for row in rows} == {
        ("cifar100 (12k pool)", "", "", "no")
    }
    put_original(folder)
    assert reproduce("mine.toml", "--scale", "full", "--out", "out/b", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparable"] is True
    assert {(row["data"][0], row["paper"] is not None, row["gap"] is not None) for row in found["rows"]} == {
        ("cifar100", True, True)
    }


def test_a_reduced_setting_names_the_data_that_were_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine-small-cifar100 (12k pool): ")
    assert "On cifar100 (12k pool) in place of the paper's data. The same." in shown
    put_original(folder)
    assert reproduce("mine.toml", "--out", "out/b", "--methods", "local") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine-small: ")
    assert "On cifar100. The same." in shown


def test_finished_runs_of_other_data_are_not_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 0
    assert read("out/a/cells/local-s0.json")["source"] == "cifar100 (12k pool)"
    put_original(folder)
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 2
    assert "is of other data: cifar100 (12k pool), and here is cifar100." in capsys.readouterr().err
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "fedavg") == 2  # beside the other
    assert "different data: cifar100 (12k pool) (30 training and 10 test samples) and" in capsys.readouterr().err


def test_finished_runs_of_other_samples_are_not_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_original(folder)
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 0
    put_original(folder, train=20)
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "fedavg") == 2
    assert "different data: cifar100 (20 training and 10 test samples) and cifar100 (30" in capsys.readouterr().err


def test_runs_of_other_data_are_not_taken(folder: Path) -> None:
    (first,) = compare(["fedavg"], runs="runs", **SMALL).results
    (again,) = compare(["fedavg"], runs="runs", reuse=True, **SMALL).results
    assert again.run == first.run
    put_original(folder)
    (other,) = compare(["fedavg"], runs="runs", reuse=True, **SMALL).results
    assert other.run != first.run
    with pytest.raises(UserError, match=r"its data set is cifar100 \(12k pool\)\. Got cifar100\."):
        Experiment("fedavg", **SMALL).resume(Path("runs", first.run))
    put_original(folder, train=20)
    with pytest.raises(UserError, match=r"its number of training samples is 30\. Got 20\."):
        Experiment("fedavg", **SMALL).resume(Path("runs", other.run))


def test_data_say_that_they_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from PIL import Image

    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        (folder / "data" / "pacs" / domain / "dog").mkdir(parents=True)
        (folder / "data" / "pacs" / domain / "cat").mkdir()
        Image.new("RGB", (8, 8)).save(folder / "data" / "pacs" / domain / "dog" / "1.png")
    assert sources.label("pacs") == "pacs (incomplete)"
    assert sources.label("cifar100") == "cifar100 (12k pool)"
    assert sources.label("office-home") is None
    assert sources.label("digits") == "digits"
    assert sources.labels("digits", "cifar100") == "digits, external cifar100 (12k pool)"
    monkeypatch.setitem(SOURCES, "toy", replace(SOURCES["digits-5r"], name="toy", parts=("digits", "cifar100")))
    assert sources.label("toy") == "toy (of cifar100 (12k pool))"


def kept(name: str, method: str, clients: list[str], **settings: Any) -> dict[str, Any]:
    """As far as data go."""
    rows = [{"client": i, "name": client} for i, client in enumerate(clients)]
    return {"settings": {"method": method, "data": name, **settings}, "source": name, "result": {"per_client": rows}}


def test_clients_that_are_missing_make_figures_incomparable() -> None:
    histology = paper.load("cd2-histo")
    two = kept("histology", "local", ["NCT-CRC-HE-100K", "CRC-VAL-HE-7K"], partition="domain")
    assert origin.other_data(histology, two).endswith("(NCT-CRC-HE-100K, CRC-VAL-HE-7K), where the paper has 3")
    assert not origin.other_data(histology, kept("histology", "local", ["a", "b", "c"], partition="domain"))
    benchmark = paper.load("partialfed-uodb")
    domains = list(SOURCES["uodb"].domains)
    assert not origin.other_data(benchmark, kept("uodb", "local", domains, partition="domain"))
    assert origin.other_data(benchmark, kept("uodb", "local", domains[1:], partition="domain"))
    strategy = paper.load("dualfed-strategy")  # whose columns name no clients
    assert origin.other_data(strategy, kept("pacs", "local", ["photo", "sketch"], partition="domain"))


def test_bytes_do_not_depend_on_the_data() -> None:
    pool = {**kept("cifar100", "fedavg", ["client-0", "client-1"]), "source": "cifar100 (12k pool)"}
    for name, comparable in (("fedcd-comm", True), ("fedcd-iid", False)):
        table = paper.load(name)
        places = {("FedAvg", column, 0): pool for column in table.columns}
        made = Made(table, list(table.rows.values()), places, "")
        assert {made.comparable(column) for column in made.columns} == {comparable}


TWO = (
    TABLE.replace('accuracy = "personal/local-test"', "")
    .replace('data = "cifar100"\n', "")
    .replace(
        "[columns]",
        """main = "A"
[columns.A]
figure = "personal/local-test"
run = { data = "cifar100" }
[columns.B]
figure = "personal/local-test"
run = { data = "office-home" }""",
    )
    .replace("accuracy =", "A =")
)


def test_columns_without_data_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "two.toml").write_text(TWO)
    assert reproduce("two.toml", "--out", "out/two", "--methods", "local") == 0
    shown = capsys.readouterr()
    assert "Left out, for the data are not here: B (office-home)." in shown.err
    assert "data not here" in shown.out
    assert "Column B" not in shown.out
    assert [path.name for path in Path("out/two/cells").iterdir()] == ["local-a-s0.json"]
    (folder / "data" / "cifar100_12k.npz").unlink()
    (folder / "two.toml").write_text(TWO.replace("cifar100", "pacs"))
    assert reproduce("two.toml", "--out", "out/none") == 2
    assert "PACS is not here and cannot be fetched" in capsys.readouterr().err


def test_a_run_is_taken_from_another_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same settings, even where one leaves a default out; not where they differ, nor from the same table."""
    (folder / "other.toml").write_text(TABLE.replace("rounds = 1", 'rounds = 1\nnormalise = "data"'))
    (folder / "apart.toml").write_text(TABLE.replace("rounds = 1", "rounds = 1\nfraction = 0.5"))
    assert reproduce("mine.toml", "--out", "out/mine") == 0
    for name, there, also in (("other", 2, ", 2 of them taken from other tables"), ("apart", 0, ""), ("mine", 0, "")):
        assert reproduce(f"{name}.toml", "--out", f"out/{name}-2") == 0
        shown = capsys.readouterr()
        assert f"{there} of 2 runs are there already" in shown.err
        assert f"2 runs{also}, 1 min of training." in shown.out
    taken, first = read("out/other-2/cells/fedavg-s0.json"), read("out/mine/cells/fedavg-s0.json")
    assert (taken["table"], taken["taken"]) == ("other.toml", "mine/cells/fedavg-s0.json")
    assert taken["result"] == first["result"]
    assert "FedAvg" in Path("out/other-2/report.html").read_text()  # of the runs where they are


def test_runs_of_another_version_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 0
    assert "Of the finished runs" not in capsys.readouterr().err
    path = Path("out/a/cells/local-s0.json")
    path.write_text(path.read_text().replace('"version": "', '"version": "0.0.', 1))
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "local") == 0
    assert "Of the finished runs 1 are of pfed 0.0." in capsys.readouterr().err


def test_fine_tuning_counts_only_its_own_time(folder: Path) -> None:
    text = TABLE.replace("rounds = 1", "rounds = 2") + '[[rows]]\nname = "FT"\nmethod = "fedavg+ft"\n'
    rows, small = text.partition("[small]")[::2]
    small, _, extra = small.partition("[[rows]]")
    (folder / "mine.toml").write_text(f"{rows}[[rows]]{extra}[small]{small}")
    assert reproduce("mine.toml", "--out", "out/a", "--methods", "FedAvg,FT") == 0
    tuned = read("out/a/cells/ft-s0.json")
    assert 0 < tuned["seconds"] < tuned["result"]["seconds"]
    base = read("out/a/cells/fedavg-s0.json")
    assert base["seconds"] == base["result"]["seconds"]


@pytest.fixture
def division() -> Callable[..., dict[str, Any]]:
    return lambda **more: Experiment("local", **{**SMALL, "data": "digits", **more}).division()


def test_a_federation_of_other_pixels_is_not_taken_over(division: Callable[..., dict[str, Any]]) -> None:
    assert division() == division(rounds=2)
    assert division() != division(normalise="half")
    assert division() != division(train_cap=5)


def test_chance_is_the_most_frequent_class(tiny: Federation) -> None:
    found = []
    for client in tiny.clients:
        labels = client.train.labels.tolist()
        most = min(set(labels), key=lambda y: (-labels.count(y), y))
        found.append(sum(y == most for y in client.test.labels.tolist()) / len(client.test))
    assert cells.chance(tiny) == pytest.approx(sum(found) / 4)


def test_where_a_run_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    table = paper.load("cd2-cifar10-s2")
    command = "pfed reproduce cd2-cifar10-s2 --scale full --methods 'a b' --seeds 1 --seed 3"
    assert origin.command(table, ["a b"], 3, {"engine": "serial"}) == command
    assert origin.command(table, ["a b"], 3, {"device": "cuda:1"}) == f"{command} --device cuda:1"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU at {device}")
    assert origin.processor("cuda:1") == "GPU at cuda:1"
    assert "GPU" not in origin.processor()


def users(rows: dict[str, tuple[str, float]], chance: float = 0.1) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished runs by row and seed: method and mean accuracy."""
    found = {}
    for seed in (0, 1):
        for row, (method, mean) in rows.items():
            clients = [{"client": i, "name": str(i), "personal/local-test": mean} for i in range(5)]
            result = {"metrics": {"personal/local-test": mean + 0.01 * seed}, "per_client": clients}
            settings = {"method": method, "model": "resnet8,resnet14,resnet20,resnet32,resnet44"}
            found[row, seed] = {"settings": settings, "chance": chance, "seconds": 60.0, "result": result}
    return found


def test_mixed_models_are_judged_against_the_tables_own_method() -> None:
    table = paper.load("fedcd-users", "small")
    found = users({"ResNet8 alone": ("local", 0.5), "ResNet8 of 5": ("fedcd", 0.6)})
    places = {(row, "accuracy", seed): one for (row, seed), one in found.items()}
    made = Made(table, list(table.rows.values()), places, "")  # type: ignore[arg-type]
    judged = figures.verdict(table.columns["accuracy"], made.places["accuracy"], found)
    assert judged.counts
    assert "-10.00 points over the same models with fedcd, for models of different kinds have no FedAvg" in judged.text
    alone = {key: one for key, one in found.items() if "alone" in key[0]}
    places = {(row, "accuracy", seed): one for (row, seed), one in alone.items()}
    made = Made(table, list(table.rows.values()), places, "")  # type: ignore[arg-type]
    assert "is not judged" in figures.verdict(table.columns["accuracy"], made.places["accuracy"], alone).text
