"""PPO and DQN of Tianshou on CartPole with its defaults: a progress bar, nothing logged or saved, no tests.

64 x 64 for policy and value each; PPO with batches like ours, advantages normalized within them and gradients clipped at 0.5.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from cases import Case
from clock import Clock, measure
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic


def ppo(case: Case, env: gym.Env) -> PPO:
    """The algorithm."""
    shape, choices = env.observation_space.shape, env.action_space.n
    actor, critic = (Net(state_shape=shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh) for _ in range(2))
    policy = ProbabilisticActorPolicy(
        actor=DiscreteActor(preprocess_net=actor, action_shape=choices, softmax_output=False),
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=env.action_space,
        action_scaling=False,
    )
    optim = AdamOptimizerFactory(lr=case.settings["learning_rate"], eps=1e-5)
    return PPO(policy=policy, critic=DiscreteCritic(preprocess_net=critic), optim=optim, ent_coef=0.0, max_grad_norm=0.5)


def dqn(case: Case, env: gym.Env) -> DQN:
    """The algorithm, with 5 % of random actions throughout and one Q function for choice and value, as the others have."""
    net = Net(state_shape=env.observation_space.shape, action_shape=env.action_space.n, hidden_sizes=[64, 64])
    policy = DiscreteQLearningPolicy(model=net, action_space=env.action_space, eps_training=0.05)
    optim = AdamOptimizerFactory(lr=case.settings["learning_rate"])
    return DQN(policy=policy, optim=optim, target_update_freq=case.settings["target_update_interval"], is_double=False)


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    torch.manual_seed(1)
    given, env = case.settings, gym.make(case.env)
    envs = DummyVectorEnv([lambda: gym.make(case.env)] * case.num_envs)
    on_policy = case.algorithm == "PPO"
    algorithm: Any = ppo(case, env) if on_policy else dqn(case, env)
    rows = case.rows if on_policy else given["buffer_size"]
    collector = Collector(algorithm, envs, VectorReplayBuffer(rows, case.num_envs), exploration_noise=not on_policy)
    common = {"training_collector": collector, "max_epochs": 1, "epoch_num_steps": case.steps, "batch_size": given["batch_size"]}
    clock.start()
    clock.follow_torch()
    if on_policy:
        counts = {"collection_step_num_env_steps": case.rows, "update_step_num_repetitions": given["n_epochs"]}
        algorithm.run_training(OnPolicyTrainerParams(**common, **counts))
    else:
        collector.reset()
        collector.collect(n_step=given["learning_starts"], random=True)
        counts = {"collection_step_num_env_steps": given["train_freq"]}
        algorithm.run_training(OffPolicyTrainerParams(**common | {"epoch_num_steps": case.steps - given["learning_starts"]}, **counts))
    clock.stop()
    return case.steps, case.updates


if __name__ == "__main__":
    measure(train)
