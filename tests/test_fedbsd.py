"""FedBSD: the numbered invariants of the method, its arithmetic by hand, its switches, its logs, its bytes.

Equality is bit for bit unless a test says otherwise. Where nothing else is said, the model has dropout right before the
head and BatchNorm, the optimiser Nesterov momentum and weight decay, and half of the clients take part in a round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Residual, Run, assert_same, blobs, federation, initial, mlp, run, same
from torch import Tensor, nn

from pfed import BACKBONE, HEAD, Client, Experiment, Federation, Samples, Tensors, UserError, anatomy, registry
from pfed.client import Fit, Loss
from pfed.data.base import ClientData
from pfed.engines.base import Call, Failure, Reply, States
from pfed.engines.serial import Serial
from pfed.losses import kl
from pfed.methods.fedbsd import FedBSD, tapped
from pfed.pool import Pool
from pfed.record import Record
from pfed.runner import Runner
from pfed.tasks import task

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
CLIENTS = range(4)
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.2, "batch_size": 4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SHARED = anatomy.params(Residual()).keys()  # all that may travel
NORM = anatomy.NORM.names(Residual())
HEADS, BODY = HEAD.names(Residual()), SHARED - HEAD.names(Residual())


def go(hyper: Mapping[str, Any] | None = None, model: Any = NOISY, data: Federation = DATA, **options: Any) -> Run:
    """Three rounds with half of the clients each, judged at the end, unless the options say otherwise."""
    defaults = {"rounds": 3, "fraction": 0.5, "local": LOCAL, "eval_every": 0}
    return run("fedbsd", data, model, hyper={"head_epochs": 2, **(hyper or {})}, **{**defaults, **options})


def logged(done: Run, name: str) -> list[float]:
    """A logged number by round and client."""
    return [value for _, _, key, value in sorted(done.result.logs) if key == name]


@dataclass
class Phase:
    """One call of `fit`: what trained, on which client, and its model before and after."""

    client: int
    round: int
    head: bool
    before: Tensors
    after: Tensors
    state: dict[str, Any]  # the client's, before the phase


@dataclass
class Watch:
    """The phases of training, and each round's teacher before and after them."""

    phases: list[Phase] = field(default_factory=list)
    teachers: list[tuple[nn.Module, Tensors]] = field(default_factory=list)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen, fit, loss = Watch(), Client.fit, FedBSD.loss

    def watched_fit(client: Client, model: nn.Module, *args: Any, **settings: Any) -> Fit:
        before, state = anatomy.snapshot(model), dict(client.state)
        done = fit(client, model, *args, **settings)
        is_head = settings["only"] is HEAD
        seen.phases.append(Phase(client.id, client.round, is_head, before, anatomy.snapshot(model), state))
        if not is_head:
            teacher, as_it_was = seen.teachers[-1]
            assert_same(anatomy.snapshot(teacher), as_it_was)
            assert not any(module.training for module in teacher.modules())
            assert all(parameter.grad is None for parameter in teacher.parameters())
        return done

    def watched_loss(method: FedBSD, client: Client, teacher: nn.Module) -> Loss:
        seen.teachers.append((teacher, anatomy.snapshot(teacher)))
        return loss(method, client, teacher)

    monkeypatch.setattr(Client, "fit", watched_fit)
    monkeypatch.setattr(FedBSD, "loss", watched_loss)
    return seen


@pytest.mark.parametrize("model", [mlp, NOISY], ids=["mlp", "dropout+bn"])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_without_distillation_it_is_fedrep(model: Any, keep: bool) -> None:
    """Invariant 1: lam = 0. Server, states, personal models, messages and metrics are those of FedRep."""
    hyper = {"head_epochs": 2, "body_epochs": 2}
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


def images(*sizes: int, classes: int = 10) -> Federation:
    """Clients with random images, as large as CIFAR's."""
    source = torch.Generator().manual_seed(1)
    parts = [Samples.of(torch.randn(n, 3, 32, 32, generator=source), torch.arange(n) % classes) for n in sizes]
    clients = tuple(ClientData(f"client {i}", part, part) for i, part in enumerate(parts))
    return Federation(clients, tuple(map(str, range(classes))), parts[0])


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


def test_logs() -> None:
    """Four numbers of every client that took part."""
    done = go(model=mlp)
    for name in ("bsd_loss", "bsd_loss_first", "ce_loss", "drift"):
        found = [(round, client) for round, client, key, _ in sorted(done.result.logs) if key == name]
        assert found == [(message.round, message.client) for message in done.messages]


def test_simple_mean_or_by_samples() -> None:
    """Uniform unless told otherwise."""
    for agg, weights in (("uniform", [1, 1, 1, 1]), ("samples", [7, 12, 5, 9])):
        done = go({"agg": agg}, mlp, rounds=1, fraction=1.0)
        for name, tensor in done.server["body"].items():
            parts = [w * message.up["body"][name].double() for w, message in zip(weights, done.messages, strict=True)]
            torch.testing.assert_close(tensor.double(), torch.stack(parts).sum(0) / sum(weights), rtol=1e-6, atol=1e-7)


def test_a_local_start_goes_on_where_the_client_was(watch: Watch) -> None:
    """The head trains on the received backbone, then the own one goes on; without one it is the received one."""
    done = go({"student_init": "local"}, rounds=5)
    last: dict[int, Tensors] = {}
    again = 0
    for i, message in enumerate(done.messages):
        head, body = watch.phases[2 * i : 2 * i + 2]
        assert_same(head.before.only(BODY), message.down["body"])
        assert_same(body.before.only(BODY), last.get(message.client, message.down["body"]))
        assert_same(body.before.only(HEADS), head.after.only(HEADS))
        again += message.client in last
        last[message.client] = message.up["body"]
        assert_same(done.personal[message.client].only(BODY), done.server["body"])
    assert again


def test_a_local_start_under_private_batchnorm(watch: Watch) -> None:
    """The own BatchNorm goes on too; what is kept as the own backbone is what may travel, and no more."""
    done = go({"student_init": "local"}, rounds=5, bn="local-all")
    assert any(phase.state for phase in watch.phases)
    for phase in watch.phases:
        if not phase.head and "body" in phase.state:
            assert_same(phase.before.only(BODY), phase.state["body"] | phase.state["kept"].only(BODY & NORM))
    assert all(state["body"].keys() == BODY - NORM for state in done.states.values())


def test_the_own_backbone_is_judged() -> None:
    """A client's last upload under its head; one that was never chosen has the newest backbone and the first head."""
    done, plain = go({"eval_backbone": "local"}, rounds=2, seed=1), go(rounds=2, seed=1)
    last = {message.client: message.up["body"] for message in done.messages}
    assert set(CLIENTS) - last.keys()
    for client in CLIENTS:
        assert_same(done.personal[client].only(BODY), last.get(client, done.server["body"]))
    assert_same(done.server, plain.server)
    assert all(set(state) == {"kept"} for state in plain.states.values())


def test_averaged_heads() -> None:
    """Heads are sent; who has not taken part yet gets their mean, is judged with it and begins with it."""
    done = go({"unseen_head": "averaged", "head_epochs": 1}, mlp, rounds=4, fraction=0.25, seed=2)
    heads, body = HEAD.names(mlp()), BACKBONE.names(mlp())
    mean: Any = None
    seen: set[int] = set()
    for message in done.messages:
        assert message.up["body"].keys() == heads | body
        assert message.down["body"].keys() == body
        if message.client in seen or mean is None:
            assert message.down["head"] is None
        else:
            assert_same(message.down["head"], mean)
        mean = message.up["body"].only(heads)  # of one client a round
        seen.add(message.client)
    assert any(message.down["head"] is not None for message in done.messages)
    assert set(done.server["seen"]) == seen < set(CLIENTS)
    for client in set(CLIENTS) - seen:
        assert_same(done.personal[client].only(heads), mean)
    body_bytes, head_bytes = 4 * (4 * 5 + 5), 4 * (5 * 3 + 3)
    given = sum(message.down["head"] is not None for message in done.messages)
    assert done.result.bytes_up == 4 * (body_bytes + head_bytes)
    assert done.result.bytes_down == 4 * body_bytes + given * head_bytes


def test_a_new_client_begins_with_the_mean_head(watch: Watch) -> None:
    """Of two clients in round 1, both trained; in later rounds the first phase of a new one starts from their mean."""
    done = go({"unseen_head": "averaged"}, rounds=4)
    mean = initial(NOISY).only(HEADS)
    seen: set[int] = set()
    for round in range(1, 5):
        messages = [message for message in done.messages if message.round == round]
        for phase in watch.phases:
            if phase.head and phase.round == round and phase.client not in seen:
                assert_same(phase.before.only(HEADS), mean)
        parts = [message.up["body"] for message in messages]
        mean = Tensors({n: torch.stack([p[n].double() for p in parts]).mean(0).float() for n in HEADS})
        seen |= {message.client for message in messages}
    assert len(seen) > 2
    assert_same(done.server["head"], mean)


def test_averaged_heads_survive_a_stop(tmp_path: Path) -> None:
    """Who has been seen is in the checkpoint: a run that goes on from its middle ends as one never stopped."""
    hyper = {"head_epochs": 1, "unseen_head": "averaged"}
    settings: dict[str, Any] = {"hyper": hyper, "rounds": 4, "fraction": 0.25, "checkpoint_every": 2}
    straight, again = (Experiment("fedbsd", DATA, "mlp", local=LOCAL, **settings) for _ in range(2))
    result = straight.run(tmp_path)
    assert straight.session is not None
    folder = straight.session.store.folder
    assert folder is not None
    sorted(folder.glob("checkpoint-*"))[-1].unlink()
    record = Record(folder / "record.sqlite")
    record.set(state="stopped")
    record.close()
    resumed = again.resume(folder)
    assert again.session is not None
    assert_same(again.session.server, straight.session.server)
    assert again.session.server["seen"]
    assert resumed.metrics == result.metrics


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batchnorm_while_the_head_trains(mode: str) -> None:
    """In train mode running statistics move although the backbone is fixed; the weights never do."""
    done, start = go({"body_epochs": 0, "head_phase_bn": mode}), initial(NOISY)
    stats = BODY & anatomy.STATS.names(Residual())
    assert_same(done.server["body"].drop(stats), start.only(BODY - stats))
    assert {same(done.server["body"][name], start[name]) for name in stats} == {mode == "eval"}


class Functional(nn.Module):
    """Its dropout is a function, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(F.dropout(torch.tanh(self.body(x)), 0.5, self.training))
        return out


def dropping(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), *last, nn.Linear(5, 3))


DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)),
    "inplace": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5, inplace=True), nn.Linear(5, 3)),
    "two": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(5, 3)),
    "identity": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Identity(), nn.Flatten(), nn.Linear(5, 3)
    ),
}


@pytest.mark.parametrize("model", DROPOUT.values(), ids=DROPOUT)
@pytest.mark.parametrize("target", ["features_softmax", "features_mse", "logits"])
def test_features_are_compared_before_dropout(model: Callable[[], nn.Module], target: str) -> None:
    """Row 7d: there the first batch distils nothing; at the head's input it is noise. The start's loss is the same."""
    before, after = (
        go({"feature_tap": tap, "target": target}, model, rounds=1, local={"lr": 0.1, "batch_size": 8})
        for tap in ("before_dropout", "head_input")
    )
    assert all(abs(value) < 1e-6 for value in logged(before, "bsd_loss_first"))
    assert all(value > 1e-4 for value in logged(after, "bsd_loss_first"))


def test_dropout_that_is_not_seen() -> None:
    """A functional dropout, or one further below, leaves features at the head's input."""
    for model in (Functional, dropping):
        before, after = (go({"feature_tap": tap}, model, rounds=2) for tap in ("before_dropout", "head_input"))
        assert min(logged(before, "bsd_loss_first")) > 1e-4
        assert_same(before.server, after.server)


@pytest.mark.parametrize("inplace", [False, True])
def test_tapping_changes_nothing(inplace: bool) -> None:
    """One pass gives logits and features as without hooks, with gradients through both; no hook is left behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5, inplace=inplace), nn.Linear(5, 3))
    x, cut = torch.randn(6, 4), model[:1]
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    with tapped(model, before_dropout=True) as taken:
        out = model(x)
    assert len(taken) == 1
    assert torch.equal(out, expected)
    assert torch.equal(taken[0], cut(x))
    weight = model[0].weight
    ours = torch.autograd.grad(taken[0].square().sum() + out.sum(), weight)
    theirs = torch.autograd.grad(cut(x).square().sum() + expected.sum(), weight)
    torch.testing.assert_close(ours, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_papers_network_with_dropout() -> None:
    """CIFAR-100's has a dropout of 0.6 before the head; it runs, and its first batch distils nothing."""
    done = go({"head_epochs": 1}, "cnn-cifar100", images(4, classes=4), rounds=1)
    assert abs(logged(done, "bsd_loss_first")[0]) < 1e-6


def test_augmented_batches_feed_both() -> None:
    """Teacher and student see the same augmented images: the first batch distils nothing."""
    done = go({"head_epochs": 1}, "cnn-small", images(6), rounds=1, augment="crop-flip")
    assert abs(logged(done, "bsd_loss_first")[0]) < 1e-6


@pytest.mark.parametrize(
    ("hyper", "sentence"),
    [
        ({"lam": -1.0}, "FedBSD.lam must be >= 0. Got -1.0."),
        ({"tau": 0.0}, "FedBSD.tau must be > 0. Got 0.0."),
        ({"lam": math.inf}, "FedBSD.lam must be a number. Got inf."),
        ({"head_epochs": 1.5}, "FedBSD.head_epochs must be a whole number. Got 1.5."),
        (
            {"target": "feature"},
            "FedBSD.target must be 'features_softmax' or 'features_mse' or 'logits'. Got 'feature'.",
        ),
        (
            {"target": "features_mse", "tau2_scaling": True},
            "FedBSD: target=features_mse has no temperature and no direction; leave both as they are.",
        ),
        (
            {"target": "features_mse", "kl_direction": "student_teacher"},
            "FedBSD: target=features_mse has no temperature and no direction; leave both as they are.",
        ),
    ],
)
def test_senseless_settings_are_refused(hyper: dict[str, Any], sentence: str) -> None:
    """In one sentence, before anything runs."""
    with pytest.raises(UserError) as refused:
        registry.make("fedbsd", hyper)
    assert str(refused.value) == sentence
