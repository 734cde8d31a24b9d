from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from pfed import loading
from pfed.anatomy import ALL, Part, params, snapshot
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.method import ANY_TASK, Aggregation, Each, Method, Reduction, step
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("partialfed-fix")
@dataclass(frozen=True)
class PartialFedFix(Method):
    """PartialFed-Fix: start each group of layers from the global or the own model (Sun et al., NeurIPS 2021).

    W[i] = W_t[i] if A[i] = 1 else W^c_{t-1}[i], E epochs from there give W^c_t, W_{t+1} = Σ (n_c/n) W^c_t. A is the
    strategy. After the last round every client starts once more from W by A and fine-tunes for F epochs.

    >>> from pfed import Experiment
    >>> result = Experiment("partialfed-fix", model="cnn-small-bn", clients=4, rounds=1).run()

    Deviations from the paper: F = E and the default strategy are choices, as the paper's appendix is not public;
    `skip_unused` is an addition.
    """

    strategy: str = option(
        "wo_bn_fc", "what is loaded: full, wo_fc, s1-s3, AaBb, … or groups separated by commas", check=loading.form
    )
    granularity: Literal["stage", "block", "layer"] = option("block", "what the labels in a list of groups stand for")
    stem_group: Literal["with_s1", "own"] = option("with_s1", "the stem is part of s1, or a group of its own")
    layer_conv_bn: Literal["joint", "separate"] = option(
        "separate", "granularity layer: a BatchNorm joins its convolution, or is a group of its own"
    )
    finetune_epochs: int | None = option(None, "epochs of tuning after the last round (none: local.epochs)", ge=0)
    finetune_lr: float | None = option(None, "learning rate of the tuning (none: local.lr)", gt=0)
    skip_unused: bool = option(False, "send only what is loaded: the same models for fewer bytes")
    agg: Aggregation = "samples"
    same_architecture = False
    sends_all = True
    reduces_to = (
        Reduction({"strategy": "full", "finetune_epochs": 0}, "fedavg"),
        Reduction({"strategy": "none", "finetune_epochs": 0}, "local"),
        Reduction({"strategy": "wo_fc", "finetune_epochs": 0}, "fedper"),
        Reduction({"strategy": "wo_bn", "finetune_epochs": 0}, "fedbn", {"agg": "samples"}),
        Reduction({"strategy": "wo_bn_stats", "finetune_epochs": 0}, "silobn"),
        Reduction({"strategy": "full", "finetune_epochs": 2}, "fedavg+ft", {"ft_epochs": 2, "ft_scope": "all"}),
    )
    tasks = ANY_TASK

    def loads(self, model: nn.Module) -> Part:
        """The groups with A[i] = 1."""
        return loading.loaded(model, self.strategy, self.granularity, self.stem_group, self.layer_conv_bn)

    def build(self, spec: Spec) -> nn.Module:
        model = spec.base()
        self.loads(model)  # refuses a strategy that the model cannot have
        return model

    def init(self, model: nn.Module) -> State:
        if loading.lacks_batchnorm(model, self.strategy):
            warnings.warn("PartialFed: the model has no BatchNorm layer to keep, so this is FedAvg.", stacklevel=2)
        if not self.skip_unused:
            return {"params": params(model)}
        used = self.loads(model)
        return {"params": params(model, used), "rest": params(model, ~used), "seen": {}}

    def download(self, server: State) -> dict[str, Any]:
        if not self.skip_unused:
            return {"params": server["params"]}
        whole = server["params"] | server["rest"]  # W_t and, where nothing is loaded, W_1: what a newcomer begins with
        return {"params": Each(lambda client: server["params"] if client in server["seen"] else whole)}

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))
        if self.skip_unused:
            server["seen"] = server["seen"] | dict.fromkeys(cohort.answered, True)

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        model = self.load(client, params)
        client.fit(model)
        client.state["own"] = snapshot(model)
        return {"params": client.share(model, self.loads(model) if self.skip_unused else ALL)}

    def load(self, client: Client, params: Tensors) -> nn.Module:
        """Eq. 2."""
        like = client.pool.template(client.id)
        return client.model(client.state.get("own"), params.only(self.loads(like).names(like)))

    def finish(self, server: State, cohort: Cohort) -> None:
        if self.finetune_epochs != 0:
            cohort.call(self.tune, **self.download(server))

    @step
    def tune(self, client: Client, params: Tensors) -> None:
        model = self.load(client, params)
        client.fit(model, epochs=self.finetune_epochs, lr=self.finetune_lr or 0.0, stream="finetune")
        client.state["finetuned"] = snapshot(model)

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        return loading.judged(client, self.load(client, params))
