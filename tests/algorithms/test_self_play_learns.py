"""ML-Agents' tests of self-play, with two walkers who do not see each other: the one that learns does, and a snapshot learns nothing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl

import lightning_rl as lrl

GAME = {"id": "tests.agents.Walks", "num_envs": 8}
PPO = partial(lrl.PPO, n_steps=16, batch_size=64, n_epochs=3, learning_rate=5e-3, net_arch=[32], compile=False)
NEWEST = {"play_against_latest_model_ratio": 1.0, "save_steps": 2000}
FIRST = {"play_against_latest_model_ratio": 0.0, "save_steps": 5000}
"""The opponent stays the first snapshot."""
GOOD, LAST = 0.9, 20
SEEDS = pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])


class Finals(pl.Callback):
    """Keeps what the walkers of each copy got at their ends, game by game."""

    def on_train_batch_end(self, trainer, model, *others):
        world = getattr(model.dataset, "world", None) or model.dataset.collector.stepper.world
        self.copies = [copy.env.unwrapped.finals for copy in world.copies]


def finals(model):
    """Train, and return what the walkers of each copy got at their ends."""
    kept = Finals()
    lrl.Trainer(logger=[], enable_progress_bar=False, evaluation=None, checkpoint=None, callbacks=[kept]).fit(model)
    return kept.copies


def mean_of_last(games):
    """Return the mean over the last games of each copy."""
    return float(np.mean([value for copy in games for value in copy[-LAST // 8 :]]))


def symmetric(seed, self_play):
    """Return the mean of the last finals of learners, and of those who played against them."""
    pl.seed_everything(seed, verbose=False)
    copies = finals(PPO(GAME, max_env_steps=2_500, self_play=self_play))
    # the learner of a copy takes the next seat in each game
    learners = [[game["ab"[(e + k) % 2]] for k, game in enumerate(copy)] for e, copy in enumerate(copies)]
    others = [[game["ab"[(e + k + 1) % 2]] for k, game in enumerate(copy)] for e, copy in enumerate(copies)]
    return mean_of_last(learners), mean_of_last(others)


def asymmetric(seed, steps, self_play):
    """Return the mean of the last finals of both behaviors."""
    pl.seed_everything(seed, verbose=False)
    behaviors = {name: lrl.Behavior(name, partial(PPO, self_play=self_play)) for name in "ab"}
    copies = finals(lrl.MultiAgent(GAME, behaviors, steps))
    return tuple(mean_of_last([[game[name] for game in copy] for copy in copies]) for name in "ab")


@pytest.mark.thorough
@SEEDS
def test_of_two_walkers_of_one_behavior_both_find_their_goals(seed):
    assert min(symmetric(seed, NEWEST)) > GOOD


@pytest.mark.thorough
@SEEDS
def test_against_the_first_snapshot_the_learner_alone_finds_its_goal(seed):
    learner, other = symmetric(seed, FIRST)
    assert learner > GOOD > other


@pytest.mark.thorough
@SEEDS
def test_two_behaviors_that_take_turns_both_find_their_goals(seed):
    assert min(asymmetric(seed, 4_000, {**NEWEST, "team_change": 400})) > GOOD


@pytest.mark.thorough
@SEEDS
def test_against_the_first_snapshot_only_the_behavior_whose_turn_it_is_finds_its_goal(seed):
    waiting, learner = asymmetric(seed, 3_500, {**FIRST, "team_change": 2_000})
    assert learner > GOOD > waiting
