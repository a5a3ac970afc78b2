"""Play whole episodes of environments of several agents with a fixed policy."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.data.episodes import MAX_EPISODE_STEPS, Episode, success
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.agents.stepper import Opponent, points
from lightning_rl.envs.agents.vmas import VmasGame
from lightning_rl.envs.masks import make_masks
from lightning_rl.envs.sync import close_env
from lightning_rl.errors import RunStoppedError
from lightning_rl.nan_policy import check_episode
from lightning_rl.networks.acting import ActingPolicy, check_float32
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.spaces import OWN, Spaces, allocate, legal_sample
from lightning_rl.types import Info, Tree, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch


class BehaviorPolicies:
    """The policies of several behaviors, passed to an episode player in place of one network.

    Args:
        sides: the spaces of each behavior, with the names of its agents.
        networks: the network of each behavior.
        frozen: names of behaviors that do not learn; they do not count in the return and success of an episode.
    """

    def __init__(self, sides: Mapping[str, Spaces], networks: Mapping[str, ActingPolicy], frozen: Collection[str] = ()) -> None:
        self.sides, self.networks, self.frozen = sides, networks, frozen
        self.side_of = {agent: name for name, spaces in sides.items() for agent in spaces.agents}

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of all networks."""
        for network in self.networks.values():
            yield from network.modules()

    def parameters(self) -> Iterator[Tensor]:
        """Yield all parameters of all networks."""
        for network in self.networks.values():
            yield from network.parameters()


class AgentEpisodePlayer:
    """Plays episodes in its own environments, as `EpisodePlayer` does, each episode with its own seed.

    If all agents move simultaneously, each acts by the policy of its behavior. The return of an episode is the mean over learning
    behaviors, and the return of a behavior is the mean over its agents that were present. If one agent or one team of a copy learns, the
    policy plays the seat seed mod A, or the team seed mod the number of teams, and the return is the mean over its agents; an opponent
    plays the others. Observations of critics alone are left zero. The length of an episode counts all moves.

    Args:
        envs: environments of several agents; the player closes them.
        max_episode_steps: an episode of this length ends, counted as truncated.
        spaces: spaces of the policy (default: those of the first environment).
        opponent: plays the other seats; None: random legal moves.
    """

    on_nan = "raise"
    """How to handle NaN and infinite values, see `nan_policy.py`."""

    def __init__(
        self, envs: list[gym.Env], max_episode_steps: int | None, spaces: Spaces | None = None, opponent: Opponent | None = None
    ) -> None:
        self.envs, self.spaces, self.opponent = envs, spaces, opponent
        self.max_episode_steps = max_episode_steps or MAX_EPISODE_STEPS
        self.finished: list[Episode] = []
        """Episodes of the newest `play` that have ended so far."""

    @torch.no_grad()
    def play(
        self,
        network: ActingPolicy | BehaviorPolicies,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Episode]:
        """Play episodes with the seeds seed, seed + 1, …; environment i plays i, i + num_envs, …  The network's modes do not change.

        `network`: a policy, or `BehaviorPolicies`. Raises `RunStoppedError`: `stop` returned True.
        """
        if isinstance(network, BehaviorPolicies):
            policies = network
        else:
            first = self.envs[0].unwrapped
            assert isinstance(first, AgentsEnv)
            if self.spaces is None:
                self.envs[0].reset(seed=0)
            policies = BehaviorPolicies({"": self.spaces or first.find_spaces()}, {"": network})
        check_float32(*policies.networks.values())
        generator = Generator(next(network.parameters()).device).manual_seed(seed)
        shares = [range(seed + i, seed + episodes, len(self.envs)) for i in range(len(self.envs))]
        players = [_EnvPlayer(env, share, self, policies, k) for k, (env, share) in enumerate(zip(self.envs, shares, strict=True)) if share]
        self.finished.clear()
        if self.opponent is not None:
            self.opponent.reset(seed)
            self.opponent.begin(np.arange(len(players)), np.array([player.seat for player in players]))
        with eval_mode(network):
            while players:
                if stop():
                    raise RunStoppedError
                self._play_others([(player, agent) for player in players for agent in player.others()])
                movers = [(player, agent) for player in players for agent in player.choose()]
                for name, policy in policies.networks.items():
                    of_behavior = [(player, agent) for player, agent in movers if policies.side_of[agent] == name]
                    if of_behavior:
                        move(of_behavior, policies.sides[name], policy, generator, deterministic)
                for player in players:
                    if isinstance(player.copy.env, VmasGame):  # all copies step in one call
                        player.copy.env.choose(player.actions)
                for player in players:
                    self.finished += player.step()
                players = [player for player in players if player.seeds]
            return sorted(self.finished)

    def _play_others(self, movers: Sequence[tuple["_EnvPlayer", str]]) -> None:
        """Choose the actions of agents that the policy does not play, by the opponent or at random."""
        if self.opponent is None:
            for player, agent in movers:
                player.actions[agent] = player.random_action(agent)
        elif movers:
            rows = np.array([player.number * len(player.agents) + player.agents.index(agent) for player, agent in movers])
            start = np.array([agent not in player.moved for player, agent in movers])
            obs, mask = tree_stack([player.seen[agent] for player, agent in movers])
            actions = self.opponent.act(obs, mask, rows, start)
            for k, (player, agent) in enumerate(movers):
                player.actions[agent] = tree_index(actions, k)
                player.moved.add(agent)

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            close_env(env)


class _EnvPlayer:
    """One environment and its running episode; `seeds` are the seeds still to play, the current one first."""

    def __init__(self, env: gym.Env, seeds: Sequence[int], player: AgentEpisodePlayer, policies: BehaviorPolicies, number: int) -> None:
        self.env, self.seeds, self.player = env, list(seeds), player
        assert isinstance(env.unwrapped, AgentsEnv)
        self.copy = env.unwrapped
        self.policies, self.agents, self.number = policies, self.copy.agents, number
        one_learns = self.copy.takes_turns or any(spaces.one_learns for spaces in policies.sides.values())
        teams = next(iter(policies.sides.values())).teams
        self.teams: Sequence[Sequence[str]] = teams or ([[agent] for agent in self.agents] if one_learns else [self.agents])
        """The policy plays one of these teams in an episode."""
        self.masks = {name: make_masks(spaces, f"{{}} of {self.copy.name}") for name, spaces in policies.sides.items()}
        self.initial = {name: tree_to_numpy(tree_index(each.initial_memory(1), 0)) for name, each in policies.networks.items()}
        self.space = deepcopy(self.copy.env.action_space(self.agents[0]))
        self.start()

    def start(self) -> None:
        """Start the episode of the current seed."""
        seed = self.seeds[0]
        self.env.reset(seed=seed)
        self.space.seed(seed)
        self.length, self.returns = 0, dict.fromkeys(self.copy.present, 0.0)
        self.seat = seed % len(self.teams)
        self.learners = self.teams[self.seat]
        sides, names = self.policies.sides, self.policies.side_of
        self.memory: dict[str, Tree] = {agent: self.initial[name] for agent, name in names.items()}
        self.before = {agent: own_part(sides[name], allocate(sides[name].observation)) for agent, name in names.items()}
        """Last observation of each agent, to replace NaN and infinite values."""
        self.moved: set[str] = set()
        self.reports: list[float] = []
        self.look()

    def look(self) -> None:
        """Read the observations of the agents that are to move."""
        self.seen: dict[str, tuple[Tree, Tree]] = {}
        self.actions: dict[str, Tree] = {}
        for agent in self.copy.to_move:
            obs, mask = self._read(agent, *self.copy.look(agent))
            self.before[agent], _ = self._check(agent, obs, 0.0)
            self.seen[agent] = self.before[agent], mask

    def _read(self, agent: str, obs: Tree, info: Info, over: bool = False) -> tuple[Tree, Tree]:
        """Return an agent's observation without its mask, and the mask."""
        return self.masks[self.policies.side_of[agent]].one(obs, info, agent, over)

    def _check(self, agent: str, obs: Tree, reward: float) -> tuple[Tree, float]:
        """Return an agent's observation and reward, with NaN and infinite values handled according to `on_nan`."""
        where = f"of {agent} in evaluation, at step {self.length} of the episode with seed {self.seeds[0]}"
        return check_episode(obs, reward, self.before[agent], where, self.player.on_nan)[:2]

    def choose(self) -> list[str]:
        """Return the agents that need an action of the policy."""
        return [agent for agent in self.seen if agent in self.learners]

    def others(self) -> list[str]:
        """Return the agents that need an action of an opponent."""
        return [agent for agent in self.seen if agent not in self.learners]

    def random_action(self, agent: str) -> Tree:
        """Draw a legal action."""
        mask = self.seen[agent][1]
        return legal_sample(self.space, mask) if len(mask) else self.space.sample()

    def step(self) -> list[Episode]:
        """Step once. Return the episode if this ended it."""
        self.env.step(self.actions)
        self.length += 1
        copy, learners = self.copy, self.learners
        for agent in copy.rewards:
            _, reward = self._check(agent, self.before[agent], float(copy.rewards[agent]))
            self.returns[agent] = self.returns.get(agent, 0.0) + reward
        gone = not set(copy.last).isdisjoint(learners) and (set(copy.present) - set(copy.last)).isdisjoint(learners)
        over = not copy.present or self.length >= self.player.max_episode_steps or gone
        ended = {agent: (copy.last[agent], copy.last_info[agent]) for agent in copy.last}
        if over:
            ended |= {agent: copy.look(agent) for agent in copy.present if agent in learners}
        for agent in self.moved.intersection(learners, ended):
            obs, info = ended[agent]
            self._check(agent, self._read(agent, obs, info, over=True)[0], 0.0)
            if self.policies.side_of[agent] not in self.policies.frozen and (reported := success(info)) is not None:
                self.reports.append(reported)
        self.moved -= set(ended)  # an agent that returns has no memory
        if not over:
            self.look()
            return []
        if self.env.has_wrapper_attr("finish_episode"):
            self.env.get_wrapper_attr("finish_episode")()
        players = [agent for agent in self.returns if agent in learners]
        parts = {
            name: float(np.mean([self.returns.get(agent, 0.0) for agent in played]))
            for name in self.policies.sides
            if (played := [agent for agent in players if self.policies.side_of[agent] == name])
        }
        learned = [part for name, part in parts.items() if name not in self.policies.frozen]
        mean = float(np.mean(learned)) if learned else 0.0  # no learning agent was present
        succeeded = float(np.mean(self.reports)) if self.reports else None
        several = parts if len(self.policies.sides) > 1 else {}
        teams = [[self.returns[agent] for agent in team if agent in self.returns] for team in self.teams if team is not learners]
        others = [float(np.mean(each)) for each in teams if each]
        result = float(points(np.array([[mean, *others]]), np.array([0]))[0]) if others else None
        episode = Episode(self.seeds.pop(0), mean, self.length, succeeded, several, result)
        if self.seeds:
            self.start()
            if self.player.opponent is not None:
                self.player.opponent.begin(np.array([self.number]), np.array([self.seat]))
        return [episode]


def own_part(spaces: Spaces, obs: Tree) -> Tree:
    """Return the part of observations that policies read, if critics also observe other agents."""
    return obs[OWN] if spaces.joint else obs


def move(
    movers: Sequence[tuple[_EnvPlayer, str]], spaces: Spaces, network: ActingPolicy, generator: Generator, deterministic: bool
) -> None:
    """Choose the actions of agents of one behavior."""
    seen = [player.seen[agent] for player, agent in movers]
    obs = allocate(spaces.observation, len(movers))
    for row, (each, _) in enumerate(seen):
        tree_map(lambda rows, leaf, row=row: rows.__setitem__(row, leaf), own_part(spaces, obs), each)
    start = np.array([agent not in player.moved for player, agent in movers])
    arrays = obs, tree_stack([player.memory[agent] for player, agent in movers]), start, tree_stack([mask for _, mask in seen])
    obs, memory, starts, mask = tree_to_torch(arrays, generator.device)
    action, memory = network.sample(obs, memory, starts, mask, deterministic=deterministic, generator=generator)
    actions, memory = network.distribution.to_env(tree_to_numpy(action)), tree_to_numpy(memory)
    for row, (player, agent) in enumerate(movers):
        player.actions[agent], player.memory[agent] = tree_index(actions, row), tree_index(memory, row)
        player.moved.add(agent)
