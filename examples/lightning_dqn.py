"""Lightning's own reinforcement learning example, DQN on CartPole, as an algorithm of this library: see docs/coming_from.md."""

from dataclasses import dataclass

import pytorch_lightning as pl
from torch import Tensor
from torch.nn.functional import mse_loss

import lightning_rl as lrl
from lightning_rl.types import Transition


@dataclass(kw_only=True, eq=False, repr=False)
class DQNLightning(lrl.DQN):
    def loss(self, batch: Transition) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        q = self.network(batch.obs, batch.memory, batch.episode_start).flatten(1).gather(1, batch.action.view(-1, 1))
        next_q = self.target(batch.next_obs, batch.memory, batch.episode_start).flatten(1).amax(1, keepdim=True)
        target = (batch.reward + batch.discount * next_q).detach()
        return mse_loss(q, target), (q - target).abs().squeeze(1).detach(), {"q_value": q.mean()}


if __name__ == "__main__":
    pl.seed_everything(0)
    exploring = {"exploration_initial_eps": 1.0, "exploration_final_eps": 0.01, "exploration_fraction": 0.05}
    replay = {"buffer_size": 1000, "learning_starts": 1000, "batch_size": 16, "train_freq": 1, "target_update_interval": 10}
    settings = {"max_env_steps": 20_000, "learning_rate": 1e-2, "gamma": 0.99, "net_arch": [128], **replay, **exploring}
    trainer = lrl.Trainer()
    trainer.fit(DQNLightning({"id": "CartPole-v1", "num_envs": 1}, **settings))
    print(trainer.test(ckpt_path="best"))
