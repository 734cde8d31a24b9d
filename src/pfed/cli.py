"""The command line: parse, call, print. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from pfed import config, options
from pfed.errors import RunError, UserError, unknown
from pfed.reproduce import command as reproduce

_NEEDS = {
    "public": "public data",
    "validation": "validation data",
    "pooled": "all data in one place",
    "replies": "each client's answer",  # a sum over clients is not enough
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}. See '{self.prog} --help'.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is fine, 1 a failure, 2 a user's mistake, 130 a stop by Ctrl-C."""
    warnings.showwarning = _warn
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        run: Callable[[argparse.Namespace], int | None] = arguments.run
        return run(arguments) or 0
    except UserError as error:
        print(f"pfed: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"pfed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"pfed: {stop or 'Stopped.'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning as one line, without the place in the code."""
    print(f"pfed: {message}", file=sys.stderr)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        raise SystemExit(0)
    for word in rest:
        if word.startswith("-"):
            raise unknown("option", word.partition("=")[0], _flags(parser, *argv[:2]))
        raise UserError(f"There is nothing to do with {word!r}. See 'pfed {argv[0]} --help'.")
    return arguments


def _flags(parser: argparse.ArgumentParser, command: str, below: str = "") -> list[str]:
    """The long options of a command, or of one below it, for suggestions."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    chosen = commands.choices[command]
    inner = next((a for a in chosen._actions if isinstance(a, argparse._SubParsersAction)), None)
    if inner is not None and below in inner.choices:
        chosen = inner.choices[below]
    return [flag for action in chosen._actions for flag in action.option_strings if flag[:2] == "--"]


def _parser() -> Parser:
    import pfed
    from pfed.deploy import cli as deploy

    parser = Parser(prog="pfed", description="Personalized federated learning.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pfed {pfed.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND [OPTION]")

    def command(
        name: str, help: str, run: Callable[[argparse.Namespace], int | None], usage: str | None = None
    ) -> Parser:
        text = f"{help[0].upper()}{help[1:]}."
        made: Parser = commands.add_parser(name, help=help, description=text, usage=usage, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    one = command("run", "run a method, or what a TOML file says", _run, "pfed run METHOD|FILE.toml [OPTION…]")
    one.add_argument("what", metavar="METHOD|FILE.toml", help="a method by name, FILE.py[:CLASS], or a TOML file")
    _add_run_options(one)
    several = command(
        "compare", "run several methods on the same clients and seeds", _compare, "pfed compare METHOD… [OPTION…]"
    )
    several.add_argument("methods", nargs="+", metavar="METHOD")
    several.add_argument("--seeds", metavar="N|A,B,…", default="1", help="how many seeds, or which")
    several.add_argument("--report", metavar="FILE", help="also write a report")
    several.add_argument("--reuse", action="store_true", help="take runs of the same settings that are there already")
    _add_run_options(several)
    search = command(
        "tune", "find settings that suit methods, on validation data", _tune, "pfed tune METHOD… [--try KEY=A,B,…]…"
    )
    search.add_argument("methods", nargs="+", metavar="METHOD")
    search.add_argument(
        "--try",
        dest="tries",
        metavar="KEY=A,B,…",
        action="append",
        default=[],
        help="values to try of local.* or of a method's option [some learning rates, and what the options name]",
    )
    search.add_argument("--search", choices=["halving", "grid"], default="halving", help="how to search [halving]")
    search.add_argument("--least", metavar="int", default="1", help="rounds that every setting gets at least [1]")
    search.add_argument("--seeds", metavar="N|A,B,…", default="1", help="how many seeds, or which")
    search.add_argument("--out", metavar="FILE.toml", help="put the best settings into a preset file")
    _add_run_options(search)
    again = command("resume", "go on with a stopped run", _resume)
    again.add_argument("name", metavar="RUN")
    again.add_argument("--rounds", metavar="N", help="more rounds than were planned")
    _add_common(again)
    ended = command("stop", "let running runs end after the round they are in, as by Ctrl-C", _stop)
    ended.add_argument("names", nargs="+", metavar="RUN")
    _add_common(ended)
    listed = command("runs", "list runs; 'runs rm RUN…' deletes some", _runs)
    listed.add_argument("action", nargs="?", choices=["rm"], help="delete runs")
    listed.add_argument("names", nargs="*", metavar="RUN")
    _add_common(listed)
    known = command("methods", "list the methods, or describe one", _methods)
    known.add_argument("name", nargs="?", metavar="NAME")
    _add_common(known)
    data = command(
        "data", "list, get, check or show data sets", _data, "pfed data list|get|check|show [NAME|FOLDER] [OPTION…]"
    )
    data.add_argument("action", choices=["list", "get", "check", "show"])
    data.add_argument("name", nargs="?", metavar="NAME", help="a data set, or your own folder or CSV file")
    data.add_argument("--force", action="store_true", help="get: fetch again")
    data.add_argument("--out", metavar="FILE", help="show: also write a picture (.png or .svg)")
    _add_fields(data, config.SplitOptions, "How the data are divided")
    data.add_argument("--seed", default=None)
    _add_common(data)
    deploy.add(command("deploy", "run on real sites: 'pfed deploy --help'", _nothing), _add_deploy_options)
    page = command("report", "write an HTML page about runs, or its figures as files", _report)
    page.add_argument("names", nargs="+", metavar="RUN")
    forms = ["html", "png", "svg", "csv"]
    page.add_argument("--format", choices=forms, default="html", help="the page, or single figures, or their numbers")
    page.add_argument("--out", metavar="FILE|FOLDER", help="where to [report.html; a folder for figures: figures]")
    _add_common(page)
    live = command("watch", "show runs in the browser while they go on", _watch, "pfed watch [RUN…] [OPTION…]")
    live.add_argument("names", nargs="*", metavar="RUN", help="runs to begin with [those that are running]")
    live.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; others than 127.0.0.1 open it to the network"
    )
    live.add_argument(
        "--port", metavar="int", default=None, help="port to listen at, 0 for any [8777, or any if that is taken]"
    )
    live.add_argument("--no-open", action="store_true", help="print the address only, start no browser")
    live.add_argument("--no_open", action="store_true", help=argparse.SUPPRESS)
    _add_common(live)
    tables = command(
        "reproduce",
        "make a table of a paper again, or list them",
        reproduce.run,
        "pfed reproduce list | page FOLDER | TABLE|FILE.toml [OPTION…]",
    )
    reproduce.add(tables)
    _add_common(tables)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", metavar="FOLDER", default=None, help=f"where runs are kept (PFED_RUNS, or ./{config.RUNS})"
    )
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser)
    _add_common(parser)


def _add_deploy_options(parser: argparse.ArgumentParser) -> None:
    """Those of a run between sites; where runs are kept is the server's choice."""
    _add_settings(parser)
    _add_json(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    divided = {field.name for field in fields(config.SplitOptions)}
    _add_fields(parser, config.RunOptions, "The run", leave_out={*divided, "local"})
    _add_fields(parser, config.SplitOptions, "How the data are divided")
    _add_fields(parser, config.Local, "How a client trains", prefix="local.")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any option: of the run, local.*, or METHOD.*"
    )
    parser.add_argument("--preset", metavar="NAME|FILE.toml", help="settings by name, as original, or from a file")


def _add_fields(
    parser: argparse.ArgumentParser, cls: type, title: str, prefix: str = "", leave_out: Collection[str] = ()
) -> None:
    """A flag for each option of a dataclass; values are parsed later, where the error can name the option."""
    group = parser.add_argument_group(title)
    for field in fields(cls):
        if field.name in leave_out:
            continue
        default = "" if field.default is None else f" [{str(field.default).lower()}]"
        text = f"{field.metadata.get('help', '')}{default}".replace("%", "%%")
        flag, name = f"--{prefix}{field.name.replace('_', '-')}", f"{prefix}{field.name}"
        group.add_argument(flag, dest=name, metavar=options.form(cls, field.name), default=None, help=text)
        if "_" in field.name:  # as it is written in files and in Python
            group.add_argument(f"--{name}", dest=name, default=None, help=argparse.SUPPRESS)


def _settings(arguments: argparse.Namespace, methods: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """The nested configuration that flags and --set make of a base; `hyper` holds options by method."""
    for table in ("local", "hyper"):
        if not isinstance(base.get(table, {}), dict):
            raise UserError(f"{table} must be a table of options. Got {base[table]!r}.")
    values: dict[str, Any] = {**base, "local": dict(base.get("local", {})), "hyper": {}}
    if "hyper" in base:
        values["hyper"][methods[0]] = dict(base["hyper"])
    for key, text in vars(arguments).items():
        if text is None or not isinstance(text, str):
            continue
        if key.startswith("local."):
            values["local"][key[6:]] = options.parse(config.Local, key[6:], text, "local")
        elif key in options.hints(config.RunOptions):
            values[key] = options.parse(config.RunOptions, key, text, "run")
    for pair in getattr(arguments, "set", []):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE. Got {pair!r}.")
        _set(values, methods, key.strip(), text)
    return values


def _set(values: dict[str, Any], methods: Sequence[str], key: str, text: str) -> None:
    from pfed import registry

    owner, dot, name = key.rpartition(".")
    if owner == "local" and (name in options.hints(config.Local) or "local" not in methods):
        values["local"][name] = options.parse(config.Local, name, text, "local")
        return
    if not dot and key in options.hints(config.RunOptions):
        for method in methods:
            if key in registry.fields(method):
                raise UserError(f"{key} is an option of the run and of {method}. Write --{key} or {method}.{key}.")
        values[key] = options.parse(config.RunOptions, key, text, "run")
        return
    if dot and owner not in methods:
        raise unknown("method in this command", owner, methods)
    chosen = [owner] if dot else list(methods)[:1] if len(methods) == 1 else []
    if not chosen:
        near = [*options.hints(config.RunOptions), *(f"{m}.{f}" for m in methods for f in registry.fields(m))]
        raise unknown("option", key, near)
    defined = registry.fields(chosen[0])
    if name not in defined:
        run = [] if dot else list(options.hints(config.RunOptions))
        raise unknown(f"option of {chosen[0]}", name, [*defined, *run])
    hyper = values["hyper"].setdefault(chosen[0], {})
    hyper[name] = options.parse(defined[name], name, text)


def _runs_folder(arguments: argparse.Namespace) -> Path:
    return config.runs_folder(arguments.runs)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _nothing(arguments: argparse.Namespace) -> None:
    """A command that has only commands below it."""


def _run(arguments: argparse.Namespace) -> None:
    config = run_config(arguments)

    from pfed.experiment import Experiment

    finish(Experiment.from_config(config).run(_runs_folder(arguments)), arguments)


def run_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of one run: what a preset says, under a file or a method's name, under flags."""
    from pfed.presets import read_toml

    base = read_toml(Path(arguments.what)) if arguments.what.endswith(".toml") else {"method": arguments.what}
    method = base.get("method", "fedavg")
    if not isinstance(method, str):
        raise UserError(f"method must be the name of a method. Got {method!r}.")
    values = _settings(arguments, [method], _under(arguments, method, base))
    return {**values, "method": method, "hyper": values["hyper"].get(method, {})}


def _under(arguments: argparse.Namespace, method: str, base: dict[str, Any]) -> dict[str, Any]:
    """What a file or a name says, over what the preset does."""
    if arguments.preset is None:
        return base
    from pfed import presets

    found = presets.load(arguments.preset).of(method)
    tables = {key: {**found[key], **base.get(key, {})} for key in ("local", "hyper")}
    return {**found, **base, **tables}


def finish(result: Any, arguments: argparse.Namespace) -> None:
    """Print what came out of a run."""
    if arguments.json:
        _print_json(result.json())
    else:
        print("\n".join([result.table(), "", *result.notes(), f"run {result.run} in {_runs_folder(arguments)}"]))


def _compare(arguments: argparse.Namespace) -> None:
    values = _settings(arguments, arguments.methods, {})
    seeds = options.seeds(arguments.seeds, values.pop("seed", 0))

    from pfed.comparison import compare

    kept = {"runs": _runs_folder(arguments), "reuse": arguments.reuse}
    comparison = compare(arguments.methods, seeds=seeds, preset=arguments.preset, **kept, **values)
    if arguments.report:
        from pfed.report import write

        write(comparison.results, Path(arguments.report))
    if arguments.json:
        _print_json(comparison.json())
    else:
        print("\n".join([comparison.table(), "", *comparison.notes()]).rstrip())


def _tune(arguments: argparse.Namespace) -> None:
    values = _settings(arguments, arguments.methods, {})
    seeds = options.seeds(arguments.seeds, values.pop("seed", 0))
    hyper = values.pop("hyper")
    if not arguments.least.isdecimal():
        raise UserError(f"--least must be a whole number >= 1. Got {arguments.least!r}.")
    least = int(arguments.least)

    from pfed import presets
    from pfed.tuning import defaults, tune

    # A mistake in the last method's, or in where to put them, shows before the first one takes its hours.
    if arguments.out:
        presets.before(Path(arguments.out))
    tries = {m: _tries(arguments.tries, m) if arguments.tries else defaults(m) for m in arguments.methods}
    found = []
    for method in arguments.methods:
        own = _under(arguments, method, {**values, "hyper": hyper.get(method, {})})
        how = {"search": arguments.search, "least": least, "seeds": seeds, "runs": arguments.runs}
        tuning = tune(method, tries[method], **how, **own)
        found.append(tuning)
        if not arguments.json:
            print("\n".join([method, tuning.table(), ""]), flush=True)
        if arguments.out:
            tuning.save(Path(arguments.out))
    if arguments.json:
        _print_json([tuning.json() for tuning in found])
    elif arguments.out:
        print(f"The best are in {arguments.out}: pfed run METHOD --preset {arguments.out}")


def _tries(pairs: Sequence[str], method: str) -> dict[str, list[Any]]:
    """The values to try by option."""
    from pfed import registry

    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not text:
            raise UserError(f"--try takes KEY=A,B,…. Got {pair!r}.")
        owner, _, name = key.strip().rpartition(".")
        defined = {name: config.Local} if owner == "local" else registry.fields(method)
        if owner not in ("local", "", method) or name not in defined:
            known = [*registry.fields(method), *(f"local.{field}" for field in options.hints(config.Local))]
            raise unknown(f"option to tune of {method}", key.strip(), known)
        shown = "local" if owner == "local" else None
        values = [options.parse(defined[name], name, part, shown) for part in text.split(",")]
        found[f"local.{name}" if owner == "local" else name] = values
    return found


def _resume(arguments: argparse.Namespace) -> None:
    from pfed import store
    from pfed.experiment import Experiment
    from pfed.result import Result

    folder = store.find(_runs_folder(arguments), arguments.name)
    store.mend(folder)
    saved = Result.load(folder).config
    if saved.get("engine") == "nvflare":
        raise UserError(
            f"Run {folder.name!r} is one of real sites; go on with 'pfed deploy run --resume {folder.name}'."
        )
    if arguments.rounds is not None:
        saved = {**saved, "rounds": options.parse(config.RunOptions, "rounds", arguments.rounds, "run")}
    if "own" in (saved.get("data", "own").split()[0], saved.get("model", "own").split()[0]):
        raise UserError(
            f"Run {folder.name!r} has data or a model from Python; go on with Experiment(…).resume(folder)."
        )
    finish(Experiment.from_config(saved).resume(folder), arguments)


def _stop(arguments: argparse.Namespace) -> None:
    from pfed import store

    runs = _runs_folder(arguments)
    for folder in [store.find(runs, name) for name in dict.fromkeys(arguments.names)]:
        store.ask_to_stop(folder, "'pfed stop'")
        if arguments.json:
            _print_json({"run": folder.name})
        else:
            print(f"{folder.name} ends after the round it is in; 'pfed resume {folder.name}' goes on with it.")


def _runs(arguments: argparse.Namespace) -> None:
    from pfed import store
    from pfed.tables import age_text, bytes_text, table

    runs = _runs_folder(arguments)
    if arguments.action == "rm":
        if not arguments.names:
            raise UserError("'pfed runs rm' takes the names of runs.")
        for folder in [store.find(runs, name) for name in dict.fromkeys(arguments.names)]:
            store.remove(folder)
        return
    rows = store.listing(runs)
    if arguments.json:
        _print_json(rows)
        return
    cells = [
        [
            *(r["run"], r["state"], f"{min(r['round'], r['rounds'])}/{r['rounds']}"),
            *(age_text(r["created"]), bytes_text(r["bytes"])),
        ]
        for r in rows
    ]
    print(table(["run", "state", "round", "age", "size"], cells, left=2) if rows else f"No runs in {runs}.")


def _methods(arguments: argparse.Namespace) -> None:
    from pfed import registry
    from pfed.tables import table

    found = registry.describe(arguments.name)
    if arguments.json:
        _print_json(found)
    elif arguments.name:
        print(registry.document(arguments.name))
    else:
        rows = [
            [m["name"], m["title"], m["paper"], m["architectures"], ", ".join(_NEEDS[need] for need in m["needs"])]
            for m in found
        ]
        print(table(["method", "what", "paper", "architectures", "needs"], rows, left=5))
        print("\nNAME+ft is any of them followed by fine-tuning; 'pfed methods NAME' tells its options.")


def _data(arguments: argparse.Namespace) -> int | None:
    from pfed.data import sources
    from pfed.tables import bytes_text, table

    if arguments.action == "list":
        found = sources.sources()
        if arguments.json:
            keys = ("name", "title", "samples", "size", "licence", "cached")
            _print_json([{key: getattr(s, key) for key in keys} | {"classes": len(s.classes)} for s in found])
            return None
        rows = [
            [
                *(s.name, s.title, str(s.samples or "–"), str(len(s.classes) or "–")),
                *("by hand" if s.by_hand else bytes_text(s.size), "yes" if s.cached else "no"),
            ]
            for s in found
        ]
        print(table(["name", "what", "samples", "classes", "download", "here"], rows, left=2))
        return None
    if arguments.name is None:
        raise UserError(f"'pfed data {arguments.action}' takes the name of a data set.")
    if arguments.action == "get":
        print(sources.get(arguments.name, force=arguments.force))
    elif arguments.action == "check" and _is_folder(arguments.name):
        return _survey(arguments)
    elif arguments.action == "check":
        problems = sources.check(arguments.name)
        print("\n".join(problems) if problems else f"{arguments.name} is fine.")
        return 1 if problems else 0
    else:
        _show(arguments)
    return None


def _is_folder(name: str) -> bool:
    """Whether a folder is meant: a data set's name comes first, as everywhere."""
    from pfed.data.catalog import SOURCES

    return name not in SOURCES and (Path(name).expanduser().is_dir() or len(Path(name).parts) > 1)


def _survey(arguments: argparse.Namespace) -> int:
    """What a folder holds of the known data sets."""
    from pfed.data.survey import bad, survey, text

    findings = survey(arguments.name)
    if arguments.json:
        keys = ("there", "missing", "problems")
        _print_json(
            [
                {"name": f.name, "state": f.state, "place": f.place and str(f.place)}
                | {key: list(getattr(f, key)) for key in keys}
                for f in findings
            ]
        )
    else:
        print(text(findings))
    return 1 if bad(findings) else 0


def _show(arguments: argparse.Namespace) -> None:
    from pfed.data import show
    from pfed.data.catalog import SOURCES
    from pfed.data.federate import describe
    from pfed.experiment import Experiment

    values = _settings(arguments, [], {})
    task = "detection" if arguments.name in SOURCES and SOURCES[arguments.name].boxes else "classification"
    federation = Experiment("local", arguments.name, **{**values, "hyper": {}, "task": task}).federation()
    if arguments.json:
        _print_json(describe(federation))
    else:
        print(show.text(federation))
    if arguments.out:
        show.save(federation, Path(arguments.out))


def _report(arguments: argparse.Namespace) -> None:
    from pfed import report
    from pfed.result import Result

    results = [Result.load(name, _runs_folder(arguments)) for name in arguments.names]
    if arguments.format == "html":
        print(report.write(results, Path(arguments.out or "report.html")))
    else:
        print(*report.export(results, Path(arguments.out or "figures"), arguments.format), sep="\n")


def _watch(arguments: argparse.Namespace) -> None:
    port = arguments.port
    if port is not None and not (port.isdecimal() and int(port) < 65536):
        raise UserError(f"--port must be a whole number from 0 to 65535. Got {port!r}.")

    from pfed.watch import serve

    where = (arguments.host, None if port is None else int(port))
    serve(_runs_folder(arguments), arguments.names, *where, not arguments.no_open, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
