"""A run with several agents that is stopped and continued is the run that was never stopped, and its checkpoints load like any other."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from lightning_rl import A2C, DQN, GRU, LSTM, POCA, PPO, SAC, SettingError, Trainer, evaluate, load_policy
from lightning_rl.algorithms.algorithm import Algorithm
from tests.training.test_resuming import StopAt, assert_equal_runs, run

PAST = {"self_play": {"window": 2, "save_steps": 24, "opponents": ["random"]}}
TEAMS = {"self_play": {**PAST["self_play"], "teams": ["red_*", "blue_*"]}}
STAGES = {
    "curriculum": [
        {"value": 5.0, "completion_criteria": {"threshold": -1e6, "min_lesson_length": 6, "require_reset": True}},
        {
            "value": {"sampler_type": "uniform", "sampler_parameters": {"min_value": 2, "max_value": 6}},
            "completion_criteria": {"threshold": 1e6, "min_lesson_length": 30},
        },
        {"value": 6.0},
    ],
    "replay_old_lessons": 0.3,
}
LESSONS = {"parameters": {"length": STAGES}}
"""Interrupted in the second lesson, whose episodes have a length of their own."""
RATED = [{"value": 4.0, "completion_criteria": {"measure": "Elo", "threshold": 1200.2}}, {"value": 6.0}]
CASES = [
    pytest.param(PPO, "tests.agents.Together", {"env": LESSONS}, id="PPO lessons"),
    pytest.param(PPO, "tests.agents.Sealed", {"env": LESSONS, "memory": LSTM(8, 4)}, id="PPO lessons replayed", marks=pytest.mark.slow),
    pytest.param(SAC, "tests.agents.InTurn", {"env": LESSONS}, id="SAC lessons in turn"),
    pytest.param(POCA, "tests.agents.Together", {"env": LESSONS}, id="POCA lessons", marks=pytest.mark.slow),
    pytest.param(PPO, "tests.agents.InTurn", {"env": {"parameters": {"length": {"curriculum": RATED}}}, **PAST}, id="PPO lessons by Elo"),
    pytest.param(PPO, "tests.agents.MaskedInfo", {"memory": GRU(8, 4), **PAST}, id="PPO self-play GRU"),
    pytest.param(PPO, "tests.agents.Together", {"normalize_obs": "running", **PAST}, id="PPO self-play parallel"),
    pytest.param(DQN, "pettingzoo.classic.tictactoe_v3", PAST, id="DQN self-play tictactoe"),
    pytest.param(POCA, "tests.agents.MortalSquads", {"memory": GRU(8, 4), "normalize_obs": "running", **TEAMS}, id="POCA teams GRU"),
    pytest.param(PPO, "tests.agents.FallenSquads", {"env": LESSONS, **TEAMS}, id="PPO teams lessons"),
    pytest.param(SAC, "tests.agents.MortalSquads", TEAMS, id="SAC teams", marks=pytest.mark.slow),
    pytest.param(A2C, "tests.agents.Elimination", PAST, id="A2C self-play", marks=pytest.mark.slow),
    pytest.param(SAC, "tests.agents.Elimination", PAST, id="SAC self-play", marks=pytest.mark.slow),
    pytest.param(PPO, "tests.agents.Visited", {"normalize_obs": "running", "normalize_reward": True}, id="PPO parallel"),
    pytest.param(PPO, "tests.agents.MaskedInfo", {"memory": GRU(8, 4)}, id="PPO in turn GRU"),
    pytest.param(PPO, "tests.agents.Sealed", {"memory": LSTM(8, 4)}, id="PPO replayed LSTM", marks=pytest.mark.slow),
    pytest.param(PPO, "tests.agents.Visited", {"threaded": True}, id="PPO threaded", marks=pytest.mark.slow),
    pytest.param(PPO, "mpe2.simple_spread_v3", {"max_env_steps": 336}, id="PPO simple_spread"),
    pytest.param(PPO, "pettingzoo.classic.connect_four_v3", {"memory": GRU(8, 4)}, id="PPO connect_four", marks=pytest.mark.slow),
    pytest.param(POCA, "tests.agents.Visited", {"normalize_obs": "running", "normalize_reward": True}, id="POCA deaths"),
    pytest.param(POCA, "tests.agents.Mortal", {"memory": LSTM(8, 4)}, id="POCA LSTM", marks=pytest.mark.slow),
    pytest.param(SAC, "tests.agents.Continuous", {"memory": GRU(8, 4)}, id="SAC parallel GRU"),
    pytest.param(SAC, "tests.agents.Elimination", {}, id="SAC in turn", marks=pytest.mark.slow),
    pytest.param(DQN, "tests.agents.MaskedTogether", {"n_steps": 3, "replay": {"prioritized": True}}, id="DQN parallel"),
    pytest.param(DQN, "tests.agents.InTurn", {}, id="DQN in turn", marks=pytest.mark.slow),
    pytest.param(DQN, "pettingzoo.classic.tictactoe_v3", {}, id="DQN tictactoe", marks=pytest.mark.slow),
]


@pytest.mark.variants("PPO self-play parallel")
@pytest.mark.parametrize(("algorithm", "env_id", "settings"), CASES)
def test_a_run_of_agents_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, env_id, settings, tmp_path, capsys):
    settings = dict(settings)
    env = {"id": env_id, **settings.pop("env", {})}
    expected = run(tmp_path / "whole", algorithm, env, settings)
    for seed, stop in ((1, StopAt(2)), (5, StopAt(4, "evaluation"))):
        run(tmp_path / "parts", algorithm, env, settings, seed, stop, "last")
    found = run(tmp_path / "parts", algorithm, env, settings, 99, None, "last")
    assert "start new episodes" not in capsys.readouterr().out
    assert_equal_runs(expected, found)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The last checkpoints of a run of agents at once, and of one in turn."""
    files = {}
    for name in ("MaskedTogether", "MaskedInTurn"):
        root = tmp_path_factory.mktemp(name)
        _, folder = run(root, PPO, {"id": f"tests.agents.{name}"}, {"memory": GRU(8, 4)}, steps=64)
        files[name] = folder / "checkpoints" / "last.ckpt"
    return files


NAMES = pytest.mark.parametrize("name", ["MaskedTogether", "MaskedInTurn"])


@NAMES
def test_an_algorithm_comes_back_from_its_file_alone(made, name):
    stored = torch.load(made[name], weights_only=True)
    model = Algorithm.load_from_checkpoint(made[name])
    assert isinstance(model, PPO) and model.spaces.one_learns == (name == "MaskedInTurn")
    assert model.spaces.agents == (("p0", "p1", "p2") if model.spaces.one_learns else ("a", "b"))
    assert model.num_envs == (2 if model.spaces.one_learns else 4) and model.spaces.masked
    assert all(torch.equal(weight, stored["state_dict"][key]) for key, weight in model.state_dict().items())


@NAMES
def test_a_policy_acts_for_any_agent(made, name):
    policy = load_policy(made[name])
    obs = np.array([[0, 1], [1, 2], [0, 3]], np.float32)
    mask = np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]], bool)
    obs = {"observation": obs} if policy.spaces.masked and name == "MaskedInTurn" else obs
    action, memory = policy.act(obs, action_mask=mask)
    assert action.tolist() == [0, 2, 1] and len(memory)


@NAMES
def test_a_checkpoint_is_evaluated_and_validated_on_its_own_environment(made, name, tmp_path, capsys):
    result = evaluate(made[name], episodes=3, seed=0)
    assert result["episodes"] == 3 and result == evaluate(made[name], episodes=3, seed=0)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    metrics = trainer.validate(Algorithm.load_from_checkpoint(made[name]))
    assert np.isfinite(metrics[0]["eval/mean_reward"])


def rewritten(source, target, **env):
    content = torch.load(source, weights_only=True)
    content["hyper_parameters"]["env"].update(env)
    torch.save(content, target)
    return target


@pytest.mark.variants
@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("evil_module.env", "names the module 'evil_module'; if you trust it, add --import evil_module"),
        ("os.system", "names 'os' as a module of an environment or wrapper, which it is not: do not trust it"),
        ("torch.load", "names torch.load as its environment, which is part of a library; pass env yourself"),
        ("torch.hub.load", "names torch.hub.load as its environment, which is part of a library"),
        ("lightning_rl.cli.main.main", "names lightning_rl.cli.main.main as its environment, which is part of a library"),
        ("gymnasium.make", "names gymnasium.make as its environment, which is part of a library"),
        ("pettingzoo.classic.evil.connect_four_v3", "names the module 'pettingzoo.classic.evil'"),
        ("pettingzoo.utils.wrappers.BaseWrapper", "part of a library"),
    ],
)
def test_a_file_cannot_name_what_is_called(made, env_id, line, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = rewritten(made["MaskedTogether"], tmp_path / "a.ckpt", id=env_id)
    for use in (load_policy, Algorithm.load_from_checkpoint, lambda path: evaluate(path, episodes=1)):
        with pytest.raises(SettingError) as refused:
            use(path)
        assert line in str(refused.value) and "\n" not in str(refused.value)
    assert "evil_module" not in sys.modules


def test_a_file_may_name_environments_of_pettingzoo_and_modules_that_are_imported(made, tmp_path):
    for env_id in ("pettingzoo.classic.connect_four_v3", "mpe2.simple_spread_v3", "tests.agents.Mortal"):
        model = Algorithm.load_from_checkpoint(rewritten(made["MaskedTogether"], tmp_path / "a.ckpt", id=env_id))
        assert model.env.id == env_id


@pytest.mark.thorough
def test_a_run_resumes_with_more_copies_in_new_episodes(tmp_path, capsys):
    run(tmp_path, PPO, {"id": "tests.agents.Mortal"}, {}, stop=StopAt(3))
    capsys.readouterr()
    model, _ = run(tmp_path, PPO, {"id": "tests.agents.Mortal", "num_envs": 4}, {"n_steps": 4}, ckpt_path="last")
    assert "environments start new episodes: the checkpoint has 1 x 4 (ranks x env.num_envs x agents), not 1 x 8" in capsys.readouterr().out
    assert model.env_steps >= 192
