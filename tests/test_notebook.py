"""In a real notebook: a method that is defined in a cell runs on worker processes."""

from __future__ import annotations

from textwrap import dedent

import pytest
from helpers import TYPED_IN

WHY = "needs a notebook: pip install 'pfed[dev]'"
nbclient = pytest.importorskip("nbclient", reason=WHY)
nbformat = pytest.importorskip("nbformat", reason=WHY)
pytest.importorskip("ipykernel", reason=WHY)

CELLS = [
    """
    from dataclasses import dataclass

    import torch

    from pfed import Experiment, Method, step

    torch.set_num_threads(2)
    (torch.ones(600, 600) @ torch.ones(600, 600)).sum();
    """,
    TYPED_IN,
    """
    assert found("processes") == found("serial")
    "the same"
    """,
    """
    result = Experiment("fedrep", clients=4, rounds=2, engine="processes").run()
    result
    """,
]


def test_a_notebook_runs_from_top_to_bottom() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(dedent(cell).strip()) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "execute_result"]
    assert [output.data["text/plain"] for output in shown[:1]] == ["'the same'"]
    assert shown[1].data["text/plain"].startswith("<Result")
    assert "<td>" in shown[1].data["text/html"]
