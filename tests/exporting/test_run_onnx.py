"""The example that plays an exported policy, in a process in which neither torch nor this package can be imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

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


@pytest.mark.thorough
def test_the_example_plays_as_the_policy_does_without_torch_and_without_this_package(exported, tmp_path):
    home, nested = "tests.environments:Choosy-v0", {"action": "nested", "period": 7}
    cases = [
        (home, {"way": "key", **nested}, LSTM(8, 4)),
        (home, {"way": "info", "form": "tree", **nested}, None),
        (home, {"way": "method", "form": "tree", "action": "multi-discrete"}, None),
    ]
    files, expected = [], []
    policies = [("CartPole-v1", {}, exported)]
    for index, (env_id, kwargs, memory) in enumerate(cases):
        model = tiny(PPO, env_id, env={"kwargs": kwargs}, memory=memory, max_env_steps=32)
        policies.append((env_id, kwargs, export_policy(save(model, tmp_path / f"{index}.ckpt"))))
    for env_id, kwargs, file in policies:
        files.append(str(file))
        totals = returns(file.with_suffix(".ckpt"), with_mask_info(gym.make(env_id, **kwargs)), [7, 8])
        expected += [f"episode {i}: return {total:g}" for i, total in enumerate(totals)]
    program = PROGRAM.replace("FILES", repr(files))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_a_mask_in_the_info_wins_over_one_in_the_observation_as_in_training(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import run_onnx

    assert run_onnx.split_mask(None, {"action_mask": [1, 0], "where": 3}, {"action_mask": [0, 1]}) == ({"where": 3}, [0, 1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A policy of CartPole."""
    folder = tmp_path_factory.mktemp("exported")
    return export_policy(save(tiny(PPO, "CartPole-v1", max_env_steps=16), folder / "a.ckpt"))


@pytest.fixture
def policy(exported, tmp_path):
    """The same, and files beside it that are none."""
    shutil.copytree(exported.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / exported.name
    (tmp_path / "garbage.onnx").write_text("no model")
    (tmp_path / "garbage.onnx.json").write_text("{}")
    (tmp_path / "other.onnx.json").write_text('{"inputs": 3}')
    for name in ("alone.onnx", "other.onnx"):
        (tmp_path / name).write_bytes(path.read_bytes())
    for name, env_id in {"theirs": "somewhere/Env-v0", "mine": "Nobodys-v0", "nameless": None}.items():
        (tmp_path / f"{name}.onnx").write_bytes(path.read_bytes())
        description = json.loads((tmp_path / "a.onnx.json").read_text()) | {"environment": env_id}
        (tmp_path / f"{name}.onnx.json").write_text(json.dumps(description))
    return path


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("gone.onnx", "there is no file gone.onnx"),
        (".", "there is no file ."),
        ("alone.onnx", "there is no alone.onnx.json, which lightning-rl export writes next to a policy"),
        ("a.ckpt", "there is no a.ckpt.json, which lightning-rl export writes next to a policy"),
        ("garbage.onnx", "garbage.onnx.json does not describe a policy"),
        ("other.onnx", "other.onnx.json does not describe a policy"),
        ("a.onnx.json", "there is no a.onnx.json.json"),
        ("a.onnx --env CartPol-v1", "CartPol-v1 is not a registered environment (Environment `CartPol` doesn't exist. Did you mean"),
        ("a.onnx --env Pendulum-v1", "Pendulum-v1 has other observations than this policy: shapes [(3,)] instead of [(4,)]"),
        ("theirs.onnx --env Blackjack-v1", "Blackjack-v1 has other observations than this policy"),
        ("a.onnx --env nowhere:Env-v0", "Env-v0 cannot be built"),
        ("a.onnx --import nowhere", "--import nowhere: No module named 'nowhere'"),
        ("theirs.onnx", "somewhere/Env-v0 is not a registered environment; add --import PACKAGE"),
        ("mine.onnx", "Nobodys-v0 is not a registered environment"),
        ("nameless.onnx", "nameless.onnx names no environment; add --env ID"),
        ("a.onnx --episodes 0", "--episodes must be at least 1, got 0"),
    ],
)
def test_wrong_input_of_the_example_ends_in_one_line_and_status_2(arguments, words, policy, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(policy.parent)
    monkeypatch.setattr(sys, "argv", ["run_onnx.py", *arguments.split()])
    import run_onnx

    assert run_onnx.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1


def test_a_file_that_is_not_a_model_is_named(policy, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["run_onnx.py", str(policy)])
    import run_onnx

    policy.write_text("no model")
    assert run_onnx.main() == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {policy} is not an ONNX model") and err.count("\n") == 1
