"""Give ours and each library of `requirements.txt` a virtual environment of its own.

    python benchmarks/install.py [--peers ours sb3 sbx skrl tianshou torchrl] [--folder benchmarks/.venvs]

The same torch, numpy, gymnasium and simulators for all, those of `constraints.txt`; what a library needs beside them, it takes itself.
Ours is this checkout with its simulators and without its developers' tools, of which torchmetrics, that Lightning imports, would import
matplotlib and scipy; EnvPool, which asks for matplotlib too, is installed only for `scale.py` (see there).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("LRL_BENCHMARK_VENVS", HERE / ".venvs"))
"""Where environments lie, one folder a peer."""
LIBRARIES = {"sb3": "stable-baselines3", "sbx": "sbx-rl", "skrl": "skrl", "tianshou": "tianshou", "torchrl": "torchrl"}
COMPANIONS = {"sb3": ("sb3-contrib",)}
"""What is installed beside a library."""
OURS = "ours"
"""The environment of this checkout, in which hand-written loops run too."""
SIMULATORS = {"torchrl": ("vmas",)}
"""What only one of the libraries steps."""
SHARED = ("numpy", "gymnasium", "mujoco", "ale-py", "opencv-python-headless", "tensorboard")
RENDERING = "imageio"  # which gymnasium imports with any MuJoCo environment


def python_of(peer: str, folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment, whether it exists or not."""
    return folder / peer / "bin" / "python"


def home_of(peer: str) -> str:
    """The environment that a peer runs in."""
    return peer if peer in LIBRARIES else OURS


def line_of(name: str, file: Path) -> str:
    """What a file asks for by this name, with its version."""
    (line,) = (line for line in file.read_text().splitlines() if line.startswith(f"{name}=="))
    return line


def install(peer: str, folder: Path) -> None:
    """Make an environment anew. torch comes first, in the build that pip finds by its settings."""
    venv.create(folder / peer, clear=True, with_pip=True)
    pip = [python_of(peer, folder), "-m", "pip", "install", "--quiet"]
    torch, *shared = (line_of(name, HERE.parent / "constraints.txt") for name in ("torch", *SHARED, *SIMULATORS.get(peer, ())))
    subprocess.run([*pip, torch], check=True)
    if peer == OURS:
        subprocess.run([*pip, "-c", HERE.parent / "constraints.txt", "-e", f"{HERE.parent}[mujoco,atari,vmas]"], check=True)
        return
    libraries = [line_of(name, HERE / "requirements.txt") for name in (LIBRARIES[peer], *COMPANIONS.get(peer, ()))]
    subprocess.run([*pip, torch, *shared, RENDERING, *libraries], check=True)


def main() -> None:
    """Install what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=(OURS, *LIBRARIES), default=[OURS, *LIBRARIES])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for peer in options.peers:
        print(f"{peer}: {options.folder / peer}", flush=True)
        try:
            install(peer, options.folder)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{peer} was not installed: pip ended with {error.returncode}")


if __name__ == "__main__":
    main()
