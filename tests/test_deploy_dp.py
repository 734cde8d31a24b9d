"""Differential privacy of what a site shares."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")
pytest.importorskip("opacus", reason="needs opacus: install pfed[deploy]")

from deploy_helpers import NAMES, Near, conduct, make_kit, make_server, write_data

from pfed import Tensors
from pfed.deploy import privacy
from pfed.errors import RunError, UserError

RULE = {"clip": 1.0, "noise": 2.0, "delta": 1e-5}


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Half the noise, for two data sets may differ by twice the clip: one release with noise 2 is sigma = 1.

    The exact (epsilon, delta) of the Gaussian mechanism with sigma 1 at delta 1e-5 is epsilon = 4.38; Rényi's bound is
    a little above it. More releases cost more, more noise costs less.
    """
    assert 4.37 < privacy.epsilon(RULE, 1) < 5.4
    assert privacy.epsilon(RULE, 10) > privacy.epsilon(RULE, 2) > privacy.epsilon(RULE, 1)
    assert privacy.epsilon({**RULE, "noise": 20.0}, 1) < 0.5


def test_an_update_is_clipped_and_noisy_around_what_was_sent() -> None:
    known = Tensors({"w": torch.full((10_000,), 5.0)})
    update = {"body": Tensors({"w": known["w"] + 3.0})}  # of length 300
    quiet, _ = privacy.protect({**RULE, "noise": 1e-9}, update, {"body": known}, b"secret")
    length = (quiet["body"]["w"] - known["w"]).norm()  # type: ignore[call-overload]
    assert length == pytest.approx(1.0, abs=1e-3)
    loud, _ = privacy.protect(RULE, update, {"body": known}, b"secret")
    spread = (loud["body"]["w"] - known["w"]).std()  # type: ignore[call-overload]
    assert spread == pytest.approx(2.0, rel=0.05)


def test_a_small_update_is_not_made_longer() -> None:
    update = {"logits": torch.tensor([0.3, 0.4])}
    quiet, _ = privacy.protect({**RULE, "noise": 1e-9}, update, {}, b"secret")
    assert torch.allclose(quiet["logits"], update["logits"], atol=1e-6)  # type: ignore[arg-type]


def test_the_same_call_has_the_same_noise_and_another_one_has_not() -> None:
    """Else the server could ask again and take the mean, or change what it sends and take the difference."""
    update = {"w": torch.ones(5)}
    first, mark = privacy.protect(RULE, update, {}, b"secret")
    again, same = privacy.protect(RULE, update, {}, b"secret")
    other, different = privacy.protect(RULE, update, {"x": 1}, b"secret")
    foreign, _ = privacy.protect(RULE, update, {}, b"another")
    assert torch.equal(first["w"], again["w"])  # type: ignore[arg-type]
    assert mark == same != different
    for found in (other, foreign):
        assert not torch.equal(first["w"], found["w"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["clip", "noise"])
def test_values_that_protect_nothing_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--dp-{name} must be > 0. Got 0."):
        privacy.check({**RULE, name: 0.0})


def test_a_method_that_sends_bare_numbers_is_refused() -> None:
    calls = {"update": {"per_round": 1, "bytes": 0, "values": {"loss": {"kind": "number"}}}}
    with pytest.raises(UserError, match="step update sends 'loss' as well"):
        privacy.promise(RULE, calls, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_data(tmp_path, each=20, public=10)
    make_server(tmp_path)
    return tmp_path


def test_a_run_tells_what_it_has_cost(root: Path) -> None:
    link = Near({name: make_kit(root, name) for name in NAMES})
    result = conduct(root, link, {"method": "fedrep", "hyper": {"head_epochs": 1}}, privacy=RULE)
    spent = {(round, client): value for round, client, name, value in result.logs if name == "epsilon"}
    assert spent[1, 0] == pytest.approx(privacy.epsilon(RULE, 1))
    assert spent[2, 2] == pytest.approx(privacy.epsilon(RULE, 2))
    plain = conduct(root, link, {"method": "fedrep", "hyper": {"head_epochs": 1}})
    assert plain.series != result.series
    assert not math.isnan(plain.metrics["personal/local-test"])


def test_a_method_that_can_not_be_protected_does_not_begin(root: Path) -> None:
    """FedDistill says which classes a site has seen."""
    link = Near({name: make_kit(root, name) for name in NAMES})
    with pytest.raises(RunError, match="Site alba can't begin"):
        conduct(root, link, {"method": "feddistill"}, privacy=RULE)
