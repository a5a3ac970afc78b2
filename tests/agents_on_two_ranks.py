"""What one of two ranks does in `test_ranks_of_agents.py`: `python -m tests.agents_on_two_ranks FOLDER`."""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from tests.algorithms.test_multi_agent import DQN, PPO, StopAt

CASES = {
    "one policy": lambda: lrl.PPO(
        {"id": "tests.agents.Mortal", "num_envs": 2}, max_env_steps=192, n_steps=6, batch_size=12, n_epochs=1, net_arch=[8], compile=False
    ),
    "turns": lambda: lrl.PPO(
        {"id": "tests.agents.Elimination", "num_envs": 2},
        max_env_steps=96,
        n_steps=6,
        batch_size=6,
        n_epochs=1,
        net_arch=[8],
        compile=False,
    ),
    "behaviors": lambda: lrl.MultiAgent(
        {"id": "tests.agents.Mortal", "num_envs": 2}, {"a": lrl.Behavior("a", PPO), "b": lrl.Behavior("b", DQN)}, 192
    ),
}


def run(folder, case, *callbacks, ckpt_path=None):
    """Train, and return the weights and counts of this rank."""
    pl.seed_everything(5, verbose=False)
    model = CASES[case]()
    lrl.Trainer(
        default_root_dir=folder,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=[],
        enable_progress_bar=False,
        evaluation=None,
    ).fit(model, ckpt_path=ckpt_path)
    return {"weights": model.state_dict(), "counts": (model.env_steps, model.updates, model.episodes)}


if __name__ == "__main__":
    root, found = Path(sys.argv[1]), {}
    for case in CASES:
        found[case] = {"whole": run(root / case / "whole", case)}
        run(root / case / "parts", case, StopAt(3))
        found[case]["parts"] = run(root / case / "parts", case, ckpt_path="last")
    torch.save(found, root / f"rank{torch.distributed.get_rank()}.pt")
