"""Differential privacy of what a site shares: its update is clipped and noise is added before it leaves.

The unit is the site: whatever its data are, what it sends in one call has a length of at most `clip` before Gaussian
noise of standard deviation `noise` times `clip` is added to every number. Two data sets can differ by twice the clip,
so the accountant is told half of `noise`. What the updates of all runs of a site cost adds up. Metrics and numbers of
samples that a manifest lists are not protected.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfed import wire
from pfed.deploy import Refused
from pfed.errors import UserError
from pfed.result import Result
from pfed.tensors import Tensors
from pfed.wire import Payload

Rule = Mapping[str, float]  # clip, noise, delta


def check(rule: Rule | None) -> None:
    """Refuse values that protect nothing."""
    if rule is None:
        return
    for name in ("clip", "noise"):
        if not (math.isfinite(rule[name]) and rule[name] > 0):
            raise UserError(f"--dp-{name} must be > 0. Got {rule[name]:g}.")
    if not 0 < rule["delta"] < 1:
        raise UserError(f"--dp-delta must be > 0 and < 1. Got {rule['delta']:g}.")
    epsilon({rule["noise"]: 1}, rule["delta"])


def epsilon(counts: Mapping[float, int], delta: float) -> float:
    """The privacy loss of updates of a site, so many of each noise, by opacus's accountant."""
    history = [(noise / 2, 1.0, count) for noise, count in sorted(counts.items()) if count]
    if not history:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of imports, and of an order at the end of the accountant's list
            from opacus.accountants import RDPAccountant

            accountant = RDPAccountant()
            accountant.history = history
            return float(accountant.get_epsilon(delta))
    except ImportError:
        raise UserError("Differential privacy needs opacus, which is not installed. Install pfed[deploy].") from None


def promise(rule: Rule | None, calls: Mapping[str, Any], rounds: int) -> dict[str, Any] | None:
    """For a manifest: the rule, how many updates may leave, and what they cost together."""
    if rule is None:
        return None
    releases = 0
    for step, call in calls.items():
        if step.startswith("@") or not call["values"]:
            continue
        for key, value in call["values"].items():
            if not _coverable(value):
                raise UserError(f"Differential privacy covers tensors of floats; step {step} sends {key!r} as well.")
        if not call["fixed"]:
            raise UserError(f"Differential privacy covers numbers; what step {step} sends depends on the data by name.")
        releases += call["per_round"] * (rounds + 2)  # a start and a finish may call it too
    spent = epsilon({rule["noise"]: releases}, rule["delta"])
    return {**rule, "releases": releases, "epsilon": round(spent, 4)}


def _coverable(value: Mapping[str, Any]) -> bool:
    forms = value["names"].values() if value["kind"] == "tensors" else [value.get("form", [value["kind"]])]
    return all("float" in form[0] or form[0] == "nothing" for form in forms)


def cost(result: Result, delta: float) -> str:
    """What the sites have told of the cost of their updates, for who runs the server."""
    told = sorted((client, value) for _, client, name, value in result.logs if name == "epsilon")
    names = [str(row["name"]) for row in result.clients]
    each = ", ".join(f"{names[client]} {value:.4g}" for client, value in dict(told).items())  # it only grows
    return f"epsilon at delta {delta:g}, over all runs of a site: {each or 'no update has left'}"


def text(promised: Mapping[str, Any]) -> str:
    spent = f"epsilon {promised['epsilon']:g} at delta {promised['delta']:g} after {promised['releases']} updates"
    return f"updates are clipped to {promised['clip']:g}, noise {promised['noise']:g}: {spent}"


def protect(
    rule: Rule, payload: Payload, sent: Payload, secret: bytes, call: Sequence[str | int]
) -> tuple[Payload, str]:
    """The payload as it may leave, and which release it is.

    What came with the same names is public, so only the difference to it is clipped. The noise is drawn from a secret
    of the site and all that goes in, with the rule and the call (its run, step, round and versions): the same call
    gives the same answer, another one other noise.
    """
    moved = {key: _against(value, sent.get(key)) for key, value in payload.items()}
    floats = [tensor for tensor in wire.tensors(moved) if tensor.is_floating_point()]
    whole = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in floats))
    if not math.isfinite(whole):  # it could not be clipped
        raise Refused("finite")
    scale = min(1.0, rule["clip"] / whole) if whole else 1.0
    about = json.dumps([[rule[name] for name in ("clip", "noise", "delta")], *call])
    given = wire.encode({"about": about, "payload": payload, "sent": sent})
    mark = hmac.new(secret, given, hashlib.sha256).hexdigest()
    source = np.random.Generator(np.random.Philox(np.random.SeedSequence(int(mark, 16))))

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise UserError(f"Differential privacy covers floats. Got a tensor of {tensor.dtype}.")
        noise = torch.from_numpy(source.normal(0.0, rule["noise"] * rule["clip"], tensor.shape))
        return (tensor.double() * scale + noise).to(tensor.dtype)

    hidden: dict[str, Any] = wire.map_tensors(moved, noisy)
    return {key: _back(value, sent.get(key)) for key, value in hidden.items()}, mark


def _against(value: Any, known: Any) -> Any:
    """What is new in a value."""
    if isinstance(value, Tensors) and isinstance(known, Tensors):
        return Tensors({name: t - known[name] if _same(t, known.get(name)) else t for name, t in value.items()})
    return value - known if isinstance(value, Tensor) and _same(value, known) else value


def _back(value: Any, known: Any) -> Any:
    if isinstance(value, Tensors) and isinstance(known, Tensors):
        return Tensors({name: t + known[name] if _same(t, known.get(name)) else t for name, t in value.items()})
    return value + known if isinstance(value, Tensor) and _same(value, known) else value


def _same(tensor: Tensor, known: Any) -> bool:
    return isinstance(known, Tensor) and known.shape == tensor.shape and known.dtype == tensor.dtype
