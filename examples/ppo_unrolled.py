"""PPO's whole loop in one file, with this package's networks, returns and losses. It learns the same weights as `lightning_rl.PPO`.

python examples/ppo_unrolled.py CartPole-v1 100000
"""

import sys

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.returns import gae
from lightning_rl.spaces import Spaces


def train(
    env_id: str,
    max_env_steps: int = 100_000,
    num_envs: int = 8,
    n_steps: int = 128,
    batch_size: int = 256,
    n_epochs: int = 4,
    learning_rate: float = 3e-4,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    clip_range: float = 0.2,
    ent_coef: float = 0.0,
    vf_coef: float = 0.5,
    max_grad_norm: float = 0.5,
    seed: int = 0,
) -> ActorCritic:
    """Train a policy for an environment with vector observations, and return its network."""
    torch.manual_seed(seed)
    acting_seed, learning_seed = (int(each) // 2 for each in np.random.SeedSequence([seed, 0, 0]).generate_state(2))
    acting, learning = torch.Generator().manual_seed(acting_seed), torch.Generator().manual_seed(learning_seed)

    envs = SyncVectorEnv([lambda: gym.make(env_id) for _ in range(num_envs)], autoreset_mode=AutoresetMode.SAME_STEP)
    network = ActorCritic(Spaces(envs.single_observation_space, envs.single_action_space))
    distribution = network.distribution
    optimizer = torch.optim.Adam(network.parameters(), learning_rate, eps=1e-5)

    shape = n_steps, num_envs
    observations = np.zeros((n_steps + 1, num_envs, *envs.single_observation_space.shape), np.float32)
    rewards, terminated, truncated = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool)
    observations[0], _ = envs.reset(seed=acting_seed)
    finished: list[float] = []
    running = np.zeros(num_envs)

    for env_steps in range(n_steps * num_envs, max_env_steps + 1, n_steps * num_envs):
        # ---- act
        noise = distribution.noise(torch.empty(*shape, distribution.num_inputs), acting).detach().numpy()
        actions, final_observations = [], {}
        for t in range(n_steps):
            with torch.no_grad():
                inputs, _ = network.policy(torch.from_numpy(observations[t]), (), None)
            actions.append(distribution.draw(inputs.numpy(), noise[t]))
            observations[t + 1], rewards[t], terminated[t], truncated[t], infos = envs.step(distribution.to_env(actions[t]))
            truncated[t] &= ~terminated[t]
            running += rewards[t]
            for env in np.flatnonzero(terminated[t] | truncated[t]):
                finished.append(running[env])
                running[env] = 0
                final_observations[t, env] = infos["final_obs"][env]

        # ---- values, and the advantage of each step
        obs, action = torch.from_numpy(observations), torch.from_numpy(np.stack(actions))
        with torch.no_grad():
            log_prob, value = network.log_prob_and_value(obs, action)
            next_value = value[1:].clone()
            for (t, env), final in final_observations.items():  # bootstrap from the final observation of an episode
                next_value[t, env] = network.value(torch.as_tensor(final, dtype=torch.float32))
        ended = torch.from_numpy(terminated | truncated).unsqueeze(-1)
        discount = gamma * ~torch.from_numpy(terminated).unsqueeze(-1)
        reward = torch.from_numpy(rewards).unsqueeze(-1)
        advantage = gae(reward, discount, value[:-1], next_value, ~ended, gae_lambda)
        returns = advantage + value[:-1]
        batch = [each.flatten(0, 1) for each in (obs[:-1], action, log_prob, advantage.squeeze(-1), returns)]

        # ---- learn
        for _ in range(n_epochs):
            for rows in torch.randperm(n_steps * num_envs, generator=learning).view(-1, batch_size):
                obs_b, action_b, old_log_prob, advantage_b, returns_b = (each[rows] for each in batch)
                advantage_b = (advantage_b - advantage_b.mean()) / (advantage_b.std() + 1e-8)
                log_prob, entropy, z = network.evaluate(obs_b, action_b)
                ratio = (log_prob - old_log_prob).sum(-1).exp()
                policy_loss = losses.clipped_surrogate(ratio, advantage_b, clip_range).mean()
                value_loss = network.value_head.loss(z, returns_b).mean()
                loss = policy_loss + vf_coef * value_loss - ent_coef * entropy.sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
                optimizer.step()

        observations[0] = observations[n_steps]
        if finished:
            print(f"{env_steps:>9,} environment steps   return {np.mean(finished[-100:]):8.1f}")
    envs.close()
    return network


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "CartPole-v1", int(float(sys.argv[2])) if len(sys.argv) > 2 else 100_000)
