"""Several clients as one on a device: a small network leaves most of a GPU idle.

Every client's step runs in a thread of its own, one at a time, up to where it trains. Those that come to train in the
same way take their steps together (`torch.func.vmap`); all others train as usual. What comes out is the same up to the
order of sums. On a CPU it gains nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.rnn import pad_sequence

from pfed import machine
from pfed.client import Client, Fit, mean
from pfed.engines.base import Call, Failure, Reply, States
from pfed.errors import RunError
from pfed.forward import Batch
from pfed.runner import Runner
from pfed.sgd import SGD
from pfed.tasks.classification import Classification
from pfed.tensors import Tensors


class Together:
    """One group of `together` clients after another, in this process."""

    def __init__(self, runner: Runner, states: States):
        self.ids = list(runner.ids)
        self._states = states
        runner.move(machine.device(runner.options.device))
        self._runners = [copy.copy(runner) for _ in range(runner.options.together)]
        for own in self._runners:
            own.pool = runner.pool.on(runner.device)

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        ids = sorted(call.own)
        for start in range(0, len(ids), len(self._runners)):
            pairs = zip(self._runners, ids[start : start + len(self._runners)], strict=False)
            members = [Member(runner, call, client, self._states) for runner, client in pairs]
            _take_turns(members)
            for member in members:
                yield member.client, member.answer

    def close(self) -> None:
        pass


@dataclass
class Training:
    """What a client is about to do, and what others did of it."""

    client: Client
    model: nn.Module
    names: frozenset[str]
    epochs: int | None
    steps: int | None
    stream: str
    memory: str
    losses: list[Tensor] = field(default_factory=list)
    done: Fit | None = None

    def __post_init__(self) -> None:
        self.batches = self.client.batches(self.epochs, self.stream, steps=self.steps, drop_single=False)
        self.live = self.model.state_dict(keep_vars=True)
        self.trained = [name for name, _ in self.model.named_parameters() if name in self.names]
        self.momentum = self.client.sgd(dict(self.model.named_parameters()), self.memory).buffers

    @property
    def kind(self) -> object:
        """Trainings of equal kinds can be one. None: chance, or the other samples of a batch, play a part in it."""
        apart = any(isinstance(m, (_BatchNorm, _DropoutNd)) and m.training for m in self.model.modules())
        if apart or type(self.client.task) is not Classification or self.client.n == 0:
            return None
        shapes = tuple((name, tensor.shape) for name, tensor in self.live.items())
        return type(self.model), shapes, self.names, self.epochs, self.steps, frozenset(self.momentum)


class Member(threading.Thread):
    """A client's step, which gives way whenever it comes to train."""

    def __init__(self, runner: Runner, call: Call, client: int, states: States):
        super().__init__(daemon=True)
        self.client = client
        self.answer: Reply | Failure = Failure("error", "was not run")
        self.training: Training | None = None
        self.over = self.cancelled = False
        self._runner, self._call, self._states = runner, call, states
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._away: SimpleQueue[None] = SimpleQueue()

    def go(self) -> None:
        """Let it run until it gives way."""
        self._turn.put(None)
        self._away.get()

    def end(self) -> None:
        """Let its thread end, whatever it was waiting for."""
        self.cancelled = True
        while not self.over:
            self.go()
        self.join()

    def run(self) -> None:
        self._turn.get()
        torch.set_num_threads(1)
        call, self._runner.companion = self._call, self
        try:
            state = self._states.load(self.client, call.base[self.client])
            payload = {**call.common, **call.own[self.client]}
            self.answer, after = self._runner(call.step, self.client, call.round, payload, state)
            if call.version is not None:
                self._states.save(self.client, call.version, after.state)
        except Exception as error:
            self.answer = Failure.of(error, call.step)
        self.over = True
        self._away.put(None)

    def fit(self, *asked: object) -> Fit | None:
        """Called by a client that is about to train: what was done for it, or None if it is to do that itself."""
        self.training = Training(*asked)  # type: ignore[arg-type]
        random = torch.get_rng_state()
        self._away.put(None)
        self._turn.get()
        if self.cancelled:
            raise RunError("Another client of the group could not go on.")
        torch.set_rng_state(random)
        done, self.training = self.training.done, None
        return done


def _take_turns(members: Sequence[Member]) -> None:
    """Run all to their end, and train for those that wait for it."""
    random = torch.get_rng_state()
    for member in members:
        member.start()
    try:
        while going := [member for member in members if not member.over]:
            for member in going:
                member.go()
            groups: dict[object, list[Training]] = {}
            for training in (member.training for member in going if member.training is not None):
                groups.setdefault(training.kind, []).append(training)
            for kind, group in groups.items():
                if kind is not None and len(group) > 1:
                    _train(group)
    finally:
        for member in members:
            member.end()
        torch.set_rng_state(random)


def _train(group: list[Training]) -> None:
    """The steps of several trainings as one; who has no more batches leaves."""
    template, names = copy.deepcopy(group[0].model).requires_grad_(False), group[0].trained

    def loss(params: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        out = functional_call(template, {**params, **rest}, (x,))
        return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()

    slopes = vmap(grad_and_value(loss))
    params = {name: torch.stack([training.live[name].detach() for training in group]) for name in names}
    rest = {
        name: torch.stack([training.live[name].detach() for training in group])
        for name in group[0].live
        if name not in params
    }
    sgd = _sgd(group, params, {name: torch.stack([t.momentum[name] for t in group]) for name in group[0].momentum})
    while group:
        batches = [next(training.batches, None) for training in group]
        staying = [row for row, batch in enumerate(batches) if batch is not None]
        if len(staying) < len(group):
            for row in set(range(len(group))) - set(staying):
                _leave(group[row], row, sgd)
            params, rest, momentum = (
                {name: tensor[staying] for name, tensor in tensors.items()} for tensors in (params, rest, sgd.buffers)
            )
            group = [group[row] for row in staying]
            sgd = _sgd(group, params, momentum) if group else sgd
        if not group:
            break
        try:
            grads, losses = slopes(params, rest, *_joined([batch for batch in batches if batch is not None]))
        except RuntimeError as error:
            raise RunError(f"run.together can't be used with this model, set it to 1: {error}") from error
        for name, parameter in params.items():
            parameter.grad = grads[name]
        sgd.step()
        for training, value in zip(group, losses, strict=True):
            training.losses.append(value)


def _sgd(group: Sequence[Training], params: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> SGD:
    """The local optimiser on stacked tensors."""
    client = group[0].client
    local = client.local
    return SGD(params, client.lr, local.momentum, local.nesterov, local.weight_decay, momentum)


def _joined(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and weights of several batches, short ones filled up with samples that weigh nothing."""
    weights = [torch.ones(len(batch.y), device=batch.x.device) for batch in batches]
    x, y, weight = (
        pad_sequence(parts, batch_first=True)
        for parts in ([batch.x for batch in batches], [batch.y for batch in batches], weights)
    )
    return x, y, weight


def _leave(training: Training, row: int, sgd: SGD) -> None:
    """A training is over: its tensors go back to its model and its client."""
    with torch.no_grad():
        for name, tensor in sgd.params.items():
            training.live[name].copy_(tensor[row])
    if training.client.keeps_optimizer and sgd.buffers:
        momentum = Tensors({name: tensor[row].clone() for name, tensor in sgd.buffers.items()})
        training.client.state.setdefault("momentum", {})[training.memory] = momentum
    training.done = Fit(len(training.losses), mean(training.losses))
