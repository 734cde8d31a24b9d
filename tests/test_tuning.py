"""Tuning: settings chosen on validation data, and comparisons that take what is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pfed import Experiment, Federation, RunError, Samples, UserError, cli, compare, presets, tune, tuning
from pfed.config import Local
from pfed.registry import methods
from pfed.result import Result

SMALL: dict[str, Any] = {"clients": 4, "rounds": 4, "model": "mlp", "train_cap": 40, "classes_per_client": 5}


def test_a_grid_is_judged_by_separate_runs() -> None:
    tries = {"local.lr": [0.001, 0.1], "mu": [0.0, 1.0]}
    found = tune("fedprox", tries, search="grid", seeds=(0, 1), **SMALL)
    scores = {}
    for lr in tries["local.lr"]:
        for mu in tries["mu"]:
            results = [
                Experiment(
                    "fedprox", hyper={"mu": mu}, local={"lr": lr}, validation=0.2, seed=seed, eval_every=0, **SMALL
                ).run()
                for seed in (0, 1)
            ]
            scores[lr, mu] = sum(r.metrics["personal/validation"] for r in results) / 2
    assert {(t.settings["local.lr"], t.settings["mu"]): t.score for t in found.trials} == scores
    assert [t.score for t in found.trials] == sorted(scores.values(), reverse=True)
    assert scores[found.best["local.lr"], found.best["mu"]] == max(scores.values())
    assert {t.rounds for t in found.trials} == {4}


def test_halving_goes_on_with_the_better_third() -> None:
    tries = {"local.lr": [0.0001, 0.001, 0.01, 0.03, 0.1]}
    found = tune("fedavg", tries, **{**SMALL, "rounds": 9})
    assert [trial.rounds for trial in found.trials] == [9, 3, 1, 1, 1]
    for trial in found.trials:
        straight = Experiment(
            "fedavg",
            local={"lr": trial.settings["local.lr"]},
            validation=0.2,
            **{**SMALL, "rounds": trial.rounds},
        ).run()
        assert trial.score == straight.metrics["personal/validation"]
    later = tune("fedavg", tries, least=2, **{**SMALL, "rounds": 9})
    assert [trial.rounds for trial in later.trials] == [9, 9, 3, 3, 3]
    first = {t.settings["local.lr"]: t for t in tune("fedavg", tries, search="grid", **{**SMALL, "rounds": 1}).trials}
    better = sorted(first.values(), key=lambda t: -t.score)[:2]
    assert {t.settings["local.lr"] for t in found.trials[:2]} == {t.settings["local.lr"] for t in better}


@pytest.mark.parametrize("method", ["fedavg", "cd2pfed"])
def test_a_longer_trial_is_what_a_straight_run_is(method: str) -> None:
    """Rounds are added where they can be; else the trial is run anew."""
    found = tune(method, {"local.lr": [0.01, 0.1]}, **{**SMALL, "rounds": 3})
    best = found.trials[0]
    straight = Experiment(method, local={"lr": best.settings["local.lr"]}, validation=0.2, **{**SMALL, "rounds": 3})
    assert (best.rounds, best.score) == (3, straight.run().metrics["personal/validation"])


def test_test_data_have_no_say(tiny: Federation) -> None:
    """With wrong labels in all test data the same scores come out."""
    tries = {"local.lr": [0.01, 0.1, 0.3]}
    settings: dict[str, Any] = {"rounds": 2, "model": "mlp", "search": "grid"}
    wrong = [dataclasses.replace(c, test=Samples.of(c.test.take()[0], (c.test.labels + 1) % 10)) for c in tiny.clients]
    spoilt = dataclasses.replace(tiny, clients=tuple(wrong))
    one, two = (tune("fedavg", tries, data=data, **settings) for data in (tiny, spoilt))
    assert [(t.settings, t.score) for t in one.trials] == [(t.settings, t.score) for t in two.trials]


@pytest.mark.parametrize("method", list(methods()))
def test_what_is_tried_of_a_method_is_valid(method: str) -> None:
    for name, values in tuning.defaults(method).items():
        assert len(set(values)) == len(values) > 1
        for value in values:
            if name.startswith("local."):
                Experiment(method, local={name[6:]: value})
            else:
                Experiment(method, hyper={name: value})


def test_the_command_writes_a_preset_that_others_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tuned.toml"
    small = ["--clients", "4", "--rounds", "2", "--model", "mlp", "--train-cap", "20"]
    assert (
        cli.main(["tune", "fedprox", "--try", "mu=0.1,1", "--try", "local.lr=0.05,0.1", "--out", str(out), *small]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split() == ["mu", "local.lr", "rounds", "validation"]
    assert shown.splitlines()[0] == "fedprox"
    assert cli.main(["tune", "fedavg", "--try", "local.lr=0.05", "--out", str(out), "--json", *small]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["best"] == {"local.lr": 0.05}
    preset = presets.load(out)
    assert set(preset.methods) == {"fedavg", "fedprox"}
    assert preset.methods["fedprox"]["hyper"]["mu"] in (0.1, 1)
    assert (preset.run["rounds"], preset.run["train_cap"]) == (2, 20)
    assert not {"validation", "eval_every", "seed", "hyper"} & set(preset.run)
    both = compare(["fedavg", "fedprox"], preset=out)
    assert [r.config["local"]["lr"] for r in both.results] == [0.05, preset.methods["fedprox"]["local"]["lr"]]


def test_a_preset_has_also_what_was_the_same_in_all_trials(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    words = ["tune", "fedrep", "--try", "head_epochs=1,2", "--set", "body_epochs=2", "--out", str(out)]
    assert cli.main([*words, "--clients", "4", "--rounds", "1", "--model", "mlp", "--train-cap", "20"]) == 0
    hyper = presets.load(out).methods["fedrep"]["hyper"]
    assert hyper["body_epochs"] == 2
    assert hyper["head_epochs"] in (1, 2)


def test_what_a_preset_says_of_one_method_stays_with_it(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    words = ["tune", "fedper", "fedavg", "--preset", "original", "--try", "local.lr=0.05", "--out", str(out)]
    assert cli.main([*words, "--clients", "4", "--rounds", "1", "--model", "mlp", "--train-cap", "20"]) == 0
    tuned = presets.load(out)
    assert (tuned.of("fedper")["local"]["epochs"], tuned.of("fedper")["local"]["lr"]) == (4, 0.05)
    assert "epochs" not in tuned.of("fedavg")["local"]


def test_mistakes_show_before_anything_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiment, "run", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(UserError, match=r"FedProx\.mu must be >= 0\. Got -1\.0\."):
        tune("fedprox", {"mu": [0.1, -1.0]}, **SMALL)
    with pytest.raises(UserError, match="no validation data"):
        tune("fedprox", {"mu": [0.1]}, validation=0.0, **SMALL)


def test_options_from_python_are_kept_as_far_as_a_file_can_say_them(tiny: Federation, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": tiny, "model": "mlp", "rounds": 1, "alpha": None, "hyper": None}
    for local in (Local(batch_size=5), None):
        found = tune("fedavg", {"local.lr": [0.1]}, local=local, **given)
        found.save(tmp_path / "own.toml")
        kept = presets.load(tmp_path / "own.toml")
        assert kept.run == {"model": "mlp", "rounds": 1}
        assert kept.of("fedavg")["local"].get("batch_size") == (5 if local else None)


def test_a_trial_that_failed_early_may_succeed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a cosine schedule a longer run is another run."""
    trial = tuning.Trial({"local.lr": 0.1})
    same = {"local": {"schedule": "cosine"}, "hyper": {}}
    tuner = tuning._Tuner("fedavg", (0,), {**SMALL, "validation": 0.2}, same)
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "run", lambda *_: (_ for _ in ()).throw(RunError("once")))
        tuner.extend(trial, 1, tmp_path)
    assert trial.failed == "once"
    tuner.extend(trial, 2, tmp_path)
    assert not trial.failed
    assert trial.score > 0


def test_other_rates_are_tried_beside_what_the_options_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "fedprox", "--rates", "0.2,0.4", "--clients", "4", "--rounds", "1", "--train-cap", "40", "--json"]
    assert cli.main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)
    tried = {(trial["settings"]["local.lr"], trial["settings"]["mu"]) for trial in found["trials"]}
    assert tried == {(rate, mu) for rate in (0.2, 0.4) for mu in (0.01, 0.1, 1.0)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedprox", "--try", "muu=1,2"], "There is no option to tune of fedprox 'muu'. Did you mean 'mu'?"),
        (["fedprox", "--try", "mu"], "--try takes KEY=A,B,…. Got 'mu'."),
        (["fedprox", "--try", "mu=1,x"], "FedProx.mu must be a number. Got 'x'."),
        (
            ["fedprox", "--try", "local.rl=1"],
            "There is no option of local 'rl'. Did you mean 'lr'?",
        ),
        (["fedprox", "--least", "0"], "least must be >= 1. Got 0."),
        (["fedprox", "--least", "few"], "--least must be a whole number >= 1. Got 'few'."),
        (["fedprox", "--validation", "0"], "There are no validation data to tune on."),
        (["fedprx"], "There is no method 'fedprx'. Did you mean 'fedprox'?"),
        (["fedavg", "fedprx"], "There is no method 'fedprx'. Did you mean 'fedprox'?"),
        (["fedavg", "--rates", "0.1,x"], "local.lr must be a number. Got 'x'."),
        (["fedavg", "--rates", "0.1", "--try", "local.epochs=1"], "goes without --try; write --try local.lr=0.1."),
        (["fedprox", "fedavg", "--try", "mu=1"], "There is no option to tune of fedavg 'mu'."),
    ],
)
def test_mistakes_of_a_search(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *words, "--clients", "4", "--rounds", "1", "--model", "mlp"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""  # nothing was tried


def test_a_wrong_place_for_the_best_shows_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: pytest.fail("it was tried"))
    (tmp_path / "bad.toml").write_text("[runs]")
    for name, message in {"best.txt": "A preset file must end with .toml.", "bad.toml": "There is no table"}.items():
        assert cli.main(["tune", "fedavg", "--out", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_what_was_found_is_told_even_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["tune", "fedavg", "--try", "local.lr=0.05", "--clients", "4", "--rounds", "1", "--train-cap", "40"]
    assert cli.main([*words, "--out", str(tmp_path / "file" / "best.toml")]) == 2
    said = capsys.readouterr()
    assert "0.05" in said.out
    assert said.err.startswith("pfed: The preset can't be written to")


def test_a_setting_that_fails_is_the_last() -> None:
    """At such a rate numbers grow beyond all bounds."""
    found = tune("fedavg", {"local.lr": [1e30, 0.1]}, **SMALL)
    assert [trial.settings["local.lr"] for trial in found.trials] == [0.1, 1e30]
    assert "failed" in found.table()
    assert found.json()["trials"][1]["validation"] is None
    with pytest.raises(RunError, match=r"All settings of fedavg failed\. The first: Round 1"):
        tune("fedavg", {"local.lr": [1e30, 1e31]}, **SMALL)


def test_a_search_that_is_not_known() -> None:
    with pytest.raises(UserError, match="search must be 'grid' or 'halving'"):
        tune("fedavg", search="random")  # type: ignore[arg-type]


def test_a_comparison_takes_what_is_there(tmp_path: Path) -> None:
    first = compare(["local", "fedavg"], runs=tmp_path, seeds=(0, 1), **SMALL)
    again = compare(["local", "fedavg", "fedprox"], runs=tmp_path, seeds=(0, 1), reuse=True, **SMALL, engine="debug")
    assert {r.run for r in first.results} < {r.run for r in again.results}
    assert len(list(tmp_path.iterdir())) == 6
    assert first.rows() == again.rows()[:2]
    compare(["fedavg"], runs=tmp_path, reuse=True, **{**SMALL, "train_cap": 39})
    assert len(list(tmp_path.iterdir())) == 7


def test_a_finished_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is all that a table needs: models may have been deleted, and no data are loaded."""
    first = compare(["local", "fedavg"], runs=tmp_path, **SMALL)
    for path in [*tmp_path.glob("*/checkpoint-*"), *tmp_path.glob("*/states-*")]:
        path.unlink()
    monkeypatch.setattr(Experiment, "federation", lambda self: pytest.fail("data were loaded"))
    assert compare(["local", "fedavg"], runs=tmp_path, reuse=True, **SMALL).rows() == first.rows()


def test_a_comparison_goes_on_with_a_stopped_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pfed.session import Session

    act = Session._act

    def stops(self: Session, t: int) -> None:
        if t == 3:
            raise KeyboardInterrupt
        act(self, t)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_act", stops)
        with pytest.raises(KeyboardInterrupt):
            compare(["fedavg"], runs=tmp_path, checkpoint_every=1, **SMALL)
    (folder,) = tmp_path.iterdir()
    assert Result.load(folder).state == "stopped"
    (result,) = compare(["fedavg"], runs=tmp_path, reuse=True, checkpoint_every=1, **SMALL).results
    assert (result.run, result.state) == (folder.name, "complete")
    assert result.metrics == Experiment("fedavg", **SMALL).run().metrics


def test_data_from_python_are_never_taken_for_others(tiny: Federation, tmp_path: Path) -> None:
    for _ in range(2):
        compare(["fedavg"], data=tiny, model="mlp", rounds=1, runs=tmp_path, reuse=True)
    assert len(list(tmp_path.iterdir())) == 2
