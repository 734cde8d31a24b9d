"""What a worker in another process, perhaps on another machine, needs to run any client: packed once, opened by each.

This is pickle between the processes of one run, with functions and classes of the user's own inside: from a notebook, a
script or a file that nobody else has. Nothing that comes from anywhere else is ever opened so.
"""

from __future__ import annotations

import io
import pickle
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfed import compat
from pfed.data.base import Federation, Samples
from pfed.errors import UserError
from pfed.method import Method
from pfed.runner import Runner

LARGE = 2**16  # bytes
Parcel = tuple[bytes, list[NDArray[np.uint8]]]  # what refers to the arrays, and these


def pack(runner: Runner) -> Parcel:
    """Everything of a runner but what it has borrowed or moved."""
    cloudpickle: Any = compat.optional("ray.cloudpickle", "ray")
    base: Any = cloudpickle.Pickler
    pools = {id(tensor) for tensor in _pools(runner.federation)}

    class Packer(base):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) is Tensor and _is_plain(thing):
                return _tensor, (thing.numpy(), id(thing) in pools)
            return super().reducer_override(thing)

    def beside(buffer: pickle.PickleBuffer) -> bool:
        """Put it into an array of its own, unless it is small."""
        raw = buffer.raw()
        if raw.nbytes >= LARGE:
            arrays.append(np.frombuffer(raw, np.uint8))
        return raw.nbytes < LARGE

    file, arrays = io.BytesIO(), list[NDArray[np.uint8]]()
    by_value = list(_own_modules(runner))
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        packer = Packer(file, protocol=5, buffer_callback=beside)
        packer.dump((_habits(), runner.method, runner.federation, runner.pool, runner.options, runner.task))
    except Exception as error:  # whatever a user's objects raise
        raise UserError(f"The method, its model or the data can't be sent to other processes: {error}") from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue(), arrays


def unpack(parcel: Parcel) -> tuple[Runner, str]:
    """A runner of its own, and the kind of processor that it comes from.

    The pools of samples stay where the arrays are, which may not be written to.
    """
    data, arrays = parcel
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not writable")
        habits, *parts = pickle.loads(data, buffers=arrays)
    torch.set_default_dtype(habits["dtype"])
    torch.set_float32_matmul_precision(habits["precision"])
    torch.use_deterministic_algorithms(habits["deterministic"])
    return Runner(*parts), habits["processor"]


def _habits() -> dict[str, Any]:
    """What of this process tells in results."""
    return {
        "mended": _Mended() if "torchvision" in sys.modules else None,  # first: what comes after may need it
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


class _Mended:
    """Where it is unpacked, torchvision can be imported from then on."""

    def __reduce__(self) -> Any:
        return compat.ensure, ()


def _pools(federation: Federation) -> Iterator[Tensor]:
    beside = [federation.test, federation.public, federation.external]
    parts: Iterable[Samples | None] = (s for c in federation.clients for s in (c.train, c.test, c.validation))
    for samples in (*beside, *parts):
        if samples is not None:
            yield from (tensor for tensor in (samples.x, samples.y, samples.boxes) if tensor is not None)


def _is_plain(tensor: Tensor) -> bool:
    """Whether numbers and shape are all there is to it. Else torch knows best.

    A dimension of size one has a stride too, and convolutions choose their algorithm by it.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype == torch.bfloat16:
        return False
    usual = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() == usual and not (tensor.requires_grad or tensor.is_conj())


def _tensor(array: NDArray[Any], stays: bool) -> Tensor:
    """A tensor where torch puts its own, unless the numbers may stay where they are."""
    tensor = torch.from_numpy(array)
    return tensor if stays else tensor.clone()


def _own_modules(runner: Runner) -> Iterator[ModuleType]:
    """The user's own modules that define the method or its models: other machines need not have them."""
    things = [runner.method, *(m for template in runner.pool.templates for m in template.modules())]
    things += [value for value in vars(runner.method).values() if isinstance(value, Method)]  # the base of NAME+ft
    names = {cls.__module__ for thing in things for cls in type(thing).__mro__}
    for name in sorted(names - {"__main__"}):
        module = sys.modules.get(name)
        if module is not None and not _is_installed(module):
            yield module


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "pfed":
        return True
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    inside = any(Path(file).is_relative_to(place) for place in places)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
