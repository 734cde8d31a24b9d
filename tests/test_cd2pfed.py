"""CD2-pFed: the numbered invariants of its description, its bytes, absent clients, and one round by hand.

Equality is bit for bit unless a test says otherwise. Switches and bad input are in test_cd2pfed_options.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from cd2pfed_helpers import CLIENTS, DATA, LOCAL, NOISY, PLAIN, go, images, layout, logged, wide
from helpers import Residual, Run, assert_same, blobs, federation, initial, same
from torch import Tensor, nn

from pfed import Experiment, anatomy
from pfed.channels import channels
from pfed.methods.cd2pfed import CD2pFed
from pfed.metrics import correct, entropy
from pfed.models import build
from pfed.smoothing import Smoothing
from pfed.subnets import Subnet
from pfed.tensors import pack

SWITCHES = [dict(zip(PLAIN, values, strict=True)) for values in itertools.product((False, True), repeat=3)]


@functools.cache
def reference(method: str, fraction: float = 1.0, bn: str = "share") -> Run:
    """A run of another method."""
    return go(method=method, fraction=fraction, bn=bn, keep_optimizer=False)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_nothing_private_is_fedavg(switches: dict[str, bool]) -> None:
    """Invariant 1: p = 0, whatever LI, TA and CD; with all clients, or with half of them."""
    fraction = 0.5 if switches["smoothing"] else 1.0
    done, avg = go({"p": 0.0, **switches}, fraction=fraction), reference("fedavg", fraction)
    assert_same(done.server["params"], avg.server["params"])
    assert_same(done.personal, avg.personal)


@pytest.mark.parametrize("bn", ["local-stats", "local-all"])
def test_nothing_private_is_fedavg_under_any_bn_policy(bn: str) -> None:
    """What the run keeps at the clients is theirs as in FedAvg, and not smoothed."""
    done, avg = go({"p": 0.0}, bn=bn), reference("fedavg", bn=bn)
    assert_same(done.server["params"], avg.server["params"])
    assert_same(done.personal, avg.personal)


def test_all_private_is_local() -> None:
    """Invariant 2: p = 1, LI and TA off. Nothing is sent, and nobody's data matter to another client."""
    all_private = {**PLAIN, "p": 1.0, "distillation": True}
    done, local = go(all_private), reference("local")
    assert_same(done.personal, local.personal)
    assert done.result.bytes_up == 0
    assert all(message.up == {"shared": {}} for message in done.messages)
    other = go(all_private, data=dataclasses.replace(DATA, clients=(*DATA.clients[:3], blobs((4, 4)).clients[1])))
    assert all(same(done.personal[client], other.personal[client]) for client in range(3))
    assert not same(done.personal[3], other.personal[3])


SPLITS = [
    {},
    *({"private_side": side} for side in ("last", "random-fixed")),
    *({"classifier_split": split} for split in ("output", "private", "shared")),
    *({"bn_buffers": rule} for rule in ("local", "shared")),
    {"layer_p": (0.9,)},
    {"t_offset": 0},
    {"progressive": False},
]


@pytest.mark.parametrize("hyper", SPLITS, ids=str)
def test_masks(hyper: dict[str, Any]) -> None:
    """Invariants 3 and 4: a mask divides every tensor; private elements stay private; the last share is p."""
    found, method = layout(Residual), CD2pFed(p=0.7, **hyper)
    size = {name: shape.numel() for name, shape in found.shapes.items() if name not in found.counters}
    before = None
    for t in range(11):
        split = method.split(found, t, 10)
        for name, mask in split.shared.items():
            assert mask.shape == found.shapes[name]
            assert int(mask.sum()) + int((~mask).sum()) == found.shapes[name].numel()
            assert before is None or (mask <= before[name]).all()
        assert not any(split.shared[name].any() for name in found.counters)
        if t == 0:
            out = found.statistics if hyper.get("bn_buffers") == "local" else set()
            assert pack_size(split.shared) == sum(n for name, n in size.items() if name not in out)
        before = split.shared
    last = Fraction(9, 10) if hyper == {"layer_p": (0.9,)} else Fraction(7, 10)
    assert max(method.shares(10, 10)) == (last * Fraction(9, 10) if hyper == {"t_offset": 0} else last)
    assert method.shares(1, 10)[0] == Fraction(7, 10) * {"{'t_offset': 0}": 0, "{'progressive': False}": 1}.get(
        str(hyper), Fraction(1, 10)
    )


def pack_size(masks: Mapping[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def test_shares_are_exact() -> None:
    """0.5 * 29 / 100 of 100 channels are 14.5, rounded up; floats would give 14."""
    found = layout(lambda: nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 3)))
    assert int(CD2pFed(p=0.5).split(found, 29, 100).private[0].sum()) == 15
    assert CD2pFed(p=0.1).shares(3, 10) == (Fraction(3, 100),)


def perturbed(model: nn.Module, masks: Mapping[str, Tensor], leave: str) -> nn.Module:
    """Random numbers wherever a mask is set, but not in one tensor."""
    source = torch.Generator().manual_seed(3)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and name != leave:
            noise = torch.rand(tensor.shape, generator=source)
            tensor.copy_(torch.where(masks[name], noise, tensor))
    return model


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("name", ["lenet5", "cnn-small-bn", "resnet8"])
def test_sub_networks_do_not_see_each_other(name: str, thin: bool) -> None:
    """Invariant 5: random private elements leave the shared network as it is, and the other way round."""
    shape, x = (3, 32, 32), torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for keep_private in (False, True):
        model = build(name, classes=5, shape=shape).eval()
        found = channels(model, torch.zeros(1, *shape))
        split = CD2pFed(p=0.5).split(found, 1, 1)
        subnet = Subnet(model, found, [own == keep_private for own in split.private], thin=thin).eval()
        before, full = subnet(x), model(x)
        bias = f"{found.classifier}.bias" if keep_private else ""
        perturbed(model, {name: mask == keep_private for name, mask in split.shared.items()}, bias)
        assert torch.equal(subnet(x), before)
        assert not torch.equal(model(x), full)


def test_distillation_loss() -> None:
    """Invariant 7: L_CD >= 0, 0 iff the logits differ by a constant for each sample, and symmetric."""
    z, private, shared = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    for targets in ("mutual", "from_full"):
        method = CD2pFed(cd_targets=targets)
        assert method.l_cd(z, private, shared) > 0.01
        torch.testing.assert_close(method.l_cd(z, shared, private), method.l_cd(z, private, shared))
        shift = torch.randn(6, 1, generator=torch.Generator().manual_seed(1), dtype=torch.double)
        assert method.l_cd(z, z + shift, z - 2 * shift).abs() < 1e-12
    assert CD2pFed().l_cd(z, private, private + 1e-3 * torch.eye(6, 4, dtype=torch.double)) > 1e-10


def test_distillation_by_hand() -> None:
    """Two classes, logits (ln 3, 0) and (0, 0), so p = (3/4, 1/4) against q = (1/2, 1/2).

    KL(p ‖ q) = 3/4 ln(3/2) + 1/4 ln(1/2), KL(q ‖ p) = 1/2 ln(2/3) + 1/2 ln 2. With temperature 2 and logits
    doubled, each term is the same, times 4. Distilled from all channels with p as theirs, the private term is 0.
    """
    zp, zq = torch.tensor([[math.log(3), 0.0]], dtype=torch.double), torch.zeros(1, 2, dtype=torch.double)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert float(CD2pFed().l_cd(zq, zp, zq)) == pytest.approx((forward + backward) / 2)
    assert float(CD2pFed(cd_temperature=2.0).l_cd(zq, 2 * zp, zq)) == pytest.approx(2 * (forward + backward))
    assert float(CD2pFed(cd_targets="from_full").l_cd(zp, zp, zq)) == pytest.approx(forward / 2)
    assert float(entropy(zp)) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert correct(torch.cat([zp, zp]), torch.tensor([0, 1])).tolist() == [True, False]


def test_beta() -> None:
    """Invariant 8: β_t grows to β at t0 and stays; T = 50 begins with 0.5 exp(-3.2)."""
    method = CD2pFed()
    for rounds in (1, 4, 5, 14, 15, 50, 97):
        series = [method.beta_t(t, rounds) for t in range(1, rounds + 1)]
        t0 = max(1, math.floor(0.1 * rounds + 0.5))
        assert series == sorted(series)
        assert all(beta < 0.5 for beta in series[: t0 - 1])
        assert all(beta == 0.5 for beta in series[t0 - 1 :])
    assert method.beta_t(1, 50) == pytest.approx(0.5 * math.exp(-3.2))
    assert CD2pFed(t_offset=0).beta_t(1, 50) == pytest.approx(0.5 * math.exp(-5))
    assert CD2pFed(ema_reading="swapped").new_weight(1, 50) == pytest.approx(1 - 0.5 * math.exp(-3.2))
    assert CD2pFed(ema_reading="swapped", smoothing=False).new_weight(1, 50) == 1.0


@pytest.mark.parametrize("every", ["epoch", "step"])
def test_beta_one_is_no_smoothing(every: str) -> None:
    """Invariant 8: from t0 = 1 on, which is every round of two."""
    with_it, without = (go(hyper, rounds=2) for hyper in ({"beta": 1.0, "ema_every": every}, {"smoothing": False}))
    assert_same(with_it.personal, without.personal)
    assert_same(with_it.server["params"], without.server["params"])


def test_smoothing_by_hand() -> None:
    """v ← β v + (1 - β) v_before in private elements, from the last smoothed value; the rest is left alone."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    found = channels(model, torch.zeros(1, 1))
    split = found.split([1])
    weight = model.get_submodule("0").weight
    weight.data = torch.tensor([[1.0], [1.0]])
    average = Smoothing(model, split, 0.25)
    weight.data = torch.tensor([[5.0], [5.0]])
    average()
    assert weight.flatten().tolist() == [2.0, 5.0]  # 5/4 + 3/4
    weight.data += 4
    average.step()
    assert weight.flatten().tolist() == [3.0, 9.0]  # 6/4 + 3 * 2/4


def test_shared_elements_are_common() -> None:
    """Invariant 9: after the last download; private elements are each client's own."""
    done, found = go({"p": 0.5}), layout(Residual)
    masks = CD2pFed(p=0.5).split(found, 4, 4).shared
    for client in CLIENTS:
        assert_same(pack(done.personal[client], masks), pack(done.server["params"], {**masks}))
    for name, mask in masks.items():
        if name.endswith("weight"):  # a bias before BatchNorm has no effect, so that those hardly move
            values = {tuple(done.personal[client][name][~mask].tolist()) for client in CLIENTS}
            assert len(values) == 4, name


def test_new_private_elements_start_from_the_server() -> None:
    """Invariant 10: what becomes private in round t starts with the mean of round t - 1, and stays on the server.

    Without local epochs in rounds 3 and 4 of four, what became private then is still what the server sent.
    """
    whole = go({"p": 0.8}, wide, rounds=4)
    found, method = layout(wide), CD2pFed(p=0.8)
    for t in (2, 3, 4):
        was, now = (method.split(found, r, 4).shared for r in (t - 1, t))
        sent = {m.client: m.down["shared"] for m in whole.messages if m.round == t}
        averaged = [m.up["shared"] for m in whole.messages if m.round == t - 1]
        weights = [len(DATA.clients[client].train) / 33 for client in CLIENTS]
        for name in ("0.weight", "0.bias", "2.weight"):
            mean = sum(w * up[name].double() for w, up in zip(weights, averaged, strict=True)).float()
            assert all(torch.equal(sent[client][name], mean) for client in CLIENTS)
            newly = was[name] & ~now[name]
            assert newly.any()
            here = newly[was[name]]  # of the elements that were sent, those that become private now
            assert torch.equal(whole.server["params"][name][newly], mean[here])


def test_newly_private_elements_are_what_was_sent() -> None:
    """Invariant 10 at the client: with a learning rate of 0 in every round but the first, nothing else moves."""
    local = {**LOCAL, "schedule": "step:0.25", "lr": 1e-30}
    done, start = go({"p": 0.8}, wide, local=local), initial(wide)
    assert all(same(done.states[client]["own"], start) for client in CLIENTS)


@pytest.mark.parametrize("bn", ["share", "local-stats", "local-all"])
def test_bytes(bn: str) -> None:
    """Invariant 11: up 4 |S(p_t)|, down 4 |S(p_{t-1})|, all at first; the last download counts as evaluation."""
    done, found, method = go({"p": 0.8}, bn=bn), layout(Residual), CD2pFed(p=0.8)
    norm = {name for name in found.shapes if name.startswith(("bn1.", "downsample.1."))}
    stays = {"share": set(), "local-stats": found.statistics, "local-all": norm}[bn]
    size = []
    for t in range(5):
        masks = method.split(found, t, 4).shared
        size.append(4 * pack_size({name: mask for name, mask in masks.items() if name not in stays}))
    assert size == sorted(size, reverse=True)
    assert size[0] > size[1] > size[4]
    for message in done.messages:
        assert message.up["shared"].nbytes == size[message.round]
        assert message.down["shared"].nbytes == size[message.round - 1]
        assert not message.names & stays
    assert done.result.bytes_up == 4 * sum(size[1:])
    assert done.result.bytes_down == 4 * sum(size[:-1])
    marks = sum(len(client.test) for client in DATA.clients)  # a byte for each test sample: right or wrong
    assert done.result.bytes_eval == 4 * size[-1] + marks
    assert [4 * n for n in logged(done, "shared_elements")] == size[1:]


@pytest.mark.parametrize(("p", "up"), [(0.0, 256_408), (0.5, 128_224), (1.0, 0)])
def test_bytes_of_lenet5(p: float, up: int) -> None:
    """Invariant 11, the worked example: 64,102 parameters, of which 32,056 are shared at p = 0.5."""
    done = go({"p": p, "progressive": False}, "lenet5", images(1, 2), rounds=2)
    assert [message.up["shared"].nbytes for message in done.messages] == [up, up]
    assert [message.down["shared"].nbytes for message in done.messages] == [256_408, up]


def test_elements_of_a_resnet_with_and_without_statistics() -> None:
    """The logged numbers: running means and variances are elements, but not parameters."""
    done = go({"p": 0.4, "progressive": False}, rounds=1)
    found = layout(Residual)
    masks = CD2pFed(p=0.4).split(found, 1, 1).shared
    statistics = pack_size({name: masks[name] for name in found.statistics})
    assert statistics == 4 * 3  # three of five channels, in two layers, mean and variance
    assert logged(done, "shared_elements") == [pack_size(masks)]
    assert logged(done, "shared_parameters") == [pack_size(masks) - statistics]


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("progressive", [False, True])
def test_one_client_is_local(p: float, progressive: bool) -> None:
    """Invariant 12: whatever p, with TA and CD off."""
    data = blobs([12])
    done = go({**PLAIN, "p": p, "progressive": progressive}, data=data)
    assert_same(done.personal, go(method="local", data=data, keep_optimizer=False).personal)


@pytest.mark.parametrize("agg", ["samples", "uniform"])
def test_weights_of_the_mean(agg: str) -> None:
    """Invariant 13: they sum to 1 and are |D_i| / Σ |D_j|, here 7, 12, 5 and 9 of 33, or a quarter each."""
    done = go({"p": 0.4, "progressive": False, "agg": agg}, rounds=1)
    sizes = [7.0, 12.0, 5.0, 9.0] if agg == "samples" else [1.0] * 4
    masks = CD2pFed(p=0.4, progressive=False).split(layout(Residual), 1, 1).shared
    for name, mean in pack(done.server["params"], masks).items():
        ups = [message.up["shared"][name].double() for message in done.messages]
        expected = sum(size * up for size, up in zip(sizes, ups, strict=True)) / sum(sizes)
        torch.testing.assert_close(mean, expected.float(), rtol=1e-6, atol=1e-8)
    still = go({"p": 0.4}, local={"epochs": 0})
    assert_same(still.server["params"], initial(NOISY).only(still.server["params"]))


def test_absent_clients_get_what_they_shared_last() -> None:
    """With a quarter of the clients a round, each message down is that of the client's own last round."""
    done = go({"p": 0.9}, wide, rounds=8, fraction=0.25, local={"lr": 0.1})
    found, method = layout(wide), CD2pFed(p=0.9)
    last: dict[int, int] = dict.fromkeys(CLIENTS, 0)
    server = initial(wide)
    waited = False
    for message in sorted(done.messages, key=lambda m: m.round):
        assert message.down["last"] == last[message.client]
        masks = method.split(found, last[message.client], 8).shared
        assert_same(message.down["shared"], pack(server, masks))
        waited |= 0 < last[message.client] < message.round - 1
        now = method.split(found, message.round, 8).shared
        for name, values in message.up["shared"].items():  # one client a round: its answer is the mean
            server[name] = server[name].clone()
            server[name][now[name]] = values
        last[message.client] = message.round
    assert waited
    assert_same(done.server["params"], server)
    newest = done.server["newest"]
    assert {client: done.server["last"].get(client, newest) for client in CLIENTS} == last


def test_dropped_and_late_clients_have_not_answered() -> None:
    """What a client lost in a round that failed, it gets in the next."""
    settings = {"dropout": 0.4, "rounds": 8, "eval_every": 0, "local": {"lr": 0.1}, "seed": 2}
    experiment = Experiment("cd2pfed", DATA, wide, hyper={"p": 0.9}, **settings)
    result = experiment.run()
    assert not [event for event in result.events if event["kind"] not in ("dropped", "late")]
    dropped = [(event["round"], event["client"]) for event in result.events]
    last = {c: max((t for t in range(1, 9) if (t, c) not in dropped), default=0) for c in CLIENTS}
    assert len(set(last.values())) > 1
    assert experiment.session is not None
    server = experiment.session.server
    assert {client: server["last"].get(client, 8) for client in CLIENTS} == last
    for client in CLIENTS:
        masks = CD2pFed(p=0.9).split(layout(wide), last[client], 8).shared
        assert_same(pack(anatomy.snapshot(experiment.model(client)), masks), pack(server["params"], masks))


def test_arithmetic_by_hand() -> None:
    """Two hidden units, one private; one sample and one step of 1 a client, CD and TA off.

    z = h · b x with b = (b0, b1), logits (z, 0), and y = 0, so e = softmax(z)_0 - 1. Client 0 has x = 1, client 1
    x = 2. From b = (1, 1), h = (1, 1): z = 2x, and b_i falls by e h_i x, h_i by e b_i x. Shared is unit 1: b1 and h1.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                self.body.weight.fill_(1.0)
                self.head.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x))
            return out

    data = federation(([[1.0]], [0]), ([[2.0]], [0]))
    done = go({**PLAIN, "p": 0.5}, Two, data, rounds=1, local={"lr": 1.0, "batch_size": 1})
    steps = {}
    for client, x in enumerate((1.0, 2.0)):
        e = 1 / (1 + math.exp(-2 * x)) - 1
        steps[client] = 1 - e * x  # of b_i as of the first row of h; the second row goes to e x
    shared = (steps[0] + steps[1]) / 2
    for client in range(2):
        personal = done.personal[client]
        assert personal["body.weight"].flatten().tolist() == pytest.approx([steps[client], shared])
        assert personal["head.weight"][0].tolist() == pytest.approx([steps[client], shared])
        assert personal["head.weight"][1].tolist() == pytest.approx([steps[client] * -1 + 1, 1 - shared])
