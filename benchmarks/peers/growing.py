"""Memory in MB and CPU seconds of a run of several agents at each tenth of its steps, as a user runs it: loggers and checkpoints on."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from peers.replaying import rss_mb

TENTHS = 10
SNAPSHOTS = 1_000
"""Snapshots of a run by self-play."""
AGENTS_AT_ONCE = 2
"""About so many agents of the crowd are there in a step of a copy, which a run of several behaviors counts."""


class Crowd:
    """Two runners and a catcher on a line, in the form of PettingZoo's `ParallelEnv`; runners leave when they are caught, one comes late.

    Episodes have 12 to 40 steps.
    """

    metadata: ClassVar = {"name": "crowd_v0"}
    possible_agents: ClassVar = ["runner_0", "runner_1", "catcher_0"]
    action_spaces: ClassVar = {"runner": gym.spaces.Discrete(3), "catcher": gym.spaces.Box(-1, 1, (1,), np.float32)}

    def observation_space(self, agent: str) -> gym.Space:
        return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> gym.Space:
        return self.action_spaces[agent.partition("_")[0]]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.time, self.length = ["runner_0", "catcher_0"], 0, int(self.random.integers(12, 41))
        self.place = dict(zip(self.possible_agents, self.random.uniform(-5, 5, 3).tolist(), strict=True))
        return self.seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self.time += 1
        for agent in self.agents:
            move = 1.5 * float(actions[agent][0]) if agent == "catcher_0" else float(actions[agent]) - 1
            self.place[agent] = min(10.0, max(-10.0, self.place[agent] + move))
        moved, over = self.agents, self.time == self.length
        runners = [agent for agent in moved if agent != "catcher_0"]
        caught = [agent for agent in runners if abs(self.place[agent] - self.place["catcher_0"]) < 0.5]
        rewards = {agent: -float(agent in caught) for agent in moved} | {"catcher_0": float(len(caught))}
        terminated = {agent: agent in caught for agent in moved}
        truncated = {agent: over and agent not in caught for agent in moved}
        comes = ["runner_1"] if self.time == 5 and not over else []
        self.agents = [] if over else [agent for agent in moved if agent not in caught] + comes
        there = dict.fromkeys([*moved, *self.agents])
        rewards, terminated, truncated = ({agent: each.get(agent, 0) for agent in there} for each in (rewards, terminated, truncated))
        return self.seen(there), rewards, terminated, truncated, {agent: {} for agent in there}

    def seen(self, agents: Iterable[str] | None = None) -> dict[str, Any]:
        catcher, time = self.place["catcher_0"], self.time / 40
        return {agent: np.array([self.place[agent], catcher, time], np.float32) for agent in agents or self.agents}

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Weigh(pl.Callback):
    """Notes memory and the CPU time since the start of the process as each tenth of the run ends."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *_: Any) -> None:
        while algorithm.env_steps * TENTHS >= algorithm.max_env_steps * (len(self.found) + 1) and len(self.found) < TENTHS:
            self.found.append(rss_mb())
            self.seconds.append(time.process_time())


def ppo(steps: int) -> lrl.PPO:
    """One policy of three agents, 64 copies at once."""
    return lrl.PPO({"id": "vmas.simple_spread", "num_envs": 64}, max_env_steps=steps, n_steps=100, batch_size=1_920)


def multi_agent(steps: int) -> lrl.MultiAgent:
    """Two behaviors, an on-policy and an off-policy one, whose replay buffer is full before a tenth of the run is over."""
    sac = partial(lrl.SAC, buffer_size=max(steps // 60, 1_000), train_freq=64, steps_per_iteration=512, learning_starts=500)
    behaviors = {
        "runners": lrl.Behavior("runner_*", partial(lrl.PPO, n_steps=64, batch_size=256)),
        "catcher": lrl.Behavior("catcher_0", sac),
    }
    env = {"id": "peers.growing.Crowd", "num_envs": 8}
    return lrl.MultiAgent(env, behaviors, max_env_steps=steps // AGENTS_AT_ONCE)


def self_play(steps: int, window: int) -> lrl.PPO:
    """A game by self-play, 16 copies at once, with a thousand snapshots."""
    setting = lrl.SelfPlayConfig(window=window, save_steps=steps // SNAPSHOTS)
    return lrl.PPO(
        {"id": "lightning_rl.envs.games.tic_tac_toe", "num_envs": 16},
        max_env_steps=steps,
        n_steps=8,
        batch_size=128,
        n_epochs=1,
        self_play=setting,
    )


RUNS = {
    "ppo": ppo,
    "multi_agent": multi_agent,
    "self_play_10": partial(self_play, window=10),
    "self_play_1000": partial(self_play, window=1_000),
}


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("agent_steps", type=int)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pl.seed_everything(1)
    algorithm, weigh = RUNS[options.run](options.agent_steps), Weigh()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lrl.Trainer(default_root_dir=folder, evaluation=None, torch_threads=options.threads, callbacks=[weigh])
        trainer.fit(algorithm)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    agent_steps = sum(each.env_steps for each in getattr(algorithm, "each", {"": algorithm}).values())
    print(json.dumps({"memory_mb": weigh.found, "cpu_s": weigh.seconds, "peak_mb": peak, "agent_steps": agent_steps}))


if __name__ == "__main__":
    main()
