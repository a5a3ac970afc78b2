"""Use a trained policy: `lrl.load_policy`, `lrl.make_env`, `lrl.evaluate`."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Generator
from torch.nn import Module

from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.data.episodes import Episode, longest_episode, summarize
from lightning_rl.data.opponents import Script, ScriptedPolicy, find_exploitability, name_opponent
from lightning_rl.data.players import make_player
from lightning_rl.envs.config import Env, EnvConfig, single_env_config
from lightning_rl.envs.make import make_env as build_env
from lightning_rl.envs.masks import Masks
from lightning_rl.envs.video import RecordVideo, with_render_mode
from lightning_rl.envs.wrapper_effects import check_saved_statistics
from lightning_rl.errors import NotFiniteError, SettingError, check_flag, check_range, check_seed
from lightning_rl.networks.acting import PolicyNetwork, VisiblePolicy
from lightning_rl.networks.changes import check_float32, copy_network
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.spaces import JOINT, MASK, OWN, Spaces, as_rows, describe_space, is_batch_of, mismatches, without_hidden
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.learning import choose_behavior
from lightning_rl.training.loading import best_of, find_program, read_checkpoint
from lightning_rl.training.threads import torch_threads
from lightning_rl.types import Tree, is_finite, tree_index, tree_leaves, tree_to_numpy, tree_to_torch


class Policy:
    """A network that acts on numpy observations, without an environment or a Trainer.

    Args:
        network: an algorithm's network, which contains its normalizer.
        spaces: the spaces of the environment it was trained on.
        seed: seed of sampled actions.
    """

    def __init__(self, network: PolicyNetwork, spaces: Spaces, seed: int = 0) -> None:
        check_float32(network)
        self.given, self.hidden = spaces, getattr(network, "critic_obs", [])
        self.spaces = without_hidden(spaces, self.hidden)
        visible = VisiblePolicy(network, spaces.observation, self.hidden) if self.hidden else network
        self.network: PolicyNetwork | VisiblePolicy = visible
        self.device = next(network.parameters()).device
        self.generator = Generator(self.device).manual_seed(seed)

    def __repr__(self) -> str:
        observation, action = describe_space(self.spaces.observation), describe_space(self.spaces.action)
        return f"Policy({type(self.network).__name__}, from {observation} to {action}{', masked' if self.spaces.masked else ''})"

    @torch.inference_mode()
    def act(
        self, obs: Tree, memory: Tree | None = None, *, action_mask: Tree | None = None, deterministic: bool = True
    ) -> tuple[Tree, Tree]:
        """Return the environment's action, as numpy, for one observation or a batch of them, and the memory for the next call.

        Args:
            obs: `[...]` or `[N, ...]`, a tree like the observation space; it may have a key `action_mask`.
            memory: the memory returned by the last call; None at the start of an episode. In a batch, a row of zeros starts an episode.
            action_mask: True for allowed choices, `[M]` or `[N, M]`, or another form of `envs/masks.py`; required if the policy was trained
                with masks.
            deterministic: take the most likely action instead of a random one.

        Raises:
            SettingError: an observation has the wrong parts or shape, or is NaN or infinite; a mask does not fit, allows nothing or is
                missing; or the memory is for another number of observations.
        """
        if isinstance(obs, dict) and MASK in obs:
            action_mask = obs[MASK] if action_mask is None else action_mask
            obs = {key: child for key, child in obs.items() if key != MASK}
        if action_mask is None and self.spaces.masked:
            raise SettingError(f"this policy was trained with masks: give an {MASK}, as an argument or as a key of the observation")
        obs = self._own_part(obs)
        batched = is_batch_of(self.spaces.observation, obs)
        is_pair = not batched and isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict)
        if is_pair and any(mismatches(self.spaces.observation, obs)):
            raise SettingError("the observation is a pair, as reset returns; write obs, info = env.reset()")
        rows = as_rows(self.spaces.observation, obs, batched)
        num = len(tree_leaves(rows)[0])
        if not is_finite(rows):
            raise NotFiniteError("the observation contains NaN or infinity")
        start = torch.full((num,), memory is None, device=self.device)
        memory = self.network.initial_memory(num) if memory is None else memory
        for leaf in tree_leaves(memory):
            if len(leaf) != num:
                raise SettingError(f"the memory is for {len(leaf)} observations, not {num}: pass what the last call for these returned")
        mask: Tree = ()
        if action_mask is not None:
            masks = Masks(self.spaces.action, "observation {}")
            read = masks.batch(action_mask, num) if batched else masks.one((), {MASK: action_mask})[1][None]
            mask = tree_to_torch(read, self.device)
        with eval_mode(self.network.modules()):
            action, memory = self.network.sample(
                tree_to_torch(rows, self.device), memory, start, mask, deterministic=deterministic, generator=self.generator
            )
        env_action = self.network.distribution.to_env(tree_to_numpy(action))
        return (env_action if batched else tree_index(env_action, 0)), memory

    def _own_part(self, obs: Tree) -> Tree:
        """Return an observation without the parts that only critics see."""
        if self.given.joint:
            return obs[OWN] if isinstance(obs, dict) and JOINT in obs else obs
        return {key: child for key, child in obs.items() if key not in self.hidden} if self.hidden else obs


def load_policy(
    source: str | Path | RunModule, map_location: str | torch.device = "cpu", behavior: str | None = None, env: Env | None = None
) -> Policy:
    """Load the policy of a checkpoint, a run or a shared agent, or copy the current policy of an algorithm.

    Args:
        source: a `.ckpt` file, a run's folder (its `checkpoints/best.ckpt`), an agent on the hub (`hf://USER/NAME` or
            `hf://USER/NAME@REVISION`), an agent that comes with this package (`zoo:ppo/cartpole`), a `.zip` of Stable-Baselines3, or
            an algorithm. An algorithm's policy is copied: further training does not change the copy.
        map_location: the device to act on.
        behavior: which policy to load, if there are several.
        env: the environment, for a file that does not name one, such as a `.zip` of Stable-Baselines3.

    Raises:
        SettingError: the behavior, agent or file does not exist or cannot be read; see `Algorithm.load_from_checkpoint`; or an older
            version trained it on observations of `NormalizeObservation`, whose statistics were not saved.
    """
    if isinstance(source, RunModule) and env is not None:
        raise SettingError("env is for a file that names no environment; an algorithm has its own")
    algorithm = choose_behavior(source if isinstance(source, RunModule) else load_run(source, map_location, env), behavior)
    if env is None and isinstance(algorithm.env, EnvConfig):
        check_saved_statistics(algorithm.env.wrappers)
    network = copy_network(algorithm.network) if isinstance(source, RunModule) else algorithm.network
    return Policy(network.to(map_location).eval(), algorithm.spaces)


def load_run(path: str | Path, map_location: str | torch.device = "cpu", env: Env | None = None) -> RunModule:
    """Load the algorithm of a checkpoint, run or shared agent, or that of several behaviors."""
    return RunModule.load_from_checkpoint(path, map_location, **_given(env))


def evaluate(
    checkpoint_or_algorithm: str | Path | RunModule,
    episodes: int = 100,
    seed: int = 20_000,
    num_envs: int = 10,
    deterministic: bool = True,
    max_episode_steps: int | None = None,
    opponent: str | Path | Script | None = None,
    env: Env | None = None,
) -> dict[str, float]:
    """Evaluate a policy in the environment that it was trained in, and return statistics of its episodes.

    The same arguments give the same numbers, which `lightning-rl evaluate --json` prints. The train/eval mode of networks and the global
    random state do not change.

    Args:
        checkpoint_or_algorithm: a path as in `load_policy`, or an algorithm.
        episodes: number of episodes.
        seed: seed of the first episode; it increases by 1 for each episode.
        num_envs: number of parallel environments; it affects the run time, and sampled actions.
        deterministic: take the most likely choice or the mean instead of a random action.
        max_episode_steps: environment steps after which an episode is truncated; default: the environment's limit, or 10,000.
        opponent: the player of the other seats of a game: `random` (legal moves; the default), a path as in `load_policy`, or a scripted
            player, a function or its path such as `my_module.my_player`.
        env: the environment, for a file that does not name one, or to replace the stored one.

    Returns:
        Statistics of undiscounted returns, in the environment's rewards: `return_mean`, `return_std`, `return_min`, `return_max`,
        `return_median`, `iqm` (interquartile mean), `ci_low` and `ci_high` (a 95 % bootstrap interval of the mean). `length_mean`: mean
        episode length in environment steps. For games against opponents also `win_rate`, `draw_rate` and `points` per game (1 for each
        beaten player, ½ for a draw, averaged over the other players); for small games `exploitability`. With several behaviors, these
        are averages over behaviors; `<behavior>/return_mean`, `_std`, `_min` and `_max` are for each one. `episodes` and `seed`: the
        arguments. `env_steps` (and `updates`, if the algorithm counts them): how long the policy was trained.

    Raises:
        SettingError: a number is out of range, a checkpoint cannot be loaded, the algorithm was trained on a ready vector environment,
            which cannot be built again, the environment cannot be built, or the opponent does not exist or does not fit.
    """
    check_flag("deterministic", deterministic)
    given = checkpoint_or_algorithm
    algorithm = load_with_env(given, env) if isinstance(given, str | Path) else given
    if not isinstance(algorithm, RunModule):
        raise SettingError(f"evaluate takes a checkpoint, a run's folder or an algorithm, got {type(algorithm).__name__}")
    if env is not None and algorithm is given:
        raise SettingError("env is for a checkpoint; an algorithm is evaluated in its own environment")
    played = play_episodes(algorithm, episodes, seed, num_envs, deterministic, max_episode_steps, opponent)
    with isolate_rng(), torch_threads(1):
        return statistics(algorithm, played, seed, deterministic)


def play_episodes(
    algorithm: RunModule,
    episodes: int,
    seed: int,
    num_envs: int = 10,
    deterministic: bool = True,
    max_episode_steps: int | None = None,
    opponent: str | Path | Script | None = None,
    player: str | None = None,
) -> list[Episode]:
    """Play episodes in an algorithm's environment; see `evaluate`. `player`: a scripted player in the place of the policy."""
    check_range("episodes", episodes, 1, whole=True)
    check_range("num_envs", num_envs, 1, whole=True)
    check_seed("seed", seed)
    if max_episode_steps is not None:
        check_range("max_episode_steps", max_episode_steps, 1, whole=True)
    env = algorithm.run.current_env
    if not (isinstance(env, EnvConfig) or callable(env)):
        raise SettingError("evaluate cannot build a ready environment again; train on an id, an EnvConfig or a function that builds one")
    together = min(num_envs, episodes)
    rows = together * max(1, len(algorithm.spaces.agents))
    name = None if opponent is None else name_opponent("opponent", opponent)
    other = None if name is None else algorithm.make_opponent(name, rows)
    episode_player = make_player(env, together, max_episode_steps, algorithm.spaces, opponent=None if name == "random" else other)
    episode_player.on_nan = getattr(algorithm, "on_nan", "raise")
    network: Any = algorithm.network
    if current_thread() is not main_thread() and isinstance(network, Module):
        network = copy_network(network)  # a run in the main thread may use this one, in training mode
    if player is not None:
        script = algorithm.make_opponent(player, rows)
        script.reset(seed)
        network = ScriptedPolicy(script, bool(algorithm.spaces.joint))
    with isolate_rng(), torch_threads(1), closing(episode_player):
        return episode_player.play(network, episodes, seed, deterministic)


def statistics(algorithm: RunModule, episodes: list[Episode], seed: int, deterministic: bool) -> dict[str, float]:
    """Return the statistics of episodes, the exploitability in a small game, and how long the policy was trained."""
    counts = {"env_steps": algorithm.env_steps, algorithm.counter: algorithm.count}
    known = find_exploitability(algorithm.env, algorithm.spaces, algorithm.network, deterministic)
    return {**summarize(episodes), **known, "episodes": len(episodes), **counts, "seed": seed}


def record_episodes(algorithm: Any, files: Sequence[Path], seed: int, max_episode_steps: int | None, may_cut: bool) -> list[Episode]:
    """Play one episode per file with the most likely actions, and write its video to the file.

    `may_cut`: end a video after `max_episode_steps` or the environment's limit; otherwise a longer episode is an error.

    Raises:
        SettingError: the environment cannot render, or a file cannot be written.
    """
    names = iter(files)

    def recording(env: gym.Env) -> RecordVideo:
        return RecordVideo(env, names, max_episode_steps or longest_episode(env), may_cut)

    try:
        files[0].parent.mkdir(exist_ok=True)
        player = make_player(with_render_mode(algorithm.run.current_env), 1, max_episode_steps, algorithm.spaces, [recording])
        player.on_nan = getattr(algorithm, "on_nan", "raise")
        with closing(player), torch_threads(1):
            return player.play(algorithm.network, len(files), seed, True)
    except SaveError:
        raise
    except OSError as error:
        raise SettingError(f"{files[0].parent} could not be written to ({error.strerror or error})") from error


def make_env(source: str | Path | RunModule, render_mode: str | None = None) -> gym.Env:
    """Build one environment as in the training of a policy, with the arguments, wrappers and frame stacking of its settings.

    Parameters with a curriculum have the values of its last lesson.

    Args:
        source: a path as in `load_policy`, or an algorithm.
        render_mode: such as `human` or `rgb_array`; default: from the settings.

    Raises:
        SettingError: a checkpoint cannot be loaded or does not name an environment; or the environment cannot be built, has several
            agents, or is built by a function and `render_mode` is given.
    """
    algorithm = source if isinstance(source, RunModule) else load_with_env(source)
    env = algorithm.run.current_env
    if algorithm.spaces.agents or "" not in algorithm.run.learners:
        raise SettingError("make_env is for single-agent environments; build a multi-agent one as its package does")
    if isinstance(env, VectorEnv) or env is None:
        raise SettingError("make_env cannot build a ready environment again; train on an id, an EnvConfig or a function that builds one")
    if render_mode is not None:
        if not isinstance(env, EnvConfig):
            raise SettingError("render_mode needs an environment that is named by an id; this one is built by a function")
        env = with_render_mode(env, render_mode)
    return build_env(single_env_config(env))


def load_with_env(path: str | Path, env: Env | None = None) -> Any:
    """Load the algorithm of a checkpoint with its environment, or with the given one."""
    algorithm = RunModule.load_from_checkpoint(path, **_given(env))
    if algorithm.env is None:
        if (program := find_program(read_checkpoint(best_of(path))["hyper_parameters"])) is not None:
            raise SettingError(f"{path} was trained in a program, {program}; if you trust it, add --env {program}, or env= in Python")
        way_out = "give env= from Python, or --env ID where the command has it"
        raise SettingError(f"{path} was trained on a ready environment, which a file cannot store; {way_out}")
    return algorithm


def _given(env: Env | None) -> dict[str, Any]:
    return {} if env is None else {"env": env}
