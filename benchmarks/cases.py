"""What `throughput.py` measures, and what it shall come to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Goal:
    """A ratio ours ÷ peer: of `rate` at least so much, of anything else at most."""

    peer: str
    ratio: float
    measure: Literal["rate", "memory_mb", "first_update_s"] = "rate"

    def reached(self, ratio: float) -> bool:
        """Whether a measured ratio will do."""
        return ratio >= self.ratio if self.measure == "rate" else ratio <= self.ratio


MEMORY = Goal("sb3", 1.0, "memory_mb")


@dataclass(frozen=True)
class Case:
    """One task and one way to learn it, the same for all peers.

    Args:
        algorithm: its name.
        env: an environment's id.
        num_envs: how many environments step at once.
        steps: environment steps of a run; of several agents a step is one action of one agent.
        settings: by Stable-Baselines3's names, which are ours.
        peers: who is measured beside us.
        goals: what the ratios shall be.
        vectorization: of ours; a bare loop steps gymnasium's own in turn unless it is `native`, peers use what they use by default.
        ours: settings that only we have. `log_interval`, where given, is that of a run of a usual length: a hundredth of this short one
            would log far more often.
        precision: of our Trainer.
        normalize: observations and rewards by running statistics.
        agents: of each environment; they share one policy.
    """

    algorithm: Literal["PPO", "A2C", "DQN", "SAC", "TQC", "CrossQ"]
    env: str
    num_envs: int
    steps: int
    settings: dict[str, Any]
    peers: tuple[str, ...]
    goals: tuple[Goal, ...]
    vectorization: str = "auto"
    ours: dict[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    normalize: bool = False
    agents: int = 1

    @property
    def atari(self) -> bool:
        """Whether the observations are frames of a game."""
        return self.env.startswith("ALE/")

    @property
    def before_learning(self) -> int:
        """Environment steps before the first update."""
        return int(self.settings.get("learning_starts", self.rows))

    @property
    def rows(self) -> int:
        """Environment steps of a rollout; without rollouts 1."""
        return int(self.settings["n_steps"]) * self.num_envs * self.agents if "n_steps" in self.settings else 1

    @property
    def updates(self) -> int:
        """Gradient steps of a run."""
        if "learning_starts" in self.settings:
            return (self.steps - self.before_learning) * int(self.settings.get("gradient_steps", 1))
        return self.steps // self.rows * self.settings.get("n_epochs", 1) * self.rows // self.settings.get("batch_size", self.rows)

    def shortened(self, share: float) -> Case:
        """With a share of the steps, in whole rollouts."""
        return replace(self, steps=max(1, round(self.steps * share / self.rows)) * self.rows)


PPO_CARTPOLE: dict[str, Any] = {
    "algorithm": "PPO",
    "env": "CartPole-v1",
    "num_envs": 8,
    "steps": 204_800,
    "settings": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 3e-4},
}
PPO_CHEETAH: dict[str, Any] = {"algorithm": "PPO", "env": "HalfCheetah-v5", "normalize": True}
SPREAD: dict[str, Any] = {
    "algorithm": "PPO",
    "env": "vmas.simple_spread",
    "agents": 3,
    "settings": {
        "n_steps": 100,
        "batch_size": 1_920,
        "n_epochs": 10,
        "learning_rate": 3e-4,
        "gamma": 0.9,
        "gae_lambda": 0.9,
        "ent_coef": 1e-4,
        "max_grad_norm": 1.0,
    },
    "peers": ("torchrl",),
    "goals": (Goal("torchrl", 2.0),),
}
SAC: dict[str, Any] = {
    "algorithm": "SAC",
    "num_envs": 1,
    "steps": 6_000,
    "peers": ("sb3", "sbx", "bare_sac"),
    "goals": (Goal("sb3", 2.0), Goal("sbx", 1.0), Goal("bare_sac", 0.95), MEMORY),
}

CASES = {
    "ppo_cartpole": Case(
        **PPO_CARTPOLE,
        peers=("sb3", "skrl", "tianshou", "bare_ppo"),
        goals=(Goal("sb3", 2.0), Goal("skrl", 2.0), Goal("bare_ppo", 0.90), MEMORY, Goal("sb3", 1.2, "first_update_s")),
    ),
    "a2c_cartpole": Case(
        algorithm="A2C",
        env="CartPole-v1",
        num_envs=8,
        steps=100_000,
        settings={"n_steps": 5, "learning_rate": 7e-4},
        peers=("sb3",),
        goals=(Goal("sb3", 2.0), MEMORY),
        ours={"log_interval": 5_000},
    ),
    "ppo_cheetah1": Case(
        **PPO_CHEETAH,
        num_envs=1,
        steps=20_480,
        settings={"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4},
        peers=("sb3", "skrl", "bare_ppo"),
        goals=(Goal("sb3", 1.8), Goal("skrl", 1.6), Goal("bare_ppo", 0.90), MEMORY),
    ),
    "ppo_cheetah8": Case(
        **PPO_CHEETAH,
        num_envs=8,
        steps=131_072,
        settings={"n_steps": 2048, "batch_size": 512, "n_epochs": 10, "learning_rate": 3e-4},
        peers=("sb3", "bare_ppo"),
        goals=(Goal("sb3", 1.6), Goal("bare_ppo", 0.90), MEMORY),
    ),
    "dqn_cartpole": Case(
        algorithm="DQN",
        env="CartPole-v1",
        num_envs=1,
        steps=30_000,
        settings={
            "learning_rate": 1e-3,
            "learning_starts": 100,
            "batch_size": 128,
            "train_freq": 1,
            "buffer_size": 100_000,
            "target_update_interval": 500,
        },
        peers=("sb3", "cleanrl_style", "tianshou", "bare_dqn"),
        goals=(Goal("sb3", 2.2), Goal("cleanrl_style", 1.5), Goal("bare_dqn", 0.85), MEMORY),
        ours={"log_interval": 1_000},
    ),
    "sac_pendulum": Case(**SAC, env="Pendulum-v1", settings={"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 256}),
    "sac_cheetah": Case(
        **SAC,
        env="HalfCheetah-v5",
        settings={"learning_rate": 3e-4, "learning_starts": 100, "batch_size": 256},
        ours={"log_interval": 1_000},
    ),
    "tqc_pendulum": Case(
        **{**SAC, "algorithm": "TQC", "peers": ("sb3", "sbx"), "goals": (Goal("sb3", 1.5), Goal("sbx", 1.0), MEMORY)},
        env="Pendulum-v1",
        settings={"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 256},
    ),
    "crossq_pendulum": Case(
        **{**SAC, "algorithm": "CrossQ", "steps": 1_500, "peers": ("sb3", "sbx"), "goals": (Goal("sb3", 1.0), MEMORY)},
        env="Pendulum-v1",
        settings={"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 256},
    ),
    "droq_pendulum": Case(
        **{**SAC, "steps": 400, "peers": ("sbx",), "goals": (Goal("sbx", 1.0),)},
        env="Pendulum-v1",
        settings={"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 256, "gradient_steps": 20, "policy_delay": 20},
        ours={"critic_layers": "layer_norm", "critic_dropout": 0.01},
    ),
    "ppo_pong": Case(
        algorithm="PPO",
        env="ALE/Pong-v5",
        num_envs=8,
        steps=8_192,
        settings={"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4},
        peers=("sb3",),
        goals=(Goal("sb3", 1.5), MEMORY),
        ours={"net_arch": [], "clip_reward": 1.0},
    ),
    "ppo_torch_cartpole": Case(
        algorithm="PPO",
        env="Torch/CartPole-v1",
        num_envs=4_096,
        steps=2_097_152,
        settings={"n_steps": 32, "batch_size": 32_768, "n_epochs": 4, "learning_rate": 1e-3},
        peers=("on_host",),
        goals=(Goal("on_host", 2.0),),
    ),
    "ippo_spread64": Case(**SPREAD, num_envs=64, steps=576_000),
    "ippo_spread512": Case(**SPREAD, num_envs=512, steps=1_536_000),
    "ippo_balance512": Case(**SPREAD | {"env": "vmas.balance", "goals": (Goal("torchrl", 3.0),)}, num_envs=512, steps=1_536_000),
}
COMPILED: dict[str, tuple[Goal, ...]] = dict.fromkeys(
    ("a2c_cartpole", "ppo_cheetah1", "ppo_cheetah8", "dqn_cartpole", "sac_pendulum", "sac_cheetah", "ippo_balance512"), ()
)
COMPILED |= {"ppo_cartpole": (Goal("sb3", 2.8), Goal("skrl", 2.8))}
"""Cases that ours learns with `compile: true` too, and what is asked of that; the peers learn as ever."""
CASES |= {
    f"{name}_compile": replace(CASES[name], ours={**CASES[name].ours, "compile": True}, goals=goals) for name, goals in COMPILED.items()
}
BFLOAT16 = {"ppo_pong": "ppo_pong", "sac_pendulum": "sac_pendulum_compile", "sac_cheetah": "sac_cheetah_compile"}
"""Cases that ours learns with `--trainer.precision bf16-mixed` too, for processors that multiply such numbers, made of which case."""
CASES |= {f"{name}_bf16": replace(CASES[case], precision="bf16-mixed", goals=()) for name, case in BFLOAT16.items()}
