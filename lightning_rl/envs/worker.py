"""The process of one environment: answers what `WorkerVectorEnv` asks."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from textwrap import shorten
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper, write_to_shared_memory

from lightning_rl.envs.snapshot.state import get_state, record, set_state
from lightning_rl.envs.sync import Contract
from lightning_rl.errors import SettingError
from lightning_rl.startup import follow_parent

DONE = b""
ERROR = b"!"
"""Begins the answer of a worker whose environment raised. No pickle begins so."""
REFUSED = b"?"
"""Begins that of a worker whose environment cannot be used, however often it is started anew. No pickle begins so."""


def work(
    index: int,
    build: CloudpickleWrapper,
    pipe: Connection,
    parent_end: Connection,
    observations: Any,
    outcome: Any,
    mode: str,
    way: str | None,
) -> None:
    """Build an environment and answer, until told to close or until the parent is gone."""
    parent_end.close()  # so that reading ends when the parent does
    follow_parent()
    worker = None
    try:
        worker = Worker(build(), index, observations, outcome, mode, way)
        pipe.send_bytes(DONE)
        while True:
            command, arguments = pickle.loads(pipe.recv_bytes())
            if command == "close":
                break
            pipe.send_bytes(getattr(worker, command)(*arguments))
    except (EOFError, ConnectionError):
        pass
    except SettingError as error:
        pipe.send_bytes(REFUSED + str(error).encode(errors="replace"))
    except Exception as error:  # an environment of others may raise anything
        line = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        pipe.send_bytes(ERROR + line.encode(errors="replace"))
    finally:
        if worker is not None:
            worker.env.close()


class Worker:
    """One environment. Each method answers a request with bytes: nothing, or a pickle."""

    def __init__(self, env: gym.Env, index: int, observations: Any, outcome: Any, mode: str, way: str | None) -> None:
        self.index, self.observations, self.mode = index, observations, mode
        self.space = env.observation_space
        self.reward = np.frombuffer(outcome[0], np.float64)
        self.terminated, self.truncated = (np.frombuffer(flags, bool) for flags in outcome[1:])
        self.ended = False
        self.contract = Contract(env, index)
        self.env, self.way = record(env, way), way

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> bytes:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.ended = False
        return self.tell(obs, info)

    def step(self, action: Any) -> bytes:
        """A step, or the reset that its mode puts in its place or behind it."""
        if self.ended and self.mode == "NEXT_STEP":
            self.reward[self.index], self.terminated[self.index], self.truncated[self.index] = 0.0, False, False
            return self.reset(None, None)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.contract.check_reward(reward)
        self.reward[self.index], self.terminated[self.index], self.truncated[self.index] = reward, terminated, truncated
        self.ended = bool(terminated or truncated)
        if self.ended and self.mode == "SAME_STEP":
            self.contract.check_obs(obs)
            final = {"final_obs": obs, "final_info": info}
            obs, info = self.env.reset()
            info = final | info
        return self.tell(obs, info)

    def tell(self, obs: Any, info: dict[str, Any]) -> bytes:
        """The observation by shared memory, the rest as bytes."""
        self.contract.check_obs(obs)
        write_to_shared_memory(self.space, self.index, obs, self.observations)
        return _bytes(info) if info else DONE

    def call(self, name: str, arguments: tuple[Any, ...]) -> bytes:
        """An attribute, or what a method returns."""
        value = self.env.get_wrapper_attr(name)
        return _bytes(value(*arguments) if callable(value) else value)

    def record(self, way: str | None) -> bytes:
        """Keep what this way needs."""
        self.env = record(self.env, way)
        self.way = way
        return DONE

    def get_state(self) -> bytes:
        """The environment's state, and whether it awaits its reset."""
        assert self.way is not None
        return _bytes({"env": get_state(self.env, self.way), "ended": self.ended})

    def set_state(self, state: dict[str, Any]) -> bytes:
        """The inverse; whether it worked."""
        self.ended = state["ended"]
        return _bytes(set_state(self.env, self.way, state["env"]))


def _bytes(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
