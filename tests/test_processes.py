"""Clients in parallel: the same bits as one after another, and no process or memory left behind, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BEHAVIOUR, TYPED_IN, Probe, assert_same, blobs, probe, replies

from pfed import Experiment, Federation, RunError, Tensors, machine
from pfed.engines.processes import AHEAD, Mailbox, Processes


def parallel(data: Federation, behaviour: Any, workers: int = 2, **options: Any) -> Experiment:
    """A probe on workers, judged at the end only."""
    return probe(data, behaviour, **{"engine": "processes", "workers": workers, "eval_every": 0, **options})


def children() -> set[int]:
    """The processes that this one has started and not yet buried."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children(), sorted(os.listdir("/dev/shm"))
    yield
    assert (children(), sorted(os.listdir("/dev/shm"))) == before


EVERYTHING: dict[str, Any] = {
    "rounds": 3,
    "fraction": 0.75,
    "dropout": 0.3,
    "eval_point": "post_local",
    "keep_optimizer": True,
    "new_test": "mean_prob",
    "representation": True,
    "local": {"lr": 0.1, "batch_size": 8, "momentum": 0.9},
    "seed": 1,
}


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_number_of_workers_makes_no_difference(tiny: Federation, workers: int) -> None:
    def left(**engine: Any) -> Any:
        experiment = Experiment("ditto+ft", tiny, "cnn-small-bn", hyper={"ft_epochs": 1}, **EVERYTHING, **engine)
        result = experiment.run()
        session = experiment.session
        assert session is not None
        states = {client: session.store.states.load(client, v) for client, v in session.exchange.versions.items()}
        return {"server": session.server, "states": states}, (result.series, result.logs, result.traffic, result.events)

    (one, found), (two, expected) = left(engine="processes", workers=workers), left(engine="serial")
    assert_same(one, two)
    assert found == expected


def test_clients_run_in_other_processes_and_share_them(tiny: Federation) -> None:
    """Two workers for four clients, and none of them is this process; evaluation uses the same ones."""
    experiment = parallel(tiny, lambda client, params: {"pid": os.getpid(), "threads": torch.get_num_threads()})
    experiment.run()
    found = replies(experiment)
    assert len({reply["pid"] for reply in found.values()} - {os.getpid()}) == 2
    assert {reply["threads"] for reply in found.values()} == {1}


def test_workers_live_as_long_as_the_run(tiny: Federation) -> None:
    pids: list[set[int]] = []

    @dataclass(frozen=True)
    class Twice(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            pids.append({reply["pid"] for reply in cohort.call(self.update, **self.download(server)).values()})

    BEHAVIOUR[0] = lambda client, params: {"pid": os.getpid()}
    Experiment(Twice(), tiny, "mlp", rounds=3, engine="processes", workers=1).run()
    assert pids[0] == pids[1] == pids[2]


def test_no_more_workers_than_clients_and_one_per_core_unless_told(tiny: Federation) -> None:
    assert machine.cores() == len(os.sched_getaffinity(0)) or Path("/sys/fs/cgroup/cpu.max").exists()
    experiment = parallel(tiny, lambda client, params: {"pid": os.getpid()}, workers=50)
    experiment.run()
    assert len({reply["pid"] for reply in replies(experiment).values()}) <= 4


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1)])
def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        patch.setattr(Path, "read_text", lambda _: text)
        assert machine.cores() == expected


def test_a_client_that_changes_what_it_got_changes_it_for_itself(tiny: Federation) -> None:
    """With one worker the next client would see it, were the memory shared for writing."""

    def careless(client: Any, params: Tensors) -> dict[str, Any]:
        before = float(sum(tensor.sum() for tensor in params.values()))
        for tensor in params.values():
            tensor.add_(1)
        params.clear()
        return {"sum": before}

    experiment = parallel(tiny, careless, workers=1)
    experiment.run()
    assert len({reply["sum"] for reply in replies(experiment).values()}) == 1


def test_large_and_growing_messages(tiny: Federation) -> None:
    """Larger than any pipe, different per client, and smaller again afterwards."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        before = client.state.get("big")
        client.state["big"] = torch.full((2_000_000 // client.round,), float(client.id))
        return {"x": torch.full((1_000_000 * (client.id + 1),), float(client.id)), "had": before is not None}

    experiment = parallel(tiny, update, rounds=3)
    experiment.run()
    found = replies(experiment)
    assert {client: tuple(reply["x"].unique().tolist()) for client, reply in found.items()} == {
        client: (float(client),) for client in range(4)
    }
    assert [len(reply["x"]) for reply in found.values()] == [1_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert all(reply["had"] for reply in found.values())


def test_nobody_runs_far_ahead_of_the_slowest(tmp_path: Path) -> None:
    """While the first client is busy, answers of later ones wait for it: no more than a few per worker."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        if client.id == 0:
            time.sleep(0.5)
            return {"before": len(list(tmp_path.iterdir()))}
        (tmp_path / str(client.id)).touch()
        return {"before": 0}

    experiment = parallel(blobs([5] * 40), update)
    experiment.run()
    assert 1 <= replies(experiment)[0]["before"] <= 2 * AHEAD
    assert sorted(replies(experiment)) == list(range(40))


def dies(client: Any, always: bool, place: Path) -> None:
    """Client 2's process is gone in the midst of its step, always or the first time only."""
    if client.id == 2 and (always or not (place / "died").exists()):
        (place / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_and_its_client_tried_again(tiny: Federation, tmp_path: Path) -> None:
    def update(client: Any, params: Tensors) -> dict[str, Any]:
        client.state["seen"] = client.state.get("seen", 0) + 1
        dies(client, False, tmp_path)
        return {"seen": client.state["seen"]}

    experiment = parallel(tiny, update, rounds=2)
    result = experiment.run()
    assert (tmp_path / "died").exists()
    assert result.events == []
    assert {client: reply["seen"] for client, reply in replies(experiment).items()} == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
        (lambda: os._exit(7), "exit code 7"),
    ],
)
def test_a_client_that_kills_its_worker_twice_has_failed(tiny: Federation, end: Any, how: str) -> None:
    """The others are unharmed, and the run goes on."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        if client.id == 2:
            end()
        return {"id": client.id}

    experiment = parallel(tiny, update)
    result = experiment.run()
    assert sorted(replies(experiment)) == [0, 1, 3]
    assert [(event["client"], event["kind"], event["text"]) for event in result.events] == [
        (2, "died", f"the process that ran update died ({how}), twice")
    ]


def test_too_few_left_stop_the_run(tiny: Federation) -> None:
    def update(client: Any, params: Tensors) -> None:
        os._exit(3)

    with pytest.raises(RunError, match=r"0 clients answered, min_clients is 1\. Client client-0: the process that ran"):
        parallel(tiny, update).run()


def test_a_worker_that_is_killed_while_idle_is_replaced(tiny: Federation) -> None:
    """Between two rounds somebody kills all workers."""

    @dataclass(frozen=True)
    class Murder(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            for pid in children() if cohort.round == 2 else ():
                os.kill(pid, signal.SIGKILL)
            super().round(server, cohort)

    BEHAVIOUR[0] = lambda client, params: {"id": client.id}
    experiment = Experiment(Murder(), tiny, "mlp", rounds=2, engine="processes", workers=2, eval_every=0)
    assert experiment.run().events == []
    assert sorted(replies(experiment)) == [0, 1, 2, 3]


def test_a_bug_in_a_method_shows_its_traceback(tiny: Federation) -> None:
    def broken(client: Any, params: Tensors) -> None:
        raise KeyError("my bug")

    with pytest.raises(RunError, match="update raised KeyError") as caught:
        parallel(tiny, broken).run()
    assert "in broken" in str(caught.value)


def test_what_cannot_be_stored_is_a_failure(tiny: Federation) -> None:
    def update(client: Any, params: Tensors) -> dict[str, Any]:
        client.state["list"] = [1] if client.id == 1 else 1
        return {}

    for engine in ("serial", "processes"):
        result = parallel(tiny, update, engine=engine).run()
        assert [(event["client"], event["text"]) for event in result.events] == [
            (1, "update raised TypeError: list can't be stored or sent; use tensors, numbers, texts and dicts of them.")
        ]


def test_an_error_of_the_server_stops_the_workers(tiny: Federation) -> None:
    """In the midst of a cohort, while others still train."""

    @dataclass(frozen=True)
    class Broken(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            for _ in cohort._exchange.train("update", 1, cohort.ids, self.download(server)):
                raise ZeroDivisionError

    def slow(client: Any, params: Tensors) -> dict[str, Any]:
        time.sleep(0 if client.id == 0 else 60)
        return {}

    BEHAVIOUR[0] = slow
    before, started = children(), time.monotonic()
    with pytest.raises(ZeroDivisionError):
        Experiment(Broken(), tiny, "mlp", rounds=1, engine="processes", workers=2).run()
    assert time.monotonic() - started < 30
    assert children() == before


def test_an_engine_that_was_not_used_starts_nothing(tiny: Federation, tmp_path: Path) -> None:
    """As for a run that is complete."""
    experiment = parallel(tiny, lambda client, params: {})
    folder = tmp_path / experiment.run(tmp_path).run

    def nobody(*_: Any) -> None:
        raise AssertionError("a worker was started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "_fork", nobody)
        parallel(tiny, lambda client, params: {}).resume(folder)


def test_a_system_that_allows_no_more_processes(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(RunError, match=r"^A worker process can't be started: Resource temporarily unavailable\.$"):
        parallel(tiny, lambda client, params: {}).run()


def test_a_mailbox_is_private_to_the_reader() -> None:
    box = Mailbox("test")
    box.put([b"abc", b"", memoryview(b"def")])
    seen = box.view(6)
    seen[0:1] = b"X"
    assert bytes(seen) == b"Xbcdef"
    assert box.copy(0, 6) == b"abcdef"
    assert box.copy(2, 3) == b"cde"


SCRIPT = """
import sys, threading, time
from dataclasses import dataclass
import torch

# As in a notebook: threads are there, and torch has used several of its own.
threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
torch.set_num_threads(2)
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()

from pfed import Experiment, Method, step
"""
CHECK = """
assert found("processes") == found("serial")
print("the same")
"""


def test_a_method_that_was_typed_in_and_threads_before() -> None:
    """The class is in no file that another process could import."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=SCRIPT + TYPED_IN + CHECK, capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.stdout, done.stderr) == ("the same\n", "")
