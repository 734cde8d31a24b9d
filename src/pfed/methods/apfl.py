from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch
from pfed.method import ANY_TASK, Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("apfl")
@dataclass(frozen=True)
class APFL(Method):
    """APFL: a mixture of an own model and the global one, with a learned weight (Deng et al., 2020).

    Beside FedAvg each client keeps v and α. On every batch, with w_k from before its step and v̄ = α v + (1 − α) w_k:
    v ← v − η α ∇F_k(v̄), and α ← α − η_α ⟨v − w_k, ∇F_k(v̄)⟩ within [0, 1]. The server takes the simple mean of the w_k;
    a client is judged with v̄ of its v and the newest w.

    >>> from pfed import Experiment
    >>> result = Experiment("apfl", clients=4, rounds=1, hyper={"alpha": 0.5}).run()

    Deviations from the paper: none. The gradient is taken at v̄, not at v; weights are mixed, not logits; α is learned
    at every batch, not only at the first of a round.
    """

    alpha: float = option(
        0.5, "weight of the own model (at the start, if it is learned)", ge=0, le=1, tries=(0.25, 0.5, 0.75)
    )
    adaptive: bool = option(True, "learn alpha")
    alpha_lr: float = option(0.0, "step of alpha (0: the run's local.lr)", ge=0)
    agg: Aggregation = "uniform"
    tasks = ANY_TASK

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        model, mixed = client.model(params), client.model(client.state.get("v"))
        own = {name: p.detach().clone() for name, p in anatomy.trainable(mixed).items()}
        sgd = client.sgd(own, "v")
        alpha = float(client.state.get("alpha", self.alpha))
        shared = anatomy.trainable(model)

        def personal(batch: Batch) -> None:
            nonlocal alpha
            w = {name: p.detach() for name, p in shared.items()}
            grads = self._gradient(client, mixed, own, w, alpha, batch)
            if self.adaptive:
                slope = sum(float(((own[n] - w[n]) * g).sum()) for n, g in grads.items())
                after = min(max(alpha - client.rate(self.alpha_lr) * slope, 0.0), 1.0)
            for name, grad in grads.items():
                own[name].grad = alpha * grad
            sgd.step()
            alpha = after if self.adaptive else alpha

        if client.fit(model, grad=personal).steps:
            with torch.no_grad():
                for name, parameter in anatomy.trainable(mixed).items():
                    parameter.copy_(own[name])
            client.state["v"] = anatomy.snapshot(mixed)  # under all names that tied weights have
            client.state["alpha"] = alpha
        if client.keeps_optimizer and sgd.buffers:
            client.state.setdefault("momentum", {})["v"] = sgd.buffers
        client.log(alpha=alpha)
        client.keep(model)
        shared_now = client.share(model)
        client.trained(self._mixture(client, anatomy.snapshot(model)))
        return {"params": shared_now}

    def _gradient(
        self, client: Client, mixed: nn.Module, own: dict[str, Tensor], w: dict[str, Tensor], alpha: float, batch: Batch
    ) -> dict[str, Tensor]:
        """The gradient of the loss at the mixture; BatchNorm's statistics of v move with it."""
        live = anatomy.trainable(mixed.train())
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(alpha * own[name] + (1 - alpha) * w[name])
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, f"mixture/{batch.step}"):
            loss = client.loss(mixed, Batch(batch.x, batch.y, batch.index, batch.step, batch.epoch))
            found = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        return {name: grad for name, grad in zip(live, found, strict=True) if grad is not None}

    def _mixture(self, client: Client, w: Tensors) -> nn.Module:
        v, alpha = client.state.get("v"), float(client.state.get("alpha", self.alpha))
        if v is None:
            return client.model(w)
        both = {n: alpha * v[n] + (1 - alpha) * t for n, t in w.items() if n in v and t.is_floating_point()}
        return client.model(v, Tensors(both))

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        general = client.model(params)
        return {"personal": self._mixture(client, anatomy.snapshot(general)), "global": general}
