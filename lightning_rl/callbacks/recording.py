"""Videos and demonstrations of the policy as it learns."""

from __future__ import annotations

import struct
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.seed import isolate_rng
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_rl.callbacks.evaluation import RolloutEvaluator, check_can_be_built
from lightning_rl.callbacks.stopping import stop_asked
from lightning_rl.data.episodes import longest_episode
from lightning_rl.demonstrations.files import dataset_id, new_folder
from lightning_rl.demonstrations.recorder import RecordEpisodes, in_order, save_demonstrations
from lightning_rl.envs.video import RecordVideo, check_renders, episode_names, load_ffmpeg, padded, rendering
from lightning_rl.errors import Interrupted, SettingError, check_range
from lightning_rl.loggers import going_on

PREVIEW = "fps=10,scale=w='min(320,iw)':h=-1,split[a][b];[a]palettegen[colours];[b][colours]paletteuse"
"""A file for TensorBoard, which keeps all of them in one: ten pictures a second, at most 320 wide."""


class Video(pl.Callback):
    """Records episodes at every k-th evaluation into the run's `videos/`, and hands them to the loggers.

    Files are named for what the run counts: `env_steps_020000_episode_0.mp4`, with zeros in front, so that they sort. Actions are the most
    likely ones. W&B gets the files as `eval/video`, TensorBoard the first of them as an animated picture. Learning is the same with and
    without it: it has an environment of its own, and the global random generators keep their state. Needs the extra `video`, and an
    environment that renders `rgb_array`; a function that builds one must say so itself.

    Args:
        every_n_evaluations: k; 1 is each of them.
        episodes: how many to play.
        seed: of the first episode; the others count up.
        max_episode_steps: longest episode; the environment's own limit, or 10,000 where it has none, unless given.
    """

    def __init__(self, every_n_evaluations: int = 1, episodes: int = 1, seed: int = 10_000, max_episode_steps: int | None = None) -> None:
        for name in ("every_n_evaluations", "episodes", "max_episode_steps"):
            if locals()[name] is not None or name != "max_episode_steps":
                check_range(f"Video.{name}", locals()[name], 1, whole=True)
        check_range("Video.seed", seed, 0, whole=True)
        self.every_n_evaluations, self.episodes, self.seed = every_n_evaluations, episodes, seed
        self.max_episode_steps = max_episode_steps
        self.evaluations = 0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if not any(isinstance(callback, RolloutEvaluator) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise SettingError("Video records at evaluations, and this run has none: leave evaluation as it is")
        check_can_be_built(pl_module.env)
        if trainer.is_global_zero:
            with isolate_rng():
                check_renders(pl_module.env, "Video")  # now, not after the first rollouts

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Record, if it is the turn of this evaluation; given up if somebody asks to stop."""
        self.evaluations += 1
        due = self.evaluations % self.every_n_evaluations == 0
        if due and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "videos"
            count = padded(pl_module.count, pl_module.length)
            files = [folder / f"{pl_module.counter}_{count}_{name}" for name in episode_names(self.episodes)]
            try:
                with going_on(pl_module, "a video"):
                    self.record(trainer, pl_module, files)
                    for logger in trainer.loggers:
                        hand_over(logger, files, pl_module.count)
            except Interrupted:
                pass

    def record(self, trainer: pl.Trainer, algorithm: Any, files: list[Path]) -> None:
        """Play, an episode a file."""
        files[0].parent.mkdir(parents=True, exist_ok=True)
        names = iter(files)
        player = RolloutEvaluator(
            episodes=self.episodes, seed=self.seed, num_envs=1, max_episode_steps=self.max_episode_steps, env=rendering(algorithm.env)
        )
        player.wrappers.append(lambda env: RecordVideo(env, names, self.max_episode_steps or longest_episode(env)))
        player.play(algorithm, partial(stop_asked, trainer))

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations = state_dict["evaluations"]


def hand_over(logger: Any, files: list[Path], count: int) -> None:
    """Give videos to a logger that shows some."""
    if isinstance(logger, WandbLogger):
        logger.log_video("eval/video", [str(file) for file in files], step=count)
    elif isinstance(logger, TensorBoardLogger):
        gif = preview(files[0])
        width, height = struct.unpack_from("<HH", gif, 6)  # as its header says
        image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=3)
        logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag="eval/video", image=image)]), count)


def preview(file: Path) -> bytes:
    """A video as an animated GIF, which TensorBoard shows as a picture.

    It is what torch's `add_video` writes, by moviepy, which does not go with the pillow that we have.
    """
    program = load_ffmpeg("Video").get_ffmpeg_exe()
    command = [program, "-v", "quiet", "-i", str(file), "-vf", PREVIEW, "-f", "gif", "-"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout


class RecordDemonstrations(pl.Callback):
    """Saves the episodes of the best evaluation of the run as a Minari dataset, so that at its end it holds the best there were.

    It is replaced whenever an evaluation is at least as good as all before it, as `best.ckpt` is. `evaluation.episodes` says how many
    episodes there are.

    Args:
        dataset: its id, such as `cartpole/expert-v0`; Minari's folder is `MINARI_DATASETS_PATH`.
        force: replace a dataset of that id which another run has left.
        monitor: the evaluation's metric.
    """

    def __init__(self, dataset: str, force: bool = False, monitor: str = "eval/mean_reward") -> None:
        self.dataset, self.force, self.monitor = dataset_id(dataset), force, monitor
        self.recorders: list[RecordEpisodes] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best, self.continues = -float("inf"), False
        found = [callback for callback in trainer.callbacks if isinstance(callback, RolloutEvaluator)]  # type: ignore[attr-defined]
        if not found:
            raise SettingError("RecordDemonstrations records evaluations, and this run has none: leave evaluation as it is")
        for evaluator in (each for callback in found for each in getattr(callback, "evaluators", [callback])):
            if self.record not in evaluator.wrappers:
                evaluator.wrappers.append(self.record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recorders.clear()
        if trainer.is_global_zero:
            new_folder(self.dataset, self.force or self.continues)

    def record(self, env: gym.Env) -> gym.Env:
        """An environment whose episodes are kept until the end of the evaluation."""
        self.recorders.append(RecordEpisodes(env))
        return self.recorders[-1]

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best one."""
        recorders, self.recorders = self.recorders, []
        if metrics[self.monitor] >= self.best:
            self.best = metrics[self.monitor]
            for recorder in recorders:  # on rank 0 alone
                recorder.cut()
            if recorders:
                with going_on(pl_module, f"dataset {self.dataset}"):
                    name = type(pl_module).__name__
                    save_demonstrations(self.dataset, in_order(recorders), recorders[0].env, algorithm=name, force=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.continues = state_dict["best"], True
