"""Agents of Stable-Baselines3 for tests, as `python -m tests.sharing.theirs` makes them with that library; tests need it not.

Each is 1,000 steps of training, its `.zip` without optimizers and pickles, and what its `predict(deterministic=True)` gave at
1,000 observations. The weights of the one with images are too large to keep: they are a formula, in its file and in the test.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box

FOLDER = Path(__file__).parent / "sb3"
NUMBER = 1000
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo-CartPole-v1": ("PPO", "CartPole-v1", {"n_steps": 256, "policy_kwargs": {"net_arch": [8, 8]}}),
    "ppo-Pendulum-v1": (
        "PPO",
        "Pendulum-v1",
        {"n_steps": 256, "policy_kwargs": {"net_arch": {"pi": [8], "vf": [8]}, "activation_fn": "ReLU"}},
    ),
    "a2c-Acrobot-v1": ("A2C", "Acrobot-v1", {"policy_kwargs": {"net_arch": [6], "ortho_init": False}}),
    "dqn-CartPole-v1": ("DQN", "CartPole-v1", {"learning_starts": 100, "policy_kwargs": {"net_arch": [8, 8]}}),
    "sac-Pendulum-v1": ("SAC", "Pendulum-v1", {"learning_starts": 100, "policy_kwargs": {"net_arch": [8, 8]}}),
    "td3-Pendulum-v1": ("TD3", "Pendulum-v1", {"learning_starts": 100, "policy_kwargs": {"net_arch": [8, 6], "activation_fn": "ELU"}}),
    "ddpg-Pendulum-v1": ("DDPG", "Pendulum-v1", {"learning_starts": 100, "policy_kwargs": {"net_arch": [8]}}),
    "ppo-Blink-v0": (
        "PPO",
        "tests.sharing.theirs:Blink-v0",
        {"n_steps": 16, "policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}},
    ),
    "sde": ("PPO", "Pendulum-v1", {"use_sde": True, "n_steps": 64, "policy_kwargs": {"net_arch": [4]}}),
    "sac-sde": ("SAC", "Pendulum-v1", {"use_sde": True, "learning_starts": 100, "policy_kwargs": {"net_arch": [4]}}),
    "unequal": ("PPO", "CartPole-v1", {"n_steps": 64, "policy_kwargs": {"net_arch": {"pi": [4], "vf": [5]}}}),
}
NORMALIZED = "ppo-Pendulum-v1"
"""Which was trained on normalized observations: `vec_normalize.pkl` is in the folder of its name."""


class Blink(gym.Env):
    """Observes random images; each action ends the episode."""

    observation_space = Box(0, 255, (36, 40, 3), np.uint8)
    action_space = Box(-5, 5, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8), {}

    def step(self, action):
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8), 0.0, True, False, {}


gym.register("Blink-v0", "tests.sharing.theirs:Blink")


def observations(env_id: str) -> np.ndarray:
    """1,000 observations, the same everywhere, that reach as far as the environment's."""
    random = np.random.default_rng(7)
    space: Any = gym.make(env_id).observation_space
    if space.dtype == np.uint8:
        return random.integers(0, 256, (NUMBER, *space.shape), np.uint8)
    low, high = space.low.clip(-5, 5), space.high.clip(-5, 5)
    return (low + random.random((NUMBER, *space.shape)) * (high - low)).astype(np.float32)


def by_formula(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Weights in (-1, 1) that are made from their places alone, and scaled by their inputs."""
    weights = {}
    for name, shape in shapes.items():
        number = int(np.prod(shape))
        values = (np.arange(number, dtype=np.int64) * 7919 + len(name)) % 10007 / 5003.5 - 1
        weights[name] = torch.tensor(values.reshape(shape) / np.sqrt(number / shape[0]), dtype=torch.float32)
    return weights


def complete(name: str, folder: Path) -> Path:
    """The file of an agent; one without weights is completed in a folder of the test."""
    path = FOLDER / f"{name}.zip"
    with zipfile.ZipFile(path) as archive:
        if "shapes.json" not in archive.namelist():
            return path
        content = io.BytesIO()
        torch.save(by_formula(json.loads(archive.read("shapes.json"))), content)
        copy = folder / path.name
        with zipfile.ZipFile(copy, "w") as written:
            written.writestr("data", archive.read("data"))
            written.writestr("policy.pth", content.getvalue())
    return copy


def without_pickles(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an agent without the pickles in it, which hold code and paths of the machine; nobody here reads them."""
    return {key: value | {":serialized:": ""} if isinstance(value, dict) and ":type:" in value else value for key, value in data.items()}


def make(name: str) -> None:
    """Train an agent and write its files."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    algorithm, env_id, settings = CASES[name]
    kwargs = dict(settings["policy_kwargs"])
    if "activation_fn" in kwargs:
        kwargs["activation_fn"] = getattr(torch.nn, kwargs["activation_fn"])
    env: Any = DummyVecEnv([lambda: gym.make(env_id)])
    if name == NORMALIZED:
        env = VecNormalize(env)
    policy = "CnnPolicy" if "features_extractor_kwargs" in kwargs else "MlpPolicy"
    model = getattr(sb3, algorithm)(policy, env, seed=1, device="cpu", **{**settings, "policy_kwargs": kwargs})
    model.learn(32 if policy == "CnnPolicy" else 1000)
    shapes = {key: tuple(value.shape) for key, value in model.policy.state_dict().items()}
    if policy == "CnnPolicy":
        weights = by_formula(shapes)
        for key in shapes:  # which are the same layers
            weights[key] = weights[key.removeprefix("pi_").removeprefix("vf_")]
        model.policy.load_state_dict(weights)
    seen = observations(env_id)
    if name == NORMALIZED:
        (FOLDER / name).mkdir(exist_ok=True)
        env.save(FOLDER / name / "vec_normalize.pkl")
        seen = env.normalize_obs(seen)
    content = io.BytesIO()
    model.save(content)
    with zipfile.ZipFile(content) as archive, zipfile.ZipFile(FOLDER / f"{name}.zip", "w") as kept:
        for member in archive.namelist():
            if member == "policy.pth" and policy == "CnnPolicy":
                kept.writestr("shapes.json", json.dumps(shapes))
            elif member == "data":
                kept.writestr(member, json.dumps(without_pickles(json.loads(archive.read(member)))))
            elif "optimizer" not in member and member != "system_info.txt":
                kept.writestr(member, archive.read(member))
    np.save(FOLDER / f"{name}.npy", model.predict(seen, deterministic=True)[0])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in CASES:
        make(each)
