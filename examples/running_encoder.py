"""PPO with an encoder whose features are normalized by a forward hook, with running statistics.

python examples/running_encoder.py        # stop it at any time: the same line resumes it
"""

import pytorch_lightning as pl
import torch
from torch import nn

import lightning_rl as lrl


class NormalizedFeatures(nn.Module):
    """A layer; a hook subtracts the running mean of its outputs and divides by their running standard deviation."""

    def __init__(self, space, features, momentum=0.01):
        super().__init__()
        self.momentum = momentum
        self.layer = nn.Linear(space.shape[0], features)
        self.register_buffer("mean", torch.zeros(features))  # buffers are saved, parameters are learned
        self.register_buffer("variance", torch.ones(features))
        self.layer.register_forward_hook(self.normalize)

    def forward(self, obs):
        return self.layer(obs).tanh()

    def normalize(self, layer, inputs, output):
        if self.training:  # in losses; while acting and in evaluations the statistics stay as they are
            with torch.no_grad():
                rows = output.flatten(0, -2)
                self.mean.lerp_(rows.mean(0), self.momentum)
                self.variance.lerp_(rows.var(0), self.momentum)
        return (output - self.mean) / (self.variance + 1e-5).sqrt()


if __name__ == "__main__":
    pl.seed_everything(1)
    model = lrl.PPO("CartPole-v1", encoder=NormalizedFeatures, encoder_features=32, learning_rate=1e-3, max_env_steps=12_000)
    lrl.Trainer(checkpoint={"every_n_env_steps": 1_000}).fit(model, ckpt_path="last")
