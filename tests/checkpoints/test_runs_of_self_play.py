"""The state of self-play in a checkpoint is checked before anything takes it, and games that cannot go on begin anew."""

from __future__ import annotations

from math import inf, nan
from typing import ClassVar

import pytest
import torch

from lightning_rl import PPO, SettingError, Trainer
from lightning_rl.training.loading import check_fits
from tests.agents import Together
from tests.checkpoints.test_runs import GONE, replaced

CALLBACK = "callbacks", "SelfPlay"
ENVS = "lightning_rl", "ranks", 0, "data", "collector", "episodes", "envs"
OPPONENT = *ENVS, "opponent"


class Trio(Together):
    """Three who get what they press, in episodes of four steps."""

    names: ClassVar = ("a", "b", "c")

    def pay(self, agent, action):
        return float(action)


def model(max_env_steps=128, env="lightning_rl.envs.games.tic_tac_toe", **settings):
    own = {"save_steps": 32, "opponents": ["random"], "play_against_latest_model_ratio": 0.2, **settings}
    env = {"id": env, "num_envs": 4}
    return PPO(env, max_env_steps=max_env_steps, n_steps=8, batch_size=16, n_epochs=1, self_play=own)


def fit(folder, made, ckpt_path=None, **settings):
    trainer = Trainer(default_root_dir=folder, accelerator="cpu", enable_progress_bar=False, evaluation=None, **settings)
    trainer.fit(made, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    trainer = fit(tmp_path_factory.mktemp("run"), model())
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)


GAMES = (
    3,
    [3],
    [([1], 0.5, "", "")],
    [(0, nan, "", "")],
    [(0, 1.3, "", "")],
    [(0, True, "", "")],
    [(0, 0.5, ["a"], "")],
    [(0, 0.5, "", "", "")],
)
SNAPSHOTS = (3, [1], {"abc": {}}, {-1: {}}, {0: 3}, {0: {"weight": [[1.0], [1.0, 2.0]]}})
CASES = [
    *[((*CALLBACK, "elo"), value) for value in ("high", nan, inf, 1e300, True, GONE)],
    *[((*CALLBACK, "elos"), value) for value in ([], {0: nan}, {0: inf}, {0: 1e300}, {"x": 1200.0}, GONE)],
    *[
        ((*CALLBACK, "scores"), [value])
        for value in (1, (1, 0, 2, nan, ""), (1, 0, 2, 3.0, ""), (1, 0, -2, -3.0, ""), (1, 0, 2, 1.0, ["a"]))
    ],
    *[((*CALLBACK, "scores"), [value]) for value in (([1], 0, 2, 1.0, ""), (1, 0, inf, 1.0, ""), (1, 0, 2, 1.0, "", ""))],
    *[((*CALLBACK, "games"), value) for value in (*GAMES, GONE)],
    *[((*CALLBACK, name), value) for name in ("taken", "taken_at") for value in (-5, nan, "x", GONE)],
    *[((*CALLBACK, "opponents"), value) for value in (3, "random", [3])],
    *[((*CALLBACK, "snapshots"), value) for value in (*SNAPSHOTS, GONE)],
    *[(OPPONENT, value) for value in (3, {})],
    *[((*OPPONENT, "playing"), value) for value in (torch.zeros(4), 3, torch.zeros(4, 1, dtype=torch.int64))],
    *[((*OPPONENT, "finished"), value) for value in GAMES],
    *[((*OPPONENT, "retired"), value) for value in SNAPSHOTS],
    *[((*OPPONENT, name), value) for name in ("generator", "draws", "fixed") for value in (3, "x")],
]


def test_self_play_with_something_else_in_a_place_is_refused_in_one_line(content, tmp_path):
    made = model()
    for place, value in CASES:
        torch.save(replaced(content, place, value), tmp_path / "changed.ckpt")
        try:
            check_fits(made, tmp_path / "changed.ckpt")
        except SettingError as error:
            assert "\n" not in str(error) and len(str(error)) <= 240, (place, value, str(error))
        else:
            pytest.fail(f"{value!r} at {place} was not refused")


def test_a_run_of_three_players_whose_results_are_quarters_continues_from_its_checkpoint(tmp_path):
    trio, goes_on = (model(steps, "tests.checkpoints.test_runs_of_self_play.Trio") for steps in (128, 192))
    trio.log_interval = 1000  # a checkpoint holds the games since the last line
    trainer = fit(tmp_path, trio, checkpoint={"every_n_env_steps": 96, "keep": -1})
    path = trainer.run_folder / "checkpoints" / "env_steps=96.ckpt"
    results = [result for _, result, *_ in torch.load(path, weights_only=True)["callbacks"]["SelfPlay"]["games"]]
    assert {*results} & {0.25, 0.75} and {*results} <= {0, 0.25, 0.5, 0.75, 1}
    fit(tmp_path, goes_on, path)
    assert goes_on.env_steps == 192


def test_a_callback_whose_name_begins_alike_is_not_self_play(content, tmp_path):
    torch.save(replaced(content, ("callbacks",), {**content["callbacks"], "SelfPlayOfMine": {"x": 1}}), tmp_path / "changed.ckpt")
    assert check_fits(model(), tmp_path / "changed.ckpt") == 128


@pytest.mark.variants
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("playing", torch.zeros(3, dtype=torch.int64)),
        ("playing", torch.full((4,), 99)),
        ("playing", torch.full((4,), -9)),
        ("finished", [(0, 0.5, "another", "")]),
        ("finished", [(99, 0.5, "", "")]),
        ("finished", [(-9, 0.5, "", "")]),
        ("fixed", []),
        *[(name, GONE) for name in ("playing", "memory", "draws", "fixed", "finished", "retired")],
    ],
)
def test_players_who_do_not_belong_to_the_run_are_refused_in_one_line(content, tmp_path, place, value):
    torch.save(replaced(content, (*OPPONENT, place), value), tmp_path / "changed.ckpt")
    with pytest.raises(SettingError, match="run cannot be resumed") as refused:
        fit(tmp_path, model(192), tmp_path / "changed.ckpt")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seats",), torch.full((4,), 7)),
        (("moved",), torch.zeros(4, 2)),
        (("game", "arrays", "mover"), torch.full((4,), 5)),
        (("game", "arrays", "stones"), torch.full((4, 2), 0b111_0111_0111)),
    ],
)
def test_games_that_cannot_continue_start_again(content, tmp_path, capsys, place, value):
    torch.save(replaced(content, (*ENVS, *place), value), tmp_path / "changed.ckpt")
    fit(tmp_path, model(192), tmp_path / "changed.ckpt")
    assert "tic_tac_toe could not be restored exactly" in capsys.readouterr().out
