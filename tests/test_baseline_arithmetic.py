"""The baselines by hand: the two clients and three weights of `test_method_arithmetic`, in plain floats.

Client 0 has one sample and client 1 three, so by samples they count 1/4 and 3/4. An epoch is one step.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Residual, blobs, federation, mlp, run
from test_method_arithmetic import DATA as SAMPLES
from test_method_arithmetic import (
    START,
    TwoLayers,
    Weights,
    combine,
    descend,
    go,
    gradient,
    mean,
    near,
    values,
)
from torch import Tensor, nn

from pfed import Experiment, Tensors, anatomy
from pfed.methods import fedpac
from pfed.models.fixedheads import orthonormal, simplex_frame
from pfed.prototypes import all_features

ZERO = (0.0, 0.0, 0.0)


def scaffold(rounds: int, epochs: int, rate: float = 0.25) -> tuple[Weights, Weights, list[Weights]]:
    """SCAFFOLD with option II: the server's model and variate, and the clients' variates."""
    x, c, own = START, ZERO, [ZERO, ZERO]
    for _ in range(rounds):
        ends, news = [], []
        for k in (0, 1):
            y = x
            for _ in range(epochs):
                y = combine((1, y), (-rate, gradient(y, k)), (rate, own[k]), (-rate, c))
            ends.append(y)
            news.append(combine((1, own[k]), (-1, c), (1 / (epochs * rate), x), (-1 / (epochs * rate), y)))
        x = mean(*ends, share=0.5)
        c = combine((1, c), *((0.5 * sign, w) for k in (0, 1) for sign, w in ((1, news[k]), (-1, own[k]))))
        own = news
    return x, c, own


@pytest.mark.parametrize("epochs", [1, 3])
def test_scaffold_over_five_rounds(epochs: int) -> None:
    """Against a simulation by hand, at lr 1/4; momentum and weight decay of the run are left out."""
    done = go("scaffold", 5, lr=0.25, epochs=epochs, momentum=0.9, weight_decay=0.1)
    x, c, own = scaffold(5, epochs)
    assert values(done.server["params"]) == near(*x)
    assert values(done.server["control"]) == near(*c)
    for k in (0, 1):
        assert values(done.states[k]["control"]) == near(*own[k])
    assert values(done.server["control"]) == near(*mean(*own, share=0.5))  # all take part
    assert done.result.bytes_up == done.result.bytes_down == 5 * 2 * 2 * 12


def test_scaffold_once_is_fedavg() -> None:
    """All variates are zero in the first round."""
    one, other = go("scaffold"), go("fedavg", hyper={"agg": "uniform"})
    assert values(one.server["params"]) == values(other.server["params"])
    half = go("scaffold", hyper={"eta_g": 0.5})
    assert values(half.server["params"]) == near(*mean(START, tuple(values(one.server["params"])), share=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_perfedavg(variant: str) -> None:
    """A client has one batch, which serves as D, D' and D''. HF: the Hessian product by differences of gradients."""
    alpha, beta, delta = 0.5, 1.0, 0.01
    done = go("perfedavg", hyper={"variant": variant, "alpha": alpha, "delta": delta})
    own = []
    for k in (0, 1):
        d = gradient(combine((1, START), (-alpha, gradient(START, k))), k)
        step = d
        if variant == "hf":
            above, below = (gradient(combine((1, START), (sign * delta, d)), k) for sign in (1, -1))
            step = combine((1, d), (-alpha / (2 * delta), above), (alpha / (2 * delta), below))
        own.append(combine((1, START), (-beta, step)))
    w = mean(*own, share=0.5)
    assert values(done.server["params"]) == pytest.approx(list(w), abs=2e-4 if variant == "hf" else 2e-6)
    for k in (0, 1):
        adapted = combine((1, w), (-alpha, gradient(w, k)))
        assert values(done.personal[k]) == pytest.approx(list(adapted), abs=3e-4 if variant == "hf" else 2e-6)


def test_perfedavg_without_adaptation_is_fedavg() -> None:
    """alpha = 0 leaves FedAvg on D', at every second batch."""
    one, other = go("perfedavg", hyper={"alpha": 0.0}), go("fedavg", hyper={"agg": "uniform"})
    assert values(one.server["params"]) == values(other.server["params"])


def test_hessian_free_is_exact_for_a_quadratic() -> None:
    """With F(w) = ½ wᵀAw differences of gradients give A d exactly: w − β (I − αA) A (I − αA) w."""

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(3, 1, bias=False)
            with torch.no_grad():
                self.head.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x)
            return out

    a = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 1.5]], dtype=torch.float64)
    experiment = Experiment(
        "perfedavg",
        federation(([[0.0, 0.0, 0.0]], [0]), classes=1),
        Quadratic,
        rounds=1,
        hyper={"variant": "hf", "alpha": 0.1, "delta": 0.5},
        local={"lr": 0.2},
        eval_every=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pfed.tasks.classification.Classification.loss",
            lambda self, model, batch: 0.5 * (model.head.weight @ a.float() @ model.head.weight.T).squeeze(),
        )
        experiment.run()
    assert experiment.session is not None
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    inner = torch.eye(3, dtype=torch.float64) - 0.1 * a
    expected = w - 0.2 * inner @ a @ inner @ w
    found = experiment.session.server["params"]["head.weight"].flatten().double()
    assert torch.allclose(found, expected, atol=1e-5)


def apfl(alpha: float, rounds: int, adaptive: bool) -> tuple[Weights, list[Weights], list[float]]:
    """APFL at lr 1: the global model, the clients' own and their weights."""
    w, own, weights = START, [START, START], [alpha, alpha]
    for _ in range(rounds):
        ends = []
        for k in (0, 1):
            v, a = own[k], weights[k]
            g = gradient(combine((a, v), (1 - a, w)), k)
            slope = sum((x - y) * z for x, y, z in zip(v, w, g, strict=True))
            own[k] = combine((1, v), (-a, g))
            weights[k] = min(max(a - slope, 0.0), 1.0) if adaptive else a
            ends.append(descend(w, k))
        w = mean(*ends, share=0.5)
    return w, own, weights


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl(adaptive: bool) -> None:
    """Three rounds; the mixture has w from before its step, and is judged with the newest."""
    done = go("apfl", 3, {"alpha": 0.25, "adaptive": adaptive})
    w, own, weights = apfl(0.25, 3, adaptive)
    assert values(done.server["params"]) == near(*w)
    for k in (0, 1):
        assert done.states[k]["alpha"] == pytest.approx(weights[k], abs=2e-6)
        assert values(done.states[k]["v"]) == near(*own[k])
        assert values(done.personal[k]) == near(*combine((weights[k], own[k]), (1 - weights[k], w)))
    assert (weights[0] != 0.25) == adaptive


def loss(w: Weights, client: int) -> float:
    """The cross-entropy of a client's sample, in plain floats."""
    (b, *h), (x, y) = w, SAMPLES[client]
    return math.log(sum(math.exp(weight * b * x) for weight in h)) - h[y] * b * x


def test_the_slope_of_apfl_is_that_of_the_loss() -> None:
    """What α moved by in round 2, over its rate, is dF(αv + (1 − α)w)/dα, by differences of the loss."""
    once, twice = (go("apfl", rounds, {"alpha": 0.25, "alpha_lr": 0.125}) for rounds in (1, 2))
    w: Weights = tuple(values(once.server["params"]))  # type: ignore[assignment]
    for k in (0, 1):
        v, alpha = tuple(values(once.states[k]["v"])), once.states[k]["alpha"]
        slope = (alpha - twice.states[k]["alpha"]) / 0.125
        above, below = (loss(combine((a, v), (1 - a, w)), k) for a in (alpha + 1e-5, alpha - 1e-5))  # type: ignore[arg-type]
        assert slope == pytest.approx((above - below) / 2e-5, abs=1e-5)
        assert abs(slope) > 0.01


def test_l2gd() -> None:
    """Local rounds until the coin says aggregate; then each model goes a quarter of the way to their mean."""
    done = go("l2gd", 10, {"p": 0.5, "mix": 0.25})
    turns = [value for _, client, name, value in done.result.logs if name == "aggregation"]
    assert 0 < sum(turns) < 10
    x = [START, START]
    moved = 0
    for aggregates, before in zip(turns, [1.0, *turns], strict=False):
        if aggregates:
            middle = mean(*x, share=0.5)
            x = [combine((0.75, own), (0.25, middle)) for own in x]
            moved += not before
        else:
            x = [descend(own, k) for k, own in enumerate(x)]
    assert [values(done.personal[k]) for k in (0, 1)] == [near(*own) for own in x]
    assert done.result.bytes_up == done.result.bytes_down == moved * 2 * 12  # not where nobody trained in between


def test_pfedme() -> None:
    """Two steps of θ on the batch, then w towards it."""
    done = go("pfedme", 1, {"lam": 2.0, "inner_steps": 2, "personal_lr": 0.1, "eta": 0.2, "beta": 0.5})
    ends = []
    for k in (0, 1):
        theta = START
        for _ in range(2):
            theta = combine((1, theta), (-0.1, gradient(theta, k)), (-0.2, theta), (0.2, START))
        assert values(done.personal[k]) == near(*theta)
        ends.append(combine((1, START), (-0.4, START), (0.4, theta)))
    assert values(done.server["params"]) == near(*combine((0.5, START), (0.5, mean(*ends, share=0.5))))


def test_the_inner_loop_of_pfedme_comes_to_its_fixed_point() -> None:
    """Many steps: ∇F(θ) + λ (θ − w) = 0."""
    done = go("pfedme", 1, {"lam": 3.0, "inner_steps": 500, "personal_lr": 0.1})
    for k in (0, 1):
        theta = values(done.personal[k])
        slope = gradient(tuple(theta), k)  # type: ignore[arg-type]
        assert [g + 3.0 * (t - w) for g, t, w in zip(slope, theta, START, strict=True)] == near(0, 0, 0)


def test_fedpac_weighs_equal_clients_equally() -> None:
    """And leaves out those that are far away, with weights below a thousandth."""
    means = torch.zeros(4, 2, 3, dtype=torch.float64)
    means[3] += 100
    alpha = fedpac.combination(torch.ones(4, dtype=torch.float64), means, 0)
    assert alpha.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert alpha[3] == 0


def test_calibration_of_spherefed_is_ridge_regression() -> None:
    """From sums over clients the same classifier as from all data in one place."""
    experiment = Experiment("spherefed", blobs((7, 12, 5, 9)), mlp, rounds=2, hyper={"rho": 0.5}, local={"lr": 0.1})
    experiment.run()
    session = experiment.session
    assert session is not None
    parts = []
    for k in session.clients:
        client = session._runner.client(k, 3, {})
        z, y = all_features(client, client.model(session.server["params"]))
        parts.append((F.normalize(z, dim=1).double(), F.one_hot(y, 3).double()))
    z, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    expected = torch.linalg.solve(z.T @ z + 0.5 * torch.eye(z.shape[1], dtype=torch.float64), z.T @ y)
    assert torch.allclose(session.server["classifier"].double(), expected, atol=1e-6)


@pytest.mark.parametrize(("width", "classes"), [(5, 5), (64, 10), (7, 2)])
def test_the_frame_of_fedetf(width: int, classes: int) -> None:
    """Unit rows, every two of them at the same and largest possible angle: cosine -1/(C - 1)."""
    frame = simplex_frame(width, classes).double()
    cosines = frame @ frame.T
    assert torch.allclose(cosines.diag(), torch.ones(classes, dtype=torch.float64), atol=1e-6)
    for i, j in itertools.combinations(range(classes), 2):
        assert float(cosines[i, j]) == pytest.approx(-1 / (classes - 1), abs=1e-6)
    rows = orthonormal(width, classes)
    assert torch.allclose(rows @ rows.T, torch.eye(classes), atol=1e-5)


def test_pfedsd() -> None:
    """Round 1 is FedAvg's; in round 2 the loss has also λ T² KL(softmax(p/T) || softmax(f/T))."""
    once, twice = go("pfedsd"), go("pfedsd", 2, {"lam": 0.5, "tau": 2.0})
    plain = go("fedavg", hyper={"agg": "uniform"})
    assert values(once.server["params"]) == values(plain.server["params"])
    w = tuple(values(once.server["params"]))
    for k, (x, y) in enumerate(((1.0, 0), (2.0, 1))):
        teacher = torch.tensor(descend(START, k), dtype=torch.float64)
        live = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        logits, target = live[1:] * live[0] * x, (teacher[1:] * teacher[0] * x / 2).softmax(0)
        loss = F.cross_entropy(logits[None], torch.tensor([y]))
        loss = loss + 0.5 * 4 * (target * (target.log() - (logits / 2).log_softmax(0))).sum()
        (slope,) = torch.autograd.grad(loss, live)
        assert values(twice.personal[k]) == near(*(live - slope).tolist())


def test_feddistill_leaves_the_own_logits_out() -> None:
    """Each client has a label that the other has not: only with its own logits does it get a target."""
    alone = go("local", 3, {"matched_participation": True})
    for leave, same in ((True, True), (False, False)):
        done = go("feddistill", 3, {"leave_one_out": leave, "lam": 1.0})
        assert (values(done.personal[0]) == values(alone.personal[0])) == same
    first = done.states[0]
    assert done.server["seen"][0].tolist() == [True, False]
    assert first is not None


def test_a_consensus_is_the_mean_of_logits() -> None:
    """FedMD without any training: what the second call brings is the mean of what the first sent."""
    data = Experiment("local", "digits", "mlp", clients=3, public=0.1, test_fraction=0.5).federation()
    hyper = {"public_epochs": 0, "private_epochs": 0, "digest_epochs": 0, "subset": 20}
    done = run("fedmd", data, "mlp,cnn-small", rounds=1, hyper=hyper, local={"epochs": 0})
    sent = [message.up["logits"] for message in done.messages if message.step == "look"]
    got = [message.down["consensus"] for message in done.messages if message.step == "learn"]
    assert len(sent) == len(got) == 3
    assert all(isinstance(logits, Tensor) and logits.shape == (20, 10) for logits in sent)
    expected = torch.stack(sent).double().mean(0).float()  # type: ignore[arg-type]
    assert all(torch.equal(consensus, expected) for consensus in got)  # type: ignore[arg-type]


def test_fedbabu_never_changes_the_head_before_tuning() -> None:
    """The head is the initial one, and no message has it."""
    done = run("fedbabu", blobs((7, 12, 5, 9)), Residual, rounds=3, hyper={"ft_epochs": 0}, local={"lr": 0.2})
    start = anatomy.snapshot(Experiment("fedbabu", blobs((7, 12, 5, 9)), Residual)._pool().template(-1))
    heads = anatomy.HEAD.names(Residual())
    for personal in done.personal.values():
        assert all(torch.equal(personal[name], start[name]) for name in heads)
    assert all(not message.names & heads for message in done.messages)


def test_the_personal_head_of_fedrod_changes_nothing_else() -> None:
    """Balanced softmax with equal counts adds a constant: base and generic head are those of FedAvg."""
    data = federation(([[1.0], [2.0]], [0, 1]), ([[-1.0], [3.0]], [1, 0]))
    local = {"lr": 0.5, "batch_size": 8}
    one = run("fedrod", data, TwoLayers, rounds=3, local=local)
    other = run("fedavg", data, TwoLayers, rounds=3, local=local)
    found = one.server["params"]
    assert found["encoder.body.weight"].item() == pytest.approx(other.server["params"]["body.weight"].item(), abs=1e-6)
    general = found["heads.global_head.weight"]
    assert torch.allclose(general, other.server["params"]["head.weight"], atol=1e-6)
    assert not any("personal" in name for message in one.messages for name in message.names)
    assert any("personal" in name for name in one.states[0]["kept"])


def test_fedproto_by_hand() -> None:
    """Prototypes are the clients' mean features by class, weighted by samples; no weight travels."""
    data = federation(([[1.0], [2.0], [3.0]], [0, 0, 1]), ([[4.0]], [0]))
    done = run("fedproto", data, TwoLayers, rounds=1, local={"epochs": 0, "lr": 1.0})
    assert {y: c.tolist() for y, c in done.server["prototypes"].items()} == {
        "0": pytest.approx([7 / 3]),
        "1": pytest.approx([3.0]),
    }
    even = run("fedproto", data, TwoLayers, rounds=1, hyper={"weighting": "uniform"}, local={"epochs": 0, "lr": 1.0})
    assert even.server["prototypes"]["0"].tolist() == pytest.approx([(1.5 + 4) / 2])
    assert {key for message in done.messages for key in message.up} == {"means", "counts"}
    assert [message.up["means"].keys() for message in done.messages] == [{"0", "1"}, {"0"}]  # of classes that it has


def test_feddf_moves_the_mean_towards_the_clients() -> None:
    """Without steps it is FedAvg; with some, the mean's logits come nearer to the mean of the clients' logits."""
    data = Experiment("local", "digits", "mlp", clients=5, public=0.2, classes_per_client=4).federation()
    assert data.public is not None
    x = data.public.take()[0]
    far = []
    for steps in (0, 60):
        done = run("feddf", data, "mlp", rounds=1, hyper={"server_steps": steps}, local={"lr": 0.1, "epochs": 3})
        sent = [message.up["params"] for message in done.messages]
        experiment = Experiment("fedavg", data, "mlp")
        model = experiment._pool().template(-1)

        def logits(params: object, model: nn.Module = model) -> Tensor:
            assert isinstance(params, Tensors)
            model.load_state_dict(params, strict=False)
            with torch.no_grad():
                out: Tensor = model.eval()(x)
            return out

        teacher = torch.stack([logits(params) for params in sent]).mean(0)
        student = logits(done.server["params"])
        far.append(float(F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")))
    assert far[1] < 0.8 * far[0]
