"""What crosses between server and sites, as NVFlare carries it: tensors by name, so that a site's own filters see them.

The rest, numbers and texts and how it all hangs together, is JSON beside them. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from pfed.tensors import Tensors
from pfed.wire import Payload

TASK = "pfed"  # the one task of a site
PING = "pfed.ping"
ABOUT = "pfed"  # the header with the JSON


def register() -> None:
    """Let tensors cross; to be called once in every process that sends or gets some."""
    fobs.register(TensorDecomposer)


def pack(about: Mapping[str, Any], payload: Payload) -> Shareable:
    """A message: what it is about, and its payload."""
    tensors: dict[str, Tensor] = {}
    plan: dict[str, Any] = {}
    for key, value in payload.items():
        if isinstance(value, Tensors):
            plan[key] = {"names": list(value)}
            tensors |= {f"{key}/{name}": _sendable(tensor) for name, tensor in value.items()}
        elif isinstance(value, Tensor):
            plan[key] = {"tensor": True}
            tensors[key] = _sendable(value)
        else:
            plan[key] = {"value": value}
    shareable = DXO(DataKind.WEIGHTS, data=tensors).to_shareable()
    shareable.set_header(ABOUT, json.dumps({"about": about, "plan": plan}))
    return shareable


def unpack(shareable: Shareable) -> tuple[dict[str, Any], Payload]:
    """The inverse; a message that is none is a ValueError."""
    try:
        text = json.loads(shareable.get_header(ABOUT))
        found = from_shareable(shareable).data
        about, plan = dict(text["about"]), text["plan"]
        payload: Payload = {}
        for key, entry in plan.items():
            if "names" in entry:
                payload[key] = Tensors({name: _tensor(found[f"{key}/{name}"]) for name in entry["names"]})
            else:
                payload[key] = _tensor(found[key]) if "tensor" in entry else entry["value"]
        used = sum(len(entry.get("names", [0] if "tensor" in entry else [])) for entry in plan.values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no message of pfed ({type(error).__name__})") from error
    if used != len(found):
        raise ValueError("it holds tensors that it does not name")
    return about, payload


def _sendable(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def _tensor(value: Any) -> Tensor:
    """A tensor of our own memory: the last bit of a sum may depend on how it lies. Some filters leave arrays."""
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor):
        raise TypeError(type(value).__name__)
    return value.clone()
