"""From settings to environments, and errors when that does not work."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from dataclasses import replace
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FlattenObservation

import lightning_rl as lrl
from lightning_rl import PPO
from lightning_rl.envs.config import EnvConfig, as_config, resolve_to_sync, resolve_vectorization, single_env_config
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.snapshot.vector import fingerprint
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.envs.sync import Contract, TurnVectorEnv
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from lightning_rl.errors import SettingError
from lightning_rl.training.run_folder import environment_name
from tests.agents import Together
from tests.environments import Scripted, ScriptedDict
from tests.fitting import fit


def refusal(build, *args) -> str:
    """The one line that a mistake ends in."""
    with pytest.raises(SettingError) as error:
        build(*args).close()
    line = str(error.value)
    assert len(line.splitlines()) == 1 and len(line) <= 200
    return line


class Doubled(gym.RewardWrapper):
    """Pays `factor` times the reward."""

    def __init__(self, env: gym.Env, factor: float = 2.0) -> None:
        assert factor > 0, "factor must be positive\nand it is not"
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


def test_an_id_may_name_the_module_that_registers_it():
    env = make_env(EnvConfig("tests.environments:Scripted-v0"))
    assert isinstance(env.unwrapped, Scripted)


def test_kwargs_reach_the_constructor():
    assert make_env(EnvConfig("tests.environments:Scripted-v0", kwargs={"period": 5})).unwrapped.period == 5


def test_episodes_are_cut_at_the_limit_that_the_settings_give():
    env = make_env(EnvConfig("CartPole-v1", max_episode_steps=2))
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_frames_are_stacked_oldest_first():
    env = make_env(EnvConfig("tests.environments:Scripted-v0", frame_stack=3))
    env.reset()
    env.step(0)
    obs, *_ = env.step(0)
    assert obs.tolist() == [[0, 0], [0, 1], [0, 2]] and env.observation_space.shape == (3, 2)


def test_wrappers_are_applied_in_order_by_short_name_class_path_and_arguments():
    doubled = {"class_path": f"{__name__}.Doubled", "init_args": {"factor": 3.0}}
    env = make_env(EnvConfig("tests.environments:ScriptedDict-v0", wrappers=["FlattenObservation", doubled, f"{__name__}.Doubled"]))
    assert isinstance(env, Doubled) and isinstance(env.env, Doubled) and isinstance(env.env.env, FlattenObservation)
    assert (env.factor, env.env.factor) == (2.0, 3.0)
    env.reset()
    env.step(0)
    assert env.step(0)[1] == 2.0 * 3.0 * 1.0  # t = 1


def test_a_class_as_a_wrapper_is_kept_as_its_path():
    config = EnvConfig(
        "tests.environments:ScriptedDict-v0", wrappers=[FlattenObservation, {"class_path": Doubled, "init_args": {"factor": 3}}]
    )
    assert isinstance(make_env(config), Doubled)
    stored = PPO(config, net_arch=[8]).hparams["env"]["wrappers"]
    assert stored[1] == {"class_path": f"{__name__}.Doubled", "init_args": {"factor": 3}}
    assert isinstance(make_env(EnvConfig(config.id, wrappers=stored)), Doubled)


def test_a_function_or_a_class_without_a_path_is_refused_as_a_wrapper():
    class Local(gym.Wrapper):
        pass

    for wrapper, name in (
        (lambda env: env, "is a function"),
        (partial(Doubled, factor=2), "use {class_path: …, init_args: {…}}, or a function"),
        (Local, "Local is defined in"),
    ):
        line = refusal(partial(EnvConfig, "CartPole-v1", wrappers=[wrapper]))
        assert line.startswith("env.wrappers: ") and name in line and "builds the wrapped environment as env" in line


def test_masked_numbers_of_an_observation_are_0_in_spaces_resets_and_steps():
    wrapper = {"class_path": "lightning_rl.envs.MaskObservation", "init_args": {"indices": [1, 3]}}
    env = make_env(EnvConfig("CartPole-v1", wrappers=[wrapper]))
    plain = make_env(EnvConfig("CartPole-v1"))
    for masked, shown in ((env.reset(seed=0)[0], plain.reset(seed=0)[0]), (env.step(1)[0], plain.step(1)[0])):
        assert masked.tolist() == [shown[0], 0, shown[2], 0] and shown[1] != 0 and masked in env.observation_space
    assert env.observation_space.high.tolist() == [plain.observation_space.high[0], 0, plain.observation_space.high[2], 0]
    for indices, says in (([4], "indices must be from 0 to 3, got [4]"), ([], "indices must be from 0 to 3, got none")):
        wrapper["init_args"]["indices"] = indices
        assert says in refusal(make_env, EnvConfig("CartPole-v1", wrappers=[wrapper]))
    wrapper["init_args"]["indices"] = [0]
    assert "MaskObservation is for a vector" in refusal(make_env, EnvConfig("tests.environments:ScriptedDict-v0", wrappers=[wrapper]))


def test_a_list_is_a_tuple_for_wrappers_of_gymnasium():
    wrapper = {"class_path": "ReshapeObservation", "init_args": {"shape": [2, 2]}}
    assert make_env(EnvConfig("CartPole-v1", wrappers=[wrapper])).reset()[0].shape == (2, 2)


@pytest.mark.thorough
def test_atari_games_are_seen_as_four_grey_frames():
    envs = make_vector_env(EnvConfig("ALE/Pong-v5", 2, "sync", atari=True))
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    assert envs.envs[0].unwrapped._frameskip == 1  # the wrapper skips four, and must be the only one that does
    envs.close()
    more = make_env(EnvConfig("ALE/Pong-v5", atari=True, frame_stack=2))
    assert more.observation_space.shape == (2, 84, 84)
    more.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cores", "settings", "cls"),
    [
        (2, {"id": "ALE/Pong-v5", "atari": True}, WorkerVectorEnv),
        (1, {"id": "ALE/Pong-v5", "atari": True}, TurnVectorEnv),
        (2, {"id": "ALE/Pong-v5", "atari": True, "num_envs": 1}, TurnVectorEnv),
        (2, {"id": "CartPole-v1"}, TurnVectorEnv),
    ],
)
def test_auto_uses_workers_for_several_atari_games_on_several_cores_and_sync_otherwise(cores, settings, cls, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    config = EnvConfig(**({"num_envs": 2} | settings))
    stepper = make_stepper(make_vector_env(config), config)
    assert type(stepper.envs) is cls
    explicit = replace(config, vectorization="async" if cls is WorkerVectorEnv else "sync")
    assert fingerprint(stepper.envs, explicit) == stepper.settings  # a run continues, whether it was said or chosen
    stepper.close()
    assert resolve_to_sync(config).vectorization == "sync" and resolve_to_sync(explicit) is explicit


def test_worker_settings_are_dropped_when_auto_becomes_sync(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert EnvConfig("ALE/Pong-v5", atari=True, step_timeout=5.0).vectorization == "auto"
    with pytest.raises(SettingError, match="but it is sync; remove it"):
        EnvConfig("CartPole-v1", step_timeout=5.0)
    games = EnvConfig("ALE/Pong-v5", atari=True, step_timeout=5.0)
    assert resolve_vectorization(games).step_timeout == 5.0
    assert single_env_config(games) == EnvConfig("ALE/Pong-v5", 1, "sync", atari=True) and resolve_to_sync(games).step_timeout is None
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert resolve_vectorization(games) == EnvConfig("ALE/Pong-v5", vectorization="sync", atari=True)


@pytest.mark.variants
@pytest.mark.parametrize("vectorization, cls", [("sync", SyncVectorEnv), ("async", WorkerVectorEnv)])
def test_sync_and_async_reset_in_the_same_step_by_default(vectorization, cls):
    for autoreset, name in {None: "SAME_STEP", "NEXT_STEP": "NEXT_STEP", "DISABLED": "DISABLED"}.items():
        envs = make_vector_env(EnvConfig("CartPole-v1", 3, vectorization, autoreset))
        assert isinstance(envs, cls) and envs.num_envs == 3 and envs.metadata["autoreset_mode"].name == name
        envs.close()


@pytest.mark.variants
@pytest.mark.parametrize("vectorization", ["native", "envpool"])
def test_native_and_envpool_have_the_requested_number_of_environments(vectorization):
    envs = make_vector_env(EnvConfig("CartPole-v1", 3, vectorization))
    assert envs.reset(seed=0)[0].shape == (3, 4) and envs.num_envs == 3
    assert envs.single_observation_space.shape == (4,)
    envs.close()


@pytest.mark.thorough
def test_a_single_envpool_environment_can_be_stepped_and_seeded():
    env = make_env(EnvConfig("CartPole-v1", 1, "envpool"))
    starts = [env.reset(seed=seed)[0] for seed in (1, 1, 2)]
    assert starts[0].shape == (4,) and np.array_equal(starts[0], starts[1]) and not np.array_equal(starts[0], starts[2])
    obs, reward, terminated, truncated, _ = env.step(1)
    assert obs[0] == pytest.approx(starts[2][0] + 0.02 * starts[2][1], abs=1e-6)
    assert (reward, terminated, truncated) == (1.0, False, False)
    env.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kwargs", [{}, {"use_fire_reset": False}])
def test_a_single_atari_game_of_ales_own_vector_environment_is_what_training_sees(kwargs):
    env = make_env(EnvConfig("ALE/Pong-v5", 4, "native", kwargs=kwargs))
    starts = [env.reset(seed=seed)[0] for seed in (1, 1)]
    assert starts[0].shape == env.observation_space.shape == (4, 84, 84) and np.array_equal(*starts)
    obs, reward, terminated, truncated, _ = env.step(2)
    assert env.observation_space.contains(obs) and (reward, terminated, truncated) == (0.0, False, False)
    env.close()


def test_a_single_environment_that_is_stepped_natively_is_the_single_version_if_both_are_one_task():
    env = make_env(EnvConfig("CartPole-v1", 4, "native"))
    assert type(env.unwrapped) is CartPoleEnv and env.observation_space.shape == (4,)
    env.close()


def test_python_may_pass_a_function_or_a_ready_vector_environment():
    envs = make_vector_env(lambda: FlattenObservation(ScriptedDict()), 3)
    assert envs.num_envs == 3 and envs.single_observation_space.shape == (1 + 100 + 25,)
    assert as_config(envs) is envs and make_vector_env(envs) is envs
    assert as_config(Scripted).id is Scripted


def test_an_id_and_a_mapping_become_settings():
    assert as_config("CartPole-v1") == as_config({"id": "CartPole-v1"}) == EnvConfig("CartPole-v1")


@pytest.mark.parametrize("vectorization", ["sync", "async", "native", "envpool"])
def test_an_unknown_id_is_reported_with_the_nearest_name(vectorization):
    line = refusal(make_vector_env, EnvConfig("CartPoll-v1", 1, vectorization))
    assert "'CartPoll-v1'" in line and line.endswith("did you mean CartPole-v1?")


def test_an_id_in_the_old_package_gym_is_refused_with_shimmys_wrapper(monkeypatch):
    old = ModuleType("gym")
    old.envs, old.__version__ = SimpleNamespace(registry={"CrafterReward-v1": None}), "0.26.2"  # as gym 0.26 keeps them
    monkeypatch.setitem(sys.modules, "gym", old)
    line = refusal(make_env, EnvConfig("CrafterReward-v1"))
    assert line.startswith(
        "env.id 'CrafterReward-v1' is registered in the old package gym, not in gymnasium; pip install \"shimmy[gym-v26]\""
    )
    assert line.endswith("set env.id GymV26Environment-v0, env.kwargs {env_id: CrafterReward-v1}")


def test_a_module_of_several_agents_is_named_with_its_environment(monkeypatch):
    late = ModuleType("late")
    late.parallel_env = Together
    monkeypatch.setitem(sys.modules, "late", late)
    line = "env.id late is a module with an environment of several agents; name it late.parallel_env"
    assert refusal(make_env, EnvConfig("late")) == line


def test_a_reward_for_each_agent_is_refused_with_the_ways_to_pay_one():
    space = gym.spaces.Tuple([gym.spaces.Discrete(2)] * 2)  # as in level-based foraging and the multi-robot warehouse
    with pytest.raises(SettingError, match=r"one for each agent; pay their sum in a RewardWrapper, or write a PettingZoo ParallelEnv$"):
        Contract(space, "environment 0 of Foraging-8x8-2p-1f-v3").check_reward([0.0, 1.0])


def test_an_unknown_module_is_reported():
    assert refusal(make_env, EnvConfig("nowhere:Thing-v0")).endswith("cannot be built: No module named 'nowhere'")


@pytest.mark.parametrize("vectorization", ["sync", "async", "native", "envpool"])
def test_wrong_constructor_arguments_are_reported(vectorization):
    line = refusal(make_vector_env, EnvConfig("CartPole-v1", 1, vectorization, kwargs={"gravitation": 1}))
    assert line.startswith("the environment CartPole-v1 cannot be built") and "gravitation" in line


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"id": "CartPole-v1", "kwargs": {"sutton_bato_reward": True}}, "sutton_barto_reward"),
        ({"id": "CartPole-v1", "kwargs": {"sutton_bato_reward": True}, "vectorization": "native"}, "sutton_barto_reward"),
        ({"id": "CartPole-v1", "wrappers": [{"class_path": "ClipReward", "init_args": {"min_rewrd": 0}}]}, "min_reward"),
        ({"id": "lightning_rl.envs.games.tic_tac_toe", "kwargs": {"rendr_mode": "ansi"}}, "render_mode"),
    ],
)
def test_a_misspelt_argument_of_an_environment_or_wrapper_gets_a_suggestion(settings, meant):
    build = make_vector_env if "vectorization" in settings else make_env
    assert refusal(build, EnvConfig(**settings)).endswith(f"; did you mean {meant}?")


class Unmade(gym.Env):
    """Lacks an argument that its constructor looks up."""

    def __init__(self, **arguments):
        self.size = arguments["size"]


class Asserting(gym.Env):
    """Asserts without a word."""

    def __init__(self):
        raise AssertionError


def test_a_bare_assertion_of_a_constructor_is_shown():
    line = Asserting.__init__.__code__.co_firstlineno + 1
    shown = f"the environment Asserting cannot be built: AssertionError: raise AssertionError (test_make.py:{line})"
    assert refusal(make_env, Asserting) == shown


def test_a_bare_assertion_of_a_library_is_shown_with_its_place(tmp_path, monkeypatch):
    folder = tmp_path / "dist-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text("def check(joint):\n    assert joint is None\n")
    monkeypatch.syspath_prepend(folder)
    shown = "cannot be built: AssertionError: assert joint is None (a_library.py:2)"
    assert refusal(make_env, partial(importlib.import_module("a_library").check, 1)).endswith(shown)


def test_an_error_of_a_users_constructor_names_the_environment_and_its_line():
    line = Unmade.__init__.__code__.co_firstlineno + 1
    assert refusal(make_env, Unmade) == f"the environment Unmade cannot be built: 'size' (test_make.py:{line})"


def test_several_policies_refuse_a_ready_vector_environment_in_plain_words():
    envs = SyncVectorEnv([partial(gym.make, "CartPole-v1")])
    behavior = {"agents": "*", "learner": {"class_path": "PPO"}}
    line = "a ready vector environment cannot be built again; pass an id, an EnvConfig, or a function that builds one"
    assert refusal(lrl.MultiAgent, envs, {"all": behavior}, 64) == line


def test_any_error_of_a_constructor_becomes_one_line():
    assert "5x5" in refusal(make_env, EnvConfig("FrozenLake-v1", kwargs={"map_name": "5x5"}))  # a bare KeyError


@pytest.mark.parametrize(
    "wrapper, says",
    [
        ("FlattenObservatio", "there is no FlattenObservatio; did you mean FlattenObservation?"),
        ("nowhere.Wrapper", "there is no nowhere.Wrapper"),
        (3, "takes class paths or {class_path: …, init_args: {name: value}}, got 3"),
        ({"class_path": 5}, "got {'class_path': 5}"),
        ({"class_path": "TimeLimit", "init_args": [20]}, "got {'class_path': 'TimeLimit', 'init_args': [20]}"),
        ({"class_path": "FlattenObservation", "init_arg": {}}, "takes class paths or {class_path: …, init_args: {name: value}}, got"),
        ({"class_path": "RescaleAction", "init_args": {"mini": 1}}, "RescaleAction rejects its arguments: "),
        ({"class_path": f"{__name__}.Doubled", "init_args": {"factor": -1}}, "Doubled rejects its arguments: factor must be positive"),
    ],
)
def test_a_wrapper_that_cannot_be_applied_is_reported(wrapper, says):
    line = refusal(make_env, EnvConfig("CartPole-v1", wrappers=[wrapper]))
    assert line.startswith("env.wrappers") and says in line


@pytest.mark.parametrize(
    "setting, says",
    [
        ({"id": "CartPole-v1", "num_env": 3}, "env.num_env is not a setting; did you mean num_envs?"),
        ({"num_envs": 3}, "env.id is missing; give the id of an environment such as CartPole-v1"),
        ({"id": 7}, "env.id must be the id of an environment such as CartPole-v1, or a class or function that builds one; got 7"),
        ({"id": Scripted, "vectorization": "native"}, "env.vectorization native is for registered environments of one agent"),
        ({"id": "CartPole-v1", "num_envs": 0}, "env.num_envs must be >= 1, got 0"),
        ({"id": "CartPole-v1", "max_episode_steps": 1.5}, "env.max_episode_steps must be an integer >= 1, got 1.5"),
        ({"id": "CartPole-v1", "vectorization": "synk"}, "'synk'; did you mean sync?"),
        ({"id": "CartPole-v1", "autoreset": "SAME"}, "env.autoreset must be one of SAME_STEP, NEXT_STEP, DISABLED, got 'SAME'"),
        ({"id": "CartPole-v1", "vectorization": "native", "frame_stack": 2}, "env.frame_stack does not work with vectorization native"),
        (7, "env must be an id such as CartPole-v1, an EnvConfig, a gymnasium environment or vector environment, or a class or function"),
        ([Scripted, Scripted], "or a class or function that builds one; got [<class"),
    ],
)
def test_invalid_settings_are_rejected(setting, says):
    assert says in refusal(as_config, setting)


@pytest.mark.parametrize("registered", ["by gymnasium", "by gymnasium-robotics"])
def test_an_old_mujoco_environment_is_refused_with_the_version_to_use(monkeypatch, registered):
    if registered == "by gymnasium-robotics":
        old = EnvSpec("HalfCheetah-v3", entry_point="gymnasium_robotics.envs.mujoco.half_cheetah_v3:HalfCheetahEnv")
        monkeypatch.setitem(gym.registry, old.id, old)
    line = refusal(make_env, EnvConfig("HalfCheetah-v3"))
    assert line == "HalfCheetah-v3 needs mujoco_py, which is no longer maintained; use HalfCheetah-v5"


@pytest.mark.parametrize(("old", "newest"), [("FetchReach-v1", "FetchReach-v4"), ("HandReach-v0", "HandReach-v3")])
def test_an_old_robot_is_refused_with_the_version_to_use(old, newest):
    assert refusal(make_env, EnvConfig(old)) == f"{old} needs mujoco_py, which is no longer maintained; use {newest}"


@pytest.mark.parametrize(
    "package, config, extra",
    [
        ("Box2D", EnvConfig("LunarLander-v3"), "box2d"),
        ("mujoco", EnvConfig("Ant-v5"), "mujoco"),
        ("ale_py", EnvConfig("ALE/Pong-v5"), "atari"),
        ("cv2", EnvConfig("ALE/Pong-v5", atari=True), "atari"),
        ("envpool", EnvConfig("CartPole-v1", vectorization="envpool"), "envpool"),
        ("minigrid", EnvConfig("MiniGrid-Empty-5x5-v0"), "minigrid"),
        ("pettingzoo", EnvConfig("lightning_rl/ConnectFour-v0"), "pettingzoo"),
    ],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch, package, config, extra):
    users = (
        "gymnasium.envs.box2d",
        "gymnasium.envs.mujoco",
        "lightning_rl.envs.examples",
    )  # they look for their package when first imported
    for module in [name for name in sys.modules if name.startswith((*users, f"{package}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(make_env, config).endswith(f'run: pip install "lightning_rl[{extra}]"')


@pytest.mark.parametrize(("env_id", "atari"), [("HalfCheetah-v5", False), ("ALE/Pong-v5", True)])
def test_warnings_of_simulators_go_to_the_log_and_not_to_stderr_or_a_file(env_id, atari, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_env(EnvConfig(env_id, atari=atari)).close()
    assert capfd.readouterr().err == "" and list(tmp_path.iterdir()) == []


def test_copies_of_a_ready_environment_are_made_from_its_id_and_arguments():
    made = gym.make("Pendulum-v1", g=3.0, render_mode="rgb_array", max_episode_steps=7)
    assert as_config(made) == EnvConfig("Pendulum-v1", kwargs={"g": 3.0}, max_episode_steps=7)


@pytest.mark.parametrize(
    "ready", [lambda: Scripted(period=3), lambda: gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: 2 * reward)]
)
def test_a_ready_environment_without_a_name_is_copied(ready):
    env = ready()
    copied, other = (as_config(env)() for _ in range(2))
    copied.reset(seed=1)
    env.reset(seed=1)
    for (obs, reward, *_), (theirs, paid, *_) in [(copied.step(1), env.step(1)) for _ in range(2)]:
        assert reward == paid and np.array_equal(obs, theirs)
    assert copied is not other


def test_an_environment_that_cannot_be_copied_is_refused_in_one_line():
    env = Scripted()
    env.lock = threading.Lock()
    assert "cannot be copied" in (line := refusal(as_config, env)) and "a function that builds it" in line


@pytest.mark.parametrize("ready", [lambda: gym.make("CartPole-v1"), Scripted])
def test_a_ready_environment_with_a_method_that_was_replaced_is_refused_in_one_line(ready):
    env = ready()
    env.unwrapped.step = lambda action: (np.zeros(2, np.float32), 7.0, True, False, {})
    line = refusal(as_config, env)
    assert "step was replaced, which copies would not have" in line and "a function that builds it" in line
    wrapped = gym.wrappers.TimeLimit(ready(), 5)
    wrapped.reset = MethodType(lambda self, **named: (None, {}), wrapped)
    assert "reset was replaced" in refusal(as_config, wrapped)
    named = ready()
    named.unwrapped.step = named.unwrapped.step  # its own
    assert as_config(named)


@pytest.mark.parametrize("where", [lambda env: env, lambda env: env.unwrapped], ids=["wrapper", "unwrapped"])
def test_spaces_that_were_assigned_to_a_ready_environment_are_those_of_its_copies(where):
    env = gym.make("CartPole-v1")
    where(env).observation_space = Box(-9, 9, (4,))
    copied = as_config(env)()
    assert copied.observation_space == Box(-9, 9, (4,)) and copied.unwrapped is not env.unwrapped


def test_a_run_learns_from_a_ready_environment_and_can_be_evaluated(tmp_path):
    model = PPO(gym.make("CartPole-v1"), n_steps=2, batch_size=16, net_arch=[8], max_env_steps=32)
    fit(model)
    assert model.env_steps == 32 and lrl.evaluate(model, episodes=2, num_envs=2)["episodes"] == 2


def test_the_folder_of_a_run_in_a_ready_environment_without_a_name_is_named_for_its_class():
    environment = gym.wrappers.TimeLimit(Scripted(), 50)
    model = PPO(environment, n_steps=2, batch_size=16, net_arch=[8], max_env_steps=32)
    assert environment_name(model.env) == "Scripted"


def test_the_folder_of_a_run_is_named_for_what_a_lambda_builds():
    named = {"Scripted": lambda: Scripted(), "CartPole-v1": lambda: gym.make("CartPole-v1"), "Together": lambda: Together()}
    for name, build in named.items():
        assert environment_name(PPO(build, n_steps=2, batch_size=16, net_arch=[8], max_env_steps=32).env) == name


def test_a_function_that_forgets_to_return_its_environment_is_reported():
    def build():
        gym.make("CartPole-v1")

    expected = "build builds NoneType, which is neither a gymnasium.Env nor a PettingZoo environment"
    assert refusal(make_env, build) == expected


CHANGES = {"CartPole-v1": {"length": 2.0, "gravity": 20.0}, "LunarLander-v3": {"wind_power": 3.0}}


@pytest.mark.parametrize(("env_id", "changes"), CHANGES.items())
def test_copies_of_a_ready_environment_that_was_changed_are_changed_alike(env_id, changes):
    made = gym.make(env_id)
    vars(made.unwrapped).update(changes)
    builder = pickle.loads(pickle.dumps(as_config(made)))
    one, other = builder(), builder()
    assert environment_name(builder) == env_id
    for env in (one, other):
        assert {name: getattr(env.unwrapped, name) for name in changes} == changes and env.unwrapped is not made.unwrapped
        env.reset(seed=1)
    assert np.array_equal(one.step(1)[0], other.step(1)[0])


class Sized(gym.Env):
    """Knows no `render_mode`, counts what is built, and holds something of which there is one."""

    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)
    built, most = 0, 9

    def __init__(self, size=3):
        Sized.built += 1
        if Sized.built > Sized.most:
            raise OSError("the port is taken")
        self.size, self.best = size, 0

    def reset(self, *, seed=None, options=None):
        self.best += 1
        return np.zeros(1, np.float32), {}


gym.register("Sized-v0", Sized)


def test_a_ready_environment_is_known_by_its_settings_whatever_it_takes_and_however_it_was_used():
    Sized.built, made = 0, gym.make("Sized-v0", size=4, disable_env_checker=True)
    assert as_config(made) == EnvConfig("Sized-v0", kwargs={"size": 4})
    made.unwrapped.size = np.array([4, 5])  # no number any more
    assert as_config(made) == EnvConfig("Sized-v0", kwargs={"size": 4})
    made.reset()
    built = Sized.built
    assert as_config(made) == EnvConfig("Sized-v0", kwargs={"size": 4}) and Sized.built == built
    Sized.built = 8
    other = gym.make("Sized-v0", disable_env_checker=True)  # the last one that can be built
    assert as_config(other) == EnvConfig("Sized-v0")


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [20, 100])
def test_the_longest_episode_of_an_atari_game_is_in_steps_of_the_agent(limit):
    env = make_env(EnvConfig("ALE/Pong-v5", atari=True, max_episode_steps=limit))
    for seed in range(3):  # each with another number of steps before the first
        env.reset(seed=seed)
        steps = 1
        while not any(env.step(0)[2:4]):
            steps += 1
        assert steps == limit
    env.close()


def test_a_user_may_switch_gymnasiums_checks_on():
    env = make_env(EnvConfig("CartPole-v1", kwargs={"disable_env_checker": False}))
    assert "PassiveEnvChecker" in str(env)
