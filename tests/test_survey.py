"""`pfed data check FOLDER`: what a folder holds of the known data sets, and what is missing or wrong."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pfed import UserError, cli
from pfed.data.catalog import SOURCES
from pfed.data.fetch import File
from pfed.data.forms import Form
from pfed.data.survey import Finding, bad, survey, text

SOURCES_OF_TISSUE = ["NCT-CRC-HE-100K,", "CRC-VAL-HE-7K"]


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in survey(folder)}


def known(monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    """Let the catalog know a data set by these files."""
    form = SOURCES[name].forms[0]
    assert isinstance(form, Form)
    sums = tuple(File(file, f"md5:{hashlib.md5(content).hexdigest()}") for file, content in files.items())
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], forms=(Form(sums, form.parse),)))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_every_data_set_with_files_is_told(tmp_path: Path) -> None:
    findings = survey(tmp_path)
    assert [finding.name for finding in findings] == [name for name, source in SOURCES.items() if source.forms]
    assert {finding.state for finding in findings} == {"not there"}
    assert str(found(tmp_path)["usps"]) == "needs the files usps.bz2, usps.t.bz2 or the files usps.csv"
    assert bad(findings)  # nothing at all


def test_complete_incomplete_and_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a": b"1", "b": b"2", "c": b"3"}
    known(monkeypatch, "mnist", files)
    folder = write(tmp_path / "mnist", files)
    assert found(tmp_path)["mnist"] == Finding("mnist", "complete", folder, ("a", "b", "c"))
    assert not bad(survey(tmp_path))
    (folder / "b").write_bytes(b"other")
    damaged = found(tmp_path)["mnist"]
    assert damaged.state == "damaged"
    assert [str(folder / "b") in problem for problem in damaged.problems] == [True]
    assert bad(survey(tmp_path))
    (folder / "b").unlink()
    assert found(tmp_path)["mnist"] == Finding("mnist", "incomplete", folder, ("a", "c"), ("b",))
    assert str(found(tmp_path)["mnist"]) == f"{folder}: missing b; there: a, c"
    assert bad(survey(tmp_path))


def test_the_folder_may_be_the_data_sets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, "mnist", {"a": b"1", "b": b"2", "c": b"3", "d": b"4"})
    folder = write(tmp_path / "mnist", {"a": b"1"})
    assert found(folder)["mnist"] == Finding("mnist", "incomplete", folder, ("a",), ("b", "c", "d"))


def test_files_of_the_same_name_are_told_apart_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that all share, Fashion-MNIST's images are no damaged MNIST."""
    known(monkeypatch, "mnist", {"images": b"digits"})
    known(monkeypatch, "fashion-mnist", {"images": b"clothes"})
    write(tmp_path, {"images": b"clothes"})
    assert {name: found(tmp_path)[name].state for name in ("mnist", "fashion-mnist")} == {
        "mnist": "not there",
        "fashion-mnist": "complete",
    }
    assert not bad(survey(tmp_path))


def test_reduced_archives_and_counted_folders(tmp_path: Path) -> None:
    np.savez(tmp_path / "svhn_28px.npz", images=np.zeros((1, 28, 28, 3), np.uint8), labels=np.zeros(1, np.int64))
    for domain in SOURCES["pacs"].domains[:3]:
        (tmp_path / "pacs" / domain / "dog").mkdir(parents=True)
        (tmp_path / "pacs" / domain / "dog" / "pic.jpg").write_bytes(b"")
    assert found(tmp_path)["svhn"] == Finding("svhn", "reduced", tmp_path, ("svhn_28px.npz",))
    lacking = found(tmp_path)["pacs"]
    assert (lacking.state, lacking.missing) == ("incomplete", ("sketch",))
    (tmp_path / "pacs" / "sketch").mkdir()
    counted = found(tmp_path)["pacs"]
    assert counted.state == "damaged"
    assert counted.problems[0] == f"{tmp_path / 'pacs' / 'photo'} must hold 1670 images. Got 1."
    assert len(counted.problems) == 4


def test_a_name_that_others_have_too_is_no_part(tmp_path: Path) -> None:
    """DomainNet and PACS both have a folder sketch."""
    (tmp_path / "sketch").mkdir()
    assert found(tmp_path)["pacs"].state == "not there"
    for domain in SOURCES["domainnet-10"].domains:
        (tmp_path / "DomainNet" / domain).mkdir(parents=True)
    lacking = found(tmp_path)["domainnet-10"]
    assert (lacking.state, lacking.place) == ("incomplete", tmp_path / "DomainNet")
    assert lacking.missing[:2] == ("clipart_train.txt", "clipart_test.txt")
    assert found(tmp_path)["pacs"].state == "not there"


def test_what_is_there_comes_first_and_lines_are_wrapped(tmp_path: Path) -> None:
    (tmp_path / "real-cur" / "album" / "3").mkdir(parents=True)
    lines = text(survey(tmp_path), width=80).splitlines()
    assert lines[0].split()[:2] == ["real-cur", "complete"]
    rest = [line for line in lines if str(tmp_path) not in line]  # a path is not broken
    assert rest[-1].split() == ["histology", "not", "there", "needs", "the", "folders", *SOURCES_OF_TISSUE]
    assert max(map(len, rest)) <= 80


def test_the_command_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a": b"1", "b": b"2"}
    known(monkeypatch, "mnist", files)
    write(tmp_path / "mnist", files)
    assert cli.main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("mnist              complete   ")
    (tmp_path / "mnist" / "b").unlink()
    assert cli.main(["data", "check", str(tmp_path), "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mnist"] == {
        "name": "mnist",
        "state": "incomplete",
        "place": str(tmp_path / "mnist"),
        "there": ["a"],
        "missing": ["b"],
        "problems": [],
    }
    assert rows["pacs"]["place"] is None


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        survey(tmp_path / "nowhere")
    assert cli.main(["data", "check", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"pfed: There is no folder {str(tmp_path / 'nowhere')!r}.\n"
