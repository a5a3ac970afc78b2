"""Wrappers that keep statistics or change rewards are replaced by settings, or a line says what they do to returns and policies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorObservationWrapper, VectorRewardWrapper
from gymnasium.wrappers import vector

import lightning_rl as lrl
from lightning_rl import PPO
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import describe_wrappers
from lightning_rl.errors import SettingError
from tests.environments import Standardized
from tests.fitting import fit

PENDULUM = EnvConfig("Pendulum-v1", max_episode_steps=20, num_envs=2)
RETURNS = "returns, also those that choose best.ckpt, are of rewards after {}, not the environment's own"
MEMORY = "what {} keeps of earlier episodes is not saved with the policy"


class Halved(gym.RewardWrapper):
    """Pays half."""

    def reward(self, reward: Any) -> float:
        return float(reward) / 2


class Bonus(gym.Wrapper):
    """Pays 1 more for each step, which its class does not show."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) + 1.0, *rest


class Novelty(gym.Wrapper):
    """Pays less for what it has seen more often, in all episodes."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.seen: dict[tuple[int, ...], int] = {}

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        place = tuple(np.round(obs).astype(int))
        self.seen[place] = self.seen.get(place, 0) + 1
        return obs, float(reward) + self.seen[place] ** -0.5, *rest


class Previous(gym.Wrapper):
    """Observes the observation before: what it keeps ends with the episode."""

    def reset(self, **arguments: Any) -> Any:
        self.last, info = self.env.reset(**arguments)
        return self.last, info

    def step(self, action: Any) -> Any:
        obs, *rest = self.env.step(action)
        obs, self.last = self.last, obs
        return obs, *rest


class Noisy(gym.ObservationWrapper):
    """Draws noise that no seed repeats."""

    def observation(self, observation: Any) -> Any:
        return (observation + np.random.default_rng().normal(size=3)).astype(np.float32)


class HalvedCopies(VectorRewardWrapper):
    def rewards(self, reward: Any) -> Any:
        return reward / 2


class CenteredCopies(VectorObservationWrapper):
    """Subtracts the mean of all observations so far."""

    total, count = np.zeros(3), 0

    def observations(self, observations: Any) -> Any:
        self.total, self.count = self.total + observations.sum(0), self.count + len(observations)
        return (observations - self.total / self.count).astype(np.float32)


def wrapped(*classes: Any) -> gym.Env:
    env = gym.make("Pendulum-v1", max_episode_steps=20)
    for cls in classes:
        env = cls(env)
    return env


def copies(*classes: Any, of: Any = wrapped) -> VectorEnv:
    envs: VectorEnv = SyncVectorEnv([of] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    for cls in classes:
        envs = cls(envs)
    return envs


def clipped(low: float | None, high: float | None, module: Any = wrappers) -> Any:
    return partial(module.ClipReward, min_reward=low, max_reward=high)


@pytest.mark.parametrize("form", ["settings", "a ready environment", "a function", "ready copies", "copies of a vector wrapper"])
@pytest.mark.parametrize(
    ("name", "arguments", "setting"),
    [
        ("NormalizeObservation", {}, "normalize_obs: running"),
        ("NormalizeReward", {}, "normalize_reward: true"),
        ("ClipReward", {"min_reward": -0.5, "max_reward": 0.5}, "clip_reward: 0.5"),
    ],
)
def test_wrappers_that_a_setting_replaces_are_refused_with_it(form, name, arguments, setting):
    one, several = (partial(getattr(module, name), **arguments) for module in (wrappers, vector))
    env = {
        "settings": lambda: replace(PENDULUM, wrappers=[{"class_path": name, "init_args": arguments}]),
        "a ready environment": lambda: Previous(wrapped(one)),
        "a function": lambda: partial(wrapped, one, Previous),
        "ready copies": lambda: copies(of=partial(wrapped, one)),
        "copies of a vector wrapper": lambda: copies(several, HalvedCopies),
    }[form]()
    with pytest.raises(SettingError, match=f"is wrapped in {name}, .*; remove it and set {setting}$") as error:
        PPO(env=env)
    assert len(str(error.value)) < 200


@pytest.mark.thorough
def test_workers_of_gymnasium_are_asked_too():
    envs = AsyncVectorEnv([partial(wrapped, wrappers.NormalizeObservation)] * 2)
    with pytest.raises(SettingError, match="normalize_obs: running"):
        describe_wrappers(envs)
    envs.close()


@pytest.mark.parametrize(
    ("env", "changing", "remembering"),
    [
        (PENDULUM, "", ""),
        (
            replace(PENDULUM, wrappers=[Previous, "TimeAwareObservation", {"class_path": "RepeatAction", "init_args": {"num_repeats": 2}}]),
            "",
            "",
        ),
        (replace(PENDULUM, wrappers=[Halved, Previous]), "Halved", ""),
        (replace(PENDULUM, wrappers=[Bonus]), "Bonus", ""),
        (replace(PENDULUM, wrappers=[Previous, Bonus, Halved]), "Halved, Bonus", ""),
        (replace(PENDULUM, wrappers=[Standardized]), "", "Standardized"),
        (replace(PENDULUM, wrappers=[Novelty]), "Novelty", "Novelty"),
        (replace(PENDULUM, wrappers=[Noisy, Previous]), "", ""),
        (partial(wrapped, Bonus, Standardized), "Bonus", "Standardized"),
        (partial(wrapped, clipped(-1, None)), "ClipReward", ""),
        (partial(wrapped, clipped(-1, 2)), "ClipReward", ""),
        (partial(wrapped, partial(wrappers.TransformReward, func=np.sign)), "TransformReward", ""),
        (partial(copies, of=partial(wrapped, Novelty)), "Novelty", "Novelty"),
        (partial(copies, HalvedCopies), "HalvedCopies", ""),
        (partial(copies, clipped(0, 1, vector)), "ClipReward", ""),
        (partial(copies, CenteredCopies, of=partial(wrapped, Bonus)), "Bonus", "CenteredCopies"),
    ],
)
def test_a_line_names_the_wrappers_that_change_rewards_and_those_that_depend_on_earlier_episodes(env, changing, remembering):
    if isinstance(env, partial) and env.func is copies:
        env = env()
    lines = describe_wrappers(env)
    expected = [form.format(names) for form, names in ((RETURNS, changing), (MEMORY, remembering)) if names]
    assert len(lines) == len(expected) and all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_statistics_that_no_longer_change_are_a_wrapper_like_any_other():
    def frozen(env: gym.Env) -> gym.Env:
        env = wrappers.NormalizeReward(wrappers.NormalizeObservation(env))
        env.update_running_mean = env.env.update_running_mean = False
        env.return_rms.var = np.array(4.0)
        return env

    (line,) = describe_wrappers(partial(wrapped, frozen))
    assert line.startswith(RETURNS.format("NormalizeReward"))


@pytest.mark.thorough
def test_finding_out_does_not_step_a_ready_environment():
    envs = copies(CenteredCopies, of=partial(wrapped, Novelty))
    describe_wrappers(envs)
    assert envs.count == 0 and all(env.seen == {} for env in envs.unwrapped.envs)


def test_an_environment_that_is_the_same_one_each_time_is_judged_by_its_classes():
    env = wrapped(Halved, Bonus)
    (line,) = describe_wrappers(lambda: env)
    assert line.startswith(RETURNS.format("Halved"))


@pytest.mark.thorough
def test_a_run_says_it_at_its_start_once(capsys):
    fit(PPO(env=replace(PENDULUM, wrappers=[Novelty]), n_steps=8, batch_size=16, max_env_steps=32))
    out = capsys.readouterr().out
    assert out.count(RETURNS.format("Novelty")) == 1 and out.count(MEMORY.format("Novelty")) == 1


@pytest.mark.thorough
def test_an_evaluation_in_an_environment_of_its_own_says_it_too(capsys):
    algorithm = PPO(env=PENDULUM, n_steps=8, batch_size=16, max_env_steps=16)
    own = replace(PENDULUM, wrappers=[Halved])
    fit(algorithm, callbacks=[lrl.RolloutEvaluator(env=own, episodes=1)])
    assert capsys.readouterr().out.count("in evaluations: " + RETURNS.format("Halved")) == 1
    with pytest.raises(SettingError, match="normalize_reward: true"):
        lrl.RolloutEvaluator(env=partial(wrapped, wrappers.NormalizeReward)).check(algorithm)


def test_a_policy_that_an_older_version_trained_on_normalized_observations_is_not_loaded_without_them(tmp_path):
    algorithm = PPO(env=PENDULUM, n_steps=8, batch_size=16, max_env_steps=16)
    trainer = fit(algorithm)
    algorithm.hparams["env"]["wrappers"] = ["NormalizeObservation"]  # as older versions stored it
    trainer.save_checkpoint(path := tmp_path / "old.ckpt")
    with pytest.raises(SettingError, match="acts on observations of NormalizeObservation, whose statistics were not saved"):
        lrl.load_policy(path)
    assert lrl.load_policy(path, env=PENDULUM).act(np.zeros(3, np.float32))[0].shape == (1,)
    with pytest.raises(SettingError, match="normalize_obs: running"):
        lrl.evaluate(path, episodes=1)
