"""FedCD: the invariants of the method by number, its common images, and two rounds by hand.

What concerns the solver alone (invariants 5, 6, 7, 11, 12) is in test_simplex.py, switches in test_fedcd_options.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fedcd_helpers import BATCH, DATA, LOCAL, MODELS, NOISY, go, ids, labels, logged, logits, sent
from helpers import Residual, Run, assert_same, mlp, run, same
from torch import Tensor, nn

from pfed import Experiment, Federation, Samples
from pfed.data.base import ClientData, union
from pfed.losses import kl
from pfed.simplex import CrossEntropy, uniform


@pytest.fixture(scope="module")
def plain() -> Run:
    return go()


def test_gamma_is_in_the_simplex(plain: Run) -> None:
    """Invariant 1: γ_j ≥ 0 and |Σγ - 1| < 1e-6 in every round."""
    gamma = logged(plain, "gamma")
    assert sorted(gamma) == [1, 2, 3]
    for weights in gamma.values():
        assert sorted(weights) == [0, 1, 2, 3]
        assert min(weights.values()) >= 0
        assert abs(sum(weights.values()) - 1) < 1e-6


def test_the_teacher_is_no_worse_than_the_mean_or_anyone(plain: Run) -> None:
    """Invariant 2: CE(γ) ≤ CE(uniform) + 1e-9 and ≤ min_j CE_j + 1e-9, from what the clients really sent."""
    for round, messages in sent(plain).items():
        f = CrossEntropy(logits(messages), labels(DATA, round))
        gamma = torch.tensor([*logged(plain, "gamma")[round].values()], dtype=torch.float64)
        assert f.loss(gamma) == pytest.approx(logged(plain, "teacher_loss")[round][-1], abs=1e-12)
        assert f.loss(gamma) <= min(f.loss(uniform(4)), float(f.alone().min())) + 1e-9


def test_one_client_teaches_itself() -> None:
    """Invariant 3, bit for bit: n = 1 has γ = [1] and z_t = z_1, so at the moment of upload KL = 0."""
    done = go(dataclasses.replace(DATA, clients=DATA.clients[1:2]))
    for round, messages in sent(done).items():
        assert logged(done, "gamma")[round] == {0: 1.0}
        teacher = (sent(done).get(round + 1) or sent(done, "receive")[round + 1])[0].down["teacher"]
        own = messages[0].up["logits"]
        assert isinstance(teacher, Tensor)
        assert isinstance(own, Tensor)
        assert torch.equal(teacher, own)
        assert float(kl(teacher, own, 2.0)) == 0


@pytest.mark.parametrize("model", [MODELS, NOISY], ids=["heterogeneous", "basic"])
def test_without_distillation_it_is_local(model: Any) -> None:
    """Invariant 4, bit for bit: λ = 0 is Local under one optimiser and schedule, with the same initial models and data.

    Models and momentum are equal; the logits are still sent and counted.
    """
    options = {"local": {**LOCAL, "schedule": "step:0.5"}}
    one, two = go(model=model, lam=0.0, **options), go(model=model, method="local", **options)
    assert_same(one.states, two.states)
    assert_same(one.personal, two.personal)
    assert all("momentum" in state for state in one.states.values())
    assert one.result.bytes_up == one.result.bytes_down == 3 * 4 * 4 * BATCH * 3
    assert "kd" not in {row[2] for row in one.result.logs}


def test_distillation_changes_the_clients(plain: Run) -> None:
    """λ = 1 moves everyone from round 2 on: in round 1 there is no teacher."""
    alone = go(method="local")
    for client in range(4):
        assert not same(plain.personal[client], alone.personal[client])
    assert_same(go(rounds=1).personal, go(method="local", rounds=1).personal)


def test_bytes(plain: Run) -> None:
    """Invariant 8: 4 B C bytes up and as many down per client and round. Here B = 6, C = 3, R = 3, four clients."""
    assert plain.result.bytes_up == plain.result.bytes_down == 4 * 3 * (4 * 6 * 3)
    twice = go(common_batches=2)
    assert twice.result.bytes_up == twice.result.bytes_down == 2 * plain.result.bytes_up


def test_bytes_of_the_paper() -> None:
    """Invariant 8 in the paper's setting: R = 200, B = 64, C = 100 are 10,240,000 bytes per client, both ways."""
    source = torch.Generator().manual_seed(0)
    own = Samples.of(torch.randn(2, 1, generator=source), torch.tensor([0, 1]))
    common = Samples.of(torch.randn(64, 1, generator=source), torch.arange(64))
    names = tuple(str(i) for i in range(100))
    data = Federation((ClientData("a", own, own),), names, own, common)
    done = Experiment("fedcd", data, lambda: nn.Linear(1, 100), rounds=200, eval_every=0, checkpoint_every=0).run()
    assert done.bytes_up + done.bytes_down == 2 * 4 * 64 * 100 * 200 == 10_240_000
    assert done.bytes_up == done.bytes_down


def floats(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from floats(value)


def test_only_logits_cross() -> None:
    """Invariant 9: nothing of a model is in any message, by name, shape or value, and models of all sizes federate.

    Where all features of an image are zero, as ReLU may make them, its logits are the head's bias: hence no ReLU here.
    """
    done = go(model=[mlp, nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))])
    assert len({sum(t.numel() for t in tensors.values()) for tensors in done.personal.values()}) == 3
    weights = {value for state in done.states.values() for t in floats(state) for value in t.flatten().tolist()}
    for message in done.messages:
        assert set(message.up) == ({"logits"} if message.step == "update" else set())
        assert set(message.down) == {"teacher"}
        for tensor in floats({**message.up, **message.down}):
            assert tensor.shape == (BATCH, 3)
            assert tensor.dtype == torch.float32
            assert not weights & set(tensor.flatten().tolist())


def test_a_teacher_is_a_constant(plain: Run) -> None:
    """Invariant 10: what is sent carries no gradient, so none flows into the teacher."""
    for message in plain.messages:
        for tensor in floats({**message.up, **message.down}):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None


def test_labels_of_the_common_images_stay_at_the_server(plain: Run) -> None:
    """Invariant 10: no message holds whole numbers, and with the mean as teacher other labels change nothing at all.

    With the best combination, which depends on labels, they change γ, but nothing that a client sends in round 1.
    """
    assert DATA.public is not None
    other = dataclasses.replace(DATA, public=Samples.of(DATA.public.x, (DATA.public.y + 1) % 3))
    one, two = go(ensemble="mean"), go(other, ensemble="mean")
    assert_same(one.states, two.states)
    assert_same(one.server, two.server)
    changed = go(other)
    assert torch.equal(logits(sent(plain)[1]), logits(sent(changed)[1]))
    assert logged(plain, "gamma")[1] != logged(changed, "gamma")[1]
    for message in plain.messages:
        assert all(
            isinstance(value, Tensor) or value is None for value in [*message.up.values(), *message.down.values()]
        )


def test_a_teacher_is_one_round_old(plain: Run) -> None:
    """Round r gets Σ γ_j z_j of round r - 1, round 1 nothing, and after the last round everyone gets the last one."""
    updates = sent(plain)
    assert all(message.down["teacher"] is None for message in updates[1].values())
    for round in (1, 2, 3):
        gamma = torch.tensor([*logged(plain, "gamma")[round].values()], dtype=torch.float64)
        expected = torch.tensordot(gamma, logits(updates[round]).double(), dims=1).float()
        following = updates[round + 1] if round < 3 else sent(plain, "receive")[4]
        assert sorted(following) == [0, 1, 2, 3]
        for message in following.values():
            torch.testing.assert_close(message.down["teacher"], expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(plain.server["teacher"], sent(plain, "receive")[4][0].down["teacher"])  # type: ignore[arg-type]


def test_the_last_download_changes_nothing(plain: Run) -> None:
    """The step after the last round stores nothing: personal models give the logits of the last upload, bit for bit."""
    assert DATA.public is not None
    assert plain.messages[-1].step == "receive"
    model = mlp()
    model.load_state_dict(plain.personal[1])
    with torch.no_grad():
        assert torch.equal(model(DATA.public.take(ids(DATA, 3))[0]), logits(sent(plain)[3])[1])


class Telltale(nn.Module):
    """Its logits are the input itself: what a client sends says which image it saw. Passes in training are noted."""

    seen: tuple[list[Tensor], list[Tensor]] = ([], [])  # in eval mode, in train mode

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self.training].append(x[:, 0].clone())
        out: Tensor = 0 * self.head(self.body(x)) + x[:, :3]
        return out


def numbered(size: int) -> Samples:
    """The first input of image i is 100 + i; its label is the argmax of its first three inputs."""
    x = torch.zeros(size, 4)
    x[:, 0] = 100 + torch.arange(size)
    x[:, 1] = 200.0 * (torch.arange(size) % 2)
    return Samples.of(x, x[:, :3].argmax(1))


def shown(done: Run) -> dict[int, list[int]]:
    """The common images of each round, which all clients must have in common."""
    found = {}
    for round, messages in sent(done).items():
        images = {tuple(message.up["logits"][:, 0].int().tolist()) for message in messages.values()}  # type: ignore[index, union-attr]
        assert len(images) == 1
        found[round] = [image - 100 for image in images.pop()]
    return found


def test_common_images() -> None:
    """Both sides know the images of a round: an epoch is cut into batches without replacement, the tail dropped.

    15 images in batches of 6 make two batches an epoch. The server knows the same ones: against its labels everyone is
    right. Two batches a round are those of two rounds with one.
    """
    data = dataclasses.replace(DATA, public=numbered(15))
    done = go(data, Telltale, rounds=6)
    images = shown(done)
    epochs = [images[1] + images[2], images[3] + images[4], images[5] + images[6]]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(images[round] == ids(data, round).tolist() for round in images)
    assert {value for found in logged(done, "common_accuracy").values() for value in found.values()} == {1.0}
    assert shown(go(data, Telltale, rounds=3, common_batches=2)) == dict(enumerate(epochs, 1))
    assert shown(go(data, Telltale, rounds=2, seed=1))[1] != images[1]


@pytest.mark.parametrize(
    ("every", "batches", "expected"), [(1, 1, "aaaaa"), (2, 1, "a.a.a"), (1, 2, "ababa"), (2, 2, "a.b.a")]
)
def test_which_steps_distil(every: int, batches: int, expected: str) -> None:
    """`kd_every` leaves out steps, `common_batches` are taken in turn, and `local_steps` is the number of steps.

    In round 2 the images are those of round 1. Private batches have 4 samples, common ones 6.
    """
    data = dataclasses.replace(DATA, clients=DATA.clients[1:2], public=numbered(15))
    Telltale.seen[True].clear()
    done = go(data, Telltale, rounds=2, kd_every=every, common_batches=batches, local_steps=5)
    first = shown(done)[1]
    passes = Telltale.seen[True][5:]  # round 1 has no teacher
    text = ""
    for x in passes:
        if len(x) == 4:
            text += "."
        else:
            text = text[:-1] + "ab"[first.index(int(x[0]) - 100) // BATCH]
            place = first.index(int(x[0]) - 100)
            assert [int(image) - 100 for image in x] == first[place : place + BATCH]
    assert text == expected


def test_running_statistics_are_those_of_private_data() -> None:
    """The pass over common images takes its batch's statistics and leaves the running ones alone, bit for bit.

    With a learning rate below the resolution of float32 the weights stay, and nothing else can move the statistics.
    """
    local = {"lr": 1e-30, "batch_size": 4}
    one, two = go(model=Residual, local=local), go(model=Residual, method="local", local=local)
    for client in range(4):
        statistics = [name for name in one.personal[client] if "running" in name]
        assert len(statistics) == 4
        assert_same(one.personal[client].only(statistics), two.personal[client].only(statistics))
    assert logged(one, "kd")[3][1] > 0
    assert float(one.personal[1]["bn1.running_mean"].abs().max()) > 0


class Linear(nn.Module):
    """Logits w x with two weights, which start at (0, ln 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def softmax(*z: float) -> list[float]:
    powers = [math.exp(value) for value in z]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_two_rounds_by_hand(direction: str) -> None:
    """Client 0 has x = 1, y = 0, client 1 has x = 2, y = 1; both common images are x = 1; lr 1, T = 2, λ = 1/2.

    Round 1, from w = (0, ln 3): p = (1/4, 3/4) and (1/10, 9/10), so w_0 = (3/4, ln 3 - 3/4) and w_1 =
    (-1/5, ln 3 + 1/5). At x = 1 they are the logits, and the teacher is their mean z_t = (11/40, ln 3 - 11/40).
    Round 2: w ← w - x (softmax(w x) - y) - λ d, where d is the gradient of T² KL at x = 1. With s = softmax(w/T) and
    t = softmax(z_t/T) it is T (s - t) for KL(t || s), and T s (log s - log t - KL) for KL(s || t).
    """
    parts = [Samples.of(torch.tensor([[x]]), torch.tensor([y])) for x, y in ((1.0, 0), (2.0, 1))]
    clients = tuple(ClientData(str(i), part, part) for i, part in enumerate(parts))
    common = Samples.of(torch.ones(2, 1), torch.tensor([0, 1]))
    data = Federation(clients, ("a", "b"), union(parts), common)
    hyper = {"batch": 2, "ensemble": "mean", "lam": 0.5, "kl_direction": direction}
    done = go(data, Linear, rounds=2, local={"lr": 1.0, "batch_size": 8}, **hyper)
    log3 = math.log(3)
    first = sent(done)[1]
    after = [[0.75, log3 - 0.75], [-0.2, log3 + 0.2]]
    for client in (0, 1):
        for row in first[client].up["logits"]:  # type: ignore[union-attr]
            assert row.tolist() == pytest.approx(after[client], abs=1e-6)
    teacher = [11 / 40, log3 - 11 / 40]
    assert sent(done)[2][0].down["teacher"][0].tolist() == pytest.approx(teacher, abs=1e-6)  # type: ignore[index]
    for client, (x, y) in enumerate(((1.0, 0), (2.0, 1))):
        w = after[client]
        e = [p - (k == y) for k, p in enumerate(softmax(*(weight * x for weight in w)))]
        s, t = softmax(*(weight / 2 for weight in w)), softmax(*(value / 2 for value in teacher))
        if direction == "teacher_student":
            divergence = sum(b * math.log(b / a) for a, b in zip(s, t, strict=True))
            d = [2 * (a - b) for a, b in zip(s, t, strict=True)]
        else:
            divergence = sum(a * math.log(a / b) for a, b in zip(s, t, strict=True))
            d = [2 * a * (math.log(a / b) - divergence) for a, b in zip(s, t, strict=True)]
        expected = [weight - x * own - 0.5 * kd for weight, own, kd in zip(w, e, d, strict=True)]
        assert done.personal[client]["fc.weight"].flatten().tolist() == pytest.approx(expected, abs=2e-6)
        assert logged(done, "kd")[2][client] == pytest.approx(4 * divergence, abs=1e-6)


def test_momentum_is_kept(plain: Run) -> None:
    """The model is never overwritten, so its optimiser goes on; a run may say otherwise."""
    assert all(state["momentum"]["train"] for state in plain.states.values())
    fresh = go(keep_optimizer=False)
    assert not any("momentum" in state for state in fresh.states.values())
    assert not same(fresh.personal, plain.personal)


def test_accuracies_are_logged(plain: Run) -> None:
    """Each client's accuracy on the common images, and the teacher's."""
    for round, messages in sent(plain).items():
        right = (logits(messages).argmax(2) == labels(DATA, round)).double().mean(1)
        assert logged(plain, "common_accuracy")[round] == pytest.approx(dict(enumerate(right.tolist())))
        following = sent(plain).get(round + 1) or sent(plain, "receive")[round + 1]
        teacher = following[0].down["teacher"]
        assert isinstance(teacher, Tensor)
        expected = (teacher.argmax(1) == labels(DATA, round)).double().mean()
        assert logged(plain, "teacher_accuracy")[round] == {-1: pytest.approx(float(expected))}


def test_a_client_that_cannot_train_has_no_weight() -> None:
    """One sample and BatchNorm: its γ is 0; but where nobody can train, all count."""
    single = dataclasses.replace(DATA.clients[3], train=DATA.clients[3].train.part([0]))
    some = go(dataclasses.replace(DATA, clients=(*DATA.clients[:3], single)), Residual, ensemble="mean")
    assert [*logged(some, "gamma")[1].values()] == [1 / 3, 1 / 3, 1 / 3, 0]
    assert 3 in logged(some, "common_accuracy")[1]
    all_of_them = go(dataclasses.replace(DATA, clients=(single,) * 4), Residual, ensemble="mean")
    assert [*logged(all_of_them, "gamma")[1].values()] == [0.25] * 4


def test_one_in_two_takes_part() -> None:
    """With half of the clients in a round γ is over those; after the last round all get the teacher."""
    done = go(fraction=0.5)
    for round, messages in sent(done).items():
        assert len(messages) == 2
        assert logged(done, "gamma")[round].keys() == messages.keys()
    assert sorted(sent(done, "receive")[4]) == [0, 1, 2, 3]


def test_no_round() -> None:
    """T = 0: nobody sent anything, and there is no teacher."""
    done = go(rounds=0)
    assert done.server == {"teacher": None}
    assert done.result.bytes_up == done.result.bytes_down == 0


def test_networks_of_three_kinds(tiny: Federation) -> None:
    """Invariant 9: a CIFAR ResNet, a CNN and an MLP learn together; a wrong engine would not carry them."""
    serial, debug = (
        run("fedcd", tiny, "resnet8,cnn-small,mlp", rounds=2, engine=engine, eval_every=0)
        for engine in ("serial", "debug")
    )
    assert_same(serial.states, debug.states)
    assert_same(serial.server, debug.server)
    sizes = [sum(t.numel() for t in serial.personal[client].values()) for client in range(4)]
    assert sizes[0] == sizes[3]
    assert len(set(sizes)) == 3
    assert serial.result.bytes_up == 2 * 4 * (4 * 64 * 10)
    assert not same(serial.personal[0], serial.personal[3])  # each from its own seed
