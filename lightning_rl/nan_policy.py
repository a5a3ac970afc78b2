"""NaN policy: where non-finite values are detected, and what the run does about them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.checkpoints.atomic import stage
from lightning_rl.checkpoints.validation import COUNT, FLAG, Rules
from lightning_rl.errors import NotFiniteError
from lightning_rl.processes.ranks import of_all_ranks, own_rank
from lightning_rl.types import MAX_FLOAT32, EnvStep, State, Tree, is_finite, tree_map


def check_episode(obs: Tree, reward: float, before: Tree, where: str, on_nan: str = "raise") -> tuple[Tree, float, str]:
    """Replace non-finite values in one environment's observation and reward.

    Return both, and a description of the first bad value; an empty string if all are finite. Raises `NotFiniteError`: a value is not
    finite, and `on_nan` is raise.
    """
    if abs(reward) <= MAX_FLOAT32 and is_finite(obs):
        return obs, reward, ""
    rows = tree_map(lambda leaf: np.asarray(leaf)[None], obs)
    problem = first_bad("reward", np.array([reward]), [0]) or first_bad("observation", rows, [0]) or ""
    line = f"{problem.replace(' of environment 0', '')} {where}"
    if on_nan == "raise":
        raise NotFiniteError(line)
    rows = replace(rows, tree_map(lambda leaf: np.asarray(leaf)[None], before))
    return tree_map(lambda leaf: leaf[0], rows), reward if abs(reward) <= MAX_FLOAT32 else 0.0, line


def finite_rewards(rewards: Sequence[float] | np.ndarray) -> np.ndarray:
    """Replace non-finite rewards by 0, for sums."""
    return np.nan_to_num(rewards, posinf=0.0, neginf=0.0)


def first_bad(name: str, tree: Tree, envs: Sequence[int] | np.ndarray, labels: Sequence[str] = ()) -> str | None:
    """Describe the first non-finite value of arrays `[K, ...]`: `observation where.t of environment 3 is nan`.

    Row k belongs to environment `envs[k]`, which messages call `labels[envs[k]]` if there are labels.
    """
    for key, leaf in named_leaves(tree):
        if not is_finite(leaf):
            place = np.argwhere(~_good(leaf))[0]
            row = int(envs[int(place[0])])
            return f"{name}{key and f' {key}'} of {labels[row] if labels else f'environment {row}'} is {leaf[tuple(place)]}"
    return None


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the leaves with their dotted keys."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if children is None:
        yield prefix, tree
        return
    for key, child in children:
        yield from named_leaves(child, f"{prefix}.{key}" if prefix else str(key))


def replace(tree: Tree, instead: Tree) -> Tree:
    """Replace the rows of arrays `[K, ...]` that have non-finite values by the rows of another tree."""

    def replace_rows(leaf: np.ndarray, other: np.ndarray) -> np.ndarray:
        good = _good(leaf).reshape(len(leaf), -1).all(1)
        return leaf if good.all() else np.where(good.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, other).astype(leaf.dtype)

    return tree_map(replace_rows, tree, instead)


def _good(leaf: np.ndarray) -> np.ndarray:
    return np.abs(leaf) <= np.float32(MAX_FLOAT32) if leaf.dtype.kind == "f" else np.ones(leaf.shape, dtype=bool)


STATE = ("replaced", "skipped", "restored", "bad_steps", "bad_updates", "bad_iterations", "is_bad_iteration")
REPLACED = "replaced by the last finite one (reward: 0)"
MAX_IN_A_ROW = 100
"""Number of consecutive bad steps, or bad updates of one loss, that stops a run under every policy."""
MAX_RESTORED_IN_A_ROW = 10
"""Number of consecutive iterations with restored weights that stops a run."""


class BadStep(NamedTuple):
    """A step with NaN or infinite values: a description, its arrays, and whether it is one too many in a row."""

    line: str
    batch: Tree
    too_many: bool = False


class Guard:
    """Handles NaN and infinity in a run: `raise` stops it, `skip_update` and `restore_last` continue.

    Args:
        folder: where to save the first bad batch, as `bad_batch.pt`; None: do not save it.
        ranks: number of processes, which must make the same decision.
    """

    state_rules: ClassVar[Rules] = {
        "bad_updates/*": COUNT,
        "replaced|skipped|restored|bad_steps|bad_iterations": COUNT,
        "is_bad_iteration": FLAG,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, on_nan: str = "raise", folder: Path | None = None, ranks: int = 1) -> None:
        self.on_nan, self.folder, self.ranks = on_nan, folder, ranks
        self.error: NotFiniteError | None = None
        """What this rank found in an iteration; all ranks stop after the iteration."""
        self.replaced = self.skipped = self.restored = 0
        self.saved: Path | None = None
        self.notices: list[str] = []
        """Lines for the user; the caller that prints them clears the list."""
        self.bad_steps = 0
        self.bad_updates: dict[str, int] = {}
        self.bad_iterations, self.is_bad_iteration = 0, False
        self.snapshot: Snapshot | None = None

    # ---------------------------------------------------------------- environments

    def replace_first(self, obs: Tree, env_steps: int, labels: Sequence[str] = ()) -> Tree:
        """Replace non-finite first observations `[N, ...]` of episodes by zeros."""
        self._handle(first_bad("observation", obs, range(1_000_000), labels), env_steps, {"next_obs": obs})
        return replace(obs, tree_map(np.zeros_like, obs))

    def replace(self, step: EnvStep, before: Tree, env_steps: int, labels: Sequence[str] = ()) -> EnvStep:
        """Replace non-finite values in a step: observations by the previous ones, rewards by 0.

        Args:
            step: of N environments, with a non-finite value.
            before: the observations `[N, ...]` that the policy acted on.
            env_steps: environment steps before this one.
            labels: names of the rows in messages; default: environment 0, …
        """
        final, everywhere = step.final_obs, range(len(step.reward))
        problem = first_bad("reward", step.reward, everywhere, labels)
        problem = problem or (None if final is None else first_bad("final observation", final, step.ended, labels))
        batch = {"obs": before, "reward": step.reward, "next_obs": step.obs, "final_obs": () if final is None else final}
        made = env_steps + int(np.count_nonzero(step.valid))
        self._handle(problem or first_bad("observation", step.obs, everywhere, labels), made, batch)
        final = None if final is None else replace(final, tree_map(lambda leaf: leaf[step.ended], before))
        return step._replace(reward=replace(step.reward, np.zeros_like(step.reward)), obs=replace(step.obs, before), final_obs=final)

    def _handle(self, problem: str | None, env_steps: int, batch: Tree) -> None:
        """Report a step of the environments."""
        self.bad_steps += 1
        self.report(1, BadStep(f"{problem} at environment step {env_steps:,}", batch, self.bad_steps >= MAX_IN_A_ROW))

    def report(self, replaced: int, bad: BadStep) -> None:
        """Stop because of bad values that an environment returned, here or in an actor, or continue and report the first one.

        Args:
            replaced: number of steps whose values were replaced.
            bad: the first of them, or the one that is too many.
        """
        is_first = self.replaced == 0
        self.replaced += replaced
        if self.on_nan == "raise":
            self.stop(bad.line, bad.batch)
        elif bad.too_many:
            self.stop(f"{bad.line}, for {MAX_IN_A_ROW} steps in a row", bad.batch)
        elif is_first:
            self.notices.append(f"{bad.line}: {REPLACED}{self._save(bad.batch)}")

    def stop(self, line: str, batch: Tree) -> None:
        """Stop because of a bad value from an environment: at once, or with several ranks after the iteration, see `agree`."""
        self.error = self.error or NotFiniteError(line + self._save(batch))
        if self.ranks == 1:
            raise self.error

    def agree(self, anywhere: bool) -> None:
        """Stop on all ranks, with the error of the first that has one, if an environment of any rank returned a bad value."""
        if anywhere:
            lines = of_all_ranks("" if self.error is None else str(self.error))
            raise error_of_rank(*next((rank, line) for rank, line in enumerate(lines) if line))

    # ---------------------------------------------------------------- learning

    def refuse(self, name: str, loss: Tensor, norm: Tensor, counts: str, parts: Mapping[str, list[float | Tensor]], batch: Tree) -> None:
        """Apply `on_nan` after a gradient step that was refused.

        Args:
            norm: of the gradient.
            counts: the run's progress, in words.
            parts: recorded metrics; the message names a non-finite part of the loss, if there is one, instead of the whole loss.
            batch: the data of the update.
        """
        bad_loss = not math.isfinite(loss.item())
        recorded = {part: float(values[-1]) for part, values in parts.items() if part.endswith("_loss") and values}
        bad = {part: value for part, value in recorded.items() if bad_loss and not math.isfinite(value)}
        named, value = next(iter(bad.items())) if bad and name not in bad else (name, (loss if bad_loss else norm).item())
        line = f"{('' if named == 'loss' else 'loss ') if bad_loss else 'gradient norm of '}{named} is {value} {counts}"
        culprits = of_all_ranks(bad_loss)
        rank = culprits.index(True) if any(culprits) else 0  # the gradient is the mean over ranks, and bad on all
        is_here = rank == own_rank()
        number = self.bad_updates[name] = self.bad_updates.get(name, 0) + 1
        again = self.bad_iterations + (not self.is_bad_iteration)
        self.is_bad_iteration, self.bad_iterations = True, again
        is_too_often = number >= MAX_IN_A_ROW or (self.on_nan == "restore_last" and again >= MAX_RESTORED_IN_A_ROW)
        if is_too_often and self.on_nan != "raise":
            line += f", for {f'{number} updates' if number >= MAX_IN_A_ROW else f'{again} iterations'} in a row"
        place = self._save(batch) if is_here else ""
        if self.on_nan == "raise" or is_too_often:
            way_out = "; lower learning_rate, or set on_nan" if self.on_nan == "raise" else ""
            raise error_of_rank(rank, of_all_ranks(f"{line}{place}{way_out}")[rank])
        if self.on_nan == "restore_last" and self.snapshot is not None:
            self.snapshot.restore()
            self.restored += 1
            done, first = "restored the weights of the last finished iteration", self.restored == 1
        else:
            self.skipped += 1
            done, first = "that gradient step is skipped", self.skipped == 1
        if first and is_here:  # later ones only count in metrics
            self.notices.append(f"{line}: {done}{place}")

    def begin(self, module: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Take the first snapshot, before the first iteration."""
        if self.on_nan == "restore_last":
            self.snapshot = Snapshot(module, list(optimizers))

    def end_iteration(self) -> None:
        """Take a snapshot after an iteration, for `restore_last`."""
        if not self.is_bad_iteration:
            self.bad_iterations = 0
        self.is_bad_iteration = False
        if self.snapshot is not None:
            self.snapshot.take()

    def metrics(self) -> dict[str, float]:
        """Return the counts of skipped, restored and replaced values so far; none with `raise`."""
        names = {"train/skipped_updates": self.skipped, "train/restored": self.restored, "rollout/replaced_steps": self.replaced}
        return {} if self.on_nan == "raise" else {name: float(value) for name, value in names.items()}

    def get_state(self) -> State:
        return {name: getattr(self, name) for name in STATE}

    def set_state(self, state: State) -> None:
        for name in STATE:
            setattr(self, name, state[name])

    def _save(self, batch: Tree) -> str:
        """Save the first bad batch. Return a message that names the file."""
        if self.saved is None and self.folder is not None and self.folder.is_dir():
            rank = own_rank()
            path = self.folder / (f"bad_batch_rank_{rank}.pt" if rank else "bad_batch.pt")
            try:
                stage(path, lambda file: torch.save(as_tensors(batch), file)).commit()  # type: ignore[arg-type]
                self.saved = path
            except OSError:  # the NaN message is more important
                pass
        return "" if self.saved is None else f"; its batch is in {self.saved}"


class ActorGuard(Guard):
    """Keeps what an actor found for the guard of its run, which decides what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.bad_step: BadStep | None = None

    def report(self, replaced: int, bad: BadStep) -> None:
        """Keep the first bad step, or the one that is too many."""
        self.replaced += replaced
        if self.bad_step is None or bad.too_many:
            self.bad_step = bad._replace(batch=tree_map(np.array, bad.batch))

    def take(self) -> tuple[int, BadStep | None]:
        """Return the number of replaced steps since the last call, and the bad step that was kept."""
        taken = self.replaced, self.bad_step
        self.replaced, self.bad_step = 0, None
        return taken


def error_of_rank(rank: int, line: str) -> NotFiniteError:
    """Return an error that a rank found, for all ranks to raise."""
    error = NotFiniteError(f"rank {rank}: {line}" if rank else line)
    error.is_told = own_rank() > 0
    return error


class Snapshot:
    """A copy of weights and optimizer states in memory."""

    def __init__(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        self.optimizers, self.tensors = optimizers, list(module.state_dict().values())
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        self.copies = [tensor.clone() for tensor in self.tensors]
        self.states = [[(parameter, _clone(state)) for parameter, state in optimizer.state.items()] for optimizer in self.optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copies, which are kept."""
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        for optimizer, states in zip(self.optimizers, self.states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({parameter: _clone(state) for parameter, state in states})


def _clone(state: State) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def as_tensors(tree: Tree) -> Tree:
    """Convert a tree to dicts, tuples and tensors only, which load with `weights_only=True`."""
    if hasattr(tree, "_asdict"):
        return as_tensors(tree._asdict())
    if isinstance(tree, Mapping):
        return {key: as_tensors(child) for key, child in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(as_tensors(child) for child in tree)
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    return torch.as_tensor(np.array(tree)) if isinstance(tree, np.ndarray | np.generic | float | int) else tree
