"""Environments receive their parameters, draw them from their own streams, and continue to draw after a restore."""

from contextlib import closing
from dataclasses import replace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import PPO, EnvConfig, EvolutionStrategies
from lightning_rl.actors.evaluator import BuildEvaluator, Generation
from lightning_rl.data.players import make_player
from lightning_rl.envs import LESSONS, PARAMETERS
from lightning_rl.envs.lessons import as_parameters
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.errors import SettingError


def uniform(low, high, **more):
    return {"sampler_type": "uniform", "sampler_parameters": {"min_value": low, "max_value": high, **more}}


def built(env_id, parameters, **settings):
    env = make_env(EnvConfig(env_id, parameters=parameters, **settings))
    env.reset(seed=0)
    return env.unwrapped


class Receiving(gym.Env):
    """Keeps what it is given."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
    mass, given, options = 1.0, None, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        return np.zeros(1, np.float32), {}


class ByMethod(Receiving):
    def set_parameters(self, parameters):
        self.given = parameters


class ByOptions(Receiving):
    metadata: ClassVar = {"parameters": ["mass"]}


def test_a_method_comes_before_options_and_those_before_attributes():
    class Both(ByMethod, ByOptions):
        pass

    for cls, expected in (
        (Both, ({"mass": 2.0}, None, 1.0)),
        (ByMethod, ({"mass": 2.0}, None, 1.0)),
        (ByOptions, (None, {"parameters": {"mass": 2.0}}, 1.0)),
        (Receiving, (None, None, 2.0)),
    ):
        env = EnvParameters(cls(), as_parameters({"mass": 2}))
        env.reset()
        assert (env.unwrapped.given, env.unwrapped.options, env.unwrapped.mass) == expected


class Picky(Receiving):
    def set_parameters(self, parameters):
        raise KeyError("no parameter mas")


def test_an_error_of_set_parameters_is_reported_with_the_setting():
    with pytest.raises(SettingError) as error:
        EnvParameters(Picky(), as_parameters({"mas": 2})).reset()
    assert str(error.value) == "set_parameters raised KeyError: 'no parameter mas'; env.parameters are {'mas': 2.0}"


def test_other_reset_options_are_kept():
    env = EnvParameters(ByOptions(), as_parameters({"mass": 2}))
    env.reset(options={"low": 0.1})
    assert env.unwrapped.options == {"low": 0.1, "parameters": {"mass": 2.0}}


def test_parameters_keep_their_type():
    env = built("Pendulum-v1", {"max_speed": 6.0, "g.scale": 0.5, "m": 2})
    assert [(type(value), value) for value in (env.max_speed, env.g, env.m)] == [(int, 6), (float, 5.0), (float, 2.0)]


def test_the_derived_numbers_of_cartpole_are_updated():
    env = built("CartPole-v1", {"length": 2.0, "masscart": 0.5, "masspole": 0.25})
    assert (env.length, env.total_mass, env.polemass_length) == (2.0, 0.75, 0.5)


def test_a_scale_is_always_relative_to_the_built_value():
    env = make_env(EnvConfig("CartPole-v1", parameters={"gravity.scale": 0.5}))
    for _ in range(3):
        env.reset()
    assert env.unwrapped.gravity == 4.9


def test_a_heavier_cheetah_is_what_mujoco_itself_makes_of_a_total_mass():
    mujoco = pytest.importorskip("mujoco")
    env = built("HalfCheetah-v5", {"model.body_mass.scale": 1.5})
    expected = mujoco.MjModel.from_xml_path(env.fullpath)
    mujoco.mj_setTotalmass(expected, 1.5 * expected.body_mass.sum())
    mujoco.mj_setConst(expected, mujoco.MjData(expected))
    for name in ("body_mass", "body_inertia", "body_subtreemass", "body_invweight0", "dof_invweight0"):
        np.testing.assert_allclose(getattr(env.model, name), getattr(expected, name), rtol=1e-9, err_msg=name)


def test_parts_of_a_simulation_are_named_by_the_model_or_by_their_number():
    parameters = {"model.body_mass.torso": 3.0, "model.geom_friction.floor.0": 0.1, "model.opt.gravity.2": -3.7, "model.body_mass.3": 1.0}
    model = built("HalfCheetah-v5", parameters).model
    assert model.body("torso").mass == 3.0 and model.geom("floor").friction[0] == 0.1 and model.opt.gravity[2] == -3.7
    assert model.body_mass[3] == 1.0


def test_the_lander_falls_with_its_gravity_parameter():
    env = built("LunarLander-v3", {"gravity": -4.0})
    assert env.world.gravity.y == -4.0


@pytest.mark.parametrize(
    ("env_id", "name", "line"),
    [
        ("CartPole-v1", "lenght", "env.parameters.lenght is not a parameter of CartPoleEnv; did you mean length?"),
        ("CartPole-v1", "gravity.x", "env.parameters.gravity.x is not a parameter of CartPoleEnv"),
        ("CartPole-v1", "kinematics_integrator", "env.parameters.kinematics_integrator of CartPoleEnv is not a number"),
        ("CartPole-v1", "action_space.n", "action_space.n cannot be changed: action_space of CartPoleEnv is fixed when it is built"),
        ("Pendulum-v1", "mass", "is not a parameter of PendulumEnv; choose from dt, g, l, m, max_speed, max_torque"),
        ("HalfCheetah-v5", "speed", "is not a parameter of HalfCheetahEnv; choose from frame_skip, model"),
        ("HalfCheetah-v5", "gravity", "is not a parameter of HalfCheetahEnv; did you mean model.opt.gravity.2?"),
        ("HalfCheetah-v5", "model.opt.gravty", "is not a parameter of HalfCheetahEnv; did you mean model.opt.gravity?"),
        ("HalfCheetah-v5", "model.body_mass.torzo", "did you mean model.body_mass.torso?"),
        ("HalfCheetah-v5", "model.opt.gravity.3", "; gravity has 3 numbers"),
        ("HalfCheetah-v5", "model.body_mass", "has 8 numbers: name one, such as model.body_mass.0, or use model.body_mass.scale"),
        ("LunarLander-v3", "wind_power", "env.parameters.wind_power has no effect without wind; set env.kwargs.enable_wind true"),
        ("LunarLander-v3", "enable_wind", "env.parameters.enable_wind of LunarLander is not a number"),
    ],
)  # fmt: skip
def test_an_unknown_parameter_is_reported_in_one_line_with_the_nearest_name(env_id, name, line):
    with pytest.raises(SettingError) as error:
        make_env(EnvConfig(env_id, parameters={name: 1.0}))
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("env_id", "parameters", "name"),
    [
        ("CartPole-v1", {"total_mass": 2.0}, "total_mass"),  # it follows from two others
        ("CartPole-v1", {"gravity": 9.0, "gravity.scale": 2.0}, "gravity"),
        ("HalfCheetah-v5", {"data.qpos.0": 3.0}, "data.qpos.0"),  # each reset begins somewhere
    ],
)
def test_a_parameter_without_effect_is_reported_at_the_first_reset(env_id, parameters, name):
    env = make_env(EnvConfig(env_id, parameters=parameters))
    with pytest.raises(SettingError, match=rf"env.parameters.{name} has no effect: \w+Env or another parameter overwrites it"):
        env.reset(seed=0)


def test_lessons_of_an_unknown_parameter_are_rejected():
    env = EnvParameters(gym.make("CartPole-v1"), as_parameters({"length": 2}))
    with pytest.raises(SettingError, match=r"lenght is not a parameter that this environment draws; did you mean length\?"):
        env.set_lessons({"lenght": LESSONS_OF_LENGTH.until(0)})


def test_an_environment_that_lists_its_parameters_rejects_others():
    with pytest.raises(SettingError, match=r"env.parameters.mas is not a parameter of ByOptions; did you mean mass\?"):
        EnvParameters(ByOptions(), as_parameters({"mas": 2}))


def play(config, steps=80, lessons=None, seed=3):
    """All observations, the parameters of each episode that ended, and the lessons."""
    stepper = make_stepper(make_vector_env(config), config)
    if lessons is not None:
        stepper.set_lessons(lessons)
    generator, seen, drawn, played = np.random.default_rng(0), [], [[] for _ in range(config.num_envs)], []
    seen.append(stepper.reset(seed)[0].copy())
    for _ in range(steps):
        step = stepper.step(generator.integers(2, size=config.num_envs))
        seen.append(step.obs.copy())
        for i in step.ended:
            drawn[i].append(float(step.info[PARAMETERS]["length"][i]))
            played.append(int(step.info[LESSONS]["length"][i]))
    stepper.close()
    return np.stack(seen), drawn, played


PARAMETERS_DRAWN = {"length": uniform(0.3, 3), "masscart": uniform(1, 2)}
RANDOM = EnvConfig("CartPole-v1", num_envs=3, parameters=PARAMETERS_DRAWN, observe_parameters=True, max_episode_steps=12)


@pytest.mark.thorough
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_a_seed_draws_the_same_numbers_with_sync_and_async_and_different_ones_in_each_environment(autoreset):
    config = replace(RANDOM, autoreset=autoreset)
    seen, drawn, _ = play(config)
    others, others_drawn, _ = play(replace(config, vectorization="async"))
    np.testing.assert_array_equal(seen, others)
    values = [value for each in drawn for value in each]
    assert drawn == others_drawn and len(values) > 6 and len(set(values)) == len(values)


@pytest.mark.thorough
def test_another_seed_draws_other_numbers_unless_the_sampler_has_its_own():
    fixed = replace(RANDOM, parameters={"length": uniform(0.3, 3, seed=7)})
    one, other = ([each[0] for each in play(RANDOM, seed=seed)[1]] for seed in (3, 9))
    assert not set(one) & set(other)
    one, other = ([each[0] for each in play(fixed, seed=seed)[1]] for seed in (3, 9))
    assert one == other and len(set(one)) == 3


@pytest.mark.variants
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "LunarLander-v3"])
def test_a_saved_environment_has_the_same_parameters_and_draws_the_next_ones(env_id, vectorization):
    names = {"CartPole-v1": "length", "HalfCheetah-v5": "model.body_mass.scale", "LunarLander-v3": "gravity.scale"}
    config = EnvConfig(env_id, 2, vectorization, parameters={names[env_id]: uniform(0.5, 1.2)}, max_episode_steps=8)
    first, second = (make_stepper(make_vector_env(config), config) for _ in range(2))
    space = first.envs.action_space
    space.seed(0)
    first.reset(1)
    for _ in range(12):
        first.step(space.sample())
    assert second.load_state_dict(first.state_dict()) is None
    for _ in range(12):
        action = space.sample()
        one, other = first.step(action), second.step(action)
        np.testing.assert_array_equal(one.obs, other.obs)
        for i in one.ended:
            assert one.info[PARAMETERS][names[env_id]][i] == other.info[PARAMETERS][names[env_id]][i]
    first.close()
    second.close()


LESSONS_OF_LENGTH = as_parameters(
    {
        "length": {
            "curriculum": [
                {"value": 0.25, "completion_criteria": {}},
                {"value": 0.5, "completion_criteria": {}},
                {"value": 1.0},
            ],
            "replay_old_lessons": 0.25,
        }
    }
)["length"]


def test_without_a_curriculum_the_final_lesson_is_played():
    env = EnvParameters(gym.make("CartPole-v1"), {"length": LESSONS_OF_LENGTH})
    _, info = env.reset(seed=0)
    assert (info[PARAMETERS], info[LESSONS]) == ({"length": 1.0}, {"length": 2})


@pytest.mark.thorough
def test_a_share_of_episodes_plays_an_earlier_lesson():
    env = EnvParameters(gym.make("CartPole-v1"), {"length": LESSONS_OF_LENGTH})
    env.set_lessons({"length": LESSONS_OF_LENGTH.until(2)})
    env.reset(seed=0)
    played = np.array([env.reset()[1][LESSONS]["length"] for _ in range(4000)])
    shares = [(played == lesson).mean() for lesson in range(3)]
    np.testing.assert_allclose(shares, [0.125, 0.125, 0.75], atol=0.028)  # four standard errors of the last


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_lesson_begins_with_the_next_episode_of_each_environment(vectorization):
    config = EnvConfig("CartPole-v1", 2, vectorization, parameters={"length": 1.0}, max_episode_steps=5)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.set_lessons({"length": LESSONS_OF_LENGTH.only(0)})
    stepper.reset(0)
    stepper.set_lessons({"length": LESSONS_OF_LENGTH.only(1)})
    ended = [step.info[PARAMETERS]["length"] for step in (stepper.step(np.arange(2)) for _ in range(10)) if len(step.ended)]
    np.testing.assert_array_equal(ended, [[0.25, 0.25], [0.5, 0.5]])
    stepper.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_without_parameters_refuse_lessons_in_one_line_and_go_on(vectorization):
    config = EnvConfig("CartPole-v1", 2, vectorization)
    with closing(make_stepper(make_vector_env(config), config)) as stepper:
        stepper.reset(0)
        line = r"^CartPole-v1 takes no lessons; build it from settings with env\.parameters, or in EnvParameters$"
        with pytest.raises(SettingError, match=line):
            stepper.set_lessons({"length": LESSONS_OF_LENGTH.only(0)})
        assert stepper.step(np.arange(2)).valid.all() and stepper.restarts == 0


@pytest.mark.thorough
def test_a_replaced_worker_plays_the_lesson_of_the_others():
    config = EnvConfig("CartPole-v1", 2, "async", parameters={"length": 1.0}, max_episode_steps=3)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.set_lessons({"length": LESSONS_OF_LENGTH.only(0)})
    stepper.reset(0)
    stepper.envs.processes[1].kill()
    ended = [step.info[PARAMETERS]["length"] for step in (stepper.step(np.arange(2)) for _ in range(6)) if 1 in step.ended]
    assert stepper.restarts == 1 and ended and ended[0][1] == 0.25
    stepper.close()


def test_numbers_are_appended_to_vectors_and_to_dicts_and_to_nothing_else():
    obs, _ = make_env(RANDOM).reset(seed=0)
    assert obs.shape == (6,) and 0.3 <= obs[4] <= 3 and 1 <= obs[5] <= 2 and obs.dtype == np.float32

    class Keyed(Receiving):
        observation_space = Dict({"position": Box(-1, 1, (1,), np.float32)})

        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return {"position": obs}, info

    env = EnvParameters(Keyed(), as_parameters({"mass": 2}), observe=True)
    obs, _ = env.reset()
    assert env.observation_space.contains(obs) and obs["parameters"] == [2.0]
    with pytest.raises(SettingError, match="parameters cannot be appended to observations"):
        make_env(EnvConfig("FrozenLake-v1", parameters={"nrow": 4}, observe_parameters=True))


@pytest.mark.parametrize("seed", [-1, 7])
def test_an_evaluation_draws_by_its_episodes_whatever_seed_a_sampler_has_and_however_many_environments_play(seed):
    env = EnvConfig("CartPole-v1", parameters={"gravity": uniform(5, 15, seed=seed)})
    model = PPO(env, n_steps=16, batch_size=16, net_arch=[8])
    model.configure_model()
    found = []
    for num_envs in (1, 2, 5):
        drawn = []

        class Note(gym.Wrapper):
            def reset(self, drawn=drawn, **kwargs):
                obs, info = self.env.reset(**kwargs)
                drawn.append(info[PARAMETERS]["gravity"])
                return obs, info

        make_player(env, num_envs, 3, model.spaces, [Note]).play(model.network, 5, 10_000, True)
        found.append(sorted(drawn))
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 5


def test_the_two_policies_of_a_pair_meet_the_same_parameters_in_any_number_of_environments():
    env = EnvConfig("CartPole-v1", parameters={"gravity": uniform(5, 15, seed=7)})
    model = EvolutionStrategies(env)
    model.configure_model()
    names = tuple(name for name, _ in model.network.named_parameters())
    found = []
    for num_envs in (1, 3):
        evaluator = BuildEvaluator(env, num_envs, model.spaces, False, "raise")(0, 0, model.network)
        played = list(evaluator.evaluate(Generation(3, 0, 0.1, names=names), range(2)))
        found.append({(each.job, each.sign): each.finished.parameters["gravity"] for each in played})
    assert found[0] == found[1] and found[0][0, 1] == found[0][0, -1] != found[0][1, 1] == found[0][1, -1]
