"""The subcommand `export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_rl.cli import Parser
from lightning_rl.exporting.export import export_policy
from lightning_rl.exporting.formats import FORMATS
from lightning_rl.saving.manifest import manifest_path, read_manifest


def export(arguments: list[str], imports: list[str]) -> int:
    """Write a checkpoint's policy as a file that needs no part of this package."""
    parser = Parser("lightning-rl export", description="A checkpoint's policy as a file of its own.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, such as RUN/checkpoints/best.ckpt")
    parser.add_argument("--format", help=f"{', '.join(FORMATS)} (what the suffix of --out says, or onnx)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to (beside the checkpoint)")
    options = parser.parse_args(arguments)
    path = export_policy(options.ckpt_path, options.out, options.format)
    found = (read_manifest(path) or {})["check"]
    print(f"{path}, described in {manifest_path(path).name}")
    print(
        f"compared with the policy at {found['observations']:,} observations: numbers differ by at most {found['max_abs_difference']:.2g}, "
        f"choices are the same" + (f" but for {found['ties']} ties" if found["ties"] else "")
    )
    return 0


SUBCOMMANDS: dict[str, Callable[[list[str], list[str]], int]] = {"export": export}
