"""Models by name: sizes as published, shapes, and one clear sentence when a name or an image does not fit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from pfed import models
from pfed.anatomy import features, head, head_name
from pfed.channels import channels
from pfed.data.fetch import File
from pfed.errors import UserError
from pfed.models import weights

COUNTS = [
    ("mlp", 10, (1, 28, 28), 784 * 200 + 200 + 200 * 10 + 10),
    ("mlp-femnist", 10, (1, 28, 28), 785 * 512 + 513 * 256 + 257 * 10),
    ("mlp-fedrep", 10, (1, 28, 28), 785 * 512 + 513 * 256 + 257 * 64 + 65 * 10),
    ("lenet5", 10, (3, 32, 32), 64_102),
    ("lenet5", 10, (1, 28, 28), 6 * 26 + 16 * 151 + 120 * 257 + 100 * 121 + 10 * 101),
    ("cnn", 10, (1, 28, 28), 582_026),
    ("cnn-fedrep", 10, (3, 32, 32), 307_842),
    ("cnn-cifar100", 100, (3, 32, 32), 64 * 76 + 128 * 1601 + 256 * 3201 + 128 * 257 + 100 * 129),
    ("cnn-small", 10, (1, 8, 8), 16 * 10 + 32 * 145 + 64 * 513 + 10 * 65),
    ("cnn-small-bn", 10, (1, 8, 8), 16 * 10 + 32 * 145 + 64 * 513 + 10 * 65 + 2 * (16 + 32)),
    ("digits-cnn", 10, (3, 28, 28), 64 * 76 + 64 * 1601 + 128 * 1601 + 2048 * 6273 + 512 * 2049 + 5130 + 2 * 2816),
    ("resnet8", 10, (3, 32, 32), 75_290),
    ("resnet14", 10, (3, 32, 32), 172_506),
    ("resnet20", 10, (3, 32, 32), 269_722),
    ("resnet32", 10, (3, 32, 32), 464_154),
    ("resnet44", 10, (3, 32, 32), 658_586),
    ("resnet56", 10, (3, 32, 32), 853_018),
    ("resnet110", 10, (3, 32, 32), 1_727_962),
    ("resnet8x4", 100, (3, 32, 32), 1_233_540),
    ("resnet32x4", 100, (3, 32, 32), 7_433_860),
    ("resnet18", 100, (3, 32, 32), 11_220_132),
    ("resnet34", 100, (3, 32, 32), 21_328_292),
    ("resnet50", 100, (3, 32, 32), 23_705_252),  # FedCD's Table III
    ("timm:resnet18", 7, (1, 32, 32), 11_180_103 - 2 * 64 * 49),
    ("torchvision:resnet18", 7, (3, 32, 32), 11_176_512 + 7 * 513),  # DualFed's encoder and a classifier
    ("torchvision:resnet34", 65, (3, 32, 32), 21_284_672 + 65 * 513),
    ("torchvision:resnet50", 65, (3, 32, 32), 23_508_032 + 65 * 2049),
]


@pytest.mark.parametrize(("name", "classes", "shape", "count"), COUNTS)
def test_size_output_and_head(name: str, classes: int, shape: tuple[int, ...], count: int) -> None:
    model = models.build(name, classes=classes, shape=shape).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    x = torch.rand(2, *shape)
    with torch.no_grad():
        y = model(x)
        assert y.shape == (2, classes)
        assert torch.equal(head(model, features(model, x)), y)
    assert model.get_submodule(head_name(model)).out_features == classes


def test_every_name_is_tested_here() -> None:
    assert set(models.names()) - {"alexnet-bn"} == {name for name, *_ in COUNTS if ":" not in name}


def test_alexnet_bn_on_its_smallest_image() -> None:
    model = models.build("alexnet-bn", classes=10, shape=(3, 63, 63)).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 57_063_498
    with torch.no_grad():
        assert model(torch.rand(1, 3, 63, 63)).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lenet5", (3, 16, 17)), ("cnn", (1, 16, 30)), ("cnn-small", (1, 3, 2)), ("digits-cnn", (1, 4, 5))],
)
def test_images_of_other_sizes(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, classes=3, shape=shape).eval()
    assert model(torch.rand(2, *shape)).shape == (2, 3)


def test_the_seed_decides_the_initial_values() -> None:
    def weights(seed: int, name: str) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in models.build(name, classes=3, shape=(3, 32, 32)).parameters()])

    for name in ("lenet5", "resnet8", "timm:mobilenetv2_035"):
        assert torch.equal(weights(1, name), weights(1, name))
        assert not torch.equal(weights(1, name), weights(2, name))


def test_dropout_stands_before_the_head() -> None:
    model = models.build("cnn-cifar100", classes=3, shape=(3, 32, 32))
    assert [type(module) for module in model.children()][-2:] == [torch.nn.Dropout, torch.nn.Linear]
    z = features(model.train(), torch.rand(8, 3, 32, 32))
    quiet = features(model.eval(), torch.rand(8, 3, 32, 32))
    assert (z == 0).float().mean() > (quiet == 0).float().mean() + 0.1  # more than ReLU's zeros


def test_a_padded_shortcut_is_every_other_pixel_and_zero_channels() -> None:
    model = models.build("resnet8", classes=3, shape=(3, 32, 32))
    x = torch.rand(2, 16, 8, 8)
    y = model.get_submodule("layer2.0.shortcut")(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 4, 4)
    assert not y[:, 16:].any()


@pytest.mark.parametrize("name", ["resnet8", "resnet8x4", "digits-cnn", "cnn-cifar100"])
def test_torch_fx_traces_them(name: str) -> None:
    model = models.build(name, classes=5, shape=(3, 32, 32))
    assert channels(model, torch.zeros(1, 3, 32, 32)).classifier == head_name(model)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((64,), "mlp"),
        ((1, 8, 8), "cnn-small"),
        ((3, 15, 40), "cnn-small"),
        ((1, 16, 16), "cnn"),
        ((1, 28, 28), "cnn"),
        ((3, 32, 32), "cnn-fedrep"),
        ((3, 33, 33), "timm:resnet18"),
        ((3, 224, 224), "timm:resnet18"),
    ],
)
def test_default(shape: tuple[int, ...], name: str) -> None:
    assert models.default(shape) == name
    models.build(name, classes=2, shape=shape)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet", (3, 32, 32), "There is no model 'lenet'. Did you mean 'lenet5'?"),
        ("timm:", (3, 32, 32), "There is no model 'timm:'. Did you mean 'timm:NAME'?"),
        ("timm:resnt18", (3, 32, 32), "There is no timm model 'resnt18'. Did you mean 'resnet18'?"),
        ("torchvision:resnt18", (3, 32, 32), "There is no torchvision model 'resnt18'. Did you mean 'resnet18'?"),
        ("torchvision:resnet18", (1, 32, 32), "Model 'torchvision:resnet18' wants images of 3 channels"),
        ("lenet5", (3, 15, 32), "Model 'lenet5' wants images of at least 16x16. Got 15x32."),
        ("alexnet-bn", (3, 62, 64), "Model 'alexnet-bn' wants images of at least 63x63. Got 62x64."),
        ("resnet8", (64,), "Model 'resnet8' wants images (channels, height, width). Got shape (64,)."),
        ("timm:resnet18", (64,), "Model 'timm:resnet18' wants images (channels, height, width). Got shape (64,)."),
    ],
)
def test_what_does_not_fit(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        models.build(name, classes=10, shape=shape)
    assert str(caught.value).startswith(message)


def test_no_class() -> None:
    with pytest.raises(UserError, match=r"at least 1 class. Got 0."):
        models.build("mlp", classes=0, shape=(4,))


def test_imagenet_weights_are_looked_for_checked_and_given_to_all_but_the_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here the file is one made of a model with a thousand classes; the real ones come from torchvision's address."""
    torch.manual_seed(1)
    published = models.build("torchvision:resnet18", classes=1000, shape=(3, 32, 32))
    (tmp_path / "weights").mkdir()
    torch.save(published.state_dict(), tmp_path / "weights" / "made.pth")
    digest = hashlib.sha256((tmp_path / "weights" / "made.pth").read_bytes()).hexdigest()[:8]
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    monkeypatch.setattr(weights, "_file", lambda name: (File("made.pth", f"sha256:{digest}"), "http://127.0.0.1:9/"))
    torch.manual_seed(2)
    fresh = models.build("torchvision:resnet18", classes=7, shape=(3, 32, 32)).state_dict()
    torch.manual_seed(2)
    found = models.build("torchvision:resnet18", classes=7, shape=(3, 32, 32), pretrained=True).state_dict()
    for name, tensor in published.state_dict().items():
        assert torch.equal(found[name], fresh[name] if name.startswith("fc.") else tensor), name
    (tmp_path / "weights" / "made.pth").write_bytes(b"other")
    with pytest.raises(UserError, match=r"made\.pth is damaged or another file"):
        models.build("torchvision:resnet18", classes=7, shape=(3, 32, 32), pretrained=True)
    (tmp_path / "weights" / "made.pth").unlink()
    monkeypatch.setenv("PFED_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        UserError, match=r"weights of resnet18 could not be fetched .*: put made\.pth into a folder named"
    ):
        models.build("torchvision:resnet18", classes=7, shape=(3, 32, 32), pretrained=True)


def test_the_published_file_is_named_by_its_checksum() -> None:
    file, address = weights._file("mobilenet_v2")
    assert (file.name, file.digest) == ("mobilenet_v2-b0353104.pth", "sha256:b0353104")
    assert address.startswith("https://")
    with pytest.raises(UserError, match=r"for torchvision:NAME models and detectors only\. Got 'lenet5'"):
        models.build("lenet5", classes=7, shape=(3, 32, 32), pretrained=True)
