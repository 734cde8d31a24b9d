from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.forward import Batch, features
from pfed.losses import balanced
from pfed.method import Aggregation, Method, step
from pfed.models import twoheaded
from pfed.models.twoheaded import PERSONAL_HEAD, heads_of, judged
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("fedrod")
@dataclass(frozen=True)
class FedRoD(Method):
    """Fed-RoD: a generic head under a balanced loss, and a personal one beside it (Chen and Chao, ICLR 2022).

    Base and generic head g learn by the balanced softmax, CE(g(z) + log n_y, y); the personal head q, on the same
    features held fixed, by CE(sg[g(z)] + q(sg[z]), y). Base and g are averaged by samples. A client is judged with g +
    q.

    >>> from pfed import Experiment
    >>> result = Experiment("fedrod", clients=4, rounds=1).run()

    Deviations from the paper: the personal head is linear and starts at zero; a class that a client does not have
    counts as 1e-9 of a sample.
    """

    balance: bool = option(True, "the generic head learns by the balanced softmax")
    agg: Aggregation = "samples"

    def build(self, spec: Spec) -> nn.Module:
        base = spec.base()
        name, head = anatomy.linear_head(base, "FedRoD")
        base.set_submodule(name, nn.Identity())
        personal = spec.add("personal_head", lambda: nn.Linear(head.in_features, head.out_features))
        for parameter in personal.parameters():
            nn.init.zeros_(parameter)
        heads = twoheaded.Heads(personal, head)
        return anatomy.set_head(twoheaded.TwoHeaded(base, nn.Identity(), heads), "heads")

    def init(self, model: nn.Module) -> State:
        return {"params": anatomy.params(model, ~PERSONAL_HEAD)}

    def round(self, server: State, cohort: Cohort) -> None:
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client: Client, params: Tensors) -> Payload:
        counts = client.counts

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            zu = features(model, batch)
            general = heads_of(model).general(zu)
            generic = F.cross_entropy(balanced(general, counts) if self.balance else general, batch.y)
            return generic + F.cross_entropy(general.detach() + heads_of(model).personal(zu.detach()), batch.y)

        model = client.model(params)
        client.fit(model, loss)
        client.trained(judged(model))
        client.keep(model, PERSONAL_HEAD)
        return {"params": client.share(model, ~PERSONAL_HEAD)}

    def predictor(self, client: Client, params: Tensors) -> dict[str, nn.Module]:
        return judged(client.model(params))
