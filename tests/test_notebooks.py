"""The notebooks run from top to bottom, and hold no outputs but their small curves."""

import re
from itertools import groupby
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
SHOWN = {
    "01_quickstart": {"'return_mean': ": (300, 500)},
    "02_write_an_algorithm": {r"REINFORCE over A2C +": (0, 1)},
    "03_rewards_memory_curriculum": {
        "'without rnd': ": (0, 0.1),
        "'with rnd': ": (0.5, 1),
        "'without': ": (-10, 0.5),
        "'with a memory': ": (0.9, 1.02),
        "'in lessons': ": (300, 500),
    },
    "04_many_processes": {"'largest difference': ": (0, 1e-6)},
    "05_connect_four": {"'random moves': ": (0.8, 1), "'two_ply': ": (0.05, 1)},
    "06_your_own_environment": {r"'random': {'return': ": (-2, 0), r"'learned': {'return': ": (0.7, 1)},
    "07_tuning": {"found: mean return ": (100, 500), "defaults: mean return ": (9, 400)},
    "08_several_agents": {"'one policy': ": (0.85, 1), "'PPO and DQN': ": (0.7, 1)},
}
"""Each, and numbers that it must have come to show, with their bounds."""
MAX_BYTES = 150_000
WITHOUT_CURVES = ("04_many_processes",)


def test_all_notebooks_are_executed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_small_and_holds_only_its_curves(name):
    file = FOLDER / f"{name}.ipynb"
    cells = nbformat.read(file, as_version=4).cells
    assert 0 < len(cells) <= 15 and file.stat().st_size < MAX_BYTES
    assert all(cell.get("execution_count") is None for cell in cells)
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert all(output.output_type == "display_data" and {*output.data} == {"image/png"} for output in outputs)
    assert outputs or name in WITHOUT_CURVES


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "\n".join(output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs)
    for what, (low, high) in SHOWN[name].items():
        assert low <= float(re.search(rf"{what}(-?[\d.]+(?:e-\d+)?)", shown)[1]) <= high, what
    assert any(tmp_path.rglob("metrics.csv"))


PROGRAM = """
import lightning_rl as lrl
from lightning_rl.callbacks import progress

class Mine(lrl.PPO):
    pass

progress.SECONDS_BETWEEN_REFRESHES = 0.0
trainer = lrl.Trainer(max_steps=5, evaluation=None)
model = Mine("CartPole-v1", max_env_steps=10**7, net_arch=[8])
trainer.fit(model)
print("at", model.env_steps)
"""


def run_cell(program, folder):
    """Run a notebook of one cell. Return it, and the kind and content of each message from its kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program)])
    messages = []

    class Client(NotebookClient):
        def process_message(self, message, cell, index):
            messages.append((message["msg_type"], message["content"]))
            return super().process_message(message, cell, index)

    Client(notebook, timeout=100, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, messages


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_a_notebook_without_ipywidgets_shows_a_bar_that_moves_and_python_to_go_on_with(tmp_path):
    notebook, shown = run_cell(PROGRAM, tmp_path)
    updates = [content["data"] for kind, content in shown if kind == "update_display_data"]
    lines, bars = ([update[form] for update in updates] for form in ("text/plain", "text/html"))
    text = "".join(content["text"] for kind, content in shown if kind == "stream")
    plain = "\n".join(content["data"]["text/plain"] for kind, content in shown if kind == "display_data")
    assert len(lines) == 5 and all(" · return " in line and " steps/s · ETA " in line for line in lines)
    assert all(bar.startswith('<progress value="') and bar.endswith(line) for line, bar in zip(lines, bars, strict=True))
    said = text + plain
    assert "ipywidgets" not in said and "💡" not in said and "GPU available" not in said and "lightning-rl fit" not in said
    assert 'continue it: trainer.fit(model, ckpt_path="runs/Mine/CartPole-v1/version_0")' in said
    assert "at 5120" in said
    outputs = [output for output in notebook.cells[0].outputs if output.get("name") != "stderr"]
    blocks = [(kind, list(found)) for kind, found in groupby(outputs, lambda output: output.output_type)]  # a page joins streams
    assert [kind for kind, _ in blocks] == ["stream", "display_data", "stream"] and len(blocks[1][1]) == 1
    summary, rest = ("".join(output.text for output in blocks[k][1]) for k in (0, 2))
    assert "\nMine on CartPole-v1, 8 copies\n  observations  Box(4)\n" in summary and "\x1b" not in summary + rest
    assert summary.endswith("  folder        runs/Mine/CartPole-v1/version_0\n") and "run: runs/Mine/CartPole-v1/version_0\n" in rest


SLOW = """
import time
import gymnasium as gym
import lightning_rl as lrl
from lightning_rl.callbacks import progress

class Slow(gym.Wrapper):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)

progress.SECONDS_OF_A_LONG_ITERATION, progress.SECONDS_BETWEEN_LOOKS = 0.1, 0.05
env = lrl.EnvConfig("CartPole-v1", num_envs=1, wrappers=[Slow])
evaluation = lrl.EvaluationConfig(every_n_env_steps=64, episodes=3, num_envs=1, max_episode_steps=20)
lrl.Trainer(evaluation=evaluation, logger=False).fit(lrl.PPO(env, n_steps=64, batch_size=64, max_env_steps=64, net_arch=[8]))
"""


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_a_notebook_shows_long_iterations_and_evaluations_while_they_last(tmp_path):
    _, shown = run_cell(SLOW, tmp_path)
    lines = [content["data"]["text/plain"] for kind, content in shown if kind == "update_display_data"]
    steps = [int(line.partition("/")[0]) for line in lines if " · iteration: " in line]
    assert steps == sorted(steps) and len({step for step in steps if 0 < step < 64}) > 1
    assert any("evaluation: 1 of 3 episodes" in line for line in lines)
