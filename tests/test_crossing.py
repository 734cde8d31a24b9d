"""Which parts of a model cross: as recorded for every method, and as the report draws it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Residual, mlp
from torch import nn

from pfed import Experiment, Federation, Tensors, anatomy, registry
from pfed.crossing import PARTS, describe
from pfed.models import build


def shares(record: dict[str, Any], way: int) -> dict[str, float]:
    """Of each part, which share went down (2) or up (3) in any step."""
    found: dict[str, float] = {}
    for step in record.values():
        for part in step["parts"]:
            found[part[0]] = max(found.get(part[0], 0.0), part[way] / part[1])
    return found


def go(method: str, data: Federation, model: Any = "mlp", **options: Any) -> dict[str, Any]:
    result = Experiment(method, data, model, **{"rounds": 2, "eval_every": 0, **options}).run()
    return result.crossing


def test_elements_are_counted_by_part_and_once() -> None:
    """4 × 5 weights and 5 biases, 5 × 3 and 3; of the first layer 8 packed weights and the biases go down, twice."""
    model = mlp()
    some = Tensors({"0.weight": torch.zeros(8), "0.bias": torch.zeros(5)})
    found = describe(model, {"w": some, "c": some, "lr": 0.1}, {"logits": torch.zeros(6, 3), "loss": 1.0})
    assert found["parts"] == [["0", 25, 13, 0], ["2", 18, 0, 0]]
    assert found["down"] == [[key, "2 of the model's tensors, 13 elements"] for key in ("w", "c")]
    assert found["up"] == [["logits", "6 × 3"]]


def test_counters_are_no_part() -> None:
    parts = describe(Residual(), {}, {})["parts"]
    assert [part[:2] for part in parts if part[0].startswith("bn1")] == [["bn1", 20]], "no num_batches_tracked"


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "resnet110"])
def test_every_element_of_a_model_is_in_one_of_few_parts(name: str) -> None:
    model = build(name, classes=10, shape=(3, 32, 32))
    parts = describe(model, {}, {"params": anatomy.params(model)})["parts"]
    floats = sum(t.numel() for t in model.state_dict().values() if t.is_floating_point())
    assert sum(part[1] for part in parts) == sum(part[3] for part in parts) == floats
    assert len(parts) <= PARTS


def test_a_network_in_one_piece_is_one_part() -> None:
    assert [part[0] for part in describe(nn.Linear(2, 2), {}, {})["parts"]] == ["model"]


@pytest.mark.parametrize(
    ("method", "expected"),
    {"local": [0, 0, 0], "fedavg": [1, 1, 1], "fedper": [1, 1, 0], "lg-fedavg": [0, 0, 1], "fedbn": [1, 0, 1]}.items(),
)
def test_what_stays_is_seen(tiny: Federation, method: str, expected: list[float]) -> None:
    """Of the first convolution, of its BatchNorm and of the head."""
    hyper = {"shared": 1} if method == "lg-fedavg" else {}
    found = list(shares(go(method, tiny, "cnn-small-bn", hyper=hyper), 3).values())
    assert [found[0], found[1], found[-1]] == expected


def test_channels_cross_in_part(tiny: Federation) -> None:
    """At the end half of the channels are private."""
    record = go("cd2pfed", tiny, hyper={"p": 0.5})
    assert all(0.2 < share < 0.8 for share in shares(record, 3).values())


def test_what_is_no_weight_is_named(tiny: Federation) -> None:
    record = go("fedcd", tiny, hyper={"batch": 16})
    assert not any(shares(record, 3).values())
    assert record["update"]["up"] == [["logits", "16 × 10"]]
    assert record["receive"]["down"] == [["teacher", "16 × 10"]]


@pytest.mark.parametrize("method", sorted(registry.methods()))
def test_every_method_leaves_what_crossed(tiny: Federation, method: str) -> None:
    fast = {"batch": 16, "alternations": 1, "server_steps": 2, "public_epochs": 1, "head_epochs": 1}
    hyper = {name: value for name, value in fast.items() if name in registry.fields(method)}
    record = go(method, tiny, "cnn-small-bn", rounds=1, hyper=hyper)
    assert bool(record) == (method != "all"), "where all data are in one place, nothing crosses"
    for step in record.values():
        assert all(0 <= down <= size and 0 <= up <= size for _, size, down, up in step["parts"])


def test_a_resumed_run_still_knows_it(tiny: Federation, tmp_path: Any) -> None:
    result = Experiment("fedavg+ft", tiny, "mlp", rounds=1).run(tmp_path)
    assert set(result.crossing) == {"update", "finetune"}
    again = Experiment("fedavg+ft", tiny, "mlp", rounds=1).resume(result.folder)
    assert again.crossing == result.crossing
