"""Using a trained policy: from a file alone, on one observation or many."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import lightning_rl as lrl
from lightning_rl import A2C, DQN, PPO, SAC, TD3, EvaluationConfig, Policy, Trainer, evaluate, load_policy
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.errors import SettingError
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.spaces import Spaces
from lightning_rl.types import tree_map, tree_to_torch
from tests.environments import Endless, Scripted
from tests.fitting import fit, tiny, weights

SPACES = ["Scripted-v0", "ScriptedBox-v0", "ScriptedDict-v0", "Image-v0"]
REPLAYING = [(SAC, "ScriptedBox-v0"), (SAC, "ScriptedDict-v0"), (DQN, "Scripted-v0"), (DQN, "Image-v0"), (TD3, "ImageBox-v0")]
every_kind = pytest.mark.parametrize("algorithm, env_id", [*((PPO, env_id) for env_id in SPACES), *REPLAYING])


@pytest.fixture
def saved(tmp_path):
    """A trained model and its checkpoint."""

    def saved(env_id="Scripted-v0", algorithm=PPO, **settings):
        model = tiny(algorithm, f"tests.environments:{env_id}", **({"normalize_obs": "running", "encoder_features": 8} | settings))
        fit(model).save_checkpoint(tmp_path / "a.ckpt")
        return model, tmp_path / "a.ckpt"

    return saved


@pytest.fixture
def no_environments(monkeypatch):
    """Building an environment is an error."""

    def refuse(*arguments, **keywords):
        raise AssertionError("an environment was built")

    monkeypatch.setattr(gym, "make", refuse)
    monkeypatch.setattr(gym, "make_vec", refuse)


def observations(model, count):
    space = model.spaces.observation
    space.seed(0)
    rows = [space.sample() for _ in range(count)]
    return rows, tree_map(lambda *leaves: np.stack(leaves), *rows)


@every_kind
def test_a_policy_acts_as_the_network_it_was_saved_from(algorithm, env_id, saved):
    model, path = saved(env_id, algorithm)
    policy = load_policy(path)
    rows, batch = observations(model, 5)
    model.network.eval()
    with torch.no_grad():
        action, _ = model.network.sample(tree_to_torch(batch), deterministic=True)
    expected = model.network.distribution.to_env(tree_map(lambda leaf: leaf.numpy(), action))
    actions, memory = policy.act(batch)
    np.testing.assert_array_equal(actions, expected)
    assert memory == () and not any(module.training for module in policy.network.modules())
    for row, action in zip(rows, actions, strict=True):
        one, _ = policy.act(row)
        np.testing.assert_allclose(one, action, rtol=1e-5)
        assert model.spaces.action.contains(one if isinstance(model.spaces.action, gym.spaces.Box) else int(one))


@every_kind
def test_loading_builds_no_environment(algorithm, env_id, saved, request):
    model, path = saved(env_id, algorithm)
    request.getfixturevalue("no_environments")
    loaded = Algorithm.load_from_checkpoint(path)
    assert type(loaded) is algorithm and loaded.spaces == model.spaces and loaded.collector is None
    assert torch.equal(weights(loaded), weights(model)) and loaded.env_steps == 96
    load_policy(path).act(model.spaces.observation.sample())


def test_settings_given_when_loading_win_over_those_stored(saved):
    _, path = saved()
    loaded = PPO.load_from_checkpoint(path, gamma=0.5, max_env_steps=112)
    assert (loaded.hparams["gamma"], loaded.max_env_steps, loaded.n_steps) == (0.5, 112, 8)
    fit(loaded)
    assert loaded.env_steps >= 112


def test_the_normalizer_is_inside(saved):
    model, path = saved()
    policy = load_policy(path)
    stored, own = policy.network.normalizer.statistics[0], model.network.normalizer.statistics[0]
    assert torch.equal(stored.mean, own.mean) and stored.count == pytest.approx(96, abs=1e-3) and stored.mean.abs().sum() > 0
    _, batch = observations(model, 20)
    policy.act(batch)
    assert torch.equal(policy.network.normalizer.statistics[0].mean, own.mean)  # acting moves nothing
    with torch.no_grad():
        before = policy.network.act(tree_to_torch(batch)).value
        stored.mean += 10
        assert not torch.allclose(policy.network.act(tree_to_torch(batch)).value, before)


def test_masked_actions_are_not_taken(saved):
    model, path = saved()
    policy = load_policy(path)
    _, batch = observations(model, 6)
    masks = np.eye(3, dtype=bool)[[0, 1, 2, 0, 1, 2]]
    for deterministic in (True, False):
        actions, _ = policy.act(batch, action_mask=masks, deterministic=deterministic)
        assert actions.tolist() == [0, 1, 2, 0, 1, 2]
    one, _ = policy.act(batch[0], action_mask=np.array([False, False, True]))
    assert int(one) == 2


def test_random_actions_differ_and_a_seed_repeats_them(saved):
    model, path = saved()
    algorithm = Algorithm.load_from_checkpoint(path)
    _, batch = observations(model, 64)

    def draws(seed):
        policy = Policy(algorithm.network, algorithm.spaces, seed)
        return [policy.act(batch, deterministic=False)[0].tolist() for _ in range(2)]

    first = draws(0)
    assert first == draws(0) and first != draws(1) and first[0] != first[1]
    likeliest = load_policy(path).act(batch)[0].tolist()
    assert likeliest == load_policy(path).act(batch)[0].tolist() != first[0]


def test_a_policy_plays_its_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=EvaluationConfig(episodes=2, max_episode_steps=20))
    trainer.fit(tiny(A2C, "CartPole-v1"))
    policy, env = load_policy(trainer.run_folder / "checkpoints/best.ckpt"), gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    ended, memory, steps = False, None, 0
    while not ended:
        action, memory = policy.act(obs, memory)
        obs, _, terminated, truncated, _ = env.step(action)
        ended, steps = terminated or truncated, steps + 1
    assert steps >= 8
    env.close()


def ready():
    return gym.vector.SyncVectorEnv([Scripted] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


@pytest.mark.thorough
@pytest.mark.parametrize("env, again", [(lambda: lambda: Endless(), Endless), (ready, Scripted)], ids=["function", "ready"])
def test_environments_that_a_file_cannot_name_train_and_are_not_stored(env, again, tmp_path):
    model = PPO(env(), n_steps=8, batch_size=16, net_arch=[8], max_env_steps=64)
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    assert model.env_steps == 64
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["env"] is None
    loaded = PPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.env is None and torch.equal(weights(loaded), weights(model))
    load_policy(tmp_path / "a.ckpt").act(np.zeros(model.spaces.observation.shape, np.float32))
    with pytest.raises(SettingError, match="pass env= to train it"):
        fit(loaded)
    trained_on = PPO.load_from_checkpoint(tmp_path / "a.ckpt", env=again, max_env_steps=128)
    fit(trained_on)
    assert trained_on.env_steps >= 128


@pytest.mark.parametrize("obs", [0.0, np.zeros(1), np.zeros(5), np.zeros((2, 1)), "x"])
def test_an_observation_of_another_shape_is_refused(obs):
    policy = load_policy("zoo:ppo/cartpole")
    with pytest.raises(SettingError, match=r"^the observation (has shape \(.*\)|is 'x'), and its space \(4,\)$"):
        policy.act(obs)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda obs: {"image": obs["image"], "vector": obs["vector"]}, "the observation 'number' is missing"),
        (lambda obs: obs | {"more": 1}, "the observation 'more' is not in its space"),
        (lambda obs: obs | {"vector": obs["vector"] * np.nan}, "the observation contains NaN or infinity"),
        (lambda obs: (obs, {}), "the observation is a pair, as reset returns; write obs, info = env.reset()"),
        (lambda obs: obs | {"image": obs["image"] / 255.0 + 0.001}, "the observation 'image' is float64, and its space uint8"),
        (lambda obs: obs | {"number": 7}, "the observation 'number' is 7, and its space Discrete(3)"),
    ],
)
def test_an_observation_of_other_parts_is_refused_in_one_line(change, line):
    space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (2, 2), np.uint8), number=gym.spaces.Discrete(3), vector=gym.spaces.Box(-1, 1, (2,))
    )
    policy = Policy(ActorCritic(Spaces(space, gym.spaces.Discrete(2))), Spaces(space, gym.spaces.Discrete(2)))
    obs = {"image": np.full((2, 2), 255, np.uint8), "number": 1, "vector": np.zeros(2, np.float32)}
    assert policy.act(obs)[0] in (0, 1)
    assert policy.act(tree_map(lambda leaf: np.stack([leaf] * 3), obs))[0].shape == (3,)
    with pytest.raises(SettingError) as error:
        policy.act(change(obs))
    assert str(error.value) == line


def test_a_tuple_that_ends_in_a_dict_is_an_observation_where_the_space_is_one():
    vector = gym.spaces.Box(-1, 1, (2,))
    spaces = Spaces(gym.spaces.Tuple((vector, gym.spaces.Dict(more=vector))), gym.spaces.Discrete(2))
    policy, zeros = Policy(ActorCritic(spaces), spaces), np.zeros(2, np.float32)
    assert policy.act((zeros, {"more": zeros}))[0] in (0, 1)
    with pytest.raises(SettingError, match=r"^the observation is a pair, as reset returns"):
        policy.act(((zeros, {"more": zeros}), {}))


@pytest.mark.thorough
def test_the_environment_of_a_policy_has_the_wrappers_of_training(tmp_path):
    env = {
        "id": "CartPole-v1",
        "frame_stack": 3,
        "max_episode_steps": 7,
        "wrappers": [{"class_path": "ClipReward", "init_args": {"max_reward": 0.5}}],
    }
    model = PPO(lrl.EnvConfig(**env), n_steps=8, batch_size=8, max_env_steps=64)
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    built = lrl.make_env(tmp_path / "a.ckpt", render_mode="rgb_array")
    assert built.observation_space == model.spaces.observation and built.render_mode == "rgb_array"
    policy, (obs, _), rewards, over = load_policy(tmp_path / "a.ckpt"), built.reset(seed=1), [], False
    while not over:
        obs, reward, terminated, truncated, _ = built.step(policy.act(obs)[0])
        rewards.append(reward)
        over = terminated or truncated
    assert rewards == [0.5] * 7
    assert lrl.make_env(model).observation_space == built.observation_space


def test_an_environment_that_cannot_be_built_again_is_reported():
    with pytest.raises(SettingError, match="make_env cannot build a ready environment again"):
        lrl.make_env(PPO(gym.make_vec("CartPole-v1", 2), n_steps=8, batch_size=8))
    with pytest.raises(SettingError, match="render_mode needs an environment that is named by an id"):
        lrl.make_env(PPO(lambda: Scripted(), n_steps=8, batch_size=8), render_mode="human")
    with pytest.raises(SettingError, match=r"the environment Scripted cannot be built: .*'render_mode'"):
        lrl.make_env(PPO(Scripted, n_steps=8, batch_size=8), render_mode="human")


def test_what_reset_returns_is_no_observation():
    policy = load_policy(tiny(PPO, "CartPole-v1"))
    with pytest.raises(SettingError, match=r"^the observation is .*; write obs, info = env\.reset\(\)$"):
        policy.act(gym.make("CartPole-v1").reset(seed=1))


def test_an_algorithm_is_evaluated_and_acts_in_its_own_environment():
    model = tiny(PPO, "CartPole-v1")
    with pytest.raises(SettingError, match=r"^env is for a checkpoint; an algorithm is evaluated in its own environment$"):
        evaluate(model, episodes=1, env="Acrobot-v1")
    with pytest.raises(SettingError, match=r"^env is for a file that names no environment; an algorithm has its own$"):
        load_policy(model, env="Acrobot-v1")


def test_a_missing_device_is_reported():
    with pytest.raises(SettingError, match=r"^map_location 'cuda:99': "):
        load_policy("zoo:ppo/cartpole", "cuda:99")


def test_a_map_of_devices_is_taken_as_torch_takes_it(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, logger=False, enable_progress_bar=False)
    trainer.fit(tiny(PPO, "CartPole-v1", max_env_steps=32))
    last = trainer.run_folder / "checkpoints" / "last.ckpt"
    assert PPO.load_from_checkpoint(last, map_location={"cuda:0": "cpu"}).env_steps == 32


@pytest.mark.parametrize("device", [None, {"cuda:0": "cpu"}, lambda storage, place: storage])
def test_a_shared_agent_takes_the_devices_that_a_checkpoint_takes(device):
    assert PPO.load_from_checkpoint("zoo:ppo/cartpole", map_location=device).env_steps == 100_096


def test_a_seed_that_generators_cannot_take_is_refused():
    with pytest.raises(SettingError, match=r"^seed must be >= 0 and <= 4294967295"):
        evaluate("zoo:ppo/cartpole", episodes=1, seed=2**64)


def test_an_environment_of_several_agents_is_built_by_its_own_package():
    with pytest.raises(SettingError, match="make_env is for single-agent environments"):
        lrl.make_env(PPO("tests.agents.Together", n_steps=8, batch_size=8))


def test_parts_of_a_batch_with_other_numbers_of_rows_are_refused():
    space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,)), b=gym.spaces.Box(-1, 1, (2,)))
    model = PPO(lambda: Blank(space), n_steps=8, batch_size=8)
    with pytest.raises(SettingError, match="the parts of a batch have 3 and 1 observations"):
        model({"a": np.zeros((3, 2)), "b": np.zeros((1, 2))})
    with pytest.raises(SettingError, match="the parts of a batch have 3 and 1 observations"):
        load_policy(model).act({"a": np.zeros((3, 2)), "b": np.zeros((1, 2))})


class Blank(gym.Env):
    """Shows zeros."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {name: np.zeros(2, np.float32) for name in self.observation_space}, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def test_a_policy_of_a_learner_leaves_its_mode_and_acts_without_dropout():
    model = lrl.PPO("CartPole-v1")
    model.network.actor.append(torch.nn.Dropout(0.9))
    policy = lrl.Policy(model.network, model.spaces)
    actions = {int(policy.act(np.full(4, 0.1, np.float32))[0]) for _ in range(50)}
    assert len(actions) == 1 and all(part.training for part in model.network.modules())
