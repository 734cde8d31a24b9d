"""The output channels of a model's layers, which of them stand or fall together, and masks that divide them.

A hidden channel is a row of a convolution or a linear layer. Its bias and its place in a BatchNorm (statistics too)
belong to it. A residual addition forces the channels of both sides into one group, a depthwise convolution those of
its input and its output. Divide every group in two, and every tensor is divided:

>>> from pfed.models import build
>>> model = build("lenet5", classes=10, shape=(3, 32, 32))
>>> lenet = channels(model, torch.zeros(1, 3, 32, 32))
>>> [group.size for group in lenet.groups]
[6, 16, 120, 100]
>>> lenet.groups[0].rows
{'conv1.weight': 1, 'conv1.bias': 1}
>>> lenet.inputs["fc1"]  # 400 features, 25 for each of the 16 channels of group 1
Input(group=1, each=25)
>>> sum(int(mask.sum()) for mask in lenet.masks(Fraction(1, 2)).values())  # of 64,102 elements
32056
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from pfed import streams
from pfed.anatomy import STATS, head_name, marks, once
from pfed.errors import UserError

ClassifierSplit = Literal["input", "output", "private", "shared"]
Side = Literal["first", "last", "random-fixed"]
Statistics = Literal["follow", "local", "shared"]


def n_private(channels: int, p: Fraction) -> int:
    """How many of so many channels are private: the fraction p of them, halves rounded up.

    >>> n_private(100, Fraction(1, 2) * 29 / 100)  # 14.5 exactly; in floats it would be a little less
    15
    """
    if not 0 <= p <= 1:
        raise UserError(f"The private share of channels must be >= 0 and <= 1. Got {p}.")
    return int(p * channels + Fraction(1, 2))


@dataclass(frozen=True)
class Group:
    """Channels that are divided alike. Row j (axis 0) of a tensor in `rows` belongs to channel j // rows[name]."""

    size: int
    rows: dict[str, int]


class Input(NamedTuple):
    """What a module receives: feature j belongs to channel j // each of a group."""

    group: int
    each: int


@dataclass(frozen=True)
class Split:
    """A division of the hidden channels in two."""

    private: tuple[Tensor, ...]  # for each group, which of its channels
    shared: dict[str, Tensor]  # for each tensor, which of its elements

    @property
    def degenerate(self) -> bool:
        """Whether one of the two networks has a layer without channels."""
        return any(bool(own.all()) or not own.any() for own in self.private)


@dataclass(frozen=True)
class Channels:
    """The hidden channels of a model.

    `groups` are in the order of the forward pass. `inputs` tells for every convolution and linear layer which channels
    it receives, but for those that see the image itself: multiply these inputs by a mask, and what runs is the thin
    network of the chosen channels. It lists zero padding that adds channels as well, since channels move there from
    one group to another. Batch statistics of BatchNorm are taken per channel, so they do not mix either.
    Where `narrow` is true, the thin network also runs as such: with rows and columns of the other channels left out.
    """

    groups: tuple[Group, ...]
    inputs: dict[str, Input]
    classifier: str
    shapes: dict[str, torch.Size]  # of every tensor in the state_dict
    counters: frozenset[str]  # those that are no floating-point numbers
    statistics: frozenset[str]  # running means and variances of BatchNorm
    narrow: bool  # no module depends on how many channels there are, nor on chance

    @property
    def classes(self) -> int:
        return self.shapes[f"{self.classifier}.weight"][0]

    def counts(self, p: Fraction | Sequence[Fraction]) -> tuple[int, ...]:
        """Private channels in each group, for one fraction or for one per group."""
        several = [p] * len(self.groups) if isinstance(p, Fraction) else p
        self._check_number(several, "fraction")
        return tuple(n_private(group.size, own) for own, group in zip(several, self.groups, strict=True))

    def masks(
        self, p: Fraction, *, classifier_split: ClassifierSplit = "input", side: Side = "first"
    ) -> dict[str, Tensor]:
        """For every tensor of the state_dict, which of its elements are shared when a fraction p is private."""
        return self.split(self.counts(p), n_private(self.classes, p), classifier_split, side).shared

    def split(
        self,
        counts: Sequence[int],
        classes: int = 0,
        classifier_split: ClassifierSplit = "input",
        side: Side = "first",
        statistics: Statistics = "follow",
    ) -> Split:
        """The division by which `counts[g]` channels of group g are private, and with `output` so many classes.

        The classifier is divided by its `input` columns (its bias is shared as long as any of them is), by its `output`
        rows, or is `private` or `shared` as a whole. Running statistics `follow` their channel, or all of them are
        `local` or `shared`. Tensors that belong to no hidden channel are shared as long as any hidden channel is.
        Integer counters never are.
        """
        self._check(counts)
        private = tuple(_private(group.size, count, side) for count, group in zip(counts, self.groups, strict=True))
        any_shared = not all(bool(own.all()) for own in private)
        masks = {name: torch.full(shape, any_shared) for name, shape in self.shapes.items()}
        for own, group in zip(private, self.groups, strict=True):
            for name, each in group.rows.items():
                masks[name] = self._rows(name, ~own.repeat_interleave(each))
        for name in {f"{self.classifier}.weight", f"{self.classifier}.bias"} & masks.keys():
            shape = self.shapes[name]
            if classifier_split == "input":
                columns = ~self.received(private)[self.classifier]
                masks[name] = (columns if len(shape) == 2 else columns.any()).expand(shape).clone()
            elif classifier_split == "output":
                masks[name] = self._rows(name, ~_private(shape[0], classes, side))
            else:
                masks[name] = torch.full(shape, classifier_split == "shared")
        for name in self.statistics if statistics != "follow" else ():
            masks[name] = torch.full(self.shapes[name], statistics == "shared")
        for name in self.counters:
            masks[name] = torch.zeros(self.shapes[name], dtype=torch.bool)
        return Split(private, masks)

    def received(self, chosen: Sequence[Tensor]) -> dict[str, Tensor]:
        """For every module in `inputs`, which of the features that it receives belong to these channels."""
        return {name: chosen[group].repeat_interleave(each) for name, (group, each) in self.inputs.items()}

    def text(self) -> str:
        """All of this as JSON."""
        plain = {**vars(self), "groups": [[group.size, group.rows] for group in self.groups]}
        plain |= {name: sorted(plain[name]) for name in ("counters", "statistics")}
        return json.dumps(plain, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Channels:
        """The inverse of `text`."""
        plain = json.loads(text)
        return Channels(
            groups=tuple(Group(size, rows) for size, rows in plain["groups"]),
            inputs={name: Input(*place) for name, place in plain["inputs"].items()},
            classifier=plain["classifier"],
            shapes={name: torch.Size(shape) for name, shape in plain["shapes"].items()},
            counters=frozenset(plain["counters"]),
            statistics=frozenset(plain["statistics"]),
            narrow=plain["narrow"],
        )

    def _check_number(self, given: Sequence[object], what: str) -> None:
        if len(given) != len(self.groups):
            raise UserError(f"There must be one {what} for each of {len(self.groups)} groups. Got {len(given)}.")

    def _check(self, counts: Sequence[int]) -> None:
        self._check_number(counts, "count")
        for count, group in zip(counts, self.groups, strict=True):
            if not 0 <= count <= group.size:
                raise UserError(f"Private channels must be >= 0 and <= {group.size}. Got {count}.")

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        shape = self.shapes[name]
        return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def _private(size: int, count: int, side: Side) -> Tensor:
    """Which of so many channels are private; a larger count only adds to them."""
    if side == "last":
        return _private(size, count, "first").flip(0)
    if side == "first":
        return torch.arange(size) < count
    chosen = torch.zeros(size, dtype=torch.bool)  # one order for all groups of a size, whatever the run's seed
    chosen[torch.from_numpy(streams.rng(0, "private channels", size).permutation(size)[:count])] = True
    return chosen


def channels(model: nn.Module, example_input: Tensor) -> Channels:
    """Follow the channels of a model from layer to layer; the model itself is left as it is.

    The example decides nothing but the size of images: a batch of zeros will do.
    """
    copied = copy.deepcopy(model).eval()  # eval: no draw for dropout, no change of running statistics
    try:
        graph = _Tracer().trace(copied)
    except Exception as error:
        raise UserError(f"The channels of {type(model).__name__} cannot be followed: {error}") from error
    follower = _Follower(fx.GraphModule(copied, graph), type(model).__name__, _classifier(model))
    with torch.no_grad():
        follower.run(example_input)
    return follower.found(model)


def layout(model: nn.Module) -> Channels:
    """The channels of a run's model, followed once."""
    return once(model, "channels", lambda m: channels(m, torch.zeros(1, *marks(m).shape)))


def _classifier(model: nn.Module) -> str:
    head = head_name(model)
    linear: list[str] = [n for n, m in model.get_submodule(head).named_modules(prefix=head) if isinstance(m, nn.Linear)]
    if not linear:
        raise UserError(f"The head {head!r} of {type(model).__name__} has no linear layer to be the classifier.")
    return linear[-1]


class _Tracer(fx.Tracer):
    """Takes every layer as a whole, also those that timm derives from torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (_ConvNd, nn.Linear, _NormBase)) or super().is_leaf_module(m, module_qualified_name)


class _Follower(fx.Interpreter):
    """Runs a traced model and notes for each value which channels its axis 1 holds; the image has none."""

    def __init__(self, traced: fx.GraphModule, model: str, classifier: str) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # an error is one sentence
        self.model = model
        self.classifier = classifier
        self.flows: dict[fx.Node, Input] = {}
        self.results: dict[fx.Node, torch.Size] = {}
        self.sizes: list[int] = []  # of each set of channels
        self.joined: list[int] = []  # the earlier set that each is one with, or itself
        self.rows: dict[str, Input] = {}
        self.inputs: dict[str, Input] = {}
        self.narrow = True

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        sources = [source for source in n.all_input_nodes if source in self.flows]
        flow = None
        if isinstance(result, Tensor):
            self.results[n] = result.shape
            if n.op == "call_module":
                flow = self._module(n, result.shape, sources)
            elif sources and n.op != "output":
                flow = self._operation(n, result.shape, sources)
        elif sources and isinstance(result, (tuple, list)) and any(isinstance(r, Tensor) for r in result):
            raise self._refuse(n)
        if flow is not None:
            self.flows[n] = flow
        return result

    def _module(self, n: fx.Node, shape: torch.Size, sources: list[fx.Node]) -> Input | None:
        module = self.fetch_attr(str(n.target))
        came = self.flows[sources[0]] if sources else None
        if isinstance(module, (_ConvNd, nn.Linear)) and not isinstance(module, _ConvTransposeNd):
            return self._layer(n, module, came, shape)
        if came is None:
            return None
        if isinstance(module, nn.Flatten):
            return self._reshaped(n, came, shape)
        if isinstance(module, nn.ZeroPad3d) and shape[1] != self.results[sources[0]][1]:
            self._receives(n, came)
            self.narrow = False
            return self._new(shape[1])
        if isinstance(module, _DropoutNd) or (isinstance(module, _NormBase) and not isinstance(module, _BatchNorm)):
            self.narrow = False
        channelwise = type(module).__module__ in _CHANNELWISE and not isinstance(module, _MIXING)
        if (channelwise or isinstance(module, _NormBase)) and shape[1] == self.results[sources[0]][1]:
            self._holds(n, module, came, shape[1])
            return came
        raise self._refuse(n)

    def _layer(self, n: fx.Node, module: nn.Module, came: Input | None, shape: torch.Size) -> Input | None:
        name = str(n.target)
        if came is not None:
            if isinstance(module, nn.Linear) and len(shape) != 2:
                raise self._refuse(n)  # it works on another axis than that of the channels
            self._receives(n, came)
        if name == self.classifier:
            return None
        depthwise = isinstance(module, _ConvNd) and module.groups == module.in_channels > 1
        if isinstance(module, _ConvNd) and module.groups > 1:
            self.narrow = False
        if depthwise and came is not None:
            flow = Input(came.group, came.each * shape[1] // self.results[n.all_input_nodes[0]][1])
        else:
            flow = self._new(shape[1])
        self._holds(n, module, flow, shape[1])
        if f"{name}.weight" not in self.rows:  # a parametrization computes it from something else
            raise self._refuse(n)
        return flow

    def _operation(self, n: fx.Node, shape: torch.Size, sources: list[fx.Node]) -> Input:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        came, before = self.flows[sources[0]], self.results[sources[0]]
        if name in _TIES:
            others = [o for o in n.all_input_nodes if o not in sources and o in self.results]
            if any(self.results[other].numel() > 1 for other in others):
                raise self._refuse(n)  # the image, or a parameter outside of any layer, meets hidden channels
            for source in sources[1:]:
                self._join(n, came, self.flows[source])
            return came
        if name in _RESHAPES:
            self.narrow = self.narrow and not any(isinstance(size, int) and size > 1 for size in _flat(n.args[1:]))
            return self._reshaped(n, came, shape)
        if name in _REDUCTIONS:
            dims: Any = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else (0, 1))
            if all(dim % len(before) > 1 for dim in (dims if isinstance(dims, Sequence) else [dims])):
                return came
        if name == "getitem" and isinstance(n.args[1], tuple) and n.args[1][:2] == (slice(None), slice(None)):
            return came
        if name in _POINTWISE and shape[1:2] == before[1:2]:
            self.narrow = self.narrow and name not in _CHANCE
            return came
        raise self._refuse(n)

    def _reshaped(self, n: fx.Node, came: Input, shape: torch.Size) -> Input:
        """Flattening gives every channel as many features as its map has places."""
        before = self.results[n.all_input_nodes[0]]
        if shape[:2] == before[:2]:
            return came
        if shape != (before[0], before[1:].numel()):
            raise self._refuse(n)
        return Input(came.group, came.each * before[2:].numel())

    def _new(self, size: int) -> Input:
        self.sizes.append(size)
        self.joined.append(len(self.joined))
        return Input(self.joined[-1], 1)

    def _holds(self, n: fx.Node, module: nn.Module, flow: Input, width: int) -> None:
        """Note whose rows a module's tensors are; one that is used twice ties the two."""
        for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.dim() and len(tensor) == width:
                self._join(n, self.rows.setdefault(f"{n.target}.{own}", flow), flow)

    def _receives(self, n: fx.Node, came: Input) -> None:
        self._join(n, self.inputs.setdefault(str(n.target), came), came)

    def _root(self, group: int) -> int:
        while self.joined[group] != group:
            group = self.joined[group]
        return group

    def _join(self, n: fx.Node, a: Input, b: Input) -> None:
        first, second = sorted((self._root(a.group), self._root(b.group)))
        if a.each != b.each or self.sizes[first] != self.sizes[second]:
            raise self._refuse(n)
        self.joined[second] = first

    def _refuse(self, n: fx.Node) -> UserError:
        what = f"{type(self.fetch_attr(str(n.target))).__name__} {n.target}" if n.op == "call_module" else n.name
        return UserError(f"The channels of {self.model} cannot be followed through {what!r}: it mixes or moves them.")

    def found(self, model: nn.Module) -> Channels:
        """What was noted, with joined sets made one."""
        state = model.state_dict(keep_vars=True)
        if self.classifier not in self.inputs:
            raise UserError(f"{self.model} has no hidden channels before its classifier {self.classifier!r}.")
        roots = [group for group in range(len(self.sizes)) if self._root(group) == group]
        number = {group: roots.index(self._root(group)) for group in range(len(self.sizes))}
        rows: list[dict[str, int]] = [{} for _ in roots]
        for name, (group, each) in self.rows.items():
            rows[number[group]][name] = each
        return Channels(
            groups=tuple(Group(self.sizes[root], rows[number[root]]) for root in roots),
            inputs={name: Input(number[group], each) for name, (group, each) in self.inputs.items()},
            classifier=self.classifier,
            shapes={name: tensor.shape for name, tensor in state.items()},
            counters=frozenset(name for name, tensor in state.items() if not tensor.is_floating_point()),
            statistics=frozenset(name for name in STATS.names(model) if state[name].is_floating_point()),
            narrow=self.narrow,
        )


def _flat(sizes: Any) -> list[Any]:
    return [s for size in sizes for s in _flat(size)] if isinstance(sizes, (tuple, list)) else [sizes]


_MIXING = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention, nn.Bilinear)
_CHANNELWISE = {
    f"torch.nn.modules.{kind}"  # the rest of the modules defined here treat every channel alike and alone
    for kind in ("activation", "dropout", "linear", "padding", "pooling", "upsampling")
}
_TIES = {"add", "add_", "iadd", "sub", "sub_", "isub", "mul", "mul_", "imul", "truediv", "div", "maximum", "minimum"}
_RESHAPES = {"flatten", "view", "reshape", "squeeze"}
_REDUCTIONS = {"mean", "sum", "amax", "amin"}
_POINTWISE = {
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "sigmoid", "sigmoid_", "tanh"),
    *("hardtanh", "hardswish", "hardsigmoid", "softplus", "clamp", "abs", "sqrt", "pow", "neg", "exp"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "stochastic_depth"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "interpolate"),
    *("pad", "contiguous", "clone", "detach", "to", "float"),
}
_CHANCE = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "stochastic_depth"}
