"""Worker process of one environment, which answers the requests of `WorkerVectorEnv`."""

import pickle
from contextlib import suppress
from copy import deepcopy
from multiprocessing.connection import Connection

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper, write_to_shared_memory

from lightning_rl.envs.snapshot.state import get_state, record, seed_spaces, set_state
from lightning_rl.envs.sync import close_env, contract_of
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import error_line
from lightning_rl.types import Info, Options, State, Tree

DONE = b""
FAILED = b"!"
"""First byte of the reply of a worker whose environment raised. No pickle begins with it."""
UNUSABLE = b"?"
"""First byte of the reply of a worker whose environment is unusable, even after restarts. No pickle begins with it."""


def work(index: int, build: CloudpickleWrapper, obs: Tree, outcome: Tree, mode: str, way: str | None, pipe: Connection) -> None:
    """Build an environment and answer requests until the request `close` or the end of the parent process."""
    worker = None
    try:
        worker = Worker(build(), index, obs, outcome, mode, way)
        pipe.send_bytes(DONE)
        while True:
            command, arguments = pickle.loads(pipe.recv_bytes())
            if command == "close":
                break
            pipe.send_bytes(getattr(worker, command)(*arguments))
    except (EOFError, ConnectionError):
        pass
    except SettingError as error:
        report(pipe, UNUSABLE, str(error))
    except Exception as error:  # user code may raise anything
        if worker is not None and (misuse := worker.contract.misuse(error)):
            report(pipe, UNUSABLE, misuse)
        else:
            report(pipe, FAILED, error_line(error))
    finally:
        if worker is not None:
            close_env(worker.env, say=lambda line: None)


def report(pipe: Connection, kind: bytes, line: str) -> None:
    """Send the parent, if it still runs, the reason why this worker ends."""
    with suppress(OSError):
        pipe.send_bytes(kind + line.encode(errors="replace"))


class Worker:
    """Serves one environment. Each method answers a request with bytes: empty, or a pickle."""

    def __init__(self, env: gym.Env, index: int, observations: Tree, outcome: Tree, mode: str, way: str | None) -> None:
        self.index, self.observations, self.mode = index, observations, mode
        self.space = env.observation_space
        self.reward = np.frombuffer(outcome[0], np.float64)
        self.terminated, self.truncated = (np.frombuffer(flags, bool) for flags in outcome[1:])
        self.ended = False
        self.contract = contract_of(env, index)
        self.env, self.way = record(env, way), way

    def reset(self, seed: int | None, options: Options) -> bytes:
        seed_spaces(self.env, seed)
        obs, info = self.env.reset(seed=seed, options=options)
        self.ended = False
        return self._reply(obs, self.contract.read_info(info))

    def step(self, action: Tree) -> bytes:
        """Step; reset instead (NEXT_STEP) or afterwards (SAME_STEP) if the episode has ended."""
        if self.ended and self.mode == "NEXT_STEP":
            self.reward[self.index], self.terminated[self.index], self.truncated[self.index] = 0.0, False, False
            return self.reset(None, None)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.contract.check_reward(reward)
        self.contract.check_end(terminated, truncated)
        self.reward[self.index], self.terminated[self.index], self.truncated[self.index] = reward, terminated, truncated
        self.ended = bool(terminated or truncated)
        if self.ended and self.mode == "SAME_STEP":
            self.contract.check_obs(obs)
            final = deepcopy({"final_obs": obs, "final_info": self.contract.read_info(info, over=True)})  # the reset may write into them
            obs, info = self.env.reset()
            return self._reply(obs, final | self.contract.read_info(info))
        return self._reply(obs, self.contract.read_info(info, self.ended))

    def call(self, name: str, arguments: tuple[object, ...]) -> bytes:
        value = self.env.get_wrapper_attr(name)
        return to_bytes(value(*arguments) if callable(value) else value)

    def record(self, way: str | None) -> bytes:
        self.env, self.way = record(self.env, way), way
        return DONE

    def get_state(self) -> bytes:
        """Return the environment's state, and whether its reset is due."""
        assert self.way is not None
        return to_bytes({"env": get_state(self.env, self.way), "ended": self.ended})

    def set_state(self, state: State) -> bytes:
        """Restore a state; return whether that succeeded."""
        self.ended = state["ended"]
        return to_bytes(set_state(self.env, self.way, state["env"]))

    def _reply(self, obs: Tree, info: Info) -> bytes:
        """Write an observation to shared memory, and return the info."""
        self.contract.check_obs(obs)
        write_to_shared_memory(self.space, self.index, obs, self.observations)
        return to_bytes(info) if info else DONE


def to_bytes(value: object) -> bytes:
    """Pickle a value for a pipe."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
