"""SAC of SBX, Stable-Baselines3's interface on JAX, with its defaults: two critics of 256 x 256 each, nothing logged or saved.

Its first update compiles; the cases count from its end.
"""

from __future__ import annotations

from cases import Case
from clock import Clock, measure
from sbx import SAC


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
