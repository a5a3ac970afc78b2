"""Deep Q-Networks (Mnih et al. 2015, https://doi.org/10.1038/nature14236) and what became of them.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), n-step, prioritized replay (Schaul et al. 2016), noisy layers (Fortunato et
al. 2018), C51 (Bellemare et al. 2017), quantile regression (Dabney et al. 2018), and most of them at once: Rainbow (Hessel et al. 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.target_update import TargetNetworkUpdate, make_target
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplayDataset, ReplaySettings
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import as_settings, check_range
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.losses.q_learning import chosen
from lightning_rl.networks.flat import FlatAdam
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.networks.return_heads import make_return_head
from lightning_rl.schedules import ScheduleSetting, piecewise
from lightning_rl.types import Transition
from lightning_rl.value_transforms import make_value_transform


class DQN(Algorithm):
    """Act on the greatest action value, sometimes at random, remember, and move the values towards their own one-step-ahead estimates.

    All options go together, except that a return is known either by its mean, by a histogram or by quantiles.

    Args:
        learning_rate: step size of the optimizer, a number or a schedule.
        max_grad_norm: cut gradients to this Euclidean norm; null leaves them.
        net_arch: widths of the hidden layers, [64, 64] unless given.
        activation: of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu.
        buffer_size: how many transitions are remembered.
        batch_size: rows of a batch, with a memory a multiple of its sequence_length.
        learning_starts: environment steps before the first update.
        train_freq: environment steps, counted over all environments, between learning.
        gradient_steps: updates each time; -1 makes as many as there were steps.
        steps_per_iteration: environment steps of an iteration, between which acting and learning take turns.
        n_steps: length of the returns' windows; shorter at the end of an episode.
        warmup: actions before learning starts: `random` or from the `policy`.
        replay: how memories are kept and drawn, see `ReplayConfig`.
        tau: fraction by which the target network moves each time; 1 copies it.
        target_update_interval: updates between moves of the target network (environment steps in Stable-Baselines3: divide by train_freq).
        exploration_fraction: part of the run over which the share of random actions falls linearly.
        exploration_initial_eps: share of random actions at the start.
        exploration_final_eps: share of random actions from then on.
        double: the online network chooses the next action, the target network values it.
        dueling: values and advantages have hidden layers of their own.
        noisy: explore by noise in the weights; set both `exploration_…_eps` to 0 then.
        distribution: what is known of a return: its mean (`none`), a histogram (`c51`), or `quantiles` (QR-DQN).
        n_atoms: of C51.
        v_min: the least return that C51 knows, transformed if there is a value_transform.
        v_max: the greatest.
        n_quantiles: of QR-DQN.
        value_transform: learn h(return): `identity`, `signed_hyperbolic` (Pohlen et al. 2018) or `symlog`.
        adam_eps: ε of Adam.

    Metrics: `train/loss`, `train/q_value` (the expected return of the actions taken, summed over reward streams),
    `rollout/exploration_rate`, and of the memory `replay/size`, `replay/mean_picks` (how often a memory was drawn) and `replay/age_mean`
    (transitions of its own environment newer than a drawn one, in the last batch).
    """

    without = ("behavioral_cloning",)

    def __init__(
        self,
        env: EnvConfig,
        *,
        learning_rate: ScheduleSetting = 1e-4,
        max_grad_norm: float | None = 10.0,
        net_arch: list[int] | None = None,
        activation: str = "relu",
        buffer_size: int = 1_000_000,
        batch_size: int = 32,
        learning_starts: int = 100,
        train_freq: int = 4,
        gradient_steps: int = 1,
        steps_per_iteration: int = 100,
        n_steps: int = 1,
        warmup: Literal["random", "policy"] = "random",
        replay: ReplayConfig = ReplayConfig(),
        tau: float = 1.0,
        target_update_interval: int = 2_500,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        double: bool = False,
        dueling: bool = False,
        noisy: bool = False,
        distribution: Literal["none", "c51", "quantiles"] = "none",
        n_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        n_quantiles: int = 50,
        value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity",
        adam_eps: float = 1e-8,
        **common: Any,
    ) -> None:
        super().__init__(
            env,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            net_arch=net_arch,
            activation=activation,
            behavioral_cloning=None,
            **common,
        )
        check_range("exploration_fraction", exploration_fraction, 0, 1)
        check_range("exploration_initial_eps", exploration_initial_eps, 0, 1)
        check_range("exploration_final_eps", exploration_final_eps, 0, 1)
        check_range("v_min", v_min, -1e9, 1e9)
        check_range("v_max", v_max, -1e9, 1e9)
        check_range("adam_eps", adam_eps, 0, open_low=True)
        self.replay_config = as_settings("replay", ReplayConfig, replay)
        self.replay_settings = ReplaySettings(
            buffer_size=buffer_size,
            batch_size=batch_size,
            learning_starts=learning_starts,
            train_freq=train_freq,
            gradient_steps=gradient_steps,
            steps_per_iteration=steps_per_iteration,
            n_steps=n_steps,
            warmup=warmup,
            memory=self.memory,
        )
        self.target_update = TargetNetworkUpdate(tau, target_update_interval)
        self.exploration = piecewise([[0, exploration_initial_eps], [exploration_fraction, exploration_final_eps]])
        self.double_q, self.adam_eps = double, adam_eps
        self.transform = make_value_transform(value_transform)
        returns = make_return_head(distribution, n_atoms, v_min, v_max, n_quantiles, self.transform)
        self.network = QNetwork(
            self.spaces, returns, dueling=dueling, noisy=noisy, streams=len(self.reward_signals), **self.network_settings
        )
        self.target = make_target(self.network)
        self.target_networks = [(self.network, self.target)]

    def experience(self) -> ReplayDataset:
        return self.replay(self.replay_settings, self.replay_config)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.network.distribution.epsilon = self.exploration(self.progress)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.network.distribution.epsilon = self.exploration(min(1.0, self.env_steps / self.max_env_steps))

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        optimizer = self.raw_optimizers()[0]
        self.record(**{"rollout/exploration_rate": torch.tensor(self.network.distribution.epsilon)})
        with self.learning():
            for batch in batches:
                self.network.resample(self.noise)
                self.target.resample(self.noise)
                loss, errors, metrics = self.loss(batch)
                self.record(loss=loss, **metrics)
                self.record(grad_norm=self.step(loss, optimizer))
                self.update_priorities(batch, errors)
                self.end_update(batch)

    def loss(self, batch: Transition) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """D(Z(s, a), h(r + γ h⁻¹(Z̄(s', a*)))), a* = argmax Q̄(s', a), or argmax Q(s', a) if double (Hessel et al. 2018).

        Returns the loss, the error of each row `[B]`, and what is logged.
        """
        returns = self.network.returns
        with torch.no_grad():
            next_obs = self.network.normalizer(batch.next_obs)
            next_z = batch.follow(self.target(next_obs, batch.memory, batch.episode_start))  # [B, n, S, Z]
            judge = batch.follow(self.network(next_obs, batch.memory, batch.episode_start)) if self.double_q else next_z
            next_action = self.network.distribution.mode(returns.mean(judge).sum(-1), batch.follow(batch.next_action_mask))
            values, probs = returns.distribution(chosen(next_z, next_action))  # [B, S, Z]
            target = self.transform(batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * self.transform.inverse(values))
        z = chosen(self.network(self.network.normalizer(batch.obs), batch.memory, batch.episode_start), batch.action)
        loss, error = returns.loss(z, target, probs)  # [B, S]
        return mean(loss, batch.weight), error.mean(-1), {"q_value": batch.mean(returns.mean(z.detach()).sum(-1))}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.network, self.adam_eps))
