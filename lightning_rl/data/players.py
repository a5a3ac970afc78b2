"""Players of whole episodes for an environment: for one agent, for several, and for scenes that take no seeds."""

from collections.abc import Callable, Sequence

import gymnasium as gym
import numpy as np

from lightning_rl.data.agent_episodes import AgentEpisodePlayer, RowEpisodePlayer
from lightning_rl.data.episodes import EpisodePlayer
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.agents.stepper import Opponent, RowStepper
from lightning_rl.envs.config import EnvConfig, EnvSource, single_env_config
from lightning_rl.envs.make import make_env, make_vmas, probe_spaces
from lightning_rl.envs.parameters import draw_by_episode
from lightning_rl.envs.stepping import make_agent_stepper
from lightning_rl.envs.unity.settings import EDITOR
from lightning_rl.errors import SettingError
from lightning_rl.processes.ranks import num_ranks, own_rank
from lightning_rl.spaces import Spaces, allocate, describe_space
from lightning_rl.types import tree_map

Wrapper = Callable[[gym.Env], gym.Env]


def make_player(
    env: EnvSource,
    num_envs: int,
    max_episode_steps: int | None,
    spaces: Spaces | None = None,
    wrappers: Sequence[Wrapper] = (),
    opponent: Opponent | None = None,
) -> EpisodePlayer | AgentEpisodePlayer | RowEpisodePlayer:
    """Return a player of episodes, which end at `max_episode_steps`, or else at the environment's own limit.

    `spaces`: those of the policy; if they are masked, the environments must have masks; None takes those of the environment. `wrappers`:
    for each environment, the last one outermost. `opponent`: plays the other seats of a game; None moves at random. Raises `SettingError`
    for a ready vector environment, which cannot be built again.
    """
    builder = single_env_config(check_can_be_built(env))
    if isinstance(env, EnvConfig) and env.is_unity and spaces is not None and not wrappers and opponent is None:
        first = 0 if env.name == EDITOR else env.num_envs * num_ranks() + own_rank()  # a player of its own, after those that train
        stepper = make_agent_stepper(single_env_config(env), spaces._replace(teams=(), groups=0), first)
        assert isinstance(stepper, RowStepper)
        return RowEpisodePlayer(stepper, max_episode_steps)

    def wrap(made: gym.Env) -> gym.Env:
        made = draw_by_episode(made)
        for wrapper in wrappers:
            made = wrapper(made)
        return made

    copies = make_vmas(builder, num_envs) if num_envs > 1 and not wrappers else None
    if copies is not None and not copies.are_independent():
        copies = None
    envs = [wrap(make_env(builder)) for _ in range(num_envs if copies is None else 0)]
    if copies is not None or isinstance(envs[0].unwrapped, AgentsEnv):
        longest = max_episode_steps or getattr(builder, "max_episode_steps", None)
        return AgentEpisodePlayer(envs, longest, spaces or probe_spaces(builder), opponent, copies)
    if opponent is not None:
        raise SettingError("an opponent plays the other seats of a game: this environment has one agent, or a policy for each")
    return EpisodePlayer(envs, max_episode_steps, spaces is not None and spaces.masked)


def check_shapes(env_spaces: Spaces, policy_spaces: Spaces) -> None:
    """Raise `SettingError` unless the spaces of an evaluation environment have the same parts and shapes as the policy's."""
    for name in ("observation", "action"):
        its, known = (getattr(spaces, name) for spaces in (env_spaces, policy_spaces))
        parts, known_parts = (tree_map(np.shape, allocate(space, 1)) for space in (its, known))
        if parts != known_parts:
            given = f"the environment of an evaluator has the {name} space {describe_space(its)}"
            raise SettingError(f"{given}, and the algorithm's has {describe_space(known)}")


def check_can_be_built(env: EnvSource) -> EnvConfig | Callable[[], gym.Env]:
    """Return the settings or function that builds an environment; raise `SettingError` for a ready vector environment and for None."""
    if env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train or evaluate it")
    if isinstance(env, EnvConfig) or callable(env):
        return env
    raise SettingError("evaluation cannot copy a ready vector environment; pass evaluation=None or an evaluator with env=")
