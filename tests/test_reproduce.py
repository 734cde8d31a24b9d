"""`pfed reproduce`: the papers' tables made again, run by run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same

from pfed import Experiment, Result, UserError, anatomy, branch, cli
from pfed.data.base import Federation
from pfed.reproduce import cells, figures, paper
from pfed.reproduce.output import Made
from pfed.result import MAIN

TABLE = """
about = "Digits"
paper = "Somebody (2020), Table 1"
claim = "FedAvg+FT is first."
open = ["The rate: 0.1."]
seeds = [0, 1]
time = "1 min"
main = "Local"

[columns]
Local = "personal/local-test"
New = "ensemble/new-test"
First = "client:client-0"
Outside = "ensemble/external"

[run]
data = "digits"
model = "mlp"
clients = 3
classes_per_client = 10
rounds = 3
eval_every = 2
eval_last = 2
select = "mean_last_10"
new_test = "mean_prob"
checkpoint_every = 1

[run.local]
lr = 0.1

[[rows]]
name = "Local"
method = "local"
paper = { Local = "87.92±2.14", New = "10.03±0.06?" }

[[rows]]
name = "FedAvg"
method = "fedavg"
paper = { Local = "58.99", New = 58.99 }
note = "copied."

[[rows]]
name = "FedAvg+FT"
method = "fedavg+ft"
hyper = { ft_epochs = 2 }
figure = { Local = "finetuned/local-test" }
paper = { Local = 90.0 }

[[rows]]
name = "FedProx"
method = "fedprox"
hyper = { mu = 0.5 }

[small]
about = "1 round instead of 3."
time = "20 s"
columns = ["Local"]
rows = ["Local", "FedAvg"]
run = { rounds = 1 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TABLE)
    return path


def reproduce(*argv: object) -> int:
    return cli.main(["reproduce", *map(str, argv), "--engine", "serial"])


def kept(out: Path) -> dict[str, dict[str, Any]]:
    """What is kept of each finished run, without times."""
    found = {path.stem: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}
    for cell in found.values():
        for key in ("seconds", "finished"):
            del cell[key]
        del cell["result"]["seconds"], cell["result"]["run"]
    return found


def test_a_killed_table_goes_on_to_the_same_figures(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle of the second run: the first is not run again, the second goes on, +ft takes the second."""
    file.write_text(TABLE.replace("rounds = 3\n", "rounds = 30\n"))
    argv = [str(file), "--scale", "full", "--seeds", "1", "--methods", "Local,FedAvg,FedAvg+FT"]
    out, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "pfed", "reproduce", *argv, "--out", str(out), "--engine", "serial"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs, deadline = out / "runs" / "fedavg-s0", time.monotonic() + 200
    while not list(runs.glob("*/checkpoint-00000[3-9]")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(kept(out)) == ["local-s0"]
    before = (out / "cells" / "local-s0.json").stat().st_mtime_ns
    assert reproduce(*argv, "--out", out) == 0
    assert "1 of 3 runs are there already" in capsys.readouterr().err
    assert (out / "cells" / "local-s0.json").stat().st_mtime_ns == before
    assert len(list(runs.iterdir())) == 1  # gone on with, not begun anew
    assert list((out / "runs" / "fedavg+ft-s0").glob("fedavg+ft-*"))
    assert reproduce(*argv, "--out", whole) == 0
    assert kept(out) == kept(whole)
    assert reproduce(*argv, "--out", out) == 0
    assert "3 of 3 runs are there already" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedavg", "fedper", "scaffold", "partialfed-fix"])
def test_fine_tuning_from_a_finished_run_is_exact(method: str, tiny: Federation, tmp_path: Path) -> None:
    """The last one has a finish of its own, which fine-tuning does anew."""
    hyper = {"strategy": "wo_fc"} if method == "partialfed-fix" else {}
    options: dict[str, Any] = {"rounds": 3, "eval_every": 2, "eval_last": 1, "new_test": "mean_prob", "seed": 3}
    base = Experiment(method, tiny, "mlp", hyper=hyper, **options).run(tmp_path / "base")
    assert base.folder is not None

    def tuned() -> Experiment:
        return Experiment(f"{method}+ft", tiny, "mlp", hyper={**hyper, "ft_epochs": 2}, **options)

    straight, short = tuned(), tuned()
    whole = straight.run(tmp_path / "straight")
    found = branch.finetune(short, base.folder, tmp_path / "short")
    assert [row["seconds"] for row in found.rounds[:-1]] != [row["seconds"] for row in whole.rounds[:-1]]  # not run
    # The base run's end was judged in full, which the same round of a longer run is not; that is not counted as sent.
    apart = {"run": "", "seconds": 0, "bytes_eval": 0}
    assert {**found.json(), **apart} == {**whole.json(), **apart}
    assert found.series[MAIN] == whole.series[MAIN]
    for client in range(4):
        assert_same(anatomy.snapshot(short.model(client)), anatomy.snapshot(straight.model(client)))
    assert Result.load(base.folder).metrics == base.metrics  # untouched
    assert not (tmp_path / "short" / "copy").exists()


def test_only_a_finished_run_of_the_same_settings_is_taken(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clients": 3, "rounds": 1, "model": "mlp"}
    Experiment("fedprox", **options, hyper={"mu": 0.5}).run(tmp_path)
    wanted = Experiment("fedprox+ft", **options, hyper={"mu": 0.5}).config()
    assert branch.finished(tmp_path, wanted) is not None
    assert branch.finished(tmp_path, {**wanted, "hyper": {**wanted["hyper"], "mu": 0.4}}) is None
    assert branch.finished(tmp_path, {**wanted, "seed": 1}) is None
    unjudged = Experiment("fedprox+ft", **options, eval_every=0).config()
    Experiment("fedprox", **options, eval_every=0).run(tmp_path)
    assert branch.finished(tmp_path, unjudged) is None  # in a longer run its last round would not have been judged
    assert branch.finished(tmp_path, Experiment("fedprox", **options).config()) is None


def test_small_says_that_it_is_reduced_and_has_no_gap(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert reproduce(file, "--out", out) == 0
    shown = capsys.readouterr().out
    for text in (shown, (out / "table.md").read_text(), (out / "report.html").read_text().replace("&#x27;", "'")):
        assert "REDUCED, not the paper's setting" in text
        assert "1 round instead of 3." in text
        assert not re.search(r"\bgap\b", re.sub("<style>.*?</style>", "", text, flags=re.DOTALL))
        assert "87.92" not in text
    rows = (out / "table.csv").read_text().splitlines()
    assert [row.split(",")[6:8] + row.split(",")[-3::2] for row in rows[1:]] == [["", "", "", "no"]] * 2
    assert reproduce(file, "--out", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparable"] is False
    assert {(row["paper"], row["gap"]) for row in found["rows"]} == {(None, None)}


def test_small_may_have_columns_of_its_own(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For data that stand in for the paper's have other clients."""
    file.write_text(TABLE.replace('columns = ["Local"]', 'columns = [{ Last = "client:client-2" }, "Local"]'))
    assert reproduce(file, "--out", tmp_path / "out", "--methods", "FedAvg", "--json") == 0
    found = {row["column"]: row["ours"] for row in json.loads(capsys.readouterr().out)["rows"]}
    (made,) = kept(tmp_path / "out").values()
    of_client = {row["name"]: row["personal/local-test"] for row in made["result"]["per_client"]}
    assert found == {
        "Last": pytest.approx(100 * of_client["client-2"], abs=0.01),
        "Local": pytest.approx(100 * made["result"]["metrics"]["personal/local-test"], abs=0.01),
    }


def cell(
    method: str, seed: int, local: float, new: float, first: float, chance: float = 0.1, **more: Any
) -> dict[str, Any]:
    """A finished run as it is kept."""
    metrics = {"personal/local-test": local, "ensemble/new-test": new, **more}
    clients = [{"client": 0, "name": "client-0", "personal/local-test": first}]
    result = {"metrics": metrics, "per_client": clients, "select": "last", "eval_point": "post_download", "rounds": 3}
    about = {"version": "0.1.0", "commit": "abc", "versions": {"torch": "2"}, "processor": "CPU", "notes": ["a note"]}
    settings = {"method": method, "seed": seed, "data": "digits", "model": "mlp"}
    data = {"settings": settings, "source": "digits", "chance": chance}
    return {**about, **data, "seconds": 60.0, "counted": {}, "result": result, "curve": []}


def made(file: Path, scale: Any = "full") -> Made:
    table = paper.load(str(file), scale)
    found = {
        ("Local", 0): cell("local", 0, 0.80, 0.1, 0.7),
        ("Local", 1): cell("local", 1, 0.82, 0.1, 0.7),
        ("FedAvg", 0): cell("fedavg", 0, 0.60, 0.60, 0.5),
        ("FedAvg", 1): cell("fedavg", 1, 0.61, 0.61, 0.5),
        ("FedAvg+FT", 0): cell("fedavg+ft", 0, 0.60, 0.5, 0.8, **{"finetuned/local-test": 0.9}),
    }
    places = {(row, column, seed): one for (row, seed), one in found.items() for column in table.columns}
    return Made(
        table, list(table.rows.values()), {k: v for k, v in places.items() if k[0] in table.rows}, "pfed reproduce x"
    )


MARKDOWN = """## tiny

Somebody (2020), Table 1. Digits

| Local % | paper | ours | gap | spread |
| --- | ---: | ---: | ---: | ---: |
| Local | 87.92 ± 2.14 | 81.00 | -6.92 | 1.41 |
| FedAvg | 58.99 | 60.50 | +1.51 | 0.71 |
| FedAvg+FT | 90.00 | 90.00 | +0.00 | – |
| FedProx | – | – | – | – |

| New % | paper | ours | gap | spread |
| --- | ---: | ---: | ---: | ---: |
| Local | 10.03 ± 0.06 ? | 10.00 | -0.03 | 0.00 |
| FedAvg | 58.99 | 60.50 | +1.51 | 0.71 |
| FedAvg+FT | – | 50.00 | – | – |
| FedProx | – | – | – | – |

| First % | paper | ours | gap | spread |
| --- | ---: | ---: | ---: | ---: |
| Local | – | 70.00 | – | 0.00 |
| FedAvg | – | 50.00 | – | 0.00 |
| FedAvg+FT | – | 80.00 | – | – |
| FedProx | – | – | – | – |

| Outside % | paper | ours | gap | spread |
| --- | ---: | ---: | ---: | ---: |
| Local | – | – | – | – |
| FedAvg | – | – | – | – |
| FedAvg+FT | – | – | – | – |
| FedProx | – | – | – | – |

- Column Local counts: Local is +71.00 points over chance (± 1.41) and +20.50 points over FedAvg (± 0.71), 2 seeds.
- First in the paper and here: FedAvg+FT, 10.00 points over Local.
- The paper says: FedAvg+FT is first.
- Reported round and point: last (post_download). Local is personal/local-test, New is ensemble/new-test, \
First is client:client-0, Outside is ensemble/external. Spread: standard deviation over seeds.
- Left open by the paper: The rate: 0.1.
- FedAvg: copied.
- a note
- pfed 0.1.0, commit abc, torch 2, CPU; 5 runs, 5 min of training.

```bash
pfed reproduce x
```
"""
CSV = """table,scale,data,row,column,unit,paper,paper_spread,ours,spread,gap,seeds,comparable
tiny,full,digits,Local,Local,%,87.92,2.14,81,1.4142,-6.92,2,yes
tiny,full,digits,FedAvg,Local,%,58.99,,60.5,0.7071,1.51,2,yes
tiny,full,digits,FedAvg+FT,Local,%,90,,90,,0,1,yes
tiny,full,digits,FedProx,Local,%,,,,,,0,yes
"""


def test_markdown_and_csv(file: Path) -> None:
    assert made(file).markdown() == MARKDOWN
    assert made(file).csv().startswith(CSV)
    assert made(file).csv().count("\n") == 1 + 4 * 4


def test_the_verdict_has_its_numbers(file: Path) -> None:
    table = paper.load(str(file))

    def judged(*pairs: tuple[float, float], chance: float = 0.1) -> figures.Verdict:
        found = {}
        for seed, (local, fedavg) in enumerate(pairs):
            found["Local", seed] = cell("local", seed, local, 0, 0, chance)
            found["FedAvg", seed] = cell("fedavg", seed, fedavg, 0, 0, chance)
        places = {(row, "Local", seed): one for (row, seed), one in found.items()}
        column = table.columns["Local"]
        rows = [table.rows[name] for name in ("Local", "FedAvg")]
        return figures.verdict(column, figures.table_of(table, rows, places)["Local"], found)

    good = judged((0.8, 0.6), (0.82, 0.6))
    assert good.counts
    assert good.numbers == pytest.approx(
        {"seeds": 2, "gain": 71.0, "gain spread": 2**0.5, "distance": 21.0, "distance spread": 2**0.5}
    )
    behind = judged((0.6, 0.8), (0.62, 0.8))  # that FedAvg is ahead says as much
    assert behind.counts
    one = judged((0.8, 0.6))
    assert not one.counts
    assert one.text.endswith("One seed has no spread: 2 or 3 seeds would have one, about 2 min or 4 min more.")
    close = judged((0.80, 0.79), (0.82, 0.80), (0.80, 0.815))  # +1, +2, -1.5: mean 0.5, deviation 1.803
    assert not close.counts
    assert close.text.endswith(
        " A seed moves it by more than it is, and more seeds alone will not change that. Whether the mean is noise"
        " would be decided by 52 seeds, which would bring it to twice its standard error, about 1.6 h more."
    )
    weak = judged(*[(0.8 + 0.01 * (i % 2) * 4, 0.805) for i in range(12)])  # -0.5 and +3.5: mean 1.5, error 0.6
    assert not weak.counts
    assert weak.text.endswith("It is no noise, though: the mean is more than twice its standard error.")
    chance = judged((0.1, 0.5), (0.1, 0.5))
    assert not chance.counts
    assert "Local does not learn here" in chance.text
    no_local = figures.verdict(table.columns["Local"], [], {})
    assert (no_local.counts, no_local.text[:13]) == (False, "is not judged")


def test_a_page_of_all_tables_is_made_of_what_is_kept(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reproduce(file.name, "--methods", "fedavg") == 0
    assert (tmp_path / "reproduce" / "tiny-small" / "report.html").is_file()
    os.remove("reproduce/tiny-small/table.md")
    capsys.readouterr()
    assert cli.main(["reproduce", "page", "reproduce"]) == 0
    assert capsys.readouterr().out == "reproduce/tables.md\n"
    page = Path("reproduce/tables.md").read_text()
    assert "| tiny-small | Somebody (2020), Table 1 | reduced | 1 |" in page
    assert Path("reproduce/tiny-small/table.md").read_text() in page
    assert "pfed reproduce tiny.toml --scale small --methods FedAvg --seeds 1 --seed 0" in page


def test_the_list_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(paper.names())]] == paper.names()
    assert cli.main(["reproduce", "list", "--json"]) == 0
    found = {entry["table"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["partialfed-bn"]["small"]["data"].keys() == {"pacs"}
    assert found["partialfed-bn"]["full"]["data"] == {"office-home": False}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cd2-cifar10"], "There is no table 'cd2-cifar10'. Did you mean 'cd2-cifar10-s2'?"),
        (["no.toml"], "There is no table file 'no.toml'."),
        (["FILE", "--methods", "fedavgg"], "There is no row or method of tiny 'fedavgg'. Did you mean 'fedavg'?"),
        (["FILE", "--seeds", "x"], "--seeds must be how many, or a list as in 0,1,2. Got 'x'."),
        (["FILE", "--seed", "-1"], "run.seed must be >= 0. Got -1."),
        (
            ["FILE", "--engine", "fast"],
            "run.engine must be 'serial' or 'processes' or 'ray' or 'debug' or 'nvflare'. Got 'fast'.",
        ),
        (["FILE", "more"], "There is nothing to do with 'more'. See 'pfed reproduce --help'."),
        (["page"], "'pfed reproduce page' takes the folder in which tables were made. Got None."),
        (["page", "FOLDER"], "There are no finished runs of tables below 'FOLDER'."),
    ],
)
def test_a_mistake_is_named(
    argv: list[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(text: str) -> str:
        return text.replace("FILE", str(file)).replace("FOLDER", str(tmp_path))

    assert cli.main(["reproduce", *map(named, argv), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"pfed: {named(message)}"


def test_data_that_nobody_knows_show_before_the_first_run(file: Path, tmp_path: Path) -> None:
    file.write_text(TABLE.replace("mu = 0.5 }", 'mu = 0.5 }\nrun = { data = "digts" }'))
    table = paper.load(str(file))
    bench = cells.Bench(table, tmp_path / "out", tmp_path / "out" / "runs", {})
    with pytest.raises(UserError, match=r"There is no data set 'digts'\. Did you mean 'digits'\?"):
        bench.all(cells.plan(table, list(table.rows.values()), [0]), lambda text: None)
    assert not (tmp_path / "out").exists()


def test_a_finished_run_of_other_settings_is_not_taken(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert reproduce(file, "--methods", "Local", "--out", out) == 0
    file.write_text(TABLE.replace("lr = 0.1", "lr = 0.2"))
    assert reproduce(file, "--methods", "Local", "--out", out) == 2
    assert "is of other settings: local.lr is 0.1, not 0.2." in capsys.readouterr().err
    (out / "cells" / "local-s0.json").write_text("{")
    assert reproduce(file, "--methods", "Local", "--out", out) == 2
    assert "can't be read as a finished run" in capsys.readouterr().err


def test_evaluation_in_the_last_rounds() -> None:
    result = Experiment("fedavg", clients=3, rounds=7, model="mlp", eval_every=3, eval_last=2).run()
    assert [t for t, _ in result.series["personal/local-test"]] == [3, 6, 7]
    result = Experiment("fedavg+ft", clients=3, rounds=7, model="mlp", eval_every=0, eval_last=3).run()
    assert [t for t, _ in result.series["personal/local-test"]] == [5, 6, 7, 8]
