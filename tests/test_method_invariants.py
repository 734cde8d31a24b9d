"""What must hold whatever the data: methods that reduce to others, switches that are off, things that never change.

Equality is bit for bit unless a test says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Residual, Run, blobs, initial, mlp, run, same
from torch import Tensor, nn

from pfed import Experiment, Federation, Tensors, UserError, anatomy
from pfed.cohort import Cohort
from pfed.method import Method
from pfed.pool import Pool
from pfed.runner import Runner
from pfed.sgd import SGD
from pfed.tasks import task

SIZES = (7, 12, 5, 9)  # with batches of 4, some are incomplete and one is a single sample
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
METHODS: dict[str, dict[str, Any]] = {
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

every_method = pytest.mark.parametrize("method", METHODS)
every_model = pytest.mark.parametrize(
    "model", [functools.partial(mlp, dropout=0.3), Residual], ids=["dropout", "batchnorm"]
)


@pytest.fixture(scope="module")
def data() -> Federation:
    return blobs(SIZES)


def go(method: str, data: Federation, model: Any = Residual, hyper: Any = None, **options: Any) -> Run:
    """Three rounds with half of the clients each, unless the options say otherwise."""
    return run(method, data, model, hyper=hyper, **{"rounds": 3, "fraction": 0.5, "local": LOCAL, **options})


def norm_names(tensors: Any) -> set[str]:
    return {name for name in tensors if name.startswith(("bn1.", "downsample.1."))}


def distance(a: Tensors, b: Tensors) -> float:
    names = [name for name, tensor in a.items() if tensor.is_floating_point()]
    return float((Tensors(a).only(names) - Tensors(b).only(names)).sqnorm().sqrt())


# All methods


@every_method
def test_no_round_is_the_initial_model(method: str, data: Federation) -> None:
    """T = 0: server and clients hold the model that the run's seed draws, and nobody was asked for anything."""
    hyper = {"ft_epochs": 0} if method.endswith("+ft") else METHODS[method]
    done = go(method, data, hyper=hyper, rounds=0)
    start = initial(Residual)
    assert all(same(tensors, start.only(tensors)) for tensors in done.server.values())
    assert all(same(done.personal[client], start) for client in range(len(SIZES)))
    assert done.result.bytes_up == 0


@every_method
def test_no_epoch_changes_nothing(method: str, data: Federation) -> None:
    """E = 0: everybody takes part, nothing moves; so the weights of the mean sum to 1."""
    hyper = {"fedrep": {"head_epochs": 0, "body_epochs": 0}, "fedavg+ft": {"ft_epochs": 0}}.get(method, METHODS[method])
    done = go(method, data, hyper=hyper, local={"epochs": 0}, fraction=1.0)
    start = initial(Residual)
    assert done.messages
    assert all(same(tensors, start.only(tensors)) for tensors in done.server.values())
    assert all(same(done.personal[client], start) for client in range(len(SIZES)))


@every_method
def test_one_client(method: str) -> None:
    """N = 1: the run goes through, and the client's model has learned something."""
    done = go(method, blobs([12]), hyper=METHODS[method])
    assert done.result.state == "complete"
    assert not same(done.personal[0], initial(Residual))


@every_method
@every_model
def test_a_seed_gives_one_result(method: str, model: Any, data: Federation) -> None:
    """The same seed gives the same bits, another seed others; dropout and batches are drawn by the seed, too."""
    quiet = pytest.warns(UserWarning, match="no BatchNorm") if _warns(method, model) else _silence()
    with quiet:
        one, again, other = (go(method, data, model, METHODS[method], seed=seed) for seed in (1, 1, 2))
    assert same(one.server, again.server)
    assert same(one.states, again.states)
    assert one.result.metrics == again.result.metrics
    assert not same(one.personal, other.personal)


@pytest.mark.parametrize("method", ["fedrep", "ditto"])
@every_model
def test_serial_and_debug_agree(method: str, model: Any, data: Federation) -> None:
    """Sending everything through bytes changes no bit."""
    serial, debug = (go(method, data, model, METHODS[method], engine=engine) for engine in ("serial", "debug"))
    assert same(serial.server, debug.server)
    assert same(serial.states, debug.states)


@every_method
def test_unsampled_clients_are_untouched(method: str, data: Federation) -> None:
    """The state of a client that is not chosen in round 3 is that after round 2."""
    if method in ("all", "fedavg+ft"):
        pytest.skip("all: no clients take part; +ft: all of them do at the end")
    hyper = {"matched_participation": True} if method == "local" else METHODS[method]
    before, after = (go(method, data, hyper=hyper, rounds=rounds) for rounds in (2, 3))
    chosen = {message.client for message in after.messages if message.round == 3}
    idle = before.states.keys() - chosen
    assert len(chosen) == 2
    assert idle
    assert all(before.states[client] and same(before.states[client], after.states[client]) for client in idle)
    assert not any(same(before.states.get(client), after.states[client]) for client in chosen)


def _warns(method: str, model: Any) -> bool:
    return method in ("fedbn", "silobn") and model is not Residual


def _silence() -> Any:
    import contextlib

    return contextlib.nullcontext()


# FedAvg


@pytest.mark.parametrize("keep", [False, True])
def test_fedavg_with_one_client_is_sequential_sgd(keep: bool) -> None:
    """One client: torch's own SGD on the same batches, its momentum forgotten after each round unless it is kept."""
    data, rounds = blobs([11]), 3
    experiment = Experiment("fedavg", data, Residual, rounds=rounds, local=LOCAL)
    model = Residual()
    model.load_state_dict(initial(Residual))
    runner = Runner(experiment.method, data, Pool([model]), experiment.options, task("classification"))
    optimizer = _torch_sgd(model)
    for round in range(1, rounds + 1):
        optimizer = optimizer if keep else _torch_sgd(model)
        for batch in runner.client(0, round, {}).batches(epochs=2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
    done = go("fedavg", data, rounds=rounds, keep_optimizer=keep)
    assert same(done.personal[0], model.state_dict())


def _torch_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)


def test_fedavg_of_full_batches_is_gradient_descent() -> None:
    """One full-batch step and equal sizes: gradient descent on the mean of the clients' losses (up to rounding)."""
    data = blobs([6, 6, 6])
    model = mlp()
    model.load_state_dict(initial())
    for _ in range(3):
        losses = [F.cross_entropy(model(x), y) for x, y in (client.train.take() for client in data.clients)]
        gradients = torch.autograd.grad(sum(losses, torch.zeros(())) / 3, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    done = go("fedavg", data, mlp, fraction=1.0, local={"lr": 0.5, "batch_size": 6})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(done.server["params"][name], tensor, rtol=1e-5, atol=1e-6)


# FedProx


@every_model
def test_fedprox_without_pull_is_fedavg(model: Any, data: Federation) -> None:
    prox, avg = go("fedprox", data, model, {"mu": 0.0}), go("fedavg", data, model)
    assert same(prox.server, avg.server)
    assert same(prox.states, avg.states)


@every_model
def test_first_fedprox_step_is_fedavgs(model: Any, data: Federation) -> None:
    """The proximal term and its gradient are zero at the start; the second step differs."""
    full = {"lr": 0.2, "batch_size": 100}
    prox, avg = (
        [go(method, data, model, rounds=1, local={**full, "epochs": e}).server for e in (1, 2)]
        for method in ("fedprox", "fedavg")
    )
    assert same(prox[0], avg[0])
    assert not same(prox[1], avg[1])


def test_more_pull_keeps_clients_closer(data: Federation) -> None:
    """‖w_k - w‖ falls with mu in every client, while lr · mu < 1."""
    local = {"lr": 0.2, "batch_size": 4, "epochs": 5}
    distances = []
    for mu in (0.0, 0.1, 1.0, 4.0):
        messages = go("fedprox", data, mlp, {"mu": mu}, rounds=1, fraction=1.0, local=local).messages
        distances.append([distance(message.up["params"], message.down["params"]) for message in messages])
    for client in range(len(SIZES)):
        series = [row[client] for row in distances]
        assert series == sorted(series, reverse=True)
        assert series[-1] < 0.5 * series[0]


# Ditto


@every_model
def test_ditto_without_pull_is_local(model: Any, data: Federation) -> None:
    """lam = 0: the personal models are those of Local, whose clients train in the same rounds."""
    ditto = go("ditto", data, model, {"lam": 0.0})
    local = go("local", data, model, {"matched_participation": True}, keep_optimizer=False)
    assert same(ditto.personal, local.personal)


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@every_model
def test_dittos_global_branch_is_fedavg(model: Any, keep: bool, lam: float, data: Federation) -> None:
    """Whatever lam, and whether momentum is kept over rounds or not."""
    ditto = go("ditto", data, model, {"lam": lam}, keep_optimizer=keep)
    assert same(ditto.server, go("fedavg", data, model, keep_optimizer=keep).server)


# LG-FedAvg and FedPer


@every_model
def test_lg_fedavg_sharing_all_is_fedavg(model: Any, data: Federation) -> None:
    lg, avg = go("lg-fedavg", data, model, {"shared": 99}), go("fedavg", data, model, {"agg": "uniform"})
    assert same(lg.server["top"], avg.server["params"])
    assert same(lg.personal, avg.personal)


@every_model
def test_lg_fedavg_sharing_nothing_is_local(model: Any, data: Federation) -> None:
    lg = go("lg-fedavg", data, model, {"shared": 0})
    local = go("local", data, model, {"matched_participation": True}, keep_optimizer=False)
    assert same(lg.personal, local.personal)
    assert lg.result.bytes_up == lg.result.bytes_down == 0


def test_lg_fedavg_shares_from_the_top_or_as_the_authors_code(data: Federation) -> None:
    """A layer counts with the BatchNorm that follows it."""
    first = {f"fc1.{n}" for n in ("weight", "bias")} | {
        f"bn1.{n}" for n in ("weight", "bias", "running_mean", "running_var")
    }
    for variant, names in {"paper_top": {"fc.weight", "fc.bias"}, "authors_code": first}.items():
        done = go("lg-fedavg", data, hyper={"shared": 1, "lg_variant": variant})
        assert {name for message in done.messages for name in message.names} == names


@every_model
def test_fedper_with_nothing_private_is_fedavg(model: Any, data: Federation) -> None:
    per, avg = go("fedper", data, model, {"private": 0}), go("fedavg", data, model)
    assert same(per.server["base"], avg.server["params"])
    assert same(per.personal, avg.personal)


def test_lg_fedavg_shares_what_fedper_keeps(data: Federation) -> None:
    """With the head alone shared, and with the head alone private, the two halves make one model."""
    lg, per = go("lg-fedavg", data, hyper={"shared": 1}), go("fedper", data)
    assert not lg.server["top"].keys() & per.server["base"].keys()
    assert lg.server["top"].keys() | per.server["base"].keys() == anatomy.params(Residual()).keys()


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_heads_never_travel(method: str, data: Federation) -> None:
    """The head is in no message, and each client that took part has its own."""
    done = go(method, data, hyper=METHODS[method])
    names = {name for message in done.messages for name in message.names}
    assert names == anatomy.params(Residual()).keys() - {"fc.weight", "fc.bias"}
    heads = [done.personal[client]["fc.weight"] for client in {message.client for message in done.messages}]
    assert len({tuple(head.flatten().tolist()) for head in heads}) == len(heads) > 1


# FedRep


@every_model
def test_fedrep_without_head_epochs_keeps_heads(model: Any, data: Federation) -> None:
    """Heads stay at their initial values; the body still learns."""
    done = go("fedrep", data, model, {"head_epochs": 0})
    start = initial(model)
    heads = anatomy.HEAD.names(model())
    assert all(same(personal.only(heads), start.only(heads)) for personal in done.personal.values())
    assert not same(done.server["body"], start.only(done.server["body"]))


@every_model
def test_fedrep_without_body_epochs_keeps_the_body(model: Any, data: Federation) -> None:
    """The body stays at its initial values, running statistics too: it is in eval mode while the head trains."""
    done = go("fedrep", data, model, {"head_epochs": 2, "body_epochs": 0})
    start, body = initial(model), anatomy.BACKBONE.names(model())
    assert same(done.server["body"], start.only(done.server["body"]))
    assert all(same(personal.only(body), start.only(body)) for personal in done.personal.values())
    assert not same(done.personal, dict.fromkeys(done.personal, start))


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


def test_exact_shortcuts_are_exact(data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the frozen body are computed once instead of in each of ten epochs; results agree within 1e-5."""
    on_off, seen = [], []
    for shortcuts in (True, False):
        monkeypatch.setattr(Counting, "seen", 0)
        options = {"rounds": 1, "fraction": 1.0, "exact_shortcuts": shortcuts}
        on_off.append(go("fedrep", data, Counting, {"head_epochs": 10}, **options))
        seen.append(Counting.seen)
    assert seen[1] - seen[0] > 8 * sum(SIZES)
    for client in range(len(SIZES)):
        for name, tensor in on_off[0].personal[client].items():
            other = on_off[1].personal[client][name]
            assert (tensor - other).norm() <= 1e-5 * other.norm()


# FedBN and SiloBN


@pytest.mark.parametrize(("method", "agg"), [("fedbn", "uniform"), ("silobn", "samples")])
def test_without_batchnorm_they_are_fedavg(method: str, agg: str, data: Federation) -> None:
    """And say so."""
    with pytest.warns(UserWarning, match=r"BN: the model has no BatchNorm layer to keep, so this is FedAvg\."):
        done = go(method, data, mlp)
    avg = go("fedavg", data, mlp, {"agg": agg})
    assert same(done.server, avg.server)
    assert same(done.states, avg.states)


@pytest.mark.parametrize("agg", ["uniform", "samples"])
@pytest.mark.parametrize(("method", "policy"), [("fedbn", "local-all"), ("silobn", "local-stats")])
def test_they_are_fedavg_under_a_policy(method: str, policy: str, agg: str, data: Federation) -> None:
    """The run's `bn` policy does to FedAvg what the method does."""
    done, avg = go(method, data, hyper={"agg": agg}), go("fedavg", data, hyper={"agg": agg}, bn=policy)
    assert same(done.server, avg.server)
    assert same(done.states, avg.states)
    assert same(done.personal, avg.personal)


def test_batchnorm_is_known_by_its_type(data: Federation) -> None:
    """`downsample.1` is a BatchNorm, too: FedBN sends nothing of it, SiloBN only its affine parameters."""
    everything = norm_names(anatomy.params(Residual()))
    assert {name.rpartition(".")[0] for name in everything} == {"bn1", "downsample.1"}
    statistics = {name for name in everything if "running" in name}
    for method, private in {"fedavg": set(), "fedbn": everything, "silobn": statistics}.items():
        sent = {name for message in go(method, data).messages for name in message.names}
        assert norm_names(sent) == everything - private
        assert sent - everything == {
            f"{layer}.{n}" for layer in ("fc1", "downsample.0", "fc") for n in ("weight", "bias")
        }


# Fine-tuning


@pytest.mark.parametrize("base", ["fedavg", "fedper", "ditto"])
@every_model
def test_no_fine_tuning_is_the_base_method(base: str, model: Any, data: Federation) -> None:
    tuned, plain = go(f"{base}+ft", data, model, {"ft_epochs": 0}), go(base, data, model)
    assert same(tuned.server, plain.server)
    assert same(tuned.personal, plain.personal)
    assert tuned.result.metrics["personal/local-test"] == plain.result.metrics["personal/local-test"]


@pytest.mark.parametrize("base", ["fedavg", "fedper", "ditto"])
@every_model
def test_fine_tuning_heads_leaves_backbones(base: str, model: Any, data: Federation) -> None:
    """Bit for bit, running statistics included; every client's head is tuned, also of those never chosen before."""
    tuned, plain = go(f"{base}+ft", data, model, {"ft_epochs": 3}), go(base, data, model)
    head, backbone = anatomy.HEAD.names(model()), anatomy.BACKBONE.names(model())
    assert same(tuned.server, plain.server)
    for client in range(len(SIZES)):
        assert same(tuned.personal[client].only(backbone), plain.personal[client].only(backbone))
        assert not same(tuned.personal[client].only(head), plain.personal[client].only(head))


def test_fine_tuning_all_changes_backbones(data: Federation) -> None:
    tuned, plain = go("fedavg+ft", data, hyper={"ft_epochs": 1, "ft_scope": "all"}), go("fedavg", data)
    assert all(not same(tuned.personal[c]["fc1.weight"], plain.personal[c]["fc1.weight"]) for c in range(len(SIZES)))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step:0.5,0.75"])
def test_fine_tuning_learns_under_every_schedule(schedule: str, data: Federation) -> None:
    """The learning rate of training has not fallen to zero when fine-tuning begins."""
    local = {**LOCAL, "schedule": schedule}
    tuned, plain = go("fedavg+ft", data, hyper={"ft_epochs": 3}, local=local), go("fedavg", data, local=local)
    assert all(not same(tuned.personal[c]["fc.weight"], plain.personal[c]["fc.weight"]) for c in range(len(SIZES)))


def test_fine_tuning_sends_nothing(data: Federation) -> None:
    done = go("fedavg+ft", data, hyper={"ft_epochs": 1})
    last = [message for message in done.messages if message.step == "finetune"]
    assert [message.client for message in last] == [0, 1, 2, 3]
    assert not any(message.up for message in last)


# Several architectures


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def test_different_architectures(data: Federation) -> None:
    """Refused in one sentence by a method that averages whole models; each its own where nothing is averaged."""
    with pytest.raises(UserError) as refused:
        go("fedavg", data, [mlp, wide])
    assert str(refused.value) == "fedavg needs the same architecture at every client. Got 2 different ones."
    done = go("local", data, [mlp, wide])
    assert [len(done.personal[client]["0.weight"]) for client in range(len(SIZES))] == [5, 7, 5, 7]
    assert not same(done.personal[0], done.personal[2])


# SGD


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool, weight_decay: float) -> None:
    """Five steps; the third parameter has a gradient only in every second. Momentum stored and given back goes on."""
    ours, theirs = ({n: p.detach().requires_grad_() for n, p in _parameters()} for _ in range(2))
    settings = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    torch_sgd, sgd = torch.optim.SGD(theirs.values(), lr=0.3, **settings), SGD(ours, 0.3, **settings)
    for step, gradients in enumerate(_gradients()):
        if step == 3:
            sgd = SGD(ours, 0.3, **settings, buffers=sgd.buffers)
        sgd.zero_grad()
        torch_sgd.zero_grad()
        for (name, gradient), parameters in ((item, p) for item in gradients.items() for p in (ours, theirs)):
            parameters[name].grad = gradient.clone()
        sgd.step()
        torch_sgd.step()
        assert same(ours, theirs), step


def _parameters() -> Iterator[tuple[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return ((name, torch.randn(shape, generator=source)) for name, shape in {"a": (3, 4), "b": (4,), "c": (5,)}.items())


def _gradients() -> Iterator[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    for step in range(5):
        drawn = {"a": torch.randn(3, 4, generator=source), "b": torch.randn(4, generator=source)}
        yield drawn if step % 2 else {**drawn, "c": torch.randn(5, generator=source)}
