"""FedBSD: its switches, its logs, where features are taken, and what it refuses.

Equality is bit for bit unless a test says otherwise. The invariants are in test_fedbsd.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fedbsd_helpers import BODY, CLIENTS, DATA, HEADS, LOCAL, NOISY, NORM, Watch, go, images, logged, watched
from helpers import Residual, assert_same, initial, mlp, same
from torch import Tensor, nn

from pfed import BACKBONE, HEAD, Experiment, Tensors, UserError, anatomy, registry
from pfed.methods.fedbsd import tapped
from pfed.record import Record


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


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
