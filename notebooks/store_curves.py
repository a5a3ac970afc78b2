"""Execute notebooks and store their curves in them, and no other outputs.

python notebooks/store_curves.py [notebooks/01_quickstart.ipynb …]
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
PICTURE = "image/png"


def store(path: Path) -> None:
    """Execute a notebook in a folder of its own, and write it with its pictures."""
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=1_800, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            pictures = [output.data[PICTURE] for output in cell.outputs if PICTURE in output.get("data", {})]
            cell.outputs = [nbformat.v4.new_output("display_data", {PICTURE: picture}) for picture in pictures]
            cell.execution_count = None
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.monotonic() - began:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        store(each)
