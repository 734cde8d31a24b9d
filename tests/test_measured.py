"""The figures in the pages are those of the runs, which are kept line by line in docs/results/all-methods.csv."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from pfed.metrics import over_seeds
from pfed.registry import methods
from pfed.result import spread

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {
    "fashion-mnist, two classes": "Fashion-MNIST, two classes",
    "fashion-mnist, dirichlet 0.3": "Fashion-MNIST, Dirichlet 0.3",
    "digits-5s": "digits in five styles",
}
SEEDS = {"0", "1", "2"}
MATCHED = "local matched_participation=true"
Runs = dict[str, dict[str, dict[str, dict[str, str]]]]  # data, method, seed: a line of the table


@pytest.fixture(scope="module")
def runs() -> Runs:
    found: Runs = {data: defaultdict(dict) for data in TITLES}
    with (DOCS / "results" / "all-methods.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["seed"] not in found[row["data"]][row["method"]]
            found[row["data"]][row["method"]][row["seed"]] = row
    return found


def figures(runs: Runs, data: str, method: str) -> list[str]:
    """Accuracy, that of the worst, gain over Local: mean and spread over seeds."""
    rows, alone = runs[data][method], runs[data]["local"]
    gains = [float(row["accuracy"]) - float(alone[seed]["accuracy"]) for seed, row in rows.items()]
    told = [spread(over_seeds([float(row[key]) for row in rows.values()])) for key in ("accuracy", "worst")]
    return [*told, "–" if method == "local" else spread(over_seeds(gains), sign=True)]


@pytest.mark.parametrize("data", TITLES)
def test_every_method_has_a_run_for_each_seed(runs: Runs, data: str) -> None:
    assert {*methods(), "fedavg+ft"} <= runs[data].keys()
    assert all(rows.keys() == SEEDS for rows in runs[data].values())


@pytest.mark.parametrize("data", TITLES)
def test_the_table_of_all_methods_is_made_of_the_runs(runs: Runs, data: str) -> None:
    page = (DOCS / "results" / "all-methods.md").read_text()
    for method, rows in runs[data].items():
        name = method.replace(" ", " `") + "`" if " " in method else method
        sent = sum(float(row["bytes_per_client"]) for row in rows.values()) / len(rows) / 1e6
        seconds = sum(float(row["seconds"]) for row in rows.values()) / len(rows)
        cells = [name, *figures(runs, data, method), f"{sent:.3g}", f"{seconds:.0f}"]
        assert f"| {' | '.join(cells)} |" in page, method


@pytest.mark.parametrize("data", TITLES)
def test_each_method_tells_its_own_figures(runs: Runs, data: str) -> None:
    for method in runs[data].keys() - {MATCHED}:
        several = method.startswith("partialfed-")
        page = "finetuned" if method.endswith("+ft") else "partialfed" if several else method
        cells = [f"{TITLES[data]}, {method}" if several else TITLES[data], *figures(runs, data, method)]
        assert f"| {' | '.join(cells)} |" in (DOCS / "methods" / f"{page}.md").read_text(), method
