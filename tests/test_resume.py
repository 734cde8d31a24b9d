"""A stopped run goes on as if it had never stopped: bit for bit, after Ctrl-C, kill -9, damage and full disks."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pfed import Experiment, cli, files, store, wire
from pfed.data import sources
from pfed.record import Record
from pfed.result import Result
from pfed.runner import Runner
from pfed.session import Session
from pfed.states import ClientStates

SMALL: dict[str, Any] = {"model": "mlp", "clients": 4, "rounds": 4, "fraction": 0.75, "checkpoint_every": 3}
FEW = 120  # digits: what is tested here does not depend on their number


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = sources.load("digits")
    few = dataclasses.replace(digits, x=digits.x[:FEW], y=digits.y[:FEW])
    monkeypatch.setattr(sources, "load", lambda *name, **size: few)


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str


def pfed(*argv: object) -> Done:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")
        code = cli.main([str(word) for word in argv])
    return Done(code, out.getvalue(), err.getvalue())


def resume(folder: Path) -> Done:
    return pfed("resume", folder.name, "--runs", folder.parent, "--json")


def plain(tree: Any) -> Any:
    """A tree that can be compared by ==, bit by bit."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tree


def decoded(path: Path) -> wire.State:
    return wire.decode(path.read_bytes()[32:])  # after the checksum


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-??????"))


def outcome(folder: Path) -> dict[str, Any]:
    """All that a stop must not change: every number of every round, and the final states of server and clients."""
    result = Result.load(folder)
    final = decoded(checkpoints(folder)[-1])
    kept = ClientStates(folder)
    kept.restore(final["clients"])
    versions = {client: version for client, version, *_ in final["clients"].tolist()}
    return {
        "state": result.state,
        "rounds": [{key: value for key, value in row.items() if key != "seconds"} for row in result.rounds],
        "series": result.series,
        "metrics": result.metrics,
        "per_client": list(result.clients),
        "traffic": result.traffic,
        "logs": result.logs,
        "correct": result.correct,
        "failures": [event for event in result.events if event["kind"] in ("dropped", "late", "note")],
        "round": final["round"],
        "calls": final["calls"],
        "versions": versions,
        "server": plain(final["server"]),
        "clients": {client: plain(kept.load(client, version)) for client, version in versions.items()},
    }


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Part by part, for a difference of two large states says little."""
    assert found.keys() == expected.keys()
    for part in expected:
        assert found[part] == expected[part], part


Moment = Callable[[str, int, int], bool]  # of a step's name, a client and a round


@contextlib.contextmanager
def interruption(moment: Moment) -> Iterator[None]:
    """Ctrl-C right after the first step for which this holds: its state is made, its reply not yet accepted."""
    original = Runner.__call__

    def call(self: Runner, step: str, id: int, round: int, *rest: Any) -> Any:
        answer = original(self, step, id, round, *rest)
        if moment(step, id, round):
            raise KeyboardInterrupt
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "__call__", call)
        yield


@contextlib.contextmanager
def rounds_run() -> Iterator[list[int]]:
    """The rounds that are run inside."""
    act, found = Session._act, []

    def noting(self: Session, t: int) -> None:
        found.append(t)
        act(self, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_act", noting)
        yield found


def second_client_of(round: int) -> Moment:
    """In the midst of a cohort: one client has been accepted, one has trained, the third has not begun."""
    seen: list[int] = []

    def moment(step: str, id: int, now: int) -> bool:
        if now == round and not step.startswith("@"):
            seen.append(id)
        return len(seen) == 2

    return moment


def stopped_run(experiment: Experiment, runs: Path, moment: Moment) -> Path:
    with interruption(moment), pytest.raises(KeyboardInterrupt):
        experiment.run(runs)
    (folder,) = store.folders(runs)
    return folder


def straight_run(experiment: Experiment, runs: Path) -> dict[str, Any]:
    return outcome(runs / experiment.run(runs).run)


def events(folder: Path) -> list[tuple[int, str]]:
    return [(event["round"], event["kind"]) for event in Result.load(folder).events if event["kind"] != "note"]


MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "schedule": "cosine"}
EVERYTHING = {
    "dropout": 0.3,
    "stragglers": 0.5,
    "eval_point": "post_local",
    "eval_every": 2,
    "validation": 0.2,
    "select": "validation",
    "keep_optimizer": True,
    "new_test": "mean_prob",
    "local": MOMENTUM,
}
CASES = {
    "fedavg": ("fedavg", {}),
    "fedavg with everything": ("fedavg", EVERYTHING),
    "fedrep": ("fedrep", {"hyper": {"head_epochs": 2}}),
    "ditto": ("ditto", {}),
    "fedavg+ft": ("fedavg+ft", {"hyper": {"ft_epochs": 2}}),
    "local with momentum": ("local", {"local": MOMENTUM}),
    "lg-fedavg": ("lg-fedavg", {"hyper": {"shared": 1}}),
    "fedavg, BatchNorm": ("fedavg", {"model": "cnn-small-bn"}),
    "fedrep, BatchNorm": ("fedrep", {"model": "cnn-small-bn", "hyper": {"head_epochs": 1}}),
    "ditto, BatchNorm": ("ditto", {"model": "cnn-small-bn", "bn": "local-stats"}),
    "fedavg+ft, BatchNorm": ("fedavg+ft", {"model": "cnn-small-bn", "hyper": {"ft_epochs": 1, "ft_scope": "all"}}),
    "local with momentum, BatchNorm": ("local", {"model": "cnn-small-bn", "local": MOMENTUM}),
    "lg-fedavg, BatchNorm": ("lg-fedavg", {"model": "cnn-small-bn", "bn": "local-all"}),
}


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("case", CASES)
def test_resumed_is_straight(tmp_path: Path, case: str) -> None:
    """Stopped in the midst of round 3, which leaves a checkpoint; resumed by the command, from the record alone."""
    method, changes = CASES[case]
    settings = {**SMALL, **changes}
    folder = stopped_run(Experiment(method, **settings), tmp_path / "stopped", second_client_of(3))
    assert Result.load(folder).state == "stopped"
    assert checkpoints(folder)[-1].name == "checkpoint-000002"
    done = resume(folder)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["state"] == "complete"
    found = outcome(folder)
    assert_same(found, straight_run(Experiment(method, **settings), tmp_path / "straight"))
    assert all(("momentum" in state) == ("momentum" in case) for state in found["clients"].values()) or "every" in case


def at(round: int, step: str, client: int) -> Moment:
    return lambda name, id, now: (now, name, id) == (round, step, client)


MOMENTS = {
    "the first step of all": second_client_of(1),
    "evaluation of round 1": at(1, "@accuracy", 2),
    "evaluation of round 3": at(3, "@accuracy", 0),
    "the first client of round 4": lambda name, id, now: now == 4,
    "fine-tuning": at(5, "finetune", 1),
    "the last evaluation": at(5, "@scores", 3),
}


@pytest.fixture(scope="module")
def ditto_straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        digits = sources.load("digits")
        few = dataclasses.replace(digits, x=digits.x[:FEW], y=digits.y[:FEW])
        patch.setattr(sources, "load", lambda *name, **size: few)
        return straight_run(ditto(), tmp_path_factory.mktemp("straight"))


def ditto(**changes: Any) -> Experiment:
    """Ditto with fine-tuning has state of every kind: at the server, private at the clients, and a finish."""
    return Experiment("ditto+ft", hyper={"ft_epochs": 1}, **{**SMALL, "checkpoint_every": 1, **changes})


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("moment", MOMENTS)
def test_any_moment_is_good_for_a_stop(tmp_path: Path, ditto_straight: dict[str, Any], moment: str) -> None:
    folder = stopped_run(ditto(), tmp_path, MOMENTS[moment])
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_a_run_of_which_only_the_journal_is_left_goes_on_in_python(
    tmp_path: Path, ditto_straight: dict[str, Any]
) -> None:
    folder = stopped_run(ditto(), tmp_path, MOMENTS["the first client of round 4"])
    for path in folder.glob("record.sqlite*"):
        path.unlink()
    with pytest.warns(UserWarning, match="made anew"):
        ditto().resume(folder)
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_stop_leaves_a_checkpoint_of_the_last_whole_round(
    tmp_path: Path, ditto_straight: dict[str, Any], every: int
) -> None:
    """However often checkpoints are written, Ctrl-C costs no more than the round it falls into."""
    folder = stopped_run(ditto(checkpoint_every=every), tmp_path, second_client_of(4))
    assert checkpoints(folder)[-1].name == "checkpoint-000003"
    with rounds_run() as rounds:
        assert resume(folder).code == 0
    assert rounds == [4, 5]
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_stopped_again_and_again(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    """In every round, also before the resumed run has finished its first one."""
    folder = stopped_run(ditto(), tmp_path, second_client_of(1))
    for moment in (second_client_of(2), second_client_of(2), at(3, "@accuracy", 1), second_client_of(4)):
        with interruption(moment), pytest.raises(KeyboardInterrupt):
            Experiment.from_config(Result.load(folder).config).resume(folder)
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_a_stop_while_a_checkpoint_is_written(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    replace, seen = os.replace, []

    def stop_once(source: Any, target: Any) -> None:
        if Path(target).name == "checkpoint-000002" and not seen:
            seen.append(target)
            raise KeyboardInterrupt
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.os, "replace", stop_once)
        with pytest.raises(KeyboardInterrupt):
            ditto().run(tmp_path)
    assert seen
    (folder,) = store.folders(tmp_path)
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_the_command_line_stops_with_130(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    argv = ["ditto+ft", "--set", "ft_epochs=1", "--runs", tmp_path]
    for key, value in SMALL.items():
        argv += [f"--{key}", value]
    with interruption(second_client_of(3)):
        done = pfed("run", *argv)
    assert done.code == 130
    assert done.out == ""
    assert done.err == "pfed: Stopped after round 2; go on with 'pfed resume ditto+ft-digits-s0-1'.\n"
    (row,) = json.loads(pfed("runs", "--runs", tmp_path, "--json").out)
    assert (row["state"], row["round"], row["rounds"]) == ("stopped", 2, 4)
    assert resume(tmp_path / row["run"]).code == 0
    assert_same(outcome(tmp_path / row["run"]), ditto_straight)


def flip(path: Path, where: str = "middle") -> None:
    """Turn a bit in the middle, of the last byte, or of many."""
    data = bytearray(path.read_bytes())
    places = {"middle": [len(data) // 2], "end": [-1], "everywhere": range(0, len(data), 500)}
    for place in places[where]:
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize(
    ("harmed", "start"),
    [
        ({"checkpoint-000003": "middle"}, 3),
        ({"checkpoint-000002": "middle", "checkpoint-000003": "end"}, 0),
        ({"states-000001": "end"}, 3),
        ({"states-000001": "everywhere"}, 0),
        ({"checkpoint-000003": "middle", "states-000001": "everywhere"}, 0),
    ],
    ids=["newest", "both", "newest state", "states", "one of each"],
)
def test_damage_costs_rounds_and_nothing_else(
    tmp_path: Path, ditto_straight: dict[str, Any], harmed: dict[str, str], start: int
) -> None:
    """The run goes on from the one before, or from the beginning; the record tells, and the result is the same."""
    folder = stopped_run(ditto(), tmp_path, second_client_of(4))
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-000002", "checkpoint-000003"]
    for name, where in harmed.items():
        flip(folder / name, where)
    with rounds_run() as rounds:
        done = resume(folder)
    assert done.code == 0
    assert rounds == list(range(start, 6))
    noted = {3} if start else {2, 3}
    told = [f"the checkpoint of round {round} is damaged" for round in sorted(noted, reverse=True)]
    assert len(done.err.splitlines()) == len(told)
    assert all(text in line for text, line in zip(told, done.err.splitlines(), strict=True))
    assert {round for round, kind in events(folder) if kind == "damaged checkpoint"} == noted
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_rounds_to_be_run_again_are_out_of_the_record(tmp_path: Path) -> None:
    """Back at the beginning and stopped early, the run has no numbers of the rounds it lost."""
    folder = stopped_run(ditto(), tmp_path, second_client_of(4))
    for path in checkpoints(folder):
        flip(path)
    with interruption(second_client_of(2)), pytest.raises(KeyboardInterrupt), pytest.warns(match="begins anew"):
        ditto().resume(folder)
    result = Result.load(folder)
    assert [row["round"] for row in result.rounds] == [0, 1]
    assert [round for round, _ in result.series["personal/local-test"]] == [1]
    assert store.describe(folder)["round"] == 1


@pytest.mark.usefixtures("few_digits")
def test_a_complete_run_is_printed_again(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    """Nothing is run, nothing is written; `resume` prints what `run` printed."""
    experiment = ditto()
    folder = tmp_path / experiment.run(tmp_path).run
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("check", "states"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "__call__", None)
        done = resume(folder)
    assert done.code == 0
    assert json.loads(done.out) == Result.load(folder).json()
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_personal_models_of_a_complete_run_are_the_final_ones(tmp_path: Path) -> None:
    """Also when its last checkpoint is damaged: rounds are run again rather than an older model handed out."""
    first = ditto()
    folder = tmp_path / first.run(tmp_path).run
    expected = plain(dict(first.model(0).state_dict()))
    flip(checkpoints(folder)[-1])
    again = ditto()
    with pytest.warns(match="the one before is used"):
        again.resume(folder)
    assert plain(dict(again.model(0).state_dict())) == expected


@pytest.mark.usefixtures("few_digits")
def test_a_stop_without_a_folder_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with interruption(second_client_of(2)), pytest.raises(KeyboardInterrupt, match="nothing is kept"):
        ditto().run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_digits")
def test_two_checkpoints_and_only_named_segments_stay(tmp_path: Path) -> None:
    """With one client of four a round, and no other file is there."""
    folder = tmp_path / Experiment("fedrep", **{**SMALL, "fraction": 0.25, "checkpoint_every": 1}).run(tmp_path).run
    kept = checkpoints(folder)
    assert [path.name for path in kept] == ["checkpoint-000003", "checkpoint-000004"]
    named = {f"states-{row[2]:06d}" for path in kept for row in decoded(path)["clients"].tolist() if row[2]}
    files = {"lock", "record.sqlite", "journal", *(path.name for path in kept), *named}
    assert {path.name for path in folder.iterdir()} == files


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_more_rows(*_: Any, **__: Any) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def no_room_from(round: int, patch: pytest.MonkeyPatch, *, for_rows: bool = True) -> None:
    """The disk is full from this round's checkpoint on; without room for rows the record can't be written either."""
    save = store.Store.save

    def saving(self: store.Store, checkpoint: store.Checkpoint) -> None:
        if checkpoint.round >= round:
            patch.setattr(store.os, "fsync", full_disk)
            if not for_rows:
                for name in ("set", "event", "add_round"):
                    patch.setattr(Record, name, no_more_rows)
        save(self, checkpoint)

    patch.setattr(store.Store, "save", saving)


DITTO = ["run", "ditto+ft", "--set", "ft_epochs=1", "--checkpoint-every", 1]
for key in ("model", "clients", "rounds", "fraction"):
    DITTO += [f"--{key}", SMALL[key]]


@pytest.mark.usefixtures("few_digits")
def test_a_full_disk_stops_the_run_and_costs_one_round(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    """Exit code 1 and one line that says what to do; then there is room again."""
    with pytest.MonkeyPatch.context() as patch:
        no_room_from(3, patch)
        done = pfed(*DITTO, "--runs", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "pfed: The checkpoint of round 3 can't be written: No space left on device. The last good one is of round 2; "
        "make room and go on with 'pfed resume ditto+ft-digits-s0-1'.\n"
    )
    (row,) = json.loads(pfed("runs", "--runs", tmp_path, "--json").out)
    assert row["state"] == "failed"
    folder = tmp_path / row["run"]
    assert checkpoints(folder)[-1].name == "checkpoint-000002"
    assert not list(folder.glob("*.tmp"))
    assert [kind for _, kind in events(folder)] == ["failed"]
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_a_disk_too_full_for_the_record_of_the_failure(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    """The checkpoint does not fit, nor does the note about it: still one line, still resumable."""
    with pytest.MonkeyPatch.context() as patch:
        no_room_from(3, patch, for_rows=False)
        done = pfed(*DITTO, "--runs", tmp_path)
    assert done.code == 1
    assert done.err.startswith("pfed: The checkpoint of round 3 can't be written: No space left on device.")
    assert done.err.count("\n") == 1
    (folder,) = store.folders(tmp_path)
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("what", ["add_clients", "set", "add_round"])
def test_a_disk_too_full_for_the_record(tmp_path: Path, ditto_straight: dict[str, Any], what: str) -> None:
    """From the first row to those of a round: one line, exit code 1, and the run can go on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, what, no_more_rows)
        done = pfed(*DITTO, "--runs", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "database or disk is full" in done.err
    assert done.err.count("\n") == 1
    (folder,) = store.folders(tmp_path)
    if what == "add_round":
        assert resume(folder).code == 0
        assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("where", ["journal", "states"])
def test_a_disk_that_is_full_in_the_midst_of_a_round(
    tmp_path: Path, ditto_straight: dict[str, Any], where: str
) -> None:
    """No room for a line of the journal, or for states that do not fit into memory: one line, and the run can go on."""
    write, states = files.write, iter(range(10**9))

    def writing(descriptor: int, parts: Any, offset: int) -> None:
        of_journal = parts[0].endswith(b"\n")
        if b'"rounds":[[3' in parts[0] if where == "journal" else not of_journal and next(states) >= 12:
            full_disk()
        write(descriptor, parts, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", writing)
        done = pfed(*DITTO, "--state-memory", 0, "--runs", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "No space left on device" in done.err
    assert done.err.count("\n") == 1
    (folder,) = store.folders(tmp_path)
    assert resume(folder).code == 0
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_a_failure_costs_no_more_than_its_round(tmp_path: Path, ditto_straight: dict[str, Any]) -> None:
    """Whatever stops a run, a checkpoint of the last whole round is left, however rare checkpoints are."""

    def failing(self: Session, t: int) -> None:
        if t == 4:
            raise ZeroDivisionError("a bug in a method")
        act(self, t)

    act = Session._act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_act", failing)
        with pytest.raises(ZeroDivisionError):
            ditto(checkpoint_every=0).run(tmp_path)
    (folder,) = store.folders(tmp_path)
    assert store.describe(folder)["state"] == "failed"
    with rounds_run() as rounds:
        assert resume(folder).code == 0
    assert rounds == [4, 5]
    assert_same(outcome(folder), ditto_straight)


@pytest.mark.usefixtures("few_digits")
def test_too_few_clients_stop_the_run_cleanly(tmp_path: Path) -> None:
    """Exit code 1 and one line; the last checkpoint is good: with a lower bound the run goes on as if it had had it."""
    settings = {**SMALL, "checkpoint_every": 1, "fraction": 1.0, "dropout": 0.3, "seed": 2}
    straight = straight_run(Experiment("fedrep", **settings), tmp_path / "straight")
    assert [row["participants"] for row in straight["rounds"]] == [0, 4, 4, 1, 3]
    runs, argv = tmp_path / "failed", [word for key, value in settings.items() for word in (f"--{key}", value)]
    done = pfed("run", "fedrep", *argv, "--min-clients", 2, "--runs", runs)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("pfed: Round 3: 1 clients answered, min_clients is 2. Client client-")
    assert done.err.count("\n") == 1
    (folder,) = store.folders(runs)
    assert store.describe(folder)["state"] == "failed"
    assert checkpoints(folder)[-1].name == "checkpoint-000002"
    again = resume(folder)
    assert (again.code, again.err) == (1, done.err)
    assert Experiment("fedrep", **settings).resume(folder).state == "complete"
    assert_same(outcome(folder), straight)


METHOD = '''
"""FedAvg with a private bias, which waits in round 3 as long as a file called `hold` lies beside this one."""

import time
from dataclasses import dataclass
from pathlib import Path

from pfed import BACKBONE, HEAD, Method, params, step

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Patient(Method):
    """Waits (nobody)."""

    def init(self, model):
        return {"body": params(model, BACKBONE)}

    def download(self, server):
        return {"body": server["body"]}

    def round(self, server, cohort):
        server["body"] = cohort.mean(self.update, "body", **self.download(server))

    @step
    def update(self, client, body):
        model = client.model(body)
        client.fit(model)
        if client.round == 3 and client.id == 1 and (HERE / "hold").exists():
            (HERE / "reached").touch()
            time.sleep(120)
        client.keep(model, HEAD)
        return {"body": client.share(model, BACKBONE)}

    def predictor(self, client, body):
        return client.model(body)
'''

PATIENT = ["--clients", 3, "--rounds", 4, "--model", "mlp", "--test-fraction", 0.9, "--local.momentum", 0.5]


@pytest.fixture(scope="module")
def method_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own methods") / "patient.py"
    path.write_text(METHOD)
    return path


@pytest.fixture(scope="module")
def patient_straight(method_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("straight")
    done = pfed("run", f"{method_file}:Patient", *PATIENT, "--runs", runs)
    assert done.code == 0, done.err
    (folder,) = store.folders(runs)
    return outcome(folder)


@contextlib.contextmanager
def waiting(method_file: Path, runs: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, in the midst of round 3."""
    (method_file.parent / "hold").touch()
    argv = [sys.executable, "-m", "pfed", "run", f"{method_file}:Patient", *map(str, PATIENT), "--runs", str(runs)]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not (method_file.parent / "reached").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "it did not come to round 3"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()
        for name in ("hold", "reached"):
            (method_file.parent / name).unlink(missing_ok=True)


def states(runs: Path) -> list[str]:
    return [row["state"] for row in json.loads(pfed("runs", "--runs", runs, "--json").out)]


def test_control_c_in_a_terminal(tmp_path: Path, method_file: Path, patient_straight: dict[str, Any]) -> None:
    """A real SIGINT: exit code 130, one line, a checkpoint of round 2, and the way on is the straight one."""
    with waiting(method_file, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "pfed: Stopped after round 2; go on with 'pfed resume patient-digits-s0-1'.\n")
    assert states(tmp_path) == ["stopped"]
    (folder,) = store.folders(tmp_path)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-000002"]
    assert resume(folder).code == 0
    assert states(tmp_path) == ["complete"]
    assert_same(outcome(folder), patient_straight)


def test_a_second_process_is_refused_and_kill_9_costs_nothing(
    tmp_path: Path, method_file: Path, patient_straight: dict[str, Any]
) -> None:
    """While it runs nobody else may touch it; killed without a word, it has died and can be resumed."""
    with waiting(method_file, tmp_path) as process:
        assert states(tmp_path) == ["running"]
        (folder,) = store.folders(tmp_path)
        refused = resume(folder)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err == f"pfed: Run '{folder.name}' is in use by another process.\n"
        kept = pfed("runs", "rm", folder.name, "--runs", tmp_path)
        assert (kept.code, kept.err) == (2, f"pfed: Run '{folder.name}' is running; stop it first.\n")
        process.kill()
        process.wait(timeout=60)
    assert states(tmp_path) == ["died"]
    assert [round for round, _ in Result.load(folder).series["personal/local-test"]] == [1, 2]
    assert resume(folder).code == 0
    assert_same(outcome(folder), patient_straight)


def test_a_finished_run_goes_on_by_command(tmp_path: Path) -> None:
    """`pfed resume RUN --rounds N`; fine-tuning was after the last round, and is after the new last one."""
    argv = ["ditto+ft", "--set", "ft_epochs=1", "--clients", 4, "--model", "mlp", "--train-cap", 20, "--eval-every", 0]
    assert pfed("run", *argv, "--rounds", 2, "--runs", tmp_path / "a").code == 0
    assert pfed("run", *argv, "--rounds", 5, "--runs", tmp_path / "b").code == 0
    done = pfed("resume", "ditto+ft-digits-s0-1", "--rounds", 5, "--runs", tmp_path / "a", "--json")
    assert (done.code, json.loads(done.out)["rounds"]) == (0, 5)
    (one,), (two,) = store.folders(tmp_path / "a"), store.folders(tmp_path / "b")
    found, expected = outcome(one), outcome(two)
    for part in ("server", "clients", "metrics", "per_client", "correct"):
        assert found[part] == expected[part], part


@pytest.mark.parametrize(
    ("argv", "rounds", "said"),
    [
        (["fedavg"], "1", "has done 2 rounds already. Got 1."),
        (["fedavg"], "many", "run.rounds must be a whole number. Got 'many'."),
        (["cd2pfed"], "3", "must have 2 rounds: what cd2pfed does depends on it. Got 3."),
        (["partialfed-adaptive+ft"], "3", "must have 2 rounds: what partialfed-adaptive+ft does depends on it. Got 3."),
        (["fedavg", "--local.schedule", "cosine"], "3", "2 rounds: what local.schedule says depends on it. Got 3."),
    ],
    ids=["fewer", "no number", "CD2-pFed", "PartialFed-Adaptive", "schedule"],
)
def test_other_numbers_of_rounds_are_refused(tmp_path: Path, argv: list[str], rounds: str, said: str) -> None:
    """One sentence, exit code 2, and the run is as it was."""
    small = ["--clients", 3, "--model", "mlp", "--train-cap", 20, "--rounds", 2, "--runs", tmp_path]
    assert pfed("run", *argv, *small).code == 0
    (folder,) = store.folders(tmp_path)
    before = outcome(folder)
    done = pfed("resume", folder.name, "--rounds", rounds, "--runs", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(f"{said}\n")
    assert done.err.count("\n") == 1
    assert_same(outcome(folder), before)


def test_a_damaged_record_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    for method in ("local", "fedavg"):
        assert pfed("run", method, "--clients", 3, "--model", "mlp", "--rounds", 1, "--runs", tmp_path).code == 0
    (tmp_path / "local-digits-s0-1" / "record.sqlite").write_bytes(b"rubbish" * 1000)
    rows = {row["run"]: row["state"] for row in json.loads(pfed("runs", "--runs", tmp_path, "--json").out)}
    assert rows == {"local-digits-s0-1": "damaged", "fedavg-digits-s0-1": "complete"}
    done = resume(tmp_path / "local-digits-s0-1")
    assert done.code == 0
    assert "its record was damaged (file is not a database); it was made anew from its journal." in done.err
    assert json.loads(done.out)["state"] == "complete"
