"""Synchronous vector environment, the checks that an environment follows gymnasium's contract, and closing within a time limit."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from textwrap import shorten
from types import FrameType
from typing import Any, Literal, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import create_empty_array, iterate
from numpy.typing import DTypeLike

from lightning_rl.envs import KEPT, LESSONS, PARAMETERS, SUCCESS
from lightning_rl.errors import SettingError, is_interrupt, keep_running, place_in_code, printable, was_raised_in
from lightning_rl.spaces import MASK, cast, is_outside, mismatches, misshape
from lightning_rl.types import Info, Options, StepResult, Tree

NUMBERS = frozenset((float, int, np.float64, np.float32, np.int64))
"""Types of rewards that need no closer look."""
FLAGS = frozenset((bool, np.bool_))
"""Types of ends of episodes that need no closer look."""
READ = (*SUCCESS, MASK, PARAMETERS, LESSONS, KEPT)
"""The keys of an environment's info that are read."""
CLOSE_TIMEOUT = 10.0
"""Seconds for `close` of an environment."""
AnyEnv = gym.Env | VectorEnv
Env = TypeVar("Env", bound=Any)
_failed: set[type] = set()
"""Environments whose failure to close this process has reported."""
_hung: set[type] = set()
"""Environments whose `close` did not return in time; it is not called again."""


class Contract:
    """Checks what an environment with this observation space returns; `who` names the environment in messages."""

    def __init__(self, space: gym.Space, who: str) -> None:
        self.space, self.shape, self.who = space, space.shape, who
        codes = np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
        self.codes = "".join(code for code in codes if can_be_written(code, space.dtype))
        """Codes of the dtypes whose arrays need no further check."""

    def check_obs(self, obs: Tree) -> None:
        """Raise `SettingError` unless an observation has the parts, shapes and kinds of its space."""
        is_usual = obs.__class__ is np.ndarray and obs.shape == self.shape and obs.dtype.char in self.codes
        if is_usual and not is_outside(self.space, obs):
            return
        for what in mismatches(self.space, obs):
            raise SettingError(shorten(f"{self.who}: {what}", 190, placeholder=" …"))

    def check_reward(self, reward: object) -> None:
        """Raise `SettingError` unless a reward is a number."""
        if reward.__class__ not in NUMBERS and (what := misshape(reward, ())):
            must = self._ways_to_one(reward) or "and must be a number"
            raise SettingError(shorten(f"{self.who}: the reward {what}, {must}", 190, placeholder=" …"))

    def _ways_to_one(self, reward: object) -> str:
        """Return how to pay one number instead of one for each agent or objective; an empty string for other rewards."""
        many = len(reward) if isinstance(reward, list | tuple | np.ndarray) and np.ndim(reward) else 0
        parts = getattr(self.space, "spaces", None)
        if many < 2:
            return ""
        if isinstance(parts, tuple) and len(parts) == many:
            return "one for each agent; pay their sum in a RewardWrapper, or write a PettingZoo ParallelEnv"
        return "one for each objective; pay their weighted sum in a RewardWrapper"

    def check_end(self, terminated: object, truncated: object) -> None:
        """Raise `SettingError` unless `terminated` and `truncated` are true or false."""
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if flag.__class__ not in FLAGS and (what := misshape(flag, ())):
                raise SettingError(f"{self.who}: {name} {what}, and must be true or false")

    def read_info(self, info: Info, over: bool = False) -> Info:
        """Return the entries of an info that are read and gathered into arrays; success only if the episode is over.

        Raises `SettingError`: the info is not a dict, or its success is not a number.
        """
        if info.__class__ is dict and not info:
            return info
        if not isinstance(info, Mapping):
            raise SettingError(f"{self.who}: the info is {info!r}, and must be a dict")
        entries = {key: info[key] for key in READ if key in info}
        for name in SUCCESS:
            reported = entries.pop(name, None)
            if over and reported is not None:
                number = np.asarray(reported)
                if number.dtype.kind not in "biuf" or number.size != 1:
                    what = misshape(reported, ()) or f"is {reported!r}"
                    raise SettingError(shorten(f"{self.who}: {name} of the info {what}, and must be true, false or a number", 190))
                entries[name] = float(number.item())  # one array holds the success of all environments
        return entries

    def misuse(self, error: BaseException) -> str:
        """Return a message if an error means that `step` or `reset` returned the wrong number of values, else an empty string."""
        if isinstance(error, ValueError) and "to unpack" in str(error) and was_raised_in(error, gym):
            must = "step must return observation, reward, terminated, truncated and info, and reset observation and info"
            return f"{self.who}: {must} ({error})"
        return ""

    def failure(self, error: BaseException) -> SettingError:
        """Return an error that says in one line what the environment raised, and where. Raises the same as `keep_running`."""
        keep_running(error, self.who)
        if misuse := self.misuse(error):
            return SettingError(misuse)
        if isinstance(error, NotImplementedError) and not str(error):
            method = traceback.extract_tb(error.__traceback__)[-1].name
            return SettingError(f"{self.who} does not implement {method}{place_in_code(error)}")
        return SettingError(f"{self.who} raised {shorten(f'{type(error).__name__}: {error}', 130, placeholder=' …')}{place_in_code(error)}")

    @contextmanager
    def naming(self, *passed: type[Exception]) -> Iterator[None]:
        """Name the environment in the errors that it raises, except errors of the types `passed`."""
        try:
            yield
        except SettingError:
            raise
        except passed:
            raise
        except BaseException as error:  # a user's environment may raise anything
            raise self.failure(error) from error


class CheckedEnv(gym.Wrapper):
    """Checks what an environment returns, for vector environments that do not check it themselves."""

    def __init__(self, build: Callable[[], gym.Env], index: int) -> None:
        super().__init__(env := build())
        self.contract = contract_of(env, index)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        with self.contract.naming():
            obs, info = self.env.reset(seed=seed, options=options)
        self.contract.check_obs(obs)
        return cast(self.observation_space, obs), self.contract.read_info(info)

    def step(self, action: Tree) -> StepResult:
        with self.contract.naming():
            obs, reward, terminated, truncated, info = self.env.step(action)
        self.contract.check_obs(obs)
        self.contract.check_reward(reward)
        self.contract.check_end(terminated, truncated)
        info = self.contract.read_info(info, bool(terminated or truncated))
        return cast(self.observation_space, obs), reward, terminated, truncated, info

    def close(self) -> None:
        close_env(self.env)


def name_of(env: gym.Env) -> str:
    """Return the id of an environment, or the name of its class if it was not made from an id."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id


def contract_of(env: gym.Env, index: int) -> Contract:
    """Return the contract of an environment; `index` identifies it in messages."""
    return Contract(env.observation_space, f"environment {index} of {name_of(env)}")


def merge_info(envs: VectorEnv, infos: Info, info: Info, index: int) -> Info:
    """Add one environment's info to those of a vector environment, in gymnasium's format: an array `[N]` and a mask of who has a value."""
    return envs._add_info(infos, info, index)  # gymnasium has no public name for it


class TurnVectorEnv(SyncVectorEnv):
    """A faster version of gymnasium's `SyncVectorEnv` in mode SAME_STEP: the step that ends an episode starts the next one.

    From the infos of a step it gathers only masks and, as `final_info`, the entries that are read at the end of an episode; the rest is not
    used. The next step overwrites the observations.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
        self.contracts = [contract_of(env, i) for i, env in enumerate(self.envs)]
        space, self.codes = self.single_observation_space, self.contracts[0].codes
        self.shape, self.numbers = space.shape or (), {number for number in NUMBERS if can_be_written(number, space.dtype)}
        self.latest: list[Tree] = [None] * self.num_envs
        """The newest observation of each environment."""
        self.stacked: Tree = create_empty_array(self.single_observation_space, self.num_envs)
        """All of them, in reused arrays."""

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: Options = None) -> tuple[Tree, Info]:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        infos: Info = {}
        for i, (env, own_seed, contract) in enumerate(zip(self.envs, seeds, self.contracts, strict=True)):
            with contract.naming():
                self.latest[i], info = env.reset(seed=own_seed, options=options)
            contract.check_obs(self.latest[i])
            infos = merge_info(self, infos, contract.read_info(info), i)
        self._stack()
        return self.stacked, infos

    def _stack(self) -> None:
        """Write the newest observations into the reused arrays."""
        space = self.single_observation_space
        try:
            write_rows(self.stacked, self.latest)
        except Exception:  # another shape, or values that may not be cast to the space's dtype
            self._check_all()
            write_rows(self.stacked, [cast(space, obs) for obs in self.latest])

    def _check_all(self) -> None:
        for contract, obs in zip(self.contracts, self.latest, strict=True):
            contract.check_obs(obs)

    def step(self, actions: Tree) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments. Return observations, rewards `[N]`, terminated `[N]`, truncated `[N]`, and infos."""
        ends, rewards, latest = np.zeros((2, self.num_envs), dtype=bool), np.zeros(self.num_envs), self.latest
        infos: Info = {}
        single_actions = actions if isinstance(actions, np.ndarray) else iterate(self.action_space, actions)
        for i, (env, action) in enumerate(zip(self.envs, single_actions, strict=True)):
            try:
                obs, reward, terminated, truncated, info = env.step(action)
                if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
                    self.contracts[i].check_end(terminated, truncated)
                if terminated or truncated:
                    contract = self.contracts[i]
                    contract.check_obs(obs)
                    ends[:, i] = terminated, truncated
                    final = {"final_obs": deepcopy(obs), "final_info": contract.read_info(info, over=True)}  # the reset may write into it
                    infos = merge_info(self, infos, final, i)
                    obs, info = env.reset()
                    self.contracts[i].check_obs(obs)
                if info.__class__ is not dict:
                    info = self.contracts[i].read_info(info)
                if MASK in info:
                    infos = merge_info(self, infos, {MASK: info[MASK]}, i)
            except SettingError:
                raise
            except BaseException as error:  # a user's environment may raise anything
                raise self.contracts[i].failure(error) from error
            if reward.__class__ not in NUMBERS:
                self.contracts[i].check_reward(reward)
            rewards[i], latest[i] = reward, obs
        if isinstance(self.stacked, np.ndarray):
            for row, obs in enumerate(latest):
                if obs.__class__ is np.ndarray:
                    is_usual = obs.shape == self.shape and obs.dtype.char in self.codes
                else:
                    is_usual = not self.shape and obs.__class__ in self.numbers
                if not is_usual:
                    self.contracts[row].check_obs(obs)
                self.stacked[row] = obs
        else:
            self._stack()
        if is_outside(self.single_observation_space, self.stacked):
            self._check_all()
        return self.stacked, rewards, *ends, infos

    def close_extras(self, **_: object) -> None:
        """Close the environments."""
        for env in self.envs:
            close_env(env)


def casting_to(dtype: np.dtype) -> Literal["safe", "same_kind"]:
    """Return NumPy's casting rule for a space's dtype: an integer dtype takes only types whose values it can all hold."""
    return "safe" if dtype.kind in "iu" else "same_kind"


def can_be_written(kind: DTypeLike, dtype: np.dtype | None) -> bool:
    """Return whether all values of a type can be cast to a space's dtype, if it has one."""
    return dtype is not None and np.can_cast(kind, dtype, casting_to(dtype))


def write_rows(array: Tree, rows: Sequence[Tree]) -> None:
    """Write the observations of N environments into arrays `[N, ...]`; raise if they do not fit."""
    if not isinstance(array, dict | tuple):
        np.stack(rows, out=array, casting=casting_to(array.dtype))
        return
    for key, part in array.items() if isinstance(array, dict) else enumerate(array):
        write_rows(part, [row[key] for row in rows])


class CloseTimeoutError(BaseException):
    """Interrupts a `close` that hangs; not an `Exception`, which it might catch."""


def close_env(env: Any, say: Callable[[str], object] = lambda line: print(line, flush=True)) -> None:
    """Close an environment, single or vector. Print a line if its `close` raises or hangs, once for each class.

    Only in the main thread is there a time limit. Errors of our own wrappers that write files are raised.
    """
    kind = type(getattr(env, "unwrapped", env))
    if kind in _hung:
        return
    try:
        with time_limit(CLOSE_TIMEOUT):
            env.close()
    except SettingError:
        raise
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
        what = shorten(f"raised {type(error).__name__}: {error}", 130, placeholder=" …") + place_in_code(error)
        if isinstance(error, CloseTimeoutError):
            _hung.add(kind)
            what = f"did not return in {CLOSE_TIMEOUT:g} s{place_in_code(error)} and is not called again"
        if kind not in _failed:
            _failed.add(kind)
            say(printable(f"close of {kind.__name__} {what}; the program continues"))


def layers(env: Any) -> Iterator[AnyEnv]:
    """Iterate over an environment's wrappers from the outermost, and then itself."""
    while env is not env.unwrapped:
        yield env
        env = env.env
    yield env


@contextmanager
def closing_env(env: Env) -> Iterator[Env]:
    """Close an environment at the end of the context, as `close_env` does."""
    try:
        yield env
    finally:
        close_env(env)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `CloseTimeoutError` in the main thread after some seconds, and again each second; other threads have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, _interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise CloseTimeoutError
