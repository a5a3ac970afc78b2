"""One distribution per action space.

A distribution is a module conditioned on `x [..., num_inputs]`, the output of the policy's last layer. It owns the parameters that do not
depend on the observation (a Gaussian's standard deviation). Log-probabilities and entropies have the shape `[..., D]`, with an entry for
each action dimension or branch; the joint ones are their sums. Actions are stored as sampled; `to_env` converts them for the environment.
"""

from lightning_rl.distributions.distribution import Bernoulli, Categorical, Distribution, EpsilonGreedy, MultiCategorical
from lightning_rl.distributions.gaussian import DiagonalGaussian, NoisyAction, SquashedGaussian, TanhGaussian, UnitGaussian
from lightning_rl.distributions.joint import Joint, check_box_actions, make_distribution, make_epsilon_greedy
from lightning_rl.distributions.soft import SoftActions, SoftSample
from lightning_rl.distributions.state_dependent import SDE, Exploration, FeatureHead, state_dependent

__all__ = [
    "SDE",
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "EpsilonGreedy",
    "Exploration",
    "FeatureHead",
    "Joint",
    "MultiCategorical",
    "NoisyAction",
    "SoftActions",
    "SoftSample",
    "SquashedGaussian",
    "TanhGaussian",
    "UnitGaussian",
    "check_box_actions",
    "make_distribution",
    "make_epsilon_greedy",
    "state_dependent",
]
