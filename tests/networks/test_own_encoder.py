"""An encoder of a user's own, from Python and from a config."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

import lightning_rl as lrl
from lightning_rl import DQN, PPO, SAC, TD3, SettingError
from lightning_rl.networks.encoders import OwnEncoder, make_encoder
from lightning_rl.types import tree_map
from tests.command_line import TINY, run
from tests.fitting import fit, tiny, weights

SPACE = Dict({"camera": Box(0, 255, (6, 6, 3), "uint8"), "speed": Box(-1, 1, (2,))})
MODULE = """
import torch
from torch import nn

class Squares(nn.Module):
    def __init__(self, space, features):
        super().__init__()
        self.layer = nn.Linear(2 * space.shape[0], features)

    def forward(self, obs):
        return self.layer(torch.cat([obs, obs**2], -1)).relu()
"""


class Camera(nn.Module):
    """Reads both observations; features are three more than asked for."""

    def __init__(self, space, features):
        super().__init__()
        self.layer = nn.Linear(6 * 6 * 3 + 2, features + 3)

    def forward(self, obs):
        assert obs["camera"].dtype == torch.uint8 and obs["camera"].dim() == 4
        return self.layer(torch.cat([obs["camera"].flatten(1) / 255, obs["speed"]], -1))


class Doubled(nn.Module):
    """Twice the observation."""

    def __init__(self, space, features):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, obs):
        return self.factor * obs


def observations(*batch):
    return {"camera": torch.randint(0, 256, (*batch, 6, 6, 3), dtype=torch.uint8), "speed": torch.randn(*batch, 2)}


def test_it_sees_batches_of_all_observations_and_its_width_is_what_it_returns():
    encoder = make_encoder(SPACE, Camera, 5)
    obs = observations(4, 3)
    encoded = encoder(obs)
    assert encoder.num_features == 8 and encoded.shape == (4, 3, 8)
    one = tree_map(lambda leaf: leaf[2, 1].unsqueeze(0), obs)
    torch.testing.assert_close(encoded[2, 1], encoder.own(one)[0])


@pytest.mark.variants
@pytest.mark.parametrize("algorithm, env", [(PPO, "CartPole-v1"), (DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
@pytest.mark.parametrize("memory", [None, lrl.LSTM(4, 4)])
def test_it_learns_in_every_network_with_and_without_memory(algorithm, env, memory):
    model = tiny(algorithm, env, encoder=Doubled, memory=memory)
    before = [(name, parameter.clone()) for name, parameter in model.named_parameters() if "own.factor" in name and parameter.requires_grad]
    fit(model)
    after = dict(model.named_parameters())
    assert before and all(parameter != after[name] for name, parameter in before)


@pytest.mark.thorough
def test_it_is_named_in_a_config_and_its_checkpoint_acts_only_where_its_module_is_imported(folder, capfd, monkeypatch):
    (folder / "my_encoders.py").write_text(MODULE)
    status, out, err = run(f"fit --model.env.id CartPole-v1 {TINY} --model.encoder my_encoders.Squares --model.encoder_features 6", capfd)
    assert (status, err) == (0, "") and "evaluate --import my_encoders --ckpt_path" in out
    best = "runs/PPO/CartPole-v1/version_0/checkpoints/best.ckpt"
    policy = lrl.load_policy(best)  # imported by the run
    assert policy.network.actor_encoder.own.layer.weight.shape == (6, 8)
    monkeypatch.delitem(__import__("sys").modules, "my_encoders")
    status, _, err = run(f"evaluate --ckpt_path {best} --episodes 1", capfd)
    assert status == 2 and "names the module 'my_encoders'" in err and "--import my_encoders" in err
    assert run(f"evaluate --import my_encoders --ckpt_path {best} --episodes 1", capfd)[0] == 0


def test_a_checkpoint_cannot_name_a_class_of_a_library(folder):
    model = tiny(PPO, "CartPole-v1", encoder=Doubled, max_env_steps=16)
    trainer = fit(model)
    model.hparams["encoder"] = "torch.nn.Linear"
    trainer.save_checkpoint(folder / "bad.ckpt")
    with pytest.raises(SettingError, match=r"names torch\.nn\.Linear as an encoder, which is part of a library"):
        lrl.load_policy(folder / "bad.ckpt")


@pytest.mark.thorough
def test_a_stopped_run_resumes_to_the_same_weights(folder):
    whole, first, second = (tiny(PPO, "CartPole-v1", encoder=Doubled) for _ in range(3))
    quiet = {"accelerator": "cpu", "evaluation": None, "enable_progress_bar": False}
    lrl.Trainer(**quiet).fit(whole)
    lrl.Trainer(**quiet, run_name="half", max_steps=3).fit(first)
    lrl.Trainer(**quiet, run_name="half").fit(second, ckpt_path="last")
    assert first.env_steps == 48 and torch.equal(weights(whole), weights(second))


@pytest.mark.thorough
def test_onnx_holds_it(tmp_path, folder):
    model = tiny(PPO, "CartPole-v1", encoder=Doubled, max_env_steps=16)
    fit(model).save_checkpoint(tmp_path / "own.ckpt")
    assert lrl.export_policy(tmp_path / "own.ckpt", tmp_path / "own.onnx").exists()  # which compares it with the policy


class Broken(nn.Module):
    def __init__(self, space):
        super().__init__()


class Flat(nn.Module):
    def __init__(self, space, features):
        super().__init__()

    def forward(self, obs):
        return obs["speed"].sum()


@pytest.mark.parametrize(
    ("encoder", "says"),
    [
        ("no_such_module.Mine", "cannot be imported: ModuleNotFoundError"),
        ("tests.networks.test_own_encoder.Camra", "there is no Camra in tests.networks.test_own_encoder; did you mean Camera?"),
        (dict, "encoder dict is not a torch.nn.Module"),
        (Broken, r"encoder Broken cannot be built with \(space, 16\) and read observations: TypeError"),
        (Doubled, "encoder Doubled cannot be built .* and read observations: TypeError"),
        (Flat, r"encoder Flat must turn observations \[B, ...\] into features \[B, F\]; for two it returned \[\]"),
    ],
)
def test_an_invalid_encoder_is_reported_in_one_line(encoder, says):
    with pytest.raises(SettingError, match=says):
        make_encoder(SPACE, encoder, 16)


def test_it_does_not_go_with_settings_of_single_observations():
    with pytest.raises(SettingError, match="encoder Camera is your own and reads all observations: leave out goals"):
        make_encoder(SPACE, Camera, goals=["speed"])


def test_probing_it_leaves_the_random_numbers_alone():
    torch.manual_seed(1)
    OwnEncoder(lambda_dropout(), Box(-1, 1, (2,)), 4)
    found = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(found, torch.rand(1))


def lambda_dropout():
    class Noisy(nn.Module):
        def __init__(self, space, features):
            super().__init__()

        def forward(self, obs):
            return obs + torch.rand_like(obs)

    return Noisy


class Normed(nn.Module):
    """Normalizes batches."""

    def __init__(self, space, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(space.shape[0])

    def forward(self, obs):
        return self.norm(obs)


def test_statistics_of_batches_begin_as_they_were_built():
    encoder = make_encoder(Box(-1, 1, (3,)), Normed, 3)
    assert encoder.own.norm.num_batches_tracked == 0 and encoder.own.norm.running_var.tolist() == [1, 1, 1] and encoder.own.training


class Frozen(Normed):
    """Keeps its statistics, and says nothing when it is put into another mode."""

    def __init__(self, space, features):
        super().__init__(space, features)
        self.norm.eval()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()


def test_parts_stay_in_the_mode_that_a_users_module_gave_them():
    encoder = make_encoder(Box(-1, 1, (3,)), Frozen, 3)
    assert not encoder.own.norm.training and encoder.own.training


class InPlace(nn.Module):
    """Writes into what it gets."""

    def __init__(self, space, features):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(space.shape[0], features))

    def forward(self, obs):
        return self.layers(obs)


def test_a_module_that_writes_into_its_input_leaves_observations_as_they_are():
    encoder = make_encoder(Box(-1, 1, (3,)), InPlace, 4)
    obs = -torch.ones(5, 3)
    encoder(obs)
    assert torch.equal(obs, -torch.ones(5, 3))


class Dropping(nn.Module):
    """Normalizes batches, and drops out."""

    def __init__(self, space, features):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(space.shape[0]), nn.Linear(space.shape[0], features), nn.Dropout(0.5))

    def forward(self, obs):
        return self.layers(obs)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_an_encoder_with_statistics_of_batches_acts_in_one_environment_by_those_of_all_so_far(algorithm):
    model = tiny(algorithm, "CartPole-v1", encoder=Dropping, env={"num_envs": 1})
    fit(model)
    assert model.training  # as it learned
    rows = torch.randn(40, 4).numpy()
    assert (model(rows) == model(rows)).all()


class Compass(gym.Env):
    """Shows a heading, one of four, and a speed."""

    observation_space, action_space = Dict({"heading": Discrete(4), "speed": Box(-1, 1, (2,))}), Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"heading": 3, "speed": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return {"heading": 2, "speed": np.zeros(2, np.float32)}, 1.0, False, True, {}


class Points(nn.Module):
    """Notes what headings it reads."""

    def __init__(self, space, features):
        super().__init__()
        self.layer, self.seen = nn.Linear(4 + 2, features), set()

    def forward(self, obs):
        self.seen |= {(obs["heading"].dim(), obs["heading"].is_floating_point())}
        return self.layer(torch.cat([nn.functional.one_hot(obs["heading"].long(), 4), obs["speed"]], -1))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_choices_reach_it_as_integers_of_one_axis_in_acting_and_learning(algorithm):
    model = tiny(algorithm, encoder=Points, env={"id": Compass})
    fit(model)
    assert model.updates > 0 and next(each for each in model.network.modules() if isinstance(each, Points)).seen == {(1, False)}
