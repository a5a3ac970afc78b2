"""What one of two ranks does in `test_ranks_of_agents.py`: `python -m tests.agents_on_two_ranks FOLDER`."""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.callbacks.self_play import SelfPlay
from tests.algorithms.test_multi_agent import DQN, PPO, StopAt

CASES = {
    "one policy": lambda: lrl.PPO(
        {"id": "tests.agents.Mortal", "num_envs": 2}, max_env_steps=192, n_steps=6, batch_size=12, n_epochs=1, net_arch=[8], compile=False
    ),
    "groups": lambda: lrl.POCA(
        {"id": "tests.agents.Visited", "num_envs": 2},
        max_env_steps=192,
        n_steps=6,
        batch_size=6,
        n_epochs=2,
        net_arch=[8],
        attention_size=8,
        compile=False,
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
    "self-play": lambda: lrl.PPO(
        {"id": "lightning_rl.envs.games.tic_tac_toe", "num_envs": 2},
        max_env_steps=288,
        n_steps=6,
        batch_size=6,
        n_epochs=1,
        net_arch=[8],
        memory=lrl.GRU(4, 3),
        normalize_obs="running",
        compile=False,
        self_play={"window": 2, "save_steps": 48, "opponents": ["random"]},
    ),
    "teams": lambda: lrl.POCA(
        {"id": "tests.agents.MortalSquads", "num_envs": 2},
        max_env_steps=192,
        n_steps=6,
        batch_size=6,
        n_epochs=1,
        net_arch=[8],
        attention_size=8,
        compile=False,
        self_play={"window": 2, "save_steps": 48, "teams": ["red_*", "blue_*"]},
    ),
    "behaviors": lambda: lrl.MultiAgent(
        {"id": "tests.agents.Mortal", "num_envs": 2}, {"a": lrl.Behavior("a", PPO), "b": lrl.Behavior("b", DQN)}, 192
    ),
}


def run(folder, case, *callbacks, ckpt_path=None):
    """Train, and return the weights, counts, ratings and past selves of this rank."""
    pl.seed_everything(5, verbose=False)
    model = CASES[case]()
    trainer = lrl.Trainer(
        default_root_dir=folder,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=[],
        enable_progress_bar=False,
        evaluation=None,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    found = {"weights": model.state_dict(), "counts": (model.env_steps, model.updates, model.episodes), "ratings": ()}
    for callback in trainer.callbacks:
        if isinstance(callback, SelfPlay):
            found["ratings"] = callback.elo, callback.elos, callback.results[""].rows.tolist(), callback.taken_at
            of_past = callback.snapshots.get_weights(callback.snapshots.numbers)
            found["weights"] |= {f"{number}.{name}": weight for number, own in of_past.items() for name, weight in own.items()}
    return found


if __name__ == "__main__":
    root, found = Path(sys.argv[1]), {}
    for case in CASES:
        found[case] = {"whole": run(root / case / "whole", case)}
        run(root / case / "parts", case, StopAt(3))
        found[case]["parts"] = run(root / case / "parts", case, ckpt_path="last")
    torch.save(found, root / f"rank{torch.distributed.get_rank()}.pt")
