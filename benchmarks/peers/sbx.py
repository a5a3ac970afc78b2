"""SAC of SBX, Stable-Baselines3's interface on JAX, with its defaults: two critics of 256 x 256 each, nothing logged or saved.

Its first update compiles; the cases count from its end. XLA's flags do not keep it to a number of threads, so the process keeps to as many
processors.
"""

from __future__ import annotations

import os

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])  # before XLA counts them

from cases import Case  # noqa: E402
from clock import Clock, measure  # noqa: E402
from sbx import SAC  # noqa: E402


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    model = SAC("MlpPolicy", case.env, seed=1, **case.settings)
    clock.follow(model, "train")
    clock.start()
    model.learn(case.steps)
    clock.stop()
    return model.num_timesteps, model._n_updates


if __name__ == "__main__":
    measure(train)
