"""Several processes on a CPU, and one GPU (`-m gpu`)."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl import EvolutionStrategies
from tests.algorithms.test_evolution_strategies import CARTPOLE, learned
from tests.fitting import ON_POLICY, fit, tiny, weights

TWO_RANKS = """
import pytorch_lightning as pl, torch
from tests.fitting import tiny, weights
from lightning_rl import PPO, Trainer

class Compare(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        mine = torch.cat([weights(pl_module), pl_module.network.normalizer.statistics[0].mean.float()])
        all_ranks = pl_module.all_gather(mine)
        firsts = pl_module.all_gather(torch.as_tensor(float(pl_module.collector.seed)))
        counts = (pl_module.env_steps, pl_module.collector.env_steps, trainer.global_step)
        if trainer.is_global_zero:
            print("DIFFERENCE", (all_ranks[0] - all_ranks[1]).abs().max().item(), "SEEDS", firsts.tolist(), "COUNTS", *counts)

if __name__ == "__main__":
    model = tiny(PPO, "CartPole-v1", normalize_obs="running", max_env_steps=192, target_kl=0.01)
    Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", callbacks=[Compare()]).fit(model)
"""


def test_two_ranks_see_different_experience_and_keep_equal_weights(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    root = str(Path(__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    line = next((line for line in result.stdout.splitlines() if "DIFFERENCE" in line), None)
    assert line is not None, result.stderr[-2000:]
    words = line.split()
    assert float(words[1]) == 0.0
    seeds, counts = line.partition("SEEDS ")[2].split(" COUNTS ")
    assert len(set(seeds.strip("[]").split(", "))) == 2
    assert counts.split() == ["192", "96", "6"]  # 2 ranks x 2 environments x 8 steps an iteration
    assert len(list(tmp_path.glob("runs/PPO/CartPole-v1/version_*"))) == 1


REPLAYING_RANKS = """
import sys, torch
from tests.experts import at_random
from tests.fitting import fit, tiny
from lightning_rl import DQN, SAC, TD3, BehavioralCloning

for algorithm, env_id in ((SAC, "CartPole-v1"), (DQN, "CartPole-v1"), (TD3, "Pendulum-v1")):
    imitates = {"gail": {"demo_path": at_random(env_id, "{}"), "use_vail": True, "normalize": True}} if algorithm is SAC else None
    model = tiny(algorithm, env_id, normalize_obs="running", normalize_reward=True, max_env_steps=192, learning_starts=32,
                 reward_signals=imitates,
                 steps_per_iteration=32, replay={"prioritized": algorithm is DQN, "directory": sys.argv[1]})

    def compare():
        mine = torch.cat([value.flatten().double() for value in model.state_dict().values()])
        difference = (model.all_gather(mine)[0] - model.all_gather(mine)[1]).abs().max().item()
        rows = model.all_gather(torch.from_numpy(model.dataset.buffer.layout.row.seen.obs[:48]))  # of the first environment
        apart = (rows[0] - rows[1]).abs().sum(-1).gt(0).double().mean().item()
        if model.global_rank == 0:
            counts = model.env_steps, model.collector.env_steps, len(model.dataset.buffer), model.updates, model.trainer.global_step
            print("COMPARED", difference, apart, *counts)

    model.on_train_end = compare
    fit(model, devices=2, strategy="ddp")

# rows that only reset, at different times on the two ranks: neither may wait for the other
env = {"num_envs": 1, "autoreset": "NEXT_STEP"}
beside = {"reward_signals": {"rnd": {}}, "reward_signal_steps_per_update": 3}
model = tiny(DQN, "CartPole-v1", env=env, max_env_steps=100, learning_starts=20, steps_per_iteration=2, **beside)
fit(model, devices=2, strategy="ddp")
print("RESETTING", model.env_steps >= 100)

# demonstrations: each rank learns from its share of a pass
model = tiny(BehavioralCloning, "CartPole-v1", normalize_obs="running", updates_per_iteration=4, max_updates=8)

def share():
    mine = torch.cat([value.flatten().double() for value in model.state_dict().values()])
    difference = (model.all_gather(mine)[0] - model.all_gather(mine)[1]).abs().max().item()
    rows = model.all_gather(model.dataset.batch.obs)
    apart = (rows[0].unsqueeze(1) - rows[1]).abs().sum(-1).gt(0).all().item()
    print("SHARED", difference, apart, model.updates, model.trainer.global_step)

model.on_train_end = share
fit(model, devices=2, strategy="ddp")

# evolution strategies: each rank does its share of the jobs
from lightning_rl import EvolutionStrategies
from tests.algorithms.test_evolution_strategies import CARTPOLE, learned

model = tiny(EvolutionStrategies, "CartPole-v1", **CARTPOLE)

def told():
    ranks, steps = model.all_gather(learned(model)), model.all_gather(torch.tensor(model.collector.env_steps)).tolist()
    torch.save(learned(model), f"rank {model.global_rank}.pt")
    print("TOLD", torch.equal(*ranks), sum(steps) == model.env_steps, min(steps) > 200, model.updates >= 3)

model.on_train_end = told
fit(model, devices=2, strategy="ddp")
"""


def test_two_ranks_replay_memories_of_their_own_and_keep_equal_weights(tmp_path):
    (tmp_path / "ranks.py").write_text(REPLAYING_RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "ranks.py", str(tmp_path / "rows")]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env=env | {"LOCAL_RANK": str(rank)}, stdout=PIPE, stderr=PIPE, text=True) for rank in (0, 1)
    ]
    (out, err), _ = (rank.communicate(timeout=120) for rank in ranks)
    found = [line.split()[1:] for line in out.splitlines() if line.startswith("COMPARED")]
    assert len(found) == 3 and "RESETTING True" in out, err[-2000:]
    for difference, apart, *counts in found:
        assert float(difference) == 0.0  # of all that a checkpoint holds: targets, temperature and statistics too
        assert float(apart) > 0.9
        # each rank makes half the steps, and after half of 32 of them an update for each 4 of its own
        assert counts == ["192", "96", "96", "20", "6"]
    assert "SHARED 0.0 True 8 2" in out
    assert "TOLD True True True True" in out
    alone = tiny(EvolutionStrategies, "CartPole-v1", **CARTPOLE)
    fit(alone)  # has the same jobs; statistics are summed in another order
    assert torch.allclose(torch.load(tmp_path / "rank 1.pt"), learned(alone), rtol=0, atol=1e-6)


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
        def loss(self, minibatch):
            log_prob = self.network.evaluate(minibatch.obs, minibatch.action)[0]
            ratios.append((log_prob - minibatch.log_prob).sum(-1).exp().detach().cpu())
            return super().loss(minibatch)

    pl.seed_everything(0)
    model = Watching("CartPole-v1", max_env_steps=4_096, n_epochs=1, batch_size=1024, normalize_obs="running")
    fit(model, accelerator="gpu", devices=1)
    assert len(ratios) == 4 and all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios)
