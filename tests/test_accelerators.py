"""One GPU (`-m gpu`)."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from tests.fitting import ON_POLICY, fit, tiny, weights


class Pixels(gym.Env):
    """84 x 84 random pixels; the action should be the brightness of the first one."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.observation_space.low + self.np_random.integers(0, 256, (84, 84, 3), np.uint8)
        return self.obs, {}

    def step(self, action):
        reward = float(action == (self.obs[0, 0, 0] > 127))
        obs, _ = self.reset()
        return obs, reward, bool(self.np_random.random() < 0.1), False, {}


@pytest.mark.gpu
@pytest.mark.parametrize("normalize_obs", ["off", "running", "frozen"])
@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_a_gpu_learns_and_its_checkpoint_acts_on_a_cpu(algorithm, normalize_obs, tmp_path):
    model = tiny(algorithm, "CartPole-v1", normalize_obs=normalize_obs, normalize_obs_steps=64, max_env_steps=256)
    before = weights(model)
    trainer = lrl.Trainer(accelerator="gpu", devices=1, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(model)
    assert not torch.equal(before, weights(model).cpu())
    policy = lrl.load_policy(trainer.run_folder / "checkpoints" / "last.ckpt")
    observations = torch.randn(64, 4)
    expected = model.network.cuda().act(observations.cuda(), deterministic=True)
    assert (policy.act(observations.numpy())[0] == expected.action.cpu().numpy()).all()
    torch.testing.assert_close(policy.network.value(observations), expected.value.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_gpu_learns_from_images_at_every_precision(precision):
    torch.manual_seed(0)
    model = lrl.PPO(Pixels, max_env_steps=512, n_steps=16, batch_size=32, n_epochs=2, net_arch=[])
    before = weights(model)
    fit(model, accelerator="gpu", devices=1, precision=precision)
    assert torch.isfinite(weights(model)).all() and not torch.equal(before, weights(model).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC, lrl.DQN])
def test_a_gpu_chooses_only_legal_actions(algorithm):
    model = tiny(algorithm, "tests.environments:Choosy-v0", env={"kwargs": {"way": "key"}})  # which raises at others
    fit(model, accelerator="gpu", devices=1)
    assert model.env_steps >= 96 and torch.isfinite(weights(model)).all()


@pytest.mark.gpu
def test_the_ratio_is_one_on_a_gpu():
    ratios = []

    class Watching(lrl.PPO):
        def loss(self, minibatch, *scheduled):
            log_prob = self.network.evaluate(minibatch.obs, minibatch.action)[0]
            ratios.append((log_prob - minibatch.log_prob).sum(-1).exp().detach().cpu())
            return super().loss(minibatch, *scheduled)

    pl.seed_everything(0)
    model = Watching("CartPole-v1", max_env_steps=4_096, n_epochs=1, batch_size=1024, normalize_obs="running")
    fit(model, accelerator="gpu", devices=1)
    assert len(ratios) == 4 and all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios)


@pytest.mark.gpu
def test_environments_that_live_on_a_gpu_stay_there(tmp_path):
    settings = {"n_steps": 16, "batch_size": 512, "max_env_steps": 200_000, "learning_rate": 1e-3}
    model = lrl.PPO(lrl.EnvConfig("Torch/CartPole-v1", 256), **settings)
    trainer = lrl.Trainer(accelerator="gpu", devices=1, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(model)
    assert float(trainer.callback_metrics["rollout/ep_rew_mean"]) > 60
