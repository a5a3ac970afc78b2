"""Off-policy learning with demonstrations in the replay buffer or in a second one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl import DQN, LSTM, SAC, TD3, CheckpointConfig, Demonstration, SettingError, Trainer, load_policy
from lightning_rl.data.collector import Collector
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.demonstrations.recorder import RecordEpisodes
from tests.environments import Scripted
from tests.experts import at_random
from tests.fitting import OFF_POLICY, fit, tiny, twins_slow, weights

every_algorithm = pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
HOME = {SAC: "tests.environments:Scripted-v0", DQN: "tests.environments:Scripted-v0", TD3: "tests.environments:ScriptedBox-v0"}


def shown(algorithm: type = DQN) -> list[Demonstration]:
    """Six episodes of three steps; they observe (episode, t)."""
    return at_random(HOME[algorithm], "{}")


def episode(steps: int, first: int = 0, terminated: bool = False) -> Demonstration:
    """Observes (first, t) and pays t + 0.5."""
    obs = np.stack([np.full(steps + 1, first), np.arange(steps + 1)], 1).astype(np.float32)
    over = np.arange(steps) == steps - 1
    return Demonstration(obs, np.arange(steps) % 3, np.arange(steps) + 0.5, over & terminated, over & (not terminated))


def batches(model: Any) -> list[Any]:
    """What a model learns from."""
    found, end_update = [], model.end_update
    model.end_update = lambda batch: (found.append(batch), end_update(batch))
    fit(model)
    return found


@every_algorithm
def test_the_buffer_is_filled_with_demonstrations_before_the_first_step(algorithm, monkeypatch, capsys):
    kwargs = {"action": "box" if algorithm is TD3 else "discrete"}
    action = np.float32([[1, 5]] * 5) if algorithm is TD3 else np.full(5, 2)  # in the environment's own form
    obs = np.stack([np.full(3, t, np.float32) for t in range(6)])
    terminated = np.arange(5) == 4
    given = Demonstration(obs, action, np.arange(5) + 0.5, terminated, np.zeros(5, bool))
    model = tiny(algorithm, "tests.environments:Anything-v0", env={"kwargs": kwargs}, replay={"demonstrations": [given]})
    found, act = [], Collector.act

    def watched(collector, random_steps):
        if not found:
            found.append(model.dataset.buffer.sample(200))
        return act(collector, random_steps)

    monkeypatch.setattr(Collector, "act", watched)
    kept = []
    model.on_train_end = lambda: kept.append(len(model.dataset.buffer))
    fit(model)
    window = found[0]
    rows = {int(window.obs[i, 0]): i for i in range(200)}
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for t, i in rows.items():
        assert window.next_obs[i].tolist() == [t + 1] * 3 and window.reward[i].tolist() == [t + 0.5]
        assert window.action[i].tolist() == ([1.0, 0.0] if algorithm is TD3 else 1)  # in [-1, 1], or counted from 0
        assert window.steps[i] == (0 if t == 4 else 1)
    assert kept == [96 + 5] and model.env_steps == 96 and model.updates == 20
    assert (
        "demonstrations: 1 episode, 5 steps, return 12.50 ± 0.00, mean length 5.0; they fill the replay buffer first"
        in capsys.readouterr().out
    )


@every_algorithm
@pytest.mark.parametrize("settings", [{}, {"n_steps": 2, "replay": {"prioritized": True, "optimize_memory_usage": True}}])
def test_a_quarter_of_each_batch_is_demonstrated(algorithm, settings, capsys):
    replay = {"demonstrations": shown(algorithm), "demonstration_share": 0.25, **settings.get("replay", {})}
    model = tiny(algorithm, **{**settings, "replay": replay, "env": {"kwargs": {"first_episode": 100}}, "buffer_size": 20})
    found = batches(model)
    assert len(found) == 20
    for batch in found:
        assert (batch.obs[:, 0] < 100).tolist() == [False] * 6 + [True] * 2
        assert batch.weight[6:].tolist() == pytest.approx([1 / 8] * 2)
    assert "18 steps, return" in (said := capsys.readouterr().out) and "; 2 of 8 rows of each batch" in said


@pytest.mark.parametrize("algorithm", [SAC, DQN])
def test_a_quarter_of_the_sequences_is_demonstrated(algorithm):
    replay = {"demonstrations": [episode(30)], "demonstration_share": 0.25}
    env = {"kwargs": {"first_episode": 100}}
    found = batches(tiny(algorithm, replay=replay, memory=LSTM(4, 2), env=env))
    for batch in found:
        assert batch.episode_start.shape[1] == 4
        assert (batch.obs[:, 0].reshape(-1, 4) < 100).tolist() == [[False] * 3 + [True]] * len(batch.episode_start)
        assert float(batch.weight.sum()) == pytest.approx(1)


@pytest.mark.parametrize("share", [None, 0.5])
def test_with_demonstrations_learning_can_begin_at_once(share):
    replay = {"demonstrations": shown(), "demonstration_share": share}
    model = tiny(DQN, learning_starts=0, train_freq=1, max_env_steps=16, replay=replay)
    assert len(batches(model)) == 16


@pytest.mark.thorough
def test_another_share_changes_what_is_learned():
    def learned(share: float | None) -> torch.Tensor:
        model = tiny(DQN, replay={"demonstrations": shown(), "demonstration_share": share})
        fit(model)
        return weights(model)

    first, *others = map(learned, (0.25, 0.25, 0.5, None))
    assert [torch.equal(other, first) for other in others] == [True, False, False]


@pytest.mark.thorough
def test_what_signals_pay_for_demonstrations_is_what_they_make_of_them_now():
    replay = {"demonstrations": [episode(6)], "demonstration_share": 0.5}
    signals = {"extrinsic": {"scale": 2.0}, "curiosity": {"strength": 0.5}, "rnd": {}}
    model = tiny(SAC, replay=replay, reward_signals=signals, n_steps=2, gamma=0.5)
    checked, training_step = [], model.training_step

    def watched(found, batch_idx):
        def each():
            for batch in found:
                steps, signals = batch.experience, model.reward_signals
                pays = torch.stack([signal(steps) * (steps.weight > 0) for signal in signals.values()], -1).view(-1, 2, 3)
                second = torch.stack([torch.as_tensor(signal.gamma) for signal in signals.values()])
                assert torch.allclose(batch.reward, pays[:, 0] + second * pays[:, 1], atol=1e-5)
                for i in range(4, 8):  # what is shown, by hand: 2 (t + 0.5) + 0.5 · 2 (t + 1.5)
                    t = int(batch.obs[i, 1])
                    assert float(batch.reward[i, 0]) == pytest.approx(2 * t + 1 + (t + 1.5 if t < 5 else 0))
                    checked.append(t)
                assert steps.obs.view(8, 2, 2)[4:, 0].tolist() == batch.obs[4:].tolist()
                yield batch

        training_step(each(), batch_idx)

    model.training_step = watched
    fit(model)
    assert len(checked) == 80 and set(checked) == set(range(6)) and weights(model).isfinite().all()


# ---------------------------------------------------------------- saving


def trainer_in(folder: Any, **checkpoint: Any) -> Trainer:
    config = CheckpointConfig(every_n_env_steps=32, **checkpoint)
    return Trainer(default_root_dir=folder, accelerator="cpu", evaluation=None, enable_progress_bar=False, checkpoint=config)


@pytest.mark.thorough
def test_a_resumed_run_takes_its_buffer_from_the_checkpoint(tmp_path, capsys):
    trainer_in(tmp_path).fit(tiny(DQN, max_env_steps=32, replay={"demonstrations": shown()}))
    capsys.readouterr()
    model, sizes = tiny(DQN, max_env_steps=64, replay={"demonstrations": "no/more-v0"}), []
    model.on_train_end = lambda: sizes.append(len(model.dataset.buffer))
    trainer_in(tmp_path).fit(model, ckpt_path="last")
    assert sizes == [64 + 18] and "demonstrations: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "said"), [(None, "learning continues with the demonstrations"), (0.25, "learning continues after 16 steps")]
)
def test_a_run_resumed_without_its_buffer_reads_the_demonstrations_again(share, said, tmp_path, capsys):
    replay = {"demonstrations": shown(), "demonstration_share": share}
    for steps in (32, 64):
        model = tiny(DQN, max_env_steps=steps, replay=replay)
        trainer_in(tmp_path, save_replay_buffer=False).fit(model, ckpt_path="last" if steps > 32 else None)
    assert f"the checkpoint holds no replay buffer: {said}" in capsys.readouterr().out and model.env_steps == 64


def test_given_demonstrations_are_not_stored_and_a_name_is(tmp_path):
    replay = ReplayConfig(demonstrations=shown(), demonstration_share=0.25)
    model = tiny(DQN, replay=replay)
    assert model.hparams["replay"]["demonstrations"] is None and model.hparams["replay"]["demonstration_share"] == 0.25
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    action, _ = load_policy(tmp_path / "a.ckpt").act(np.zeros(2, np.float32))
    assert action in (0, 1, 2)
    loaded = DQN.load_from_checkpoint(tmp_path / "a.ckpt", env={"id": HOME[DQN], "num_envs": 2})
    with pytest.raises(SettingError, match=r"^replay\.demonstration_share 0\.25 needs demonstrations: name replay\.demonstrations$"):
        fit(loaded)
    fit(DQN.load_from_checkpoint(tmp_path / "a.ckpt", env={"id": HOME[DQN], "num_envs": 2}, replay=replay))
    assert tiny(DQN, replay={"demonstrations": "a/b-v0"}).hparams["replay"]["demonstrations"] == "a/b-v0"


# ---------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer_size": 16}, r"18 steps, .*; they do not fit into 2 x 8 rows .*, raise buffer_size$"),
        ({"buffer_size": 30, "replay": {"demonstrations": [episode(16)]}}, r"16 steps, .* do not fit into 2 x 15 rows"),
        ({"replay": {"demonstration_share": 0.01}}, r"demonstration_share 0\.01 of 8 rows is 0; a batch must hold both"),
        ({"replay": {"demonstration_share": 0.99}}, r"demonstration_share 0\.99 of 8 rows is 8; a batch must hold both"),
        (
            {"memory": LSTM(4, 4, 8), "replay": {"demonstration_share": 0.5, "demonstrations": [episode(12)]}},
            r" 0 sequences can be sampled; .* needs 1$",
        ),
        (
            {"replay": {"demonstration_share": 0.5, "replace": False, "demonstrations": [episode(3)]}},
            r"of which 3 rows can be sampled; a batch needs 4$",
        ),
        (
            {"replay": {"demonstrations": [{"obs": 1}]}},
            r"^demonstration 0 of replay\.demonstrations is a dict, not a lightning_rl\.Demonst",
        ),
        ({"replay": {"demonstrations": [episode(3)._replace(obs=np.zeros((4, 3)))]}}, r"^demonstration 0 does not fit .* spaces: observat"),
        ({"replay": {"demonstrations": [episode(3)._replace(action=np.full(3, 9))]}}, r"^demonstration 0 takes an action in step 0 that"),
        ({"replay": {"demonstrations": [episode(3)._replace(reward=np.full(3, np.nan))]}}, r"^demonstration 0 must have a reward"),
        ({"replay": {"demonstrations": [episode(3)._replace(truncated=np.zeros(2))]}}, r"^demonstration 0 must have .* each of its 3 acti"),
        ({"replay": {"demonstrations": "no/such-v0"}}, r"no/such-v0"),
    ],
)
def test_demonstrations_that_cannot_be_used_are_refused_in_one_line(settings, message):
    settings = {**settings, "replay": {"demonstrations": shown(), **settings.get("replay", {})}}
    with pytest.raises(SettingError, match=message) as error:
        fit(tiny(DQN, **settings))
    assert "\n" not in str(error.value)


def test_a_dataset_is_named_and_must_have_the_environments_spaces(tmp_path, monkeypatch, capsys):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = RecordEpisodes(Scripted())
    for _ in range(2):
        env.reset()
        for _ in range(3):
            env.step(1)
    env.save("scripted/one-v0")
    found = batches(tiny(DQN, replay={"demonstrations": "scripted/one-v0", "demonstration_share": 0.5}))
    assert all((batch.action[4:] == 1).all() for batch in found)
    assert "demonstrations: 2 episodes, 6 steps, return 18.30 ± 15.00" in capsys.readouterr().out
    with pytest.raises(SettingError, match=r"^dataset 'scripted/one-v0': "):
        fit(tiny(TD3, replay={"demonstrations": "scripted/one-v0"}))


def test_demonstrations_to_imitate_cannot_also_fill_the_replay_buffer():
    shown = at_random("tests.environments:Scripted-v0", "{}")
    model = tiny(SAC, replay={"demonstrations": shown}, reward_signals={"gail": {"demo_path": shown}})
    with pytest.raises(SettingError, match=r"reward_signals\.gail would treat replay\.demonstrations"):
        fit(model)
