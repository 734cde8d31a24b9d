"""What it costs to reach an accuracy, by the bytes that were counted as sent, or as papers counted them.

A curve has a point for every round: (round, mean accuracy or None where nothing was judged, bytes that each client
has sent and received by then, the mean over clients).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from pfed.experiment import Experiment
    from pfed.result import Result

MIB, MB = 2**20, 10**6
FLOAT = 4  # bytes
WAYS = 2  # up and down

Counting = Literal["sent", "paper"]
Point = tuple[int, float | None, float]

# What DualFed's Table 8 leaves out of a method's bytes, of a model with one classifier. Its own private projector is
# not left out, so its cost there is higher than it is.
LEFT_OUT: dict[str, Literal["nothing", "classifier", "norm"]] = {
    "fedavg": "nothing",
    "fedprox": "nothing",
    "fedper": "classifier",
    "fedrep": "classifier",
    "fedbn": "norm",
    "spherefed": "classifier",
    "fedrod": "nothing",
    "fedetf": "classifier",
    "dualfed": "nothing",
}


def curve(result: Result) -> list[Point]:
    """Accuracy and bytes of a run, round by round."""
    from pfed.result import MAIN

    judged = {t: sum(v.values()) / len(v) for t, v in result.series.get(MAIN, [])}
    sent, points = 0.0, []
    for row in result.rounds:
        sent += (row["bytes_up"] + row["bytes_down"]) / len(result.clients)
        points.append((row["round"], judged.get(row["round"]), sent))
    return points


def reached(points: Sequence[Point], target: float) -> int | None:
    """The first judged round with this mean accuracy or more.

    >>> reached([(1, 0.4, 10.0), (2, None, 20.0), (3, 0.7, 30.0)], 0.5)
    3
    """
    return next((t for t, accuracy, _ in points if accuracy is not None and accuracy >= target), None)


def sent(points: Sequence[Point], round: int) -> float:
    """Bytes per client, up and down, until the end of a round."""
    return max((total for t, _, total in points if t <= round), default=0.0)


def table8(method: str, model: nn.Module) -> int:
    """How many numbers DualFed's Table 8 counts of a model in each direction of a round.

    All trained parameters and one batch counter for each BatchNorm layer, no running statistics, less what the
    method keeps: the classifier, or BatchNorm altogether. The model has one classifier, behind the projector.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from pfed import anatomy

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    total = sum(parameter.numel() for parameter in model.parameters()) + len(norms)
    if LEFT_OUT[method] == "classifier":
        return total - sum(p.numel() for p in model.get_submodule(anatomy.head_name(model)).parameters())
    if LEFT_OUT[method] == "norm":
        return total - sum(p.numel() for norm in norms for p in norm.parameters()) - len(norms)
    return total


def table3(method: str, classes: int, batch: int, model: nn.Module | None) -> int:
    """How many numbers FedCD's Table III counts in each direction of a round.

    Logits of a batch (FedCD), of every class (FedDistill), or all trained parameters; no labels, no counters.

    >>> by_rounds(200, table3("fedcd", classes=100, batch=64, model=None))
    10240000
    """
    if method == "fedcd":
        return batch * classes
    if method == "feddistill":
        return classes * classes
    assert model is not None
    return sum(parameter.numel() for parameter in model.parameters())


def by_rounds(rounds: int, count: int) -> int:
    """Bytes per client of rounds that send so many float32 numbers each way."""
    return rounds * WAYS * FLOAT * count


def counted(experiment: Experiment, figures: Collection[str]) -> dict[str, int]:
    """The numbers per direction and round by the papers' countings that these figures of a table ask for."""
    from pfed import models

    kinds = {figure.partition(":")[0] for figure in figures if figure.endswith(":paper")}
    method, found = experiment.config()["method"], {}
    federation = experiment.federation()
    classes, shape, name = len(federation.classes), federation.shape, experiment.options.model
    if "cost" in kinds and method in LEFT_OUT:
        own = name + models.PROJECTED if method == "dualfed" else name
        found["cost"] = table8(method, models.build(own, classes=classes, shape=shape))
    if "bytes" in kinds:
        model = None if "," in name else models.build(name, classes=classes, shape=shape)
        found["bytes"] = table3(method, classes, experiment.config()["hyper"].get("batch", 0), model)
    return found
