"""Scenarios of VMAS: all copies and agents in one call, as rows of a collector."""

from __future__ import annotations

import itertools
import sys
from functools import partial

import numpy as np
import pytest
import torch

from lightning_rl import PPO, SAC, Behavior, MultiAgent, SettingError, Trainer, evaluate, load_policy
from lightning_rl.envs.agents.vmas import VmasCopies, VmasWorld
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import find_user_module, make_env, make_vmas, probe_spaces
from lightning_rl.envs.stepping import make_fitting_stepper, make_world
from lightning_rl.policy import play_episodes
from lightning_rl.spaces import samples
from lightning_rl.types import tree_leaves
from tests.fitting import fit, tiny
from tests.training.test_resuming import StopAt, assert_equal_runs, run

vmas = pytest.importorskip("vmas")
SPREAD = "vmas.simple_spread"


def make(env_id=SPREAD, num_envs=4, joint="", **settings):
    """A stepper, and the spaces of its agents."""
    config = EnvConfig(env_id, num_envs=num_envs, **settings)
    spaces = probe_spaces(config, joint)
    return make_fitting_stepper(config, spaces, 0), spaces


def play(stepper, spaces, steps):
    """Step with the same random actions each time; return all that happened."""
    spaces.action.seed(0)
    return [stepper.step(samples(spaces.action, stepper.num_envs)) for _ in range(steps)]


def assert_equal_steps(left, right):
    for one, other in zip(left, right, strict=True):
        pairs = zip(tree_leaves(one._replace(info={}, final_obs=())), tree_leaves(other._replace(info={}, final_obs=())), strict=True)
        assert all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.thorough
def test_rows_are_the_agents_of_copies_and_a_step_is_that_of_vmas():
    stepper, _ = make(num_envs=4, max_episode_steps=5, kwargs={"n_agents": 2})
    assert stepper.num_envs == 8
    theirs = vmas.make_env("simple_spread", 4, max_steps=5, seed=7, terminated_truncated=True, n_agents=2)
    seen, mask = stepper.reset(7)
    assert mask == () and seen.dtype == np.float32
    expected = theirs.reset(seed=7)
    random = np.random.default_rng(0)
    for t in range(5):
        assert all(np.array_equal(seen[a::2], expected[a].numpy()) for a in range(2))
        actions = random.uniform(-1, 1, (8, 2)).astype(np.float32)
        step = stepper.step(actions)
        expected, reward, terminated, truncated, _ = theirs.step([torch.from_numpy(actions[a::2]) for a in range(2)])
        assert all(np.array_equal(step.reward[a::2], reward[a].numpy()) for a in range(2))
        assert step.valid.all() and not terminated.any() and truncated.all() == (t == 4)
        seen = step.obs
    assert step.truncated.all() and not step.terminated.any() and step.episode_start.all() and step.ended.tolist() == list(range(8))
    assert all(np.array_equal(step.final_obs[a::2], expected[a].numpy()) for a in range(2))
    first = theirs.reset()
    assert all(np.array_equal(seen[a::2], first[a].numpy()) for a in range(2))  # the next episodes go on with the same draws


@pytest.mark.thorough
def test_copies_that_end_alone_are_reset_and_leave_the_others_unchanged():
    stepper, spaces = make("vmas.balance", num_envs=16, max_episode_steps=200)
    stepper.reset(0)
    steps = play(stepper, spaces, 60)
    agents = len(spaces.agents)
    alone = [step for step in steps if 0 < len(step.ended) < stepper.num_envs]
    assert alone and all(step.terminated[step.ended].all() for step in alone)
    for step in alone:
        over = step.terminated.reshape(-1, agents)
        assert (over.all(1) == over.any(1)).all() and len(step.final_obs) == len(step.ended)
        assert not np.allclose(step.final_obs, step.obs[step.ended]) and (step.obs[step.ended, 2:4] == 0).all()  # at rest
    lengths = stepper.world.copies.env.steps.numpy()
    assert 0 < lengths.min() < lengths.max() == 60 or len(set(lengths.tolist())) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["vmas.balance", "vmas.navigation", "vmas.transport", "vmas.ball_passage"])  # the last: one by one
def test_copies_that_start_together_leave_the_others_bit_for_bit(env_id):
    (started, spaces), (going_on, _) = make(env_id, num_envs=5), make(env_id, num_envs=5)
    for stepper in (started, going_on):
        stepper.reset(3)
        play(stepper, spaces, 7)
    ended = np.array([False, True, True, False, True])
    first = started.world.copies.start(ended, started.can_be_saved)
    kept = np.repeat(~ended, len(spaces.agents))
    assert all(not np.array_equal(row, leaf[ended][0]) for leaf in first for row in leaf[ended][1:])  # each draws a start of its own
    for step, expected in zip(play(started, spaces, 9), play(going_on, spaces, 9), strict=True):
        assert np.array_equal(step.obs[kept], expected.obs[kept]) and np.array_equal(step.reward[kept], expected.reward[kept])
        assert not np.array_equal(step.obs[~kept], expected.obs[~kept])
    assert started.world.copies.env.steps.tolist() == [16, 9, 9, 16, 9]


@pytest.mark.thorough
def test_episodes_have_a_hundred_steps_unless_settings_say_otherwise():
    for settings, length in (({}, 100), ({"max_episode_steps": 3}, 3), ({"kwargs": {"max_steps": 4}}, 4)):
        stepper, spaces = make(num_envs=1, **settings)
        stepper.reset(0)
        assert [bool(step.truncated.all()) for step in play(stepper, spaces, length)] == [False] * (length - 1) + [True]


@pytest.mark.thorough
def test_seeds_repeat_and_others_do_not_disturb():
    stepper, spaces = make(max_episode_steps=3)
    torch.manual_seed(0)
    first = stepper.reset(5)[0].copy()
    steps = play(stepper, spaces, 8)
    other, _ = make(num_envs=2)
    assert np.array_equal(stepper.reset(5)[0], first) and not np.array_equal(stepper.reset(6)[0], first)
    stepper.reset(5)
    again = []
    spaces.action.seed(0)
    for _ in range(8):
        other.reset(1)
        again.append(stepper.step(samples(spaces.action, stepper.num_envs)))
    assert_equal_steps(steps, again)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))  # the process's draws are its own


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", [SPREAD, "vmas.balance", "vmas.navigation", "vmas.football"])
def test_a_state_is_restored_bit_for_bit(env_id):
    stepper, spaces = make(env_id, max_episode_steps=6)
    stepper.reset(3)
    play(stepper, spaces, 9)
    assert stepper.can_be_saved
    state = stepper.state_dict()
    expected = play(stepper, spaces, 9)
    later, _ = make(env_id, max_episode_steps=6)
    assert later.load_state_dict(state) is None
    assert_equal_steps(expected, play(later, spaces, 9))
    assert "settings changed" in make(env_id, max_episode_steps=7)[0].load_state_dict(state)
    assert "4 copies" in make(env_id, num_envs=5, max_episode_steps=6)[0].load_state_dict(state)


def noisy(make_source, draw):
    """A scenario that adds to rewards what it draws from a source of its own."""
    from vmas.scenarios.mpe.simple_spread import Scenario

    class Noisy(Scenario):
        def make_world(self, batch_dim, device, **kwargs):
            self.source = make_source()
            return super().make_world(batch_dim, device, **kwargs)

        def reward(self, agent):
            return super().reward(agent) + draw(self.source)

    return Noisy


@pytest.mark.thorough
def test_a_random_generator_of_a_scenario_is_saved():
    scenario = noisy(partial(np.random.default_rng, 0), np.random.Generator.random)
    (saved, spaces), (later, _) = make(scenario), make(scenario)
    saved.reset(1)
    play(saved, spaces, 3)
    assert saved.can_be_saved and later.load_state_dict(saved.state_dict()) is None
    assert_equal_steps(play(saved, spaces, 3), play(later, spaces, 3))


@pytest.mark.thorough
def test_a_scenario_that_cannot_be_saved_says_so():
    stepper, _ = make(noisy(itertools.count, next))  # a count that nobody can read
    assert not stepper.can_be_saved
    assert "cannot be saved in the middle" in stepper.load_state_dict(stepper.state_dict())


@pytest.mark.thorough
def test_critics_see_what_all_agents_see():
    stepper, spaces = make(joint="all", max_episode_steps=2)
    obs, _ = stepper.reset(1)
    single = make_env(EnvConfig(SPREAD))
    assert single.with_joint(single.find_spaces(), "all") == spaces
    own = obs["own"].reshape(4, -1)
    assert all(np.array_equal(obs["joint"][3 * e + a], [*own[e], 1, 1, 1]) for e in range(4) for a in range(3))
    _, last = play(stepper, spaces, 2)
    assert last.final_obs["joint"].shape == obs["joint"].shape
    with pytest.raises(SettingError, match="no state"):
        make(joint="state")


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("vmas.simple_spred", {}, "no scenario 'simple_spred'; did you mean simple_spread"),
        ("vmas.simple_tag", {}, "the spaces of adversary_0 and agent_0 differ"),
        (SPREAD, {"n_agent": 2, "n_agents": 2}, "cannot be built: .*the scenario does not take n_agent;"),
        (SPREAD, {"device": "cuda"}, "cannot set device"),
    ],
)
def test_wrong_settings_take_one_line(env_id, kwargs, message):
    with pytest.raises(SettingError, match=message) as caught:
        probe_spaces(EnvConfig(env_id, kwargs=kwargs))
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(SettingError, match=r"vmas\.balance needs the package vmas, .*lightning_rl\[vmas\]"):
        probe_spaces(EnvConfig("vmas.balance"))


@pytest.mark.thorough
def test_training_leaves_out_how_to_render():
    assert make(kwargs={"render_mode": "rgb_array"})[0].num_envs == 12


def test_a_checkpoint_may_name_a_scenario():
    assert find_user_module(SPREAD) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "kwargs", "settings"),
    [(PPO, {}, {"critic_obs": "all"}), (PPO, {"continuous_actions": False}, {}), (SAC, {}, {})],
    ids=["PPO with a critic that sees all", "PPO discrete", "SAC"],
)
def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, kwargs, settings, tmp_path, capsys):
    env = {"id": SPREAD, "max_episode_steps": 5, "kwargs": kwargs}
    expected = run(tmp_path / "whole", algorithm, env, settings)
    run(tmp_path / "parts", algorithm, env, settings, 1, StopAt(3), "last")
    found = run(tmp_path / "parts", algorithm, env, settings, 99, None, "last")
    assert "start new episodes" not in capsys.readouterr().out
    assert_equal_runs(expected, found)


@pytest.mark.thorough
def test_a_policy_is_evaluated_and_loaded(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, enable_progress_bar=False, accelerator="cpu")
    model = PPO({"id": SPREAD, "num_envs": 4, "max_episode_steps": 5}, max_env_steps=240, n_steps=5, batch_size=30, net_arch=[8])
    trainer.fit(model)
    result = evaluate(model, episodes=3)
    assert result["length_mean"] == 5 and result["return_mean"] < 0
    policy = load_policy(trainer.run_folder)
    assert policy.act(np.zeros((3, 14), np.float32))[0].shape == (3, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("env_id", "together", "deterministic"),
    [(SPREAD, True, True), ("vmas.balance", True, False), ("vmas.simple_reference", False, True)],  # the last draws goals for all copies
)
def test_an_evaluation_steps_all_copies_in_one_call_and_plays_what_single_copies_play(env_id, together, deterministic, monkeypatch):
    model = PPO({"id": env_id, "max_episode_steps": 15}, max_env_steps=64, n_steps=4, batch_size=8, net_arch=[8])
    steps, step = [], VmasCopies.step
    monkeypatch.setattr(VmasCopies, "step", lambda copies, actions: steps.append(copies.env.num_envs) or step(copies, actions))
    found = play_episodes(model, 5, 3, num_envs=4, deterministic=deterministic)
    assert {*steps} == {4 if together else 1}
    monkeypatch.setattr(VmasCopies, "are_independent", lambda copies: False)
    single = play_episodes(model, 5, 3, num_envs=4, deterministic=deterministic)
    returns = [episode.return_ for episode in found]
    assert len({*returns}) == 5 and returns == pytest.approx([episode.return_ for episode in single], rel=0.02)  # rounding, at contacts
    assert [(each.seed, each.length) for each in found] == [(each.seed, each.length) for each in single]


OWN = """
import torch
from vmas import make_env
from vmas.scenarios.mpe.simple_spread import Scenario


class Kept:
    def __init__(self, size):
        self.seen = torch.zeros(size)


class Counting(Scenario):
    def make_world(self, batch_dim, device, **kwargs):
        self.kept = Kept(batch_dim)
        return super().make_world(batch_dim, device, **kwargs)

    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        self.kept.seen[... if env_index is None else env_index] = 0

    def reward(self, agent):
        self.kept.seen = self.kept.seen + 1
        return self.kept.seen.clone()


class Other:
    pass
"""


@pytest.mark.thorough
def test_a_scenario_of_ones_own_is_found_by_its_path_and_its_state_is_saved(tmp_path, monkeypatch):
    (tmp_path / "scenarios_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    stepper, spaces = make("scenarios_of_mine.Counting", max_episode_steps=6, kwargs={"n_agents": 2})
    assert type(stepper.world) is VmasWorld and stepper.num_envs == 8 and stepper.can_be_saved
    stepper.reset(0)
    assert [step.reward[:2].tolist() for step in play(stepper, spaces, 7)] == [[2 * k + 1, 2 * k + 2] for k in (*range(6), 0)]
    state, (step,) = stepper.state_dict(), play(stepper, spaces, 1)
    assert stepper.load_state_dict(state) is None
    assert_equal_steps([step], play(stepper, spaces, 1))
    assert find_user_module("scenarios_of_mine.Counting") == "scenarios_of_mine"
    for name, line in (("Other", "builds Other, which is neither a gymnasium.Env"), ("make_env", "make_env is not called")):
        with pytest.raises(SettingError, match=line):
            probe_spaces(EnvConfig(f"scenarios_of_mine.{name}"))


@pytest.mark.thorough
def test_agents_with_different_spaces_learn_as_several_behaviors():
    learner = partial(PPO, n_steps=5, batch_size=5, net_arch=[8])
    behaviors = {"adversary": Behavior("adversary_*", learner), "good": Behavior("agent_*", learner)}
    model = MultiAgent({"id": "vmas.simple_adversary", "num_envs": 2, "max_episode_steps": 5}, behaviors, max_env_steps=40)
    fit(model)


@pytest.mark.thorough
def test_an_evaluation_of_several_behaviors_steps_all_copies_in_one_call(monkeypatch):
    learner = partial(PPO, n_steps=5, batch_size=5, net_arch=[8])
    behaviors = {"adversary": Behavior("adversary_*", learner), "good": Behavior("agent_*", learner)}
    model = MultiAgent({"id": "vmas.simple_tag", "num_envs": 2, "max_episode_steps": 6}, behaviors, max_env_steps=40)
    steps, step = [], VmasCopies.step
    monkeypatch.setattr(VmasCopies, "step", lambda copies, actions: steps.append(copies.env.num_envs) or step(copies, actions))
    found = play_episodes(model, 4, 3, num_envs=4)
    assert [each.length for each in found] == [6] * 4 and {*steps} == {4} and len(steps) < 4 * 6


def make_two_sides():
    """A world of two behaviors with different observations, and the spaces of both."""
    config = EnvConfig("vmas.simple_tag", num_envs=3, max_episode_steps=4)
    env = make_env(config)
    env.reset(seed=0)
    names = {"good": ("agent_0",), "bad": ("adversary_0", "adversary_1", "adversary_2")}
    sides = {name: env.unwrapped.spaces_of(agents)._replace(agents=agents) for name, agents in names.items()}
    return make_world(config, sides, 0), sides


def test_a_landmark_that_an_agent_refers_to_is_restored():
    config = EnvConfig("vmas.simple_adversary", num_envs=2)
    paid = []
    for seed in range(4):  # the goal is one of two landmarks, drawn when all copies start
        saved, restored = (make_vmas(config, 2) for _ in range(2))
        saved.reset(seed)
        restored.reset(9)
        restored.set_state(saved.get_state())
        actions = [np.zeros((2, *space.shape), space.dtype) for space in saved.action_spaces]
        left, right = (copies.step(actions)[1] for copies in (saved, restored))
        assert np.array_equal(left, right)
        paid.append(saved.env.world.landmarks.index(saved.env.agents[0].goal))
    assert {*paid} == {0, 1}


def step_both(world, sides):
    world.step_all({name: samples(spaces.action, 3 * len(spaces.agents)) for name, spaces in sides.items()})
    return {name: side.pop_step() for name, side in world.sides.items()}


@pytest.mark.thorough
def test_several_behaviors_step_all_copies_in_one_call_and_resume_in_the_middle_of_episodes():
    (world, sides), (later, _) = make_two_sides(), make_two_sides()
    assert type(world) is VmasWorld
    world.reset(5)
    theirs = vmas.make_env("simple_tag", 3, max_steps=4, seed=5, terminated_truncated=True)
    seen = dict(zip((agent.name for agent in theirs.agents), theirs.reset(seed=5), strict=True))
    assert np.array_equal(world.sides["good"].newest()[0], seen["agent_0"].numpy())
    assert np.array_equal(world.sides["bad"].newest()[0][1::3], seen["adversary_1"].numpy())
    for spaces in sides.values():
        spaces.action.seed(0)
    steps = [step_both(world, sides) for _ in range(3)]
    assert later.set_state(world.get_state()) is None
    for spaces in sides.values():
        spaces.action.seed(1)
    following = [step_both(world, sides) for _ in range(6)]
    assert [step["good"].truncated.tolist() for step in (*steps, *following)][2:5] == [[False] * 3, [True] * 3, [False] * 3]
    for spaces in sides.values():
        spaces.action.seed(1)
    repeated = [step_both(later, sides) for _ in range(6)]
    for name in sides:
        assert_equal_steps([step[name] for step in following], [step[name] for step in repeated])


@pytest.mark.thorough
def test_tiny_runs_count_the_steps_of_agents():
    model = tiny(PPO, SPREAD, n_steps=8, batch_size=24)
    fit(model)
    assert model.num_envs == 6 and model.env_steps >= 96
