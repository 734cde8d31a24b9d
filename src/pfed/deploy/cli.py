"""`pfed deploy …`: parse, call, print. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pfed.errors import RunError, UserError

FOLDER = "federation"
UP = 120.0  # seconds until a server must be there
Run = Callable[[argparse.Namespace], int | None]


def add(deploy: argparse.ArgumentParser, add_run_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """The commands below `pfed deploy`."""
    deploy.set_defaults(run=lambda arguments: deploy.print_help())
    commands = deploy.add_subparsers(metavar="COMMAND")

    def command(name: str, help: str, run: Run) -> argparse.ArgumentParser:
        text = f"{help[0].upper()}{help[1:]}."
        made: argparse.ArgumentParser = commands.add_parser(name, help=help, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    new = command("init", "make a federation: certificates, and kits of server and sites", _init)
    _folder(new)
    new.add_argument("--sites", metavar="A,B,…", default="", help="the names of its sites; more can ask later")
    new.add_argument("--server", metavar="HOST", default="localhost", help="the server's name in the net [localhost]")
    new.add_argument("--port", metavar="N", default="8102", help="its port [8102]")
    ask = command("request", "at a site: make a key of its own and ask to be let in", _request)
    ask.add_argument("site", metavar="SITE")
    ask.add_argument("--out", metavar="FOLDER", help="where key and request go [SITE-request]")
    sign = command("sign", "let a site in that has asked", _sign)
    sign.add_argument("request", metavar="REQUEST.zip")
    sign.add_argument("--out", metavar="FILE", help="the answer [SITE.signed.zip]")
    _folder(sign, option=True)
    kit = command("kit", "at a site: make the kit from the answer", _kit)
    kit.add_argument("signed", metavar="SIGNED.zip")
    kit.add_argument("--request", metavar="FOLDER", help="where the key is [SITE-request]")
    kit.add_argument("--out", metavar="FOLDER", help="the kit [SITE]")
    kit.add_argument("--fingerprint", metavar="TEXT", required=True, help="of the root, as 'sign' has told")
    server = command("server", "start the server", _server)
    _folder(server)
    server.add_argument("--runs", metavar="FOLDER", help="where runs are kept [FOLDER/runs]")
    _add_data(server)
    join = command("join", "start a site", _join)
    join.add_argument("kit", metavar="KIT")
    join.add_argument("--data", metavar="FOLDER|FILE.csv", required=True, help="its data: CLASS/image, or a table")
    join.add_argument("--model", metavar="NAME", help="an architecture of its own [the run's]")
    join.add_argument("--label-column", metavar="NAME", help="own CSV file: the column with the class [label]")
    join.add_argument("--device", metavar="NAME", help="where it trains: cpu, cuda or cuda:N [cpu]")
    join.add_argument("--approve-within", metavar="MB", help="approve every run that sends at most this in a round")
    join.add_argument("--server", metavar="HOST:PORT", help="the server's address, if not the kit's")
    _add_data(join)
    approve = command("approve", "at a site: read what a run would send, and agree", _approve)
    approve.add_argument("manifest", metavar="MANIFEST")
    approve.add_argument("--kit", metavar="KIT", help="the site's kit [where the manifest lies]")
    approve.add_argument("--show", action="store_true", help="only read")
    one = command("run", "run a method on all sites", _run)
    one.usage = "pfed deploy run METHOD|FILE.toml|--resume RUN [OPTION…]"
    one.add_argument("what", metavar="METHOD|FILE.toml", nargs="?", help="as in 'pfed run'")
    one.add_argument("--resume", metavar="RUN", help="go on with a run instead")
    one.add_argument("--records", action="store_true", help="ask for what methods log too")
    one.add_argument("--dp-clip", metavar="float", help="differential privacy: the length that an update may have")
    one.add_argument("--dp-noise", metavar="float", help="noise on it, in clips [1]")
    one.add_argument("--dp-delta", metavar="float", help="delta for which epsilon is told [1e-05]")
    _folder(one, option=True)
    add_run_options(one)
    _folder(command("status", "who is there, and what is running", _status))
    _folder(command("stop", "end a federation's processes here, or one site's", _stop), what="FOLDER|KIT")


def _folder(parser: argparse.ArgumentParser, option: bool = False, what: str = "FOLDER") -> None:
    help = f"the federation's folder [{FOLDER}]"
    if option:
        parser.add_argument("--folder", metavar="FOLDER", default=FOLDER, help=help)
    else:
        parser.add_argument("folder", metavar=what, nargs="?", default=FOLDER, help=help)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--classes", metavar="A,B,…", help="the classes in the order that all have agreed on")
    parser.add_argument("--public", metavar="FOLDER", help="a labelled set that server and sites have in common")
    parser.add_argument("--image-size", metavar="int", help="image files: resized to this many pixels, square")
    parser.add_argument("--detach", action="store_true", help="go on in the background; 'pfed deploy stop' ends it")


def _init(arguments: argparse.Namespace) -> None:
    from pfed.deploy import kits

    folder, sites = Path(arguments.folder), [name for name in arguments.sites.split(",") if name]
    kits.init(folder, sites, arguments.server, _whole("--port", arguments.port))
    shown = f", sites {', '.join(sites)}" if sites else ""
    print(f"{folder}: server {arguments.server}:{arguments.port}{shown}")
    print(f"root certificate {kits.fingerprint(folder / 'ca' / 'rootCA.pem')}")


def _request(arguments: argparse.Namespace) -> None:
    from pfed.deploy import kits

    folder = Path(arguments.out or f"{arguments.site}-request")
    print(f"Send {kits.request(arguments.site, folder)} to who runs the server; the key stays in {folder}.")


def _sign(arguments: argparse.Namespace) -> None:
    from pfed.deploy import kits

    request = Path(arguments.request)
    out = Path(arguments.out or f"{request.name.removesuffix('.request.zip')}.signed.zip")
    signed, mark = kits.sign(Path(arguments.folder), request, out)
    print(f"Send {signed} back, and tell them the fingerprint in another way:\n{mark}")


def _kit(arguments: argparse.Namespace) -> None:
    from pfed.deploy import kits

    signed = Path(arguments.signed)
    site = signed.name.removesuffix(".signed.zip")
    out = Path(arguments.out or site)
    kits.package(signed, Path(arguments.request or f"{site}-request"), out, arguments.fingerprint)
    print(f"The kit is {out}: pfed deploy join {out} --data FOLDER")


def _data(arguments: argparse.Namespace) -> dict[str, Any]:
    """What server and sites may say of data, for the settings of their kits."""
    for name in ("data", "public"):
        path = getattr(arguments, name, None)
        if path is not None and not Path(path).exists():
            raise UserError(f"There is no file or folder {path!r} for --{name}.")
    size = arguments.image_size
    return {
        "classes": arguments.classes.split(",") if arguments.classes else None,
        "public": str(Path(arguments.public).absolute()) if arguments.public else None,
        "image_size": _whole("--image-size", size) if size else None,
    }


def _server(arguments: argparse.Namespace) -> None:
    from pfed.deploy import check_installed, jobs, kits, parents

    check_installed()
    folder = Path(arguments.folder)
    about = kits.about(folder)
    kit, runs = folder / "server", Path(arguments.runs or folder / "runs")
    if not parents.running(kit) and _listens(about["port"]):
        raise UserError(
            f"Port {about['port']} is in use by another program; end that, or make a federation with another."
        )
    kits.settle(kit, runs=str(runs.absolute()), **_data(arguments))
    (kit / jobs.STOPPED).unlink(missing_ok=True)
    process = parents.start(kit)
    address = about["host"], about["port"]
    _wait(process, kit, lambda: _listens(address[1]))
    print(f"The server is at {address[0]}:{address[1]}; it keeps runs in {runs} and its log in {kit / parents.LOG}.")
    _stay(process, kit, arguments.detach)


def _join(arguments: argparse.Namespace) -> None:
    from pfed.deploy import check_installed, kits, parents

    check_installed()
    kit = Path(arguments.kit)
    name = kits.site_name(kit)
    budget = arguments.approve_within
    settings = {"data": str(Path(arguments.data).absolute()), "model": arguments.model, "device": arguments.device}
    settings |= {"approve_within": _number("--approve-within", budget) if budget else None}
    kits.settle(kit, **settings, label_column=arguments.label_column, **_data(arguments))
    if arguments.server:
        kits.redirect(kit, arguments.server)
    process = parents.start(kit)
    _wait(process, kit, lambda: parents.joined(kit))
    print(f"{name} has joined; its log is {kit / parents.LOG}, its own runs are in {kit / 'runs'}.")
    _stay(process, kit, arguments.detach)


def _wait(process: subprocess.Popen[bytes], kit: Path, there: Callable[[], bool]) -> None:
    """Until a process does its work, or does not."""
    from pfed.deploy import parents

    end = time.monotonic() + UP
    while not there():
        if process.poll() is not None or time.monotonic() > end:
            parents.stop(kit)
            raise RunError(f"It did not come up within {UP:g} seconds, or was not let in; see {kit / parents.LOG}.")
        time.sleep(0.1)


def _stay(process: subprocess.Popen[bytes], kit: Path, detach: bool) -> None:
    """Until somebody ends it, unless it is to go on alone."""
    from pfed.deploy import parents

    if detach:
        return
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        process.wait()
    except KeyboardInterrupt:
        parents.stop(kit)
        raise
    raise RunError(f"The process has ended with code {process.returncode}; see {kit / parents.LOG}.")


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


def _approve(arguments: argparse.Namespace) -> None:
    from pfed.deploy import limits, manifest, site

    file = Path(arguments.manifest)
    plan = manifest.load(file)
    kit = Path(arguments.kit) if arguments.kit else file.absolute().parent.parent
    print(manifest.text(plan))
    if plan["privacy"]:
        print(f"with all runs of the site before it: epsilon {limits.total(kit, plan['privacy']):.4g}")
    if not arguments.show:
        site.approve(kit, plan)
        print(f"{plan['site']} has approved {manifest.digest(plan)[:12]}.")


def _run(arguments: argparse.Namespace) -> None:
    from pfed import commands, store
    from pfed.deploy import jobs, privacy

    folder = Path(arguments.folder)
    runs = jobs.runs_folder(folder)
    if (arguments.what is None) == (arguments.resume is None):
        raise UserError("'pfed deploy run' takes a METHOD, a FILE.toml, or --resume RUN.")
    if arguments.resume:
        run = store.find(runs, arguments.resume)
    else:
        rule = _rule(arguments)
        privacy.check(rule)
        if rule and arguments.records:
            raise UserError("--records does not go with --dp-clip: noise does not cover what methods log.")
        run = jobs.create(folder, commands.run_config(arguments), records=arguments.records, privacy=rule)
    result = jobs.follow(folder, run, lambda text: None if arguments.json else print(text, flush=True))
    arguments.runs = os.path.relpath(runs)
    commands.finish(result, arguments)
    if (rule := jobs.rule(run)) and not arguments.json:
        print(privacy.cost(result, rule["delta"]))


def _rule(arguments: argparse.Namespace) -> dict[str, float] | None:
    """What is asked of differential privacy."""
    if arguments.dp_clip is None:
        for name in ("noise", "delta"):
            if getattr(arguments, f"dp_{name}") is not None:
                raise UserError(f"--dp-{name} needs --dp-clip, the length that an update may have.")
        return None
    given = {"clip": arguments.dp_clip, "noise": arguments.dp_noise or "1", "delta": arguments.dp_delta or "1e-5"}
    return {name: _number(f"--dp-{name}", value) for name, value in given.items()}


def _status(arguments: argparse.Namespace) -> None:
    from pfed import store
    from pfed.deploy import jobs, kits, parents
    from pfed.tables import table

    folder = Path(arguments.folder)
    about = kits.about(folder)
    there: set[str] | None = None
    if parents.running(folder / "server"):
        with contextlib.suppress(RunError), jobs.session(folder, patience=0.0) as admin:
            there = jobs.connected(admin)
    rows = [["server", _here(folder / "server"), "answers" if there is not None else "does not answer"]]
    for site in about["sites"]:
        known = "" if there is None else "joined" if site in there else "not there"
        rows.append([site, _here(folder / site), known])
    print(table(["part", "processes here", "state"], rows, left=3))
    for run in store.listing(jobs.runs_folder(folder)):
        print(f"run {run['run']}: {run['state']}, round {min(run['round'], run['rounds'])}/{run['rounds']}")


def _here(kit: Path) -> str:
    from pfed.deploy import parents

    return str(len(parents.running(kit))) if kit.exists() else "elsewhere"


def _stop(arguments: argparse.Namespace) -> None:
    from pfed.deploy import jobs, kits, parents

    place = Path(arguments.folder)
    if not (place / kits.ABOUT).exists():
        kits.site_name(place)
        _ended(parents.stop(place))
        return
    server = place / "server"
    if parents.running(server):
        (server / jobs.STOPPED).touch()
        with contextlib.suppress(RunError):
            jobs.abort_all(place)
    sites = [place / site for site in kits.about(place)["sites"] if (place / site).exists()]
    _ended(sum(map(parents.stop, [*sites, server])))


def _ended(count: int) -> None:
    print("1 process ended." if count == 1 else f"{count} processes ended.")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name} must be a whole number. Got {text!r}.")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(json.loads(text))
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a number. Got {text!r}.") from None
