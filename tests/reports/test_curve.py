"""A run's own learning curve."""

from __future__ import annotations

import os
import sys

import pytest
import yaml

from lightning_rl import PPO, PlotCurve, SettingError, Trainer
from lightning_rl.callbacks import recording
from tests.command_line import TINY, run
from tests.fitting import tiny, weights

RUN = "runs/PPO/CartPole-v1/version_0"


def trained(folder, **arguments):
    model = tiny(PPO, "CartPole-v1")
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation={"episodes": 1, "every_n_env_steps": 48}, **arguments)
    trainer.fit(model)
    return model, trainer


def test_the_curve_is_drawn_at_each_evaluation_with_what_the_files_hold(folder, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        recording, "png", lambda figure: drawn.append({each.get_label(): each.get_xdata() for each in figure.axes[0].lines}) or b""
    )
    trained(folder, plot=True)
    assert [{name: list(counts) for name, counts in each.items()} for each in drawn] == [
        {"training": [48], "evaluations": [48]},
        {"training": [48, 64, 80, 96], "evaluations": [48, 96]},
    ]


@pytest.mark.thorough
def test_a_run_learns_the_same_with_and_without_its_curve_which_needs_no_pyplot(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plain, one = trained(folder)
    plotted, other = trained(folder, plot=True)
    assert weights(plain).equal(weights(plotted))
    assert (other.run_folder / "curve.png").read_bytes().startswith(b"\x89PNG") and not (one.run_folder / "curve.png").exists()
    assert not any(isinstance(callback, PlotCurve) for callback in one.callbacks)


@pytest.mark.thorough
def test_plot_is_an_option_of_the_command_line_and_a_setting_of_the_trainer(folder, capfd):
    command = f"fit --model.env.id CartPole-v1 {TINY} --plot"
    status, out, err = run(f"{command} --print_config", capfd)
    assert (status, err) == (0, "") and yaml.safe_load(out)["trainer"]["plot"] is True
    assert run(command, capfd)[::2] == (0, "")
    assert (folder / RUN / "curve.png").is_file()
    assert yaml.safe_load((folder / RUN / "config.yaml").read_text())["trainer"]["plot"] is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--plot --evaluation null", "trainer.plot draws at evaluations, and this run has none"),
        ("--plot maybe", "trainer.plot"),
    ],
)
def test_a_curve_that_cannot_be_drawn_is_refused_before_the_first_step(options, said, folder, capfd):
    tiny_run = TINY.replace("--evaluation.episodes 2 --evaluation.num_envs 2 --evaluation.max_episode_steps 20", "")
    status, _, err = run(f"fit --model.env.id CartPole-v1 {tiny_run} {options}", capfd)
    assert status == 2 and said in err and err.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r'trainer.plot needs the package matplotlib.*"lightning_rl\[plots\]"'):
        trained(folder, plot=True)


@pytest.mark.thorough
def test_a_failing_disk_for_the_picture_does_not_end_the_run(folder, monkeypatch, capsys):
    def refuse(path, content):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(recording, "write_bytes", refuse)
    model, _ = trained(folder, plot=True)
    assert model.env_steps == 96
    assert "curve.png could not be written, the run goes on: No space left on device" in capsys.readouterr().out
