"""Every algorithm on every probe: environments so small that the right numbers are known (after Andy Jones and rejax).

A probe names the bug: a wrong constant is the value loss, a wrong discount the returns, a wrong action the policy loss, and so on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_rl import A2C, DQN, IMPALA, PPO, PQN, SAC, TD3, TQC, TRPO, CrossQ
from lightning_rl.networks.layers import BatchRenorm
from lightning_rl.types import tree_leaves, tree_to_numpy
from tests.environments import ConstantReward, DelayedReward, Endless, ObservedAction, ObservedReward
from tests.fitting import fit, tiny

GAMMA = 0.9


class Learner(NamedTuple):
    """An algorithm with settings to learn fast, and the actions it can take.

    Half of the probes of the first kind of action are fast; of the others, and of a `variant` of another learner, one is, if that is not a
    second kind of the same: see `SLOW`.
    """

    algorithm: type
    settings: dict[str, Any]
    actions: tuple[str, ...]
    replays: bool = True
    variant: bool = False


ON_POLICY = {"learning_rate": 0.01, "n_steps": 8}
REPLAY = {
    "learning_rate": {"schedule": "linear", "start": 0.02},  # to end at rest: a few thousand steps suffice
    "batch_size": 64,
    "train_freq": 4,
    "learning_starts": 600,
    "buffer_size": 4_000,
    "steps_per_iteration": 100,
}
SMOOTH = {"use_sde": True, "sde_sample_freq": 2, "log_std_init": -1.0}
SOFT = REPLAY | {"tau": 0.1, "ent_coef": 1e-4}
MAXIMIZING = ON_POLICY | {"batch_size": 32, "n_epochs": 8, "exploration_final_eps": 0.2}
DROPPED = {"gradient_steps": 2, "n_critics": 4, "critic_subset": 2, "critic_layers": "layer_norm", "net_arch": [32]}
CROSS = REPLAY | {"ent_coef": 1e-4, "gradient_steps": 4, "net_arch": [32], "critic_net_arch": [32], "policy_delay": 1}
DEEP = REPLAY | {"target_update_interval": 10, "exploration_final_eps": 0.2}
NOISY = DEEP | {"noisy": True, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0, "gradient_steps": 2}
LEARNERS = {
    "PPO": Learner(PPO, ON_POLICY | {"batch_size": 32, "n_epochs": 4}, ("discrete", "box"), replays=False),
    "A2C": Learner(A2C, ON_POLICY | {"use_rms_prop": False}, ("discrete", "box"), replays=False),
    "PQN": Learner(PQN, MAXIMIZING, ("discrete",), replays=False, variant=True),
    "PPO with a function for noise": Learner(PPO, ON_POLICY | SMOOTH | {"batch_size": 32, "n_epochs": 4}, ("box",), False, variant=True),
    "TRPO": Learner(TRPO, ON_POLICY | {"batch_size": 32}, ("discrete", "box"), replays=False, variant=True),
    "IMPALA": Learner(IMPALA, ON_POLICY | {"use_rms_prop": False}, ("discrete", "box"), replays=False),
    "SAC": Learner(SAC, SOFT, ("discrete",)),
    "SAC of continuous actions": Learner(SAC, SOFT | {"gradient_steps": 2}, ("box", "hybrid")),
    "SAC with a function for noise": Learner(SAC, SOFT | SMOOTH | {"gradient_steps": 2}, ("box",), variant=True),
    "SAC with a value network": Learner(SAC, SOFT | {"value_network": True}, ("discrete", "box"), variant=True),
    "TQC": Learner(TQC, SOFT | {"gradient_steps": 4, "n_quantiles": 8}, ("box",), variant=True),
    "CrossQ": Learner(CrossQ, CROSS, ("discrete", "box"), variant=True),
    "a subset of normalized critics": Learner(SAC, SOFT | DROPPED, ("box",), variant=True),
    "TD3": Learner(TD3, REPLAY | {"tau": 0.2}, ("box",)),
    "DQN": Learner(DQN, DEEP, ("discrete",)),
    "double": Learner(DQN, DEEP | {"double": True}, ("discrete",), variant=True),
    "dueling": Learner(DQN, DEEP | {"dueling": True}, ("discrete",), variant=True),
    "n-step": Learner(DQN, DEEP | {"n_steps": 3}, ("discrete",), variant=True),
    "prioritized": Learner(DQN, DEEP | {"replay": {"prioritized": True, "beta": 1.0}}, ("discrete",), variant=True),
    "noisy": Learner(DQN, NOISY, ("discrete",), variant=True),
    "C51": Learner(DQN, DEEP | {"distribution": "c51", "v_min": -2.0, "v_max": 12.0}, ("discrete",), variant=True),
    "quantiles": Learner(DQN, DEEP | {"distribution": "quantiles", "n_quantiles": 8}, ("discrete",), variant=True),
    "transformed": Learner(DQN, DEEP | {"value_transform": "signed_hyperbolic"}, ("discrete",), variant=True),
    "all at once": Learner(
        DQN,
        NOISY
        | {"double": True, "dueling": True, "n_steps": 3, "replay": {"prioritized": True}}
        | {"distribution": "c51", "v_min": -1.0, "v_max": 3.0, "value_transform": "signed_hyperbolic"},
        ("discrete",),
        variant=True,
    ),
}


class Probe(NamedTuple):
    """An environment, and what must be learned of it in `env_steps`, on-policy ones first: the values at `obs`, or the best actions."""

    env: type
    obs: list[float]
    values: list[float] | None = None
    best: bool = False
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    env_steps: tuple[int, int] = (4_000, 2_000)


PROBES = {
    "the value of a constant reward": Probe(ConstantReward, [0], [1]),
    "the discount of a reward one step later": Probe(DelayedReward, [0, 1], [GAMMA, 1]),
    "a value for each observation": Probe(ObservedReward, [-1, 1], [-1, 1]),
    "an action for each observation": Probe(ObservedAction, [-1, 1], best=True, env_steps=(5_000, 3_000)),
    # 1 + γ + γ² + … = 1 / (1 - γ)
    "the value beyond a time limit": Probe(Endless, [0], [10], env_steps=(5_000, 3_000)),
    # the second of two steps ends: 1 + γ · 1, and 1
    "no value beyond a termination": Probe(Endless, [0, 0.5], [1.9, 1], kwargs={"ending": "termination", "period": 2, "clock": True}),
}
FAST_OF_VARIANTS = "the value beyond a time limit"
FAST_OF_OTHER_ACTIONS = "an action for each observation"
FAST = {FAST_OF_VARIANTS, FAST_OF_OTHER_ACTIONS, "no value beyond a termination"}
"""Who knows the value beyond a time limit knows that of a constant reward and the discount too."""
SLOW = {
    *((name, "discrete") for name in ("double", "dueling", "n-step", "prioritized", "noisy", "C51", "transformed")),  # all at once has them
    *((name, "box") for name in ("A2C", "IMPALA")),  # PPO's distribution
    ("SAC of continuous actions", "hybrid"),  # see test_joint.py
    ("SAC with a function for noise", "box"),  # PPO's noise, in SAC's loss
    ("a subset of normalized critics", "box"),  # SAC's loss, normalized as that of CrossQ
}
"""Learners with actions whose probes are all slow, because a fast one has the same parts."""
SLOW_PROBES = {(name, "no value beyond a termination") for name in ("PPO", "SAC", "SAC of continuous actions")}
SLOW_PROBES.add(("SAC of continuous actions", FAST_OF_VARIANTS))
"""A2C has PPO's returns, DQN and TD3 have the same replay, SAC of choices has the same targets."""
BEST = {"discrete": [0, 1], "box": [-0.5, 0.5], "hybrid": [0, 1, -0.5, 0.5]}


@pytest.fixture(autouse=True)
def early_renormalization(monkeypatch):
    """Let CrossQ train by running statistics, with which it is judged, for most of these short runs: a batch's own leave a few per cent."""
    monkeypatch.setattr(BatchRenorm, "warmup", 500)


@torch.no_grad()
def learned_values(model: Any, obs: torch.Tensor) -> torch.Tensor:
    """What the network, or each critic, says of the best choice and of the policy's continuous actions, `[B, …]`."""
    model.eval()
    if isinstance(model, DQN):
        return model.network.value(obs).amax(1)
    if not hasattr(model, "critic"):
        return model.network.value(obs)
    action = model.network.sample(obs, deterministic=True)[0]
    action = model.actions.continuous(action) if isinstance(model, SAC) else action
    return model.critic(obs, action).amax(2).squeeze(-1).T


def rows():
    """A learner, one of its actions and a probe."""
    for learner, row in LEARNERS.items():
        for k, action in enumerate(row.actions):
            fast = {FAST_OF_VARIANTS} if row.variant else {FAST_OF_OTHER_ACTIONS} if k else FAST
            for name in PROBES:
                slow = name not in fast or (row.variant and k) or (learner, action) in SLOW or (learner, name) in SLOW_PROBES
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(name, learner, action, id=f"{learner}-{action}-{name}", marks=marks)


@pytest.mark.variants("PPO-discrete")
@pytest.mark.parametrize("name, learner, action", rows())
def test_what_a_probe_teaches(name, learner, action):
    algorithm, settings, _, replays, _ = LEARNERS[learner]
    probe = PROBES[name]
    settings = {"gamma": GAMMA, "max_env_steps": probe.env_steps[replays], "net_arch": [16]} | settings
    env = {"num_envs": 4, "kwargs": {"action": action, **probe.kwargs}}
    model = tiny(algorithm, f"tests.environments:{probe.env.__name__}-v0", env=env, **settings)
    fit(model)
    obs = torch.tensor(probe.obs).float().unsqueeze(-1)
    if probe.values is not None:
        for row, value in zip(learned_values(model, obs).tolist(), probe.values, strict=True):
            assert row == pytest.approx([value] * len(row), abs=0.02 * max(probe.values))
    else:
        model.network.eval()
        actions = model.network.distribution.to_env(tree_to_numpy(model.network.sample(obs, deterministic=True)[0]))
        assert np.concatenate([leaf.ravel() for leaf in tree_leaves(actions)]) == pytest.approx(BEST[action], abs=0.1)
