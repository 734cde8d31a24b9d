"""Channels: what is tied, what a mask divides, and that masked inputs run the thin network of the chosen channels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.channels import Channels, Side, channels, n_private
from pfed.errors import UserError
from pfed.models import build
from pfed.models.resnet import CifarResNet, Shortcut
from pfed.tensors import pack

HALF = Fraction(1, 2)


def of(name: str, size: int = 32, classes: int = 10) -> tuple[nn.Module, Channels]:
    model = build(name, classes=classes, shape=(3, size, size))
    return model, channels(model, torch.zeros(1, 3, size, size))


def group_of(found: Channels, tensor: str) -> int:
    (group,) = (i for i, group in enumerate(found.groups) if tensor in group.rows)
    return group


def shared(masks: dict[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def test_n_private() -> None:
    assert [n_private(6, Fraction(i, 12)) for i in range(13)] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert n_private(100, HALF * Fraction(29, 100)) == 15
    assert [n_private(7, Fraction(0)), n_private(7, Fraction(1))] == [0, 7]
    with pytest.raises(UserError, match=r"must be >= 0 and <= 1\. Got 3/2"):
        n_private(7, Fraction(3, 2))


def test_lenet5_as_worked_out_by_hand() -> None:
    """p = 1/2: 3 * 76 + 8 * 151 + 60 * 401 + 50 * 121 + 50 * 10 + 10 = 32,056 elements, 128,224 bytes."""
    model, lenet = of("lenet5")
    assert [group.size for group in lenet.groups] == [6, 16, 120, 100]
    assert lenet.inputs == {"conv2": (0, 1), "fc1": (1, 25), "fc2": (2, 1), "fc3": (3, 1)}
    assert [shared(lenet.masks(p)) for p in (Fraction(0), HALF, Fraction(1))] == [64_102, 32_056, 0]
    assert pack(anatomy.params(model), lenet.masks(HALF)).nbytes == 128_224
    masks = lenet.masks(HALF)
    assert masks["conv1.weight"][:3].sum() == 0
    assert masks["conv1.weight"][3:].all()
    assert masks["fc1.weight"].all(1).tolist() == [False] * 60 + [True] * 60
    assert masks["fc3.weight"].all(0).tolist() == [False] * 50 + [True] * 50
    assert masks["fc3.bias"].all()


@pytest.mark.parametrize("name", ["mlp", "digits-cnn", "resnet8", "torchvision:mobilenet_v2", "timm:seresnet18"])
def test_every_tensor_is_divided_exactly(name: str) -> None:
    model, found = of(name)
    state = model.state_dict()
    grouped = [tensor for group in found.groups for tensor in group.rows]
    counters = {tensor for tensor in state if tensor.endswith("num_batches_tracked")}
    assert len(grouped) == len(set(grouped))
    assert {*grouped, f"{found.classifier}.weight", f"{found.classifier}.bias"} | counters == state.keys()
    for group in found.groups:
        assert all(len(state[tensor]) == group.size * each for tensor, each in group.rows.items())
    before = None
    for p in (Fraction(0), Fraction(1, 3), HALF, Fraction(1)):
        masks = found.masks(p)
        assert {n: (m.shape, m.dtype) for n, m in masks.items()} == {n: (t.shape, torch.bool) for n, t in state.items()}
        assert before is None or all((masks[n] <= before[n]).all() for n in state)  # what is private stays so
        before = masks
        if p == 0:
            assert shared(masks) == sum(t.numel() for n, t in state.items() if n not in counters)
    assert shared(found.masks(Fraction(1))) == 0


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
def test_residual_additions_tie_a_stage(name: str) -> None:
    _, found = of(name)
    assert [group.size for group in found.groups] == [64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512]
    first = group_of(found, "conv1.weight")
    for tensor in ("bn1.running_mean", "layer1.0.conv2.weight", "layer1.1.bn2.bias"):
        assert group_of(found, tensor) == first
    second = group_of(found, "layer2.0.downsample.0.weight")
    for tensor in ("layer2.0.downsample.1.running_var", "layer2.0.bn2.weight", "layer2.1.conv2.weight"):
        assert group_of(found, tensor) == second
    for tensor in ("layer2.0.conv1.weight", "layer2.1.conv1.weight", "layer3.0.conv2.weight", "conv1.weight"):
        assert group_of(found, tensor) != second
    assert found.inputs["layer2.1.conv1"] == found.inputs["layer3.0.downsample.0"] == (second, 1)
    assert "conv1" not in found.inputs  # it sees the image
    masks = found.masks(HALF)
    assert masks["layer2.0.downsample.1.running_var"].tolist() == [False] * 64 + [True] * 64
    assert not masks["bn1.num_batches_tracked"]


@pytest.mark.parametrize(
    ("name", "block", "expand", "depthwise"),
    [
        ("torchvision:mobilenet_v2", "features.2.conv", ("0.0", "0.1"), ("1.0", "1.1")),
        ("timm:mobilenetv2_035", "blocks.1.0", ("conv_pw", "bn1"), ("conv_dw", "bn2")),
    ],
)
def test_depthwise_convolutions_tie(name: str, block: str, expand: tuple[str, str], depthwise: tuple[str, str]) -> None:
    model, found = of(name)
    group = group_of(found, f"{block}.{expand[0]}.weight")
    for layer in (expand[1], *depthwise):
        assert group_of(found, f"{block}.{layer}.weight") == group
    assert group_of(found, f"{block}.{depthwise[1]}.running_mean") == group
    assert found.inputs[f"{block}.{depthwise[0]}"] == (group, 1)
    assert found.groups[group].size == model.get_submodule(f"{block}.{depthwise[0]}").groups


def test_a_gate_is_tied_to_what_it_scales() -> None:
    _, found = of("timm:seresnet18")
    assert group_of(found, "layer1.0.se.fc2.weight") == group_of(found, "conv1.weight")
    assert found.groups[group_of(found, "layer1.0.se.fc1.weight")].size == 8


def test_padded_shortcuts_change_group() -> None:
    _, found = of("resnet8")
    assert [group.size for group in found.groups] == [16, 16, 32, 32, 64, 64]
    assert found.inputs["layer2.0.shortcut.1"] == (group_of(found, "conv1.weight"), 1)
    assert group_of(found, "layer2.0.conv2.weight") == found.inputs["layer3.0.conv1"].group


def test_several_features_per_channel() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),  # (2, 2, 2)
        nn.Conv2d(2, 4, 1, groups=2),  # two maps for each channel
        nn.Conv2d(4, 8, 1, groups=4),  # four
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.BatchNorm1d(32),
        nn.Linear(32, 3),
    )
    found = channels(model, torch.zeros(2, 1, 4, 4))
    (group,) = found.groups
    assert group.size == 2
    assert [group.rows[f"{layer}.weight"] for layer in (0, 1, 2, 3, 5)] == [1, 2, 4, 4, 16]
    assert group.rows["5.running_var"] == found.inputs["6"].each == 16
    masks = found.split([1]).shared
    assert masks["5.weight"].tolist() == [False] * 16 + [True] * 16
    assert masks["6.weight"].tolist() == [[False] * 16 + [True] * 16] * 3


def test_sides_and_splits_of_the_classifier() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 10))
    found = channels(model, torch.zeros(1, 3))
    quarter = Fraction(1, 4)
    assert found.masks(quarter)["0.bias"].tolist() == [False, True, True, True]
    assert found.masks(quarter, side="last")["0.bias"].tolist() == [True, True, True, False]
    assert found.masks(quarter, side="last")["2.weight"].tolist() == [[True, True, True, False]] * 10
    output = found.masks(quarter, classifier_split="output")
    assert output["2.bias"].tolist() == [False] * 3 + [True] * 7
    assert output["2.weight"].all(1).tolist() == output["2.bias"].tolist()
    assert not found.masks(Fraction(0), classifier_split="private")["2.weight"].any()
    assert not found.masks(Fraction(0), classifier_split="private")["2.bias"].any()
    assert found.masks(Fraction(1), classifier_split="shared")["2.weight"].all()
    assert found.masks(Fraction(1), classifier_split="shared")["2.bias"].all()
    assert not found.masks(Fraction(1))["2.bias"].any()
    deeper = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    masks = channels(deeper, torch.zeros(1, 3)).split([0, 4]).shared
    assert not masks["3.bias"].any()  # nothing that the classifier receives is shared
    assert masks["0.running_mean"].all()  # of the input itself, before any hidden channel
    assert not channels(deeper, torch.zeros(1, 3)).split([4, 4]).shared["0.weight"].any()
    with pytest.raises(UserError, match=r"one count for each of 1 groups\. Got 2"):
        found.split([1, 1])
    with pytest.raises(UserError, match=r"Private channels must be >= 0 and <= 4\. Got 5"):
        found.split([5])


def test_a_fraction_for_each_group() -> None:
    _, lenet = of("lenet5")
    assert lenet.counts([Fraction(0), HALF, Fraction(1, 4), Fraction(1)]) == (0, 8, 30, 100)
    with pytest.raises(UserError, match=r"one fraction for each of 4 groups\. Got 1"):
        lenet.counts([HALF])


@pytest.mark.parametrize("side", ["first", "last", "random-fixed"])
def test_private_channels_stay_private(side: Side) -> None:
    """Whatever the side, more private channels are those from before and some others."""
    _, lenet = of("lenet5")
    before = lenet.split([0, 0, 0, 0], side=side)
    for i in range(1, 101):
        counts = lenet.counts(Fraction(i, 100))
        after = lenet.split(counts, side=side)
        assert [int(own.sum()) for own in after.private] == list(counts)
        assert all((own >= earlier).all() for own, earlier in zip(after.private, before.private, strict=True))
        before = after


def test_random_channels_are_the_same_everywhere() -> None:
    """Neither first nor last, the same for groups of one size, and no matter what was drawn before."""
    _, found = of("resnet8")
    counts = found.counts(HALF)
    drawn = found.split(counts, side="random-fixed").private
    torch.manual_seed(1)
    again = channels(build("resnet8", classes=3, shape=(3, 16, 16)), torch.zeros(1, 3, 16, 16))
    assert all(map(torch.equal, drawn, again.split(counts, side="random-fixed").private))
    assert torch.equal(drawn[0], drawn[1])
    for side in ("first", "last"):
        assert not any(map(torch.equal, drawn, found.split(counts, side=side).private))


def test_whose_the_running_statistics_are() -> None:
    model, found = of("resnet8")
    counts = found.counts(HALF)
    assert found.statistics == {name for name in model.state_dict() if "running" in name}
    follow = found.split(counts).shared
    for rule in ("local", "shared"):
        masks = found.split(counts, statistics=rule).shared
        for name, mask in masks.items():
            expected = torch.full_like(mask, rule == "shared") if name in found.statistics else follow[name]
            assert torch.equal(mask, expected), name
    assert follow["bn1.running_mean"].tolist() == [False] * 8 + [True] * 8


def test_degenerate_splits() -> None:
    _, lenet = of("lenet5")
    assert not lenet.split([1, 1, 1, 1]).degenerate
    assert lenet.split([0, 1, 1, 1]).degenerate
    assert lenet.split([3, 16, 60, 50]).degenerate


def test_narrow_models() -> None:
    """Those of which a thin copy needs nothing but smaller tensors, and draws nothing by chance."""
    names = {"lenet5": True, "cnn-small-bn": True, "resnet8x4": True, "timm:seresnet18": True}
    names |= {"resnet8": False, "torchvision:mobilenet_v2": False, "cnn-cifar100": False}
    assert {name: of(name)[1].narrow for name in names} == names
    image = torch.zeros(1, 3, 8, 8)
    assert channels(Functional(), image).narrow

    class Counted(Functional):
        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(self.first(x), 2).view(-1, 6 * 16)
            out: Tensor = self.fc2(F.dropout(self.fc1(x), 0.0))
            return out

    assert not channels(Counted(), image).narrow
    instance = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(256, 2))
    assert not channels(instance, image).narrow


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "torchvision:mobilenet_v2"])
def test_text(name: str) -> None:
    """JSON and back, with nothing lost."""
    _, found = of(name)
    again = Channels.from_text(found.text())
    assert again == found
    assert again.text() == found.text()
    assert all(isinstance(shape, torch.Size) for shape in again.shapes.values())


class Functional(nn.Module):
    """LeNet-like, in functions and methods instead of modules, and with one convolution used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.side = nn.Conv2d(6, 6, 1)
        self.fc1 = nn.Linear(6 * 16, 7)
        self.fc2 = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = self.twice(self.twice(x)[:, :, ::1, ::1])
        x = x * torch.sigmoid(self.side(x).mean((2, 3), keepdim=True))
        x = x.view(x.size(0), -1)
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


def test_functions_and_methods_are_followed() -> None:
    found = channels(Functional(), torch.zeros(2, 3, 8, 8))
    assert [group.size for group in found.groups] == [6, 7]
    assert found.groups[0].rows.keys() == {f"{n}.{t}" for n in ("first", "twice", "side") for t in ("weight", "bias")}
    assert found.inputs == {"twice": (0, 1), "side": (0, 1), "fc1": (0, 16), "fc2": (1, 1)}


class Wired(nn.Module):
    """Two convolutions side by side, something that is done with their maps, and a classifier."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 4, 1)
        self.between = between
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.between(self.a(x), self.b(x)).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    ("between", "culprit"),
    [
        (lambda a, b: torch.cat([a, b], 1)[:, :4], "cat"),
        (lambda a, b: a[:, :2].repeat(1, 2, 1, 1), "getitem"),
        (lambda a, b: torch.cat(a.chunk(2, 1)[::-1], 1), "chunk"),
        (lambda a, b: a.softmax(1), "softmax"),
        (lambda a, b: a.permute(0, 3, 2, 1), "permute"),
        (lambda a, b: a + b.mean(1, keepdim=True), "mean"),
        (lambda a, b: a.reshape(1, 2, 8, 4), "reshape"),
    ],
)
def test_operations_that_mix_or_move_channels_are_refused(between: Callable[..., Tensor], culprit: str) -> None:
    with pytest.raises(UserError) as caught:
        channels(Wired(between), torch.zeros(1, 1, 4, 4))
    message = f"The channels of Wired cannot be followed through {culprit!r}: it mixes or moves them."
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "between",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm([4, 4, 4]),
        nn.Softmax2d(),
        nn.ConvTranspose2d(4, 4, 1),
        nn.ChannelShuffle(2),
        nn.Linear(4, 4),
        nn.ConstantPad3d((0, 0, 0, 0, 0, 1), 1.0),
    ],
)
def test_modules_that_mix_or_move_channels_are_refused(between: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), between, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 1, 4, 4))
    with pytest.raises(UserError, match=f"cannot be followed through '{type(between).__name__} 1': it mixes or moves"):
        channels(model, torch.zeros(1, 1, 4, 4))


def test_other_models_that_are_refused() -> None:
    image = torch.zeros(1, 1, 4, 4)

    class Scaled(Wired):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc((self.a(x) * self.scale).mean((2, 3)))
            return out

    with pytest.raises(UserError, match="through 'mul'"):
        channels(Scaled(torch.add), image)

    class Branching(Wired):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(UserError, match="The channels of Branching cannot be followed: symbolically traced variables"):
        channels(Branching(torch.add), image)
    with pytest.raises(UserError, match="Sequential has no hidden channels before its classifier '1'"):
        channels(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), image)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(UserError, match="through 'ParametrizedLinear 0'"):
        channels(normed, torch.zeros(1, 4))


def test_the_model_is_left_as_it_is() -> None:
    model = build("cnn-small-bn", classes=3, shape=(1, 8, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    channels(model, torch.rand(2, 1, 8, 8))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def masked(model: nn.Module, found: Channels, keep: dict[str, Tensor], x: Tensor) -> Tensor:
    """The model on x with all inputs outside `keep` set to zero."""
    model = copy.deepcopy(model)
    for name in found.inputs:

        def hide(module: nn.Module, args: tuple[Tensor, ...], vector: Tensor = keep[name]) -> Tensor:
            return args[0] * vector.view(1, -1, *[1] * (args[0].dim() - 2))

        model.get_submodule(name).register_forward_pre_hook(hide)
    with torch.no_grad():
        out: Tensor = model(x)
    return out


def cut(model: nn.Module, found: Channels, keep: list[Tensor], thin: nn.Module) -> nn.Module:
    """Copy rows and columns of the kept channels into a narrower network of the same names."""
    state = dict(model.state_dict())
    for group, vector in zip(found.groups, keep, strict=True):
        for name, each in group.rows.items():
            state[name] = state[name][vector.repeat_interleave(each)]
    for name, (group, each) in found.inputs.items():
        if f"{name}.weight" in state:
            state[f"{name}.weight"] = state[f"{name}.weight"][:, keep[group].repeat_interleave(each)]
    thin.load_state_dict(state)
    return thin.eval()


def narrow_lenet() -> nn.Module:
    conv = (nn.Conv2d(3, 3, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2))
    fc = (nn.Flatten(), nn.Linear(200, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 10))
    names = [name for name, _ in build("lenet5", classes=10, shape=(3, 32, 32)).named_children()]
    thin = nn.Sequential()
    for name, module in zip(names, (*conv, *fc), strict=True):
        thin.add_module(name, module)
    return thin


def narrow_mlp() -> nn.Module:
    thin = build("mlp", classes=10, shape=(3, 32, 32))
    thin.fc1, thin.fc2 = nn.Linear(3072, 100), nn.Linear(100, 10)
    return thin


def small_resnet(width: int, shortcut: Shortcut) -> nn.Module:
    model = CifarResNet(8, (width, width, 2 * width, 4 * width), 10, shortcut=shortcut)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer += torch.rand_like(buffer) / 10
    return model


@pytest.mark.parametrize(
    ("wide", "thin", "side"),
    [
        (lambda: build("mlp", classes=10, shape=(3, 32, 32)), narrow_mlp, "first"),
        (lambda: build("mlp", classes=10, shape=(3, 32, 32)), narrow_mlp, "last"),
        (lambda: build("lenet5", classes=10, shape=(3, 32, 32)), narrow_lenet, "first"),
        (lambda: build("lenet5", classes=10, shape=(3, 32, 32)), narrow_lenet, "last"),
        (lambda: small_resnet(8, "conv"), lambda: small_resnet(4, "conv"), "first"),
        (lambda: small_resnet(8, "conv"), lambda: small_resnet(4, "conv"), "last"),
        (lambda: small_resnet(8, "pad"), lambda: small_resnet(4, "pad"), "first"),
    ],
)
def test_masked_inputs_are_the_thin_network(
    wide: Callable[[], nn.Module], thin: Callable[[], nn.Module], side: Side
) -> None:
    """Half of the channels (padding leads from channel c to channel c, so that last halves make no narrow ResNet)."""
    torch.manual_seed(0)
    model = wide().eval()
    found = channels(model, torch.zeros(1, 3, 32, 32))
    x = torch.rand(2, 3, 32, 32)
    own = [(torch.arange(group.size) < group.size // 2) == (side == "first") for group in found.groups]
    with torch.no_grad():
        full, narrow = model(x), cut(model, found, own, thin())(x)
    inputs = found.received(found.split(found.counts(HALF), side=side).private)
    torch.testing.assert_close(masked(model, found, inputs, x), narrow, rtol=1e-5, atol=1e-5)
    assert (full - narrow).abs().max() > 0.01
    assert torch.equal(masked(model, found, {name: torch.ones_like(v) for name, v in inputs.items()}, x), full)


def test_the_thin_network_does_not_see_the_other_channels() -> None:
    """Random numbers in every private element leave the shared network as it was, and the other way round."""
    torch.manual_seed(0)
    for name in ("resnet8", "torchvision:mobilenet_v2", "timm:mobilenetv3_small_050"):
        model, found = of(name, classes=3)
        model.eval()
        masks, own = found.masks(HALF), found.received(found.split(found.counts(HALF)).private)
        x = torch.rand(2, 3, 32, 32)
        for keep_private in (False, True):
            keep = {n: v if keep_private else ~v for n, v in own.items()}
            before = masked(model, found, keep, x)
            changed = copy.deepcopy(model)
            for tensor, values in changed.state_dict().items():
                gone = masks[tensor] if keep_private else ~masks[tensor]
                if values.is_floating_point() and tensor != f"{found.classifier}.bias":
                    values[gone] = torch.rand(int(gone.sum()))
            assert torch.equal(masked(changed, found, keep, x), before)
            assert not torch.equal(changed(x), model(x))
