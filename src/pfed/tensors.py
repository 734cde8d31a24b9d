"""Named tensors with arithmetic, so that update rules read like the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class Tensors(dict[str, Tensor]):
    """Tensors by name. `a + b`, `a - b`, `2 * a`, `a / 3` work name by name; `a | b` takes b's where both have one.

    >>> w = Tensors(a=torch.tensor([1.0, 2.0]))
    >>> (w - 0.5 * w)["a"]
    tensor([0.5000, 1.0000])
    """

    def _zip(self, other: Mapping[str, Tensor] | Tensor | float, f: Callable[..., Tensor]) -> Tensors:
        if isinstance(other, Mapping):
            if self.keys() != other.keys():
                raise KeyError(f"names differ: {sorted(self.keys() ^ other.keys())[:3]}")
            return Tensors({n: f(t, other[n]) for n, t in self.items()})
        return Tensors({n: f(t, other) for n, t in self.items()})

    def __add__(self, other: Mapping[str, Tensor] | Tensor | float) -> Tensors:
        return self._zip(other, torch.add)

    def __sub__(self, other: Mapping[str, Tensor] | Tensor | float) -> Tensors:
        return self._zip(other, torch.sub)

    def __mul__(self, other: Mapping[str, Tensor] | Tensor | float) -> Tensors:
        return self._zip(other, torch.mul)

    def __truediv__(self, other: Mapping[str, Tensor] | Tensor | float) -> Tensors:
        return self._zip(other, torch.div)

    __rmul__ = __mul__

    def __or__(self, other: Mapping[str, Tensor]) -> Tensors:  # type: ignore[override]
        return Tensors({**self, **other})

    def only(self, names: Iterable[str]) -> Tensors:
        """Those with one of these names."""
        keep = set(names)
        return Tensors({n: t for n, t in self.items() if n in keep})

    def drop(self, names: Iterable[str]) -> Tensors:
        """Those without any of these names."""
        out = set(names)
        return Tensors({n: t for n, t in self.items() if n not in out})

    def zeros(self) -> Tensors:
        return Tensors({n: torch.zeros_like(t) for n, t in self.items()})

    def clone(self) -> Tensors:
        return Tensors({n: t.clone() for n, t in self.items()})

    def sqnorm(self) -> Tensor:
        """The sum of all squared elements."""
        return torch.stack([(t * t).sum() for t in self.values()]).sum()

    def dot(self, other: Mapping[str, Tensor]) -> Tensor:
        """The sum of all products."""
        return torch.stack(list(self._zip(other, lambda a, b: (a * b).sum()).values())).sum()

    @property
    def numel(self) -> int:
        return sum(t.numel() for t in self.values())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.values())


class Mean:
    """A weighted mean folded one value at a time: sum of n_k w_k over sum of n_k in float64, cast back at the end.

    Values are tensors, named tensors or numbers. Memory does not grow with their number.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sum: dict[str, Tensor] = {}
        self._like: Tensors | Tensor | float | None = None

    def add(self, value: Tensors | Tensor | float, weight: float) -> None:
        named = value if isinstance(value, Tensors) else {"": _tensor(value)}
        if self._like is None:
            self._like = value
            self._sum = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in named.items()}
        if named.keys() != self._sum.keys():
            raise KeyError(f"names differ: {sorted(named.keys() ^ self._sum.keys())[:3]}")
        for name, tensor in named.items():
            self._sum[name].add_(tensor.double(), alpha=weight)
        self.total += weight

    def value(self) -> Tensors | Tensor | float:
        if self._like is None or self.total <= 0:
            raise ValueError("the mean of nothing")
        mean = {n: s / self.total for n, s in self._sum.items()}
        if isinstance(self._like, Tensors):
            return Tensors({n: mean[n].to(t.dtype) for n, t in self._like.items()})
        if isinstance(self._like, Tensor):
            return mean[""].to(self._like.dtype)
        return float(mean[""])


def _tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def pack(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensors:
    """The elements under each mask, as one flat tensor per name; a tensor without any is left out."""
    return Tensors({n: t[masks[n]] for n, t in tensors.items() if masks[n].any()})


def unpack(packed: Mapping[str, Tensor], masks: Mapping[str, Tensor], onto: Mapping[str, Tensor]) -> Tensors:
    """Put packed elements back to where their mask is set, in copies of `onto`."""
    out = Tensors({n: t.clone() for n, t in onto.items()})
    put(packed, masks, out)
    return out


def put(packed: Mapping[str, Tensor], masks: Mapping[str, Tensor], onto: Mapping[str, Tensor]) -> None:
    """The same, in the tensors of `onto` themselves."""
    for name, values in packed.items():
        onto[name][masks[name]] = values
