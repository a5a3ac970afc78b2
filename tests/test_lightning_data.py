"""Experience without a Trainer, as in a notebook."""

from itertools import islice

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

from lightning_rl import A2C, DQN, IMPALA, PPO, SAC, TD3, BehavioralCloning, EvolutionStrategies
from lightning_rl.data.rollout import make_batch
from tests.fitting import fit, tiny, weights


@pytest.mark.parametrize("algorithm", [PPO, A2C, IMPALA])
def test_rollouts_come_without_a_trainer_and_may_be_kept(algorithm):
    dataset = tiny(algorithm).experience()
    first, second = islice(dataset, 2)
    kept = first.obs.clone()
    next(iter(dataset))
    assert torch.equal(first.obs, kept) and not torch.equal(first.obs, second.obs)
    assert dataset.collector.env_steps == 3 * first.reward.shape[0] * first.reward.shape[1]


@pytest.mark.parametrize("algorithm", [SAC, DQN, TD3])
def test_batches_of_a_replay_buffer_come_without_a_trainer(algorithm):
    model = tiny(algorithm)
    dataset = model.experience()
    batches = [batch for iteration in islice(dataset, 4) for batch in iteration]
    assert batches and len(dataset.buffer) == dataset.collector.env_steps
    assert len(dataset.sample().reward) == model.batch_size


def test_rollouts_come_with_fabric_in_place_of_a_trainer():
    model = tiny(PPO)
    Fabric(accelerator="cpu", devices=1).setup_module(model)
    assert next(iter(model.experience())).reward.shape[:2] == (8, 2) and not model.has_trainer


def test_advantages_are_a_call_away():
    model = tiny(PPO)
    rollout = next(iter(model.experience()))
    batch = make_batch(*model.prepare(rollout), gae_lambda=1.0)
    assert len(batch.advantage) == rollout.reward[..., 0].numel()


def test_demonstrations_and_generations_come_without_a_trainer():
    assert sum(1 for _ in next(iter(tiny(BehavioralCloning).experience()))) > 0
    generation = next(iter(tiny(EvolutionStrategies).experience()))
    assert np.isfinite(generation.returns).all()


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_looking_at_experience_leaves_a_later_run_as_it_is(algorithm):
    undisturbed, model = tiny(algorithm), tiny(algorithm)
    next(iter(model.experience()))
    fit(model)
    torch.manual_seed(0)
    fit(undisturbed)
    assert torch.equal(weights(model), weights(undisturbed))
