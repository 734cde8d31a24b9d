"""Clients on another device than the server's: torch's `meta`, which knows shapes and devices, but no numbers.

An operation on tensors of two devices is an error there as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pfed import Experiment, Federation, Tensors, UserError, machine, registry, step, wire
from pfed.client import Client
from pfed.runner import Runner
from pfed.tasks.classification import Classification

# What these do next depends on values, which meta tensors have not.
BY_VALUE = {"cd2pfed", "partialfed-adaptive", "fedpac", "fedproto"}


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a number or a tensor is read from the device, some number is read."""
    item, to = Tensor.item, Runner._to

    def back(self: Runner, device: torch.device, tree: Any) -> Any:
        if device.type == "cpu":
            return wire.map_tensors(tree, lambda t: torch.full(t.shape, 0.5).to(t.dtype) if t.is_meta else t)
        return to(self, device, tree)

    monkeypatch.setattr(Tensor, "item", lambda self: 0.5 if self.is_meta else item(self))
    monkeypatch.setattr(Tensor, "__float__", lambda self: 0.5 if self.is_meta else item(self))
    monkeypatch.setattr(Runner, "_to", back)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("method", [name for name in registry.methods() if name not in BY_VALUE])
def test_every_method_trains_where_it_is_told(method: str, tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfed.session.Session._judges", lambda self, t: False)
    Experiment(method, tiny, "cnn-small-bn", rounds=2, device="meta", exact_shortcuts=False).run()


def _places(client: Client, params: Tensors) -> list[str]:
    model, batch = client.model(), next(client.batches(1))
    tensors = [
        torch.zeros(1),
        client.state["mark"],
        params["a"],
        next(model.parameters()),
        batch.x,
        batch.y,
        batch.index,
    ]
    return [tensor.device.type for tensor in tensors]


def test_what_a_step_makes_and_gets_is_on_the_device(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a pool of samples that all clients share is moved once."""
    seen: list[str] = []
    experiment = Experiment("fedavg", tiny, "mlp", device="meta")
    runner = Runner(experiment.method, tiny, experiment._pool(), experiment.options, Classification())
    runner.move(torch.device("meta"))
    monkeypatch.setattr(
        type(experiment.method), "update", step(lambda self, client, params: seen.extend(_places(client, params)))
    )
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        runner("update", 0, 1, {"params": Tensors(a=torch.zeros(2))}, {"mark": torch.zeros(1)})
    assert set(seen) == {"meta"}
    to, moved = Tensor.to, []
    monkeypatch.setattr(Tensor, "to", lambda self, *where: moved.append(self.shape) or to(self, *where))
    first, second = (runner.client(id, 1, {}).data.train for id in (0, 1))
    assert first.x is second.x
    assert tiny.clients[0].train.x.shape not in moved  # it was there since the first step
    assert len(first) == len(tiny.clients[0].train)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu", "run.device must be cpu, cuda or cuda:N. Got 'gpu'."),
        ("cuda", "run.device 'cuda' is not there: torch finds 0 GPUs."),
        ("cuda:3", "run.device 'cuda:3' is not there: torch finds 0 GPUs."),
    ],
)
@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_device_that_is_not_there(
    tiny: Federation, name: str, said: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError) as error:
        Experiment("fedavg", tiny, "mlp", rounds=1, device=name, engine=engine).run()
    assert str(error.value) == said


def test_every_worker_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [machine.device("cuda", number) for number in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
    assert machine.device("cuda:1", 4) == torch.device("cuda", 1)
    assert machine.device("cpu", 4) == torch.device("cpu")
