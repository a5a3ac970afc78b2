"""The subcommand `export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_rl.cli import Parser
from lightning_rl.errors import printable
from lightning_rl.exporting.export import export_policy
from lightning_rl.exporting.formats import FORMATS
from lightning_rl.saving.manifest import manifest_path, read_manifest


def export(arguments: list[str], imports: list[str]) -> int:
    """Write a checkpoint's policy as a file that needs no part of this package."""
    parser = Parser("lightning-rl export", description="A checkpoint's policy as a file of its own.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, or a run's folder: its checkpoints/best.ckpt")
    parser.add_argument("--format", help=f"{', '.join(FORMATS)} (what the suffix of --out says, or onnx)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to (beside the checkpoint)")
    options = parser.parse_args(arguments)
    path = export_policy(options.ckpt_path, options.out, options.format)
    description = read_manifest(path) or {}
    found, ties = description["check"], f" but for {description['check']['ties']} ties" if description["check"]["ties"] else ""
    numbers = {output["dtype"].startswith("float") for output in description["outputs"] if output["role"] == "action"}
    said = [f"numbers differ by at most {found['max_abs_difference']:.2g}"] * (True in numbers)
    said += [f"choices are the same{ties}"] * (False in numbers)
    print(printable(f"{path}, described in {manifest_path(path).name}"))
    print(f"compared with the policy at {found['observations']:,} observations: {', '.join(said)}")
    return 0


SUBCOMMANDS: dict[str, Callable[[list[str], list[str]], int]] = {"export": export}
