"""Options: what texts become, what is refused, and the sentence that says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from pfed import options, registry
from pfed.config import Local, RunOptions
from pfed.errors import UserError
from pfed.experiment import Experiment
from pfed.options import option


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One field of every kind."""

    whole: int = option(1, "a count", ge=0, le=9)
    number: float = option(0.5, "a factor", gt=0, lt=1)
    switch: bool = option(False)
    text: str = option("x")
    kind: Literal["red", "green"] = option("red")
    size: Literal[1, 2, 4] = option(1)
    maybe: int | None = option(None, ge=1)
    name: str | None = option(None)
    three: bool | None = option(None)
    steps: tuple[int, ...] = option(())
    shares: tuple[float, ...] | None = option(None, ge=0)
    word: str = option("ab", check=lambda value: None if len(value) == 2 else "a text of two letters")

    def __post_init__(self) -> None:
        options.validate(self, "toy")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("whole", "3", 3),
        ("whole", " -3 ", -3),
        ("number", "0.25", 0.25),
        ("number", "1e-3", 1e-3),
        ("number", "2", 2.0),
        ("switch", "true", True),
        ("switch", "Off", False),
        ("switch", "1", True),
        ("switch", "0", False),
        ("text", "a b", "a b"),
        ("text", "none", "none"),
        ("kind", "green", "green"),
        ("size", "4", 4),
        ("maybe", "none", None),
        ("maybe", "None", None),
        ("maybe", "5", 5),
        ("name", "fc2", "fc2"),
        ("name", "none", None),
        ("three", "none", None),
        ("three", "on", True),
        ("steps", "1,2, 3", (1, 2, 3)),
        ("steps", "7", (7,)),
        ("steps", "", ()),
        ("shares", "0.5,1", (0.5, 1.0)),
        ("shares", "none", None),
    ],
)
def test_texts_become_the_value_that_the_field_wants(key: str, text: str, value: Any) -> None:
    found = options.parse(Toy, key, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "rule"),
    [
        ("whole", "abc", "a whole number"),
        ("whole", "3.5", "a whole number"),
        ("whole", "", "a whole number"),
        ("whole", "none", "a whole number"),
        ("number", "many", "a number"),
        ("number", "nan", "a number"),
        ("number", "inf", "a number"),
        ("switch", "maybe", "true or false"),
        ("switch", "2", "true or false"),
        ("kind", "blue", "'red' or 'green'"),
        ("kind", "Red", "'red' or 'green'"),
        ("size", "3", "1 or 2 or 4"),
        ("maybe", "x", "a whole number or none"),
        ("three", "x", "true or false or none"),
        ("steps", "1,x", "a list (a whole number each)"),
        ("shares", "x", "a list (a number each) or none"),
    ],
)
def test_a_bad_text_is_answered_with_field_rule_and_value(key: str, text: str, rule: str) -> None:
    with pytest.raises(UserError) as caught:
        options.parse(Toy, key, text, "toy")
    assert str(caught.value) == f"toy.{key} must be {rule}. Got {text!r}."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"whole": -1}, "toy.whole must be >= 0. Got -1."),
        ({"whole": 10}, "toy.whole must be <= 9. Got 10."),
        ({"whole": 1.0}, "toy.whole must be a whole number. Got 1.0."),
        ({"whole": True}, "toy.whole must be a whole number. Got True."),
        ({"whole": "1"}, "toy.whole must be a whole number. Got '1'."),
        ({"whole": None}, "toy.whole must be a whole number. Got None."),
        ({"number": 0}, "toy.number must be > 0. Got 0."),
        ({"number": 1.0}, "toy.number must be < 1. Got 1.0."),
        ({"number": math.nan}, "toy.number must be a number. Got nan."),
        ({"number": math.inf}, "toy.number must be a number. Got inf."),
        ({"number": False}, "toy.number must be a number. Got False."),
        ({"switch": 1}, "toy.switch must be true or false. Got 1."),
        ({"text": 3}, "toy.text must be a text. Got 3."),
        ({"kind": "blue"}, "toy.kind must be 'red' or 'green'. Got 'blue'."),
        ({"size": True}, "toy.size must be 1 or 2 or 4. Got True."),
        ({"maybe": 0}, "toy.maybe must be >= 1. Got 0."),
        ({"maybe": "none"}, "toy.maybe must be a whole number or none. Got 'none'."),
        ({"name": 1}, "toy.name must be a text or none. Got 1."),
        ({"steps": (1, "x")}, "toy.steps must be a list (a whole number each). Got (1, 'x')."),
        ({"shares": (0.5, -1.0)}, "toy.shares must be >= 0. Got -1.0."),
        ({"word": "abc"}, "toy.word must be a text of two letters. Got 'abc'."),
        ({"steps": 3}, "toy.steps must be a list (a whole number each). Got 3."),
    ],
    ids=str,
)
def test_a_bad_value_is_answered_with_field_rule_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Toy(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"whole": 0},
        {"whole": 9},
        {"number": 1e-9},
        {"maybe": None},
        {"maybe": 1},
        {"kind": "green", "size": 4},
        {"steps": (), "shares": (1, 0.5, 0)},
        {"word": "xy"},
    ],
    ids=str,
)
def test_the_edges_of_a_rule_are_inside_or_outside_as_it_says(values: dict[str, Any]) -> None:
    toy = Toy(**values)
    assert {key: getattr(toy, key) for key in values} == values


def test_make_takes_lists_for_tuples_as_json_and_toml_have_no_tuples() -> None:
    assert options.make(Toy, {"steps": [1, 2]}).steps == (1, 2)
    assert options.make(Toy, {}) == Toy()


def test_an_unknown_option_gets_the_nearest_known_one() -> None:
    with pytest.raises(UserError, match=r"^There is no option of toy 'numbr'\. Did you mean 'number'\?$"):
        options.make(Toy, {"numbr": 1}, "toy")
    with pytest.raises(UserError, match=r"^There is no option of Toy 'numbr'\. Did you mean 'number'\?$"):
        options.parse(Toy, "numbr", "1")
    with pytest.raises(UserError, match=r"^There is no option of toy 'qqq'\. Known: kind, maybe, .*word\.$"):
        options.make(Toy, {"qqq": 1}, "toy")


def test_the_default_and_the_help_stay_with_the_field() -> None:
    found = {field.name: field for field in fields(Toy)}
    assert found["number"].default == 0.5
    assert found["number"].metadata == {"help": "a factor", "rules": {"gt": 0, "lt": 1}}
    assert found["text"].metadata["rules"] == {}


@pytest.mark.parametrize("cls", [RunOptions, Local])
def test_every_option_of_a_run_has_help_and_a_default_that_is_valid(cls: type) -> None:
    cls()
    assert [field.name for field in fields(cls) if not field.metadata.get("help")] == []


@pytest.mark.parametrize("cls", [RunOptions, Local])
def test_every_default_survives_the_command_line(cls: type) -> None:
    """What help prints as a default may be typed."""
    for field in fields(cls):
        if field.name != "local":
            value = options.parse(cls, field.name, str(field.default))
            assert value == field.default, field.name
            assert type(value) is type(field.default), field.name


def test_a_methods_error_is_the_one_of_the_design() -> None:
    with pytest.raises(UserError) as caught:
        Experiment("fedprox", hyper={"mu": -0.1})
    assert str(caught.value) == "FedProx.mu must be >= 0. Got -0.1."


@pytest.mark.parametrize("name", sorted(registry.methods()))
def test_every_option_of_every_method_is_checked(name: str) -> None:
    """An object is the right value of no option."""
    for key, owner in registry.fields(name).items():
        with pytest.raises(UserError, match=rf"^{owner.__name__}\.{key} must be .*\. Got <object"):
            Experiment(name, hyper={key: object()})


def test_fine_tuning_shares_its_options_with_the_base_method() -> None:
    method = registry.make("fedprox+ft", {"mu": 0.25, "ft_epochs": 3})
    assert method.label == "fedprox+ft"
    assert method.hyperparameters() == {"mu": 0.25, "agg": "samples", "ft_epochs": 3, "ft_scope": "head"}
    assert set(registry.fields("fedprox+ft")) == {"mu", "agg", "ft_epochs", "ft_scope"}
    with pytest.raises(UserError, match=r"^FineTuned\.ft_epochs must be >= 0\. Got -1\.$"):
        registry.make("fedprox+ft", {"ft_epochs": -1})


@pytest.mark.parametrize(("key", "near"), [("ft_epoch", "ft_epochs"), ("ft_scop", "ft_scope"), ("aggg", "agg")])
def test_a_misspelt_option_of_fine_tuning_gets_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"'{key}'\. Did you mean '{near}'\?$"):
        registry.make("fedavg+ft", {key: 1})
