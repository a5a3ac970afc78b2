"""CrossQ: wide critics without targets, and normalization by batches."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import SAC, CrossQ, load_policy
from lightning_rl.networks.layers import BatchRenorm
from tests.fitting import fit, tiny, weights

BOX = "tests.environments:ScriptedBox-v0"


def learned(algorithm, **settings):
    model = tiny(algorithm, BOX, **settings)
    fit(model)
    return weights(model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option",
    [
        {"critic_layers": "plain"},
        {"actor_layers": "plain"},
        {"critic_net_arch": [6]},
        {"policy_delay": 1},
        {"adam_beta1": 0.9},
        {"n_quantiles": 5},
        {"ent_coef": 0.1},
    ],
    ids=str,
)
def test_every_option_of_crossq_changes_what_is_learned(option):
    assert not torch.equal(learned(CrossQ, critic_net_arch=[8]), learned(CrossQ, **{"critic_net_arch": [8], **option}))


def test_the_temperature_of_crossq_has_the_usual_beta_as_in_its_authors_code():
    optimizers = tiny(CrossQ, BOX, critic_net_arch=[8]).configure_optimizers()
    assert [each.param_groups[0]["betas"][0] for each in optimizers] == [0.5, 0.5, 0.9]  # critics, policy, temperature


def test_crossq_has_wide_critics_and_no_targets():
    model = tiny(CrossQ, BOX)
    assert next(layer.weight.shape[1:] for layer in model.critic.layers.modules() if hasattr(layer, "weight")) == (4, 1024)
    assert model.target_networks == [] and not any(name.startswith("target.") for name in model.state_dict())


def test_the_policy_of_crossq_acts_with_running_statistics_and_moves_them_only_in_its_own_updates():
    model = tiny(CrossQ, BOX, critic_net_arch=[8])
    fit(model)
    (first, *_), critic = ([each for each in net.modules() if isinstance(each, BatchRenorm)] for net in (model.network, model.critic))
    assert first.batches == model.updates // 3 > 0
    assert {each.batches.item() for each in critic} == {model.updates}
    obs = model.spaces.observation.sample()
    alone = load_policy(model).act(obs, deterministic=True)[0]
    both = model(torch.stack([torch.as_tensor(obs), torch.full_like(torch.as_tensor(obs), 5.0)]))[0]
    assert both == pytest.approx(alone, abs=1e-6)


def test_between_updates_of_the_policy_only_critics_learn():
    model = tiny(SAC, BOX, policy_delay=100)
    before = weights(model)
    critic = torch.nn.utils.parameters_to_vector(model.critic.parameters()).detach().clone()
    fit(model)
    assert torch.equal(weights(model), before)
    assert not torch.equal(torch.nn.utils.parameters_to_vector(model.critic.parameters()), critic)
