"""What may cross between server and clients: bytes and back, what is counted, what is refused."""

from __future__ import annotations

import json
import math
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pfed import wire
from pfed.tensors import Tensors

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, shape and order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(k) is type(m) and same(a[k], b[m]) for k, m in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b or (a != a and b != b)


def there_and_back(tree: wire.State) -> wire.State:
    return wire.decode(wire.encode(tree))


def test_same_tells_trees_apart() -> None:
    """The comparison of these tests notices types, dtypes, shapes, order and kinds of dicts."""
    one = torch.ones(2)
    assert same({"a": one, "b": {1: 2}}, {"a": one.clone(), "b": {1: 2}})
    for a, b in [
        (1, True),
        (1, 1.0),
        (one, one.double()),
        (one, torch.ones(1, 2)),
        ({1: 0}, {"1": 0}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
        (Tensors(a=one), {"a": one}),
    ]:
        assert not same({"x": a}, {"x": b})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    tree = {"bare": tensor, "named": Tensors({"conv1.weight": tensor.t()})}
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**70,
        True,
        False,
        None,
        0.1,
        -0.0,
        1e-310,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "naïve \n \x00 ✓ 𝛌",
        '{"t":"0"}',
    ],
    ids=repr,
)
def test_every_number_and_text_comes_back(value: Any) -> None:
    """Also those whose text looks like the encoding's own."""
    back = there_and_back({"value": value, "deep": {"er": {0: value}}})
    assert same(back, {"value": value, "deep": {"er": {0: value}}})
    if value == 0 and isinstance(value, float):
        assert math.copysign(1, back["value"]) == -1


def test_nested_dicts_keep_int_keys_order_and_kind() -> None:
    tree = {
        "momentum": {"train": Tensors(b=torch.ones(2), a=torch.zeros(1)), "head": Tensors()},
        7: {3: torch.tensor(3), -1: {"x": 1, 0: {}}},
        "7": "a text key that looks like a number",
    }
    assert same(there_and_back(tree), tree)
    assert same(there_and_back({}), {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(0, 3, dtype=torch.int64),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[1::3],
        torch.ones(1, 3).expand(4, 3),
        torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last),
    ],
    ids=["scalar", "bool scalar", "empty", "empty matrix", "transposed", "strided", "expanded", "channels last"],
)
def test_every_layout_comes_back(tensor: Tensor) -> None:
    back = there_and_back({"x": tensor})["x"]
    assert same({"x": back}, {"x": tensor})
    assert back.is_contiguous()


def test_aliased_tensors_come_back_as_tensors_of_their_own() -> None:
    """Two views of one memory are two values: changing one afterwards leaves the other."""
    memory = torch.arange(6.0)
    tree = {"all": memory, "again": memory, "some": memory[2:4]}
    back = there_and_back(tree)
    assert same(back, tree)
    back["all"].zero_()
    assert back["again"].tolist() == [0, 1, 2, 3, 4, 5]
    assert back["some"].tolist() == [2, 3]


def test_parameters_lose_their_gradient_on_the_way_and_only_there() -> None:
    parameter = nn.Parameter(torch.ones(2))
    back = there_and_back({"w": parameter})["w"]
    assert type(back) is Tensor
    assert not back.requires_grad
    assert parameter.requires_grad


def test_equal_trees_have_equal_bytes() -> None:
    tree = {"a": Tensors(w=torch.arange(4.0)), "b": {1: torch.tensor(2)}}
    assert wire.encode(tree) == wire.encode(there_and_back(tree))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nbytes_is_what_the_tensors_take_in_the_encoding(dtype: torch.dtype) -> None:
    """Everything after the header, whose length stands in the first eight bytes."""
    tensor = torch.ones(3, 5).to(dtype)
    payload = {"a": tensor, "b": Tensors(x=tensor[:, :2], y=tensor[0, 0], z=tensor[:0]), "n": 7, "t": "text", "o": None}
    data = wire.encode(payload)
    assert wire.nbytes(payload) == len(data) - 8 - int.from_bytes(data[:8], "little")
    assert wire.nbytes(payload) == (15 + 6 + 1) * tensor.element_size()
    assert wire.nbytes({"n": 1, "t": "text"}) == 0


class Trap:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Neither a pickle nor a file of torch.save is opened; an object is not encoded."""
    trap = Trap(str(tmp_path / "sprung"))
    saved = BytesIO()
    torch.save({"x": trap}, saved)
    for data in (pickle.dumps(trap), saved.getvalue()):
        with pytest.raises(Exception, match=r"(?i)header"):
            wire.decode(data)
    with pytest.raises(TypeError, match="Trap"):
        wire.encode({"x": trap})
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(trap))  # the trap works
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    data = wire.encode({"w": torch.arange(10.0)})
    with pytest.raises(Exception, match=r".+"):
        wire.decode(data[:cut])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, 2], "list"),
        ((1, 2), "tuple"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
        (np.zeros(2), "ndarray"),
        (np.int64(3), "int64"),
        (nn.Linear(1, 1), "Linear"),
        (print, "builtin_function_or_method"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_value_is_named(value: Any, kind: str) -> None:
    """On its way to bytes, and earlier, where a method sends or answers it."""
    with pytest.raises(TypeError, match=f"^{kind} can't be stored or sent"):
        wire.encode({"fine": 1, "deep": {"er": value}})
    with pytest.raises(TypeError, match=f"^FedAvg.update: 'odd' is a {kind}; send tensors, numbers or texts"):
        wire.check_types({"fine": 1, "odd": value}, "FedAvg.update")


@pytest.mark.parametrize("key", [(1, 2), b"key", 1.5, None], ids=repr)
def test_keys_are_texts_or_whole_numbers(key: Any) -> None:
    """Another key is refused when it is stored: a checkpoint that can't be read again would be no checkpoint."""
    with pytest.raises(TypeError, match=type(key).__name__):
        wire.encode({"deep": {key: 1}})


def test_a_payload_is_flat() -> None:
    """Named tensors are fine, other dicts are named; inside named tensors only tensors (or numbers) go."""
    wire.check_types({"w": Tensors(a=torch.ones(1)), "n": 1, "t": "x", "f": 0.5, "b": True, "o": None}, "M.step")
    with pytest.raises(TypeError, match=r"M.step: 'w' is a dict; send Tensors"):
        wire.check_types({"w": {"a": torch.ones(1)}}, "M.step")
    with pytest.raises(TypeError, match=r"M.step: 'w' is a list"):
        wire.check_types({"w": Tensors(a=[1.0])}, "M.step")  # type: ignore[arg-type]


MODEL = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
SENT: wire.Payload = {"params": Tensors(MODEL)}
MUCH = 10**6


def fault(**reply: Any) -> str | None:
    return wire.fault(reply, SENT, MODEL, MUCH)


def params(**changes: Tensor) -> Tensors:
    return Tensors({**MODEL, **changes})


def test_a_good_reply_has_no_fault() -> None:
    """The model's tensors, numbers, texts, and tensors of the method's own under keys that were not sent."""
    assert fault(params=params(), loss=0.5, steps=3, note="x", flag=True, nothing=None) is None
    assert fault(params=Tensors(w=MODEL["w"])) is None
    assert fault(prototypes=Tensors({"class 3": torch.ones(7)}), counts=torch.arange(4)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fault_not_finite(bad: float) -> None:
    """One bad element is enough, in named tensors, bare tensors and numbers."""
    assert fault(params=params(b=torch.tensor([0.0, bad]))) == "params['b'] is not finite"
    assert fault(loss=torch.tensor(bad)) == "loss is not finite"
    assert "loss is not" in (fault(loss=bad) or "")


def test_fault_wrong_shape() -> None:
    assert fault(params=params(w=torch.zeros(3, 2))) == "params['w'] is float32 (3, 2), not float32 (2, 3)"
    assert fault(params=params(b=torch.zeros(3))) == "params['b'] is float32 (3,), not float32 (2,)"
    assert fault(params=params(w=torch.zeros(7))) == "params['w'] is float32 (7,), not float32 (2, 3)"


def test_packed_tensors_pass_where_packed_ones_were_sent() -> None:
    """A masked payload travels flat, in both directions."""
    sent: wire.Payload = {"params": Tensors(w=torch.zeros(4))}
    assert wire.fault({"params": Tensors(w=torch.ones(4))}, sent, MODEL, MUCH) is None


def test_fault_a_flat_tensor_where_a_whole_one_was_sent() -> None:
    """A row of three would broadcast into the mean of 2 x 3 matrices without a word."""
    assert fault(params=params(w=torch.zeros(3))) is not None
    assert fault(params=params(w=torch.zeros(1))) is not None


def test_fault_wrong_dtype() -> None:
    assert fault(params=params(w=torch.zeros(2, 3).double())) == "params['w'] is float64 (2, 3), not float32 (2, 3)"
    assert fault(params=params(b=torch.zeros(2).long())) == "params['b'] is int64 (2,), not float32 (2,)"


def test_fault_unknown_name() -> None:
    assert fault(params=params(strange=torch.zeros(2))) == "params['strange'] is a name that the model does not have"


def test_fault_too_many_bytes() -> None:
    reply: wire.Payload = {"params": Tensors(MODEL)}
    assert wire.fault(reply, SENT, MODEL, limit=32) is None
    assert wire.fault(reply, SENT, MODEL, limit=31) == "sent 32 bytes, more than the limit of 31"


def test_copies_have_new_dicts_around_the_same_tensors() -> None:
    tensor = torch.ones(2)
    tree = {"a": {1: tensor}, "t": Tensors(w=tensor), "n": 3}
    copy = wire.copy_tree(tree)
    assert same(copy, tree)
    assert copy["a"][1] is tensor
    copy["a"][1] = torch.zeros(2)
    copy["t"]["w"] = torch.zeros(2)
    assert tree["a"][1] is tensor
    assert tree["t"]["w"] is tensor
    doubled = wire.map_tensors(tree, lambda t: 2 * t)
    assert same(doubled, {"a": {1: 2 * tensor}, "t": Tensors(w=2 * tensor), "n": 3})


def test_the_encoding_is_a_safetensors_file() -> None:
    """Any reader of that format finds the tensors, each where its elements may begin."""
    tree = {"flags": torch.tensor([True]), "w": Tensors(a=torch.randn(3, 2).double(), b=torch.arange(3).byte())}
    found = safetensors.torch.load(wire.encode(tree))
    assert len(found) == 3
    assert torch.equal(found["0"], tree["flags"])
    assert torch.equal(found["1"], tree["w"]["a"])
    assert torch.equal(found["2"], tree["w"]["b"])


def test_what_comes_back_lies_where_torch_would_put_it() -> None:
    """Not in the message, whose memory may begin anywhere."""
    data = bytearray(b"x" + wire.encode({"flag": torch.tensor(True), "w": torch.zeros(40)}))
    tensor = wire.decode(memoryview(data)[1:])["w"]
    assert tensor.data_ptr() % 64 == torch.zeros(40).data_ptr() % 64 == 0
    data[:] = b"y" * len(data)
    assert tensor.tolist() == [0] * 40


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 20]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
    ],
)
def test_a_tensor_that_lies_elsewhere_is_refused(entry: dict[str, Any]) -> None:
    """Whoever made the header, nothing outside the message is read."""
    header = json.dumps({"__metadata__": {"tree": '{"d":[["w",{"t":"0"}]]}'}, "0": entry}).encode()
    with pytest.raises(ValueError, match="a tensor is not where it should be"):
        wire.decode(len(header).to_bytes(8, "little") + header + b"\0" * 16)
