"""What may cross between server and clients: its types, its bytes, its checks. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pfed.tensors import Tensors

Value: TypeAlias = Tensors | Tensor | int | float | str | bool | None
Payload: TypeAlias = dict[str, Value]
State: TypeAlias = dict[Any, Any]  # nested dicts, str or int keys, whose leaves are Values

_SCALARS = (int, float, str, bool, type(None))
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


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
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(payload))


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


def finite(payload: Mapping[str, Value]) -> bool:
    """Whether all its numbers are."""
    numbers = (value for value in payload.values() if isinstance(value, float))
    floats = (tensor for tensor in tensors(payload) if tensor.is_floating_point())
    return all(map(math.isfinite, numbers)) and all(bool(torch.isfinite(tensor).all()) for tensor in floats)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def map_tensors(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with f applied to every tensor; dicts are new."""
    if isinstance(tree, Tensors):
        return Tensors({name: f(t) for name, t in tree.items()})
    if isinstance(tree, dict):
        return {key: map_tensors(value, f) for key, value in tree.items()}
    return f(tree) if isinstance(tree, Tensor) else tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)


def copy_tree(tree: Any) -> Any:
    """New dicts around the same tensors: tensors are values and are replaced, not changed."""
    return map_tensors(tree, lambda tensor: tensor)


def check_tree(tree: Any) -> None:
    """Refuse a state that can't be stored."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, (str, int)):
                raise TypeError(f"A key is a {type(key).__name__}; use texts and whole numbers.")
            check_tree(value)
    elif isinstance(tree, Tensor):
        if tree.dtype not in _DTYPES:
            raise TypeError(f"A tensor of {tree.dtype} can't be stored or sent.")
    elif not isinstance(tree, _SCALARS):
        kind = type(tree).__name__
        raise TypeError(f"{kind} can't be stored or sent; use tensors, numbers, texts and dicts of them.")


def encode(tree: State) -> bytes:
    """Any state or payload as bytes: its tensors as safetensors, its shape as JSON in their metadata."""
    return b"".join(pieces(tree))


def pieces(tree: State) -> list[bytes | memoryview]:
    """What `encode` joins: a header, then the tensors' own memory. Nothing is copied that lies in one piece."""
    check_tree(tree)
    found: list[Tensor] = []

    def skeleton(node: Any) -> Any:
        if isinstance(node, Tensor):
            found.append(node.detach().contiguous())
            return {"t": str(len(found) - 1)}
        if isinstance(node, dict):
            return {"T" if isinstance(node, Tensors) else "d": [[key, skeleton(value)] for key, value in node.items()]}
        return {"v": node}

    shape = json.dumps(skeleton(tree), separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {"tree": shape}}
    data: list[bytes | memoryview] = []
    end = 0
    # The widest elements first, so that each tensor begins where its elements may.
    for i in sorted(range(len(found)), key=lambda i: -found[i].element_size()):
        tensor = found[i]
        start, end = end, end + tensor.nbytes
        header[str(i)] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        if tensor.nbytes:
            data.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *data]


def digest(tree: State) -> str:
    """The same for the same state or payload, and for no other."""
    found = hashlib.sha256()
    for piece in pieces(tree):
        found.update(piece)
    return found.hexdigest()


def decode(data: bytes | bytearray | mmap.mmap | memoryview) -> State:
    """The inverse of `encode`.

    Tensors are copied to where torch puts its own: the last bit of a sum may depend on how a tensor lies in memory.
    """
    buffer = memoryview(bytearray(data) if isinstance(data, bytes) else data)
    size = 8 + int.from_bytes(buffer[:8], "little")
    if not 8 < size <= len(buffer):
        raise ValueError("its header is damaged")
    header = json.loads(bytes(buffer[8:size]))
    found = {name: _tensor(buffer[size:], entry) for name, entry in header.items() if name != "__metadata__"}

    def build(node: Mapping[str, Any]) -> Any:
        if "t" in node:
            return found[node["t"]]
        if "v" in node:
            return node["v"]
        if "T" in node:
            return Tensors({key: build(value) for key, value in node["T"]})
        return {key: build(value) for key, value in node["d"]}

    tree: State = build(json.loads(header["__metadata__"]["tree"]))
    return tree


def _tensor(buffer: memoryview, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape, (start, end) = _TORCH[entry["dtype"]], entry["shape"], entry["data_offsets"]
    count = math.prod(shape)
    if min([start, *shape]) < 0 or end > len(buffer) or end - start != count * dtype.itemsize:
        raise ValueError("a tensor is not where it should be")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).reshape(shape).clone()
