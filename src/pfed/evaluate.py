"""Every judgement of a run, named by which model was judged on which data.

`personal/local-test` is a client's own model on its own test data; `ensemble/new-test` all models together on the
whole test set, as for a sample whose owner is unknown; `ensemble/external` the same on a domain that no client has.
With `representation`, `separation/NAME` says how far apart the classes lie in a client's features of its own test data,
and `cka/NAME` how alike the clients' features of common samples are; both right after local training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pfed import anatomy, metrics, streams
from pfed.client import Client
from pfed.cohort import Exchange
from pfed.config import RunOptions
from pfed.data.base import Federation, Samples, union
from pfed.embedding import Features, collect
from pfed.engines.base import POOLED
from pfed.forward import View
from pfed.method import Method
from pfed.shortcuts import SLICE
from pfed.tensors import Mean, Tensors
from pfed.wire import Payload, State

PROBE, PROBE_TOTAL = 200, 2000  # test samples on which features are compared: of each client, and of all at most


def assess(
    client: Client, models: nn.Module | Mapping[str, nn.Module], names: tuple[str, ...] | None = None
) -> Payload:
    """A client's models on its own test and validation data: these scores, or all that the task has."""
    main, names = client.task.main, names or client.task.names
    named = {"personal": models} if isinstance(models, nn.Module) else models
    out: Payload = {}
    splits = {"local-test": client.data.test, "validation": client.data.validation}
    for data, samples in splits.items():
        if samples is None or len(samples) == 0:
            continue
        for model, predictions in _predictions(client, named, samples).items():
            for name, value in client.task.scores(predictions, samples, names, client.data.classes).items():
                if value is not None:
                    out[f"{model}/{data}" if name == main else f"{model}/{data}/{name}"] = value
            out[f"correct:{model}/{data}"] = client.task.correct(predictions, samples)
    return out


def assess_fitted(client: Client) -> None:
    """Remember the scores of what a step trained, in case that no later one replaces it before the next evaluation.

    Where all take part in every round that is known, and rounds without an evaluation need no scores.
    """
    options, t = client.options, client.round
    last = t >= options.rounds
    if client.fitted is not None and (last or options.judged(t) or not options.all_take_part):
        names = None if last or not options.all_take_part else (client.task.main,)
        client.state["post_local"] = {"round": t, "scores": assess(client, client.fitted, names)}


def _fitted_scores(client: Client) -> Payload | None:
    """What `assess_fitted` remembers of the client's last training; None if that is not known."""
    options, stored = client.options, client.state.get("post_local")
    if options.eval_point != "post_local" or stored is None:
        return None
    newest = stored["round"] >= min(client.round, options.rounds)
    return dict(stored["scores"]) if newest or not options.all_take_part else None


def _predictions(client: Client, named: Mapping[str, nn.Module], samples: Samples) -> dict[str, Tensor]:
    """What each model says of the samples; no model is asked twice, and no body run twice for several heads."""
    bodies = {id(module.model): module.model for module in named.values() if isinstance(module, View)}
    features = {key: _features(body, samples) for key, body in bodies.items()}
    seen: dict[int, Tensor] = {}
    for module in named.values():
        body = module.model if isinstance(module, View) else module
        if id(body) in features:
            head = module.head if isinstance(module, View) else module.get_submodule(anatomy.head_name(module))
            seen[id(module)] = client.task.predict(head, features[id(body)])
        elif id(module) not in seen:
            seen[id(module)] = client.task.predict(module, samples)
    return {name: seen[id(module)] for name, module in named.items()}


def _features(model: nn.Module, samples: Samples) -> Samples:
    """The samples as the model's head sees them."""
    found = _collect(lambda model, x: {"features": anatomy.features(model, x)}, model, samples)
    return Samples.of(found["features"], samples.labels)


def _judged(client: Client, method: Method, download: Payload) -> dict[str, nn.Module]:
    models = method.predictor(client, **download)
    return {"personal": models} if isinstance(models, nn.Module) else dict(models)


def _evaluate(client: Client, method: Method, download: Payload, final: bool) -> Payload:
    """All scores at the end, the main one before it."""
    stored = _fitted_scores(client)
    names = None if final else (client.task.main,)
    return stored if stored is not None else assess(client, _judged(client, method, download), names)


def _predict(client: Client, method: Method, download: Payload, data: str) -> Payload:
    """What the personal model says of common samples, and of external ones what every model says."""
    judged = _judged(client, method, download)
    named = judged if data == "external" else dict([next(iter(judged.items()))])
    return {"predictions": Tensors(_predictions(client, named, client.beside[data]))}


def _weights(client: Client, method: Method, download: Payload) -> Payload:
    model = next(iter(_judged(client, method, download).values()))
    names = {n for n, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()}
    return {"weights": anatomy.snapshot(model, anatomy.of(names))}


def probe(federation: Federation, seed: int) -> tuple[Samples, list[int]]:
    """Some test samples of every client, the same in all rounds: on them the clients' features are compared.

    They lie client after client; the list says how many of each.
    """
    each = min(PROBE, max(1, PROBE_TOTAL // len(federation.clients)))
    chosen = []
    for i, client in enumerate(federation.clients):
        order = streams.rng(seed, "probe", i).permutation(len(client.test))
        chosen.append(client.test.part(torch.from_numpy(order[:each]).sort().values))
    return union(chosen), [len(part) for part in chosen]


def represent(client: Client, method: Method, models: nn.Module | Mapping[str, nn.Module]) -> Payload:
    """A client's features of the probe, and by name how far apart the classes lie in those of its own test data."""
    model = models if isinstance(models, nn.Module) else next(iter(models.values()))
    out: Payload = {"features": _collect(method.representations, model, client.beside["probe"])}
    test = client.data.test
    for name, tensor in _collect(method.representations, model, test).items():
        separation = metrics.class_separation(tensor, test.labels)
        if separation is not None and math.isfinite(separation):
            out[f"separation/{name}"] = separation
    return out


def _collect(read: Callable[[nn.Module, Tensor], Mapping[str, Tensor]], model: nn.Module, samples: Samples) -> Tensors:
    """What `read(model, x)` gives for all samples: eval mode, no gradient. Nothing for no samples."""
    model.eval()
    parts: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for i in range(0, len(samples), SLICE):
            for name, tensor in read(model, samples.take(slice(i, i + SLICE))[0]).items():
                parts.setdefault(name, []).append(tensor)
    return Tensors({name: torch.cat(tensors) for name, tensors in parts.items()})


def _represent(client: Client, method: Method, download: Payload) -> Payload:
    """As the client's last training left it; for one that never trained, by the model it would be judged with."""
    stored = client.state.get("representation")
    return dict(stored) if stored else represent(client, method, _judged(client, method, download))


# What an engine runs beside a method's steps: it reads a client and changes nothing.
READERS: dict[str, Callable[[Client, Method, Payload], Payload]] = {
    "@accuracy": lambda client, method, download: _evaluate(client, method, download, final=False),
    "@scores": lambda client, method, download: _evaluate(client, method, download, final=True),
    "@new-test": lambda client, method, download: _predict(client, method, download, "new-test"),
    "@external": lambda client, method, download: _predict(client, method, download, "external"),
    "@weights": _weights,
    "@representation": _represent,
}


@dataclass
class Evaluation:
    """What one evaluation found."""

    clients: dict[tuple[int, str], float] = field(default_factory=dict)  # by client and metric
    overall: dict[str, float] = field(default_factory=dict)
    correct: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    features: Features | None = None  # at the end, with `representation`


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
        if self.options.representation:
            features = self._representation(round, ids, download, out)
            if final:
                samples, sizes = probe(self.federation, self.options.seed)
                out.features = collect(features, sizes, samples.labels)
        return out

    def _representation(
        self, round: int, ids: list[int], download: Mapping[str, Any], out: Evaluation
    ) -> dict[str, dict[int, Tensor]]:
        """Class separation by client; linear CKA as the mean over all pairs of clients. Returns the features."""
        features: dict[str, dict[int, Tensor]] = {}
        for client, reply in self.exchange.ask("@representation", round, ids, download):
            for name, tensor in reply.pop("features").items():  # type: ignore[union-attr]
                features.setdefault(name, {})[client] = tensor
            out.clients.update({(client, name): value for name, value in reply.items() if isinstance(value, float)})
        for name, tensors in features.items():
            pairs = [metrics.linear_cka(x, y) for x, y in itertools.combinations(tensors.values(), 2)]
            known = [value for value in pairs if value is not None and math.isfinite(value)]
            if known:
                out.overall[f"cka/{name}"] = sum(known) / len(known)
        return features

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
            assert isinstance(predictions, Tensors)
            ensemble.add(next(iter(predictions.values())))
            if alone is not None:
                for name, own in predictions.items():
                    alone.clients[client, f"{name}/external"] = _accuracy(own.argmax(1), samples)
        return _accuracy(ensemble.predict(), samples)


def _accuracy(predicted: Tensor, samples: Samples) -> float:
    return float((predicted == samples.labels).to(torch.float64).mean())
