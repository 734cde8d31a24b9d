from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.anatomy import NONE, NORM, STATS, Part
from pfed.client import Client
from pfed.cohort import Cohort
from pfed.errors import UserError
from pfed.forward import Batch, features
from pfed.losses import supervised_contrastive
from pfed.method import Aggregation, Method, step
from pfed.models import twoheaded
from pfed.models.twoheaded import ENCODER, GLOBAL_HEAD, PERSONAL_HEAD, PROJECTOR, heads_of, judged, post, pre
from pfed.options import option
from pfed.pool import Spec
from pfed.registry import register
from pfed.tensors import Tensors
from pfed.wire import Payload, State


@register("dualfed")
@dataclass(frozen=True)
class DualFed(Method):
    """DualFed: general features before a private projector, personal ones after it (Zhu et al., ACM MM 2024).

    z = f(x) feeds a global head, u = g_k(z) a personal one; the score of a class is h_p,k(u) + h_s(z). Stage 1 trains
    f, g_k, h_p,k on CE(h_p,k(u), y) + λ L_con(u, y), L_con being the supervised contrastive loss at temperature τ;
    stage 2 trains h_s alone on CE(h_s(z), y). Then f = mean of f_k, h_s = mean of h_s,k; the rest never leaves.

    >>> from pfed import Experiment
    >>> result = Experiment("dualfed", clients=4, rounds=1, hyper={"lam": 1.0}).run()

    Deviations from the paper: the global head sees z, as in its equation 3 and the authors' code (section 4.1 of the
    text says u); equations 6 and 9 are taken as mean cross-entropy; logits are summed, as in the code.
    """

    lam: float = option(40.0, "weight of the contrastive loss", ge=0, tries=(1.0, 10.0, 40.0))
    tau: float = option(0.2, "its temperature", gt=0)
    strategy: Literal["stagewise", "simultaneous"] = option("stagewise", "two stages, or one loop over both losses")
    interleave: Literal["none", "epoch"] = option("none", "all of stage 1 and then stage 2, or by turns every epoch")
    stage2_bn: Literal["train", "eval"] = option("train", "mode of the frozen BatchNorm in stage 2")
    global_loss_weight: float = option(1.0, "weight of the global head's loss (simultaneous)", ge=0)
    projector_depth: int = option(2, "linear layers of the projector (0: none)", ge=0, le=3)
    projector_hidden: int = option(256, "their hidden width", ge=1)
    projector_bn: bool = option(True, "BatchNorm in the projector")
    global_head_position: Literal["pre", "post"] = option("pre", "the global head stands before or after the projector")
    ensemble: Literal["logits", "probs"] = option("logits", "the heads' logits or probabilities are summed")
    bn_affine_local: bool = option(False, "affine parameters of BatchNorm stay at the client, like its statistics")
    encoder: Literal["private", "shared"] = option("shared", "where the encoder lives")
    projector: Literal["private", "shared"] = option("private", "where the projector lives")
    personal_head: Literal["private", "shared"] = option("private", "where the personal head lives")
    global_head: Literal["private", "shared"] = option("shared", "where the global head lives")
    agg: Aggregation = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        stagewise = self.strategy == "stagewise"
        for name, default in {"interleave": "none", "stage2_bn": "train"}.items():
            if not stagewise and getattr(self, name) != default:
                raise UserError(f"DualFed.{name} is for strategy 'stagewise'. Got {getattr(self, name)!r}.")
        if stagewise and self.global_loss_weight != 1:
            raise UserError(
                f"DualFed.global_loss_weight is for strategy 'simultaneous'. Got {self.global_loss_weight}."
            )

    def build(self, spec: Spec) -> nn.Module:
        base = spec.base()
        name, head = anatomy.linear_head(base, "DualFed")
        base.set_submodule(name, nn.Identity())
        width, shape = head.in_features, (self.projector_depth, self.projector_hidden, self.projector_bn)
        projector = spec.add("projector", lambda: twoheaded.projector(width, *shape))
        general = spec.add("global_head", lambda: nn.Linear(width, head.out_features, head.bias is not None))
        heads = twoheaded.Heads(head, general, self.global_head_position == "pre", self.ensemble == "probs")
        return anatomy.set_head(twoheaded.TwoHeaded(base, projector, heads), "heads")

    def shared(self) -> Part:
        """What travels: the parts with that flag, but never BatchNorm's running statistics."""
        places = {ENCODER: self.encoder, PROJECTOR: self.projector}
        places |= {PERSONAL_HEAD: self.personal_head, GLOBAL_HEAD: self.global_head}
        shared = NONE
        for part, place in places.items():
            shared = shared | part if place == "shared" else shared
        return shared - (NORM if self.bn_affine_local else STATS)

    def init(self, model: nn.Module) -> State:
        return {"shared": anatomy.params(model, self.shared())}

    def download(self, server: State) -> Payload:
        return {"shared": server["shared"]}

    def round(self, server: State, cohort: Cohort) -> None:
        server["shared"] = cohort.mean(self.update, "shared", **self.download(server))

    @step
    def update(self, client: Client, shared: Tensors) -> Payload:
        model = client.model(shared)
        if self.strategy == "simultaneous":
            client.fit(model, lambda model, batch: self._both(client, model, batch))
        else:
            self._stages(client, model)
        client.trained(judged(model))
        client.keep(model, ~self.shared())
        return {"shared": client.share(model, self.shared())}

    def _stages(self, client: Client, model: nn.Module) -> None:
        def first(model: nn.Module, batch: Batch) -> Tensor:
            return self._personal(client, model, features(model, batch), batch.y)

        def second(model: nn.Module, batch: Batch) -> Tensor:
            return self._global(model, features(model, batch), batch.y)

        turns, epochs = (client.local.epochs, 1) if self.interleave == "epoch" else (1, client.local.epochs)
        for turn in range(turns):
            again = f"/{turn}" if turn else ""  # the same stream would bring the same batches
            done = client.fit(model, first, epochs=epochs, only=~GLOBAL_HEAD, stream=f"train{again}", memory="train")
            if done.steps:
                client.fit(
                    model,
                    second,
                    epochs=epochs,
                    only=GLOBAL_HEAD,
                    frozen=self.stage2_bn,
                    stream=f"global_head{again}",
                    memory="global_head",
                )

    def _personal(self, client: Client, model: nn.Module, zu: Tensor, y: Tensor) -> Tensor:
        """L1 = CE(h_p(u), y) + λ L_con(u, y)."""
        loss = F.cross_entropy(heads_of(model).personal(zu), y)
        if not self.lam:
            return loss
        contrast = supervised_contrastive(post(zu), y, self.tau)
        client.log_mean(contrastive=contrast.detach())
        return loss + self.lam * contrast

    def _global(self, model: nn.Module, zu: Tensor, y: Tensor) -> Tensor:
        """L2 = CE(h_s(z), y)."""
        return F.cross_entropy(heads_of(model).general(zu), y)

    def _both(self, client: Client, model: nn.Module, batch: Batch) -> Tensor:
        zu = features(model, batch)
        loss = self._personal(client, model, zu, batch.y)
        if self.global_loss_weight:
            loss = loss + self.global_loss_weight * self._global(model, zu, batch.y)
        return loss

    def predictor(self, client: Client, shared: Tensors) -> dict[str, nn.Module]:
        return judged(client.model(shared))

    def representations(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        zu = features(model, x)
        return {"pre": pre(zu), "post": post(zu)}
