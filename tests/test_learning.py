"""The packaged configs reach what their first lines say (`-m slow`; minutes to an hour on two cores).

Judged as a user would: the best checkpoint, 100 episodes, with seeds that no training or selection used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parent.parent / "configs"
COMMAND = [sys.executable, "-m", "lightning_rl"]


def best_return(config, seed, folder):
    fit = [*COMMAND, "fit", "--config", str(CONFIGS / f"{config}.yaml"), "--seed_everything", str(seed)]
    subprocess.run([*fit, "--trainer.default_root_dir", str(folder)], check=True, stdout=subprocess.DEVNULL)
    judge = [*COMMAND, "evaluate", "--ckpt_path", str(best_of(folder)), "--episodes", "100", "--seed", "50000", "--json"]
    judge += ["--import", "minigrid.wrappers"] if "minigrid" in config else []
    return json.loads(subprocess.run(judge, check=True, capture_output=True, text=True).stdout)["return_mean"]


def best_of(folder):
    (best,) = folder.rglob("best.ckpt")
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "seeds", "threshold", "needed"),
    [
        ("ppo/cartpole", (1, 2, 3, 4, 5), 490, 5),
        ("a2c/cartpole", (1, 2, 3, 4, 5), 475, 4),
        ("ppo/lunarlander", (1, 2, 3), 200, 2),
        ("ppo/pendulum", (1, 2, 3), -250, 2),
        ("ppo/mountaincar_rnd", (1, 2, 3), -130, 2),
        ("ppo/minigrid_doorkey_curiosity", (1, 2), 0.8, 2),
        ("sac/pendulum", (1, 2, 3), -180, 3),
        ("sac/cartpole", (1, 2, 3), 450, 2),
        ("sac/lunarlander_continuous", (1, 2, 3), 150, 2),
        ("dqn/cartpole", (1, 2, 3), 475, 2),
        ("dqn/lunarlander", (1, 2, 3), 150, 2),
        ("td3/pendulum", (1, 2, 3), -200, 3),
    ],
)
def test_a_config_reaches_its_return(config, seeds, threshold, needed, tmp_path):
    returns = [best_return(config, seed, tmp_path / str(seed)) for seed in seeds]
    assert sum(value >= threshold for value in returns) >= needed, returns


@pytest.mark.slow
@pytest.mark.parametrize(("config", "teacher", "within"), [("bc/cartpole", "ppo/cartpole", 50), ("bc/lunarlander", "ppo/lunarlander", 60)])
def test_clones_of_twenty_episodes_come_near_their_teacher(config, teacher, within, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    dataset = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["model"]["init_args"]["dataset"]
    threshold = best_return(teacher, 1, tmp_path / "teacher") - within
    collect = [*COMMAND, "collect", "--ckpt_path", str(best_of(tmp_path / "teacher")), "--dataset", dataset, "--episodes", "20"]
    subprocess.run(collect, check=True, stdout=subprocess.DEVNULL)
    returns = [best_return(config, seed, tmp_path / str(seed)) for seed in (1, 2, 3)]
    assert min(returns) >= threshold, (threshold, returns)
