"""FedDistill, FedMD and FedDF: who teaches whom, in plain floats, on the model of `test_method_arithmetic`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, blobs, federation, mlp, run
from test_method_arithmetic import START, TwoLayers, Weights, combine, descend, mean, near, values
from torch import Tensor, nn

from pfed import Experiment, Federation, Samples, Tensors, UserError, anatomy, codistillation
from pfed.cohort import Cohort
from pfed.methods import feddf
from pfed.methods.feddistill import FedDistill

Table = dict[int, list[float]]  # logits by label, without the labels that are not there


def logits(w: Weights, x: float) -> list[float]:
    return [weight * w[0] * x for weight in w[1:]]


def softmax(z: Sequence[float]) -> list[float]:
    powers = [math.exp(value) for value in z]
    return [power / sum(powers) for power in powers]


def divergence(a: Sequence[float], b: Sequence[float]) -> float:
    """KL(softmax(a) || softmax(b)): where a sees much and b little, it is large."""
    return sum(p * math.log(p / q) for p, q in zip(softmax(a), softmax(b), strict=True))


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return sum((one - other) ** 2 for one, other in zip(a, b, strict=True)) / len(a)


def backward(w: Weights, x: float, slope: Sequence[float]) -> Weights:
    """The gradient of the weights from that of the logits: with z = b x, x (s · h) for b and z s for h."""
    return x * (slope[0] * w[1] + slope[1] * w[2]), w[0] * x * slope[0], w[0] * x * slope[1]


def among(table: Mapping[int, Table], label: int, but: int | None) -> list[float] | None:
    """The mean of a label's logits over the clients that have it."""
    rows = [rows[label] for client, rows in table.items() if label in rows and client != but]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else None


# All have label 1, client 0 alone has label 0: some of its batches hold a sample with a target beside one without.
TRIO = federation(
    ([[1.0], [2.0], [0.5], [-1.5], [3.0]], [0, 1, 0, 1, 1]),
    ([[-1.0], [0.5], [1.5]], [1, 1, 1]),
    ([[1.5], [-0.5]], [1, 1]),
)
LR, LAM = 0.2, 0.7


class Hand:
    """FedDistill in plain floats: weights, newest tables and logged distances, in the order of a run's batches."""

    def __init__(self, distance: str, leave: bool = True) -> None:
        self.distance, self.leave = distance, leave
        self.weights: dict[int, Weights] = dict.fromkeys(range(3), START)
        self.tables: dict[int, Table] = {}
        self.logs: dict[tuple[int, int], float] = {}

    def targets(self, client: int) -> list[list[float] | None]:
        return [among(self.tables, label, client if self.leave else None) for label in (0, 1)]

    def train(self, round: int, client: int, batches: list[list[tuple[float, int]]]) -> Table:
        """A round of one client; returns the means of its logits, each from before the step of its batch."""
        w, targets = self.weights[client], self.targets(client)
        seen: dict[int, list[list[float]]] = {}
        far: list[float] = []
        for batch in batches:
            steps, distances = [], []
            for x, y in batch:
                out, target = logits(w, x), targets[y]
                seen.setdefault(y, []).append(out)
                slope = [p - (label == y) for label, p in enumerate(softmax(out))]
                if target is not None:
                    kl = self.distance == "kl"
                    distances.append(divergence(target, out) if kl else apart(out, target))
                    pairs = zip(softmax(out), softmax(target), strict=True) if kl else zip(out, target, strict=True)
                    slope = [s + LAM * (mine - theirs) for s, (mine, theirs) in zip(slope, pairs, strict=True)]
                steps.append((-LR / len(batch), backward(w, x, slope)))
            w = combine((1, w), *steps)
            far.append(sum(distances) / max(len(distances), 1))
        self.weights[client] = w
        if self.tables:
            self.logs[round, client] = sum(far) / len(far)
        return {y: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for y, rows in seen.items()}


def order(experiment: Experiment, client: int, round: int) -> list[list[tuple[float, int]]]:
    """A client's batches of a round, as they come."""
    assert experiment.session is not None
    batches = experiment.session._runner.client(client, round, {}).batches(2)
    return [list(zip(batch.x.flatten().tolist(), batch.y.tolist(), strict=True)) for batch in batches]


@pytest.mark.parametrize(("distance", "leave"), [("kl", True), ("mse", True), ("kl", False)])
def test_feddistill_by_hand(distance: str, leave: bool) -> None:
    """Four rounds of two of three clients, two epochs of batches of two: the targets, the weights and the log.

    The gradient of KL(softmax(t) || softmax(f)) for f is softmax(f) - softmax(t), that of mean (f - t)² over the two
    labels is f - t. The loss is a mean over the batch in which a sample without a target counts zero; the log is over
    the samples that have one. Of the client that is not there its last table counts.
    """
    options: dict[str, Any] = {
        "hyper": {"lam": LAM, "distance": distance, "leave_one_out": leave},
        "local": {"lr": LR, "batch_size": 2, "epochs": 2},
        "rounds": 4,
        "fraction": 0.67,
    }
    done = run("feddistill", TRIO, TwoLayers, **options)
    again = Experiment("feddistill", TRIO, TwoLayers, **options)
    again.run()
    hand = Hand(distance, leave)
    older = 0
    for round in range(1, 5):
        fresh: dict[int, Table] = {}
        messages = [message for message in done.messages if message.round == round]
        older += len(hand.tables.keys() - {message.client for message in messages})
        for message in messages:
            targets, client = hand.targets(message.client), message.client
            if not hand.tables:
                assert message.down == {"logits": None, "known": None}
            else:
                got, known = message.down["logits"], message.down["known"]
                assert isinstance(got, Tensor)
                assert isinstance(known, Tensor)
                assert known.tolist() == [target is not None for target in targets]
                assert [row for row, target in zip(got.tolist(), targets, strict=True) if target] == [
                    near(*target) for target in targets if target
                ]
            fresh[client] = hand.train(round, client, order(again, client, round))
            sent, seen = message.up["logits"], message.up["seen"]
            assert isinstance(sent, Tensor)
            assert isinstance(seen, Tensor)
            assert seen.tolist() == [label in fresh[client] for label in (0, 1)]
            assert {label: sent[label].tolist() for label in fresh[client]} == {
                label: near(*row) for label, row in fresh[client].items()
            }
        hand.tables.update(fresh)
    assert older >= 2
    assert [values(done.personal[k]) for k in range(3)] == [near(*hand.weights[k]) for k in range(3)]
    logged = {(round, client): value for round, client, name, value in done.result.logs if name == "distillation"}
    assert logged == {key: pytest.approx(value, abs=1e-5) for key, value in hand.logs.items()}
    assert min(hand.logs.values()) > 1e-3


def test_distances_of_feddistill_are_logged_over_samples_with_a_target() -> None:
    """Client 0 has label 1 in one of its three batches of one, and only there a target: the log is a third of it.

    With F_1 the logits of client 1 in round 1, all before its one step, G_0,1 = F_1,1 = (0, 2 ln 3).
    """
    data = federation(([[1.0], [1.0], [3.0]], [0, 0, 1]), ([[2.0]], [1]))
    hyper = {"lam": 1e-9, "distance": "mse", "leave_one_out": True}
    done = run("feddistill", data, TwoLayers, rounds=2, hyper=hyper, local={"lr": 1e-9, "batch_size": 1})
    found = {(round, k): value for round, k, name, value in done.result.logs if name == "distillation"}
    assert found == {(2, k): pytest.approx(math.log(3) ** 2 / 2 / batches) for k, batches in ((0, 3), (1, 1))}


def test_tables_of_feddistill_are_added_up_by_client() -> None:
    """In double precision and ascending order, whoever was there first: (2^60 + 1) - 2^60 = 0."""
    big = 2.0**60
    tables = {0: big, 2: -big, 1: 1.0, 3: 0.5}
    server = {
        "logits": {client: torch.full((2, 2), value) for client, value in tables.items()},
        "seen": {client: torch.tensor([True, client > 1]) for client in tables},
    }
    sums = FedDistill()._sums(server)
    assert sums is not None
    assert sums[0].tolist() == [[0.5, 0.5]] * 2
    assert sums[1].tolist() == [4, 2]
    assert all(tensor.dtype == torch.float64 for tensor in sums)


QUIET = {"public_epochs": 1, "private_epochs": 1, "subset": 1000}  # FedMD with a little training before round 1


def public(data: Federation, *inputs: float) -> Federation:
    """The federation beside public images of these inputs."""
    x = torch.tensor(inputs).view(-1, 1)
    return dataclasses.replace(data, public=Samples.of(x, (x[:, 0] > 0).long()))


P = (1.0, -0.5, 2.0)  # public images


@pytest.mark.parametrize("distance", ["mae", "mse"])
def test_two_rounds_of_fedmd(distance: str) -> None:
    """Before them a step on the public images, labelled 1, 0, 1, and one on the own data.

    A round has a step towards the mean c of both clients' logits f on the public images, and one on the own data. The
    distance is a mean over images and two classes, so that its slope for f is f - c under mse and sign(f - c)/2 under
    mae, mean over images.
    """

    def stepped(w: Weights, slopes: Sequence[Sequence[float]]) -> Weights:
        return combine((1, w), *((-1 / len(P), backward(w, x, s)) for x, s in zip(P, slopes, strict=True)))

    own = []
    for k in (0, 1):
        shares = [softmax(logits(START, x)) for x in P]
        errors = [[p - (label == (x > 0)) for label, p in enumerate(row)] for x, row in zip(P, shares, strict=True)]
        own.append(descend(stepped(START, errors), k))
    for _ in (1, 2):
        told = [[logits(w, x) for x in P] for w in own]
        for k in (0, 1):
            far = [[(f - g) / 2 for f, g in zip(*pair, strict=True)] for pair in zip(told[k], told[1 - k], strict=True)]
            slopes = far if distance == "mse" else [[math.copysign(0.5, value) for value in row] for row in far]
            own[k] = descend(stepped(own[k], slopes), k)
    data = public(federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)), *P)
    hyper = {**QUIET, "distance": distance}
    done = run("fedmd", data, TwoLayers, rounds=2, hyper=hyper, local={"lr": 1.0, "batch_size": 8})
    assert [values(done.personal[k]) for k in (0, 1)] == [near(*w) for w in own]


@pytest.mark.parametrize("distance", ["mae", "mse"])
def test_one_client_of_fedmd_agrees_with_itself(distance: str) -> None:
    """Its consensus is what it says itself, so the digest finds a loss of 0 and changes no bit.

    Both layers have one input, so that no sum depends on the size of a batch.
    """
    data = public(federation(([[1.0], [2.0], [-1.0]], [0, 1, 1])), 0.3, -0.7, 1.1, 2.3, -1.9, 0.9, -0.2)
    local = {"lr": 0.3, "batch_size": 2, "epochs": 0}
    plain, digested = (
        run("fedmd", data, TwoLayers, rounds=2, hyper={**QUIET, "digest_epochs": n, "distance": distance}, local=local)
        for n in (0, 3)
    )
    assert values(plain.personal[0]) != pytest.approx(list(START), abs=1e-3)
    assert_same(digested.personal, plain.personal)


@pytest.mark.parametrize("distance", ["mae", "mse"])
def test_a_digest_of_fedmd_comes_nearer_to_the_consensus(distance: str, tiny: Federation) -> None:
    """At each of four clients, on the images of the round."""
    options: dict[str, Any] = {
        "hyper": {**QUIET, "private_epochs": 10, "digest_epochs": 3, "subset": 60, "distance": distance},
        "local": {"lr": 0.05, "batch_size": 16, "epochs": 0},
    }
    done = run("fedmd", tiny, "mlp", rounds=1, **options)
    experiment = Experiment("fedmd", tiny, "mlp", rounds=1, **options)
    experiment.run()
    assert experiment.session is not None
    measure = F.l1_loss if distance == "mae" else F.mse_loss
    for client in range(4):
        (look,) = [m for m in done.messages if m.step == "look" and m.client == client]
        (learn,) = [m for m in done.messages if m.step == "learn" and m.client == client]
        before, consensus = look.up["logits"], learn.down["consensus"]
        assert isinstance(before, Tensor)
        assert isinstance(consensus, Tensor)
        images = codistillation.public_part(experiment.session._runner.client(client, 1, {}), 1, 60)
        after = codistillation.predict(experiment.model(client), images)
        assert measure(after, consensus) < 0.9 * measure(before, consensus)


@pytest.mark.parametrize("agg", ["uniform", "samples"])
def test_a_client_of_fedmd_that_can_not_train_counts_in_every_round(agg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With BatchNorm, client 0 makes no batch of its one sample; its logits are those of the public training.

    So in the first round, in which it makes up for that training, as in the second.
    """
    monkeypatch.setattr("pfed.methods.fedmd.FedMD.start", lambda self, server, cohort: None)
    data = dataclasses.replace(blobs((1, 6, 9)), public=blobs((12,)).clients[0].train)
    hyper = {**QUIET, "agg": agg}
    done = run("fedmd", data, normed, rounds=2, hyper=hyper, local={"lr": 0.1, "batch_size": 4})
    shares = {"uniform": (1, 1, 1), "samples": (1, 6, 9)}[agg]
    for round in (1, 2):
        sent = [m.up["logits"] for m in done.messages if m.step == "look" and m.round == round]
        got = [m.down["consensus"] for m in done.messages if m.step == "learn" and m.round == round]
        parts = [share * logits.double() for share, logits in zip(shares, sent, strict=True)]  # type: ignore[union-attr]
        expected = (torch.stack(parts).sum(0) / sum(shares)).float()
        assert len(got) == 3
        assert all(torch.allclose(consensus, expected) for consensus in got)  # type: ignore[arg-type]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def test_feddf_by_hand() -> None:
    """Three steps of Adam on KL(softmax(t) || softmax(f)), t the plain mean of the clients' logits, f from their mean.

    For f its gradient is softmax(f) - softmax(t), mean over the images. By samples the mean of weights is 1/4 and 3/4;
    the rates are lr (1 + cos(π s/3))/2, that is lr, 3/4 lr, 1/4 lr. The length of an Adam step tells nothing of the
    first gradient; that of the others depends on how it changes.
    """
    data = public(federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3)), *P)
    hyper = {"server_steps": 3, "server_lr": 0.4, "patience": 0}
    done = run("feddf", data, TwoLayers, rounds=1, hyper=hyper, local={"lr": 1.0, "batch_size": 8})
    own = [descend(START, k) for k in (0, 1)]
    w, m, v = list(mean(*own, share=0.25)), [0.0] * 3, [0.0] * 3
    for step, rate in ((1, 0.4), (2, 0.3), (3, 0.1)):
        slopes = []
        for x in P:
            teacher = [sum(pair) / 2 for pair in zip(*(logits(k, x) for k in own), strict=True)]
            b, h0, h1 = w
            found = softmax(logits((b, h0, h1), x))
            slope = [q - p for q, p in zip(found, softmax(teacher), strict=True)]
            slopes.append(backward((b, h0, h1), x, slope))
        for i in range(3):
            g = sum(slope[i] for slope in slopes) / len(P)
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            w[i] -= rate * m[i] / (1 - 0.9**step) / (math.sqrt(v[i] / (1 - 0.999**step)) + 1e-8)
    assert values(done.server["params"]) == pytest.approx(w, abs=1e-5)


Watch = Callable[[Any, nn.Module, Tensor, Tensor, Tensor], float]


@pytest.mark.parametrize(("patience", "end"), [(30, 50), (25, 50), (20, 40), (0, 70)])
def test_the_patience_of_feddf(patience: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at steps 0, 10, 20, …, the divergence lowest at 20: it ends `patience` steps later, or at the next.

    What counts is then the model of step 20. Without patience there is no look, and the last model counts.
    """
    found = iter([5.0, 4.0, 3.0, 3.5, 3.0, 3.2, 3.1, 9.0])
    models: list[Tensors] = []
    steps = 0
    step = torch.optim.Adam.step

    def look(self: Any, student: nn.Module, teacher: Tensor, x: Tensor, index: Tensor) -> float:
        models.append(anatomy.params(student))
        assert len(index) == (2 if patience else 0)
        return next(found) if patience else math.inf

    def count(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, *args)

    watch: Watch = look
    monkeypatch.setattr(feddf.FedDF, "_apart", watch)
    monkeypatch.setattr(torch.optim.Adam, "step", count)
    data = dataclasses.replace(blobs((6, 9)), public=blobs((20,)).clients[0].train)
    hyper = {"server_steps": 70, "patience": patience, "server_batch": 8}
    done = run("feddf", data, mlp, rounds=1, hyper=hyper, local={"lr": 0.1})
    assert steps == end
    assert len(models) == 1 + end // 10
    assert_same(done.server["params"], models[2 if patience else -1])


@pytest.mark.parametrize("bn", ["local-stats", "local-all"])
def test_feddf_needs_all_of_batchnorm_at_the_server(bn: str, tiny: Federation) -> None:
    message = rf"FedDF runs models at the server, which needs run\.bn 'share'\. Got '{bn}'\."
    with pytest.raises(UserError, match=message):
        Experiment("feddf", tiny, "cnn-small-bn", rounds=1, bn=bn).run()


def test_the_server_gives_its_models_back(tiny: Federation) -> None:
    """Also where clients run elsewhere, so that no client's step does it."""
    hyper = {"server_steps": 2}
    experiment = Experiment("feddf", tiny, "mlp", rounds=3, hyper=hyper, engine="processes", workers=1)
    experiment.run()
    assert experiment.session is not None
    pool = experiment.session.exchange.pool
    assert not pool._lent
    assert sum(map(len, pool._free)) == 1  # one and the same in all rounds


def test_a_round_that_fails_gives_its_models_back(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def borrow(self: Any, server: Any, cohort: Cohort) -> None:
        cohort.model()
        raise ArithmeticError

    monkeypatch.setattr(feddf.FedDF, "round", borrow)
    experiment = Experiment("feddf", tiny, "mlp", rounds=1)
    with pytest.raises(ArithmeticError):
        experiment.run()
    assert experiment.session is not None
    assert not experiment.session.exchange.pool._lent
