"""docs/grpo.ipynb runs up to the cell for a GPU; its cells assert their own results."""

from pathlib import Path

import nbclient
import nbformat
import pytest


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    notebook = nbformat.read("docs/grpo.ipynb", as_version=4)
    *cells, last = notebook.cells
    assert last.metadata.tags == ["gpu"]
    notebook.cells = cells
    monkeypatch.setenv("MPLBACKEND", "agg")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": "."}}).execute()
    plot = next(cell for cell in reversed(cells) if cell.cell_type == "code")
    printed = "".join(output.get("text", "") for output in plot.outputs)
    assert "model: " in printed and Path("grpo.py").exists()
