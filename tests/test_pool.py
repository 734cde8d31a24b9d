"""Models that are lent to clients: how their tensors lie in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, differences, run
from torch import Tensor, nn

from pfed import Federation, models, params, snapshot
from pfed.pool import Pool, channels_last, mark

POOLED = {"lenet5": (1, 28, 28), "cnn-small": (1, 8, 8), "digits-cnn": (3, 12, 12), "alexnet-bn": (3, 80, 80)}


def images(shape: tuple[int, ...], count: int = 6) -> Tensor:
    """Noise with plain backgrounds, in which the four of a pool are equal."""
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))
    x[:, :, : shape[1] // 2] = 0.0
    return x


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Its output and its gradients."""
    out = model(x)
    F.cross_entropy(out, torch.arange(len(x)) % 10).backward()
    return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("name", POOLED)
def test_pooling_before_relu_is_relu_before_pooling(name: str) -> None:
    """To the bit, in the output and in all gradients."""
    ours = models.build(name, classes=10, shape=POOLED[name])
    layers = list(ours._modules.items())
    swapped = 0
    for i in range(len(layers) - 1):
        if isinstance(layers[i][1], nn.MaxPool2d) and isinstance(layers[i + 1][1], nn.ReLU):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
            swapped += 1
    assert swapped
    x = images(POOLED[name])
    assert_same(step(ours, x), step(nn.Sequential(OrderedDict(layers)), x))


@pytest.mark.parametrize("name", [*POOLED, "resnet20"])
def test_channels_last_computes_the_same(name: str) -> None:
    """Up to the order of sums; names, shapes and values of the tensors stay as they are."""
    shape = POOLED.get(name, (3, 16, 16))
    plain, fast = (models.build(name, classes=10, shape=shape) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    mark([fast], "share", shape)
    before = snapshot(fast)
    channels_last([fast])
    assert_same(snapshot(fast), before)
    assert any(_turned(p) for p in fast.parameters())
    one, two = (step(model.eval(), images(shape)) for model in (plain, fast))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-5)


def _turned(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous()


class Viewing(nn.Module):
    """Takes for granted how the output of a convolution lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(x).view(len(x), -1))
        return out


class Asserting(Viewing):
    """Says so in words of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.conv(x).is_contiguous():
            raise ValueError("rows first, please")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Viewing, Asserting])
def test_a_model_that_does_not_allow_it_stays_as_it_is(kind: type[Viewing], tiny: Federation) -> None:
    model = kind()
    mark([model], "share", (1, 8, 8))
    channels_last([model])
    assert not any(_turned(p) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    run("fedavg", tiny, kind, rounds=1)


def test_what_leaves_a_model_lies_as_after_a_journey() -> None:
    """Else the last bit of a sum could depend on the engine."""
    model = models.build("cnn", classes=10, shape=(1, 28, 28))
    mark([model], "share", (1, 28, 28))
    channels_last([model])
    lent = Pool([model]).take(0)
    assert any(_turned(p) for p in lent.parameters())
    for copies in (params(lent), snapshot(lent)):
        assert all(tensor.is_contiguous() for tensor in copies.values())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_run_is_the_same_either_way(tiny: Federation, momentum: float) -> None:
    settings: dict[str, Any] = {"rounds": 2, "local": {"momentum": momentum, "lr": 0.05, "batch_size": 8}}
    one, two = (
        run("fedavg", tiny, "cnn-small", keep_optimizer=True, channels_last=fast, **settings) for fast in (True, False)
    )
    assert list(differences(one.server, two.server))  # both ways were really gone
    for name, tensor in one.server["params"].items():
        torch.testing.assert_close(tensor, two.server["params"][name], rtol=1e-3, atol=1e-5)
