"""What a method sees of the clients, and the exchange behind it: versions, bytes, failures, simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from pfed import crossing, streams, wire
from pfed.config import RunOptions
from pfed.data.base import Samples
from pfed.engines.base import POOLED, Call, Engine, Failure, Reply
from pfed.errors import RunError
from pfed.method import Aggregation, Average, Each, Method, Replies
from pfed.pool import Pool
from pfed.tasks import Task
from pfed.tensors import Tensors
from pfed.wire import Payload

MEBIBYTE = 2**20


@dataclass
class Ledger:
    """What happened in one round, for the record."""

    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    evaluation: dict[int, int] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    logs: dict[tuple[int, str], float] = field(default_factory=dict)
    participants: set[int] = field(default_factory=set)
    samples: int = 0
    simulated: float = 0.0  # seconds
    notes: set[str] = field(default_factory=set)


@dataclass
class Exchange:
    """Carries calls to the engine: names the versions to build on, counts bytes, sorts out failures."""

    engine: Engine
    method: Method
    options: RunOptions
    pool: Pool
    task: Task
    names: Mapping[int, str]
    public: Samples | None = None
    versions: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    crossed: dict[str, Any] = field(
        default_factory=dict
    )  # by step: what the first client of its last call got and sent
    lenient: bool = False  # clients may be lost in an evaluation too

    def __post_init__(self) -> None:
        model = self.pool.shared()
        self._model: Mapping[str, Tensor] = model
        self._limit = 8 * model.nbytes + 64 * MEBIBYTE

    def train(
        self, step: str, round: int, ids: Iterable[int], payload: Mapping[str, Any], *keys: str
    ) -> Iterator[tuple[int, Reply]]:
        """Run a training step; yields accepted answers by ascending client id.

        Values under `keys` are to be combined, so they must have the names and shapes of the first client's.
        """
        self.calls += 1
        chosen = self._present(round, ids)
        call = self._call(step, round, chosen, payload, self.calls)
        answered, slowest = 0, 0.0
        patterns: dict[str, Any] = {}
        for client, answer in _ascending(chosen, self.engine.map(call)):
            sent = {**call.common, **call.own[client]}
            self._count(self.ledger.down, client, sent)
            if isinstance(answer, Reply):
                seconds = self._seconds(client, answer.samples)
                slowest = max(slowest, seconds)
                self._count(self.ledger.up, client, answer.payload)
                answer = self._inspect(client, answer, sent, seconds)
            if isinstance(answer, Reply) and (misfit := _misfit(answer.payload, keys, patterns)):
                answer = Failure("bad reply", misfit)
            if isinstance(answer, Failure):
                self.ledger.failures[client] = answer
                continue
            if not answered and client != POOLED:
                self.crossed[step] = crossing.describe(self.pool.template(client), sent, answer.payload)
            answered += 1
            self.versions[client] = self.calls
            self.ledger.participants.add(client)
            self.ledger.samples += answer.samples
            self.ledger.notes.update(answer.notes)
            self.ledger.logs.update({(client, name): value for name, value in answer.records.items()})
            yield client, answer
        deadline = self.options.deadline
        self.ledger.simulated += slowest if deadline is None else min(slowest, deadline)
        if POOLED not in chosen and answered < min(self.options.min_clients, len(self.engine.ids)):
            raise RunError(self._too_few(round, answered))

    def ask(
        self, step: str, round: int, ids: Iterable[int], payload: Mapping[str, Any]
    ) -> Iterator[tuple[int, Payload]]:
        """Run a reading step, as evaluation is; makes no version. A failure stops the run, unless it is lenient."""
        chosen = sorted(client for client in ids if not self.lenient or client not in self.ledger.failures)
        call = self._call(step, round, chosen, payload, None)
        for client, answer in _ascending(chosen, self.engine.map(call)):
            if isinstance(answer, Reply) and self.lenient and not wire.finite(answer.payload):
                answer = Failure("bad reply", f"sent numbers of {step} that are not finite")
            if isinstance(answer, Failure) and self.lenient:
                self.ledger.failures[client] = answer
                continue
            if isinstance(answer, Failure):
                raise RunError(f"Client {self.names[client]}: {answer.reason}\n{answer.detail}".rstrip())
            self._count(self.ledger.evaluation, client, {**call.common, **call.own[client]})
            self._count(self.ledger.evaluation, client, answer.payload)
            yield client, answer.payload

    def _call(self, step: str, round: int, ids: list[int], payload: Mapping[str, Any], version: int | None) -> Call:
        common = {key: value for key, value in payload.items() if not isinstance(value, Each)}
        each = {key: value for key, value in payload.items() if isinstance(value, Each)}
        own = {client: {key: value.of(client) for key, value in each.items()} for client in ids}
        for part in [common, *own.values()]:
            wire.check_types(part, f"{type(self.method).__name__}.{step}")
        base = {client: self.versions.get(client, 0) for client in ids}
        return Call(step, round, common, own, base, version)

    def _present(self, round: int, ids: Iterable[int]) -> list[int]:
        """Those of the chosen clients that have not failed in this round, nor are made to drop out."""
        chosen = [client for client in sorted(ids) if client not in self.ledger.failures]
        if not self.options.dropout:
            return chosen
        for client in chosen:
            if (
                client != POOLED
                and streams.rng(self.options.seed, "unavailable", client, round).random() < self.options.dropout
            ):
                self.ledger.failures[client] = Failure("dropped", "did not answer (simulated)")
        return [client for client in chosen if client not in self.ledger.failures]

    def _seconds(self, client: int, samples: int) -> float:
        """Simulated: a thousand samples a second, stragglers slower by the given factor."""
        slow = streams.rng(self.options.seed, "stragglers", client).random() < self.options.stragglers
        return samples / 1000 * (self.options.slowdown if slow else 1.0)

    def _inspect(self, client: int, reply: Reply, sent: Payload, seconds: float) -> Reply | Failure:
        deadline = self.options.deadline
        if deadline is not None and client != POOLED and seconds > deadline:
            return Failure("late", f"answered after {seconds:.3g} simulated seconds, the deadline is {deadline:g}")
        fault = wire.fault(reply.payload, sent, self._model, self._limit)
        return reply if fault is None else Failure("bad reply", fault)

    def _count(self, counter: dict[int, int], client: int, payload: Mapping[str, Any]) -> None:
        if client != POOLED:
            counter[client] = counter.get(client, 0) + wire.nbytes(payload)

    def _too_few(self, round: int, answered: int) -> str:
        first = next(iter(sorted(self.ledger.failures.items())), None)
        text = f"Round {round}: {answered} clients answered, min_clients is {self.options.min_clients}."
        if first is None:
            return text
        client, failure = first
        return f"{text} Client {self.names[client]}: {failure.reason}\n{failure.detail}".rstrip()


def _pattern(value: Any) -> Any:
    """The names and shapes of a value."""
    if isinstance(value, Tensors):
        return {name: tuple(tensor.shape) for name, tensor in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else None if value is None else type(value)


def _misfit(payload: Mapping[str, Any], keys: Iterable[str], patterns: dict[str, Any]) -> str | None:
    """Why these values can't be combined with those of the clients before, if so; the first makes the patterns."""
    found = {key: _pattern(payload.get(key)) for key in keys}
    for key, pattern in found.items():
        if pattern is None:
            return f"there is no {key!r} in it"
        if pattern != patterns.get(key, pattern):
            return f"{key} does not fit that of the other clients"
    patterns.update(found)
    return None


def _ascending(ids: list[int], answers: Iterable[tuple[int, Reply | Failure]]) -> Iterator[tuple[int, Reply | Failure]]:
    """Bring answers into the order of ids, holding back those that come early."""
    waiting: dict[int, Reply | Failure] = {}
    expected = iter(ids)
    turn = next(expected, None)
    for client, answer in answers:
        waiting[client] = answer
        while turn is not None and turn in waiting:
            yield turn, waiting.pop(turn)
            turn = next(expected, None)


class Cohort:
    """The clients of a round, as a method sees them."""

    def __init__(self, exchange: Exchange, ids: Iterable[int], round: int):
        self._exchange = exchange
        self.ids = sorted(ids)
        self.round = round
        self.rounds = exchange.options.rounds
        self.total = len(exchange.engine.ids)
        self.public = exchange.public
        self.answered: list[int] = []  # who answered the last call
        self.trained: list[int] = []  # those of them who could train

    def call(self, step: Callable[..., Any], alike: str | None = None, /, **payload: Any) -> Replies:
        """Run a step on every client of the cohort and wait for all answers.

        A client whose value under the name `alike` has not the names and shapes of the others' has failed.
        """
        replies = Replies(self._agg)
        keys = () if alike is None else (alike,)
        for client, reply in self._exchange.train(step.__name__, self.round, self.ids, payload, *keys):
            replies[client] = reply.payload
            replies.weights[client] = reply.weight
        self.answered = list(replies)
        self.trained = [client for client in replies if replies.weights[client] > 0]
        return replies

    def mean(self, step: Callable[..., Any], *keys: str, **payload: Any) -> Any:
        """Run a step and average a value of the answers, or several, as they arrive.

        Memory does not grow with the cohort.
        """
        means = self._means(step, keys, self._agg, payload)
        return means if len(keys) > 1 else means[0]

    def sum(self, step: Callable[..., Any], *keys: str, **payload: Any) -> Any:
        """The same, but the sums over the clients."""
        means = self._means(step, keys, "uniform", payload)
        sums = tuple(len(self.trained) * mean for mean in means)
        return sums if len(keys) > 1 else sums[0]

    def _means(
        self, step: Callable[..., Any], keys: tuple[str, ...], agg: Aggregation, payload: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        folds = {key: Average(agg) for key in keys}
        self.answered, self.trained = [], []
        for client, reply in self._exchange.train(step.__name__, self.round, self.ids, payload, *keys):
            for key, fold in folds.items():
                fold.add(reply.payload[key], reply.weight)
            self.answered.append(client)
            self.trained += [client] if reply.weight > 0 else []
        return tuple(fold.value() for fold in folds.values())

    def only(self, ids: Iterable[int]) -> Cohort:
        """Some of these clients."""
        return Cohort(self._exchange, set(ids) & set(self.ids), self.round)

    def pooled(self) -> Cohort:
        """The union of all clients' data as one client: for central training in a simulation."""
        return Cohort(self._exchange, [POOLED], self.round)

    def model(self, *tensors: Tensors | None) -> nn.Module:
        """A module on the server with the given tensors, else the run's initial values."""
        return self._exchange.pool.take(POOLED, *tensors)

    @property
    def seed(self) -> int:
        return self._exchange.options.seed

    def rng(self, stream: str) -> np.random.Generator:
        """A random stream of the server in this round."""
        return streams.rng(self._exchange.options.seed, "server", self.round, stream)

    def common_rng(self, stream: str, *key: int) -> np.random.Generator:
        """A random stream that the server and all clients have in common (`client.common_rng`)."""
        return streams.rng(self._exchange.options.seed, "common", stream, *key)

    def log(self, client: int = POOLED, /, **numbers: float) -> None:
        """Numbers for plots: of the server, or what it knows of a client."""
        self._exchange.ledger.logs.update({(client, name): float(value) for name, value in numbers.items()})

    @property
    def _agg(self) -> Aggregation:
        agg: Aggregation = getattr(self._exchange.method, "agg", "samples")
        return agg
