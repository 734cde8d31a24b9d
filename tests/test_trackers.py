"""Trackers: what TensorBoard, MLflow and Weights & Biases hold after runs, stops and failures, read back from there."""

from __future__ import annotations

import errno
import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pfed import Experiment, Federation, Result, UserError, cli, trackers
from pfed.record import Record
from pfed.session import Session

MAIN = "personal/local-test"
EACH = {"bytes_up", "bytes_down", "seconds", "samples", "failures"}  # told of every round
Series = dict[str, list[tuple[int, float]]]


def needs(module: str, extra: str) -> Any:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed: pip install 'pfed[{extra}]'")


NEEDS = {name: needs(name, name) for name in trackers.TRACKERS}
EVERY = [pytest.param(name, marks=NEEDS[name]) for name in NEEDS]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def experiment(data: Federation, track: str | None, method: str = "fedper", **changes: Any) -> Experiment:
    settings: dict[str, Any] = {"rounds": 4, "checkpoint_every": 2, "local": {"lr": 0.2}, **changes}
    return Experiment(method, data, "mlp", track=track, **settings)


def stop_in(monkeypatch: pytest.MonkeyPatch, round: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """The next time that this round begins, it does not."""
    act = Session._act

    def stopped(session: Session, t: int) -> None:
        if t == round:
            monkeypatch.setattr(Session, "_act", act)
            raise error("no more")
        act(session, t)

    monkeypatch.setattr(Session, "_act", stopped)


def next_second() -> None:
    """TensorBoard and Weights & Biases name their files by the second in which a run is begun."""
    time.sleep(1.01 - time.time() % 1)


def in_tensorboard(folder: Path) -> tuple[Series, dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    series = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    found = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(found).session_start_info.hparams
    return series, {key: value.string_value or value.number_value for key, value in settings.items()}


def in_mlflow(folder: Path) -> tuple[Series, dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    owner = client.get_experiment_by_name("pfed")
    (run,) = [run for run in client.search_runs([owner.experiment_id]) if run.info.run_name == folder.name]
    series = {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics}
    return series, {**run.data.params, "status": run.info.status}


def wandb_records(path: Path) -> Iterator[bytes]:
    """The file's messages: a log as LevelDB writes it, blocks of 32 KiB with parts of messages, after seven bytes."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)  # kind: 1 whole, 2 first, 3 middle, 4 last
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield message
            message = b""


def in_wandb(folder: Path) -> tuple[Series, dict[str, Any]]:
    """All files of the run, one for each time that it was begun, in that order."""
    from wandb.proto import wandb_internal_pb2

    series: Series = {}
    more: dict[str, Any] = {"files": 0}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        more["files"] += 1
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                if not key.startswith("_"):
                    series.setdefault(key, []).append((row["_step"], value))
            for item in record.summary.update:
                if (key := item.key or "/".join(item.nested_key)).startswith("final/"):
                    series[key] = [(0, json.loads(item.value_json))]
            for item in (*record.run.config.update, *record.config.update):
                more[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            more.setdefault("ids", set()).update({record.run.run_id} - {""})
    return series, more


READ: Mapping[str, Callable[[Path], tuple[Series, dict[str, Any]]]] = {
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
}


@pytest.fixture(autouse=True)
def _third_parties_may_warn(request: pytest.FixtureRequest) -> None:
    """Reading back uses the packages' own code, whose warnings are theirs; pfed's own stay errors."""
    for module in ("sqlalchemy", "mlflow", "wandb", "google", "tensorboard"):
        request.node.add_marker(pytest.mark.filterwarnings(f"ignore::Warning:{module}"))


def expected(result: Result) -> dict[str, list[tuple[int, float]]]:
    """What the run's own record says."""
    up, rows = 0, {}
    for row in result.rounds:
        up += row["bytes_up"]
        rows[row["round"]] = up
    clients = {t: list(values.values()) for t, values in result.series[MAIN]}
    return {
        "bytes_up": list(rows.items()),
        "samples": [(row["round"], row["samples"]) for row in result.rounds],
        MAIN: [(t, sum(values) / len(values)) for t, values in clients.items()],
        f"{MAIN}/worst-decile": [(t, min(values)) for t, values in clients.items()],  # of four clients the worst
    }


def check(name: str, result: Result) -> dict[str, Any]:
    assert result.folder is not None
    series, config = READ[name](result.folder)
    for key, points in expected(result).items():
        assert [t for t, _ in series[key]] == [t for t, _ in points], key
        assert [v for _, v in series[key]] == pytest.approx([v for _, v in points]), key
    final = {key.removeprefix("final/"): points[-1][1] for key, points in series.items() if key.startswith("final/")}
    assert final == pytest.approx(result.metrics)
    assert series.keys() >= EACH
    return config


@pytest.mark.parametrize("name", EVERY)
def test_a_run_is_there_with_its_numbers_and_settings(name: str, tiny: Federation, tmp_path: Path) -> None:
    result = experiment(tiny, name).run(tmp_path / "runs")
    config = check(name, result)
    assert config["local.lr"] in (0.2, "0.2")
    assert config["method"] == "fedper"
    assert config.get("status") in ("FINISHED", None)
    assert result.state == "complete"


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("stopped", [3, 4])
def test_a_resumed_run_goes_on_in_the_same_place(
    name: str, stopped: int, tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the newest checkpoint is gone, so that rounds are run again: each is there once."""
    stop_in(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        experiment(tiny, name).run(tmp_path / "runs")
    (folder,) = (tmp_path / "runs").glob("fedper-*")
    _, before = READ[name](folder)
    assert before.get("status") in ("KILLED", None)
    for path in sorted(folder.glob("checkpoint-*"))[1:]:
        path.unlink()
    next_second()
    result = experiment(tiny, name).resume(folder)
    again = check(name, result)
    assert len(again.get("ids", "1")) == 1
    assert again.get("files") in (2, None)


@pytest.mark.parametrize("name", EVERY)
def test_a_longer_run_goes_on(name: str, tiny: Federation, tmp_path: Path) -> None:
    first = experiment(tiny, name, rounds=2).run(tmp_path / "runs")
    assert first.folder is not None
    next_second()
    check(name, experiment(tiny, name, rounds=3).resume(first.folder))


def test_several_at_once_change_no_result(tiny: Federation, tmp_path: Path) -> None:
    there = [name for name in trackers.TRACKERS if importlib.util.find_spec(name)]
    if not there:
        pytest.skip("no tracker is installed: pip install 'pfed[tensorboard]'")
    plain = experiment(tiny, None).run(tmp_path / "runs")
    result = experiment(tiny, ", ".join(there), engine="processes", workers=2).run(tmp_path / "runs")
    assert result.metrics == plain.metrics
    for name in there:
        check(name, result)


@NEEDS["tensorboard"]
def test_without_a_runs_folder_every_run_has_its_own(tiny: Federation, tmp_path: Path) -> None:
    for _ in range(2):
        experiment(tiny, "tensorboard", rounds=1).run()
    folders = list((tmp_path / "tensorboard").iterdir())
    assert len(folders) == 2
    assert all(folder.name.startswith("fedper-own-data-s0-") for folder in folders)
    assert list(tmp_path.iterdir()) == [tmp_path / "tensorboard"]


@NEEDS["mlflow"]
def test_mlflow_takes_its_variables(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    result = experiment(tiny, "mlflow", rounds=1).run(tmp_path / "runs")
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_name == result.run
    assert not (tmp_path / "runs" / "mlflow.db").exists()


@NEEDS["mlflow"]
def test_a_failed_run_is_marked(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_in(monkeypatch, 3, RuntimeError)
    with pytest.raises(RuntimeError, match="no more"):
        experiment(tiny, "mlflow").run(tmp_path / "runs")
    (folder,) = (tmp_path / "runs").glob("fedper-*")
    series, config = in_mlflow(folder)
    assert config["status"] == "FAILED"
    assert [t for t, _ in series["seconds"]] == [0, 1, 2]
    assert not any(key.startswith("final/") for key in series)


@NEEDS["mlflow"]
def test_mlflow_may_lose_its_database(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is gone after round 2: one warning, and the run goes on to its end."""
    act = Session._act

    def spoil(session: Session, t: int) -> None:
        act(session, t)
        if t == 3:
            with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
                database.execute("DROP TABLE metrics")
            database.close()

    monkeypatch.setattr(Session, "_act", spoil)
    with pytest.warns(UserWarning, match="The tracker mlflow failed and is left out from now on: ") as said:
        result = experiment(tiny, "mlflow").run(tmp_path / "runs")
    assert len(said) == 1
    assert result.state == "complete"
    assert result.rounds[-1]["round"] == 4
    assert result.folder is not None
    record = Record(result.folder / "record.sqlite", readonly=True)
    assert record.get("trackers")["mlflow"]["round"] == 2
    record.close()


@NEEDS["tensorboard"]
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread is TensorBoard's
def test_tensorboard_may_meet_a_full_disk(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two trackers fails in the thread that writes; the other one is told everything."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, told = RecordWriter.write, []

    class Other(trackers.TensorBoard):
        package = "json"

        def begin(self, run: trackers.Run, config: Mapping[str, Any]) -> None: ...
        def end(self, state: str, summary: Mapping[str, float]) -> None:
            told.append(state)

        def round(self, t: int, numbers: Mapping[str, float]) -> None:
            told.append(t)
            if t == 2:
                monkeypatch.setattr(RecordWriter, "write", full)

    def full(self: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(trackers.TRACKERS, "other", Other)
    with pytest.warns(UserWarning, match="The tracker tensorboard failed .*: .*No space left on device") as said:
        result = experiment(tiny, "tensorboard,other").run(tmp_path / "runs")
    assert len(said) == 1
    assert (result.state, told) == ("complete", [0, 1, 2, 3, 4, "complete"])
    monkeypatch.setattr(RecordWriter, "write", write)


def test_names_that_do_not_exist(tiny: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"There is no tracker 'tensorbord'\. Did you mean 'tensorboard'\?"):
        experiment(tiny, "tensorbord")
    assert cli.main(["run", "fedavg", "--track", "wanddb"]) == 2
    assert capsys.readouterr().err == "pfed: There is no tracker 'wanddb'. Did you mean 'wandb'?\n"


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_names_its_extra(
    name: str, tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"The package {name} is missing: pip install 'pfed\[{name}\]'\."):
        experiment(tiny, name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_unless_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys; from pfed import Experiment;"
        " Experiment('local', clients=2, rounds=1, model='mlp', test_fraction=0.9).run('runs');"
        " print([m for m in ('tensorboard', 'torch.utils.tensorboard', 'mlflow', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@NEEDS["tensorboard"]
def test_a_tracked_run_is_the_same_run(tiny: Federation) -> None:
    from pfed.store import settings

    assert settings(experiment(tiny, None).config()) == settings(experiment(tiny, "tensorboard").config())


@NEEDS["tensorboard"]
@NEEDS["mlflow"]
def test_the_command_is_quiet(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pfed", "run", "local", "--clients", "2", "--rounds", "1", "--model", "mlp", "--json"]
    argv += ["--test-fraction", "0.9", "--track", "tensorboard,mlflow"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["state"] == "complete"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["local-digits-s0-1", "mlflow.db"]
