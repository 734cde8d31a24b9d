"""Presets: settings by name, for the run and for methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pfed import Experiment, UserError, cli, compare, presets
from pfed.methods.fedprox import FedProx
from pfed.presets import Preset

FILE = """
[run]
rounds = 1
clients = 3
model = "mlp"

[run.local]
lr = 0.2
batch_size = 7

[methods.fedprox]
local = { lr = 0.3 }
hyper = { mu = 0.5 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def config(capsys: pytest.CaptureFixture[str], runs: Path, *argv: object) -> dict[str, Any]:
    """The settings of a run that a command made."""
    from pfed.result import Result

    assert cli.main([str(word) for word in (*argv, "--runs", runs, "--json")]) == 0
    return Result.load(runs / json.loads(capsys.readouterr().out)["run"]).config


@pytest.mark.parametrize("name", presets.others())  # the papers' tables have tests of their own
def test_a_preset_of_the_package_is_valid_for_each_of_its_methods(name: str) -> None:
    preset = presets.load(name)
    assert preset.about
    assert preset.methods
    for method in preset.methods:
        made = Experiment(method, **preset.of(method))
        hyper, local = preset.methods[method].get("hyper", {}), preset.methods[method].get("local", {})
        assert {key: made.method.hyperparameters()[key] for key in hyper} == hyper
        assert {key: getattr(made.options.local, key) for key in local} == local


def test_the_originals_are_not_the_defaults() -> None:
    """Per-FedAvg's own step hardly learns, so that it is no default; it can be had by name."""
    original = Experiment("perfedavg", **presets.load("original").of("perfedavg")).method.hyperparameters()
    assert (original["beta"], Experiment("perfedavg").method.hyperparameters()["beta"]) == (0.001, 0.0)


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("apfl", {"alpha": 0.75, "adaptive": False}),
        ("fedetf", {"scale": 10.0, "alternations": 20, "lr": 0.04, "momentum": 0.9, "batch_size": 128}),
        ("fedpac", {"lam": 1.0, "head_lr": 0.1, "lr": 0.01, "weight_decay": 5e-4, "epochs": 5}),
        ("fedrep", {"head_epochs": 10, "body_epochs": 1, "momentum": 0.5, "weight_decay": 1e-4}),
        ("l2gd", {"p": 0.9, "mix": 0.05, "lr": 0.1}),
        ("pfedme", {"lam": 15.0, "inner_steps": 5, "personal_lr": 0.01, "eta": 0.005, "beta": 1.0}),
        ("pfedsd", {"lam": 1.0, "tau": 1.0, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 64}),
        ("scaffold", {"eta_g": 1.0}),
    ],
)
def test_the_originals_are_as_published(method: str, values: dict[str, Any]) -> None:
    made = Experiment(method, **presets.load("original").of(method))
    found = {**vars(made.options.local), **made.method.hyperparameters()}
    assert {key: found[key] for key in values} == values


def test_a_method_that_is_not_known_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[methods.fedprxo]\nhyper = { mu = 0.5 }\n")
    with pytest.raises(UserError, match=r"There is no method of the preset .*'fedprxo'\. Did you mean 'fedprox'\?"):
        presets.load(path)


def test_a_run_takes_a_preset_and_flags_win(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    found = config(capsys, runs, "run", "fedprox", "--preset", file)
    assert (found["rounds"], found["clients"], found["hyper"]["mu"]) == (1, 3, 0.5)
    assert (found["local"]["lr"], found["local"]["batch_size"]) == (0.3, 7)
    other = config(capsys, runs, "run", "fedavg", "--preset", file)
    assert other["local"]["lr"] == 0.2
    given = ("--clients", 4, "--local.lr", 0.1, "--set", "mu=0.7")
    changed = config(capsys, runs, "run", "fedprox", "--preset", file, *given)
    assert (changed["clients"], changed["local"]["lr"], changed["hyper"]["mu"]) == (4, 0.1, 0.7)
    assert changed["local"]["batch_size"] == 7


def test_a_file_wins_over_a_preset(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('method = "fedprox"\nclients = 5\n[local]\nlr = 0.4\n')
    found = config(capsys, tmp_path / "runs", "run", toml, "--preset", file)
    assert (found["clients"], found["local"]["lr"], found["local"]["batch_size"]) == (5, 0.4, 7)
    assert found["hyper"]["mu"] == 0.5


def test_a_comparison_gives_each_method_its_own(file: Path) -> None:
    both = compare(["fedavg", "fedprox", "fedprox+ft"], preset=file, hyper={"fedprox+ft": {"ft_epochs": 1}})
    fedavg, fedprox, tuned = (result.config for result in both.results)
    assert [c["local"]["lr"] for c in (fedavg, fedprox, tuned)] == [0.2, 0.3, 0.3]
    assert (fedprox["hyper"]["mu"], tuned["hyper"]["mu"], tuned["hyper"]["ft_epochs"]) == (0.5, 0.5, 1)
    given = compare([FedProx(mu=0.9)], preset=file).results[0].config
    assert (given["clients"], given["local"]["lr"], given["hyper"]["mu"]) == (3, 0.2, 0.9)
    changed = compare(["fedprox"], preset=file, local={"lr": 0.1}, rounds=0).results[0].config
    assert (changed["local"]["lr"], changed["local"]["batch_size"], changed["rounds"]) == (0.1, 7, 0)


def test_a_method_with_a_run_of_its_own_does_not_take_over_another_division(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[run]\nclients = 3\nrounds = 0\n[methods.fedper]\nrun = { clients = 4, bn = 'local-all' }\n")
    fedavg, fedper, tuned = (
        result.config for result in compare(["fedavg", "fedper", "fedper+ft"], preset=file).results
    )
    assert [(c["clients"], c["bn"]) for c in (fedavg, fedper, tuned)] == [(3, "share"), *[(4, "local-all")] * 2]
    assert [len(r.clients) for r in compare(["fedavg", "fedper"], preset=file).results] == [3, 4]


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    run = {"data": "digits", "fraction": 0.5, "balance_cap": True, "local": {"lr": 0.1}}
    methods = {
        "fedavg+ft": {"run": {"bn": "share"}, "hyper": {"ft_epochs": 3}},
        "lg-fedavg": {"local": {"lr": 1e-05}, "hyper": {"shared": 1}},
    }
    presets.save(Preset('Says "so": ü', run, methods), tmp_path / "a" / "b.toml")
    read = presets.load(tmp_path / "a" / "b.toml")
    assert (read.about, read.run, read.methods) == ('Says "so": ü', run, methods)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("orginal", "There is no preset 'orginal'. Did you mean 'original'?"),
        ("nothing.toml", "There is no preset file 'nothing.toml'."),
    ],
)
def test_a_preset_that_is_not_there(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "fedavg", "--preset", name]) == 2
    assert capsys.readouterr().err == f"pfed: {message}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run", "is not TOML"),
        ("[runs]\n", r"There is no table of the preset .* 'runs'. Did you mean 'run'\?"),
        ("run = 3\n", "run and methods of the preset .* must be tables"),
        ("[methods.fedavg]\nlr = 3\n", "methods.fedavg of the preset .* must have tables run, local and hyper. Got lr"),
        (
            "[methods.fedavg.run.local]\nlr = 3\n",
            "methods.fedavg.run of the preset .* must not have local: that stands",
        ),
    ],
)
def test_a_preset_file_with_a_mistake(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        presets.load(path)


@pytest.mark.parametrize("name", ["tuned/label-skew", "tuned/feature-skew"])
def test_methods_of_a_tuned_preset_train_as_much_as_each_other(name: str) -> None:
    """A search fixes the epochs and the size of batches for all; a method that lost them would compare unfairly."""
    preset = presets.load(name)
    trained = {(o.epochs, o.batch_size) for o in (Experiment(m, **preset.of(m)).options.local for m in preset.methods)}
    assert len(trained) == 1
