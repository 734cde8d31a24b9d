"""Folders of images: a folder per class, or a folder per client with a folder per class in it."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pfed.data.pool import Pool
from pfed.errors import UserError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
SPLITS = ("train", "test")
LAYOUTS = "CLASS/image, train/CLASS/image, CLIENT/CLASS/image or CLIENT/train/CLASS/image"


@dataclass(frozen=True)
class Entry:
    """An image file and what its folders say of it."""

    path: Path
    label: str
    client: str | None
    test: bool


@dataclass(frozen=True, eq=False)
class Packed:
    """An image inside an archive: what it is called, and the bytes of a file or pixels."""

    name: str
    content: bytes | NDArray[np.uint8]

    def __str__(self) -> str:
        return self.name


def read_folder(
    root: Path, image_size: int | None = None, mode: str | None = None, among: Sequence[str] | None = None
) -> Pool:
    """All images below a folder, with owners if the outer folders are clients; with `among`, of these clients only."""
    entries = _scan(root) if among is None else client_entries([(name, root / name) for name in among])
    if not entries:
        raise UserError(f"{root} must hold images as {LAYOUTS}. Got none.")
    notes = _left_out(root, {entry.path for entry in entries}) if among is None else ()
    return replace(read_entries(entries, image_size, mode), notes=notes)


def read_entries(entries: Sequence[Entry], image_size: int | None = None, mode: str | None = None) -> Pool:
    """These images in this order."""
    clients = tuple(dict.fromkeys(entry.client for entry in entries if entry.client is not None))
    position = {name: index for index, name in enumerate(clients)}
    return Pool(
        x=read_images([entry.path for entry in entries], image_size, mode),
        labels=np.array([entry.label for entry in entries], np.str_),
        test=np.array([entry.test for entry in entries], np.bool_),
        owner=np.array([position.get(entry.client or "", 0) for entry in entries], np.int64),
        clients=clients,
    )


def _scan(root: Path) -> list[Entry]:
    folders = _folders(root)
    if any(name.lower() in SPLITS for name, _ in folders):
        return _splits(root, None)
    classes = [name for name, folder in folders if _images(folder)]
    clients = [(name, folder) for name, folder in folders if not _images(folder) and _folders(folder)]
    if classes and clients:
        raise UserError(
            f"The folders of {root} must be all classes or all clients. "
            f"Got {classes[0]!r} with images and {clients[0][0]!r} with folders in it."
        )
    if classes:
        return _classes(root, None, test=False)
    return client_entries(clients)


def client_entries(folders: Sequence[tuple[str, Path]]) -> list[Entry]:
    """The images of clients, each in a folder of its own."""
    entries = []
    for name, folder in folders:
        own = _splits(folder, name)
        if not own:
            raise UserError(f"Client folder {folder} must hold images in class folders. Got none.")
        entries += own
    return entries


def _splits(folder: Path, client: str | None) -> list[Entry]:
    """The classes of a folder, or of its train and test folders."""
    folders = _folders(folder)
    beside = [name for name, _ in folders if name.lower() not in SPLITS]
    if len(beside) == len(folders):
        return _classes(folder, client, test=False)
    if beside:
        raise UserError(f"Beside the folders train and test, {folder} must hold no other. Got {beside[0]!r}.")
    return [entry for name, below in folders for entry in _classes(below, client, test=name.lower() == "test")]


def _classes(folder: Path, client: str | None, test: bool) -> list[Entry]:
    return [Entry(path, name, client, test) for name, below in _folders(folder) for path in _images(below)]


def _folders(folder: Path) -> list[tuple[str, Path]]:
    """The visible folders in a folder with their names, sorted; é is one letter whichever system wrote the name."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "__"))]
    return [(unicodedata.normalize("NFC", path.name), path) for path in found]


def _images(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]


def _left_out(root: Path, used: set[Path]) -> tuple[str, ...]:
    files = (path for path in sorted(root.rglob("*")) if path not in used and path.is_file())
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    if not visible:
        return ()
    return (f"Files left out, for they are no images in a class folder: {len(visible)}, such as {visible[0]}.",)


def read_images(paths: Sequence[Path | Packed], image_size: int | None = None, mode: str | None = None) -> Tensor:
    """Images of one size as a tensor of bytes; all grey ("L") or all in colour ("RGB"), by default as the first one is.

    The tensor is (n, c, h, w).
    """
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size must be >= 1. Got {image_size}.")
    mode = mode or ("L" if open_image(paths[0]).mode in ("1", "L", "LA") else "RGB")
    first = _pixels(paths[0], mode, image_size)
    height, width, channels = first.shape
    pixels = np.empty((len(paths), channels, height, width), np.uint8)
    for index, path in enumerate(paths):
        image = _pixels(path, mode, image_size)
        if image.shape != first.shape:
            raise UserError(
                f"{path} is {image.shape[1]}x{image.shape[0]} but {paths[0]} is {width}x{height}: "
                f"pass image_size=N to have all images resized to NxN."
            )
        pixels[index] = image.transpose(2, 0, 1)
    return torch.from_numpy(pixels)


def _pixels(path: Path | Packed, mode: str, image_size: int | None) -> NDArray[np.uint8]:  # (h, w, c)
    if isinstance(path, Packed) and not isinstance(path.content, bytes):
        pixels = path.content.reshape(*path.content.shape[:2], -1)
        wanted = (*((image_size, image_size) if image_size else pixels.shape[:2]), 3 if mode == "RGB" else 1)
        if pixels.shape == wanted:
            return pixels  # Pillow would take ten times as long to say so
    image = open_image(path).convert(mode)
    if image_size is not None:
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    array = np.asarray(image, np.uint8)
    return array[:, :, None] if array.ndim == 2 else array


def open_image(path: Path | Packed) -> Image.Image:
    """An image file, read in full; one that is none, or that has other pixels than whole numbers, is an error."""
    try:
        with _image(path) as image:
            image.load()
            if image.mode == "F":
                raise UserError(f"{path} must have pixels in whole numbers. Got floats.")
            if not image.mode.startswith("I"):
                return image
            # 16 bits of grey, as in many X-rays: Pillow's own conversion would cut everything above 255.
            return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"There is no image {path}.") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{path} cannot be read as an image: its format is unknown.") from error
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}.") from error


def _image(path: Path | Packed) -> Image.Image:
    if isinstance(path, Path):
        return Image.open(path)
    if isinstance(path.content, bytes):
        return Image.open(io.BytesIO(path.content))
    return Image.fromarray(path.content)
