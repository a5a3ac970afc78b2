"""What an algorithm can do alone, it can do as one behavior of several, or is refused in one line."""

from functools import partial

import numpy as np
import pytest

import lightning_rl as lrl
from tests.algorithms.test_multi_agent import A2C, DQN, PPO, SMALL, StopAt, different, fit, made

SAC = partial(lrl.SAC, learning_starts=8, train_freq=4, steps_per_iteration=8, batch_size=8, buffer_size=200, **SMALL)


def shown(action, episodes=4):
    """Episodes of agent a of Together, who always does the same."""
    obs = np.array([[0, t] for t in range(5)], np.float32)
    flags = np.array([False, False, False, True]), np.zeros(4, bool)
    return [lrl.Demonstration(obs, np.full(4, action), np.zeros(4), *flags)] * episodes


@pytest.mark.thorough
@pytest.mark.parametrize("learner", [PPO, A2C, SAC])
def test_one_behavior_clones_demonstrations_and_the_other_does_not(learner, tmp_path):
    cloning = {"demo_path": shown(1), "strength": 30.0, "batch_size": 16}
    plain, cloned = made(a=learner, b=PPO), made(a=partial(learner, behavioral_cloning=cloning), b=PPO)
    fit(plain, tmp_path / "plain")
    fit(cloned, tmp_path / "cloned")
    assert cloned.algorithms["a"](np.array([[0, t] for t in range(4)], np.float32)).tolist() == [1, 1, 1, 1]
    assert cloned.run.newest["a"]["behavioral_cloning/loss"] < 0.7 and "behavioral_cloning/loss" not in cloned.run.newest["b"]
    assert different(plain.algorithms["a"], cloned.algorithms["a"]) != []
    assert different(plain.algorithms["b"], cloned.algorithms["b"]) == []  # what a does changes nothing that b sees


@pytest.mark.thorough
@pytest.mark.parametrize("learner", [PPO, SAC])
def test_one_behavior_imitates_by_gail_and_continues_exactly(learner, tmp_path, capsys):
    imitates = partial(learner, reward_signals={"extrinsic": None, "gail": {"demo_path": shown(1), "use_actions": True}})
    whole, again = made(a=imitates, b=DQN), made(a=imitates, b=DQN)
    fit(whole, tmp_path / "whole")
    assert "a: demonstrations: " in capsys.readouterr().out
    assert {"gail/loss", "rewards/gail"} & {name.removeprefix("train/") for name in whole.run.newest["a"]}
    fit(made(a=imitates, b=DQN), tmp_path / "parts", StopAt(3))
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == []


@pytest.mark.thorough
def test_ppo_with_an_actor_thread_learns_simple_spread(tmp_path):
    model = lrl.PPO({"id": "mpe2.simple_spread_v3", "num_envs": 2}, n_steps=10, batch_size=30, threaded=True, max_env_steps=240, **SMALL)
    trainer = fit(model, tmp_path, evaluation=lrl.EvaluationConfig(every_n_env_steps=120, episodes=2))
    assert model.env_steps == 240 and np.isfinite(float(trainer.callback_metrics["eval/mean_reward"]))


@pytest.mark.parametrize("env", ["mpe2.simple_spread_v3", "tests.agents.Elimination"])
@pytest.mark.parametrize("backend", ["in_process", "threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_actors_step_environments_of_pettingzoo(backend, env, tmp_path):
    model = lrl.IMPALA({"id": env, "num_envs": 2}, n_steps=5, max_env_steps=120, actors={"num_actors": 2, "backend": backend}, **SMALL)
    fit(model, tmp_path)
    assert model.env_steps >= 120


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray starts for many seconds, and warns
@pytest.mark.parametrize("env", ["mpe2.simple_spread_v3", "tests.agents.Elimination"])
def test_actors_that_ray_places_step_agents(env, tmp_path):
    pytest.importorskip("ray")
    model = lrl.IMPALA({"id": env, "num_envs": 2}, n_steps=5, max_env_steps=120, actors={"num_actors": 2, "backend": "ray"}, **SMALL)
    fit(model, tmp_path)
    assert model.env_steps >= 120
