"""Play whole episodes of environments of several agents with a fixed policy."""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.data.episodes import MAX_EPISODE_STEPS, Episode, success
from lightning_rl.data.opponents import draw_actions
from lightning_rl.envs.agents.serial import SerialWorld
from lightning_rl.envs.agents.stepper import Opponent, RowStepper, points, spread
from lightning_rl.envs.agents.vmas import VmasCopies, VmasWorld
from lightning_rl.envs.agents.world import Moves, Side, World
from lightning_rl.envs.sync import close_env
from lightning_rl.errors import RunStoppedError
from lightning_rl.nan_policy import Guard, check_episode
from lightning_rl.networks.acting import ActingPolicy
from lightning_rl.networks.changes import check_float32
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.spaces import OWN, Spaces, allocate, legal_sample, without_hidden
from lightning_rl.types import Tree, is_finite, tree_index, tree_map, tree_stack, tree_to_numpy


class BehaviorPolicies:
    """The policies of several behaviors, passed to an episode player in place of one network.

    Args:
        sides: the spaces of each behavior, with the names of its agents.
        networks: the network of each behavior.
        frozen: names of behaviors that do not learn; they do not count in the return and success of an episode.
    """

    def __init__(self, sides: Mapping[str, Spaces], networks: Mapping[str, ActingPolicy], frozen: Collection[str] = ()) -> None:
        self.sides, self.networks, self.frozen = sides, networks, frozen

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
        envs: environments of several agents, which the player closes; empty with `copies`.
        max_episode_steps: an episode of this length ends, counted as truncated.
        spaces: spaces of the policy.
        opponent: plays the other seats; None: random legal moves.
        copies: copies of a scenario of VMAS, which step in one call.
    """

    on_nan = "raise"
    """How to handle NaN and infinite values, see `nan_policy.py`."""

    def __init__(
        self,
        envs: list[gym.Env],
        max_episode_steps: int | None,
        spaces: Spaces,
        opponent: Opponent | None = None,
        copies: VmasCopies | None = None,
    ) -> None:
        self.envs, self.spaces, self.opponent, self.copies = envs, spaces, opponent, copies
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
        """Play episodes with the seeds seed, seed + 1, …; copy e plays e, e + E, …  The network's modes do not change.

        `network`: a policy, or `BehaviorPolicies`. Raises `RunStoppedError`: `stop` returned True.
        """
        policies = network if isinstance(network, BehaviorPolicies) else BehaviorPolicies({"": self.spaces}, {"": network})
        check_float32(*policies.networks.values())
        self.finished.clear()
        match = _Match(self, policies, episodes, seed, deterministic)
        with eval_mode(network.modules()):
            while match.goes_on():
                if stop():
                    raise RunStoppedError
                match.step()
        return sorted(self.finished)

    def make_world(self, sides: Mapping[str, Spaces]) -> World:
        """Build the world of the environments. Its sides leave out what only critics observe."""
        seen = {name: without_hidden(spaces, ()) for name, spaces in sides.items()}
        world: World
        if self.copies is not None:
            world = VmasWorld(self.copies, seen, can_be_saved=False)
        else:
            world = SerialWorld(self.envs.__getitem__, len(self.envs), seen)
        world.max_episode_steps = self.max_episode_steps
        return world

    def finish_recording(self, e: int) -> None:
        """Let a wrapper of copy e save its video: the learners' episode is over, even if others play on."""
        if self.envs and self.envs[e].has_wrapper_attr("finish_episode"):
            self.envs[e].get_wrapper_attr("finish_episode")()

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            close_env(env)


class _Played:
    """A side that is played, with the running episode of each copy.

    Attributes:
        returns: of each agent, `[E, A]`.  was_present: whether it was present in the episode, `[E, A]`.
        learns: whether the policy plays the agent, `[E, A]`.
        successes: those that agents reported, for each copy.
    """

    def __init__(self, side: Side, spaces: Spaces, network: ActingPolicy, counts: bool) -> None:
        self.side, self.spaces, self.network, self.counts = side, spaces, network, counts
        shape = side.rows.shape
        self.returns, self.was_present, self.learns = np.zeros(shape), np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)
        self.successes: list[list[float]] = [[] for _ in side.rows]
        self.memory = tree_to_numpy(network.initial_memory(side.num))
        self.before = allocate(side.spaces.observation, side.num)
        """The last observation of each row, to replace NaN and infinite values."""

    def begin(self, e: int) -> None:
        """Note that an episode begins in copy e."""
        self.returns[e], self.was_present[e], self.successes[e] = 0.0, False, []
        tree_map(lambda leaf: leaf.__setitem__(self.side.rows[e], 0), self.before)

    def act(self, rows: np.ndarray, generator: Generator, deterministic: bool) -> Tree:
        """Return the policy's actions for K rows, `[K, ...]`."""
        obs, mask = self.side.newest(rows)
        if self.spaces.joint:
            obs = {**allocate(self.spaces.observation, len(rows)), OWN: obs}
        start = ~self.side.moved[rows]
        actions, memory = draw_actions(self.network, obs, mask, tree_index(self.memory, rows), start, generator, deterministic)
        tree_map(lambda kept, new: kept.__setitem__(rows, new), self.memory, memory)
        return actions


class _Match:
    """The episodes of one call of `AgentEpisodePlayer.play`."""

    def __init__(self, player: AgentEpisodePlayer, policies: BehaviorPolicies, episodes: int, seed: int, deterministic: bool) -> None:
        self.player, self.deterministic = player, deterministic
        self.world = world = player.make_world(policies.sides)
        self.generator = Generator(next(policies.parameters()).device).manual_seed(seed)
        self.sides = {
            name: _Played(world.sides[name], spaces, policies.networks[name], name not in policies.frozen)
            for name, spaces in policies.sides.items()
        }
        self.seeds = [list(range(seed + e, seed + episodes, world.num_copies)) for e in range(world.num_copies)]
        """The seeds that each copy still plays, the current one first."""
        spaces = next(iter(policies.sides.values()))
        agents = list(spaces.agents)
        alone = [(agent,) for agent in agents] if spaces.one_learns else []
        self.teams = [[*map(agents.index, team)] for team in spaces.teams or alone]
        """The policy plays one of these teams in an episode, indices of agents; empty: it plays all agents."""
        self.draws = [deepcopy(spaces.action) for _ in range(world.num_copies)]
        """Spaces that draw the moves of others in each copy."""
        if player.opponent is not None:
            player.opponent.reset(seed)
        self._begin(self._find_running())

    def goes_on(self) -> bool:
        """Return whether a copy still plays."""
        return any(self.seeds)

    def _find_running(self) -> np.ndarray:
        return np.flatnonzero([len(seeds) > 0 for seeds in self.seeds])

    def _begin(self, copies: np.ndarray) -> None:
        """Begin the episodes of the current seeds of K copies, and look at all that run."""
        for e in copies.tolist():
            seed = self.seeds[e][0]
            self.draws[e].seed(seed)
            self.world.start(np.array([e]), seed)
            for played in self.sides.values():
                played.begin(e)
                if self.teams:
                    played.learns[e] = np.isin(range(len(played.side.agents)), self.teams[self._seat(e)])
        if self.player.opponent is not None and len(copies):
            self.player.opponent.begin(copies, np.array([self._seat(e) for e in copies]))
        running = self._find_running()
        self.world.look(running)
        for played in self.sides.values():
            rows = played.side.rows[running]
            self._check_seen(played, rows[played.side.to_move[rows]])

    def _seat(self, e: int) -> int:
        """Return the number of the team that the policy plays in copy e."""
        return self.seeds[e][0] % max(1, len(self.teams))

    def step(self) -> None:
        """Step the copies that run once, and begin the next episodes of those whose episodes are over."""
        copies = self._find_running()
        for played in self.sides.values():
            played.was_present[copies] |= played.side.present[played.side.rows[copies]]
        moves, over = self.world.step(copies, {name: self._choose(played, copies) for name, played in self.sides.items()})
        ended, present = np.zeros(len(copies), dtype=bool), np.zeros(len(copies), dtype=bool)
        for name, played in self.sides.items():
            learns = played.learns[copies]
            ended |= (moves[name].ended & learns).any(1)
            present |= (moves[name].present & learns).any(1)
            self._note(played, copies, moves[name])
        over = copies[over | (ended & ~present)]
        for e in over.tolist():
            self.player.finish_recording(e)
            self.player.finished.append(self._finish(e))
        if self.goes_on():
            self._begin(np.array([e for e in over if self.seeds[e]], dtype=np.int64))

    def _choose(self, played: _Played, copies: np.ndarray) -> Tree:
        """Return the actions of a side's rows, `[N, ...]`: those of its policy, and those of others."""
        side, learns = played.side, played.learns[copies]
        rows = side.rows[copies]
        to_move = side.to_move[rows]
        others, learning = rows[to_move & ~learns], rows[to_move & learns]
        parts = []
        if len(others):
            parts.append((others, self._play_others(side, others)))
        if len(learning):
            parts.append((learning, played.act(learning, self.generator, self.deterministic)))
        return spread(parts, side.num)

    def _play_others(self, side: Side, rows: np.ndarray) -> Tree:
        """Return actions of rows that the policy does not play, by the opponent or at random."""
        obs, mask = side.newest(rows)
        if self.player.opponent is not None:
            return self.player.opponent.act(obs, mask, rows, ~side.moved[rows])
        draws = [self.draws[e] for e in rows // len(side.agents)]
        return tree_stack([legal_sample(draw, mask[k]) if len(mask) else draw.sample() for k, draw in enumerate(draws)])

    def _note(self, played: _Played, copies: np.ndarray, moves: Moves) -> None:
        """Add the rewards of a step, and check and read what ended in it."""
        side, reward = played.side, moves.reward
        if not is_finite(reward):
            pairs = zip(side.rows[copies].flat, reward.flat, strict=True)
            reward = np.reshape([self._check(played, row, tree_index(played.before, row), one)[1] for row, one in pairs], reward.shape)
        played.returns[copies] += reward
        played.was_present[copies] |= reward != 0  # also of an agent that came in this step
        rows = side.rows[copies]
        for row in rows[side.ended[rows] & played.learns[copies]].tolist():
            self._check(played, row, tree_index(side.last_obs, row), 0.0)
            if played.counts and (reported := success(side.last_info.get(row, {}))) is not None:
                played.successes[row // len(side.agents)].append(reported)
        side.forget()

    def _check_seen(self, played: _Played, rows: np.ndarray) -> None:
        """Handle NaN and infinite values in the newest observations of K rows according to `on_nan`."""
        side = played.side
        if not is_finite(tree_index(side.obs, rows)):
            for row in rows.tolist():
                obs, _ = self._check(played, row, tree_index(side.obs, row), 0.0)
                tree_map(lambda leaf, value, row=row: leaf.__setitem__(row, value), side.obs, obs)
        tree_map(lambda leaf, new: leaf.__setitem__(rows, new[rows]), played.before, side.obs)

    def _check(self, played: _Played, row: int, obs: Tree, reward: float) -> tuple[Tree, float]:
        """Return an agent's observation and reward, with NaN and infinite values handled according to `on_nan`."""
        e, a = divmod(int(row), len(played.side.agents))
        episode = f"at step {self.world.lengths[e]} of the episode with seed {self.seeds[e][0]}"
        where = f"of {played.side.agents[a]} in evaluation, {episode}"
        return check_episode(obs, float(reward), tree_index(played.before, row), where, self.player.on_nan)[:2]

    def _finish(self, e: int) -> Episode:
        """Return the finished episode of copy e."""
        parts: dict[str, float] = {}
        successes: list[float] = []
        for name, played in self.sides.items():
            if len(agent_returns := played.returns[e][played.was_present[e] & played.learns[e]]):
                parts[name] = float(np.mean(agent_returns))
            successes += played.successes[e]
        learned = [part for name, part in parts.items() if self.sides[name].counts]
        mean = float(np.mean(learned)) if learned else 0.0  # no learning agent was present
        several = parts if len(self.sides) > 1 else {}
        result = None
        if self.teams:
            played, seat = next(iter(self.sides.values())), self._seat(e)
            returns = [played.returns[e, team][played.was_present[e, team]] for k, team in enumerate(self.teams) if k != seat]
            if others := [float(np.mean(team)) for team in returns if len(team)]:
                result = float(points(np.array([[mean, *others]]), np.array([0]))[0])
        succeeded = float(np.mean(successes)) if successes else None
        return Episode(self.seeds[e].pop(0), mean, int(self.world.lengths[e]), succeeded, several, result)


class RowEpisodePlayer:
    """Plays episodes in a world that itself begins the next episode of each agent, such as a scene of Unity; it takes no seeds.

    Each row plays its fixed share of the episodes: those that finish first are often short ones. The return of an episode is its agent's.

    Args:
        stepper: of the world; the player closes it.
        max_episode_steps: an episode of this length counts as truncated; so does that of an agent that does not come back for as long.
    """

    on_nan = "raise"
    """How to handle NaN and infinite values, see `nan_policy.py`."""

    def __init__(self, stepper: RowStepper, max_episode_steps: int | None) -> None:
        self.stepper, self.close = stepper, stepper.close
        self.max_episode_steps = max_episode_steps or MAX_EPISODE_STEPS
        self.finished: list[Episode] = []
        """Episodes of the newest `play` that have ended so far."""

    @torch.no_grad()
    def play(
        self, network: ActingPolicy, episodes: int, seed: int, deterministic: bool, stop: Callable[[], bool] = lambda: False
    ) -> list[Episode]:
        """Play episodes, numbered seed, seed + 1, …; of the rows with an agent, row i plays i, i + rows, …  `seed` is also of the draws.

        Raises `RunStoppedError`: `stop` returned True.
        """
        check_float32(network)
        stepper, guard, num = self.stepper, Guard(self.on_nan), self.stepper.num_envs
        generator = Generator(next(network.parameters()).device).manual_seed(seed)
        obs, mask = stepper.reset(seed)
        rows = np.flatnonzero(stepper.present)
        shares = {row: list(range(seed + i, seed + episodes, len(rows))) for i, row in enumerate(rows.tolist())}
        memory, start = tree_to_numpy(network.initial_memory(num)), np.ones(num, dtype=bool)
        returns, lengths, absent = np.zeros(num), np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        self.finished.clear()
        with eval_mode(network.modules()):
            while any(shares.values()):
                if stop():
                    raise RunStoppedError
                actions, memory = draw_actions(network, obs, mask, memory, start, generator, deterministic)
                step = stepper.step(actions)
                if not (is_finite(step.obs) and is_finite(step.reward)):
                    step = guard.replace(step, obs, int(lengths.max()), stepper.labels)
                returns += np.where(step.valid, step.reward, 0.0)
                lengths += step.valid
                absent = np.where(step.valid, 0, absent + 1)
                over = step.terminated | step.truncated | (lengths >= self.max_episode_steps) | (absent >= self.max_episode_steps)
                for row in np.flatnonzero(over).tolist():
                    if lengths[row] and shares.get(row):
                        self.finished.append(Episode(shares[row].pop(0), float(returns[row]), int(lengths[row]), None))
                    elif absent[row]:
                        shares[row] = []  # its agent has left for good
                lost = step.episode_start & ~step.valid
                returns[over | lost], lengths[over | lost], absent[over] = 0.0, 0, 0
                obs, mask, start = step.obs, step.mask, step.episode_start
        return sorted(self.finished)
