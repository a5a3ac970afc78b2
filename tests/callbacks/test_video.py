"""Videos of a run's evaluations."""

from __future__ import annotations

import sys

import pytest
import wandb
from pytorch_lightning.loggers import WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_rl as lrl
from lightning_rl import PPO, SettingError, Trainer
from lightning_rl.loggers import read_rows
from tests.command_line import TINY, run
from tests.fitting import tiny, weights
from tests.videos import read

RUN = "runs/PPO/CartPole-v1/version_0"


def trained(*callbacks, max_env_steps=96, **arguments):
    """Six iterations of 16 environment steps, an evaluation each other."""
    model = tiny(PPO, "CartPole-v1", max_env_steps=max_env_steps)
    evaluation = {"episodes": 1, "every_n_env_steps": 32, "max_episode_steps": 20}
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=evaluation, callbacks=list(callbacks), **arguments)
    trainer.fit(model)
    return model, trainer


@pytest.mark.thorough
def test_a_run_learns_the_same_with_and_without_videos_of_each_kth_evaluation(folder):
    plain, one = trained()
    filmed, other = trained(lrl.Video(every_n_evaluations=2, episodes=2, max_episode_steps=6))
    assert weights(plain).equal(weights(filmed))
    rows = [read_rows(trainer.run_folder / "evaluations.csv") for trainer in (one, other)]
    assert rows[0] == rows[1] and [row["env_steps"] for row in rows[0]] == ["32", "64", "96"]
    metrics = [read_rows(trainer.run_folder / "metrics.csv") for trainer in (one, other)]
    timeless = [[{name: value for name, value in row.items() if "time" not in name} for row in each] for each in metrics]
    assert timeless[0] == timeless[1]
    assert not (one.run_folder / "videos").exists()
    videos = sorted((other.run_folder / "videos").iterdir())
    assert [file.name for file in videos] == ["env_steps_64_episode_0.mp4", "env_steps_64_episode_1.mp4"]
    assert [len(read(file)[1]) for file in videos] == [7, 7]
    events = EventAccumulator(str(other.run_folder)).Reload()
    (image,) = events.Images("eval/video")
    assert (image.step, image.width, image.height, image.encoded_image_string[:6]) == (64, 320, 213, b"GIF89a")


def test_names_of_videos_sort_in_the_order_in_which_they_were_made(folder):
    video = lrl.Video(episodes=11, max_episode_steps=1)
    made = []
    video.record = lambda trainer, algorithm, files: made.extend(file.name for file in files)
    trained(video, logger=False, max_env_steps=112)
    assert made[0] == "env_steps_032_episode_00.mp4" and made[-1] == "env_steps_112_episode_10.mp4"
    assert len(made) == 44 and made == sorted(made)


@pytest.mark.thorough
def test_a_new_run_counts_its_evaluations_from_the_first_and_a_resumed_one_continues(folder):
    video = lrl.Video(every_n_evaluations=2)
    made = []
    video.record = lambda trainer, algorithm, files: made.extend(file.name for file in files)
    trained(video, logger=False)  # evaluated after 32, 64 and 96 steps
    assert made == ["env_steps_64_episode_0.mp4"]
    _, trainer = trained(video, logger=False)
    assert made == ["env_steps_64_episode_0.mp4"] * 2
    trainer.fit(tiny(PPO, "CartPole-v1", max_env_steps=128), ckpt_path=trainer.run_folder)
    assert made == ["env_steps_64_episode_0.mp4"] * 2 + ["env_steps_128_episode_0.mp4"]


@pytest.mark.thorough
def test_weights_and_biases_gets_the_files(folder, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it keeps the settings that it read first in this process
    trained(lrl.Video(every_n_evaluations=3, max_episode_steps=3), logger=WandbLogger(save_dir=str(folder)))
    wandb.finish()
    (found,) = folder.glob("wandb/offline-run-*/files/media/videos/eval/video_*.mp4")
    assert found.read_bytes() == (folder / RUN / "videos" / "env_steps_96_episode_0.mp4").read_bytes()


@pytest.mark.thorough
def test_it_is_a_callback_of_the_command_line(folder, capfd):
    options = "--trainer.callbacks+=lightning_rl.Video --trainer.callbacks.max_episode_steps 3 --trainer.logger false"
    status, _, err = run(f"fit --model.env.id CartPole-v1 {TINY} {options}", capfd)
    assert (status, err) == (0, "")
    assert len(read(folder / RUN / "videos" / "env_steps_64_episode_0.mp4")[1]) == 4


def test_what_cannot_be_recorded_is_refused_before_the_run(folder, monkeypatch):
    with pytest.raises(SettingError, match=r"Video: tests.environments:Scripted-v0 cannot render rgb_array; its render modes: none"):
        Trainer(accelerator="cpu", callbacks=[lrl.Video()]).fit(tiny(PPO))
    with pytest.raises(SettingError, match="Video records at evaluations, and this run has none"):
        Trainer(accelerator="cpu", evaluation=None, callbacks=[lrl.Video()]).fit(tiny(PPO, "CartPole-v1"))
    for name in ("every_n_evaluations", "episodes", "max_episode_steps"):
        with pytest.raises(SettingError, match=f"Video.{name} must be >= 1, got 0"):
            lrl.Video(**{name: 0})
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(SettingError, match=r"Video needs the package imageio-ffmpeg.*lightning_rl\[video\]"):
        Trainer(accelerator="cpu", callbacks=[lrl.Video()]).fit(tiny(PPO, "CartPole-v1"))


@pytest.mark.thorough
def test_a_stopped_run_interrupts_its_video_and_fast_dev_run_makes_none(folder, monkeypatch):
    assert trained(lrl.Video(), fast_dev_run=True)[1].run_folder is None
    monkeypatch.setattr("lightning_rl.callbacks.recording.must_stop", lambda trainer: True)
    model, trainer = trained(lrl.Video())
    assert model.env_steps == 96 and list((trainer.run_folder / "videos").iterdir()) == []


@pytest.mark.thorough
def test_a_failing_disk_does_not_end_the_run(folder, monkeypatch, capsys):
    def refuse(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_rl.envs.video.VideoFile.add", refuse)
    model, _ = trained(lrl.Video())
    assert model.env_steps == 96 and "a video could not be written, the run goes on: No space left on device" in capsys.readouterr().out
