"""Downloads that stop and go on, archives of every kind, package clients that fail: all without a network."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import re
import shutil
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pfed.data import fetch
from pfed.data.fetch import FetchError, File, Official, Package, download, read, unpack
from pfed.errors import UserError

CONTENT = bytes(range(256)) * 40


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Server:
    """Serves CONTENT on the loopback; `drop_at` ends the connection after so many bytes, once."""

    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        self.drop_at: int | None = None
        self.takes_ranges = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.ranges.append(wanted)
                if "missing" in self.path:
                    self.send_error(404)
                    return
                start = int(re.findall(r"\d+", wanted)[0]) if wanted and server.takes_ranges else 0
                if start >= len(CONTENT):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(CONTENT) - start))
                self.end_headers()
                end, server.drop_at = server.drop_at, None
                self.wfile.write(CONTENT[start:end])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_download_is_whole_and_leaves_nothing_else(server: Server, tmp_path: Path) -> None:
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert server.ranges == [None]  # a file that is there and right is not asked for again


def test_a_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(CONTENT[:1000])
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_dropped_connection_is_taken_up_again(server: Server, tmp_path: Path) -> None:
    server.drop_at = 3000
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=3000-"]


def test_a_server_without_ranges_sends_all_anew(server: Server, tmp_path: Path) -> None:
    server.takes_ranges = False
    (tmp_path / "a.part").write_bytes(CONTENT[:1000])
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert len(server.ranges) == 1


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * (len(CONTENT) + 5)], ids=["wrong beginning", "too long"])
def test_a_bad_beginning_is_thrown_away(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "a.part").write_bytes(left)
    download(server.url + "a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_complete_part_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(CONTENT)
    download("http://127.0.0.1:9/a", tmp_path / "a", sha256(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_no_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"checksum of http.*/a differs"):
        download(server.url + "a", tmp_path / "a", sha256(b"something else"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_said_at_once(server: Server, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="missing: Not Found"):
        download(server.url + "missing", tmp_path / "a", sha256(CONTENT))
    assert len(server.ranges) == 1


def test_the_second_mirror_serves_when_the_first_does_not(server: Server, tmp_path: Path) -> None:
    route = Official((server.url + "missing/", server.url), (File("a.gz", sha256(CONTENT)),))
    assert route.collect(tmp_path, tmp_path) == [tmp_path / "a.gz"]
    with pytest.raises(FetchError, match="missing"):
        Official((server.url + "missing/",), (File("b", sha256(CONTENT)),)).collect(tmp_path, tmp_path)


def archive(path: Path, members: dict[str, bytes]) -> Path:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as tar:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["a.whl", "a.tgz", "a.tar.gz"])
def test_only_wanted_members_come_out_of_an_archive(tmp_path: Path, name: str) -> None:
    members = {"pkg/data/one": b"1", "pkg/two.gz": gzip.compress(b"2"), "../../three": b"3", "pkg/other": b"4"}
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    unpack(archive(tmp_path / name, members), {"one", "two", "three"}, into)
    assert {path.name: path.read_bytes() for path in into.iterdir()} == {"one": b"1", "two": b"2", "three": b"3"}
    assert not (tmp_path / "three").exists()


def test_a_single_file_is_its_own_archive(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "one.gz").write_bytes(gzip.compress(b"1"))
    (tmp_path / "two.bz2").write_bytes(bz2.compress(b"2"))
    for name in ("one.gz", "two.bz2"):
        unpack(tmp_path / name, {"one", "two.bz2"}, tmp_path / "into")
    assert (tmp_path / "into" / "one").read_bytes() == b"1"
    assert (tmp_path / "into" / "two.bz2").read_bytes() == bz2.compress(b"2")  # its parser opens it


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_debian_packages_are_opened_but_not_installed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: toy\n"
    )
    (tree / "usr" / "share").mkdir(parents=True)
    (tree / "usr" / "share" / "one.gz").write_bytes(gzip.compress(b"1"))
    fetch.run(["dpkg-deb", "--build", str(tree), str(tmp_path / "toy.deb")], tmp_path, "toy")
    (tmp_path / "into").mkdir()
    unpack(tmp_path / "toy.deb", {"one"}, tmp_path / "into")
    assert (tmp_path / "into" / "one").read_bytes() == b"1"


def fake_client(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An npm of our own, first and last in the path."""
    folder.mkdir()
    (folder / "npm.py").write_text(script)
    # A shell in between: no interpreter line may hold a path with a space.
    (folder / "npm").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "npm.py"}" "$@"\n')
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake client is a script")


@posix
def test_a_package_is_fetched_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = archive(tmp_path / "ready.tgz", {"package/data/one": b"1", "package/run.js": b"harm()"})
    fake_client(tmp_path / "bin", monkeypatch, f"import shutil; shutil.copy({str(ready)!r}, 'toy-1.0.tgz')")
    target, staging = tmp_path / "toy", tmp_path / "toy.part"
    fetch.fetch(Package("npm", "toy@1.0"), [File("one", sha256(b"1"))], target, staging)
    assert [path.name for path in target.iterdir()] == ["one"]
    assert not staging.exists()


@posix
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([File("one", sha256(b"1")), File("two", sha256(b"2"))], "does not hold two"),
        ([File("one", sha256(b"another"))], "checksum of one differs"),
    ],
)
def test_a_package_with_other_content_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[File], reason: str
) -> None:
    ready = archive(tmp_path / "ready.tgz", {"package/one": b"1"})
    fake_client(tmp_path / "bin", monkeypatch, f"import shutil; shutil.copy({str(ready)!r}, 'toy-1.0.tgz')")
    with pytest.raises(FetchError, match=reason):
        fetch.fetch(Package("npm", "toy@1.0"), files, tmp_path / "toy", tmp_path / "toy.part")
    assert not (tmp_path / "toy").exists()


@posix
def test_a_broken_archive_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_client(tmp_path / "bin", monkeypatch, "open('toy.tgz', 'wb').write(b'no archive')")
    with pytest.raises(FetchError):
        fetch.fetch(Package("npm", "toy"), [File("one", sha256(b"1"))], tmp_path / "toy", tmp_path / "toy.part")


@posix
def test_a_client_that_fails_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_client(tmp_path / "bin", monkeypatch, "import sys; sys.exit('first line\\nno such package')")
    with pytest.raises(FetchError, match=r"^no such package$"):
        Package("npm", "toy").collect(tmp_path, tmp_path)


def test_commands_never_run_what_they_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert "--ignore-scripts" in Package("npm", "a@1").command()
    assert {"--no-deps", "--only-binary=:all:"} <= set(Package("pip", "a==1").command())
    assert Package("apt-get", "a").command()[-2:] == ["download", "a"]


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="npm is not installed"):
        Package("npm", "a@1").command()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match="pip is not installed"):
        Package("pip", "a==1").command()


def test_a_file_is_read_plain_or_gzipped(tmp_path: Path) -> None:
    file = File("one", sha256(b"1"))
    (tmp_path / "one.gz").write_bytes(gzip.compress(b"1"))
    assert read(tmp_path, file, "help") == b"1"
    (tmp_path / "one").write_bytes(b"1")
    assert read(tmp_path, file, "help") == b"1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one", b"2", "one is damaged or another file.*: help"),
        ("one.gz", gzip.compress(b"1" * 1000, mtime=0)[:-9], "one.gz cannot be read.*: help"),
        ("one.gz", b"no gzip", "one.gz cannot be read.*: help"),
        ("two", b"1", "does not hold one: help"),
    ],
)
def test_a_bad_file_is_named_with_its_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path, File("one", sha256(b"1")), "help")


@posix
def test_one_at_a_time(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with fetch.locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with fetch.locked(tmp_path / "lock"):
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
