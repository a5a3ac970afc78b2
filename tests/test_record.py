"""`lightning-rl record`: videos of a checkpoint's policy."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from lightning_rl import PPO, load_policy
from lightning_rl.data import episodes
from tests.command_line import run, run_apart
from tests.fitting import fit, tiny
from tests.videos import read


@pytest.fixture
def checkpoint(folder):
    def checkpoint(env_id="CartPole-v1", **env):
        fit(tiny(PPO, env_id, env=env, max_env_steps=16)).save_checkpoint(folder / "run" / "checkpoints" / "best.ckpt")
        return "run/checkpoints/best.ckpt"

    return checkpoint


def replayed(path, seed):
    """Return the return, length and last frame of an episode, one observation at a time."""
    env, policy = gym.make("CartPole-v1", render_mode="rgb_array"), load_policy(path)
    (obs, _), rewards, over = env.reset(seed=seed), [], False
    while not over:
        action, _ = policy.act(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        over = terminated or truncated
    picture = env.render()
    env.close()
    return sum(rewards), len(rewards), picture


def test_each_episode_has_a_video_of_all_its_frames_next_to_the_checkpoints(folder, capfd, checkpoint):
    path = checkpoint()
    status, out, err = run(f"record --ckpt_path {path} --episodes 2 --seed 3", capfd)
    assert (status, err) == (0, "")
    videos = folder / "run" / "videos"
    assert sorted(file.name for file in videos.iterdir()) == ["episode_0.mp4", "episode_1.mp4"]
    played = [replayed(path, seed) for seed in (3, 4)]
    for index, (return_, length, picture) in enumerate(played):
        meta, frames = read(videos / f"episode_{index}.mp4")
        assert (meta["size"], meta["fps"], len(frames)) == ((600, 400), 50.0, length + 1)
        differences = [np.abs(frame.astype(int) - picture).mean() for frame in frames[-4:]]
        assert np.argmin(differences) == 3 and differences[3] < 2
        assert f"{videos / f'episode_{index}.mp4'}: return {return_:.2f}, length {length}, seed {3 + index}\n" in out
    mean = np.mean([return_ for return_, _, _ in played])
    status, judged, _ = run(f"evaluate --ckpt_path {path} --episodes 2 --seed 3 --num_envs 1", capfd)
    assert out.splitlines()[-1] == judged.splitlines()[-1] and judged.startswith(f"return {mean:.2f} ± ")


PLACES = [
    ("mine.mp4", "mine.mp4"),
    ("mine.MP4", "mine.MP4"),
    ("mine", "mine/episode_0.mp4"),
    ("v1.5", "v1.5/episode_0.mp4"),
    ("there.gif", "there.gif/episode_0.mp4"),
]


@pytest.mark.thorough
def test_out_is_a_file_or_a_folder(folder, capfd, checkpoint):
    (folder / "there.gif").mkdir()
    path = checkpoint()
    for out, file in PLACES:
        status, printed, err = run(f"record --ckpt_path {path} --out {out} --max_episode_steps 4", capfd)
        assert (status, err) == (0, "") and printed.startswith(f"{file}: return 4.00, length 4, seed 20000\n")
        assert len(read(folder / file)[1]) == 5 and not (folder / "run" / "videos").exists()


ERRORS = [
    ("--episodes 1", "the following arguments are required: --ckpt_path"),
    ("--ckpt_path nowhere.ckpt", "ckpt_path 'nowhere.ckpt' is not a file"),
    ("--ckpt_path PATH --episodes 0", "--episodes must be >= 1, got 0"),
    ("--ckpt_path PATH --seed -1", "--seed must be >= 0 and <= 4294967295, got -1"),
    ("--ckpt_path PATH --max_episode_steps 0", "--max_episode_steps must be >= 1, got 0"),
    ("--ckpt_path PATH --out gone/a.mp4", "--out gone/a.mp4: there is no folder gone; make it first"),
    ("--ckpt_path PATH --out notes/a", "--out notes/a: notes is not a folder"),
    ("--ckpt_path PATH --out notes", "--out notes is a file; name a folder, or a file that ends in .mp4"),
    ("--ckpt_path PATH --out a.mp4 --episodes 2", "--out a.mp4 is one file for 2 episodes; name a folder"),
    ("--ckpt_path PATH --out cp.gif", "--out cp.gif: videos are mp4; name a file that ends in .mp4, or a folder"),
    ("--ckpt_path PATH --out cp.WebM --episodes 2", "--out cp.WebM: videos are mp4; name a file that ends in .mp4, or a folder"),
    ("--ckpt_path PATH --episode 2", "did you mean --episodes?"),
]


def test_wrong_input_ends_in_one_line(folder, capfd, checkpoint):
    path = checkpoint()
    (folder / "notes").touch()
    for options, message in ERRORS:
        status, out, err = run(f"record {options.replace('PATH', path)}", capfd)
        assert (status, out, err.count("\n")) == (2, "", 1) and message in err
        assert not (folder / "run" / "videos").exists()


@pytest.mark.parametrize("way", ["mkdir", "open"])
def test_a_place_that_cannot_be_written_to_is_named_in_one_line(folder, capfd, checkpoint, monkeypatch, way):
    path, real = checkpoint(), getattr(Path, way)

    def refuse(self, *args, **kwargs):
        if "films" in str(self):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, way, refuse)
    status, out, err = run(f"record --ckpt_path {path} --out films", capfd)
    place = "films could not be written to" if way == "mkdir" else "films/episode_0.mp4 could not be saved"
    assert (status, out, err) == (2, "", f"error: {place} (Permission denied)\n")


@pytest.mark.thorough
def test_environments_that_cannot_render_or_do_not_end_are_refused(folder, capfd, checkpoint, monkeypatch):
    status, out, err = run(f"record --ckpt_path {checkpoint('tests.environments:Scripted-v0')}", capfd)
    assert (status, out) == (2, "") and "Scripted-v0 cannot render rgb_array; its render modes: none\n" in err
    path = checkpoint(max_episode_steps=100_000)
    monkeypatch.setattr(episodes, "MAX_EPISODE_STEPS", 5)
    monkeypatch.setattr("lightning_rl.policy.longest_episode", lambda env: episodes.MAX_EPISODE_STEPS)
    status, out, err = run(f"record --ckpt_path {path}", capfd)
    assert (status, out) == (2, "")
    assert re.fullmatch("error: an episode of CartPole-v1 does not end within 5 steps; limit it with --max_episode_steps\n", err)
    assert list((folder / "run" / "videos").iterdir()) == []


def test_without_ffmpeg_the_extra_is_named(folder, capfd, checkpoint, monkeypatch):
    path = checkpoint()
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    status, out, err = run(f"record --ckpt_path {path}", capfd)
    needs = "lightning-rl record needs the package imageio-ffmpeg, which is not installed"
    assert (status, out, err) == (2, "", f'error: {needs}; run: pip install "lightning_rl[video]"\n')


@pytest.mark.thorough
def test_a_machine_without_a_display_records_and_prints_nothing_on_stderr(folder, checkpoint):
    env = {name: value for name, value in os.environ.items() if name not in ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")}
    status, out, err = run_apart(f"record --ckpt_path {checkpoint()} --out a.mp4 --max_episode_steps 2", folder, env)
    assert (status, err) == (0, "") and out.startswith("a.mp4: return 2.00, length 2, seed 20000\n")


@pytest.mark.thorough
def test_a_game_whose_learner_leaves_early_has_a_video_up_to_there(folder, capfd, checkpoint):
    path = checkpoint("tests.agents.FilmedElimination")
    status, out, err = run(f"record --import tests.agents --ckpt_path {path} --episodes 3 --seed 0", capfd)
    assert (status, err) == (0, "")
    frames = [len(read(folder / "run" / "videos" / f"episode_{k}.mp4")[1]) for k in range(3)]
    assert frames == [7, 4, 7]  # of six moves; in the second game the learner is p1, whom the third move throws out
    assert [line.partition(", length ")[2][0] for line in out.splitlines()[:3]] == ["6", "3", "6"]
