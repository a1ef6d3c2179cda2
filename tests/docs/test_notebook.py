"""docs/grpo.ipynb runs up to the cell for a GPU; its cells assert their own results."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager


@pytest.fixture
def notebook():
    return nbformat.read("docs/grpo.ipynb", as_version=4)


def test_outside_of_a_clone_the_first_cell_asks_for_the_address(notebook, tmp_path, monkeypatch):
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    program = TransformerManager().transform_cell(first.source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="set REPOSITORY"):
        exec(program, {})


@pytest.mark.slow
def test_the_notebook_runs(notebook, monkeypatch):
    *cells, last = notebook.cells
    assert last.metadata.tags == ["gpu"]
    notebook.cells = cells
    monkeypatch.setenv("MPLBACKEND", "agg")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": "."}}).execute()
    plot = next(cell for cell in reversed(cells) if cell.cell_type == "code")
    printed = "".join(output.get("text", "") for output in plot.outputs)
    assert "model: " in printed and Path("grpo.py").exists()
