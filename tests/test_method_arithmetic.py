"""Every method by hand: two clients, three weights, the arithmetic in the docstring, no autograd in what is expected.

The model is z = b x, logits = h z with one weight b in the body and two, h = (h0, h1), in the head. With p =
softmax(h z) and e = p - onehot(y), the gradient of the cross-entropy is x (e0 h0 + e1 h1) for b and z (e0, e1) for h.

All start from b = 1, h = (0, ln 3), where the first gradients are round numbers.

- Client 0 has x = 1, y = 0 (once): z = 1, p = (1/4, 3/4), e = (-3/4, 3/4), so g = (3/4 ln 3; -3/4, 3/4).
- Client 1 has x = 2, y = 1 (three times): z = 2, p = (1/10, 9/10), e = (1/10, -1/10), so g = (-1/5 ln 3; 1/5, -1/5).

The learning rate is 1 and every batch is a client's whole data, so an epoch is one step. By samples client 0 counts 1/4
and client 1 counts 3/4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers import Run, federation, run
from torch import Tensor, nn

LN3 = math.log(3)
START = (1.0, 0.0, LN3)
DATA = ((1.0, 0), (2.0, 1))  # x and y of the two clients
Weights = tuple[float, float, float]  # b, h0, h1


class TwoLayers(nn.Module):
    """z = b x, logits = h z."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.body.weight.fill_(START[0])
            self.head.weight.copy_(torch.tensor(START[1:]).view(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def go(method: str, rounds: int = 1, hyper: Mapping[str, Any] | None = None, **local: float) -> Run:
    """A run of the two clients."""
    clients = federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3))
    return run(method, clients, TwoLayers, rounds=rounds, hyper=hyper, local={"lr": 1.0, "batch_size": 8, **local})


def gradient(w: Weights, client: int) -> Weights:
    """The gradient of a client's loss, in plain floats."""
    (b, *h), (x, y) = w, DATA[client]
    z = b * x
    powers = [math.exp(weight * z) for weight in h]
    e = [power / sum(powers) - (label == y) for label, power in enumerate(powers)]
    return (e[0] * h[0] + e[1] * h[1]) * x, e[0] * z, e[1] * z


def combine(*terms: tuple[float, Weights]) -> Weights:
    """The sum of multiples: combine((1, w), (-1, g)) is w - g."""
    b, h0, h1 = (sum(factor * w[i] for factor, w in terms) for i in range(3))
    return b, h0, h1


def descend(w: Weights, client: int) -> Weights:
    """One step of the client's own."""
    return combine((1, w), (-1, gradient(w, client)))


def mean(first: Weights, second: Weights, share: float) -> Weights:
    """The clients' mean, the first with this share."""
    return combine((share, first), (1 - share, second))


def values(tensors: Mapping[str, Tensor]) -> list[float]:
    """The weights in the order b, h0, h1; those that are not there are left out."""
    return [x for name in ("body.weight", "head.weight") if name in tensors for x in tensors[name].flatten().tolist()]


def near(*expected: float) -> Any:
    return pytest.approx(list(expected), abs=2e-6)


def test_the_gradients_at_the_start() -> None:
    """The formula that these tests use gives the numbers of this file's docstring."""
    assert gradient(START, 0) == pytest.approx((0.75 * LN3, -0.75, 0.75))
    assert gradient(START, 1) == pytest.approx((-0.2 * LN3, 0.2, -0.2))


def test_local() -> None:
    """Two rounds under one optimiser with momentum 1/2: w1 = w - g(w), w2 = w1 - (g(w)/2 + g(w1)); nothing is sent.

    After the first round client 0 has (1 - 3/4 ln 3; 3/4, ln 3 - 3/4) and client 1 (1 + 1/5 ln 3; -1/5, ln 3 + 1/5).
    """
    once, twice = go("local", 1, momentum=0.5), go("local", 2, momentum=0.5)
    assert values(once.personal[0]) == near(1 - 0.75 * LN3, 0.75, LN3 - 0.75)
    assert values(once.personal[1]) == near(1 + 0.2 * LN3, -0.2, LN3 + 0.2)
    for client in (0, 1):
        w1 = descend(START, client)
        w2 = combine((1, w1), (-0.5, gradient(START, client)), (-1, gradient(w1, client)))
        assert values(twice.personal[client]) == near(*w2)
    assert twice.result.bytes_up == twice.result.bytes_down == 0


def test_all() -> None:
    """The union has four samples, so its gradient is G = (g_0 + 3 g_1)/4; two rounds under one optimiser, momentum 1/2.

    w1 = w - G(w) = (1 - 3/80 ln 3; 3/80, ln 3 - 3/80), as 3/4 · 1/4 - 1/5 · 3/4 = 3/80; w2 = w1 - (G(w)/2 + G(w1)).
    """
    assert values(go("all", momentum=0.5).server["params"]) == near(1 - 0.0375 * LN3, 0.0375, LN3 - 0.0375)

    def pooled(w: Weights) -> Weights:
        return combine((0.25, gradient(w, 0)), (0.75, gradient(w, 1)))

    w1 = combine((1, START), (-1, pooled(START)))
    w2 = combine((1, w1), (-0.5, pooled(START)), (-1, pooled(w1)))
    twice = go("all", 2, momentum=0.5)
    assert values(twice.server["params"]) == near(*w2)
    assert values(twice.personal[0]) == values(twice.personal[1]) == values(twice.server["params"])
    assert twice.result.bytes_up == twice.result.bytes_down == 0


@pytest.mark.parametrize(("agg", "step"), [("samples", 0.0375), ("uniform", 0.275)])
def test_fedavg(agg: str, step: float) -> None:
    """The clients send w_0 = (1 - 3/4 ln 3; 3/4, ln 3 - 3/4) and w_1 = (1 + 1/5 ln 3; -1/5, ln 3 + 1/5).

    Their mean is (1 - s ln 3; s, ln 3 - s) with s = 3/4 · 1/4 - 1/5 · 3/4 = 3/80 by samples, and with equal shares s =
    3/4 · 1/2 - 1/5 · 1/2 = 11/40. Three floats of four bytes go to and from each of the two clients.
    """
    done = go("fedavg", hyper={"agg": agg})
    assert values(done.server["params"]) == near(1 - step * LN3, step, LN3 - step)
    assert values(done.personal[0]) == values(done.personal[1]) == values(done.server["params"])
    assert done.result.bytes_up == done.result.bytes_down == 24


def test_fedprox() -> None:
    """Two steps with mu = 1/2: w1 = w - g(w), as the pull is zero at w; w2 = w1 - (g(w1) + (w1 - w)/2).

    The server takes w2_0 /4 + 3/4 w2_1.
    """
    done = go("fedprox", hyper={"mu": 0.5}, epochs=2)
    own = []
    for client in (0, 1):
        w1 = descend(START, client)
        own.append(combine((1, descend(w1, client)), (-0.5, w1), (0.5, START)))
    assert values(done.server["params"]) == near(*mean(*own, share=0.25))


def test_fedper() -> None:
    """Round 1: b = 1/4 (1 - 3/4 ln 3) + 3/4 (1 + 1/5 ln 3) = 1 - 3/80 ln 3.

    The heads stay apart, (3/4, ln 3 - 3/4) and (-1/5, ln 3 + 1/5). Round 2 goes on from this b with each client's own
    head. A client sends one float a round.
    """
    once, twice = go("fedper", 1), go("fedper", 2)
    base = 1 - 0.0375 * LN3
    heads = [(0.75, LN3 - 0.75), (-0.2, LN3 + 0.2)]
    assert [values(once.personal[client]) for client in (0, 1)] == [near(base, *head) for head in heads]

    own = [descend((base, *head), client) for client, head in enumerate(heads)]
    base = own[0][0] / 4 + 3 / 4 * own[1][0]
    assert [values(twice.personal[client]) for client in (0, 1)] == [near(base, *w[1:]) for w in own]
    assert values(twice.server["base"]) == near(base)
    assert twice.result.bytes_up == twice.result.bytes_down == 2 * 2 * 4


def test_lg_fedavg() -> None:
    """Only the head is shared, by the simple mean. Round 1: h0 = (3/4 - 1/5)/2 = 11/40 and h1 = ln 3 - 11/40.

    The bodies stay apart, 1 - 3/4 ln 3 and 1 + 1/5 ln 3. Round 2 goes on from this h with each client's own body. A
    client sends two floats a round.
    """
    once, twice = go("lg-fedavg", 1, {"shared": 1}), go("lg-fedavg", 2, {"shared": 1})
    top = (0.275, LN3 - 0.275)
    bodies = [1 - 0.75 * LN3, 1 + 0.2 * LN3]
    assert [values(once.personal[client]) for client in (0, 1)] == [near(body, *top) for body in bodies]

    own = [descend((body, *top), client) for client, body in enumerate(bodies)]
    _, *top = mean(*own, share=0.5)
    assert [values(twice.personal[client]) for client in (0, 1)] == [near(w[0], *top) for w in own]
    assert values(twice.server["top"]) == near(*top)
    assert twice.result.bytes_up == twice.result.bytes_down == 2 * 2 * 8


def test_fedrep() -> None:
    """Two steps of the head at b = 1, the first to (3/4, ln 3 - 3/4) and (-1/5, ln 3 + 1/5).

    Then one step of b under the new head; the server's b is the simple mean. A client sends one float.
    """
    done = go("fedrep", hyper={"head_epochs": 2, "body_epochs": 1})
    first = [(1.0, 0.75, LN3 - 0.75), (1.0, -0.2, LN3 + 0.2)]
    heads = [descend(w, client)[1:] for client, w in enumerate(first)]
    bodies = [descend((1.0, *head), client)[0] for client, head in enumerate(heads)]
    body = (bodies[0] + bodies[1]) / 2
    assert values(done.server["body"]) == near(body)
    assert [values(done.personal[client]) for client in (0, 1)] == [near(body, *head) for head in heads]
    assert done.result.bytes_up == done.result.bytes_down == 2 * 4


def test_ditto() -> None:
    """Two rounds with lam = 1/2. In the first v_k = w - g_k(w), as the pull is zero at w.

    The server then has w1 = (1 - 3/80 ln 3; 3/80, ln 3 - 3/80). In the second v_k' = v_k - (g_k(v_k) + (v_k - w1)/2),
    pulled towards the w1 that came, and the server's w2 is the mean of w1 - g_k(w1) by samples.
    """
    once, twice = go("ditto", 1, {"lam": 0.5}), go("ditto", 2, {"lam": 0.5})
    w1 = (1 - 0.0375 * LN3, 0.0375, LN3 - 0.0375)
    assert values(once.server["params"]) == near(*w1)
    for client in (0, 1):
        v = descend(START, client)
        assert values(once.personal[client]) == near(*v)
        assert values(twice.personal[client]) == near(*combine((1, descend(v, client)), (-0.5, v), (0.5, w1)))
    assert values(twice.server["params"]) == near(*mean(descend(w1, 0), descend(w1, 1), share=0.25))
    assert twice.result.bytes_up == twice.result.bytes_down == 2 * 24


def test_ditto_at_full_pull() -> None:
    """With lr · lam = 1 and no gradient of its own (x = 0), v ← v - (v - w1) = w1, the model received in round 2."""
    clients = federation(([[0.0]], [0]), ([[2.0]], [1]))
    options: dict[str, Any] = {"hyper": {"lam": 1.0}, "local": {"lr": 1.0}}
    w1 = run("ditto", clients, TwoLayers, rounds=1, **options).server["params"]
    assert values(w1) != near(*START)
    assert values(run("ditto", clients, TwoLayers, rounds=2, **options).personal[0]) == near(*values(w1))


def test_fedavg_with_fine_tuning() -> None:
    """After one round w = (1 - 3/80 ln 3; 3/80, ln 3 - 3/80). Then each client takes two steps of the head alone.

    Nothing is sent after the round, but w comes once more.
    """
    done = go("fedavg+ft", hyper={"ft_epochs": 2})
    w = (1 - 0.0375 * LN3, 0.0375, LN3 - 0.0375)
    assert values(done.server["params"]) == near(*w)
    for client in (0, 1):
        tuned = w
        for _ in range(2):
            tuned = (w[0], *descend(tuned, client)[1:])
        assert values(done.personal[client]) == near(*tuned)
    assert (done.result.bytes_up, done.result.bytes_down) == (24, 48)


class Normed(nn.Module):
    """logits = h (gamma x̂ + beta), x̂ = (x - mean)/√var over the batch; at the start gamma = 1, beta = 0, h = (0, ln 3).

    - Client 0 has x = -1 with y = 1 and x = 3 with y = 0: mean 1, variance 4 (8 without bias), x̂ = -1 and 1.
    - Client 1 has x = 2 and x = 10, three of each, all with y = 1: mean 6, variance 16 (19.2 without bias), x̂ likewise.

    At x̂ = -1 p = (3/4, 1/4), at x̂ = 1 p = (1/4, 3/4). So e = p - onehot(y) is (3/4, -3/4) and (-3/4, 3/4) in client 0,
    (3/4, -3/4) and (1/4, -1/4) in client 1. The gradients are the batch means of (e·h) x̂ for gamma, of e·h for beta and
    (as beta is 0) of e x̂ for h: (3/4 ln 3; 0; -3/4, 3/4) in client 0, (1/4 ln 3; -1/2 ln 3; -1/4, 1/4) in client 1.

    Running statistics move by a tenth from (0, 1) to the batch's mean and its variance without bias: to (0.1, 1.7) and
    (0.6, 2.82) in the first step and, where they stay at the client, to (0.19, 2.33) and (1.14, 4.458) in the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.BatchNorm1d(1, eps=1e-12), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(START[1:]).view(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x))
        return out


LABELS = ((1, 0), (1, 1))  # of x̂ = -1 and x̂ = 1 in the two clients
STATS = ((0.1, 1.7), (0.6, 2.82))
STATS_AFTER_TWO = ((0.19, 2.33), (1.14, 4.458))


def norm_run(method: str, rounds: int = 1) -> Run:
    clients = federation(([[-1.0], [3.0]], [1, 0]), ([[2.0], [10.0]] * 3, [1] * 6))
    return run(method, clients, Normed, rounds=rounds, local={"lr": 1.0, "batch_size": 8})


def norm_descend(w: Sequence[float], client: int) -> list[float]:
    """One step of (gamma, beta, h0, h1) in plain floats."""
    gamma, beta, *h = w
    g = [0.0] * 4
    for x, y in zip((-1.0, 1.0), LABELS[client], strict=True):
        z = gamma * x + beta
        powers = [math.exp(weight * z) for weight in h]
        e = [power / sum(powers) - (label == y) for label, power in enumerate(powers)]
        dz = e[0] * h[0] + e[1] * h[1]
        g = [total + part / 2 for total, part in zip(g, (dz * x, dz, e[0] * z, e[1] * z), strict=True)]
    return [weight - slope for weight, slope in zip(w, g, strict=True)]


def norm_values(tensors: Mapping[str, Tensor]) -> list[float]:
    """gamma, beta, h0, h1; those that are not there are left out."""
    names = [name for name in ("first.weight", "first.bias", "head.weight") if name in tensors]
    return [value for name in names for value in tensors[name].flatten().tolist()]


def statistics(tensors: Mapping[str, Tensor]) -> list[float]:
    return [tensors[f"first.running_{name}"].item() for name in ("mean", "var")]


def test_the_gradients_at_the_start_with_batchnorm() -> None:
    """The formula that these tests use gives the numbers of the model's docstring."""
    start = (1.0, 0.0, 0.0, LN3)
    assert norm_descend(start, 0) == pytest.approx([1 - 0.75 * LN3, 0, 0.75, LN3 - 0.75])
    assert norm_descend(start, 1) == pytest.approx([1 - 0.25 * LN3, 0.5 * LN3, 0.25, LN3 - 0.25])


def test_fedavg_averages_statistics() -> None:
    """By samples: gamma = 1 - (1/4 · 3/4 + 3/4 · 1/4) ln 3 = 1 - 3/8 ln 3, beta = 3/8 ln 3, h = (3/8, ln 3 - 3/8).

    Running mean 1/4 · 0.1 + 3/4 · 0.6 = 0.475, variance 1/4 · 1.7 + 3/4 · 2.82 = 2.54. The second round starts there:
    0.9 · 0.475 + 0.1 (1/4 · 1 + 3/4 · 6) = 0.9025 and 0.9 · 2.54 + 0.1 (1/4 · 8 + 3/4 · 19.2) = 3.926. The counter of
    batches is not sent: six floats and no integer.
    """
    once, twice = norm_run("fedavg"), norm_run("fedavg", 2)
    assert norm_values(once.server["params"]) == near(1 - 0.375 * LN3, 0.375 * LN3, 0.375, LN3 - 0.375)
    assert statistics(once.server["params"]) == near(0.475, 2.54)
    assert statistics(twice.server["params"]) == near(0.9025, 3.926)
    assert [twice.personal[client]["first.num_batches_tracked"].item() for client in (0, 1)] == [2, 2]
    assert once.result.bytes_up == once.result.bytes_down == 2 * 24


def test_fedbn() -> None:
    """Only h is averaged, by the simple mean: ((3/4 + 1/4)/2, ln 3 - 1/2).

    Each client keeps its own gamma, beta and running statistics, and builds on them in the next round. It sends two
    floats.
    """
    once, twice = norm_run("fedbn"), norm_run("fedbn", 2)
    h = [0.5, LN3 - 0.5]
    affine = [[1 - 0.75 * LN3, 0.0], [1 - 0.25 * LN3, 0.5 * LN3]]
    assert once.server["params"].keys() == {"head.weight"}
    assert norm_values(once.server["params"]) == near(*h)
    own = [norm_descend([*affine[client], *h], client) for client in (0, 1)]
    h_after = [(own[0][i] + own[1][i]) / 2 for i in (2, 3)]
    for client in (0, 1):
        assert norm_values(once.personal[client]) == near(*affine[client], *h)
        assert norm_values(twice.personal[client]) == near(*own[client][:2], *h_after)
        assert statistics(once.personal[client]) == near(*STATS[client])
        assert statistics(twice.personal[client]) == near(*STATS_AFTER_TWO[client])
        assert twice.personal[client]["first.num_batches_tracked"].item() == 2
    assert once.result.bytes_up == once.result.bytes_down == 2 * 8


def test_silobn() -> None:
    """gamma, beta and h are averaged by samples, as in FedAvg: 1 - 3/8 ln 3, 3/8 ln 3, (3/8, ln 3 - 3/8).

    Each client keeps its running statistics, and builds on them in the next round. It sends four floats.
    """
    once, twice = norm_run("silobn"), norm_run("silobn", 2)
    shared = [1 - 0.375 * LN3, 0.375 * LN3, 0.375, LN3 - 0.375]
    assert once.server["params"].keys() == {"first.weight", "first.bias", "head.weight"}
    assert norm_values(once.server["params"]) == near(*shared)
    own = [norm_descend(shared, client) for client in (0, 1)]
    assert norm_values(twice.server["params"]) == near(*(a / 4 + 3 / 4 * b for a, b in zip(*own, strict=True)))
    for client in (0, 1):
        assert norm_values(once.personal[client]) == near(*shared)
        assert statistics(once.personal[client]) == near(*STATS[client])
        assert statistics(twice.personal[client]) == near(*STATS_AFTER_TWO[client])
        assert twice.personal[client]["first.num_batches_tracked"].item() == 2
    assert once.result.bytes_up == once.result.bytes_down == 2 * 16
