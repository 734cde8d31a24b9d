"""Real runs that are watched and stopped: followed round by round, ended safely, never in the way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from test_resume import assert_same, checkpoints, outcome, resume
from test_resume import pfed as command
from watch_helpers import NAME, SMALL, Gate, Visitor, process, serving, until

import pfed.watch
from pfed import store
from pfed.result import Result
from pfed.watch import Server, app


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def straight(gate: Gate, runs: Path, rounds: int) -> dict[str, Any]:
    """What a run leaves that was never stopped."""
    done = command("run", f"{gate.method}:Gated", *SMALL, "--rounds", rounds, "--runs", runs)
    assert done.code == 0, done.err
    return outcome(runs / NAME)


def test_a_run_is_followed_and_stopped_and_goes_on_as_if_nothing_had_been(tmp_path: Path, gate: Gate) -> None:
    """The stream tells of each round; the request ends the run after the one it is in, and resume is bit-identical."""
    runs = tmp_path / "runs"
    with serving(runs) as server, Visitor(server.address()).events() as events:
        visitor = Visitor(server.address())
        assert next(events) == {"runs": [], "gone": []}
        with gate.run(runs, 5) as run:
            rounds = []
            while not rounds or rounds[-1] < 2:
                (row,) = next(events)["runs"]
                if row["state"] == "running" and row["round"] not in rounds:
                    rounds.append(row["round"])
                    gate.open(min(row["round"] + 1, 2))
            assert rounds == [0, 1, 2]
            assert visitor.stop(NAME).code == 200
            while not row["stopping"] and row["state"] == "running":  # it waits in round 3, or was not there yet
                (row,) = next(events)["runs"]
            gate.open(3)
            out, err = run.communicate(timeout=60)
        while row["state"] == "running":
            (row,) = next(events)["runs"]
    done = Result.load(runs / NAME).rounds[-1]["round"]
    assert (run.returncode, out) == (130, "")
    assert err == f"pfed: Stopped after round {done}; go on with 'pfed resume {NAME}'.\n"
    assert done in (2, 3)
    assert (row["state"], row["round"]) == ("stopped", done)
    assert [path.name for path in checkpoints(runs / NAME)] == [f"checkpoint-{done:06d}"]
    assert not (runs / NAME / store.STOP).exists()
    told = [event for event in Result.load(runs / NAME).events if event["kind"] == "stopped"]
    assert [(event["round"], event["text"]) for event in told] == [(done, "The live page asked for it.")]
    assert resume(runs / NAME).code == 0
    assert_same(outcome(runs / NAME), straight(gate, tmp_path / "other", 5))


def test_the_command_stops_a_run_with_workers(tmp_path: Path, gate: Gate) -> None:
    runs = tmp_path / "runs"
    with gate.run(runs, 4, "--engine", "processes", "--workers", "2") as run:
        gate.open(1)
        until(lambda: (runs / NAME / store.RECORD).exists() and store.describe(runs / NAME)["round"] == 1)
        done = command("stop", NAME, "--runs", runs)
        said = f"{NAME} ends after the round it is in; 'pfed resume {NAME}' goes on with it.\n"
        assert (done.code, done.out, done.err) == (0, said, "")
        gate.open(2)
        assert run.wait(60) == 130
    assert store.describe(runs / NAME)["state"] == "stopped"
    assert [event["text"] for event in Result.load(runs / NAME).events if event["kind"] == "stopped"] == [
        "'pfed stop' asked for it."
    ]
    assert resume(runs / NAME).code == 0
    assert_same(outcome(runs / NAME), straight(gate, tmp_path / "other", 4))


def test_a_request_of_before_does_not_stop_the_run_that_goes_on(tmp_path: Path) -> None:
    with contextlib.closing(store.create(tmp_path, "run")) as opened:
        store.ask_to_stop(tmp_path / "run-1", "Someone who comes too late")
    assert not (tmp_path / "run-1" / store.STOP).exists(), "a run takes it with it at its end"
    (tmp_path / "run-1" / store.STOP).write_text("Someone who saw a process die")
    with contextlib.closing(store.Store(tmp_path / "run-1")) as opened:
        assert opened.asked_to_stop() is None
        store.ask_to_stop(tmp_path / "run-1", "Someone in time")
        assert [opened.asked_to_stop() for _ in range(2)] == ["Someone in time", None]


def test_a_run_that_is_killed_has_died(tmp_path: Path, gate: Gate) -> None:
    """No file changes; the stream tells it all the same."""
    runs = tmp_path / "runs"
    with serving(runs) as server, Visitor(server.address()).events() as events, gate.run(runs, 2) as run:
        row = {"state": ""}
        for wanted in ("running", "died"):
            while row["state"] != wanted:
                row = next(iter(next(events)["runs"]), row)
            run.kill()
    assert store.describe(runs / NAME)["state"] == "died"


def test_who_looks_at_a_lock_does_not_keep_a_run_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts just when someone looks waits for a moment; two who look do not take each other for a run."""
    monkeypatch.setattr(store, "PATIENCE", 60.0)
    store.create(tmp_path, "run").close()
    looking = os.open(tmp_path / "run-1" / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not store.locked(tmp_path / "run-1")
    threading.Timer(0.1, os.close, [looking]).start()
    with contextlib.closing(store.Store(tmp_path / "run-1")):
        assert store.locked(tmp_path / "run-1")


def test_a_report_is_drawn_once_for_all_and_not_too_often(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who ask at a time share a drawing; a finished run is not read again; a new state has to wait its turn."""
    straight(gate, tmp_path, 1)
    drawn, render = [], app.render
    monkeypatch.setattr(app, "render", lambda results: drawn.append(results) or render(results))
    monkeypatch.setattr(app, "LEAST", 3600.0)
    with serving(tmp_path) as server:
        visitor = Visitor(server.address())
        askers = [threading.Thread(target=visitor.get, args=[f"/report?run={NAME}"]) for _ in range(3)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert len(drawn) == 1
        assert command("resume", NAME, "--rounds", 2, "--runs", tmp_path).code == 0
        with contextlib.closing(visitor.send("GET", f"/report?run={NAME}", {})) as waiting:
            waiting.sock.settimeout(1)
            with pytest.raises(TimeoutError):
                waiting.getresponse()
        assert len(drawn) == 1


def test_streams_end_with_their_browsers(tmp_path: Path) -> None:
    """When nobody watches, nobody looks at the files."""
    with serving(tmp_path) as server:
        watcher = server._watcher
        with Visitor(server.address()).events() as one, Visitor(server.address()).events() as other:
            assert next(one) == next(other)
            assert watcher.viewers == 2
        until(lambda: watcher.viewers == 0)
        until(lambda: watcher._task is not None and watcher._task.done())
        with Visitor(server.address()).events() as again:
            next(again)
            assert not watcher._task.done()


def test_the_command_serves_until_control_c(tmp_path: Path) -> None:
    """It ends at once with 0, though someone is connected, and leaves nothing behind."""
    with process("watch", "--runs", str(tmp_path), "--json", "--no-open", "--port", "0") as started:
        assert started.stdout is not None
        visitor = Visitor(json.loads(started.stdout.readline())["address"])
        with visitor.events() as events:
            next(events)
            started.send_signal(signal.SIGINT)
            assert started.wait(60) == 0
        assert started.communicate() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_the_browser_is_opened_where_there_is_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(pfed.watch.webbrowser, "open", opened.append)
    monkeypatch.setattr(pfed.watch.os, "nice", lambda by: by)
    monkeypatch.setattr(Server, "go", lambda self: self._listening.close())
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    watch = ["watch", "--runs", tmp_path, "--port", 0]
    assert command(*watch).code == 0
    monkeypatch.setenv("DISPLAY", ":0")
    assert command(*[*watch, "--no-open"]).code == 0
    assert opened == []
    done = command(*watch)
    until(lambda: opened)
    assert done.out.startswith(f"{tmp_path} is shown at http://127.0.0.1:")
    assert opened[0] not in done.out, "it has a token for one use"


def test_our_port_or_a_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(pfed.watch, "PORT", port)
        server = Server(tmp_path)
        assert server._port not in (0, port)
        server._listening.close()
    server = Server(tmp_path)
    assert server._port == port
    server._listening.close()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["watch", "--port", "70000"], "--port must be a whole number from 0 to 65535. Got '70000'."),
        (["watch", "--port", "-1"], "--port must be a whole number from 0 to 65535. Got '-1'."),
        (["watch", "gated-digits"], f"There is no run 'gated-digits'. Did you mean '{NAME}'?"),
        (["watch", "--host", "no.such.host.invalid"], "The live page can't be served at 'no.such.host.invalid': "),
        (["stop", NAME], f"Run '{NAME}' is not running."),
        (["stop", "gated-digits"], f"There is no run 'gated-digits'. Did you mean '{NAME}'?"),
    ],
)
def test_mistakes(tmp_path: Path, gate: Gate, argv: list[str], said: str) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / store.RECORD).touch()
    done = command(*argv, "--runs", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"pfed: {said}")
    assert done.err.count("\n") == 1


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("watch", "--port", port, "--runs", tmp_path)
    assert (done.code, done.err) == (
        2,
        f"pfed: The live page can't be served at '127.0.0.1', port {port}: Address already in use.\n",
    )


def test_a_page_that_is_open_to_the_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfed.watch.os, "nice", lambda by: by)
    monkeypatch.setattr(Server, "go", lambda self: self._listening.close())
    done = command("watch", "--host", "0.0.0.0", "--port", 0, "--no-open", "--runs", tmp_path)
    assert done.code == 0
    assert done.err.startswith("pfed: The live page is open to the network at 0.0.0.0, without encryption: ")
