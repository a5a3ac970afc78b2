"""PPO whose encoder also learns to predict the next observation, by a head and a loss of its own.

python examples/auxiliary_head.py        # stop it at any time: the same line resumes it
"""

from dataclasses import dataclass
from typing import Annotated

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import one_hot

import lightning_rl as lrl
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.optimization import ScheduledAdam


class Layer(nn.Module):
    """One layer that the policy, the value function and the prediction share."""

    def __init__(self, space, features):
        super().__init__()
        self.layer = nn.Linear(space.shape[0], features)

    def forward(self, obs):
        return self.layer(obs).tanh()


@dataclass(kw_only=True, eq=False, repr=False)
class PredictivePPO(lrl.PPO):
    """PPO that adds the error of a predicted next observation to its loss, for vector observations and discrete actions."""

    prediction_coef: Annotated[float, lrl.Range(0)] = 0.5
    """Weight of the prediction loss."""

    needs_next_obs = True

    def __post_init__(self):
        super().__post_init__()
        self.num_actions = int(self.spaces.action.n)
        num_obs = self.spaces.observation.shape[0]
        self.head = nn.Sequential(nn.Linear(self.encoder_features + self.num_actions, 64), nn.Tanh(), nn.Linear(64, num_obs))

    def loss(self, minibatch, *scheduled):
        """Return PPO's loss + prediction_coef · |s' − ŝ'(s, a)|², and metrics."""
        loss, metrics = super().loss(minibatch, *scheduled)
        features = self.network.actor_encoder(self.network.normalizer(minibatch.obs))
        action = one_hot(minibatch.action.long(), self.num_actions)
        predicted = self.head(torch.cat([features, action], -1))
        error = (predicted - minibatch.next_obs).square().mean(-1)
        prediction_loss = mean(error, minibatch.weight)
        return loss + self.prediction_coef * prediction_loss, metrics | {"prediction_loss": prediction_loss}

    def configure_optimizers(self):
        return self.with_side_learners(ScheduledAdam(nn.ModuleList([self.network, self.head]), eps=1e-5))


if __name__ == "__main__":
    pl.seed_everything(1)
    model = PredictivePPO("CartPole-v1", encoder=Layer, encoder_features=32, learning_rate=1e-3, max_env_steps=12_000)
    lrl.Trainer(checkpoint={"every_n_env_steps": 1_000}).fit(model, ckpt_path="last")
