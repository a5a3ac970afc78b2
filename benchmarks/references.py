"""What others report for the environments of the packaged configs.

The error is what the published figure lets one compute: the standard deviation over runs, divided by the root of their number; where only
one run is published, that over its evaluation episodes, divided by the root of theirs, which leaves out how far runs differ.
"""

from __future__ import annotations

import math
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

    @property
    def count(self) -> int | None:
        """Return the steps as a number, None if they are not one."""
        digits = self.steps.replace(",", "")
        return int(digits) if digits.isdigit() else None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3g}"
        return f"{self.mean:.4g}{error}, {self.steps}, {self.source}{self.note}"


def zoo(mean: float, deviation: float, episodes: int, steps: str, note: str = "") -> Reference:
    """A row of rl-zoo's table: one run, and the standard deviation over the episodes that judged it."""
    return Reference(mean, deviation / math.sqrt(episodes), steps, ZOO, note)


OLD_LANDER = ", LunarLander-v2"
REFERENCES: dict[str, Reference | None] = {
    "ppo/cartpole": zoo(500, 0, 300, "100,000"),
    "a2c/cartpole": zoo(500, 0, 300, "500,000"),
    "dqn/cartpole": zoo(500, 0, 300, "50,000"),
    "dqn/cartpole_quantiles": zoo(500, 0, 300, "50,000", ", qrdqn"),
    "trpo/cartpole": zoo(500, 0, 300, "100,000"),
    "sac/cartpole": Reference(406.1, None, "200,000", SLM),
    "impala/cartpole": None,
    "es/cartpole": None,
    "pqn/cartpole": None,
    "ars/cartpole": zoo(500, 0, 300, "50,000"),
    "dagger/cartpole": None,
    "ppo/cartpole_curriculum": None,
    "dqn/bit_flipping": None,
    "ppo/acrobot": zoo(-73.506, 18.201, 2013, "1,000,000"),
    "a2c/acrobot": zoo(-83.353, 17.213, 1778, "500,000"),
    "trpo/acrobot": zoo(-83.114, 18.648, 1783, "100,000"),
    "ars/acrobot": zoo(-82.884, 23.825, 1788, "500,000"),
    "ppo/mountaincar": zoo(-110.423, 19.473, 1358, "1,000,000"),
    "ppo/mountaincar_rnd": zoo(-110.423, 19.473, 1358, "1,000,000"),
    "a2c/mountaincar": zoo(-111.263, 24.087, 1348, "1,000,000"),
    "dqn/mountaincar": zoo(-100.849, 9.925, 1487, "120,000"),
    "dqn/mountaincar_quantiles": zoo(-106.042, 15.536, 1414, "120,000", ", qrdqn"),
    "trpo/mountaincar": zoo(-107.278, 13.231, 1398, "100,000"),
    "ars/mountaincar": zoo(-122.000, 33.456, 1229, "500,000"),
    "es/mountaincar_continuous": zoo(96.672, 0.784, 621, "500,000", ", ARS"),
    "a2c/mountaincar_continuous": zoo(91.166, 0.255, 1659, "100,000"),
    "trpo/mountaincar_continuous": zoo(92.489, 0.355, 1732, "50,000"),
    "sac/mountaincar_continuous": zoo(94.679, 1.134, 1443, "50,000"),
    "ppo/pendulum": zoo(-172.225, 104.159, 750, "100,000"),
    "a2c/pendulum": zoo(-162.965, 103.210, 750, "1,000,000"),
    "trpo/pendulum": zoo(-174.631, 127.577, 750, "100,000"),
    "sac/pendulum": zoo(-156.995, 88.714, 750, "20,000"),
    "tqc/pendulum": None,
    "crossq/pendulum": None,
    "bc/pendulum": None,
    "td3_bc/pendulum": None,
    "iql/pendulum": None,
    "awac/pendulum": None,
    "cql/pendulum": None,
    "td3/pendulum": zoo(-151.855, 90.227, 750, "20,000"),
    "ppo/lunarlander": zoo(242.119, 31.823, 369, "1,000,000", OLD_LANDER),
    "trpo/lunarlander_continuous": zoo(262.387, 21.428, 501, "200,000", OLD_LANDER),
    "a2c/lunarlander": zoo(155.751, 80.419, 297, "200,000", OLD_LANDER),
    "dqn/lunarlander": zoo(154.382, 79.241, 200, "100,000", OLD_LANDER),
    "dqn/rainbow": None,
    "impala/lunarlander": None,
    "ppo/lunarlander_continuous": zoo(270.863, 32.072, 526, "1,000,000", OLD_LANDER),
    "sac/lunarlander_continuous": zoo(260.390, 65.467, 672, "500,000", OLD_LANDER),
    "tqc/lunarlander_continuous": zoo(277.956, 25.466, 706, "500,000", OLD_LANDER),
    "ppo/bipedalwalker": zoo(213.299, 129.490, 233, "5,000,000"),
    "crossq/bipedalwalker": None,
    "ppo/halfcheetah": Reference(5783.9, 393.4, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "a2c/halfcheetah": Reference(1829.9, 337.8, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "es/halfcheetah": None,
    "sac/halfcheetah": Reference(9634.9, 822.0, "1,000,000", CLEANRL, ", v4"),
    "td3/halfcheetah": zoo(9655.666, 969.916, 150, "1,000,000", ", v3"),
    "ppo/hopper": Reference(2609.3, 221.6, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/walker2d": Reference(3588.5, 239.3, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/swimmer": zoo(281.561, 9.671, 150, "1,000,000", ", v3"),
    "ars/swimmer": zoo(355.267, 12.796, 150, "2,000,000", ", v3"),
    "es/swimmer": zoo(355.267, 12.796, 150, "2,000,000", ", ARS, v3"),
    "ppo/ant": zoo(1327.158, 451.577, 175, "1,000,000", ", v3"),
    "ppo/inverted_double_pendulum": Reference(9231.3, 85.5, "1,000,000", TIANSHOU, ", gym v3, best evaluation"),
    "ppo/minatar_breakout": Reference(28, None, "10,000,000", "[gymnax](https://github.com/RobertTLange/gymnax)"),
    "dqn/minatar_breakout": None,
    "pqn/minatar_breakout": None,
    "ppo/minigrid_doorkey_rnd": None,
    "ppo/minigrid_doorkey_curiosity": None,
    "ppo/pong": Reference(20.36, 0.12, "10,000,000", CLEANRL),
    "ppo/breakout": Reference(414.66, 16.2, "10,000,000", CLEANRL),
    "ppo/simple_spread": None,
    "ppo/tictactoe": None,
    "ppo/connect_four": None,
    "ppo/hybrid1d": None,
    "sac/hybrid1d": None,
    "ppo/memory1d": None,
    "sac/memory1d": None,
    "ppo/vmas_simple_spread": None,
    "poca/sacrifice": None,
    "multi_agent/speaker_listener_independent": None,
    "multi_agent/speaker_listener": None,
    "multi_agent/simple_adversary": None,
}
"""By config, in the order of the table. CleanRL's are means over 3 seeds of training returns, Tianshou's over 10 seeds."""

KNOWN = (
    *("ppo/cartpole", "dqn/cartpole", "ppo/mountaincar", "sac/pendulum", "td3/pendulum", "tqc/pendulum", "ppo/lunarlander"),
    *("ppo/halfcheetah", "ppo/hopper", "ppo/walker2d", "ppo/ant", "ppo/swimmer"),
)
"""The rows of README's table: well-known environments."""

ATTEMPTS: dict[str, str] = {
    "ppo/minigrid_doorkey_rnd": "the most likely actions of seed 1 never reach the goal",
    "ppo/mountaincar_rnd": "the reference normalizes observations and needs no RND; without either, every episode here ends at -200",
    "sac/mountaincar_continuous": "by 0.03; the error of the mean over our seeds is 0.14",
    "sac/lunarlander_continuous": "with a fifth of the reference's steps; Stable-Baselines3 with the same settings and steps is lower",
    "tqc/lunarlander_continuous": "with slightly more than half of the reference's steps",
    "ppo/minatar_breakout": "a tenth of the reference's steps; pqn/minatar_breakout reaches three times as much in as many steps",
    "a2c/lunarlander": "A2C is weak here; use PPO",
    **{f"{name}/pendulum": "offline, from a dataset with a mean return of -1,109" for name in ("bc", "td3_bc", "iql", "awac", "cql")},
    "ppo/simple_spread": "per agent; random moves reach -52.4 in the same episodes",
    "ppo/tictactoe": "wins minus losses against random moves; the best response to them reaches 0.96",
    "ppo/connect_four": "wins minus losses against random moves",
    **{f"{algorithm}/hybrid1d": "discrete and continuous actions at once; 1.02 is the maximum" for algorithm in ("ppo", "sac")},
    **{f"{algorithm}/memory1d": "1.02 is the maximum; below 0 without memory" for algorithm in ("ppo", "sac")},
    "poca/sacrifice": "per agent; 0.35 is the maximum",
    "ppo/vmas_simple_spread": "per agent; random moves reach -577",
    "multi_agent/speaker_listener_independent": "per agent, two independent PPO learners; 100,000 agent steps",
    "multi_agent/speaker_listener": "per agent, with critics that see both observations; 1,000,000 agent steps",
    "multi_agent/simple_adversary": "the mean of two behaviors with opposite goals",
}
"""Remarks on rows: why one is not as good or not measured, and what its return means."""
