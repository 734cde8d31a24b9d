"""Presets: settings by name, for the run and for each method.

A preset is a TOML file. `[run]` has options of the run with `[run.local]`, `[methods.NAME]` what a method has of its
own: `run`, `local` and `hyper`. What a user gives wins over all of it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfed.errors import UserError, unknown

FOLDER = Path(__file__).parent
OWN = ("run", "local", "hyper")  # what a method may have of its own


@dataclass(frozen=True)
class Preset:
    """Settings of the run, and by method those in which it differs from the others."""

    about: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def of(self, method: str) -> dict[str, Any]:
        """All that a run of this method takes from here: options of the run, `local` and `hyper`.

        NAME+ft has what NAME has, unless it has settings of its own.
        """
        from pfed.registry import SUFFIX

        own = self.methods.get(method, self.methods.get(method.removesuffix(SUFFIX), {}))
        local = {**self.run.get("local", {}), **own.get("local", {})}
        return {**self.run, **own.get("run", {}), "local": local, "hyper": dict(own.get("hyper", {}))}


def names() -> list[str]:
    """The presets of the package: the papers' tables, each also in its reduced form, and others."""
    from pfed.reproduce import paper

    tables = [name + ending for name in paper.names() for ending in ("", paper.SMALL)]
    return sorted([*others(), *tables])


def others() -> list[str]:
    """Those that are no tables of papers."""
    found = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.toml")]
    return sorted(path.as_posix() for path in found if path.parts[0] != "papers")


def load(name: str | Path) -> Preset:
    """A preset of the package by name, or a file (.toml)."""
    from pfed.reproduce import paper

    path = Path(name) if str(name).endswith(".toml") else FOLDER / f"{name}.toml"
    if path.is_file():
        where = f"the preset {str(name)!r}"
        found = checked(read_toml(path), where)
        _check_names(found.methods, where)
        return found
    if str(name).endswith(".toml"):
        raise UserError(f"There is no preset file {str(name)!r}.")
    table = str(name).removesuffix(paper.SMALL)
    if table not in paper.names():
        raise unknown("preset", str(name), names())
    return paper.load(table, "full" if table == name else "small").preset()


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; one that can't be read, or is none, is an error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The file {str(path)!r} can't be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"The file {str(path)!r} is not TOML: {error}.") from error


def checked(values: dict[str, Any], where: str) -> Preset:
    """A preset from what a file says, if that has the form of one; `where` names it in errors."""
    for key in values:
        if key not in ("about", "run", "methods"):
            raise unknown(f"table of {where}", key, ("about", "run", "methods"))
    run, methods = values.get("run", {}), values.get("methods", {})
    if not all(isinstance(table, dict) for table in [run, methods, *methods.values()]):
        raise UserError(f"run and methods of {where} must be tables.")
    for method, own in methods.items():
        for key, table in own.items():
            if key not in OWN or not isinstance(table, dict):
                raise UserError(f"methods.{method} of {where} must have tables run, local and hyper. Got {key}.")
        for key in {"method", "local", "hyper"} & own.get("run", {}).keys():
            raise UserError(f"methods.{method}.run of {where} must not have {key}: that stands beside run.")
    return Preset(values.get("about", ""), run, methods)


def _check_names(given: Iterable[str], where: str) -> None:
    from pfed.registry import SUFFIX, methods

    known = methods()
    for method in given:
        name = method.removesuffix(SUFFIX)
        if ".py" not in name and name not in known:
            raise unknown(f"method of {where}", method, known)


def before(path: Path) -> Preset:
    """What a file that is to be written has already, an empty preset if there is none; a wrong name is an error."""
    if path.suffix != ".toml":
        raise UserError(f"A preset file must end with .toml. Got {str(path)!r}.")
    return load(path) if path.exists() else Preset()


def save(preset: Preset, path: Path) -> None:
    """Write a preset as a TOML file."""
    lines = [f"about = {_text(preset.about)}", "", "[run]"]
    lines += [f"{key} = {_text(value)}" for key, value in preset.run.items() if key != "local"]
    if preset.run.get("local"):
        lines += ["", "[run.local]", *(f"{key} = {_text(value)}" for key, value in preset.run["local"].items())]
    for method, own in sorted(preset.methods.items()):
        lines += ["", f"[methods.{_key(method)}]"]
        for table in OWN:
            if own.get(table):
                pairs = ", ".join(f"{key} = {_text(value)}" for key, value in own[table].items())
                lines.append(f"{table} = {{ {pairs} }}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"The preset can't be written to {str(path)!r}: {error.strerror}.") from error


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else _text(name)


def _text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
