"""Install the lowest or the newest versions that `setup.cfg` allows, and train with them.

    python benchmarks/versions.py lowest|newest [--python python3.11] [--extras box2d mujoco …|none] [--folder FOLDER]

Makes a virtual environment, installs this checkout in it without `constraints.txt`, trains as the README's first command does, and
evaluates what it trained. `lowest` pins each direct requirement to its lower bound, and `newest` takes what pip takes. Then it installs
each extra, of the same kind of versions, into that environment, and imports its packages. The last lines are a table; the exit status is 1
if anything failed. torch's default build takes gigabytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
NOT_TRIED = ("dev", "docs")
"""Extras without which a run has all that it can use."""
SHOWN = ("torch", "numpy", "gymnasium", "pytorch-lightning", "jsonargparse")


def read_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of the package, under the empty name, and of each extra."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = {"": setup["options"]["install_requires"]} | dict(setup["options.extras_require"])
    return {name: [Requirement(line) for line in text.split("\n") if line] for name, text in lists.items() if name not in NOT_TRIED}


def find_lower_bounds(requirements: list[Requirement]) -> list[str]:
    """Return a pin for each requirement with a lower bound, the highest where a package is named twice."""
    bounds: dict[str, Version] = {}
    for requirement in requirements:
        for bound in requirement.specifier:
            if bound.operator == ">=":
                bounds[requirement.name] = max(Version(bound.version), bounds.get(requirement.name, Version("0")))
    return [f"{name}=={version}" for name, version in sorted(bounds.items())]


def call(*command: object, cwd: Path = ROOT) -> tuple[bool, str]:
    """Return whether a command succeeded, and what it printed."""
    result = subprocess.run([str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.returncode == 0, result.stdout


def reason(output: str) -> str:
    """Return the first line of an output that names an error, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if re.match(r"(ERROR|error|\w*Error|lightning-rl)\b", line)), lines[-1] if lines else "")


def install(python: Path, what: str, requirements: list[Requirement], lowest: bool) -> tuple[bool, str]:
    """Install the checkout, or an extra of it, next to what is installed, within the bounds of all that is asked for so far."""
    pins = find_lower_bounds(requirements) if lowest else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        return call(python, "-m", "pip", "install", "--quiet", "-c", file.name, "-e", what)


def import_packages(python: Path, requirements: list[Requirement]) -> tuple[bool, str]:
    """Import the top-level modules of packages that were installed for an extra."""
    names = [requirement.name for requirement in requirements]
    return call(python, "-c", f"{IMPORTING}\nimport_modules_of({names!r})")


IMPORTING = """
import importlib, importlib.metadata, re
def import_modules_of(names):
    canonical = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    for module, distributions in importlib.metadata.packages_distributions().items():
        if module.isidentifier() and not module.startswith("_"):
            if canonical & {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}:
                importlib.import_module(module)
"""


PRINTING_VERSIONS = "import sys; from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in sys.argv[1:]), sep=', ')"


def main() -> int:
    """Install, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["lowest", "newest"])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install for")
    requirements = read_requirements()
    extras = [name for name in requirements if name]
    parser.add_argument("--extras", nargs="*", choices=[*extras, "none"], default=extras, help="extras to try (all)")
    parser.add_argument("--folder", type=Path, help="where the environment is made and kept (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        ok, _ = call(options.python, "-m", "venv", folder / "venv")
        rows = (
            try_versions(folder, options.kind == "lowest", requirements, [name for name in options.extras if name != "none"]) if ok else []
        )
    print(f"\n| {options.kind} | result |\n|---|---|", *(f"| {name} | {text} |" for name, text, _ in rows), sep="\n")
    return int(not rows or not all(good for *_, good in rows))


def try_versions(folder: Path, lowest: bool, requirements: dict[str, list[Requirement]], extras: list[str]) -> list[tuple[str, str, bool]]:
    """Install, train and evaluate in the environment of a folder; return a name, a text and whether it succeeded for each part."""
    python, wanted = folder / "venv" / "bin" / "python", list(requirements[""])
    ok, output = install(python, str(ROOT), wanted, lowest)
    rows = [("installed", "yes" if ok else reason(output), ok)]
    if not ok:
        return rows
    rows.append(("versions", call(python, "-c", PRINTING_VERSIONS, *SHOWN)[1].strip(), True))
    program = [python, "-m", "lightning_rl"]
    ok, output = call(*program, "fit", "--config", ROOT / "configs/ppo/cartpole.yaml", "--trainer.default_root_dir", folder / "runs")
    rows.append(("lightning-rl fit --config configs/ppo/cartpole.yaml", "trained" if ok else reason(output), ok))
    if ok:
        (best,) = (folder / "runs").rglob("best.ckpt")
        ok, output = call(*program, "evaluate", "--ckpt_path", best, "--episodes", 20, "--json")
        rows.append(("lightning-rl evaluate", output.splitlines()[-1] if ok else reason(output), ok))
    for extra in extras:
        wanted += requirements[extra]
        ok, output = install(python, f"{ROOT}[{extra}]", wanted, lowest)
        if ok:
            ok, output = import_packages(python, requirements[extra])
        rows.append((extra, "installed and imported" if ok else reason(output), ok))
        print(*rows[-1][:2], sep=": ", flush=True)
        if not ok:
            wanted = wanted[: -len(requirements[extra])]
    return rows


if __name__ == "__main__":
    sys.exit(main())
