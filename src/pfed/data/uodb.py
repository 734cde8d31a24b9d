"""The eleven domains of the Universal Object Detection Benchmark, from the files that its authors offer.

Folders, sets and classes are those of the benchmark's published code, with two exceptions. Watercolor and Comic have
the six classes that occur in them, where the code lists VOC's twenty. COCO is not checked against the code: its files
are expected as COCO names them (`coco/annotations/instances_minival2014.json` for testing, `valminusminival2014` for
training, images in `coco/images/val2014`), and its classes are those in the files. VOC is 2007 and 2012 together,
tested on 2007. As in the code, labels are compared in small letters, and boxes of other labels, such as KITTI's vans,
are left out. So are boxes that have no area inside their image.

Reference: Wang, Cai, Gao, Vasconcelos: Towards Universal Object Detection by Domain Attention, CVPR 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pfed.data.base import Dataset
from pfed.data.boxes import Picture, Scenes, limited, read_scenes, to_dataset
from pfed.data.coco import FOLDER, coco_pictures, in_order
from pfed.data.voc import is_voc, voc_pictures
from pfed.errors import UserError, unknown

ORIGIN = "http://www.svcl.ucsd.edu/projects/universal-detection/"


@dataclass(frozen=True)
class Part:
    """A folder in VOC's layout, and which of its lists of images are for training and for testing."""

    folder: str
    train: str
    test: str | None


@dataclass(frozen=True)
class Domain:
    """One of the ten domains in VOC's format."""

    parts: tuple[Part, ...]
    classes: tuple[str, ...]
    first: int = 1  # what its files call the first pixel


VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
SIX_CLASSES = ("bicycle", "bird", "car", "cat", "dog", "person")
DOTA_CLASSES = (
    *("plane", "baseball-diamond", "bridge", "ground-track-field", "small-vehicle", "large-vehicle", "ship"),
    *("tennis-court", "basketball-court", "storage-tank", "soccer-ball-field", "roundabout", "harbor"),
    *("swimming-pool", "helicopter"),
)
KITCHEN_CLASSES = (
    *("coca_cola_glass_bottle", "coffee_mate_french_vanilla", "honey_bunches_of_oats_honey_roasted", "hunts_sauce"),
    *("mahatma_rice", "nature_valley_soft_baked_oatmeal_squares_cinnamon_brown_sugar"),
    *("nature_valley_sweet_and_salty_nut_almond", "palmolive_orange", "pop_secret_light_butter"),
    *("pringles_bbq", "red_bull"),
)
VOC_PARTS = (
    Part("VOCdevkit2007/VOC2007", "trainval", "test"),
    Part("VOCdevkit2012/VOC2012", "trainval", None),
)
COCO = "coco"
COCO_SETS = (("instances_valminusminival2014.json", False), ("instances_minival2014.json", True))
VOC_DOMAINS = {
    "kitti": Domain((Part("KITTIVOC", "train", "test"),), ("pedestrian", "cyclist", "car")),
    "widerface": Domain((Part("widerface", "train", "val"),), ("face",), first=0),
    "voc": Domain(VOC_PARTS, VOC_CLASSES),
    "lisa": Domain((Part("LISA", "train", "test"),), ("warning", "noturn", "speedlimit", "stop"), first=0),
    "dota": Domain((Part("dota", "train", "val"),), DOTA_CLASSES, first=0),
    "watercolor": Domain((Part("watercolor", "train", "test"),), SIX_CLASSES),
    "clipart": Domain((Part("clipart", "train", "test"),), VOC_CLASSES),
    "comic": Domain((Part("comic", "train", "test"),), SIX_CLASSES),
    "kitchen": Domain((Part("Kitchen", "train", "test"),), KITCHEN_CLASSES),
    "deeplesion": Domain((Part("deeplesion", "trainval", "test"),), ("lesion",), first=0),
}
DOMAINS = (
    *("kitti", "widerface", "voc", "lisa", "dota", COCO),
    *("watercolor", "clipart", "comic", "kitchen", "deeplesion"),
)


def uodb(root: Path, size: int, domains: Sequence[str] = DOMAINS, limit: int | None = None) -> Dataset:
    """The benchmark, or some of its domains, from the folder where its files were unpacked.

    All images that are read stay in memory. `limit` takes at most so many training images and test images of each
    domain, evenly over all of them.
    """
    for name in domains:
        if name not in DOMAINS:
            raise unknown("domain of UODB", name, DOMAINS)
    missing = [text for name in domains for text in _missing(root, name)]
    if missing:
        here = present(root)
        raise UserError(
            f"{root} must hold the domains of UODB that are asked for ({ORIGIN} has them). "
            f"Missing: {', '.join(missing)}. There: {', '.join(here) or 'none'}."
        )
    return to_dataset("uodb", [_read(root, name, size, limit) for name in domains])


def present(root: Path) -> list[str]:
    """The domains whose files are there."""
    return [name for name in DOMAINS if not _missing(root, name)]


def _missing(root: Path, name: str) -> list[str]:
    """What a domain lacks, with the folder where it should be."""
    if name == COCO:
        files = [f"{COCO}/{FOLDER}/{file}" for file, _ in COCO_SETS]
        return [f"{name} ({file})" for file in files if not (root / file).is_file()]
    return [f"{name} ({part.folder})" for part in VOC_DOMAINS[name].parts if _place(root, part) is None]


def _place(root: Path, part: Part) -> Path | None:
    """Most archives have a folder VOCdevkit around JPEGImages and Annotations."""
    return next((place for place in (root / part.folder, root / part.folder / "VOCdevkit") if is_voc(place)), None)


def _read(root: Path, name: str, size: int, limit: int | None) -> Scenes:
    pictures, classes = _coco(root / COCO) if name == COCO else _voc(root, VOC_DOMAINS[name])
    return read_scenes(name, limited(pictures, limit), size, classes, strict=False)


def _voc(root: Path, domain: Domain) -> tuple[list[Picture], tuple[str, ...]]:
    pictures: list[Picture] = []
    for part in domain.parts:
        place = _place(root, part)
        assert place is not None
        pictures += voc_pictures(place, [part.train], [part.test] if part.test else [], domain.first)
    return [_in_small_letters(picture) for picture in pictures], domain.classes


def _coco(folder: Path) -> tuple[list[Picture], tuple[str, ...]]:
    parts = [coco_pictures(folder / FOLDER / file, folder, test) for file, test in COCO_SETS]
    return [picture for pictures, _ in parts for picture in pictures], in_order(parts[0][1])


def _in_small_letters(picture: Picture) -> Picture:
    return replace(picture, boxes=tuple(replace(box, label=box.label.lower()) for box in picture.boxes))
