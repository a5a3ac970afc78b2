"""A loss of one's own finds next observations on-policy if its class asks for them."""

import gymnasium as gym
import numpy as np
import pytest

import lightning_rl as lrl


class Count(gym.Env):
    """Observes how many steps of an episode of five were made."""

    observation_space = gym.spaces.Box(0, 5, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0], np.float32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], np.float32), 1.0, self.count == 5, False, {}


class Watching(lrl.PPO):
    """PPO that keeps the minibatches of its loss."""

    def loss(self, minibatch, *arguments):
        self.seen.append(minibatch)
        return super().loss(minibatch, *arguments)


class WithNext(Watching):
    """The same with next observations."""

    needs_next_obs = True


@pytest.mark.parametrize("memory", [None, "LSTM"])
def test_each_row_has_the_next_observation_also_the_last_one_of_an_episode(memory):
    model = WithNext(Count, max_env_steps=32, n_steps=8, batch_size=64, n_epochs=1, memory=memory)
    model.seen = []
    lrl.Trainer(max_steps=1, evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False).fit(model)
    (batch,) = model.seen
    real = batch.weight > 0
    assert real.sum() == 8 * 8
    assert (batch.next_obs[real] == batch.obs[real] + 1).all()
    assert (batch.terminated[real] == (batch.next_obs[real, 0] == 5)).all() and batch.terminated.any()


def test_without_asking_there_are_none():
    model = Watching(Count, max_env_steps=32, n_steps=8, batch_size=64, n_epochs=1)
    model.seen = []
    lrl.Trainer(max_steps=1, evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False).fit(model)
    assert model.seen[0].next_obs == ()
