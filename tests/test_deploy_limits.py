"""How often a site answers: other names, versions and texts of a question do not make it answer more."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import ask, begun, body_of, conduct, data, job, make_kit, near, root

from pfed import Result, Tensors
from pfed.deploy import manifest, site, worker

__all__ = ["data", "root"]  # fixtures
FEDREP = {"method": "fedrep", "hyper": {"head_epochs": 1}}
CALLS = {"code": "refused", "why": "calls"}


def begin(link: Any, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return worker.answer(link.sites["alba"].answer, {"kind": "begin", "job": job(link, config, **more)}, {})[0]


def other(body: Tensors, number: int) -> Tensors:
    return Tensors({name: tensor + number for name, tensor in body.items()})


def test_a_round_has_so_many_calls_whatever_they_are_called(root: Path) -> None:
    """One, and as many more as a round may be done again: another payload is another call, under any version."""
    at, listed = begun(root, FEDREP)
    body, most = body_of(listed), listed["calls"]["update"]["per_round"] + listed["repeats"]
    assert listed["calls"]["update"]["per_round"] == 1
    for number in range(most):
        assert ask(at, "update", {"body": other(body, number)})["code"] == "ok"
    assert ask(at, "update", {"body": other(body, most)}) == CALLS
    assert ask(at, "update", {"body": body}, version=2) == CALLS
    assert ask(at, "update", {"body": body})["code"] == "ok"  # the same call once more, as after a lost reply
    assert ask(at, "update", {"body": body}, round=2, version=3)["code"] == "ok"


def test_an_evaluation_has_so_many_calls_too(root: Path) -> None:
    at, listed = begun(root, FEDREP)
    body, most = body_of(listed), listed["calls"]["@accuracy"]["per_round"] + listed["repeats"]
    for number in range(most):
        assert ask(at, "@accuracy", {"body": other(body, number)}, version=None)["code"] == "ok"
    assert ask(at, "@accuracy", {"body": other(body, most)}, version=None) == CALLS
    assert ask(at, "@accuracy", {"body": body}, version=None)["code"] == "ok"


def test_a_restart_does_not_make_a_site_forget_its_calls(root: Path) -> None:
    at, listed = begun(root, FEDREP)
    body, most = body_of(listed), 1 + listed["repeats"]
    for number in range(most):
        assert ask(at, "update", {"body": other(body, number)})["code"] == "ok"
    assert at._run is not None
    at._run.close()
    at, _ = begun(root, FEDREP)
    assert ask(at, "update", {"body": other(body, most)}) == CALLS


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, -1, [1]])
@pytest.mark.parametrize("name", ["round", "base", "since", "version"])
def test_numbers_of_a_question_are_whole_numbers(name: str, wrong: Any, root: Path) -> None:
    """True is 1 and 1.0 is 1 as well, but they are other texts: calls under them would be counted apart."""
    at, listed = begun(root, FEDREP)
    told = ask(at, "update", {"body": body_of(listed)}, **{name: wrong})
    assert told == {"code": "refused", "why": "step" if (name, wrong) == ("version", None) else "question"}


@pytest.mark.parametrize("change", [{"seed": 5}, {"local": {"lr": 0.5}}, {"method": "fedper"}, {"test_fraction": 0.5}])
def test_a_run_does_not_build_on_the_private_state_of_another(change: dict[str, Any], root: Path) -> None:
    """A method that shares all that FedRep keeps could else be run under the same name and send it."""
    link, changed = near(root), {**FEDREP, **change}
    if "method" in change:
        del changed["hyper"]
    assert begin(link, FEDREP)["code"] == "ok"
    assert begin(link, FEDREP)["code"] == "ok"  # the same run goes on
    assert begin(link, changed) == {"code": "refused", "why": "run"}
    assert begin(link, changed, run="test-2")["code"] == "ok"


def test_a_folder_of_a_run_without_a_manifest_is_nobodys(root: Path) -> None:
    link = near(root)
    folder = root / "kits" / "alba" / "runs" / "test-1"
    folder.mkdir(parents=True)
    (folder / "version-00000001").touch()
    assert begin(link, FEDREP) == {"code": "refused", "why": "run"}


def test_a_run_whose_facts_are_not_the_sites_does_not_begin(root: Path) -> None:
    """Else the server could have a manifest made for other data than are there."""
    link = near(root)
    told = job(link, FEDREP)
    told["facts"]["classes"] = 20
    question = {"kind": "begin", "job": told}
    assert worker.answer(link.sites["alba"].answer, question, {})[0] == {"code": "refused", "why": "facts"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_leave(number: float, root: Path) -> None:
    at, listed = begun(root, FEDREP)
    body = Tensors({name: torch.full_like(tensor, number) for name, tensor in body_of(listed).items()})
    assert ask(at, "update", {"body": body}) == {"code": "refused", "why": "finite"}
    assert not list((root / "kits" / "alba" / "runs" / "test-1").glob("version-*"))


def test_a_sites_own_record_has_the_time_of_its_training(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(site.time, "perf_counter", lambda: float(next(clock)))
    result = conduct(root, near(root), FEDREP)
    own = Result.load(root / "kits" / "alba" / "runs" / result.run)
    assert [row["seconds"] for row in own.rounds] == [1.0, 1.0]


def test_the_secret_of_a_site_is_whole_and_stays(root: Path) -> None:
    kit = make_kit(root, "alba")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(site._secret(kit))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert (kit / "local" / "secret").stat().st_mode & 0o77 == 0
    assert [file.name for file in (kit / "local").iterdir() if file.name not in ("secret", "pfed.json")] == []
    (kit / "local" / "secret").write_bytes(b"")
    with pytest.raises(site.UserError, match=r"must have 32 bytes\. Got 0\."):
        site._secret(kit)


def test_a_manifest_is_read_tensor_by_tensor(root: Path) -> None:
    listed = begun(root, FEDREP)[1]
    text = manifest.text(listed)
    for name, (dtype, *shape) in listed["calls"]["update"]["values"]["body"]["names"].items():
        assert any(name in line and dtype in line and " × ".join(map(str, shape)) in line for line in text.splitlines())
    assert f"up to {listed['repeats']} more" in text
    assert "seed 0" in text
    assert json.loads((root / "kits" / "alba" / "runs" / "test-1" / "manifest.json").read_text()) == json.loads(
        json.dumps(listed, default=list)
    )
