"""Parallelised Q-Network (Gallici et al. 2024, https://arxiv.org/abs/2407.04811): Q-learning from rollouts, without replay or targets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.rollout import Batch, RolloutDataset, make_batch, minibatches
from lightning_rl.errors import SettingError
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.losses.q_learning import chosen
from lightning_rl.networks.q_network import MaxQNetwork
from lightning_rl.optimization import ScheduledRAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ExplorationFields, check_minibatches, check_n_steps
from lightning_rl.types import Rollout


@dataclass(kw_only=True, eq=False, repr=False)
class PQN(ExplorationFields, Algorithm):
    """Collect an ε-greedy rollout from many environments, then move the action values of a normalized network towards its Q(λ) returns.

    Action masks are not supported: the maximum in its returns would include illegal actions.

    Metrics: `train/loss`, `train/q_value` (of the actions taken, summed over reward streams), `rollout/exploration_rate`.
    """

    learning_rate: ScheduleSetting = 2.5e-4
    """Step size of rectified Adam (RAdam)."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = 10.0
    """Clip gradients to this Euclidean norm; null: no clipping."""
    net_arch: list[int] | None = None
    """Widths of hidden layers; null: [120, 84]."""
    activation: str = "relu"
    """Activation of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    n_steps: Annotated[int, Range(1)] = 128
    """Steps per environment in a rollout."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows of a minibatch: a divisor of `n_steps * num_envs`; with a memory, a multiple of its sequence_length."""
    n_epochs: Annotated[int, Range(1)] = 4
    """Passes over a rollout."""
    q_lambda: Annotated[float, Range(0, 1)] = 0.65
    """λ of the returns: 0 looks one step ahead, 1 to the end of the rollout."""
    exploration_fraction: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the run over which the share of random actions falls linearly."""
    layer_norm: bool = True
    """Use layer normalization in hidden layers; values may diverge without it (theorem 2)."""
    behavioral_cloning: None = field(init=False, default=None)

    assignable: ClassVar[tuple[str, ...]] = ("n_epochs", "q_lambda")

    def __post_init__(self) -> None:
        self.net_arch = [120, 84] if self.net_arch is None else self.net_arch
        super().__post_init__()
        if self.spaces.masked:
            raise SettingError("PQN does not support action masks: its returns would need those of future states; use DQN or PPO")
        if self.memory is not None and self.memory.burn_in:
            burn_in = f"memory.burn_in {self.memory.burn_in} is for replayed sequences"
            raise SettingError(f"{burn_in}, and rollouts store the memory itself: set it to 0")
        check_n_steps(self.n_steps, self.num_envs)
        check_minibatches(self)
        layers, streams = "layer_norm" if self.layer_norm else "plain", len(self.reward_signals)
        self.network: MaxQNetwork = MaxQNetwork(self.spaces, layers=layers, streams=streams, **self.network_settings)
        self.network.distribution.epsilon = self.exploration(0.0)

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps * self.n_epochs // self.batch_size

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps, log_probs=False)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        self.record(**{"rollout/exploration_rate": torch.tensor(self.network.distribution.epsilon)})
        batch = make_batch(*self.prepare(rollout), self.q_lambda, self.network.memory.sequence_length)
        epochs: Iterator[Iterator[Batch]] = (minibatches(batch, self.batch_size, False, self.noise) for _ in range(self.n_epochs))
        for minibatch in chain.from_iterable(epochs):
            loss, metrics = self.loss(minibatch)
            self.record(loss=loss, **metrics)
            self.record(grad_norm=self.step(loss, self.own_optimizers[0]))
            self.end_update(minibatch)

    def loss(self, minibatch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (Q(s, a) − R)², R_t = r_t + γ ((1 − λ) max Q(s_{t+1}, ·) + λ R_{t+1}) with Q from before the updates (alg. 1)."""
        z = self.network(self.network.normalizer(minibatch.obs), minibatch.memory, minibatch.episode_start)
        q = chosen(z, minibatch.action).squeeze(-1)  # [B, S]
        loss = mean((q - minibatch.returns).square().mean(-1), minibatch.weight)
        return loss, {"q_value": mean(q.detach().sum(-1), minibatch.weight)}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledRAdam(self.network))
