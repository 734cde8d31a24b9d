"""The papers' tables in docs/results are made of the runs beside them, and its page shows their figures."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pfed import cli
from pfed.reproduce import paper

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/cells"))
NAMES = [folder.name for folder in FOLDERS]


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables made again, from the kept runs alone."""
    made = tmp_path_factory.mktemp("results")
    for folder in FOLDERS:
        shutil.copytree(folder / "cells", made / folder.name / "cells")
    assert cli.main(["reproduce", "page", str(made)]) == 0
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["table.md", "table.csv"])
def test_a_table_is_what_its_runs_make(name: str, file: str, again: Path) -> None:
    assert (again / name / file).read_text() == (RESULTS / name / file).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_its_figures_and_its_command(name: str, again: Path) -> None:
    table, page = (again / name / "table.md").read_text(), (RESULTS / "README.md").read_text()
    first = re.findall(r"(?:^\|.*\|\n)+", table, re.MULTILINE)[0].splitlines()  # of the column that is judged
    ours = next(i for i, head in enumerate(first[0].split("|")) if head.strip() in ("ours", "here, reduced"))
    assert "\n".join(line for line in first if line.split("|")[ours].strip() != "–") in page
    command = re.findall(r"```bash\n(.*)\n```", table)[0]
    assert command in page
    assert f"({name}/table.md)" in page


def test_every_table_is_named_on_the_page() -> None:
    page = (RESULTS / "README.md").read_text()
    assert [name for name in paper.names() if f"`{name}`" not in page] == []
