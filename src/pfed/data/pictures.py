"""The image collections of the papers as their authors publish them: folders, lists of files, tables of ratings."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pfed.data.folders import Entry, client_entries, read_entries
from pfed.data.pool import Pool
from pfed.errors import UserError

Reader = Callable[[Path, int, str], Pool]  # folder, image size, mode

PACS_LISTS = ("", "splits", "pacs_label", "Train val splits and h5py files pre-read")
HISTOLOGY_MOST = 7180  # patches of a centre, as in CD2-pFed
FLICKR_TABLE = "FLICKR-AES_image_labeled_by_each_worker.csv"
FLICKR_IMAGES = ("40K", "FLICKR-AES-001/40K")
FLICKR_LEAST, FLICKR_MOST = 60, 290  # ratings of a rater who counts, as in FedPer
RATINGS = tuple("12345")


def domain_folders(domains: Mapping[str, Sequence[str]], aliases: Mapping[str, str] | None = None) -> Reader:
    """Images in FOLDER/CLASS; each domain has a folder of one of these names; `aliases` are other names of classes."""

    def read(folder: Path, image_size: int, mode: str) -> Pool:
        entries = client_entries([(domain, _first(folder, names)) for domain, names in domains.items()])
        known = aliases or {}
        renamed = [replace(entry, label=known.get(entry.label, entry.label)) for entry in entries]
        return read_entries(renamed, image_size, mode)

    return read


def pacs(*domains: str) -> Reader:
    """PACS: folders DOMAIN/CLASS, and the official lists of training and validation images if these are there.

    The third official list of a domain, for testing on unseen domains, is all of its images; the validation images
    serve for testing here.
    """
    folders = domain_folders({domain: (domain,) for domain in domains})

    def read(folder: Path, image_size: int, mode: str) -> Pool:
        near = [place / name for place in (folder, folder.parent) for name in PACS_LISTS]
        names = [(d, f"{d}_{kind}_kfold.txt", kind == "crossval") for d in domains for kind in ("train", "crossval")]
        place = next((place for place in near if all((place / name).is_file() for _, name, _ in names)), None)
        if place is None:
            return folders(folder, image_size, mode)
        lists = [(domain, place / name, test) for domain, name, test in names]
        return read_entries([entry for own in lists for entry in _listed(folder, *own)], image_size, mode)

    return read


def list_names(domain: str, kind: str) -> tuple[str, str]:
    """Where a list of DomainNet may be."""
    return f"{domain}_{kind}.txt", f"splits/{domain}_{kind}.txt"


def domain_lists(classes: Sequence[str], *domains: str) -> Reader:
    """DomainNet: DOMAIN/CLASS/image, listed in DOMAIN_train.txt and DOMAIN_test.txt; images of these classes only."""
    wanted = set(classes)

    def read(folder: Path, image_size: int, mode: str) -> Pool:
        entries: list[Entry] = []
        for domain in domains:
            for kind in ("train", "test"):
                listed = _listed(folder, domain, _first(folder, list_names(domain, kind)), kind == "test")
                entries += [entry for entry in listed if entry.label in wanted]
        if not entries:
            raise UserError(f"The lists in {folder} must name images of {', '.join(classes)}. Got none.")
        return read_entries(entries, image_size, mode)

    return read


def mnist_m(folder: Path, image_size: int, mode: str) -> Pool:
    """MNIST-M: images of training and test digits in a folder each, their labels in a list each."""
    entries = []
    for kind in ("train", "test"):
        for name, label in _lines(folder / f"mnist_m_{kind}_labels.txt"):
            entries.append(Entry(folder / f"mnist_m_{kind}" / name, label, None, kind == "test"))
    return read_entries(entries, image_size, mode)


def centres(classes: Sequence[str], *known: str) -> Reader:
    """Histology: a folder for each centre with a folder for each class, the known ones first, and others beside them.

    A centre with very many patches gives so many as in the paper, evenly from all of them.
    """

    def read(folder: Path, image_size: int, mode: str) -> Pool:
        here = [path for path in sorted(folder.iterdir()) if all((path / label).is_dir() for label in classes)]
        here.sort(key=lambda path: known.index(path.name) if path.name in known else len(known))
        entries: list[Entry] = []
        for path in here:
            own = [entry for entry in client_entries([(path.name, path)]) if entry.label in classes]
            count = min(len(own), HISTOLOGY_MOST)
            entries += [own[index * len(own) // count] for index in range(count)]
        return read_entries(entries, image_size, mode)

    return read


def flickr_aes(folder: Path, image_size: int, mode: str) -> Pool:
    """FLICKR-AES: each rater is a client, and a rating, 1 to 5, is the class of an image for this rater.

    As in FedPer, only who rated 60 to 290 images counts.
    """
    images = _first(folder, FLICKR_IMAGES)
    rated: dict[str, dict[str, str]] = {}
    for rater, image, rating in _ratings(folder / FLICKR_TABLE):
        rated.setdefault(rater, {})[image] = rating
    chosen = {rater: own for rater, own in rated.items() if FLICKR_LEAST <= len(own) <= FLICKR_MOST}
    if not chosen:
        raise UserError(
            f"{folder / FLICKR_TABLE} must have raters of {FLICKR_LEAST} to {FLICKR_MOST} images. Got none."
        )
    return read_entries(
        [
            Entry(images / name, own[name], rater, False)
            for rater, own in sorted(chosen.items())
            for name in sorted(own)
        ],
        image_size,
        mode,
    )


def real_cur(folder: Path, image_size: int, mode: str) -> Pool:
    """REAL-CUR: folders ALBUM/RATING/image."""
    albums = sorted({path.parent for path in folder.glob("*/[1-5]") if path.is_dir()})
    return read_entries(client_entries([(path.name, path) for path in albums]), image_size, mode)


def _first(folder: Path, names: Sequence[str]) -> Path:
    """What is there under one of these names."""
    return next((folder / name for name in names if (folder / name).exists()), folder / names[0])


def _listed(folder: Path, domain: str, path: Path, test: bool) -> Iterator[Entry]:
    """The images of a list with lines `DOMAIN/CLASS/image number`: the folder tells the class."""
    for name, _ in _lines(path):
        parts = name.split("/")
        if len(parts) < 3 or ".." in parts:
            raise UserError(f"A line of {path} must be DOMAIN/CLASS/image and a number. Got {name!r}.")
        yield Entry(folder / name, parts[-2], domain, test)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Name and label of each line."""
    for line in _text(path):
        name, _, label = line.strip().rpartition(" ")
        if not name or not label.isdigit():
            raise UserError(f"A line of {path} must be a name and a number. Got {line.strip()!r}.")
        yield name.strip(), label


def _ratings(path: Path) -> Iterator[tuple[str, str, str]]:
    """Rater, image and rating of each row; names and values may have spaces around them."""
    rows = csv.reader(_text(path))
    header = [name.strip() for name in next(rows, [])]
    if header != ["worker", "imagePair", "score"]:
        raise UserError(f"{path} must have the columns worker, imagePair, score. Got {', '.join(header) or 'none'}.")
    for row in rows:
        if len(row) != 3 or row[2].strip() not in RATINGS:
            raise UserError(f"A row of {path} must be a rater, an image and a rating in 1..5. Got {','.join(row)!r}.")
        rater, image, rating = (value.strip() for value in row)
        yield rater, image, rating


def _text(path: Path) -> Iterable[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a text ({error}).") from error
