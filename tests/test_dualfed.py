"""DualFed: every invariant of the method by its number, the contrastive loss, what is sent, one round by hand.

Equality is bit for bit unless a test says otherwise. The two-headed model is in test_dualfed_models.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dualfed_helpers import DATA, LOCAL, NAMES, NOISY, SMALL, alone, built, contrast, go, only
from helpers import Residual, Run, assert_same, blobs, federation, mlp, run, same
from torch import Tensor, nn

from pfed import Client, Cohort, Method, Tensors, anatomy, models, step
from pfed.losses import supervised_contrastive
from pfed.methods.dualfed import DualFed
from pfed.pool import Spec
from pfed.wire import State

PRIVATE = dict.fromkeys(("encoder", "projector", "personal_head", "global_head"), "private")
SHARED = dict.fromkeys(PRIVATE, "shared")
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

    start = built({**hyper}, TwoLayers, shape=(1,))
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
