"""`lightning-rl compare`, from the command line to the page."""

from __future__ import annotations

import base64
import re
import shutil
import struct
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from pytorch_lightning import seed_everything

import lightning_rl as lrl
from lightning_rl import PPO, EnvConfig, SettingError, Trainer
from lightning_rl.reports.figures import draw_diagnostics, line_styles, make_figure, png
from lightning_rl.reports.groups import make_sections
from lightning_rl.reports.runs import find_runs
from tests.command_line import TINY, run
from tests.reports.folders import write_run


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Bootstraps of a fraction of the time; what they come to is the subject of test_tables.py."""
    monkeypatch.setattr("lightning_rl.reports.tables.REPS", 50)


@pytest.fixture
def two_groups(folder):
    """Five seeds of PPO that end at 0, 10, 20, 90 and 1,000, two of A2C that end at 15 and 30."""
    for seed, final in enumerate((0, 90, 20, 1000, 10)):
        seconds = {100: 1.0 + seed, 200: 60.0 * (1 + seed)}
        write_run(folder / f"PPO/v{seed}", {100: [5, 15], 200: [final, final]}, seed=seed, seconds=seconds)
    for seed, final in enumerate((15, 30)):
        write_run(folder / f"A2C/v{seed}", {100: [20], 200: [final]}, seed=seed, algorithm="A2C", seconds={200: 100.0})
    return folder


def test_the_tables_hold_numbers_worked_by_hand(two_groups, capfd):
    status, out, err = run("compare PPO A2C --threshold 20", capfd)
    assert (status, err) == (0, "") and not list(two_groups.glob("*.*"))
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["CartPole-v1"]
    final, until = [line for line in lines if line[0] == "PPO"]
    # IQM (10 + 20 + 90) / 3; the median run took 180 seconds
    assert final[:4] == ["PPO", "5", "200", "40"] and final[5:] == ["0 – 1,000.0", "3.0 min"]
    # 20, 90 and 1,000 reach 20, at 200 steps, after 120, 180 and 240 seconds; the others count as slower: the median of five is the third
    assert until == ["PPO", "3 of 5", "200", "200", "4.0 min", "2.0 min – 4.0 min"]
    # both of A2C are there at 100 steps, whose first row of metrics.csv is that of 200
    assert [line for line in lines if line[0] == "A2C"][1] == ["A2C", "2 of 2", "100", "100", "100.0 s", "100.0 s"]
    # 20 beats 15; 90 and 1,000 beat both: 5 of 10 pairs
    (improvement,) = [line for line in lines if line[0] == "PPO over A2C"]
    assert improvement[1] == "0.50"
    assert ["PPO/v3", "PPO", "3", "200", "1,000.0"] in lines


def test_a_threshold_that_no_run_reaches_has_no_time(two_groups, capfd):
    status, out, err = run("compare A2C --threshold 1e3", capfd)
    assert (status, err) == (0, "")
    assert "Until a mean return of 1,000, median of the seeds" in out
    assert [line.split() for line in out.splitlines() if "0 of 2" in line] == [["A2C", "0", "of", "2", "–", "–", "–", "–"]]


@pytest.mark.thorough
def test_the_page_stands_alone_and_is_the_same_each_time(two_groups, capfd):
    write_run(two_groups / "alone", {100: [3], 300: [4]}, env="Mine<b>-v0")
    status, out, err = run("compare PPO A2C alone --threshold 50 --out report.html", capfd)
    assert (status, err) == (0, "") and out.endswith("report: report.html, picture: report.png\n")
    page, picture = (two_groups / "report.html").read_text(), (two_groups / "report.png").read_bytes()
    assert "<script" not in page and "<link" not in page and not re.search(r'src="(?!data:image/png;base64,)|="(https?:)?//', page)
    assert '<a href="PPO/v0">PPO/v0</a>' in page
    assert "Mine&lt;b&gt;-v0" in page and "<b>" not in page and page.index("<img") < page.index("<table")
    assert "PPO has one seed: there is no interval." in page and "PPO over A2C" in page
    pictures = [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    sizes = [struct.unpack(">II", each[16:24]) for each in [*pictures, picture]]
    assert len(pictures) == 2 and {width for width, _ in sizes} == {960} and sizes[2][1] == pytest.approx(sizes[0][1] + sizes[1][1], abs=2)
    assert run("compare PPO A2C alone --threshold 50 --out report.html", capfd)[0] == 0
    assert ((two_groups / "report.html").read_text(), (two_groups / "report.png").read_bytes()) == (page, picture)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "the following arguments are required: RUN"),
        ("nowhere", "nowhere: there is no such folder"),
        ("empty", "empty: there is no run in it"),
        ("begun", "begun: neither evaluations.csv nor metrics.csv has a return in it"),
        ("PPO --out nowhere/report.html", "there is no folder nowhere"),
        ("PPO --out report.pdf", "ends in .html"),
        ("PPO --out folder.html", "folder.html is a folder"),
        ("PPO --threshold much", "invalid float value: 'much'"),
        ("PPO --threshold nan", "--threshold must be a number, got nan"),
        ("''", "'' is not a folder; name the folder of a run"),
        ("PPO/v0/config.yaml", "PPO/v0/config.yaml is a file; name the folder of a run, PPO/v0"),
        ("report.txt", "report.txt is a file; name the folder of a run, or a folder of runs such as runs/PPO/CartPole-v1"),
        ("PPO --out ''", "--out '' is not a file; name one that ends in .html"),
        ("PPO --treshold 3", "did you mean --threshold?"),
        ("a" * 300, f"the folder '{'a' * 60}'… is too long for a path"),
        (f"PPO --out {'a' * 300}.html", f"--out '{'a' * 60}'… is too long for a path"),
    ],
)
def test_wrong_input_is_reported_in_one_line(arguments, said, two_groups, capfd):
    write_run(two_groups / "begun", {})
    (two_groups / "empty").mkdir()
    (two_groups / "report.txt").touch()
    (two_groups / "folder.html").mkdir()
    status, out, err = run(f"compare {arguments}", capfd)
    assert (status, out) == (2, "") and err.startswith("error: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(("package", "arguments"), [("rliable", ""), ("matplotlib.figure", "--out report.html")])
def test_a_missing_package_names_its_extra(package, arguments, two_groups, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    status, out, err = run(f"compare PPO {arguments}", capfd)
    assert (status, out) == (2, "") and 'pip install "lightning_rl[plots]"' in err and err.count("\n") == 1


@pytest.mark.thorough
def test_a_run_that_has_no_returns_yet_is_left_out_of_its_folder_and_named(two_groups, capfd):
    write_run(two_groups / "PPO/v9", {})
    status, out, err = run("compare PPO --out report.html", capfd)
    assert (status, err) == (0, "") and "PPO/v9 is left out: it has no returns yet." in out
    assert "PPO/v9 is left out: it has no returns yet." in (two_groups / "report.html").read_text()


def long_named(folder):
    """Two groups of two seeds whose settings fill a line of 200 characters."""
    for seed in (0, 1):
        settings = {"clip_range": linear(0.2), "learning_rate": linear(0.001), "n_epochs": 20, "gae_lambda": 0.8, "ent_coef": 0.01}
        write_run(folder / f"a/v{seed}", {100: [1], 200: [2 + seed]}, seed=seed, **settings)
        settings = {"clip_range": 0.2, "n_epochs": 10, "memory": {"class_path": "lightning_rl.LSTM", "init_args": {"memory_size": 64}}}
        write_run(folder / f"b/v{seed}", {100: [1], 200: [3 + seed]}, seed=seed, **settings)


def linear(start):
    return {"schedule": "linear", "start": start, "end": 0.0}


def test_groups_with_long_names_have_a_key(folder, capfd):
    long_named(folder)
    status, out, err = run("compare a b", capfd)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) < 120
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    start = lines.index(["Groups of PPO, by the settings in which they differ"])
    assert lines[start + 1 : start + 9] == [
        ["PPO 1", "PPO 2"],
        ["clip_range", "linear 0.2→0", "0.2"],
        ["ent_coef", "0.01", "–"],
        ["gae_lambda", "0.8", "–"],
        ["learning_rate", "linear 0.001→0", "0.0003"],
        ["memory", "–", "LSTM"],
        ["memory.memory_size", "–", "64"],
        ["n_epochs", "20", "10"],
    ]
    assert [line[:2] for line in lines if line[0] in ("PPO 1", "PPO 1 over PPO 2")][1:] == [["PPO 1", "2"], ["PPO 1 over PPO 2", "0.12"]]


def boxes(figure):
    """Where each panel's curves, and all else of it, and its legend lie in the picture, from the top down."""
    figure.draw_without_rendering()
    for panel in figure.subfigs:
        (axes,), (legend,) = panel.axes, panel.legends
        yield axes.get_window_extent(), axes.get_tightbbox(), legend.get_window_extent()


@pytest.mark.variants
@pytest.mark.parametrize("environments", [1, 3])
@pytest.mark.parametrize("named", ["long", "short"])
def test_each_panel_and_each_legend_have_a_place_of_their_own(environments, named, folder):
    for environment in range(environments):
        for algorithm in ("PPO", "A2C"):
            settings = {"clip_range": linear(0.2), "n_epochs": 20, "gae_lambda": 0.8} if named == "long" else {}
            for k, given in enumerate(({}, settings)):
                write_run(
                    folder / f"{environment}{algorithm}{k}", {100: [1], 200: [2]}, env=f"E{environment}", algorithm=algorithm, **given
                )
    figure = make_figure(sections := make_sections(find_runs([folder])[0]), line_styles(sections), None)
    width, top = figure.bbox.width, figure.bbox.height
    places = list(boxes(figure))
    assert len(places) == environments
    for curves, panel, legend in places:
        assert curves.height > 250 and curves.width > 700
        assert panel.y1 <= top and legend.y1 <= panel.y0 and 0 <= legend.x0 < legend.x1 <= width
        assert top - panel.y1 < 60  # no blank margin
        top = legend.y0
    assert 0 <= top < 60


def test_a_report_of_training_names_its_returns_as_such(folder, capfd):
    write_run(folder / "a", {100: [1]}, training={100: 3.0}, seed=1)
    write_run(folder / "b", training={100: 7.0}, algorithm="A2C")
    status, out, err = run("compare a b --threshold 2", capfd)
    assert (status, err) == (0, "") and "valuation" not in out.replace("b has no evaluations.", "")
    lines = out.splitlines()
    assert "Final mean return of training, last 100 episodes" in lines
    assert "Until a mean return of training of 2, median of the seeds" in lines
    assert "Probability of improvement, by the final mean return of training" in lines
    sections = make_sections(find_runs([folder])[0])
    axes = make_figure(sections, line_styles(sections), None).subfigs[0].axes[0]
    assert axes.get_ylabel() == "mean return of training, last 100 episodes"


def test_a_curve_of_few_points_shows_them_and_one_of_a_single_point_is_seen(folder):
    many = {count: [1] for count in range(1, 32)}
    write_run(folder / "a", {100: [1]})
    write_run(folder / "b", many, algorithm="A2C")
    write_run(folder / "c", dict(list(many.items())[1:]), algorithm="DQN")
    sections = make_sections(find_runs([folder])[0])
    lines = make_figure(sections, line_styles(sections), None).subfigs[0].axes[0].lines
    assert [(len(line.get_xdata()), line.get_marker()) for line in lines] == [(1, "o"), (31, "None"), (30, "o")]


def test_the_legend_explains_lines_and_bands(two_groups):
    for runs, said in ((["PPO", "A2C"], "line: interquartile mean of the seeds; band: its 95 % interval"), (["PPO/v0"], "")):
        sections = make_sections(find_runs(map(Path, runs))[0])
        (legend,) = make_figure(sections, line_styles(sections), None).subfigs[0].legends
        assert legend.get_title().get_text() == said


@pytest.mark.thorough
def test_real_runs_go_the_whole_way_however_they_were_started(folder, capfd):
    fit = f"fit --model.env.id CartPole-v1 {TINY} --model.max_env_steps 320 --evaluation.every_n_env_steps 64"
    assert run(f"{fit} --seed_everything 1", capfd)[0] == 0
    seed_everything(3)
    model = PPO(EnvConfig("CartPole-v1", num_envs=2), n_steps=16, batch_size=32, n_epochs=1, net_arch=[8], max_env_steps=320)
    Trainer(accelerator="cpu", evaluation={"episodes": 2, "every_n_env_steps": 64, "max_episode_steps": 20}).fit(model)
    status, out, err = run("compare runs/PPO/CartPole-v1 --threshold 5 --out report.html", capfd)
    assert (status, err) == (0, "")
    assert re.search(r"^  PPO +2 +320 ", out, re.MULTILINE) and re.search(r"^  PPO +2 of 2 ", out, re.MULTILINE)
    assert re.search(r"version_1 +PPO +3 +320 ", out)
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["$\\frac{$", "$$", "a\\$b$", "<i>$x$</i>", "{x:}%s", "Ω\udcff"], ids=ascii)
def test_names_are_shown_as_they_are_whatever_their_letters(name, folder, capfd):
    write_run(folder / "one", {100: [1], 200: [2]}, encoder=name, env=f"{name}-v0")
    write_run(folder / "other", {100: [1], 200: [2]}, seed=1, env=f"{name}-v0")
    status, _, err = run("compare . --out report.html", capfd)
    assert (status, err) == (0, "") and (folder / "report.png").stat().st_size > 10_000
    page = (folder / "report.html").read_text()
    assert escape(f"encoder={name}".replace("\udcff", "\\udcff")) in page


@pytest.mark.thorough
def test_a_dollar_is_no_formula_in_a_picture(folder, capfd):
    pixels = []
    for name in ("$a_b$", "a_b"):
        write_run(folder / "run", {100: [1], 200: [2]}, env=f"{name}-v0")
        figure = make_figure(sections := make_sections(find_runs([folder / "run"])[0]), line_styles(sections), None)
        png(figure)
        (title,) = [text for text in figure.findobj(Text) if text.get_text() == f"{name}-v0"]
        pixels.append(title.get_window_extent().width)
        shutil.rmtree(folder / "run")
    assert pixels[0] > pixels[1]  # two dollars wider; a formula is narrower


def test_videos_of_a_run_are_linked_from_where_the_page_lies(two_groups, capfd):
    (two_groups / "A2C/v0/videos").mkdir()
    (two_groups / "A2C/v0/videos/a b.mp4").touch()
    (two_groups / "pages").mkdir()
    assert run("compare A2C --out pages/report.html", capfd)[0] == 0
    assert '<a href="../A2C/v0/videos/a%20b.mp4">a b.mp4</a>' in (two_groups / "pages/report.html").read_text()


@pytest.mark.thorough
def test_diagnostics_are_drawn_on_demand_for_runs_that_have_them(two_groups, capfd):
    (two_groups / "A2C/v0/metrics.csv").write_text("env_steps,train/entropy_loss,train/approx_kl\n100,-0.5,\n200,-0.4,0.01\n")
    pages = []
    for option in ("", "--diagnostics"):
        assert run(f"compare A2C PPO {option} --out report.html", capfd)[0] == 0
        pages.append((two_groups / "report.html").read_text())
    assert [page.count("<summary>Diagnostics</summary>") for page in pages] == [0, 1]
    sections = make_sections(find_runs([two_groups / "A2C"])[0])
    panels = [axes for axes in draw_diagnostics(sections[0], line_styles(sections)).axes if axes.get_visible()]
    assert [axes.get_title("left") for axes in panels] == ["train/approx_kl", "train/entropy_loss"]
    (entropy,) = [line for line in panels[1].lines if len(line.get_xdata())]
    assert (list(entropy.get_xdata()), list(entropy.get_ydata())) == ([100, 200], [-0.5, -0.4])


@pytest.mark.thorough
def test_diagnostics_have_gaps_where_a_run_went_on_after_nan(two_groups, capfd):
    (two_groups / "A2C/v0/metrics.csv").write_text("env_steps,train/value_loss\n100,0.5\n200,inf\n300,nan\n400,0.25\n")
    status, _, err = run("compare A2C --diagnostics --out report.html", capfd)
    assert (status, err) == (0, "")
    sections = make_sections(find_runs([two_groups / "A2C"])[0])
    panel = draw_diagnostics(sections[0], line_styles(sections)).axes[0]
    (line,) = [line for line in panel.lines if len(line.get_xdata())]
    np.testing.assert_equal(list(line.get_ydata()), [0.5, np.nan, np.nan, 0.25])


def test_a_page_that_cannot_be_made_leaves_no_picture(two_groups, capfd):
    (two_groups / "A2C/v0/metrics.csv").write_text("env_steps,train/value_loss\n100,much\n")
    status, _, err = run("compare A2C --diagnostics --out report.html", capfd)
    assert (status, err.count("\n")) == (2, 1) and not [*two_groups.glob("report.*")]


@pytest.mark.thorough
def test_python_gets_the_figure_and_the_tables_of_the_command_line(two_groups, capfd):
    _, out, _ = run("compare A2C PPO --threshold 5", capfd)
    report = lrl.compare("A2C", Path("PPO"), threshold=5)
    assert f"{report}\n" == out
    assert [axes.get_title("left") for panel in report.figure.subfigs for axes in panel.axes] == ["CartPole-v1"]
    assert report.tables[0].title == "Final evaluation, mean return" and report._repr_png_().startswith(b"\x89PNG")
    report.write("report.html")
    assert (two_groups / "report.png").exists()
    with pytest.raises(SettingError, match="there is no such folder"):
        lrl.compare("nowhere")
    with pytest.raises(SettingError, match="compare takes folders one by one"):
        lrl.compare(["A2C", "PPO"])
