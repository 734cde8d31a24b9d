"""Which groups of a model a client loads from the server: hand-made strategies, by name or as a list of groups."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Literal

from torch import nn

from pfed import groups
from pfed.anatomy import ALL, HEAD, NONE, NORM, SE, STATS, Part, find_head, has_batchnorm
from pfed.client import Client
from pfed.errors import UserError, unknown

Granularity = Literal["stage", "block", "layer"]
Stem = Literal["with_s1", "own"]
ConvBN = Literal["joint", "separate"]

LOCAL = {  # what stays local in the strategies that are named after it
    "full": NONE,
    "none": ALL,
    "wo_fc": HEAD,
    "wo_bn": NORM,
    "wo_bn_fc": NORM | HEAD,
    "wo_bn_stats": STATS,
    "wo_se": SE,
    "wo_se_bn": SE | NORM,
}
FIRST_BLOCKS = {"wo_fb": (0,), "wo_fb_tb": (0, 2)}  # blocks of every stage that stay local
NAMED = (*LOCAL, *FIRST_BLOCKS, "fc")
_RANGE = re.compile(r"(stem|s\d+|fc)(?:-(stem|s\d+|fc))?")
_BLOCK = re.compile(r"s(\d+)\.(\d+)")


def cut(
    model: nn.Module, granularity: Granularity, stem_group: Stem = "with_s1", layer_conv_bn: ConvBN = "separate"
) -> dict[str, Part]:
    """The groups of a model at a granularity, by label."""
    if granularity == "stage":
        return groups.stages(model, stem_group)
    return groups.blocks(model) if granularity == "block" else groups.layers(model, layer_conv_bn == "joint")


def form(strategy: str) -> str | None:
    """What a strategy must look like, if this text does not; whether a model has it is another question."""
    labels = strategy.split(",")
    if not all(re.fullmatch(r"[\w.-]+", label) for label in labels):
        return f"one of {', '.join(NAMED)}, stages such as s1-s3, blocks such as AaBb or groups separated by commas"
    if len(labels) == 1 and strategy.startswith("wo_") and strategy not in NAMED:
        return f"one of {', '.join(name for name in NAMED if name.startswith('wo_'))} if it begins with wo_"
    return None


def loaded(model: nn.Module, strategy: str, granularity: Granularity, stem_group: Stem, layer_conv_bn: ConvBN) -> Part:
    """The part of the model that a strategy loads from the server; an error says what the model lacks for it."""
    if strategy in LOCAL:
        return ~_local(model, strategy)
    if strategy in FIRST_BLOCKS:
        return ~_first_blocks(model, strategy)
    known = cut(model, granularity, stem_group, layer_conv_bn)
    labels = strategy.split(",")
    if strategy not in known and (found := _RANGE.fullmatch(strategy)):
        return _stages(groups.stages(model, stem_group), strategy, found[1], found[2] or found[1])
    if strategy not in known and strategy.isalpha():
        return _skip(model, strategy)
    for label in labels:
        if label not in known:
            raise unknown(f"{granularity} of the model", label, known)
    return _union([known[label] for label in labels])


def lacks_batchnorm(model: nn.Module, strategy: str) -> bool:
    """Whether the strategy keeps BatchNorm and nothing else, and the model has none."""
    return strategy in ("wo_bn", "wo_bn_stats") and not has_batchnorm(model)


def judged(client: Client, model: nn.Module) -> dict[str, nn.Module]:
    """The client's model, or once it is tuned, the tuned one and this one beside it."""
    if "finetuned" not in client.state:
        return {"personal": model}
    tuned = client.model(client.state["finetuned"])
    return {"personal": tuned, "finetuned": tuned, "untuned": model}


def _local(model: nn.Module, strategy: str) -> Part:
    if "se" in strategy.split("_") and not SE.names(model):
        raise _refusal(strategy, "squeeze-and-excitation", "none")
    if "fc" in strategy.split("_") and find_head(model) is None:
        raise _refusal(strategy, "a linear head", "none")
    return LOCAL[strategy]


def _first_blocks(model: nn.Module, strategy: str) -> Part:
    """A stage that has no third block keeps its first only, but some stage must have one."""
    blocks = groups.blocks(model)
    place = {label: int(found[2]) for label in blocks if (found := _BLOCK.fullmatch(label))}
    kept = FIRST_BLOCKS[strategy]
    if kept[-1] not in place.values():
        raise _refusal(
            strategy, "a third block in some stage" if len(kept) > 1 and place else "residual blocks", blocks
        )
    return _union([blocks[label] for label, index in place.items() if index in kept])


def _stages(known: dict[str, Part], strategy: str, first: str, last: str) -> Part:
    """From one stage to another. s2 is the second group that is neither the stem nor fc, whatever its label."""
    numbered = [label for label in known if label not in ("stem", "fc")]
    numbers = {label: f"s{i}" for i, label in enumerate(numbered, start=1)}
    names = [numbers.get(label, label) for label in known]
    for end in (first, last):
        if end not in names:
            raise _refusal(strategy, end, _with_labels(dict(zip(names, known, strict=True))))
    begin, stop = names.index(first), names.index(last) + 1
    if begin >= stop:
        raise UserError(f"PartialFedFix.strategy must name the earlier stage first. Got {strategy!r}.")
    return _union(list(known.values())[begin:stop])


def _skip(model: nn.Module, strategy: str) -> Part:
    """The lettered blocks, the stem and the head. A and a are the first and second block of stage 1, B and b of 2, …"""
    blocks = groups.blocks(model)
    places = {label: (int(found[1]), int(found[2])) for label in blocks if (found := _BLOCK.fullmatch(label))}
    if not places:  # no stages: layer by layer A, a, B, b, …
        rest = [label for label in blocks if label != "fc"]
        places = {label: (i // 2 + 1, i % 2) for i, label in enumerate(rest)}
    letters = {
        chr((ord("A"), ord("a"))[block] + stage - 1): label for label, (stage, block) in places.items() if block < 2
    }
    if strange := [letter for letter in strategy if letter not in letters]:
        if difflib.get_close_matches(strategy, NAMED):
            raise unknown("strategy", strategy, NAMED)
        raise _refusal(strategy, f"a block {strange[0]}", _with_labels(letters))
    return _union([blocks[label] for label in blocks if label in ("stem", "fc", *(letters[x] for x in strategy))])


def _union(parts: Sequence[Part]) -> Part:
    whole = NONE
    for part in parts:
        whole = whole | part
    return whole


def _with_labels(names: dict[str, str]) -> list[str]:
    return [name if name == label else f"{name} ({label})" for name, label in names.items()]


def _refusal(strategy: str, lacking: str, has: Collection[str] | str) -> UserError:
    there = has if isinstance(has, str) else ", ".join(has)
    return UserError(f"PartialFedFix.strategy {strategy!r} needs {lacking}; the model has {there}.")
