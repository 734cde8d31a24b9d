from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from pfed import anatomy
from pfed.anatomy import ALL, HEAD, snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.errors import UserError
from pfed.method import Method, step
from pfed.options import option
from pfed.pool import Spec
from pfed.wire import State, Value


@dataclass(frozen=True)
class FineTuned(Method):
    """A method followed by fine-tuning at each client, written NAME+ft.

    After the last round every client takes its personal model of the base method, trains its head (or all of it) for
    some epochs on its own data, and is judged with that. Nothing is sent.

    >>> from pfed import Experiment
    >>> result = Experiment("fedavg+ft", clients=4, rounds=1).run()

    Deviations from the paper: none (the protocol is FedRep's and FedBSD's).
    """

    base: Method
    ft_epochs: int = option(10, "epochs of fine-tuning", ge=0)
    ft_scope: Literal["head", "all"] = option("head", "what is tuned")

    def __post_init__(self) -> None:
        super().__post_init__()
        models = ("same_architecture", "same_start", "sends_all")
        for name in ("agg", "needs", "tasks", "keep_optimizer", *models, "fixed_rounds"):
            if hasattr(self.base, name):
                object.__setattr__(self, name, getattr(self.base, name))

    @property
    def label(self) -> str:
        return f"{self.base.label}+ft"

    @property
    def participation(self) -> Literal["sampled", "all"]:
        return self.base.participation

    def hyperparameters(self) -> dict[str, Any]:
        return {**self.base.hyperparameters(), "ft_epochs": self.ft_epochs, "ft_scope": self.ft_scope}

    def steps(self) -> dict[str, Callable[..., Mapping[str, Value] | None]]:
        return {**self.base.steps(), "finetune": self.finetune}

    def check(self, options: RunOptions, federation: Federation) -> None:
        self.base.check(options, federation)

    def check_models(self, models: Sequence[nn.Module]) -> None:
        self.base.check_models(models)

    def build(self, spec: Spec) -> nn.Module:
        model = self.base.build(spec)
        if self.ft_scope == "head" and not HEAD.names(model) - anatomy.marks(model).fixed:
            raise UserError(f"{self.label} has nothing to tune: the head is fixed. Set ft_scope to 'all'.")
        return model

    def init(self, model: nn.Module) -> State:
        return self.base.init(model)

    def start(self, server: State, cohort: Cohort) -> None:
        self.base.start(server, cohort)

    def download(self, server: State) -> dict[str, Any]:
        return self.base.download(server)

    def round(self, server: State, cohort: Cohort) -> None:
        self.base.round(server, cohort)

    def finish(self, server: State, cohort: Cohort) -> None:
        self.base.finish(server, cohort)
        if self.ft_epochs:
            cohort.call(self.finetune, **self.download(server))

    @step
    def finetune(self, client: Client, **download: Any) -> None:
        model = self._untuned(client, download)
        only = HEAD if self.ft_scope == "head" else ALL
        again = type(self.base).finish is not Method.finish  # then the base may have tuned in this very round
        client.fit(model, epochs=self.ft_epochs, only=only, stream="finetune/again" if again else "finetune")
        client.state["tuned"] = snapshot(model)

    def predictor(self, client: Client, **download: Any) -> dict[str, nn.Module]:
        untuned = self._untuned(client, download)
        if "tuned" not in client.state:
            return {"personal": untuned}
        tuned = client.model(client.state["tuned"])
        return {"personal": tuned, "finetuned": tuned, "untuned": untuned}

    def representations(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        return self.base.representations(model, x)

    def _untuned(self, client: Client, download: Mapping[str, Any]) -> nn.Module:
        models = self.base.predictor(client, **download)
        return models if isinstance(models, nn.Module) else next(iter(models.values()))
