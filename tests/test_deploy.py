"""`pfed deploy` as a user meets it: kits, mistakes, and one small federation of real processes."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pfed import cli, deploy

needs_nvflare = pytest.mark.skipif(deploy.find_spec("nvflare") is None, reason="needs NVFlare: install pfed[deploy]")


def pfed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    told = capsys.readouterr()
    return code, told.out, told.err


@needs_nvflare
def test_two_sites_and_two_rounds_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of what test_deploy_real.py does: the same bits as a simulation, and nothing left running."""
    from deploy_helpers import simulate, write_data
    from deploy_processes import Federation

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place = tmp_path / "a folder's name may have spaces"
    write_data(place, ("alba", "bonn"), each=20, public=10)
    made = Federation(place, ("alba", "bonn"))
    try:
        made.start()
        result = made.run({"method": "fedrep", "hyper": {"head_epochs": 1}})
    finally:
        made.stop()
    assert made.left() == []
    assert result.state == "complete"
    assert result.series == simulate(place, {"method": "fedrep", "hyper": {"head_epochs": 1}})[0].series
    assert [row["name"] for row in result.clients] == ["alba", "bonn"]
    assert result.engine == "nvflare"


def test_without_nvflare_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deploy, "find_spec", lambda name: None)
    code, _, error = pfed(capsys, "deploy", "init", tmp_path / "new", "--sites", "a,b")
    assert code == 2
    assert error == "pfed: pfed deploy needs NVFlare, which is not installed. Install pfed[deploy].\n"


@needs_nvflare
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--sites", "Oslo"], "A site's name must be small letters, digits and hyphens, and not a part's. Got 'Oslo'."),
        (["--sites", "server"], "and not a part's. Got 'server'."),
        (["--sites", "a,a"], "The names of sites must differ. Got a, a."),
        (["--sites", "a", "--port", "0"], "--port must be a number from 1 to 65535. Got 0."),
        (["--sites", "a", "--port", "http"], "--port must be a whole number. Got 'http'."),
        (["--site", "a"], "There is no option '--site'. Did you mean '--sites'?"),
    ],
)
def test_mistakes_in_init(words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = pfed(capsys, "deploy", "init", tmp_path / "new", *words)
    assert code == 2
    assert error in told
    assert not (tmp_path / "new").exists()


@needs_nvflare
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["all"], "all needs all data in one place, which no site gives away."),
        (["fedavg", "--alpha", "0.3"], "run.alpha is for simulations: each site has its own data. Got 0.3."),
        (["fedavg", "--dropout", "0.3"], "run.dropout is for simulations: sites drop out by themselves. Got 0.3."),
        (["fedavg", "--new-test", "majority"], "run.new_test is for simulations: no site has the others' test data."),
        (["own.py"], "A method must be installed at every site: no code is sent. Got 'own.py'."),
        (["fedavgg"], "There is no method 'fedavgg'. Did you mean 'fedavg'?"),
        (["fedavg", "--dp-noise", "1"], "--dp-noise needs --dp-clip, the length that an update may have."),
        (["fedavg", "--dp-clip", "1", "--records"], "--records does not go with --dp-clip: noise does not cover"),
        (["fedavg", "--dp-clip", "0"], "--dp-clip must be > 0. Got 0."),
        (["fedavg", "--dp-clip", "much"], "--dp-clip must be a number. Got 'much'."),
        ([], "'pfed deploy run' takes a METHOD, a FILE.toml, or --resume RUN."),
        (["--resume", "nothing"], "There is no run 'nothing'"),
    ],
)
def test_mistakes_in_run_show_before_anybody_is_asked(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "federation"
    (folder / "server" / "local").mkdir(parents=True)
    (folder / "federation.json").write_text(json.dumps({"host": "localhost", "port": 1, "sites": ["a", "b"]}))
    code, _, told = pfed(capsys, "deploy", "run", *words, "--folder", folder)
    assert code == 2
    assert error in told
    assert not (folder / "runs").exists()


def test_mistakes_in_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "nowhere"
    for words, error in [
        (["status", nowhere], f"There is no federation in '{nowhere}'; 'pfed deploy init' makes one."),
        (["stop", nowhere], f"There is no site's kit in '{nowhere}'."),
        (["approve", nowhere], f"There is no manifest in '{nowhere}'."),
    ]:
        code, _, told = pfed(capsys, "deploy", *words)
        assert (code, told) == (2, f"pfed: {error}\n")


@needs_nvflare
def test_a_site_makes_its_own_key_and_only_a_request_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Request at the site, signature at the server, kit at the site; another root's fingerprint is noticed."""
    monkeypatch.chdir(tmp_path)
    assert pfed(capsys, "deploy", "init", "--port", "18999")[0] == 0
    assert pfed(capsys, "deploy", "request", "zoe")[0] == 0
    request = tmp_path / "zoe-request" / "zoe.request.zip"
    with zipfile.ZipFile(request) as archive:
        crossed = b"".join(archive.read(name) for name in archive.namelist())
    assert b"PRIVATE KEY" not in crossed
    assert b"PRIVATE KEY" in (tmp_path / "zoe-request" / "zoe.key").read_bytes()
    code, told, _ = pfed(capsys, "deploy", "sign", request)
    assert code == 0
    mark = told.splitlines()[-1]
    for wrong in (mark.replace(mark[-5:], "00:00"), "SHA256:00", ""):
        code, _, error = pfed(capsys, "deploy", "kit", "zoe.signed.zip", f"--fingerprint={wrong}")
        assert code == 2
        assert f"must be the one told. Got {wrong!r}." in error
        assert not (tmp_path / "zoe").exists()
    code, _, error = pfed(capsys, "deploy", "kit", "federation/federation.json", "--fingerprint", mark)
    assert code == 2
    assert "is no signed answer" in error
    told = mark.removeprefix("SHA256:").lower()
    assert pfed(capsys, "deploy", "kit", "zoe.signed.zip", "--fingerprint", told)[0] == 0
    assert (tmp_path / "zoe" / "startup" / "client.key").exists()
    assert json.loads((tmp_path / "federation" / "federation.json").read_text())["sites"] == ["zoe"]
    target = json.loads((tmp_path / "zoe" / "startup" / "fed_client.json").read_text())["servers"][0]["service"]
    assert target["target"] == "localhost:18999"


@needs_nvflare
def test_only_sites_are_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could have an admin's request signed would be one."""
    from pfed.deploy import kits
    from pfed.errors import UserError

    kits.init(tmp_path / "federation", [], "localhost", 18999)
    asked = kits._request("eve@pfed.local", {"type": "admin", "role": "lead"}, tmp_path / "eve")
    with pytest.raises(UserError, match="asks to be a lead; only sites are signed"):
        kits.sign(tmp_path / "federation", asked, tmp_path / "eve.signed.zip")


@needs_nvflare
def test_a_name_is_signed_once(tmp_path: Path) -> None:
    """Who asks under the name of a site that is there would be it. The same request may be signed again."""
    from pfed.deploy import kits
    from pfed.errors import UserError

    folder = tmp_path / "federation"
    kits.init(folder, ["oslo"], "localhost", 18999)
    asked = kits.request("zoe", tmp_path / "zoe")
    for number in range(2):
        assert kits.sign(folder, asked, tmp_path / f"{number}.signed.zip")[0].exists()
    for name in ("zoe", "oslo"):
        other = kits.request(name, tmp_path / f"other-{name}")
        with pytest.raises(UserError, match=f"There is a site '{name}' already; another key needs another name"):
            kits.sign(folder, other, tmp_path / "other.signed.zip")
    assert not (tmp_path / "other.signed.zip").exists()


@needs_nvflare
def test_a_port_that_is_in_use_is_no_server_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "federation"
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        (folder / "server").mkdir(parents=True)
        (folder / "federation.json").write_text(json.dumps({"host": "localhost", "port": port, "sites": []}))
        code, _, error = pfed(capsys, "deploy", "server", folder, "--detach")
    assert code == 2
    assert f"Port {port} is in use by another program" in error


def test_the_processes_of_a_kit_are_those_that_run_it(tmp_path: Path) -> None:
    """Not an editor with a file of it open; also where the kit is reached by another path."""
    from pfed.deploy import parents

    kit, link = tmp_path / "kit", tmp_path / "link"
    kit.mkdir()
    link.symlink_to(kit)
    wait = "import sys; print(flush=True); sys.stdin.read()"
    lines = {"editor": ["-m", str(kit)], "worker": ["pfed.deploy.worker", str(link)], "other": ["pfed.deploy.worker"]}
    running = {}
    for name, words in lines.items():
        running[name] = subprocess.Popen(
            [sys.executable, "-c", wait, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    try:
        for process in running.values():
            assert process.stdout is not None
            process.stdout.readline()
        for path in (kit, link, tmp_path / "link" / ".." / "kit"):
            assert parents.running(path) == [running["worker"].pid]
        assert parents.stop(link) == 1
        assert running["editor"].poll() is None
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


@needs_nvflare
@pytest.mark.parametrize("kind", ["Server", "Site"])
def test_a_run_starts_also_where_paths_have_spaces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare joins words without quotes, and takes them apart again at spaces."""
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.job_launcher_spec import JobProcessArgs

    from pfed.deploy import launchers

    monkeypatch.setattr(sys, "executable", "/an it's/python")
    given = {
        JobProcessArgs.EXE_MODULE: ("-m", "some.module"),
        JobProcessArgs.WORKSPACE: ("-w", "/a folder"),
        JobProcessArgs.OPTIONS: ("--set", "one=1 two=2"),
    }
    context = FLContext()
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, given, private=True, sticky=False)
    command = getattr(launchers, f"{kind}Launcher")().get_command({}, context)
    words = ["/an it's/python", "-m", "some.module", "-w", "/a folder", "--set", "one=1", "two=2"]
    assert shlex.split(command) == words


@needs_nvflare
def test_a_kit_is_safe_before_its_process_starts(tmp_path: Path) -> None:
    """No code with a job, no files to read, no logs to the server, nothing outside the kit."""
    from pfed.deploy import kits

    folder = tmp_path / "federation"
    kits.init(folder, ["oslo"], "localhost", 18999)
    for part in ("server", "oslo"):
        kits.settle(folder / part, data="here")
        rights = json.loads((folder / part / "local" / "authorization.json").read_text())["permissions"]
        assert rights.keys() == {"lead"}
        assert not rights["lead"].keys() & {"byoc", "shell_commands", "operate", "download_job"}
        text = (folder / part / "local" / "resources.json").read_text()
        assert "/tmp/nvflare" not in text
        assert "log_streamer" not in text
        assert "data" not in json.loads(text)
    assert json.loads((folder / "oslo" / "local" / "resources.json").read_text())["allow_log_streaming"] is False


@needs_nvflare
def test_only_listed_classes_are_built_in_a_kit(tmp_path: Path) -> None:
    """As NVFlare itself reads the list: neither their modules' other contents nor names that begin alike."""
    from nvflare.apis.fl_exception import UnsafeComponentError
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

    from pfed.deploy import kits

    def built(part: str, name: str) -> bool:
        class Place:
            def get_resources_file_path(self) -> str:
                return str(tmp_path / part / "local" / "resources.json")

        try:
            ComponentPathAuthorizer().authorize_component_config({"path": name}, workspace=Place())
        except UnsafeComponentError:
            return False
        return True

    for part, file in (("oslo", "fed_client.json"), ("server", "fed_server.json")):
        for name in ("startup", "local"):
            (tmp_path / part / name).mkdir(parents=True)
        (tmp_path / part / "startup" / file).touch()
        store = {"snapshot_persistor": {"args": {"storage": {"args": {}}}}, "servers": [{}]}
        default = {"components": [], "class_list_enforcement_mode": "warn", **store}
        (tmp_path / part / "local" / "resources.json.default").write_text(json.dumps(default))
        kits.settle(tmp_path / part)
    ours = {"oslo": "pfed.deploy.executor.SiteExecutor", "server": "pfed.deploy.controller.RunController"}
    for part, own in ours.items():
        assert built(part, own)
        assert built(part, "pfed.deploy.arrivals.Arrivals")
        others = [name for name in ours.values() if name != own]
        for name in (*others, f"{own}X", "pfed.deploy.remote.Experiment", "pfed.deploy.remote.Remote", "os.system"):
            assert not built(part, name), name


def test_a_run_of_sites_is_not_resumed_as_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pfed import Experiment, store

    result = Experiment("fedavg", "digits", "mlp", clients=2, rounds=1).run(tmp_path)
    with store.contextlib.closing(store.Store(tmp_path / result.run)) as opened:
        opened.record.set(config={**result.config, "engine": "nvflare"})
    code, _, error = pfed(capsys, "resume", result.run, "--runs", tmp_path)
    assert code == 2
    assert f"go on with 'pfed deploy run --resume {result.run}'" in error


def test_the_engine_of_sites_is_no_engine_of_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["run", "fedavg", "--engine", "nvflare", "--clients", "2", "--rounds", "1", "--runs", tmp_path]
    code, _, error = pfed(capsys, *words)
    assert code == 2
    assert "which 'pfed deploy run' reaches" in error
