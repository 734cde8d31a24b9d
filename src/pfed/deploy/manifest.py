"""What will leave a site in a run: names, shapes, types, bytes. The site finds out by itself, by trying.

The method runs a few rounds on one made-up sample of each class, with the models and the public set of the real run,
and again with sites that lack a class. What its steps then send is listed; in the run the site sends nothing else,
whatever the server asks for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfed import store, streams, wire
from pfed.config import RunOptions
from pfed.data.base import ClientData, Federation, Samples
from pfed.deploy import privacy
from pfed.deploy.remote import Facts, Remote
from pfed.engines.base import Call, Engine, Failure, Reply, States
from pfed.engines.serial import Serial
from pfed.errors import UserError
from pfed.method import Method
from pfed.runner import Runner
from pfed.tables import bytes_text, table
from pfed.tensors import Tensors

ROUNDS = 8  # that are tried, at most
AGAIN = 2  # of them with sites that lack a class
REPEATS = 3  # calls of a step that a round may have beyond the usual, when it is done again after a fault
SITES = 3  # that take part in each of them, about
EVALUATION = ("@accuracy", "@scores")  # of which only numbers leave
Manifest = dict[str, Any]


class Watched:
    """An engine that notes what the steps of another send."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.ids = engine.ids
        self.model: Mapping[str, Tensor] = {}
        self.calls: dict[str, dict[str, Any]] = {}
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self.records: set[str] = set()
        self.forms: dict[str, set[str]] = {}  # by step: names, shapes and types of a reply

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        for client, answer in self._engine.map(call):
            if isinstance(answer, Reply):
                self._note(call, client, answer)
            yield client, answer

    def _note(self, call: Call, client: int, reply: Reply) -> None:
        self.counts[call.step, call.round, client] += 1
        self.records |= set(reply.records)
        self.forms.setdefault(call.step, set()).add(json.dumps({k: _kind(v, {}) for k, v in reply.payload.items()}))
        listed = self.calls.setdefault(call.step, {})
        for key, value in reply.payload.items():
            if call.step not in EVALUATION or not isinstance(value, Tensor):
                listed[key] = _merged(listed.get(key), _kind(value, self.model))

    def close(self) -> None:
        self._engine.close()


def make(job: Mapping[str, Any], site: str, facts: Facts, public: Samples | None) -> Manifest:
    """The manifest of a run for a site, by trying it."""
    config, names = job["config"], job["sites"]
    if job["records"] and job["privacy"]:
        raise UserError("Differential privacy does not cover what methods log: it takes no records.")
    method, seen = _try(config, names, _made_up(names, facts, public), ROUNDS)
    _, again = _try(config, names, _made_up(names, facts, public, lacking=True), AGAIN)
    per_round = Counter[str]()
    for (step, _, _), count in seen.counts.items():
        per_round[step] = max(per_round[step], count)
    calls: dict[str, Any] = {
        step: {
            "per_round": per_round[step],
            "bytes": sum(map(_bytes, values.values())),
            "fixed": step not in EVALUATION and len(seen.forms[step] | again.forms.get(step, set())) == 1,
            "values": values,
        }
        for step, values in sorted(seen.calls.items())
    }
    apart = {"method", "model", "rounds", "hyper", "device", *store.WAYS}  # told beside, or of no effect
    return {
        "format": 1,
        "site": site,
        "method": config["method"],
        "hyper": method.hyperparameters(),
        "model": config["model"],
        "sites": list(names),
        "rounds": config["rounds"],
        "settings": {name: value for name, value in sorted(config.items()) if name not in apart},
        "repeats": REPEATS,
        "calls": calls,
        "bytes_per_round": sum(call["bytes"] * call["per_round"] for call in calls.values()),
        "sizes": ["test", "train"] if getattr(method, "agg", "samples") == "samples" else ["test"],
        "records": sorted(seen.records) if job["records"] else [],
        "privacy": privacy.promise(job["privacy"], calls, config["rounds"]),
    }


def _try(config: Mapping[str, Any], names: Sequence[str], data: Federation, most: int) -> tuple[Method, Watched]:
    """A run on made-up data, and what was seen of it."""
    rounds, share = min(config["rounds"], most), min(1.0, SITES / len(names))
    tried = {**config, "rounds": rounds, "eval_every": 1, "fraction": share, "min_clients": 1}
    experiment = Remote(tried, data)
    watched: list[Watched] = []

    def carrier(runner: Runner, states: States) -> Engine:
        watched.append(Watched(Serial(runner, states)))
        watched[0].model = runner.pool.shared()
        return watched[0]

    experiment.carrier = carrier
    experiment.run()
    return experiment.method, watched[0]


def digest(manifest: Manifest) -> str:
    """The same for the same promises; what is approved is this."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def fault(calls: Mapping[str, Any], step: str, payload: Mapping[str, Any]) -> str | None:
    """In which way a payload is not what the manifest lists, in a word; nothing if it is."""
    if step not in calls:
        return "step"
    if wire.nbytes(payload) > calls[step]["bytes"]:
        return "size"
    listed = calls[step]["values"]
    for key, value in payload.items():
        if key not in listed:
            return "name"
        wrong = _misfit(value, listed[key])
        if wrong is not None:
            return wrong
    lacks = calls[step].get("fixed") and {key: _names(_kind(value, {})) for key, value in payload.items()} != {
        key: _names(value) for key, value in listed.items()
    }
    return "lack" if lacks else None


def fits(manifest: Any, job: Mapping[str, Any], site: str) -> bool:
    """Whether what a site sent is a manifest of this run that can be used to check its replies."""
    try:
        text(manifest)
        same = {"site": site, "sites": job["sites"], "method": job["config"]["method"], "format": 1}
        asked = bool(job["records"]) or not manifest["records"]
        return (
            all(manifest[name] == value for name, value in same.items())
            and asked
            and ((manifest["privacy"] is None) == (job["privacy"] is None))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def within(manifest: Manifest, megabytes: float) -> bool:
    """Whether a site that approves all that is small may approve this: no texts, and not too many bytes in a round."""
    kinds = {value["kind"] for call in manifest["calls"].values() for value in call["values"].values()}
    return "text" not in kinds and manifest["bytes_per_round"] <= megabytes * 1e6


def load(path: Path) -> Manifest:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"There is no manifest in {str(path)!r}.") from None
    if not isinstance(found, dict) or found.get("format") != 1:
        raise UserError(f"{str(path)!r} is no manifest that this pfed knows.")
    return found


def text(manifest: Manifest) -> str:
    """For the person who approves it."""
    rows, numbers = [], []
    for step, call in manifest["calls"].items():
        for key, value in call["values"].items():
            if value["kind"] == "number":
                numbers.append(key)
                continue
            forms = value["names"] if value["kind"] == "tensors" else {"": value.get("form", [value["kind"]])}
            for name, (kind, *shape) in forms.items():
                size = bytes_text(_bytes({"kind": "tensor", "form": [kind, *shape]})) if "form" in value or name else ""
                rows.append([step, key, name, kind, " × ".join(map(str, shape)), size])
    often = ", ".join(f"{step} {call['per_round']}" for step, call in manifest["calls"].items())
    lines = [
        f"{manifest['method']} at {manifest['site']}, model {manifest['model']}, {manifest['rounds']} rounds",
        table(["step", "value", "name", "type", "shape", "size"], rows, left=5),
        f"at most {bytes_text(manifest['bytes_per_round'])} in a round",
        f"calls in a round: {often}; up to {manifest['repeats']} more of each if it is done again after a fault",
        f"numbers: {', '.join(dict.fromkeys(numbers))}",
        f"how many samples: {', '.join(manifest['sizes'])}",
        f"records: {', '.join(manifest['records']) or 'none'}",
        f"settings: {_settings({**manifest['hyper'], **manifest['settings']})}",
    ]
    if manifest["privacy"]:
        lines.append(privacy.text(manifest["privacy"]))
    return "\n".join(lines)


def _settings(values: Mapping[str, Any]) -> str:
    """Those that say how a site trains; the file has all."""
    local = {f"local.{name}": value for name, value in values["local"].items()}
    usual = asdict(RunOptions())
    usual |= {f"local.{name}": value for name, value in usual.pop("local").items()}
    told = {**values, **local}
    del told["local"]
    chosen = {name: value for name, value in told.items() if name == "seed" or value != usual.get(name)}
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _made_up(names: Sequence[str], facts: Facts, public: Samples | None, lacking: bool = False) -> Federation:
    """Sites with noise for data: one sample of each class, or, at every second site, of each but the last."""
    noise = streams.rng(0, "manifest").random((facts.classes, *facts.shape))
    x = torch.from_numpy(noise * 255).to(torch.uint8) if facts.pixels else torch.from_numpy(noise).float()
    samples = Samples.of(x, torch.arange(facts.classes))
    fewer = samples.part(torch.arange(max(1, facts.classes - 1))) if lacking else samples
    owned = [samples if i % 2 else fewer for i in range(len(names))]
    clients = tuple(ClientData(name, own, own) for name, own in zip(names, owned, strict=True))
    return Federation(clients, tuple(str(i) for i in range(facts.classes)), samples, public)


def _kind(value: Any, model: Mapping[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensors):
        packed = any(name in model and t.dim() == 1 and model[name].dim() != 1 for name, t in value.items())
        whole = {name: model[name] if packed and name in model else tensor for name, tensor in value.items()}
        names = {name: [_dtype(tensor), *tensor.shape] for name, tensor in whole.items()}
        return {"kind": "tensors", "packed": packed, "names": names}
    if isinstance(value, Tensor):
        return {"kind": "tensor", "form": [_dtype(value), *value.shape]}
    kinds = {str: "text", type(None): "nothing", bool: "number", int: "number", float: "number"}
    return {"kind": kinds.get(type(value), "thing")}


def _merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """One entry for what several replies sent under a name."""
    if old is None or old["kind"] == "nothing":
        return new
    if new["kind"] != "tensors" or old["kind"] != "tensors":
        return old
    return {**new, "packed": old["packed"] or new["packed"], "names": {**old["names"], **new["names"]}}


def _misfit(value: Any, listed: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if isinstance(value, Tensors) and listed["kind"] == "tensors":
        for name, tensor in value.items():
            if name not in listed["names"]:
                return "name"
            if not _fits(tensor, listed["names"][name], listed["packed"]):
                return "shape"
        return None
    if isinstance(value, Tensor) and listed["kind"] == "tensor":
        return None if _fits(value, listed["form"], packed=False) else "shape"
    return None if _kind(value, {})["kind"] == listed["kind"] else "kind"


def _fits(tensor: Tensor, form: Sequence[Any], packed: bool) -> bool:
    dtype, *shape = form
    part = packed and tensor.dim() == 1 and tensor.numel() <= math.prod(shape)
    return _dtype(tensor) == dtype and (list(tensor.shape) == shape or part)


def _bytes(value: Mapping[str, Any]) -> int:
    forms = value["names"].values() if value["kind"] == "tensors" else [value["form"]] if "form" in value else []
    return sum(getattr(torch, dtype).itemsize * math.prod(shape) for dtype, *shape in forms)


def _names(value: Mapping[str, Any]) -> set[str]:
    return set(value["names"]) if value["kind"] == "tensors" else {value["kind"]}


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
