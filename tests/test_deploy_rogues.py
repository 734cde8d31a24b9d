"""One site can't end or hold up everybody's run: what it tells beside a payload, and when it comes back."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import NAMES, Near, again, conduct, data, make_kit, near, plan, root

from pfed import Result, store
from pfed.deploy import jobs, message
from pfed.deploy.controller import Conductor
from pfed.deploy.executor import SiteExecutor
from pfed.engines import nvflare
from pfed.engines.base import Call
from pfed.errors import Paused, RunError
from pfed.wire import Payload

__all__ = ["data", "root"]  # fixtures
FEDREP = {"method": "fedrep", "hyper": {"head_epochs": 1}, "rounds": 3, "checkpoint_every": 1}
Changed = tuple[dict[str, Any], Payload] | None


def events(result: Result) -> list[tuple[int, str, str, str]]:
    names = dict(enumerate(NAMES)) | {-1: ""}
    return [(e["round"], names[e["client"]], e["kind"], e["text"]) for e in result.events if e["kind"] != "note"]


TOLD = {"weight": 20.0, "samples": 20, "records": {"loss": 1.0}}
LISTS = {"records": ["loss"], "privacy": None}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"weight": value} for value in (math.inf, math.nan, -1.0, 1e300, "1", None, True, [1])),
        *({"samples": value} for value in (math.inf, 1.5, -1, "1", None)),
        *({"records": value} for value in ([], None, 3, {"secret": 1.0}, {"epsilon": 1.0}, {"loss": math.nan})),
    ],
)
def test_weights_samples_and_records_are_checked(wrong: dict[str, Any]) -> None:
    assert nvflare._beside(TOLD, LISTS) == (20.0, 20, {"loss": 1.0})
    private = nvflare._beside({**TOLD, "records": {"epsilon": 2}}, {**LISTS, "privacy": {"noise": 1.0}})
    assert private[2] == {"epsilon": 2.0}
    with pytest.raises(ValueError, match=f"its {next(iter(wrong))}"):
        nvflare._beside({**TOLD, **wrong}, LISTS)


@pytest.mark.parametrize("wrong", [{"weight": math.inf}, {"samples": math.inf}, {"records": []}, {"code": 5}])
def test_what_a_site_tells_beside_a_payload_is_checked(wrong: dict[str, Any], root: Path) -> None:
    link = near(root)

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        bad = site == "bonn" and told["round"] == 2 and told["step"] == "update"
        return ({**told, **wrong}, payload) if bad else (told, payload)

    link.change = change
    result = conduct(root, link, FEDREP)
    ((round, site, kind, _),) = events(result)
    assert (round, site, kind) == (2, "bonn", "dropped" if "code" in wrong else "bad reply")
    assert result.state == "complete"
    assert [row["participants"] for row in result.rounds if row["round"]] == [3, 2, 3]


def test_a_metric_that_is_no_number_is_a_bad_reply(root: Path) -> None:
    link = near(root)

    def change(site: str, told: dict[str, Any], payload: Payload) -> Changed:
        bad = site == "alba" and told["round"] == 2 and told["step"] == "@accuracy"
        return told, dict.fromkeys(payload, math.nan) if bad else payload

    link.change = change
    result = conduct(root, link, FEDREP)
    assert events(result) == [(2, "alba", "bad reply", "sent numbers of @accuracy that are not finite")]
    assert {round: sorted(v) for round, v in result.series["personal/local-test"]}[2] == [1, 2]


def paused(root: Path, link: Near, monkeypatch: pytest.MonkeyPatch, **more: Any) -> str:
    """A run that ended for now after round 1."""
    run = plan(root, {**FEDREP, **more})
    turn = nvflare.NVFlare._turn

    def pause(self: Any, round: int) -> None:
        turn(self, round)
        if round == 2:
            raise Paused("for a test")

    with monkeypatch.context() as patch:
        patch.setattr(nvflare.NVFlare, "_turn", pause)
        with pytest.raises(Paused):
            again(root, link, run, Conductor)
    return run


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"approve_within": None}, "it has not approved the run"),
        ({"classes": list("9876543210")}, "its data are not as they were"),
        ({"data": "nowhere"}, "ValueError"),
    ],
)
def test_a_run_goes_on_without_a_site_that_can_not_begin(
    settings: dict[str, Any], why: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = paused(root, near(root), monkeypatch)
    kits = {name: make_kit(root, name) for name in NAMES}
    make_kit(root, "bonn", **settings)
    again(root, Near(kits), run, Conductor)
    result = Result.load(root / "runs" / run)
    assert result.state == "complete"
    assert (1, "bonn", "dropped", f"can't begin ({why}); its log says more.") in events(result)
    assert [row["participants"] for row in result.rounds if row["round"]] == [3, 2, 2]
    assert all(row["test"] > 0 for row in result.clients)


def test_a_run_does_not_go_on_without_enough_sites(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = paused(root, near(root), monkeypatch, min_clients=3)
    kits = {name: make_kit(root, name) for name in NAMES}
    make_kit(root, "bonn", approve_within=None)
    with pytest.raises(RunError, match=r"Site bonn can't begin \(it has not approved the run\)"):
        again(root, Near(kits), run, Conductor)


def test_a_manifest_of_another_shape_does_not_begin_a_run(root: Path) -> None:
    link = near(root)
    begin = link.sites["bonn"].answer
    link.sites["bonn"].answer = lambda about, payload: (  # type: ignore[method-assign]
        ({"manifest": {"calls": 3}, "sizes": {"test": 1}}, {}) if about["kind"] == "begin" else begin(about, payload)
    )
    with pytest.raises(RunError, match=r"Site bonn can't begin \(what it says can't be read\)"):
        conduct(root, link, FEDREP)


def sent(root: Path, run: str, here: list[str], when: float) -> dict[str, Any]:
    """The job of a run as it was sent to these sites."""
    return {**jobs._read(root / "runs" / run, "job"), "here": here, "sent": when}


def test_a_resume_asks_only_those_that_it_was_sent_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes in who came after they were looked for, even before the run has started."""
    run, kit = paused(root, near(root), monkeypatch), root / "kits" / "server"
    link, asked = near(root), list[str]()
    echo = link.echo
    monkeypatch.setattr(link, "echo", lambda site: (asked.append(site), echo(site))[1])
    link.silent.add("bonn")
    arrivals = kit / "arrivals"
    arrivals.mkdir()
    (arrivals / "bonn").touch()
    now = time.time() - 100
    os.utime(arrivals / "bonn", (now + 1, now + 1))
    with pytest.raises(Paused, match="bonn came back: the run goes on with it from round 2"):
        Conductor(link, sent(root, run, ["alba", "oslo"], now), kit).run()
    Conductor(link, sent(root, run, ["alba", "oslo"], now + 2), kit).run()
    assert "bonn" not in asked
    result = Result.load(root / "runs" / run)
    assert [row["participants"] for row in result.rounds if row["round"]] == [3, 2, 2]


def test_a_site_has_come_back_if_it_came_after_its_last_answer(tmp_path: Path) -> None:
    came = {"alba": 0.0}
    engine = nvflare.NVFlare(
        Near({}), "run-1", ["alba"], {}, 1.0, tmp_path, store.Store(None).states, came.__getitem__, sent=10.0
    )
    engine._turn(1)
    came["alba"] = 11.0
    with pytest.raises(Paused, match="alba came back"):
        engine._turn(2)
    engine._seen[0] = 12.0
    engine._turn(3)


class Slow:
    """A worker that takes its time over the first question."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.busy, self.go = threading.Event(), threading.Event()

    def ask(self, about: dict[str, Any], payload: Payload, stopped: Any) -> Any:
        self.asked.append(about["version"])
        self.busy.set()
        self.go.wait(60)
        return {"code": "ok"}, {}


def answers(executor: SiteExecutor, worker: Slow, *questions: dict[str, Any]) -> list[str]:
    """The codes of questions that come while the first one is at work."""
    codes = [""] * len(questions)

    def put(place: int) -> None:
        reply = executor.execute("pfed", message.pack(questions[place], {}), None, nvflare.Signal())
        codes[place] = message.unpack(reply)[0]["code"]

    threads = [threading.Thread(target=put, args=(place,)) for place in range(len(questions))]
    for number, thread in enumerate(threads):
        thread.start()
        worker.busy.wait(60)
        while executor._newest < number:
            time.sleep(0.01)
    time.sleep(0.3)
    worker.go.set()
    for thread in threads:
        thread.join(60)
    return codes


@pytest.mark.parametrize(
    ("patience", "codes", "done"),
    [([60.0, 60.0, 60.0], ["ok", "late", "ok"], [0, 2]), ([60.0, 0.1], ["ok", "late"], [0])],
)
def test_late_questions_do_not_pile_up_at_a_slow_site(patience: list[float], codes: list[str], done: list[int]) -> None:
    """One that was overtaken by a newer one, or that nobody waits for any more, is not worked on."""
    executor, worker = SiteExecutor(), Slow()
    executor._worker = worker  # type: ignore[assignment]
    questions = [{"kind": "step", "version": i, "patience": seconds} for i, seconds in enumerate(patience)]
    assert answers(executor, worker, *questions) == codes
    assert worker.asked == done


def test_a_site_that_says_it_was_late_is_late() -> None:
    call = Call("update", 1, {}, {}, {}, 1)
    assert nvflare._failure(call.step, {"code": "late"}).kind == "late"


def test_a_stop_while_sites_are_waited_for_is_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, run = near(root), plan(root, FEDREP)
    link.silent |= set(NAMES)
    monkeypatch.setattr(Near, "aborted", property(lambda self: True))
    with pytest.raises(Paused, match="The run was stopped"):
        again(root, link, run, Conductor)
    assert jobs._read(root / "runs" / run, "state") == "stopped"
    assert jobs._events(root / "runs" / run, "failed") == []


def test_how_an_earlier_job_ended_is_not_told_of_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "runs" / plan(root, FEDREP)
    with contextlib.closing(store.Store(folder)) as opened:
        opened.record.event(0, "failed", "an old story")
        opened.record.set(state="failed")
    given: list[dict[str, Any]] = []

    class Admin:
        def get_system_info(self) -> Any:
            return type("Info", (), {"client_info": [type("Client", (), {"name": name}) for name in NAMES]})

    monkeypatch.setattr(jobs, "session", lambda folder: contextlib.nullcontext(Admin()))
    monkeypatch.setattr(jobs, "_submit", lambda admin, job, here: given.append(job) or "1")
    monkeypatch.setattr(jobs, "_watch", lambda *of: None)
    before = time.time()
    with pytest.raises(RunError, match="ended 3 times without a new round"):
        jobs.follow(root, folder, print)
    assert given[0]["here"] == list(NAMES)
    assert before <= given[0]["sent"] <= time.time()
    assert jobs._events(folder, "note") == []


def test_a_server_that_ended_in_mid_run_is_in_the_record(root: Path) -> None:
    folder = root / "runs" / plan(root, FEDREP)
    for state in ("stopped", "failed", "running"):
        with contextlib.closing(store.Store(folder)) as opened:
            opened.record.set(state=state)
        jobs._forget_end(folder)
    assert jobs._events(folder, "note") == [f"{jobs.LOST}: the run goes on from its last checkpoint"]
    assert jobs._read(folder, "state") == "stopped"


def test_the_job_of_a_run_is_found_by_its_whole_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "locked", lambda run: True)
    names = ["run-10", "run-1", "run-12"]

    class Admin:
        def list_jobs(self, name_prefix: str) -> list[dict[str, str]]:
            found = [name for name in names if name.startswith(name_prefix)]
            return [{"job_id": f"id of {name}", "job_name": name, "status": "RUNNING"} for name in found]

    assert jobs._at_work(Admin(), root / "run-1") == "id of run-1"
    assert jobs._at_work(Admin(), root / "run") is None
