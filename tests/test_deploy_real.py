"""Federations of real processes: equal results, and each fault with processes that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import NAMES, left_behind, same, simulate, write_data
from deploy_processes import Federation, rounds, show, until
from test_deploy_sites import METHODS

from pfed import cli
from pfed.deploy import jobs, parents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = {"method": "fedrep", "hyper": {"head_epochs": 40}, "rounds": 8, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    root = tmp_path_factory.mktemp("real")
    write_data(root)
    made = Federation(root, NAMES)
    try:
        made.start()
        yield made
    finally:
        made.stop()
    assert made.left() == []


def check_equal(federation: Federation, run: Path, config: dict[str, Any]) -> None:
    from pfed import Result

    expected, server, states = simulate(federation.root, config)
    assert Result.load(run).series == expected.series
    places = {name: federation.folder / name for name in NAMES}
    found, private = left_behind(federation.root, run.name, places)
    assert same(found, server)
    assert all(same(private[client], states[client]) for client in states)


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_gives_the_same_bits_as_a_simulation(method: str, federation: Federation) -> None:
    config = {"method": method, **METHODS[method]}
    result = federation.run(config)
    assert result.state == "complete"
    assert result.folder is not None
    check_equal(federation, result.folder, config)


def test_a_worker_that_is_killed_in_mid_step_costs_nothing(federation: Federation) -> None:
    run = federation.plan(LONG)
    done = federation.follow(run)
    until(lambda: rounds(run) >= 2, "two rounds")
    federation.kill("bonn", "pfed.deploy.worker")
    result = done.result()
    show(result)
    assert [row["participants"] for row in result.rounds if row["round"]] == [3] * 8
    assert any("bonn: its process died in round" in event["text"] for event in result.events)
    check_equal(federation, run, LONG)


def test_a_site_that_is_killed_and_started_again_takes_part_within_two_rounds(federation: Federation) -> None:
    config = {**LONG, "rounds": 30}
    run = federation.plan(config)
    done = federation.follow(run)
    until(lambda: rounds(run) >= 2, "two rounds")
    federation.kill("oslo")
    until(lambda: not parents.running(federation.folder / "oslo"), "the end of all of its processes")
    gone = rounds(run)
    until(lambda: rounds(run) > gone + 1, "a round without it")
    federation.start_site("oslo")
    until(lambda: parents.joined(federation.folder / "oslo"), "its return")
    back = rounds(run)
    result = done.result()
    show(result)
    lost = [event["round"] for event in result.events if event["client"] == 2]
    assert gone < min(lost)
    assert max(lost) <= back + 2
    took_part = {row["round"]: row["participants"] for row in result.rounds if row["round"]}
    assert set(took_part.values()) == {2, 3}
    assert took_part[30] == 3
    assert any("oslo came back" in event["text"] for event in result.events)
    assert result.state == "complete"


def test_a_server_that_is_killed_and_started_again_goes_on_bit_for_bit(federation: Federation) -> None:
    run = federation.plan(LONG)
    done = federation.follow(run)
    until(lambda: rounds(run) >= 2, "two rounds")
    federation.kill("server")
    until(lambda: not parents.running(federation.folder / "server"), "its end")
    federation.start_server()
    result = done.result()
    show(result)
    assert result.state == "complete"
    assert any(event["text"].startswith(jobs.LOST) for event in result.events)
    assert [row["participants"] for row in result.rounds if row["round"]] == [3] * 8
    check_equal(federation, run, LONG)


def test_a_run_whose_sender_is_gone_is_followed_and_not_sent_again(federation: Federation) -> None:
    run = federation.plan(LONG)
    first = federation.follow(run)
    until(lambda: rounds(run) >= 2, "two rounds")
    told: list[str] = []
    jobs.follow(federation.folder, run, told.append)
    assert first.result().state == "complete"
    assert not any("sent to" in text for text in told)


def test_stop_in_mid_run_leaves_a_good_checkpoint_and_no_process(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    run = federation.plan(LONG)
    done = federation.follow(run)
    until(lambda: rounds(run) >= 2, "two rounds")
    assert cli.main(["deploy", "stop", str(federation.folder)]) == 0
    assert federation.left() == []
    assert isinstance(done.exception(), KeyboardInterrupt)
    assert cli.main(["runs", "--runs", str(federation.root / "runs")]) == 0
    assert f"{run.name}  stopped" in " ".join(capsys.readouterr().out.split()).replace(" ", "  ")
    (federation.folder / "server" / jobs.STOPPED).unlink()
    federation.start()
    assert jobs.follow(federation.folder, run, print).state == "complete"
    check_equal(federation, run, LONG)
