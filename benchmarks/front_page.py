"""The picture and the animation of the README.

    python benchmarks/install.py --peers ours sb3
    python benchmarks/front_page.py [--seeds 5] [--folder runs/front_page]

PPO with the settings of rl-baselines3-zoo on CartPole, ours and Stable-Baselines3's, evaluated alike; and a policy of `ppo/lunarlander`.
What is there already is not made again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
from install import python_of

import lightning_rl as lrl

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "images"
GREY = "#999999"
ZOO = ("--model.env.num_envs", "8", "--model.n_epochs", "20", "--model.learning_rate", "{schedule: linear, start: 1e-3, end: 0}")
"""Where rl-baselines3-zoo's settings differ from those of our packaged config."""


def train(folder: Path, seeds: int) -> None:
    """Train what the picture and the animation show."""
    for seed in range(1, seeds + 1):
        ours = [sys.executable, "-m", "lightning_rl", "fit", "--config", "ppo/cartpole", *ZOO, "--seed_everything", str(seed)]
        ours += ["--evaluation.every_n_env_steps", "5000", "--evaluation.episodes", "10", "--trainer.run_name", str(seed)]
        peer = [python_of("sb3"), "-m", "peers.curve_sb3", "--seed", str(seed), "--folder", folder / "sb3" / str(seed)]
        if not (folder / "ours/PPO/CartPole-v1" / str(seed)).exists():
            subprocess.run([*ours, "--trainer.default_root_dir", folder / "ours"], check=True)
        if not (folder / "sb3" / str(seed)).exists():
            subprocess.run(peer, check=True, cwd=HERE, env=os.environ | {"PYTHONPATH": str(HERE)})
    if not (folder / "lander").exists():
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", "ppo/lunarlander", "--seed_everything", "1"]
        subprocess.run([*command, "--trainer.default_root_dir", folder / "lander"], check=True)


def draw(folder: Path) -> None:
    """Draw the curves, the peer's in grey."""
    figure = lrl.compare(folder / "ours", folder / "sb3").figure
    for panel in figure.subfigs:
        for axes in panel.axes:
            for artist in axes.lines[len(axes.lines) // 2 :] + axes.collections[1:]:  # its line, band and edges come second
                artist.set_color(GREY)
            axes.set_title("PPO on CartPole-v1, settings of rl-baselines3-zoo", loc="left")
    for legend in [legend for panel in figure.subfigs for legend in panel.legends]:
        legend.legend_handles[-1].set_color(GREY)
    figure.set_size_inches(8, 4)
    figure.savefig(IMAGES / "curves.png", dpi=110)


def animate(folder: Path) -> None:
    """Record an episode, and make an animation of 15 pictures a second from it."""
    video, (best,) = folder / "lander.mp4", folder.glob("lander/PPO/*/*/checkpoints/best.ckpt")
    record = [sys.executable, "-m", "lightning_rl", "record", "--ckpt_path", best, "--out", video, "--seed", "3"]
    subprocess.run(record, check=True)
    colors = "fps=15,scale=300:-1:flags=lanczos,split[a][b];[a]palettegen=max_colors=48[p];[b][p]paletteuse=dither=none"
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", "-i", video, "-vf", colors, IMAGES / "lander.gif"]
    subprocess.run(ffmpeg, check=True)


def main() -> None:
    """Train, draw and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/front_page"))
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    train(options.folder.resolve(), options.seeds)
    draw(options.folder.resolve())
    animate(options.folder.resolve())


if __name__ == "__main__":
    main()
