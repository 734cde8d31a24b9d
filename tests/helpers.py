"""What tests of methods share: tiny federations and models, and a run whose server, states and messages can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pfed import Experiment, Federation, Result, Samples, Tensors, anatomy, wire
from pfed.data.base import ClientData, union
from pfed.engines import engine
from pfed.engines.base import Call, Engine, Failure, Reply, States
from pfed.method import Method, step
from pfed.pool import Spec
from pfed.runner import Runner
from pfed.wire import Payload, State


def federation(*clients: tuple[Sequence[Any], Sequence[int]], classes: int = 2) -> Federation:
    """Clients with these inputs and labels, which are both their training and their test data."""
    parts = [Samples.of(torch.tensor(x), torch.tensor(y)) for x, y in clients]
    named = tuple(ClientData(f"client {i}", part, part) for i, part in enumerate(parts))
    return Federation(named, tuple("abcdefgh"[:classes]), union(parts))


def blobs(sizes: Iterable[int]) -> Federation:
    """Clients of these sizes with four random inputs and three random classes: the same at every call."""
    source = torch.Generator().manual_seed(1)
    draws = [(torch.randn(n, 4, generator=source), torch.randint(3, (n,), generator=source)) for n in sizes]
    return federation(*((x.tolist(), y.tolist()) for x, y in draws), classes=3)


def mlp() -> nn.Module:
    """4 inputs, 5 hidden units, 3 classes. Pass the function itself as a model, so that the run's seed draws it."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Residual(nn.Module):
    """A residual model with two BatchNorm layers, one of them without "bn" in its name, as in torchvision's ResNets."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.downsample = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.dropout(torch.relu(self.bn1(self.fc1(x)) + self.downsample(x))))
        return out


@dataclass(frozen=True)
class Message:
    """One training step of one client: what it got and what it sent."""

    step: str
    round: int
    client: int
    down: Payload
    up: Payload

    @property
    def names(self) -> set[str]:
        """The names of all tensors in both directions."""
        values = [*self.down.values(), *self.up.values()]
        return {name for value in values if isinstance(value, Tensors) for name in value}


@dataclass(frozen=True)
class Run:
    """A run and all that it left behind."""

    result: Result
    server: State
    states: dict[int, State]  # of every client that took part; that of the pooled data is -1
    personal: dict[int, Tensors]  # all tensors of the model by which a client is judged
    messages: list[Message]  # by round and client


@dataclass
class _Watched:
    """An engine that notes every answer to a training step. A client that fails is an error, with its traceback."""

    inner: Engine
    messages: list[Message] = field(default_factory=list)

    @property
    def ids(self) -> Sequence[int]:
        return self.inner.ids

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        for client, answer in self.inner.map(call):
            assert isinstance(answer, Reply), f"{answer.reason}\n{answer.detail}"
            if call.version is not None:
                down = {**call.common, **call.own[client]}
                self.messages.append(Message(call.step, call.round, client, down, answer.payload))
            yield client, answer

    def close(self) -> None:
        self.inner.close()


def run(method: str | Method, data: Federation, model: Any = mlp, **options: Any) -> Run:
    """Run an experiment, and look behind it."""
    experiment = Experiment(method, data, model, **options)
    watched: list[_Watched] = []

    def watch(name: str, runner: Runner, states: States) -> Engine:
        watched.append(_Watched(engine(name, runner, states)))
        return watched[0]

    with mock.patch("pfed.session.engine", watch):
        result = experiment.run()
    session = experiment.session
    assert session is not None
    states = {client: session.store.states.load(client, v) for client, v in session.exchange.versions.items()}
    personal = {client: anatomy.snapshot(experiment.model(client)) for client in session.clients}
    return Run(result, wire.copy_tree(session.server), wire.copy_tree(states), personal, watched[0].messages)


@dataclass(frozen=True)
class Probe(Method):
    """A method whose step is whatever a test wants."""

    def round(self, server: Any, cohort: Any) -> None:
        server["replies"] = dict(cohort.call(self.update, **self.download(server)))

    @step
    def update(self, client: Any, params: Any) -> Any:
        return BEHAVIOUR[0](client, params)

    def predictor(self, client: Any, params: Any) -> Any:
        return client.model(params)


BEHAVIOUR: list[Any] = [None]  # what a probe does with a client and what it got


def probe(data: Federation, behaviour: Any, engine: str = "serial", **options: Any) -> Experiment:
    """A run of one round in which every client does this."""
    BEHAVIOUR[0] = behaviour
    model = "mlp" if data.shape == (1, 8, 8) else mlp
    return Experiment(Probe(), data, model, **{"rounds": 1, "engine": engine, **options})


def replies(experiment: Experiment) -> dict[int, Any]:
    """What the clients of a probe answered in its last round."""
    assert experiment.session is not None
    found: dict[int, Any] = experiment.session.server["replies"]
    return found


TYPED_IN = """
@dataclass(frozen=True)
class Mine(Method):
    def round(self, server, cohort):
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client, params):
        model = client.model(params)
        client.fit(model)
        return {"params": client.share(model)}

    def predictor(self, client, params):
        return client.model(params)

def found(engine):
    return Experiment(Mine(), "digits", "cnn-small", clients=4, rounds=2, engine=engine).run().metrics
"""  # a method that is in no file which another process could import


def initial(model: Callable[[], nn.Module] = mlp, seed: int = 0, shape: tuple[int, ...] = (4,)) -> Tensors:
    """The tensors with which a run of this model and seed begins."""
    return anatomy.snapshot(Spec(model, classes=3, shape=shape, seed=seed).base())


def differences(a: object, b: object, path: str = "") -> Iterator[str]:
    """Where two trees of states differ: in a name, or in any bit of a value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from (f"{path}/{name}" for name in a.keys() ^ b.keys())
        for name in a.keys() & b.keys():
            yield from differences(a[name], b[name], f"{path}/{name}")
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or not torch.equal(a, b):
            yield path
    elif a != b:
        yield path


def same(a: object, b: object) -> bool:
    """Whether two trees of states hold the same bits."""
    return not any(True for _ in differences(a, b))


def assert_same(a: object, b: object) -> None:
    """That they do; if not, it says where."""
    if found := sorted(differences(a, b)):
        raise AssertionError(f"{len(found)} values differ: {', '.join(found[:5])}")
