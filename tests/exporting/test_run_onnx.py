"""The example that plays an exported policy, in a process in which neither torch nor this package can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium as gym

import lightning_rl
from lightning_rl import LSTM, PPO, export_policy, load_policy
from lightning_rl.envs.masks import with_mask_info
from tests.exporting.exported import save
from tests.fitting import tiny

ROOT = Path(lightning_rl.__file__).parents[1]
PROGRAM = """
import sys
sys.modules |= {"torch": None, "lightning_rl": None}
sys.path[:0] = ["examples"]
import run_onnx
for file in FILES:
    sys.argv[1:] = [file, "--episodes", "2", "--seed", "7"]
    run_onnx.main()
"""


def returns(checkpoint, env, seeds):
    """What `load_policy` earns."""
    policy = load_policy(checkpoint)
    for seed in seeds:
        (obs, info), memory, total, ended = env.reset(seed=seed), None, 0.0, False
        while not ended:
            action, memory = policy.act(obs, memory, action_mask=info.get("action_mask"))
            obs, reward, terminated, truncated, info = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        yield total


def test_the_example_plays_as_the_policy_does_without_torch_and_without_this_package(tmp_path):
    home, nested = "tests.environments:Choosy-v0", {"action": "nested", "period": 7}
    cases = [
        ("CartPole-v1", {}, None),
        (home, {"way": "key", **nested}, LSTM(8, 4)),
        (home, {"way": "info", "form": "tree", **nested}, None),
        (home, {"way": "method", "form": "tree", "action": "multi-discrete"}, None),
    ]
    files, expected = [], []
    for index, (env_id, kwargs, memory) in enumerate(cases):
        model = tiny(PPO, env_id, env={"kwargs": kwargs}, memory=memory, max_env_steps=32)
        files.append(str(export_policy(save(model, tmp_path / f"{index}.ckpt"))))
        totals = returns(tmp_path / f"{index}.ckpt", with_mask_info(gym.make(env_id, **kwargs)), [7, 8])
        expected += [f"episode {i}: return {total:g}" for i, total in enumerate(totals)]
    program = PROGRAM.replace("FILES", repr(files))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_a_mask_in_the_info_counts_more_than_one_in_the_observation_as_in_training(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import run_onnx

    assert run_onnx.split_mask(None, {"action_mask": [1, 0], "where": 3}, {"action_mask": [0, 1]}) == ({"where": 3}, [0, 1])
