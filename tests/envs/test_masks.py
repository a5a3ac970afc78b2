"""Masks of legal actions, given in all three ways and all forms, become one flat mask for each observation."""

from __future__ import annotations

import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl import EnvConfig
from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.envs.make import make_env, make_vector_env, probe_spaces
from lightning_rl.envs.masks import MaskInfo, Masks
from lightning_rl.envs.snapshot.state import Recorder
from lightning_rl.envs.stepping import Stepper, make_stepper
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces, choice_sizes, legal_sample
from lightning_rl.types import tree_index, tree_map, tree_stack
from tests.environments import Choosy, Scripted, ScriptedBox, legal

CHOOSY = "tests.environments:Choosy-v0"
WAYS = ("info", "key", "method")
KINDS = list(Choosy.action_spaces)
VECTORS = [("sync", "SAME_STEP"), ("sync", "NEXT_STEP"), ("sync", "DISABLED"), ("async", "SAME_STEP"), ("async", "NEXT_STEP")]
NESTED = Choosy.action_spaces["nested"]
PAIR = (np.array([1, 0]), np.array([0, 1, 1, 0]))
BITS = [True, False, True, True]
"""The first one off, the second one either."""
FLAT = [True, False, False, True, True, False, *BITS, False, True]


def choosy(num_envs: int = 3, **settings) -> EnvConfig:
    names = ("vectorization", "autoreset", "frame_stack", "max_episode_steps")
    own = {name: settings.pop(name) for name in names if name in settings}
    return EnvConfig(CHOOSY, num_envs, kwargs=settings, **own)


def stepper_for(config: EnvConfig) -> Stepper:
    return make_stepper(make_vector_env(config), config, probe_spaces(config).masked)


def legal_actions(stepper: Stepper, masks: np.ndarray):
    space = stepper.envs.single_action_space
    return tree_map(np.asarray, tree_stack([legal_sample(space, mask) for mask in masks]))


def where(obs):
    """(episode, t), of stacked frames the newest."""
    obs = obs["where"] if isinstance(obs, dict) else obs
    return obs[:, -1] if obs.ndim == 3 else obs


def check(masks, obs, kind, over=None):
    """Masks are those of the observations, or all true where nothing follows."""
    expected = np.array([legal(each, Choosy.sizes[kind]) for each in where(obs)])
    assert masks.dtype == bool
    assert masks.tolist() == (expected if over is None else expected | over[:, None]).tolist()


# ---------------------------------------------------------------- while environments are stepped


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way, kind, form",
    [
        *(
            pytest.param(way, kind, "flat", marks=[] if way == "info" or kind in ("discrete", "nested") else [pytest.mark.slow])
            for way in WAYS
            for kind in KINDS
        ),
        *((way, kind, "tree") for way in ("info", "method") for kind in KINDS[1:]),
        ("key", "multi-discrete", "tree"),
    ],
)
def test_each_observation_comes_with_its_own_mask_and_final_ones_too(way, kind, form):
    in_workers = (kind, form) in (("discrete", "flat"), ("nested", "tree" if way != "key" else "flat"))
    for vectorization, autoreset in VECTORS if in_workers else VECTORS[:3]:
        stepper = stepper_for(choosy(way=way, action=kind, form=form, vectorization=vectorization, autoreset=autoreset))
        obs, mask = stepper.reset(0)
        check(mask, obs, kind)
        finals = 0
        for _ in range(14):
            step = stepper.step(legal_actions(stepper, mask))
            over = step.terminated if autoreset == "NEXT_STEP" else None  # there obs is the final observation
            check(step.mask, step.obs, kind, over)
            if len(step.ended):
                finals += len(step.ended)
                check(step.final_mask, step.final_obs, kind, step.terminated[step.ended])
                assert step.final_mask.shape == (len(step.ended), len(mask[0]))
            assert not isinstance(step.obs, dict) or list(step.obs) == ["where"]
            mask = step.mask
        assert finals > 3 and stepper.restarts == 0
        stepper.close()


def test_a_mask_does_not_change_at_the_next_step():
    stepper = stepper_for(choosy(way="key"))
    _, mask = stepper.reset(0)
    before = mask.copy()
    stepper.step(legal_actions(stepper, mask))
    assert np.array_equal(mask, before)
    stepper.close()


@pytest.mark.parametrize("way", WAYS)
def test_of_stacked_frames_the_newest_mask_counts(way):
    stepper = stepper_for(choosy(way=way, frame_stack=3))
    obs, mask = stepper.reset(0)
    assert where(obs).shape == (3, 2) and mask.shape == (3, 4)
    for _ in range(8):
        step = stepper.step(legal_actions(stepper, mask))
        mask = step.mask
        check(mask, step.obs, "discrete")
    stepper.close()


gym.register("ChoosyNative-v0", Choosy, vector_entry_point=lambda num_envs, **settings: native(num_envs, **settings))


def native(num_envs: int, **settings) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Choosy(**settings)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("way", ["info", "key"])
def test_masks_of_native_vector_environments_are_read(way):
    config = EnvConfig("ChoosyNative-v0", 2, "native", kwargs={"way": way})
    assert probe_spaces(config).masked and probe_spaces(native(2, way=way)).masked
    stepper = stepper_for(config)
    _, mask = stepper.reset(0)
    for _ in range(9):
        step = stepper.step(legal_actions(stepper, mask))
        check(step.mask, step.obs, "discrete", step.terminated)
        mask = step.mask
    stepper.close()


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_the_row_of_a_lost_worker_has_the_mask_of_its_new_episode(way, autoreset):
    stepper = stepper_for(choosy(way=way, vectorization="async", autoreset=autoreset))
    _, mask = stepper.reset(0)
    mask = stepper.step(legal_actions(stepper, mask)).mask
    os.kill(stepper.envs.processes[1].pid, signal.SIGKILL)
    step = stepper.step(legal_actions(stepper, mask))
    assert step.valid.tolist() == [True, False, True] and where(step.obs).tolist() == [[0, 2], [0, 0], [0, 2]]
    check(step.mask, step.obs, "discrete")
    assert stepper.step(legal_actions(stepper, step.mask)).valid.all() and stepper.restarts == 1
    stepper.close()


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["info", "key"])
def test_a_worker_that_is_lost_while_states_are_saved_has_its_mask_when_they_are_restored(way):
    config = choosy(way=way, vectorization="async")
    first, second = stepper_for(config), stepper_for(config)
    _, mask = first.reset(0)
    mask = first.step(legal_actions(first, mask)).mask
    os.kill(first.envs.processes[1].pid, signal.SIGKILL)
    state = to_arrays(to_plain(first.state_dict()))
    assert second.load_state_dict(state) is None
    steps = [stepper.step(legal_actions(first, mask)) for stepper in (first, second)]
    for step in steps:
        assert step.valid.tolist() == [True, False, True]
        check(step.mask, step.obs, "discrete")
    first.close()
    second.close()


# ---------------------------------------------------------------- before a run


@pytest.mark.parametrize("way, wrapped", [("info", False), ("key", False), ("method", True)])
def test_masks_are_found_before_a_run_and_networks_do_not_see_them(way, wrapped):
    for env in (choosy(way=way), lambda: Choosy(way)):
        spaces = probe_spaces(env)
        assert spaces.masked and spaces.action == Discrete(4, start=1)
        assert spaces.observation == (Dict(where=Scripted.observation_space) if way == "key" else Scripted.observation_space)
    assert isinstance(make_env(choosy(way=way)), MaskInfo) == wrapped
    assert spaces.masks(2, 3).shape == (2, 3, 4) and spaces.masks().all()


def test_an_environment_without_masks_has_none():
    spaces = probe_spaces(EnvConfig("tests.environments:Scripted-v0"))
    assert spaces == Spaces(Scripted.observation_space, Scripted.action_space) and not spaces.masked and spaces.masks(5) == ()
    stepper = make_stepper(make_vector_env(EnvConfig("tests.environments:Scripted-v0", 2)))
    step = stepper.step(np.zeros(2, int)) if stepper.reset(0)[1] == () else None
    assert step.mask == step.final_mask == ()
    stepper.close()


class MaskedBox(ScriptedBox):
    """Rules out something where there are no choices."""

    def reset(self, **arguments):
        return super().reset(**arguments)[0], {"action_mask": np.ones(2, bool)}


def test_a_mask_for_actions_without_choices_is_rejected():
    said = r"^environment 0 of MaskedBox has an action_mask, but its action space Box\(2,\) has no discrete part$"
    with pytest.raises(SettingError, match=said):
        probe_spaces(MaskedBox)


def test_a_method_that_would_not_be_called_is_an_error():
    envs = SyncVectorEnv([lambda: Choosy("method")], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(SettingError, match=r"^action_masks\(\) of a ready vector environment is not called: wrap each in"):
        probe_spaces(envs)
    envs = SyncVectorEnv([lambda: MaskInfo(Choosy("method"))], autoreset_mode=AutoresetMode.SAME_STEP)
    assert probe_spaces(envs).masked


class Unplugged(Scripted):
    """Cannot be reset."""

    def reset(self, **arguments):
        raise RuntimeError("no power\nat all")


def test_an_environment_that_cannot_be_reset_is_reported_in_one_line():
    with pytest.raises(SettingError, match=r"^the environment Unplugged cannot be reset: no power \(test_masks\.py:\d+\)$"):
        probe_spaces(Unplugged)


# ---------------------------------------------------------------- what cannot be right


@pytest.mark.parametrize("way", WAYS)
def test_an_all_false_mask_is_reported_with_the_environment_and_its_index(way):
    envs = [lambda i=i: MaskInfo(Choosy(way, stuck=1 if i == 3 else None)) if way == "method" else Choosy(way, stuck=1) for i in range(5)]
    if way != "method":
        envs[:3] = [lambda: Choosy(way)] * 3
    stepper = make_stepper(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP), None, True)
    _, mask = stepper.reset(0)
    with pytest.raises(SettingError, match=r"^environment 3 of Choosy allows no action: its action_mask is all false$"):
        stepper.step(legal_actions(stepper, mask))
    stepper.close()


def test_a_branch_without_a_legal_choice_is_reported():
    said = "^environment 0 of tests.environments:Choosy-v0 allows no action: its action_mask is all false for one of its parts$"
    with pytest.raises(SettingError, match=said):
        stepper_for(choosy(action="multi-discrete", stuck=0)).reset(0)


@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_a_mask_must_allow_something_at_a_truncation(autoreset):
    stepper = stepper_for(choosy(1, stuck=3, endings=("truncation",), autoreset=autoreset))  # its targets look one step further
    _, mask = stepper.reset(0)
    for _ in range(2):
        mask = stepper.step(legal_actions(stepper, mask)).mask
    with pytest.raises(SettingError, match=r"^environment 0 of .* allows no action"):
        stepper.step(legal_actions(stepper, mask))
    stepper.close()


class Forgetful(Choosy):
    """Gives a mask after a reset alone."""

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {}


class Late(Choosy):
    """Gives a mask in steps alone."""

    def reset(self, **arguments):
        return super().reset(**arguments)[0], {}


def test_masks_must_always_be_present_or_never():
    stepper = make_stepper(SyncVectorEnv([Forgetful], autoreset_mode=AutoresetMode.SAME_STEP), None, True)
    _, mask = stepper.reset(0)
    with pytest.raises(SettingError, match=r"^environment 0 of Forgetful has no action_mask, but the model was made with"):
        stepper.step(legal_actions(stepper, mask))
    stepper = make_stepper(SyncVectorEnv([Late], autoreset_mode=AutoresetMode.SAME_STEP), None, probe_spaces(Late).masked)
    stepper.reset(0)
    with pytest.raises(SettingError, match=r"^environment 0 of Late has an action_mask, but the first reset had none"):
        stepper.step(np.array([1]))


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize(
    "space, said, flat",
    [
        (Discrete(3), [1, 0, 1], [True, False, True]),
        (Discrete(3), np.array([0.0, np.nan, 2.0]), [False, False, True]),
        (Discrete(3), np.array([[0, 0, 1], [1, 1, 0]]), [True, True, False]),  # two frames
        (MultiDiscrete([2, 4]), PAIR, FLAT[:2] + FLAT[2:6]),
        (MultiDiscrete([2, 4]), [[1, 0], [0, 1, 1, 0]], FLAT[:2] + FLAT[2:6]),
        (MultiDiscrete([2, 2]), np.array([[1, 0], [0, 1]]), [True, False, False, True]),
        (MultiDiscrete([[2, 2], [2, 2]]), (PAIR[:1] * 2, PAIR[:1] * 2), [True, False] * 4),
        (MultiBinary(2), BITS, BITS),
        (MultiBinary(2), np.array(BITS).reshape(2, 2), BITS),
        (MultiBinary(2), np.array([[0, 1, 1, 0], BITS]), BITS),  # two frames
        (MultiBinary([1, 2]), (BITS[:2], BITS[2:]), BITS),
        (NESTED, (None, {"pair": PAIR, "bits": BITS}, [0, 1]), FLAT),
        (NESTED, ((), {"pair": np.array(FLAT[:6]), "bits": (BITS[:2], BITS[2:])}, [0, 1]), FLAT),
        (NESTED, FLAT, FLAT),
        (Dict(turn=Box(0, 1, (1,)), choice=Discrete(2)), {"choice": (1, 0)}, [True, False]),
    ],
)
def test_forms_of_a_mask(space, said, flat):
    if isinstance(said, dict) and isinstance(said["choice"], tuple):
        said = {"choice": np.array(said["choice"])}
    flat = [bool(each) for each in flat]
    assert Masks(space, "environment {}").one((), {"action_mask": said})[1].tolist() == flat


@pytest.mark.parametrize(
    "space, said, line",
    [
        (Discrete(3), [1, 0], r"environment 2 must have 3 entries, one for each choice: got shape \(2,\) for 3"),
        (MultiDiscrete([2, 4]), [1] * 5, r"environment 2 must have 2 \+ 4 entries, one for each choice: got shape \(5,\) for 6"),
        (MultiDiscrete([2, 4]), PAIR[::-1], r"must have 2 \+ 4 entries, one for each choice: got shape \(4,\) for 2"),
        (MultiDiscrete([2, 4]), PAIR[:1], "got 1 parts for 2"),
        (MultiBinary(2), [1, 0], r"environment 2 must have 2 \+ 2 entries, one for each choice: got shape \(2,\) for 4"),
        (NESTED, (None, {"bits": BITS}, [0, 1]), "a part has no mask"),
        (NESTED, (None, {"pair": PAIR, "bits": [1, 1]}, [0, 1]), r"got shape \(2,\) for 4"),
        (NESTED, ([1], {"pair": PAIR, "bits": BITS}, [0, 1]), r"got shape \(1,\) for 0"),
        (NESTED, (None, {"pair": PAIR}), "its parts differ from those of the action space"),
        (Dict(choice=Discrete(2)), PAIR[:1], "its parts differ from those of the action space"),
    ],
)
def test_a_mask_that_does_not_fit_is_reported_in_one_line(space, said, line):
    with pytest.raises(SettingError, match=line) as error:
        Masks(space, "environment {}").one((), {"action_mask": said}, 2)
    assert "\n" not in str(error.value)
    with pytest.raises(SettingError, match=r"no discrete part$"):
        Masks(Box(0, 1, (2,)), "environment {}")


@pytest.mark.parametrize("space", [*Choosy.action_spaces.values(), MultiDiscrete([[2, 3], [4, 2]], start=[[1, 2], [3, 4]])])
def test_random_legal_actions_are_legal_and_cover_all_choices(space):
    space.seed(0)
    sizes = choice_sizes(space)
    drawn, rng = set(), np.random.default_rng(0)
    for _ in range(600):
        mask = np.concatenate([np.eye(size, dtype=bool)[rng.integers(size)] for size in sizes])  # one choice in each part
        action = legal_sample(space, mask)
        assert space.contains(action)
        drawn.add(tuple(np.flatnonzero(mask)))
        if isinstance(space, Discrete):
            assert action - space.start == mask.argmax()
        if isinstance(space, MultiDiscrete):
            assert np.array_equal((action - space.start).ravel() + np.cumsum([0, *sizes[:-1]]), np.flatnonzero(mask))
        if space is NESTED:
            assert [*action[1]["pair"] + [0, 2], *action[1]["bits"] + [6, 8], action[2] + 10] == np.flatnonzero(mask).tolist()
    assert len(drawn) == np.prod(sizes)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["discrete", "nested"])
def test_environments_that_reject_illegal_actions_can_be_saved_in_the_middle_of_an_episode(way, kind):
    for vectorization in ("sync", "async"):
        stepper = stepper_for(choosy(1, way=way, action=kind, vectorization=vectorization))
        assert stepper.can_be_saved
        stepper.close()


def test_a_replayed_episode_begins_with_a_legal_action():
    first, second = (Recorder(MaskInfo(Choosy("method", first_episode=k)), "replay") for k in (1, 0))
    for _ in range(2):
        first.reset(seed=0)
        first.step(2 if first.unwrapped.episode % 2 else 1)  # the second episode's, illegal in the other one's first
    assert second.set_state(first.get_state()) and tree_index(second.unwrapped.observe(), ...).tolist() == [2, 1]
