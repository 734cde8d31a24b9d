"""Options: dataclass fields that know their rule, so that they are defined and checked once.

Methods and the run's configuration are both dataclasses made of such fields. The command line, TOML files
and the documentation are derived from them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pfed.errors import UserError, unknown

T = TypeVar("T")


def option(
    default: T,
    help: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    check: Callable[[Any], str | None] | None = None,
    tries: Sequence[T] = (),
) -> T:
    """A dataclass field with a default, a line of help and the range of its values, or of each one in a list.

    `check(value)` is for rules of another kind: it says what the value must be, or nothing if it is that. `tries` are
    values worth trying, for `pfed tune`.
    """
    rules = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata: dict[str, Any] = {"help": help, "rules": {k: v for k, v in rules.items() if v is not None}}
    if check is not None:
        metadata["check"] = check
    if tries:
        metadata["tries"] = tuple(tries)
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _holds(rule: str, value: float, bound: float) -> bool:
    return {"ge": value >= bound, "gt": value > bound, "le": value <= bound, "lt": value < bound}[rule]


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved type of each field of a dataclass."""
    return get_type_hints(cls)


def validate(instance: Any, name: str | None = None) -> None:
    """Check every field against its type and its rules; the error names field, rule and value."""
    cls: type = type(instance)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        where = f"{name or cls.__name__}.{field.name}"
        _check_type(where, hints(cls)[field.name], value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                for rule, bound in field.metadata.get("rules", {}).items():
                    if not _holds(rule, number, bound):
                        raise UserError(f"{where} must be {_SIGNS[rule]} {bound}. Got {number}.")
        check = field.metadata.get("check")
        wanted = check(value) if check is not None else None
        if wanted is not None:
            raise UserError(f"{where} must be {wanted}. Got {value!r}.")


def _check_type(where: str, hint: Any, value: Any) -> None:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not any(_fits(alternative, value) for alternative in alternatives):
        raise UserError(f"{where} must be {_describe(alternatives)}. Got {value!r}.")


def _fits(hint: Any, value: Any) -> bool:
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], v) for v in value)
    origin = get_origin(hint) or hint
    return not isinstance(origin, type) or isinstance(value, origin)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "none"}


def _describe(alternatives: tuple[Any, ...]) -> str:
    words = []
    for hint in alternatives:
        if get_origin(hint) is Literal:
            words += [repr(choice) for choice in get_args(hint)]
        elif get_origin(hint) is tuple:
            words.append(f"a list ({_describe(get_args(hint)[:1])} each)")
        else:
            words.append(_WORDS.get(hint, getattr(hint, "__name__", str(hint))))
    return " or ".join(words)


def parse(cls: type, key: str, text: str, name: str | None = None) -> Any:
    """Turn the text of a command-line option into the value its field wants."""
    if key not in hints(cls):
        raise unknown(f"option of {name or cls.__name__}", key, hints(cls))
    hint = hints(cls)[key]
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for alternative in sorted(alternatives, key=lambda hint: hint is not types.NoneType):
        value = _parse_as(alternative, text)
        if value is not _NO and _fits(alternative, value):
            return value
    raise UserError(f"{name or cls.__name__}.{key} must be {_describe(alternatives)}. Got {text!r}.")


def form(cls: type, key: str) -> str:
    """What an option takes, in a word: its choices, or int, float, text."""
    hint = hints(cls)[key]
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = []
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            words += [str(choice) for choice in get_args(alternative)]
        elif alternative is not types.NoneType:
            words.append({bool: "true|false", int: "int", float: "float"}.get(alternative, "text"))
    return "|".join(words)


_NO = object()


def _parse_as(hint: Any, text: str) -> Any:
    word = text.strip()
    if hint is bool:
        return {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}.get(word.lower(), _NO)
    if hint is types.NoneType:
        return None if word.lower() == "none" else _NO
    if hint in (int, float):
        try:
            return hint(word)
        except ValueError:
            return _NO
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == word), _NO)
    if get_origin(hint) is tuple:
        values = tuple(_parse_as(get_args(hint)[0], part) for part in word.split(",") if part.strip())
        return _NO if _NO in values else values
    return text if hint is str else _NO


def make(cls: type[T], values: Mapping[str, Any], name: str | None = None) -> T:
    """Build a dataclass from named values; an unknown name suggests the nearest right one."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for key in values:
        if key not in fields:
            raise unknown(f"option of {name or cls.__name__}", key, fields)
    return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def seeds(text: str, first: int) -> list[int]:
    """The seeds that `--seeds` means: so many from the first on, or a list of them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or (len(parts) == 1 and not int(text)):
        raise UserError(f"--seeds must be how many, or a list as in 0,1,2. Got {text!r}.")
    return [int(part) for part in parts] if len(parts) > 1 else [first + i for i in range(int(text))]
