"""DualFed: its two-headed model, what is judged and logged of it, and what is refused.

Equality is bit for bit unless a test says otherwise. The invariants are in test_dualfed.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from dualfed_helpers import DATA, LOCAL, NOISY, SMALL, alone, built, contrast, go, only
from helpers import Residual, assert_same, blobs, mlp, run, same
from torch import Tensor, nn

from pfed import Experiment, UserError, anatomy, features, head, models
from pfed.methods.dualfed import DualFed
from pfed.models.twoheaded import TwoHeaded, projector
from pfed.pool import Spec


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
    assert passes[False] == [1] + [5] * 6 + [5] * 6 + [10]  # trial, stage 1, stage 2, evaluation
    assert passes[True] == [1] + [5] * 6 + [2] * 3 + [10] + [10]  # where a probe shows that the features are steady
    for name, tensor in found[True].items():
        torch.testing.assert_close(tensor, found[False][name], rtol=1e-5, atol=1e-6)


def test_three_heads_are_judged_in_one_pass() -> None:
    """Evaluation runs the encoder once for both heads and each alone, and finds what each says by itself."""
    data = blobs([40])
    Counted.rows.clear()
    experiment = Experiment("dualfed", data, Counted, hyper=SMALL, rounds=0, local=LOCAL, validation=0.25)
    result = experiment.run()
    assert Counted.rows == [1, 40, 10]  # a trial of the model, the test data, the validation data
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
