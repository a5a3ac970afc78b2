"""Trust Region Policy Optimization (Schulman et al. 2015, https://arxiv.org/abs/1502.05477) as a user's module.

    lightning-rl fit --import trpo --model trpo.TRPO --model.env.id CartPole-v1 --model.max_env_steps 100000

The natural gradient is computed by `torch.autograd.grad` through the network, twice for each product with the Fisher matrix.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from lightning_rl import Algorithm, Range
from lightning_rl.algorithms.ppo import check_batch_size
from lightning_rl.data.rollout import make_batch, minibatches, normalize
from lightning_rl.distributed import mean_over_ranks
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.optimization import FlatAdam
from lightning_rl.schedules import ScheduleSetting


@dataclass(kw_only=True, eq=False, repr=False)
class TRPO(Algorithm):
    """Collect a rollout, move the policy along the natural gradient as far as the trust region allows, then fit the value function.

    Metrics: `train/policy_objective` (after the step), `train/approx_kl`, `train/backtracks`, `train/value_loss`.
    """

    learning_rate: ScheduleSetting = 1e-3
    """Step size of the value function's Adam."""
    n_steps: Annotated[int, Range(1)] = 128
    """Steps of each environment in a rollout."""
    gae_lambda: Annotated[float, Range(0, 1)] = 0.95
    """λ of the generalised advantage estimate."""
    target_kl: Annotated[float, Range(0, open_low=True)] = 0.01
    """δ, the largest KL divergence of a step."""
    cg_steps: Annotated[int, Range(1)] = 10
    """Steps of the conjugate gradient."""
    cg_damping: Annotated[float, Range(0)] = 0.1
    """Added to the diagonal of the Fisher matrix."""
    backtracks: Annotated[int, Range(1)] = 10
    """How often a step that is too long is halved; after that no step is made."""
    n_critic_updates: Annotated[int, Range(1)] = 10
    """Passes of the value function over a rollout."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows in a minibatch of the value function."""

    losses = ("value_loss",)

    def __post_init__(self):
        super().__post_init__()
        check_batch_size(self.batch_size, self.n_steps, self.num_envs, 1 if self.memory is None else self.memory.sequence_length)
        self.network = ActorCritic(self.spaces, **self.network_settings, share_encoder=False, streams=len(self.reward_signals))
        policy = nn.ModuleList([self.network.actor_encoder, self.network.memory, self.network.actor, self.network.distribution])
        self.policy_parameters = list(policy.parameters())

    def experience(self):
        return self.collect(self.n_steps)

    def training_step(self, rollout, batch_idx):
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.improve_policy(batch._replace(advantage=normalize(batch.advantage, batch.weight)))
        for _ in range(self.n_critic_updates):
            for minibatch in minibatches(batch, self.batch_size, False, self.generator):
                loss = self.value_loss(minibatch)
                self.record(value_loss=loss, grad_norm=self.step(loss, self.own_optimizers[0], "value_loss"))
        self.end_update(batch)

    def improve_policy(self, batch) -> None:
        """Maximize the surrogate within KL ≤ δ: s = F⁻¹ g, a step of √(2δ / sᵀFs) s, halved until it does both (app. C)."""
        objective, kl = self.surrogate(batch)
        gradient = mean_over_ranks(self.flat_gradient(objective, retain_graph=True))
        kl_gradient = self.flat_gradient(kl, create_graph=True)

        def fisher(vector: Tensor) -> Tensor:
            product = self.flat_gradient(kl_gradient @ vector, retain_graph=True)
            return mean_over_ranks(product) + self.cg_damping * vector

        direction = conjugate_gradient(fisher, gradient, self.cg_steps)
        step = (2 * self.target_kl / (direction @ fisher(direction)).clamp(min=1e-8)).sqrt() * direction
        for tries in range(self.backtracks):
            self.move_policy(step * 0.5**tries)
            with torch.no_grad():
                after, divergence = map(mean_over_ranks, self.surrogate(batch))
            if after > mean_over_ranks(objective) and divergence <= self.target_kl:
                break
            self.move_policy(-step * 0.5**tries)
        self.record(policy_objective=after, approx_kl=divergence, backtracks=torch.tensor(float(tries)))

    def surrogate(self, batch) -> tuple[Tensor, Tensor]:
        """Return E[ρ Â] (eq. 14), and the KL divergence of the old from the new policy, whose Hessian at ρ = 1 is the Fisher matrix."""
        log_prob = self.network.log_prob(batch.obs, batch.action, batch.memory, batch.episode_start, batch.action_mask)
        log_ratio = (log_prob - batch.log_prob).sum(-1)
        kl = losses.mean(losses.approximate_kl(log_ratio), batch.weight)
        return losses.mean(log_ratio.exp() * batch.advantage, batch.weight), kl

    def value_loss(self, minibatch) -> Tensor:
        """Return E[(R − V)²]."""
        _, _, z = self.network.evaluate(minibatch.obs, minibatch.action, minibatch.memory, minibatch.episode_start, minibatch.action_mask)
        return losses.mean(self.network.value_head.loss(z, minibatch.returns), minibatch.weight)

    def flat_gradient(self, scalar: Tensor, **options) -> Tensor:
        """Differentiate with respect to the policy's parameters; return one vector `[P]`."""
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(scalar, self.policy_parameters, **options)])

    @torch.no_grad()
    def move_policy(self, step: Tensor) -> None:
        """Add a step `[P]` to the policy's parameters."""
        for parameter, part in zip(self.policy_parameters, step.split([each.numel() for each in self.policy_parameters]), strict=True):
            parameter.add_(part.view_as(parameter))

    def configure_optimizers(self):
        critic = nn.ModuleList([self.network.critic_encoder, self.network.critic_memory, self.network.critic])
        return self.with_side_learners(FlatAdam(critic))


def conjugate_gradient(product, b: Tensor, steps: int) -> Tensor:
    """Solve A x = b for a symmetric positive A, known by its product with a vector."""
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = residual @ residual
    for _ in range(steps):
        image = product(direction)
        length = square / (direction @ image).clamp(min=1e-10)
        x, residual = x + length * direction, residual - length * image
        square, before = residual @ residual, square
        direction = residual + square / before.clamp(min=1e-10) * direction
    return x
