"""Evolution strategies (Salimans et al. 2017, https://arxiv.org/abs/1703.03864)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.generations import GenerationDataset, Results
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_range
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.optimization import ScheduledAdam, ScheduledSGD, trainable
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import OrPlain, Range, as_settings
from lightning_rl.training.experience import generations
from lightning_rl.training.settings import NoRewardFields


@dataclass(kw_only=True, eq=False, repr=False)
class EvolutionStrategies(NoRewardFields, Algorithm):
    """Perturb the weights at random, play whole episodes, and move towards better returns. One batch is one generation.

    Rewards are neither discounted nor bootstrapped. Nothing is differentiated, so the environment and the policy can be anything. A job is
    a pair of episodes from one seed, at θ + σε and θ − σε. Its noise and seed follow from the seed of the run and the job's number, so the
    result does not depend on the process that plays it. `env.num_envs` episodes are played in parallel, each with its own weights in one
    batch. Resets with the same seed must give the same environment.

    The network is the same as for PPO and A2C, so each can start from the other's weights (`--init_from`); its value function is not
    trained here. With several ranks, each plays its share of the jobs, and all make the same step.

    Metrics: `rollout/ep_rew_mean` is that of moved weights; `train/sigma`, `train/grad_norm` (with the pull of `l2`), `train/weight_norm`
    and `train/update_ratio` (the length of the step over that of the weights after it), `time/generation` (seconds).
    """

    learning_rate: ScheduleSetting = 0.01
    """Step size of the optimizer."""
    episodes_per_generation: Annotated[int, Range(2)] = 100
    """Episodes per generation, an even number: two per job."""
    min_steps_per_generation: Annotated[int, Range(0)] = 0
    """Minimum environment steps of a generation, which repeats `episodes_per_generation` episodes until it has them."""
    sigma: ScheduleSetting = 0.02
    """σ, standard deviation of the weight perturbations."""
    shaping: Literal["centred_ranks", "centred_sign_ranks", "z_scores", "signs", "raw"] = "centred_ranks"
    """Fitness of an episode: `centred_ranks` of returns, `z_scores`, `raw` returns, `signs` (the sum of the rewards' signs), or
    `centred_sign_ranks` of these."""
    top_directions: Annotated[int, Range(1)] | None = None
    """Number of pairs that count, those with the best episodes (b in Mania et al. 2018); null: all."""
    alive_bonus_offset: Annotated[float, Range(-1e9, 1e9)] = 0.0
    """Added to the return for each step, to remove a bonus for staying alive."""
    zero_policy: bool = False
    """Initialize the weights of the last layer to 0."""
    l2: Annotated[float, Range(0)] = 0.005
    """Coefficient of the L2 penalty on the weights."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """`adam`, or `sgd` with momentum."""
    momentum: Annotated[float, Range(0, 0.999)] = 0.9
    """Momentum of sgd, whose steps follow a running mean of gradients."""
    stochastic: bool = False
    """Sample actions, with the same random numbers in both episodes of a pair, instead of taking the most likely ones."""
    action_noise: Annotated[float, Range(1e-6, 1e6)] = 0.01
    """Standard deviation of sampled Box actions; it is not trained."""
    max_length_ratio: Annotated[float, Range(1)] | None = None
    """End episodes that are this many times longer than the mean of the previous generation, so that no worker waits for stragglers (2 in
    the paper); null: never."""
    normalize_obs_share: Annotated[float, Range(0, 1, open_low=True)] = 0.1
    """Fraction of a generation's jobs whose observations update the statistics of `normalize_obs: running`."""
    actors: OrPlain[ActorsConfig | None] = None
    """Number and kind of evaluators, see `actors/config.py`; null: one in this process."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Distribution of Box actions: `clipped_normal` or `tanh_normal`."""

    gamma: float = field(init=False, default=1.0)
    max_grad_norm: None = field(init=False, default=None)
    self_play: OrPlain[SelfPlayConfig | None] = field(init=False, default=None)
    compile: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes_per_generation % 2:
            raise SettingError(f"episodes_per_generation {self.episodes_per_generation} must be even: each job has two")
        check_range("sigma", self.sigma, 0, open_low=True)
        if self.top_directions is not None:
            check_range("top_directions", self.top_directions, 1, self.episodes_per_generation // 2, whole=True)
        if isinstance(self.env, EnvConfig) and self.env.vectorization not in ("auto", "sync"):
            raise SettingError(
                f"env.vectorization {self.env.vectorization}: each environment begins its episodes when its weights change; use sync, "
                "and actors.backend processes for more cores"
            )
        if self.spaces.agents:
            name = f" such as {self.env.name}" if isinstance(self.env, EnvConfig) else ""
            raise SettingError(f"{type(self).__name__} does not support multi-agent environments{name}; use another algorithm")
        self.evaluators = check_actors(self.actors)
        self.generation_settings: dict[str, Any] = {
            "pairs": self.episodes_per_generation // 2,
            "min_steps": self.min_steps_per_generation,
            "max_length_ratio": self.max_length_ratio,
            "watched_share": self.normalize_obs_share if self.normalize_obs == "running" else 0.0,
        }
        self.network: ActorCritic = ActorCritic(
            self.spaces,
            **self.network_settings,
            share_encoder=True,
            action_dist=self.action_dist,
            log_std_init=torch.tensor(self.action_noise, device="cpu").log().item(),
        )
        if self.zero_policy:
            torch.nn.init.zeros_(self.network.actor[-1].get_parameter("weight"))
        self.network.critic.requires_grad_(False)
        self.network.distribution.requires_grad_(False)

    @property
    def num_envs(self) -> int:
        """Return 1: no episode is in progress between generations, whatever the number of environments."""
        return 1

    def experience(self) -> GenerationDataset:
        return generations(self, self.evaluators, self.stochastic, **self.generation_settings)

    def training_step(self, results: Results, batch_idx: int) -> None:
        perturbed = [self.network.get_parameter(name) for name in results.generation.names]
        weights = torch.cat([parameter.flatten() for parameter in perturbed])
        before = weights.detach().clone()
        self.record(grad_norm=self.step(self.loss(results, weights), self.own_optimizers[0]))
        after = torch.cat([parameter.detach().flatten() for parameter in perturbed])
        length = after.norm()
        self.record(weight_norm=length, update_ratio=(after - before).norm() / length.clamp(min=1e-12))
        self.record(sigma=torch.tensor(results.generation.sigma))
        self.end_update(results)

    def loss(self, results: Results, weights: Tensor) -> Tensor:
        """Return L(θ) = l2/2 ‖θ‖² − g · θ, with g = (1/n) Σ (u⁺ − u⁻) ε and the fitness u of each episode."""
        of_what, shape = SHAPINGS[self.shaping]
        returns, generation = getattr(results, of_what) + self.alive_bonus_offset * results.lengths, results.generation
        jobs = returns.amax(1).argsort(descending=True, stable=True)[: self.top_directions].sort().values
        worth = shape(returns[jobs])
        noise = (torch.from_numpy(generation.noise(job, len(weights))) for job in jobs.tolist())
        gradient = antithetic_gradient(worth, noise).to(weights)
        return 0.5 * self.l2 * weights.square().sum() - (gradient * weights).sum()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = trainable(self.network)
        return self.with_side_learners(ScheduledAdam(parameters) if self.optimizer == "adam" else ScheduledSGD(parameters, self.momentum))


def centred_ranks(returns: Tensor) -> Tensor:
    """Rank each among all 2n returns, from −½ for the worst to ½ for the best; equal returns share the mean of their ranks."""
    flat = returns.flatten()
    _, place, count = flat.unique(return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - 0.5 * (count + 1)
    return (rank[place] / (len(flat) - 1) - 0.5).view_as(returns)


def z_scores(returns: Tensor) -> Tensor:
    """Return (R − mean) / standard deviation over all 2n returns; 0 if all are equal."""
    centred = returns - returns.mean()
    deviation = centred.square().mean().sqrt()
    return centred / deviation if deviation > 1e-12 * returns.abs().max() else torch.zeros_like(returns)


def raw(returns: Tensor) -> Tensor:
    """Return the returns unchanged."""
    return returns


SHAPINGS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "centred_ranks": ("returns", centred_ranks),
    "centred_sign_ranks": ("signs", centred_ranks),
    "z_scores": ("returns", z_scores),
    "signs": ("signs", raw),
    "raw": ("returns", raw),
}
"""For each name: the sum over an episode, of its rewards or of their signs, and the function that turns float64 `[n, 2]`, n
antithetic pairs at θ + σε and θ − σε, into fitness."""


def antithetic_gradient(worth: Tensor, noise: Iterable[Tensor]) -> Tensor:
    """Return g = (1/n) Σ_j (u_j⁺ − u_j⁻) ε_j, the direction `[P]` of increasing fitness; the factor 1/σ is left to the step size.

    With u = R this is 2σ times the estimate of ∇E[R(θ + σε)] (sec. 2, with antithetic sampling).

    Args:
        worth: the fitness u, `[n, 2]`.
        noise: ε_1, …, ε_n, each `[P]`, one at a time.
    """
    total = None
    for difference, direction in zip((worth[:, 0] - worth[:, 1]).tolist(), noise, strict=True):
        total = direction * difference if total is None else total.add_(direction, alpha=difference)
    assert total is not None
    return total / len(worth)


MEANINGLESS = ("rollouts_per_batch", "queue_factor", "max_policy_lag", "ordered")
"""Settings of actors that act during updates; evaluators do not."""


def check_actors(setting: object) -> ActorsConfig:
    """Return the settings of evaluators.

    Raises:
        SettingError: a setting does not apply to evaluators.
    """
    if setting is None:
        return ActorsConfig(num_actors=1, backend="in_process")
    actors = as_settings("actors", ActorsConfig, setting)
    for name in MEANINGLESS:
        if getattr(actors, name) != getattr(ActorsConfig(), name):
            raise SettingError(
                f"actors.{name} does not apply to EvolutionStrategies, which waits for all jobs of a generation; leave it out"
            )
    return actors
