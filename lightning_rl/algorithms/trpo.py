"""Trust Region Policy Optimization (Schulman et al. 2015, https://arxiv.org/abs/1502.05477)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, kl_divergence
from torch.nn.functional import softplus
from torch.nn.utils import parameters_to_vector

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.rollout import Batch, RolloutDataset, make_batch, minibatches, normalize
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.processes.ranks import mean_over_ranks
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ActorCriticFields, check_minibatches, check_n_steps, make_actor_critic
from lightning_rl.types import Rollout


@dataclass(kw_only=True, eq=False, repr=False)
class TRPO(ActorCriticFields, Algorithm):
    """Collect a rollout, move the policy along the natural gradient as far as the trust region allows, then fit the value function.

    Policy and value function have separate networks. If the policy's step is NaN or infinite, the line search fails and no step is made.

    Metrics: `train/policy_objective` and `train/kl_divergence` (KL(π_old ‖ π)), both after the step, `train/line_search_success` (0: no
    step was made), `train/value_loss`, `train/explained_variance` (of the returns by the values).
    """

    learning_rate: ScheduleSetting = 1e-3
    """Step size of the value function's Adam."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = None
    """Clip the value function's gradients to this Euclidean norm; null: no clipping."""
    n_steps: Annotated[int, Range(1)] = 256
    """Steps per environment in a rollout."""
    batch_size: Annotated[int, Range(1)] = 128
    """Rows of a minibatch of the value function: a divisor of `n_steps * num_envs`; with a memory, a multiple of its sequence_length."""
    gae_lambda: Annotated[float, Range(0, 1)] = 0.95
    """λ of generalized advantage estimation; 1 gives n-step returns."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit variance over a rollout."""
    target_kl: Annotated[float, Range(0, open_low=True)] = 0.01
    """δ, the maximum mean KL divergence of a step."""
    cg_max_steps: Annotated[int, Range(1)] = 15
    """Maximum steps of the conjugate gradient method."""
    cg_damping: Annotated[float, Range(0)] = 0.1
    """Damping, added to the diagonal of the Fisher matrix."""
    line_search_shrinking_factor: Annotated[float, Range(0, 1, open_low=True)] = 0.8
    """Factor that shortens a step that is too long."""
    line_search_max_iter: Annotated[int, Range(1)] = 10
    """Number of step lengths to try; if all fail, no step is made."""
    n_critic_updates: Annotated[int, Range(1)] = 10
    """Epochs of the value function over a rollout."""
    ent_coef: float = field(init=False, default=0.0)
    vf_coef: float = field(init=False, default=1.0)
    critic_burn_in_steps: int = field(init=False, default=0)
    share_encoder: bool | None = field(init=False, default=False)
    behavioral_cloning: None = field(init=False, default=None)

    losses = ("value_loss",)
    learned_otherwise = ("network.actor", "network.memory", "network.distribution")
    assignable: ClassVar[tuple[str, ...]] = (
        "gae_lambda",
        "normalize_advantage",
        "target_kl",
        "cg_max_steps",
        "cg_damping",
        "n_critic_updates",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_n_steps(self.n_steps, self.num_envs)
        check_minibatches(self)
        self.network = make_actor_critic(self)
        policy = nn.ModuleList([self.network.actor_encoder, self.network.memory, self.network.actor, self.network.distribution])
        self.policy_parameters = list(policy.parameters())

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps * self.n_critic_updates // self.batch_size

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.weight > 0))
        advantage = normalize(batch.advantage, batch.weight) if self.normalize_advantage else batch.advantage
        self.record(**self.improve_policy(batch._replace(advantage=advantage)))
        for _ in range(self.n_critic_updates):
            for minibatch in minibatches(batch, self.batch_size, False, self.noise):
                loss = self.value_loss(minibatch)
                self.record(value_loss=loss, grad_norm=self.step(loss, self.own_optimizers[0]))
        self.end_update(batch)

    def improve_policy(self, batch: Batch) -> dict[str, Tensor]:
        """Maximize L(θ) with KL ≤ δ: s = F⁻¹ g, a step √(2δ / sᵀFs) s, shortened until L improves and KL < δ (app. C). Return metrics."""
        with torch.no_grad():
            old = self.densities(batch)
        objective, kl = self.surrogate(batch, old)
        gradient = mean_over_ranks(self.flat_gradient(objective, retain_graph=True))
        kl_gradient = self.flat_gradient(kl, create_graph=True)

        def fisher(vector: Tensor) -> Tensor:
            product = self.flat_gradient(kl_gradient @ vector, retain_graph=True)
            return mean_over_ranks(product) + self.cg_damping * vector

        direction = conjugate_gradient(fisher, gradient, self.cg_max_steps)
        step = (2 * self.target_kl / (direction @ fisher(direction))).sqrt() * direction
        before, start = mean_over_ranks(objective.detach()), parameters_to_vector(self.policy_parameters).detach()
        for k in range(self.line_search_max_iter):
            self.set_policy(start + self.line_search_shrinking_factor**k * step)
            with torch.no_grad():
                after, divergence = map(mean_over_ranks, self.surrogate(batch, old))
            if after > before and divergence < self.target_kl:
                return {"policy_objective": after, "kl_divergence": divergence, "line_search_success": torch.ones(())}
        self.set_policy(start)
        return {"policy_objective": before, "kl_divergence": torch.zeros(()), "line_search_success": torch.zeros(())}

    def densities(self, batch: Batch) -> list[torch.distributions.Distribution]:
        """Return π(·|s) of each row, for each leaf of the action."""
        x, _ = self.network.policy(batch.obs, batch.memory, batch.episode_start)
        return self.network.distribution.densities(x, batch.action_mask)

    def surrogate(self, batch: Batch, old: Sequence[torch.distributions.Distribution]) -> tuple[Tensor, Tensor]:
        """Return L(θ) = E[π(a|s) / π_old(a|s) Â] (eq. 14), and the mean KL(π_old ‖ π), whose Hessian at π_old is the Fisher matrix."""
        x, _ = self.network.policy(batch.obs, batch.memory, batch.episode_start)
        log_prob = self.network.distribution.evaluate(x, batch.action, batch.action_mask)[0]
        ratio = (log_prob - batch.log_prob).sum(-1).exp()
        new = self.network.distribution.densities(x, batch.action_mask)
        kl = torch.stack([divergence(before, after).sum(-1) for before, after in zip(old, new, strict=True)]).sum(0)
        return losses.mean(ratio * batch.advantage, batch.weight), losses.mean(kl, batch.weight)

    def value_loss(self, minibatch: Batch) -> Tensor:
        """Return E[(R − V)²]."""
        _, _, z = self.network.evaluate(minibatch.obs, minibatch.action, minibatch.memory, minibatch.episode_start, minibatch.action_mask)
        return losses.mean(self.network.value_head.loss(z, minibatch.returns), minibatch.weight)

    def flat_gradient(self, scalar: Tensor, retain_graph: bool | None = None, create_graph: bool = False) -> Tensor:
        """Differentiate with respect to the policy's parameters; return one vector `[P]`."""
        gradients = torch.autograd.grad(scalar, self.policy_parameters, retain_graph=retain_graph, create_graph=create_graph)
        return torch.cat([gradient.flatten() for gradient in gradients])

    @torch.no_grad()
    def set_policy(self, vector: Tensor) -> None:
        """Set the policy's parameters to the parts of a vector `[P]`."""
        for parameter, part in zip(
            self.policy_parameters, vector.split([parameter.numel() for parameter in self.policy_parameters]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        critic = nn.ModuleList([self.network.critic_encoder, self.network.critic_memory, self.network.critic])
        return self.with_side_learners(ScheduledAdam(critic, eps=1e-5))


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solve A x = b for a symmetric positive definite A, given its product with a vector (Hestenes and Stiefel 1952)."""
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = residual @ residual
    for _ in range(steps):
        if square < 1e-10:
            break
        image = product(direction)
        length = square / (direction @ image)
        x, residual = x + length * direction, residual - length * image
        square, before = residual @ residual, square
        direction = residual + square / before * direction
    return x


def divergence(old: Distribution, new: Distribution) -> Tensor:
    """Return KL(old ‖ new) of each part. torch's is infinite where a probability of `new` rounds to 0; its logarithm is finite here."""
    if isinstance(old, Categorical) and isinstance(new, Categorical):
        return (old.probs * (old.logits - new.logits)).sum(-1)
    if isinstance(old, Bernoulli) and isinstance(new, Bernoulli):
        on = old.probs * (softplus(-new.logits) - softplus(-old.logits))
        return on + (1 - old.probs) * (softplus(new.logits) - softplus(old.logits))
    return kl_divergence(old, new)
