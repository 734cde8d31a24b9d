"""A model cut into groups of tensors: layers, blocks or stages, the head always last.

Every tensor is in exactly one group; the running statistics of a BatchNorm are in that of its affine parameters.
"""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from pfed.anatomy import Part, find_head, names_under, of, once, state_names


def layers(model: nn.Module, joint_bn: bool = False) -> dict[str, Part]:
    """Every layer with tensors of its own, the head last; `joint_bn` puts a BatchNorm with the layer it follows."""
    return dict(once(model, ("layers", joint_bn), lambda m: _groups(m, _layer_labels(m, joint_bn))))


def blocks(model: nn.Module) -> dict[str, Part]:
    """`stem`, every residual block (`s2.0` is the first of stage 2), what stands between and after them, `fc`.

    A model without such blocks falls into its layers, each with its BatchNorm, and `fc`.
    """

    def work(model: nn.Module) -> dict[str, Part]:
        labels = {owner: block for owner, (_, block) in _block_labels(model).items()}
        return _groups(model, labels or _layer_labels(model), head="fc")

    return dict(once(model, "blocks", work))


def stages(model: nn.Module, stem: Literal["with_s1", "own"] = "with_s1") -> dict[str, Part]:
    """`s1`, `s2`, ... and `fc`: blocks at one resolution are one stage, and the stem belongs to the first.

    A model without blocks falls into its top-level modules and `fc`.
    """

    def work(model: nn.Module) -> dict[str, Part]:
        labels = {owner: stage for owner, (stage, _) in _block_labels(model).items()}
        if stem == "with_s1":
            labels = {owner: "s1" if stage == "stem" else stage for owner, stage in labels.items()}
        top = {owner: layer.partition(".")[0] for owner, layer in _layer_labels(model).items()}
        return _groups(model, labels or top, head="fc")

    return dict(once(model, ("stages", stem), work))


def _owners(model: nn.Module) -> dict[str, list[str]]:
    """The modules that hold tensors themselves, with the names of these, in the order of the state_dict."""
    owners: dict[str, list[str]] = {}
    for name in state_names(model):
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return owners


def _groups(model: nn.Module, labels: dict[str, str], head: str | None = None) -> dict[str, Part]:
    """Tensors by the label of their module; the head comes last, under the label `head` if one is given."""
    top = once(model, "head", find_head)
    of_head = names_under(model, top) if top is not None else frozenset()
    groups: dict[str, list[str]] = {}
    for last in (False, True):
        for owner, names in _owners(model).items():
            if (names[0] in of_head) == last:
                groups.setdefault(head if last and head else labels[owner], []).extend(names)
    return {label: of(names, label) for label, names in groups.items()}


def _layer_labels(model: nn.Module, joint_bn: bool = True) -> dict[str, str]:
    """Each module that holds tensors -> its own name, or for a BatchNorm that of the layer before it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    labels: dict[str, str] = {}
    before = ""
    for owner in _owners(model):
        joins = joint_bn and _completes(modules[owner], modules[before])
        labels[owner] = labels[before] if joins else owner or "model"
        before = owner
    return labels


def _completes(module: nn.Module, before: nn.Module) -> bool:
    width = {nn.Linear: "out_features", _ConvNd: "out_channels"}
    outputs = next((getattr(before, attribute) for kind, attribute in width.items() if isinstance(before, kind)), None)
    return isinstance(module, _BatchNorm) and module.num_features == outputs


def _block_labels(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Each module that holds tensors -> its stage and its block; empty if the model has no blocks."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = list(_owners(model))
    within = {owner: _block_around(owner, owners, modules) for owner in owners}
    numbers = _number([block for block in dict.fromkeys(within.values()) if block is not None], modules)
    labels: dict[str, tuple[str, str]] = {}
    started = False
    for before, owner in zip(["", *owners], owners, strict=False):
        block = within[owner]
        if block is not None:
            started = True
            stage, index = numbers[block]
            labels[owner] = f"s{stage}", f"s{stage}.{index}"
        elif not started:
            labels[owner] = "stem", "stem"
        elif within[before] is None and _completes(modules[owner], modules[before]):
            labels[owner] = labels[before]
        else:
            loose = next(name for name in _ancestors(owner) if not any(f"{b}.".startswith(f"{name}.") for b in numbers))
            labels[owner] = loose, loose
    return labels if started else {}


def _ancestors(name: str) -> list[str]:
    """
    >>> _ancestors("a.b.c")
    ['a', 'a.b', 'a.b.c']
    """
    steps = name.split(".")
    return [".".join(steps[: i + 1]) for i in range(len(steps))]


def _block_around(owner: str, owners: list[str], modules: dict[str, nn.Module]) -> str | None:
    """The outermost module around `owner` that stands in a list of modules and is made of layers, but is no list."""
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    for name in _ancestors(owner):
        listed = isinstance(modules[name.rpartition(".")[0]], lists) and not isinstance(modules[name], lists)
        if listed and any(other.startswith(f"{name}.") for other in owners):
            return name
    return None


def _number(found: list[str], modules: dict[str, nn.Module]) -> dict[str, tuple[int, int]]:
    """Block -> its stage and its place in it; another list of modules or a stride begins a stage."""
    numbers: dict[str, tuple[int, int]] = {}
    stage, index, place = 0, 0, None
    for block in found:
        convolutions = [module for module in modules[block].modules() if isinstance(module, _ConvNd)]
        strided = any(max(convolution.stride) > 1 for convolution in convolutions)
        begins = strided or block.rpartition(".")[0] != place
        stage, index = (stage + 1, 0) if begins else (stage, index + 1)
        place = block.rpartition(".")[0]
        numbers[block] = stage, index
    return numbers
