"""What goes wrong in a federation, with sites inside this process: a clear line in the record, and nothing lost."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import NAMES, Near, again, conduct, data, left_behind, make_kit, near, plan, root, same, simulate

from pfed import Result, Tensors, store
from pfed.deploy import jobs
from pfed.deploy.controller import Conductor
from pfed.engines import nvflare
from pfed.errors import Paused, RunError
from pfed.wire import Payload

__all__ = ["data", "root"]  # fixtures
FEDREP = {"method": "fedrep", "hyper": {"head_epochs": 1}, "rounds": 3, "checkpoint_every": 1}
Changed = tuple[dict[str, Any], Payload] | None


def events(result: Result) -> list[tuple[int, str, str, str]]:
    names = dict(enumerate(NAMES)) | {-1: ""}
    return [(e["round"], names[e["client"]], e["kind"], e["text"]) for e in result.events if e["kind"] != "note"]


def _nan(payload: Payload) -> Payload:
    return {"body": Tensors({n: torch.full_like(t, torch.nan) for n, t in payload["body"].items()})}  # type: ignore


def _shape(payload: Payload) -> Payload:
    return {"body": Tensors({n: t[:1] for n, t in payload["body"].items()})}  # type: ignore[union-attr]


def _name(payload: Payload) -> Payload:
    return {"body": Tensors({f"{n}.secret": t for n, t in payload["body"].items()})}  # type: ignore[union-attr]


def _key(payload: Payload) -> Payload:
    return {**payload, "extra": 3.0}


def _tenfold(payload: Payload) -> Payload:
    return {"body": Tensors({n: t.repeat(10, *[1] * (t.dim() - 1)) for n, t in payload["body"].items()})}  # type: ignore


BAD = {
    "nan": (_nan, "is not finite"),
    "shape": (_shape, "sent a shape that its manifest does not list"),
    "name": (_name, "sent a name that its manifest does not list"),
    "key": (_key, "sent a name that its manifest does not list"),
    "lack": (lambda payload: {}, "sent less than it lists"),
    "list": (lambda payload: {"body": [1.0]}, "sent a kind of value that its manifest does not list"),
    "tenfold": (_tenfold, "sent a size that its manifest does not list"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_is_a_failure_of_that_site_alone(fault: str, root: Path) -> None:
    spoil, text = BAD[fault]
    link = near(root)

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        bad = site == "bonn" and told["round"] == 2 and told["step"] == "update"
        return told, spoil(payload) if bad else payload

    link.change = change
    result = conduct(root, link, FEDREP)
    ((round, site, kind, said),) = events(result)
    assert (round, site, kind) == (2, "bonn", "bad reply")
    assert text in said
    assert result.state == "complete"
    assert [row["participants"] for row in result.rounds if row["round"]] == [3, 2, 3]


def test_more_bytes_than_announced_are_refused_before_they_are_looked_at(root: Path) -> None:
    """A tensor of the right name and shape may still be too much, where the manifest has a smaller sum."""
    from pfed.deploy import manifest

    listed = {"kind": "tensors", "packed": True, "names": {"w": ["float32", 10]}}
    calls = {"update": {"per_round": 1, "bytes": 40, "values": {"a": listed, "b": listed}}}
    part = Tensors({"w": torch.zeros(10)})
    assert manifest.fault(calls, "update", {"a": part}) is None
    assert manifest.fault(calls, "update", {"a": part, "b": part}) == "size"


def test_a_step_that_raises_tells_its_type_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pfed.methods.fedrep import FedRep

    class PatientSmith(ValueError):
        pass

    original = FedRep.update

    def update(self: FedRep, client: Any, body: Tensors) -> Any:
        if client.id == 2 and client.round == 2:
            raise PatientSmith("patient 12345")
        return original(self, client, body)

    update._pfed_step = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedRep, "update", update)
    link = near(root)
    result = conduct(root, link, FEDREP)
    assert events(result) == [(2, "oslo", "error", "update raised ValueError; its log says more")]
    assert not any(word in data for data in link.received for word in (b"12345", b"PatientSmith"))


def test_a_site_that_is_gone_is_left_out_and_taken_in_again(root: Path) -> None:
    """It drops out in round 1; when it has come back, the run pauses before the next round and goes on with it."""
    link = near(root)
    run = plan(root, FEDREP)
    arrivals = root / "kits" / "server" / "arrivals"
    arrivals.mkdir()

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        if site == "bonn":
            link.silent.add(site)
            return None
        if told["round"] == 2:
            (arrivals / "bonn").touch()
        return told, payload

    link.change = change
    with pytest.raises(Paused, match="bonn came back: the run goes on with it from round 3"):
        again(root, link, run, Conductor)
    link.silent.clear()
    link.change = None
    again(root, link, run, Conductor)
    result = Result.load(root / "runs" / run)
    assert [row["participants"] for row in result.rounds if row["round"]] == [2, 2, 3]
    assert (1, "bonn", "dropped", "is not connected any more (no answer)") in events(result)
    assert (2, "bonn", "dropped", "is not connected") in events(result)
    assert result.state == "complete"


def test_a_site_beyond_the_deadline_is_late_and_takes_part_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvflare, "LOOK", 0.5)
    link = near(root)
    ask = link.ask
    slow = {"left": 1}

    def dawdle(site: str, about: Any, payload: Payload, timeout: float, given_up: Any = None) -> Any:
        if site == "oslo" and about.get("round") == 2 and about["step"] == "update" and slow["left"]:
            slow["left"] = 0
            time.sleep(timeout + 1)
        return ask(site, about, payload, timeout)

    link.ask = dawdle  # type: ignore[method-assign]
    result = conduct(root, link, FEDREP, deadline=8.0)
    assert events(result) == [(2, "oslo", "late", "did not answer within 8 seconds")]
    assert [row["participants"] for row in result.rounds if row["round"]] == [3, 2, 3]


def test_a_site_that_can_not_be_judged_does_not_end_the_run(root: Path) -> None:
    link = near(root)

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        lost = site == "alba" and told["round"] == 2 and told["step"] == "@accuracy"
        return ({"code": "raised", "type": "MemoryError"}, {}) if lost else (told, payload)

    link.change = change
    result = conduct(root, link, FEDREP)
    assert events(result) == [(2, "alba", "error", "@accuracy raised MemoryError; its log says more")]
    judged = {round: sorted(values) for round, values in result.series["personal/local-test"]}
    assert judged == {1: [0, 1, 2], 2: [1, 2], 3: [0, 1, 2]}
    assert result.state == "complete"


def test_sites_that_know_of_a_stop_before_the_server_have_not_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = near(root)
    run = plan(root, FEDREP)
    known = threading.Event()
    monkeypatch.setattr(Near, "aborted", property(lambda self: known.is_set()))

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        if told["round"] < 2:
            return told, payload
        threading.Timer(0.5, known.set).start()
        return {"code": "stopped"}, {}

    link.change = change
    with pytest.raises(Paused, match="The run was stopped"):
        again(root, link, run, Conductor)
    result = Result.load(root / "runs" / run)
    assert (result.state, result.rounds[-1]["round"]) == ("stopped", 1)


def test_a_run_that_is_asked_to_stop_is_not_sent_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 'pfed stop' or the live page; whoever follows the run ends, too, and can go on later."""
    link, run, sent = near(root), plan(root, FEDREP), list[str]()
    folder = root / "runs" / run

    def send(*of: Any) -> None:
        sent.append("job")
        with contextlib.suppress(KeyboardInterrupt):
            again(root, link, run, Conductor)

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        if told["round"] == 1:
            store.ask_to_stop(folder, "'pfed stop'")
        return told, payload

    link.change = change
    monkeypatch.setattr(jobs, "_send", send)
    with pytest.raises(KeyboardInterrupt, match=f"Stopped after round 1; go on with --resume {run}"):
        jobs.follow(root, folder, print)
    assert sent == ["job"]
    assert (Result.load(folder).state, events(Result.load(folder))[-1][2:]) == (
        "stopped",
        ("stopped", "'pfed stop' asked for it."),
    )
    link.change = None
    assert jobs.follow(root, folder, print).state == "complete"


def test_too_few_sites_stop_the_run_with_its_checkpoint_good(root: Path) -> None:
    link = near(root)
    link.change = lambda site, told, payload: (told, payload if told["round"] < 2 else _key(payload))
    run = plan(root, {**FEDREP, "min_clients": 2})
    with pytest.raises(RunError, match="Round 2: 0 clients answered, min_clients is 2"):
        again(root, link, run, Conductor)
    link.change = None
    again(root, link, run, Conductor)
    result = Result.load(root / "runs" / run)
    assert result.state == "complete"
    assert result.series == simulate(root, {**FEDREP, "min_clients": 2})[0].series


@pytest.mark.parametrize("when", ["before the site", "after the site"])
def test_a_server_that_is_killed_goes_on_bit_for_bit(when: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's newest version may be one that the server never accepted: the call names the one to build on."""
    kits = {name: make_kit(root, name) for name in NAMES}
    link = Near(kits)
    run = plan(root, FEDREP)

    class Kill(BaseException):
        pass

    judge = nvflare.NVFlare._judge

    def dying(self: Any, call: Any, client: int, found: Any) -> Any:
        if call.round == 2 and call.step == "update" and client == (0 if when == "before the site" else 2):
            raise Kill
        return judge(self, call, client, found)

    with monkeypatch.context() as patch:
        patch.setattr(nvflare.NVFlare, "_judge", dying)
        with pytest.raises(Kill):
            again(root, link, run, Conductor)
    second = Near(kits)  # the sites have been started anew too
    again(root, second, run, Conductor)
    result = Result.load(root / "runs" / run)
    expected, server, states = simulate(root, FEDREP)
    assert result.series == expected.series
    found, private = left_behind(root, run, kits)
    assert same(found, server)
    assert all(same(private[client], states[client]) for client in states)


def test_a_site_that_lost_its_state_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kits = {name: make_kit(root, name) for name in NAMES}
    link = Near(kits)
    run = plan(root, {**FEDREP, "rounds": 2})
    turn = nvflare.NVFlare._turn

    def pause(self: Any, round: int) -> None:
        turn(self, round)
        if round == 2:
            raise Paused("for a test")

    with monkeypatch.context() as patch:
        patch.setattr(nvflare.NVFlare, "_turn", pause)
        with pytest.raises(Paused):
            again(root, link, run, Conductor)
    for file in (kits["alba"] / "runs" / run).glob("version-*"):
        file.write_bytes(file.read_bytes()[:-1])
    again(root, Near(kits), run, Conductor)
    result = Result.load(root / "runs" / run)
    assert (2, "alba", "error", "has lost the private state that this round builds on") in events(result)


@pytest.mark.parametrize(("every", "kept"), [(1, [4, 5, 6]), (0, [5, 6])])
def test_a_site_keeps_the_versions_that_checkpoints_name(every: int, kept: list[int], root: Path) -> None:
    """With a checkpoint in every round: those of the two newest, and the one before them. Without: the newest two."""
    kits = {name: make_kit(root, name) for name in NAMES}
    result = conduct(root, Near(kits), {**FEDREP, "rounds": 6, "checkpoint_every": every})
    found = sorted(int(file.name[8:]) for file in (kits["alba"] / "runs" / result.run).glob("version-*"))
    assert found == kept
