"""Record a run during learning: videos, demonstrations, and the learning curve."""

from __future__ import annotations

import struct
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.seed import isolate_rng
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.evaluation import MultiEvaluator, RolloutEvaluator
from lightning_rl.callbacks.stopping import is_least_best, metric_of, must_stop
from lightning_rl.checkpoints.atomic import write_bytes
from lightning_rl.checkpoints.validation import MEASURE, Rules
from lightning_rl.data.episodes import longest_episode
from lightning_rl.data.players import check_can_be_built
from lightning_rl.demonstrations.files import dataset_id, new_folder
from lightning_rl.demonstrations.recorder import RecordEpisodes, interleave_episodes, save_demonstrations
from lightning_rl.envs.video import RecordVideo, check_renders, load_ffmpeg, name_episodes, pad_number, with_render_mode
from lightning_rl.errors import RunStoppedError, SettingError, check_range
from lightning_rl.loggers import going_on, read_rows
from lightning_rl.reports.figures import COLORS, label, new_figure, png
from lightning_rl.reports.runs import TRAINING, series
from lightning_rl.types import State

PREVIEW = "fps=10,scale=w='min(320,iw)':h=-1,split[a][b];[a]palettegen[colours];[b][colours]paletteuse"
"""A small GIF for TensorBoard, which keeps all of them in one file: ten frames per second, at most 320 pixels wide."""


def evaluators_of(trainer: pl.Trainer, needed_by: str) -> list[RolloutEvaluator]:
    """Return the evaluators of a run; raise `SettingError` if there are none."""
    evaluators = callbacks_of(trainer, RolloutEvaluator)
    if not evaluators:
        raise SettingError(f"{needed_by} evaluations, and this run has none: remove evaluation null")
    return evaluators


class Video(pl.Callback):
    """Record episodes at every k-th evaluation into the run's `videos/`, and pass them to the loggers.

    Files are named after the run's count: `env_steps_020000_episode_0.mp4`, with leading zeros, so that they sort. Actions are the most
    likely ones. W&B gets the files as `eval/video`, TensorBoard the first of them as an animated GIF. Recording does not affect learning:
    it uses a separate environment, and the global random generators keep their state. Needs the extra `video`, and an environment that
    renders `rgb_array`; a function that builds the environment must set that itself.

    Args:
        every_n_evaluations: k; 1 records at each of them.
        episodes: number of episodes to record.
        seed: seed of the first episode; the others count up.
        max_episode_steps: maximum length of an episode; default: the environment's own limit, or 10,000 if it has none.
    """

    def __init__(self, every_n_evaluations: int = 1, episodes: int = 1, seed: int = 10_000, max_episode_steps: int | None = None) -> None:
        for name, value in {"every_n_evaluations": every_n_evaluations, "episodes": episodes}.items():
            check_range(f"Video.{name}", value, 1, whole=True)
        if max_episode_steps is not None:
            check_range("Video.max_episode_steps", max_episode_steps, 1, whole=True)
        check_range("Video.seed", seed, 0, whole=True)
        self.every_n_evaluations, self.episodes, self.seed = every_n_evaluations, episodes, seed
        self.max_episode_steps = max_episode_steps

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        self.evaluations = 0
        evaluators_of(trainer, "Video records at")
        env = check_can_be_built(pl_module.env)
        if trainer.is_global_zero:
            with isolate_rng():
                check_renders(env, "Video")  # fail now, not after the first rollouts

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Record if a video is due at this evaluation; stop recording if the run is asked to stop."""
        self.evaluations += 1
        due = self.evaluations % self.every_n_evaluations == 0
        if due and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "videos"
            count = pad_number(pl_module.count, pl_module.length)
            files = [folder / f"{pl_module.counter}_{count}_{name}" for name in name_episodes(self.episodes)]
            try:
                with going_on(pl_module.say, "a video"):
                    self.record(trainer, pl_module, files)
                    for logger in trainer.loggers:
                        log_videos(logger, files, pl_module.count)
            except RunStoppedError:
                pass

    def record(self, trainer: pl.Trainer, algorithm: AlgorithmRun, files: list[Path]) -> None:
        """Play one episode for each file."""
        files[0].parent.mkdir(parents=True, exist_ok=True)
        names = iter(files)
        env: Any = with_render_mode(algorithm.run.current_env)  # a ready vector environment is rejected
        player = RolloutEvaluator(episodes=self.episodes, seed=self.seed, num_envs=1, max_episode_steps=self.max_episode_steps, env=env)
        player.wrappers.append(lambda env: RecordVideo(env, names, self.max_episode_steps or longest_episode(env)))
        player.play(algorithm, partial(must_stop, trainer))

    def state_dict(self) -> State:
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state_dict: State) -> None:
        self.evaluations = state_dict["evaluations"]


def log_videos(logger: Logger, files: list[Path], count: int) -> None:
    """Pass videos to a logger that can show them.

    TensorBoard shows the first one as an animated GIF. Torch's `add_video` needs moviepy, which does not work with our version of pillow.
    """
    if isinstance(logger, WandbLogger):
        logger.log_video("eval/video", [str(file) for file in files], step=count)
    elif isinstance(logger, TensorBoardLogger):
        program = load_ffmpeg("Video").get_ffmpeg_exe()
        command = [program, "-v", "quiet", "-i", str(files[0]), "-vf", PREVIEW, "-f", "gif", "-"]
        gif = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout
        width, height = struct.unpack_from("<HH", gif, 6)  # from its header
        image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=3)
        logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag="eval/video", image=image)]), count)


class RecordDemonstrations(pl.Callback):
    """Save the episodes of the run's best evaluation as a Minari dataset.

    Like `best.ckpt`, it is replaced whenever an evaluation is at least as good as all previous ones. The number of episodes is
    `evaluation.episodes`.

    Args:
        dataset: id of the dataset, such as `cartpole/expert-v0`; Minari's folder is `MINARI_DATASETS_PATH`.
        force: replace a dataset with that id that another run has saved.
        monitor: the evaluation metric; a lower loss or exploitability is better, of other metrics a higher value.
    """

    state_rules: ClassVar[Rules] = {"best": MEASURE}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, dataset: str, force: bool = False, monitor: str = "eval/mean_reward") -> None:
        self.dataset, self.force, self.monitor = dataset_id(dataset), force, monitor
        self.recorders: list[RecordEpisodes] = []

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        self.best, self.continues, self.on_nan = -float("inf"), False, getattr(pl_module, "on_nan", "raise")
        for callback in evaluators_of(trainer, "RecordDemonstrations records"):
            for evaluator in callback.evaluators if isinstance(callback, MultiEvaluator) else [callback]:
                if self.record not in evaluator.wrappers:
                    evaluator.wrappers.append(self.record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.recorders.clear()
        if trainer.is_global_zero:
            new_folder(self.dataset, self.force or self.continues)

    def record(self, env: gym.Env) -> gym.Env:
        """Wrap an environment so that its episodes are kept until the end of the evaluation."""
        self.recorders.append(RecordEpisodes(env))
        self.recorders[-1].on_nan = self.on_nan
        return self.recorders[-1]

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best so far."""
        recorders, self.recorders = self.recorders, []
        value = metric_of(metrics, self.monitor, "RecordDemonstrations.monitor", trainer)
        if value is None:
            return
        score = -value if is_least_best(self.monitor) else value
        if score >= self.best:
            self.best = score
            for recorder in recorders:  # on rank 0 only
                recorder.cut()
            if recorders:
                with going_on(pl_module.say, f"dataset {self.dataset}"):
                    name = type(pl_module).__name__
                    save_demonstrations(self.dataset, interleave_episodes(recorders), recorders[0].env, algorithm=name, force=True)

    def on_environment_changed(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Forget the best score of another task."""
        self.best = -float("inf")

    def state_dict(self) -> State:
        return {"best": self.best}

    def load_state_dict(self, state_dict: State) -> None:
        self.best, self.continues = state_dict["best"], True


class PlotCurve(pl.Callback):
    """Draw `curve.png` in the run's folder after each evaluation: mean returns of evaluations and training over the run's count.

    It plots `evaluations.csv` and `metrics.csv`, so that the curve of a resumed run covers the whole run. Learning is not affected. Needs
    the extra `plots`.
    """

    is_due = False
    """Whether an evaluation is not in the curve yet."""

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        evaluators_of(trainer, "trainer.plot draws at")
        new_figure(1, 1, "trainer.plot")  # fail now, not after the first rollouts

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        self.is_due = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        self.draw(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.draw(trainer, pl_module)

    def draw(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        """Draw the curve if there was an evaluation, after the iteration's row is written."""
        is_due, self.is_due = self.is_due, False
        if is_due and trainer.is_global_zero:
            folder = Path(str(trainer.log_dir))
            with going_on(pl_module.say, "curve.png"):
                write_bytes(folder / "curve.png", draw_curve(folder, pl_module.counter))


def draw_curve(folder: Path, counter: str) -> bytes:
    """Return the curve of the run in a folder as a PNG file."""
    figure = new_figure(8, 4.8, "trainer.plot")
    axes = figure.subplots()
    for name, file, column, style in (("training", "metrics.csv", TRAINING, "-"), ("evaluations", "evaluations.csv", "return", "o-")):
        curve = series(folder / file, read_rows(folder / file), counter, column)
        if len(curve):
            axes.plot(*curve.T, style, color=COLORS[name == "evaluations"], markersize=4, label=name)
    label(axes, "/".join(folder.parts[-3:]), counter)
    return png(figure)
