"""What each command does once its line is parsed: call, print. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfed import config, options
from pfed.errors import UserError, unknown

_NEEDS = {
    "public": "public data",
    "validation": "validation data",
    "pooled": "all data in one place",
    "replies": "each client's answer",  # a sum over clients is not enough
}


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


def nothing(arguments: argparse.Namespace) -> None:
    """A command that has only commands below it."""


def run(arguments: argparse.Namespace) -> None:
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


def compare(arguments: argparse.Namespace) -> None:
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


def tune(arguments: argparse.Namespace) -> None:
    values = _settings(arguments, arguments.methods, {})
    seeds = options.seeds(arguments.seeds, values.pop("seed", 0))
    hyper = values.pop("hyper")
    if not arguments.least.isdecimal():
        raise UserError(f"--least must be a whole number >= 1. Got {arguments.least!r}.")
    least = int(arguments.least)

    from pfed import presets
    from pfed.tuning import tune

    # A mistake in the last method's, or in where to put them, shows before the first one takes its hours.
    if arguments.out:
        presets.before(Path(arguments.out))
    tries = {method: _tries(arguments, method) for method in arguments.methods}
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


def _tries(arguments: argparse.Namespace, method: str) -> dict[str, list[Any]]:
    """The values to try by option."""
    from pfed import registry, tuning

    if arguments.rates and arguments.tries:
        raise UserError(f"--rates goes without --try; write --try local.lr={arguments.rates}.")
    if arguments.rates:
        rates = [options.parse(config.Local, "lr", part, "local") for part in arguments.rates.split(",")]
        return tuning.defaults(method, rates)
    if not arguments.tries:
        return tuning.defaults(method)
    found = {}
    for pair in arguments.tries:
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


def resume(arguments: argparse.Namespace) -> None:
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


def stop(arguments: argparse.Namespace) -> None:
    from pfed import store

    runs = _runs_folder(arguments)
    for folder in [store.find(runs, name) for name in dict.fromkeys(arguments.names)]:
        store.ask_to_stop(folder, "'pfed stop'")
        if arguments.json:
            _print_json({"run": folder.name})
        else:
            print(f"{folder.name} ends after the round it is in; 'pfed resume {folder.name}' goes on with it.")


def runs(arguments: argparse.Namespace) -> None:
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


def methods(arguments: argparse.Namespace) -> None:
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


def data(arguments: argparse.Namespace) -> int | None:
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


def report(arguments: argparse.Namespace) -> None:
    from pfed import report
    from pfed.result import Result

    results = [Result.load(name, _runs_folder(arguments)) for name in arguments.names]
    if arguments.format == "html":
        print(report.write(results, Path(arguments.out or "report.html")))
    else:
        print(*report.export(results, Path(arguments.out or "figures"), arguments.format), sep="\n")


def watch(arguments: argparse.Namespace) -> None:
    port = arguments.port
    if port is not None and not (port.isdecimal() and int(port) < 65536):
        raise UserError(f"--port must be a whole number from 0 to 65535. Got {port!r}.")

    from pfed.watch import serve

    where = (arguments.host, None if port is None else int(port))
    serve(_runs_folder(arguments), arguments.names, *where, not arguments.no_open, arguments.json)
