"""PartialFed-Adaptive in runs: identities, what is sent, kept, tuned and logged. Numbers: the spec's.

Where nothing else is said the model has BatchNorm and dropout, the optimiser Nesterov momentum and weight decay, and
half of the clients take part in a round. Equality is bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from helpers import Residual, Run, assert_same, blobs, mlp, run, same
from test_selection import client
from torch import Tensor, nn

from pfed import UserError, anatomy, loading, models, selection
from pfed.methods.partialfed_adaptive import PartialFedAdaptive
from pfed.selection import probabilities

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
CLIENTS = range(4)
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
LABELS = ["fc1", "downsample.0", "fc"]  # of the model's blocks


def go(method: str = "partialfed-adaptive", model: Any = NOISY, rounds: int = 3, **hyper: Any) -> Run:
    """Half of the clients in each round; options of the run begin with `run_`."""
    options = {key.removeprefix("run_"): hyper.pop(key) for key in list(hyper) if key.startswith("run_")}
    defaults = {"fraction": 0.5, "local": LOCAL, "eval_every": 0}
    return run(method, DATA, model, rounds=rounds, hyper=hyper, **{**defaults, **options})


def test_theta_moves_in_strategy_steps_only() -> None:
    """8: never with f_s = 0; else alpha's rows still sum to 1 and lie in (0, 1)."""
    still, done = go(f_s=0, f_m=1, finetune_epochs=0), go(f_m=1, f_s=2, finetune_epochs=0)
    for state in still.states.values():
        assert_same(state["theta"], torch.zeros(3, 2, dtype=torch.float64))
    for state in done.states.values():
        alpha = probabilities(state["theta"], "logits")
        assert not (state["theta"] == 0).any()
        torch.testing.assert_close(alpha.sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-6)
        assert ((alpha > 0) & (alpha < 1)).all()


@pytest.mark.parametrize("two_copies", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("gap", "strategy"), [(200.0, "full"), (-200.0, "none")])
def test_a_decided_theta_is_a_fixed_strategy(gap: float, strategy: str, keep: bool, two_copies: bool) -> None:
    """9: with f_s = 0 what clients send and keep is that of Fix, also where momentum is kept over rounds."""
    hyper = {"finetune_epochs": 0, "run_keep_optimizer": keep}
    one = go(initial_gap=gap, f_s=0, two_copies=two_copies, **hyper)
    two = go("partialfed-fix", strategy=strategy, **hyper)
    assert_same(one.server, two.server)
    for taking in two.states:
        assert_same(one.states[taking]["own"], two.states[taking]["own"])


@pytest.mark.parametrize(
    "hyper", [{"alpha_param": "projected"}, {"alpha_param": "projected", "theta_optimizer": "sgd"}]
)
def test_projected_alpha_stays_on_the_simplex(hyper: dict[str, Any]) -> None:
    """8, where alpha itself is the parameter, and steps are large."""
    done = go(**hyper, lr_theta=0.3, f_m=1, initial_gap=0.5, finetune_epochs=0)
    for state in done.states.values():
        assert not same(state["theta"], selection.initial(3, 0.5, "projected"))
        torch.testing.assert_close(state["theta"].sum(1), torch.ones(3, dtype=torch.float64))
        assert ((state["theta"] >= 0) & (state["theta"] <= 1)).all()


def test_the_count_of_batches_goes_on_over_rounds() -> None:
    """Client 2 has 5 samples: in 2 epochs 2 batches of 4, and single samples are dropped.

    So with f_m = 4 its theta moves first in round 3; a count that began anew in every round would never reach it.
    """
    for rounds, moves in ((2, False), (3, True)):
        done = go(rounds=rounds, f_m=4, f_s=1, run_fraction=1.0)
        assert [done.states[k]["q"] for k in CLIENTS] == [n * rounds for n in (4, 6, 2, 4)]
        assert same(done.states[2]["theta"], torch.zeros(3, 2, dtype=torch.float64)) != moves
        assert done.states[1]["moments"]["t"] == (6 * rounds) // 5


def test_theta_starts_anew_unless_it_persists() -> None:
    """With `theta_persist` off a round that has no strategy step ends with the initial theta, but q goes on."""
    done = go(rounds=3, theta_persist=False, run_fraction=1.0)
    assert [done.states[k]["q"] for k in CLIENTS] == [12, 18, 6, 12]
    assert done.states[1]["moments"]["t"] == 1  # of q = 12 … 17 only 14 is a strategy step
    again = go(rounds=4, theta_persist=False, run_fraction=1.0)
    assert_same(again.states[2]["theta"], torch.zeros(3, 2, dtype=torch.float64))  # q = 6, 7: weights


def test_two_copies_matter() -> None:
    """A step that moves both copies gives other models."""
    assert not same(go(two_copies=False).server, go().server)


def test_sampling_is_applied() -> None:
    """With equal alpha `soft` mixes and `hard` keeps L; with a decided one they are the same."""
    soft, hard = go(f_s=0), go(f_s=0, sampling="hard")
    assert not same(soft.server, hard.server)
    decided = {"initial_gap": 200.0, "f_s": 0}
    assert_same(go(**decided, sampling="hard").states, go(**decided).states)


def test_tuning() -> None:
    """At the end: from W^c_T on the stream `finetune`, F = E by default, nothing sent, the server's W as it was."""
    plain, tuned = go(finetune_epochs=0), go()
    assert_same(tuned.server, plain.server)
    for k in plain.states:
        assert_same(plain.personal[k], plain.states[k]["own"])  # between rounds W^c_t is judged
        assert_same(tuned.states[k]["own"], plain.states[k]["own"])
        assert_same(tuned.personal[k], tuned.states[k]["finetuned"])
        assert not same(tuned.personal[k], plain.personal[k])
    assert_same(tuned.personal, go(finetune_epochs=2).personal)
    last = [message for message in tuned.messages if message.round == 4]
    assert [(message.client, message.up) for message in last] == [(k, {}) for k in CLIENTS]
    assert "untuned/local-test" in tuned.result.metrics


def test_tuning_in_every_round() -> None:
    """W^c_t is tuned before it is kept and sent, and nothing happens after the last round."""
    plain, done = go(rounds=1, finetune_epochs=0), go(rounds=1, finetune_when="every_round")
    assert {message.step for message in done.messages} == {"update"}
    for message in done.messages:
        owner = client(NOISY, message.client)
        model = owner.model(plain.states[message.client]["own"])
        owner.fit(model, epochs=2, stream="finetune")
        assert_same(done.states[message.client]["own"], anatomy.snapshot(model))
        assert_same(message.up["params"], anatomy.params(model))
        assert_same(done.personal[message.client], anatomy.snapshot(model))


def test_who_never_took_part_has_the_global_model() -> None:
    """And tunes that, as a model of its own is not there."""
    plain, tuned = go(rounds=1, finetune_epochs=0), go(rounds=1)
    new = set(CLIENTS) - set(plain.states)
    assert new
    for k in new:
        assert_same(plain.personal[k].only(plain.server["params"]), plain.server["params"])
        assert not same(tuned.personal[k], plain.personal[k])


def test_a_round_in_which_nobody_can_train_changes_nothing() -> None:
    """Client 1 has one sample and so no batch: it answers W_t as it came, though its own model is another."""
    one, two = (
        run("partialfed-adaptive", blobs((8, 1)), Residual, rounds=rounds, fraction=0.5, seed=0, local=LOCAL)
        for rounds in (1, 2)
    )
    assert [message.client for message in two.messages if message.step == "update"] == [0, 1]
    assert_same(one.server, two.server)
    assert not same(two.states[1]["own"].only(two.server["params"]), two.server["params"])


def test_bytes() -> None:
    """13: all of W up and down in every round and once down for the tuning; theta, moments and q are never sent."""
    size = anatomy.params(Residual()).nbytes
    done = go()
    assert (done.result.bytes_up, done.result.bytes_down) == (6 * size, (6 + 4) * size)
    assert all(set(message.down) == {"params"} and set(message.up) <= {"params"} for message in done.messages)


def test_logs() -> None:
    """alpha[i, 1] of every group, the temperature and the mean loss of strategy steps, by round and client."""
    done = go(run_fraction=1.0)
    rows = {(row[0], row[1], row[2]): row[3] for row in done.result.logs}
    names = {f"load_global/{label}" for label in LABELS}
    assert names <= {name for _, _, name in rows} <= {*names, "tau", "strategy_loss"}
    assert [rows[t, 0, "tau"] for t in (1, 2, 3)] == pytest.approx([5.0, math.sqrt(0.5), 0.1])
    for k, (i, label) in itertools.product(CLIENTS, enumerate(LABELS)):
        alpha = probabilities(done.states[k]["theta"], "logits")
        assert rows[3, k, f"load_global/{label}"] == alpha[i, 1].item()
    assert rows[1, 1, "strategy_loss"] > 0
    assert (1, 2, "strategy_loss") not in rows  # two batches, both train weights


@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({"granularity": "stage"}, 5),
        ({"granularity": "stage", "stem_group": "own"}, 6),
        ({"granularity": "block"}, 10),
        ({"granularity": "layer"}, 41),
        ({"granularity": "layer", "layer_conv_bn": "joint"}, 21),
    ],
)
def test_groups_of_a_resnet18(settings: dict[str, Any], k: int) -> None:
    """Every tensor is in exactly one group; the numbers are the paper's, and theta has a row for each."""
    model = models.build("torchvision:resnet18", classes=10, shape=(3, 32, 32))
    method = PartialFedAdaptive(**settings)
    parts = loading.cut(model, method.granularity, method.stem_group, method.layer_conv_bn)
    assert len(parts) == k
    names = [name for part in parts.values() for name in part.names(model)]
    assert sorted(names) == sorted(model.state_dict())


def test_granularity_of_a_run() -> None:
    """theta has as many rows as the model has groups."""
    rows = {"stage": 3, "block": 3, "layer": 5}
    for granularity, k in rows.items():
        done = go(rounds=1, granularity=granularity, finetune_epochs=0)
        assert {len(state["theta"]) for state in done.states.values()} == {k}


class Tied(nn.Module):
    """Two layers with one weight between them, in different groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return out


@pytest.mark.parametrize(("gap", "strategy"), [(200.0, "full"), (-200.0, "none")])
def test_tied_weights(gap: float, strategy: str) -> None:
    """One tensor with two names is chosen, trained and mixed once."""
    one = go(model=Tied, initial_gap=gap, f_s=0, finetune_epochs=0)
    assert_same(one.server, go("partialfed-fix", Tied, strategy=strategy, finetune_epochs=0).server)
    for personal in go(model=Tied).personal.values():
        assert_same(personal["one.weight"], personal["two.weight"])


def test_heads_of_their_own() -> None:
    """Models that differ in their heads: what they have in common is averaged, heads stay."""

    def other() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

    done = go(model=[mlp, other])
    assert set(done.server["params"]) == {"0.weight", "0.bias"}
    assert [len(done.personal[k]["2.bias"]) for k in CLIENTS] == [3, 4, 3, 4]


def test_bad_input() -> None:
    """What a run could not do, in one sentence."""
    with pytest.raises(UserError) as refused:
        PartialFedAdaptive(tau_min=6.0)
    assert str(refused.value) == "PartialFedAdaptive.tau_min must be <= tau0 (5.0). Got 6.0."
    with pytest.raises(UserError, match=r"PartialFedAdaptive\.f_m must be >= 1\. Got 0\."):
        PartialFedAdaptive(f_m=0)
