"""Every judgement of a run, named by which model was judged on which data.

`personal/local-test` is a client's own model on its own test data; `ensemble/new-test` all models together on the
whole test set, as for a sample whose owner is unknown; `ensemble/external` the same on a domain that no client has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pfed import anatomy, metrics
from pfed.client import Client
from pfed.cohort import Exchange
from pfed.config import RunOptions
from pfed.data.base import Federation, Samples
from pfed.engines.base import POOLED
from pfed.method import Method
from pfed.tensors import Mean
from pfed.wire import Payload, State

FULL = ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "ece")


def assess(client: Client, models: nn.Module | Mapping[str, nn.Module], names: tuple[str, ...] = FULL) -> Payload:
    """A client's models on its own test and validation data."""
    named = {"personal": models} if isinstance(models, nn.Module) else models
    out: Payload = {}
    splits = {"local-test": client.data.test, "validation": client.data.validation}
    for data, samples in splits.items():
        if samples is None or len(samples) == 0:
            continue
        seen: dict[int, Tensor] = {}
        for model, module in named.items():
            if id(module) not in seen:
                seen[id(module)] = client.task.predict(module, samples)
            predictions = seen[id(module)]
            for name, value in client.task.scores(predictions, samples, names).items():
                if value is not None:
                    out[f"{model}/{data}" if name == "accuracy" else f"{model}/{data}/{name}"] = value
            out[f"correct:{model}/{data}"] = client.task.correct(predictions, samples)
    return out


def _judged(client: Client, method: Method, download: Payload) -> dict[str, nn.Module]:
    models = method.predictor(client, **download)
    return {"personal": models} if isinstance(models, nn.Module) else dict(models)


def _evaluate(client: Client, method: Method, download: Payload, names: tuple[str, ...]) -> Payload:
    stored = client.state.get("post_local") if client.options.eval_point == "post_local" else None
    return dict(stored) if stored else assess(client, _judged(client, method, download), names)


def _predict(client: Client, method: Method, download: Payload, data: str) -> Payload:
    model = next(iter(_judged(client, method, download).values()))
    return {"predictions": client.task.predict(model, client.beside[data])}


def _weights(client: Client, method: Method, download: Payload) -> Payload:
    model = next(iter(_judged(client, method, download).values()))
    names = {n for n, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()}
    return {"weights": anatomy.snapshot(model, anatomy.of(names))}


# What an engine runs beside a method's steps: it reads a client and changes nothing.
READERS: dict[str, Callable[[Client, Method, Payload], Payload]] = {
    "@accuracy": lambda client, method, download: _evaluate(client, method, download, ("accuracy",)),
    "@scores": lambda client, method, download: _evaluate(client, method, download, FULL),
    "@new-test": lambda client, method, download: _predict(client, method, download, "new-test"),
    "@external": lambda client, method, download: _predict(client, method, download, "external"),
    "@weights": _weights,
}


@dataclass
class Evaluation:
    """What one evaluation found."""

    clients: dict[tuple[int, str], float] = field(default_factory=dict)  # by client and metric
    overall: dict[str, float] = field(default_factory=dict)
    correct: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class Evaluator:
    """Asks the clients how good their models are."""

    def __init__(self, exchange: Exchange, federation: Federation, options: RunOptions, method: Method):
        self.exchange, self.federation, self.options, self.method = exchange, federation, options, method

    def __call__(self, server: State, round: int, final: bool) -> Evaluation:
        out = Evaluation()
        download = self.method.download(server)
        ids = list(self.exchange.engine.ids)
        for client, reply in self.exchange.ask("@scores" if final else "@accuracy", round, ids, download):
            for name, value in reply.items():
                if isinstance(value, Tensor):
                    out.correct[client, name.removeprefix("correct:")] = value
                elif isinstance(value, float):
                    out.clients[client, name] = value
        every = self.options.new_test_every
        if self.options.new_test != "none" and (final or (every and round % every == 0)):
            out.overall["ensemble/new-test"] = self._new_test(round, ids, download)
        if self.federation.external is not None and final:
            out.overall["ensemble/external"] = self._ensemble(
                "@external", self.federation.external, "mean_prob", round, ids, download, out
            )
        return out

    def _new_test(self, round: int, ids: list[int], download: Mapping[str, Any]) -> float:
        rule, samples = self.options.new_test, self.federation.test
        if rule != "weight_average":
            return self._ensemble("@new-test", samples, rule, round, ids, download)
        fold = Mean()
        for _, reply in self.exchange.ask("@weights", round, ids, download):
            fold.add(reply["weights"], 1.0)  # type: ignore[arg-type]
        model = self.exchange.pool.take(POOLED, fold.value())  # type: ignore[arg-type]
        predictions = self.exchange.task.predict(model, samples)
        self.exchange.pool.give_back()
        return _accuracy(predictions.argmax(1), samples)

    def _ensemble(
        self,
        step: str,
        samples: Samples,
        rule: str,
        round: int,
        ids: list[int],
        download: Mapping[str, Any],
        alone: Evaluation | None = None,
    ) -> float:
        ensemble = metrics.Ensemble(rule)
        for client, reply in self.exchange.ask(step, round, ids, download):
            predictions = reply["predictions"]
            assert isinstance(predictions, Tensor)
            ensemble.add(predictions)
            if alone is not None:
                alone.clients[client, "personal/external"] = _accuracy(predictions.argmax(1), samples)
        return _accuracy(ensemble.predict(), samples)


def _accuracy(predicted: Tensor, samples: Samples) -> float:
    return float((predicted == samples.labels).to(torch.float64).mean())
