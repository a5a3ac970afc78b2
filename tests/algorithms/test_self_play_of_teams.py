"""Self-play of teams with one policy: all agents of a team learn, against past selves in the other team."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl import POCA, PPO, SettingError
from lightning_rl.matches import play_matches
from tests.fitting import fit, tiny

TEAMS = {"teams": ["red_*", "blue_*"], "save_steps": 400}
BUTTONS = {"id": "tests.agents.Buttons", "num_envs": 8}


@pytest.fixture(scope="module", params=[PPO, POCA])
def run(request, tmp_path_factory):
    """An algorithm after a run in which teams have to press their buttons together, and its folder."""
    pl.seed_everything(1, verbose=False)
    settings = {"n_steps": 16, "batch_size": 64 if request.param is PPO else 32, "learning_rate": 5e-3, "net_arch": [16]}
    model = request.param(BUTTONS, max_env_steps=6_000, compile=False, self_play=TEAMS, **settings)
    evaluation = lrl.EvaluationConfig(every_n_env_steps=6_000, episodes=4, opponent="tests.agents.idle")
    trainer = lrl.Trainer(default_root_dir=tmp_path_factory.mktemp("teams"), enable_progress_bar=False, evaluation=evaluation)
    trainer.fit(model)
    return model, trainer


@pytest.mark.thorough
def test_a_team_learns_to_press_its_buttons_together(run):
    model, _ = run
    obs = np.array([[agent, t] for agent in range(4) for t in range(4)], np.float32)
    assert model(obs).tolist() == [1] * 16
    assert model.num_envs == 16  # two rows for each of eight copies


@pytest.mark.thorough
def test_evaluations_play_both_teams_against_their_opponent(run):
    metrics = run[1].callback_metrics
    assert metrics["eval/mean_reward"] == 4 and metrics["eval/win_rate"] == 1  # a point in each of four steps


@pytest.mark.thorough
def test_games_between_teams_are_rated(run):
    metrics = run[1].callback_metrics
    assert metrics["self_play/snapshots"] > 5 and {"self_play/elo", "self_play/rating"} <= metrics.keys()


def test_a_team_is_evaluated_against_a_run_and_a_player(run):
    folder = run[1].run_folder
    draw = lrl.evaluate(folder, episodes=4, opponent="tests.agents.pressing")
    assert (draw["return_mean"], draw["win_rate"], draw["draw_rate"]) == (0, 0, 1)
    won = lrl.evaluate(folder, episodes=4, opponent="tests.agents.idle")
    assert (won["return_mean"], won["win_rate"], won["draw_rate"]) == (4, 1, 0)
    assert lrl.evaluate(folder, episodes=4, opponent=str(folder))["win_rate"] < 1
    loaded = type(run[0]).load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert loaded.spaces == run[0].spaces and loaded.spaces.teams == (("red_0", "red_1"), ("blue_0", "blue_1"))


def test_matches_of_teams_are_played(run):
    folder = run[1].run_folder
    matches = play_matches([folder, "tests.agents.idle"], 4)
    assert matches.scores[0, 1].points / matches.scores[0, 1].games > 0.9


def test_groups_are_the_teams_that_learn():
    model = tiny(POCA, "tests.agents.MortalSquads", self_play={"teams": ["red_*", "blue_*"], "save_steps": 16})
    groups = next(iter(model.experience()))
    # red learns in the first copy and red_1 comes at time 1; blue in the second and blue_0 dies in the second step; then they change
    first, second = groups.present[:, 0].tolist(), groups.present[:, 1].tolist()
    red, blue = [[True, False], *[[True, True]] * 3], [*[[True, True]] * 2, *[[False, True]] * 2]
    assert first == red + blue and second == blue + red
    assert groups.over.int().argmax(0).tolist() == [3, 3] and groups.over.sum().item() == 4
    assert groups.value.shape == (8, 2, 1) and groups.baseline.shape == (8, 2, 2, 1)


@pytest.mark.thorough
def test_one_policy_is_the_same_with_teams_of_one_as_with_single_learners():
    """Both learn from the same rows: in the games of `Duel` each agent is a team of its own."""
    found = []
    for teams in ({}, {"teams": ["a", "b"]}):
        pl.seed_everything(3, verbose=False)
        model = tiny(PPO, "tests.agents.Duel", self_play={"save_steps": 16, **teams})
        fit(model)
        found.append(torch.nn.utils.parameters_to_vector(model.network.parameters()))
    assert torch.equal(*found)


EQUAL = "they must be equally large, and each of the agents red_0, blue_0, red_1, blue_1 must be in one"
LISTED = "self_play.teams must be a list of patterns of agents, one or more for each team, got"


@pytest.mark.parametrize(
    ("env_id", "teams", "line"),
    [
        ("Squads", ["red_*", "blue_0"], f"self_play.teams are [red_0, red_1] and [blue_0]: {EQUAL}"),
        ("Squads", ["red_*", "green_*"], f"self_play.teams are [red_0, red_1] and []: {EQUAL}"),
        ("Squads", ["red_*", "*_1"], f"self_play.teams are [red_0, red_1] and [red_1, blue_1]: {EQUAL}"),
        ("Squads", "red_*", f"{LISTED} 'red_*'"),
        ("Squads", ["*"], f"{LISTED} ['*']"),
        ("Squads", ["red_*", 1], f"{LISTED} ['red_*', 1]"),
        (
            "InTurn",
            ["p0", "p[12]"],
            "self_play.teams is for agents that move at the same time, but those of this game take turns; leave it out",
        ),
    ],
)
def test_teams_that_cannot_play_are_refused_in_one_line(env_id, teams, line):
    with pytest.raises(SettingError) as raised:
        tiny(PPO, f"tests.agents.{env_id}", self_play={"teams": teams})
    assert str(raised.value) == line


def test_a_team_may_be_named_by_several_patterns():
    model = tiny(PPO, "tests.agents.Squads", self_play={"teams": [["red_0", "blue_0"], "*_1"]})
    assert model.spaces.teams == (("red_0", "blue_0"), ("red_1", "blue_1"))


def test_behaviors_are_refused_teams_of_their_own():
    behaviors = {each: lrl.Behavior(f"{each}_*", lambda *a, **k: PPO(*a, self_play=TEAMS, **k)) for each in ("red", "blue")}
    with pytest.raises(SettingError, match=r": self_play\.teams is for a single policy; with several behaviors, each one is a team"):
        lrl.MultiAgent("tests.agents.Squads", behaviors, 1000)
