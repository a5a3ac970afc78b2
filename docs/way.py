"""Trace ways through the package, and write those of learning into docs/how_it_works.md: from the environment's step to changed weights.

    python docs/way.py

Lambdas and comprehensions count as part of the function that contains them. `python docs/way.py --all` prints the size of every way.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl

import lightning_rl as lrl
from lightning_rl.cli.main import main

PACKAGE = Path(lrl.__file__).parent
Way = dict[str, list[str]]
"""The functions that were entered, by the file's path in the package, both in the order of first entry."""


class Trace:
    """Notes the package's functions that are entered, from one function on and until another returns; both are ends of names."""

    def __init__(self, start: str = "", stop: str = "\0") -> None:
        self.start, self.stop, self.entered, self.begun = start, stop, Way(), False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        self.begun |= code.co_qualname.endswith(self.start)
        if self.begun and path.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
            functions = self.entered.setdefault(path.relative_to(PACKAGE).as_posix(), [])
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)
        return self.end if code.co_qualname.endswith(self.stop) else None

    def end(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Stop when a function returns."""
        if event == "return":
            sys.settrace(None)
        return self.end


def trace(action: Callable[[], object], stop: str = "\0") -> Way:
    """Trace an action, until a function returns. It is done once before, so that all modules are imported."""
    action()
    noted = Trace(stop=stop)
    sys.settrace(noted)
    try:
        action()
    finally:
        sys.settrace(None)
    return noted.entered


def iterate(model: Callable[..., Any], *arguments: Any, at: int = 3, **settings: Any) -> Way:
    """Train for some iterations, and trace one from its first step to its last update.

    Args:
        model: a class of the package; `arguments` and `settings` are those of its constructor.
        at: the iteration to trace; actors are created in the first one.
    """
    noted = Trace(start="Dataset.__iter__")

    class Traced(model):  # type: ignore[misc, valid-type]
        iteration = 0

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            type(self).iteration += 1
            if self.iteration == at - 1:
                sys.settrace(noted)

        def training_step(self, *arguments: Any) -> None:
            super().training_step(*arguments)
            if self.iteration == at - 1:
                sys.settrace(None)
                self.trainer.should_stop = True

    pl.seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder).fit(Traced(*arguments, **settings))
    return noted.entered


def quiet_trainer(folder: str) -> Any:
    """Return a Trainer that prints and writes little."""
    return lrl.Trainer(default_root_dir=folder, evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False)


def several() -> Way:
    """Trace two PPO that learn in one world."""
    learner = partial(lrl.PPO, n_steps=8, batch_size=8, n_epochs=1, compile=False)
    behaviors = {name: lrl.Behavior(agents=f"{name}_*", learner=learner) for name in ("adversary", "agent")}
    return iterate(lrl.MultiAgent, "mpe2.simple_tag_v3", behaviors)


def from_command_line() -> Way:
    """Trace a setting on the command line until its PPO is built."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = ["fit", "--model", "PPO", "--model.env.id", "CartPole-v1", "--model.gamma", "0.9", "--model.max_env_steps", "1024"]
        quiet = ["--trainer.default_root_dir", folder, "--trainer.logger", "false", "--evaluation", "null", "--checkpoint", "null"]
        return trace(lambda: main([*arguments, *quiet]), stop="MarkBuilt.__call__")


def with_checkpoint(action: Callable[[Any, str], object]) -> Way:
    """Trace what is done with the Trainer of a short run and the path of a checkpoint of it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, path = quiet_trainer(folder), f"{folder}/a.ckpt"
        trainer.fit(lrl.PPO("CartPole-v1", n_steps=8, batch_size=8, n_epochs=1, max_env_steps=64))
        trainer.save_checkpoint(path)
        return trace(lambda: action(trainer, path))


WAYS: dict[str, Callable[[], Way]] = {
    "PPO": lambda: iterate(lrl.PPO, "CartPole-v1", compile=False),
    "SAC": lambda: iterate(lrl.SAC, "Pendulum-v1", compile=False, learning_starts=1, batch_size=8),
    "MultiAgent": several,
    "POCA": lambda: iterate(lrl.POCA, "mpe2.simple_spread_v3", group_reward="mean", n_steps=8, batch_size=8, n_epochs=1, compile=False),
    "setting in Python": lambda: trace(lambda: lrl.PPO("CartPole-v1", gamma=0.9)),
    "setting on the command line": from_command_line,
    "save": lambda: with_checkpoint(lambda trainer, path: trainer.save_checkpoint(path)),
    "load_policy": lambda: with_checkpoint(lambda trainer, path: lrl.load_policy(path)),
    "evaluate": lambda: with_checkpoint(lambda trainer, path: lrl.evaluate(path, episodes=2)),
}


def size(entered: Way) -> tuple[int, int]:
    """Return the number of files and of functions."""
    return len(entered), sum(map(len, entered.values()))


def table(entered: Way) -> str:
    """Return a way as a Markdown table: each file, what it holds, and the functions entered."""
    rows = ["| file | holds | functions |", "| --- | --- | --- |"]
    for file, names in entered.items():
        holds = (ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or "").splitlines()[0]
        functions = ", ".join(f"`{name.replace('.<locals>', '')}`" for name in names)
        rows.append(f"| [{file}](../lightning_rl/{file}) | {holds} | {functions} |")
    files, count = size(entered)
    return "\n".join([*rows, "", f"{files} files, {count} functions."])


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return a page with new tables between its comments `<!-- way of NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        before, begin, rest = page.partition(f"<!-- way of {name} -->")
        page = f"{before}{begin}\n\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="print the number of files and functions of every way")
    if parser.parse_args().all:
        for name, measure in WAYS.items():
            print(name, *size(measure()))
    else:
        page = Path(__file__).with_name("how_it_works.md")
        tables = {name: table(WAYS[name]()) for name in ("PPO", "SAC")}
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
