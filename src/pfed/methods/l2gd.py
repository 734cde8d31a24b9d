from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from pfed.anatomy import ALL
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Method, Reduction, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("l2gd")
@dataclass(frozen=True)
class L2GD(Method):
    """L2GD: each client its own model, now and then drawn to the mean of all (Hanzely and Richtárik, 2020).

    A round is an aggregation with probability p, x_k ← (1 − μ) x_k + μ x̄, and otherwise local training of all clients.
    The paper's η and λ follow: η = lr N (1 − p), and μ = ηλ/(Np).

    >>> from pfed import Experiment
    >>> result = Experiment("l2gd", clients=4, rounds=2, hyper={"p": 0.5}).run()

    Deviations from the paper: a local step is the run's epochs, whose momentum survives between rounds unless the run
    has `keep_optimizer=false`; the step lengths are given as lr and the mixing μ. As there, all start from one model,
    and models are sent only where an aggregation follows local training; until then the mean is what it was.
    """

    p: float = option(0.5, "chance that a round is an aggregation", ge=0, lt=1, tries=(0.2, 0.5))
    mix: float = option(0.5, "how far a model moves to the mean", gt=0, le=1, tries=(0.1, 0.5))
    agg: Aggregation = "uniform"
    keep_optimizer = True
    same_start = True
    sends_all = True
    reduces_to = (Reduction({"p": 0.0}, "local"),)
    tasks = ANY_TASK

    @property
    def participation(self) -> Literal["sampled", "all"]:
        return "all"

    def init(self, model: nn.Module) -> State:
        return {"fresh": True}  # all models are the same, and so is their mean

    def download(self, server: State) -> Payload:
        return {}

    def round(self, server: State, cohort: Cohort) -> None:
        aggregates = bool(cohort.rng("coin").random() < self.p)
        cohort.log(aggregation=aggregates)
        if not aggregates:
            cohort.call(self.train)
        else:
            mean = None if server["fresh"] else cohort.mean(self.send, "model")
            cohort.call(self.mixed, mean=mean)
        server["fresh"] = aggregates and cohort.answered == cohort.ids  # else somebody has an older mean

    @step
    def train(self, client: Client) -> None:
        model = client.model()
        client.fit(model)
        client.keep(model, ALL)
        client.state["starved"] = client.starved

    @step
    def send(self, client: Client) -> Payload:
        client.starved = bool(client.state.get("starved", False))  # who could not train weighs nothing in the mean
        return {"model": client.share(client.model())}

    @step
    def mixed(self, client: Client, mean: Tensors | None) -> None:
        """Towards the mean; the client has it already where nobody trained since the last one."""
        mean = client.state.get("mean") if mean is None else mean
        if mean is None:
            return
        client.state["mean"] = mean
        model = client.model()
        model = client.model(_between(client.share(model), mean, self.mix))
        client.keep(model, ALL)

    def predictor(self, client: Client) -> nn.Module:
        return client.model()


def _between(own: Tensors, mean: Tensors, mix: float) -> Tensors:
    return mean if mix == 1 else (1 - mix) * own + mix * mean
