"""Certificates and kits: what a server, a site and an admin need to find and to trust each other.

All keys are made where they are used. Where one person sets up a trial, that is one folder; a site that makes its own
key sends a request without it, gets a signed answer and makes its kit from both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pfed.deploy import check_installed
from pfed.errors import UserError

PROJECT = "pfed"
ADMIN = "admin@pfed.local"
RESERVED = {"server", "admin", "ca", "runs"}
ABOUT = "federation.json"
SETTINGS = "pfed.json"  # in a kit's folder `local`: what is the owner's own business
SILENCE = 30  # seconds after which a site that says nothing is not there any more
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

# What the one who sends runs may do. Nobody may ship code, read files of a site, or switch it off.
RIGHTS = {"submit_job": "any", "manage_job": "n:submitter", "view": "any"}
POLICY = {"format_version": "1.0", "permissions": {"lead": RIGHTS}}
# What a run may build, class by class: a package's name would allow all that can be imported from there. NVFlare builds
# the classes of a kit's own resources without asking.
SITE_CLASSES = ("executor.SiteExecutor", "launchers.SiteLauncher", "arrivals.Arrivals")
SERVER_CLASSES = ("controller.RunController", "launchers.ServerLauncher", "arrivals.Arrivals")


def init(folder: Path, sites: Sequence[str], host: str, port: int) -> None:
    """A new federation: a root certificate, and kits of the server, of the admin and of these sites."""
    check_installed()
    for name in sites:
        check_name(name)
    if len(set(sites)) < len(sites):
        raise UserError(f"The names of sites must differ. Got {', '.join(sites)}.")
    if not 0 < port < 65536:
        raise UserError(f"--port must be a number from 1 to 65535. Got {port}.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"The folder {str(folder)!r} must be empty or new.")
    ca = folder / "ca"
    ca.mkdir(parents=True, mode=0o700)
    address = {"host": host, "fed_learn_port": port, "admin_port": port}
    profile = {"name": PROJECT, "scheme": "grpc", "connection_security": "mtls", "server": address}
    (ca / "profile.yml").write_text(json.dumps(profile))
    # Without an organisation: NVFlare 2.9.0 signs as an issuer without one, and nothing would verify.
    _nvflare("init", profile=str(ca / "profile.yml"), output_dir=str(ca))
    _about(folder, host, port, [])
    server = {"type": "server", "fed_learn_port": port, "admin_port": port}
    if host != "localhost":
        server["host_names"] = ["localhost"]
    _here(folder, host, server, folder / "server")
    _here(folder, ADMIN, {"type": "admin", "role": "lead"}, folder / "admin")
    for name in sites:
        _here(folder, name, {"type": "client"}, folder / name)
        add_site(folder, name)


def check_name(name: str) -> None:
    """Refuse what can't be the name of a site."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise UserError(f"A site's name must be small letters, digits and hyphens, and not a part's. Got {name!r}.")


def request(name: str, folder: Path) -> Path:
    """At a site: make a key that stays here, and the request that goes to who has the root certificate."""
    check_installed()
    check_name(name)
    return _request(name, {"type": "client"}, folder)


def sign(folder: Path, request: Path, out: Path) -> tuple[Path, str]:
    """At the federation's folder: sign a site's request; the answer, and the root certificate's fingerprint."""
    check_installed()
    site = _asked(request)
    known = about(folder)
    check_name(site)
    mark, note = hashlib.sha256(request.read_bytes()).hexdigest(), folder / "ca" / f"{site}.request"
    if site in known["sites"] and not (note.exists() and note.read_text() == mark):
        raise UserError(f"There is a site {site!r} already; another key needs another name.")
    _sign(folder, request, out)
    note.write_text(mark)
    add_site(folder, site)
    return out, fingerprint(folder / "ca" / "rootCA.pem")


def package(signed: Path, request: Path, kit: Path, expected: str | None = None) -> None:
    """At a site: a kit from the signed answer and the folder with the key."""
    check_installed()
    if kit.exists() and any(kit.iterdir()):
        raise UserError(f"The folder {str(kit)!r} must be empty or new.")
    expected = None if expected is None else _expected(signed, expected)
    kit.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kit.parent) as work:
        words = {"input": str(signed), "workspace": work, "request_dir": str(request), "expected_fingerprint": expected}
        _nvflare("package", **words)
        (made,) = Path(work).glob(f"{PROJECT}/prod_*/*/startup")
        shutil.copytree(made.parent, kit, dirs_exist_ok=True)


def fingerprint(certificate: Path | zipfile.Path) -> str:
    """What two people compare by telephone."""
    from cryptography import x509
    from nvflare.tool.cert.fingerprint import cert_fingerprint_sha256

    return str(cert_fingerprint_sha256(x509.load_pem_x509_certificate(certificate.read_bytes())))


def _expected(signed: Path, told: str) -> str:
    """The fingerprint of the root certificate in a signed answer, if it is the one that was told."""
    try:
        found = fingerprint(zipfile.Path(signed) / "rootCA.pem")
    except (OSError, ValueError, zipfile.BadZipFile):
        raise UserError(f"{str(signed)!r} is no signed answer; 'pfed deploy sign' makes one.") from None
    if told.upper().removeprefix("SHA256:").replace(":", "") != found.removeprefix("SHA256:").replace(":", ""):
        raise UserError(f"The fingerprint of the root certificate in {signed.name} must be the one told. Got {told!r}.")
    return found


def about(folder: Path) -> dict[str, Any]:
    """Address and sites of a federation."""
    try:
        found: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    except FileNotFoundError:
        raise UserError(f"There is no federation in {str(folder)!r}; 'pfed deploy init' makes one.") from None
    return found


def add_site(folder: Path, name: str) -> None:
    known = about(folder)
    _about(folder, known["host"], known["port"], sorted({*known["sites"], name}))


def site_name(kit: Path) -> str:
    """Whose kit this is."""
    try:
        client = json.loads((kit / "startup" / "fed_client.json").read_text())["client"]
    except FileNotFoundError:
        raise UserError(f"There is no site's kit in {str(kit)!r}.") from None
    return str(client["fqsn"])


def settings(kit: Path) -> dict[str, Any]:
    """What the owner of a kit has said when it was started."""
    file = kit / "local" / SETTINGS
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def settle(kit: Path, **owner: Any) -> None:
    """Make a kit safe before its process starts, and note what its owner says.

    Only the listed classes are built there, no code comes with a run, nobody reads its files from afar, no log line
    leaves, and nothing lies outside the kit.
    """
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    site = (kit / "startup" / "fed_client.json").exists()
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = [f"pfed.deploy.{name}" for name in (SITE_CLASSES if site else SERVER_CLASSES)]
    if site:
        _settle_site(resources)
    else:
        _settle_server(resources, kit)
    for part in resources["components"]:
        if part["id"] == "process_launcher":
            part["path"] = f"pfed.deploy.launchers.{'Site' if site else 'Server'}Launcher"
    resources["components"].append({"id": "arrivals", "path": "pfed.deploy.arrivals.Arrivals", "args": {}})
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    (local / "authorization.json").write_text(json.dumps(POLICY, indent=2))
    (local / SETTINGS).write_text(json.dumps(owner, indent=2))


def redirect(kit: Path, address: str) -> None:
    """Let a site find the server at another address than the kit was made with."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--server takes HOST:PORT. Got {address!r}.")
    file = kit / "startup" / "fed_client.json"
    config = json.loads(file.read_text())
    config["servers"][0]["service"]["target"] = address
    file.write_text(json.dumps(config, indent=2))


def _settle_site(resources: dict[str, Any]) -> None:
    resources["allow_log_streaming"] = False
    resources["components"] = [part for part in resources["components"] if part["id"] != "site_log_streamer"]


def _settle_server(resources: dict[str, Any], kit: Path) -> None:
    store = kit.absolute()
    resources["servers"][0]["heart_beat_timeout"] = SILENCE
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(store / "snapshots")
    parts = [part for part in resources["components"] if part["id"] != "log_receiver"]
    for part in parts:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(store / "jobs")
    resources["components"] = parts


def _about(folder: Path, host: str, port: int, sites: Sequence[str]) -> None:
    (folder / ABOUT).write_text(json.dumps({"host": host, "port": port, "sites": list(sites)}, indent=2))


def _here(folder: Path, name: str, who: dict[str, Any], kit: Path) -> None:
    """Request, signature and kit in one place, for a trial and for those who run the server."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        asked = _request(name, who, Path(work) / "request")
        signed = Path(work) / f"{name}.signed.zip"
        _sign(folder, asked, signed)
        package(signed, asked.parent, kit, fingerprint(folder / "ca" / "rootCA.pem"))


def _request(name: str, who: dict[str, Any], folder: Path) -> Path:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"The folder {str(folder)!r} must be empty or new.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "participant.yml"  # JSON is YAML too
        file.write_text(json.dumps({"name": PROJECT, "participants": [{"name": name, "org": PROJECT, **who}]}))
        _nvflare("request", participant=str(file), output_dir=str(folder))
    return folder / f"{name}.request.zip"


def _sign(folder: Path, request: Path, out: Path) -> None:
    ca = folder / "ca"
    words = {"request_zip": str(request), "ca_dir": str(ca), "signed_zip": str(out), "profile": str(ca / "profile.yml")}
    _nvflare("approve", **words)


def _asked(request: Path) -> str:
    """Which site a request is of; one of a server or an admin is none."""
    try:
        with zipfile.ZipFile(request) as archive:
            asked = json.loads(archive.read("request.json"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        raise UserError(f"{str(request)!r} is no request of a site; 'pfed deploy request' makes one.") from None
    if asked.get("cert_type") != "client":
        raise UserError(f"{str(request)!r} asks to be a {asked.get('cert_type')}; only sites are signed.")
    return str(asked.get("name"))


def _nvflare(command: str, **words: Any) -> None:
    """One of NVFlare's own commands, in this process; what it prints matters only if it fails."""
    from nvflare.tool.cert import cert_cli, cert_commands
    from nvflare.tool.package import package_cli, package_commands

    parser = argparse.ArgumentParser()
    group = parser.add_subparsers()
    cert_cli.def_cert_cli_parser(group)
    package_cli.def_package_cli_parser(group)
    commands: dict[str, tuple[list[str], Callable[[Any], Any]]] = {
        "init": (["cert", "init"], cert_commands.handle_cert_init),
        "request": (["cert", "request", "-p", ""], cert_commands.handle_cert_request),
        "approve": (["cert", "approve", "", "-c", "", "--profile", ""], cert_commands.handle_cert_approve),
        "package": (["package", ""], package_commands.handle_package),
    }
    line, run = commands[command]
    arguments = parser.parse_args(line)
    vars(arguments).update(words)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), _home():
        try:
            failed = run(arguments) == 1
        except SystemExit as exit:
            failed = bool(exit.code)
    if failed:
        lines = [line for line in told.getvalue().splitlines() if line.strip()]
        raise UserError(f"NVFlare's {command} failed: {lines[0] if lines else 'it does not say why'}")


@contextlib.contextmanager
def _home() -> Iterator[None]:
    """A home of its own for a command, which would write notes there."""
    before = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("HOME")
            else:
                os.environ["HOME"] = before
