"""SAC, TQC and CrossQ of SBX, Stable-Baselines3's interface on JAX, with its defaults: nothing logged or saved.

Its first update compiles; the cases count from its end. XLA's flags do not keep it to a number of threads, so the process keeps to as many
processors.
"""

from __future__ import annotations

import os

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])  # before XLA counts them

import sbx  # noqa: E402
from cases import Case  # noqa: E402
from clock import Clock, measure  # noqa: E402


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    droq = {"dropout_rate": case.ours["critic_dropout"], "layer_norm": True} if "critic_dropout" in case.ours else {}
    model = getattr(sbx, case.algorithm)("MlpPolicy", case.env, seed=1, **case.settings, policy_kwargs=droq)
    clock.follow(model, "train")
    clock.start()
    model.learn(case.steps)
    clock.stop()
    return model.num_timesteps, model._n_updates


if __name__ == "__main__":
    measure(train)
