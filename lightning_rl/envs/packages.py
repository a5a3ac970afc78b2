"""The optional packages behind environments: which extra brings them, and quieting them."""

from __future__ import annotations

import importlib
import logging

import gymnasium as gym

EXTRAS = {
    "Box2D": "box2d",
    "mujoco": "mujoco",
    "ale_py": "atari",
    "cv2": "atari",
    "opencv": "atari",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "pettingzoo": "pettingzoo",
}
"""Which of our extras brings a missing package."""


def prepare_package(env_id: str) -> None:
    """What a package needs before its environment is built. Its notices go to the log, not to stderr and a file in the current folder.

    Raises:
        ImportError: the package is not installed.
    """
    if env_id.startswith("ALE/"):
        ale_py = importlib.import_module("ale_py")
        gym.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if env_id.startswith("MinAtar/") and env_id not in gym.registry:
        importlib.import_module("minatar.gym").register_envs()
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        importlib.import_module("minigrid")  # which registers them
    spec = gym.registry.get(env_id)
    if spec is not None and "mujoco" in str(spec.entry_point):
        importlib.import_module("mujoco").set_mju_user_warning(logging.getLogger("mujoco").info)


def own_module(env_id: str) -> str | None:
    """The module behind an id that a program registered itself; None for ids of gymnasium, of this package and of the packages above."""
    spec = gym.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return None
    module = spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    return None if module.partition(".")[0] in ("gymnasium", "lightning_rl", *EXTRAS) else module
