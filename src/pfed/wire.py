"""What may cross between server and clients: its types, its bytes, its checks. No pickle anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor

from pfed.tensors import Tensors

Value: TypeAlias = Tensors | Tensor | int | float | str | bool | None
Payload: TypeAlias = dict[str, Value]
State: TypeAlias = dict[Any, Any]  # nested dicts, str or int keys, whose leaves are Values

_SCALARS = (int, float, str, bool, type(None))


def check_types(payload: Mapping[str, Any], where: str) -> None:
    """Refuse what is not a Value, naming it."""
    for key, value in payload.items():
        if isinstance(value, dict) and not isinstance(value, Tensors):
            raise TypeError(f"{where}: {key!r} is a dict; send Tensors(…), tensors, numbers or texts.")
        for item in value.values() if isinstance(value, Tensors) else (value,):
            if not isinstance(item, (Tensor, *_SCALARS)):
                raise TypeError(f"{where}: {key!r} is a {type(item).__name__}; send tensors, numbers or texts.")


def nbytes(payload: Mapping[str, Value]) -> int:
    """The bytes that are counted: every tensor's elements times their size."""
    total = 0
    for value in payload.values():
        for tensor in value.values() if isinstance(value, Tensors) else (value,):
            if isinstance(tensor, Tensor):
                total += tensor.numel() * tensor.element_size()
    return total


def fault(reply: Mapping[str, Value], sent: Mapping[str, Value], model: Mapping[str, Tensor], limit: int) -> str | None:
    """What is wrong with a reply, if anything: its size, its numbers, the names and shapes of the model's tensors.

    A tensor of the model arrives in the model's shape, or, unless it was sent whole, packed to one dimension.
    """
    if (size := nbytes(reply)) > limit:
        return f"sent {size} bytes, more than the limit of {limit}"
    for key, value in reply.items():
        known = sent.get(key)
        for name, tensor in value.items() if isinstance(value, Tensors) else [("", value)]:
            label = f"{key}[{name!r}]" if name else key
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{label} is not finite"
            if isinstance(tensor, float) and not math.isfinite(tensor):
                return f"{label} is not a number" if math.isnan(tensor) else f"{label} is not finite"
            if isinstance(tensor, Tensor) and name in model:
                want = model[name]
                given = known.get(name) if isinstance(known, Tensors) else None
                may_pack = given is None or given.dim() == 1
                packed = may_pack and tensor.dim() == 1 and tensor.numel() <= want.numel()
                if tensor.dtype != want.dtype or (tensor.shape != want.shape and not packed):
                    return f"{label} is {_kind(tensor)}, not {_kind(want)}"
            elif name and isinstance(known, Tensors) and name not in known:
                return f"{label} is a name that the model does not have"
    return None


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def map_tensors(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with f applied to every tensor; dicts are new."""
    if isinstance(tree, Tensors):
        return Tensors({name: f(t) for name, t in tree.items()})
    if isinstance(tree, dict):
        return {key: map_tensors(value, f) for key, value in tree.items()}
    return f(tree) if isinstance(tree, Tensor) else tree


def copy_tree(tree: Any) -> Any:
    """New dicts around the same tensors: tensors are values and are replaced, not changed."""
    return map_tensors(tree, lambda tensor: tensor)


def encode(tree: State) -> bytes:
    """Any state or payload as bytes: its tensors as safetensors, its shape as JSON in their metadata."""
    tensors: dict[str, Tensor] = {}

    def skeleton(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors[str(len(tensors))] = node.detach().clone(memory_format=torch.contiguous_format)
            return {"t": str(len(tensors) - 1)}
        if isinstance(node, dict):
            kind = "T" if isinstance(node, Tensors) else "d"
            if strange := [key for key in node if not isinstance(key, (str, int))]:
                raise TypeError(f"A key is a {type(strange[0]).__name__}; use texts and whole numbers.")
            return {kind: [[key, skeleton(value)] for key, value in node.items()]}
        if isinstance(node, _SCALARS):
            return {"v": node}
        raise TypeError(
            f"{type(node).__name__} can't be stored or sent; use tensors, numbers, texts and dicts of them."
        )

    shape = json.dumps(skeleton(tree), separators=(",", ":"))
    return bytes(safetensors.torch.save(tensors, metadata={"tree": shape}))


def decode(data: bytes) -> State:
    """The inverse of `encode`."""
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    def build(node: Mapping[str, Any]) -> Any:
        if "t" in node:
            return tensors[node["t"]]
        if "v" in node:
            return node["v"]
        if "T" in node:
            return Tensors({key: build(value) for key, value in node["T"]})
        return {key: build(value) for key, value in node["d"]}

    tree: State = build(json.loads(header["__metadata__"]["tree"]))
    return tree
