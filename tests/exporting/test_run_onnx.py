"""The example that plays an exported policy, in a process in which neither torch nor this package can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium as gym

import lightning_rl
from lightning_rl import LSTM, PPO, export_policy, load_policy
from tests.exporting.exported import save
from tests.fitting import tiny

ROOT = Path(lightning_rl.__file__).parents[1]
PROGRAM = """
import sys
sys.modules |= {"torch": None, "lightning_rl": None}
sys.path[:0] = ["examples"]
import gymnasium as gym
import run_onnx
env = gym.make("tests.environments:Choosy-v0", **KWARGS)
print(run_onnx.play(run_onnx.Policy("FILE"), env, 0))
sys.argv[1:] = ["OTHER", "--episodes", "2", "--seed", "7"]
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
    kwargs = {"way": "key", "action": "nested", "period": 7}
    recalling = tiny(PPO, "tests.environments:Choosy-v0", env={"kwargs": kwargs}, memory=LSTM(8, 4), max_env_steps=32)
    plain = tiny(PPO, "CartPole-v1", max_env_steps=32)
    files = []
    for name, model in {"recalling": recalling, "plain": plain}.items():
        files.append(export_policy(save(model, tmp_path / f"{name}.ckpt")))
    program = PROGRAM.replace("KWARGS", repr(kwargs)).replace("FILE", str(files[0])).replace("OTHER", str(files[1]))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own = gym.make("tests.environments:Choosy-v0", **kwargs)
    (expected,) = returns(tmp_path / "recalling.ckpt", own, [0])
    first, *others = done.stdout.splitlines()
    assert abs(float(first) - expected) < 1e-5
    assert others == [
        f"episode {i}: return {total:g}" for i, total in enumerate(returns(tmp_path / "plain.ckpt", gym.make("CartPole-v1"), [7, 8]))
    ]
