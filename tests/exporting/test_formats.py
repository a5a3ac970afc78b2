"""Every algorithm with every kind of observation and action, with masks and with memory: what a file does is what the policy does."""

from __future__ import annotations

import pytest

from lightning_rl import A2C, DQN, GRU, IMPALA, IQL, LSTM, POCA, PPO, SAC, TD3, BehavioralCloning, EvolutionStrategies, export_policy
from tests.environments import Anything, Choosy
from tests.exporting.exported import play_both, save
from tests.fitting import tiny

SETTINGS = {
    PPO: [{}, {"normalize_obs": "running", "share_encoder": False}, {"action_dist": "tanh_normal"}, {"value_support": [-5, 5]}],
    A2C: [{}],
    IMPALA: [{}],
    POCA: [{}],
    SAC: [{}, {"normalize_obs": "frozen", "normalize_obs_steps": 32}],
    DQN: [
        {},
        {"dueling": True},
        {"noisy": True, "dueling": True, "distribution": "c51"},
        {"distribution": "quantiles", "normalize_obs": "running"},
    ],
    TD3: [{}, {"normalize_obs": "running"}],
    EvolutionStrategies: [{}, {"normalize_obs": "running"}],
    IQL: [{}],
    BehavioralCloning: [{}],
}
ACTIONS = {DQN: ["discrete"], TD3: ["box"]}
MEMORIES = {"none": None, "lstm": LSTM(8, 4), "gru": GRU(8, 4)}


def cases():
    """Each algorithm with each observation, each action, each memory and each of its settings: not all at once, but each in turn."""
    for algorithm, settings in SETTINGS.items():
        actions = ACTIONS.get(algorithm, list(Anything.action_spaces))
        observations, memories = list(Anything.observation_spaces), list(MEMORIES)
        for i in range(max(len(actions), len(observations), 2 * len(settings))):
            action, observation = actions[i % len(actions)], observations[i % len(observations)]
            chosen = settings[i % len(settings)]
            if chosen.get("action_dist") and action in ("discrete", "multi-discrete", "multi-binary"):
                action = "box"
            yield algorithm, "Anything-v0", {"observation": observation, "action": action}, chosen, memories[(i + i // 3) % 3]
        for i, action in enumerate(action for action in Choosy.action_spaces if action in actions):
            yield algorithm, "Choosy-v0", {"way": ("info", "key")[i % 2], "action": action}, settings[-1], memories[i % 3]
        crowd = "CrowdBox-v0" if algorithm is TD3 else "Crowd-v0"
        yield algorithm, crowd, {}, {**settings[-1], "entities": ["agents"], "goals": ["goal"]}, "lstm"


def name(case):
    algorithm, env_id, kwargs, settings, memory = case
    return "-".join([algorithm.__name__, env_id.removesuffix("-v0"), *map(str, kwargs.values()), *settings, memory])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("case", cases(), ids=name)
def test_an_exported_file_does_the_same_as_the_policy(case, format, tmp_path):
    algorithm, env_id, kwargs, settings, memory = case
    length = {} if algorithm.counter == "updates" else {"max_env_steps": 32}
    own = {"encoder_features": 8, "memory": MEMORIES[memory], **length, **settings}
    model = tiny(algorithm, f"tests.environments:{env_id}", env={"kwargs": kwargs}, **own)
    path = export_policy(save(model, tmp_path / "a.ckpt"), format=format)
    difference, others = play_both(tmp_path / "a.ckpt", path, rows=20, steps=10)
    assert difference <= 1e-4 and others == 0  # 1e-5 of the widest dimension, which is 10
