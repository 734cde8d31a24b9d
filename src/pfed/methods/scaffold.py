from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pfed import anatomy
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.method import ANY_TASK, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.sgd import SGD
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD: FedAvg whose steps are corrected for client drift (Karimireddy et al., ICML 2020).

    With control variates c at the server and c_k at each client (zero at first) a local step is
    y ← y − η (∇F_k(y) − c_k + c). After K of them c_k⁺ = c_k − c + (x − y)/(Kη) (option II); then
    x ← x + η_g mean(y_k − x) and c ← c + Σ_S (c_k⁺ − c_k) / N.

    >>> from pfed import Experiment
    >>> result = Experiment("scaffold", clients=4, rounds=1).run()

    Deviations from the paper: none. Option II presumes plain SGD, so momentum and weight decay of the run are left out
    unless `plain_sgd=false`. BatchNorm's statistics have no variate and are averaged.
    """

    eta_g: float = option(1.0, "step of the server", gt=0)
    plain_sgd: bool = option(True, "leave out the run's momentum and weight decay")
    agg = "uniform"  # the variates are right for the simple mean only
    tasks = ANY_TASK

    def init(self, model: nn.Module) -> State:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # tied weights have several
        return {"params": anatomy.params(model), "control": anatomy.params(model).only(names).zeros()}

    def download(self, server: State) -> Payload:
        return {"params": server["params"], "control": server["control"]}

    def round(self, server: State, cohort: Cohort) -> None:
        x, change = cohort.mean(self.update, "params", "change", **self.download(server))
        before = server["params"].only(server["control"])
        moved = before + self.eta_g * (x.only(before) - before)
        server["params"] = x if self.eta_g == 1 else x | moved
        server["control"] = server["control"] + len(cohort.trained) / cohort.total * change

    @step
    def update(self, client: Client, params: Tensors, control: Tensors) -> Payload:
        own = client.state.get("control", control.zeros())
        model = client.model(params)
        named = anatomy.trainable(model, anatomy.of(control))

        def correct(batch: Batch) -> None:
            for name, parameter in named.items():
                if parameter.grad is not None:
                    parameter.grad += control[name] - own[name]

        opt = SGD(anatomy.trainable(model), client.lr) if self.plain_sgd else None
        steps = client.fit(model, opt=opt, grad=correct).steps
        client.keep(model)
        y = client.share(model)
        new = own
        if steps:
            new = own - control + (params - y).only(control) / (steps * client.lr)
        client.state["control"] = new
        return {"params": y, "change": new - own}

    def predictor(self, client: Client, params: Tensors, control: Tensors) -> nn.Module:
        return client.model(params)
