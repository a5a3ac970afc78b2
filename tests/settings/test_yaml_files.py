"""Every packaged config of an algorithm trains, with demonstrations that are recorded here where it learns from some."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
import yaml

from lightning_rl import RecordEpisodes
from lightning_rl.processes.startup import config_folder
from lightning_rl.settings.yaml_files import Loader, dump
from tests.command_line import run
from tests.experts import played

SLOW = (
    *("dqn/pong", "es/halfcheetah", "impala/pong", "ppo/ant", "ppo/bipedalwalker", "ppo/breakout", "ppo/hopper"),
    *("ppo/inverted_double_pendulum", "ppo/lunarlander", "ppo/lunarlander_continuous", "ppo/lunarlander_finetuned"),
    *("ppo/lunarlander_wind", "ppo/minatar_breakout", "ppo/minigrid_doorkey_rnd", "ppo/minigrid_memory", "ppo/pong"),
    *("ppo/swimmer", "ppo/walker2d", "ppo/minigrid_doorkey_curiosity", "ppo/halfcheetah", "ppo/pendulum", "es/swimmer", "bc/lunarlander"),
    *("a2c/acrobot", "a2c/halfcheetah", "a2c/lunarlander", "dqn/lunarlander", "impala/lunarlander", "ppo/acrobot", "ppo/mountaincar"),
    *("sac/halfcheetah", "td3/halfcheetah", "ppo/simple_spread", "ppo/vmas_simple_spread", "ppo/tictactoe"),
)
"""A second or more for an iteration, or of an algorithm and with an environment that others have; `test_main.py` reads all."""


def configs():
    """The names of all that name an algorithm."""
    for path in sorted(config_folder().rglob("*.yaml")):
        name = path.relative_to(config_folder()).with_suffix("").as_posix()
        if "class_path" in yaml.load(path.read_text(encoding="utf-8"), Loader).get("model", {}):
            yield pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


def datasets(settings):
    """The demonstrations that settings name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from datasets(value)
        elif name in ("dataset", "demo_path", "demonstrations"):
            yield value


def test_slow_configs_exist():
    assert all((config_folder() / f"{name}.yaml").is_file() for name in SLOW)


@pytest.mark.variants("ppo/cartpole", "sac/pendulum")
@pytest.mark.parametrize("name", configs())
def test_a_packaged_config_trains_for_an_iteration(name, folder, monkeypatch, capfd):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    model = yaml.load((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"), Loader)["model"]
    settings = model["init_args"]
    env = settings["env"] if isinstance(settings["env"], dict) else {"id": settings["env"]}
    for dataset in set(datasets(settings)):
        recorder = RecordEpisodes(gym.make(env["id"], max_episode_steps=40, **env.get("kwargs", {})))
        played(recorder, 6)
        recorder.save(dataset)
    quick = "--evaluation.episodes 1 --evaluation.max_episode_steps 10 --trainer.enable_progress_bar false"
    if "dataset" in settings:
        quick += " --model.updates_per_iteration 2"
    status, out, err = run(f"fit --config {name} --trainer.max_steps 1 --trainer.devices 1 --trainer.accelerator cpu {quick}", capfd)
    assert (status, err) == (0, "") and "evaluate it: " in out
    (last,) = (folder / "runs" / model["class_path"]).rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 1
    if "dataset" in settings:
        assert (" of 5 episodes to learn from" if name.startswith("bc/") else "dataset: 6 episodes") in out


@pytest.mark.parametrize(
    "text", ["1e5", "-2E-3", "1_0e2", "1.5", "off", "null", "~", "2024-01-01", "=", "0x1F", "1:30", "", " a", "a: b", "#", "é"]
)
def test_a_string_that_looks_like_another_value_is_written_so_that_it_is_read_as_a_string(text):
    config = {"model": {"kwargs": {"name": text, text: [text, 1e5, 1e-7, True, None]}}}
    for style in ({}, {"default_flow_style": True}, {"allow_unicode": True}):
        assert yaml.load(dump(config, **style), Loader) == config
