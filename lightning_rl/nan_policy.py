"""NaN policy: where non-finite values are detected, and what the run does about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.checkpoints.atomic import stage
from lightning_rl.errors import NotFiniteError
from lightning_rl.types import Tree, tree_leaves, tree_map

LARGEST = float(np.finfo(np.float32).max)
"""Observations and rewards are kept as float32: beyond this they would be infinite."""
SMALL = 1e38
"""A sum of squares that says that each is finite in float32."""


def check_episode(obs: Tree, reward: float, before: Tree, where: str, on_nan: str = "raise") -> tuple[Tree, float]:
    """What one environment said in a step outside of training, with stand-ins where `on_nan` goes on.

    Raises:
        NotFiniteError: it is bad, and `on_nan` is raise.
    """
    if abs(reward) <= LARGEST and all_finite(obs):
        return obs, reward
    rows = tree_map(lambda leaf: np.asarray(leaf)[None], obs)
    if on_nan == "raise":
        said = first_bad("reward", np.array([reward]), [0]) or first_bad("observation", rows, [0]) or ""
        raise NotFiniteError(f"{said.replace(' of environment 0', '')} {where}")
    rows = replace(rows, tree_map(lambda leaf: np.asarray(leaf)[None], before))
    return tree_map(lambda leaf: leaf[0], rows), reward if abs(reward) <= LARGEST else 0.0


def all_finite(tree: Tree) -> bool:
    """Whether all floats of a tree of arrays are numbers that float32 can hold. A small sum of squares says yes at once."""
    if type(tree) is np.ndarray:
        if tree.dtype.kind != "f":
            return True
        if tree.size <= 10_000:  # BLAS would start threads
            flat = tree.ravel()
            try:
                if flat.dot(flat) <= SMALL:
                    return True
            except RuntimeWarning:  # an overflow, where warnings are errors
                pass
        return np.count_nonzero(np.abs(tree) <= LARGEST) == tree.size
    if isinstance(tree, dict | tuple):
        return all(map(all_finite, tree_leaves(tree)))
    return all_finite(np.asarray(tree))


def first_bad(door: str, tree: Tree, envs: Any) -> str | None:
    """`observation where.t of environment 3 is nan`: the first bad value of arrays `[K, ...]`, whose rows are the environments `envs`."""
    for key, leaf in named_leaves(tree):
        if not all_finite(leaf):
            place = np.argwhere(~_good(leaf))[0]
            return f"{door}{key and f' {key}'} of environment {envs[int(place[0])]} is {leaf[tuple(place)]}"
    return None


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with their keys, joined by dots."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if children is None:
        yield prefix, tree
        return
    for key, child in children:
        yield from named_leaves(child, f"{prefix}.{key}" if prefix else str(key))


def replace(tree: Tree, instead: Tree) -> Tree:
    """A tree of arrays `[K, ...]` in which a row of another stands where one of a leaf is bad."""

    def mend(leaf: np.ndarray, other: np.ndarray) -> np.ndarray:
        good = _good(leaf).reshape(len(leaf), -1).all(1)
        return leaf if good.all() else np.where(good.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, other).astype(leaf.dtype)

    return tree_map(mend, tree, instead)


def _good(leaf: np.ndarray) -> np.ndarray:
    return np.abs(leaf) <= LARGEST if leaf.dtype.kind == "f" else np.ones(leaf.shape, dtype=bool)


STATE = ("replaced", "skipped", "restored", "bad_steps", "bad_updates", "bad_iterations", "is_bad_iteration")
IN_A_ROW = 100
RESTORED_IN_A_ROW = 10


class Guard:
    """Looks at numbers and knows what to do about bad ones.

    Args:
        on_nan: see above.
        folder: where `bad_batch.pt` goes, the first that was met; None saves none.
        ranks: how many processes must decide alike.
    """

    def __init__(self, on_nan: str = "raise", folder: Path | None = None, ranks: int = 1) -> None:
        self.on_nan, self.folder, self.ranks = on_nan, folder, ranks
        self.error: NotFiniteError | None = None
        """What this rank met in an iteration, for all ranks to stop after it."""
        self.replaced = self.skipped = self.restored = 0
        self.saved: Path | None = None
        self.notices: list[str] = []
        """What there is to tell, a line each; who prints them clears the list."""
        self.bad_steps = 0
        self.bad_updates: dict[str, int] = {}
        self.bad_iterations, self.is_bad_iteration = 0, False
        self.name = "loss"
        self.loss: Tensor | None = None
        self.refused = False
        self.snapshot: Snapshot | None = None

    # ---------------------------------------------------------------- environments

    def reset(self, obs: Tree, env_steps: int) -> Tree:
        """The first observations `[N, ...]`; zeros stand in for bad ones."""
        if all_finite(obs):
            return obs
        self._environment(first_bad("observation", obs, range(1_000_000)), env_steps, {"next_obs": obs})
        return replace(obs, tree_map(np.zeros_like, obs))

    def step(self, step: Any, before: Tree, env_steps: int) -> Any:
        """An `EnvStep`, with stand-ins for what is bad in it.

        Args:
            step: of N environments.
            before: the observations `[N, ...]` that were acted on.
            env_steps: environment steps made before it.
        """
        final = step.final_obs
        if all_finite(step.reward) and all_finite(step.obs) and (final is None or all_finite(final)):
            self.bad_steps = 0
            return step
        everywhere = range(len(step.reward))
        said = first_bad("reward", step.reward, everywhere)
        said = said or (None if final is None else first_bad("final observation", final, step.ended))
        batch = {"obs": before, "reward": step.reward, "next_obs": step.obs, "final_obs": () if final is None else final}
        made = env_steps + int(np.count_nonzero(step.valid))
        self._environment(said or first_bad("observation", step.obs, everywhere), made, batch)
        final = None if final is None else replace(final, tree_map(lambda leaf: leaf[step.ended], before))
        return step._replace(reward=replace(step.reward, np.zeros_like(step.reward)), obs=replace(step.obs, before), final_obs=final)

    def _environment(self, said: str | None, env_steps: int, batch: Tree) -> None:
        self.replaced += 1
        self.bad_steps += 1
        line = f"{said} at environment step {env_steps:,}"
        if self.on_nan == "raise" or self.bad_steps >= IN_A_ROW:
            self._stop(line if self.on_nan == "raise" else f"{line}, as something was {IN_A_ROW} steps in a row", batch)
        else:
            self._tell_first(self.replaced, f"{line}: the last good one, or reward 0, stands in for it{self._save(batch)}")

    def _tell_first(self, number: int, line: str) -> None:
        """Only the first time of each kind; metrics count the others."""
        if number == 1:
            self.notices.append(line)

    def _stop(self, line: str, batch: Tree) -> None:
        self.error = self.error or NotFiniteError(line + self._save(batch))
        if self.ranks == 1:
            raise self.error

    def agree(self, anywhere: bool) -> None:
        """Stop on all ranks when an environment of one of them was bad."""
        if anywhere:
            raise self.error or NotFiniteError("an environment of another rank returned a number that is none")

    # ---------------------------------------------------------------- learning

    def check_loss(self, name: str, loss: Tensor) -> Tensor:
        """A loss on its way to a gradient step; a bad one makes all of the gradient bad, on all ranks."""
        self.name = name
        if loss.device.type == "cpu":  # elsewhere the question would wait for the device: it is asked once, with the gradient's norm
            self.loss = None if math.isfinite(loss.item()) else loss.detach()
            return loss if self.loss is None else loss * math.nan
        self.loss = loss.detach()
        return loss if self.ranks == 1 else loss * (1 + 0 * self.loss)

    def passes(self, norm: Tensor, scales: bool) -> bool:
        """Whether to make the gradient step: not with a bad loss or norm, but a bad norm is a gradient scaler's own business."""
        number = norm if self.loss is None else self.loss if scales else norm + 0 * self.loss
        if (scales and self.loss is None) or math.isfinite(number.item()):
            self.bad_updates[self.name] = 0
            self.refused = False
        else:
            self.refused = True
        return not self.refused

    def refuse(self, norm: Tensor, counts: str, parts: Mapping[str, Any], batch: Tree) -> None:
        """After a gradient step that was not made.

        Args:
            norm: of the gradient.
            counts: where the run is, in words.
            parts: what was recorded; a bad part of the loss is named instead of the whole.
            batch: what was learned from.
        """
        bad_loss = self.loss is not None and not math.isfinite(self.loss.item())
        recorded = {name: float(values[-1]) for name, values in parts.items() if name.endswith("_loss") and values}
        bad = {name: value for name, value in recorded.items() if bad_loss and not math.isfinite(value)}
        part = None if self.name in bad or not bad else next(iter(bad.items()))
        name, value = part or (self.name, self.loss if self.loss is not None and bad_loss else norm)
        line = f"{'loss' if bad_loss else 'gradient norm of'} {name} is {float(value)} {counts}"
        number = self.bad_updates[self.name] = self.bad_updates.get(self.name, 0) + 1
        self.loss = None
        again = self.bad_iterations + (not self.is_bad_iteration)
        self.is_bad_iteration, self.bad_iterations = True, again
        if self.on_nan == "raise":
            raise NotFiniteError(f"{line}{self._save(batch)}; lower learning_rate, or set on_nan")
        if number >= IN_A_ROW or (self.on_nan == "restore_last" and again >= RESTORED_IN_A_ROW):
            often = f"{number} updates" if number >= IN_A_ROW else f"{again} iterations"
            raise NotFiniteError(f"{line}, as something was {often} in a row{self._save(batch)}")
        place = self._save(batch)
        if self.on_nan == "restore_last" and self.snapshot is not None:
            self.snapshot.restore()
            self.restored += 1
            self._tell_first(self.restored, f"{line}: back to the weights of the last finished iteration{place}")
        else:
            self.skipped += 1
            self._tell_first(self.skipped, f"{line}: that gradient step is left out{place}")

    def begin(self, module: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Before the first iteration."""
        if self.on_nan == "restore_last":
            self.snapshot = Snapshot(module, list(optimizers))

    def end_iteration(self) -> None:
        """After an iteration: what to go back to."""
        if not self.is_bad_iteration:
            self.bad_iterations = 0
        self.is_bad_iteration = False
        if self.snapshot is not None:
            self.snapshot.take()

    def metrics(self) -> dict[str, float]:
        """What was done about bad values so far, for runs that go on."""
        names = {"train/skipped_updates": self.skipped, "train/restored": self.restored, "rollout/replaced_steps": self.replaced}
        return {} if self.on_nan == "raise" else {name: float(value) for name, value in names.items()}

    def get_state(self) -> dict[str, Any]:
        """What was done so far, and what is bad in a row."""
        return {name: getattr(self, name) for name in STATE}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse."""
        for name in STATE:
            setattr(self, name, state[name])

    def _save(self, batch: Tree) -> str:
        """Write the first bad batch; where it lies, in words."""
        if self.saved is None and self.folder is not None and self.folder.is_dir():
            rank = torch.distributed.get_rank() if self.ranks > 1 else 0
            path = self.folder / (f"bad_batch_rank_{rank}.pt" if rank else "bad_batch.pt")
            try:
                stage(path, lambda file: torch.save(as_tensors(batch), file)).commit()  # type: ignore[arg-type]
                self.saved = path
            except OSError:  # what is to be said is said without it
                pass
        return "" if self.saved is None else f"; its batch is in {self.saved}"


class Snapshot:
    """Weights and optimizers as they were, in memory."""

    def __init__(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        self.optimizers, self.tensors = optimizers, list(module.state_dict().values())
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Keep what is now."""
        self.copies = [tensor.clone() for tensor in self.tensors]
        self.states = [[(each, _clone(state)) for each, state in optimizer.state.items()] for optimizer in self.optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to what was kept, which stays kept."""
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        for optimizer, states in zip(self.optimizers, self.states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({each: _clone(state) for each, state in states})


def _clone(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def as_tensors(tree: Any) -> Any:
    """Dicts, tuples and tensors alone, which load with `weights_only=True`."""
    if hasattr(tree, "_asdict"):
        return as_tensors(tree._asdict())
    if isinstance(tree, Mapping):
        return {key: as_tensors(child) for key, child in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(as_tensors(child) for child in tree)
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    return torch.as_tensor(np.array(tree)) if isinstance(tree, np.ndarray | np.generic | float | int) else tree
