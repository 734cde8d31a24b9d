"""The parts of a model: head, backbone, normalisation, squeeze-and-excitation, stages, blocks, layers.

Parts are chosen by module type and structure, never by a substring of a name: a ResNet's `downsample.1` is a
BatchNorm without "bn" in its name.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed.errors import UserError
from pfed.tensors import Tensors

T = TypeVar("T")


@dataclass
class Marks:
    """What a run knows of a model beyond its modules; kept on the model and copied with it."""

    head: str | None = None  # the module that is the head, where structure does not tell
    fixed: frozenset[str] = field(default=frozenset())  # tensors that never change nor travel (an ETF frame)
    local: frozenset[str] = field(default=frozenset())  # tensors that stay at the client: BN policy, own shapes
    shape: tuple[int, ...] = ()  # of one input


def marks(model: nn.Module) -> Marks:
    """The marks of a model, made at first use."""
    if not hasattr(model, "_pfed_marks"):
        model._pfed_marks = Marks()  # type: ignore[assignment]
    found: Marks = model._pfed_marks  # type: ignore[assignment]
    return found


class _Known(dict[Hashable, Any]):
    """What was worked out about a model as it was at `state`: copied with the model, empty again in a pickle."""

    state: object = None

    def __deepcopy__(self, memo: object) -> _Known:
        copy = _Known(self)  # the values never change, so both models may hold them
        copy.state = self.state
        return copy

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return _Known, ()


def _structure(model: nn.Module) -> tuple[object, ...]:
    """Everything that names and parts depend on, gathered several times faster than they are."""
    seen: list[object] = []
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        seen.append(type(module))
        if module is not None:
            seen += module._modules
            seen += [name for name, tensor in module._parameters.items() if tensor is not None]
            seen += [name for name, tensor in module._buffers.items() if tensor is not None]
            seen += module._non_persistent_buffers_set
            stack += module._modules.values()
    return tuple(seen)


def once(model: nn.Module, key: Hashable, work: Callable[[nn.Module], T]) -> T:
    """The result of `work(model)`, worked out again only when the model's modules or marks have changed."""
    mark = marks(model)
    state = (_structure(model), mark.head, mark.fixed, mark.local)
    known: _Known | None = model.__dict__.get("_pfed_known")
    if known is None or known.state != state or len(known) > 256:  # parts made anew in every round would pile up
        known = model.__dict__["_pfed_known"] = _Known()
        known.state = state
    if key not in known:
        known[key] = work(model)
    result: T = known[key]
    return result


@dataclass(frozen=True)
class Part:
    """A selection of a model's tensors; parts combine with | & - and ~."""

    label: str
    select: Callable[[nn.Module], frozenset[str]]

    def names(self, model: nn.Module) -> frozenset[str]:
        """Names in the model's state_dict."""
        return self.select.chosen if isinstance(self.select, _Named) else once(model, self, self.select)

    def __or__(self, other: Part) -> Part:
        return Part(f"{self.label}|{other.label}", _Joined(operator.or_, self, other))

    def __and__(self, other: Part) -> Part:
        return Part(f"{self.label}&{other.label}", _Joined(operator.and_, self, other))

    def __sub__(self, other: Part) -> Part:
        return Part(f"{self.label}-{other.label}", _Joined(operator.sub, self, other))

    def __invert__(self) -> Part:
        return ALL - self


# The selections below are classes, not closures: equal parts compare equal, so that their names are found again.


@dataclass(frozen=True)
class _Joined:
    how: Callable[[frozenset[str], frozenset[str]], frozenset[str]]
    left: Part
    right: Part

    def __call__(self, model: nn.Module) -> frozenset[str]:
        return self.how(self.left.names(model), self.right.names(model))


@dataclass(frozen=True)
class _Named:
    chosen: frozenset[str]

    def __call__(self, model: nn.Module) -> frozenset[str]:
        return self.chosen


@dataclass(frozen=True)
class _Under:
    module: str

    def __call__(self, model: nn.Module) -> frozenset[str]:
        return names_under(model, self.module)


@dataclass(frozen=True)
class _Typed:
    types: Callable[[], tuple[type, ...]]

    def __call__(self, model: nn.Module) -> frozenset[str]:
        types = self.types()
        modules = model.named_modules(remove_duplicate=False)
        return frozenset().union(*(names_under(model, name) for name, module in modules if isinstance(module, types)))


def of(names: Iterable[str], label: str = "named") -> Part:
    """A part made of these tensors."""
    return Part(label, _Named(frozenset(names)))


def under(module: str, label: str) -> Part:
    """What is below the module of this name."""
    return Part(label, _Under(module))


def names_under(model: nn.Module, module: str) -> frozenset[str]:
    """The state_dict names below one module."""
    return frozenset(name for name in state_names(model) if not module or name.startswith(module + "."))


def state_names(model: nn.Module) -> tuple[str, ...]:
    return once(model, "state_dict", lambda m: tuple(m.state_dict(keep_vars=True)))


def head_name(model: nn.Module) -> str:
    """The name of the head: as marked, or what timm calls the classifier, or the last linear layer."""
    found = once(model, "head", find_head)
    if found is None:
        raise UserError(f"{type(model).__name__} has no linear layer; name its head with set_head(model, 'name').")
    return found


def find_head(model: nn.Module) -> str | None:
    marked = marks(model).head
    if marked is not None:
        return marked
    modules = dict(model.named_modules())
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        module = classifier()
        named = next((name for name, other in modules.items() if other is module), None)
        candidates = [named, getattr(model, "default_cfg", {}).get("classifier")]
        for name in candidates:  # a timm model without classes has an Identity there
            if isinstance(name, str) and name in modules and names_under(model, name):
                return name
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def linear_head(model: nn.Module, who: str) -> tuple[str, nn.Linear]:
    """The head's name and module, for somebody who builds on an encoder under a linear head."""
    name = head_name(model)
    head = model.get_submodule(name)
    if not isinstance(head, nn.Linear) or head is model:
        raise UserError(f"{who} needs an encoder with a linear head. Got {type(head).__name__} as the head.")
    return name, head


def set_head(model: nn.Module, name: str) -> nn.Module:
    """Say which module is the head; returns the model."""
    known = dict(model.named_modules())
    if name not in known or not name:
        raise UserError(f"{type(model).__name__} has no module {name!r} to be its head.")
    marks(model).head = name
    return model


def _everything(model: nn.Module) -> frozenset[str]:
    return names_under(model, "")


def _head(model: nn.Module) -> frozenset[str]:
    return names_under(model, head_name(model))


def _statistics(model: nn.Module) -> frozenset[str]:
    return NORM.names(model) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _norm_types() -> tuple[type, ...]:
    return (_BatchNorm,)


def _se_types() -> tuple[type, ...]:
    """A model can hold such a module only if the library that defines it was imported."""
    known = {
        "timm.layers.squeeze_excite": ("SEModule", "EffectiveSEModule", "SqueezeExciteCl"),
        "timm.models._efficientnet_blocks": ("SqueezeExcite",),
        "timm.models.senet": ("SEModule",),
        "torchvision.ops.misc": ("SqueezeExcitation",),
    }
    loaded = {name: sys.modules[name] for name in known if name in sys.modules}
    return tuple(getattr(loaded[name], kind) for name in loaded for kind in known[name] if hasattr(loaded[name], kind))


ALL = Part("all", _everything)
NONE = of((), "none")
HEAD = Part("head", _head)
BACKBONE = Part("backbone", _Joined(operator.sub, ALL, HEAD))
NORM = Part("norm", _Typed(_norm_types))  # affine parameters and running statistics of BatchNorm
STATS = Part("stats", _statistics)  # running statistics and counters of BatchNorm
SE = Part("se", _Typed(_se_types))  # squeeze-and-excitation


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any module is a BatchNorm."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def snapshot(model: nn.Module, part: Part = ALL) -> Tensors:
    """Everything in a part, counters and private tensors too: detached copies."""
    return _copies(model, part.names(model))


def _copies(model: nn.Module, names: frozenset[str]) -> Tensors:
    """As they would lie in memory after a journey."""
    live = {n: t.detach() for n, t in model.state_dict(keep_vars=True).items() if n in names}
    return Tensors({n: t.clone(memory_format=torch.contiguous_format) for n, t in live.items()})


def shareable(model: nn.Module, part: Part = ALL) -> frozenset[str]:
    """Names of a part that may travel: no integer counters, nothing fixed, nothing local."""
    return once(model, ("shareable", part), lambda m: _travel(m, part))


def _travel(model: nn.Module, part: Part) -> frozenset[str]:
    stays = marks(model).fixed | marks(model).local
    state = model.state_dict(keep_vars=True)
    return frozenset(n for n in part.names(model) if n not in stays and state[n].is_floating_point())


def params(model: nn.Module, part: Part = ALL) -> Tensors:
    """What may travel of a part: weights and float buffers, as detached copies."""
    return _copies(model, shareable(model, part))


def trainable(model: nn.Module, part: Part = ALL) -> dict[str, Tensor]:
    """The live parameters of a part, by name."""
    names = part.names(model)
    return {n: p for n, p in model.named_parameters() if n in names}


class _Reached(Exception):
    """Carries the head's input out of a forward pass that need not go on."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


def _stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    raise _Reached(args[0])


def features(model: nn.Module, x: Any) -> Tensor:
    """What the head receives when the model is run on x; `head(model, features(model, x))` is `model(x)`."""
    name = head_name(model)
    hook = model.get_submodule(name).register_forward_pre_hook(_stop)
    try:
        model(x)
    except _Reached as reached:
        return reached.features
    finally:
        hook.remove()
    raise UserError(f"{type(model).__name__} does not use its head {name!r}.")


def width(model: nn.Module) -> int:
    """How many features the head receives for one input."""
    return once(model, "width", _width)


@torch.no_grad()
def _width(model: nn.Module) -> int:
    modes = [(module, module.training) for module in model.modules()]
    try:
        return features(model.eval(), torch.zeros(1, *marks(model).shape)).flatten(1).shape[1]
    finally:
        for module, mode in modes:
            module.training = mode


def head(model: nn.Module, z: Tensor) -> Tensor:
    """The head applied to features."""
    out: Tensor = model.get_submodule(head_name(model))(z)
    return out
