"""Steps a vector environment with a policy and keeps what happened."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.distributions import Distribution
from lightning_rl.envs.stepping import EnvStep, Stepper
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import Rollout, Tree, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch


class ActingNetwork(Protocol):
    """What the collector asks of a network, see `networks/actor_critic.py`."""

    distribution: Distribution
    memory: Any

    def sample(
        self, obs: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree, *, generator: Generator
    ) -> tuple[Tree, Tree]: ...

    def evaluate(
        self, obs: Tree, action: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def value(self, obs: Tree, memory: Tree, episode_start: Tensor | None) -> Tensor: ...


class EpisodeStatistics:
    """Returns, lengths and successes of the last 100 episodes, as the environment pays them."""

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.running_return = np.zeros(num_envs)
        self.running_length = np.zeros(num_envs, dtype=np.int64)
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.successes: deque[float] = deque(maxlen=window)
        self.episodes = 0

    def update(self, step: EnvStep) -> None:
        """Add one step of all environments."""
        self.running_return += step.reward
        self.running_length += step.valid
        if not len(step.ended):
            return
        success = step.info.get("is_success", step.info.get("success"))
        for i in step.ended:
            self.returns.append(float(self.running_return[i]))
            self.lengths.append(int(self.running_length[i]))
            if success is not None:
                self.successes.append(float(success[i]))
        self.episodes += len(step.ended)
        self.running_return[step.ended] = 0.0
        self.running_length[step.ended] = 0

    def metrics(self) -> dict[str, float]:
        """Means over the window, under Stable-Baselines3's names; empty before the first episode ends."""
        windows = {"ep_rew_mean": self.returns, "ep_len_mean": self.lengths, "success_rate": self.successes}
        return {f"rollout/{name}": float(np.mean(window)) for name, window in windows.items() if window}


class Collector:
    """Collects rollouts of `n_steps` steps from N environments.

    The rollout's tensors on the CPU share memory with the collector's arrays: use one before collecting the next.

    Args:
        stepper: the environments.
        spaces: of one of them.
        network: the policy, asked with its newest weights at every step.
        n_steps: T.
        seed: of the environments and of the policy's draws.
    """

    def __init__(self, stepper: Stepper, spaces: Spaces, network: ActingNetwork, n_steps: int, seed: int) -> None:
        self.stepper, self.network, self.n_steps, self.seed = stepper, network, n_steps, seed
        num_envs = stepper.num_envs
        self.statistics = EpisodeStatistics(num_envs)
        self.env_steps = 0
        self._space = spaces.observation
        self._obs = allocate(self._space, n_steps + 1, num_envs)
        self._obs_tensor = tree_to_torch(self._obs)
        self._reward = np.zeros((n_steps, num_envs), dtype=np.float32)
        self._flags = {name: np.zeros((n_steps, num_envs), dtype=bool) for name in ("terminated", "truncated", "valid", "start")}
        self._memory: Tree = ()
        self._start = np.ones(num_envs, dtype=bool)
        self._generator: Generator | None = None
        self._current: Tree = None

    def reset(self) -> None:
        """Start an episode in all environments."""
        self._current = self.stepper.reset(self.seed)
        self._memory = self.network.memory.initial(self.stepper.num_envs)
        self._start = np.ones(self.stepper.num_envs, dtype=bool)

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Step `n_steps` times from where the last rollout ended. The first call resets the environments."""
        network, device = self.network, next(self.network.parameters()).device  # type: ignore[attr-defined]
        if self._generator is None:
            self._generator = Generator(device).manual_seed(self.seed)
        if self._current is None:
            self.reset()
        memory = self._memory
        actions, truncations = [], []
        for t in range(self.n_steps):
            self._flags["start"][t] = self._start
            obs = self._observe(t, self._current, device)
            start = torch.as_tensor(self._start, device=device)
            action, after = network.sample(obs, self._memory, start, (), generator=self._generator)
            step = self.stepper.step(network.distribution.to_env(tree_to_numpy(action)))
            self._record(t, step)
            actions.append(action)
            truncated = np.flatnonzero(step.truncated)
            if len(truncated):
                rows = np.searchsorted(step.ended, truncated)
                truncations.append((t, truncated, tree_index(step.final_obs, rows), tree_index(after, truncated)))
            self._memory = after
        return self._rollout(tree_stack(actions), memory, truncations, device)

    def random_steps(self, count: int) -> Tree:
        """Observations `[>= count, ...]` of a policy that knows nothing; the next rollout starts new episodes."""
        generator = Generator().manual_seed(self.seed)
        x = torch.zeros(self.stepper.num_envs, self.network.distribution.num_inputs)
        distribution = self.network.distribution
        device = next(self.network.parameters()).device  # type: ignore[attr-defined]
        current, rows, end = self.stepper.reset(self.seed), [], self.env_steps + count
        while self.env_steps < end:
            row = self._observe(0, current, torch.device("cpu"))
            action = distribution.sample(x.to(device), (), None if device.type != "cpu" else generator)
            step = self.stepper.step(distribution.to_env(tree_to_numpy(action)))
            rows.append(tree_index(row, torch.from_numpy(step.valid)))
            current = step.obs
            self.env_steps += int(step.valid.sum())
        self._current = None
        return tree_map(lambda *leaves: torch.cat(leaves), *rows)

    def close(self) -> None:
        """Close the environments."""
        self.stepper.close()

    def _observe(self, t: int, obs: Tree, device: torch.device) -> Tree:
        """Write observations into row t, and return that row as tensors."""
        tree_map(_assign, tree_index(self._obs, t), obs)
        row = tree_index(self._obs_tensor, t)
        return row if device.type == "cpu" else tree_map(lambda leaf: leaf.to(device), row)

    def _record(self, t: int, step: EnvStep) -> None:
        self._reward[t] = step.reward
        self._flags["terminated"][t], self._flags["truncated"][t], self._flags["valid"][t] = step.terminated, step.truncated, step.valid
        self._start = step.episode_start
        self._current = step.obs
        self.env_steps += int(step.valid.sum())
        self.statistics.update(step)

    def _rollout(self, action: Tree, memory: Tree, truncations: list[Any], device: torch.device) -> Rollout:
        """Judge the rollout: log-probabilities and values of all rows at once, with the weights that acted."""
        network = self.network
        last = self._observe(self.n_steps, self._current, device)
        obs = tree_map(lambda leaf: leaf[:-1], self._obs_tensor)
        start = torch.from_numpy(self._flags["start"])
        log_prob, _, value = network.evaluate(
            tree_map(lambda leaf: leaf.to(device), obs), action, memory, start.to(device), ()
        )
        last_value = network.value(last, self._memory, torch.as_tensor(self._start, device=device))
        next_value = torch.cat([value[1:], last_value.unsqueeze(0)])
        for t, envs, final_obs, after in truncations:
            final = tree_map(_assign, allocate(self._space, len(envs)), final_obs)
            next_value[t, envs] = network.value(tree_to_torch(final, device), after, torch.zeros(len(envs), dtype=torch.bool))
        return Rollout(
            obs,
            action,
            log_prob,
            torch.from_numpy(self._reward).unsqueeze(-1),
            value,
            next_value,
            *(torch.from_numpy(self._flags[name]) for name in ("terminated", "truncated", "valid", "start")),
            action_mask=(),
            memory=memory,
        )


def _assign(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Copy into storage, with its dtype."""
    target[...] = source
    return target
