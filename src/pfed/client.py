"""What a step sees of a client: its data, its private state, its random streams, and ways to train."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfed import anatomy, streams
from pfed.anatomy import ALL, HEAD, NONE, Part
from pfed.config import Local, RunOptions
from pfed.data.base import ClientData, Samples
from pfed.forward import Batch
from pfed.pool import Pool
from pfed.sgd import SGD
from pfed.shortcuts import Phase, Shortcuts
from pfed.tasks import Task
from pfed.tensors import Tensors
from pfed.wire import State

GATHER = 2**24  # elements
Loss = Callable[[nn.Module, Batch], Tensor]


class Optimizer(Protocol):
    """What `fit` asks of an optimiser; torch's fit."""

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...


@dataclass(frozen=True)
class Fit:
    """What a training phase did."""

    steps: int
    loss: float  # mean over steps; nan without any


class Companion(Protocol):
    """Somebody who may do a plain training for a client, together with those of others."""

    def fit(
        self,
        client: Client,
        model: nn.Module,
        names: frozenset[str],
        epochs: int | None,
        steps: int | None,
        stream: str,
        memory: str,
    ) -> Fit | None: ...


@dataclass
class Client:
    """One client during one step of one round. Nothing else of the federation is reachable from here."""

    id: int
    round: int
    state: State
    data: ClientData
    classes: int
    options: RunOptions
    pool: Pool
    task: Task
    public: Samples | None = None
    beside: Mapping[str, Samples] = field(default_factory=dict)  # data that only evaluation looks at
    keeps_optimizer: bool = False
    companion: Companion | None = None  # somebody who may train for it
    samples: int = 0  # trained on in this step
    starved: bool = False  # wanted to train, but no batch was large enough
    fitted: nn.Module | Mapping[str, nn.Module] | None = None
    streams_used: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)  # for whoever reads the results, said once in a run

    def __post_init__(self) -> None:
        self.loss: Loss = self.task.loss
        self._logs: dict[str, float] = {}
        self._batches: dict[str, list[Tensor]] = {}  # by name, a number for each batch
        self._augment = self.task.augment(self.options.augment)
        self._shortcuts = Shortcuts(self.data.train, self._steady, self._no_shortcut)

    @property
    def n(self) -> int:
        return len(self.data.train)

    @property
    def counts(self) -> Tensor:
        """Training samples per class."""
        return self.data.train.counts(self.classes)

    @property
    def rounds(self) -> int:
        return self.options.rounds

    @property
    def local(self) -> Local:
        return self.options.local

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.rate(self.local.lr)

    def rate(self, own: float) -> float:
        """A method's own learning rate under the run's schedule; 0 stands for the run's."""
        return (own or self.local.lr) * schedule(self.local.schedule, self.round, self.rounds)

    def rng(self, stream: str) -> np.random.Generator:
        """A random stream of this client and round; the same name gives the same numbers."""
        self.streams_used.add(stream)
        return streams.rng(self.options.seed, "method", self.id, self.round, stream)

    def common_rng(self, stream: str, *key: int) -> np.random.Generator:
        """A random stream that the server and all clients have in common (`cohort.common_rng`)."""
        return streams.rng(self.options.seed, "common", stream, *key)

    def log(self, **numbers: float) -> None:
        """Numbers for plots. They are recorded at the client's side and are not payload."""
        self._logs.update({name: float(value) for name, value in numbers.items()})

    def log_mean(self, **numbers: float | Tensor) -> None:
        """Numbers of one batch for plots: what is recorded is the mean over the batches of this step."""
        for name, value in numbers.items():
            self._batches.setdefault(name, []).append(torch.as_tensor(value).detach())

    @property
    def records(self) -> dict[str, float]:
        """All that was logged."""
        return {**self._logs, **{name: mean(values) for name, values in self._batches.items()}}

    def model(self, *tensors: Tensors | None) -> nn.Module:
        """A module with the given tensors (the last wins), else what was kept, else the run's initial values."""
        return self.pool.take(self.id, self.state.get("kept"), *tensors)

    def share(self, model: nn.Module, part: Part = ALL) -> Tensors:
        """What may leave of a part: no counters, nothing fixed, nothing that the BN policy or the shapes keep here."""
        return anatomy.params(model, part)

    def keep(self, model: nn.Module, part: Part = NONE) -> None:
        """Remember a part for the next rounds, and with it all that `share` would not let out."""
        stays = anatomy.ALL.names(model) - anatomy.shareable(model) - anatomy.marks(model).fixed
        private = anatomy.snapshot(model, anatomy.of(part.names(model) | stays))
        if private:
            self.state["kept"] = Tensors(self.state.get("kept", {})) | private

    def trained(self, model: nn.Module | Mapping[str, nn.Module]) -> None:
        """Hand over the personal model after local training; without this the last one fitted counts."""
        self.fitted = model

    def examples(self) -> Batch:
        """All training examples in order, not augmented."""
        return Batch(*self._all, torch.arange(self.n))

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        return self.data.train.take()

    def batches(
        self,
        epochs: int | None = None,
        stream: str = "train",
        *,
        steps: int | None = None,
        drop_single: bool | None = None,
    ) -> Iterator[Batch]:
        """Shuffled batches; the last may be smaller, but is dropped at size one where BatchNorm trains."""
        size = self.local.batch_size
        if drop_single is None:
            drop_single = anatomy.has_batchnorm(self.pool.template(self.id))
        self.streams_used.add(stream)
        key = (self.options.seed, "batch_order", self.id, self.round, stream)
        order, noise = streams.rng(*key), streams.rng(self.options.seed, "augmentation", *key[2:])
        step = epoch = 0
        while (epochs is None or epoch < epochs) and (steps is None or step < steps):
            permutation = torch.from_numpy(order.permutation(self.n)).to(self.data.train.rows.device)
            for index, x, y in self._cut(permutation, size):
                if len(index) == 1 and drop_single:
                    continue
                if self._augment is not None:
                    x, y = self._augment(x, y, noise)
                yield Batch(x, y, index, step, epoch)
                self.samples += len(index)
                step += 1
                if step == steps:
                    return
            if step == 0:
                self.starved = True
                return
            epoch += 1

    def _cut(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The data in this order in pieces of this size; gathered at once where that takes little memory."""
        pieces = [order[i : i + size] for i in range(0, self.n, size)]
        if self.n * math.prod(self.data.train.shape) > GATHER:
            return ((index, *self.data.train.take(index)) for index in pieces)
        x, y = self._all[0][order], self._all[1][order]
        return (
            (index, x[i : i + size], y[i : i + size]) for i, index in zip(range(0, self.n, size), pieces, strict=True)
        )

    def fit(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        only: Part = ALL,
        lr: float = 0.0,
        opt: Optimizer | None = None,
        extra: Sequence[Optimizer] = (),
        grad: Callable[[Batch], None] | None = None,
        each_epoch: Callable[[nn.Module], None] | None = None,
        frozen: Literal["eval", "train"] = "eval",
        thaw: bool = False,
        stream: str = "train",
        memory: str | None = None,
    ) -> Fit:
        """Local SGD on a part of a model.

        `loss(model, batch)` is the task's unless given. `lr` is a learning rate of the method's own, under the run's
        schedule. `opt` is an optimiser that the method keeps itself, `extra` are more of them for further tensors,
        `grad(batch)` may change gradients before each step, `each_epoch(model)` runs after every epoch under the same
        optimiser. Modules whose tensors are all frozen are in eval mode unless `frozen="train"`; `thaw` trains also
        what is fixed in the run. Where momentum is kept between rounds, it is kept under `memory`, or the stream's
        name.
        """
        plain = loss is None and not lr and opt is None and not extra and grad is None and each_epoch is None
        loss = loss or self.loss
        epochs = self.local.epochs if epochs is None and steps is None else epochs
        names = only.names(model) - (frozenset() if thaw else anatomy.marks(model).fixed)
        _set_modes(model, names, frozen)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        memory = memory or stream
        phase = self._phase(model, names, epochs, steps)
        if self.companion is not None and plain and not (phase and phase.head_only):
            done = self.companion.fit(self, model, names, epochs, steps, stream, memory)
            if done is not None:
                return self._fitted(model, done)
        sgd = self.sgd(anatomy.trainable(model, anatomy.of(names)), memory, lr)
        optimizers = [opt or sgd, *extra]
        drop_single = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
        losses: list[Tensor] = []
        epoch = 0
        with streams.torch_scope(self.options.seed, "dropout", self.id, self.round, stream):
            for batch in self.batches(epochs, stream, steps=steps, drop_single=drop_single):
                if batch.epoch > epoch and each_epoch is not None:
                    each_epoch(model)
                epoch = batch.epoch
                batch.phase = phase
                for optimizer in optimizers:
                    optimizer.zero_grad()
                value = loss(model, batch)
                value.backward()  # type: ignore[no-untyped-call]
                if grad is not None:
                    grad(batch)
                for optimizer in optimizers:
                    optimizer.step()
                losses.append(value.detach())
        if losses and each_epoch is not None:
            each_epoch(model)
        if opt is None and self.keeps_optimizer and sgd.buffers:
            self.state.setdefault("momentum", {})[memory] = sgd.buffers
        return self._fitted(model, Fit(len(losses), mean(losses)))

    def _fitted(self, model: nn.Module, done: Fit) -> Fit:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        self.fitted = model
        return done

    def sgd(self, params: Mapping[str, Tensor], memory: str = "train", lr: float = 0.0) -> SGD:
        """The run's local optimiser on these parameters, with the momentum of earlier rounds where that is kept.

        A learning rate other than the run's is under its schedule too.
        """
        local = self.local
        kept = self.state.get("momentum", {}).get(memory) if self.keeps_optimizer else None
        return SGD(params, self.rate(lr), local.momentum, local.nesterov, local.weight_decay, kept)

    def _phase(self, model: nn.Module, names: frozenset[str], epochs: int | None, steps: int | None) -> Phase | None:
        """What the batches of a phase may look up; None where that would be wrong, or more work than it saves."""
        seen = self.n * epochs if epochs is not None else math.inf
        if steps is not None:
            seen = min(seen, steps * self.local.batch_size)
        if not self.task.shortcuts or not self.options.exact_shortcuts or not 0 < self.n <= seen:
            return None
        head_only = names <= HEAD.names(model)
        if self._augment is not None:
            if head_only and seen > self.n:
                self._no_shortcut("the inputs are augmented")
            return None
        return Phase(self._shortcuts, model, head_only, again=seen > self.n)

    def _steady(self, model: nn.Module) -> bool:
        return self.pool.steady(model, lambda: self.data.train.take(slice(0, 2))[0])

    def _no_shortcut(self, why: str) -> None:
        self.notes.add(f"features of frozen parts are computed again in every epoch: {why}")


def mean(numbers: list[Tensor]) -> float:
    """Of numbers that stay where they were computed until now: to read each would wait for its step to end."""
    return float(torch.stack(numbers).double().mean()) if numbers else math.nan


def _set_modes(model: nn.Module, names: frozenset[str], frozen: Literal["eval", "train"]) -> None:
    """Train mode, but eval mode for each module that holds tensors of its own, none of them to be trained."""
    model.train()
    if frozen == "train":
        return
    for prefix, module in model.named_modules():
        own = [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
        full = {f"{prefix}.{name}" if prefix else name for name in own}
        if full and not full & names:
            module.training = False


def schedule(rule: str, round: int, rounds: int) -> float:
    """The factor on the learning rate in a round: constant, cosine, or step:F1,F2 (a tenth from each fraction on)."""
    if rule == "constant" or not 1 <= round <= rounds:  # before and after the rounds the rate is the plain one
        return 1.0
    if rule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (round - 1) / max(rounds, 1)))
    return float(0.1 ** sum(round - 1 >= fraction * rounds for fraction in step_fractions(rule)))


def step_fractions(rule: str) -> list[float]:
    """The fractions of a `step:…` rule; anything else is a ValueError."""
    kind, _, fractions = rule.partition(":")
    if kind != "step":
        raise ValueError(rule)
    found = [float(part) for part in fractions.split(",")]
    if not all(0 <= fraction <= 1 for fraction in found):
        raise ValueError(rule)
    return found
