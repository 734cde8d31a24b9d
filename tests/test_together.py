"""Clients that train as one: the same as one after another, up to the order of sums."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from helpers import assert_same
from test_contract import METHODS, QUICK, flat, states
from torch import Tensor, nn

from pfed import Experiment, Federation, RunError, UserError
from pfed.engines import together

LOCAL = {"lr": 0.05, "batch_size": 8, "epochs": 2}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups that trained as one."""
    sizes: list[int] = []
    train = together._train
    monkeypatch.setattr(together, "_train", lambda group: sizes.append(len(group)) or train(group))
    return sizes


def run(method: str, data: Federation, model: Any = "cnn-small", **changes: Any) -> tuple[dict[str, Any], Any]:
    experiment = Experiment(method, data, model, **{"rounds": 2, "fraction": 1.0, "local": LOCAL, **changes})
    result = experiment.run()
    assert experiment.session is not None
    return flat(states(experiment.session)), result


def assert_close(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-5)
        else:
            assert value == two[name]


@pytest.mark.filterwarnings("ignore:(FedBN|SiloBN|PartialFed)")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_out_the_same(method: str, tiny: Federation) -> None:
    hyper = {"server_steps": 0} if method == "feddf" else QUICK.get(method)  # Adam's first steps are rounding's signs
    one, alone = run(method, tiny, rounds=1, hyper=hyper)
    two, grouped = run(method, tiny, rounds=1, hyper=hyper, together=3)
    assert_close(one, two)
    assert alone.traffic == grouped.traffic
    assert [row["samples"] for row in alone.rounds] == [row["samples"] for row in grouped.rounds]
    assert not [event for event in grouped.events if event["kind"] != "note"]


@pytest.mark.parametrize("size", [2, 3, 10])
def test_groups_are_as_large_as_asked(tiny: Federation, groups: list[int], size: int) -> None:
    """Four clients; one left over trains alone."""
    run("fedavg", tiny, rounds=1, together=size)
    assert groups == {2: [2, 2], 3: [3], 10: [4]}[size]


@pytest.mark.parametrize("momentum", [{"momentum": 0.5}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01}])
@pytest.mark.parametrize("keep", [True, False])
def test_optimisers(tiny: Federation, groups: list[int], momentum: dict[str, Any], keep: bool) -> None:
    """Also where momentum survives between rounds, and clients of different sizes leave at different times."""
    settings = {"local": {**LOCAL, **momentum}, "keep_optimizer": keep, "rounds": 3}
    one, _ = run("fedavg", tiny, **settings)
    two, _ = run("fedavg", tiny, together=4, **settings)
    assert groups == [4, 4, 4]
    assert_close(one, two)


def test_what_depends_on_chance_or_on_the_batch_trains_alone(tiny: Federation, groups: list[int]) -> None:
    one, _ = run("fedavg", tiny, "cnn-small-bn")
    two, _ = run("fedavg", tiny, "cnn-small-bn", together=4)
    assert groups == []
    assert_same(one, two)  # to the bit: it is the usual way


def test_different_architectures_are_different_groups(tiny: Federation, groups: list[int]) -> None:
    one, _ = run("local", tiny, "mlp,cnn-small", rounds=1)
    two, _ = run("local", tiny, "mlp,cnn-small", rounds=1, together=4)
    assert groups == [2, 2]
    assert_close(one, two)


def test_a_client_that_fails_does_not_hold_up_the_others(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    from pfed.methods.fedavg import FedAvg

    update = FedAvg.update

    @functools.wraps(update)
    def failing(self: FedAvg, client: Any, params: Any) -> Any:
        if client.id == 1:
            raise ValueError("no")
        return update(self, client, params)

    monkeypatch.setattr(FedAvg, "update", failing)
    _, result = run("fedavg", tiny, rounds=1, together=4)
    (failure,) = [event for event in result.events if event["kind"] == "error"]
    assert failure["client"] == 1


def test_it_is_for_one_process(tiny: Federation) -> None:
    with pytest.raises(UserError, match=r"run.together > 1 needs engine serial\. Got processes\."):
        run("fedavg", tiny, engine="processes", together=2)


class Odd(nn.Module):
    """Looks at a value, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x.flatten(1))
        out: Tensor = self.head(z if z.sum() > 0 else -z)
        return out


def test_a_model_that_can_not_be_stacked(tiny: Federation) -> None:
    before = threading.active_count()
    with pytest.raises(RunError, match=r"run\.together can't be used with this model, set it to 1: "):
        run("fedavg", tiny, Odd, together=2)
    assert threading.active_count() == before
