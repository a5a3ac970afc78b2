"""Settings that are changed where they are only described or were read before count or are refused."""

from __future__ import annotations

import pytest

import lightning_rl as lrl
from tests.fitting import fit, tiny
from tests.own_code.test_parts_put_in_during_a_run import At


@pytest.mark.parametrize("change", [lambda h: h.__setitem__("gamma", 0.5), lambda h: setattr(h, "gamma", 0.5), lambda h: h.pop("gamma")])
@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_a_setting_that_is_changed_in_hparams_is_refused_before_a_run(name, change):
    model = tiny(getattr(lrl, name))
    change(model.hparams)
    with pytest.raises(lrl.SettingError, match=rf"^hparams\['gamma'\] has no effect: assign {name}\.gamma, or pass gamma= to the constr"):
        fit(model)


def test_a_setting_that_a_callback_changes_in_hparams_is_refused():
    model = tiny(lrl.PPO, max_env_steps=256)
    with pytest.raises(lrl.SettingError, match=r"^hparams\['learning_rate'\] has no effect"):
        fit(model, callbacks=[At(lambda model: model.hparams.update(learning_rate=1.0))])


def test_a_part_of_a_setting_that_is_changed_in_hparams_is_refused():
    model = tiny(lrl.PPO)
    model.hparams["env"]["num_envs"] = 3
    with pytest.raises(lrl.SettingError, match=r"^hparams\['env'\] has no effect"):
        fit(model)


def test_settings_that_are_assigned_and_hyperparameters_of_ones_own_are_no_change_of_hparams():
    class Own(lrl.PPO):
        def training_step(self, rollout, batch_idx):
            self.hparams["note"] = self.hparams.get("note", 0) + 1
            self.vf_coef = 0.4
            super().training_step(rollout, batch_idx)

    model = Own("CartPole-v1", n_steps=32, max_env_steps=1024)
    model.learning_rate = lambda progress: 1e-3 * (1 - progress)
    fit(model)
    assert model.hparams["note"] > 1
    assert model.hparams["vf_coef"] == 0.4


@pytest.mark.parametrize(("setting", "value"), [("gamma", 0.5), ("ignore_done", True)])
@pytest.mark.parametrize("when", ["before a run", "during it"])
def test_a_reward_signals_setting_that_was_read_is_refused(setting, value, when):
    def change(model):
        setattr(model.reward_signals["extrinsic"], setting, value)

    model = tiny(lrl.PPO)
    if when == "before a run":
        change(model)
    with pytest.raises(lrl.SettingError, match=rf"^reward_signals\.extrinsic\.{setting} is read in the constructor: pass it there"):
        fit(model, callbacks=[At(change)])


def test_a_reward_signals_strength_counts_when_it_is_assigned():
    model = tiny(lrl.PPO, "CartPole-v1", max_env_steps=256)
    rewards = []
    prepare = model.prepare
    model.prepare = lambda rollout: (prepared := prepare(rollout), rewards.append(prepared[0].reward.mean().item()))[0]
    fit(model, callbacks=[At(lambda model: setattr(model.reward_signals["extrinsic"], "strength", 0.5))])
    assert rewards[:2] == [1.0, 1.0] and rewards[2:] == [0.5] * (len(rewards) - 2)
