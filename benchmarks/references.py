"""What others report for the environments of the packaged configs.

The error is what the published figure lets one compute: the standard deviation over runs, divided by the root of their number; where only
one run is published, that over its evaluation episodes, whose number is not, so that they count as one.
"""

from __future__ import annotations

from typing import NamedTuple

ZOO = "[rl-zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md)"
CLEANRL = "[CleanRL](https://docs.cleanrl.dev)"
TIANSHOU = "[Tianshou](https://github.com/thu-ml/tianshou/blob/master/examples/mujoco/README.md)"
SLM = "[SLM-Lab](https://github.com/kengz/SLM-Lab/blob/master/docs/BENCHMARKS.md)"


class Reference(NamedTuple):
    """A published return.

    error: standard error, None if there is none.  steps: as they are written.
    """

    mean: float
    error: float | None
    steps: str
    source: str
    note: str = ""

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:g}"
        return f"{self.mean:g}{error}, {self.steps}, {self.source}{self.note}"


OLD_LANDER = ", LunarLander-v2"
REFERENCES: dict[str, Reference | None] = {
    "ppo/cartpole": Reference(500, 0, "100,000", ZOO),
    "a2c/cartpole": Reference(500, 0, "500,000", ZOO),
    "dqn/cartpole": None,
    "sac/cartpole": Reference(406.1, None, "200,000", SLM),
    "impala/cartpole": None,
    "es/cartpole": None,
    "ppo/acrobot": Reference(-73.5, 18.2, "1,000,000", ZOO),
    "a2c/acrobot": Reference(-83.4, 17.2, "500,000", ZOO),
    "ppo/mountaincar": Reference(-110.4, 19.5, "1,000,000", ZOO),
    "ppo/mountaincar_rnd": Reference(-110.4, 19.5, "1,000,000", ZOO),
    "sac/mountaincar_continuous": Reference(94.7, 1.1, "50,000", ZOO, ", with gSDE"),
    "ppo/pendulum": Reference(-172.2, 104.2, "100,000", ZOO),
    "a2c/pendulum": Reference(-163.0, 103.2, "1,000,000", ZOO),
    "sac/pendulum": Reference(-157.0, 88.7, "20,000", ZOO),
    "td3/pendulum": None,
    "ppo/lunarlander": Reference(242.1, 31.8, "1,000,000", ZOO, OLD_LANDER),
    "a2c/lunarlander": Reference(155.8, 80.4, "200,000", ZOO, OLD_LANDER),
    "dqn/lunarlander": None,
    "dqn/rainbow": None,
    "impala/lunarlander": None,
    "ppo/lunarlander_continuous": Reference(270.9, 32.1, "1,000,000", ZOO, OLD_LANDER),
    "sac/lunarlander_continuous": Reference(260.4, 65.5, "500,000", ZOO, OLD_LANDER),
    "ppo/bipedalwalker": Reference(213.3, 129.5, "5,000,000", ZOO),
    "ppo/halfcheetah": Reference(5783.9, 393.4, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "a2c/halfcheetah": Reference(1829.9, 337.8, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "es/halfcheetah": None,
    "sac/halfcheetah": Reference(9634.9, 822.0, "1,000,000", CLEANRL, ", v4"),
    "td3/halfcheetah": None,
    "ppo/hopper": Reference(2609.3, 221.6, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/walker2d": Reference(3588.5, 239.3, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/swimmer": Reference(282, 10, "1,000,000", ZOO),
    "es/swimmer": Reference(355, 13, "2,000,000", ZOO, ", ARS, v3"),
    "ppo/ant": Reference(1327, 452, "1,000,000", ZOO),
    "ppo/inverted_double_pendulum": Reference(9231.3, 85.5, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/minatar_breakout": Reference(28, None, "10,000,000", "[gymnax](https://github.com/RobertTLange/gymnax)"),
    "dqn/minatar_breakout": None,
    "ppo/minigrid_doorkey_rnd": None,
    "ppo/pong": Reference(20.36, 0.12, "10,000,000", CLEANRL),
    "ppo/breakout": Reference(414.66, 16.2, "10,000,000", CLEANRL),
}
"""By config, in the order of the table. CleanRL's are means over 3 seeds of training returns, Tianshou's over 10 seeds."""

ATTEMPTS: dict[str, str] = {
    "a2c/pendulum": "A2C does not find it with every seed; PPO and SAC do",
    "a2c/lunarlander": "A2C is weak here; PPO is the one to take",
}
"""Why a row is not as good, or is not measured."""
