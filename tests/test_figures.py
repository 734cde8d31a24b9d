"""Figures as files for a paper, the parts of the model, the skew of the data, and colours that can be read."""

from __future__ import annotations

import csv
import dataclasses
import re
import time
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path

import pytest
import torch
from helpers import federation
from PIL import Image
from report_helpers import tell
from result_helpers import EVIL, run

from pfed import Federation, UserError, report
from pfed.description import checked_out, feature_skew
from pfed.report import charts, page, parts
from pfed.report.figures import slug
from pfed.result import Result

CROSSING = {
    "update": {
        "parts": [["conv", 100, 100, 50], ["norm", 10, 5, 0], ["fc", 20, 0, 0]],
        "down": [["params", "3 of the model's tensors, 105 elements"]],
        "up": [["logits", "16 × 10"]],
    }
}


@pytest.fixture(scope="module")
def two() -> list[Result]:
    return [run("local", sent=0), run("fedavg", facts={"crossing": CROSSING})]


def test_figures_are_files_for_a_column(two: list[Result], tmp_path: Path) -> None:
    names = {figure.name for figure in page.figures(two)}
    assert {
        "gains-fedavg",
        "accuracy-by-round",
        "accuracy-by-bytes",
        "bytes-up",
        "class-counts",
        "parts-fedavg",
    } <= names
    one = next(figure for figure in page.figures(two) if figure.name == "accuracy-by-round")
    with Image.open(one.save(tmp_path, "png")) as picture:
        assert picture.width == pytest.approx(3.3 * 300, abs=2)
        assert picture.info["dpi"][0] == pytest.approx(300, abs=1)
        assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
    text = one.save(tmp_path, "svg").read_text()
    assert 'width="3.3in"' in text
    assert "currentColor" not in text
    assert ET.fromstring(text)[0].get("fill") == "white"


def test_numbers_behind_every_figure(two: list[Result], tmp_path: Path) -> None:
    paths = report.export(two, tmp_path / "new", "csv")
    assert {path.stem for path in paths} == {figure.name for figure in page.figures(two)}
    with open(tmp_path / "new" / "gains-fedavg.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["Oslo", "Rome"]
    assert float(rows[0]["gain"]) == pytest.approx(0.0)


def test_a_name_that_is_a_formula_stays_a_text(tmp_path: Path) -> None:
    evil = [run(m, names=("=1+1", "Rome")) for m in ("local", "fedavg")]
    report.export(evil, tmp_path, "csv")
    assert "'=1+1" in (tmp_path / "gains-fedavg.csv").read_text()
    assert not re.search(r"(^|,)=", (tmp_path / "gains-fedavg.csv").read_text(), re.M)


def test_names_of_files_are_safe_and_differ(tmp_path: Path) -> None:
    assert slug("gains", "../../etc/passwd") == "gains-..-..-etc-passwd"
    settings = [run("fedavg"), run("fedavg", alpha=0.3), run("fedavg", alpha=0.5)]
    names = [figure.name for figure in page.figures(settings)]
    assert len(names) == len(set(names))
    evil = [run("local", sent=0), run(f"../{EVIL}")]
    assert all(path.parent == tmp_path for path in report.export(evil, tmp_path, "csv"))


def test_what_can_not_be_written_is_one_sentence(two: list[Result], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^There is no format 'pgn'.*'png'"):
        report.export(two, tmp_path, "pgn")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^The figures can't be written to '.*file': "):
        report.export(two, tmp_path / "file", "csv")


def test_parts_of_the_model_are_drawn_and_told(two: list[Result]) -> None:
    """All of the convolution goes down, half of the norm, nothing of the head."""
    told = tell(*two)
    assert ["fedavg", "conv", "norm (50 %)", "fc"] in [row[:4] for row in told.rows]
    assert "update, up: logits (16 × 10)" in told.text
    _, (figure,), _ = parts.parts(two)
    svg = figure.inline()
    assert svg.count(f'fill="{charts.UP}"') == svg.count(f'fill="{charts.DOWN}"') == 3, "two blocks and the legend's"
    assert svg.index(">conv<") < svg.index(">norm<") < svg.index(">fc<")
    assert parts.parts([run()]) == []


def test_models_of_other_parts_are_drawn_apart(two: list[Result]) -> None:
    other = {"update": {"parts": [["body", 5, 5, 5]], "down": [], "up": []}}
    _, drawn, _ = parts.parts([*two, run("dualfed", facts={"crossing": other})])
    assert [figure.name for figure in drawn] == ["parts-fedavg", "parts-dualfed"]


def shifted(by: float, classes: int = 2) -> Federation:
    """Four clients with 50 images of noise; those of every client are brighter than those of the one before."""
    source = torch.Generator().manual_seed(0)
    clients = []
    for k in range(4):
        x = torch.randn(50, 1, 4, 4, generator=source) + by * k
        clients.append((x.tolist(), [(i + k) % classes for i in range(50)]))
    return federation(*clients, classes=classes)


def test_feature_skew_is_between_clients() -> None:
    assert feature_skew(shifted(0.0)) == pytest.approx(0.0, abs=0.05)
    assert 0.3 < feature_skew(shifted(1.0)) < 0.6, "the mean of a channel differs, its deviation does not"
    assert feature_skew(shifted(0.0, classes=1)) == pytest.approx(0.0, abs=0.05)
    alone = shifted(1.0)
    assert feature_skew(dataclasses.replace(alone, clients=alone.clients[:1])) is None


def test_labels_alone_are_no_feature_skew() -> None:
    """Each client has one class, whose images are brighter: inputs differ as labels do, and not beyond."""
    source = torch.Generator().manual_seed(0)
    one = [((torch.randn(50, 1, 4, 4, generator=source) + 3 * c).tolist(), [c] * 50) for c in (0, 1, 0, 1)]
    assert feature_skew(federation(*one)) == pytest.approx(0.0, abs=0.05)


def test_measuring_the_skew_draws_nothing_and_takes_no_time() -> None:
    few = shifted(0.0)
    many = dataclasses.replace(few, clients=few.clients * 500)
    before = torch.get_rng_state()
    started = time.process_time()
    feature_skew(many)
    assert time.process_time() - started < 1
    assert torch.equal(before, torch.get_rng_state())


def test_the_skew_is_on_the_page() -> None:
    rows = [row[:2] for row in tell(run(facts={"feature_skew": 0.25})).rows]
    assert ["label", "0.05"] in rows
    assert ["feature", "0.25"] in rows
    assert ["feature", "not known"] in [row[:2] for row in tell(run()).rows]


def test_the_commit_of_a_clone(tmp_path: Path) -> None:
    assert checked_out(tmp_path) is None
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert checked_out(tmp_path) is None
    (tmp_path / ".git" / "packed-refs").write_text("# pack-refs\nabc123 refs/heads/main\n")
    assert checked_out(tmp_path) == "abc123"
    (tmp_path / ".git" / "HEAD").write_text("def456\n")
    assert checked_out(tmp_path) == "def456"


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_everything_can_be_read_in_both_themes(theme: int) -> None:
    style = resources.files("pfed.report").joinpath("style.css").read_text()
    pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style)
    colours = {name: both[theme] for name, *both in pairs}
    for text in ("ink", "soft", "mark"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
    for drawn in {*charts.PALETTE, charts.UP, charts.DOWN}:
        assert _contrast(drawn, colours["paper"]) >= 3, drawn
