"""Every option of a run: one vocabulary for Python, the command line and TOML files. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pfed.options import option, validate


@dataclass(frozen=True, kw_only=True)
class Local:
    """How a client trains."""

    lr: float = option(0.05, "learning rate", gt=0)
    epochs: int = option(1, "passes over the client's data per round", ge=0)
    batch_size: int = option(10, "samples per step", ge=1)
    momentum: float = option(0.0, "momentum of SGD", ge=0, lt=1)
    nesterov: bool = option(False, "Nesterov momentum")
    weight_decay: float = option(0.0, "coupled weight decay", ge=0)
    schedule: str = option("constant", "learning rate over rounds: constant, cosine, or step:0.5,0.75 (x0.1 there)")

    def __post_init__(self) -> None:
        validate(self, "local")


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How a data set is divided among clients."""

    clients: int = option(20, "number of clients", ge=1)
    partition: Literal[
        "auto", "classes", "dirichlet", "iid", "quantity", "femnist", "domain", "natural", "concept", "feature"
    ] = option("auto", "kind of skew; auto: classes, dirichlet or iid by the options given")  # type: ignore[assignment]
    classes_per_client: int | None = option(None, "shards per client (partition classes)", ge=1)
    distinct_classes: bool = option(False, "draw each client's classes without repetition")
    alpha: float | None = option(None, "concentration (partition dirichlet)", gt=0)
    balance_cap: bool = option(True, "Dirichlet: no more to clients that hold their fair share")
    min_size: int = option(10, "Dirichlet: draw again until every client has this many", ge=1)
    sigma: float = option(1.0, "spread of log-normal sizes (partition quantity)", gt=0)
    femnist_pointer: Literal["wrap", "released"] = option("wrap", "FEMNIST: slices wrap, or overlap as released")  # type: ignore[assignment]
    groups: int = option(2, "groups of clients with permuted labels (partition concept)", ge=1)
    shift: Literal["mixed", "rotation", "inversion", "colour", "noise", "blur"] = option(
        "mixed", "what changes from client to client (partition feature)"
    )  # type: ignore[assignment]
    test_split: Literal["auto", "matched", "global"] = option(
        "auto", "each client's test data: like its training data, or the whole test set (auto: global for dirichlet)"
    )  # type: ignore[assignment]
    test_fraction: float = option(0.2, "test share where the data have no test split", gt=0, lt=1)
    validation: float = option(0.0, "share of each client's training data kept for validation", ge=0, lt=1)
    public: float = option(0.0, "share of the training data taken out as a common public set", ge=0, lt=1)
