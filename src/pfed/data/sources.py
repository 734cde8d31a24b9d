"""The data sets that pfed knows by name: load them, fetch them, check them.

`load("mnist")` looks in `PFED_DATA/mnist` first, then in the cache, and fetches only what is in neither. What cannot be
fetched, such as `pacs`, must be below `PFED_DATA`.

>>> dataset = load("digits")
>>> dataset.x.shape, len(dataset.classes)
(torch.Size([1797, 1, 8, 8]), 10)
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfed.data.base import Dataset
from pfed.data.catalog import SOURCES, Archive, Benchmark, BoxArchives, Folders, Form, Source
from pfed.data.fetch import FetchError, cache_folder, fetch_any, locked, read
from pfed.data.formats import Split
from pfed.data.pool import Pool, to_dataset
from pfed.data.scenes import composite
from pfed.data.styles import digits_5s
from pfed.errors import UserError, unknown


@dataclass(frozen=True)
class Place:
    """A folder that holds all files of one form of a data set."""

    folder: Path
    form: Form | Archive | Folders | BoxArchives | Benchmark
    remedy: str  # what to do when one of its files is bad


def find(name: str) -> Source:
    """The data set of this name."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def sources() -> list[Source]:
    """Every data set that can be had by name, and whether it is here already."""
    return [replace(source, cached=_is_here(source)) for source in SOURCES.values()]


def load(name: str, folder: str | Path | None = None, image_size: int | None = None) -> Dataset:
    """A data set by name, fetched when it is not here; `folder` may hold its original files instead.

    Image files (`pacs`) are resized to `image_size`, square; the other data sets have one size.
    """
    source = find(name)
    if folder is not None and source.parts:
        raise UserError(
            f"{name} is made of {', '.join(source.parts)}; it has no files of its own. Got {str(folder)!r}."
        )
    if image_size is not None and not source.resizable:
        height, width = source.shape[1:]
        raise UserError(f"image_size resizes image files, and {name} comes in {height}x{width} pixels; leave it out.")
    return _read(source, Path(folder).expanduser() if folder is not None else None, image_size)


def get(name: str, force: bool = False) -> Path:
    """The folder of a data set's files, fetched where they are missing or damaged, or in any case with `force`.

    A folder of the user's own (`PFED_DATA`) is never written to.
    """
    source = find(name)
    if source.parts:
        folders = [get(part, force) for part in source.parts]
        return folders[0].parent
    if not source.forms:
        return _scikit_learn_folder()
    place = _local(source)
    if place is not None:
        _dataset(source, place)  # raises where a file is bad
        return place.folder
    place = _in_cache(source)
    if place is not None and not force and not _problems_of_files(place):
        return place.folder
    return _fetch(source, force=place is not None).folder


def check(name: str) -> list[str]:
    """What is wrong with a data set as it is here, one sentence each; nothing is fetched, and empty means fine."""
    source = find(name)
    if problems := [problem for part in source.parts for problem in check(part)]:
        return problems
    if source.forms:
        try:
            place = _local(source) or _in_cache(source)
        except UserError as error:
            return [str(error)]
        if place is None and source.by_hand:
            raise _missing(source)
        if place is None:
            return [f"{name} is not here: `pfed data get {name}` fetches it."]
        problems = _problems_of_files(place)
        if problems:
            return problems
    try:
        return _problems_of_content(source, _read(source))
    except UserError as error:
        return [str(error)]


def _read(source: Source, folder: Path | None = None, image_size: int | None = None) -> Dataset:
    if source.parts:
        return _made(source, image_size)
    if not source.forms:
        return _from_split(source, _digits())
    place = _complete(source, folder, "put the original file there") if folder is not None else _anywhere(source)
    return _dataset(source, place, image_size)


def _made(source: Source, image_size: int | None) -> Dataset:
    """A data set that is made of others."""
    photos, parts = _scikit_learn_folder().parent / "images", [_read(find(part)) for part in source.parts]
    if source.boxes:
        return composite(parts[0], photos, side=image_size or source.shape[1])
    return digits_5s(photos, *parts)


def _anywhere(source: Source) -> Place:
    return _local(source) or _in_cache(source) or _fetch(source)


def _dataset(source: Source, place: Place, image_size: int | None = None) -> Dataset:
    if isinstance(place.form, Form):
        return _from_split(source, place.form.parse(*(read(place.folder, f, place.remedy) for f in place.form.files)))
    size = source.shape[1] if image_size is None else image_size
    if isinstance(place.form, (BoxArchives, Benchmark)):
        return place.form.dataset(source.name, place.folder, size)
    mode = "RGB" if source.shape[0] == 3 else "L"
    return _from_pool(source, place.form.read(place.folder, size, mode), place)


def _from_split(source: Source, content: Split) -> Dataset:
    x, y, train = content
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


def _from_pool(source: Source, pool: Pool, place: Place) -> Dataset:
    """Image files with the classes and the domains in the catalog's order, whatever theirs is."""
    if source.domains:
        if not pool.clients or not set(pool.clients) <= set(source.domains):
            known, found = ", ".join(source.domains), ", ".join(pool.clients)
            raise UserError(f"The domains in {place.folder} must be among {known}. Got {found or 'none'}.")
        position = np.array([source.domains.index(name) for name in pool.clients], np.int64)
        pool = replace(pool, owner=position[pool.owner], clients=source.domains)
    dataset = to_dataset(pool, source.classes, source.name)
    return replace(dataset, domains=bool(source.domains), mean=source.mean, std=source.std)


def _digits() -> Split:
    rows = np.loadtxt(_scikit_learn_folder() / "digits.csv.gz", delimiter=",")  # 64 pixels in 0..16 and the digit
    x = np.round(rows[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return x, rows[:, 64].astype(np.int64), len(x)


def _scikit_learn_folder() -> Path:
    """Where its data lie. To import it for that would take longer than a first round."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "datasets" / "data"


def _is_here(source: Source) -> bool:
    try:
        if source.parts:
            return all(_is_here(find(part)) for part in source.parts)
        return not source.forms or (_local(source) or _in_cache(source)) is not None
    except UserError:
        return False


def _holds(source: Source, folder: Path, remedy: str) -> Place | None:
    """The first place, in this folder or where the original archives unpack in it, with all files of a form."""
    for candidate in (folder, *(folder / name for name in source.folders)):
        for form in source.forms:
            if form.lies_in(candidate):
                return Place(candidate, form, remedy)
    return None


def _complete(source: Source, folder: Path, remedy: str) -> Place:
    place = _holds(source, folder, remedy)
    if place is None:
        raise UserError(f"{folder} does not hold {source.title}: it needs {_needed(source)}.")
    return place


def _needed(source: Source) -> str:
    return " or ".join(map(str, source.forms))


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
    if source.by_hand:
        raise _missing(source)
    cache = cache_folder()
    routes = [(route, form.files) for route, form in source.routes]
    try:
        with locked(cache / f"{source.name}.lock"):
            place = None if force else _in_cache(source)
            if place is not None:
                return place  # another process fetched it meanwhile
            taken = fetch_any(routes, cache / source.name, cache / f"{source.name}.part")
            return Place(cache / source.name, source.routes[taken][1], _anew(source))
    except OSError as error:
        raise UserError(f"The cache {cache} cannot be written ({error}): set PFED_CACHE to another folder.") from error
    except FetchError as error:
        raise UserError(
            f"{source.title} could not be fetched ({error}): put {_needed(source)} into a folder "
            f"named {source.name} and set PFED_DATA to the folder above it."
        ) from error


def _missing(source: Source) -> UserError:
    return UserError(
        f"{source.title} is not here and cannot be fetched: get it from {source.origin}, put {_needed(source)} into a "
        f"folder named {source.name} and set PFED_DATA to the folder above it."
    )


def _problems_of_files(place: Place) -> list[str]:
    problems = []
    for file in place.form.files if isinstance(place.form, Form) else ():
        try:
            read(place.folder, file, place.remedy)
        except UserError as error:
            problems.append(str(error))
    return problems


def _problems_of_content(source: Source, data: Dataset) -> list[str]:
    if not source.samples:
        return []  # whatever part of it is there
    groups = () if data.groups is None else np.unique(data.groups.numpy()).tolist()
    classes: Any = ("classes", np.unique(data.y.numpy()).tolist(), list(range(len(source.classes))))
    if source.boxes:
        classes = ("classes", list(data.classes), list(source.classes))
    facts = (
        ("samples", len(data.x), source.samples),
        ("labels", len(data.y), source.samples),
        ("training samples", len(data.x if data.train is None else data.train), source.train),
        ("a sample's shape", tuple(data.x.shape[1:]), source.shape),
        classes,
        ("domains", [source.domains[group] for group in groups], list(source.domains)),
    )
    return [
        f"{source.name}: {what} must be {expected}. Got {found}."
        for what, found, expected in facts
        if found != expected
    ]
