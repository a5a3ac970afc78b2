"""Vector environments on a device, which take and return tensors. CartPole and Pendulum in torch are the smallest examples.

These environments are a `gymnasium.vector.VectorEnv` with an attribute `device`. Observations are trees of tensors `[N, ...]`; rewards,
terminations and truncations are tensors `[N]`; the metadata name the autoreset mode, SAME_STEP or NEXT_STEP. In SAME_STEP, the info of a
step that ended an episode has `final_obs [N, ...]`, of which only the rows of copies that ended count. The mask of the next actions is
`info["action_mask"]`. The mask of actions at `final_obs` is `info["final_action_mask"]`; only replay and random steps read it.

On a GPU the steps of a rollout become one CUDA graph if the class sets `can_be_recorded = True`. Its `step` must then never wait for the
device, write its state into the same tensors each time, branch in Python only on plain attributes that do not change during a rollout, and
draw random numbers only from its attribute `generator`.

`Torch/CartPole-v1` and `Torch/Pendulum-v1` hold thousands of copies in one tensor; a single copy, as for evaluation, is gymnasium's own
environment.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from torch import Generator, Tensor

from lightning_rl.spaces import MASK
from lightning_rl.types import Info, Options, State, Tree, tree_map, tree_to_numpy

FINAL_MASK = "final_action_mask"


def gives_tensors(envs: VectorEnv) -> bool:
    """Return whether a vector environment takes and returns tensors."""
    return hasattr(envs, "device") and not isinstance(envs, HostView)


class HostView(VectorWrapper):
    """Shows environments on a device with NumPy arrays, for code that runs on the host. `env` is the environment on the device."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.target: torch.device | str = env.device  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return tree_to_numpy(obs), on_host(info)

    def step(self, actions: Tree) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray, Info]:
        taken = tree_map(lambda leaf: torch.as_tensor(np.ascontiguousarray(leaf), device=self.target), actions)
        obs, reward, terminated, truncated, info = self.env.step(taken)
        info = on_host(info)
        if FINAL_MASK in info:  # where gymnasium puts it
            info["final_info"] = {**info, MASK: info[FINAL_MASK]}
        return *tree_to_numpy((obs, reward, terminated, truncated)), info


def on_host(info: Tree) -> Tree:
    """Convert the tensors of an info to arrays."""
    if isinstance(info, dict):
        return {key: on_host(value) for key, value in info.items()}
    if isinstance(info, tuple):
        return tuple(map(on_host, info))
    return info.detach().cpu().numpy() if isinstance(info, Tensor) else info


PREFIX = "Torch/"
"""Prefix of the ids of these environments."""


class TorchControl(VectorEnv):
    """N copies of an environment with their states in one float64 tensor `[N, D]`. The step that ends an episode starts the next one.

    In a step the host never waits for a value of the device: first states are drawn for all copies in every step. A step writes its results
    into the same tensors each time, so that a CUDA graph can replay it.

    Args:
        num_envs: N.
        max_episode_steps: number of steps after which an episode is truncated.
        device: device of all tensors that it takes and returns; `auto`: a GPU if there is one.
    """

    single: type[gym.Env]
    """gymnasium's environment with the same dynamics."""
    bounds: tuple[Sequence[float], Sequence[float]]
    """Lower and upper bounds of first states."""
    can_be_recorded = True

    def __init__(self, num_envs: int, max_episode_steps: int, device: str | torch.device = "auto") -> None:
        one = self.single()
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.generator = Generator(self.device)
        self.generator.seed()  # else all generators draw the same numbers until the first seeded reset
        self.low, self.high = (torch.tensor(bound, dtype=torch.float64, device=self.device) for bound in self.bounds)
        self.state = self.low.repeat(num_envs, 1)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tensor, Info]:
        """Start an episode in all copies, drawn from one generator. Return the first observations `[N, ...]`."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state.copy_(self.first_states())
        self.steps.zero_()
        return self.observe(self.state), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Info]:
        """Step all copies. Return the next observations, rewards and flags `[N]`, and in the info `final_obs [N, ...]`, before resets."""
        state, reward, terminated = self.move(self.state, action.to(self.device))
        self.steps += 1
        truncated = (self.steps >= self.max_episode_steps) & ~terminated
        ended = terminated | truncated
        final = self.observe(state)
        self.state.copy_(torch.where(ended.unsqueeze(-1), self.first_states(), state))
        self.steps *= ~ended
        return self.observe(self.state), reward, terminated, truncated, {"final_obs": final}

    def first_states(self) -> Tensor:
        """Draw the first state of an episode for each copy, `[N, D]`, uniformly between the bounds."""
        draws = torch.rand(self.state.shape, dtype=torch.float64, device=self.device, generator=self.generator)
        return self.low + (self.high - self.low) * draws

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states, rewards `[N]` of float32, and whether they are terminal `[N]`."""
        raise NotImplementedError

    def observe(self, state: Tensor) -> Tensor:
        """Return the observations of states, float32."""
        return state.float()

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as arrays."""
        return {name: getattr(self, name).cpu().numpy().copy() for name in ("state", "steps")} | {
            "generator": self.generator.get_state().numpy().copy()
        }

    def set_state(self, state: State) -> None:
        """Restore a state of `get_state`."""
        for name in ("state", "steps"):
            getattr(self, name).copy_(torch.from_numpy(np.array(state[name])))
        self.generator.set_state(torch.from_numpy(np.array(state["generator"])))


class TorchCartPole(TorchControl):
    """`CartPole-v1` (Barto, Sutton and Anderson 1983): states are x, ẋ, θ, θ̇."""

    single, bounds = CartPoleEnv, ([-0.05] * 4, [0.05] * 4)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, speed, angle, turn = state.unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        push = (action * 20.0 - 10.0 + 0.05 * turn.square() * sin) / 1.1
        turned = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        pushed = push - 0.05 * turned * cos / 1.1
        rates = torch.stack([speed, pushed, turn, turned], -1)
        state = state + 0.02 * rates
        terminated = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * 2 * math.pi / 360)
        return state, torch.ones_like(position, dtype=torch.float32), terminated


class TorchPendulum(TorchControl):
    """`Pendulum-v1`: states are θ, θ̇."""

    single, bounds = PendulumEnv, ([-math.pi, -1.0], [math.pi, 1.0])

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(-1)
        torque = action[:, 0].double().clamp(-2.0, 2.0)
        upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        return torch.stack([angle + speed * 0.05, speed], -1), -cost.float(), torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), speed], -1).float()


def single_cart_pole(device: str = "auto", **arguments: Any) -> gym.Env:
    """Build gymnasium's own environment, which does not use `device`."""
    return CartPoleEnv(**arguments)


def single_pendulum(device: str = "auto", **arguments: Any) -> gym.Env:
    """Build gymnasium's own environment, which does not use `device`."""
    return PendulumEnv(**arguments)


def register_torch_control() -> None:
    """Register the ids that are not registered yet."""
    environments = {
        "CartPole-v1": (single_cart_pole, TorchCartPole, 500),
        "Pendulum-v1": (single_pendulum, TorchPendulum, 200),
    }
    for name, (single, copies, limit) in environments.items():
        if PREFIX + name not in gym.registry:
            entries = f"{__name__}:{single.__name__}", f"{__name__}:{copies.__name__}"
            gym.register(PREFIX + name, entries[0], vector_entry_point=entries[1], max_episode_steps=limit)
