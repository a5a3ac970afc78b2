"""A run names what a user added to an algorithm and no optimizer learns."""

from __future__ import annotations

import pytest
from torch import nn

import lightning_rl as lrl


class TwoHeads(lrl.PPO):
    """Two heads of a user's own, of which one is learned."""

    def __post_init__(self):
        super().__post_init__()
        self.learned, self.forgotten = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        self.fixed = nn.Linear(4, 3).requires_grad_(False)

    def configure_optimizers(self):
        return self.with_side_learners(lrl.optimization.ScheduledAdam([*self.network.parameters(), *self.learned.parameters()]))


def lines(model, tmp_path, capsys):
    quiet = {"evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": True}
    lrl.Trainer(default_root_dir=tmp_path, accelerator="cpu", **quiet).fit(model)
    return [line for line in capsys.readouterr().out.splitlines() if "are not learned" in line]


def test_parameters_that_no_optimizer_holds_are_counted_and_named(tmp_path, capsys):
    model = TwoHeads("CartPole-v1", n_steps=8, batch_size=16, max_env_steps=64)
    assert lines(model, tmp_path, capsys) == [
        "23 parameters are not learned, since no optimizer holds them: forgotten.0, forgotten.2"  # 4 · 3 + 3 + 3 · 2 + 2
    ]


@pytest.mark.parametrize(
    "build",
    [
        lambda: lrl.TRPO("Pendulum-v1", n_steps=8, batch_size=16, max_env_steps=64, memory=lrl.GRU(8, 8)),
        lambda: lrl.SAC("Pendulum-v1", ent_coef=0.1, learning_starts=8, max_env_steps=16),
        lambda: lrl.PPO("CartPole-v1", n_steps=8, batch_size=16, max_env_steps=64, reward_signals={"extrinsic": {}, "curiosity": {}}),
    ],
    ids=["without an optimizer for the policy", "fixed temperature", "curiosity"],
)
def test_nothing_is_said_about_what_is_learned_in_another_way_or_not_to_be_learned(build, tmp_path, capsys):
    assert lines(build(), tmp_path, capsys) == []
