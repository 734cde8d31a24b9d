"""The networks that some of a model's channels make, run with the model's own tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from pfed.channels import Channels, Split, layout
from pfed.forward import quiet

BatchNormRule = Literal["batch_noupdate", "update", "eval"]


class Subnet(nn.Module):
    """A model in which every layer receives the chosen channels alone; the image and the logits are whole.

    That is done by masks on the layers' inputs or, where `thin` is asked for and the model allows it, by leaving out
    rows and columns of the other channels: the same numbers up to the order of sums, in less time.

    While the model trains, BatchNorm takes the statistics of this pass and leaves the running ones alone
    (`batch_noupdate`), moves those of the chosen channels (`update`), or uses the running ones (`eval`).
    """

    def __init__(
        self,
        model: nn.Module,
        found: Channels,
        chosen: Sequence[Tensor],
        bn: BatchNormRule = "batch_noupdate",
        thin: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._found, self._chosen, self._bn = found, chosen, bn
        self._thin = thin and found.narrow and bn != "update" and all(bool(own.any()) for own in chosen)
        self._inputs = found.received(chosen)

    def forward(self, x: Tensor) -> Tensor:
        with _RULES[self._bn](self):
            if self._thin:
                return functional_call(self.model, self._tensors(), (x,))  # type: ignore[no-any-return]
            with masked(self.model, self._inputs):
                out: Tensor = self.model(x)
                return out

    def _tensors(self) -> dict[str, Tensor]:
        """The model's tensors without the rows and columns of other channels."""
        state = self.model.state_dict(keep_vars=True)
        tensors = {}
        for group, own in zip(self._found.groups, self._chosen, strict=True):
            for name, each in group.rows.items():
                tensors[name] = state[name].index_select(0, _places(own, each))
        for layer, (number, each) in self._found.inputs.items():
            weight = f"{layer}.weight"
            tensors[weight] = tensors.get(weight, state[weight]).index_select(1, _places(self._chosen[number], each))
        return tensors


def pair(model: nn.Module, split: Split, bn: BatchNormRule, thin: bool) -> dict[str, Subnet]:
    """The networks of the private and of the shared channels of a run's model, in this order."""
    sides = {"private-subnet": split.private, "shared-subnet": tuple(~own for own in split.private)}
    return {name: Subnet(model, layout(model), chosen, bn, thin) for name, chosen in sides.items()}


def _places(chosen: Tensor, each: int) -> Tensor:
    return chosen.repeat_interleave(each).nonzero().squeeze(1)


@contextlib.contextmanager
def masked(model: nn.Module, keep: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, each of these modules finds zeros in the features of its input that are not to be kept."""
    hooks = [model.get_submodule(name).register_forward_pre_hook(_hide(kept)) for name, kept in keep.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hide(kept: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return args[0] * kept.view(1, -1, *[1] * (args[0].dim() - 2))

    return hook


def _quiet(subnet: Subnet) -> contextlib.AbstractContextManager[None]:
    return quiet(subnet.model)


@contextlib.contextmanager
def _settled(subnet: Subnet) -> Iterator[None]:
    training = [m for m in subnet.model.modules() if isinstance(m, _BatchNorm) and m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _updating(subnet: Subnet) -> Iterator[None]:
    """The other channels are computed as well, from part of their inputs: their statistics are put back."""
    # By `.data`: autograd must not take it for a change of what the full pass has saved; it only needs the batch's.
    state = {name: tensor.data for name, tensor in subnet.model.state_dict().items()}
    found = subnet._found
    before = {name: state[name].clone() for name in found.statistics}
    yield
    for group, own in zip(found.groups, subnet._chosen, strict=True):
        for name in group.rows.keys() & found.statistics:
            kept = own.repeat_interleave(group.rows[name])
            state[name].copy_(torch.where(kept, state[name], before.pop(name)))
    for name, whole in before.items():
        state[name].copy_(whole)  # of the image itself, which the full pass has counted


_RULES: dict[BatchNormRule, Callable[[Subnet], contextlib.AbstractContextManager[None]]] = {
    "batch_noupdate": _quiet,
    "eval": _settled,
    "update": _updating,
}
