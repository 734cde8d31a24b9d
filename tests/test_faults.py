"""Runs that die: real processes, killed at named points and at random moments, go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from test_resume import assert_same, checkpoints, outcome, pfed, resume

from pfed import database, evaluate, files, sgd, states, store
from pfed.result import Result

CONTEXT = multiprocessing.get_context("forkserver")  # imports once, then every process is a fork of that
CONTEXT.set_forkserver_preload(["pfed.cli", "pfed.experiment", "pfed.engines.processes", "pfed.data.sources"])

HERE = Path(__file__).parent
SMALL = [
    *("--clients", 4, "--model", "mlp", "--rounds", 4, "--fraction", 0.75, "--train-cap", 30, "--test-fraction", 0.7),
    *("--local.momentum", 0.5, "--checkpoint-every", 1, "--eval-every", 2, "--alpha", 1),
]
SCAFFOLD = '''
"""Control variates at the server and at each client, as in SCAFFOLD."""

from dataclasses import dataclass

from pfed import Method, Tensors, params, step


@dataclass(frozen=True)
class Variates(Method):
    """Drift is corrected by control variates (Karimireddy et al., ICML 2020)."""

    def init(self, model):
        found = params(model)
        return {"params": found, "control": found * 0.0}

    def download(self, server):
        return {"params": server["params"], "control": server["control"]}

    def round(self, server, cohort):
        replies = cohort.call(self.update, **self.download(server))
        share = len(replies) / cohort.total
        server["params"] = replies.mean("params")
        server["control"] = server["control"] + replies.mean("change", "uniform") * share

    @step
    def update(self, client, params, control):
        own = client.state.get("control", control * 0.0)
        model = client.model(params)
        named = dict(model.named_parameters())

        def correct(batch):
            for name, parameter in named.items():
                parameter.grad += control[name] - own[name]

        steps = client.fit(model, grad=correct).steps
        found = client.share(model)
        new = own - control + (params - found) / (max(steps, 1) * client.lr)
        client.state["control"] = Tensors(new)
        return {"params": found, "change": new - own}

    def predictor(self, client, params, control):
        return client.model(params)
'''
METHODS: dict[str, list[Any]] = {
    "fedavg": [],
    "variates": [],
    "fedrep": ["--set", "head_epochs=2"],
    "cd2pfed": [],
    "fedcd": ["--public", 0.05, "--model", "mlp,cnn-small", "--fraction", 1, "--set", "batch=16"],
    "partialfed-adaptive": ["--model", "cnn-small-bn"],
}


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own methods") / "variates.py"
    path.write_text(SCAFFOLD)
    return path


def command(method: str, scaffold: Path, runs: Path, *more: Any) -> list[str]:
    what = f"{scaffold}:Variates" if method == "variates" else method
    return [str(word) for word in ("run", what, *SMALL, *METHODS[method], "--runs", runs, *more)]


# Where a process dies. Each takes what is to be done there and does it at the right moment.
Deed = Callable[[], None]


def in_the_midst_of_training(deed: Deed) -> None:
    step, count = sgd.SGD.step, iter(range(10**9))

    def dying(self: sgd.SGD) -> None:
        step(self)
        if next(count) == 20:
            deed()

    sgd.SGD.step = dying  # type: ignore[method-assign]


def between_reply_and_checkpoint(deed: Deed) -> None:
    save = store.Store.save

    def dying(self: store.Store, checkpoint: store.Checkpoint) -> None:
        if checkpoint.round == 3:
            deed()
        save(self, checkpoint)

    store.Store.save = dying  # type: ignore[method-assign]


def _half(deed: Deed, number: int) -> None:
    write, count = files.write, iter(range(10**9))

    def dying(descriptor: int, parts: Any, offset: int) -> None:
        if next(count) == number:
            whole = b"".join(parts)
            write(descriptor, [whole[: len(whole) // 2]], offset)
            deed()
        write(descriptor, parts, offset)

    files.write = dying


def while_a_state_is_appended(deed: Deed) -> None:
    append, count = states.ClientStates._append, iter(range(10**9))

    def dying(self: states.ClientStates, *args: Any) -> Any:
        if next(count) == 5:
            _half(deed, 0)
        return append(self, *args)

    states.ClientStates._append = dying  # type: ignore[method-assign]


def during_compaction(deed: Deed) -> None:
    move = states.ClientStates._move
    states.FLOOR = 0

    def dying(self: states.ClientStates) -> None:
        _half(deed, 1)
        move(self)

    states.ClientStates._move = dying  # type: ignore[method-assign]


def _at_the_rename(deed: Deed, after: bool) -> None:
    replace = os.replace

    def dying(source: Any, target: Any) -> None:
        mine = Path(target).name == "checkpoint-000002"
        if mine and not after:
            deed()
        replace(source, target)
        if mine:
            deed()

    os.replace = dying


def before_the_rename(deed: Deed) -> None:
    _at_the_rename(deed, after=False)


def after_the_rename(deed: Deed) -> None:
    _at_the_rename(deed, after=True)


def during_evaluation(deed: Deed) -> None:
    assess, count = evaluate.assess, iter(range(10**9))

    def dying(*args: Any) -> Any:
        if next(count) == 2:
            deed()
        return assess(*args)

    evaluate.assess = dying  # type: ignore[assignment]


def between_journal_and_record(deed: Deed) -> None:
    apply, count = database._apply, iter(range(10**9))

    def dying(db: Any, entry: Any) -> None:
        if "rounds" in entry.get("put", {}) and next(count) == 2:
            deed()
        apply(db, entry)

    database._apply = dying


def while_the_journal_is_written(deed: Deed) -> None:
    write, count = files.write, iter(range(10**9))

    def dying(descriptor: int, parts: Any, offset: int) -> None:
        if b'"put":{"rounds"' in parts[0] and next(count) == 2:
            write(descriptor, [parts[0][: len(parts[0]) // 2]], offset)
            deed()
        write(descriptor, parts, offset)

    files.write = dying


def slowly(deed: Deed) -> None:
    """Not a death, but steps that take a minute each."""
    step = sgd.SGD.step

    def slow(self: sgd.SGD) -> None:
        time.sleep(60)
        step(self)

    sgd.SGD.step = slow  # type: ignore[method-assign]


POINTS = {
    function.__name__.replace("_", " "): function
    for function in (
        in_the_midst_of_training,
        between_reply_and_checkpoint,
        while_a_state_is_appended,
        during_compaction,
        before_the_rename,
        after_the_rename,
        during_evaluation,
        between_journal_and_record,
        while_the_journal_is_written,
    )
}


def life(argv: list[str], log: str, point: str | None) -> None:
    """What a process does: a command, up to the point where it dies."""
    from pfed import cli

    os.setpgrp()  # as a shell does, so that Ctrl-C reaches the workers as well
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    own = os.getpid()

    def die() -> None:  # the run's own process, also where a worker comes to this point
        os.kill(own, signal.SIGKILL)
        time.sleep(60)

    if point is not None:
        {**POINTS, "slowly": slowly}[point](die)
    sys.exit(cli.main(argv))


def started(argv: list[str], place: Path, point: str | None = None) -> BaseProcess:
    process: BaseProcess = CONTEXT.Process(target=life, args=(argv, str(place / "log"), point))
    process.start()
    return process


def ended(process: BaseProcess, place: Path, seconds: float = 120) -> int:
    process.join(seconds)
    assert process.exitcode is not None, (place / "log").read_text()
    return process.exitcode


def family(pid: int) -> list[int]:
    """The processes that one has started."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in children_of(task)]
    except FileNotFoundError:
        return []


def children_of(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def alive(pid: int) -> bool:
    """Whether it is there and not only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


STRAIGHT: dict[str, dict[str, Any]] = {}


@pytest.fixture
def straight(scaffold: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run of a method leaves that was never stopped."""

    def found(method: str) -> dict[str, Any]:
        if method not in STRAIGHT:
            runs = tmp_path_factory.mktemp("straight")
            done = pfed(*command(method, scaffold, runs))
            assert done.code == 0, done.err
            (folder,) = store.folders(runs)
            STRAIGHT[method] = outcome(folder)
        return STRAIGHT[method]

    return found


Straight = Callable[[str], dict[str, Any]]
ENGINES = {"serial": [], "processes": ["--engine", "processes", "--workers", 2]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point(tmp_path: Path, scaffold: Path, straight: Straight, point: str, engine: str) -> None:
    """`kill -9` there, then `pfed resume`: metrics, server and client states are those of a run never stopped."""
    small_memory = ["--state-memory", 0] if "compaction" in point or "appended" in point else []
    argv = command("fedrep", scaffold, tmp_path / "runs", *ENGINES[engine], *small_memory)
    assert ended(started(argv, tmp_path, point), tmp_path) == -signal.SIGKILL
    (folder,) = store.folders(tmp_path / "runs")
    assert store.describe(folder)["state"] == "died"
    done = resume(folder)
    assert (done.code, done.err) == (0, "")
    assert_same(outcome(folder), straight("fedrep"))


def begun(folder: Path) -> bool:
    """Whether there is something to go on with; a kill may come between the journal's first byte and the record's."""
    return (folder / "record.sqlite").is_file() and bool(Result.load(folder).config)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments(tmp_path: Path, scaffold: Path, straight: Straight, method: str, engine: str) -> None:
    """Again and again, also while the run is being resumed; with processes no worker survives its parent."""
    expected = straight(method)
    moments = random.Random(f"{method} {engine}")
    begin = command(method, scaffold, tmp_path / "runs", *ENGINES[engine])
    began = time.monotonic()
    first = started(command(method, scaffold, tmp_path / "timed", *ENGINES[engine]), tmp_path)
    assert ended(first, tmp_path) == 0
    whole = time.monotonic() - began
    argv, kills = begin, 0
    while kills < 6:
        process = started(argv, tmp_path)
        assert process.pid is not None
        process.join(moments.uniform(0.02, 0.7) * whole)
        workers = family(process.pid)
        process.kill()
        code = ended(process, tmp_path)
        assert code in (0, -signal.SIGKILL), (tmp_path / "log").read_text()
        assert gone(workers)
        kills += code != 0
        found = [folder for folder in store.folders(tmp_path / "runs") if begun(folder)]
        if code == 0:  # it was faster than its death: from the beginning
            shutil.rmtree(tmp_path / "runs")
            found = []
        argv = ["resume", found[-1].name, "--runs", str(tmp_path / "runs")] if found else begin
    code = ended(started(argv, tmp_path), tmp_path)
    assert code == 0, (tmp_path / "log").read_text()
    finished = [f for f in store.folders(tmp_path / "runs") if begun(f) and Result.load(f).state == "complete"]
    assert_same(outcome(finished[-1]), expected)


@pytest.mark.parametrize("whom", ["worker", "parent", "interrupted"])
def test_no_process_is_left(tmp_path: Path, scaffold: Path, straight: Straight, whom: str) -> None:
    """A worker killed from outside is replaced; without its parent none lives, after Ctrl-C neither."""
    ended(started(["--version"], tmp_path), tmp_path)  # what all these processes are forked from may have some
    before = sorted(os.listdir("/dev/shm"))
    argv = command("fedrep", scaffold, tmp_path / "runs", *ENGINES["processes"], "--local.epochs", 30)
    process = started(argv, tmp_path, "slowly" if whom != "worker" else None)
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while len(workers := family(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if whom == "worker":
        os.kill(workers[0], signal.SIGKILL)
        assert ended(process, tmp_path) == 0
        (folder,) = store.folders(tmp_path / "runs")
        assert {event["kind"] for event in Result.load(folder).events} == {"note"}
    else:
        began = time.monotonic()
        if whom == "parent":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
        assert ended(process, tmp_path) == (-signal.SIGKILL if whom == "parent" else 130)
        said = (tmp_path / "log").read_text().splitlines()[1:]  # after the version
        assert [line.partition(";")[0] for line in said] == (
            [] if whom == "parent" else ["pfed: Stopped after round 0"]
        )
        assert time.monotonic() - began < 30
    assert gone(workers)
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("where", ["record.sqlite", "journal"])
def test_a_flipped_byte_in_the_record(tmp_path: Path, scaffold: Path, straight: Straight, where: str) -> None:
    """It is noticed and mended, one sentence says so, and nothing is lost."""
    argv = command("fedrep", scaffold, tmp_path / "runs")
    assert ended(started(argv, tmp_path, "between reply and checkpoint"), tmp_path) == -signal.SIGKILL
    (folder,) = store.folders(tmp_path / "runs")
    with contextlib.closing(sqlite3.connect(folder / "record.sqlite")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray((folder / where).read_bytes())
    place = data.index(b"client-2") if b"client-2" in data else data.index(b"config")
    data[place] ^= 1
    (folder / where).write_bytes(data)
    done = resume(folder)
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "was damaged" in line
    assert "made anew" in line
    assert_same(outcome(folder), straight("fedrep"))


def test_a_disk_that_is_really_full(tmp_path: Path, scaffold: Path, straight: Straight) -> None:
    """A file system of 300 kB: the run stops with one sentence; with more room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    python = f"{shlex.quote(sys.executable)} -m pfed"
    words = shlex.join(command("fedrep", scaffold, disk / "runs"))
    script = (
        f"mount -t tmpfs -o size=300k tmpfs '{disk}' || exit 99\n{python} {words}; echo code $?\n"
        f"mount -o remount,size=50m '{disk}'\n{python} resume fedrep-digits-s0-1 --runs '{disk}/runs' >&2 || exit 98\n"
        f"cp -r '{disk}/runs' '{tmp_path}/saved'\n"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    if shutil.which("unshare") is None or subprocess.run([*unshare[:4], "true"], capture_output=True).returncode:
        pytest.skip("needs 'unshare' (util-linux) and unprivileged user namespaces to make a small file system")
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "code 1\n"
    told = done.stderr.splitlines()[0]
    assert told.startswith("pfed: ")
    assert "No space left on device" in told or "disk is full" in told
    assert_same(outcome(tmp_path / "saved" / "fedrep-digits-s0-1"), straight("fedrep"))


def test_a_clock_that_jumps(
    tmp_path: Path, scaffold: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back by a day, ahead by a year: nothing depends on it but what is said about the age of a run."""
    now, jumps = time.time(), iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now + (31e6 if next(jumps) % 2 else -86400.0))
    done = pfed(*command("fedrep", scaffold, tmp_path))
    assert done.code == 0, done.err
    (folder,) = store.folders(tmp_path)
    assert_same(outcome(folder), straight("fedrep"))
    monkeypatch.setattr(time, "time", lambda: now - 1e8)
    (line,) = pfed("runs", "--runs", tmp_path).out.splitlines()[2:]
    assert line.split()[:5] == ["fedrep-digits-s0-1", "complete", "4/4", "0", "s"]
    assert json.loads(pfed("runs", "--runs", tmp_path, "--json").out)[0]["state"] == "complete"


def test_a_run_that_died_can_be_listed_and_removed(tmp_path: Path, scaffold: Path) -> None:
    argv = command("fedrep", scaffold, tmp_path / "runs")
    assert ended(started(argv, tmp_path, "before the rename"), tmp_path) == -signal.SIGKILL
    (row,) = json.loads(pfed("runs", "--runs", tmp_path / "runs", "--json").out)
    assert (row["state"], row["round"], row["rounds"]) == ("died", 2, 4)
    assert [path.name for path in checkpoints(tmp_path / "runs" / row["run"])] == ["checkpoint-000001"]
    assert pfed("runs", "rm", row["run"], "--runs", tmp_path / "runs").code == 0
    assert list((tmp_path / "runs").iterdir()) == []
