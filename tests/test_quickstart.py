"""The worked notebook in the docs: it runs from top to bottom, and what is stored with it can be shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

WHY = "needs a notebook: pip install 'pfed[dev]'"
nbclient = pytest.importorskip("nbclient", reason=WHY)
nbformat = pytest.importorskip("nbformat", reason=WHY)
pytest.importorskip("ipykernel", reason=WHY)
pytest.importorskip("pandas", reason=WHY)

DOCS = Path(__file__).parent.parent / "docs"
STORED = DOCS / "quickstart.ipynb"


def read() -> Any:
    return nbformat.read(STORED, as_version=4)


def kinds(notebook: Any) -> list[list[str]]:
    """What each cell of code shows: the forms of its result; an error or anything printed has a name of its own."""
    return [
        sorted({form for output in cell.outputs for form in output.get("data", [output.output_type])})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.timeout(900)  # half a minute of work, which may have to share its core
def test_it_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its own assertions hold: Blend is FedAvg at one end and Local at the other; what is loaded is what was kept."""
    notebook = read()
    stored = kinds(notebook)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    assert kinds(notebook) == stored, "the outputs that are stored are those of this code"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len(list((tmp_path / "runs").iterdir())) == 8


def test_what_is_stored_can_be_shown_anywhere() -> None:
    forms = [form for shown in kinds(read()) for form in shown]
    assert {"image/svg+xml", "text/html"} <= set(forms)
    assert not {"error", "stream"} & set(forms)
    text = STORED.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|tmp|Users|work)/|<script", text)


def test_cells_were_run_in_order() -> None:
    counts = [cell.execution_count for cell in read().cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_links_lead_somewhere() -> None:
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((DOCS / link).exists() for link in links)
