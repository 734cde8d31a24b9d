"""Differential privacy of what a site shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")
pytest.importorskip("opacus", reason="needs opacus: install pfed[deploy]")

from deploy_helpers import NAMES, conduct, job, make_kit, make_server, near, write_data

from pfed import Result, Tensors
from pfed.deploy import Refused, limits, manifest, privacy, site, worker
from pfed.errors import RunError, UserError

DELTA = 1e-5
RULE = {"clip": 1.0, "noise": 2.0, "delta": DELTA}
CALL = ("run-1", "update", 1, 1, 0)
FEDREP = {"method": "fedrep", "hyper": {"head_epochs": 1}}


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Half the noise, for two data sets may differ by twice the clip: one release with noise 2 is sigma = 1.

    The exact (epsilon, delta) of the Gaussian mechanism with sigma 1 at delta 1e-5 is epsilon = 4.38; Rényi's bound is
    a little above it. More releases cost more, more noise costs less.
    """
    one = privacy.epsilon({2.0: 1}, DELTA)
    assert 4.37 < one < 5.4
    assert privacy.epsilon({2.0: 10}, DELTA) > privacy.epsilon({2.0: 2}, DELTA) > one
    assert privacy.epsilon({20.0: 1}, DELTA) < 0.5
    assert privacy.epsilon({}, DELTA) == 0.0
    assert one < privacy.epsilon({2.0: 1, 20.0: 1}, DELTA) < one + 0.5  # what has other noise adds up as well


def test_an_update_is_clipped_and_noisy_around_what_was_sent() -> None:
    known = Tensors({"w": torch.full((10_000,), 5.0)})
    update = {"body": Tensors({"w": known["w"] + 3.0})}  # of length 300
    quiet, _ = privacy.protect({**RULE, "noise": 1e-9}, update, {"body": known}, b"secret", CALL)
    length = (quiet["body"]["w"] - known["w"]).norm()  # type: ignore[call-overload]
    assert length == pytest.approx(1.0, abs=1e-3)
    loud, _ = privacy.protect(RULE, update, {"body": known}, b"secret", CALL)
    spread = (loud["body"]["w"] - known["w"]).std()  # type: ignore[call-overload]
    assert spread == pytest.approx(2.0, rel=0.05)


def test_a_small_update_is_not_made_longer() -> None:
    update = {"logits": torch.tensor([0.3, 0.4])}
    quiet, _ = privacy.protect({**RULE, "noise": 1e-9}, update, {}, b"secret", CALL)
    assert torch.allclose(quiet["logits"], update["logits"], atol=1e-6)  # type: ignore[arg-type]


def test_the_same_call_has_the_same_noise_and_another_one_has_not() -> None:
    """Else the server could ask again and take the mean, or change what it sends and take the difference."""
    update = {"w": torch.ones(5)}
    first, mark = privacy.protect(RULE, update, {}, b"secret", CALL)
    again, same = privacy.protect(RULE, update, {}, b"secret", CALL)
    other, different = privacy.protect(RULE, update, {"x": 1}, b"secret", CALL)
    foreign, _ = privacy.protect(RULE, update, {}, b"another", CALL)
    louder, _ = privacy.protect({**RULE, "noise": 4.0}, update, {}, b"secret", CALL)
    assert torch.equal(first["w"], again["w"])  # type: ignore[arg-type]
    assert mark == same != different
    for found in (other, foreign):
        assert not torch.equal(first["w"], found["w"])  # type: ignore[arg-type]
    assert not torch.allclose(2 * (first["w"] - 1), louder["w"] - 1, atol=0.1)  # type: ignore[operator]
    for place, value in enumerate(("run-2", "adjust", 2, 2, 1)):
        call = [*CALL[:place], value, *CALL[place + 1 :]]
        assert privacy.protect(RULE, update, {}, b"secret", call)[1] != mark, value


@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38])
def test_what_can_not_be_clipped_does_not_leave(number: float) -> None:
    """The smaller of 1 and clip / nan would be 1. The largest floats are finite, but not their difference."""
    update = {"w": torch.tensor([1.0, number])}
    with pytest.raises(Refused, match="finite"):
        privacy.protect(RULE, update, {"w": torch.tensor([1.0, -3e38])}, b"secret", CALL)


@pytest.mark.parametrize("name", ["clip", "noise"])
def test_values_that_protect_nothing_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--dp-{name} must be > 0. Got 0."):
        privacy.check({**RULE, name: 0.0})


def test_a_method_that_sends_bare_numbers_is_refused() -> None:
    calls = {"update": {"per_round": 1, "bytes": 0, "fixed": True, "values": {"loss": {"kind": "number"}}}}
    with pytest.raises(UserError, match="step update sends 'loss' as well"):
        privacy.promise(RULE, calls, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_data(tmp_path, each=20, public=10)
    make_server(tmp_path)
    return tmp_path


def test_a_run_tells_what_it_has_cost(root: Path) -> None:
    link = near(root)
    result = conduct(root, link, FEDREP, privacy=RULE)
    assert spent(result)[1, 0] == pytest.approx(privacy.epsilon({2.0: 1}, DELTA))
    assert spent(result)[2, 2] == pytest.approx(privacy.epsilon({2.0: 2}, DELTA))
    told = f"{privacy.epsilon({2.0: 2}, DELTA):.4g}"
    line = f"epsilon at delta {DELTA:g}, over all runs of a site: alba {told}, bonn {told}, oslo {told}"
    assert privacy.cost(result, DELTA) == line
    plain = conduct(root, link, FEDREP)
    assert privacy.cost(plain, DELTA).endswith("of a site: no update has left")
    assert plain.series != result.series
    assert not math.isnan(plain.metrics["personal/local-test"])


def spent(result: Result) -> dict[tuple[int, int], float]:
    return {(round, client): value for round, client, name, value in result.logs if name == "epsilon"}


def test_what_runs_cost_adds_up_over_all_of_a_site(root: Path) -> None:
    link = near(root)
    conduct(root, link, FEDREP, privacy=RULE)
    second = conduct(root, link, FEDREP, privacy={**RULE, "noise": 3.0})
    assert spent(second)[2, 0] == pytest.approx(privacy.epsilon({2.0: 2, 3.0: 2}, DELTA))


def test_another_run_needs_another_approval(root: Path) -> None:
    """Who agrees to a manifest agrees to one run by it, and reads what that makes with all before it."""
    link = near(root, approve_within=None)

    def approve() -> float:
        for name in NAMES:
            (file,) = (root / "kits" / name / "manifests").iterdir()
            site.approve(root / "kits" / name, manifest.load(file))
        return json.loads((root / "kits" / "alba" / "epsilon.json").read_text())[repr(DELTA)]  # type: ignore[no-any-return]

    with pytest.raises(RunError, match="Not approved yet at alba, bonn, oslo"):
        conduct(root, link, FEDREP, privacy=RULE)
    first = approve()
    assert first == pytest.approx(privacy.epsilon({2.0: 4}, DELTA))  # a start and a finish may be called too
    assert conduct(root, link, FEDREP, privacy=RULE).state == "complete"
    with pytest.raises(RunError, match="Not approved yet at alba, bonn, oslo"):
        conduct(root, link, FEDREP, privacy=RULE)
    assert approve() == pytest.approx(privacy.epsilon({2.0: 6}, DELTA))
    again = conduct(root, link, FEDREP, privacy=RULE)
    assert spent(again)[2, 0] == pytest.approx(privacy.epsilon({2.0: 4}, DELTA))


def test_no_update_leaves_beyond_what_was_agreed_to(tmp_path: Path) -> None:
    rule = {**RULE, "releases": 3}
    limits.allow(tmp_path, {**rule, "releases": 2})
    one = limits.Releases(tmp_path, "run-1", rule)
    assert [one.admits(mark) for mark in ("a", "b", "a", "c")] == [True, True, True, False]
    assert one.epsilon() == pytest.approx(privacy.epsilon({2.0: 2}, DELTA))
    limits.allow(tmp_path, rule)
    other = limits.Releases(tmp_path, "run-2", rule)
    assert [one.admits(mark) for mark in ("c", "d")] == [True, False]  # the run has three
    assert [other.admits(mark) for mark in ("a", "b", "c")] == [True, True, False]  # and all together five


def test_what_has_no_tensors_is_no_update(root: Path) -> None:
    """FedMD's first step and its last send nothing; only the logits count."""
    for name in NAMES:
        make_kit(root, name, public=str(root / "public"))
    make_server(root, public=str(root / "public"))
    link = near(root, public=str(root / "public"))
    hyper = {"public_epochs": 1, "private_epochs": 1}
    result = conduct(root, link, {"method": "fedmd", "hyper": hyper}, privacy=RULE)
    assert result.state == "complete"
    assert [event for event in result.events if event["kind"] == "error"] == []
    assert spent(result)[2, 0] == pytest.approx(privacy.epsilon({2.0: 2}, DELTA))


@pytest.mark.parametrize(
    ("method", "error"),
    [("feddistill", "step update sends"), ("fedproto", "what step update sends depends on the data")],
)
def test_a_method_that_can_not_be_protected_does_not_begin(method: str, error: str, root: Path) -> None:
    """FedDistill says which classes a site has seen; FedProto sends a tensor for each."""
    with pytest.raises(UserError, match=error):
        conduct(root, near(root), {"method": method}, privacy=RULE)


def test_records_do_not_go_with_privacy(root: Path) -> None:
    with pytest.raises(UserError, match="does not cover what methods log"):
        conduct(root, near(root), FEDREP, privacy=RULE, records=True)
    link = near(root)
    question = {"kind": "begin", "job": job(link, FEDREP, privacy=RULE, records=True)}
    assert worker.answer(link.sites["alba"].answer, question, {})[0] == {"code": "raised", "type": "ValueError"}
