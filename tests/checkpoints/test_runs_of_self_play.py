"""The state of self-play in a checkpoint is checked before anything takes it, and games that cannot go on begin anew."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from lightning_rl import PPO, SettingError, Trainer
from lightning_rl.training.loading import check_fits
from tests.checkpoints.test_runs import GONE, replaced

CALLBACK = "callbacks", "SelfPlay"
ENVS = "lightning_rl", "ranks", 0, "data", "collector", "episodes", "envs"
OPPONENT = *ENVS, "opponent"


def model(max_env_steps=128, **settings):
    own = {"save_steps": 32, "opponents": ["random"], "play_against_latest_model_ratio": 0.2, **settings}
    env = {"id": "lightning_rl.envs.games.tic_tac_toe", "num_envs": 4}
    return PPO(env, max_env_steps=max_env_steps, n_steps=8, batch_size=16, n_epochs=1, self_play=own)


def fit(folder, made, ckpt_path=None):
    trainer = Trainer(default_root_dir=folder, accelerator="cpu", enable_progress_bar=False, evaluation=None)
    trainer.fit(made, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    trainer = fit(tmp_path_factory.mktemp("run"), model())
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)


GAMES = (3, [3], [([1], 0.5, "", "")], [(0, nan, "", "")], [(0, 0.3, "", "")], [(0, 0.5, ["a"], "")], [(0, 0.5, "", "", "")])
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


def test_a_callback_whose_name_begins_alike_is_not_self_play(content, tmp_path):
    torch.save(replaced(content, ("callbacks",), {**content["callbacks"], "SelfPlayOfMine": {"x": 1}}), tmp_path / "changed.ckpt")
    assert check_fits(model(), tmp_path / "changed.ckpt") == 128


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
    with pytest.raises(SettingError, match="run cannot be continued") as refused:
        fit(tmp_path, model(192), tmp_path / "changed.ckpt")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seats",), torch.full((4,), 7)),
        (("moved",), torch.zeros(4, 2)),
        (("game", "arrays", "mover"), torch.full((4,), 5)),
    ],
)
def test_games_that_cannot_go_on_begin_anew(content, tmp_path, capsys, place, value):
    torch.save(replaced(content, (*ENVS, *place), value), tmp_path / "changed.ckpt")
    fit(tmp_path, model(192), tmp_path / "changed.ckpt")
    assert "tic_tac_toe did not come back as it was saved" in capsys.readouterr().out
