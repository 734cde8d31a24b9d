"""The command line: its commands and options. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from pfed import commands, config, options
from pfed.errors import RunError, UserError, unknown
from pfed.reproduce import command as reproduce


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
    known = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    chosen = known.choices[command]
    inner = next((a for a in chosen._actions if isinstance(a, argparse._SubParsersAction)), None)
    if inner is not None and below in inner.choices:
        chosen = inner.choices[below]
    return [flag for action in chosen._actions for flag in action.option_strings if flag[:2] == "--"]


def _parser() -> Parser:
    import pfed
    from pfed.deploy import cli as deploy

    parser = Parser(prog="pfed", description="Personalized federated learning.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pfed {pfed.__version__}")
    below = parser.add_subparsers(metavar="COMMAND [OPTION]")

    def command(
        name: str, help: str, run: Callable[[argparse.Namespace], int | None], usage: str | None = None
    ) -> Parser:
        text = f"{help[0].upper()}{help[1:]}."
        made: Parser = below.add_parser(name, help=help, description=text, usage=usage, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    one = command("run", "run a method, or what a TOML file says", commands.run, "pfed run METHOD|FILE.toml [OPTION…]")
    one.add_argument("what", metavar="METHOD|FILE.toml", help="a method by name, FILE.py[:CLASS], or a TOML file")
    _add_run_options(one)
    several = command(
        "compare",
        "run several methods on the same clients and seeds",
        commands.compare,
        "pfed compare METHOD… [OPTION…]",
    )
    several.add_argument("methods", nargs="+", metavar="METHOD")
    several.add_argument("--seeds", metavar="N|A,B,…", default="1", help="how many seeds, or which")
    several.add_argument("--report", metavar="FILE", help="also write a report")
    several.add_argument("--reuse", action="store_true", help="take runs of the same settings that are there already")
    _add_run_options(several)
    search = command(
        "tune",
        "find settings that suit methods, on validation data",
        commands.tune,
        "pfed tune METHOD… [--try KEY=A,B,…]…",
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
    search.add_argument(
        "--rates", metavar="A,B,…", help="learning rates to try beside what the options name [0.01,0.03,0.1]"
    )
    search.add_argument("--search", choices=["halving", "grid"], default="halving", help="how to search [halving]")
    search.add_argument("--least", metavar="int", default="1", help="rounds that every setting gets at least [1]")
    search.add_argument("--seeds", metavar="N|A,B,…", default="1", help="how many seeds, or which")
    search.add_argument("--out", metavar="FILE.toml", help="put the best settings into a preset file")
    _add_run_options(search)
    again = command("resume", "go on with a stopped run", commands.resume)
    again.add_argument("name", metavar="RUN")
    again.add_argument("--rounds", metavar="N", help="more rounds than were planned")
    _add_common(again)
    ended = command("stop", "let running runs end after the round they are in, as by Ctrl-C", commands.stop)
    ended.add_argument("names", nargs="+", metavar="RUN")
    _add_common(ended)
    listed = command("runs", "list runs; 'runs rm RUN…' deletes some", commands.runs)
    listed.add_argument("action", nargs="?", choices=["rm"], help="delete runs")
    listed.add_argument("names", nargs="*", metavar="RUN")
    _add_common(listed)
    known = command("methods", "list the methods, or describe one", commands.methods)
    known.add_argument("name", nargs="?", metavar="NAME")
    _add_common(known)
    data = command(
        "data",
        "list, get, check or show data sets",
        commands.data,
        "pfed data list|get|check|show [NAME|FOLDER] [OPTION…]",
    )
    data.add_argument("action", choices=["list", "get", "check", "show"])
    data.add_argument("name", nargs="?", metavar="NAME", help="a data set, or your own folder or CSV file")
    data.add_argument("--force", action="store_true", help="get: fetch again")
    data.add_argument("--out", metavar="FILE", help="show: also write a picture (.png or .svg)")
    _add_fields(data, config.SplitOptions, "How the data are divided")
    data.add_argument("--seed", default=None)
    _add_common(data)
    deploy.add(command("deploy", "run on real sites: 'pfed deploy --help'", commands.nothing), _add_deploy_options)
    page = command("report", "write an HTML page about runs, or its figures as files", commands.report)
    page.add_argument("names", nargs="+", metavar="RUN")
    forms = ["html", "png", "svg", "csv"]
    page.add_argument("--format", choices=forms, default="html", help="the page, or single figures, or their numbers")
    page.add_argument("--out", metavar="FILE|FOLDER", help="where to [report.html; a folder for figures: figures]")
    _add_common(page)
    live = command("watch", "show runs in the browser while they go on", commands.watch, "pfed watch [RUN…] [OPTION…]")
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


if __name__ == "__main__":
    sys.exit(main())
