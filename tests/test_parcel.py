"""What a worker on another machine gets, and what sees to it that no process is left: without a cluster."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BEHAVIOUR, Probe, assert_same
from torch import nn

from pfed import Experiment, Federation, UserError, registry
from pfed.engines import cluster, guard
from pfed.engines.parcel import LARGE, pack, unpack
from pfed.runner import Runner
from pfed.tasks import task

FILE = """
from dataclasses import dataclass
from pfed.methods.fedavg import FedAvg
from pfed import step

def twice(x):
    return 2 * x

@dataclass(frozen=True)
class Mine(FedAvg):
    @step
    def update(self, client, params):
        return {"params": params, "twice": twice(client.id)}
"""


def runner(method: Any, data: Federation, model: Any = "cnn-small-bn", **options: Any) -> Runner:
    experiment = Experiment(method, data, model, **options)
    return Runner(experiment.method, data, experiment._pool(), experiment.options, task("classification"))


needs_ray = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('ray')", reason="pip install 'pfed[ray]'"
)


@needs_ray
@pytest.mark.parametrize("model", ["cnn-small", "cnn-small-bn", "mlp"])
def test_a_runner_that_was_sent_does_the_same(tiny: Federation, model: str) -> None:
    """Weights lie as they did, also where a dimension of size one leaves a choice: convolutions go by it."""
    one = runner("fedavg", tiny, model)
    two, processor = unpack(pack(one))
    assert processor == torch.backends.cpu.get_cpu_capability()
    for here, there in ((one.pool.templates, two.pool.templates), (one.pool._initial, two.pool._initial)):
        a, b = (tree[0].state_dict() if isinstance(tree[0], nn.Module) else tree[0] for tree in (here, there))
        assert_same(a, b)
        assert [tensor.stride() for tensor in a.values()] == [tensor.stride() for tensor in b.values()]
    payload = {"params": one.pool.shared()}
    (reply, client), (again, other) = (each("update", 1, 1, dict(payload), {}) for each in (one, two))
    assert_same(reply.payload, again.payload)
    assert_same(client.state, other.state)


@needs_ray
def test_samples_are_sent_once_and_read_where_they_lie(tiny: Federation) -> None:
    data, arrays = pack(runner("fedavg", tiny, "mlp"))
    assert sum(array.nbytes >= tiny.clients[0].train.x.nbytes for array in arrays) == 1
    assert len(data) < 20 * LARGE
    received, _ = unpack((data, arrays))
    clients = received.federation.clients
    assert clients[0].train.x is clients[3].test.x
    assert clients[0].train.x.data_ptr() in {array.ctypes.data for array in arrays}
    assert_same(clients[2].train.take()[0], tiny.clients[2].train.take()[0])
    parameter = next(received.pool.templates[0].parameters())
    assert parameter.data_ptr() not in {array.ctypes.data for array in arrays}


@needs_ray
def test_a_method_from_a_file_goes_along(tiny: Federation, tmp_path: Path) -> None:
    """Opened in a process that can't import it."""
    (tmp_path / "mine.py").write_text(FILE)
    sent = pack(runner(registry.find(f"{tmp_path / 'mine.py'}:Mine"), tiny, "mlp"))
    torch.save([sent[0], [torch.from_numpy(array.copy()) for array in sent[1]]], tmp_path / "sent")
    code = f"""
import torch
from pfed.engines.parcel import unpack
data, arrays = torch.load({str(tmp_path / "sent")!r}, weights_only=True)
runner, _ = unpack((data, [array.numpy() for array in arrays]))
reply, _ = runner("update", 3, 1, {{"params": runner.pool.shared()}}, {{}})
print(reply.payload["twice"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("6\n", "")


@needs_ray
def test_habits_of_the_process_go_along(tiny: Federation) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        sent = pack(runner("fedavg", tiny, "mlp"))
        torch.set_float32_matmul_precision("highest")
        unpack(sent)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@needs_ray
def test_what_cannot_be_sent_is_said(tiny: Federation) -> None:
    lock = threading.Lock()
    BEHAVIOUR[0] = lambda client, params: lock.locked()
    with pytest.raises(UserError, match=r"^The method, its model or the data can't be sent to other processes: .*lock"):
        pack(runner(Probe(), tiny, "mlp"))


def test_without_ray_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoRay(), *sys.meta_path])
    with pytest.raises(UserError, match=r"^The package ray is missing: pip install 'pfed\[ray\]'\.$"):
        Experiment("fedavg", engine="ray")


class _NoRay:
    def find_spec(self, name: str, *rest: Any) -> None:
        if name == "ray":
            raise ModuleNotFoundError(name="ray")


PARENT = """
import subprocess, sys, time
from pfed.engines.cluster import _guard
guard = _guard(*sys.argv[1:])
child = subprocess.Popen(["sleep", "100"], env={sys.argv[1].split("=")[0]: sys.argv[1].split("=")[1]})
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray has its own way")
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_guard_ends_what_is_marked_and_nothing_else(tmp_path: Path, end: str) -> None:
    mark = f"PFED_RAY={secrets.token_hex(8)}"
    folder = tmp_path / "session"
    (folder / "logs").mkdir(parents=True)
    bystander = subprocess.Popen(["sleep", "100"], env={"PFED_RAY": secrets.token_hex(8)})
    try:
        if end == "killed":
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, mark, str(folder)], stdout=subprocess.PIPE, text=True
            )
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert guard.marked(mark) == [pid]
            parent.kill()
            parent.communicate()
        else:
            child = subprocess.Popen(["sleep", "100"], env=dict([mark.split("=")]))
            pid = child.pid
            watching = cluster._guard(mark, str(folder))
            time.sleep(0.3)
            assert guard.marked(mark) == [pid]
            watching.communicate(timeout=20)
            assert child.wait(5) == -9
        deadline = time.monotonic() + 20
        while folder.exists() or guard.marked(mark):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
