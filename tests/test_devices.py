"""Clients on another device than the server's: torch's `meta`, which knows shapes and devices, but no numbers.

An operation on tensors of two devices is an error there as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pfed import Experiment, Federation, UserError, machine, registry
from pfed.runner import Runner

META = torch.device("meta")
# Which numbers these send or choose depends on values, which meta tensors have not.
BY_VALUE = {"cd2pfed"}


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a number or a tensor is read from the device, some number is read."""
    item, to = Tensor.item, Runner._to

    def back(self: Runner, device: torch.device, tree: Any) -> Any:
        if device.type == "cpu":
            from pfed import wire

            return wire.map_tensors(tree, lambda t: torch.full(t.shape, 0.5).to(t.dtype) if t.is_meta else t)
        return to(self, device, tree)

    monkeypatch.setattr(Tensor, "item", lambda self: 0.5 if self.is_meta else item(self))
    monkeypatch.setattr(Tensor, "__float__", lambda self: 0.5 if self.is_meta else item(self))
    monkeypatch.setattr(Runner, "_to", back)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("method", [name for name in registry.methods() if name not in BY_VALUE])
def test_every_method_trains_where_it_is_told(method: str, tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfed.session.Session._judges", lambda self, t: False)
    Experiment(method, tiny, "cnn-small-bn", rounds=2, device="meta", exact_shortcuts=False).run()
