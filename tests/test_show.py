"""Pictures of a federation: true to the counts, in terminals and as files."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
import torch

from pfed.data import show
from pfed.data.base import ClientData, Federation, Samples
from pfed.data.federate import describe
from pfed.errors import UserError


def federation(counts: list[list[int]], names: list[str] | None = None, classes: list[str] | None = None) -> Federation:
    clients = []
    for k, row in enumerate(counts):
        labels = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        samples = Samples.of(torch.zeros(len(labels), 1), labels)
        clients.append(ClientData(names[k] if names else f"client-{k}", samples, samples))
    held = tuple(classes or map(str, range(len(counts[0]))))
    return Federation(tuple(clients), held, clients[0].test, source="toy")


def test_shades_follow_the_counts():
    """160 samples at most: shades end at 160 times 1/16, 4/16, 9/16 and 1."""
    lines = show.text(federation([[0, 1, 10, 11, 40], [41, 90, 91, 160, 0]])).splitlines()
    assert lines[-4:] == [
        "",
        "client    0  1  2  3  4   samples",
        "client-0  ·· ░░ ░░ ▒▒ ▒▒       62",
        "client-1  ▓▓ ▓▓ ██ ██ ··      382",
    ]
    assert "samples:  · none  ░ 1–10  ▒ 11–40  ▓ 41–90  █ 91–160" in lines


def test_a_shade_of_one_count_or_none_is_said_so():
    assert "samples:  · none  ▒ 1  ▓ 2  █ 3–5" in show.text(federation([[5, 1]])).splitlines()


def test_the_headline_measures_the_clients():
    """Pooled (1/2, 1/2); distances 1/2, 1/2, 0: mean 1/3. Sizes 10, 10, 40: std sqrt(200), mean 20."""
    data = federation([[10, 0], [0, 10], [20, 20]])
    head = " ".join(show.text(data).splitlines()[:2])
    assert head.startswith("toy: 60 training samples, 3 clients, 2 classes; label skew 0.33 ")
    assert "size variation 0.71 " in head
    label, size = show.skew([[10, 0], [0, 10], [20, 20]])
    assert (label, size) == pytest.approx((1 / 3, 200**0.5 / 20))
    told = describe(data)
    assert (label, size) == pytest.approx((told["label_skew"], told["quantity_skew"]))


def test_clients_without_samples_have_no_skew_of_labels():
    assert show.skew([[5, 5], [0, 0]])[0] == 0
    assert show.skew([[0, 0], [0, 0]]) == (0, 0)
    assert show.text(federation([[0, 0]])).splitlines()[-1] == "client-0  ·· ··        0"


def test_many_clients_are_cut_and_counted():
    lines = show.text(federation([[1, 2]] * 43)).splitlines()
    assert lines[-1] == "… and 3 more clients"
    assert lines[-2].startswith("client-39 ")
    assert not show.text(federation([[1, 2]] * 40)).endswith("more clients")


@pytest.mark.parametrize(("classes", "columns"), [(17, 17), (21, 21), (64, 64), (65, 33), (345, 58)])
def test_many_classes_fit_a_terminal_and_lose_no_sample(classes: int, columns: int):
    text = show.text(federation([[1] * classes]))
    *_, ruler, row = text.splitlines()
    assert len(row.split()[1]) == columns
    assert row.split()[2] == str(classes)
    assert len(ruler) == len(row) <= 100
    merged = -(-classes // columns)
    _, *marks, _ = ruler.split()
    assert marks == [str(10 * merged * i) for i in range(len(marks))]
    assert len(marks) >= 2
    assert (f"each column is {merged} classes" in text) == (merged > 1)


def test_long_names_of_classes_stand_in_a_key():
    lines = show.text(federation([[1, 2]], classes=["cat", "a very long name of a class"])).splitlines()
    assert "classes:  0 cat, 1 a very long name of…" in lines
    assert lines[-2].split() == ["client", "0", "1", "samples"]


def test_names_cannot_move_the_cursor():
    text = show.text(federation([[1]], names=["a\x1b[2J\nb\udcff"], classes=["\x07"]))
    assert text.splitlines()[-1].startswith("a?[2J b? ")
    assert text.replace("\n", "").isprintable()


def test_pictures_are_written_by_suffix(tmp_path):
    data = federation([[3, 0], [1, 2]], names=["Oslo <1>", "x\x1b"], classes=["cat", "dog"])
    assert show.save(data, tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    drawn = ET.fromstring(show.save(data, tmp_path / "a.svg").read_text(encoding="utf-8"))
    words = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert {"Oslo <1>", "x?", "cat", "dog"} <= set(words)
    fills = [e for e in drawn.iter() if e.get("fill") == show.HUE and e.get("opacity") and e.get("d")]
    strongest = max(fills, key=lambda element: float(element.get("opacity", 0)))
    assert strongest.get("d", "").startswith("M0,0h"), "the cell with most samples is Oslo's cats"


def test_clients_of_one_name_keep_a_row_each():
    assert show.distinct(["Oslo", "Rome", "Oslo", "Oslo"]) == ["Oslo", "Rome", "Oslo (2)", "Oslo (3)"]
    told = show.heat_map(["Oslo", "Oslo"], ["a", "b"], [[1, 2], [3, 4]], "boxes").to_dict()
    assert told["hconcat"][0]["encoding"]["y"]["scale"]["domain"] == ["Oslo", "Oslo (2)"]


def test_the_largest_client_is_told_as_it_is():
    """At the end of the bars: 418 is not 420."""
    svg = io.StringIO()
    show.heat_map(["Oslo", "Rome"], ["a", "b"], [[400, 18], [3, 4]], "samples").save(svg, format="svg")
    assert ">418<" in svg.getvalue()


def test_impossible_pictures_are_one_sentence(tmp_path):
    data = federation([[1]])
    with pytest.raises(UserError, match=r"^The picture's file must end in \.png or \.svg\. Got 'a\.pdf'\.$"):
        show.save(data, tmp_path / "a.pdf")
    with pytest.raises(UserError, match=r"^The picture can't be written to '.*': No such file or directory\.$"):
        show.save(data, tmp_path / "missing" / "a.png")
