"""Clients on Ray: the same bits as one after another, whoever dies, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BEHAVIOUR, TYPED_IN, Probe, assert_same, blobs, probe, replies
from test_contract import METHODS, QUICK

from pfed import Experiment, Federation, RunError, Tensors, step
from pfed.config import RunOptions
from pfed.engines import guard
from pfed.engines.cluster import SETTINGS, Cluster
from pfed.engines.parallel import AHEAD
from pfed.methods.ditto import Ditto
from pfed.result import Result

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'pfed[ray]'")
EVERYTHING: dict[str, Any] = {
    "rounds": 2,
    "fraction": 0.75,
    "eval_point": "post_local",
    "keep_optimizer": True,
    "new_test": "mean_prob",
    "representation": True,
    "local": {"lr": 0.1, "batch_size": 8, "momentum": 0.9},
    "seed": 1,
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go, in this process and in all that it starts: Ray's, and nobody else's."""
    short = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield short
    shutil.rmtree(short)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster for many runs: they take the one that their process is in."""
    opened = Cluster(RunOptions(engine="ray", workers=2), 2)
    opened.open()
    yield
    opened.close()


def left(experiment: Experiment) -> tuple[Any, Any]:
    """What a run leaves behind and what it found."""
    result = experiment.run()
    session = experiment.session
    assert session is not None
    states = {client: session.store.states.load(client, v) for client, v in session.exchange.versions.items()}
    found = result.series, result.logs, result.traffic, result.correct, result.events
    return {"server": session.server, "states": states}, found


def assert_equal(one: tuple[Any, Any], two: tuple[Any, Any]) -> None:
    assert_same(one[0], two[0])
    assert one[1] == two[1]


def remains(place: Path) -> tuple[list[Path], list[int]]:
    """Files of Ray, and processes that were started since the test began."""
    return sorted(place.glob("*ray*")), guard.marked(f"TMPDIR={place}")


def test_a_process_whose_title_hides_its_mark_is_found_by_its_files(tmp_path: Path) -> None:
    """Ray's agents overwrite the beginning of their environment; who merely reads a log is left alone."""
    folder = tmp_path / "cluster"
    (folder / "logs").mkdir(parents=True)
    held = 'exec -a $0 sleep 60 >> "$1/logs/out"'
    agent, reader = (subprocess.Popen(["bash", "-c", held, title, folder]) for title in ("ray::Agent", "tail"))
    try:
        for process, title in ((agent, b"ray::Agent"), (reader, b"tail")):
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(title):
                time.sleep(0.02)
            assert guard.holds(process.pid, str(folder))
        guard.sweep("PFED_RAY=nobody", str(folder))
        assert agent.wait(10) == -signal.SIGKILL
        assert reader.poll() is None
        assert not folder.exists()
    finally:
        for process in (agent, reader):
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Fragile(Ditto):
    """Ditto, the process of whose second client dies once in the midst of training. On no other machine's disk."""

    mark: str = ""

    @step
    def update(self, client: Any, params: Tensors) -> Any:
        reply = super().update(client, params)
        if client.id == 2 and self.mark and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return reply


def test_the_same_bits_on_a_cluster_of_its_own_though_a_worker_dies(
    tiny: Federation, tmp_path: Path, place: Path
) -> None:
    """Metrics, logs, bytes, the server's and all clients' states; afterwards there is nothing of Ray."""
    environment = dict(os.environ)
    mark = tmp_path / "died"
    one = left(Experiment(Fragile(mark=str(mark)), tiny, "cnn-small-bn", **EVERYTHING, engine="ray", workers=2))
    assert mark.exists()
    assert not ray.is_initialized()
    assert remains(place) == ([], [])
    assert {name for name in os.environ.keys() ^ environment if "AUTH" in name or "PFED" in name} == set()
    assert list(tmp_path.iterdir()) == [mark]  # which is also the home
    assert_equal(one, left(Experiment(Fragile(), tiny, "cnn-small-bn", **EVERYTHING)))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:(FedBN|SiloBN|PartialFed). the model has no BatchNorm")
def test_every_method_gives_the_same_bits(method: str, tiny: Federation) -> None:
    settings = {"rounds": 2, "fraction": 0.5, "local": EVERYTHING["local"], "hyper": QUICK.get(method)}
    one, two = (
        left(Experiment(method, tiny, "cnn-small-bn", engine=engine, workers=2, **settings))
        for engine in ("ray", "serial")
    )
    assert_equal(one, two)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_architectures_of_their_own(tiny: Federation) -> None:
    one, two = (
        left(Experiment("fedcd", tiny, "resnet8,cnn-small,mlp", rounds=2, engine=engine))
        for engine in ("ray", "serial")
    )
    assert_equal(one, two)


def parallel(data: Federation, behaviour: Any, **options: Any) -> Experiment:
    """A probe on two workers, judged at the end only."""
    return probe(data, behaviour, **{"engine": "ray", "workers": 2, "eval_every": 0, **options})


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_workers_have_one_thread_each_and_share_the_data(tiny: Federation, tmp_path: Path) -> None:
    """Two processes for four clients, none of them this one; what one changes of what it got, only it sees."""

    def careless(client: Any, params: Tensors) -> dict[str, Any]:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.glob("[0-9]*"))) < 2:  # the other may still be starting, and find nothing left to do
            time.sleep(0.05)
        before = float(sum(tensor.sum() for tensor in params.values()))
        for tensor in params.values():
            tensor.add_(1)
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), "sum": before}

    experiment = parallel(tiny, careless)
    experiment.run()
    found = replies(experiment).values()
    assert len({reply["pid"] for reply in found} - {os.getpid()}) == 2
    assert {reply["threads"] for reply in found} == {1}
    assert len({reply["sum"] for reply in found}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_nobody_runs_far_ahead_of_the_slowest(tmp_path: Path) -> None:
    """While the first client is busy, answers of later ones wait for it: no more than a few per worker."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        if client.id == 0:
            time.sleep(2)
            return {"before": len(list(tmp_path.glob("client-*")))}
        (tmp_path / f"client-{client.id}").touch()
        return {"before": 0}

    experiment = parallel(blobs([5] * 40), update)
    experiment.run()
    assert 1 <= replies(experiment)[0]["before"] <= 2 * AHEAD
    assert sorted(replies(experiment)) == list(range(40))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_client_that_kills_its_worker_every_time_has_failed(tiny: Federation) -> None:
    """The others are unharmed, and the run goes on."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        if client.id == 2:
            os._exit(7)
        return {"id": client.id}

    experiment = parallel(tiny, update)
    result = experiment.run()
    assert sorted(replies(experiment)) == [0, 1, 3]
    assert [(event["client"], event["kind"], event["text"]) for event in result.events] == [
        (2, "died", "the process that ran update died (ActorDiedError), twice")
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_bug_in_a_method_shows_its_traceback_and_stops_those_that_train(tiny: Federation) -> None:
    def broken(client: Any, params: Tensors) -> None:
        raise KeyError("my bug")

    with pytest.raises(RunError, match="update raised KeyError") as caught:
        parallel(tiny, broken).run()
    assert "in broken" in str(caught.value)

    @dataclass(frozen=True)
    class Broken(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            for _ in cohort._exchange.train("update", 1, cohort.ids, self.download(server)):
                raise ZeroDivisionError

    BEHAVIOUR[0] = lambda client, params: time.sleep(0 if client.id == 0 else 600)
    with pytest.raises(ZeroDivisionError):
        Experiment(Broken(), tiny, "mlp", rounds=1, engine="ray", workers=2).run()


@pytest.mark.slow
def test_a_method_that_was_typed_in() -> None:
    """The class is in no file that another process could import; nothing is said but what the script says."""
    script = "from dataclasses import dataclass\nfrom pfed import Experiment, Method, step\n" + TYPED_IN
    script += 'assert found("ray") == found("serial")\nprint("the same")\n'
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=280)
    assert (done.stdout, done.stderr) == ("the same\n", "")


NODES = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from ray.cluster_utils import Cluster
from pfed import Experiment
from pfed.methods.fedrep import FedRep

killed, place = [], Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)

def kill():
    "The second machine, as soon as one of its workers is in the midst of its second client's step."
    while not (place / node.node_id).exists():
        time.sleep(0.05)
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    killed.append(True)

class Slow(FedRep):
    def update(self, client, body):
        import ray
        reply = super().update(client, body)
        if ray.is_initialized() and client.round == 2:
            (place / ray.get_runtime_context().get_node_id()).touch()
            time.sleep(3)
        return reply
    update._pfed_step = True

def found(**engine):
    experiment = Experiment(Slow(head_epochs=2), "digits", "cnn-small-bn", clients=6, rounds=3, train_cap=30, **engine)
    result = experiment.run()
    states = {c: experiment.session.store.states.load(c, v) for c, v in experiment.session.exchange.versions.items()}
    return result, {"server": experiment.session.server, "states": states}

threading.Thread(target=kill, daemon=True).start()
one = found(engine="ray", ray_address=cluster.address)
two = found()
sys.path.insert(0, sys.argv[2])
from helpers import assert_same
assert_same(one[1], two[1])
assert one[0].series == two[0].series and one[0].events == two[0].events
cluster.shutdown()
print("killed" * len(killed), "the same")
"""


@pytest.mark.slow
def test_a_machine_that_dies_in_mid_round(tmp_path: Path) -> None:
    """Two Ray nodes; one is killed while clients train there. They train again elsewhere: the same bits."""
    command = [sys.executable, "-", str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **SETTINGS}
    done = subprocess.run(command, input=NODES, capture_output=True, text=True, timeout=280, env=environment)
    assert done.stdout.splitlines()[-1:] == ["killed the same"], done.stderr  # Ray may tell of the death before it


SLOW = """
import time
from dataclasses import dataclass
from pfed import step
from pfed.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Slow(FedAvg):
    \"\"\"FedAvg that takes its time from the third round on.\"\"\"

    @step
    def update(self, client, params):
        if client.round > 2:
            time.sleep(0.5)
        return super().update(client, params)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_of_ray_outlives_the_run_which_can_be_resumed(how: signal.Signals, tmp_path: Path, place: Path) -> None:
    """A class in a file that no worker can import; killed or stopped in mid-round, then resumed on Ray: the same."""
    (tmp_path / "slow.py").write_text(SLOW)
    options = "--clients 4 --model mlp --train-cap 30 --rounds 4 --checkpoint-every 1"
    pfed = [sys.executable, "-m", "pfed"]
    run = [*pfed, "run", f"{tmp_path / 'slow.py'}:Slow", *options.split(), "--engine", "ray", "--workers", "2"]
    process = subprocess.Popen([*run, "--runs", str(tmp_path / "runs")], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("runs/*/checkpoint-000002")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    assert all(remains(place))
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert said.startswith("pfed: Stopped after round 2" if how == signal.SIGINT else "")
    assert len(said.splitlines()) == (how == signal.SIGINT)
    deadline = time.monotonic() + 15
    while any(remains(place)):
        assert time.monotonic() < deadline, remains(place)
        time.sleep(0.1)
    (folder,) = (tmp_path / "runs").iterdir()
    subprocess.run([*pfed, "resume", folder.name, "--runs", str(tmp_path / "runs")], check=True, capture_output=True)
    experiment = Experiment("fedavg", model="mlp", clients=4, train_cap=30, rounds=4)
    assert Result.load(folder).series == experiment.run().series
    assert remains(place) == ([], [])
