"""Loss terms that methods add to the task's own loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def sqdist(model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """The squared distance of the model's trainable parameters to those of the same names in `anchor`."""
    parts = [((p - anchor[name]) ** 2).sum() for name, p in model.named_parameters() if name in anchor]
    return torch.stack(parts).sum()


def kl(a: Tensor, b: Tensor, tau: float = 1.0) -> Tensor:
    """KL(softmax(a/tau) || softmax(b/tau)), summed over the last dimension, mean over the batch.

    KL(p || q) = sum p (log p - log q), from log_softmax. Gradients flow into both: detach what is constant.
    """
    return kl_each(a, b, tau).mean()


def kl_each(a: Tensor, b: Tensor, tau: float = 1.0) -> Tensor:
    """The same for each sample of a batch."""
    p, q = (a / tau).log_softmax(-1), (b / tau).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def balanced(logits: Tensor, counts: Tensor) -> Tensor:
    """Logits under which cross-entropy does not favour frequent classes: plus the log of the class's samples.

    The balanced softmax of Ren et al. (NeurIPS 2020). A class without any counts as 1e-9 of a sample.
    """
    return logits + counts.to(logits.dtype).clamp(min=1e-9).log()


def supervised_contrastive(u: Tensor, y: Tensor, tau: float) -> Tensor:
    """Pulls features of one class together and pushes those of others away (Khosla et al., NeurIPS 2020); one view.

    With s_ij = cos(u_i, u_j)/tau and A(i) the others of i's class in the batch, the mean over i of
    -1/max(|A(i)|, 1) sum_{j in A(i)} (s_ij - log sum_{a != i} exp s_ia). At least 0; a batch of one gives 0.
    """
    unit = torch.nn.functional.normalize(u.flatten(1), dim=1)
    s = unit @ unit.T / tau  # (n, n)
    itself = torch.eye(len(s), dtype=torch.bool, device=s.device)
    log_p = s - s.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (y[:, None] == y) & ~itself
    # `where`, as the other entries may be infinite.
    return -(torch.where(positive, log_p, 0.0).sum(1) / positive.sum(1).clamp(min=1)).mean()
