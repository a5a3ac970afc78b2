"""Videos of episodes: all frames, of the right size, the last one after the last step."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lightning_rl import EnvConfig
from lightning_rl.checkpoints.atomic import temporary
from lightning_rl.envs.video import RecordVideo, check_renders, render_frame
from lightning_rl.errors import SettingError
from tests.videos import read


class Shades(gym.Env):
    """Five steps; its pictures of 15 x 31 grow 40 brighter with each."""

    observation_space, action_space = Box(0, 5, (1,), np.float32), Discrete(2)
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 12}

    def __init__(self, render_mode="rgb_array", length=5, pictures=None):
        self.render_mode, self.length, self.pictures = render_mode, length, pictures

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}

    def render(self):
        return np.full((15, 31, 3), 40 * self.t, np.uint8) if self.pictures is None else self.pictures[self.t]


def play(env, steps):
    env.reset(seed=0)
    for _ in range(steps):
        env.step(0)


@pytest.mark.thorough
def test_a_video_has_a_frame_of_the_reset_and_of_each_step_and_even_sides(tmp_path):
    env = RecordVideo(Shades(), iter([tmp_path / "a.mp4", tmp_path / "b.mp4"]), 100)
    play(env, 5)
    play(env, 2)  # given up
    env.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    meta, frames = read(tmp_path / "a.mp4")
    assert (meta["size"], meta["fps"], meta["codec"], meta["pix_fmt"][:7]) == ((32, 16), 12.0, "h264", "yuv420p")
    assert frames.shape == (6, 16, 32, 3)
    assert frames.mean((1, 2, 3)) == pytest.approx([0, 40, 80, 120, 160, 200], abs=3)
    assert frames[-1].std() < 3  # the row and the column more are no border


@pytest.mark.thorough
def test_an_environment_without_a_frame_rate_has_thirty_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(Shades, "metadata", {"render_modes": ["rgb_array"]})
    env = RecordVideo(Shades(), iter([tmp_path / "a.mp4"]), 100)
    play(env, 5)
    assert read(tmp_path / "a.mp4")[0]["fps"] == 30


@pytest.mark.thorough
def test_an_episode_is_cut_or_rejected_at_the_maximum_length(tmp_path):
    play(RecordVideo(Shades(length=99), iter([tmp_path / "cut.mp4"]), 3), 3)
    assert len(read(tmp_path / "cut.mp4")[1]) == 4
    env = RecordVideo(Shades(length=99), iter([tmp_path / "refused.mp4"]), 3, may_cut=False)
    with pytest.raises(SettingError, match="an episode of Shades does not end within 3 steps; limit it with --max_episode_steps"):
        play(env, 3)
    env.close()
    play(RecordVideo(Shades(length=3), iter([tmp_path / "over.mp4"]), 3, may_cut=False), 3)  # which does end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.mp4", "over.mp4"]


def test_a_step_after_the_end_is_an_error(tmp_path):
    env = RecordVideo(Shades(length=1), iter([tmp_path / "a.mp4"]), 100)
    with pytest.raises(gym.error.ResetNeeded):
        play(env, 2)


SMALL, LARGE = np.zeros((16, 16, 3), np.uint8), np.zeros((18, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([SMALL, LARGE], r"a.mp4: a frame of shape \(18, 16, 3\) after others of \(16, 16, 3\)"),
        ([None], "Shades renders object"),
        ([SMALL + 2.0], r"Shades renders float64 \[16, 16, 3\]; an rgb_array must be uint8"),
        ([SMALL[..., 0]], r"Shades renders uint8 \[16, 16\]"),
        ([], "Shades cannot render rgb_array: IndexError: list index out of range"),
    ],
)
def test_invalid_frames_are_rejected_and_leave_no_file(tmp_path, pictures, message):
    env = RecordVideo(Shades(pictures=pictures), iter([tmp_path / "a.mp4"]), 100)
    with pytest.raises(SettingError, match=message):
        play(env, 1)
    env.close()
    assert list(tmp_path.iterdir()) == []


def test_frames_in_fractions_are_scaled_to_bytes():
    env = Shades(pictures=[np.full((16, 16, 3), 0.6)])
    env.reset()
    assert render_frame(env).dtype == np.uint8 and (render_frame(env) == 153).all()


def test_a_missing_folder_is_reported_with_the_systems_error(tmp_path):
    with pytest.raises(OSError, match=r"a.mp4 could not be saved \(No such file or directory\)"):
        play(RecordVideo(Shades(), iter([tmp_path / "gone" / "a.mp4"]), 100), 1)


def test_a_video_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    for name in (tmp_path / "a.mp4", temporary(tmp_path / "a.mp4")):
        name.symlink_to(tmp_path / "mine")
    play(RecordVideo(Shades(), iter([tmp_path / "a.mp4"]), 100), 5)
    assert (tmp_path / "mine").read_text() == "years of work" and len(read(tmp_path / "a.mp4")[1]) == 6


def test_an_incomplete_file_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(imageio_ffmpeg, "count_frames_and_secs", lambda path: (5, 1.0))
    with pytest.raises(OSError, match="it is incomplete"):
        play(RecordVideo(Shades(), iter([tmp_path / "a.mp4"]), 100), 5)
    assert list(tmp_path.iterdir()) == []


def test_environments_that_cannot_render_are_rejected_beforehand():
    check_renders(EnvConfig("CartPole-v1", kwargs={"render_mode": "human"}), "record")
    check_renders(Shades, "record")
    with pytest.raises(SettingError, match=r"record: tests.environments:Scripted-v0 cannot render rgb_array; its render modes: none"):
        check_renders(EnvConfig("tests.environments:Scripted-v0"), "record")
    with pytest.raises(SettingError, match="record: CartPole-v1 must be built with render_mode rgb_array, got None"):
        check_renders(lambda: gym.make("CartPole-v1"), "record")
