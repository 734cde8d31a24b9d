"""Shifts that make clients differ although their data were dealt evenly: other looks, or other meanings of labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfed import streams
from pfed.errors import UserError

Kind = Literal["mixed", "rotation", "inversion", "colour", "noise", "blur"]

CYCLE = ("identity", "rotation", "inversion", "colour", "noise", "blur")
MOST_NOISE = 0.3  # standard deviation, on a scale where white is 1
LEAST_BLUR, MOST_BLUR = 0.5, 1.5  # standard deviation in pixels; less than half a pixel would not be seen


def shift_images(x: Tensor, kind: Kind, client: int, clients: int, seed: int) -> Tensor:
    """Images of one client as it sees them: same shape and type, changed in this client's own way.

    `x` is (n, channels, height, width), uint8 or float in [0, 1]. Client 0 sees the original. Rotation turns client k
    by k/K of a circle; inversion concerns every other client; colour (contrast and gamma for grey images), noise and
    blur grow from none to the strongest; mixed deals these kinds to the clients in turn.
    """
    _check_images(x)
    name, strength = plan(kind, client, clients)
    if strength == 0 or not len(x):
        return x.clone()
    image = x.float() / 255 if x.dtype == torch.uint8 else x
    image = _CHANGES[name](image, strength, seed, client).clamp(0, 1)
    return image.mul(255).round().to(torch.uint8) if x.dtype == torch.uint8 else image.to(x.dtype)


def plan(kind: Kind, client: int, clients: int) -> tuple[str, float]:
    """What happens to the images of a client, and how strongly (0: nothing, 1: the most).

    >>> [plan("rotation", k, 4) for k in range(3)]
    [('rotation', 0.0), ('rotation', 0.25), ('rotation', 0.5)]
    """
    if kind == "mixed":
        name = CYCLE[client % len(CYCLE)]
        turn, turns = client // len(CYCLE) + 1, math.ceil(clients / len(CYCLE))
        if name == "identity":
            return name, 0.0
        # A full circle is no rotation, so the strongest stays short of it.
        return name, 1.0 if name == "inversion" else turn / (turns + 1 if name == "rotation" else turns)
    if kind == "inversion":
        return kind, float(client % 2)
    return kind, client / (clients if kind == "rotation" else max(1, clients - 1))


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        shape = tuple(x.shape[1:])
        raise UserError(f"Partition feature needs images (channels, height, width). Got samples of shape {shape}.")
    if x.dtype != torch.uint8 and len(x):
        low, high = float(x.min()), float(x.max())
        if not (low >= 0 and high <= 1):
            raise UserError(f"Partition feature needs pixels in [0, 1] (or uint8). Got {low:.3g} to {high:.3g}.")


def _rotate(x: Tensor, strength: float, seed: int, client: int) -> Tensor:
    h, w = x.shape[2:]
    if strength == 0.5 or (h == w and strength in (0.25, 0.75)):
        return torch.rot90(x, int(4 * strength), (2, 3))  # quarter turns lose nothing
    angle = 2 * math.pi * strength
    cos, sin = math.cos(angle), math.sin(angle)
    theta = torch.tensor([[cos, -sin * h / w, 0.0], [sin * w / h, cos, 0.0]], dtype=x.dtype)
    grid = F.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def _invert(x: Tensor, strength: float, seed: int, client: int) -> Tensor:
    return 1 - x


def _recolour(x: Tensor, strength: float, seed: int, client: int) -> Tensor:
    """Mix and tint the channels; grey images get another gamma and less contrast."""
    draw = streams.rng(seed, "shift", "colour", client)
    channels = x.shape[1]
    if channels == 1:
        gamma = float(3.0 ** (strength * draw.choice([-1, 1])))
        contrast = 1 - 0.5 * strength * draw.random()
        return 0.5 + contrast * (x.pow(gamma) - 0.5)
    mix = draw.dirichlet(np.ones(channels), channels)  # each row sums to 1, so only the tint changes what is grey
    tint = 1 - 0.5 * strength * draw.random(channels)
    matrix = tint[:, None] * ((1 - 0.7 * strength) * np.eye(channels) + 0.7 * strength * mix)
    return torch.einsum("dc,nchw->ndhw", torch.as_tensor(matrix, dtype=x.dtype), x)


def _add_noise(x: Tensor, strength: float, seed: int, client: int) -> Tensor:
    generator = streams.torch_rng(seed, "shift", "noise", client)
    return x + MOST_NOISE * strength * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def _blur(x: Tensor, strength: float, seed: int, client: int) -> Tensor:
    sigma = LEAST_BLUR + (MOST_BLUR - LEAST_BLUR) * strength
    radius = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=x.dtype) / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, -1)  # (channels, 1, width of the kernel)
    padded = F.pad(x, (radius,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel[:, :, None, :], groups=x.shape[1])
    return F.conv2d(rows, kernel[:, :, :, None], groups=x.shape[1])


_CHANGES: dict[str, Callable[[Tensor, float, int, int], Tensor]] = {
    "rotation": _rotate,
    "inversion": _invert,
    "colour": _recolour,
    "noise": _add_noise,
    "blur": _blur,
}


def label_permutations(groups: int, classes: int, seed: int) -> NDArray[np.int64]:
    """One permutation of the classes per group, all different; group 0 keeps the true labels. (groups, classes)"""
    if groups > math.factorial(min(classes, 20)):
        most = math.factorial(classes)
        raise UserError(f"groups must be <= {most}, the number of orders of {classes} classes. Got {groups}.")
    draw = streams.rng(seed, "shift", "concept")
    table = {tuple(range(classes)): None}  # a dict keeps the order of drawing
    while len(table) < groups:
        table[tuple(draw.permutation(classes).tolist())] = None
    return np.array(list(table), dtype=np.int64)


def permute_labels(y: Tensor, permutation: NDArray[np.int64]) -> Tensor:
    """Labels under another meaning: class c becomes class permutation[c].

    >>> permute_labels(torch.tensor([0, 2, 1]), np.array([1, 2, 0]))
    tensor([1, 0, 2])
    """
    return torch.as_tensor(permutation)[y]
