"""Batched NumPy steps for gymnasium's classic control environments, bit-identical to the original classes.

Each copy remains a gymnasium environment, which draws first states, holds the physical constants, and is what checkpoints save. The steps
are computed here, with the same operations in the same order, on the states of all copies. Values are computed one by one only where
array operations round differently: for powers and in place of `math.cos`. Copies that a user changes during a run are read again, or
stepped one by one if a method was replaced.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import AcrobotEnv, CartPoleEnv, Continuous_MountainCarEnv, MountainCarEnv, PendulumEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from lightning_rl.envs.sync import TurnVectorEnv, name_of
from lightning_rl.types import Info, Options, Tree

ELAPSED, LIMIT = "_elapsed_steps", "_max_episode_steps"
"""Private attributes of gymnasium's `TimeLimit`: the steps of the episode so far, and the maximum."""
STEPS_BETWEEN_CHECKS = 32
"""Steps after which copies are compared with what was read from them, if no iteration begins before."""
COPIES_PER_CHECK = 32
"""Number of copies that are compared at a time; of more copies, the next ones are compared the next time."""


class ClassicControlEnvs(TurnVectorEnv):
    """Steps copies of an environment whose class is in `PHYSICS` as one batch. Actions must have the dtype of their space.

    Copies whose methods were replaced since they were built are stepped one by one.
    """

    physics: "Physics | None" = None
    """None before the first reset, and while copies are stepped one by one."""

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns)
        self.timers = list(self.envs)
        self.cores: list[Any] = [env.unwrapped for env in self.envs]
        self.limits = np.zeros(self.num_envs, dtype=np.int64)
        self.notices: list[str] = []
        """Lines for the user. The caller that prints them clears the list."""
        self.in_turn = False
        """Whether copies are stepped one by one."""
        self.read: attrgetter[Any] = attrgetter(*names_read(type(self.cores[0])))
        self.found: list[Any] = []
        """What was read from each copy, to find changes."""
        self.unchecked = 0
        """The first copy to look at for changes."""
        self.next_check = 0
        """The first value of `clock` at which to look for changes. Collectors set it to 0 when an iteration begins."""
        self.clock = 0
        """Number of steps so far; `begun` holds its value at the start of each copy's episode."""
        self.begun = np.zeros(self.num_envs, dtype=np.int64)
        self.next_limit = 0
        """The first value of `clock` at which an episode can reach its limit."""
        self.not_truncated = constant(self.num_envs, False)

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, infos = super().reset(seed=seed, options=options)
        self.load_states()
        return obs, infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments. Return the same as `TurnVectorEnv`; some of the arrays are read-only."""
        if self.clock >= self.next_check and self.physics is not None:  # inline: this runs in each iteration
            self.next_check = self.clock + STEPS_BETWEEN_CHECKS
            first, last = self.unchecked, self.unchecked + COPIES_PER_CHECK
            self.unchecked = last if last < self.num_envs else 0
            try:
                is_same = self.found[first:last] == [*map(self.read, self.envs[first:last])]
            except (AttributeError, ValueError):  # another wrapper, or an array in place of a number
                is_same = False
            if not is_same:
                self.store_states()
                self.load_states()
        if self.physics is None:
            return super().step(actions)
        rewards, terminated = self.physics.step(actions, self.stacked)
        self.clock += 1
        truncated = self._truncate() if self.clock >= self.next_limit else self.not_truncated
        over = terminated if truncated is self.not_truncated else terminated | truncated
        infos = self._begin_next(self.physics, over) if np.count_nonzero(over) else {}
        return self.stacked, rewards, terminated, truncated, infos

    def _truncate(self) -> np.ndarray:
        """Return which episodes reach their limit, and update `next_limit`."""
        truncated = self.clock - self.begun >= self.limits
        self.begun[truncated] = self.clock
        self.next_limit = int((self.begun + self.limits).min())
        return truncated

    def _begin_next(self, physics: "Physics", over: np.ndarray) -> Info:
        """Reset the copies whose episode is over. Return the infos of the ends."""
        final_obs = np.empty(self.num_envs, dtype=object)
        physics.first = over.nonzero()[0]
        for i in physics.first.tolist():
            final_obs[i] = self.stacked[i].copy()
            self.stacked[i], _ = self.cores[i].reset()
            physics.state[physics.rows, i] = self.cores[i].state
            self.begun[i] = self.clock
        return {"final_obs": final_obs, "_final_obs": over, "final_info": {}, "_final_info": over.copy()}

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[object, ...]:
        with self._up_to_date():
            return super().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: object) -> None:
        with self._up_to_date():
            super().set_attr(name, values)

    @contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Write the states into the copies, and read them back afterwards."""
        self.store_states()
        yield
        if self.physics is not None:
            self.load_states()

    def store_states(self) -> None:
        """Write the states into the copies. A copy at the start of an episode already has its state."""
        if self.physics is not None:
            for i, steps in enumerate((self.clock - self.begun).tolist()):
                setattr(self.timers[i], ELAPSED, steps)
                if steps:
                    self.cores[i].state = self.physics.native_state(self.physics.state[self.physics.rows, i].copy())

    def load_states(self) -> None:
        """Read states and constants from the copies, if their dynamics are implemented here."""
        if not all(map(is_known, self.envs)):
            if not self.in_turn:
                name = name_of(self.envs[0])
                self.notices.append(f"{name} was changed from outside: its copies are stepped one by one from now on, which is slower")
            self.physics, self.in_turn = None, True
            return
        self.timers, self.cores = list(self.envs), [env.unwrapped for env in self.envs]
        steps = np.array([getattr(env, ELAPSED) for env in self.envs])
        physics = PHYSICS[type(self.cores[0])]
        self.physics, self.in_turn = physics(self.cores, steps), False
        self.found = [(*physics.fixed.values(), *self.read(env)[len(physics.fixed) :]) for env in self.envs]  # lists may change in place
        self.limits = np.array([getattr(env, LIMIT) for env in self.envs])
        self.begun = self.clock - steps
        self.next_limit = int((self.begun + self.limits).min())


def should_step_at_once(env: gym.Env, num_envs: int) -> bool:
    """Return whether copies of an environment can be stepped as a batch, and are numerous enough for that to be faster.

    The environment must be one of gymnasium's own, wrapped in `OrderEnforcing` and `TimeLimit` and nothing else.
    """
    return env.render_mode is None and is_known(env) and num_envs >= PHYSICS[type(env.unwrapped)].pays_from


def is_known(env: gym.Env) -> bool:
    """Return whether the dynamics of an environment are implemented here: no method is replaced in it, its class, or its two wrappers."""
    if not (type(env) is TimeLimit and type(env.env) is OrderEnforcing and env.env.env is env.unwrapped):
        return False
    core = env.unwrapped
    physics = PHYSICS.get(type(core))
    if physics is None or not all(isinstance(getattr(core, name), int | float | np.generic) for name in physics.numbers.split()):
        return False
    fixed = ((getattr(core, name), value) for name, value in physics.fixed.items())
    if any(type(found) is not type(value) or found != value for found, value in fixed):
        return False
    parts = env, env.env, core
    return all(name not in vars(part) and is_own(type(part), name) for part in parts for name in METHODS[type(part)])


def is_own(kind: type, name: str) -> bool:
    """Return whether a class of gymnasium has the method that its module defines, and no other in its place."""
    method = vars(kind).get(name)
    if not isinstance(method, FunctionType) or method.__qualname__ != f"{kind.__qualname__}.{name}":
        return False
    return method.__code__.co_filename == sys.modules[kind.__module__].__file__


def names_read(kind: type) -> list[str]:
    """Return the paths from a copy of an environment of this class to all that its batch depends on, the fixed attributes first."""
    physics = PHYSICS[kind]
    core = [*physics.fixed, *physics.numbers.split(), "__class__", *METHODS[kind]]
    inner = ["env", "__class__", *METHODS[OrderEnforcing]]
    return [*(f"env.env.{name}" for name in core), *(f"env.{name}" for name in inner), "env", "__class__", LIMIT, *METHODS[TimeLimit]]


class ControlEnv(Protocol):
    """One of gymnasium's classic control environments, unwrapped."""

    @property
    def state(self) -> np.ndarray | tuple[float, ...] | None: ...


class Physics:
    """Dynamics of N copies of an environment.

    pays_from: the number of copies from which a batch is faster than a loop, as measured.
    numbers: names of all environment attributes to read; `env` holds them as arrays `[N]`.
    rows: the row of `state` for each entry of the environment's own state.
    fixed: attributes that must have these values.

    Args:
        envs: the copies.
        steps: `[N]`, the steps of their episodes so far.
    """

    pays_from = 4
    numbers = ""
    rows: slice | np.ndarray = slice(None)
    fixed: ClassVar[dict[str, object]] = {}

    def __init__(self, envs: Sequence[ControlEnv], steps: np.ndarray) -> None:
        self.env = SimpleNamespace(**{name: np.array([float(getattr(env, name)) for env in envs]) for name in self.numbers.split()})
        states = np.array([env.state for env in envs], dtype=np.float64).T
        self.state = np.empty_like(states, order="C")
        """`[S, N]`"""
        self.state[self.rows] = states
        self.first = np.flatnonzero(steps == 0)
        """Indices of the copies at the start of an episode; `step` may clear them."""
        self.not_terminated = constant(len(envs), False)

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step all copies and write their observations `[N, F]`. Return rewards `[N]` and terminated `[N]`."""
        raise NotImplementedError

    def native_state(self, state: np.ndarray) -> np.ndarray | tuple[float, ...]:
        """Return the state of one copy in the environment's own format."""
        return state


class CartPole(Physics):
    """A pole on a cart."""

    numbers = "force_mag gravity length masspole total_mass polemass_length tau x_threshold theta_threshold_radians _sutton_barto_reward"
    rows = np.array([0, 2, 1, 3])  # positions above velocities
    fixed: ClassVar[dict[str, object]] = {"kinematics_integrator": "euler"}
    directions = np.array([-1.0, 1.0])

    def __init__(self, envs: Sequence[ControlEnv], steps: np.ndarray) -> None:
        super().__init__(envs, steps)
        self.positions, self.velocities, self.accelerations = self.state[:2], self.state[2:], np.empty((2, len(envs)))
        self.limits = np.array([self.env.x_threshold, self.env.theta_threshold_radians])
        self.tau = np.array([self.env.tau, self.env.tau])
        sutton_barto = self.env._sutton_barto_reward.astype(bool)
        self.ones = None if sutton_barto.any() else constant(len(envs), 1.0)
        self.pays, self.pays_at_end = np.where(sutton_barto, 0.0, 1.0), np.where(sutton_barto, -1.0, 1.0)

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        env, theta, theta_dot = self.env, self.positions[1], self.velocities[1]
        cos, sin = np.cos(theta), np.sin(theta)
        force = self.directions[action] * env.force_mag
        temp = (force + env.polemass_length * np.square(theta_dot) * sin) / env.total_mass
        inertia = env.length * (4.0 / 3.0 - env.masspole * np.square(cos) / env.total_mass)
        theta_acc = np.divide(env.gravity * sin - cos * temp, inertia, out=self.accelerations[1])
        np.subtract(temp, env.polemass_length * theta_acc * cos / env.total_mass, out=self.accelerations[0])
        self.positions += self.tau * self.velocities
        self.velocities += self.tau * self.accelerations
        beyond = np.abs(self.positions) > self.limits
        terminated = beyond[0] | beyond[1]
        obs[:, ::2], obs[:, 1::2] = self.positions.T, self.velocities.T
        return (np.where(terminated, self.pays_at_end, self.pays) if self.ones is None else self.ones), terminated


class Pendulum(Physics):
    """A pendulum to swing up."""

    numbers = "max_torque max_speed dt g m l"

    def __init__(self, envs: Sequence[PendulumEnv], steps: np.ndarray) -> None:
        super().__init__(envs, steps)
        self.gravity = np.array([3 * env.g / (2 * env.l) for env in envs])
        self.inertia = np.array([3.0 / (env.m * env.l**2) for env in envs], dtype=np.float32)  # rounded, as the torque is float32
        self.max_torque = self.env.max_torque.astype(np.float32)
        self.cost_terms = np.empty_like(self.state)

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        env, (theta, speed) = self.env, self.state
        torque = clip(action[:, 0], -self.max_torque, self.max_torque)
        self.cost_terms[0] = (theta + np.pi) % (2 * np.pi) - np.pi
        self.cost_terms[1] = speed
        angle2, speed2 = squares(self.cost_terms)
        costs = angle2 + 0.1 * speed2 + 0.001 * np.array([number**2 for number in torque])
        speed += (self.gravity * np.sin(theta) + self.inertia * torque) * env.dt
        clip(speed, -env.max_speed, env.max_speed, out=speed)
        theta += speed * env.dt
        obs[:, 0], obs[:, 1], obs[:, 2] = np.cos(theta), np.sin(theta), speed
        return -costs, self.not_terminated


class MountainCar(Physics):
    """A car in a valley, whose engine is too weak for the hill."""

    numbers = "force gravity max_speed min_position max_position goal_position goal_velocity"

    def __init__(self, envs: Sequence[ControlEnv], steps: np.ndarray) -> None:
        super().__init__(envs, steps)
        self.reward = constant(len(envs), -1.0)

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        env, (position, velocity) = self.env, self.state
        velocity += (action - 1) * env.force + cosines(3 * position) * -env.gravity
        clip(velocity, -env.max_speed, env.max_speed, out=velocity)
        position += velocity
        clip(position, env.min_position, env.max_position, out=position)
        velocity[(position == env.min_position) & (velocity < 0)] = 0
        obs[...] = self.state.T
        return self.reward, (position >= env.goal_position) & (velocity >= env.goal_velocity)

    def native_state(self, state: np.ndarray) -> tuple[float, ...]:
        return tuple(state)


class ContinuousMountainCar(Physics):
    """The same car with a continuous force. States are float32, except the first of an episode, and so is what is computed from them."""

    pays_from = 8
    numbers = "min_action max_action power max_speed min_position max_position goal_position goal_velocity"

    def __init__(self, envs: Sequence[ControlEnv], steps: np.ndarray) -> None:
        super().__init__(envs, steps)
        self.rounded = SimpleNamespace(**{name: number.astype(np.float32) for name, number in vars(self.env).items()})

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        action = action[:, 0]
        moved = self.state.astype(np.float32)
        terminated = self.drive(self.rounded, moved, action)
        if len(self.first):
            at_goal = self.drive(self.env, self.state, action)
            moved[:, self.first], terminated[self.first] = self.state[:, self.first], at_goal[self.first]
            self.first = self.first[:0]
        self.state[...] = moved
        obs[...] = moved.T
        return np.where(terminated, 100.0, 0.0) - np.square(action, dtype=np.float64) * 0.1, terminated

    def drive(self, env: SimpleNamespace, state: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Update states in place, in their dtype and that of the constants. Return which of them are at the goal."""
        position, velocity = state
        force = clip(action, self.rounded.min_action, self.rounded.max_action)
        slope = 0.0025 * cosines(3 * position)
        push = force * self.rounded.power - slope.astype(np.float32)
        if np.count_nonzero(beyond := force != action):  # clipped forces are Python floats (the bounds): not rounded
            bound = clip(action.astype(np.float64), self.env.min_action, self.env.max_action)
            push = np.where(beyond, (bound * self.env.power - slope).astype(state.dtype), push)
        velocity += push
        clip(velocity, -env.max_speed, env.max_speed, out=velocity)
        position += velocity
        clip(position, env.min_position, env.max_position, out=position)
        velocity[(position == env.min_position) & (velocity < 0)] = 0
        return (position >= env.goal_position) & (velocity >= env.goal_velocity)

    def native_state(self, state: np.ndarray) -> np.ndarray:
        return state.astype(np.float32)


class Acrobot(Physics):
    """Two links; the goal is to swing the tip of the lower one above a line."""

    numbers = "dt LINK_LENGTH_1 LINK_MASS_1 LINK_MASS_2 LINK_COM_POS_1 LINK_COM_POS_2 LINK_MOI MAX_VEL_1 MAX_VEL_2"
    fixed: ClassVar[dict[str, object]] = {"book_or_nips": "book", "torque_noise_max": 0.0, "AVAIL_TORQUE": [-1.0, 0.0, 1.0]}
    torques = np.array([-1.0, 0.0, 1.0])

    def __init__(self, envs: Sequence[ControlEnv], steps: np.ndarray) -> None:
        super().__init__(envs, steps)
        env, dt = self.env, np.tile(self.env.dt, (4, 1))
        self.dt, self.half, self.sixth = dt, dt / 2.0, dt / 6.0
        mass1, mass2, length = env.LINK_MASS_1, env.LINK_MASS_2, env.LINK_LENGTH_1
        centre1, centre2 = env.LINK_COM_POS_1, env.LINK_COM_POS_2
        self.inertia1, self.inertia2 = mass1 * squares(centre1), mass2 * squares(centre2) + env.LINK_MOI
        self.lengths, self.length2 = squares(length) + squares(centre2), squares(centre2)
        self.coupling, self.lever = 2 * length * centre2, length * centre2
        self.gravity1, self.gravity2 = (mass1 * centre1 + mass2 * length) * 9.8, mass2 * centre2 * 9.8
        self.swing = mass2 * length * centre2

    def step(self, action: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Integrate by the Runge-Kutta method of fourth order."""
        env, state, torque = self.env, self.state, self.torques[action]
        k1 = self.derivative(state, torque)
        k2 = self.derivative(state + self.half * k1, torque)
        k3 = self.derivative(state + self.half * k2, torque)
        k4 = self.derivative(state + self.dt * k3, torque)
        state += self.sixth * (k1 + 2 * k2 + 2 * k3 + k4)
        angles, (theta1, theta2, speed1, speed2) = state[:2], state
        while np.count_nonzero(above := angles > np.pi):
            angles[above] -= 2 * np.pi
        while np.count_nonzero(below := angles < -np.pi):
            angles[below] += 2 * np.pi
        clip(speed1, -env.MAX_VEL_1, env.MAX_VEL_1, out=speed1)
        clip(speed2, -env.MAX_VEL_2, env.MAX_VEL_2, out=speed2)
        cos1 = np.cos(theta1)
        obs[:, 0], obs[:, 1], obs[:, 2], obs[:, 3] = cos1, np.sin(theta1), np.cos(theta2), np.sin(theta2)
        obs[:, 4:] = state[2:].T
        terminated = -cos1 - np.cos(theta2 + theta1) > 1.0
        return np.where(terminated, 0.0, -1.0), terminated

    def derivative(self, state: np.ndarray, torque: np.ndarray) -> np.ndarray:
        """Return the time derivative of states."""
        theta1, theta2, speed1, speed2 = state
        cos2, sin2 = np.cos(theta2), np.sin(theta2)
        square1, square2 = squares(state[2:])
        d1 = self.inertia1 + self.env.LINK_MASS_2 * (self.lengths + self.coupling * cos2) + self.env.LINK_MOI + self.env.LINK_MOI
        d2 = self.env.LINK_MASS_2 * (self.length2 + self.lever * cos2) + self.env.LINK_MOI
        phi2 = self.gravity2 * np.cos(theta1 + theta2 - np.pi / 2.0)
        phi1 = -self.swing * square2 * sin2 - 2 * self.swing * speed2 * speed1 * sin2 + self.gravity1 * np.cos(theta1 - np.pi / 2) + phi2
        change = np.empty_like(state)
        change[:2] = state[2:]
        change[3] = (torque + d2 / d1 * phi1 - self.swing * square1 * sin2 - phi2) / (self.inertia2 - squares(d2) / d1)
        change[2] = -(d2 * change[3] + phi1) / d1
        return change


PHYSICS: dict[type, type[Physics]] = {
    CartPoleEnv: CartPole,
    PendulumEnv: Pendulum,
    MountainCarEnv: MountainCar,
    Continuous_MountainCarEnv: ContinuousMountainCar,
    AcrobotEnv: Acrobot,
}
METHODS: dict[type, list[str]] = {
    kind: sorted({"step", "reset"}.union(name for name, value in vars(kind).items() if callable(value)) - {"__init__", "render", "close"})
    for kind in PHYSICS
}
METHODS |= {kind: ["step", "reset"] for kind in (TimeLimit, OrderEnforcing)}
"""Names of the methods of gymnasium on which steps and resets depend."""


def constant(count: int, value: float) -> np.ndarray:
    """Return a read-only array `[count]` filled with a value, which every step can return."""
    array = np.full(count, value)
    array.flags.writeable = False
    return array


def clip(x: np.ndarray, low: np.ndarray, high: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Clip small arrays in a third of the time of `np.clip`."""
    return np.minimum(np.maximum(x, low, out=out), high, out=out)


def squares(x: np.ndarray) -> np.ndarray:
    """Compute `x ** 2` on Python floats: for arrays NumPy computes x * x, which may differ in the last bit."""
    return np.array([number**2 for number in x.ravel().tolist()]).reshape(x.shape)


def cosines(x: np.ndarray) -> np.ndarray:
    """Compute cosines with `math.cos`: NumPy's may differ in the last bit on processors with SIMD instructions."""
    return np.array([math.cos(number) for number in x.tolist()])
