"""Parts of a model: found by type and structure, found again quickly, and covering the model exactly."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from pfed import anatomy
from pfed.anatomy import ALL, BACKBONE, HEAD, NONE, NORM, SE, STATS, Part, marks
from pfed.errors import UserError
from pfed.groups import blocks, layers, stages
from pfed.models import build


def model_of(name: str, size: int = 32) -> nn.Module:
    return build(name, classes=5, shape=(3, size, size))


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    return model_of("torchvision:resnet18")


class Small(nn.Module):
    """A convolution with BatchNorm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.top = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.bn(self.conv(x)))
        return out


def test_head_backbone_norm_and_statistics() -> None:
    model = Small()
    assert HEAD.names(model) == {"top.2.weight", "top.2.bias"}
    assert BACKBONE.names(model) == ALL.names(model) - HEAD.names(model)
    assert NORM.names(model) == {f"bn.{n}" for n in ("weight", "bias", *nn.BatchNorm2d(1)._buffers)}
    assert STATS.names(model) == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert NONE.names(model) == frozenset()
    assert ALL.names(model) == set(model.state_dict())
    assert NORM.names(nn.BatchNorm1d(2)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def test_a_batchnorm_in_a_shortcut_is_norm(resnet18: nn.Module) -> None:
    assert "layer2.0.downsample.1.running_mean" in NORM.names(resnet18)
    assert "layer2.0.downsample.0.weight" not in NORM.names(resnet18)
    assert len(NORM.names(resnet18)) == 20 * 5
    assert len(STATS.names(resnet18)) == 20 * 3


def test_parts_combine_and_equal_combinations_are_equal() -> None:
    model = Small()
    assert (HEAD | NORM).names(model) == HEAD.names(model) | NORM.names(model)
    assert (NORM & STATS).names(model) == STATS.names(model)
    assert (NORM - STATS).names(model) == {"bn.weight", "bn.bias"}
    assert (~HEAD).names(model) == BACKBONE.names(model)
    assert HEAD | NORM == HEAD | NORM != NORM | HEAD
    assert pickle.loads(pickle.dumps(~(HEAD | NORM))) == ~(HEAD | NORM)


def test_what_travels() -> None:
    model = Small()
    assert "bn.num_batches_tracked" not in anatomy.params(model)
    assert "bn.num_batches_tracked" in anatomy.snapshot(model)
    assert anatomy.shareable(model, NORM) == NORM.names(model) - {"bn.num_batches_tracked"}
    marks(model).fixed, marks(model).local = frozenset({"conv.bias"}), frozenset({"bn.weight"})
    assert anatomy.shareable(model) == ALL.names(model) - {"bn.num_batches_tracked", "conv.bias", "bn.weight"}
    copied = anatomy.params(model, HEAD)
    assert copied.keys() == HEAD.names(model)
    assert copied["top.2.bias"].data_ptr() != model.state_dict()["top.2.bias"].data_ptr()
    live = anatomy.trainable(model, HEAD | STATS)
    assert live.keys() == HEAD.names(model)
    assert live["top.2.bias"] is model.get_parameter("top.2.bias")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("lenet5", "fc3"),
        ("resnet8", "fc"),
        ("torchvision:mobilenet_v2", "classifier.1"),
        ("timm:mobilenetv2_035", "classifier"),
        ("timm:convnext_atto", "head.fc"),
    ],
)
def test_the_head_is_found(name: str, head: str) -> None:
    assert anatomy.head_name(model_of(name)) == head


def test_timm_s_classifier_goes_before_the_last_linear_layer() -> None:
    model = Small()
    model.get_classifier = lambda: model.conv  # type: ignore[assignment]
    assert anatomy.head_name(model) == "conv"
    named = Small()
    named.get_classifier = lambda: (None, None)  # type: ignore[assignment]
    named.default_cfg = {"classifier": "conv"}  # type: ignore[assignment]
    assert anatomy.head_name(named) == "conv"
    without = Small()
    without.get_classifier = lambda: without.top[0]  # type: ignore[assignment, index]
    assert anatomy.head_name(without) == "top.2"


def test_a_marked_head_and_no_head() -> None:
    model = Small()
    assert anatomy.set_head(model, "top") is model
    assert anatomy.head_name(model) == "top"
    with pytest.raises(UserError, match="Small has no module 'topp' to be its head"):
        anatomy.set_head(model, "topp")
    with pytest.raises(UserError, match=r"Sequential has no linear layer; name its head with set_head"):
        HEAD.names(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_names_are_worked_out_once_and_again_after_a_change() -> None:
    calls = []

    def select(model: nn.Module) -> frozenset[str]:
        calls.append(model)
        return frozenset(name for name, _ in model.named_parameters()) - marks(model).fixed

    part = Part("counted", select)
    model = Small()
    assert part.names(model) is part.names(model)
    twin = copy.deepcopy(model)
    assert part.names(twin) == part.names(model)
    assert len(calls) == 1
    twin.top[2] = nn.Linear(16, 3, bias=False)  # type: ignore[index, operator]
    assert part.names(twin) == part.names(model) - {"top.2.bias"}
    twin.bn = nn.BatchNorm2d(4, affine=False)
    assert "bn.weight" not in part.names(twin)
    assert "bn.weight" in part.names(model)
    marks(model).fixed = frozenset({"conv.weight"})
    assert "conv.weight" not in part.names(model)
    assert len(calls) == 4
    assert part.names(pickle.loads(pickle.dumps(model))) == part.names(model)
    assert len(calls) == 5


def test_a_head_that_is_set_or_replaced_later_is_the_head() -> None:
    model = Small()
    assert len(HEAD.names(model)) == 2
    anatomy.set_head(model, "bn")
    assert HEAD.names(model) == NORM.names(model)
    twin = copy.deepcopy(model)
    anatomy.set_head(twin, "conv")
    assert HEAD.names(twin) == {"conv.weight", "conv.bias"}
    assert HEAD.names(model) == NORM.names(model)
    bigger = Small()
    assert anatomy.head_name(bigger) == "top.2"
    bigger.extra = nn.Linear(3, 2)
    assert anatomy.head_name(bigger) == "extra"
    renamed = nn.ModuleDict({"fc": nn.Linear(1, 2), "old": nn.Linear(2, 3)})
    assert anatomy.head_name(renamed) == "old"
    renamed["fc2"] = renamed.pop("old")
    assert anatomy.head_name(renamed) == "fc2"
    assert HEAD.names(anatomy.set_head(renamed, "fc")) == {"fc.weight", "fc.bias"}


def test_parts_made_anew_do_not_pile_up() -> None:
    model = Small()
    for i in range(1000):
        (ALL - anatomy.of([str(i)])).names(model)
    assert len(model._pfed_known) < 300  # type: ignore[arg-type]


def test_squeeze_and_excitation_by_type() -> None:
    assert SE.names(model_of("lenet5")) == frozenset()
    timm = SE.names(model_of("timm:seresnet18"))
    assert len(timm) == 8 * 4
    assert all(".se." in name for name in timm)
    efficient = SE.names(model_of("timm:mobilenetv3_small_050"))
    assert efficient
    assert all(".se." in name for name in efficient)
    torchvision = model_of("torchvision:mobilenet_v3_small")
    assert len(SE.names(torchvision)) == 9 * 4
    assert "features.1.block.1.fc1.weight" in SE.names(torchvision)


def test_has_batchnorm() -> None:
    assert anatomy.has_batchnorm(Small())
    assert not anatomy.has_batchnorm(model_of("lenet5"))


def exactly(model: nn.Module, groups: dict[str, Part]) -> bool:
    names = [name for part in groups.values() for name in part.names(model)]
    return sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "digits-cnn",
        "resnet8",
        "resnet8x4",
        "torchvision:resnet18",
        "torchvision:mobilenet_v2",
        "timm:resnet18",
        "timm:mobilenetv2_035",
        "timm:vit_tiny_patch16_224",
        "torchvision:squeezenet1_1",
    ],
)
def test_groups_cover_every_tensor_once_and_the_head_is_last(name: str) -> None:
    model = model_of(name)
    kinds = [stages(model), stages(model, stem="own"), blocks(model), layers(model), layers(model, joint_bn=True)]
    for groups in kinds:
        assert exactly(model, groups)
        if "squeezenet" not in name:  # its last layer is a convolution
            assert list(groups.values())[-1].names(model) == HEAD.names(model)
        for part in groups.values():  # statistics stay with their BatchNorm's parameters
            for tensor in part.names(model):
                if tensor.endswith("running_mean"):
                    assert tensor.replace("running_mean", "weight") in part.names(model)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
def test_groups_of_resnet18(name: str) -> None:
    model = model_of(name)
    assert list(stages(model)) == ["s1", "s2", "s3", "s4", "fc"]
    assert list(stages(model, stem="own")) == ["stem", "s1", "s2", "s3", "s4", "fc"]
    assert list(blocks(model)) == ["stem", *(f"s{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "fc"]
    assert len(layers(model)) == 41
    assert len(layers(model, joint_bn=True)) == 21
    assert {"conv1.weight", "bn1.running_var", "layer1.1.conv2.weight"} <= stages(model)["s1"].names(model)
    assert blocks(model)["stem"].names(model) == anatomy.names_under(model, "conv1") | anatomy.names_under(model, "bn1")
    assert blocks(model)["s2.0"].names(model) == anatomy.names_under(model, "layer2.0")  # its shortcut too
    shortcut = layers(model, joint_bn=True)["layer2.0.downsample.0"].names(model)
    assert shortcut == anatomy.names_under(model, "layer2.0.downsample")


def test_groups_of_other_models() -> None:
    assert list(stages(model_of("resnet14"))) == ["s1", "s2", "s3", "fc"]
    assert list(blocks(model_of("resnet8"))) == ["stem", "s1.0", "s2.0", "s3.0", "fc"]
    mobile = model_of("torchvision:mobilenet_v2")
    assert list(stages(mobile)) == ["s1", "s2", "s3", "s4", "s5", "features.18", "fc"]
    assert len(blocks(mobile)) == 1 + 17 + 1 + 1
    assert blocks(mobile)["s5.3"].names(mobile) == anatomy.names_under(mobile, "features.17")
    timm = model_of("timm:mobilenetv2_035")
    assert len(blocks(timm)) == 1 + 17 + 1 + 1
    assert blocks(timm)["conv_head"].names(timm) == anatomy.names_under(timm, "conv_head") | anatomy.names_under(
        timm, "bn2"
    )
    apart = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(3))
    assert list(layers(apart, joint_bn=True)) == ["0", "1"]  # the BatchNorm has another width, so it follows another
    small = model_of("cnn-small-bn", 8)
    assert list(blocks(small)) == list(stages(small)) == ["conv1", "conv2", "fc1", "fc"]
    assert list(layers(small)) == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2"]
    parts = nn.ModuleDict({"features": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))})
    parts["classifier"] = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(stages(parts)) == ["features", "classifier", "fc"]
    assert list(blocks(parts)) == ["features.0", "features.1", "classifier.0", "fc"]


def test_groups_follow_a_change_and_belong_to_the_caller() -> None:
    model = Small()
    layers(model).clear()
    assert list(layers(model)) == ["conv", "bn", "top.2"]
    anatomy.set_head(model, "conv")
    assert list(layers(model)) == ["bn", "top.2", "conv"]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["lenet5", "resnet8", "torchvision:mobilenet_v2", "timm:resnet18", "cnn-cifar100"])
def test_features_then_head_is_the_model(name: str, mode: bool) -> None:
    model = model_of(name).train(mode)
    x = torch.rand(4, 3, 32, 32)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    z = anatomy.features(model, x)
    assert torch.equal(anatomy.head(model, z), expected)
    assert z.shape == (4, model.get_submodule(anatomy.head_name(model)).in_features)


def test_features_with_and_without_gradients() -> None:
    model = Small()
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        assert not anatomy.features(model, x).requires_grad
    anatomy.features(model, x).sum().backward()
    assert model.conv.weight.grad is not None
    assert model.top[2].weight.grad is None  # type: ignore[index, union-attr]
    assert model(x).shape == (2, 3)  # the hook is gone


def test_features_of_a_model_that_fails_or_leaves_out_its_head() -> None:
    model = Small()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.rand(2, 1, 9, 9))
    with pytest.raises(RuntimeError):
        anatomy.features(anatomy.set_head(model, "top"), torch.rand(2, 3, 9, 9))
    model.unused = nn.Linear(1, 1)
    with pytest.raises(UserError, match="Small does not use its head 'unused'"):
        anatomy.features(anatomy.set_head(model, "unused"), torch.rand(2, 1, 4, 4))
