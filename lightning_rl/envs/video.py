"""Videos of what is played in an environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from lightning_rl.checkpoints.atomic import SaveFailed, create, temporary
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.errors import SettingError, missing_extra

FRAMES_PER_SECOND = 30
"""Of environments whose metadata have no `render_fps`."""


class RecordVideo(gym.Wrapper):
    """Writes each episode as an mp4 file, from the picture after its reset to the one after its last step.

    An episode that is given up before its end leaves no file.

    Args:
        env: one environment that renders `rgb_array`.
        files: where the episodes go, one after the other; files that are there are replaced.
        longest: an episode of this length is cut here.
        may_cut: whether it may; if not, it is refused.
    """

    def __init__(self, env: gym.Env, files: Iterator[Path], longest: int, may_cut: bool = True) -> None:
        super().__init__(env)
        self.files, self.longest, self.may_cut = files, longest, may_cut
        self.video: VideoFile | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._discard()
        obs, info = self.env.reset(seed=seed, options=options)
        self.video = VideoFile(next(self.files), picture(self.env), self.env.metadata.get("render_fps") or FRAMES_PER_SECOND)
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and write the picture.

        Raises:
            SettingError: the episode is longer than it may be, or the environment renders no picture of the same size.
            SaveFailed: the disk is full, …
            ResetNeeded: the episode is over.
        """
        if self.video is None:
            raise gym.error.ResetNeeded("call reset before the first step of an episode")
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.video.add(picture(self.env))
        over = bool(terminated or truncated)
        if not over and self.video.frames > self.longest and not self.may_cut:
            raise SettingError(f"an episode of {name_of(self.env)} does not end within {self.longest:,} steps; cut it: --max_episode_steps")
        if over or self.video.frames > self.longest:
            self.video.save()
            self.video = None
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment, and leave nothing of the episode under way."""
        self._discard()
        super().close()

    def _discard(self) -> None:
        if self.video is not None:
            self.video.discard()
            self.video = None


class VideoFile:
    """An mp4 file (H.264, yuv420p, which browsers play) that is there whole or not at all.

    Args:
        path: its name.
        first: the first frame, uint8 [height, width, 3]; an odd height or width gets a row or column more, as yuv420p has none.
        fps: frames a second.

    Raises:
        SaveFailed: the folder cannot be written to.
    """

    def __init__(self, path: Path, first: np.ndarray, fps: float) -> None:
        self.path, self.shape, self.frames = path, first.shape, 0
        self.ffmpeg = load_ffmpeg("a video")
        height, width, _ = self.shape
        try:
            create(temporary(path)).close()  # ffmpeg would not say why it cannot, and would write through a link
        except OSError as error:
            raise SaveFailed(f"{path} could not be saved ({error.strerror})", error.strerror) from error
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
        """Write a frame.

        Raises:
            SettingError: it is not of the first one's size.
            SaveFailed: the disk is full, …
        """
        if frame.shape != self.shape:
            raise SettingError(f"{self.path.name}: a picture of shape {frame.shape} after others of {self.shape}; a video has one size")
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        try:
            self.writer.send(np.ascontiguousarray(even))
        except OSError as error:
            self.discard()
            raise SaveFailed(f"{self.path} could not be saved (ffmpeg stopped; is the disk full?)", "ffmpeg stopped") from error
        self.frames += 1

    def save(self) -> None:
        """Take the place of what is there.

        Raises:
            SaveFailed: not all of it could be written.
        """
        self.writer.close()
        try:
            whole = self.ffmpeg.count_frames_and_secs(temporary(self.path))[0] == self.frames
        except RuntimeError:  # ffmpeg does not say when the last of it could not be written
            whole = False
        if not whole:
            self.discard()
            raise SaveFailed(f"{self.path} could not be saved (it is not whole; is the disk full?)", "it is not whole")
        os.replace(temporary(self.path), self.path)

    def discard(self) -> None:
        """Leave nothing."""
        self.writer.close()
        temporary(self.path).unlink(missing_ok=True)


def episode_names(episodes: int) -> list[str]:
    """Of the files of so many episodes, in their order when sorted."""
    return [f"episode_{padded(index, episodes - 1)}.mp4" for index in range(episodes)]


def padded(number: int, last: int) -> str:
    """A number with zeros in front, as many digits as the last one has."""
    return f"{number:0{len(str(last))}d}"


def load_ffmpeg(needed_by: str) -> Any:
    """The package `imageio_ffmpeg`.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise missing_extra("imageio-ffmpeg", "video", needed_by) from error
    return imageio_ffmpeg


def rendering(env: Any, render_mode: str | None = "rgb_array") -> Any:
    """Settings of the same environment with pictures, or with another render mode; a function builds what it builds."""
    if not isinstance(env, EnvConfig):
        return env
    kwargs = {name: value for name, value in env.kwargs.items() if name != "render_mode"}
    return replace(env, kwargs=kwargs if render_mode is None else kwargs | {"render_mode": render_mode})


def check_renders(env: EnvConfig | Callable[[], gym.Env], needed_by: str) -> None:
    """Build an environment and look at its first picture.

    Raises:
        SettingError: it has none, or the extra `video` is not installed.
    """
    load_ffmpeg(needed_by)
    if sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame says on stderr that it found no display, which pictures do not need
    if isinstance(env, EnvConfig):
        plain = make_env(single_env_config(rendering(env, None)))
        plain.close()
        if "rgb_array" not in (plain.metadata.get("render_modes") or ()):
            modes = ", ".join(plain.metadata.get("render_modes") or ()) or "none"
            raise SettingError(f"{needed_by}: {env.id} cannot render rgb_array; its render modes: {modes}")
    with_pictures = rendering(env)
    single = make_env(single_env_config(with_pictures) if isinstance(with_pictures, EnvConfig) else with_pictures)
    with closing(single):
        if single.render_mode != "rgb_array":
            raise SettingError(f"{needed_by}: {name_of(single)} must be built with render_mode rgb_array, got {single.render_mode}")
        single.reset(seed=0)
        picture(single)


def picture(env: gym.Env) -> np.ndarray:
    """What an environment renders, uint8 [height, width, 3]; fractions of 1 are made whole numbers up to 255.

    Raises:
        SettingError: it cannot, or renders something else.
    """
    try:
        frame = np.asarray(env.render())
    except Exception as error:  # an environment of others may raise anything
        raise SettingError(f"{name_of(env)} cannot render rgb_array: {type(error).__name__}: {error}") from error
    if frame.dtype.kind == "f" and frame.size and frame.min() >= 0 and frame.max() <= 1:  # as MinAtar's are
        frame = (255 * frame).round().astype(np.uint8)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
        raise SettingError(f"{name_of(env)} renders {frame.dtype} {list(frame.shape)}, and an rgb_array is uint8 [height, width, 3]")
    return frame


def name_of(env: gym.Env) -> str:
    """For messages."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id
