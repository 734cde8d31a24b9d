"""The data sets that pfed knows by name: load them, fetch them, check them.

`load("mnist")` looks in `PFED_DATA/mnist` first, then in the cache, and fetches only what is in neither.

>>> dataset = load("digits")
>>> dataset.x.shape, len(dataset.classes)
(torch.Size([1797, 1, 8, 8]), 10)
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pfed.data.base import Dataset
from pfed.data.catalog import SOURCES, Form, Source
from pfed.data.fetch import FetchError, cache_folder, fetch, locate, locked, read
from pfed.data.formats import Split
from pfed.errors import UserError, unknown


@dataclass(frozen=True)
class Place:
    """A folder that holds all files of one form of a data set."""

    folder: Path
    form: Form
    remedy: str  # what to do when one of its files is bad


def find(name: str) -> Source:
    """The data set of this name."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def sources() -> list[Source]:
    """Every data set that can be had by name, and whether it is here already."""
    return [replace(source, cached=_is_here(source)) for source in SOURCES.values()]


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """A data set by name, fetched when it is not here; `folder` may hold its original files instead."""
    source = find(name)
    x, y, train = _read(source, Path(folder).expanduser() if folder is not None else None)
    split = source.test > 0
    return Dataset(
        name=source.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=source.classes,
        train=torch.arange(train) if split else None,
        test=torch.arange(train, len(y)) if split else None,
        mean=source.mean,
        std=source.std,
    )


def get(name: str, force: bool = False) -> Path:
    """The folder of a data set's files, fetched where they are missing or damaged, or in any case with `force`.

    A folder of the user's own (`PFED_DATA`) is never written to.
    """
    source = find(name)
    if not source.forms:
        return _scikit_learn_folder()
    place = _local(source)
    if place is not None:
        _contents(place)  # raises where a file is bad
        return place.folder
    place = _in_cache(source)
    if place is not None and not force and not _problems_of_files(place):
        return place.folder
    return _fetch(source, force=place is not None).folder


def check(name: str) -> list[str]:
    """What is wrong with a data set as it is here, one sentence each; nothing is fetched, and empty means fine."""
    source = find(name)
    if source.forms:
        try:
            place = _local(source) or _in_cache(source)
        except UserError as error:
            return [str(error)]
        if place is None:
            return [f"{name} is not here: `pfed data get {name}` fetches it."]
        problems = _problems_of_files(place)
        if problems:
            return problems
    return _problems_of_content(source, _read(source, None))


def _read(source: Source, folder: Path | None) -> Split:
    if not source.forms:
        return _digits()
    place = _complete(source, folder, "put the original file there") if folder is not None else _anywhere(source)
    return place.form.parse(*_contents(place))


def _anywhere(source: Source) -> Place:
    return _local(source) or _in_cache(source) or _fetch(source)


def _contents(place: Place) -> list[bytes]:
    return [read(place.folder, file, place.remedy) for file in place.form.files]


def _digits() -> Split:
    from sklearn.datasets import load_digits

    raw = load_digits()  # pixels in 0..16
    x = np.round(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    return x, raw.target.astype(np.int64), len(x)


def _scikit_learn_folder() -> Path:
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data"


def _is_here(source: Source) -> bool:
    try:
        return not source.forms or (_local(source) or _in_cache(source)) is not None
    except UserError:
        return False


def _holds(source: Source, folder: Path, remedy: str) -> Place | None:
    """The first place, in this folder or where the original archives unpack in it, with all files of a form."""
    for candidate in (folder, *(folder / name for name in source.folders)):
        for form in source.forms:
            if all(locate(candidate, file) for file in form.files):
                return Place(candidate, form, remedy)
    return None


def _complete(source: Source, folder: Path, remedy: str) -> Place:
    place = _holds(source, folder, remedy)
    if place is None:
        raise UserError(f"{folder} does not hold {source.title}: it needs {_needed(source)}.")
    return place


def _needed(source: Source) -> str:
    return " or ".join(f"the files {', '.join(file.name for file in form.files)}" for form in source.forms)


def _local(source: Source) -> Place | None:
    """The user's own copy. A folder of the data set's name must be complete: nothing else is used in its stead."""
    root = os.environ.get("PFED_DATA")
    if not root:
        return None
    remedy = "put the original file there, or unset PFED_DATA to have it fetched"
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"PFED_DATA must be a folder. Got {root!r}.")
    if (folder / source.name).is_dir():
        return _complete(source, folder / source.name, remedy)
    return _holds(source, folder, remedy)


def _in_cache(source: Source) -> Place | None:
    return _holds(source, cache_folder() / source.name, _anew(source))


def _anew(source: Source) -> str:
    return f"`pfed data get {source.name} --force` fetches it anew"


def _fetch(source: Source, force: bool = False) -> Place:
    """Try every route in turn."""
    cache = cache_folder()
    tried = []
    try:
        with locked(cache / f"{source.name}.lock"):
            place = None if force else _in_cache(source)
            if place is not None:
                return place  # another process fetched it meanwhile
            for route, form in source.routes:
                try:
                    fetch(route, form.files, cache / source.name, cache / f"{source.name}.part")
                    return Place(cache / source.name, form, _anew(source))
                except FetchError as error:
                    tried.append(f"{route}: {error}")
    except OSError as error:
        raise UserError(f"The cache {cache} cannot be written ({error}): set PFED_CACHE to another folder.") from error
    raise UserError(
        f"{source.title} could not be fetched ({'; '.join(tried)}): put {_needed(source)} into a folder "
        f"named {source.name} and set PFED_DATA to the folder above it."
    )


def _problems_of_files(place: Place) -> list[str]:
    problems = []
    for file in place.form.files:
        try:
            read(place.folder, file, place.remedy)
        except UserError as error:
            problems.append(str(error))
    return problems


def _problems_of_content(source: Source, content: Split) -> list[str]:
    x, y, train = content
    facts = (
        ("samples", len(x), source.samples),
        ("labels", len(y), source.samples),
        ("training samples", train, source.train),
        ("a sample's shape", x.shape[1:], source.shape),
        ("classes", np.unique(y).tolist(), list(range(len(source.classes)))),
    )
    return [
        f"{source.name}: {what} must be {expected}. Got {found}."
        for what, found, expected in facts
        if found != expected
    ]
