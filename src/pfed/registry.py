"""Methods by name: those of the package, those of other packages, and a class in a user's own file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pfed import options
from pfed.errors import UserError, unknown
from pfed.method import Method

M = TypeVar("M", bound=type[Method])
_METHODS: dict[str, type[Method]] = {}
SUFFIX = "+ft"


def register(name: str) -> Callable[[M], M]:
    """Give a method its name on the command line, in files and in tables."""

    def add(cls: M) -> M:
        cls.name = name
        _METHODS[name] = cls
        return cls

    return add


def methods() -> dict[str, type[Method]]:
    """All registered methods by name. Other packages add theirs through the entry-point group `pfed.methods`."""
    import pfed.methods

    for module in pkgutil.iter_modules(pfed.methods.__path__):
        importlib.import_module(f"pfed.methods.{module.name}")
    for entry in entry_points(group="pfed.methods"):
        if entry.name not in _METHODS:
            register(entry.name)(entry.load())
    return dict(sorted(_METHODS.items()))


def find(name: str) -> type[Method]:
    """A method's class: by name, or as `FILE.py` or `FILE.py:CLASS` for one that is not installed."""
    file, _, cls = name.partition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), cls)
    known = methods()
    if name not in known:
        raise unknown("method", name, [*known, *(base + SUFFIX for base in ("fedavg",))])
    return known[name]


def make(name: str, values: Mapping[str, Any]) -> Method:
    """A method with these hyper-parameters; `NAME+ft` is the method NAME followed by fine-tuning."""
    if name.endswith(SUFFIX):
        from pfed.methods.finetuned import FineTuned

        own = {key: value for key, value in values.items() if key in options.hints(FineTuned) and key != "base"}
        for key in values:
            if key not in fields(name):
                raise unknown(f"option of {name}", key, fields(name))
        rest = {key: value for key, value in values.items() if key not in own}
        return FineTuned(base=make(name.removesuffix(SUFFIX), rest), **own)
    cls = find(name)
    return options.make(cls, values, cls.__name__)


def fields(name: str) -> dict[str, type]:
    """The options of a method by name, each with the class that defines it."""
    if name.endswith(SUFFIX):
        from pfed.methods.finetuned import FineTuned

        own = {key: FineTuned for key in options.hints(FineTuned) if key.startswith("ft_")}
        return {**fields(name.removesuffix(SUFFIX)), **own}
    cls = find(name)
    return dict.fromkeys(getattr(cls, "__dataclass_fields__", {}), cls)


def describe(name: str | None = None) -> list[dict[str, Any]]:
    """Name, title, paper, options and needs of one method or of all."""
    found = []
    for method, cls in {name: _class(name)}.items() if name else methods().items():
        # A method's docstring begins with `Title (paper).`
        title, _, paper = _doc(cls).splitlines()[0].rstrip(".").partition(" (")
        defaults = {f.name: f for f in dataclasses.fields(cls) if f.name != "base"}  # type: ignore[arg-type]
        about = {
            field: {"default": f.default, "type": options.form(cls, field), "help": f.metadata.get("help", "")}
            for field, f in defaults.items()
        }
        entry = {
            "name": method,
            "title": title,
            "paper": paper.rstrip(")"),
            "fields": about,
            "needs": sorted(cls.needs),
            "architectures": "one" if cls.same_architecture else "any",
            "tasks": sorted(cls.tasks),
        }
        found.append(entry)
    return found


def document(name: str) -> str:
    """What a method is and which options it has, as text."""
    entry = describe(name)[0]
    lines = [_doc(_class(name)), "", "Options:"]
    for field, about in entry["fields"].items():
        lines.append(f"  {field} = {about['default']}  ({about['type']})  {about['help']}".rstrip())
    return "\n".join(lines)


def _class(name: str) -> type[Method]:
    if name.endswith(SUFFIX):
        from pfed.methods.finetuned import FineTuned

        find(name.removesuffix(SUFFIX))
        return FineTuned
    return find(name)


def _doc(cls: type) -> str:
    return inspect.getdoc(cls) or cls.__name__


def _from_file(path: Path, cls: str) -> type[Method]:
    if not path.is_file():
        raise UserError(f"There is no file {str(path)!r} to take a method from.")
    spec = importlib.util.spec_from_file_location(f"pfed_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == spec.name
    }
    if not cls and len(found) == 1:
        return next(iter(found.values()))
    if cls not in found:
        raise unknown(f"method class in {path.name}", cls, found) if found else UserError(f"{path} defines no method.")
    return found[cls]
