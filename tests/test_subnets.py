"""Sub-networks: both ways of running one are the thin network that can be cut out of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed.channels import Channels, Side, channels
from pfed.models import build
from pfed.models.resnet import CifarResNet
from pfed.subnets import BatchNormRule, Subnet, masked

SHAPE = (3, 32, 32)
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: (lambda name=name: build(name, classes=4, shape=SHAPE))  # type: ignore[misc]
        for name in ("lenet5", "cnn", "resnet8", "torchvision:resnet18", "timm:resnet10t", "torchvision:mobilenet_v2")
    },
    "resnet8-conv": lambda: CifarResNet(8, (8, 8, 16, 32), 4, shortcut="conv"),
}
NARROW = {"lenet5", "cnn", "resnet8-conv", "torchvision:resnet18", "timm:resnet10t"}


def made(name: str) -> tuple[nn.Module, Channels]:
    """A model in double precision, without dropout and with running statistics that are not 0 and 1."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    found = channels(model, torch.zeros(1, *SHAPE, dtype=torch.double))
    for tensor in found.statistics:
        model.state_dict()[tensor].sub_(torch.rand(found.shapes[tensor]) / 10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, found


class Padding(nn.Module):
    """Zero padding of channels between some of one group and some of the next."""

    def __init__(self, before: Tensor, after: Tensor) -> None:
        super().__init__()
        place = {int(c): i for i, c in enumerate(before.nonzero())}
        self.places = [place.get(int(c)) for c in after.nonzero()]

    def forward(self, x: Tensor) -> Tensor:
        nothing = torch.zeros_like(x[:, 0])
        return torch.stack([nothing if place is None else x[:, place] for place in self.places], 1)


def cut(model: nn.Module, found: Channels, chosen: Sequence[Tensor]) -> nn.Module:
    """A copy whose layers have no other channels than these."""
    thin = copy.deepcopy(model)
    rows = {n: chosen[g].repeat_interleave(e) for g, group in enumerate(found.groups) for n, e in group.rows.items()}
    columns = found.received(chosen)
    for name, module in list(thin.named_modules()):
        depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
        for kind, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            part = tensor.detach()
            if f"{name}.{kind}" in rows:
                part = part[rows[f"{name}.{kind}"]]
            if kind == "weight" and name in columns and not depthwise:
                part = part[:, columns[name]]
            setattr(module, kind, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part.clone())
        if isinstance(module, nn.Conv2d):
            module.out_channels = len(module.weight)
            module.groups = module.out_channels if depthwise else 1
            module.in_channels = module.weight.shape[1] * module.groups
        if isinstance(module, _BatchNorm):
            module.num_features = len(module.weight)
        if isinstance(module, nn.ZeroPad3d):
            block = name.removesuffix(".shortcut.1")
            thin.get_submodule(f"{block}.shortcut")[1] = Padding(columns[name], rows[f"{block}.conv2.weight"])
    return thin


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, "first") for name in MODELS),
        *((name, side) for name in ("lenet5", "resnet8", "resnet8-conv") for side in ("last", "random-fixed")),
    ],
)
def test_sub_networks_are_thin_networks(name: str, side: Side) -> None:
    """The private and the shared third or rest, in training (batch statistics) and in eval mode, masked or thin."""
    model, found = made(name)
    assert found.narrow == (name in NARROW)
    split = found.split(found.counts(Fraction(1, 3)), side=side)
    x = torch.rand(3, *SHAPE, dtype=torch.double)
    for chosen in (split.private, [~own for own in split.private]):
        for mode in (False, True):
            thin = cut(model, found, chosen).train(mode)
            expected = thin(x)
            for narrow in (False, True):
                out = Subnet(model, found, chosen, thin=narrow).train(mode)(x)
                torch.testing.assert_close(out, expected, rtol=1e-7, atol=1e-9)
            assert (out - model.eval()(x)).abs().max() > 1e-3
        assert sum(p.numel() for p in thin.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "resnet8-conv"])
@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_are_those_of_the_thin_network(name: str, narrow: bool) -> None:
    """On its own elements; everywhere else the gradient is zero. The classifier's bias belongs to both."""
    model, found = made(name)
    chosen = found.split(found.counts(Fraction(1, 2))).private
    x, y = torch.rand(3, *SHAPE, dtype=torch.double), torch.tensor([0, 1, 3])
    thin = cut(model, found, chosen)
    F.cross_entropy(thin(x), y).backward()
    F.cross_entropy(Subnet(model, found, chosen, thin=narrow)(x), y).backward()
    theirs = cut_gradients(model, found, chosen)
    for tensor, parameter in thin.named_parameters():
        torch.testing.assert_close(theirs[tensor], parameter.grad, rtol=1e-6, atol=1e-9)
    total = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    assert total == pytest.approx(sum(float(g.abs().sum()) for g in theirs.values()), rel=1e-9)


def cut_gradients(model: nn.Module, found: Channels, chosen: Sequence[Tensor]) -> dict[str, Tensor]:
    """The model's gradients without the rows and columns of other channels."""
    with_gradients = copy.deepcopy(model)
    for copied, parameter in zip(with_gradients.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        copied.data = parameter.grad
    return {name: p.detach() for name, p in cut(with_gradients, found, chosen).named_parameters()}


def test_all_channels_are_the_model() -> None:
    """Invariant 6: with an all-ones mask nothing changes, to the bit, nor when the model runs on its own again."""
    for name in ("lenet5", "resnet8", "torchvision:resnet18"):
        model, found = made(name)
        model.eval()
        x = torch.rand(2, *SHAPE, dtype=torch.double)
        before = model(x)
        everything = found.split([0] * len(found.groups))
        assert torch.equal(Subnet(model, found, [~own for own in everything.private]).eval()(x), before)
        with masked(model, found.received(everything.private)):
            assert not torch.equal(model(x), before)
        assert torch.equal(model(x), before)


def statistics(model: nn.Module, found: Channels) -> dict[str, Tensor]:
    return {name: model.state_dict()[name].clone() for name in sorted(found.statistics)}


def test_batchnorm_in_sub_networks() -> None:
    """By default statistics stay; `update` moves those of the chosen channels alone, as in the thin network."""
    model, found = made("resnet8-conv")
    split = found.split(found.counts(Fraction(1, 2)))
    x = torch.rand(5, *SHAPE, dtype=torch.double)
    before = statistics(model, found)
    rules: dict[BatchNormRule, Any] = {}
    for rule in ("batch_noupdate", "eval"):
        rules[rule] = Subnet(model, found, split.private, rule)(x)  # type: ignore[arg-type,index]
        assert all(torch.equal(before[name], now) for name, now in statistics(model, found).items())
        assert all(module.training for module in model.modules())
    assert not torch.allclose(rules["batch_noupdate"], rules["eval"])
    torch.testing.assert_close(rules["eval"], Subnet(model, found, split.private).eval()(x))
    model.train()
    thin = cut(model, found, split.private)
    thin(x)
    torch.testing.assert_close(Subnet(model, found, split.private, "update", thin=True)(x), rules["batch_noupdate"])
    after = statistics(model, found)
    for name, mask in split.shared.items():
        if name in found.statistics:
            assert torch.equal(after[name][mask], before[name][mask])
            torch.testing.assert_close(after[name][~mask], thin.state_dict()[name])
            assert not torch.isclose(after[name][~mask], before[name][~mask]).any()


def test_statistics_of_the_image_itself() -> None:
    """They are no channel's: a sub-network's pass leaves them."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    found = channels(model, torch.zeros(1, 3))
    before = statistics(model, found)
    Subnet(model, found, found.split([2]).private, "update")(torch.rand(6, 3))
    after = statistics(model, found)
    assert torch.equal(after["0.running_mean"], before["0.running_mean"])
    assert not torch.equal(after["2.running_mean"], before["2.running_mean"])


def test_a_sub_network_without_channels_runs() -> None:
    """It says the classifier's bias to every image."""
    model, found = made("lenet5")
    nothing = found.split([0] * 4).private
    out = Subnet(model, found, nothing, thin=True)(torch.rand(2, *SHAPE, dtype=torch.double))
    torch.testing.assert_close(out, model.get_submodule("fc3").bias.expand(2, 4))
