"""Deep Q-Networks (Mnih et al. 2015, https://doi.org/10.1038/nature14236) and their extensions.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), n-step, prioritized replay (Schaul et al. 2016), noisy layers (Fortunato et
al. 2018), C51 (Bellemare et al. 2017), quantile regression (Dabney et al. 2018), and most of them combined: Rainbow (Hessel et al. 2018).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NoReturn

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.iteration import TargetNetworkUpdate, make_target
from lightning_rl.errors import SettingError
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.losses.q_learning import chosen
from lightning_rl.networks.memory import as_memory
from lightning_rl.networks.q_network import QNetwork, make_return_head
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ExplorationFields, ReplayFields
from lightning_rl.types import Transition
from lightning_rl.value_transforms import make_value_transform


@dataclass(kw_only=True, eq=False, repr=False)
class DQN(ExplorationFields, ReplayFields, Algorithm):
    """Act ε-greedily, store transitions, and move action values towards their own one-step-ahead estimates.

    All options can be combined, except that returns are modeled by either their mean, a histogram or quantiles.

    Metrics: `train/loss`, `train/q_value` (the expected return of the actions taken, summed over reward streams),
    `rollout/exploration_rate`. For the replay buffer `replay/size`, `replay/mean_picks` (how often a transition was sampled, on average)
    and `replay/age_mean` (mean number of newer transitions from the same environment, in the last batch).
    """

    learning_rate: ScheduleSetting = 1e-4
    """Step size of the optimizer."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = 10.0
    """Clip gradients to this Euclidean norm; null: no clipping."""
    net_arch: list[int] | None = None
    """Widths of hidden layers; null: [64, 64]."""
    activation: str = "relu"
    """Activation of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    batch_size: Annotated[int, Range(1)] | None = None  # type: ignore[assignment]  # an integer once it is built
    """Rows of a batch; null: 32, with a memory 8 of its sequences. With a memory, a multiple of its sequence_length."""
    train_freq: Annotated[int, Range(1)] = 4
    """Environment steps, counted over all environments, between updates."""
    tau: float = 1.0
    """Fraction by which the target network moves each time it is updated; 1 copies the weights."""
    target_update_interval: int = 2_500
    """Updates between updates of the target network (environment steps in Stable-Baselines3: divide by train_freq)."""
    double: bool = False  # type: ignore[assignment]  # replaces `torch.nn.Module.double`
    """Double Q-learning: the online network chooses the next action, the target network evaluates it."""
    dueling: bool = False
    """Separate hidden layers for values and advantages."""
    noisy: bool = False
    """Explore by noise in the weights; then set both `exploration_…_eps` to 0."""
    distribution: Literal["none", "c51", "quantiles"] = "none"
    """What is known of a return: its mean (`none`), a histogram (`c51`), or `quantiles` (QR-DQN)."""
    n_atoms: Annotated[int, Range(2)] = 51
    """Of C51."""
    v_min: Annotated[float, Range(-1e9, 1e9)] = -10.0
    """Lowest return of C51, after the value_transform if there is one."""
    v_max: Annotated[float, Range(-1e9, 1e9)] = 10.0
    """The greatest."""
    n_quantiles: Annotated[int, Range(1)] = 50
    """Of QR-DQN."""
    value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"
    """Learn h(return): `identity`, `signed_hyperbolic` (Pohlen et al. 2018) or `symlog`."""
    adam_eps: Annotated[float, Range(0, open_low=True)] = 1e-8
    """ε of Adam."""
    behavioral_cloning: None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.batch_size is None:
            memory = as_memory(self.memory)
            self.batch_size = 32 if memory is None else 8 * memory.sequence_length
        super().__post_init__()
        self.double = Double(self.double)  # type: ignore[assignment]
        self.target_update = TargetNetworkUpdate(self.tau, self.target_update_interval)
        self.transform = make_value_transform(self.value_transform)
        returns = make_return_head(self.distribution, self.n_atoms, self.v_min, self.v_max, self.n_quantiles, self.transform)
        self.network = QNetwork(
            self.spaces, returns, dueling=self.dueling, noisy=self.noisy, streams=len(self.reward_signals), **self.network_settings
        )
        self.network.distribution.epsilon = self.exploration(0.0)
        self.target = make_target(self.network)
        self.target_networks = [(self.network, self.target)]

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        optimizer = self.own_optimizers[0]
        self.record(**{"rollout/exploration_rate": torch.tensor(self.network.distribution.epsilon)})
        for batch in batches:
            self.network.resample(self.noise)
            self.target.resample(self.noise)
            loss, errors, metrics = self.loss(batch)
            self.record(loss=loss, **metrics)
            self.record(grad_norm=self.step(loss, optimizer))
            self.update_priorities(batch, errors)
            self.end_update(batch)

    def loss(self, batch: Transition) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return D(Z(s, a), h(r + γ h⁻¹(Z̄(s', a*)))), a* = argmax Q̄(s', a), or argmax Q(s', a) if double (Hessel et al. 2018).

        Also return the error of each row `[B]`, and metrics.
        """
        returns = self.network.returns
        with torch.no_grad():
            next_obs = self.network.normalizer(batch.next_obs)
            next_z = batch.follow(self.target(next_obs, batch.memory, batch.episode_start))  # [B, n, S, Z]
            judge = batch.follow(self.network(next_obs, batch.memory, batch.episode_start)) if self.double else next_z
            next_action = self.network.distribution.mode(returns.mean(judge).sum(-1), batch.follow(batch.next_action_mask))
            values, probs = returns.distribution(chosen(next_z, next_action))  # [B, S, Z]
            target = self.transform(batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * self.transform.inverse(values))
        z = chosen(self.network(self.network.normalizer(batch.obs), batch.memory, batch.episode_start), batch.action)
        loss, error = returns.loss(z, target, probs)  # [B, S]
        return mean(loss, batch.weight), error.mean(-1), {"q_value": batch.mean(returns.mean(z.detach()).sum(-1))}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.network, self.adam_eps))


class Double(int):
    """The value of the setting `double`, which can be called as the method of modules that it replaces, and then raises an error."""

    def __call__(self) -> NoReturn:
        raise SettingError("DQN.double is a setting: networks act and learn in torch.float32, leave out .double()")

    def __repr__(self) -> str:
        return repr(bool(self))
