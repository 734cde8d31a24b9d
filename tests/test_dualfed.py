"""DualFed: every invariant of the method by its number, the contrastive loss, what is sent, what is refused.

Equality is bit for bit unless a test says otherwise. The model has dropout and BatchNorm, the optimiser momentum and
weight decay, unless a test says otherwise.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import Residual, Run, assert_same, blobs, federation, mlp, run, same
from torch import Tensor, nn

from pfed import Client, Cohort, Experiment, Method, Tensors, UserError, anatomy, features, head, models, step
from pfed.forward import View
from pfed.losses import supervised_contrastive
from pfed.methods.dualfed import ENCODER, GLOBAL_HEAD, PERSONAL_HEAD, PROJECTOR, DualFed
from pfed.models.twoheaded import OneHead, TwoHeaded, projector
from pfed.pool import Spec
from pfed.wire import State

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
PRIVATE = dict.fromkeys(("encoder", "projector", "personal_head", "global_head"), "private")
SHARED = dict.fromkeys(PRIVATE, "shared")
SMALL = {"lam": 1.0, "projector_hidden": 6}


def go(hyper: Mapping[str, Any] | None = None, model: Any = NOISY, data: Any = DATA, **options: Any) -> Run:
    """Three rounds of all clients, judged at the end, unless the options say otherwise."""
    defaults = {"rounds": 3, "local": LOCAL, "eval_every": 0}
    return run("dualfed", data, model, hyper={**SMALL, **(hyper or {})}, **{**defaults, **options})


def built(hyper: Mapping[str, Any] | None = None, make: Any = NOISY, seed: int = 0) -> TwoHeaded:
    """The model with which a run begins."""
    model = DualFed(**{**SMALL, **(hyper or {})}).build(Spec(make, classes=3, shape=(4,), seed=seed))
    assert isinstance(model, TwoHeaded)
    return model


def alone(model: TwoHeaded, personal: bool) -> nn.Module:
    """The model under one of its heads."""
    return View(model, OneHead(model.heads, personal))


NAMES = {part.label: part.names(built()) for part in (ENCODER, PROJECTOR, PERSONAL_HEAD, GLOBAL_HEAD, anatomy.STATS)}


def only(tensors: Mapping[str, Tensor], *labels: str, stats: bool = False) -> Tensors:
    """The tensors of these parts, without running statistics and counters unless asked."""
    names = frozenset().union(*(NAMES[label] for label in labels))
    return Tensors(tensors).only(names if stats else names - NAMES["stats"])


REST = ("encoder", "projector", "personal head")


@pytest.mark.parametrize("stage2_bn", ["train", "eval"])
@pytest.mark.parametrize("model", [mlp, NOISY], ids=["plain", "batchnorm"])
def test_without_projector_and_contrast_it_is_fedper(model: Any, stage2_bn: str) -> None:
    """Invariant 1: lam = 0, depth 0, the personal head alone: FedPer under the simple mean, statistics at the client.

    All trained tensors are FedPer's; with stage2_bn = eval the running statistics and counters are, too. The global
    head learns beside it and changes nothing.
    """
    dual = go({"lam": 0.0, "projector_depth": 0, "stage2_bn": stage2_bn}, model)
    plain = {"rounds": 3, "local": LOCAL, "eval_every": 0, "bn": "local-stats"}
    per = run("fedper", DATA, model, hyper={"agg": "uniform"}, **plain)
    start = anatomy.snapshot(built({"projector_depth": 0}, model))
    last = anatomy.head_name(model())
    buffers = anatomy.STATS.names(model())
    for client, theirs in per.personal.items():
        ours = {}
        for name, tensor in dual.personal[client].items():
            assert not name.startswith("projector.")
            if name.startswith("heads.global_head."):
                assert not torch.equal(tensor, start[name])
            elif name.startswith("heads.personal_head."):
                ours[f"{last}.{name.removeprefix('heads.personal_head.')}"] = tensor
            else:
                ours[name.removeprefix("encoder.")] = tensor
        assert ours.keys() == theirs.keys()
        if stage2_bn == "eval":
            assert_same(ours, theirs)
        else:
            assert_same(Tensors(ours).drop(buffers), theirs.drop(buffers))
            assert not buffers or not same(Tensors(ours).only(buffers), theirs.only(buffers))
    judged = dual.result.series["personal-head/local-test"][-1][1]
    assert stage2_bn == "train" or judged == per.result.values


class Watched:
    """`Client.fit`, but what it did to the model is noted by stream."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[Tensors, Tensors]]] = {}

    def __call__(self, client: Client, model: nn.Module, *args: Any, **options: Any) -> Any:
        before = anatomy.snapshot(model)
        done = self.fit(client, model, *args, **options)
        self.seen.setdefault(options["stream"], []).append((before, anatomy.snapshot(model)))
        return done

    fit = staticmethod(Client.fit)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watch = Watched()
    monkeypatch.setattr(Client, "fit", lambda client, model, *a, **k: watch(client, model, *a, **k))
    return watch


@pytest.mark.parametrize("stage2_bn", ["train", "eval"])
def test_each_stage_leaves_the_others_parts_alone(stage2_bn: str, watched: Watched) -> None:
    """Invariant 2: stage 1 leaves the global head, stage 2 all that is trained of encoder, projector, personal head.

    Invariant 3: with stage2_bn = eval stage 2 leaves the running statistics, too; with train it moves them all.
    """
    go({"stage2_bn": stage2_bn})
    assert watched.seen.keys() == {"train", "global_head"}
    for before, after in watched.seen["train"]:
        assert_same(only(before, "global head"), only(after, "global head"))
        assert all(not same(only(before, part), only(after, part)) for part in REST)
    for before, after in watched.seen["global_head"]:
        assert_same(only(before, *REST), only(after, *REST))
        assert not same(only(before, "global head"), only(after, "global head"))
        moved = {name for name in NAMES["stats"] if not torch.equal(before[name], after[name])}
        assert moved == (set() if stage2_bn == "eval" else NAMES["stats"])


def test_what_is_common_after_a_round() -> None:
    """Invariant 4: all clients have one encoder and one global head; projectors, personal heads, statistics differ."""
    done = go()
    for part in ("encoder", "global head"):
        found = [only(done.personal[client], part) for client in range(4)]
        assert found[0]
        assert all(same(found[0], other) for other in found[1:])
    for part in ("projector", "personal head", "stats"):
        found = [only(done.personal[client], part, stats=True) for client in range(4)]
        assert not any(same(found[i], found[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("bn", ["share", "local-stats", "local-all"])
def test_what_is_sent(bn: str) -> None:
    """Invariant 5: encoder and global head without running statistics, whatever the run's policy; 4 bytes a number.

    In the paper's own switch and with bn = local-all the affine parameters of BatchNorm stay as well.
    """
    for local in (False, True):
        done = go({"bn_affine_local": local}, bn=bn, rounds=1)
        expected = only(anatomy.params(built()), "encoder", "global head")
        if local or bn == "local-all":
            expected = expected.drop(anatomy.NORM.names(built()))
        assert expected
        for message in done.messages:
            assert message.names == expected.keys()
            assert not [name for name in message.names if "running_" in name or "num_batches" in name]
            assert message.up["shared"].nbytes == message.down["shared"].nbytes == 4 * expected.numel  # type: ignore[union-attr]
        assert done.result.bytes_up == done.result.bytes_down == 4 * 4 * expected.numel


@pytest.mark.parametrize(("classes", "sent"), [(7, 44_720_412), (10, 44_726_568), (65, 44_839_428)])
def test_bytes_of_the_papers_model(classes: int, sent: int) -> None:
    """Invariant 5: 4 (11,176,512 + 513 C) bytes each way for ResNet-18; the projector's 264,448 numbers stay."""
    spec = Spec(
        lambda: models.build("torchvision:resnet18", classes=classes, shape=(3, 32, 32)), classes, (3, 32, 32), seed=0
    )
    method = DualFed()
    model = method.build(spec)
    server = method.init(model)
    trained = dict(model.named_parameters())
    assert sum(p.numel() for name, p in trained.items() if name.startswith("encoder.")) == 11_176_512
    assert sum(p.numel() for name, p in trained.items() if name.startswith("projector.")) == 264_448
    assert server["shared"].keys() == {n for n in trained if n.startswith(("encoder.", "heads.global_head."))}
    assert server["shared"].nbytes == sent == 4 * (11_176_512 + 513 * classes)


@dataclass(frozen=True)
class ByHand(Method):
    """The two stages written out once more; `exchange` says what is averaged: nothing, or all but statistics."""

    exchange: bool = False
    agg: str = "uniform"

    def build(self, spec: Spec) -> nn.Module:
        return DualFed(**SMALL).build(spec)

    def init(self, model: nn.Module) -> State:
        return {"params": anatomy.params(model, ~anatomy.STATS) if self.exchange else Tensors()}

    def round(self, server: State, cohort: Cohort) -> None:
        mean = cohort.mean(self.update, "params", **self.download(server))
        server["params"] = mean if self.exchange else Tensors()

    @step
    def update(self, client: Client, params: Tensors) -> dict[str, Any]:
        def first(model: Any, batch: Any) -> Tensor:
            u = anatomy.features(model, batch.x)[:, 5:].contiguous()
            return F.cross_entropy(model.heads.personal_head(u), batch.y) + supervised_contrastive(u, batch.y, 0.2)

        def second(model: Any, batch: Any) -> Tensor:
            z = anatomy.features(model, batch.x)[:, :5].contiguous()
            return F.cross_entropy(model.heads.global_head(z), batch.y)

        model = client.model(params)
        top = anatomy.of(n for n in model.state_dict() if n.startswith("heads.global_head."))
        client.fit(model, first, only=~top)
        client.fit(model, second, only=top, frozen="train", stream="global_head")
        client.keep(model, anatomy.STATS if self.exchange else anatomy.ALL)
        return {"params": client.share(model, ~anatomy.STATS)}

    def predictor(self, client: Client, params: Tensors) -> nn.Module:
        return client.model(params)


def by_hand(exchange: bool, data: Any = DATA) -> Run:
    return run(ByHand(exchange), data, NOISY, rounds=3, local=LOCAL, eval_every=0)


def test_one_client_is_local_training() -> None:
    """Invariant 6: with one client the mean changes nothing: two stages, round after round, without a server."""
    data = blobs([11])
    assert_same(go(data=data).personal, by_hand(False, data).personal)


def test_all_private_is_no_exchange() -> None:
    """Invariant 10: with every part private nothing is sent, and the schedule is that of one client alone."""
    done = go(PRIVATE)
    assert_same(done.personal, by_hand(False).personal)
    assert done.result.bytes_up == done.result.bytes_down == 0


def test_all_shared_is_fedavg_of_the_two_headed_model() -> None:
    """Invariant 10: with every part shared, FedAvg of the two-headed model with statistics at the client."""
    done, plain = go(SHARED), by_hand(True)
    assert_same(done.server["shared"], plain.server["params"])
    assert_same(done.personal, plain.personal)


def test_the_flags_say_what_is_sent() -> None:
    """Table 7's flags: each part is in the messages exactly when it is shared."""
    for part in PRIVATE:
        done = go({**PRIVATE, part: "shared"}, rounds=1)
        expected = only(anatomy.params(built()), part.replace("_", " "))
        assert expected
        assert all(message.names == expected.keys() for message in done.messages)


def contrast(u: Any, y: Any, tau: float = 0.2) -> float:
    return supervised_contrastive(torch.as_tensor(u), torch.as_tensor(y), tau).item()


def test_contrastive_loss() -> None:
    """Invariant 7: at least 0; 0 if all labels differ; indifferent to lengths and to the order of the batch.

    The formula sample by sample, in plain floats, gives the same.
    """
    source = torch.Generator().manual_seed(0)
    for n in (1, 2, 5, 16):
        u, y = torch.randn(n, 6, generator=source), torch.randint(3, (n,), generator=source)
        loss = contrast(u, y)
        assert loss >= 0
        assert contrast(u, torch.arange(n)) == 0
        assert contrast(u * torch.rand(n, 1, generator=source).add(0.1), y) == pytest.approx(loss, abs=1e-5)
        order = torch.randperm(n, generator=source)
        assert contrast(u[order], y[order]) == pytest.approx(loss, abs=1e-6)
        total = 0.0
        for i in range(n):
            s = [F.cosine_similarity(u[i], u[j], dim=0).item() / 0.2 for j in range(n)]
            same_class = [j for j in range(n) if j != i and y[j] == y[i]]
            rest = sum(math.exp(s[a]) for a in range(n) if a != i)
            total += sum(math.log(rest) - s[j] for j in same_class) / max(len(same_class), 1)
        assert loss == pytest.approx(total / n, abs=1e-5)


@pytest.mark.parametrize("tau", [0.05, 0.2, 1.0])
def test_contrastive_loss_of_collapsed_classes(tau: float) -> None:
    """Invariant 8: two classes at cosine -1: a sample contributes log((n_c - 1) + n_o exp(-2/tau))."""
    u = torch.tensor([[3.0, 4.0]] * 3 + [[-3.0, -4.0]] * 5)
    each = [math.log(own - 1 + other * math.exp(-2 / tau)) for own, other in [(3, 5)] * 3 + [(5, 3)] * 5]
    assert contrast(u, [0] * 3 + [1] * 5, tau) == pytest.approx(sum(each) / 8, abs=1e-5)


@pytest.mark.parametrize("u", [[[1.0, 2.0]], [[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
def test_contrastive_loss_has_finite_gradients(u: list[list[float]]) -> None:
    """A batch of one, a feature of zeros, no two of one class."""
    features = torch.tensor(u, requires_grad=True)
    supervised_contrastive(features, torch.arange(len(u)), 0.05).backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("ensemble", ["logits", "probs"])
def test_a_constant_global_head_decides_nothing(ensemble: str) -> None:
    """Invariant 9: the class of both heads together is that of the personal head."""
    model = built({"ensemble": ensemble}).eval()
    with torch.no_grad():
        model.heads.global_head.weight.zero_()
        model.heads.global_head.bias.fill_(0.7)
        model.heads.personal_head.weight.mul_(20)
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model(x).argmax(1), alone(model, True)(x).argmax(1))
        assert len(model(x).argmax(1).unique()) > 1


def test_the_score_is_the_sum_of_both_heads() -> None:
    """a + b of logits, or the logarithm of the mean probability; a from u, b from z (or u)."""
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for position in ("pre", "post"):
        model = built({"global_head_position": position}).eval()
        z = model.encoder(x)
        u = model.projector(z)
        a, b = model.heads.personal_head(u), model.heads.global_head(z if position == "pre" else u)
        assert_same({"score": model(x)}, {"score": a + b})
        assert torch.equal(alone(model, True)(x), a)
        assert torch.equal(alone(model, False)(x), b)
        both = built({"global_head_position": position, "ensemble": "probs"}).eval()
        torch.testing.assert_close(both(x).exp(), (a.softmax(1) + b.softmax(1)) / 2)


def test_simultaneous_without_the_global_loss_is_stage_one() -> None:
    """Invariant 11: with weight 0 all but the global head end as in the stages, and the global head never moves."""
    at_once = go({"strategy": "simultaneous", "global_loss_weight": 0.0})
    stages = go({"stage2_bn": "eval"})
    start = anatomy.snapshot(built())
    for client in range(4):
        ours, theirs = at_once.personal[client], stages.personal[client]
        assert_same(only(ours, *REST, stats=True), only(theirs, *REST, stats=True))
        assert_same(only(ours, "global head"), only(start, "global head"))


def test_simultaneous_lets_the_global_loss_into_the_encoder() -> None:
    """Table 4: one loop with L1 + L2; the encoder's end differs from that of the stages."""
    at_once, stages = go({"strategy": "simultaneous"}), go({"stage2_bn": "eval"})
    assert not same(only(at_once.server["shared"], "encoder"), only(stages.server["shared"], "encoder"))
    assert not same(only(at_once.server["shared"], "global head"), only(anatomy.snapshot(built()), "global head"))


def test_weight_of_the_global_loss() -> None:
    """In one plain step half the weight moves the global head half as far, up to rounding."""
    start = only(anatomy.snapshot(built(make=Residual)), "global head")
    moves = []
    for weight in (1.0, 0.5):
        hyper = {"strategy": "simultaneous", "global_loss_weight": weight}
        done = go(hyper, Residual, blobs([8]), rounds=1, local={"lr": 0.1, "batch_size": 8})
        moves.append(only(done.server["shared"], "global head") - start)
    for name, move in moves[0].items():
        assert move.abs().max() > 1e-3
        torch.testing.assert_close(moves[1][name], 0.5 * move, rtol=1e-4, atol=1e-6)


def test_order_of_clients() -> None:
    """Invariant 12: the same order gives the same bits; another order, with whole batches, the same up to rounding."""
    local = {"lr": 0.1, "batch_size": 100}
    one, again = go(local=local, model=Residual), go(local=local, model=Residual)
    assert_same(one.server, again.server)
    assert_same(one.states, again.states)
    turned = type(DATA)(DATA.clients[::-1], DATA.classes, DATA.test)
    other = go(local=local, model=Residual, data=turned)
    for name, tensor in one.server["shared"].items():
        torch.testing.assert_close(other.server["shared"][name], tensor, rtol=1e-3, atol=1e-5)


class TwoLayers(nn.Module):
    """z = b x, personal logits = h z: one weight b, two weights h = (0, ln 3), as in the other hand-made cases."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.body.weight.fill_(1.0)
            self.head.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_by_hand() -> None:
    """Two clients, x = 1 with y = 0 and x = 2 with y = 1 (three times), lr 1, no projector, no contrast, one step.

    Stage 1 is FedPer's step. Client 0: p = (1/4, 3/4), so b_0 = 1 - 3/4 ln 3 and its head is (3/4, ln 3 - 3/4).
    Client 1: z = 2, p = (1/10, 9/10), so b_1 = 1 + 1/5 ln 3, head (-1/5, ln 3 + 1/5). By the simple mean
    b = 1 - 11/40 ln 3.
    Stage 2 starts from the global head (c_0, c_1) with the new b_k: z_0 = b_0, z_1 = 2 b_1; with q = softmax(c z) a
    step is c - z (q - onehot(y)); the server takes the simple mean. Three floats go each way to each client.
    """
    clients = federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3))
    hyper = {"lam": 0.0, "projector_depth": 0}
    done = run("dualfed", clients, TwoLayers, rounds=1, hyper=hyper, local={"lr": 1.0, "batch_size": 8})
    ln3 = math.log(3)
    shared = done.server["shared"]
    assert shared["encoder.body.weight"].item() == pytest.approx(1 - 0.275 * ln3, abs=1e-6)
    heads = [done.personal[k]["heads.personal_head.weight"].flatten().tolist() for k in (0, 1)]
    assert heads[0] == pytest.approx([0.75, ln3 - 0.75], abs=1e-6)
    assert heads[1] == pytest.approx([-0.2, ln3 + 0.2], abs=1e-6)

    start = built({**hyper}, TwoLayers)
    c = start.heads.global_head.weight.flatten().tolist()
    own = []
    for z, y in ((1 - 0.75 * ln3, 0), (2 * (1 + 0.2 * ln3), 1)):
        powers = [math.exp(weight * z) for weight in c]
        q = [power / sum(powers) for power in powers]
        own.append([c[k] - z * (q[k] - (k == y)) for k in (0, 1)])
    mean = [(own[0][k] + own[1][k]) / 2 for k in (0, 1)]
    assert shared["heads.global_head.weight"].flatten().tolist() == pytest.approx(mean, abs=1e-6)
    assert done.result.bytes_up == done.result.bytes_down == 2 * 3 * 4


def test_turns_of_the_stages() -> None:
    """interleave = epoch: equal to all of stage 1 before stage 2 for one epoch, not for two."""
    one, two = ({**LOCAL, "epochs": epochs} for epochs in (1, 2))
    assert_same(go({"interleave": "epoch"}, local=one).states, go(local=one).states)
    assert not same(go({"interleave": "epoch"}, local=two).server, go(local=two).server)


def test_turns_bring_new_batches(watched: Watched) -> None:
    """Every turn opens streams of its own, by stage, so the epochs do not repeat each other's order."""
    go({"interleave": "epoch"}, rounds=1, local={**LOCAL, "epochs": 3})
    stages = ("train", "global_head")
    assert list(watched.seen) == [f"{stage}{turn}" for turn in ("", "/1", "/2") for stage in stages]


@pytest.mark.parametrize(
    ("depth", "bn", "expected"),
    [
        (0, True, []),
        (1, True, ["Linear 8 8", "BatchNorm1d 8"]),
        (2, True, ["Linear 8 5", "ReLU", "BatchNorm1d 5", "Linear 5 8", "BatchNorm1d 8"]),
        (2, False, ["Linear 8 5", "ReLU", "Linear 5 8"]),
        (
            3,
            True,
            [
                *("Linear 8 5", "ReLU", "BatchNorm1d 5", "Linear 5 5", "ReLU", "BatchNorm1d 5", "Linear 5 8"),
                "BatchNorm1d 8",
            ],
        ),
    ],
)
def test_projector(depth: int, bn: bool, expected: list[str]) -> None:
    """Table 5: depth and BatchNorm, ReLU before it; in and out as wide as the features."""

    def text(layer: nn.Module) -> str:
        widths = [getattr(layer, name, None) for name in ("in_features", "out_features", "num_features")]
        return " ".join([type(layer).__name__, *(str(width) for width in widths if width is not None)])

    made = projector(8, depth, hidden=5, bn=bn)
    assert [text(layer) for layer in made.children()] == expected
    x = torch.randn(4, 8)
    assert made(x).shape == x.shape


@pytest.mark.parametrize("name", ["mlp", "cnn-small-bn", "resnet8", "timm:resnet10t"])
def test_any_encoder_with_a_linear_head(name: str) -> None:
    """The model is head(features), can be copied and pickled, and its encoder is the base model below its head."""
    shape = (1, 8, 8) if name == "mlp" else (3, 16, 16)

    def make() -> nn.Module:
        return models.build(name, classes=5, shape=shape)

    spec = Spec(make, 5, shape, seed=0)
    base, model = spec.base().eval(), DualFed().build(spec).eval()
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(head(model, features(model, x)), model(x))
        shown = DualFed().representations(model, x)
        assert torch.equal(shown["pre"], anatomy.features(base, x))
        assert shown["post"].shape == shown["pre"].shape
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), model(x))
    assert_same(
        {n: t for n, t in model.state_dict().items() if n.startswith("heads.personal_head.")},
        {f"heads.personal_head.{n}": t for n, t in base.get_submodule(anatomy.head_name(base)).state_dict().items()},
    )
    assert anatomy.has_batchnorm(model)
    assert not anatomy.has_batchnorm(DualFed(projector_bn=False).build(spec)) or anatomy.has_batchnorm(base)


def test_parts_start_equal_and_from_streams_of_their_own() -> None:
    """All clients begin with one model; what the projector is like changes neither encoder nor heads."""
    shallow, deep = (anatomy.snapshot(built({"projector_depth": depth})) for depth in (1, 3))
    for part in ("encoder", "personal head", "global head"):
        assert_same(only(shallow, part, stats=True), only(deep, part, stats=True))
    assert not same(
        {n.rpartition(".")[2]: t for n, t in only(shallow, "personal head").items()},
        {n.rpartition(".")[2]: t for n, t in only(shallow, "global head").items()},
    )
    assert_same(go(rounds=0).personal, dict.fromkeys(range(4), anatomy.snapshot(built())))


class Counted(Residual):
    """Notes how many rows each forward pass had."""

    rows: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().forward(x)


def test_frozen_features_are_computed_once() -> None:
    """With stage2_bn = eval and no dropout stage 2 takes features from one pass; the result is that without it."""
    data, local, found = blobs([10]), {"lr": 0.1, "batch_size": 5, "epochs": 3}, {}
    passes = {}
    for shortcuts in (True, False):
        Counted.rows.clear()
        done = go({"stage2_bn": "eval"}, Counted, data, rounds=1, local=local, exact_shortcuts=shortcuts)
        found[shortcuts], passes[shortcuts] = done.server["shared"], Counted.rows[:]
    assert passes[False] == [5] * 6 + [5] * 6 + [10]  # stage 1, stage 2, evaluation
    assert passes[True] == [5] * 6 + [2] * 3 + [10] + [10]  # where a probe shows that the features are steady
    for name, tensor in found[True].items():
        torch.testing.assert_close(tensor, found[False][name], rtol=1e-5, atol=1e-6)


def test_three_heads_are_judged_in_one_pass() -> None:
    """Evaluation runs the encoder once for both heads and each alone, and finds what each says by itself."""
    data = blobs([40])
    Counted.rows.clear()
    experiment = Experiment("dualfed", data, Counted, hyper=SMALL, rounds=0, local=LOCAL, validation=0.25)
    result = experiment.run()
    assert Counted.rows == [40, 10]
    model = experiment.model(0)
    assert isinstance(model, TwoHeaded)
    x, y = data.clients[0].test.take()
    judged = {"personal": model, "personal-head": alone(model, True), "global-head": alone(model, False)}
    for name, module in judged.items():
        right = (module(x).argmax(1) == y).double().mean().item()
        assert result.metrics[f"{name}/local-test"] == pytest.approx(right, abs=1e-12)
    assert len({result.metrics[f"{name}/local-test/ece"] for name in judged}) == 3


@pytest.mark.parametrize("stage2_bn", ["train", "eval"])
def test_a_client_that_cannot_train_sends_back_what_it_got(stage2_bn: str) -> None:
    """One sample makes no batch under BatchNorm in stage 1, and then there is no stage 2 either: it counts nothing."""
    done = go({"stage2_bn": stage2_bn}, Residual, blobs((1, 8)), rounds=1)
    single, other = done.messages
    assert_same(single.up, single.down)
    assert not same(other.up, other.down)
    assert_same(done.server["shared"], other.up["shared"])


@pytest.mark.parametrize("point", ["post_download", "post_local"])
def test_three_accuracies_and_the_contrast(point: str) -> None:
    """Both heads together, each alone, at both points of evaluation; the mean contrastive loss per client and round."""
    done = go(eval_every=1, eval_point=point)
    for model in ("personal", "personal-head", "global-head"):
        series = done.result.series[f"{model}/local-test"]
        assert [(t, len(values)) for t, values in series] == [(1, 4), (2, 4), (3, 4)]
    logged = [(t, client) for t, client, name, value in done.result.logs if name == "contrastive" and value > 0]
    assert sorted(logged) == [(t, client) for t in (1, 2, 3) for client in range(4)]
    assert not go({"lam": 0.0}, rounds=1).result.logs


def test_the_contrast_that_is_logged() -> None:
    """One batch a round: the number is the loss of the initial model on the client's data."""
    data = blobs([8])
    done = go(data=data, model=Residual, rounds=1, local={"lr": 0.1, "batch_size": 8})
    x, y = data.clients[0].train.take()
    expected = contrast(features(built(make=Residual), x).chunk(2, -1)[1].detach(), y)
    assert [value for *_, value in done.result.logs] == [pytest.approx(expected, abs=1e-5)]


def test_fine_tuning() -> None:
    """dualfed+ft tunes both heads on their common score."""
    done = run("dualfed+ft", DATA, NOISY, hyper={**SMALL, "ft_epochs": 2}, rounds=1, local=LOCAL, eval_every=0)
    untuned = go(rounds=1)
    for client in range(4):
        tuned, before = done.personal[client], untuned.personal[client]
        assert_same(only(tuned, "encoder", "projector", stats=True), only(before, "encoder", "projector", stats=True))
        assert all(not same(only(tuned, part), only(before, part)) for part in ("personal head", "global head"))


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lam": -1.0}, r"DualFed\.lam must be >= 0\. Got -1\.0\."),
        ({"tau": 0.0}, r"DualFed\.tau must be > 0\. Got 0\.0\."),
        ({"projector_depth": 4}, r"DualFed\.projector_depth must be <= 3\. Got 4\."),
        ({"global_loss_weight": 0.5}, r"DualFed\.global_loss_weight is for strategy 'simultaneous'\. Got 0\.5\."),
        (
            {"strategy": "simultaneous", "stage2_bn": "eval"},
            r"DualFed\.stage2_bn is for strategy 'stagewise'\. Got 'eval'\.",
        ),
        (
            {"strategy": "simultaneous", "interleave": "epoch"},
            r"DualFed\.interleave is for strategy 'stagewise'\. Got 'epoch'\.",
        ),
        ({"encoder": "both"}, r"DualFed\.encoder must be .*\. Got 'both'\."),
    ],
)
def test_bad_options(hyper: dict[str, Any], message: str) -> None:
    """The error names the option, the rule and the value."""
    with pytest.raises(UserError, match=message):
        Experiment("dualfed", DATA, mlp, hyper=hyper)


def test_bad_models() -> None:
    """A head that is not linear, or a model that is nothing but its head, is refused before anything runs."""
    stacked = anatomy.set_head(nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))), "1")
    for model, got in ((stacked, "Sequential"), (nn.Linear(4, 3), "Linear")):
        with pytest.raises(UserError, match=f"DualFed needs an encoder with a linear head. Got {got} as the head"):
            Experiment("dualfed", DATA, model, rounds=1).run()
