"""The notebooks run from top to bottom, and lie in the repository without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
SHOWN = {
    "01_quickstart": "'return_mean': ",
    "02_write_an_algorithm": "REINFORCE over A2C",
    "03_rewards_memory_curriculum": "'with a memory': ",
    "04_many_processes": "'largest difference': ",
}
"""Each, and something that it must have come to show."""


def test_all_notebooks_are_executed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_small_and_carries_no_outputs(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    assert 0 < len(cells) <= 15
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any(SHOWN[name] in output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert any(tmp_path.rglob("metrics.csv"))
