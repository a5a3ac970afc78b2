"""Evolution strategies as runs."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from itertools import pairwise

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch
from torch.nn.utils import prune

from lightning_rl import GRU, LSTM, PPO, ActorsConfig, EvolutionStrategies, SettingError
from lightning_rl.actors.evaluator import BuildEvaluator, NumpyPopulation
from lightning_rl.training.loading import take_weights
from tests.environments import Anything, Scripted
from tests.fitting import Rows, fit, tiny, weights

CARTPOLE = {"episodes_per_generation": 8, "normalize_obs": "running", "normalize_obs_share": 0.5, "max_env_steps": 600, "sigma": 0.1}


def train(num_envs=2, actors=None, callbacks=(), env_id="CartPole-v1", **settings):
    """Train on CartPole for a few generations with the same seed."""
    model = tiny(EvolutionStrategies, env_id, env={"num_envs": num_envs}, actors=actors, **CARTPOLE | settings)
    trainer = fit(model, callbacks=list(callbacks))
    return model, trainer


def learned(model):
    """Return all weights and statistics."""
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.mark.thorough
@pytest.mark.parametrize("num_envs, num_actors", [(1, 1), (7, 1), (30, 1), (2, 2), (3, 4)], ids=lambda number: str(number))
def test_the_number_of_evaluators_and_environments_changes_no_bit(num_envs, num_actors):
    (expected, _), (found, _) = train(), train(num_envs, ActorsConfig(num_actors, "in_process"))
    assert torch.equal(learned(found), learned(expected))
    assert (found.env_steps, found.episodes, found.updates) == (expected.env_steps, expected.episodes, expected.updates)
    assert expected.updates > 2 and not torch.equal(weights(expected), weights(train(seed=1)[0]))


class Kill(pl.Callback):
    """Kills a process while the second generation is requested, and counts restarts."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        workers = pl_module.collector.workers
        if batch_idx == 0:
            workers.processes[0].process.kill()
        self.restarts = workers.restarts


@pytest.mark.thorough
def test_processes_with_an_environment_that_a_script_registered_and_a_restart_change_no_bit(capsys):
    gym.register("OnlyHere-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
    kill = Kill()
    (expected, _), (found, _) = train(), train(3, {"num_actors": 2}, [kill], "OnlyHere-v0")
    del gym.registry["OnlyHere-v0"]
    assert torch.equal(learned(found), learned(expected))
    assert kill.restarts == 1 and "was restarted: it died" in capsys.readouterr().out


@pytest.mark.parametrize("kind", Anything.action_spaces)
@pytest.mark.parametrize("stochastic", [False, True])
def test_actions_of_all_kinds(kind, stochastic):
    env = {"kwargs": {"action": kind}}
    model = tiny(EvolutionStrategies, "tests.environments:Anything-v0", env=env, max_env_steps=40, stochastic=stochastic)
    assert fit(model).global_step == 2  # 4 episodes of 5 steps each


@pytest.mark.parametrize("kind", Anything.observation_spaces)
def test_observations_of_all_kinds(kind):
    env = {"kwargs": {"observation": kind}}
    settings = {"normalize_obs": "running", "normalize_obs_share": 1.0, "encoder_features": 8, "max_env_steps": 40}
    model = tiny(EvolutionStrategies, "tests.environments:Anything-v0", env=env, **settings)
    before = weights(model)
    fit(model)
    assert model.updates == 2 and not torch.equal(weights(model), before)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [LSTM(4, 4), pytest.param(GRU(4, 4), marks=pytest.mark.slow)])
def test_policies_with_memory_learn_to_remember(memory):
    settings = {"learning_rate": 0.05, "sigma": 0.1, "shaping": "centred_ranks", "memory": memory, "l2": 0.0}
    model = tiny(EvolutionStrategies, "tests.environments:Recall-v0", max_env_steps=4_000, episodes_per_generation=80, **settings)
    fit(model)
    first, second = torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1)
    start = torch.ones(2, dtype=torch.bool)
    _, after = model.network.sample(first, model.network.initial_memory(2), start, deterministic=True)
    action, _ = model.network.sample(second, after, ~start, deterministic=True)
    assert action.tolist() == [0, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("action, best", [("discrete", [0, 1]), ("box", [-0.5, 0.5])])
def test_the_best_action_of_each_observation_is_learned(action, best):
    settings = {"learning_rate": 0.03, "sigma": 0.1, "shaping": "centred_ranks", "l2": 0.0, "env": {"kwargs": {"action": action}}}
    model = tiny(EvolutionStrategies, "tests.environments:ObservedAction-v0", max_env_steps=6_000, episodes_per_generation=100, **settings)
    fit(model)
    found, _ = model.network.sample(torch.tensor([[-1.0], [1.0]]), deterministic=True)
    assert found.flatten().tolist() == pytest.approx(best, abs=0.1)


# ---------------------------------------------------------------- generations


def lengths(**settings):
    """Train; return the lengths of the episodes of each generation, and the rows of the log."""
    model, seen, rows = tiny(EvolutionStrategies, **settings), [], Rows()
    end_update = model.end_update
    model.end_update = lambda results: (seen.append((results.generation, results.lengths)), end_update(results))
    fit(model, logger=rows)
    return seen, rows.rows


class PlayAgain(pl.Callback):
    """Plays the jobs of each generation again with the weights after the last step."""

    returns: list[torch.Tensor]

    def on_train_start(self, trainer, pl_module):
        self.network, self.returns = deepcopy(pl_module.network), []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        build = BuildEvaluator(pl_module.env, 3, pl_module.spaces, False, "raise")
        played = build(0, 0, self.network).evaluate(batch.generation, range(len(batch.returns)))
        returns = {(each.job, each.sign): each.finished.return_ for each in played}
        self.returns.append(torch.tensor([[returns[job, sign] for sign in (1, -1)] for job in range(len(batch.returns))]))
        assert torch.equal(self.returns[-1], batch.returns.float())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.network = deepcopy(pl_module.network)


@pytest.mark.thorough
def test_every_generation_begins_with_the_newest_weights():
    again = PlayAgain()
    train(callbacks=[again], learning_rate=0.1)
    assert len(again.returns) > 2 and not torch.equal(again.returns[0], again.returns[1])


class Changes(pl.Callback):
    """Changes the network after the second generation, and notes how many numbers evaluators perturb and the policy learns in each."""

    def __init__(self, change):
        self.change, self.sizes = change, []

    def on_train_batch_end(self, trainer, model, outputs, results, batch_idx):
        learned = sum(parameter.numel() for parameter in model.network.parameters() if parameter.requires_grad)
        self.sizes.append((len(results.generation.names), learned))
        if len(self.sizes) == 2:
            self.change(model.network.actor[0])


@pytest.mark.thorough
def test_a_layer_that_is_frozen_during_a_run_stays_and_the_others_learn_from_their_own_noise(monkeypatch):
    perturbed = []
    monkeypatch.setattr(
        NumpyPopulation, "set", lambda self, k, noise, own=NumpyPopulation.set: (perturbed.append(len(noise)), own(self, k, noise))
    )
    changes = Changes(lambda layer: (layer.requires_grad_(False), setattr(changes, "before", layer.weight.clone())))
    model, _ = train(callbacks=[changes], learning_rate=0.1, max_env_steps=1200)
    # layers of 4 x 8 + 8 and 8 x 2 + 2 numbers, then only the second
    assert set(changes.sizes[:2]) == {(4, 58)} and set(changes.sizes[2:]) == {(2, 18)}
    assert perturbed[: 2 * 8] == [58] * 16 and set(perturbed[2 * 8 :]) == {18}
    assert torch.equal(model.network.actor[0].weight, changes.before)


@pytest.mark.thorough
def test_a_layer_that_is_pruned_during_a_run_learns_on_and_evaluators_that_lack_its_weights_are_one_line():
    changes = Changes(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5))
    model, _ = train(callbacks=[changes], learning_rate=0.1, max_env_steps=3000)
    model.network.actor(torch.zeros(1, 4))  # which applies the mask
    assert len(changes.sizes) > 3 and int((model.network.actor[0].weight == 0).sum()) == 16
    with pytest.raises(SettingError, match=r"^evaluators have no actor\.0\.weight_orig: what is new in the network after they started"):
        train(callbacks=[Changes(changes.change)], actors=ActorsConfig(1, "threads"))


class Closing(Scripted):
    """Counts how many were opened and closed."""

    opened, closed = 0, 0

    def __init__(self):
        super().__init__()
        Closing.opened += 1

    def close(self):
        Closing.closed += 1


@pytest.mark.thorough
def test_environments_are_closed_after_a_run_and_after_an_exception():
    for error in (None, RuntimeError("in the middle")):
        model = EvolutionStrategies(Closing, episodes_per_generation=4, max_env_steps=20)
        if error is None:
            fit(model)
        else:
            model.end_update = lambda results, error=error: (_ for _ in ()).throw(error)
            with pytest.raises(RuntimeError, match="in the middle"):
                fit(model)
        assert model.collector is None
    assert Closing.opened == Closing.closed == 2 * (1 + 8)  # one to look at, and those of the evaluator


def test_a_generation_grows_by_whole_rounds_until_it_has_its_steps():
    seen, _ = lengths(episodes_per_generation=6, min_steps_per_generation=50, max_env_steps=1)
    assert [tuple(each.shape) for _, each in seen] == [(9, 2)]  # 24 steps a round of 4 each


@pytest.mark.thorough
def test_stragglers_are_cut_at_a_multiple_of_the_mean_length_of_the_generation_before():
    settings = {"episodes_per_generation": 20, "max_env_steps": 1500, "sigma": 0.5, "learning_rate": 0.1, "shaping": "centred_ranks"}
    seen, _ = lengths(env_id="CartPole-v1", max_length_ratio=1.5, **settings)
    assert seen[0][0].longest is None and len(seen) > 2
    for (_, before), (generation, here) in pairwise(seen):
        assert generation.longest == round(1.5 * before.mean().item()) and here.max() <= generation.longest
    assert any((here == generation.longest).any() for generation, here in seen[1:])


def test_sigma_follows_its_schedule():
    seen, rows = lengths(sigma={"schedule": "linear", "start": 0.5, "end": 0.1}, log_interval=1)
    expected = [0.5 - 0.4 * k / 6 for k in range(6)]
    assert [generation.sigma for generation, _ in seen] == pytest.approx(expected)
    assert [row["train/sigma"] for _, row in rows] == pytest.approx(expected)
    assert [generation.number for generation, _ in seen] == list(range(6))


def test_equal_episodes_leave_only_the_pull_of_l2():
    settings = {"shaping": "centred_ranks", "optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "max_env_steps": 20}
    for l2, factor in ((0.0, 1.0), (0.5, 0.95)):
        model = tiny(EvolutionStrategies, "tests.environments:Anything-v0", l2=l2, **settings)
        before = model.network.actor[0].weight.detach().clone()
        fit(model)
        assert model.updates == 1 and torch.allclose(model.network.actor[0].weight, factor * before, rtol=1e-6)


def test_the_value_function_and_the_action_noise_do_not_change():
    model = tiny(EvolutionStrategies, "tests.environments:ScriptedBox-v0", stochastic=True, action_noise=0.25)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    fit(model)
    moved = {name.partition(".")[0] for name, value in model.network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"actor"} and model.network.distribution.log_std.exp().tolist() == pytest.approx([0.25] * 2)


def test_training_can_begin_with_the_weights_of_ppo(tmp_path):
    ppo = tiny(PPO, "CartPole-v1")
    fit(ppo).save_checkpoint(tmp_path / "ppo.ckpt")
    model = tiny(EvolutionStrategies, "CartPole-v1", seed=3)
    take_weights(model, tmp_path / "ppo.ckpt")
    assert torch.equal(weights(model), weights(ppo))


@pytest.mark.thorough
def test_lessons_follow_one_another(capsys):
    length = {"curriculum": [{"value": 1.0, "completion_criteria": {"threshold": 5, "min_lesson_length": 20}}, {"value": 2.0}]}
    rows = Rows()
    model = tiny(EvolutionStrategies, "CartPole-v1", env={"parameters": {"length": length}}, episodes_per_generation=16, max_env_steps=900)
    fit(model, logger=rows)
    lessons = [row["curriculum/length/lesson"] for _, row in rows.rows]
    assert lessons[0] == 0 and lessons[-1] == 1 and "goes to lesson 2 of 2" in capsys.readouterr().out
    assert model.collector is None and {played for _, row in rows.rows for played in [row["parameters/length"]]} >= {1.0}


def test_lessons_for_an_environment_that_takes_none_are_an_error():
    model = tiny(EvolutionStrategies, "CartPole-v1")
    with pytest.raises(SettingError, match="CartPole-v1 takes no lessons"):
        fit(model, callbacks=[SetLessons()])


class SetLessons(pl.Callback):
    """Sets lessons at the start of training."""

    def on_train_start(self, trainer, pl_module):
        pl_module.collector.set_lessons({"length": {"values": [1.0], "replay": 0.0, "first": 0}})


# ---------------------------------------------------------------- invalid settings


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"episodes_per_generation": 5}, "episodes_per_generation 5 must be even: each job has two"),
        ({"shaping": "rank"}, "shaping must be one of centred_ranks, .* got 'rank'"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, got 'lion'"),
        ({"sigma": -1.0}, "sigma must be >= 0, got -1.0"),
        ({"sigma": 0.0}, "sigma must be > 0, got 0.0"),
        ({"max_length_ratio": 0.5}, "max_length_ratio must be >= 1, got 0.5"),
        ({"gamma": 0.9}, "gamma is not a setting of EvolutionStrategies"),
        ({"actors": {"ordered": True}}, "actors.ordered does not apply to EvolutionStrategies"),
        ({"actors": {"queue_factor": 3}}, "actors.queue_factor does not apply to EvolutionStrategies"),
        ({"env": {"vectorization": "async"}}, "env.vectorization async: each environment begins its episodes when its weights change"),
    ],
)
def test_invalid_settings_are_one_line(settings, line):
    with pytest.raises(SettingError, match=line) as refused:
        tiny(EvolutionStrategies, "CartPole-v1", **settings)
    assert "\n" not in str(refused.value)


def test_a_ready_vector_environment_is_an_error():
    model = EvolutionStrategies(gym.make_vec("CartPole-v1", 2, "sync"))
    with pytest.raises(SettingError, match="actors build their environments themselves"):
        fit(model)


@pytest.mark.variants
@pytest.mark.parametrize("actors", [None, ActorsConfig(num_actors=1)])
def test_bad_values_of_a_generation_are_counted_and_the_first_is_reported(actors, capsys):
    rows, kwargs = Rows(), {"door": "reward", "value": math.nan, "at": 7, "length": 2}
    settings = {"env": {"num_envs": 1, "kwargs": kwargs}, "episodes_per_generation": 4, "max_env_steps": 40, "log_interval": 1}
    model = tiny(EvolutionStrategies, "tests.poisoned:Poisoned-v0", actors=actors, on_nan="skip_update", **settings)
    fit(model, logger=rows)
    assert [row["rollout/replaced_steps"] for _, row in rows.rows] == [2.0, 2.0]
    line = r"reward is nan in a generation, at step 2 of the episode with seed \d+: replaced by the last finite one \(reward: 0\)"
    assert len(re.findall(line, capsys.readouterr().out)) == 1
