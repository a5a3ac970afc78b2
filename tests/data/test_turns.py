"""Behaviors of an asymmetric game take turns learning, against past selves of each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.data.self_play import NEWEST, Game
from lightning_rl.errors import NotFiniteError, SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.types import tree_leaves
from tests.agents import Together, Visited
from tests.algorithms.test_multi_agent import DQN, POCA, PPO, fit
from tests.algorithms.test_multi_agent import StopAt as StopAfter
from tests.training.test_resuming import StopAt, assert_equal_runs

PAST = {"save_steps": 24, "team_change": 24}


class Three(Together):
    """Together with a third agent, and episodes of five steps, which are in progress where iterations of four or six end."""

    names: ClassVar = ("a", "b", "c")
    length = 5


class Five(Together):
    """Together with five steps."""

    length = 5


class Payday(Together):
    """In an episode of two steps a gets 1 and then -3, b nothing: it has lost, though not at every time."""

    length = 2

    def pay(self, agent, action):
        return {0: 1.0, 1: -3.0}[self.t] if agent == "a" else 0.0


class Broken(Five):
    """b sees NaN in the second step of each episode."""

    def observe(self, agent):
        return np.full(2, np.nan, np.float32) if agent == "b" and self.t == 2 else super().observe(agent)


class Watch(pl.Callback):
    """Notes whose iterations were full, and which rows of theirs begin or end episodes or are experience."""

    def __init__(self):
        self.full, self.starts, self.valid, self.truncated = [], [], [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.full.append(list(batch))
        for name, item in batch.items():
            if isinstance(item, lrl.types.Rollout):
                self.starts.append((name, item.episode_start.clone()))
                self.valid.append((name, item.valid.clone()))
                self.truncated.append((name, item.truncated.clone()))


def made(env=Five, steps=192, seed=3, past=PAST, more=None, **learners):
    pl.seed_everything(seed, verbose=False)
    learners = learners or {"a": PPO, "b": PPO}
    behaviors = {name: lrl.Behavior(name, partial(learner, self_play=past)) for name, learner in learners.items()}
    behaviors |= {name: lrl.Behavior(f"{name}*", learner) for name, learner in (more or {}).items()}
    return lrl.MultiAgent({"id": f"{env.__module__}.{env.__name__}", "num_envs": 2}, behaviors, steps)


def weights(network):
    return {name: each.clone() for name, each in network.state_dict().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Learned(pl.Callback):
    """Notes which behaviors changed in each iteration."""

    def __init__(self):
        self.changed = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.before = {name: weights(each.network) for name, each in model.algorithms.items()}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.changed.append([name for name, each in model.algorithms.items() if not equal(self.before[name], each.network.state_dict())])


@pytest.mark.thorough
def test_one_learns_at_a_time_and_the_turn_changes_where_its_iteration_is_full(tmp_path):
    watch, learned, model = Watch(), Learned(), made(steps=120)
    fit(model, tmp_path, watch, learned)
    order = ["a", "a", "b", "b", "a", "a", "b", "b", "a", "a"]  # 12 steps an iteration, 24 a turn
    assert watch.full == learned.changed == [[name] for name in order]
    assert {name: each.env_steps for name, each in model.algorithms.items()} == {"a": 72, "b": 48} and model.env_steps == 120


@pytest.mark.thorough
def test_turns_go_in_the_order_in_which_behaviors_are_given(tmp_path):
    watch, model = Watch(), made(Three, steps=96, c=PPO, a=PPO, b=PPO)
    fit(model, tmp_path, watch)
    assert watch.full == [[name] for name in ["c", "c", "a", "a", "b", "b", "c", "c"]]
    path = fit(made(Three, steps=12, c=PPO, a=PPO, b=PPO), tmp_path).run_folder / "checkpoints" / "last.ckpt"
    assert lrl.MultiAgent.load_from_checkpoint(path).rivals == ["c", "a", "b"]


@pytest.mark.thorough
def test_a_turn_takes_five_times_save_steps_unless_it_is_given(tmp_path):
    watch = Watch()
    fit(made(steps=144, past={"save_steps": 8}), tmp_path, watch)
    assert [names[0] for names in watch.full] == [*"aaaa", *"bbbb", *"aaaa"]  # 48 is the first full iteration from 40 on


@pytest.mark.thorough
def test_behaviors_without_self_play_always_learn_and_lose_only_the_episodes_that_a_turn_breaks_off(tmp_path):
    watch, model = Watch(), made(Three, steps=96, more={"c": PPO})
    fit(model, tmp_path, watch)
    always = torch.cat([flags for name, flags in watch.valid if name == "c"])
    starts = torch.cat([flags for name, flags in watch.starts if name == "c"])
    cut = torch.cat([flags for name, flags in watch.truncated if name == "c"])
    broken = (~always).nonzero()[:, 0].unique().tolist()
    assert broken == [12, 25, 38]  # after 12 steps of each turn, one step that is no experience
    assert starts[[each + 1 for each in broken if each + 1 < len(starts)]].all()
    assert cut[[each - 1 for each in broken if each % 6]].all()
    assert model.algorithms["c"].env_steps == 96 >= int(always.sum())  # the last steps belong to an iteration that is not full


class Squad(Together):
    """Together with a group of two that always learns, and episodes of five steps."""

    names: ClassVar = ("a", "b", "c0", "c1")
    length = 5


@pytest.mark.thorough
@pytest.mark.parametrize("truncates", [False, True])
def test_a_group_bootstraps_from_what_it_saw_last_in_episodes_that_a_turn_breaks_off(tmp_path, monkeypatch, truncates):
    monkeypatch.setattr(Squad, "truncates", truncates)
    differences = []

    class Bootstraps(pl.Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            if (groups := batch.get("c")) is None:
                return
            broken_off = ~groups.present[1:].any(-1)  # before a step that is no experience
            assert groups.over[:-1][broken_off].all()
            last_obs = groups.rows.obs[1:]
            differences.append((groups.next_value[:-1] - model.algorithms["c"].network.value(last_obs))[broken_off].detach())

    in_turn, always = partial(PPO, n_steps=4, batch_size=8), partial(POCA, n_steps=12, batch_size=12)
    model = made(Squad, 160, past={**PAST, "team_change": 16}, more={"c": always}, a=in_turn, b=in_turn)
    fit(model, tmp_path, Bootstraps())
    found = torch.cat(differences)
    assert len(found) > 4 and found.abs().max() < 1e-6


@pytest.mark.thorough
def test_no_return_of_a_group_is_that_of_an_episode_that_a_turn_breaks_off(tmp_path, monkeypatch):
    class Returns(pl.Callback):
        seen: ClassVar = set()

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.seen.update(model.algorithms["c"].dataset.finished)

    monkeypatch.setattr(Squad, "pay", lambda self, agent, action: 1.0)
    in_turn, always = partial(PPO, n_steps=4, batch_size=8), partial(POCA, n_steps=12, batch_size=12)
    model = made(Squad, 160, past={**PAST, "team_change": 16}, more={"c": always}, a=in_turn, b=in_turn)
    fit(model, tmp_path, Returns())
    assert Returns.seen == {10.0}  # two agents, five steps


@pytest.mark.thorough
def test_the_first_rows_of_a_turn_begin_new_episodes_with_an_empty_memory(tmp_path):
    watch = Watch()
    memory = partial(PPO, memory=lrl.GRU(4, 3))
    fit(made(a=memory, b=memory), tmp_path, watch)
    first = [starts[0].tolist() for name, starts in watch.starts]
    # an iteration has 6 steps and an episode 5, so only the first iteration of a turn begins with an episode
    assert first == [[True, True], [False, False]] * 8


@pytest.mark.thorough
def test_the_observations_of_a_turn_begin_where_its_episodes_do(tmp_path):
    class Times(pl.Callback):
        seen: ClassVar = []

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.seen.append(next(iter(batch.values())).obs[:, :, 1].tolist())

    times = Times()
    fit(made(steps=72), tmp_path, times)
    one, two = [[t, t] for t in (0.0, 1.0, 2.0, 3.0, 4.0, 0.0)], [[t, t] for t in (1.0, 2.0, 3.0, 4.0, 0.0, 1.0)]
    assert times.seen == [one, two] * 3


class Players(pl.Callback):
    """Notes who plays in each copy, and the games that ended, before they are rated."""

    def __init__(self):
        self.playing, self.games = [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        turns = model.dataset.turns
        self.playing.append((turns.learner, {name: opponent.playing.tolist() for name, opponent in turns.opponents.items()}))
        self.games += [game for opponent in turns.opponents.values() for game in opponent.finished]


@pytest.mark.thorough
@pytest.mark.parametrize(("ratio", "players"), [(1.0, {NEWEST}), (0.0, {0, 1, 2, 3, 4})])
def test_those_that_wait_are_played_by_their_newest_weights_or_their_own_snapshots(tmp_path, ratio, players):
    noted = Players()
    fit(made(past={**PAST, "play_against_latest_model_ratio": ratio, "window": 2}), tmp_path, noted)
    drawn = {number for learner, playing in noted.playing for name, numbers in playing.items() if name != learner for number in numbers}
    learning = {number for learner, playing in noted.playing for number in playing[learner]}
    assert drawn == players and learning == {NEWEST}
    assert {(game.learner, game.behavior) for game in noted.games} == {("a", "b"), ("b", "a")}


@pytest.mark.thorough
def test_a_result_is_the_sign_of_the_difference_of_whole_episodes(tmp_path):
    noted = Players()
    fit(made(Payday, past={**PAST, "play_against_latest_model_ratio": 1.0}), tmp_path, noted)
    assert {(game.learner, game.result) for game in noted.games} == {("a", 0.0), ("b", 1.0)}
    assert noted.games[0] == Game(NEWEST, 0.0, "b", "a")


@pytest.mark.thorough
def test_ratings_of_a_turn_are_elos_by_hand(tmp_path):
    model = made(Payday, steps=12, past={"save_steps": 1000, "play_against_latest_model_ratio": 0.0, "initial_elo": 1200})
    fit(model, tmp_path)
    a, b = (model.algorithms[name].past_selves[0] for name in "ab")
    # six games that a loses: the first takes 0.5, and each following one a little less
    elo = other = 1200.0
    for _ in range(6):
        change = -1 / (1 + 10 ** ((other - elo) / 400))
        elo, other = elo + change, other - change
    assert (a.elo, b.elo, b.elos[0]) == (pytest.approx(elo), 1200.0, pytest.approx(other))
    assert a.results["b"].rows.tolist() == [[1, 0, 6, 0.0]] and b.results == {}


def test_games_against_the_newest_weights_of_another_behavior_are_rated(tmp_path):
    model = made(Payday, steps=12, past={"save_steps": 1000, "play_against_latest_model_ratio": 1.0})
    fit(model, tmp_path)
    a, b = (model.algorithms[name].past_selves[0] for name in "ab")
    assert a.elo < 1198 and a.elo + b.elo == pytest.approx(2400) and b.elos == {0: 1200.0}


@pytest.mark.thorough
def test_metrics_of_each_behavior_stand_under_its_name(tmp_path):
    trainer = fit(made(), tmp_path, logger=True)
    rows = read_rows(trainer.run_folder / "metrics.csv")
    for name in "ab":
        found = {
            key.removeprefix(f"{name}/self_play/") for row in rows for key, value in row.items() if value and key.startswith(f"{name}/self")
        }
        assert found == {"elo", "snapshots", "rating", "rating_margin", "win_rate", "draw_rate"}
    assert not any(key.startswith("self_play/") for row in rows for key in row)


@pytest.mark.thorough
def test_fixed_opponents_play_the_side_of_their_behavior(tmp_path):
    past = {**PAST, "opponents": ["random"], "play_against_latest_model_ratio": 0.0}
    trainer = fit(made(past=past, steps=480), tmp_path, logger=True)
    rows = read_rows(trainer.run_folder / "metrics.csv")
    assert any(row.get("a/self_play/win_rate/random") for row in rows) and any(row.get("b/self_play/win_rate/random") for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize("learner", [DQN, POCA], ids=["DQN", "POCA"])
def test_other_algorithms_take_turns_too(tmp_path, learner):
    watch, learned, model = Watch(), Learned(), made(Visited, steps=288, a=learner, b=learner)
    fit(model, tmp_path, watch, learned)
    assert {name for names in watch.full for name in names} == {"a", "b"} and all(len(names) == 1 for names in watch.full)
    assert all(changed == names or changed == [] for changed, names in zip(learned.changed, watch.full, strict=True))


@pytest.mark.thorough
def test_no_window_of_a_replay_buffer_reaches_from_one_turn_into_the_next(tmp_path):
    class Ends(pl.Callback):
        ended: ClassVar = {}

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            for name, each in model.algorithms.items():
                buffer = each.dataset.buffer
                self.ended[name] = np.flatnonzero(buffer.layout.row.ended[buffer.first[0] + np.arange(buffer.count[0])]).tolist()

    ends, learner = Ends(), partial(DQN, n_steps=3)
    fit(made(a=learner, b=learner, steps=144), tmp_path, ends)
    # a turn has 12 rows, and an episode 5; the last row of a turn ends as the next one of this behavior begins
    assert ends.ended == {"a": [4, 9, 11, 16, 21, 23, 28, 33], "b": [4, 9, 11, 16, 21, 23, 28, 33]}


@pytest.mark.thorough
def test_reward_scales_begin_again_with_a_turn(tmp_path):
    model = made(a=partial(PPO, normalize_reward=True), b=partial(PPO, normalize_reward=True))

    class Running(pl.Callback):
        sizes: ClassVar = []

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            turns = model.dataset.turns
            if turns.begins:
                self.sizes.append(len(model.algorithms[turns.learner].reward_signals["extrinsic"].returns.running))

    running = Running()
    fit(model, tmp_path, running)
    assert running.sizes == [0] * 8


@pytest.mark.thorough
@pytest.mark.parametrize("on_nan", ["raise", "skip_update"])
def test_on_nan_also_handles_nan_that_a_waiting_behavior_observes(tmp_path, on_nan):
    model = made(Broken, a=partial(PPO, on_nan=on_nan), b=partial(PPO, on_nan=on_nan), steps=24)
    if on_nan == "raise":
        with pytest.raises(NotFiniteError, match=r"observation of agent b of environment 0 of .*Broken is nan"):
            fit(model, tmp_path)
    else:
        fit(model, tmp_path)
        assert model.algorithms["b"].learner.guard.replaced > 0


@pytest.mark.thorough
def test_a_frozen_policy_of_such_a_run_acts_in_another(tmp_path):
    run = fit(made(), tmp_path / "first", evaluation=lrl.EvaluationConfig(every_n_env_steps=96, episodes=2)).run_folder
    behaviors = {"a": lrl.Behavior("a", PPO), "b": lrl.Behavior("b", lrl.FrozenPolicy(run, "b"))}
    model = lrl.MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, behaviors, 24)
    fit(model, tmp_path / "second")
    assert model.rivals == [] and model.algorithms["b"].self_play is None


WRONG = [
    ({"a": PAST, "b": None}, "behavior a: self_play needs another behavior with self_play, which learns in turn with it"),
    ({"a": {"team_change": 0}, "b": {}}, "behavior a: self_play.team_change must be >= 1, got 0"),
    ({"a": {"team_change": 1.5}, "b": {}}, "behavior a: self_play.team_change must be an integer >= 1, got 1.5"),
    ({"a": {"team_chang": 3}, "b": {}}, "behavior a: self_play.team_chang is not a setting; did you mean team_change?"),
]


@pytest.mark.parametrize(("past", "line"), WRONG)
def test_wrong_settings_are_one_line(past, line):
    behaviors = {name: lrl.Behavior(name, partial(lrl.PPO, self_play=each)) for name, each in past.items()}
    with pytest.raises(SettingError) as error:
        lrl.MultiAgent("tests.agents.Together", behaviors)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_run_of_one_policy_has_no_turns():
    with pytest.raises(SettingError, match=r"self_play\.team_change is for several behaviors of MultiAgent"):
        lrl.PPO("tests.agents.Together", self_play={"team_change": 100})


GRU = partial(PPO, memory=lrl.GRU(8, 3), normalize_obs="running", normalize_reward=True)
RESUMED = [
    pytest.param(Five, {"a": GRU, "b": GRU}, {}, id="PPO GRU"),
    pytest.param(Visited, {"b": PPO, "a": PPO}, {}, id="PPO and agents that leave"),
    pytest.param(Three, {"a": PPO, "b": DQN}, {"c": GRU}, id="PPO, DQN and one that always learns"),
    pytest.param(Visited, {"a": POCA, "b": GRU}, {}, id="POCA and GRU", marks=pytest.mark.slow),
]


def train(root, env, learners, more, seed=3, stop=None, ckpt_path=None):
    past = {"save_steps": 12, "team_change": 24, "window": 2, "opponents": ["random"], "play_against_latest_model_ratio": 0.25}
    model = made(env, 240, seed, past, more, **learners)
    model.log_interval = 12
    trainer = lrl.Trainer(
        default_root_dir=root,
        enable_progress_bar=False,
        evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2, num_envs=2),
        checkpoint=lrl.CheckpointConfig(every_n_env_steps=32),
        callbacks=[] if stop is None else [stop],
    )
    if stop is None:
        trainer.fit(model, ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit):
            trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer.run_folder


@pytest.mark.thorough
@pytest.mark.parametrize(("env", "learners", "more"), RESUMED)
def test_a_run_that_was_stopped_in_any_turn_and_continued_is_the_run_that_was_not(env, learners, more, tmp_path, capsys):
    expected = train(tmp_path / "whole", env, learners, more)
    # in the middle of a turn, as it changes, and after it, with players in the middle of episodes
    for seed, stop in ((3, StopAt(1)), (5, StopAt(2)), (6, StopAt(5, "evaluation")), (7, StopAt(8))):
        train(tmp_path / "parts", env, learners, more, seed, stop, "last")
    found = train(tmp_path / "parts", env, learners, more, 99, None, "last")
    assert "start new episodes" not in capsys.readouterr().out
    assert_equal_runs(expected, found)
    for name in learners:
        one, other = (run[0].algorithms[name].past_selves[0] for run in (expected, found))
        assert (one.elo, one.elos) == (other.elo, other.elos) and equal(one.state_dict()["scores"], other.state_dict()["scores"])
        assert all(equal(one.snapshots.weights[k], other.snapshots.weights[k]) for k in one.snapshots.numbers)


def test_all_of_the_state_of_turns_comes_back():
    dataset, fresh = (made(a=GRU, b=GRU).experience() for _ in range(2))
    next(iter(dataset))
    state = dataset.turns.get_state()
    assert not state["start"]["b"].any() and state["returns"]["a"].all() and leaves(state["opponents"]["b"]["memory"]).any()
    fresh.turns.set_state(state, continues=True)
    found = fresh.turns.get_state()
    for key in ("start", "returns"):
        assert all(np.array_equal(found[key][name], state[key][name]) for name in "ab")
    assert np.array_equal(leaves(found["opponents"]["b"]["memory"]), leaves(state["opponents"]["b"]["memory"]))
    with pytest.raises(ValueError, match="c took turns"):
        fresh.turns.set_state({**state, "opponents": {"c": {}}}, continues=True)


def leaves(tree):
    return np.concatenate([leaf.ravel() for leaf in tree_leaves(tree)])


@pytest.mark.thorough
def test_a_run_resumed_with_new_episodes_is_in_the_same_turn(tmp_path, capsys):
    watch = Watch()
    fit(made(Visited, steps=96), tmp_path, StopAfter(3))
    changed = made(Visited, steps=96)
    changed.env = replace(changed.env, max_episode_steps=5)
    fit(changed, tmp_path, watch, ckpt_path="last")
    assert "environments start new episodes: their settings changed" in capsys.readouterr().out
    assert watch.full[0] == ["b"]
