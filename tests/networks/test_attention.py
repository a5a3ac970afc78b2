"""Attention over sets of entities against a loop over rows, heads and entities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl.networks.encoders import EntityAttention
from lightning_rl.spaces import observation_leaves

NEAR, FAR = observation_leaves(Dict(near=Box(-9, 9, (3, 2)), sky=Box(-9, 9, (4, 5))))


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(sets=(NEAR, FAR), num_others=6):
    """Weights large enough that heads and entities matter, biases too."""
    torch.manual_seed(0)
    module = EntityAttention(sets, num_others)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def sets(*batch, seed=0):
    """Three near and four far entities, of which one and two are padding."""
    near, far = rows(*batch, 3, 2, seed=seed), rows(*batch, 4, 5, seed=seed + 1)
    near[..., 1, :], far[..., 2:, :] = 0, 0
    return near, far


def by_hand(module, near, far, others):
    """One row in numpy, for one entity after the other."""
    weights = {name: value.detach().numpy().astype(np.float64) for name, value in module.named_parameters()}

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)

    def silu(x):
        return x / (1 + np.exp(-x))

    def norm(x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5)

    own = silu(linear("others", others)) if len(others) else []
    entities = [("embeddings.0", entity) for entity in near] + [("embeddings.1", entity) for entity in far]
    there = [entity @ entity >= 0.01 for _, entity in entities]
    embedded = [norm(silu(linear(name, np.concatenate([entity, own])))) for name, entity in entities]
    results = []
    for x in embedded:
        heads = []
        for head in range(4):
            part = slice(32 * head, 32 * head + 32)
            query = linear("query", x)[part]
            scores = np.array([query @ linear("key", y)[part] / np.sqrt(128) for y in embedded])
            shares = np.where(there, np.exp(scores), 0)
            shares /= shares.sum()
            heads.append(sum(share * linear("value", y)[part] for share, y in zip(shares, embedded, strict=True)))
        results.append(norm(linear("out", np.concatenate(heads)) + x))
    return np.mean([result for result, real in zip(results, there, strict=True) if real], 0)


@pytest.mark.parametrize("num_others", [0, 6])
def test_attention_equals_a_loop_over_heads_and_entities(num_others):
    module, (near, far), others = attention(num_others=num_others), sets(5), rows(5, num_others, seed=7)
    computed = module((near, far), [others[:, :2], others[:, 2:]] if num_others else [])
    expected = [by_hand(module, *(part[b].numpy().astype(np.float64) for part in (near, far, others))) for b in range(5)]
    np.testing.assert_allclose(computed.detach().numpy(), expected, rtol=0, atol=1e-5)
    assert computed.std(0).min() > 0.01


def test_the_order_of_entities_changes_nothing():
    module, (near, far), others = attention(), sets(5), rows(5, 6)
    shuffled = module((near[:, [2, 0, 1]], far[:, [3, 1, 0, 2]]), [others])
    torch.testing.assert_close(shuffled, module((near, far), [others]), rtol=0, atol=1e-6)


def test_the_number_and_content_of_padding_change_nothing():
    module, (near, far), others = attention(), sets(5), rows(5, 6)
    expected = module((near, far), [others])
    small = torch.full_like(near, 0.07)  # 0.07² + 0.07² = 0.0098
    noise = torch.where(near == 0, small, near)
    more = torch.cat([far, torch.zeros(5, 6, 5)], 1)
    fewer = far[:, :2]
    for other_near, other_far in ((noise, far), (near, more), (near, fewer), (near[:, [0, 2]], more)):
        torch.testing.assert_close(module((other_near, other_far), [others]), expected, rtol=0, atol=1e-6)


def test_an_entity_counts_from_a_sum_of_squares_of_a_hundredth():
    module, near, others = attention([NEAR]), torch.zeros(1, 3, 2), rows(1, 6)
    near[0, 0] = torch.tensor([1.0, 2.0])
    alone = module([near], [others])
    for value, there in ((0.0999, False), (0.1001, True)):
        near[0, 1, 0] = value
        assert bool((module([near], [others]) - alone).abs().max() > 1e-3) is there


def test_only_padding_gives_zeros_with_finite_gradients():
    module, others = attention(), rows(2, 6).requires_grad_()
    near, far = sets(2)
    near[1], far[1] = 0, 0
    summary = module((near, far), [others])
    assert not summary[1].any() and summary[0].any()
    summary.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    assert not others.grad[1].any() and others.grad[0].all()


def test_the_gradient_reaches_every_weight():
    module = EntityAttention((NEAR, FAR), 6)
    module(sets(5), [rows(5, 6)]).pow(3).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().max() > 1e-9, name


def test_weights_start_with_the_deviation_of_t_fixup_and_biases_at_zero():
    torch.manual_seed(0)
    module = EntityAttention((NEAR, FAR), 6)
    # √(0.125 / 128)
    assert torch.cat([each.flatten() for each in module.parameters() if each.dim() == 2]).std().item() == pytest.approx(0.03125, rel=0.01)
    assert not any(each.any() for each in module.parameters() if each.dim() == 1)
    assert module.embeddings[0].weight.shape == (128, 2 + 128) and EntityAttention([NEAR], 0).embeddings[0].weight.shape == (128, 2)


def test_bytes_are_padding_only_if_they_are_all_zero():
    (leaf,) = observation_leaves(Box(0, 255, (3, 2), np.uint8))
    module, entities = attention([leaf], 0), torch.tensor([[[51, 255], [0, 0], [0, 0]]], dtype=torch.uint8)
    alone = attention([NEAR], 0)([torch.tensor([[[0.2, 1.0], [0, 0], [0, 0]]])], [])
    torch.testing.assert_close(module([entities], []), alone)
    entities[0, 1, 1] = 1  # (1 / 255)² is far less than 0.01
    assert (module([entities], []) - alone).abs().max() > 1e-3


@pytest.mark.parametrize("batch", [(), (6,), (2, 3), (2, 1, 3)])
def test_every_leading_dimension_is_a_batch(batch):
    module, (near, far), others = attention(), sets(6), rows(6, 6)
    expected = module((near, far), [others])
    count = max(1, torch.Size(batch).numel())
    parts = [part[:count].reshape(*batch, *part.shape[1:]) for part in (near, far, others)]
    torch.testing.assert_close(module(parts[:2], parts[2:]), expected[:count].reshape(*batch, 128))


def test_a_half_precision_network_ignores_padding_too():
    module, (near, far), others = attention(), sets(5), rows(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        rough = module((near, far), [others])
    torch.testing.assert_close(rough.float(), module((near, far), [others]), rtol=0, atol=0.1)
    assert module.bfloat16()((near.bfloat16(), far.bfloat16()), [others.bfloat16()]).isfinite().all()
