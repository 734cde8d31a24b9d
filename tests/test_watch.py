"""The live page's server: only for whoever has the token, true to the runs, and out of their way."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from watch_helpers import Visitor, serving

from pfed import store
from pfed.cohort import Ledger
from pfed.evaluate import Evaluation
from pfed.result import MAIN
from pfed.store import Store
from pfed.watch import Server
from pfed.watch.guard import NO_TOKEN, POLICY
from pfed.watch.runs import Run, Runs

EVIL = '"><img src=x onerror=alert(1)><script>alert(2)<|script>'


def add(opened: Store, t: int, accuracy: float | None = None, seconds: float = 2.0) -> None:
    judged = Evaluation(clients={(0, MAIN): accuracy, (1, MAIN): accuracy}) if accuracy is not None else None
    opened.record.add_round(t, seconds, Ledger(up={0: 1000}, down={0: 500}), judged)


@contextlib.contextmanager
def begun(folder: Path, rounds: int = 20, **facts: Any) -> Iterator[Store]:
    """A run of two clients that goes on, without any training."""
    folder.mkdir(parents=True)
    with contextlib.closing(Store(folder)) as opened:
        opened.record.add_clients([(0, "Oslo", 10, 5, [10, 0]), (1, "Rome", 11, 5, [1, 10])])
        config = {"method": "fedavg", "data": "digits", "rounds": rounds, "seed": 3, "select": "last"}
        told = {"config": config, "method": "fedavg", "data": "digits", "seed": 3, "created": 5.0, "state": "running"}
        opened.record.set(**{**told, **facts})
        opened.record.add_round(0, 0.0, Ledger(), None)
        yield opened


def finished(folder: Path, rounds: int = 3, **facts: Any) -> Path:
    with begun(folder, rounds, **facts) as opened:
        for t in range(1, rounds + 1):
            add(opened, t, 0.5 + 0.1 * t)
        opened.record.set(state="complete")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("runs")
    finished(runs / "one")
    finished(runs / "two")
    with serving(runs) as started:
        yield started


@pytest.fixture
def visitor(server: Server) -> Visitor:
    return Visitor(server.address())


@pytest.mark.parametrize("path", ["/", "/events", "/report?run=one", "/page.js", "/nothing", "/?token=", "/?token=%ff"])
def test_without_the_token_nobody_sees_anything(server: Server, path: str) -> None:
    answer = Visitor(server.address(), enter=False).get(path)
    assert (answer.code, answer.text) == (403, NO_TOKEN)
    assert Visitor(server.address(), enter=False).get(path, Cookie="pfed-watch-1=x").code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: Server) -> None:
    """No script sees the cookie, and no page of another site sends it."""
    stranger = Visitor(server.address(), enter=False)
    answer = stranger.get(f"/?{urlsplit(server.address()).query}&run=one&run=a%26b")
    assert (answer.code, answer.headers["Location"]) == (303, "/?run=one&run=a%26b")
    cookie, *kinds = answer.headers["Set-Cookie"].split("; ")
    assert {kind.lower() for kind in kinds} == {"httponly", "samesite=strict", "path=/"}
    token = urlsplit(server.address()).query.removeprefix("token=")
    assert token not in cookie
    assert len(token) > 40
    assert stranger.get("/", Cookie=cookie).code == 200


def test_a_token_for_a_browser_is_good_once(server: Server) -> None:
    """Others can read the command line that starts a browser."""
    query = urlsplit(server.address(once=True)).query
    stranger = Visitor(server.address(), enter=False)
    assert [stranger.get(f"/?{query}").code for _ in range(2)] == [303, 403]


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:PORT", 200),
        ("localhost:PORT", 200),
        ("LOCALHOST:PORT", 200),
        ("[::1]:PORT", 200),
        ("127.0.0.1", 421),
        ("127.0.0.1:1", 421),
        ("evil.example:PORT", 421),
        ("10.0.0.1:PORT", 421),
        ("", 400),  # HTTP itself wants one
    ],
)
def test_only_our_own_names_lead_here(visitor: Visitor, host: str, code: int) -> None:
    """A foreign name that its owner lets lead to 127.0.0.1 would make our page one of theirs."""
    assert visitor.get("/", Host=host.replace("PORT", str(visitor.port))).code == code


def test_all_addresses_of_a_machine_that_is_open_to_the_network(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as server:
        assert urlsplit(server.address()).hostname == socket.gethostname().lower()
        visitor = Visitor(server.address())
        port = visitor.port
        hosts = [f"10.1.2.3:{port}", f"{socket.gethostname()}:{port}", f"evil.example:{port}", f"localhost:{port}"]
        assert [visitor.get("/", Host=host).code for host in hosts] == [200, 200, 421, 200]


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:PORT"])
def test_no_other_page_may_stop_a_run(visitor: Visitor, origin: str) -> None:
    given = origin.replace("PORT", str(visitor.port))
    answer = visitor.get("/stop?run=one", "POST", Origin=given)
    assert (answer.code, answer.text) == (403, "Only the live page itself may ask for that.")
    assert visitor.get("/stop?run=one").code == 405


def test_every_answer_is_strict(visitor: Visitor) -> None:
    for path in ("/", "/page.js", "/page.css", "/report.css", "/report?run=one", "/nothing"):
        headers = visitor.get(path).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    assert "script-src 'self';" in POLICY
    text = visitor.get("/").text
    assert re.findall(r"<script(?! src=)|<style| on\w+=| style=|https?:", text) == []


@pytest.mark.parametrize(
    "path",
    ["/../runs", "/%2e%2e/runs", "/runs.py", "/page.html", "/..%2fpage.css", "/static/", "/report?run=../one",
     "/report?run=/etc", "/report?run=", "/report?run=%00", "/report?run=one&run=One"],
)  # fmt: skip
def test_there_is_nothing_else(visitor: Visitor, path: str) -> None:
    assert visitor.get(path).code == 404


def test_a_run_is_stopped_by_its_name_only(visitor: Visitor) -> None:
    for name, said in {
        "one": "Run 'one' is not running.",
        "../one": "There is no run '../one'. Did you mean 'one'?",
    }.items():
        answer = visitor.stop(name)
        assert (answer.code, json.loads(answer.text)) == (409, {"error": said})


def test_the_report_is_that_of_the_command(server: Server, visitor: Visitor) -> None:
    """The page takes the part between the tags; what is saved is the whole file."""
    whole = visitor.get("/report?run=one&run=two&save=1")
    assert whole.headers["Content-Disposition"] == 'attachment; filename="report.html"'
    part = visitor.get("/report?run=one&run=two").text
    assert part.startswith("<main>")
    assert part in whole.text
    assert "2 runs, seed 3." in part
    assert "<style" not in part


def test_evil_names_do_nothing(tmp_path: Path) -> None:
    finished(tmp_path / EVIL, method=EVIL, data=EVIL)
    with serving(tmp_path, EVIL) as server:
        visitor = Visitor(server.address())
        with visitor.events() as events:
            (row,) = next(events)["runs"]
        assert row["run"] == EVIL
        assert quote(EVIL, safe="") in visitor.get(f"/?{urlsplit(server.address()).query}").headers["Location"].replace(
            "+", "%20"
        )
        answer = visitor.get(f"/report?run={quote(EVIL)}")
    assert answer.code == 200
    assert re.findall(r"<img|<script(?! type=\"application/json\">)", answer.text) == []


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    finished(tmp_path / "caf\udce9")
    runs = Runs(tmp_path)
    runs.look()
    assert list(runs.known) == ["caf?"]
    assert runs.find("caf?").folder == tmp_path / "caf\udce9"


def test_what_is_told_of_a_run(tmp_path: Path) -> None:
    """Round, accuracy, bytes, time per round and time left; what was read is not read again."""
    with begun(tmp_path / "run", rounds=10) as opened:
        run = Run(tmp_path / "run")
        assert run.look()
        assert (run.shown["state"], run.shown["round"], run.shown["accuracy"], run.shown["rest"]) == (
            "running",
            0,
            "–",
            "–",
        )
        assert not run.look()
        add(opened, 1, 0.5)
        add(opened, 2)
        assert run.look()
        told = {key: run.shown[key] for key in ("about", "round", "rounds", "accuracy", "sent", "per_round")}
        assert told == {
            "about": "fedavg, digits, seed 3", "round": 2, "rounds": 10, "accuracy": "50.00 %", "sent": "3 kB",
            "per_round": "2.00 s",
        }  # fmt: skip
        add(opened, 3, 0.75, seconds=5.0)
        assert run.look()
        assert (run.shown["accuracy"], run.shown["per_round"], run.version) == ("75.00 %", "3.00 s", 3)
        store.ask_to_stop(tmp_path / "run", "A test")
        assert run.look()
        assert run.shown["stopping"]
    assert run.look()
    assert (run.shown["state"], run.shown["stopping"], run.shown["rest"]) == ("died", False, "–")


def test_the_time_left_counts_what_is_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 2 s that come every 10 s, as with a long evaluation: 6 that are left take a minute."""
    from pfed.watch import runs

    with begun(tmp_path / "run", rounds=10) as opened:
        run = Run(tmp_path / "run")
        for t in range(1, 5):
            add(opened, t)
            monkeypatch.setattr(runs, "_stamp", lambda folder, t=t: ((t * 10 * 10**9, t),))
            run.look()
            assert run.shown["rest"] == ("18 s" if t == 1 else "1 min")


def test_rounds_that_are_run_again_count_once(tmp_path: Path) -> None:
    with begun(tmp_path / "run") as opened:
        run = Run(tmp_path / "run")
        for t in (1, 2, 3):
            add(opened, t, 0.1 * t)
        run.look()
        opened.record.forget_after(1)
        run.look()
        assert (run.shown["round"], run.shown["sent"], run.shown["accuracy"]) == (1, "1.5 kB", "10.00 %")
        for t in (2, 3, 4):
            add(opened, t, 0.2 * t, seconds=1.0)
        run.look()
        assert (run.shown["round"], run.shown["sent"], run.shown["accuracy"]) == (4, "6 kB", "80.00 %")


def test_looking_leaves_no_trace_and_takes_no_lock(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    with serving(tmp_path) as server:
        visitor = Visitor(server.address())
        with visitor.events() as events:
            next(events)
        before = sorted(path.name for path in folder.iterdir())
        assert visitor.get("/report?run=run").code == 200
        assert not store.locked(folder)
    assert sorted(path.name for path in folder.iterdir()) == before == ["journal", "lock", "record.sqlite"]


def test_damaged_runs_and_those_that_go_do_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        finished(tmp_path / name)
    (tmp_path / "bad" / "record.sqlite").write_bytes(b"rubbish" * 1000)
    runs = Runs(tmp_path)
    assert runs.look()
    assert {key: run.shown["state"] for key, run in runs.known.items()} == {"bad": "damaged", "good": "complete"}
    assert not runs.look()
    store.remove(tmp_path / "bad")
    assert runs.look()
    assert list(runs.known) == ["good"]
