"""Evolution strategies (Salimans et al. 2017, https://arxiv.org/abs/1703.03864)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.generations import GenerationDataset, Results
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, as_settings, check_range
from lightning_rl.losses.evolution import SHAPINGS, antithetic_gradient
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.optimization import FlatAdam, FlatSGD
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.training.arguments import Range
from lightning_rl.training.experience import generations
from lightning_rl.training.settings import NoRewardFields


@dataclass(kw_only=True, eq=False, repr=False)
class EvolutionStrategies(NoRewardFields, Algorithm):
    """Move the weights at random, play whole episodes, and go where the returns were better. One batch is one generation.

    Rewards are neither discounted nor bootstrapped, and nothing is differentiated: the environment and the policy may be anything. Jobs are
    pairs of episodes from one seed, at θ + σε and θ − σε, whose noise and seed follow from the seed of the run and their number: the result
    does not depend on who does them. `env.num_envs` episodes are played at once, each with its own weights in one batch. Environments must
    be the same after each reset with the same seed.

    The network is that of PPO and A2C, so that either can begin with the other's weights (`--init_from`); its value function does not
    learn here. With several ranks each does its share of the jobs, and all make the same step.

    Metrics: `rollout/ep_rew_mean` is that of moved weights; `train/sigma`, `train/grad_norm` (with the pull of `l2`), `train/weight_norm`
    and `train/update_ratio` (the length of the step over that of the weights after it), `time/generation` (seconds).
    """

    learning_rate: ScheduleSetting = 0.01
    """Step size of the optimizer."""
    episodes_per_generation: Annotated[int, Range(2)] = 100
    """An even number, two of each job."""
    min_steps_per_generation: Annotated[int, Range(0)] = 0
    """A generation has as many episodes again until it has so many environment steps."""
    sigma: ScheduleSetting = 0.02
    """σ, how far weights are moved."""
    shaping: Literal["centred_ranks", "centred_sign_ranks", "z_scores", "signs", "raw"] = "centred_ranks"
    """What an episode is worth: `centred_ranks` of returns, `z_scores`, `raw` returns, `signs` (the sum of the rewards' signs), or
    `centred_sign_ranks` of these."""
    top_directions: Annotated[int, Range(1)] | None = None
    """Only so many pairs count, those with the best episode (b of Mania et al. 2018); null: all."""
    alive_bonus_offset: Annotated[float, Range(-1e9, 1e9)] = 0.0
    """Added to the return for each step, to take a bonus for staying alive away."""
    zero_policy: bool = False
    """Begin with weights of 0 in the last layer."""
    l2: Annotated[float, Range(0)] = 0.005
    """Pull of the weights towards 0."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """`adam`, or `sgd` with momentum."""
    momentum: Annotated[float, Range(0, 0.999)] = 0.9
    """Of sgd, a running mean of gradients."""
    stochastic: bool = False
    """Draw actions, with the same chance in both episodes of a pair, instead of the most likely ones."""
    action_noise: Annotated[float, Range(1e-6, 1e6)] = 0.01
    """Standard deviation of Box actions where they are drawn; it does not learn."""
    max_length_ratio: Annotated[float, Range(1)] | None = None
    """End episodes that are so many times longer than the mean of the generation before, so that nobody waits for stragglers (the paper
    takes 2); null ends none."""
    normalize_obs_share: Annotated[float, Range(0, 1, open_low=True)] = 0.1
    """The share of a generation's jobs from which `normalize_obs: running` takes its statistics."""
    actors: ActorsConfig | None = None
    """How many evaluators there are and where, see `actors/config.py`; null: one in this process."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """For Box actions, `clipped_normal` or `tanh_normal`."""

    gamma: float = field(init=False, default=1.0)
    max_grad_norm: None = field(init=False, default=None)
    self_play: SelfPlayConfig | None = field(init=False, default=None)
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
            name = f", such as {self.env.id}" if isinstance(self.env, EnvConfig) else ""
            raise SettingError(f"{type(self).__name__} plays no environments of PettingZoo or VMAS{name}; use another algorithm")
        self.evaluators = check_actors(self.actors)
        self.generation_settings: dict[str, Any] = {
            "pairs": self.episodes_per_generation // 2,
            "min_steps": self.min_steps_per_generation,
            "max_length_ratio": self.max_length_ratio,
            "watched_share": self.normalize_obs_share if self.normalize_obs == "running" else 0.0,
        }
        own: dict[str, Any] = {
            "share_encoder": True,
            "action_dist": self.action_dist,
            "log_std_init": torch.tensor(self.action_noise).log().item(),
        }
        self.network = ActorCritic(self.spaces, **self.network_settings, **own)
        if self.zero_policy:
            torch.nn.init.zeros_(self.network.actor[-1].weight)
        self.network.critic.requires_grad_(False)
        self.network.distribution.requires_grad_(False)

    @property
    def num_envs(self) -> int:
        """Return 1: between generations no episode is in progress, whatever the number."""
        return 1

    def experience(self) -> GenerationDataset:
        return generations(self, self.evaluators, **self.generation_settings)

    def training_step(self, results: Results, batch_idx: int) -> None:
        weights = torch.cat([parameter.flatten() for parameter in self.network.parameters() if parameter.requires_grad])
        before = weights.detach().clone()
        self.record(grad_norm=self.step(self.loss(results, weights), self.own_optimizers[0]))
        after = torch.cat([parameter.detach().flatten() for parameter in self.network.parameters() if parameter.requires_grad])
        length = after.norm()
        self.record(weight_norm=length, update_ratio=(after - before).norm() / length.clamp(min=1e-12))
        self.record(sigma=torch.tensor(results.generation.sigma))
        self.end_update(results)

    def loss(self, results: Results, weights: Tensor) -> Tensor:
        """Return L(θ) = l2/2 ‖θ‖² − g · θ, with g = (1/n) Σ (u⁺ − u⁻) ε and the worth u of each episode."""
        of_what, shape = SHAPINGS[self.shaping]
        returns, generation = getattr(results, of_what) + self.alive_bonus_offset * results.lengths, results.generation
        jobs = returns.amax(1).argsort(descending=True, stable=True)[: self.top_directions].sort().values
        worth = shape(returns[jobs])
        noise = (torch.from_numpy(generation.noise(job, len(weights))) for job in jobs.tolist())
        gradient = antithetic_gradient(worth, noise).to(weights)
        return 0.5 * self.l2 * weights.square().sum() - (gradient * weights).sum()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.network) if self.optimizer == "adam" else FlatSGD(self.network, self.momentum))


MEANINGLESS = ("rollouts_per_batch", "queue_factor", "max_policy_lag", "ordered")
"""Settings of actors that go on while one learns, which evaluators do not."""


def check_actors(setting: Any) -> ActorsConfig:
    """Return the settings of evaluators.

    Raises:
        SettingError: a setting that means nothing to evaluators.
    """
    if setting is None:
        return ActorsConfig(num_actors=1, backend="in_process")
    actors = as_settings("actors", ActorsConfig, setting)
    for name in MEANINGLESS:
        if getattr(actors, name) != getattr(ActorsConfig(), name):
            raise SettingError(
                f"actors.{name} means nothing to EvolutionStrategies, which waits for all jobs of a generation; leave it out"
            )
    return actors
