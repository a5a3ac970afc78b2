"""Videos of episodes: record an environment, write mp4 files, and check that an environment renders."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import gymnasium as gym
import numpy as np

from lightning_rl.checkpoints.atomic import SaveError, create, temporary
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.envs.sync import closing_env, name_of
from lightning_rl.errors import SettingError, keep_running, missing_extra
from lightning_rl.types import Info, Options, StepResult, Tree

DEFAULT_FPS = 30
"""Frames per second for environments whose metadata have no `render_fps`."""
T = TypeVar("T")


class RecordVideo(gym.Wrapper):
    """Writes each episode as an mp4 file, from the frame after its reset to the one after its last step.

    An episode that is reset before its end leaves no file.

    Args:
        env: one environment that renders `rgb_array`.
        files: the files of the episodes in order; existing files are replaced.
        longest: the maximum number of steps in a video.
        may_cut: whether to end the video of a longer episode there; otherwise that is an error.
    """

    def __init__(self, env: gym.Env, files: Iterator[Path], longest: int, may_cut: bool = True) -> None:
        super().__init__(env)
        self.files, self.longest, self.may_cut = files, longest, may_cut
        self.video: VideoFile | None = None

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        self._discard()
        obs, info = self.env.reset(seed=seed, options=options)
        self.video = VideoFile(next(self.files), render_frame(self.env), self.env.metadata.get("render_fps") or DEFAULT_FPS)
        return obs, info

    def step(self, action: Tree) -> StepResult:
        if self.video is None:
            raise gym.error.ResetNeeded("call reset before the first step of an episode")
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.video.add(render_frame(self.env))
        over = bool(terminated or truncated)
        if not over and self.video.frames > self.longest and not self.may_cut:
            limit = f"does not end within {self.longest:,} steps; limit it with --max_episode_steps"
            raise SettingError(f"an episode of {name_of(self.env)} {limit}")
        if over or self.video.frames > self.longest:
            self.finish_episode()
        return obs, reward, terminated, truncated, info

    def finish_episode(self) -> None:
        """Save the video of the episode if it is not saved yet, for callers whose part in it is over while the others play on."""
        if self.video is not None:
            self.video.save()
            self.video = None

    def close(self) -> None:
        """Close the environment, and remove the unfinished video."""
        self._discard()
        super().close()

    def _discard(self) -> None:
        if self.video is not None:
            self.video.discard()
            self.video = None


class VideoFile:
    """An mp4 file (H.264, yuv420p, which browsers play) that is written completely or not at all.

    `first` is the first frame, uint8 [height, width, 3]. yuv420p needs even sides, so an odd one gets an extra row or column. Raises
    `SaveError` if the folder is not writable.
    """

    def __init__(self, path: Path, first: np.ndarray, fps: float) -> None:
        self.path, self.shape, self.frames = path, first.shape, 0
        self.ffmpeg = load_ffmpeg("a video")
        height, width, _ = self.shape
        try:
            create(temporary(path)).close()  # ffmpeg would not report why it fails, and would follow a link
        except OSError as error:
            raise SaveError(f"{path} could not be saved ({error.strerror})", error.strerror) from error
        self.writer = self.ffmpeg.write_frames(
            temporary(path),
            (width + width % 2, height + height % 2),
            fps=fps,
            macro_block_size=2,
            ffmpeg_log_level="quiet",
            output_params=["-f", "mp4", "-movflags", "+faststart"],
        )
        self.writer.send(None)
        self.add(first)

    def add(self, frame: np.ndarray) -> None:
        """Write a frame of the same size as the first one; raise `SaveError` if the disk is full."""
        if frame.shape != self.shape:
            raise SettingError(
                f"{self.path.name}: a frame of shape {frame.shape} after others of {self.shape}; all frames of a video must have one size"
            )
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        try:
            self.writer.send(np.ascontiguousarray(even))
        except OSError as error:
            self.discard()
            raise SaveError(f"{self.path} could not be saved (ffmpeg stopped; is the disk full?)", "ffmpeg stopped") from error
        self.frames += 1

    def save(self) -> None:
        """Finish the file, replacing an existing one; raise `SaveError` if frames are missing."""
        self.writer.close()
        try:
            complete = self.ffmpeg.count_frames_and_secs(temporary(self.path))[0] == self.frames
        except RuntimeError:  # ffmpeg does not report that its last write failed
            complete = False
        if not complete:
            self.discard()
            raise SaveError(f"{self.path} could not be saved (it is incomplete; is the disk full?)", "it is incomplete")
        os.replace(temporary(self.path), self.path)

    def discard(self) -> None:
        self.writer.close()
        temporary(self.path).unlink(missing_ok=True)


def name_episodes(episodes: int) -> list[str]:
    """Return file names for this many episodes; sorting them keeps the order of the episodes."""
    return [f"episode_{pad_number(index, episodes - 1)}.mp4" for index in range(episodes)]


def pad_number(number: int, last: int) -> str:
    """Pad a number with zeros to as many digits as the last one has."""
    return f"{number:0{len(str(last))}d}"


def load_ffmpeg(needed_by: str) -> ModuleType:
    """Import the package `imageio_ffmpeg`; raise `SettingError` if it is not installed."""
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise missing_extra("imageio-ffmpeg", "video", needed_by) from error
    return imageio_ffmpeg


def with_render_mode(env: T, render_mode: str | None = "rgb_array") -> T:
    """Return the settings with this render mode; return functions unchanged."""
    if not isinstance(env, EnvConfig):
        return env
    kwargs = {name: value for name, value in env.kwargs.items() if name != "render_mode"}
    return replace(env, kwargs=kwargs if render_mode is None else kwargs | {"render_mode": render_mode})


def check_renders(env: EnvConfig | Callable[[], gym.Env], needed_by: str) -> None:
    """Raise `SettingError` unless an environment can be built, renders a first frame, and the extra `video` is installed."""
    load_ffmpeg(needed_by)
    if sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # otherwise pygame warns that there is no display, which frames do not need
    if isinstance(env, EnvConfig):
        with closing_env(make_env(single_env_config(with_render_mode(env, None)))) as plain:
            modes = plain.metadata.get("render_modes") or ()
        if "rgb_array" not in modes:
            raise SettingError(f"{needed_by}: {env.name} cannot render rgb_array; its render modes: {', '.join(modes) or 'none'}")
        env = single_env_config(with_render_mode(env))
    with closing_env(make_env(env)) as single:
        if single.render_mode != "rgb_array":
            raise SettingError(f"{needed_by}: {name_of(single)} must be built with render_mode rgb_array, got {single.render_mode}")
        single.reset(seed=0)
        render_frame(single)


def render_frame(env: gym.Env) -> np.ndarray:
    """Render a frame, uint8 [height, width, 3], scaling floats in [0, 1] to 255; raise `SettingError` for anything else."""
    try:
        frame = np.asarray(env.render())
    except BaseException as error:  # user code may raise anything
        keep_running(error, name_of(env))
        raise SettingError(f"{name_of(env)} cannot render rgb_array: {type(error).__name__}: {error}") from error
    if frame.dtype.kind == "f" and frame.size and frame.min() >= 0 and frame.max() <= 1:  # as MinAtar's are
        frame = (255 * frame).round().astype(np.uint8)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
        raise SettingError(f"{name_of(env)} renders {frame.dtype} {list(frame.shape)}; an rgb_array must be uint8 [height, width, 3]")
    return frame
