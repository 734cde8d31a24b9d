"""Which inputs a model takes."""

from __future__ import annotations

from pfed.errors import UserError


def image(name: str, shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of an image that is large enough for the model of this name."""
    if len(shape) != 3:
        raise UserError(f"Model {name!r} wants images (channels, height, width). Got shape {shape}.")
    channels, height, width = shape
    if min(height, width) < least:
        raise UserError(f"Model {name!r} wants images of at least {least}x{least}. Got {height}x{width}.")
    return channels, height, width
