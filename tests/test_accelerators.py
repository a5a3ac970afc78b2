"""One GPU (`-m gpu`)."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.errors import NotFiniteError
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


def train_copies(folder, algorithm=lrl.PPO, env="Torch/CartPole-v1", ckpt_path=None, rollouts=8, **settings):
    """Train on the GPU in 64 copies, 1,024 steps a rollout. Return the model and the folder of its run."""
    pl.seed_everything(0)
    settings = {"n_steps": 16, "learning_rate": 1e-3, **({} if algorithm is lrl.A2C else {"batch_size": 256}), **settings}
    model = algorithm(lrl.EnvConfig(env, 64), max_env_steps=rollouts * 1_024, **settings)
    trainer = lrl.Trainer(accelerator="gpu", devices=1, default_root_dir=folder, enable_progress_bar=False, evaluation=None)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer.run_folder


@pytest.mark.gpu
@pytest.mark.parametrize(
    "algorithm, env, settings",
    [
        pytest.param(lrl.PPO, "Torch/CartPole-v1", {}, id="PPO"),
        pytest.param(lrl.PPO, "Torch/Pendulum-v1", {"normalize_obs": "running", "normalize_reward": True}, id="PPO normalized"),
        pytest.param(
            lrl.PPO,
            "Torch/CartPole-v1",
            {"memory": lrl.GRU(16, 4)},
            id="PPO with a memory",
            marks=pytest.mark.filterwarnings("ignore:RNN module weights"),  # as the package does, whose filter is below pytest's
        ),
        pytest.param(lrl.A2C, "Torch/CartPole-v1", {}, id="A2C"),
        pytest.param(lrl.PQN, "Torch/CartPole-v1", {}, id="PQN, whose exploration fades"),
    ],
)
def test_a_recorded_rollout_is_the_one_that_is_stepped(algorithm, env, settings, tmp_path, monkeypatch):
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    stepped, _ = train_copies(tmp_path, algorithm, env, compile=False, **settings)
    assert not replays
    recorded, _ = train_copies(tmp_path, algorithm, env, **settings)
    assert len(replays) >= 2 and stepped.episodes == recorded.episodes
    assert torch.equal(weights(stepped), weights(recorded))


@pytest.mark.gpu
def test_a_run_on_a_gpu_continues_as_if_it_had_not_been_stopped(tmp_path):
    settings = {"normalize_obs": "running", "normalize_reward": True}
    whole, _ = train_copies(tmp_path, **settings)
    _, folder = train_copies(tmp_path, **settings, rollouts=5)
    rest, _ = train_copies(tmp_path, **settings, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert whole.episodes == rest.episodes and whole.env_steps == rest.env_steps
    assert torch.equal(weights(whole), weights(rest))


def waits(folder, **settings):
    """Return how often a run of four rollouts waits for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_copies(folder, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, "auto"])
def test_more_steps_in_a_rollout_are_not_more_waits_for_the_gpu(compile, tmp_path):
    long, short = ({"n_steps": n, "batch_size": 16 * n, "rollouts": n // 4, "compile": compile} for n in (32, 16))
    waits(tmp_path, **short)  # the first run of a process waits for what it sets up
    assert waits(tmp_path, **long) == waits(tmp_path, **short) > 0


@pytest.mark.gpu
def test_more_updates_are_not_more_waits_for_the_gpu(tmp_path):
    waits(tmp_path, rollouts=4)
    assert waits(tmp_path, n_epochs=7, rollouts=4) == waits(tmp_path, n_epochs=2, rollouts=4) > 0


class Stumbling(lrl.PPO):
    """The value loss of whose third update is NaN."""

    def loss(self, *arguments):
        loss, metrics = super().loss(*arguments)
        bad = float("nan") if self.updates == 2 else 0.0
        return loss + bad, metrics | {"value_loss": metrics["value_loss"] + bad}


@pytest.mark.gpu
def test_a_gpu_stops_at_nan_and_names_the_update(tmp_path):
    with pytest.raises(NotFiniteError, match=r"loss value_loss is nan at environment step 1,024, update 2;.*bad_batch\.pt"):
        train_copies(tmp_path, Stumbling)


@pytest.mark.gpu
def test_a_gpu_leaves_out_the_step_that_is_not_finite_and_no_other(tmp_path):
    class AllButTheThird(lrl.PPO):
        def step(self, loss, *arguments):
            return loss if self.updates == 2 else super().step(loss, *arguments)

    stumbling, _ = train_copies(tmp_path, Stumbling, on_nan="skip_update", rollouts=2)
    careful, _ = train_copies(tmp_path, AllButTheThird, rollouts=2)
    assert stumbling.learner.guard.skipped == 1
    assert torch.equal(weights(stumbling), weights(careful))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice of the compiler, such as to round products
@pytest.mark.parametrize("algorithm, env", [(lrl.PPO, "CartPole-v1"), (lrl.SAC, "Pendulum-v1"), (lrl.DQN, "CartPole-v1")])
def test_compiled_losses_learn_the_same_on_a_gpu(algorithm, env):
    models = []
    for compiled in (False, True):
        pl.seed_everything(0)
        models.append(tiny(algorithm, env, compile=compiled))
        fit(models[-1], accelerator="gpu", devices=1)
    torch.testing.assert_close(weights(models[1]), weights(models[0]), rtol=1e-3, atol=1e-4)
