"""FedBSD: the numbered invariants of the method, its bytes, and its arithmetic by hand.

Equality is bit for bit unless a test says otherwise. Switches and bad input are in test_fedbsd_options.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fedbsd_helpers import BODY, CLIENTS, DATA, HEADS, LOCAL, NOISY, NORM, SHARED, Watch, go, images, logged, watched
from helpers import Residual, assert_same, blobs, federation, initial, mlp, run, same
from torch import Tensor, nn

from pfed import BACKBONE, HEAD, Experiment, Tensors
from pfed.engines.base import Call, Failure, Reply, States
from pfed.engines.serial import Serial
from pfed.losses import kl
from pfed.methods.fedbsd import FedBSD
from pfed.pool import Pool
from pfed.runner import Runner
from pfed.tasks import task


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.mark.parametrize("model", [mlp, NOISY], ids=["mlp", "dropout+bn"])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("norm", ["eval", "train"])
def test_without_distillation_it_is_fedrep(model: Any, keep: bool, norm: str) -> None:
    """Invariant 1: lam = 0. Server, states, personal models, messages and metrics are those of FedRep."""
    hyper = {"head_epochs": 2, "body_epochs": 2, "head_phase_bn": norm}
    bsd = go({**hyper, "lam": 0.0}, model, keep_optimizer=keep)
    settings = {"rounds": 3, "fraction": 0.5, "local": LOCAL, "eval_every": 0, "keep_optimizer": keep}
    rep = run("fedrep", DATA, model, hyper=hyper, **settings)
    assert_same(bsd.server, rep.server)
    assert_same(bsd.states, rep.states)
    assert_same(bsd.personal, rep.personal)
    assert bsd.result.metrics == rep.result.metrics
    assert not same(bsd.server, go(hyper, model, keep_optimizer=keep).server)


@pytest.mark.parametrize("target", ["features_softmax", "features_mse", "logits"])
@pytest.mark.parametrize("student", ["global", "local"])
def test_each_phase_trains_its_part_alone(watch: Watch, target: str, student: str) -> None:
    """Invariant 2: neither phase touches the other's part, nor anything the teacher (checked at every phase's end)."""
    go({"target": target, "student_init": student, "lam": 10.0})
    assert [phase.head for phase in watch.phases] == [True, False] * 6
    backbone = BACKBONE.names(Residual())
    for phase in watch.phases:
        moved, still = (HEADS, backbone) if phase.head else (backbone, HEADS)
        assert_same(phase.before.only(still), phase.after.only(still))
        assert not same(phase.before.only(moved), phase.after.only(moved))


def test_the_teacher_is_what_was_received(watch: Watch) -> None:
    """Invariant 2, row 7c: w_g with the client's own BatchNorm as it was at the round's start."""
    done = go(bn="local-all", rounds=4)
    first = [phase for phase in watch.phases if phase.head]
    assert any(phase.state for phase in first)
    for phase, (_, teacher), message in zip(first, watch.teachers, done.messages, strict=True):
        norm = phase.state.get("kept", initial(NOISY)).only(NORM)
        assert_same(teacher.only(BODY), Tensors(message.down["body"]) | norm.only(BODY))
        assert_same(phase.before.only(BODY), teacher.only(BODY))


@pytest.mark.parametrize(
    ("target", "direction"),
    [
        ("features_softmax", "teacher_student"),
        ("features_softmax", "student_teacher"),
        ("logits", "teacher_student"),
        ("features_mse", "teacher_student"),
    ],
)
def test_the_first_batch_distils_nothing(target: str, direction: str) -> None:
    """Invariant 3: from the global start the loss begins at 0 and so does its gradient, however large lam is."""
    hyper = {"target": target, "kl_direction": direction}
    one_step = {"lr": 0.2, "batch_size": 100}
    with_it, without = (go({**hyper, "lam": lam}, mlp, rounds=1, fraction=1.0, local=one_step) for lam in (100.0, 0.0))
    assert len(logged(with_it, "bsd_loss_first")) == 4
    assert all(abs(value) < 1e-6 for value in logged(with_it, "bsd_loss_first"))
    for name, tensor in without.server["body"].items():
        torch.testing.assert_close(with_it.server["body"][name], tensor, rtol=0, atol=1e-5)
    later = go({**hyper, "lam": 100.0, "body_epochs": 2}, mlp, rounds=1, fraction=1.0, local=one_step)
    assert all(value > 1e-6 for value in logged(later, "bsd_loss"))


def test_batch_statistics_make_a_first_difference() -> None:
    """Invariant 3, the other half: in train mode BatchNorm does not give what the teacher gives."""
    assert all(value > 1e-4 for value in logged(go(model=Residual), "bsd_loss_first"))


def test_the_divergence_is_one() -> None:
    """Invariant 4: never negative, 0 under a constant per sample, falling to 0 as tau grows."""
    source = torch.Generator().manual_seed(0)
    method, model = FedBSD(tau=1.0), mlp()
    for scale in (0.01, 1.0, 10.0):
        g, b = (scale * torch.randn(6, 5, generator=source, dtype=torch.double) for _ in range(2))
        assert method.distance(model, g, b) > 0
        shift = torch.randn(6, 1, generator=source)
        assert abs(method.distance(model, g, g + shift)) < 1e-6
        assert method.distance(model, g, g + torch.randn(1, 5, generator=source)) > 1e-3
        cooled = [float(FedBSD(tau=tau).distance(model, g, b)) for tau in (1.0, 10.0, 100.0, 1e4)]
        assert cooled == sorted(cooled, reverse=True)
        assert abs(cooled[-1]) < 1e-6
    assert min(logged(go({"lam": 5.0}), "bsd_loss")) > -1e-6


def test_kl_is_torchs() -> None:
    """Value and both gradients, to rounding: torch's kl_div takes the second first, as a logarithm."""
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 3, generator=source, dtype=torch.double).requires_grad_() for _ in range(2))
    log_p, log_q = (F.log_softmax(z / 3.0, dim=1) for z in (a, b))
    theirs = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    ours = kl(a, b, 3.0)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, [a, b]), torch.autograd.grad(theirs, [a, b]))


@pytest.mark.parametrize(("heads", "more"), [("init", 0), ("averaged", 2_600)])
def test_bytes_of_the_papers_network(heads: str, more: int) -> None:
    """Invariant 5: 307,842 parameters, 650 of them the head's: 4 · 307,192 = 1,228,768 B each way, 2,600 for a head."""
    done = go({"head_epochs": 1, "unseen_head": heads}, "cnn-fedrep", images(4, 4), rounds=2, fraction=0.5, seed=1)
    first, second = done.messages
    assert second.client != first.client  # so it is given the other's head, if anybody's
    assert done.result.bytes_up == 2 * (1_228_768 + more)
    assert done.result.bytes_down == 2 * 1_228_768 + more


def test_heads_never_travel() -> None:
    """Invariant 5: all but the head crosses, in both directions, and the server knows no other name."""
    done = go()
    assert all({*message.down, *message.up} == {"body"} for message in done.messages)
    assert all(message.names == BODY for message in done.messages)
    assert done.server.keys() == {"body"}
    assert done.server["body"].keys() == BODY


def test_without_body_epochs_it_is_linear_probing() -> None:
    """Invariant 6: w_g never changes, and each head is torch's SGD on the features of the initial backbone."""
    hyper, plain = {"body_epochs": 0, "head_epochs": 3}, {"lr": 0.2, "batch_size": 4, "momentum": 0.5}
    done = go(hyper, mlp, fraction=1.0, rounds=2, local=plain, exact_shortcuts=False)
    start = initial()
    assert_same(done.server["body"], start.only(done.server["body"]))
    settings = Experiment("fedbsd", DATA, mlp, rounds=2, hyper=hyper, local=plain)
    runner = Runner(settings.method, DATA, Pool([mlp()]), settings.options, task("classification"))
    for client in CLIENTS:
        probe = mlp()
        probe.load_state_dict(start)
        for round in (1, 2):
            optimizer = torch.optim.SGD(probe[-1].parameters(), lr=0.2, momentum=0.5)  # type: ignore[index]
            for batch in runner.client(client, round, {}).batches(epochs=3, stream="head"):
                optimizer.zero_grad()
                F.cross_entropy(probe(batch.x), batch.y).backward()
                optimizer.step()
        assert_same(done.personal[client], probe.state_dict())


@pytest.mark.parametrize("hyper", [{"body_epochs": 3}, {"lam": 100.0}, {"target": "logits"}, {"lam": 0.0}])
def test_without_head_epochs_heads_stay(hyper: dict[str, Any]) -> None:
    """Invariant 7: at their initial values, while the backbone moves."""
    done, start = go({"head_epochs": 0, **hyper}, mlp), initial()
    assert all(
        same(personal.only(HEAD.names(mlp())), start.only(HEAD.names(mlp()))) for personal in done.personal.values()
    )
    assert not any(same(done.server["body"][name], start[name]) for name in done.server["body"])


def test_a_client_never_chosen_keeps_its_initial_head() -> None:
    """Invariant 8: and is judged with it under the newest backbone."""
    done, start = go(rounds=1), initial(NOISY)
    unseen = set(CLIENTS) - done.states.keys()
    assert len(unseen) == 2
    for client in CLIENTS:
        assert same(done.personal[client].only(HEADS), start.only(HEADS)) == (client in unseen)
        assert_same(done.personal[client].only(BODY), done.server["body"])


def test_the_mean_of_one_client_is_what_it_sent() -> None:
    """Invariant 9: n = 1, r = 1."""
    done = go(data=blobs([12]), fraction=1.0)
    assert_same(done.server["body"], done.messages[-1].up["body"])
    assert not same(done.server["body"], done.messages[-1].down["body"])


@pytest.mark.parametrize(
    ("model", "data", "chosen"),
    [(mlp, DATA, {"fraction": 1.0}), ("cnn-small", "digits", {"clients": 20, "fraction": 0.05})],
    ids=["mlp", "cnn"],
)
def test_more_distillation_keeps_the_backbone_closer(model: Any, data: Any, chosen: dict[str, Any]) -> None:
    """Invariant 10: ||w - w_g|| falls with lam in every client; it is the distance of what is sent to what was got."""
    series = []
    for lam in (0.0, 1.0, 10.0, 100.0, 1000.0):
        local = {"lr": 0.01, "batch_size": 8}
        done = go({"lam": lam, "body_epochs": 5}, model, data, rounds=1, local=local, **chosen)
        series.append(logged(done, "drift"))
        sent = [(message.up["body"] - message.down["body"]).sqnorm().sqrt().item() for message in done.messages]
        assert series[-1] == pytest.approx(sent, rel=1e-5)
    for distances in zip(*series, strict=True):
        assert list(distances) == sorted(distances, reverse=True)
        assert distances[-1] < 0.8 * distances[0]


class Backwards(Serial):
    """The last client first."""

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        for client in sorted(call.own, reverse=True):
            yield client, self._answer(call, client)


@pytest.mark.parametrize("hyper", [{}, {"unseen_head": "averaged", "student_init": "local"}], ids=["default", "others"])
def test_order_does_not_matter(hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 11: one seed gives one result, also where clients are run in another order."""
    one, again, other = (go(hyper, seed=seed) for seed in (1, 1, 2))

    def backwards(name: str, runner: Runner, states: States) -> Backwards:
        return Backwards(runner, states)

    monkeypatch.setattr("helpers.engine", backwards)
    turned = go(hyper, seed=1)
    assert [message.client for message in turned.messages] != [message.client for message in one.messages]
    for twin in (again, turned):
        assert_same(one.server, twin.server)
        assert_same(one.states, twin.states)
        assert one.result.metrics == twin.result.metrics
        assert sorted(one.result.logs) == sorted(twin.result.logs)
    assert not same(one.server, other.server)


@pytest.mark.parametrize("heads", ["init", "averaged"])
def test_private_batchnorm_never_travels(heads: str) -> None:
    """Invariant 12: with bn = local-all no tensor of a BatchNorm is in any payload, and each client has its own."""
    done = go({"unseen_head": heads}, bn="local-all", rounds=4)
    crossed = {name for message in done.messages for name in message.names}
    assert crossed == (SHARED if heads == "averaged" else BODY) - NORM
    assert all(done.states[client]["kept"].keys() >= NORM for client in done.states)
    own = [done.personal[client]["downsample.1.running_mean"] for client in done.states]
    assert len({tuple(tensor.tolist()) for tensor in own}) == len(own) > 1


class Two(nn.Module):
    """Features z = (b0 x, b1 x), logits = H z."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor([[1.0], [-0.5]]))
            self.head.weight.copy_(torch.tensor([[0.5, -1.0], [1.0, 2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


Pair = tuple[float, float]


def softmax(z: Sequence[float], tau: float = 1.0) -> list[float]:
    powers = [math.exp(value / tau) for value in z]
    return [power / sum(powers) for power in powers]


def logits(z: Sequence[float]) -> Pair:
    return 0.5 * z[0] - z[1], z[0] + 2 * z[1]


def back(e: Sequence[float]) -> Pair:
    """A gradient with respect to the logits, with respect to the features."""
    return 0.5 * e[0] + e[1], -e[0] + 2 * e[1]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def forwards(g: Sequence[float], b: Sequence[float], tau: float) -> tuple[float, Pair]:
    """KL(P_g || P_b), and its gradient (P_b - P_g) / tau."""
    p, q = softmax(g, tau), softmax(b, tau)
    return divergence(p, q), ((q[0] - p[0]) / tau, (q[1] - p[1]) / tau)


def reversed_kl(g: Sequence[float], b: Sequence[float], tau: float) -> tuple[float, Pair]:
    """KL(P_b || P_g), and its gradient P_b (log P_b/P_g - KL) / tau."""
    p, q = softmax(g, tau), softmax(b, tau)
    value = divergence(q, p)
    first, second = (q[i] * (math.log(q[i] / p[i]) - value) / tau for i in range(2))
    return value, (first, second)


def on_logits(g: Sequence[float], b: Sequence[float], tau: float) -> tuple[float, Pair]:
    value, gradient = forwards(logits(g), logits(b), tau)
    return value, back(gradient)


def squares(g: Sequence[float], b: Sequence[float], tau: float) -> tuple[float, Pair]:
    """The mean of two squares: its gradient is the difference."""
    d = (b[0] - g[0], b[1] - g[1])
    return (d[0] ** 2 + d[1] ** 2) / 2, d


def scaled(g: Sequence[float], b: Sequence[float], tau: float) -> tuple[float, Pair]:
    value, gradient = forwards(g, b, tau)
    return tau**2 * value, (tau**2 * gradient[0], tau**2 * gradient[1])


@pytest.mark.parametrize(
    ("hyper", "term"),
    [
        ({}, forwards),
        ({"kl_direction": "student_teacher"}, reversed_kl),
        ({"target": "logits"}, on_logits),
        ({"target": "features_mse"}, squares),
        ({"tau2_scaling": True}, scaled),
    ],
    ids=["default", "student_teacher", "logits", "mse", "tau2"],
)
def test_by_hand(hyper: dict[str, Any], term: Callable[..., tuple[float, Pair]]) -> None:
    """Two clients, one sample each, two steps on the backbone at rate 1/2, lam = 3, tau = 2, the head as it began.

    With e = softmax(H z) - onehot(y) a step is b ← b - x/2 (H'e + 3 d), d the gradient of L_BSD with respect to the
    features. The server takes the simple mean. The logs are means over the two steps, the first distils nothing.
    """
    tau, lam, lr = 2.0, 3.0, 0.5
    samples = ((1.0, 0), (2.0, 1))
    ends, ce, bsd = [], [], []
    for x, y in samples:
        b: Pair = (1.0, -0.5)
        g = (b[0] * x, b[1] * x)
        entropies, terms = [], []
        for _ in range(2):
            z = (b[0] * x, b[1] * x)
            p = softmax(logits(z))
            value, d = term(g, z, tau)
            h = back([p[0] - (y == 0), p[1] - (y == 1)])
            b = (b[0] - lr * x * (h[0] + lam * d[0]), b[1] - lr * x * (h[1] + lam * d[1]))
            entropies.append(-math.log(p[y]))
            terms.append(value)
        assert abs(terms[0]) < 1e-12 < terms[1]
        ends.append(b)
        ce.append(sum(entropies) / 2)
        bsd.append(sum(terms) / 2)
    clients = federation(*(([[x]], [y]) for x, y in samples))
    settings = {"head_epochs": 0, "body_epochs": 2, "lam": lam, "tau": tau, **hyper}
    done = go(settings, Two, clients, rounds=1, fraction=1.0, local={"lr": lr, "batch_size": 8})
    sent = [message.up["body"]["body.weight"].flatten().tolist() for message in done.messages]
    assert sent == [pytest.approx(end, abs=1e-5) for end in ends]
    mean = [(ends[0][i] + ends[1][i]) / 2 for i in range(2)]
    assert done.server["body"]["body.weight"].flatten().tolist() == pytest.approx(mean, abs=1e-5)
    assert logged(done, "ce_loss") == pytest.approx(ce, abs=1e-5)
    assert logged(done, "bsd_loss") == pytest.approx(bsd, abs=1e-5)
    assert logged(done, "bsd_loss_first") == pytest.approx([0, 0], abs=1e-6)
    assert logged(done, "drift") == pytest.approx([math.dist(end, (1.0, -0.5)) for end in ends], abs=1e-5)
