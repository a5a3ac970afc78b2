"""What a run saves beside weights: when its last row was, the state of random generators, and the attributes that a user adds.

Checkpoints name what they cannot hold: other objects, and changed networks.
"""

from __future__ import annotations

import dis
import itertools
import os
import pickle
import random
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from inspect import unwrap
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator, Tensor, nn

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.checkpoints.validation import COUNT, GENERATOR, NUMBER, Kind, Rules, is_numpy_generator, is_python_generator
from lightning_rl.envs.snapshot.decoding import Decoder
from lightning_rl.envs.snapshot.encoding import MAX_PARTS, VERSION, Encoder, UnsupportedValueError
from lightning_rl.errors import SettingError
from lightning_rl.loggers import log_row, show_to_callbacks
from lightning_rl.networks.changes import list_changes
from lightning_rl.training.hooks import RunModule
from lightning_rl.types import State


class RunLog:
    """Writes a row of metrics every `interval` counts of the run (environment steps or updates).

    Lightning's `self.log` costs 0.2 ms per key and has neither count, so rows go directly to the loggers and `callback_metrics`.

    Args:
        interval: counts between rows.
        count: the run's count at the start.
    """

    state_rules: ClassVar[Rules] = {"logged_env_steps": COUNT, "elapsed": NUMBER}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, interval: int, count: int) -> None:
        self.interval, self.logged_env_steps = interval, count
        self.started = self.logged_at = time.monotonic()
        self.keeps = True
        """Whether the current iteration may be logged."""
        self.open_rows: list[dict[str, float]] = []
        """The row of the current iteration until it is written, and those of evaluations that come after it."""

    def begin(self, most: float) -> None:
        """Begin an iteration, after which the run's count is at most `most`."""
        self.keeps = most - self.logged_env_steps >= self.interval

    def is_due(self, count: int) -> bool:
        """Return whether a row is due."""
        return self.keeps and count - self.logged_env_steps >= self.interval

    @property
    def is_open(self) -> bool:
        """Return whether the row of the current iteration is not written yet."""
        return bool(self.open_rows)

    def open(self, trainer: pl.Trainer, module: RunModule, metrics: dict[str, float]) -> None:
        """Make a row of the given metrics and time metrics, and show it to callbacks."""
        now, count = time.monotonic(), module.count
        rate = (count - self.logged_env_steps) / max(now - self.logged_at, 1e-9)
        times = {"time/fps": rate, "time/time_elapsed": now - self.started, "time/iterations": trainer.global_step}
        self.open_rows = [{module.counter: count, **metrics, **times}]
        self.logged_at, self.logged_env_steps = now, count
        show_to_callbacks(trainer, self.open_rows[0])

    def add(self, trainer: pl.Trainer, module: RunModule, metrics: dict[str, float]) -> None:
        """Write another row, after the one that is open, and show it to callbacks."""
        if self.is_open:
            self.open_rows.append(metrics)
            show_to_callbacks(trainer, metrics)
        else:
            log_row(trainer, {module.counter: module.count, **metrics}, module.count, module.say)

    def close(self, trainer: pl.Trainer, module: RunModule, metrics: dict[str, float]) -> None:
        """Write the open rows, the first with metrics that replace earlier ones."""
        (first, *others), self.open_rows = self.open_rows, []
        for row in ({**first, **metrics}, *others):
            log_row(trainer, {module.counter: module.count, **row}, module.count, module.say)

    def get_state(self) -> State:
        """Return the count of the last row, the elapsed time, and the time since that row."""
        now = time.monotonic()
        return {"logged_env_steps": self.logged_env_steps, "elapsed": now - self.started, "since_row": now - self.logged_at}

    def set_state(self, state: State) -> None:
        """Restore a state; times continue from there."""
        self.logged_env_steps = state["logged_env_steps"]
        now = time.monotonic()
        self.started, self.logged_at = now - state["elapsed"], now - state.get("since_row", 0.0)  # 0.1.0 did not store it


RANDOM_RULES: Rules = {
    "torch": GENERATOR,
    "cuda/[]": GENERATOR,
    "python": Kind("a state of random", is_python_generator),
    "numpy": Kind("a state of numpy.random", is_numpy_generator),
}
"""What the result of `random_state` holds."""


def random_state() -> State:
    """Return the state of this process's global random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


LEAST_OWN_SEED = 2**32
"""Torch's own seeds are random numbers of 64 bits, and those of runs are at least this: a smaller one is the user's."""
run_numbers = itertools.count()
"""Two runs that begin with the same state of torch's generator, as after two resumed runs, differ by these."""


def draw_seed() -> None:
    """Seed torch again unless the user seeded it or Lightning: otherwise the program's next run would repeat this one's episodes."""
    if "PL_GLOBAL_SEED" not in os.environ and torch.initial_seed() >= LEAST_OWN_SEED:
        entropy = [int(torch.randint(2**32, ())), next(run_numbers)]
        torch.manual_seed(LEAST_OWN_SEED + int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def set_random_state(state: State) -> None:
    """Restore the state from `random_state`, except for generators of GPUs that do not exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    for device, words in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
        torch.cuda.set_rng_state(torch.from_numpy(words), device)


# ---------------------------------------------------------------- attributes that a user adds

PACKAGES = ("lightning_rl", "pytorch_lightning", "lightning", "torch")
"""Packages whose classes take care of their own state."""
BUILT_WITH = "built_with"
"""Attribute of a user's module: digests of its attributes as its constructor left them."""


def is_packaged(cls: type) -> bool:
    """Return whether a class is one of `PACKAGES`."""
    return cls.__module__.partition(".")[0] in PACKAGES


@cache
def packaged_names(cls: type) -> frozenset[str]:
    """Return the names that the packaged bases of a class define, and those of attributes that their methods assign."""
    names = {BUILT_WITH, "built", *vars(pl.LightningModule()), "_hparams", "_hparams_initial", "_hparams_name"}
    for base in filter(is_packaged, cls.__mro__):
        names |= vars(base).keys() | vars(base).get("__annotations__", {}).keys()
        for member in vars(base).values() if base.__module__.startswith("lightning_rl") else ():
            parts = (member, *(getattr(member, part, None) for part in ("__func__", "func", "fget", "fset")))
            functions = [unwrap(part) for part in parts if isinstance(part, FunctionType)]
            names |= {str(step.argval) for function in functions for step in dis.get_instructions(function) if step.opname == "STORE_ATTR"}
    return frozenset(names)


def own_attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that a user has added; settings, weights, code, and objects of `PACKAGES` are not among them."""
    cls: Any = type(module)
    known = packaged_names(cls) | getattr(module, "hparams", {}).keys()
    added = {name: value for name, value in vars(module).items() if name not in known and not is_code(value)}
    return {name: value for name, value in added.items() if isinstance(value, Tensor | Generator) or not is_packaged(type(value))}


def is_code(value: object) -> bool:
    """Return whether a value is a function, a method or a class, which do not change."""
    return callable(value) and not isinstance(value, nn.Module)


def own_modules(run: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may have attributes of a user: runs, and those of a user's class, by their path in the run."""
    return (
        (path, module) for path, module in run.named_modules() if isinstance(module, pl.LightningModule) or not is_packaged(type(module))
    )


def note_attributes(run: nn.Module) -> None:
    """Note the attributes of a run that was just built: checkpoints hold those that have changed since."""
    for _, module in own_modules(run):
        if not is_packaged(type(module)):
            vars(module)[BUILT_WITH] = {name: digest(run, value) for name, value in own_attributes(module).items()}


def digest(run: nn.Module, value: object) -> bytes:
    """Return a digest of a value; empty if it cannot be saved."""
    try:
        return sha256(pickle.dumps(encoder_of(run).encode(value))).digest()
    except UnsupportedValueError:
        return b""


def encoder_of(run: nn.Module) -> Encoder:
    """Return an encoder for attributes of a run's modules; references to a module are saved as its number."""
    encoder = Encoder(strict=True)
    for module in run.modules():
        encoder.number(module)
    encoder.most = MAX_PARTS
    return encoder


def read_attributes(run: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the changed attributes of a run's modules as plain data, by the module's path, and why others cannot be saved."""
    stored: dict[str, dict[str, Any]] = {}
    unsaved: dict[str, str] = {}
    encoder = encoder_of(run)
    for path, module in own_modules(run):
        before = vars(module).get(BUILT_WITH, {})
        for name, value in own_attributes(module).items():
            new = digest(run, value)
            if not new or new != before.get(name):
                try:
                    encoder.parts = 0
                    stored.setdefault(path, {})[name] = encoder.encode(value)
                except UnsupportedValueError as error:
                    unsaved[f"{type(module).__name__}.{name}"] = str(error)
    return stored, unsaved


def write_attributes(run: nn.Module, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore what `read_attributes` returned. Return the names of attributes that the run's modules no longer have.

    Raises:
        SettingError: a name is not that of a user's attribute.
    """
    modules, lost = dict(own_modules(run)), []
    decoder = Decoder(VERSION, [*run.modules()])
    for path, attributes in stored.items():
        for name, plain in attributes.items():
            module = modules.get(path)
            cls: Any = type(module)
            try:
                if module is None:
                    raise UnsupportedValueError(path)
                value = decoder.decode(plain, vars(module).get(name))
            except (UnsupportedValueError, TypeError, ValueError, KeyError, AttributeError):
                lost.append(f"{path}.{name}".lstrip("."))
                continue
            inherited = getattr(cls, name, None)
            if not name.isidentifier() or name in packaged_names(cls) or isinstance(inherited, property) or is_code(inherited):
                raise SettingError(f"the checkpoint holds an attribute {name[:40]!r}, which is not one of a user's class")
            vars(module)[name] = value
    return lost


class Additions:
    """What a user has added to a run, or changed in its networks: checkpoints hold the attributes, and the rest is named once."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        """Attributes, and places of changes, that were named already."""
        self.lost: list[str] = []
        """Changes in the networks of the checkpoint that the run was loaded from."""

    def save(self, module: Any, changes: Mapping[str, str]) -> State:
        """Return entries of a checkpoint, and name what they do not hold; `changes`: what was changed in networks, by place."""
        attributes, unsaved = read_attributes(module)
        for name in unsaved.keys() - self.named:
            module.say(f"checkpoints do not hold {name} ({unsaved[name]}): make it plain data or a buffer, or use on_save_checkpoint")
        if new := [text for place, text in changes.items() if place not in self.named]:
            what = f"checkpoints do not hold what was changed after {type(module).__name__} was built: {list_changes(new)}"
            module.say(f"{what}; change it in the constructor of a subclass, or again after loading")
        self.named |= unsaved.keys() | changes.keys()
        return {"attributes": to_plain(attributes), **({"changes": [*changes.values()]} if changes else {})}

    def load(self, module: Any, state: State) -> None:
        """Restore attributes from a checkpoint."""
        if missing := write_attributes(module, to_arrays(state["attributes"])):
            module.say(f"not restored from the checkpoint, as they are not there any more: {', '.join(missing)}")

    def name_lost(self, module: Any, state: State, changes: Mapping[str, str]) -> None:
        """Name the changes in networks that the run of a checkpoint had and this one, with `changes`, has not."""
        here = changes.values()
        if lost := [text for text in state.get("changes", ()) if text not in here]:
            what = f"the checkpoint does not hold what had been changed in its networks: {list_changes(lost)}"
            (module.say if module.has_trainer else warnings.warn)(f"{what}; change it again, or results differ")
        self.lost = [] if module.has_trainer else lost
