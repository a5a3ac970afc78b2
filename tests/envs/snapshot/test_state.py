"""Environments that are saved and restored continue as if they had never stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.snapshot.state import MAX_TRIAL_SECONDS
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from tests.environments import Scripted, Step
from tests.envs.continuing import is_continued, leaves, rows, saved

MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")
WAYS = [(vectorization, mode) for vectorization in ("sync", "async") for mode in MODES]
ENVIRONMENTS = {
    "CartPole": EnvConfig("CartPole-v1"),
    "Pendulum": EnvConfig("Pendulum-v1", max_episode_steps=30),
    "MountainCar": EnvConfig("MountainCar-v0", max_episode_steps=30, frame_stack=3),
    "FrozenLake": EnvConfig("FrozenLake-v1"),
    "CliffWalking with statistics": EnvConfig("CliffWalking-v1", max_episode_steps=30, wrappers=["RecordEpisodeStatistics"]),
    "normalized": EnvConfig("Pendulum-v1", max_episode_steps=30, wrappers=["tests.environments.Standardized"]),
    "LunarLander": EnvConfig("LunarLander-v3"),
    "HalfCheetah": EnvConfig("HalfCheetah-v5", max_episode_steps=30),
    "Ant": EnvConfig("Ant-v5", max_episode_steps=40),
    "Hopper": EnvConfig("Hopper-v5"),
    "MinAtar": EnvConfig("MinAtar/Breakout-v1"),
    "MiniGrid": EnvConfig("MiniGrid-MemoryS7-v0", max_episode_steps=30, wrappers=["minigrid.wrappers.ImgObsWrapper"]),
    "Memory1D": EnvConfig("lightning_rl/Memory1D-v0", kwargs={"num_visual": 1, "action": [1, 1]}),
    "Connect Four": EnvConfig("lightning_rl/ConnectFour-v0"),
    "Scripted": EnvConfig("tests.environments:Scripted-v0"),
    "ScriptedDict": EnvConfig("tests.environments:ScriptedDict-v0"),
    "a space that all draw from": EnvConfig("DrawnState-v0", max_episode_steps=9),
}


def configured(config: EnvConfig, vectorization: str, mode: str, num_envs: int = 2) -> EnvConfig:
    return EnvConfig(**(vars(config) | {"num_envs": num_envs, "vectorization": vectorization, "autoreset": mode}))


IN_EVERY_MODE = ("CartPole", "normalized", "ScriptedDict", "a space that all draw from")
"""Environments that are tried in every mode of resetting; the others' second and third are slow."""


def environments_in_modes():
    for name, mode in product(ENVIRONMENTS, MODES):
        yield pytest.param(name, mode, marks=[] if mode == "SAME_STEP" or name in IN_EVERY_MODE else [pytest.mark.slow])


@pytest.mark.variants("CartPole", "Pendulum")
@pytest.mark.parametrize(("name", "mode"), environments_in_modes())
def test_restored_environments_continue_exactly(name, mode):
    vectorizations = ("sync", "async") if mode == "SAME_STEP" else ("sync",)
    for vectorization in vectorizations:
        config = configured(ENVIRONMENTS[name], vectorization, mode)
        for before in (17, 40) if vectorization == "sync" else (40,):
            assert is_continued(lambda config=config: make_vector_env(config), config, before) is None


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["CartPole", pytest.param("LunarLander", marks=pytest.mark.slow)])
def test_restored_workers_continue_exactly_in_every_mode(name, mode):
    config = configured(ENVIRONMENTS[name], "async", mode)
    assert is_continued(lambda: make_vector_env(config), config) is None


@pytest.mark.thorough
@pytest.mark.parametrize("vectorization, mode", [("sync", "NEXT_STEP"), ("async", "SAME_STEP")])
def test_restored_sticky_atari_games_continue_exactly(vectorization, mode):
    config = configured(EnvConfig("ALE/Pong-v5", atari=True, max_episode_steps=100), vectorization, mode)
    assert is_continued(lambda: make_vector_env(config), config, 60, 60) is None  # its emulator's own state fails with this seed


@pytest.mark.thorough
def test_a_game_without_sticky_actions_is_restored_from_its_emulator():
    config = EnvConfig("ALE/Pong-v5", 1, atari=True, max_episode_steps=100, kwargs={"repeat_action_probability": 0.0})
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    assert stepper.state_dict()["states"]["envs"][0]["way"] == "attributes"
    stepper.close()
    assert is_continued(lambda: make_vector_env(config), config, 30, 40) is None


@pytest.mark.variants
@pytest.mark.parametrize("before", range(9, 14))
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_pending_reset_is_restored(vectorization, before):
    config = EnvConfig("MountainCar-v0", 2, vectorization, "NEXT_STEP", max_episode_steps=10)
    assert is_continued(lambda: make_vector_env(config), config, before, 40) is None


@pytest.mark.parametrize("before", [0, 1, 29, 30, 31])
def test_restored_native_vector_environments_continue_exactly(before):
    config = EnvConfig("CartPole-v1", 3, "native", max_episode_steps=30)
    assert is_continued(lambda: make_vector_env(config), config, before) is None


@pytest.mark.thorough
def test_saving_does_not_disturb_a_run():
    for name in ("CartPole", "LunarLander", "Ant"):
        config = configured(ENVIRONMENTS[name], "sync", "SAME_STEP")
        quiet, watched = (make_stepper(make_vector_env(config), config) for _ in range(2))
        for stepper in (quiet, watched):
            stepper.reset(0)
        quiet.envs.action_space.seed(0)
        for _ in range(60):
            action = quiet.envs.action_space.sample()
            watched.state_dict()
            assert rows(quiet, [action]) == rows(watched, [action])
        quiet.close()
        watched.close()


@pytest.mark.thorough
def test_a_saved_state_does_not_change_with_the_environment():
    config = ENVIRONMENTS["Ant"]
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    state = stepper.state_dict()
    before = [leaf.copy() for leaf in leaves(state) if isinstance(leaf, np.ndarray)]
    rows(stepper, [stepper.envs.action_space.sample() for _ in range(5)])
    assert all(np.array_equal(a, b) for a, b in zip(before, (leaf for leaf in leaves(state) if isinstance(leaf, np.ndarray)), strict=True))
    stepper.close()


class Hidden(gym.Env):
    """Adds up actions and noise where no attribute shows it; only what resets and steps repeat brings it back."""

    observation_space, action_space = Box(-np.inf, np.inf, (1,), np.float32), Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        total, t = float(self.np_random.random()), 0

        def advance(action: int) -> Step:
            nonlocal total, t
            total, t = total + action + float(self.np_random.random()), t + 1
            return np.array([total], np.float32), total, False, t == 13, {}

        self.advance = advance
        return np.array([total], np.float32), {}

    def step(self, action):
        return self.advance(action)


class Chance(Hidden):
    """Starts where the system's entropy says."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=int.from_bytes(os.urandom(4)))
        return self.advance(0)[0], {}


class Drawn(gym.Env):
    """Observes what it draws from a space that all environments of its class have in common."""

    observation_space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(100)})
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Own(Hidden):
    """Hidden too, but says itself what it is."""

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        secret = [0.0, 0]
        self.look, self.put = lambda: list(secret), lambda value: secret.__setitem__(slice(None), value)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        total, t = self.look()
        self.put([total + action + float(self.np_random.random()), t + 1])
        return np.array([total], np.float32), total, False, t == 10, {}

    def get_state(self):
        return {"secret": self.look()}

    def set_state(self, state):
        self.put(state["secret"])


class Unsteady(Hidden):
    """As hidden, and in the real world: from its 100th step on nothing goes as it did."""

    steps = 0

    def step(self, action):
        Unsteady.steps += 1
        obs, reward, *rest = super().step(action)
        return obs + (Unsteady.steps > 100) * np.float32(Unsteady.steps), reward, *rest


class Nested(Hidden):
    """Keeps its noise in an object."""

    def __init__(self):
        self.noise = SimpleNamespace(scale=0.5)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs * self.noise.scale, info


for cls in (Hidden, Chance, Drawn, Own, Unsteady, Nested):
    gym.register(f"{cls.__name__}State-v0", cls)


@pytest.mark.variants
@pytest.mark.parametrize("vectorization, mode", WAYS)
def test_an_environment_with_hidden_state_is_replayed(vectorization, mode):
    config = EnvConfig("HiddenState-v0", 2, vectorization, mode)
    assert is_continued(lambda: make_vector_env(config), config) is None


@pytest.mark.variants
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environments_own_get_state_comes_first(vectorization):
    config = EnvConfig("OwnState-v0", 2, vectorization, max_episode_steps=20)
    assert is_continued(lambda: make_vector_env(config), config) is None
    assert is_continued(lambda: make_vector_env(Own, 2)) is None
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    states = stepper.state_dict()["states"]["envs"]
    assert (states[0]["env"] if vectorization == "async" else states[0])["way"] == "own"
    stepper.close()


@pytest.mark.variants
@pytest.mark.parametrize("vectorization, mode", WAYS)
def test_an_environment_that_cannot_be_restored_starts_new_episodes_with_a_notice(vectorization, mode):
    config = EnvConfig("ChanceState-v0", 2, vectorization, mode)
    line = is_continued(lambda: make_vector_env(config), config)
    assert line == "ChanceState-v0 cannot be saved in the middle of an episode"


def test_a_replay_with_another_outcome_is_rejected_and_leaves_no_trace():
    config = EnvConfig("UnsteadyState-v0", 1)
    Unsteady.steps = 0
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    rows(stepper, [np.array([1])] * 5)
    state = saved(stepper.state_dict())
    Unsteady.steps = 100
    other, fresh = (make_stepper(make_vector_env(config), config) for _ in range(2))
    line = other.load_state_dict(state)
    assert "could not be restored exactly" in line and len(line.splitlines()) == 1
    assert np.array_equal(other.reset(7)[0], fresh.reset(7)[0])


@pytest.mark.parametrize("value", [np.inf, None, "noise", ("~list", 9, [], None)])
def test_an_environment_whose_saved_state_has_something_else_in_the_place_of_an_object_starts_new_episodes(value):
    config = EnvConfig("NestedState-v0", 2)
    stepper, other, fresh = (make_stepper(make_vector_env(config), config) for _ in range(3))
    stepper.reset(0)
    state = stepper.state_dict()
    broken = next(layer for layer in state["states"]["envs"][1]["episode"]["before"] if "noise" in layer)
    assert broken["noise"][0] == "~object"
    broken["noise"] = value
    assert "could not be restored exactly" in other.load_state_dict(state)
    assert np.array_equal(other.reset(7)[0], fresh.reset(7)[0])
    actions = [np.array([1, 2])] * 20
    assert rows(other, actions) == rows(fresh, actions)


@pytest.mark.thorough
def test_envpool_environments_start_new_episodes():
    pool = EnvConfig("CartPole-v1", 2, "envpool")
    assert "CartPole-v1" in is_continued(lambda: make_vector_env(pool), pool, 0, 0)


def test_another_number_of_environments_or_another_mode_starts_new_episodes():
    one, two, other = EnvConfig("CartPole-v1", 1), EnvConfig("CartPole-v1", 2), EnvConfig("CartPole-v1", 1, autoreset="DISABLED")
    stepper = make_stepper(make_vector_env(one), one)
    stepper.reset(0)
    for config in (two, other):
        line = make_stepper(make_vector_env(config), config).load_state_dict(stepper.state_dict())
        assert line == "the checkpoint has 1 environments, in another number or autoreset mode"


CHANGED = "their settings changed since they were saved"
PENDULUM = EnvConfig("Pendulum-v1", 2, max_episode_steps=100, kwargs={"g": 10.0, "render_mode": None})


def line_between(before: VectorEnv, after: VectorEnv, first: EnvConfig | None = None, second: EnvConfig | None = None) -> str | None:
    """What is said when what one vector environment saved goes into another."""
    steppers = make_stepper(before, first), make_stepper(after, second)
    steppers[0].reset(0)
    line = steppers[1].load_state_dict(saved(steppers[0].state_dict()))
    for stepper in steppers:
        stepper.close()
    return line


@pytest.mark.variants
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    "change", [{"kwargs": {"g": 5.0}}, {"max_episode_steps": 20}, {"wrappers": ["TimeAwareObservation"]}, {"frame_stack": 2}]
)
def test_changed_settings_win_over_a_saved_state(vectorization, change):
    first = replace(PENDULUM, vectorization=vectorization)
    second = replace(first, **change)
    assert line_between(make_vector_env(first), make_vector_env(second), first, second) == CHANGED


def test_equal_settings_in_another_form_continue():
    for change in ({"kwargs": {"g": 10}}, {"kwargs": {"render_mode": "rgb_array", "g": 10.0}}):
        second = replace(PENDULUM, **change)
        assert line_between(make_vector_env(PENDULUM), make_vector_env(second), PENDULUM, second) is None


@pytest.mark.thorough
def test_changed_settings_in_functions_and_ready_vector_environments_win_too():
    def ready(make: Callable[[], gym.Env]) -> VectorEnv:
        return SyncVectorEnv([make], autoreset_mode=AutoresetMode.SAME_STEP)

    builders = {
        "one": lambda: gym.make("Pendulum-v1", g=10.0),
        "other kwargs": lambda: gym.make("Pendulum-v1", g=5.0),
        "other limit": lambda: gym.make("Pendulum-v1", g=10.0, max_episode_steps=20),
        "other wrapper": lambda: gym.wrappers.NormalizeReward(gym.make("Pendulum-v1", g=10.0)),
        "unregistered": lambda: Scripted(3),
        "other argument": lambda: Scripted(4),
    }
    for first, second in (("one", "other kwargs"), ("one", "other limit"), ("one", "other wrapper"), ("unregistered", "other argument")):
        assert line_between(ready(builders[first]), ready(builders[second])) == CHANGED
        assert line_between(ready(builders[first]), ready(builders[first])) is None
    used = ready(builders["unregistered"])
    used.reset(seed=0)
    for _ in range(5):
        used.step(np.array([0]))
    assert line_between(ready(builders["unregistered"]), used) is None


@pytest.mark.thorough
def test_restored_functions_and_ready_vector_environments_continue_exactly():
    assert is_continued(lambda: make_vector_env(Hidden, 2)) is None
    assert is_continued(lambda: make_vector_env(lambda: make_env(ENVIRONMENTS["LunarLander"]), 2)) is None
    for mode in AutoresetMode:
        builders = [lambda period=period: Scripted(period) for period in (3, 5)]
        assert is_continued(lambda builders=builders, mode=mode: SyncVectorEnv(builders, autoreset_mode=mode)) is None
    mixed = [lambda: gym.make("CartPole-v1"), lambda: gym.make("CartPole-v1", max_episode_steps=9)]
    assert is_continued(lambda: SyncVectorEnv(mixed, autoreset_mode=AutoresetMode.SAME_STEP)) is None


def test_an_environment_that_a_function_returns_again_is_not_stepped_in_the_trial():
    env = Scripted()
    make_stepper(SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.SAME_STEP))
    assert env.episode == -1


class Endless(Hidden):
    """Hangs when it is stepped."""

    def step(self, action):
        while True:
            pass


@pytest.mark.thorough
def test_the_trial_has_no_side_effects_and_a_time_limit(monkeypatch):
    monkeypatch.setattr("lightning_rl.envs.snapshot.state.MAX_TRIAL_SECONDS", 0.5)
    np.random.seed(0)
    expected, told = np.random.rand(), []
    np.random.seed(0)
    make_stepper(make_vector_env(lambda: told.append(np.random.rand()) or make_env(EnvConfig("CartPole-v1")), 1))
    assert len(told) == 1 and told[0] == expected  # the one that is to be stepped
    started = time.monotonic()
    stepper = make_stepper(make_vector_env(Endless, 1))
    assert time.monotonic() - started < 5 and stepper.state_dict()["states"] is None


def in_a_worker(build: Callable[[], gym.Env]) -> VectorEnv:
    return WorkerVectorEnv(build, 1)


def in_turn(build: Callable[[], gym.Env]) -> VectorEnv:
    return SyncVectorEnv([build], autoreset_mode=AutoresetMode.SAME_STEP)


class Watched(Scripted):
    """Tells a file, so that what a forked process does to it shows too."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = str(file)

    def tell(self, what: str) -> None:
        with open(self.file, "a") as file:
            file.write(f"{what}\n")

    def reset(self, *, seed=None, options=None):
        self.tell("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.tell("step")
        return super().step(action)

    def close(self):
        self.tell("close")

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("kind", [in_turn, in_a_worker])
def test_an_environment_that_cannot_be_copied_is_neither_stepped_nor_closed_in_the_trial(kind, platform, tmp_path, monkeypatch):
    env = Watched(tmp_path / "told")
    envs = kind(lambda: env)
    (tmp_path / "told").unlink(missing_ok=True)  # building a vector environment looks at one environment and closes it
    monkeypatch.setattr("lightning_rl.envs.snapshot.state.sys.platform", platform)
    stepper = make_stepper(envs)
    assert not (tmp_path / "told").exists() and not stepper.can_be_saved
    stepper.close()


class Loud(Hidden):
    """Writes past Python's streams and ends the process."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __deepcopy__(self, memo):
        os.write(2, b"NOISE")
        if self.way == "exits":
            raise SystemExit("NOISE")
        if self.way == "interrupts":
            raise KeyboardInterrupt("NOISE")
        os.abort()


@pytest.mark.parametrize("way", ["exits", "interrupts", "aborts", "no fork"])
def test_an_environment_that_cannot_be_copied_or_forked_cannot_be_saved_and_prints_nothing(way, capfd, monkeypatch):
    def refuse() -> int:
        raise OSError("no memory")

    if way == "no fork":
        monkeypatch.setattr("os.fork", refuse)
    started = time.monotonic()
    env = Loud(way)
    envs = in_turn(lambda: env)
    assert not make_stepper(envs).can_be_saved and time.monotonic() - started < MAX_TRIAL_SECONDS
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("mode", "before"), [("SAME_STEP", "Stepper"), ("NEXT_STEP", "NextStepStepper"), ("DISABLED", "DisabledStepper")])
def test_a_state_of_0_1_0_continues_its_episodes(mode, before):
    config = EnvConfig("CartPole-v1", num_envs=2, autoreset=mode)
    first, second = (make_stepper(make_vector_env(config), config) for _ in range(2))
    first.reset(seed=1)
    for _ in range(3):
        first.step(np.array([0, 1]))
    state = first.state_dict() | {"mode": before}
    if mode != "NEXT_STEP":
        del state["resetting"]
    assert second.load_state_dict(saved(state)) is None
    assert rows(second, 20 * [np.array([0, 1])]) == rows(first, 20 * [np.array([0, 1])])
