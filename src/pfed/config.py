"""Every option of a run: one vocabulary for Python, the command line and TOML files. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pfed.options import option, validate

RUNS = "runs"


def runs_folder(given: str | Path | None = None) -> Path:
    """Where runs are looked for: as given, or by PFED_RUNS, or below the working folder."""
    return Path(given or os.environ.get("PFED_RUNS") or RUNS)


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
        "auto",
        "classes",
        "dirichlet",
        "iid",
        "replicated",
        "quantity",
        "femnist",
        "domain",
        "natural",
        "concept",
        "feature",
    ] = option(
        "auto",
        "kind of skew; auto: classes or dirichlet by the options given, else domain if the data have some, else iid",
    )
    classes_per_client: int | None = option(None, "shards per client (partition classes)", ge=1)
    distinct_classes: bool = option(False, "draw each client's classes without repetition")
    alpha: float | None = option(None, "concentration (partition dirichlet)", gt=0)
    balance_cap: bool = option(True, "Dirichlet: no more to clients that hold their fair share")
    min_size: int = option(10, "Dirichlet: draw again until every client has this many", ge=1)
    sigma: float = option(1.0, "spread of log-normal sizes (partition quantity)", gt=0)
    femnist_pointer: Literal["wrap", "released"] = option("wrap", "FEMNIST: slices wrap, or overlap as released")
    groups: int = option(2, "groups of clients with permuted labels (partition concept)", ge=1)
    shift: Literal["mixed", "rotation", "inversion", "colour", "noise", "blur"] = option(
        "mixed", "what changes from client to client (partition feature)"
    )
    test_split: Literal["auto", "matched", "global"] = option(
        "auto", "each client's test data: like its training data, or the whole test set (auto: global for dirichlet)"
    )
    test_fraction: float = option(0.2, "test share where the data have no test split", gt=0, lt=1)
    train_cap: int | None = option(None, "at most so many training samples per client, evenly from its classes", ge=1)
    validation: float = option(0.0, "share of each client's training data kept for validation", ge=0, lt=1)
    image_size: int | None = option(None, "images: resized to this many pixels, square", ge=1)
    label_column: str = option("label", "own CSV file: the column with the class")
    client_column: str | None = option(None, "own CSV file: the column with the client [client, if there is one]")
    public: float = option(0.0, "share of the training data taken out as a common public set", ge=0, lt=1)
    public_in_train: bool = option(False, "the public set stays in the training data as well")


@dataclass(frozen=True, kw_only=True)
class RunOptions(SplitOptions):
    """Everything about a run but its method and the method's hyper-parameters."""

    data: str = option("digits", "a data set by name, or a folder or CSV file of your own")
    model: str = option("auto", "a model by name; several, separated by commas, are dealt to the clients in turn")
    pretrained: bool = option(
        False, "start from ImageNet weights (models torchvision:NAME, and the bodies of detectors)"
    )
    head: str | None = option(None, "the module that is the model's head, where structure does not tell")
    task: Literal["classification", "detection"] = option("classification", "what is learned")
    rounds: int = option(20, "communication rounds", ge=0)
    fraction: float = option(1.0, "share of the clients that take part in a round", gt=0, le=1)
    seed: int = option(0, "the root of all randomness", ge=0)
    local: Local = field(default_factory=Local, metadata={"help": "how a client trains: local.lr, local.epochs, …"})
    normalise: Literal["data", "none", "half", "imagenet"] = option(
        "data", "pixels by the data set's mean and spread, not at all (0 to 1), to -1 to 1, or by ImageNet's"
    )
    augment: Literal["none", "flip", "crop-flip", "flip-rotate"] = option("none", "random changes of training images")
    bn: Literal["share", "local-stats", "local-all"] = option(
        "share", "BatchNorm: travels, keeps its statistics at the client (SiloBN), or stays altogether (FedBN)"
    )
    engine: Literal["serial", "processes", "ray", "debug", "nvflare"] = option(
        "serial",
        "what runs the clients: one after another, in parallel, on Ray (all the same results), or to find mistakes"
        " (nvflare: 'pfed deploy')",
    )
    workers: int | None = option(None, "processes of the engines `processes` and `ray` [one per core]", ge=1)
    ray_address: str | None = option(None, "Ray cluster to join: auto or HOST:PORT [one of this machine, for the run]")
    state_memory: int = option(512, "megabytes of client states in memory; the rest is on disk", ge=0)
    min_clients: int = option(1, "fewer answers than this stop the run", ge=1)
    dropout: float = option(0.0, "chance that a chosen client does not answer in a round", ge=0, lt=1)
    stragglers: float = option(0.0, "share of slow clients", ge=0, le=1)
    slowdown: float = option(10.0, "how much slower those are", ge=1)
    deadline: float | None = option(None, "simulated seconds after which an answer is too late", gt=0)
    eval_point: Literal["post_download", "post_local"] = option(
        "post_download", "judge the newest shared part with the own private part, or the model right after training"
    )
    eval_every: int = option(1, "evaluate every so many rounds, and at the end (0: only at the end)", ge=0)
    eval_last: int = option(0, "evaluate also in each of the last so many rounds", ge=0)
    select: Literal["last", "mean_last_10", "validation", "best_mean_round", "best_per_client"] = option(
        "last", "which round is reported (best_*: chosen on test data, as some papers do)"
    )
    new_test: Literal["none", "mean_prob", "mean_logprob", "majority", "weight_average"] = option(
        "none", "all client models together on the whole test set, and by which rule"
    )
    new_test_every: int = option(0, "rounds between new tests (0: only at the end)", ge=0)
    representation: bool = option(False, "class separation and CKA of the clients' features at every evaluation")
    external: str | None = option(None, "a data set of a domain that no client has")
    device: str = option("cpu", "where clients train: cpu, cuda (every GPU, one worker each), or cuda:N")
    together: int = option(1, "clients that train as one on a device, for small networks on a GPU", ge=1)
    exact_shortcuts: bool = option(True, "compute what is frozen once where that is exact")
    channels_last: bool = option(True, "how images lie in memory while a network runs: faster on most processors")
    keep_optimizer: bool | None = option(None, "momentum survives between rounds (default: as the method says)")
    checkpoint_every: int = option(10, "rounds between checkpoints (0: only at the end)", ge=0)
    track: str | None = option(None, "tracker of the numbers: tensorboard, mlflow, wandb, or several with commas")

    def __post_init__(self) -> None:
        validate(self, "run")

    def judged(self, t: int) -> bool:
        """Whether the clients are judged after this round; after the last one they are in any case."""
        in_turn = (self.eval_every > 0 and t % self.eval_every == 0) or t > self.rounds - self.eval_last
        return 0 < t <= self.rounds and in_turn

    @property
    def all_take_part(self) -> bool:
        """Whether every client is to answer in every round."""
        return self.fraction == 1 and self.dropout == 0 and self.deadline is None
