"""What crosses between the server and a client, by the parts of the model: names and numbers of elements, no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pfed import groups
from pfed.anatomy import once
from pfed.tensors import Tensors

PARTS = 24  # of a model, at most, where its blocks or stages allow it


def describe(model: nn.Module, down: Mapping[str, Any], up: Mapping[str, Any]) -> dict[str, Any]:
    """One message in each direction, as plain lists that a record can hold.

    `parts` has a label, the part's elements, and how many of them went down and up; where a message has a tensor's name
    under several keys, as weights and control variates, it counts once. `down` and `up` have a key and its content in
    words, without single numbers and texts.
    """
    found = once(model, "crossing", _parts)
    state = {name for _, sizes in found for name in sizes}
    sent = [_elements(message, state) for message in (down, up)]
    parts = [
        [label, sum(sizes.values()), *(sum(min(n, way.get(name, 0)) for name, n in sizes.items()) for way in sent)]
        for label, sizes in found
    ]
    return {"parts": parts, "down": _words(down, state), "up": _words(up, state)}


def _parts(model: nn.Module) -> list[tuple[str, dict[str, int]]]:
    """The layers of a small model, the blocks or stages of a larger one: a label, and elements by tensor."""
    state = {name: t.numel() for name, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()}
    cuts = (groups.layers, groups.blocks, groups.stages)
    cut = next((parts for cut in cuts if len(parts := cut(model)) <= PARTS), groups.stages(model))
    sizes = {label: {name: state[name] for name in state if name in part.names(model)} for label, part in cut.items()}
    return [(label, own) for label, own in sizes.items() if own]


def _elements(message: Mapping[str, Any], state: set[str]) -> dict[str, int]:
    """How many elements of each of the model's tensors are in a message."""
    found: dict[str, int] = {}
    for value in message.values():
        for name, tensor in value.items() if isinstance(value, Tensors) else ():
            if name in state:
                found[name] = max(tensor.numel(), found.get(name, 0))
    return found


def _words(message: Mapping[str, Any], state: set[str]) -> list[list[str]]:
    found = []
    for key, value in message.items():
        if isinstance(value, Tensor):
            found.append([key, " × ".join(map(str, value.shape)) or "1 number"])
        elif isinstance(value, Tensors) and value:
            kind = "of the model's tensors" if value.keys() <= state else "tensors"
            found.append([key, f"{len(value):,} {kind}, {value.numel:,} elements"])
    return found
