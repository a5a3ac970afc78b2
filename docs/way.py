"""Trace one iteration, from the environment's step to changed weights, and write the trace into docs/how_it_works.md.

    python docs/way.py

Lambdas and comprehensions count as part of the function that contains them.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl

import lightning_rl as lrl

PACKAGE = Path(lrl.__file__).parent
ENVS = {"SAC": "Pendulum-v1", "TD3": "Pendulum-v1"}
Way = dict[str, list[str]]


def way(name: str, at: int = 3) -> Way:
    """Run some iterations of an algorithm with default settings but small batches, and trace one from its first step to its last update.

    Losses are not compiled, so that their functions are entered one by one.

    Args:
        name: of the algorithm.
        at: the iteration to trace; actors are created in the first one.

    Returns:
        The functions entered, by the file's path in the package, both in the order of first entry.
    """
    entered: Way = {}

    class Traced(getattr(lrl, name)):  # type: ignore[misc]
        iteration, begun = 0, False

        def on_train_batch_end(self, *_: Any) -> None:
            type(self).iteration += 1
            if self.iteration == at - 1:
                sys.settrace(follow)

        def training_step(self, *arguments: Any) -> None:
            super().training_step(*arguments)
            if self.iteration == at - 1:
                sys.settrace(None)
                self.trainer.should_stop = True

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        Traced.begun |= code.co_qualname.endswith("Dataset.__iter__")
        if Traced.begun and path.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
            functions = entered.setdefault(path.relative_to(PACKAGE).as_posix(), [])
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)

    env = ENVS.get(name, "CartPole-v1")
    starts = {"learning_starts": 1, "batch_size": 8} if hasattr(getattr(lrl, name), "learning_starts") else {}
    pl.seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": False}
        trainer: pl.Trainer = lrl.Trainer(default_root_dir=folder, **quiet)
        trainer.fit(Traced(env=env, compile=False, **starts))
    return entered


def table(entered: Way) -> str:
    """Return a way as a Markdown table: each file, what it holds, and the functions entered."""
    rows = ["| file | holds | functions |", "| --- | --- | --- |"]
    for file, functions in entered.items():
        holds = (ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or "").splitlines()[0]
        names = ", ".join(f"`{function.replace('.<locals>', '')}`" for function in functions)
        rows.append(f"| [{file}](../lightning_rl/{file}) | {holds} | {names} |")
    count = sum(map(len, entered.values()))
    return "\n".join([*rows, "", f"{len(entered)} files, {count} functions."])


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return a page with new tables between its comments `<!-- way of NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        before, begin, rest = page.partition(f"<!-- way of {name} -->")
        page = f"{before}{begin}\n\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    page = Path(__file__).with_name("how_it_works.md")
    page.write_text(with_tables(page.read_text(encoding="utf-8"), {name: table(way(name)) for name in ("PPO", "SAC")}), encoding="utf-8")
