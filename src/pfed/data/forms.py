"""The forms in which a data set may lie in a folder, and what is known of a data set.

A form tells what it needs, whether that is there, and what is wrong with it as far as that can be seen without reading
the images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pfed.data import formats, uodb
from pfed.data.archives import read_archive
from pfed.data.base import Dataset
from pfed.data.box_archives import read_boxes_archive
from pfed.data.boxes import to_dataset
from pfed.data.fetch import File, Route, locate, read
from pfed.data.folders import SUFFIXES
from pfed.data.pool import Pool
from pfed.errors import UserError

Parts = dict[str, bool]  # what a form needs, by name, and whether it is there


@dataclass(frozen=True)
class Form:
    """One set of files that holds a data set, and the parser of their contents in this order."""

    files: tuple[File, ...]
    parse: Callable[..., formats.Split]

    def __str__(self) -> str:
        return f"the files {', '.join(file.name for file in self.files)}"

    def parts(self, folder: Path) -> Parts:
        return {file.name: locate(folder, file) is not None for file in self.files}

    def problems(self, folder: Path, remedy: str) -> list[str]:
        problems = []
        for file in self.files:
            try:
                read(folder, file, remedy)
            except UserError as error:
                problems.append(str(error))
        return problems


@dataclass(frozen=True)
class Archive:
    """One .npz file of images, as `read_archive` has it: somebody's own reduction, so it has no checksum."""

    name: str
    note: str  # in how far it is not the whole data set: part of the data's name in results
    side: int  # pixels of its images
    train: int
    test: int = 0

    def __str__(self) -> str:
        return f"the file {self.name}"

    def parts(self, folder: Path) -> Parts:
        return {self.name: (folder / self.name).is_file()}

    def problems(self, folder: Path, remedy: str) -> list[str]:
        return []

    def read(self, folder: Path, image_size: int, mode: str) -> Pool:
        return read_archive(folder / self.name, image_size, mode)


@dataclass(frozen=True)
class Layout:
    """The authors' own folders and lists, and the function that reads them.

    A need is a path or a pattern below the data set's folder, or several spellings of which one must be there.
    """

    needs: tuple[str | tuple[str, ...], ...]
    read: Callable[[Path, int, str], Pool]  # folder, image size, mode
    counts: tuple[tuple[str, int], ...] = ()  # image files below a folder (or pattern), where their number is known

    def __str__(self) -> str:
        names = list(self.parts(Path()))
        kind = "files and folders" if any("." in name for name in names) else "folders"
        return f"the {kind} {', '.join(names)}"

    def parts(self, folder: Path) -> Parts:
        return {
            names[0]: any(True for name in names for _ in folder.glob(name))
            for names in ((need,) if isinstance(need, str) else need for need in self.needs)
        }

    def problems(self, folder: Path, remedy: str) -> list[str]:
        found = [(name, sum(map(_images_below, folder.glob(name))), expected) for name, expected in self.counts]
        return [
            f"{folder / name} must hold {expected} images. Got {count}."
            for name, count, expected in found
            if count != expected
        ]


def _images_below(folder: Path) -> int:
    return sum(path.suffix.lower() in SUFFIXES for path in folder.rglob("*") if not path.name.startswith("."))


@dataclass(frozen=True)
class BoxArchives:
    """An .npz file of images with boxes for each domain, the first so many of them for training."""

    domains: tuple[tuple[str, str, int], ...]  # name, file, training images

    def __str__(self) -> str:
        return f"the files {', '.join(file for _, file, _ in self.domains)}"

    def parts(self, folder: Path) -> Parts:
        return {file: (folder / file).is_file() for _, file, _ in self.domains}

    def problems(self, folder: Path, remedy: str) -> list[str]:
        return []

    def dataset(self, name: str, folder: Path, size: int) -> Dataset:
        return to_dataset(
            name, [read_boxes_archive(folder / file, size, n, domain) for domain, file, n in self.domains]
        )


@dataclass(frozen=True)
class Benchmark:
    """The folders of UODB: all domains that are there."""

    def __str__(self) -> str:
        return f"folders of UODB ({', '.join(uodb.DOMAINS)})"

    def parts(self, folder: Path) -> Parts:
        here = uodb.present(folder)
        return dict.fromkeys(here, True) or dict.fromkeys(uodb.DOMAINS, False)

    def problems(self, folder: Path, remedy: str) -> list[str]:
        return []

    def dataset(self, name: str, folder: Path, size: int) -> Dataset:
        return replace(uodb.uodb(folder, size, uodb.present(folder)), name=name)


AnyForm = Form | Archive | Layout | BoxArchives | Benchmark


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that can be had by name."""

    name: str
    title: str
    shape: tuple[int, ...]  # of one sample, unless another size is asked for: channels, height, width
    classes: tuple[str, ...]
    train: int = 0  # samples of the official training set; all samples where there is no official split; 0: any number
    test: int = 0
    mean: tuple[float, ...] = ()  # per channel, of the training set scaled to [0, 1]; none: not normalised
    std: tuple[float, ...] = ()
    licence: str
    domains: tuple[str, ...] = ()  # by which the samples are grouped
    more_domains: bool = False  # other domains than these may be there as well
    size: int = 0  # bytes to download
    forms: tuple[AnyForm, ...] = ()  # the first that is there is taken; none: the data come with an installed package
    routes: tuple[tuple[Route, Form], ...] = ()  # tried in this order; none: only from the user's own folder
    origin: str = ""  # where a user gets what cannot be fetched
    folders: tuple[str, ...] = ()  # where torchvision and the original archives put the files
    parts: tuple[str, ...] = ()  # other data sets that it is made of
    boxes: bool = False  # images with boxes, for detection
    cached: bool = False  # told by `pfed.data.sources.sources`

    @property
    def samples(self) -> int:
        return self.train + self.test

    @property
    def by_hand(self) -> bool:
        """It cannot be fetched: the user must put it into a folder."""
        return bool(self.forms) and not self.routes
