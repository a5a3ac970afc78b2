"""Copies of our games as rows: the batched stepper does what the one over single copies does, and runs resume in the middle of games."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_rl import DQN, PPO, SettingError, Trainer, evaluate, load_policy
from lightning_rl.data.opponents import PolicyOpponent, seat_opponents
from lightning_rl.envs.agents.serial import SerialWorld
from lightning_rl.envs.agents.stepper import SIDE, RowStepper, SeatStepper
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.game import GameWorld
from lightning_rl.envs.games.players import random_legal
from lightning_rl.envs.make import make_env, probe_spaces
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.types import tree_leaves
from tests.fitting import fit, tiny
from tests.training.test_resuming import StopAt, assert_equal_runs, run

PREFIX = "lightning_rl.envs.games."


class Script:
    """An opponent whose moves depend on what it sees alone; it notes all that it is asked and told, in the order of copies."""

    def __init__(self):
        self.noted, self.seed = [], None

    def reset(self, seed):
        self.seed = seed

    def begin(self, copies, seats):
        self.noted += [("begin", *each) for each in zip(copies.tolist(), seats.tolist(), strict=True)]

    def finish(self, copies, results):
        self.noted += [("finish", *each) for each in zip(copies.tolist(), results.tolist(), strict=True)]

    def act(self, obs, mask, rows, start):
        self.noted += [("act", *each) for each in zip(rows.tolist(), start.tolist(), strict=True)]
        return choose(obs, mask, 3)

    def get_state(self):
        return {"seed": self.seed}

    def set_state(self, state):
        self.seed = state["seed"]


def choose(obs, mask, salt):
    """Legal moves that look random, and are the same for the same observation."""
    numbers = obs.reshape(len(obs), -1) @ np.arange(1.0, 1 + obs[0].size) + salt
    legal = mask if len(mask) else np.ones((len(obs), 2), bool)
    return np.where(legal, np.sin(numbers[:, None] * np.arange(1, 1 + legal.shape[1])), -2).argmax(1)


def make(env_id, num_envs=4, **settings):
    """Copies stepped together, and the same stepped one after another."""
    config = EnvConfig(f"{PREFIX}{env_id}", num_envs=num_envs, **settings)
    spaces = probe_spaces(config)
    ours = make_fitting_stepper(config, spaces, 0, seats=True)
    world = SerialWorld(lambda index: make_env(config), num_envs, {SIDE: spaces}, max_episode_steps=config.max_episode_steps)
    plain = SeatStepper(world, np.arange(len(spaces.agents))[:, None])
    assert type(ours.world) is GameWorld
    ours.opponent, plain.opponent = Script(), Script()
    return ours, plain


def flat(step):
    return tree_leaves(step._replace(info={}, final_obs=() if step.final_obs is None else step.final_obs))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("env_id", "num_envs", "settings"),
    [
        ("tic_tac_toe", 8, {}),
        ("connect_four", 8, {}),
        ("tic_tac_toe", 7, {"max_episode_steps": 4}),
        ("connect_four", 8, {"max_episode_steps": 7}),
        ("rock_paper_scissors", 8, {}),
        ("biased_rock_paper_scissors", 5, {}),
        ("kuhn_poker", 1, {}),  # cards of several copies are dealt from one seed, and not from one of each
    ],
)
def test_copies_stepped_together_equal_copies_stepped_one_by_one(env_id, num_envs, settings):
    ours, plain = make(env_id, num_envs, **settings)
    (obs, mask), (expected, expected_mask) = ours.reset(1), plain.reset(1)
    ended = 0
    for t in range(60):
        assert np.array_equal(obs, expected) and np.array_equal(mask, expected_mask)
        action = choose(obs, mask, t)
        step, same = ours.step(action), plain.step(action)
        for left, right in zip(flat(step), flat(same), strict=True):
            assert np.array_equal(left, right) and left.dtype == right.dtype
        (obs, mask), (expected, expected_mask) = (step.obs, step.mask), (same.obs, same.mask)
        ended += len(step.ended)
        assert ours.opponent.noted == plain.opponent.noted
    assert ended > 20
    for each in (ours, plain):
        each.opponent.noted.clear()
    left, right = ours.restart_all(), plain.restart_all()
    assert all(np.array_equal(one, other) for one, other in zip(flat(left), flat(right), strict=True))
    assert ours.opponent.noted == plain.opponent.noted


def test_every_row_is_a_copy_and_seats_are_taken_in_turn():
    stepper, _ = make("tic_tac_toe", 3)
    assert stepper.num_envs == 3 and stepper.num_seats == 6 and stepper.seats.tolist() == [0, 1, 0]
    obs, mask = stepper.reset(0)
    assert obs.shape == (3, 3, 3, 2) and mask.sum(1).tolist() == [9, 8, 9] and obs[1, ..., 1].sum() == 1
    while not len((step := stepper.step(choose(obs, mask, 0))).ended):
        obs, mask = step.obs, step.mask
    e = step.ended[0]
    assert stepper.seats[e] == 1 - e % 2 and step.terminated[e] and step.episode_start[e] and step.final_mask[0].all()
    assert step.obs[e].sum() == stepper.seats[e]  # the other has begun the next game


def test_where_all_learn_agents_are_rows_and_critics_that_see_all_have_single_copies():
    config = EnvConfig(f"{PREFIX}rock_paper_scissors", num_envs=3)
    assert type(make_fitting_stepper(config, probe_spaces(config), 0)) is RowStepper
    config = EnvConfig(f"{PREFIX}tic_tac_toe", num_envs=3)
    assert type(make_fitting_stepper(config, probe_spaces(config, "all"), 0).world) is SerialWorld


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", GAMES)
def test_a_state_is_restored_in_the_middle_of_games(env_id):
    config = EnvConfig(env_id, num_envs=5)
    spaces = probe_spaces(config)
    saved, later = (make_fitting_stepper(config, spaces, 0, seats=True) for _ in range(2))
    saved.opponent, later.opponent = Script(), Script()
    obs, mask = saved.reset(2)
    for t in range(7):
        step = saved.step(choose(obs, mask, t))
        obs, mask = step.obs, step.mask
    assert later.load_state_dict(saved.state_dict()) is None
    for t in range(20):
        left, right = (each.step(choose(obs, mask, t)) for each in (saved, later))
        assert all(np.array_equal(one, other) for one, other in zip(flat(left), flat(right), strict=True))
        obs, mask = left.obs, left.mask
    state = saved.state_dict()
    fewer = make_fitting_stepper(EnvConfig(env_id, num_envs=2), spaces, 0, seats=True)
    assert "5 copies" in fewer.load_state_dict(state)
    assert "settings changed" in make_fitting_stepper(
        EnvConfig(env_id, num_envs=5, max_episode_steps=9), spaces, 0, seats=True
    ).load_state_dict(state)
    assert "another kind" in later.load_state_dict({"states": None})
    arrays = state["game"]["arrays"]
    for damage in ({}, {**arrays, "mover": arrays["mover"] + 2}, {**arrays, "over": arrays["over"].astype(float)}):
        assert "could not be restored exactly" in later.load_state_dict({**state, "game": {**state["game"], "arrays": damage}})
    seats = state["seats"]
    for damage in ({"seats": seats - 9}, {"seats": seats[:-1]}, {"seats": "x"}, {"moved": state["moved"].astype(int)}, {"unpaid": seats}):
        assert "could not be restored exactly" in later.load_state_dict({**state, **damage})


def test_a_state_of_an_earlier_version_holds_what_is_unpaid_for_each_copy():
    saved, later = make("tic_tac_toe", 5)[0], make("tic_tac_toe", 5)[0]
    obs, mask = saved.reset(2)
    for t in range(3):
        step = saved.step(choose(obs, mask, t))
        obs, mask = step.obs, step.mask
    state = saved.state_dict()
    unpaid, moved = state.pop("unpaid").reshape(5, 2), state.pop("moved").reshape(5, 2)
    del state["sides"]
    assert later.load_state_dict({**state, "paid": unpaid[np.arange(5), state["seats"]], "moved": moved}) is None
    for t in range(9):
        left, right = (each.step(choose(obs, mask, t)) for each in (saved, later))
        assert all(np.array_equal(one, other) for one, other in zip(flat(left), flat(right), strict=True))
        obs, mask = left.obs, left.mask


def test_lessons_are_refused():
    with pytest.raises(SettingError, match="takes no lessons"):
        make("tic_tac_toe")[0].set_lessons({})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "env_id"), [(PPO, "connect_four"), (DQN, "tic_tac_toe"), (PPO, "kuhn_poker"), (PPO, "rock_paper_scissors")]
)
def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, env_id, tmp_path, capsys):
    env, settings = {"id": f"{PREFIX}{env_id}"}, {"encoder": "mlp"}
    expected = run(tmp_path / "whole", algorithm, env, settings)
    run(tmp_path / "parts", algorithm, env, settings, 1, StopAt(3), "last")
    found = run(tmp_path / "parts", algorithm, env, settings, 99, None, "last")
    assert "start new episodes" not in capsys.readouterr().out
    assert_equal_runs(expected, found)


def test_the_policy_plays_the_other_seats_of_all_copies():
    model, stepper = tiny(PPO, f"{PREFIX}tic_tac_toe", encoder="mlp"), make("tic_tac_toe", 2)[0]
    seat_opponents(stepper, model.network)
    assert isinstance(stepper.opponent, PolicyOpponent)
    first = stepper.reset(0)[0]
    assert np.array_equal(stepper.reset(0)[0], first)
    fit(model)
    assert model.env_steps == 96 and model.num_envs == 2


@pytest.mark.thorough
def test_a_policy_is_evaluated_and_loaded_by_the_id(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(
        PPO({"id": f"{PREFIX}connect_four", "num_envs": 4}, max_env_steps=64, n_steps=8, batch_size=32, net_arch=[8], encoder="mlp")
    )
    result = evaluate(trainer.run_folder, episodes=4)
    assert result["episodes"] == 4 and -1 <= result["return_mean"] <= 1
    obs, mask = np.zeros((2, 6, 7, 2), np.int8), np.eye(7, dtype=bool)[[2, 5]]
    assert load_policy(trainer.run_folder).act(obs, action_mask=mask)[0].tolist() == [2, 5]


def test_random_players_draw_all_legal_moves_alike():
    mask = np.tile([True, False, True], (3000, 1))
    actions = random_legal(None, mask, np.random.default_rng(0))
    assert np.bincount(actions, minlength=3)[1] == 0 and abs((actions == 0).mean() - 0.5) < 0.03
