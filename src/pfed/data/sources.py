"""The data sets that pfed knows by name: load them, fetch them, check them.

`load("mnist")` looks in `PFED_DATA/mnist` first, then in the cache, and fetches only what is in neither. What cannot be
fetched, such as `pacs`, must be below `PFED_DATA`. Of the forms in which a data set may be there, the first that the
catalog names is taken.

>>> dataset = load("digits")
>>> dataset.x.shape, len(dataset.classes)
(torch.Size([1797, 1, 8, 8]), 10)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfed.data.base import Dataset
from pfed.data.catalog import SOURCES
from pfed.data.fetch import FetchError, cache_folder, fetch_any, locked, read
from pfed.data.folders import Packed, read_images
from pfed.data.formats import Split
from pfed.data.forms import AnyForm, Archive, Benchmark, BoxArchives, Form, Layout, Source
from pfed.data.pool import Pool, to_dataset
from pfed.data.scenes import composite
from pfed.data.styles import digits_5r, digits_5s, digits_five
from pfed.errors import UserError, unknown


@dataclass(frozen=True)
class Place:
    """A folder that holds all files of one form of a data set."""

    folder: Path
    form: AnyForm
    remedy: str  # what to do when one of its files is bad

    def problems(self) -> list[str]:
        """What is wrong with its files, as far as that can be seen without reading images."""
        return self.form.problems(self.folder, self.remedy)


def find(name: str) -> Source:
    """The data set of this name."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def sources() -> list[Source]:
    """Every data set that can be had by name, and whether it is here already."""
    return [replace(source, cached=_is_here(source)) for source in SOURCES.values()]


def label(name: str) -> str | None:
    """What a data set calls itself as it is here, which says whether it is the whole one; None where it is not here."""
    source = find(name)
    try:
        if source.parts:
            parts = [label(part) for part in source.parts]
            return None if None in parts else _made_of(source, parts)
        place = _local(source) or _in_cache(source)
    except UserError:
        return None
    return source.name if not source.forms else None if place is None else _called(source, place)


def labels(data: str, external: str | None = None) -> str | None:
    """The same of a run's data with its external test, as `Federation.source` says it."""
    found = [label(name) if name in SOURCES else None for name in (data, external) if name is not None]
    return None if None in found else named(*found)


def named(data: str | None, external: str | None = None) -> str:
    return f"{data}" if external is None else f"{data}, external {external}"


def can_be_had(name: str) -> bool:
    """Whether a data set is here, or can be fetched."""
    source = find(name)
    parts = source.parts or (name,)
    return all(_is_here(find(part)) or not find(part).by_hand for part in parts)


def load(name: str, folder: str | Path | None = None, image_size: int | None = None) -> Dataset:
    """A data set by name, fetched when it is not here; `folder` may hold its original files instead.

    Images are resized to `image_size`, square, where it is given.
    """
    source = find(name)
    if folder is not None and source.parts:
        raise UserError(
            f"{name} is made of {', '.join(source.parts)}; it has no files of its own. Got {str(folder)!r}."
        )
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
    if place is not None and not force and not place.problems():
        return place.folder
    return _fetch(source, force=place is not None).folder


def check(name: str) -> list[str]:
    """What is wrong with a data set as it is here, one sentence each; nothing is fetched, and empty means fine."""
    source = find(name)
    place = None
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
        if problems := place.problems():
            return problems
    try:
        return _problems_of_content(source, _read(source), place)
    except UserError as error:
        return [str(error)]


def _read(source: Source, folder: Path | None = None, image_size: int | None = None) -> Dataset:
    if source.boxes and source.parts:
        return composite(_read(find(source.parts[0])), _photos(), side=image_size or source.shape[1])
    if source.parts:
        return _resized(_made(source), image_size)
    if not source.forms:
        return _resized(_from_split(source, _digits()), image_size)
    place = _complete(source, folder, "put the original file there") if folder is not None else _anywhere(source)
    return _dataset(source, place, image_size)


def _made(source: Source) -> Dataset:
    """Digits of several styles, made of other data sets."""
    parts = [_read(find(part)) for part in source.parts]
    if source.name == "digits-5s":
        made = digits_5s(_photos(), *parts)
    else:
        made = {"digits-5r": digits_5r, "digits-five": digits_five}[source.name](*parts)
    return replace(made, name=_made_of(source, [part.name for part in parts]))


def _made_of(source: Source, parts: Sequence[str | None]) -> str:
    """Its name, with the names of what is not the whole data set of those that it is made of."""
    reduced = [str(part) for part in parts if part not in source.parts]
    return f"{source.name} (of {', '.join(reduced)})" if reduced else source.name


def _called(source: Source, place: Place) -> str:
    """Its name, with what is not the whole of it."""
    form = place.form
    if isinstance(form, Archive):
        return f"{source.name} ({form.note})"
    if isinstance(form, Benchmark) and set(here := list(form.parts(place.folder))) != set(source.domains):
        return f"{source.name} ({', '.join(here)})"
    if isinstance(form, Layout) and place.problems():
        return f"{source.name} (incomplete)"
    return source.name


def _resized(dataset: Dataset, image_size: int | None) -> Dataset:
    if image_size is None or dataset.x.shape[2:] == (image_size, image_size):
        return dataset
    pixels = dataset.x.permute(0, 2, 3, 1).squeeze(3).numpy()  # (n, h, w) or (n, h, w, 3)
    images = [Packed(f"Image {index} of {dataset.name}", image) for index, image in enumerate(pixels)]
    return replace(dataset, x=read_images(images, image_size))


def _photos() -> Path:
    return _scikit_learn_folder().parent / "images"


def _anywhere(source: Source) -> Place:
    return _local(source) or _in_cache(source) or _fetch(source)


def _dataset(source: Source, place: Place, image_size: int | None = None) -> Dataset:
    form, folder = place.form, place.folder
    if isinstance(form, Form):
        split = form.parse(*(read(folder, file, place.remedy) for file in form.files))
        return _resized(_from_split(source, split), image_size)
    size = image_size if image_size is not None else form.side if isinstance(form, Archive) else source.shape[1]
    if isinstance(form, (BoxArchives, Benchmark)):
        return form.dataset(_called(source, place), folder, size)
    mode = "RGB" if source.shape[0] == 3 else "L"
    dataset = replace(_from_pool(source, form.read(folder, size, mode), place), name=_called(source, place))
    if not isinstance(form, Archive):
        return dataset
    return replace(dataset, notes=(f"reduced data ({form.note}): {form.name}",))


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
        known = (
            *source.domains,
            *(name for name in pool.clients if source.more_domains and name not in source.domains),
        )
        if not pool.clients or not set(pool.clients) <= set(known):
            found = ", ".join(pool.clients) or "none"
            raise UserError(f"The domains in {place.folder} must be among {', '.join(known)}. Got {found}.")
        position = np.array([known.index(name) for name in pool.clients], np.int64)
        pool = replace(pool, owner=position[pool.owner], clients=known)
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
    """The first form that is there in full, in this folder or where the original archives unpack in it."""
    for form in source.forms:
        for candidate in (folder, *(folder / name for name in source.folders)):
            if all(form.parts(candidate).values()):
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


def _problems_of_content(source: Source, data: Dataset, place: Place | None) -> list[str]:
    form = place.form if place is not None else None
    known = form if isinstance(form, Archive) else source
    if not source.samples:
        return []  # whatever part of it is there
    total, side = known.train + known.test, form.side if isinstance(form, Archive) else source.shape[1]
    groups = () if data.groups is None else np.unique(data.groups.numpy()).tolist()
    classes: Any = ("classes", np.unique(data.y.numpy()).tolist(), list(range(len(source.classes))))
    if source.boxes:
        classes = ("classes", list(data.classes), list(source.classes))
    train = len(data.x if data.train is None else data.train)
    facts = (
        ("samples", len(data.x), total),
        ("labels", len(data.y), total),
        # Lists beside the images may divide what the catalog knows as a whole.
        ("training samples", train, train if data.test is not None and not known.test else known.train),
        ("a sample's shape", tuple(data.x.shape[1:]), (source.shape[0], side, side)),
        classes,
        ("domains", [data.group_names[group] for group in groups], list(source.domains)),
    )
    return [
        f"{source.name}: {what} must be {expected}. Got {found}."
        for what, found, expected in facts
        if found != expected
    ]
