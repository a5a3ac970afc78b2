"""The state of self-play in a checkpoint is checked before anything takes it, and games that cannot go on begin anew."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from math import inf, nan
from typing import ClassVar

import pytest
import torch
from pytorch_lightning import Callback

from lightning_rl import PPO, SettingError, Trainer
from lightning_rl.training.resuming import check_fits
from tests.agents import Together
from tests.apart import ROOT
from tests.checkpoints.test_validation import GONE, replaced

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
def saved(tmp_path_factory):
    """The folder of a run's checkpoints."""
    return fit(tmp_path_factory.mktemp("run"), model(), checkpoint={"every_n_env_steps": 128, "keep": 1}).run_folder / "checkpoints"


@pytest.fixture(scope="module")
def content(saved):
    return torch.load(saved / "env_steps=128.ckpt", weights_only=True)


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
    *[
        ((*CALLBACK, "scores"), {"": torch.tensor(value, dtype=torch.float64)})
        for value in ([1], [[1, 0, 2]], [[1, 0, 2, nan]], [[1, 0, 2, 3.0]], [[1, 0.5, 2, 1.0]], [[1, 0, -2, -3.0]])
    ],
    *[((*CALLBACK, "scores"), value) for value in (3, {3: torch.zeros(0, 4)}, {"": torch.zeros(0, 4)}, {"": [[1, 0, 2, 1.0]]}, GONE)],
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_run_of_three_players_whose_results_are_quarters_continues_from_its_checkpoint(tmp_path):
    trio, goes_on = (model(steps, "tests.checkpoints.test_runs_of_self_play.Trio") for steps in (128, 192))
    trio.log_interval = 1000  # a checkpoint holds the games since the last line
    trainer = fit(tmp_path, trio, checkpoint={"every_n_env_steps": 96, "keep": -1})
    path = trainer.run_folder / "checkpoints" / "env_steps=96.ckpt"
    results = [result for _, result, *_ in torch.load(path, weights_only=True)["callbacks"]["SelfPlay"]["games"]]
    assert {*results} & {0.25, 0.75} and {*results} <= {0, 0.25, 0.5, 0.75, 1}
    fit(tmp_path, goes_on, path)
    assert goes_on.env_steps == 192


@pytest.mark.thorough
def test_a_callback_whose_name_begins_alike_is_not_self_play(content, tmp_path):
    torch.save(replaced(content, ("callbacks",), {**content["callbacks"], "SelfPlayOfMine": {"x": 1}}), tmp_path / "changed.ckpt")
    assert check_fits(model(), tmp_path / "changed.ckpt") == 128


@pytest.mark.thorough
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


def snapshots_of(path):
    """The numbers of the snapshots that a checkpoint contains, and of those in files."""
    stored = torch.load(path, weights_only=True)["callbacks"]["SelfPlay"]
    return [*stored["snapshots"]], [number for file in stored["snapshot_files"] for number in file["numbers"]]


class Files(Callback):
    """Notes the sizes of the files of snapshots after each iteration, by inode and name."""

    def on_train_batch_end(self, trainer, module, *_):
        found = (trainer.run_folder / "checkpoints/last.ckpt.d/self_play").glob("*")
        self.written.append({(each.stat().st_ino, each.name): each.stat().st_size for each in found})

    def on_train_start(self, trainer, module):
        self.written = []


@pytest.mark.thorough
def test_each_snapshot_is_written_once_and_its_file_deleted_when_no_generation_of_the_checkpoint_needs_it(tmp_path):
    files = Files()
    trainer = fit(tmp_path, model(32 * 8, window=3), callbacks=[files], checkpoint={"every_n_env_steps": 32, "keep": 1})
    folder = trainer.run_folder / "checkpoints"
    names = [sorted(name for _, name in each) for each in files.written]
    assert names[3] == ["00000001.snapshots", "00000002.snapshots", "00000003.snapshots"]  # the first holds 0 and 1
    assert all(len(each) <= 5 for each in names)  # a window of 3, and the one that left it since the previous generation
    assert all(after.get(key, size) == size for before, after in pairwise(files.written) for key, size in before.items())
    assert snapshots_of(folder / "last.ckpt") == ([], [6, 7, 8]) and snapshots_of(folder / "last.previous.ckpt") == ([], [6, 7, 8])
    assert len(list((folder / "last.ckpt.d/self_play").iterdir())) == 3
    assert snapshots_of(folder / "env_steps=256.ckpt") == ([6, 7, 8], [])  # a copy stands alone
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert snapshots_of(tmp_path / "mine.ckpt") == ([6, 7, 8], [])


@pytest.mark.parametrize("damage", ["missing", "changed", "other", "link"])
def test_files_of_snapshots_that_are_not_those_of_the_checkpoint_are_one_line(saved, tmp_path, damage):
    last = shutil.copytree(saved, tmp_path / "a") / "last.ckpt"
    file = max((last.parent / "last.ckpt.d/self_play").iterdir())
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif damage == "link":
        file.symlink_to(file.rename(tmp_path / "elsewhere"))
    else:
        torch.save([1], file)
        content = torch.load(last, weights_only=True)
        data = file.read_bytes()
        content["callbacks"]["SelfPlay"]["snapshot_files"][-1] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        torch.save(content, last)
        (last.parent / "last.ckpt.json").unlink()
    words = {
        "missing": "together with its checkpoint$",
        "changed": "is damaged",
        "other": "no archive|no snapshots|not an",
        "link": "a link",
    }
    with pytest.raises(SettingError, match=rf"self_play's snapshots in .* cannot be read .*({words[damage]})") as refused:
        fit(tmp_path / "b", model(192), last)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_self_play_that_is_killed_at_any_access_to_its_checkpoints_ends_like_the_run_that_nobody_killed(tmp_path):
    command = [sys.executable, "-m", "tests.checkpoints.kills_of_self_play", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    lines = [line for line in result.stdout.splitlines() if line.startswith("KILLED")]
    assert result.returncode == 0 and len(lines) >= 8, result.stderr[-2000:]
    assert all(re.search(r"from (None|[1-7]), True, [0-3] files$", line) for line in lines), lines
