"""CD2-pFed: its switches, its logs, its sub-networks, the models it runs on, and what it refuses.

Equality is bit for bit unless a test says otherwise. The invariants are in test_cd2pfed.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cd2pfed_helpers import CLIENTS, DATA, LOCAL, NOISY, PLAIN, go, images, layout, logged, wide
from helpers import Residual, assert_same, blobs, initial, mlp, same
from torch import Tensor, nn

from pfed import Experiment, Tensors, UserError
from pfed.channels import channels
from pfed.methods.cd2pfed import CD2pFed
from pfed.metrics import correct, entropy
from pfed.models import build
from pfed.models.resnet import CifarResNet
from pfed.smoothing import Smoothing
from pfed.subnets import Subnet

GENTLE = {"lr": 0.1, "batch_size": 6, "epochs": 5}


def test_who_gets_a_gradient() -> None:
    """`teacher`: of KL(a ‖ b) only b, whose gradient is (softmax b - softmax a) / 2. From all: never they."""
    source = torch.Generator().manual_seed(0)
    z, private, shared = (torch.randn(1, 4, generator=source, requires_grad=True) for _ in range(3))
    settings = {"teacher": CD2pFed(cd_stopgrad="teacher"), "from_full": CD2pFed(cd_targets="from_full")}
    found = {}
    for name, method in {"none": CD2pFed(), **settings}.items():
        loss = method.l_cd(z, private, shared)
        found[name] = torch.autograd.grad(loss, (z, private, shared), allow_unused=True)
    p, q, full = private.softmax(1), shared.softmax(1), z.softmax(1)
    torch.testing.assert_close(found["teacher"][1], (p - q) / 2)
    torch.testing.assert_close(found["teacher"][2], (q - p) / 2)
    torch.testing.assert_close(found["from_full"][1], (p - full) / 2)
    assert found["none"][0] is found["teacher"][0] is found["from_full"][0] is None
    assert not torch.allclose(found["none"][1], found["teacher"][1])


@pytest.mark.parametrize(("every", "count"), [("epoch", 2), ("step", 4)])
def test_when_private_weights_are_smoothed(every: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of two epochs, or after each of their four steps; running statistics are left alone."""
    calls: list[list[str]] = []

    def counted(self: Smoothing) -> None:
        calls.append(sorted(self.live))

    monkeypatch.setattr(Smoothing, "__call__", counted)
    go({"p": 0.5, "progressive": False, "ema_every": every}, data=blobs([12]), rounds=1)
    assert len(calls) == count
    assert calls[0] == [name for name in sorted(dict(Residual().named_parameters())) if name != "fc.bias"]


def test_smoothing_in_a_run() -> None:
    """One step in one round without CD: private elements go β of the way, shared ones all of it; `swapped` 1 - β."""
    local = {"lr": 0.2, "batch_size": 100}
    base = {**PLAIN, "p": 0.4}
    free = go(base, wide, rounds=1, local=local)
    start = initial(wide)
    mask = CD2pFed(p=0.4).split(layout(wide), 1, 1).shared
    for reading, share in (("literal", 0.3), ("swapped", 0.7)):
        done = go({**base, "smoothing": True, "beta": 0.3, "ema_reading": reading}, wide, rounds=1, local=local)
        for client in CLIENTS:
            for name, was in start.items():
                went = done.states[client]["own"][name] - was
                full = free.states[client]["own"][name] - was
                torch.testing.assert_close(went, torch.where(mask[name], full, share * full))


def test_distillation_makes_sub_networks_agree() -> None:
    """With CD the loss between them is less than half of what it is without; the logs show it for every client."""
    hyper = {"p": 0.5, "progressive": False, "smoothing": False}
    on, off = (go({**hyper, "lam": lam}, wide, local=GENTLE) for lam in (5.0, 1e-9))
    for client in CLIENTS:
        with_it, without = (logged(done, "cd_loss", client) for done in (on, off))
        assert len(with_it) == 4
        assert with_it[-1] < 0.5 * without[-1]
        for name in ("private", "shared"):
            assert all(0 <= value <= 1 for value in logged(on, f"{name}_accuracy", client))
            assert all(0 < value < math.log(3) + 1e-6 for value in logged(on, f"{name}_entropy", client))
    assert logged(on, "p") == [0.5] * 4
    assert logged(on, "beta") == []


def test_logged_schedule() -> None:
    """p_t and β_t of the rounds; of several p the largest."""
    done = go({"p": 0.8, "beta": 0.6}, wide)
    assert logged(done, "p") == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert logged(done, "beta") == [0.6] * 4  # t0 = 1
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    done = go({"layer_p": (0.5, 0.4), "p": 0.9, "progressive": False}, lambda: layers, rounds=1)
    assert logged(done, "p") == [0.5]
    assert len(done.messages[0].up["shared"]["0.bias"]) == 3
    assert len(done.messages[0].up["shared"]["1.bias"]) == 3


def test_logged_numbers_of_one_batch() -> None:
    """One full batch without a step: loss, accuracy and entropy are those of the initial sub-networks."""
    done = go({"p": 0.5, "progressive": False}, wide, rounds=1, local={"lr": 1e-30, "batch_size": 100})
    model = wide()
    model.load_state_dict(initial(wide))
    found = channels(model, torch.zeros(1, 4))
    split = found.split([5])
    x, y = DATA.clients[1].train.take()
    private, shared = (Subnet(model, found, own)(x) for own in (split.private, [~own for own in split.private]))
    logs = {name: value for _, client, name, value in done.result.logs if client == 1}
    expected = {"cd_loss": CD2pFed().l_cd(private, private, shared).detach()}
    for name, z in {"private": private, "shared": shared}.items():
        expected |= {f"{name}_accuracy": correct(z, y).float().mean(), f"{name}_entropy": entropy(z)}
    assert logs == {name: pytest.approx(float(value), rel=1e-4) for name, value in expected.items()}


def test_distillation_is_left_out_while_a_layer_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeNet-5 has six first channels: with p = 0.5 and T = 50 its first private one comes in round 9."""
    lenet, method = layout(lambda: build("lenet5", classes=10, shape=(3, 32, 32)), (3, 32, 32)), CD2pFed(p=0.5)
    assert [t for t in range(1, 51) if method.split(lenet, t, 50).degenerate] == list(range(1, 9))

    def refuse(self: Subnet, x: Tensor) -> Tensor:
        raise AssertionError("no sub-network was to be run")

    monkeypatch.setattr(Subnet, "forward", refuse)
    for hyper in ({"p": 0.04}, {"p": 1.0, "progressive": False}, {"distillation": False}, {"lam": 0.0}):
        done = go(hyper, wide, rounds=1)
        assert not [log for log in done.result.logs if log[1] != -1]


def test_no_weight_is_no_distillation() -> None:
    """lam = 0, also with dropout, whose draws the passes of sub-networks would take."""
    assert_same(go({"lam": 0.0}).personal, go({"distillation": False}).personal)


def after_two_rounds(hyper: Mapping[str, Any], model: Any = NOISY, **options: Any) -> dict[int, Tensors]:
    return go({"p": 0.4, "progressive": False, **hyper}, model, rounds=2, **options).personal


@functools.cache
def before_switching(hyper: tuple[tuple[str, Any], ...]) -> dict[int, Tensors]:
    return after_two_rounds(dict(hyper))


@pytest.mark.parametrize(
    "hyper",
    [
        {"distillation": False},
        {"lam": 0.5},
        {"smoothing": False},
        {"cd_targets": "from_full"},
        {"cd_stopgrad": "teacher"},
        {"cd_temperature": 3.0},
        {"subnet_ce": 0.5},
        {"bn_subnet": "eval"},
        {"bn_subnet": "update"},
        {"bn_buffers": "local"},
        {"bn_buffers": "shared"},
        {"private_side": "last"},
        {"private_side": "random-fixed", "p": 0.6},
        {"classifier_split": "output"},
        {"classifier_split": "private"},
        {"classifier_split": "shared"},
        {"layer_p": (0.6,)},
        {"ema_every": "step"},
        {"ema_reading": "swapped", "beta": 0.3},
    ],
    ids=str,
)
def test_every_switch_changes_something(hyper: dict[str, Any]) -> None:
    """In what two rounds lead to."""
    base = tuple((name, hyper[name]) for name in ("beta", "p") if name in hyper)
    assert not same(before_switching(base), after_two_rounds(hyper))


def test_supervised_sub_networks_learn() -> None:
    """`subnet_ce`: under the literal loss sub-networks agree on almost nothing but a guess; with labels they do not."""
    hyper = {"p": 0.5, "progressive": False, "smoothing": False, "lam": 5.0}
    plain, taught = (go({**hyper, "subnet_ce": weight}, wide, local=GENTLE) for weight in (0.0, 5.0))
    for name, client in itertools.product(("private_entropy", "shared_entropy"), CLIENTS):
        assert logged(taught, name, client)[-1] < logged(plain, name, client)[-1] - 0.1


def test_judged_sub_networks() -> None:
    """They appear beside the personal model, which is judged as without them; before the first round, too."""
    hyper = {"p": 0.5, "judge_subnets": True}
    done, plain = go(hyper), go({"p": 0.5})
    assert done.result.values == plain.result.values
    assert_same(done.personal, plain.personal)
    model = Residual().eval()
    model.load_state_dict(done.personal[2])
    found = channels(model, torch.zeros(1, 4))
    private = CD2pFed(p=0.5).split(found, 4, 4).private
    x, y = DATA.clients[2].test.take()
    per_client = next(row for row in done.result.clients if row["client"] == 2)
    for name, own in {"private": private, "shared": [~own for own in private]}.items():
        expected = correct(Subnet(model, found, own).eval()(x), y).float().mean()
        assert per_client[f"{name}-subnet/local-test"] == pytest.approx(float(expected))
    assert "shared-subnet/local-test" in go(hyper, rounds=0).result.metrics
    assert "shared-subnet/local-test" in go(hyper, eval_point="post_local", rounds=1).result.metrics


def test_thin_passes_are_the_masked_ones() -> None:
    """`exact_shortcuts`: after a round all weights agree within 1e-5."""
    for model in (wide, Residual):
        one, two = (after_two_rounds({}, model, exact_shortcuts=shortcuts) for shortcuts in (True, False))
        for client in CLIENTS:
            for name, tensor in two[client].items():
                assert (one[client][name] - tensor).float().norm() <= 1e-5 * tensor.float().norm().clamp(min=1e-3)


def test_sub_networks_leave_running_statistics_alone() -> None:
    """One batch: the statistics are those of FedAvg's full pass, unless `update` says otherwise."""
    local = {"lr": 0.2, "batch_size": 100}
    settings = {"model": Residual, "rounds": 1, "local": local, "eval_every": 0}
    avg = go(method="fedavg", **settings)
    for rule, equal in (("batch_noupdate", True), ("eval", True), ("update", False)):
        done = go({"p": 0.4, "progressive": False, "bn_subnet": rule, "bn_buffers": "shared"}, **settings)
        names = {name for name in avg.server["params"] if "running" in name}
        assert same(done.server["params"].only(names), avg.server["params"].only(names)) == equal
        assert not same(done.server["params"].drop(names), avg.server["params"].drop(names))


def test_order_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All channels, then the private ones, then the shared ones: so dropout draws in this order."""
    passes: list[str] = []
    network, subnet = Residual.forward, Subnet.forward

    def count(self: Residual, x: Tensor) -> Tensor:
        passes.append("network")
        return network(self, x)

    def name(self: Subnet, x: Tensor) -> Tensor:
        passes.append("private" if self._chosen[0].tolist() == [True, True, False, False, False] else "shared")
        return subnet(self, x)

    monkeypatch.setattr(Residual, "forward", count)
    monkeypatch.setattr(Subnet, "forward", name)
    local = {"lr": 0.1, "batch_size": 100}
    go({"p": 0.4, "progressive": False}, NOISY, blobs([6]), rounds=1, local=local)
    start = passes.index("private") - 1
    assert passes[start : start + 5] == ["network", "private", "network", "shared", "network"]


def test_bn_policy_of_the_run() -> None:
    """bn = local-all: no tensor of BatchNorm travels; with half of the channels private all else is divided as ever."""
    done = go({"p": 0.5}, bn="local-all")
    names = {name for message in done.messages for name in message.names}
    assert names == {"fc1.weight", "fc1.bias", "downsample.0.weight", "downsample.0.bias", "fc.weight", "fc.bias"}
    norms = [done.personal[client].only(["bn1.weight", "bn1.running_mean"]) for client in CLIENTS]
    assert not any(same(a, b) for a, b in itertools.combinations(norms, 2))
    with pytest.raises(UserError) as caught:
        go({"bn_buffers": "shared"}, bn="local-all")
    sentence = "CD2pFed.bn_buffers can't be 'shared' where the run keeps them at the clients: bn=local-all."
    assert str(caught.value) == sentence


ZOO: dict[str, Any] = {
    "lenet5": "lenet5",
    "cnn": "cnn",
    "resnet8": "resnet8",
    "resnet8-conv": lambda: CifarResNet(8, (8, 8, 16, 32), 10, shortcut="conv"),
    "torchvision:resnet18": "torchvision:resnet18",
    "timm:resnet10t": "timm:resnet10t",
    "torchvision:mobilenet_v2": "torchvision:mobilenet_v2",
}


@pytest.mark.parametrize("name", ZOO)
def test_models(name: str) -> None:
    """One round: about half goes down after all, both sub-networks run, and private channels are each client's own."""
    hyper = {"p": 0.5, "progressive": False}
    local = {"lr": 0.01, "batch_size": 2}
    done = go(hyper, ZOO[name], images(2, 2), rounds=1, local=local)
    down, up = (sum(getattr(m, way)["shared"].nbytes for m in done.messages) for way in ("down", "up"))
    assert 0.45 < up / down < 0.55
    assert all(len(logged(done, "cd_loss", client)) == 1 for client in range(2))
    first = next(iter(done.personal[0]))
    halves = [done.personal[client][first].chunk(2) for client in range(2)]
    assert torch.equal(halves[0][1], halves[1][1])
    assert not torch.equal(halves[0][0], halves[1][0])


def test_bad_input() -> None:
    """One sentence each, before anything is trained."""
    with pytest.raises(UserError) as caught:
        go({"layer_p": (0.5, 0.5)})
    wanted = "one number for each of the model's 1 channel groups"
    assert str(caught.value) == f"CD2pFed.layer_p must be {wanted}. Got 2 of them."
    with pytest.raises(UserError, match=r"CD2pFed\.layer_p must be <= 1\. Got 1\.5\."):
        go({"layer_p": (0.5, 1.5)})
    with pytest.raises(UserError, match=r"CD2pFed\.t_offset must be 0 or 1\. Got 2\."):
        go({"t_offset": 2})

    def grouped() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))

    with pytest.raises(UserError, match="of Sequential cannot be followed through 'GroupNorm 1': it mixes or moves"):
        go(model=grouped)
    with pytest.raises(UserError, match="Sequential has no hidden channels before its classifier"):
        go(model=lambda: nn.Sequential(nn.Linear(4, 3)))


def test_a_run_can_not_be_prolonged(tmp_path: Any) -> None:
    """p_t depends on the number of rounds, so that a longer run would share again what was private."""
    settings = {"hyper": {"p": 0.5}, "local": LOCAL, "eval_every": 0}
    Experiment("cd2pfed", DATA, mlp, rounds=2, **settings).run(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with pytest.raises(UserError, match=r"must have 2 rounds: what cd2pfed does depends on it\. Got 3\."):
        Experiment("cd2pfed", DATA, mlp, rounds=3, **settings).resume(folder)
