"""What users of torch and Lightning do with parameters and optimizers works as it does there, or is refused in one line."""

from __future__ import annotations

from itertools import pairwise

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.nn.utils import parametrizations

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import EnsembleLinear
from tests.fitting import fit, tiny

PARTS = {lrl.PPO: "actor", lrl.SAC: "layers", lrl.DQN: "head", lrl.TD3: "layers", lrl.CrossQ: "layers"}
"""The layers of each policy."""
ALGORITHMS = [lrl.PPO, *(pytest.param(each, marks=pytest.mark.thorough) for each in (lrl.SAC, lrl.DQN, lrl.TD3))]


def plain_adam(algorithm):
    """Return a subclass whose optimizers are torch's, of all parameters."""

    class Plain(algorithm):
        def configure_optimizers(self):
            modules = [getattr(self, name) for name in ("critic", "network", "temperature") if hasattr(self, name)]
            return self.with_side_learners(*(torch.optim.Adam(each.parameters(), 1e-2) for each in modules))

    return Plain


class At(pl.Callback):
    """Does something with the algorithm at the end of some iterations, and keeps its policy's first and last layer."""

    def __init__(self, **actions):
        self.actions, self.seen = actions, []

    def on_train_batch_end(self, trainer, algorithm, *batch):
        self.seen.append([layer(algorithm, k).weight.detach().clone() for k in (0, -1)])
        self.actions.get(f"iteration_{trainer.global_step}", lambda algorithm: None)(algorithm)


def layer(algorithm, k):
    part = next(name for kind, name in PARTS.items() if isinstance(algorithm, kind))
    return [each for each in getattr(algorithm.network, part).modules() if isinstance(each, nn.Linear)][k]


def moves(seen, which):
    """Return whether a layer has moved in each iteration after the first."""
    return [not torch.equal(before[which], after[which]) for before, after in pairwise(seen)]


@pytest.mark.parametrize("optimizer", [lambda kind: kind, plain_adam], ids=["ours", "torch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layer_that_is_frozen_during_a_run_stays_as_it_is_and_learns_on_when_it_is_not(algorithm, optimizer):
    look = At(
        iteration_3=lambda model: layer(model, 0).requires_grad_(False),
        iteration_4=lambda model: layer(model, 0).requires_grad_(True),
    )
    fit(tiny(optimizer(algorithm), max_env_steps=96), callbacks=[look])
    assert moves(look.seen, 0)[1:] == [True, False, True, True] and all(moves(look.seen, -1)[1:])


@pytest.mark.parametrize("optimizer", [lambda kind: kind, plain_adam], ids=["ours", "torch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layer_that_is_frozen_before_a_run_learns_once_it_is_not(algorithm, optimizer):
    model = tiny(optimizer(algorithm), max_env_steps=96)
    layer(model, 0).requires_grad_(False)
    look = At(iteration_4=lambda model: layer(model, 0).requires_grad_(True))
    fit(model, callbacks=[look])
    assert moves(look.seen, 0)[1:] == [False, False, True, True] and all(moves(look.seen, -1)[1:])


@pytest.mark.parametrize("optimizer", [lambda kind: kind, plain_adam], ids=["ours", "torch"])
def test_a_policy_that_is_frozen_as_a_whole_stays_while_its_critic_learns(optimizer):
    model = tiny(optimizer(lrl.SAC), max_env_steps=48)
    model.network.requires_grad_(False)
    before = [{name: value.clone() for name, value in part.state_dict().items()} for part in (model.network, model.critic)]
    fit(model)
    same = [
        all(torch.equal(value, was[name]) for name, value in part.state_dict().items())
        for part, was in zip((model.network, model.critic), before, strict=True)
    ]
    assert same == [True, False]


class Finetuned(BaseFinetuning):
    """Freezes the first layer of the policy for an epoch."""

    def freeze_before_training(self, model):
        self.freeze(layer(model, 0))

    def finetune_function(self, model, epoch, optimizer):
        if epoch == 1 and optimizer is model.own_optimizers[-1]:
            self.unfreeze_and_add_param_group(layer(model, 0), optimizer)


@pytest.mark.filterwarnings("ignore:The provided params to be")  # Lightning's: the optimizer holds them already
@pytest.mark.parametrize("optimizer", [lambda kind: kind, plain_adam], ids=["ours", "torch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_finetuning_freezes_a_layer_for_an_epoch(algorithm, optimizer):
    fit(tiny(optimizer(algorithm), max_env_steps=96), callbacks=[Finetuned(), look := At()], limit_train_batches=3)
    assert moves(look.seen, 0)[1:] == [False, True, True, True] and all(moves(look.seen, -1)[1:])


@pytest.mark.parametrize("change", [lambda model: model.network.double(), lambda model: model.half()], ids=["double", "half"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, pytest.param(lrl.EvolutionStrategies, marks=pytest.mark.thorough)])
def test_other_precisions_are_refused_in_one_line(algorithm, change):
    model = tiny(algorithm, max_env_steps=48)
    change(model)
    line = r" has parameters of torch\.float\d+: networks act and learn in torch\.float32; leave out .* or call \.float\(\)$"
    for use in (fit, lambda model: lrl.evaluate(model, episodes=1), lrl.load_policy):
        with pytest.raises(SettingError, match=line):
            use(model)
    model.float()
    fit(model)


def test_another_precision_during_a_run_is_refused_before_the_next_iteration():
    for change in (lambda model: model.double(), lambda model: layer(model, -1).double()):
        model = tiny(lrl.PPO, max_env_steps=96)
        with pytest.raises(SettingError, match=r"^ActorCritic has parameters of torch\.float64"):
            fit(model, callbacks=[At(iteration_2=change)])
        assert model.env_steps == 32


@pytest.mark.parametrize("algorithm", [lrl.SAC, *(pytest.param(each, marks=pytest.mark.thorough) for each in (lrl.TD3, lrl.CrossQ))])
def test_a_critic_in_another_precision_is_refused_before_a_run_and_in_it(algorithm):
    for callbacks in [], [At(iteration_2=lambda model: model.critic.double())]:
        model = tiny(algorithm, max_env_steps=96)
        if not callbacks:
            model.critic.double()
        with pytest.raises(SettingError, match=r"^Critic has parameters of torch\.float64"):
            fit(model, callbacks=callbacks)


def test_double_of_dqn_is_a_setting_and_called_as_torchs_method_it_says_so():
    model = tiny(lrl.DQN, double=True)
    assert model.double == model.hparams["double"] is True and repr(model.double) == "True"
    with pytest.raises(SettingError, match=r"^DQN\.double is a setting: networks act and learn in torch\.float32, leave out \.double\(\)$"):
        model.double()


def normalize_layers(module, norm):
    for each in list(module.modules()):
        if isinstance(each, nn.Linear | EnsembleLinear):
            norm(each, "weight")


NORMS = {"spectral": parametrizations.spectral_norm, "old spectral": nn.utils.spectral_norm, "weight": parametrizations.weight_norm}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("algorithm", [lrl.SAC, *(pytest.param(each, marks=pytest.mark.thorough) for each in (lrl.DQN, lrl.TD3))])
def test_normalized_weights_of_a_critic_reach_its_target(algorithm, norm):
    model = tiny(algorithm, max_env_steps=96)
    for online, _ in model.target_networks:
        normalize_layers(online, norm)
    targets = [id(target) for _, target in model.target_networks]
    fit(model)
    for (online, target), before in zip(model.target_networks, targets, strict=True):
        assert id(target) == before and online.state_dict().keys() == target.state_dict().keys()
        assert not any(parameter.requires_grad for parameter in target.parameters())
        moved = [not torch.equal(value, target.state_dict()[name]) for name, value in online.state_dict().items()]
        assert any(moved) or algorithm is lrl.DQN  # its target is a copy every few updates
    assert model.updates > 0


@pytest.mark.parametrize("algorithm", [lrl.SAC, lrl.DQN, *(pytest.param(each, marks=pytest.mark.thorough) for each in (lrl.TD3,))])
def test_activations_that_are_replaced_in_a_network_are_replaced_in_its_target_too(algorithm):
    model = tiny(algorithm, max_env_steps=96)
    before = [{name: value.clone() for name, value in target.state_dict().items()} for _, target in model.target_networks]
    for online, _ in model.target_networks:
        for part in list(online.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.ReLU | nn.Tanh):
                    setattr(part, name, nn.SiLU())
    trainer = fit(model, max_steps=0)
    assert trainer.global_step == 0
    for (online, target), weights in zip(model.target_networks, before, strict=True):
        kinds = [type(part) for part in target.modules()]
        assert kinds == [type(part) for part in online.modules()] and nn.SiLU in kinds
        assert all(torch.equal(value, weights[name]) for name, value in target.state_dict().items())


class Spectral(lrl.TD3):
    """Has spectral norms on its critic, as a user's own subclass."""

    def __post_init__(self):
        super().__post_init__()
        normalize_layers(self.critic, parametrizations.spectral_norm)


@pytest.mark.thorough
def test_a_subclass_with_spectral_norms_resumes_and_loads(tmp_path):
    model = tiny(Spectral, max_env_steps=96)
    assert model.critic.state_dict().keys() == model.target_critic.state_dict().keys()
    quiet = {"evaluation": None, "logger": False, "enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    trainer = lrl.Trainer(**quiet, limit_train_batches=3, max_epochs=1)
    trainer.fit(model)
    other = tiny(Spectral, max_env_steps=96)
    lrl.Trainer(**quiet).fit(other, ckpt_path=trainer.run_folder / "checkpoints" / "last.ckpt")
    assert other.env_steps == 96
    loaded = Spectral.load_from_checkpoint(trainer.run_folder / "checkpoints" / "last.ckpt")
    assert loaded.target_critic.state_dict().keys() == other.target_critic.state_dict().keys()


@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.DQN])
def test_an_optimizer_that_needs_a_closure_is_refused_in_one_line(algorithm):
    class Closing(algorithm):
        def configure_optimizers(self):
            return self.with_side_learners(torch.optim.LBFGS(self.network.parameters()))

    with pytest.raises(SettingError, match=r"^LBFGS computes the loss several times in a step, by a closure, .* torch.optim.Adam$"):
        fit(tiny(Closing))
