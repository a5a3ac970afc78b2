"""Who plays the seats of a game of turns that do not learn."""

from typing import Any

import numpy as np
import torch
from torch import Generator

from lightning_rl.envs.agents.stepper import TurnStepper
from lightning_rl.networks.acting import ActingNetwork
from lightning_rl.types import State, Tree, tree_index, tree_map, tree_to_numpy, tree_to_torch


class PolicyOpponent:
    """The policy that learns, with its newest weights, in the other seats.

    Args:
        network: the policy.
        num_rows: agents of all copies, each with a memory of its own.
    """

    def __init__(self, network: ActingNetwork, num_rows: int) -> None:
        self.network = network
        self.generator = Generator(next(network.parameters()).device)
        self.memory = tree_to_numpy(network.initial_memory(num_rows))

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            # the learner's draws come from the seed itself
            self.generator.manual_seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))

    @torch.no_grad()
    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        observed = obs, tree_index(self.memory, rows), start, mask
        obs, memory, starts, mask = tree_to_torch(observed, self.generator.device)
        action, memory = self.network.sample(obs, memory, starts, mask, generator=self.generator)
        tree_map(lambda kept, new: kept.__setitem__(rows, new), self.memory, tree_to_numpy(memory))
        return self.network.distribution.to_env(tree_to_numpy(action))

    def get_state(self) -> State:
        return {"generator": self.generator.get_state(), "memory": tree_map(np.array, self.memory)}

    def set_state(self, state: State) -> None:
        self.generator.set_state(torch.as_tensor(state["generator"]))
        tree_map(np.copyto, self.memory, state["memory"])


def seat_opponents(stepper: Any, network: ActingNetwork) -> None:
    """Let the policy play the other seats, where there are any."""
    if isinstance(stepper, TurnStepper):
        stepper.opponent = PolicyOpponent(network, stepper.side.num)
