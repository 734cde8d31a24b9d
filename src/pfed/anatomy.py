"""The parts of a model: head, backbone, normalisation, stages, blocks, layers.

Parts are chosen by module type and structure, never by a substring of a name: a ResNet's `downsample.1` is a
BatchNorm without "bn" in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed.errors import UserError
from pfed.tensors import Tensors


@dataclass
class Marks:
    """What a run knows of a model beyond its modules; kept on the model and copied with it."""

    head: str | None = None  # the module that is the head, where structure does not tell
    fixed: frozenset[str] = field(default=frozenset())  # tensors that never change nor travel (an ETF frame)
    local: frozenset[str] = field(default=frozenset())  # tensors that stay at the client: BN policy, own shapes


def marks(model: nn.Module) -> Marks:
    """The marks of a model, made at first use."""
    if not hasattr(model, "_pfed_marks"):
        model._pfed_marks = Marks()  # type: ignore[assignment]
    found: Marks = model._pfed_marks  # type: ignore[assignment]
    return found


@dataclass(frozen=True)
class Part:
    """A selection of a model's tensors; parts combine with | & - and ~."""

    label: str
    select: Callable[[nn.Module], frozenset[str]]

    def names(self, model: nn.Module) -> frozenset[str]:
        """Names in the model's state_dict."""
        return self.select(model)

    def __or__(self, other: Part) -> Part:
        return Part(f"{self.label}|{other.label}", lambda m: self.names(m) | other.names(m))

    def __and__(self, other: Part) -> Part:
        return Part(f"{self.label}&{other.label}", lambda m: self.names(m) & other.names(m))

    def __sub__(self, other: Part) -> Part:
        return Part(f"{self.label}-{other.label}", lambda m: self.names(m) - other.names(m))

    def __invert__(self) -> Part:
        return ALL - self


def names_under(model: nn.Module, module: str) -> frozenset[str]:
    """The state_dict names below one module."""
    prefix = module + "."
    return frozenset(n for n in model.state_dict(keep_vars=True) if n.startswith(prefix))


def head_name(model: nn.Module) -> str:
    """The name of the head: as marked, or the last linear layer."""
    marked = marks(model).head
    if marked is not None:
        return marked
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"{type(model).__name__} has no linear layer; name its head with set_head(model, 'name').")
    return linear[-1]


def set_head(model: nn.Module, name: str) -> nn.Module:
    """Say which module is the head; returns the model."""
    known = dict(model.named_modules())
    if name not in known or not name:
        raise UserError(f"{type(model).__name__} has no module {name!r} to be its head.")
    marks(model).head = name
    return model


def _modules_of(types: tuple[type, ...]) -> Callable[[nn.Module], frozenset[str]]:
    def select(model: nn.Module) -> frozenset[str]:
        found: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, types):
                found |= names_under(model, name)
        return frozenset(found)

    return select


def _statistics(model: nn.Module) -> frozenset[str]:
    parameters = {name for name, _ in model.named_parameters()}
    return NORM.names(model) - parameters


def of(names: Iterable[str], label: str = "named") -> Part:
    """A part made of these tensors."""
    chosen = frozenset(names)
    return Part(label, lambda model: chosen)


ALL = Part("all", lambda model: frozenset(model.state_dict(keep_vars=True)))
NONE = Part("none", lambda model: frozenset())
HEAD = Part("head", lambda model: names_under(model, head_name(model)))
BACKBONE = Part("backbone", lambda model: ALL.names(model) - HEAD.names(model))
NORM = Part("norm", _modules_of((_BatchNorm,)))  # affine parameters and running statistics
STATS = Part("stats", _statistics)  # running statistics and counters of BatchNorm


def tensors(model: nn.Module, part: Part = ALL) -> Tensors:
    """Everything in a part, counters and private tensors too: detached copies."""
    names = part.names(model)
    return Tensors({n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items() if n in names})


def shareable(model: nn.Module, part: Part = ALL) -> frozenset[str]:
    """Names of a part that may travel: no integer counters, nothing fixed, nothing local."""
    mark = marks(model)
    stays = mark.fixed | mark.local
    state = model.state_dict(keep_vars=True)
    return frozenset(n for n in part.names(model) if n not in stays and state[n].is_floating_point())


def params(model: nn.Module, part: Part = ALL) -> Tensors:
    """What may travel of a part: weights and float buffers, as detached copies."""
    names = shareable(model, part)
    return Tensors({n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items() if n in names})


def trainable(model: nn.Module, part: Part = ALL) -> dict[str, Tensor]:
    """The live parameters of a part, by name."""
    names = part.names(model)
    return {n: p for n, p in model.named_parameters() if n in names}
