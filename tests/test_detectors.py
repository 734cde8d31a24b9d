"""Detectors: what they say, what they learn from, and how their tensors fall into parts."""

from __future__ import annotations

import copy
import hashlib
import pickle
from pathlib import Path

import pytest
import torch
from detection_helpers import OBJECTS, boxes, scene
from torch import Tensor, nn
from torch.func import functional_call

from pfed import anatomy, compat, groups, pool
from pfed.anatomy import HEAD, NORM, SE
from pfed.data.fetch import File
from pfed.errors import UserError
from pfed.loading import loaded
from pfed.models import weights
from pfed.models.detectors import MOST, Detector, build_detector

SHAPE = (3, 64, 64)
SMALL = ["fcos:seresnet18-small", "fasterrcnn:seresnet18-small"]
LARGE = ["fcos:seresnet50", "fasterrcnn:seresnet50"]
PREDICTOR = {"fcos": "head.classification_head.cls_logits.", "fasterrcnn": "roi_heads.box_predictor."}


def new(name: str, classes: int = 2, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Detector:
    torch.manual_seed(seed)
    return build_detector(name, classes, shape)


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> Detector:
    """To look at, not to change."""
    return new(request.param)


@pytest.fixture(scope="module", params=LARGE)
def large(request: pytest.FixtureRequest) -> tuple[str, Detector]:
    name: str = request.param
    return name.partition(":")[0], new(name, 3)


@pytest.fixture(scope="module", params=SMALL)
def trained(request: pytest.FixtureRequest) -> tuple[Detector, list[float]]:
    """After forty steps on two pictures, with the loss of each."""
    model = new(request.param).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5  # or else the statistics lag behind so few steps
    x, y = scene(2)
    descent = torch.optim.SGD(model.parameters(), 0.01 if "fcos" in request.param else 0.02, momentum=0.9)
    losses = []
    for _ in range(40):
        descent.zero_grad()
        loss = model.losses(x, y)
        loss.backward()
        descent.step()
        losses.append(float(loss.detach()))
    return model, losses


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def modes(model: Detector) -> list[bool]:
    return [module.training for module in [*model.modules(), model._net]]


def test_it_learns_what_it_sees(trained: tuple[Detector, list[float]]) -> None:
    """The best detections of both pictures are their objects: an AP50 of 1."""
    compat.ensure()
    from torchvision.ops import box_iou

    model, losses = trained
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    with torch.no_grad():
        found = model.eval()(scene(2)[0])
    for said, rows in zip(found, OBJECTS, strict=False):
        best = said[: len(rows)][said[: len(rows), 5].argsort()]  # as many as there are objects, by class
        assert best[:, 5].tolist() == [row[0] for row in rows]
        assert (box_iou(best[:, :4], torch.tensor(rows)[:, 1:5]).diagonal() > 0.5).all()


def test_detections_are_padded_sorted_and_inside(
    trained: tuple[Detector, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained
    judge = model.roi_heads if hasattr(model, "roi_heads") else model._net
    monkeypatch.setattr(judge, "score_thresh", 0.15)  # fewer than there is room for
    with torch.no_grad():
        found = model.eval()(torch.cat([scene(4)[0], torch.rand(1, *SHAPE)]))
    assert found.shape == (5, MOST, 6)
    assert found.dtype == torch.float32
    real = found[..., 4] >= 0
    assert real.any()
    assert not real.all()
    assert (found[~real] == torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, -1.0])).all()
    assert (found[:, 1:, 4] <= found[:, :-1, 4]).all()  # padding is last
    said = found[real]
    assert ((said[:, :4] >= 0) & (said[:, :4] <= 64)).all()
    assert (said[:, 2:4] >= said[:, :2]).all()
    assert set(said[:, 5].tolist()) <= {0.0, 1.0}
    assert (said[:, 4] <= 1).all()


def test_looking_changes_nothing(trained: tuple[Detector, list[float]]) -> None:
    model, _ = trained
    model.eval()
    before, flags = state(model), modes(model)
    with torch.no_grad():
        first, second = model(scene(2)[0]), model(scene(2)[0])
        model.losses(*scene(2))
    assert torch.equal(first, second)
    assert same(before, state(model))
    assert modes(model) == flags


def test_it_says_something_in_train_mode_too(small: Detector) -> None:
    """As in a trial pass; the modes stay, also those of modules that are frozen."""
    model = copy.deepcopy(small).train()
    model.backbone.body.layer1.eval()  # type: ignore[union-attr,operator]
    flags = modes(model)
    assert model(scene(2)[0]).shape == (2, MOST, 6)
    assert model.losses(*scene(2)).isfinite()
    assert modes(model) == flags


def test_the_images_reach_the_body_as_they_are(small: Detector) -> None:
    """Bit for bit, in both passes; only a side that is no multiple of 32 gets a rim."""
    seen: list[Tensor] = []
    hook = small.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0]))  # type: ignore[union-attr]
    x = torch.rand(2, *SHAPE) * 3 - 1
    with torch.no_grad():
        small.eval()(x)
        small.losses(x, boxes([], []))
        small(x[:, :, :40, :50])
    hook.remove()
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], x)
    assert seen[2].shape == (2, 3, 64, 64)
    assert torch.equal(seen[2][:, :, :40, :50], x[:, :, :40, :50])
    assert seen[2][:, :, 40:].abs().sum() + seen[2][:, :, :, 50:].abs().sum() == 0


def test_what_it_sees_stays_inside_a_picture_of_any_size(small: Detector) -> None:
    with torch.no_grad():
        found = small.train()(torch.rand(2, 3, 40, 50))
    said = found[found[..., 4] >= 0]
    assert len(said)
    assert (said[:, [0, 2]] <= 50).all()
    assert (said[:, [1, 3]] <= 40).all()


def test_gradients_reach_every_parameter(small: Detector) -> None:
    """After one step: the last BatchNorm of a block starts at zero, and so nothing reaches its inside in the first."""
    model = copy.deepcopy(small).train()
    descent = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        descent.zero_grad()
        model.losses(*scene(2)).backward()
        descent.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def loss(model: Detector, y: Tensor, seed: int = 0) -> float:
    torch.manual_seed(seed)
    with torch.no_grad():
        return float(model.eval().losses(scene(len(y))[0], y))


def test_same_seed_same_loss(small: Detector) -> None:
    assert loss(small, scene(3)[1]) == loss(small, scene(3)[1])


def test_difficult_and_flat_boxes_are_not_learned(small: Detector) -> None:
    """Nor does it matter how many empty rows there are."""
    plain = loss(small, boxes(OBJECTS[0], []))
    assert loss(small, boxes([*OBJECTS[0], (1, 2, 2, 40, 40, 1)], [(0, 5, 5, 20, 20, 1)])) == plain
    assert loss(small, boxes([*OBJECTS[0], (1, 20, 2, 20, 40, 0)], [(0, 5, 9, 20, 9, 0)])) == plain
    assert loss(small, boxes(OBJECTS[0], [], most=7)) == plain
    assert loss(small, boxes([*OBJECTS[0], (1, 2, 2, 40, 40, 0)], [])) != plain


def test_the_classes_matter(small: Detector) -> None:
    """Class 0 is one of the classes and not the background: both are learned, and not as one."""
    both = {loss(small, boxes([(c, 6, 8, 30, 34, 0)])) for c in (0, 1)}
    assert len(both) == 2
    assert all(value > loss(small, boxes([])) for value in both)


@pytest.mark.parametrize("name", SMALL)
def test_pictures_without_objects_are_learned_from(name: str) -> None:
    model = new(name).train()
    for empty in (boxes([], []), torch.zeros(2, 0, 6)):
        value = model.losses(scene(2)[0], empty)
        value.backward()
        assert value.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_diverged_detector_says_nothing(small: Detector) -> None:
    model = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        assert (model.eval()(scene(2)[0])[..., 4] == -1).all()
        assert model.losses(*scene(2)).isnan()


@pytest.mark.parametrize("name", SMALL)
def test_only_the_class_predictor_depends_on_the_classes(name: str) -> None:
    three, five = ({n: t.shape for n, t in new(name, classes).state_dict().items()} for classes in (3, 5))
    assert three.keys() == five.keys()
    differ = {n for n in three if three[n] != five[n]}
    assert differ
    assert differ == {n for n in three if n.startswith(PREDICTOR[name.partition(":")[0]])}


def test_the_class_predictor_stays_at_the_client(small: Detector) -> None:
    """Also after a run has added its own marks."""
    model = copy.deepcopy(small)
    kind = "fcos" if "head" in dict(model.named_children()) else "fasterrcnn"
    own = {n for n in model.state_dict() if n.startswith(PREDICTOR[kind])}
    assert anatomy.marks(model).local == own
    pool.mark([model], "local-all", SHAPE)
    assert anatomy.marks(model).local == own | NORM.names(model)
    assert not anatomy.shareable(model) & own
    assert anatomy.shareable(model, HEAD)  # the rest of the head does travel


def test_copies_stand_for_themselves(small: Detector) -> None:
    """A copy, by memory or by bytes, runs on its own tensors; so does one whose tensors are given."""
    x, y = scene(2)
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        before = loss(twin, y)
        assert before == loss(small, y)
        with torch.no_grad():
            twin.backbone.body.conv1.weight.mul_(-2)
        assert loss(twin, y) != before == loss(small, y)
        assert anatomy.marks(twin) == anatomy.marks(small)
    given = {name: tensor.detach().clone().requires_grad_() for name, tensor in small.named_parameters()}
    objective = _Objective(small.eval())
    torch.manual_seed(0)
    value = functional_call(objective, {f"model.{name}": tensor for name, tensor in given.items()}, (x, y))
    assert float(value.detach()) == loss(small, y)
    value.backward()
    assert all(tensor.grad is not None for tensor in given.values())


class _Objective(nn.Module):
    def __init__(self, model: Detector) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.losses(x, y)


def test_channels_may_lie_side_by_side(small: Detector) -> None:
    model = copy.deepcopy(small)
    anatomy.marks(model).shape = SHAPE
    pool.channels_last([model])
    weight = model.backbone.body.conv1.weight  # type: ignore[union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert loss(model, scene(2)[1]) == pytest.approx(loss(small, scene(2)[1]), rel=1e-3)


def test_blocks_and_stages(large: tuple[str, Detector]) -> None:
    """SE-ResNet-50: the stem, sixteen blocks in four stages, what stands between, the head."""
    kind, model = large
    body = [f"s{stage}.{block}" for stage, blocks in enumerate((3, 4, 6, 3), start=1) for block in range(blocks)]
    between = {"fcos": ["backbone.fpn"], "fasterrcnn": ["backbone.fpn", "rpn"]}[kind]
    blocks = groups.blocks(model)
    assert list(blocks) == ["stem", *body, *between, "fc"]
    assert list(groups.stages(model)) == ["s1", "s2", "s3", "s4", *between, "fc"]
    assert list(groups.stages(model, "own")) == ["stem", "s1", "s2", "s3", "s4", *between, "fc"]
    head = {"fcos": "head.", "fasterrcnn": "roi_heads."}[kind]
    assert all(name.startswith(head) for name in HEAD.names(model))
    assert blocks["fc"].names(model) == HEAD.names(model)
    assert all(name.startswith("backbone.body.layer3.2.") for name in blocks["s3.2"].names(model))
    for cut in (blocks, groups.layers(model), groups.layers(model, joint_bn=True)):
        names = [name for part in cut.values() for name in part.names(model)]
        assert sorted(names) == sorted(model.state_dict())
    assert list(groups.layers(model))[-1].startswith(head)


def test_loading_strategies(large: tuple[str, Detector]) -> None:
    """What stays local, by name: squeeze-and-excitation, BatchNorm, the first and third blocks."""
    _, model = large
    every = set(model.state_dict())

    def local(strategy: str) -> set[str]:
        return every - loaded(model, strategy, "block", "with_s1", "separate").names(model)

    se = {name for name in every if ".se." in name}
    norm = {f"{n}.{t}" for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) for t in m.state_dict()}
    assert len(se) == 16 * 4
    assert len(norm) == 53 * 5
    assert (SE.names(model), NORM.names(model)) == (se, norm)
    assert local("wo_se") == se
    assert local("wo_se_bn") == se | norm

    def of_blocks(*numbers: int) -> set[str]:
        wanted = tuple(f"backbone.body.layer{stage}.{block}." for stage in range(1, 5) for block in numbers)
        return {name for name in every if name.startswith(wanted)}

    assert local("wo_fb") == of_blocks(0)
    assert local("wo_fb_tb") == of_blocks(0, 2)
    assert local("wo_fc") == HEAD.names(model)
    assert every - local("s1-s4") == {name for name in every if name.startswith("backbone.body.")}


@pytest.mark.parametrize(
    ("name", "classes", "shape", "sentence"),
    [
        ("fcos", 2, SHAPE, "There is no detector 'fcos'"),
        ("yolo:resnet18", 2, SHAPE, "There is no detector 'yolo:resnet18'"),
        ("fcos:seresnet18-smal", 2, SHAPE, "Did you mean 'seresnet18-small'"),
        ("fcos:vit_tiny_patch16_224", 2, SHAPE, "stages at strides 4, 8, 16, 32. Got 'vit_tiny_patch16_224'"),
        ("fcos:seresnet18-small", 0, SHAPE, "at least 1 class. Got 0"),
        ("fcos:seresnet18-small", 2, (3, 16, 16), "at least 32x32. Got 16x16"),
        ("fcos:seresnet18-small", 2, (64,), r"wants images \(channels, height, width\)"),
    ],
)
def test_what_can_not_be_built(name: str, classes: int, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_detector(name, classes, shape)


def test_other_bodies_and_channels() -> None:
    model = build_detector("fasterrcnn:mobilenetv3_small_050", 1, (1, 32, 64)).eval()
    with torch.no_grad():
        assert model(torch.rand(1, 1, 32, 64)).shape == (1, MOST, 6)


def publish(state: dict[str, Tensor], folder: Path, patch: pytest.MonkeyPatch, lookup: str) -> None:
    """Let `state` be the file of weights that is found for every name."""
    (folder / "weights").mkdir(exist_ok=True)
    torch.save(state, folder / "weights" / "made.pth")
    digest = hashlib.sha256((folder / "weights" / "made.pth").read_bytes()).hexdigest()
    patch.setenv("PFED_DATA", str(folder))
    patch.setattr(weights, lookup, lambda name: (File("made.pth", f"sha256:{digest}"), "http://127.0.0.1:9/"))


def test_torchvisions_weights_make_timms_body_see_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps of the four strides, of weights that are not those of a new model, statistics included."""
    compat.ensure()
    import torchvision

    torch.manual_seed(1)
    published = torchvision.models.mobilenet_v2()
    for buffer in published.buffers():
        buffer.copy_(torch.rand_like(buffer.float()) + 0.5)
    publish(published.state_dict(), tmp_path, monkeypatch, "_file")
    model = build_detector("fcos:mobilenetv2-small", 2, SHAPE, pretrained=True).eval()
    x = torch.rand(2, *SHAPE)
    with torch.no_grad():
        maps = model.backbone.body(x)  # type: ignore[union-attr,operator]
        wanted = [published.features[:end].eval()(x) for end in (4, 7, 14, 18)]
    for one, other in zip(maps, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_timms_weights_are_given_to_the_body_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    torch.manual_seed(1)
    published = timm.create_model("seresnet18", num_classes=1000).state_dict()
    publish(published, tmp_path, monkeypatch, "_file_of_timm")
    fresh = new("fcos:seresnet18", seed=2).state_dict()
    torch.manual_seed(2)
    found = build_detector("fcos:seresnet18", 2, SHAPE, pretrained=True).state_dict()
    for name, tensor in found.items():
        own = name.removeprefix("backbone.body.")
        assert torch.equal(tensor, published[own] if own != name else fresh[name]), name
    publish({"conv1.weight": published["conv1.weight"]}, tmp_path, monkeypatch, "_file_of_timm")
    with pytest.raises(UserError, match=r"weights of seresnet18 do not fit the body of a detector"):
        build_detector("fcos:seresnet18", 2, SHAPE, pretrained=True)


def test_timms_files_are_named_by_their_checksums() -> None:
    compat.ensure()
    file, address = weights._file_of_timm("seresnet50")
    assert (file.name, file.digest) == ("seresnet50_a1_0-ffa00869.pth", "sha256:ffa00869")
    assert address.startswith("https://")


@pytest.mark.parametrize(
    ("name", "channels", "message"),
    [
        ("fcos:seresnet18-small", 3, r"no ImageNet weights for the narrow body of 'fcos:seresnet18-small'"),
        ("fcos:seresnet18", 3, r"There is no file of ImageNet weights with a checksum for timm's seresnet18\."),
        ("fcos:seresnet50", 1, r"ImageNet weights are for images of 3 channels\. Got 1\."),
    ],
)
def test_bodies_without_weights(name: str, channels: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_detector(name, 2, (channels, 64, 64), pretrained=True)
