"""Agents of Stable-Baselines3: read from their zip, they act as that library's own `predict`, and nothing in the file is run."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch

import lightning_rl as lrl
from lightning_rl import A2C, DQN, PPO, SAC, TD3, EnvConfig, SettingError
from lightning_rl.policy import load_run
from lightning_rl.sharing.sb3 import StatisticsReader, read_statistics
from tests.command_line import run
from tests.sharing.hub import Repo
from tests.sharing.test_hub import ADDRESS, REPO, hub  # noqa: F401  (a fixture)
from tests.sharing.theirs import CASES, FOLDER, NORMALIZED, complete, observations

OURS = {"PPO": PPO, "A2C": A2C, "DQN": DQN, "SAC": SAC, "TD3": TD3, "DDPG": TD3}
CARTPOLE = FOLDER / "ppo-CartPole-v1.zip"


def changed(folder, name="ppo-CartPole-v1", data=None, weights=None, without=()):
    """A copy of an agent with other readable settings or weights."""
    path = folder / "changed.zip"
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive, zipfile.ZipFile(path, "w") as copy:
        for member in set(archive.namelist()) - set(without):
            content = archive.read(member)
            if member == "data":
                content = json.dumps(json.loads(content) | (data or {})).encode()
            elif member == "policy.pth" and weights is not None:
                state, saved = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
                torch.save({key: value for key, value in (state | weights).items() if value is not None}, saved)
                content = saved.getvalue()
            copy.writestr(member, content)
    return path


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("name", CASES)
def test_an_agent_does_what_it_did_there_at_a_thousand_observations(name, tmp_path):
    algorithm, env_id, _ = CASES[name]
    policy = lrl.load_policy(complete(name, tmp_path), env=env_id)
    expected = np.load(FOLDER / f"{name}.npy")
    action, _ = policy.act(observations(env_id))
    assert len(np.unique(expected)) > 1 and action.shape == expected.shape
    if expected.dtype.kind == "i":
        assert np.array_equal(action, expected)
    else:
        assert np.abs(action - expected).max() < 1e-6
    assert type(load_run(complete(name, tmp_path), env=env_id)) is OURS[algorithm]


def test_critics_and_temperature_are_read_too():
    model = load_run(FOLDER / "sac-Pendulum-v1.zip", env="Pendulum-v1")
    with zipfile.ZipFile(FOLDER / "sac-Pendulum-v1.zip") as archive:
        theirs = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
        others = torch.load(io.BytesIO(archive.read("pytorch_variables.pth")), weights_only=True)
    obs, action = torch.randn(5, 3), torch.rand(5, 1) * 2 - 1
    x = torch.cat([obs, action], -1)
    for k in range(2):
        y = x
        for layer in (0, 2, 4):
            y = torch.nn.functional.linear(y, theirs[f"critic.qf{k}.{layer}.weight"], theirs[f"critic.qf{k}.{layer}.bias"])
            y = y if layer == 4 else y.relu()
        assert torch.allclose(model.critic(obs, action)[k, :, 0], y, atol=1e-6)
    assert model.temperature().item() == pytest.approx(others["log_ent_coef"].exp().item())


def test_statistics_of_observations_are_read_and_matter(tmp_path):
    shutil.copy(FOLDER / f"{NORMALIZED}.zip", tmp_path / "alone.zip")
    seen = observations("Pendulum-v1")
    with_them, without = (
        lrl.load_policy(path, env="Pendulum-v1").act(seen)[0] for path in (FOLDER / f"{NORMALIZED}.zip", tmp_path / "alone.zip")
    )
    assert np.abs(with_them - without).max() > 1e-3
    shutil.copy(FOLDER / NORMALIZED / "vec_normalize.pkl", tmp_path / "vecnormalize.pkl")
    assert np.array_equal(lrl.load_policy(tmp_path / "alone.zip", env="Pendulum-v1").act(seen)[0], with_them)


@pytest.mark.thorough
def test_subcommands_play_an_agent_in_an_environment_that_is_named(folder, capfd):
    numbers = lrl.evaluate(CARTPOLE, 3, env="CartPole-v1")
    status, out, error = run(f"evaluate --ckpt_path {CARTPOLE} --env CartPole-v1 --episodes 3 --json", capfd)
    assert (status, error) == (0, "") and json.loads(out) == numbers and numbers["env_steps"] == 1024
    short = f"evaluate --ckpt_path {CARTPOLE} --env '{{id: CartPole-v1, max_episode_steps: 5}}' --episodes 3 --json"
    assert (
        json.loads(run(short, capfd)[1])["length_mean"]
        == 5
        == lrl.evaluate(CARTPOLE, 3, env=EnvConfig("CartPole-v1", max_episode_steps=5))["length_mean"]
    )
    assert run(f"record --ckpt_path {CARTPOLE} --env CartPole-v1 --out a.mp4", capfd)[0] == 0 and (folder / "a.mp4").is_file()
    assert run(f"export --ckpt_path {CARTPOLE} --env CartPole-v1 --out a.onnx", capfd)[0] == 0 and (folder / "a.onnx").is_file()


@pytest.mark.thorough
def test_an_agent_of_theirs_on_the_hub_is_read(hub):  # noqa: F811
    hub.repos["sb3/ppo-Pendulum-v1"] = Repo()
    statistics = (FOLDER / NORMALIZED / "vec_normalize.pkl").read_bytes()
    files = {"ppo-Pendulum-v1.zip": (FOLDER / f"{NORMALIZED}.zip").read_bytes(), "vec_normalize.pkl": statistics}
    hub.repos["sb3/ppo-Pendulum-v1"].commit({**files, "README.md": b"", "train_eval_metrics.zip": b"x", "replay.mp4": b"x"})
    action, _ = lrl.load_policy("hf://sb3/ppo-Pendulum-v1", env="Pendulum-v1").act(observations("Pendulum-v1"))
    assert np.abs(action - np.load(FOLDER / f"{NORMALIZED}.npy")).max() < 1e-6
    assert not any("mp4" in request or "metrics" in request for request in hub.requests)
    with pytest.raises(SettingError, match="names no environment: add --env CartPole-v1"):
        lrl.load_policy("hf://sb3/ppo-Pendulum-v1")
    with pytest.raises(SettingError, match=r"it can act here, and not be shared from here"):
        lrl.push("hf://sb3/ppo-Pendulum-v1", REPO)
    with pytest.raises(SettingError, match="there is no"):
        lrl.load_policy(ADDRESS)


@pytest.mark.parametrize("protocol", [4, 5])  # the default of Python up to 3.13, and from 3.14 on
def test_arrays_are_read_whatever_python_saved_them(protocol):
    for array in (np.array([[1.5, -2.0, 3.0]]), np.array(7), np.float64(0.25)):
        assert np.array_equal(StatisticsReader(io.BytesIO(pickle.dumps(array, protocol))).load(), array)


def test_no_pickle_in_a_file_is_opened(tmp_path):
    bomb = base64.b64encode(pickle.dumps(Bomb(tmp_path / "ran"))).decode()
    with zipfile.ZipFile(CARTPOLE) as archive:
        data = json.loads(archive.read("data"))
    armed = {key: value | {":serialized:": bomb} for key, value in data.items() if isinstance(value, dict) and ":type:" in value}
    assert len(armed) > 5
    policy = lrl.load_policy(changed(tmp_path, data=armed), env="CartPole-v1")
    assert np.array_equal(policy.act(observations("CartPole-v1"))[0], np.load(FOLDER / "ppo-CartPole-v1.npy"))
    with zipfile.ZipFile(tmp_path / "armed.zip", "w") as archive:
        archive.writestr("data", json.dumps(data))
        content = io.BytesIO()
        torch.save({"action_net.weight": Bomb(tmp_path / "ran")}, content)
        archive.writestr("policy.pth", content.getvalue())
    with pytest.raises(SettingError, match="cannot be read as an agent of Stable-Baselines3"):
        lrl.load_policy(tmp_path / "armed.zip", env="CartPole-v1")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [Bomb, lambda file: {"norm_obs": True}, lambda file: np.zeros(3)])
def test_statistics_of_another_kind_are_refused_and_not_run(content, tmp_path):
    shutil.copy(FOLDER / f"{NORMALIZED}.zip", tmp_path / "a.zip")
    (tmp_path / "vec_normalize.pkl").write_bytes(pickle.dumps(content(tmp_path / "ran")))
    with pytest.raises(SettingError, match=r"vec_normalize.pkl does not hold statistics of one kind of observations"):
        lrl.load_policy(tmp_path / "a.zip", env="Pendulum-v1")
    assert not (tmp_path / "ran").exists()


def test_statistics_equal_those_that_were_gathered():
    found = read_statistics(io.BytesIO((FOLDER / NORMALIZED / "vec_normalize.pkl").read_bytes()))
    assert found["count"] > 1000 and found["mean"].shape == found["var"].shape == (3,) and (found["var"] > 0).all()


EXTRACTOR = {"policy_kwargs": {"features_extractor_class": "<class 'my_module.Mine'>"}}


@pytest.mark.parametrize(
    ("given", "env_id", "words"),
    [
        ({"name": "sac-sde", "data": {"policy_kwargs": {"clip_mean": 1.0}}}, "Pendulum-v1", "its clip_mean is 1.0"),
        (
            {"data": {"policy_class": {"__module__": "sb3_contrib.tqc.policies"}}},
            "CartPole-v1",
            "its policy is of sb3_contrib.tqc.policies",
        ),
        ({"data": {"cg_max_steps": 15}}, "CartPole-v1", "agents that have a counterpart are PPO, A2C, DQN, SAC, TD3 and DDPG"),
        (
            {"data": {"policy_kwargs": {"activation_fn": "<class 'torch.nn.Softplus'>"}}},
            "CartPole-v1",
            "its activation_fn Softplus is not one of",
        ),
        ({"data": EXTRACTOR}, "CartPole-v1", "its features_extractor_class Mine is not FlattenExtractor or NatureCNN"),
        ({"data": {"policy_kwargs": {"normalize_images": False}}}, "CartPole-v1", "its normalize_images is false"),
        ({"weights": {"mlp_extractor.shared_net.0.weight": torch.zeros(2)}}, "CartPole-v1", "shared_net.0.weight have no counterpart"),
        ({"weights": {"action_net.bias": None}}, "CartPole-v1", "does not hold what an agent of Stable-Baselines3 does .KeyError"),
        ({}, "Acrobot-v1", r"does not fit the model: network.actor.0.weight: \[8, 4\] in the checkpoint, \[8, 6\] here"),
        ({}, "tests.sharing.theirs:Blink-v0", "it reads no images, unlike the environment's observations"),
        ({}, "tests.environments:ScriptedDict-v0", "observations of several parts"),
        ({"without": ("policy.pth",)}, "CartPole-v1", "it has no members data and policy.pth"),
    ],
)
def test_what_has_no_counterpart_is_refused_in_one_line(given, env_id, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        lrl.load_policy(changed(tmp_path, **given), env=env_id)


def test_a_damaged_or_missing_file_is_one_line_and_status_two(folder, capfd):
    whole = CARTPOLE.read_bytes()
    for content in (b"", b"PK", whole[:3000], whole[:5000] + b"x" * 100 + whole[5100:]):
        (folder / "a.zip").write_bytes(content)
        status, _, error = run("evaluate --ckpt_path a.zip --env CartPole-v1", capfd)
        assert status == 2 and len(error.splitlines()) == 1 and "cannot be read as an agent of Stable-Baselines3" in error
    status, _, error = run("evaluate --ckpt_path b.zip --env CartPole-v1", capfd)
    assert status == 2 and "'b.zip' is not a file" in error
    status, _, error = run(f"evaluate --ckpt_path {CARTPOLE} --env CartPol-v1", capfd)
    assert status == 2 and "CartPole" in error
    status, _, error = run(f"evaluate --ckpt_path {CARTPOLE}", capfd)
    assert status == 2 and "names no environment: add --env CartPole-v1" in error


def test_a_checkpoint_plays_in_another_environment_with_its_spaces_alone(tmp_path):
    from tests.fitting import fit, tiny

    fit(tiny(PPO, "CartPole-v1", max_env_steps=16)).save_checkpoint(tmp_path / "a.ckpt")
    assert lrl.evaluate(tmp_path / "a.ckpt", 2, env=EnvConfig("CartPole-v1", max_episode_steps=3))["length_mean"] == 3
    assert lrl.evaluate(tmp_path / "a.ckpt", 2, env=lambda: gym.make("CartPole-v1", max_episode_steps=4))["length_mean"] == 4
    with pytest.raises(SettingError, match="was trained with other observations or actions than Acrobot-v1 has"):
        lrl.evaluate(tmp_path / "a.ckpt", 2, env="Acrobot-v1")
