from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy, streams
from pfed.anatomy import ALL
from pfed.client import Client
from pfed.codistillation import predict, public_part
from pfed.cohort import Cohort
from pfed.method import Aggregation, Method, step
from pfed.options import option
from pfed.registry import register
from pfed.sgd import SGD
from pfed.shortcuts import SLICE
from pfed.wire import Payload, State


@register("fedmd")
@dataclass(frozen=True)
class FedMD(Method):
    """FedMD: clients agree on the logits of public images (Li and Wang, 2019).

    First each model is trained on the public set and then on the client's own data. In a round the clients send their
    logits on a random part of the public images; the consensus is their mean; each client matches it (digest) and then
    trains on its own data (revisit). Models never leave, each may be of another architecture.

    >>> from pfed import Experiment
    >>> result = Experiment("fedmd", model="mlp,cnn-small", clients=4, rounds=1, public=0.1).run()

    Deviations from the paper: the first training has fixed numbers of epochs instead of going on until it converges.
    """

    public_epochs: int = option(5, "epochs on the public set before round 1", ge=0)
    private_epochs: int = option(5, "epochs on the own data before round 1", ge=0)
    subset: int = option(5000, "public images in a round, at most", ge=1)
    digest_epochs: int = option(1, "epochs on the consensus", ge=0)
    distance: Literal["mae", "mse"] = option("mae", "how logits are compared", tries=("mae", "mse"))
    agg: Aggregation = "uniform"
    same_architecture = False
    needs = frozenset({"public"})

    def init(self, model: nn.Module) -> State:
        return {}

    def download(self, server: State) -> Payload:
        return {}

    def start(self, server: State, cohort: Cohort) -> None:
        cohort.call(self.prepare)

    @step
    def prepare(self, client: Client) -> None:
        """Transfer learning: public data first, then the own."""
        model = client.model()
        assert client.public is not None
        x, y = client.public.take()
        self._train(client, model, x, y, self.public_epochs, "public")
        client.fit(model, epochs=self.private_epochs, stream="private")
        client.keep(model, ALL)
        client.state["prepared"] = True

    def round(self, server: State, cohort: Cohort) -> None:
        consensus = cohort.mean(self.look, "logits")
        cohort.only(cohort.answered).call(self.learn, consensus=consensus)

    @step
    def look(self, client: Client) -> Payload:
        """The logits of this round's images, by way of what a client may have missed before round 1."""
        if "prepared" not in client.state:
            self.prepare(client)
            client.starved = False  # whatever it could train on, its logits count as in any other round
        images, model = public_part(client, client.round, self.subset), client.model()
        return {"logits": torch.cat([predict(model, part) for part in torch.split(images, SLICE)])}

    @step
    def learn(self, client: Client, consensus: Tensor) -> None:
        model = client.model()
        images = public_part(client, client.round, self.subset)
        self._train(client, model, images, consensus, self.digest_epochs, "digest")
        client.fit(model)
        client.keep(model, ALL)

    def _train(self, client: Client, model: nn.Module, x: Tensor, y: Tensor, epochs: int, stream: str) -> None:
        """Epochs on public images: labels by cross-entropy, logits by their distance."""
        local, size = client.local, client.local.batch_size
        sgd = SGD(anatomy.trainable(model.train()), client.lr, local.momentum, local.nesterov, local.weight_decay)
        order = client.rng(stream)
        with streams.torch_scope(client.options.seed, "dropout", client.id, client.round, stream):
            for _ in range(epochs):
                for index in torch.split(torch.from_numpy(order.permutation(len(x))), size):
                    if len(index) == 1 and anatomy.has_batchnorm(model):
                        continue
                    sgd.zero_grad()
                    self._distance(model(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
                    sgd.step()
                    client.samples += len(index)

    def _distance(self, out: Tensor, target: Tensor) -> Tensor:
        if not target.is_floating_point():
            return F.cross_entropy(out, target)
        return F.l1_loss(out, target) if self.distance == "mae" else F.mse_loss(out, target)

    def predictor(self, client: Client) -> nn.Module:
        return client.model()
