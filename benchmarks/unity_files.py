"""Read six files of Unity ML-Agents, and clone the policy of one of them with each pairing of its actions.

    python benchmarks/unity_files.py FOLDER [--seeds 3]

FOLDER holds the ml-agents repository's `test.demo` (here `3dball_test.demo`), `Expert3DBall.demo`, `testdcvis.demo`, `testhybridvis.demo`,
`Basic.onnx`, and `hybrid0vis8vec_2c_2_3d_v2_0.onnx` (here `hybrid_recurrent.onnx`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import pytorch_lightning as pl
from gymnasium import Env
from gymnasium.spaces import Box, Dict, MultiDiscrete, Space

from lightning_rl import BehavioralCloning, Trainer
from lightning_rl.demonstrations.unity_files import find_pairing, read_recording, split_episodes
from lightning_rl.spaces import Spaces
from lightning_rl.types import tree_leaves

VECTOR = Box(-np.inf, np.inf, (8,))
TWO = Box(-1, 1, (2,))
FORMS: dict[str, tuple[Space, Space]] = {
    "3dball_test.demo": (VECTOR, TWO),
    "Expert3DBall.demo": (VECTOR, TWO),
    "testdcvis.demo": (Box(0, 255, (84, 84, 3), np.uint8), MultiDiscrete([3, 3, 3, 2])),
    "testhybridvis.demo": (
        Dict({"obs_0": Box(0, 255, (3, 84, 84), np.uint8), "obs_1": Box(-np.inf, np.inf, (1,))}),
        Dict({"continuous": Box(-1, 1, (3,)), "discrete": MultiDiscrete([2])}),
    ),
}
"""Observations and actions of each recording."""
UPDATES = 600


class Ball(Env):
    """Have the spaces of 3DBall. Cloning does not step its environment."""

    observation_space, action_space = VECTOR, TWO

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(8, np.float32), {}


def describe_recording(path: Path, observation: Space, action: Space) -> None:
    """Print the sums, the pairing, and the first action of a recording."""
    recording = read_recording(path.read_bytes(), path.name)
    spec, agents, done = recording.spec, recording.agents, recording.done
    shapes = ", ".join(f"{each.name} {each.shape}" for each in spec.observations)
    sums = [np.float64(rows / 255 if rows.dtype == np.uint8 else rows).sum() for rows in agents.obs]
    actions = recording.continuous.sum(dtype=np.float64) + recording.discrete.sum()
    pairing = find_pairing(recording)
    episodes = list(split_episodes(recording, pairing != "own", Spaces(observation, action)))
    transitions = sum(len(episode.reward) for episode in episodes)
    first = [[round(float(value), 5) for value in leaf[0]] for leaf in tree_leaves(episodes[0].action)]
    print(
        f"{path.name}: {shapes}; continuous {spec.continuous}, branches {tuple(spec.branches)}; {len(done)} steps, {done.sum()} ends, "
        f"{(done & agents.interrupted).sum()} of them truncated, reward {agents.reward.sum():.4g}; "
        f"sums of observations {', '.join(f'{each:,.4f}' for each in sums)}, of actions {actions:.4f}; "
        f"pairing {pairing or 'not found'}, {len(episodes)} episodes, {transitions} transitions, first action {first}"
    )


def describe_basic(path: Path) -> None:
    """Print the choices of the example `Basic` for four observations."""
    session = onnxruntime.InferenceSession(str(path))
    observation, (branch,) = np.eye(20, dtype=np.float32)[[3, 7, 10, 16]], (3,)
    names = {port.name: port.shape for port in session.get_inputs()}
    found = session.run(["deterministic_discrete_actions"], {"obs_0": observation, "action_masks": np.ones((4, branch), np.float32)})
    print(f"{path.name}: inputs {names}; choices {found[0].ravel().tolist()}")


def describe_hybrid(path: Path) -> None:
    """Print the choices of a recurrent model under two masks, and the start of its memory."""
    session = onnxruntime.InferenceSession(str(path))
    given = {port.name: np.zeros([2, *port.shape[1:]], np.float32) for port in session.get_inputs()}
    given["action_masks"] = np.array([[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]], np.float32)
    choices, memory = session.run(["discrete_actions", "recurrent_out"], given)
    print(f"{path.name}: choices {choices.tolist()}; memory {np.round(memory.reshape(2, -1)[0, :2], 5).tolist()}")


class Validate(pl.Callback):
    """Computes the loss on held-out episodes after each iteration."""

    def on_train_batch_end(self, trainer: pl.Trainer, algorithm: pl.LightningModule, *_: object) -> None:
        self.loss = algorithm.validate()["val/loss"]  # type: ignore[operator]


def clone(dataset: str, seed: int) -> float:
    """Return the squared error of the actions in held-out episodes after cloning the others."""
    pl.seed_everything(seed, verbose=False)
    model = BehavioralCloning(env=Ball, dataset=dataset, loss="mse", max_updates=UPDATES, split_seed=seed, normalize_obs="running")
    validation = Validate()
    Trainer(evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False, callbacks=[validation]).fit(model)
    return validation.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name, spaces in FORMS.items():
        describe_recording(options.folder / name, *spaces)
    describe_basic(options.folder / "Basic.onnx")
    describe_hybrid(options.folder / "hybrid_recurrent.onnx")
    for pairing in ("next", "own"):
        errors = [clone(f"{options.folder / '3dball_test.demo'}:{pairing}", seed) for seed in range(1, options.seeds + 1)]
        print(f"cloning with {pairing}: squared error of held-out actions {', '.join(f'{error:.4f}' for error in errors)}")


if __name__ == "__main__":
    main()
