"""IQL: what it clones, and how it learns with a memory; AWAC learns alike."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from lightning_rl import AWAC, IQL, LSTM
from lightning_rl.demonstrations.dataset import Demonstration
from tests.environments import ObservedAction
from tests.experts import at_random, played
from tests.fitting import fit, tiny, weights

BOX = "tests.environments:ScriptedBox-v0"


def test_the_deviation_of_a_policy_is_cloned_too():
    model = tiny(AWAC, BOX, online=True, max_env_steps=96, behavioral_cloning={"demo_path": at_random(BOX, "{}", episodes=2)})
    distribution = model.network.distribution
    x, action = torch.zeros(64, 2), torch.full((64, 2), 0.5)
    distribution.drawn_error(x, action).sum().backward()
    assert (distribution.log_std.grad > 0).all()  # a smaller deviation would err less


FAST = {"learning_rate": {"schedule": "linear", "start": 0.02}, "batch_size": 64, "net_arch": [16], "gamma": 0.9, "tau": 0.1}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_a_weight_of_one_clones_the_data(algorithm):
    right = played(ObservedAction(action="discrete"), 200, rule=lambda obs: int(obs[0] < 0))  # the worst there is
    env = {"kwargs": {"action": "discrete"}}
    model = tiny(algorithm, "tests.environments:ObservedAction-v0", env=env, dataset=right, max_updates=400, beta=0.0, **FAST)
    fit(model)
    assert model.network.sample(torch.tensor([[-1.0], [1.0]]), deterministic=True)[0].tolist() == [1, 0]


class NeverTwice(gym.Env):
    """Rules out the action that was just taken, and is truncated after six steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, None
        return self.see()

    def see(self):
        mask = np.ones(3, bool)
        if self.last is not None:
            mask[self.last] = False
        return np.array([self.t / 6, 0 if self.last is None else self.last / 3], np.float32), {"action_mask": mask}

    def step(self, action):
        self.t, self.last = self.t + 1, int(action)
        obs, info = self.see()
        return obs, 1.0, False, self.t >= 6, info


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_with_a_memory_the_last_observation_of_an_episode_whose_mask_rules_out_the_action_before_it_counts_nothing(algorithm):
    rng, episodes = np.random.default_rng(0), []
    for seed in range(10):
        env = NeverTwice()
        obs, info = env.reset(seed=seed)
        seen, masks, actions = [obs], [info["action_mask"]], []
        for _ in range(6):
            actions.append(int(rng.choice(np.flatnonzero(masks[-1]))))
            obs, _, _, _, info = env.step(actions[-1])
            seen.append(obs)
            masks.append(info["action_mask"])
        none = np.zeros(6, bool)
        episodes.append(Demonstration(np.array(seen), np.array(actions), np.ones(6), none, np.arange(6) == 5, np.array(masks)))
    model = algorithm(
        NeverTwice,
        dataset=episodes,
        max_updates=20,
        updates_per_iteration=10,
        batch_size=8,
        memory=LSTM(4, 4),
        net_arch=[8],
        critic_net_arch=[8],
    )
    fit(model)
    assert model.updates == 20 and torch.isfinite(weights(model)).all()
