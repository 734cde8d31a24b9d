"""Pictures of what a detector finds: some test images of a client, with the true boxes and the found ones."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from pfed.compat import ensure
from pfed.data.base import ClientData

IMAGES = 4  # of a client, side by side
SHOWN = 0.3  # the least score of a box that is drawn
SAME = 0.5  # IoU from which on two found boxes are at one place, where only the likelier is drawn
LEAST_SIDE = 256  # pixels of an image; smaller ones are enlarged
TRUE, FOUND = (40, 200, 80), (255, 120, 0)
FOLDER = "pictures"


def draw(model: nn.Module, client: ClientData) -> Image.Image:
    """The client's first test images in a row: green what is there, orange what the model says, with its score."""
    few = client.test.part(range(min(IMAGES, len(client.test))))
    x, boxes = few.take()
    with torch.no_grad():
        found = model.eval()(x).cpu()
    pixels = few.x[few.rows].cpu()
    drawn = [_scene(*three, client.classes) for three in zip(pixels, boxes.cpu(), found, strict=True)]
    whole = Image.new("RGB", (sum(image.width for image in drawn) + 4 * (len(drawn) - 1), drawn[0].height), "white")
    place = 0
    for image in drawn:
        whole.paste(image, (place, 0))
        place += image.width + 4
    return whole


def save(pictures: dict[str, Image.Image], folder: Path) -> None:
    """Into a run's folder, one file for each client."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for number, (name, image) in enumerate(pictures.items()):
        safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
        image.save(folder / FOLDER / f"{number:03}-{safe}.png")


def files(folder: Path | None) -> list[tuple[str, Path]]:
    """The pictures of a run, with the clients' names."""
    found = sorted((folder / FOLDER).glob("*.png")) if folder is not None else []
    return [(path.stem.partition("-")[2], path) for path in found]


def _scene(pixels: Tensor, boxes: Tensor, found: Tensor, classes: tuple[str, ...]) -> Image.Image:
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    scale = max(1, -(-LEAST_SIDE // image.width))
    image = image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    for kind, x1, y1, x2, y2, _ in boxes[boxes[:, 0] >= 0].tolist():
        _box(pen, [scale * v for v in (x1, y1, x2, y2)], TRUE, classes[int(kind)], font, below=False)
    for x1, y1, x2, y2, score, kind in reversed(_likeliest(found).tolist()):  # the surest on top
        label = f"{classes[int(kind)]} {score:.2f}"
        _box(pen, [scale * v for v in (x1, y1, x2, y2)], FOUND, label, font, below=True)
    return image


def _likeliest(found: Tensor) -> Tensor:
    """The sure ones of detections (most, 6), best first, but of several at one place only the best."""
    ensure()
    from torchvision.ops import nms

    sure = found[found[:, 4] >= SHOWN]
    return sure[nms(sure[:, :4], sure[:, 4], SAME)]


def _box(
    pen: ImageDraw.ImageDraw,
    corners: list[float],
    colour: tuple[int, int, int],
    label: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    below: bool,
) -> None:
    x1, y1, x2, y2 = corners
    pen.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=colour, width=2)
    left, top, right, bottom = pen.textbbox((x1 + 2, y2 + 1 if below else y1 - 13), label, font=font)
    width, height = pen.im.size
    x, y = max(0, min(left, width - (right - left))), max(0, min(top, height - (bottom - top)))  # inside the image
    pen.rectangle((x, y, x + right - left, y + bottom - top), fill=(0, 0, 0))
    pen.text((x, y), label, fill=colour, font=font, anchor="lt")
