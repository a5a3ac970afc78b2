"""Entries of the last info of an episode, which `KeepInfo` names: for callbacks, in metrics and over a resume."""

from __future__ import annotations

import csv
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.envs import KeepInfo
from lightning_rl.errors import SettingError
from tests.command_line import TINY, run
from tests.environments import Scripted
from tests.fitting import Rows, fit, tiny


class Metered(Scripted):
    """Reports 10 · episode + t as `energy` and 2 · episode as `fuel`, at each step."""

    def step(self, action):
        *results, info = super().step(action)
        return *results, info | {"energy": 10.0 * self.episode + self.t, "fuel": np.array([2 * self.episode]), "mode": "fast"}


class Quiet(Scripted):
    """Reports `energy` at each step, or nothing."""

    def __init__(self, energy: object = None) -> None:
        super().__init__()
        self.energy = energy

    def step(self, action):
        *results, info = super().step(action)
        return *results, info if self.energy is None else info | {"energy": self.energy}


class Listen(pl.Callback):
    """Keeps the info of the episodes that end in each iteration."""

    def __init__(self):
        self.energies, self.fuels = [], []

    def on_train_batch_end(self, trainer, algorithm, *_):
        finished = algorithm.finished_episodes()[""]
        self.energies.append([each.info["energy"] for each in finished])
        self.fuels.append([each.info["fuel"] for each in finished])


METERED, QUIET = "tests.envs.test_kept_info.Metered", "tests.envs.test_kept_info.Quiet"
KEPT = {"class_path": "lightning_rl.envs.KeepInfo", "init_args": {"keywords": ["energy", "fuel"]}}
MODES = [{}, *({"autoreset": mode} for mode in ("NEXT_STEP", "DISABLED")), {"vectorization": "async"}]
VARIANTS = [{}, *(pytest.param(each, marks=pytest.mark.thorough) for each in MODES[1:])]


def metered(algorithm=lrl.PPO, env_id=METERED, keywords=("energy", "fuel"), **settings):
    env = {"wrappers": [KEPT | {"init_args": {"keywords": [*keywords]}}]} | settings.pop("env", {})
    return tiny(algorithm, env_id, env=env, **settings)


@pytest.mark.parametrize("env", VARIANTS, ids=lambda env: " ".join(env.values()) or "sync")
def test_a_callback_reads_them_of_each_episode_and_rows_hold_their_means(env):
    listen, rows = Listen(), Rows()
    fit(metered(env=env, log_interval=1), callbacks=[listen], logger=rows)
    # episodes of three steps in two environments; in mode NEXT_STEP a fourth resets
    second = [23.0, 23.0, 33.0, 33.0] + ([] if "NEXT_STEP" in env.values() else [43.0, 43.0])
    assert listen.energies[:2] == [[3.0, 3.0, 13.0, 13.0], second]
    assert listen.fuels[0] == [0.0, 0.0, 2.0, 2.0]
    assert rows.rows[0][1]["info/energy"] == 8.0 and rows.rows[0][1]["info/fuel"] == 1.0
    assert rows.rows[1][1]["info/energy"] == np.mean([3.0, 3.0, 13.0, 13.0, *second])


def test_only_what_is_named_is_kept():
    listen = Listen()
    listen.on_train_batch_end = lambda trainer, algorithm, *_: listen.energies.extend(algorithm.finished_episodes()[""])
    fit(tiny(lrl.PPO, METERED, max_env_steps=16), callbacks=[listen])
    assert [each.info for each in listen.energies] == [{}] * 4


def test_an_episode_that_another_wrapper_ends_does_not_count_as_zero():
    class Listens(Listen):
        def on_train_batch_end(self, trainer, algorithm, *_):
            self.energies.append([each.info for each in algorithm.finished_episodes()[""]])

    def build():  # the second environment is cut after two steps, outside of what keeps the info
        built.append(KeepInfo(Metered(), ["energy"]))
        return gym.wrappers.TimeLimit(built[-1], 2) if len(built) % 2 == 0 else built[-1]

    built: list[gym.Env] = []
    envs = gym.vector.SyncVectorEnv([build, build], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    listen, rows = Listens(), Rows()
    torch.manual_seed(0)
    fit(lrl.PPO(envs, n_steps=6, batch_size=12, max_env_steps=12, log_interval=12), callbacks=[listen], logger=rows)
    # the first episode is that in which spaces are found; in the sixth step both environments end one
    assert listen.energies == [[{}, {"energy": 13.0}, {}, {"energy": 23.0}, {}]]
    assert rows.rows[0][1]["info/energy"] == 18.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (lrl.SAC, {}),
        (lrl.IMPALA, {"actors": {"num_actors": 1, "backend": "threads"}}),
        (lrl.EvolutionStrategies, {"env": {"kwargs": {"period": 4}}}),
        (lrl.PPO, {"threaded": True}),
    ],
    ids=["replay", "actors", "generations", "threaded"],
)
def test_replay_actors_generations_and_threads_keep_them_too(algorithm, settings):
    listen = Listen()
    fit(metered(algorithm, **settings), callbacks=[listen])
    energies = {energy for each in listen.energies for energy in each}
    assert len(energies) > 1 and {energy % 10 for energy in energies} == {4.0 if settings.get("env") else 3.0}


def test_a_resumed_run_logs_the_same_means(tmp_path, folder):
    def rows_of(root, **arguments):
        rows = Rows()
        trainer = lrl.Trainer(
            default_root_dir=root, logger=rows, enable_progress_bar=False, accelerator="cpu", evaluation=None, **arguments
        )
        trainer.fit(metered(log_interval=16), ckpt_path="last" if (tmp_path / root).exists() else None)
        return [(step, row["info/energy"]) for step, row in rows.rows if "info/energy" in row]

    whole = rows_of(str(tmp_path / "whole"))
    first, second = (rows_of(str(tmp_path / "half"), max_steps=steps) for steps in (3, -1))
    assert len(whole) == 6 and first + second == whole


@pytest.mark.parametrize("energy", ["much", [1.0, 2.0], float("nan")], ids=str)
def test_an_entry_that_is_not_a_finite_number_is_refused_in_one_line(energy):
    with pytest.raises(SettingError) as refused:
        fit(metered(env_id=QUIET, keywords=["energy"], env={"kwargs": {"energy": energy}}))
    assert str(refused.value) == f"KeepInfo: energy of the last info of an episode must be a finite number, got {energy!r}"


def test_an_entry_that_is_missing_and_settings_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(SettingError, match=r"^KeepInfo: the last info of an episode has no energy; it has is_success$"):
        fit(metered(env_id=QUIET))
    with pytest.raises(SettingError, match=r"^KeepInfo: the last info of an episode has no energy; it is empty$"):
        fit(metered(env_id="CartPole-v1", env={"num_envs": 8}, max_env_steps=2_000))
    with pytest.raises(SettingError, match=r"^env.wrappers does not work with vectorization native; use sync or async$"):
        lrl.EnvConfig("CartPole-v1", vectorization="native", wrappers=[KEPT])
    with pytest.raises(SettingError, match="KeepInfo rejects its arguments: keywords must be names of the info, got 'energy'"):
        metered(keywords="energy", env={"wrappers": [KEPT | {"init_args": {"keywords": "energy"}}]})


@pytest.mark.thorough
def test_the_command_line_writes_their_means(folder, capfd):
    wrappers = "[{class_path: lightning_rl.envs.KeepInfo, init_args: {keywords: [energy]}}]"
    status, _, err = run(f"fit {TINY} --model.env.id {METERED} --model.env.wrappers '{wrappers}'", capfd)
    assert status == 0, err
    first, *_ = csv.DictReader(next(Path("runs").rglob("metrics.csv")).open())
    assert float(first["info/energy"]) > 0
