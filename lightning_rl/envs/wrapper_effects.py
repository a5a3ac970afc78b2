"""Wrappers that keep statistics or change rewards: refuse those that a setting replaces, and find out what others do.

A class does not say whether its behavior depends on earlier episodes, and not always whether it changes rewards. So a copy of the
environment plays an episode, a second one, and the first one again, while the results of each wrapper are compared with those of the
environment inside it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple, Self

import gymnasium as gym
import numpy as np
from gymnasium import wrappers
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorRewardWrapper
from gymnasium.wrappers import vector

from lightning_rl.envs.masks import legal_action
from lightning_rl.envs.snapshot.state import are_equal, run_apart
from lightning_rl.envs.sync import AnyEnv, closing_env, layers
from lightning_rl.errors import SettingError, is_interrupt
from lightning_rl.types import Info, Options, StepResult, Tree

TRIAL_STEPS = 16


class ReplacedWrapperError(SettingError):
    """An environment is wrapped in one of gymnasium's wrappers that a setting replaces."""

    name = setting = ""

    @classmethod
    def of(cls, name: str, setting: str) -> Self:
        """Return the error about a wrapper with the setting that replaces it."""
        keeps = "whose statistics are not those of evaluations and loaded policies"
        why = keeps if setting.startswith("normalize_obs") else "so that returns would not be those of the environment"
        error = cls(f"the environment is wrapped in {name}, {why}; remove it and set {setting}")
        error.name, error.setting = name, setting
        return error


def check_wrappers(env: AnyEnv) -> None:
    """Raise `ReplacedWrapperError` if a setting replaces one of an environment's wrappers."""
    for single in (env, *(env.unwrapped.envs if isinstance(env.unwrapped, SyncVectorEnv) else ())):
        for layer in layers(single):
            if setting := replaced_by(layer):
                raise ReplacedWrapperError.of(type(layer).__name__, setting)


def replaced_by(layer: AnyEnv) -> str | None:
    """Return the setting that does what a wrapper of gymnasium does; None if there is none, as for statistics that stay as they are."""
    if isinstance(layer, wrappers.NormalizeObservation | vector.NormalizeObservation):
        return "normalize_obs: running" if layer.update_running_mean else None
    if isinstance(layer, wrappers.NormalizeReward | vector.NormalizeReward):
        return "normalize_reward: true" if layer.update_running_mean else None
    if isinstance(layer, wrappers.ClipReward | vector.ClipReward):
        clip = layer.func if isinstance(layer, wrappers.ClipReward) else layer.wrapper.func
        low, high = (np.asarray(clip(extreme)) for extreme in (-math.inf, math.inf))
        return f"clip_reward: {float(high):g}" if high.ndim == 0 and low == -high and np.isfinite(high) else None
    return None


def check_saved_statistics(given: Sequence[object]) -> None:
    """Raise `SettingError` if the wrappers in settings normalized observations, which older versions allowed."""
    for wrapper in given:
        module, _, name = str(wrapper["class_path"] if isinstance(wrapper, Mapping) else wrapper).rpartition(".")
        if name == "NormalizeObservation" and module.partition(".")[0] in ("", "gymnasium"):
            what = f"this policy acts on observations of {name}, whose statistics were not saved with it"
            raise SettingError(f"{what}; train it again with normalize_obs: running, or pass env= and normalize them yourself")


class Effect(NamedTuple):
    """What a wrapper does.

    changes_rewards: whether its rewards differ from those of the environment inside it.  remembers: whether its results depend on earlier
    episodes.  setting: the setting that replaces it.
    """

    name: str
    changes_rewards: bool
    remembers: bool = False
    setting: str | None = None


def effects_by_class(env: object) -> list[Effect]:
    """Return what the classes of the wrappers of an environment say about them."""
    kinds = (gym.RewardWrapper, VectorRewardWrapper)
    known = [*layers(env)] if isinstance(env, gym.Env | VectorEnv) else []
    return [Effect(type(wrapper).__name__, isinstance(wrapper, kinds), setting=replaced_by(wrapper)) for wrapper in known]


def find_effects(build: Callable[[], AnyEnv]) -> list[Effect]:
    """Find out what the wrappers of the environment that `build` builds do, without affecting this process."""
    return run_apart(partial(_try_wrappers, build)) or []


def describe_effects(effects: Sequence[Effect]) -> list[str]:
    """Return lines for the user about wrappers. Raises `ReplacedWrapperError`: a setting replaces one of them."""
    for effect in effects:
        if effect.setting:
            raise ReplacedWrapperError.of(effect.name, effect.setting)
    changing = ", ".join(dict.fromkeys(effect.name for effect in effects if effect.changes_rewards))
    remembering = ", ".join(dict.fromkeys(effect.name for effect in effects if effect.remembers))
    lines = []
    if changing:
        ways = "reward_scale, clip_reward and normalize_reward change only what is learned from"
        lines.append(f"returns, also those that choose best.ckpt, are of rewards after {changing}, not the environment's own; {ways}")
    if remembering:
        lacks = "each copy, each evaluation and a loaded policy begins without it"
        lines.append(f"what {remembering} keeps of earlier episodes is not saved with the policy: {lacks}")
    return lines


class Recording:
    """Records what an environment or wrapper returns: observations, and the sum of its rewards in each step of the outermost wrapper."""

    def __init__(self, layer: AnyEnv) -> None:
        self.obs: list[Tree] = []
        self.rewards: list[Tree] = []
        self._reset, self._step = layer.reset, layer.step
        vars(layer).update(reset=self.reset, step=self.step)  # wrappers call these

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, info = self._reset(seed=seed, options=options)
        self.obs.append(deepcopy(obs))
        return obs, info

    def step(self, action: Tree) -> StepResult:
        obs, reward, *rest = self._step(action)
        self.obs.append(deepcopy(obs))
        if self.rewards:  # otherwise a wrapper steps within its reset
            self.rewards[-1] = self.rewards[-1] + deepcopy(reward)
        return obs, reward, *rest

    def pop(self) -> tuple[list[Tree], list[Tree]]:
        """Return the observations and rewards, and forget them."""
        taken, self.obs, self.rewards = (self.obs, self.rewards), [], []
        return taken


def _play(
    env: AnyEnv, recordings: Sequence[Recording], seed: int, deadline: float, given: Sequence[Tree] | None = None
) -> tuple[list[tuple[list[Tree], list[Tree]]], list[Tree]]:
    """Play the start of an episode with random or given actions. Return what each wrapper returned, and the actions."""
    space, actions = deepcopy(env.action_space), list[Tree]()
    space.seed(seed)
    obs, info = env.reset(seed=seed)
    for k in range(TRIAL_STEPS if given is None else len(given)):
        if time.monotonic() > deadline:
            raise TimeoutError
        actions.append(legal_action(env, space, space.sample, obs, info) if given is None else given[k])
        for recording in recordings:
            recording.rewards.append(0.0)
        obs, _, terminated, truncated, info = env.step(deepcopy(actions[-1]))
        if not isinstance(env, VectorEnv) and (terminated or truncated):
            break
    return [recording.pop() for recording in recordings], actions


def _try_wrappers(build: Callable[[], AnyEnv], deadline: float) -> list[Effect]:
    known: list[Effect] = []
    try:
        with closing_env(build()) as env, closing_env(build()) as other:
            known = effects_by_class(env)
            if len([*layers(env)]) == 1 or env.unwrapped is other.unwrapped:
                return known
            recordings = [Recording(layer) for layer in layers(env)]
            first, actions = _play(env, recordings, 1, deadline)
            elsewhere, _ = _play(other, [Recording(layer) for layer in layers(other)], 1, deadline, actions)
            _play(env, recordings, 2, deadline)
            again, _ = _play(env, recordings, 1, deadline, actions)
    except ReplacedWrapperError as error:
        return [Effect(error.name, False, setting=error.setting)]
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
        return known
    names = [type(layer).__name__ for layer in layers(env)]
    for k, name in enumerate(names[:-1]):  # the last one is the environment itself
        pairs = zip(first[k][1], first[k + 1][1], strict=True)
        changes = not all(np.allclose(outer, inner, equal_nan=True) for outer, inner in pairs)
        repeats = _are_equal(first[k], elsewhere[k]) and _are_equal(first[k + 1], again[k + 1])
        known.append(Effect(name, changes, repeats and not _are_equal(first[k], again[k])))
    return known


def _are_equal(a: tuple[list[Tree], list[Tree]], b: tuple[list[Tree], list[Tree]]) -> bool:
    return all(map(are_equal, a, b))
