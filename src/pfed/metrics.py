"""Numbers that judge models: scores of one client, summaries over clients, rounds and seeds, and representations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pfed.errors import UserError, unknown

SCORES = ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "ece")
BINS = 15  # of confidence
ENSEMBLES = ("mean_prob", "mean_logprob", "majority")
SELECTIONS = ("last", "mean_last_10", "validation", "best_mean_round", "best_per_client")

Series = Sequence[tuple[int, Mapping[int, float]]]  # (round, {client: value}), rounds ascending


def scores(probs: Tensor, y: Tensor, names: Sequence[str] = ("accuracy",)) -> dict[str, float | None]:
    """Scores of class probabilities (n, classes) against labels (n,); None where a score is undefined.

    A client's test data often lack some classes, so: balanced accuracy is the mean recall over the classes present;
    macro-F1 the mean over classes that occur as label or prediction; AUROC the mean, over the classes present, of one
    class against the rest, undefined with a single class; ECE has 15 bins of confidence. A model that has diverged
    (rows that are not finite) counts as knowing nothing: all classes equally likely.

    >>> scores(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    {'accuracy': 0.5}
    """
    for name in names:
        if name not in SCORES:
            raise unknown("score", name, SCORES)
    if len(y) == 0:
        return dict.fromkeys(names)
    finite = probs.isfinite().all(1, keepdim=True)
    probs = torch.where(finite, probs, 1 / probs.shape[1]).float().clamp(0, 1)
    counted = _counted(probs, y)
    out: dict[str, float | None] = {}
    for name in names:
        out[name] = counted[name] if name in counted else _auroc(probs, y) if name == "auroc" else _ece(probs, y)
    return out


def correct(scores: Tensor, y: Tensor) -> Tensor:
    """For each sample, whether the class with the highest score (n, classes) is its own. (n,)"""
    return scores.argmax(1) == y


def entropy(logits: Tensor) -> Tensor:
    """Of the predicted class, in nats, mean over samples: ln C for a guess among C."""
    log_p = logits.detach().log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


def _counted(probs: Tensor, y: Tensor) -> dict[str, float]:
    """The scores that follow from counts per class, in float64."""
    chosen = probs.argmax(1)
    said, hit, support = (
        labels.bincount(minlength=probs.shape[1]).double() for labels in (chosen, y[chosen == y], y)
    )  # (classes,) each
    present, occurs = support > 0, said + support > 0
    return {
        "accuracy": float(hit.sum() / support.sum()),
        "balanced-accuracy": float((hit[present] / support[present]).mean()),
        "macro-f1": float((2 * hit / (said + support))[occurs].mean()),
    }


def _auroc(probs: Tensor, y: Tensor) -> float | None:
    present = y.bincount().nonzero().flatten().tolist()
    if len(present) < 2:
        return None
    # How often a sample of a class has a higher score than another one, equal ones half: by the sum of their ranks.
    scores = probs.T[present].contiguous()  # (present, n)
    ordered = scores.sort(1).values
    below, upto = (torch.searchsorted(ordered, scores, right=right) for right in (False, True))
    rank = (below + upto + 1).double() / 2  # from 1, the mean of those that are equal
    inside = torch.stack([y == c for c in present])
    size = inside.sum(1).double()
    won = (rank * inside).sum(1) - size * (size + 1) / 2
    return float((won / (size * (len(y) - size))).mean())


def _ece(probs: Tensor, y: Tensor) -> float:
    """The mean over samples of |accuracy - confidence| of their bin; a bin holds its lower end, 1 is one of its own."""
    confidence, chosen = probs.max(1)
    edges = torch.linspace(0, 1, BINS + 1)
    place = torch.bucketize(confidence, edges, right=True) - 1
    gap = (chosen == y).double() - confidence.double()
    return float(torch.zeros(BINS + 1, dtype=torch.float64).index_add_(0, place, gap).abs().sum() / len(y))


def summarise(values: Mapping[int, float], sizes: Mapping[int, int]) -> dict[str, float]:
    """One value per client in a few numbers. `mean` counts clients, `weighted` counts their test samples (`sizes`).

    The standard deviation is that of the population of clients. A decile is ceil(K / 10) of the K clients.

    >>> summarise({0: 0.5, 1: 1.0}, {0: 30, 1: 10})["weighted"]
    0.625
    """
    if not values:
        raise ValueError("there are no clients to summarise")
    ids = sorted(values)
    v = np.array([values[k] for k in ids], dtype=np.float64)
    n = np.array([sizes[k] for k in ids], dtype=np.float64)
    ranked, decile = np.sort(v), -(-len(v) // 10)
    return {
        "mean": float(v.mean()),
        "weighted": float((n * v).sum() / n.sum()) if n.sum() > 0 else math.nan,
        "std": float(v.std()),
        "min": float(ranked[0]),
        "max": float(ranked[-1]),
        "worst-decile": float(ranked[:decile].mean()),
        "best-decile": float(ranked[-decile:].mean()),
    }


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over seeds; of one seed there is no deviation: nan."""
    v = np.asarray(values, dtype=np.float64)
    return float(v.mean()), float(v.std(ddof=1)) if len(v) > 1 else math.nan


class Ensemble:
    """What many models say together of samples whose owner is unknown, folded one model at a time.

    `mean_prob` averages probabilities, `mean_logprob` their logarithms, `majority` counts each model's first choice
    (a tie goes to the class with the higher mean probability).
    """

    def __init__(self, rule: str = "mean_prob"):
        if rule not in ENSEMBLES:
            raise unknown("ensemble rule", rule, ENSEMBLES)
        self.rule = rule
        self.models = 0
        self._sum: Tensor | float = 0.0
        self._votes: Tensor | float = 0.0

    def add(self, probs: Tensor) -> None:
        """One more model's class probabilities. (n, classes)"""
        probs = probs.double()
        if self.rule == "mean_logprob":
            # A probability that vanished in float32 must not veto a class for all other models.
            probs = probs.clamp(min=torch.finfo(torch.float32).tiny).log()
        if self.rule == "majority":
            self._votes = self._votes + torch.nn.functional.one_hot(probs.argmax(1), probs.shape[1])
        self._sum = self._sum + probs
        self.models += 1

    def predict(self) -> Tensor:
        """The class of each sample. (n,)"""
        if not isinstance(self._sum, Tensor):
            raise ValueError("an ensemble of no models predicts nothing")
        # Summed probabilities over models + 1 stay below 1, so they decide between equal votes only.
        return (self._votes + self._sum / (self.models + 1)).argmax(1)


def select(series: Series, rule: str, validation: Series | None = None, k: int = 10) -> dict[int, float]:
    """Each client's value by a rule of which round is reported.

    `last`; `mean_last_10`, the mean of the last k rounds; `validation`, the round with the best mean on `validation`;
    `best_mean_round` and `best_per_client`, which choose on the very data they report, and flatter. The first of equal
    rounds is taken.
    """
    if rule not in SELECTIONS:
        raise unknown("selection", rule, SELECTIONS)
    if not series:
        raise ValueError("there are no rounds to select from")
    if rule == "last":
        return dict(series[-1][1])
    if rule == "best_mean_round":
        return dict(max(series, key=_mean)[1])
    if rule == "validation":
        if not validation:
            raise UserError("Selection by validation needs validation data; set validation to 0.1, for example.")
        tested = dict(series)
        return dict(tested[max((entry for entry in validation if entry[0] in tested), key=_mean)[0]])
    chosen = series if rule == "best_per_client" else series[-k:]
    clients = sorted({client for _, values in chosen for client in values})
    columns = {client: [values[client] for _, values in chosen if client in values] for client in clients}
    return {client: max(v) if rule == "best_per_client" else sum(v) / len(v) for client, v in columns.items()}


def _mean(entry: tuple[int, Mapping[int, float]]) -> float:
    values = entry[1].values()
    return sum(values) / len(values) if values else -math.inf


def cost_to_target(
    series: Sequence[tuple[int, float]], target: float, bytes_per_round: float
) -> tuple[int, float] | None:
    """The first round whose mean accuracy reaches the target, and the bytes sent until then; None: never reached."""
    for round, accuracy in series:
        if accuracy >= target:
            return round, round * bytes_per_round
    return None


def class_separation(features: Tensor, y: Tensor) -> float | None:
    """How far apart classes lie: R² = 1 - d_within / d_total over cosine distances (Kornblith et al., 2021).

    With unit vectors and class means mu_k the sums over all pairs collapse to d_within = 1 - mean_k |mu_k|² and
    d_total = 1 - |mean_k mu_k|². 1 means collapsed classes, 0 none to tell apart; None if all features are equal.
    """
    unit = torch.nn.functional.normalize(features.double().flatten(1), dim=1)
    means = torch.stack([unit[y == c].mean(0) for c in y.bincount().nonzero()])  # (classes, d)
    within = 1 - means.square().sum(1).mean()
    total = 1 - means.mean(0).square().sum()
    return float(1 - within / total) if float(total) > 1e-12 else None


def linear_cka(x: Tensor, y: Tensor) -> float | None:
    """Similarity of two representations (n, d1), (n, d2) of the same n inputs (Kornblith et al., 2019).

    CKA = |Yᵀ X|² / (|Xᵀ X| |Yᵀ Y|) with Frobenius norms and centred columns: in [0, 1], 1 for equal up to rotation and
    scale. With more features than inputs the same numbers come from the n x n Gram matrices. None if one is constant.
    """
    x, y = _centred(x), _centred(y)
    if max(x.shape[1], y.shape[1]) > len(x):
        gram_x, gram_y = x @ x.T, y @ y.T
        cross, norms = (gram_x * gram_y).sum(), gram_x.norm() * gram_y.norm()
    else:
        cross, norms = (y.T @ x).square().sum(), (x.T @ x).norm() * (y.T @ y).norm()
    return float(cross / norms) if float(norms) > 0 else None


def _centred(x: Tensor) -> Tensor:
    x = x.double().flatten(1)
    centred = x - x.mean(0)
    # What rounding leaves of a constant column is no signal.
    return torch.where(centred.abs() > 1e-12 * x.abs().max(), centred, 0.0)
