"""What must hold whatever the data: methods that reduce to others, switches that are off, things that never change.

Equality is bit for bit unless a test says otherwise. Where nothing else is said, the model has dropout and
BatchNorm, the optimiser Nesterov momentum and weight decay, and half of the clients take part in a round.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Residual, Run, assert_same, blobs, initial, mlp, run, same
from torch import Tensor, nn

from pfed import Client, Cohort, Experiment, Federation, Method, Tensors, UserError, anatomy, step
from pfed.pool import Pool
from pfed.runner import Runner
from pfed.sgd import SGD
from pfed.tasks import task
from pfed.wire import State

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
CLIENTS = range(4)
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
HYPER: dict[str, dict[str, Any]] = {
    "local": {},
    "all": {},
    "fedavg": {},
    "fedprox": {},
    "fedper": {},
    "lg-fedavg": {"shared": 1},
    "fedrep": {"head_epochs": 2},
    "fedbn": {},
    "silobn": {},
    "ditto": {},
    "fedavg+ft": {"ft_epochs": 2},
}
HEAD, BACKBONE = anatomy.HEAD.names(Residual()), anatomy.BACKBONE.names(Residual())
ALL = anatomy.params(Residual()).keys()  # all that may travel
NORM = {name for name in ALL if name.startswith(("bn1.", "downsample.1."))}

every_method = pytest.mark.parametrize("method", HYPER)


def go(method: str, hyper: Any = None, model: Any = NOISY, data: Federation = DATA, **options: Any) -> Run:
    """Three rounds with half of the clients each, judged at the end, unless the options say otherwise."""
    defaults = {"rounds": 3, "fraction": 0.5, "local": LOCAL, "eval_every": 0}
    return run(method, data, model, hyper=HYPER.get(method) if hyper is None else hyper, **{**defaults, **options})


def sent(done: Run) -> set[str]:
    """The names of all tensors that were in any message."""
    return {name for message in done.messages for name in message.names}


@every_method
def test_no_epoch_changes_nothing(method: str) -> None:
    """E = 0: all take part and nothing moves. So the weights of the mean sum to 1."""
    none = {"fedrep": {"head_epochs": 0, "body_epochs": 0}, "fedavg+ft": {"ft_epochs": 0}}
    done = go(method, none.get(method), local={"epochs": 0}, fraction=1.0)
    start = initial(NOISY)
    assert done.messages
    assert_same(done.server, {name: start.only(tensors) for name, tensors in done.server.items()})
    assert_same(done.personal, dict.fromkeys(CLIENTS, start))


@every_method
def test_a_seed_gives_one_result(method: str) -> None:
    """The same seed gives the same bits, another seed others."""
    one, again, other = (go(method, seed=seed) for seed in (1, 1, 2))
    assert_same(one.server, again.server)
    assert_same(one.states, again.states)
    assert one.result.metrics == again.result.metrics
    assert not same(one.personal, other.personal)


def test_the_seed_orders_batches() -> None:
    """With the same initial model, all clients and no dropout, only the order of the samples is left to chance."""
    model = mlp()
    one, again, other = (go("fedavg", model=model, fraction=1.0, seed=seed) for seed in (1, 1, 2))
    assert_same(one.server, again.server)
    assert not same(one.server, other.server)


@pytest.mark.parametrize("method", ["fedrep", "ditto"])
def test_serial_and_debug_agree(method: str) -> None:
    """Sending everything through bytes changes no bit."""
    serial, debug = (go(method, engine=engine) for engine in ("serial", "debug"))
    assert_same(serial.server, debug.server)
    assert_same(serial.states, debug.states)


@pytest.mark.parametrize("method", [method for method in HYPER if method not in ("all", "fedavg+ft")])
def test_unsampled_clients_are_untouched(method: str) -> None:
    """A client that is not chosen in round 3 has afterwards the state that it had after round 2."""
    hyper = {"matched_participation": True} if method == "local" else None
    before, after = (go(method, hyper, rounds=rounds) for rounds in (2, 3))
    chosen = {message.client for message in after.messages if message.round == 3}
    idle = before.states.keys() - chosen
    assert len(chosen) == 2
    assert idle
    assert all(before.states[client] and same(before.states[client], after.states[client]) for client in idle)
    assert not any(same(before.states.get(client), after.states[client]) for client in chosen)


@dataclass(frozen=True)
class Tally(Method):
    """Counts a client's steps in its state; that of client 0 in round 2 breaks, but only after it has counted."""

    def init(self, model: nn.Module) -> State:
        return {}

    def download(self, server: State) -> dict[str, Any]:
        return {}

    def round(self, server: State, cohort: Cohort) -> None:
        cohort.call(self.count)

    @step
    def count(self, client: Client) -> None:
        tally = client.state.setdefault("tally", {"steps": 0})
        tally["steps"] += 1
        if (client.id, client.round) == (0, 2):
            raise ValueError("broken")

    def predictor(self, client: Client) -> nn.Module:
        return client.model()


def test_a_broken_step_leaves_no_trace() -> None:
    """After three rounds the client whose second step broke has counted two, as if that step had not been."""
    experiment = Experiment(Tally(), DATA, mlp, rounds=3)
    experiment.run()
    session = experiment.session
    assert session is not None
    states = {client: session.store.states.load(client, v) for client, v in session.exchange.versions.items()}
    assert states == {client: {"tally": {"steps": 2 if client == 0 else 3}} for client in CLIENTS}


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_fedavg_with_one_client_is_sequential_sgd(keep: bool) -> None:
    """torch's own SGD on the same batches; its momentum is forgotten after each round unless the run keeps it."""
    data = blobs([11])
    experiment = Experiment("fedavg", data, Residual, rounds=3, local=LOCAL)
    runner = Runner(experiment.method, data, Pool([Residual()]), experiment.options, task("classification"))
    model = Residual()
    model.load_state_dict(initial(Residual))
    optimizer = _torch_sgd(model)
    for round in (1, 2, 3):
        optimizer = optimizer if keep else _torch_sgd(model)
        for batch in runner.client(0, round, {}).batches(epochs=2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
    done = go("fedavg", model=Residual, data=data, keep_optimizer=keep)
    assert_same(done.personal[0], model.state_dict())
    assert ("momentum" in done.states[0]) == keep


def _torch_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)


def test_fedavg_of_full_batches_is_gradient_descent() -> None:
    """One full batch a round and equal sizes: gradient descent on the mean of the clients' losses, up to rounding."""
    data = blobs([6, 6, 6])
    model = mlp()
    model.load_state_dict(initial(mlp))
    for _ in range(3):
        losses = [F.cross_entropy(model(x), y) for x, y in (client.train.take() for client in data.clients)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    done = go("fedavg", model=mlp, data=data, fraction=1.0, local={"lr": 0.5, "batch_size": 6})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(done.server["params"][name], tensor, rtol=1e-5, atol=1e-6)


def test_fedprox_without_pull_is_fedavg() -> None:
    """mu = 0."""
    prox, avg = go("fedprox", {"mu": 0.0}), go("fedavg")
    assert_same(prox.server, avg.server)
    assert_same(prox.states, avg.states)


def test_first_fedprox_step_is_fedavgs() -> None:
    """The pull is zero where it starts from; from the second step on it is not."""
    one, two = ({"lr": 0.2, "batch_size": 100, "epochs": epochs} for epochs in (1, 2))
    assert_same(go("fedprox", rounds=1, local=one).server, go("fedavg", rounds=1, local=one).server)
    assert not same(go("fedprox", rounds=1, local=two).server, go("fedavg", rounds=1, local=two).server)


def test_more_pull_keeps_clients_closer() -> None:
    """‖w_k - w‖ falls with mu in every client, while lr · mu < 1."""
    series: list[list[float]] = [[] for _ in CLIENTS]
    for mu in (0.0, 0.1, 1.0, 4.0):
        local = {"lr": 0.2, "batch_size": 4, "epochs": 5}
        for message in go("fedprox", {"mu": mu}, mlp, rounds=1, fraction=1.0, local=local).messages:
            difference: Tensors = message.up["params"] - message.down["params"]
            series[message.client].append(float(difference.sqnorm().sqrt()))
    for distances in series:
        assert distances == sorted(distances, reverse=True)
        assert distances[-1] < 0.5 * distances[0]


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_ditto_without_pull_is_local(keep: bool) -> None:
    """lam = 0: the personal models are those of Local, if its clients train in the same rounds."""
    ditto = go("ditto", {"lam": 0.0}, keep_optimizer=keep)
    local = go("local", {"matched_participation": True}, keep_optimizer=keep)
    assert_same(ditto.personal, local.personal)


@pytest.mark.parametrize(("lam", "keep"), [(0.0, False), (0.5, False), (2.0, False), (0.5, True)])
def test_dittos_global_branch_is_fedavg(lam: float, keep: bool) -> None:
    """Whatever lam, and whether momentum is kept over rounds or not."""
    ditto, avg = go("ditto", {"lam": lam}, keep_optimizer=keep), go("fedavg", keep_optimizer=keep)
    assert_same(ditto.server, avg.server)


def test_lg_fedavg_sharing_all_is_fedavg() -> None:
    """With the simple mean."""
    lg, avg = go("lg-fedavg", {"shared": 99}), go("fedavg", {"agg": "uniform"})
    assert_same(lg.server["top"], avg.server["params"])
    assert_same(lg.personal, avg.personal)


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_lg_fedavg_sharing_nothing_is_local(keep: bool) -> None:
    """If Local's clients train in the same rounds. Nothing is sent."""
    lg = go("lg-fedavg", {"shared": 0}, keep_optimizer=keep)
    local = go("local", {"matched_participation": True}, keep_optimizer=keep)
    assert_same(lg.personal, local.personal)
    assert lg.result.bytes_up == lg.result.bytes_down == 0


def test_lg_fedavg_shares_from_the_top_or_as_the_authors_code() -> None:
    """A layer counts with the BatchNorm that follows it."""
    assert sent(go("lg-fedavg", {"shared": 1})) == {"fc.weight", "fc.bias"}
    bottom = sent(go("lg-fedavg", {"shared": 1, "lg_variant": "authors_code"}))
    assert bottom == {name for name in ALL if name.startswith(("fc1.", "bn1."))}


def test_fedper_with_nothing_private_is_fedavg() -> None:
    """private = 0."""
    per, avg = go("fedper", {"private": 0}), go("fedavg")
    assert_same(per.server["base"], avg.server["params"])
    assert_same(per.personal, avg.personal)


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_heads_never_travel(method: str) -> None:
    """All but the head is sent, and every client that took part has a head of its own."""
    done = go(method)
    assert sent(done) == ALL - HEAD
    heads = [done.personal[client]["fc.weight"] for client in done.states]
    assert len({tuple(head.flatten().tolist()) for head in heads}) == len(heads) > 1


def test_lg_fedavg_shares_what_fedper_keeps() -> None:
    """With the head alone shared in the one, and alone private in the other, what they send makes one model."""
    top, base = sent(go("lg-fedavg", {"shared": 1})), sent(go("fedper"))
    assert not top & base
    assert top | base == ALL


def test_fedrep_without_head_epochs_keeps_heads() -> None:
    """Heads stay at their initial values; the body does not."""
    done, start = go("fedrep", {"head_epochs": 0}), initial(NOISY)
    assert all(same(personal.only(HEAD), start.only(HEAD)) for personal in done.personal.values())
    assert not any(same(done.server["body"][name], start[name]) for name in ALL - HEAD)


def test_fedrep_without_body_epochs_keeps_the_body() -> None:
    """The body stays at its initial values, running statistics too: it is in eval mode while the head trains."""
    done, start = go("fedrep", {"head_epochs": 2, "body_epochs": 0}), initial(NOISY)
    assert_same(done.server["body"], start.only(done.server["body"]))
    assert all(same(personal.only(BACKBONE), start.only(BACKBONE)) for personal in done.personal.values())
    assert not any(same(done.personal[client].only(HEAD), start.only(HEAD)) for client in done.states)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_fedrep_batchnorm_while_the_head_trains(mode: str) -> None:
    """In train mode the head is fitted to features as each batch normalises them, and running statistics move."""
    done, start = go("fedrep", {"head_epochs": 2, "body_epochs": 0, "head_phase_bn": mode}), initial(NOISY)
    stats = ALL & anatomy.STATS.names(Residual())
    assert_same(done.server["body"].drop(stats), start.only(ALL - HEAD - stats))
    assert {same(done.server["body"][name], start[name]) for name in stats} == {mode == "eval"}


class Counting(nn.Module):
    """An MLP that counts the samples that pass its body."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        Counting.seen += len(x)
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_exact_shortcuts_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen body runs once instead of in each of ten epochs; after a round all agree within 1e-5 (relative)."""
    runs, seen = [], []
    for shortcuts in (True, False):
        monkeypatch.setattr(Counting, "seen", 0)
        options = {"rounds": 1, "fraction": 1.0, "exact_shortcuts": shortcuts}
        runs.append(go("fedrep", {"head_epochs": 10}, Counting, **options))
        seen.append(Counting.seen)
    assert seen[1] - seen[0] > 8 * sum(len(client.train) for client in DATA.clients)
    for client in CLIENTS:
        for name, tensor in runs[1].personal[client].items():
            assert (runs[0].personal[client][name] - tensor).norm() <= 1e-5 * tensor.norm()


@pytest.mark.parametrize(("method", "agg"), [("fedbn", "uniform"), ("silobn", "samples")])
def test_fedbn_and_silobn_without_batchnorm_are_fedavg(method: str, agg: str) -> None:
    """And say so."""
    with pytest.warns(UserWarning, match=r"BN: the model has no BatchNorm layer to keep, so this is FedAvg\."):
        done = go(method, model=mlp)
    avg = go("fedavg", {"agg": agg}, mlp)
    assert_same(done.server, avg.server)
    assert_same(done.states, avg.states)


@pytest.mark.parametrize("agg", ["uniform", "samples"])
@pytest.mark.parametrize(("method", "policy"), [("fedbn", "local-all"), ("silobn", "local-stats")])
def test_fedbn_and_silobn_are_fedavg_under_a_policy(method: str, policy: str, agg: str) -> None:
    """The run's `bn` does to FedAvg what the methods do."""
    done, avg = go(method, {"agg": agg}), go("fedavg", {"agg": agg}, bn=policy)
    assert_same(done.server, avg.server)
    assert_same(done.states, avg.states)
    assert_same(done.personal, avg.personal)


def test_batchnorm_is_known_by_its_type() -> None:
    """`downsample.1` is a BatchNorm, too: FedBN sends nothing of it, SiloBN only its affine parameters."""
    assert len(NORM) == 8
    assert sent(go("fedavg")) == ALL
    assert sent(go("fedbn")) == ALL - NORM
    assert sent(go("silobn")) == {name for name in ALL if "running" not in name}


@pytest.mark.parametrize("base", ["fedavg", "fedbn", "ditto"])
def test_no_fine_tuning_is_the_base_method(base: str) -> None:
    """ft_epochs = 0."""
    tuned, plain = go(f"{base}+ft", {"ft_epochs": 0}), go(base)
    assert_same(tuned.server, plain.server)
    assert_same(tuned.personal, plain.personal)
    assert tuned.result.values == plain.result.values


@pytest.mark.parametrize("base", ["fedavg", "fedper", "ditto"])
def test_fine_tuning_heads_leaves_backbones(base: str) -> None:
    """Running statistics included. Every client's head is tuned, also that of a client that never was chosen."""
    tuned, plain = go(f"{base}+ft", {"ft_epochs": 3}, rounds=1), go(base, rounds=1)
    assert_same(tuned.server, plain.server)
    for client in CLIENTS:
        assert_same(tuned.personal[client].only(BACKBONE), plain.personal[client].only(BACKBONE))
        assert not same(tuned.personal[client].only(HEAD), plain.personal[client].only(HEAD))


def test_fine_tuning_all_changes_backbones() -> None:
    """ft_scope = all."""
    tuned, plain = go("fedavg+ft", {"ft_epochs": 1, "ft_scope": "all"}), go("fedavg")
    assert not any(
        same(tuned.personal[client][name], plain.personal[client][name]) for client in CLIENTS for name in ALL
    )


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step:0.5,0.75"])
def test_fine_tuning_learns_under_every_schedule(schedule: str) -> None:
    """The learning rate must not have fallen to zero when fine-tuning begins."""
    local = {**LOCAL, "schedule": schedule}
    tuned, plain = go("fedavg+ft", {"ft_epochs": 3}, local=local), go("fedavg", local=local)
    assert not any(same(tuned.personal[client].only(HEAD), plain.personal[client].only(HEAD)) for client in CLIENTS)


def test_fine_tuning_sends_nothing() -> None:
    """All clients tune, after the last round."""
    last = [message for message in go("fedavg+ft").messages if message.step == "finetune"]
    assert [(message.round, message.client, message.up) for message in last] == [(4, client, {}) for client in CLIENTS]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def test_different_architectures() -> None:
    """Refused in one sentence by a method that averages whole models; each its own where nothing is averaged."""
    with pytest.raises(UserError) as refused:
        go("fedavg", model=[mlp, wide])
    assert str(refused.value) == "fedavg needs the same architecture at every client. Got 2 different ones."
    done = go("local", model=[mlp, wide])
    assert [len(done.personal[client]["0.weight"]) for client in CLIENTS] == [5, 7, 5, 7]
    assert not same(done.personal[0], done.personal[2])


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool, weight_decay: float) -> None:
    """Five steps. `c` has a gradient in every second only; momentum that was stored and given back goes on."""
    ours, theirs = ({name: tensor.requires_grad_() for name, tensor in _draw(0).items()} for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.3, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    sgd, reference = SGD(ours, **settings), torch.optim.SGD(theirs.values(), **settings)
    for i in range(5):
        if i == 3:
            sgd = SGD(ours, **settings, buffers=sgd.buffers)
        sgd.zero_grad()
        reference.zero_grad()
        for name, gradient in _draw(i + 1).items():
            if name != "c" or i % 2 == 0:
                ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        sgd.step()
        reference.step()
        assert_same(ours, theirs)


def _draw(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in {"a": (3, 4), "b": (4,), "c": (5,)}.items()}
