"""Who is not let in, and what a run may not do: certificates, code, files; with real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import write_data
from deploy_processes import Federation, show, until

from pfed.deploy import jobs, kits, parents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SITES = ("alba", "bonn")
SPY = """
import os
from nvflare.fuel.f3.sfm import conn_manager
original = conn_manager.ConnManager.process_frame
def process_frame(self, sfm_conn, frame, *more, **words):
    with open(os.environ["PFED_TEST_FRAMES"], "ab") as file:
        file.write(bytes(frame))
    return original(self, sfm_conn, frame, *more, **words)
conn_manager.ConnManager.process_frame = process_frame
"""
EVIL = """
import sys
if "pfed.deploy.worker" in " ".join(sys.orig_argv):
    import pfed.methods.fedrep as module
    original = module.FedRep.update
    def update(self, client, body):
        print("PRINTMARK", flush=True)
        if client.round == 2 and client.id == 0:
            raise ValueError("ERRORMARK")
        return original(self, client, body)
    update._pfed_step = True
    module.FedRep.update = update
"""
ROGUE = """
import sys
if "client.worker_process" in " ".join(sys.orig_argv):
    import time
    import torch
    from pfed import Tensors
    from pfed.deploy import worker
    original = worker.Worker.ask
    spoil = {
        1: lambda name, tensor: {name: tensor * torch.nan},
        2: lambda name, tensor: {name: tensor[:1]},
        3: lambda name, tensor: {name + ".more": tensor},
        4: lambda name, tensor: {name: tensor.repeat(10, *[1] * (tensor.dim() - 1))},
        5: lambda name, tensor: time.sleep(20) or {name: tensor},
    }
    def ask(self, about, payload, stopped):
        told, found = original(self, about, payload, stopped)
        if about.get("step") == "update" and about["round"] in spoil:
            parts = [spoil[about["round"]](*item) for item in found["body"].items()]
            found = {"body": Tensors({name: tensor for part in parts for name, tensor in part.items()})}
        return told, found
    worker.Worker.ask = ask
"""
MARKS = [b"PATHMARK", b"LABELMARK", b"ERRORMARK", b"PRINTMARK"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    root = tmp_path_factory.mktemp("intruders")
    write_data(root, SITES, each=20, public=10)
    made = Federation(root, SITES)
    try:
        made.start()
        with jobs.session(made.folder) as admin:
            until(lambda: jobs.connected(admin) == set(SITES), "both sites")
        yield made
    finally:
        made.stop()
    assert made.left() == []


def intruder(federation: Federation, name: str, spoil: Any) -> Path:
    """A copy of bonn's kit, spoiled."""
    kit = federation.root / name
    shutil.copytree(federation.folder / "bonn", kit, ignore=shutil.ignore_patterns("runs", parents.LOG))
    spoil(kit / "startup")
    return kit


def refused(federation: Federation, kit: Path, proof: str) -> None:
    """It tries, is turned away for this reason, and the server knows nothing of it."""
    log = federation.folder / "server" / parents.LOG
    before, arrivals = len(log.read_bytes()), federation.folder / "server" / parents.ARRIVALS
    times = {file.name: file.stat().st_mtime for file in arrivals.iterdir()}
    kits.settle(kit, data=str(federation.root / "data" / "bonn"))
    process = parents.start(kit)
    try:
        until(lambda: re.search(proof, _new(log, before) + _new(kit / parents.LOG, 0)), "a refusal")
        assert not parents.joined(kit)
        assert {file.name: file.stat().st_mtime for file in arrivals.iterdir()} == times
        with jobs.session(federation.folder) as admin:
            assert jobs.connected(admin) == set(SITES)
    finally:
        parents.stop(kit)
        process.wait(10)


def _new(log: Path, before: int) -> str:
    return log.read_bytes()[before:].decode(errors="replace")


def test_a_site_without_a_certificate_is_refused(federation: Federation) -> None:
    def spoil(startup: Path) -> None:
        config = json.loads((startup / "fed_client.json").read_text())
        config["client"]["connection_security"] = "clear"
        (startup / "fed_client.json").write_text(json.dumps(config))

    refused(federation, intruder(federation, "without", spoil), "Handshake failed")


def greeted(federation: Federation, startup: Path | None) -> bool:
    """Whether the server talks to who comes with this certificate and asks nothing of the server's own."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if startup is not None:
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    port = kits.about(federation.folder)["port"]
    try:
        with socket.create_connection(("localhost", port), timeout=30) as plain, context.wrap_socket(plain) as talk:
            talk.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
            return talk.recv(9) != b""
    except (ssl.SSLError, ConnectionError):
        return False


def test_no_certificate_and_a_foreign_one_are_refused_by_the_server(federation: Federation) -> None:
    other = federation.root / "other"
    kits.init(other, ["bonn"], "localhost", kits.about(federation.folder)["port"])
    assert greeted(federation, federation.folder / "bonn" / "startup")
    assert not greeted(federation, None)
    assert not greeted(federation, other / "bonn" / "startup")


def test_a_site_with_the_certificate_of_another_is_refused(federation: Federation) -> None:
    """It says that it is zoe, and has bonn's certificate."""

    def spoil(startup: Path) -> None:
        config = json.loads((startup / "fed_client.json").read_text())
        config["client"]["fqsn"] = "zoe"
        (startup / "fed_client.json").write_text(json.dumps(config))

    refused(federation, intruder(federation, "pretends", spoil), "requires identity 'zoe'")


def submit(federation: Federation, edit: Any, tmp_path: Path) -> str:
    """A job like ours but for an edit; how it ended."""
    run = federation.plan({"method": "fedavg"})
    job = jobs._read(run, "job")
    with jobs.session(federation.folder) as admin:

        class Edited:
            def submit_job(self, folder: str) -> Any:
                edit(Path(folder))
                return admin.submit_job(folder)

        try:
            number = jobs._submit(Edited(), job, set(SITES))
        except Exception as error:
            return f"REFUSED {error}"
        seen: list[str] = []
        until(lambda: _ended(admin, number, seen), "the end of the job")
        return seen[-1]


def _ended(admin: Any, number: str, seen: list[str]) -> bool:
    seen.append(str(admin.get_job_meta(number)))
    return "FINISHED" in seen[-1]


def test_code_that_comes_with_a_job_does_not_run(federation: Federation, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def edit(folder: Path) -> None:
        custom = folder / "app" / "custom"
        custom.mkdir()
        text = f"open({str(ran)!r}, 'w')\nfrom pfed.deploy.executor import SiteExecutor\n"
        (custom / "evil.py").write_text(text)
        file = folder / "app" / "config" / "config_fed_client.json"
        file.write_text(file.read_text().replace("pfed.deploy.executor.SiteExecutor", "evil.SiteExecutor"))

    assert "COMPLETED" not in submit(federation, edit, tmp_path)
    assert not ran.exists()


def says(federation: Federation, text: str) -> bool:
    """Whether a site's own logs have this text."""
    return any(text in log.read_text(errors="replace") for log in (federation.folder / "alba").rglob("*log*.txt"))


@pytest.mark.parametrize(
    "cls", ["nvflare.app_common.np.np_trainer.NPTrainer", "subprocess.Popen", "pfed.deploy.executor.SiteExecutor.Other"]
)
def test_other_classes_than_ours_are_not_built_at_a_site(cls: str, federation: Federation, tmp_path: Path) -> None:
    def edit(folder: Path) -> None:
        file = folder / "app" / "config" / "config_fed_client.json"
        file.write_text(file.read_text().replace("pfed.deploy.executor.SiteExecutor", cls))

    assert "COMPLETED" not in submit(federation, edit, tmp_path)
    ours = cls.startswith("pfed.")  # what is below a class of ours is allowed, and is nowhere
    reason = "No module named 'pfed.deploy.executor.SiteExecutor'" if ours else f"Component '{cls}' at config path"
    until(lambda: says(federation, reason), "the reason in the site's log", 30.0)
    assert ours or says(federation, "is not in allow_list")


@pytest.mark.parametrize("path", ["pfed.deploy.remote.Experiment", "pfed.experiment.Experiment"])
def test_a_method_file_that_lies_in_a_job_does_not_run_at_a_site(
    path: str, federation: Federation, tmp_path: Path
) -> None:
    """An experiment would load the file of its method: it can be imported from pfed, and is not built."""
    ran = tmp_path / "ran"

    def edit(folder: Path) -> None:
        config = folder / "app" / "config"
        (config / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
        file = config / "config_fed_client.json"
        told = json.loads(file.read_text())
        evil = {"method": "{JOB_CONFIG_DIR}/config/evil.py", "data": "digits"}
        told["components"] = [{"id": "evil", "path": path, "args": evil}]
        file.write_text(json.dumps(told))

    assert "COMPLETED" not in submit(federation, edit, tmp_path)
    assert not ran.exists()
    until(lambda: says(federation, f"Component '{path}' at config path"), "the reason in the site's log", 30.0)


def test_nobody_reads_the_files_of_a_site(federation: Federation) -> None:
    with jobs.session(federation.folder) as admin:
        for read in (admin.cat_target, admin.tail_target, admin.head_target):
            with pytest.raises(Exception, match=r"(?i)auth|permit|denied"):
                read("bonn", file="log.txt")
        with pytest.raises(Exception, match="failed to shut down"):
            admin.shutdown("client", ["bonn"])
        assert jobs.connected(admin) == set(SITES)
    assert parents.running(federation.folder / "bonn")


def test_nothing_of_a_site_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its process received, byte for byte as it came out of TLS, and all files that it has."""
    names = ("cork", "dund")
    write_data(tmp_path, names, each=20, public=10)
    for name in names:
        for label in range(10):
            target = tmp_path / "PATHMARK" / name / f"LABELMARK-{label}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(tmp_path / "data" / name / str(label))
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "sitecustomize.py").write_text(EVIL)
    made, path = Federation(tmp_path, names), os.environ.get("PYTHONPATH", "")
    try:
        monkeypatch.setenv("PFED_TEST_FRAMES", str(tmp_path / "frames"))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'spy'}:{path}")
        made.start_server()
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'evil'}:{path}")
        for name in names:
            made.start_site(name, data=str(tmp_path / "PATHMARK" / name))
        result = made.run({"method": "fedrep", "hyper": {"head_epochs": 1}})
    finally:
        made.stop()
    assert [e["text"] for e in result.events if e["kind"] == "error"] == ["update raised ValueError; its log says more"]
    frames = (tmp_path / "frames").read_bytes()
    assert len(frames) > result.bytes_up
    places = [made.folder / "server", made.folder / "admin", tmp_path / "runs"]
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    for content in [frames, *(file.read_bytes() for file in files)]:
        assert [mark for mark in MARKS if mark in content] == []
    log = (made.folder / "cork" / "worker.log").read_bytes()
    assert all(mark in log for mark in (b"ERRORMARK", b"PRINTMARK"))


def test_a_site_that_sends_rubbish_or_nothing_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, a wrong shape, a wrong name, ten times the bytes, and beyond the deadline; then it is honest again."""
    names = ("cork", "dund")
    write_data(tmp_path, names, each=20, public=10)
    (tmp_path / "rogue").mkdir()
    (tmp_path / "rogue" / "sitecustomize.py").write_text(ROGUE)
    made, path = Federation(tmp_path, names), os.environ.get("PYTHONPATH", "")
    config = {"method": "fedrep", "hyper": {"head_epochs": 1}, "rounds": 7, "deadline": 30.0}
    try:
        made.start_server()
        made.start_site("cork")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'rogue'}:{path}")
        made.start_site("dund")
        result = made.run(config)
    finally:
        made.stop()
    show(result)
    assert made.left() == []
    assert result.state == "complete"
    assert {event["client"] for event in result.events} == {1}
    said = [
        (event["round"], event["kind"], event["text"].partition("] ")[2] or event["text"]) for event in result.events
    ]
    assert said == [
        (1, "bad reply", "is not finite"),
        (2, "bad reply", "sent a shape that its manifest does not list"),
        (3, "bad reply", "sent a name that its manifest does not list"),
        (4, "bad reply", "sent a size that its manifest does not list"),
        (5, "late", "did not answer within 30 seconds"),
    ]
    assert [row["participants"] for row in result.rounds if row["round"]] == [1, 1, 1, 1, 1, 2, 2]
