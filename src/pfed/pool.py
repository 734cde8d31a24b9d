"""Modules that are built once and lent to one client after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.anatomy import Marks, Part
from pfed.errors import UserError
from pfed.forward import accept_batches
from pfed.tensors import Tensors

T = TypeVar("T")


class Spec:
    """What a method builds a client's model from: the base model, and parts of its own beside it.

    The base comes from the random stream `init`, each added part from `init/NAME`, so that adding a part leaves the
    base as it was.
    """

    def __init__(self, make: Callable[[], nn.Module], classes: int, shape: tuple[int, ...], seed: int, own: str = ""):
        self._make, self._seed, self._own = make, seed, own
        self.classes, self.shape = classes, shape

    def base(self) -> nn.Module:
        """The model that the run was given; one that can't take its inputs is an error here."""
        with streams.torch_scope(self._seed, "init", self._own):
            model = self._make()
        with torch.no_grad(), streams.torch_scope(0, "trial"):
            mode = model.training
            try:
                model.eval()(torch.zeros(1, *self.shape))
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"{type(model).__name__} can't be run on an input of shape {self.shape}: {reason}"
                ) from error
            finally:
                model.train(mode)
        return model

    def add(self, name: str, make: Callable[[], T], common: bool = False) -> T:
        """A part of the method's own, from its own stream; a common one is the same for all architectures."""
        with streams.torch_scope(self._seed, f"init/{name}", "" if common else self._own):
            return make()


class Pool:
    """The models of a run: a template for each architecture, and modules lent out for a step."""

    def __init__(
        self,
        templates: Sequence[nn.Module],
        architecture: Mapping[int, int] | None = None,
        initial: Mapping[int, Tensors] | None = None,
    ):
        """`architecture` says which template a client has (else the first), `initial` its own initial values."""
        self._templates = [accept_batches(template) for template in templates]
        self._architecture = architecture or {}
        self._initial = [anatomy.snapshot(template) for template in templates]
        self._own = initial or {}
        self._free: list[list[nn.Module]] = [[] for _ in templates]
        self._lent: list[tuple[int, nn.Module]] = []
        self._steady: dict[tuple[int, tuple[bool, ...]], bool] = {}

    def __reduce__(self) -> tuple[type[Pool], tuple[object, ...]]:
        return Pool, (self._templates, self._architecture, self._own)  # what is lent or free stays here

    @property
    def templates(self) -> Sequence[nn.Module]:
        """One for each architecture: to look at, not to change."""
        return self._templates

    def template(self, client: int) -> nn.Module:
        """The client's model with the run's initial values: to look at, not to change."""
        return self._templates[self._architecture.get(client, 0)]

    def take(self, client: int, *tensors: Mapping[str, Tensor] | None) -> nn.Module:
        """A module of the client's architecture holding the run's initial values, overwritten by each of `tensors`."""
        kind = self._architecture.get(client, 0)
        module = self._free[kind].pop() if self._free[kind] else copy.deepcopy(self._templates[kind])
        self._lent.append((kind, module))
        values: dict[str, Tensor] = dict(self._own.get(client, self._initial[kind]))
        for given in tensors:
            if given:
                if strange := given.keys() - self._initial[kind].keys():
                    raise KeyError(f"the model has no {sorted(strange)[:3]}")
                values.update(given)
        live = module.state_dict(keep_vars=True)
        with torch.no_grad():
            torch._foreach_copy_(list(live.values()), [values[name] for name in live])
        for parameter in module.parameters():
            parameter.grad = None
            parameter.requires_grad_(True)
        return module.train()

    def shared(self) -> Tensors:
        """The tensors that may travel in this run, as they were at its start."""
        return anatomy.params(self._templates[0])

    def on(self, device: torch.device) -> Pool:
        """The same models on another device."""
        templates = [copy.deepcopy(template).to(device) for template in self._templates]
        return Pool(templates, self._architecture, self._own)

    def give_back(self) -> None:
        """All modules that were lent are free again."""
        for kind, module in self._lent:
            self._free[kind].append(module)
        self._lent.clear()

    def steady(self, model: nn.Module, few: Callable[[], Tensor]) -> bool:
        """Whether features may be computed once: no chance, no batch statistics, and the head has the last word."""
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules()):
            return False
        modes = tuple(module.training for module in model.modules())
        kind = next((kind for kind, lent in self._lent if lent is model), None)
        if kind is None:
            return False
        if (kind, modes) not in self._steady:
            x = few()
            with torch.no_grad(), streams.torch_scope(0, "steady"):
                now = anatomy.features(model, x)
                model.eval()
                quiet = anatomy.features(model, x)
                last = torch.equal(anatomy.head(model, quiet), model(x))
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode
            self._steady[kind, modes] = last and torch.equal(now, quiet)
        return self._steady[kind, modes]


def mark(templates: Sequence[nn.Module], bn: str, shape: tuple[int, ...] = ()) -> None:
    """Note on each template the shape of an input, and what stays at the client.

    That is what the BN policy says, and tensors whose names or shapes are not common to all.
    """
    policy: dict[str, Part] = {"share": anatomy.NONE, "local-stats": anatomy.STATS, "local-all": anatomy.NORM}
    states = [template.state_dict(keep_vars=True) for template in templates]
    for template, state in zip(templates, states, strict=True):
        own = {
            name
            for name, tensor in state.items()
            if any(name not in other or other[name].shape != tensor.shape for other in states)
        }
        marks: Marks = anatomy.marks(template)
        marks.shape = shape
        marks.local = marks.local | policy[bn].names(template) | own


def align(templates: Sequence[nn.Module]) -> None:
    """Give all templates the first one's values wherever names and shapes are the same."""
    first = templates[0].state_dict()
    for template in templates[1:]:
        live = template.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in live.items():
                if name in first and first[name].shape == tensor.shape:
                    tensor.copy_(first[name])


def channels_last(templates: Sequence[nn.Module]) -> None:
    """Let convolutions run with the channels of a pixel side by side, where the rest of a model's code allows it.

    Values and shapes stay as they are. A model that flattens by `view`, for example, does not allow it.
    """
    for template in templates:
        if all(parameter.dim() != 4 for parameter in template.parameters()):
            continue
        training = template.training
        template.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            with streams.torch_scope(0, "trial"):
                out = template.eval()(torch.zeros(2, *anatomy.marks(template).shape))
                if out.requires_grad:  # a detector may have nothing to say
                    out.sum().backward()
        except Exception:  # whatever a user's code raises
            template.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        template.zero_grad()
        template.train(training)
