"""Classic control that is stepped at once equals gymnasium's own, bit for bit, and is chosen only where it does."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.envs.classic_control import CartPoleEnv

import lightning_rl as lrl
from lightning_rl.envs.classic_control import PHYSICS, ClassicControlEnvs
from lightning_rl.envs.config import EnvConfig, resolve_in_actor
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.envs.sync import TurnVectorEnv
from tests.command_line import run_python
from tests.training.test_resuming import StopAt, assert_equal_runs, run

IDS = ("CartPole-v0", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")
ARGUMENTS = [
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 9.81}),
    ("MountainCar-v0", {"goal_velocity": 0.02}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.01}),
]


class Renamed(CartPoleEnv):
    """Gymnasium's own but for its name."""


def pair(config):
    """The same environments stepped at once, as few as they are, and in turn."""
    builders = [partial(make_env, config, i) for i in range(config.num_envs)]
    return ClassicControlEnvs(builders), TurnVectorEnv(builders)


def actions(envs, steps, seed=0):
    """Random actions that are held for a while, some beyond their bounds."""
    space, rng = envs.single_action_space, np.random.default_rng(seed)
    held = None
    for t in range(steps):
        if t % 25 == 0 or rng.random() < 0.2:
            if isinstance(space, gym.spaces.Discrete):
                held = rng.integers(space.n, size=envs.num_envs)
            else:
                held = rng.uniform(1.2 * space.low, 1.2 * space.high, (envs.num_envs, 1)).astype(np.float32)
        yield held


def along(envs, obs, action):
    """An action that pushes cars where they are going, in every second copy."""
    if "Mountain" not in envs.envs[0].spec.id:
        return action
    action = action.copy()
    going = obs[::2, 1] >= 0
    action[::2] = 2 * going if action.ndim == 1 else np.where(going, 1.0, -1.0)[:, None]
    return action


def same(a, b):
    """Equal to the last bit, with their dtypes."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, np.ndarray) and a.dtype == object:
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert a == b


def run_together(at_once, in_turn, steps, seed=0):
    """Step both with the same actions. Return how many episodes terminated and how many were truncated."""
    ends = np.zeros(2, dtype=int)
    obs = np.zeros((at_once.num_envs, 2))
    for action in actions(at_once, steps, seed):
        action = along(at_once, obs, action)
        ours, theirs = at_once.step(action), in_turn.step(action)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
        obs = ours[0]
        ends += ours[2].sum(), ours[3].sum()
    return ends


@pytest.mark.variants
@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_steps_together_equal_steps_one_by_one_bit_for_bit(env_id, num_envs):
    at_once, in_turn = pair(EnvConfig(env_id, num_envs, max_episode_steps=300 if "Mountain" in env_id else None))
    with closing(at_once), closing(in_turn):
        for a, b in zip(at_once.reset(seed=5), in_turn.reset(seed=5), strict=True):
            same(a, b)
        terminated, truncated = run_together(at_once, in_turn, 1_200)
        assert terminated + truncated
        assert num_envs < 8 or (truncated if env_id == "Pendulum-v1" else terminated)


@pytest.mark.parametrize(("env_id", "kwargs"), ARGUMENTS)
def test_arguments_of_the_environment_count(env_id, kwargs):
    at_once, in_turn = pair(EnvConfig(env_id, 4, kwargs=kwargs, max_episode_steps=150))
    with closing(at_once), closing(in_turn):
        at_once.reset(seed=1), in_turn.reset(seed=1)
        assert run_together(at_once, in_turn, 600).any()


@pytest.mark.parametrize("env_id", IDS)
def test_episodes_end_at_the_time_limit_that_was_set(env_id):
    at_once, in_turn = pair(EnvConfig(env_id, 3, max_episode_steps=7))
    with closing(at_once), closing(in_turn):
        at_once.reset(seed=4), in_turn.reset(seed=4)
        assert run_together(at_once, in_turn, 60)[1] >= 3
        for a, b in zip(at_once.reset(options=None), in_turn.reset(options=None), strict=True):
            same(a, b)
        run_together(at_once, in_turn, 20)


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("saved_by", ["auto", "sync"])
def test_a_saved_state_continues_at_once_and_in_turn(env_id, saved_by):
    config = EnvConfig(env_id, 4, max_episode_steps=50)
    saving, other = replace(config, vectorization=saved_by), replace(config, vectorization={"auto": "sync", "sync": "auto"}[saved_by])
    for before in (0, 1, 49, 50, 70):
        first, second, third = (make_stepper(make_vector_env(each), each) for each in (saving, saving, other))
        script = list(actions(first.envs, before + 120))
        first.reset(seed=2)
        for action in script[:before]:
            first.step(action)
        state = first.state_dict()
        expected = [deepcopy(first.step(action)) for action in script[before:]]
        for stepper in (second, third):
            assert stepper.load_state_dict(state) is None
            for action, step in zip(script[before:], expected, strict=True):
                for a, b in zip(stepper.step(action), step, strict=True):
                    if isinstance(a, np.ndarray):
                        same(a, b)


@pytest.mark.parametrize("values", [5.0, [5.0, 20.0, 9.8]])
def test_attributes_of_the_copies_can_be_read_and_set(values):
    at_once, in_turn = pair(EnvConfig("CartPole-v1", 3))
    with closing(at_once), closing(in_turn):
        at_once.set_attr("force_mag", 8.0), in_turn.set_attr("force_mag", 8.0)
        at_once.reset(seed=1), in_turn.reset(seed=1)
        run_together(at_once, in_turn, 30)
        at_once.set_attr("gravity", values), in_turn.set_attr("gravity", values)
        run_together(at_once, in_turn, 30)
        same(np.array(at_once.get_attr("state")), np.array(in_turn.get_attr("state")))
        assert [env._elapsed_steps for env in at_once.envs] == [env._elapsed_steps for env in in_turn.envs]


def pays_two(before, *arguments):
    """A step whose reward is 2."""
    obs, _, *others = before(*arguments)
    return obs, 2.0, *others


def replace_step(env):
    env.step = partial(pays_two, env.step)


def set_numbers(env, **numbers):
    for name, number in numbers.items():
        setattr(env.unwrapped, name, number)


BY_NUMBERS = {
    "what ends an episode": ("CartPole-v1", partial(set_numbers, x_threshold=0.1)),
    "rewards": ("CartPole-v1", partial(set_numbers, _sutton_barto_reward=True)),
    "gravity": ("Pendulum-v1", partial(set_numbers, g=20.0, m=2.0)),
    "the time limit": ("CartPole-v1", lambda env: setattr(env, "_max_episode_steps", 12)),
}
IN_ANOTHER_WAY = {
    "step of a copy": ("CartPole-v1", lambda env: replace_step(env.unwrapped)),
    "step of a wrapper": ("MountainCar-v0", replace_step),
    "step of the inner wrapper": ("MountainCarContinuous-v0", lambda env: replace_step(env.env)),
    "a method that step calls": ("Acrobot-v1", lambda env: setattr(env.unwrapped, "_terminal", lambda: True)),
    "an integrator": ("CartPole-v1", partial(set_numbers, kinematics_integrator="semi-implicit")),
    "torques": ("Acrobot-v1", partial(set_numbers, AVAIL_TORQUE=np.array([-2.0, 0.0, 2.0]))),
    "a class": ("CartPole-v1", partial(set_numbers, __class__=Renamed)),
    "a wrapper added": ("Pendulum-v1", lambda env: setattr(env, "env", gym.wrappers.TransformReward(env.env, lambda reward: 2 * reward))),
}
CHANGES = BY_NUMBERS | IN_ANOTHER_WAY


def begin_iteration(envs):
    """Do what a collector does."""
    envs.next_check = 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", [0, 11])
def test_copies_that_are_changed_between_steps_move_as_those_in_turn(change, before):
    env_id, modify = CHANGES[change]
    at_once, in_turn = pair(EnvConfig(env_id, 4, max_episode_steps=40))
    with closing(at_once), closing(in_turn):
        at_once.reset(seed=3), in_turn.reset(seed=3)
        run_together(at_once, in_turn, before)
        for envs in (at_once, in_turn):
            modify(envs.envs[1])
            modify(envs.envs[2])
        begin_iteration(at_once)
        run_together(at_once, in_turn, 90, seed=1)
        assert (at_once.physics is None) == (change in IN_ANOTHER_WAY)
        said = [f"{env_id} was changed from outside: its copies are stepped one by one from now on, which is slower"]
        assert at_once.notices == (said if change in IN_ANOTHER_WAY else [])
        same(np.array(at_once.get_attr("state")), np.array(in_turn.get_attr("state")))
        for a, b in zip(at_once.reset(seed=6), in_turn.reset(seed=6), strict=True):
            same(a, b)
        run_together(at_once, in_turn, 50)


def test_a_wrapper_around_a_copy_counts():
    at_once, in_turn = pair(EnvConfig("CartPole-v1", 4, max_episode_steps=15))
    with closing(at_once), closing(in_turn):
        at_once.reset(seed=3), in_turn.reset(seed=3)
        run_together(at_once, in_turn, 11)
        for envs in (at_once, in_turn):
            envs.envs[1] = gym.wrappers.TransformReward(envs.envs[1], lambda reward: 2 * reward)
        begin_iteration(at_once)
        assert run_together(at_once, in_turn, 60)[1]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0"])
def test_a_class_that_is_changed_between_steps_moves_as_in_turn(env_id, monkeypatch):
    at_once, in_turn = pair(EnvConfig(env_id, 4, max_episode_steps=40))
    with closing(at_once), closing(in_turn):
        at_once.reset(seed=3), in_turn.reset(seed=3)
        run_together(at_once, in_turn, 11)
        kind = type(at_once.cores[0])
        before = kind.step
        monkeypatch.setattr(kind, "step", lambda env, action: pays_two(before, env, action))
        begin_iteration(at_once)
        run_together(at_once, in_turn, 90)
        assert at_once.step(next(actions(at_once, 1)))[1].tolist() == [2.0] * 4


def test_a_change_counts_without_iterations_after_some_steps():
    with closing(make_vector_env(EnvConfig("CartPole-v1"))) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(8, np.int64))
        replace_step(envs.envs[7].unwrapped)
        rewards = [envs.step(np.zeros(8, np.int64))[1][7] for _ in range(40)]
        assert rewards == sorted(rewards) and rewards[-1] == 2.0


def test_a_change_of_one_among_many_copies_counts_after_some_iterations():
    with closing(make_vector_env(EnvConfig("CartPole-v1", 70))) as envs:
        envs.reset(seed=1)
        replace_step(envs.envs[69].unwrapped)
        rewards = []
        for _ in range(3):
            begin_iteration(envs)
            rewards.append(envs.step(np.zeros(70, np.int64))[1][69])
        assert rewards == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("change", ["step of a copy", "rewards"])
def test_the_state_of_copies_that_were_changed_is_saved_and_restored(change):
    config = EnvConfig("CartPole-v1", 4, max_episode_steps=30)
    first, second = (make_stepper(make_vector_env(config), config) for _ in range(2))
    first.reset(seed=2)
    script = list(actions(first.envs, 100))
    for action in script[:20]:
        first.step(action)
    for env in first.envs.envs:
        CHANGES[change][1](env)
    begin_iteration(first.envs)
    for action in script[20:40]:
        first.step(action)
    assert len(first.notices) == (change == "step of a copy")
    state = first.state_dict()
    for env in second.envs.envs:
        CHANGES[change][1](env)
    assert second.load_state_dict(state) is None
    for action in script[40:]:
        for a, b in zip(first.step(action), second.step(action), strict=True):
            if isinstance(a, np.ndarray):
                same(a, b)


class ChangeAt(pl.Callback):
    """Changes something at the end of an iteration."""

    def __init__(self, iteration, change):
        self.iteration, self.change = iteration, change

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == self.iteration:
            self.change(model)


@pytest.mark.parametrize("change", ["rewards", "step of a copy"])
@pytest.mark.parametrize(("algorithm", "settings"), [(lrl.PPO, {"n_steps": 16, "batch_size": 64}), (lrl.DQN, {"learning_starts": 64})])
def test_copies_that_a_callback_changes_count_from_the_next_iteration_on(change, algorithm, settings, capsys):
    def learned(vectorization):
        def modify(model):
            for env in model.collector.stepper.envs.envs:
                CHANGES[change][1](env)

        pl.seed_everything(3, verbose=False)
        model = algorithm(EnvConfig("CartPole-v1", 8, vectorization), max_env_steps=768, **settings)
        callbacks = [ChangeAt(2, modify)]
        lrl.Trainer(evaluation=None, checkpoint=None, logger=False, accelerator="cpu", enable_progress_bar=False, callbacks=callbacks).fit(
            model
        )
        return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])

    expected = learned("sync")
    assert "one by one" not in capsys.readouterr().out
    assert torch.equal(learned("auto"), expected)
    assert capsys.readouterr().out.count("CartPole-v1 was changed from outside") == (change == "step of a copy")


PATCHED_BEFORE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from functools import wraps

before = CartPoleEnv.step

@wraps(before)
def step(self, action):
    obs, reward, *others = before(self, action)
    return obs, 2.0, *others

CartPoleEnv.step = step

import numpy as np
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env

envs = make_vector_env(EnvConfig("CartPole-v1"))
envs.reset(seed=1)
print(envs.step(np.zeros(8, np.int64))[1].tolist(), type(make_vector_env(EnvConfig("Pendulum-v1"))).__name__)
"""


@pytest.mark.thorough
def test_a_class_that_was_changed_before_the_import_is_stepped_as_it_is(tmp_path):
    (tmp_path / "patched.py").write_text(PATCHED_BEFORE)
    status, out, err = run_python((), "patched.py", tmp_path)
    assert (status, out) == (0, f"{[2.0] * 8} ClassicControlEnvs\n"), err


@pytest.mark.parametrize("env_id", IDS)
def test_auto_steps_several_copies_together(env_id):
    with closing(make_vector_env(EnvConfig(env_id))) as envs:
        assert type(envs) is ClassicControlEnvs and envs.num_envs == 8
        assert PHYSICS[type(envs.cores[0])].pays_from <= 8


@pytest.mark.parametrize(
    "settings",
    [
        {"vectorization": "sync"},
        {"num_envs": 3},
        {"id": "MountainCarContinuous-v0", "num_envs": 7},
        {"wrappers": ["TimeAwareObservation"]},
        {"frame_stack": 2},
        {"parameters": {"gravity": 5.0}},
        {"kwargs": {"render_mode": "rgb_array"}},
        {"id": "lightning_rl/Simple1D-v0"},
        {"id": "Renamed-v0"},
    ],
)
def test_other_environments_are_stepped_one_by_one(settings):
    gym.register("Renamed-v0", f"{__name__}:Renamed", max_episode_steps=20)
    arguments = {"id": "CartPole-v1"} | settings
    try:
        with closing(make_vector_env(EnvConfig(**arguments))) as envs:
            assert type(envs) is TurnVectorEnv
    finally:
        del gym.registry["Renamed-v0"]


def test_an_id_that_was_registered_again_is_stepped_one_by_one(monkeypatch):
    spec = replace(gym.spec("CartPole-v1"), entry_point=f"{__name__}:Renamed")
    monkeypatch.setitem(gym.registry, "CartPole-v1", spec)
    with closing(make_vector_env(EnvConfig("CartPole-v1"))) as envs:
        assert type(envs) is TurnVectorEnv and type(envs.envs[0].unwrapped) is Renamed


def test_actors_step_at_once_too():
    with closing(make_vector_env(resolve_in_actor(EnvConfig("CartPole-v1")))) as envs:
        assert type(envs) is ClassicControlEnvs
    assert resolve_in_actor(EnvConfig("Torch/CartPole-v1")).vectorization == "sync"
    assert resolve_in_actor(EnvConfig("ALE/Pong-v5", atari=True)).vectorization == "sync"


@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "DISABLED"])
def test_other_modes_of_resetting_are_gymnasiums(autoreset):
    with closing(make_vector_env(EnvConfig("CartPole-v1", 8, autoreset=autoreset))) as envs:
        assert type(envs) is gym.vector.SyncVectorEnv


@pytest.mark.parametrize(("algorithm", "env_id"), [(lrl.PPO, "CartPole-v1"), (lrl.PPO, "Pendulum-v1")])
def test_a_run_with_vectorized_copies_learns_the_same_bits_as_a_sync_one(algorithm, env_id):
    def learned(vectorization):
        pl.seed_everything(3, verbose=False)
        model = algorithm(EnvConfig(env_id, 8, vectorization), n_steps=32, batch_size=64, n_epochs=2, max_env_steps=1024)
        lrl.Trainer(evaluation=None, checkpoint=None, logger=False, accelerator="cpu", enable_progress_bar=False).fit(model)
        return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])

    assert torch.equal(learned("auto"), learned("sync"))


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [("sync", "auto"), ("auto", "sync")])
def test_a_run_that_was_stopped_continues_in_the_other_way(before, after, tmp_path):
    env = {"id": "CartPole-v1", "num_envs": 8}
    whole = run(tmp_path / "whole", lrl.PPO, env | {"vectorization": "sync"}, {"n_steps": 4})
    run(tmp_path / "parts", lrl.PPO, env | {"vectorization": before}, {"n_steps": 4}, 1, StopAt(3), "last")
    assert_equal_runs(whole, run(tmp_path / "parts", lrl.PPO, env | {"vectorization": after}, {"n_steps": 4}, 99, None, "last"))


def test_an_environment_or_class_whose_methods_were_replaced_is_stepped_as_it_is(monkeypatch):
    before = CartPoleEnv.step
    with closing(make_vector_env(EnvConfig("CartPole-v1"))) as envs:
        envs.reset(seed=1)
        envs.set_attr("step", lambda action: (np.zeros(4, np.float32), 2.0, False, False, {}))
        assert envs.step(np.zeros(envs.num_envs, np.int64))[1].tolist() == [2.0] * envs.num_envs
    monkeypatch.setattr(CartPoleEnv, "step", lambda env, action: pays_two(before, env, action))
    with closing(make_vector_env(EnvConfig("CartPole-v1"))) as envs:
        assert type(envs) is TurnVectorEnv
        envs.reset(seed=1)
        assert envs.step(np.zeros(envs.num_envs, np.int64))[1].tolist() == [2.0] * envs.num_envs
