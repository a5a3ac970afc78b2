"""Collect rollouts from environments on a device. Between the first and the last step nothing goes through the host."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Generator, Tensor

from lightning_rl.data.collector import SteppingCollector
from lightning_rl.data.rollout import NO_ENDS, Ends, Unroll
from lightning_rl.envs import SUCCESS
from lightning_rl.envs.stepping import Stepper
from lightning_rl.envs.tensors import HostView, on_host
from lightning_rl.errors import SettingError, keep_running
from lightning_rl.nan_policy import first_bad
from lightning_rl.networks.acting import ActingNetwork
from lightning_rl.spaces import MASK, Spaces
from lightning_rl.types import (
    EnvStep,
    Info,
    Tree,
    tree_index,
    tree_leaves,
    tree_map,
    tree_stack,
    tree_to_numpy,
    tree_to_torch,
)


class Steps(NamedTuple):
    """Results of T steps on a device.

    obs, start, mask, memory, resetting: before the next step, `[N, ...]` trees.  actions: as drawn, `[T, N, ...]` tree.
    memories: the policy's memory before the first row of each sequence.  after: its memory after each step.
    reports: reported successes of each step.  has_final: whether the info of each step held final observations.
    """

    obs: Tree
    start: Tensor
    mask: Tree
    memory: Tree
    resetting: Tensor
    actions: Tree
    memories: tuple[Tree, ...]
    after: tuple[Tree, ...]
    reports: tuple[dict[str, Tensor], ...]
    has_final: tuple[bool, ...]


class CudaGraph:
    """Calls a function of trees of tensors eagerly two times, and records its kernels as a CUDA graph in the third call.

    Later calls launch all kernels together. A recording fixes addresses and the branches taken in Python. So the three calls must have the
    same `watch()`, and the recording is dropped when it changes. The next call overwrites the results. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html.

    Args:
        name: name of the function in messages.
        function: a function that never waits for the device, and changes tensors only in place.
        device: a GPU.
        generators: the generators from which the function draws.
        watch: returns everything that the function reads in addition to its inputs, except for the values of tensors.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Tree],
        device: torch.device,
        generators: Sequence[Generator],
        watch: Callable[[], object],
    ) -> None:
        self.name, self.function, self.device, self.generators, self.watch = name, function, device, generators, watch
        self.watched: object = None
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Tree = ()
        self.results: Tree = None

    def __call__(self, *inputs: Tree) -> Tree:
        if (watched := self.watch()) != self.watched:
            self.watched, self.calls, self.graph = watched, 0, None
        self.calls += 1
        if self.calls < 3:
            return self.function(*inputs)
        if self.graph is None:
            self.record(inputs)
        assert self.graph is not None
        tree_map(lambda old, new: old.copy_(new), self.inputs, inputs)
        self.graph.replay()
        return self.results

    def record(self, inputs: Tree) -> None:
        """Record a call without computing anything. Raises `SettingError`: the function waits for the device."""
        self.inputs = tree_map(torch.clone, inputs)
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device), capture_error_mode="thread_local"):
                self.results = self.function(*self.inputs)
        except RuntimeError as error:
            line = next(iter(str(error).splitlines()), "")
            raise SettingError(f"compile: {self.name} cannot become a CUDA graph ({line}); set compile to false") from error
        self.graph = graph


class TensorCollector(SteppingCollector):
    """Steps N environments that take and return tensors, see `envs/tensors.py`; other arguments as in `Recorder`.

    The host waits for the device once per iteration, after the last step. It then reads which episodes ended, and checks that all values
    are finite and each mask leaves a choice. NaN and infinite values end the run whatever `on_nan` is, because later steps were computed
    from them. Only first observations, which the host checks before, are handled according to `on_nan`.

    Args:
        cuda_graph: whether the steps of a rollout may be recorded as a CUDA graph, if the environments support it.
    """

    def __init__(self, stepper: Stepper, spaces: Spaces, network: ActingNetwork, *arguments: Any, cuda_graph: bool = True) -> None:
        super().__init__(stepper, spaces, network, *arguments)
        assert isinstance(stepper.envs, HostView)
        self.envs: Any = stepper.envs.env
        self.resets_late = stepper.mode is AutoresetMode.NEXT_STEP
        if stepper.mode is AutoresetMode.DISABLED:
            raise SettingError(f"{self.name} runs on a device, which does not support env.autoreset DISABLED; use SAME_STEP or NEXT_STEP")
        self.device = self.generator.device

        def on_device(tree: Tree) -> Tree:
            return tree_map(lambda leaf: torch.from_numpy(leaf).to(self.device), tree)

        self._obs_tensor = on_device(self._obs)
        self._following = tree_map(torch.zeros_like, tree_index(self._obs_tensor, slice(self.n_steps)))
        """Observations after each step; final observations where it ended an episode."""
        self._next_tensor = self._following if len(self._next_obs) else ()
        self._mask_tensor = on_device(self._masks)
        self._rewards, self._marks = on_device(self._reward), on_device(self._flags)
        self._is_checked = False
        self._steps: Callable[..., Steps] = self.make_steps
        envs: Any = self.envs
        env_device, can_be_recorded = torch.device(envs.device), getattr(type(envs), "can_be_recorded", False)
        same_device = self.device.type == env_device.type == "cuda" and env_device.index in (None, self.device.index)
        if cuda_graph and same_device and can_be_recorded and self.exploration is None and is_known(network):
            generators = [self.generator, *filter(None, [getattr(envs, "generator", None)])]
            watch = partial(fixed_parts, network, envs)
            self._steps = CudaGraph(f"a rollout of {self.name}", self.make_steps, self.device, generators, watch)

    @torch.no_grad()
    def unroll(self) -> Unroll:
        """Step `n_steps` times, continuing from the last rollout. Return tensors on the device."""
        if self._current is None:
            self.reset()
        elif self._restarts:
            self.reset(seeded=False)
            self.statistics.forget()
            self._restarts = False
        self.statistics.finished.clear()
        obs, start, mask, memory = tree_to_torch((self._current, self._start, self._mask, self._memory), self.device)
        if not self._is_checked:
            check_tree(self.name, "observations", obs, tree_index(self._obs_tensor, 0))
        resetting = torch.from_numpy(self.stepper.resetting).to(self.device)  # type: ignore[union-attr]
        steps = self._steps(obs, start, mask, memory, resetting)
        now: Any = steps[:4]  # tensors, which `get_state` turns into arrays
        self._current, self._start, self._mask, self._memory = now
        ends = self._read_back(steps)
        seen, memories = self.rollout(), tree_stack(steps.memories)
        flags = seen.terminated, seen.truncated, seen.valid, self._marks["start"]
        return Unroll(self._obs_tensor, steps.actions, (), seen.reward, *flags, seen.action_mask, memories, seen.next_obs, ends)

    def make_steps(self, obs: Tree, start: Tensor, mask: Tree, memory: Tree, resetting: Tensor) -> Steps:
        """Step `n_steps` times without reading any value on the host. Arguments as in `Steps`."""
        marks, taken, memories, after, reports, has_final = self._marks, [], [], [], [], []
        for t in range(self.n_steps):
            put(self._obs_tensor, t, obs)
            put(self._mask_tensor, t, mask)
            marks["start"][t] = start
            if t % self.network.memory.sequence_length == 0:
                memories.append(memory)
            with nullcontext() if self.exploration is None else self.exploration.step(), self.context():
                seen, allowed = tree_index(self._obs_tensor, t), tree_index(self._mask_tensor, t)
                action, memory = self.network.sample(seen, memory, start, allowed, generator=self.generator)
            taken.append(action)
            sent = tree_map(lambda leaf: leaf.to(self.envs.device), self.network.distribution.to_env(action))
            try:
                result = self.envs.step(sent)
            except BaseException as error:
                keep_running(error, self.name)
                raise
            if not self._is_checked:
                check_step(self.name, result, seen, self.num_envs)
                self._is_checked = True
            obs, reward, terminated, truncated, info = result
            reward = reward.to(self.device)
            terminated, truncated = terminated.to(self.device, torch.bool), truncated.to(self.device, torch.bool)
            valid = ~resetting
            terminated, truncated = terminated & valid, truncated & ~terminated & valid
            ended = terminated | truncated
            final = info.get("final_obs") if not self.resets_late else obs
            has_final.append(final is not None)
            self._rewards[t] = reward
            marks["terminated"][t], marks["truncated"][t], marks["valid"][t] = terminated, truncated, valid
            put(self._following, t, obs if final is None else tree_map(partial(choose, ended), final, obs))
            reports.append({name: info[name].clone() for name in SUCCESS if name in info})  # cloned, as environments may overwrite them
            after.append(memory)
            start, resetting = (resetting, ended) if self.resets_late else (ended, resetting)
            mask = self._read_mask(info, terminated)
        put(self._obs_tensor, self.n_steps, obs)
        marks["start"][self.n_steps] = start
        notes = tuple(memories), tuple(after), tuple(reports), tuple(has_final)
        return Steps(obs, start, mask, memory, resetting, tree_stack(taken), *notes)

    def _read_mask(self, info: Info, terminated: Tensor) -> Tree:
        """Return the mask of the next actions, `[N, M]`, all true where no action counts. Raises `SettingError`: the mask is missing."""
        if not len(self._mask_tensor):
            self.stepper.masks.split((), info)  # type: ignore[union-attr]  # raises if there is a mask
            return ()
        if not isinstance(info.get(MASK), Tensor):
            raise SettingError(f'{self.name} runs on a device and masks actions: each step needs info["{MASK}"], a tensor')
        mask = info[MASK].to(self.device).flatten(1).bool()
        if mask.shape != self._mask_tensor.shape[1:]:
            raise SettingError(f'{self.name}: info["{MASK}"] must be {list(self._mask_tensor.shape[1:])}, got {list(mask.shape)}')
        return mask | terminated.unsqueeze(-1) if self.resets_late else mask

    def _read_back(self, steps: Steps) -> Ends:
        """Count steps and episodes, check all values, and return the final observations whose value is needed."""
        reward = self._rewards.cpu().numpy()
        terminated, truncated, valid = (self._marks[name][:-1].cpu().numpy() for name in ("terminated", "truncated", "valid"))
        self._check_values(reward)
        for allowed in self._mask_tensor.cpu().numpy() if len(self._mask_tensor) else ():
            self.stepper.masks.batch(allowed, self.num_envs)  # type: ignore[union-attr]
        over, nothing = terminated | truncated, np.zeros(0)
        for t in range(self.n_steps):
            ended = np.flatnonzero(over[t])
            if len(ended) and not steps.has_final[t]:
                raise SettingError(f'{self.name} ended an episode without info["final_obs"], its last observations')
            info = on_host(steps.reports[t]) if len(ended) else {}
            self.statistics.update(EnvStep(nothing, reward[t], terminated[t], truncated[t], valid[t], nothing, ended, None, info))
        self.rows += reward.size
        self.env_steps += int(np.count_nonzero(valid))
        self.stepper.resetting = steps.resetting.cpu().numpy()  # type: ignore[union-attr]
        step, env = np.nonzero(over if len(self._next_obs) else truncated)
        if not len(step):
            return NO_ENDS
        memory: Tree = ()
        if len(steps.after[0]):
            memory = tree_map(lambda *leaves: torch.cat(leaves), *(tree_index(steps.after[t], env[step == t]) for t in np.unique(step)))
        return Ends(step, env, tree_index(self._following, (step, env)), memory)

    def _check_values(self, reward: np.ndarray) -> None:
        """Raise `NotFiniteError`, on all ranks, unless all observations and rewards of the iteration are finite."""
        leaves = [leaf for leaf in tree_leaves((self._obs_tensor, self._following)) if leaf.is_floating_point()]
        if bool(torch.stack([leaf.isfinite().all() for leaf in (*leaves, self._rewards)]).all()):
            return
        problem, everywhere = None, range(self.num_envs)
        for t in range(self.n_steps):
            following, obs = (tree_to_numpy(tree_index(tree, at)) for tree, at in ((self._following, t), (self._obs_tensor, t + 1)))
            problem = first_bad("reward", reward[t], everywhere) or first_bad("observation", following, everywhere)
            problem = problem or first_bad("observation", obs, everywhere)
            if problem is not None:
                break
        batch = {"obs": tree_index(self._obs_tensor, t), "reward": reward[t], "next_obs": following}
        self.guard.stop(f"{problem} at environment step {self.env_steps + (t + 1) * self.num_envs:,}", batch)


def put(rows: Tree, t: int, new: Tree) -> None:
    """Write the values of step t."""
    tree_map(lambda leaf, value: leaf[t].copy_(value), rows, new)


def choose(which: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the rows of `one` where `which [N]` is true, and of `other` elsewhere."""
    return torch.where(which.to(one.device).view(-1, *[1] * (one.dim() - 1)), one, other)


def check_step(name: str, result: object, before: Tree, num_envs: int) -> None:
    """Raise `SettingError` unless the result of a step follows `envs/tensors.py`, with observations shaped like those before."""
    if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
        raise SettingError(f"{name}.step must return observations, rewards, terminations, truncations and an info")
    obs, *rows, info = result
    for what, value in zip(("rewards", "terminations", "truncations"), rows, strict=True):
        check_tensor(name, what, value, (num_envs,))
    for what in set(SUCCESS) & info.keys():
        check_tensor(name, f'info["{what}"]', info[what], (num_envs,))
    check_tree(name, "observations", obs, before)
    if "final_obs" in info:
        check_tree(name, 'info["final_obs"]', info["final_obs"], before)


def check_tree(name: str, what: str, given: Tree, known: Tree) -> None:
    """Raise `SettingError` unless a tree has leaves of the same shapes as a known one."""
    try:
        tree_map(lambda leaf, value: check_tensor(name, what, value, leaf.shape), known, given)
    except ValueError as error:
        raise SettingError(f"{name}: {what}: {error}") from error


def check_tensor(name: str, what: str, value: object, shape: Sequence[int]) -> None:
    """Raise `SettingError` unless a value is a tensor of this shape."""
    if not isinstance(value, Tensor) or value.shape != tuple(shape):
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise SettingError(f"{name} runs on a device: {what} must be a tensor {list(shape)}, got {got}")


def is_known(network: ActingNetwork) -> bool:
    """Return whether all parts of a network are from this package or torch: how other modules branch in Python is unknown."""
    return all(type(part).__module__.partition(".")[0] in ("lightning_rl", "torch") for part in network.modules())


def fixed_parts(network: Any, envs: object) -> object:
    """Return what a recording depends on in a network and environments: addresses of tensors, types of parts, and plain attributes."""
    parts = [(type(part), vars(part)) for part in (*network.modules(), envs)]
    attributes = [(kind, {name: value for name, value in values.items() if is_plain(value)}) for kind, values in parts]
    return [tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())], attributes


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a string, None, or a tuple of these."""
    return all(map(is_plain, value)) if isinstance(value, tuple) else value is None or isinstance(value, int | float | str)
