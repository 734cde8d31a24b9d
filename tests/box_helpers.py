"""Tiny folders of images with boxes, in the formats of VOC and COCO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

Object = tuple[Any, ...]  # label, xmin, ymin, xmax, ymax, and more fields as XML
DOG: Object = ("dog", 3, 5, 10, 20)


def picture(width: int, height: int, rectangle: Sequence[int] = ()) -> Image.Image:
    """A black image, with a white rectangle from (x1, y1) up to and without (x2, y2)."""
    image = Image.new("RGB", (width, height))
    if rectangle:
        image.paste((255, 255, 255), tuple(rectangle))
    return image


def xml(objects: Sequence[Object], size: tuple[int, int] | None = (40, 30)) -> str:
    parts = [] if size is None else [f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"]
    for label, x1, y1, x2, y2, *more in objects:
        corners = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
        part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"  # as in VOC's layout task
        parts.append(f"<object>{part}<name>{label}</name>{''.join(more)}<bndbox>{corners}</bndbox></object>")
    return f"<annotation><folder>VOC</folder>{''.join(parts)}</annotation>"


def voc(folder: Path, images: dict[str, Sequence[Object]], suffix: str = ".jpg", **sets: Sequence[str]) -> Path:
    """A folder in VOC's layout; the images are 40x30."""
    for place in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for name, objects in images.items():
        picture(40, 30).save(folder / "JPEGImages" / f"{name}{suffix}")
        (folder / "Annotations" / f"{name}.xml").write_text(xml(objects))
    for name, members in sets.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(members) + "\n")
    return folder


def coco(folder: Path, file: str = "instances_train.json", where: str = "images", **changes: Any) -> Path:
    """A folder in COCO's layout: two images of 40x30 pixels, a car and a crowd in the second; ids out of order."""
    entries = [{"id": key, "file_name": f"{key}.png", "width": 40, "height": 30} for key in (9, 4)]
    annotations: list[dict[str, Any]] = [
        {"image_id": 9, "category_id": 3, "bbox": [2, 4, 10.5, 8], "iscrowd": 0},
        {"image_id": 9, "category_id": 17, "bbox": [0, 0, 40, 30], "iscrowd": 1},
    ]
    categories = [{"id": 17, "name": "person"}, {"id": 3, "name": "car"}, {"id": 5, "name": "bus"}]
    content = {"images": entries, "annotations": annotations, "categories": categories} | changes
    for place in ("annotations", where):
        (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / "annotations" / file).write_text(json.dumps(content))
    for key in (9, 4):
        picture(40, 30, (key, 0, 40, 30)).save(folder / where / f"{key}.png")
    return folder


def found(boxes: torch.Tensor) -> list[list[float]]:
    """The boxes of one image without the rows that are none."""
    rows: list[list[float]] = boxes[boxes[:, 0] >= 0].tolist()
    return rows
