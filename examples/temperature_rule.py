"""SAC whose target entropy falls each time the policy has come down to it (after Xu et al. 2021, https://arxiv.org/abs/2112.02852).

python examples/temperature_rule.py        # stop it at any time: the same line resumes it
"""

from dataclasses import dataclass
from typing import Annotated

import pytorch_lightning as pl
import torch

import lightning_rl as lrl


@dataclass(kw_only=True, eq=False, repr=False)
class AnnealedSAC(lrl.SAC):
    """SAC for discrete actions with a target entropy that is lowered when the policy's mean entropy is close to it."""

    target_decay: Annotated[float, lrl.Range(0, 1)] = 0.8
    """Factor by which the target entropy is lowered."""
    tolerance: Annotated[float, lrl.Range(0)] = 0.05
    """How close the mean entropy must come."""
    window: Annotated[int, lrl.Range(1)] = 100
    """Updates over which the entropy is averaged."""

    losses = ("critic_loss", "actor_loss")  # `compile` compiles these; the temperature's loss has a memory

    def __post_init__(self):
        super().__post_init__()
        if list(self.actions.kinds) != ["discrete"]:
            raise lrl.SettingError(f"env: AnnealedSAC needs discrete actions, got {self.spaces.action}")
        self.register_buffer("target_entropies", self.temperature.target.clone())  # buffers are saved
        self.register_buffer("entropy_sum", torch.zeros_like(self.temperature.target))

    def temperature_loss(self, batch, entropy):
        """Return E[log α (H(π(·|s)) − H̄)], after lowering H̄ if the entropy of the last updates was close to it."""
        self.entropy_sum += batch.mean(entropy)
        if (self.updates + 1) % self.window == 0:
            close = (self.entropy_sum / self.window - self.target_entropies).abs() < self.tolerance
            self.target_entropies *= torch.where(close, self.target_decay, 1.0)
            self.entropy_sum.zero_()
        self.record(target_entropy=self.target_entropies)
        return (batch.weight * (self.temperature.log_alpha * (entropy - self.target_entropies)).sum(-1)).sum()


if __name__ == "__main__":
    pl.seed_everything(1)
    replay = {"learning_starts": 500, "train_freq": 4, "batch_size": 64}
    model = AnnealedSAC("CartPole-v1", net_arch=[64, 64], learning_rate=3e-3, max_env_steps=4_000, **replay)
    lrl.Trainer(checkpoint={"every_n_env_steps": 500}).fit(model, ckpt_path="last")
