"""FedCD: its ensembles, common images without labels, batches that all clients share, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from fedcd_helpers import BATCH, DATA, LOCAL, go, labels, logged, logits, sent
from helpers import Residual, Run, assert_same, initial, mlp, run, same
from torch import Tensor, nn

from pfed import Experiment, Federation, Samples, UserError, streams
from pfed.codistillation import combine
from pfed.method import Replies
from pfed.simplex import CrossEntropy

SAME = dataclasses.replace(
    DATA, clients=tuple(dataclasses.replace(c, train=DATA.clients[3].train) for c in DATA.clients)
)


@pytest.mark.parametrize("ensemble", ["linear", "mean", "best", "softmax_loss"])
def test_ensembles(ensemble: str) -> None:
    """Each rule gives the weights that it names, from what was sent in round 1; its loss and gap are those logged."""
    done = go(ensemble=ensemble, rounds=1)
    f = CrossEntropy(logits(sent(done)[1]), labels(DATA, 1))
    alone = f.alone().tolist()
    weights = [*logged(done, "gamma")[1].values()]
    if ensemble == "mean":
        assert weights == [0.25] * 4
    elif ensemble == "best":
        assert weights == [float(loss == min(alone)) for loss in alone]
    elif ensemble == "softmax_loss":
        powers = [math.exp(-loss) for loss in alone]
        assert weights == pytest.approx([power / sum(powers) for power in powers])
    gap, loss = logged(done, "duality_gap")[1][-1], logged(done, "teacher_loss")[1][-1]
    gamma = torch.tensor(weights, dtype=torch.float64)
    assert loss == pytest.approx(f.loss(gamma), abs=1e-12)
    assert gap == pytest.approx(f.gap(gamma), abs=1e-12)
    assert (gap < 1e-8) == (ensemble == "linear")


def test_without_labels() -> None:
    """`public_unlabelled` is the mean of all, bit for bit, and nothing that needs a label is logged."""
    one, two = go(common="public_unlabelled", ensemble="mean"), go(ensemble="mean")
    assert_same(one.states, two.states)
    assert_same(one.server, two.server)
    assert {row[2] for row in one.result.logs} == {"gamma", "kd"}


def shared(**options: Any) -> Run:
    return go(SAME, **{"common": "shared_batch", "rounds": 2, **options})


@pytest.fixture(scope="module")
def together() -> Run:
    return shared()


def test_shared_batches(together: Run) -> None:
    """Weights come from the public set once a round; in each step the teacher is Σ γ_j z_j of the common batch.

    9 samples in batches of 4 are two batches (a single one left over makes none), twice: 4 steps a round.
    """
    assert [message.step for message in together.messages[:12]] == ["judge"] * 4 + ["look"] * 4 + ["learn"] * 4
    for round in (1, 2):
        f = CrossEntropy(logits(sent(together, "judge")[round]), labels(SAME, round))
        gamma = torch.tensor([*logged(together, "gamma")[round].values()], dtype=torch.float64)
        assert f.gap(gamma) < 1e-8
        for number in range(4):
            steps = {
                step: [m for m in together.messages if (m.step, m.round, m.down.get("number")) == (step, round, number)]
                for step in ("look", "learn")
            }
            own = torch.stack([message.up["logits"] for message in steps["look"]])  # type: ignore[misc]
            assert own.shape == (4, 4, 3)
            for message in steps["learn"]:
                expected = torch.tensordot(gamma, own.double(), dims=1).float()
                torch.testing.assert_close(message.down["teacher"], expected, rtol=1e-6, atol=1e-6)
    assert together.server == {"teacher": None}
    assert {message.step for message in together.messages} == {"judge", "look", "learn"}


def test_shared_bytes(together: Run) -> None:
    """Every exchange counts: up 4 C (B + images of all steps), down 4 C (images of all steps), per client and round.

    With `kd_every` = 2 the steps between exchange nothing.
    """
    assert together.result.bytes_up == 4 * 2 * 4 * 3 * (BATCH + 16)
    assert together.result.bytes_down == 4 * 2 * 4 * 3 * 16
    rare = shared(kd_every=2)
    assert rare.result.bytes_up == 4 * 2 * 4 * 3 * (BATCH + 8)
    assert rare.result.bytes_down == 4 * 2 * 4 * 3 * 8


def test_all_see_the_same_batch() -> None:
    """With one model for all, nobody can differ: the same images, the same teacher, the same steps."""
    done = shared(model=Residual, augment="none")
    for client in (1, 2, 3):
        assert_same(done.personal[client], done.personal[0])
    own = logits(sent(done, "look")[2])
    assert torch.equal(own[0], own[3])


def test_shared_steps_are_sgd() -> None:
    """λ = 0: two rounds of four steps on common batches equal torch's SGD with one momentum throughout, to 1e-6."""
    done = shared(model=mlp, lam=0.0)
    x, y = SAME.clients[0].train.take()
    model = mlp()
    model.load_state_dict(initial(mlp))
    settings = {key: value for key, value in LOCAL.items() if key not in ("batch_size", "epochs")}
    optimizer = torch.optim.SGD(model.parameters(), **settings)  # type: ignore[arg-type]
    for round in (1, 2):
        for epoch in (0, 1):
            order = streams.rng(0, "common", "shared_batch", round, epoch).permutation(9)
            for index in (order[:4], order[4:8]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(done.personal[2][name], tensor, rtol=1e-5, atol=1e-6)
    assert done.states[2]["momentum"]["train"].keys() == dict(model.named_parameters()).keys()
    assert not any("momentum" in state for state in shared(model=mlp, keep_optimizer=False).states.values())


def test_shared_distillation_counts(together: Run) -> None:
    """λ, the number of steps and dropout act in this mode too; both engines agree bit for bit."""
    assert not same(together.personal, shared(lam=0.0).personal)
    assert len(sent(shared(local_steps=3, rounds=1), "learn")[1]) == 4
    assert max(m.down["number"] for m in shared(local_steps=3).messages if m.step == "learn") == 2  # type: ignore[type-var]
    assert_same(together.states, shared(engine="debug").states)
    assert {row[2] for row in together.result.logs} >= {"gamma", "kd", "teacher_loss"}


class Dropping(nn.Module):
    """Notes which units its dropout lets through in training."""

    masks: list[tuple[bool, ...]] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 30), nn.Dropout(), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.masks.append(tuple((self.drop(torch.ones(30)) > 0).tolist()))
        out: Tensor = self.head(self.body(x))
        return out


def test_shared_dropout() -> None:
    """Every client and every step has a mask of its own, though each step is a call of its own."""
    Dropping.masks.clear()
    shared(model=Dropping, rounds=2)
    assert len(Dropping.masks) == len(set(Dropping.masks)) == 2 * 4 * 4


def test_shared_images_are_changed_alike(tiny: Federation) -> None:
    """Augmentation draws from a stream in common: all see the same changed images, and other ones than without it."""
    data = dataclasses.replace(tiny, clients=(tiny.clients[0],) * 2)
    hyper = {"common": "shared_batch"}
    local = {"batch_size": 8}
    one, two = (
        run("fedcd", data, "mlp", rounds=1, hyper=hyper, augment=augment, local=local, eval_every=0)
        for augment in ("crop-flip", "none")
    )
    first, second = logits(sent(one, "look")[1])
    assert torch.equal(first, second)
    assert not same(one.personal, two.personal)


def test_too_few_for_a_shared_step() -> None:
    """One training sample makes no batch: nobody trains, and the run goes through."""
    single = dataclasses.replace(DATA.clients[3], train=DATA.clients[3].train.part([0]))
    data = dataclasses.replace(DATA, clients=(single,) * 2)
    done = go(data, common="shared_batch", local_steps=2, rounds=1)
    assert {message.step for message in done.messages} == {"judge"}


def test_a_client_lost_on_the_way() -> None:
    """Who does not answer in a later step is left out; the others keep their proportions, or count alike at zero."""
    replies = Replies("samples")
    for client, value in ((0, 1.0), (2, 4.0)):
        replies[client] = {"logits": torch.full((1, 2), value)}
    assert combine({0: 0.1, 1: 0.7, 2: 0.2}, replies).tolist() == [[3.0, 3.0]]
    assert combine({0: 0.0, 1: 1.0, 2: 0.0}, replies).tolist() == [[2.5, 2.5]]
    assert combine({0: 1.0}, replies).tolist() == [[1.0, 1.0]]


def test_refusals() -> None:
    """One sentence each, before anything runs."""
    with pytest.raises(UserError, match=r"^FedCD\.batch must be <= the number of public samples \(15\)\. Got 16\.$"):
        go(batch=16)
    with pytest.raises(
        UserError, match=r"^FedCD\.ensemble must be 'mean' where the common images have no labels\. Got 'best'\.$"
    ):
        go(common="public_unlabelled", ensemble="best")
    with pytest.raises(UserError, match=r"^FedCD\.common 'shared_batch' needs the same training data at every client"):
        go(common="shared_batch")
    with pytest.raises(UserError, match=r"^FedCD\.common 'shared_batch' needs local\.batch_size >= 2\. Got 1\.$"):
        shared(local={"batch_size": 1})
    with pytest.raises(UserError, match=r"^fedcd needs public data\."):
        go(dataclasses.replace(DATA, public=None))
    with pytest.raises(UserError, match=r"FedCD\.tau must be > 0"):
        go(tau=0.0)


def test_equal_data_under_other_numbers() -> None:
    """Own arrays count as the same data where they hold the same values; other labels do not."""
    one = DATA.clients[0]
    copied = dataclasses.replace(one, train=Samples.of(one.train.x.clone(), one.train.y.clone()))
    other = dataclasses.replace(one, train=Samples.of(one.train.x.clone(), (one.train.y + 1) % 3))
    assert go(dataclasses.replace(DATA, clients=(one, copied)), common="shared_batch", rounds=1).messages
    with pytest.raises(UserError, match="same training data"):
        go(dataclasses.replace(DATA, clients=(one, other)), common="shared_batch", rounds=1)


def test_replicated_partition() -> None:
    """`partition replicated` gives what shared batches need."""
    done = Experiment(
        "fedcd",
        "digits",
        "mlp,cnn-small",
        hyper={"common": "shared_batch", "local_steps": 2},
        clients=2,
        rounds=1,
        public=0.1,
        partition="replicated",
        local={"batch_size": 32},
    ).run()
    assert done.bytes_down == 2 * 4 * 10 * 64
    assert done.bytes_up == 2 * 4 * 10 * (64 + 64)
