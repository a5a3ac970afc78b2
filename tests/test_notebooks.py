"""The notebooks run from top to bottom, and lie in the repository without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_carries_no_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert 0 < len(cells) <= 15
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_within_a_minute(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs" / "PPO" / "CartPole-v1" / "version_0" / "checkpoints" / "best.ckpt").exists()
    statistics = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    assert "'return_mean'" in statistics
