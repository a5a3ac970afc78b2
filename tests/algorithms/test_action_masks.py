"""Illegal actions: never taken, never learned from, whoever acts and whatever remembers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Discrete
from torch import Generator

from lightning_rl import A2C, DQN, GRU, IMPALA, LSTM, PPO, SAC, TD3, TRPO, CrossQ, EvaluationConfig, RolloutEvaluator, Trainer, load_policy
from lightning_rl.data.rollout import make_batch
from lightning_rl.distributions import SoftActions
from lightning_rl.errors import SettingError
from lightning_rl.losses.soft_actor_critic import expected, soft_value
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.spaces import Spaces, choice_sizes
from lightning_rl.types import Transition, tree_leaves, tree_map, tree_to_torch
from tests.command_line import run
from tests.environments import Choosy, Scripted, ScriptedBox, legal
from tests.experts import played
from tests.fitting import Rows, fit, tiny, weights

RAINBOW = {
    **{"double": True, "dueling": True, "noisy": True, "distribution": "c51", "n_steps": 3},
    "replay": {"prioritized": True, "optimize_memory_usage": True},
}
CASES = {
    "PPO": (PPO, "multi-discrete", {"normalize_obs": "frozen", "normalize_obs_steps": 32}),
    "PPO nested": (PPO, "nested", {}),
    "PPO bits": (PPO, "multi-binary", {}),
    "PPO LSTM": (PPO, "discrete", {"memory": LSTM(4, 4)}),
    "A2C": (A2C, "discrete", {}),
    "IMPALA": (IMPALA, "multi-discrete", {}),
    "TRPO": (TRPO, "nested", {}),
    "TRPO bits": (TRPO, "multi-binary", {}),
    "TRPO LSTM": (TRPO, "discrete", {"memory": LSTM(4, 4)}),
    "DQN": (DQN, "discrete", {"exploration_fraction": 1.0}),
    "DQN rainbow": (DQN, "discrete", RAINBOW),
    "DQN quantiles": (DQN, "discrete", {"distribution": "quantiles", "replay": {"optimize_memory_usage": True}}),
    "DQN GRU": (DQN, "discrete", {"memory": GRU(4, 4, 2)}),
    "SAC": (SAC, "discrete", {"n_steps": 2}),
    "SAC hybrid": (SAC, "hybrid", {}),
    "SAC value network": (SAC, "multi-discrete", {"value_network": True}),
    "CrossQ": (CrossQ, "hybrid", {"critic_net_arch": [8]}),
    "SAC LSTM": (SAC, "discrete", {"memory": LSTM(4, 4)}),
}
MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]


def choosy(kind="discrete", way="info", **settings):
    names = ("vectorization", "autoreset", "frame_stack", "max_episode_steps", "num_envs")
    own = {name: settings.pop(name) for name in names if name in settings}
    return {"id": "tests.environments:Choosy-v0", "kwargs": {"way": way, "action": kind, **settings}, **own}


def tiny_choosy(algorithm, env, **settings):
    return tiny(algorithm, env["id"], env=env, **settings)


class Iterations(pl.Callback):
    """Keeps what is learned from."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        batch = batch if hasattr(batch, "_fields") else model.dataset.batch
        self.batches.append(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch))


def expected_masks(obs, kind):
    """Of observations (episode, t)."""
    obs = obs["where"] if isinstance(obs, dict) else obs
    rows = [legal(each, Choosy.sizes[kind]) for each in obs.reshape(-1, 2).tolist()]
    return torch.from_numpy(np.array(rows)).view(*obs.shape[:-1], -1)


# ---------------------------------------------------------------- whole runs; the environment raises where an illegal action arrives


APART = ("PPO", "A2C", "DQN", "DQN rainbow", "SAC", "SAC hybrid")
"""Cases that are tried in processes too."""
IN_EVERY_MODE = ("PPO nested", "PPO LSTM", "DQN rainbow", "SAC hybrid")
"""Cases that are tried in every mode of resetting; the others' second and third are slow."""


def ways_to_step():
    for name in CASES:
        for mode in MODES:
            yield pytest.param(name, mode, "sync", marks=[] if mode == "SAME_STEP" or name in IN_EVERY_MODE else [pytest.mark.slow])
    yield from ((name, "SAME_STEP", "async") for name in APART)


@pytest.mark.variants("PPO-SAME_STEP-sync", "DQN-SAME_STEP-sync", "SAC-SAME_STEP-sync", "NEXT_STEP-sync")
@pytest.mark.parametrize("name, autoreset, vectorization", ways_to_step())
def test_no_illegal_action_is_ever_taken_in_training_or_evaluation(name, autoreset, vectorization):
    algorithm, kind, settings = CASES[name]
    way = ("info", "key", "method")[(list(CASES).index(name) + MODES.index(autoreset)) % 3]
    model = tiny_choosy(algorithm, choosy(kind, way, autoreset=autoreset, vectorization=vectorization), **settings)
    before, iterations = weights(model), Iterations()
    evaluators = [RolloutEvaluator(48, episodes=3, num_envs=2, deterministic=deterministic) for deterministic in (True, False)]
    fit(model, callbacks=[iterations, *evaluators])
    assert model.env_steps >= 96 and not torch.equal(weights(model), before)
    batches = [each for each in iterations.batches if each != ()]
    assert batches and model.spaces.masked
    for batch in batches:
        assert batch.action_mask.shape[-1] == sum(Choosy.sizes[kind])
        assert all(torch.isfinite(leaf).all() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_a_worker_that_takes_only_legal_actions_is_never_replaced(algorithm):
    model = tiny_choosy(algorithm, choosy("nested", "method", vectorization="async"))
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, model, *_):
            seen.append(model.collector.stepper.restarts)

    fit(model, callbacks=[Look()])
    assert len(seen) == 6 and max(seen) == 0


# ---------------------------------------------------------------- what is stored


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["info", "key"])
def test_a_rollout_holds_the_masks_of_its_observations(way, mode):
    iterations = Iterations()
    model = tiny_choosy(PPO, choosy("nested", way, autoreset=mode))
    fit(model, callbacks=[iterations])
    for rollout in iterations.batches:
        assert rollout.action_mask.shape == (8, 2, 12) and rollout.action_mask.dtype == torch.bool
        expected = expected_masks(rollout.obs, "nested")
        over = expected_over(rollout) if mode == "NEXT_STEP" else torch.zeros_like(rollout.valid)
        assert torch.equal(rollout.action_mask, expected | over.unsqueeze(-1))


def expected_over(rollout):
    """Rows that only reset after a termination; the first row's episode ended in the rollout before."""
    where = rollout.obs["where"] if isinstance(rollout.obs, dict) else rollout.obs
    return ~rollout.valid & (where[..., 0] % 3 != 1)  # episodes end by termination, truncation, both


@pytest.mark.variants
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [False, True])
@pytest.mark.parametrize("n_steps, frames", [(1, None), (3, None), (1, 2), (3, 2)])
def test_a_replay_buffer_holds_the_masks_of_what_was_seen_and_of_what_came_next(mode, layout, n_steps, frames):
    iterations = Iterations()
    env = choosy("discrete", "info" if n_steps == 1 else "key", autoreset=mode, **({"frame_stack": frames} if frames else {}))
    settings = {"n_steps": n_steps, "batch_size": 32, "replay": {"optimize_memory_usage": layout}, "buffer_size": 40}
    fit(tiny_choosy(DQN, env, **settings), callbacks=[iterations])
    truncated = terminated = 0
    for batch in iterations.batches[1:]:
        obs, next_obs = ((each["where"] if isinstance(each, dict) else each) for each in (batch.obs, batch.next_obs))
        obs, next_obs = (each[:, -1] if frames else each for each in (obs, next_obs))
        assert torch.equal(batch.action_mask, expected_masks(obs, "discrete"))
        over = batch.discount[:, 0] == 0
        assert torch.equal(batch.next_action_mask, expected_masks(next_obs, "discrete") | over.unsqueeze(-1))
        truncated, terminated = truncated + int(((next_obs[:, 1] == 3) & ~over).sum()), terminated + int(over.sum())
    assert truncated > 5 and terminated > 5


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [False, True])
def test_sequences_hold_the_masks_of_all_their_slots(layout):
    iterations = Iterations()
    settings = {"memory": LSTM(4, 4), "n_steps": 2, "replay": {"optimize_memory_usage": layout}}
    fit(tiny_choosy(DQN, choosy(), **settings), callbacks=[iterations])
    finals = 0
    for batch in (each for each in iterations.batches if each != ()):
        expected, t = expected_masks(batch.obs, "discrete"), batch.obs[:, 1]
        over = (t == 3) & (batch.obs[:, 0] % 3 != 1)
        assert torch.equal(batch.next_action_mask, expected | over.unsqueeze(-1))
        assert torch.equal(batch.action_mask, expected | (t == 3).unsqueeze(-1))  # the last observation stands with the action before it
        learned = (batch.weight > 0) & (batch.discount[:, 0] > 0)
        following = batch.follow(batch.next_action_mask)[learned]
        assert torch.equal(following, expected_masks(batch.follow(batch.next_obs)[learned], "discrete"))
        finals += int((batch.follow(batch.next_obs)[learned][:, 1] == 3).sum())
    assert finals > 1  # truncations


@pytest.mark.parametrize("way", ["info", "key"])
def test_demonstrations_bring_their_masks(way):
    shown = played(Choosy(way), 2)
    model = tiny_choosy(DQN, choosy("discrete", way), max_env_steps=16, replay={"demonstrations": shown})

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, model, *_):
            self.drawn = tree_to_torch(model.dataset.buffer.sample(64))

    look = Look()
    fit(model, callbacks=[look])
    assert torch.equal(look.drawn.action_mask, expected_masks(look.drawn.obs, "discrete"))
    over = look.drawn.steps.unsqueeze(1) == 0
    assert over.any() and torch.equal(look.drawn.next_action_mask, expected_masks(look.drawn.next_obs, "discrete") | over)
    model = tiny_choosy(DQN, choosy("discrete", way), replay={"demonstrations": [each._replace(action_mask=()) for each in shown]})
    with pytest.raises(SettingError, match=r"^step 0 of the demonstrations has no action_mask"):
        fit(model)


# ---------------------------------------------------------------- networks


def illegal(network, action, mask):
    """How many choices of actions their masks forbid."""
    distribution, count = network.distribution, 0
    for leaf, part, allowed in zip(
        distribution.leaves(), distribution.flat(action), mask.split([each.mask_width for each in distribution.leaves()], -1), strict=True
    ):
        if leaf.mask_width:
            for choice, branch in zip(leaf.choices(part).T, allowed.split(leaf.sizes, -1), strict=True):
                count += int((~branch.gather(-1, choice.unsqueeze(-1))).sum())
    return count


def random_masks(space, rows, generator):
    """Each choice with probability one half, at least one in each part."""
    parts = []
    for size in choice_sizes(space):
        part = torch.rand(rows, size, generator=generator) < 0.5
        part[torch.arange(rows), torch.randint(size, (rows,), generator=generator)] = True
        parts.append(part)
    return torch.cat(parts, -1)


def networks():
    for kind, space in Choosy.action_spaces.items():
        spaces = Spaces(Scripted.observation_space, space, True)
        yield f"ActorCritic {kind}", lambda spaces=spaces: ActorCritic(spaces, net_arch=[8])
        yield f"Actor {kind}", lambda spaces=spaces: Actor(spaces, "squashed_normal", torch.nn.Identity(), net_arch=[8])
    for epsilon in (0.0, 0.5, 1.0):
        yield f"QNetwork {epsilon}", lambda epsilon=epsilon: exploring(epsilon)


def exploring(epsilon):
    network = QNetwork(Spaces(Scripted.observation_space, Choosy.action_spaces["discrete"], True), net_arch=[8])
    network.distribution.epsilon = epsilon
    return network


@pytest.mark.variants
@pytest.mark.parametrize("build", [build for _, build in networks()], ids=[name for name, _ in networks()])
def test_100_000_draws_of_a_network_are_never_illegal_and_illegal_logits_get_no_gradient(build):
    torch.manual_seed(0)
    network, generator = build(), Generator().manual_seed(1)
    obs, rows = torch.randn(100_000, 2, generator=generator) * 100, 100_000
    mask = random_masks(network_space(network), rows, generator)
    with torch.no_grad():
        for draw in (
            network.sample(obs, action_mask=mask, generator=generator)[0],
            network.sample(obs, action_mask=mask, deterministic=True)[0],
            network.distribution.random(torch.zeros(rows, network.distribution.num_inputs), mask, generator),
        ):
            assert illegal(network, draw, mask) == 0
        assert illegal(network, network.sample(obs, generator=generator)[0], mask) > 1000  # the masks matter
    if not isinstance(network, QNetwork):
        x = network.policy(obs[:1000], (), None)[0].detach().requires_grad_()
        if isinstance(network, Actor):
            actions = SoftActions(network.distribution)
            policy = actions.evaluate(x, actions.noise(len(x), generator), mask[:1000])
            (policy.probs.square().sum() + policy.entropy[:, -1].sum()).backward()
        else:
            action = network.distribution.sample(x.detach(), mask[:1000], generator)
            log_prob, entropy = network.distribution.evaluate(x, action, mask[:1000])
            (log_prob.square().sum() + entropy.sum()).backward()
        leaves = network.distribution.leaves()
        parts = zip(leaves, x.grad.split([leaf.num_inputs for leaf in leaves], -1), strict=True)
        # both values of a bit have one logit
        gradient = torch.cat([part.repeat_interleave(leaf.mask_width // part.shape[1], -1) for leaf, part in parts if leaf.mask_width], -1)
        assert (gradient[~mask[:1000]] == 0).all() and (gradient[mask[:1000]] != 0).float().mean() > 0.3


def network_space(network):
    """The kind of action space that has so many choices."""
    width = network.distribution.mask_width, len(network.distribution.leaves())
    return next(space for kind, space in Choosy.action_spaces.items() if (sum(Choosy.sizes[kind]), LEAVES[kind]) == width)


LEAVES = {"discrete": 1, "multi-discrete": 1, "multi-binary": 1, "hybrid": 2, "nested": 4}


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_loss_of_a_rollout_gives_illegal_choices_no_gradient_and_counts_the_entropy_of_the_others(algorithm):
    iterations = Iterations()
    model = tiny_choosy(algorithm, choosy("discrete"), ent_coef=0.1, max_env_steps=32, learning_rate=0.0)
    fit(model, callbacks=[iterations])
    rollout = iterations.batches[-1]
    batch = make_batch(rollout, 0.9 * ~rollout.terminated.unsqueeze(-1), 0.95)
    x, _ = model.network.policy(batch.obs, (), None)
    log_prob, entropy, _ = model.network.evaluate(batch.obs, batch.action, action_mask=batch.action_mask)
    two = torch.stack([row[allowed] for row, allowed in zip(x, batch.action_mask, strict=True)])  # two of four are legal everywhere
    p = two.softmax(-1)
    torch.testing.assert_close(entropy.squeeze(-1), -(p * p.log()).sum(-1))
    if algorithm is PPO:
        torch.testing.assert_close(batch.log_prob, log_prob, rtol=0, atol=1e-6)  # the ratio begins at 1
    # always the same masks: then a row of the last layer learns nothing
    fixed = batch._replace(action_mask=torch.tensor([[True, False, True, False]]).expand(len(x), -1), action=batch.action // 2 * 2)
    loss, _ = model.loss(fixed, 0.2, None, 0.01, 1.0) if algorithm is PPO else model.loss(fixed, 0.01, 1.0)
    (gradient,) = torch.autograd.grad(loss, model.network.actor[-1].weight)
    assert (gradient.abs().sum(1) > 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("algorithm, name, sign", [(PPO, "entropy_loss", -1), (A2C, "entropy_loss", -1), (SAC, "entropy", 1)])
def test_the_entropy_in_training_is_that_of_the_two_choices_that_are_legal(algorithm, name, sign):
    rows = Rows()
    fit(tiny_choosy(algorithm, choosy("discrete", "key"), log_interval=1), logger=rows)
    entropies = [sign * metrics[f"train/{name}"] for _, metrics in rows.rows if f"train/{name}" in metrics]
    assert len(entropies) > 3 and all(0.5 < each <= math.log(2) + 1e-6 for each in entropies)  # of four choices it would be 1.39


# ---------------------------------------------------------------- targets by hand


def transition(**slots):
    """Action 0, reward 0.5, γ = 0.9."""
    one, obs = torch.ones(1, 1), torch.zeros(1, 2)
    return Transition(obs, torch.zeros(1, dtype=torch.long), 0.5 * one, 0.9 * one, obs, one[0], np.arange(1), **slots)


@pytest.mark.parametrize("double, target", [(False, 0.5 + 0.9 * 3), (True, 0.5 + 0.9 * 2)])
def test_the_target_of_dqn_is_the_best_legal_next_value(double, target):
    model = tiny_choosy(DQN, choosy(), double=double, net_arch=[])
    heads = (model.network.head[-1], (1.0, 4.0, 3.0, 9.0)), (model.target.head[-1], (8.0, 2.0, 3.0, 7.0))
    with torch.no_grad():
        for head, values in heads:
            head.weight.zero_()
            head.bias.copy_(torch.tensor(values))
    batch = transition(next_action_mask=torch.tensor([[False, True, True, False]]))  # online says 1, the target network 2
    # ½ δ² up to 1, |δ| − ½ beyond (Huber): δ = target − Q(s, 0) = target − 1
    error = target - 1
    assert model.loss(batch)[0].item() == pytest.approx(0.5 * error**2 if error <= 1 else error - 0.5)
    unmasked = 0.5 + 0.9 * (7 if double else 8) - 1
    assert model.loss(transition())[0].item() == pytest.approx(unmasked - 0.5)


def test_in_a_sequence_the_mask_of_a_next_value_is_that_of_its_slot():
    model = tiny_choosy(DQN, choosy(), net_arch=[])
    with torch.no_grad():
        for network in (model.network, model.target):
            network.head[-1].weight.zero_()
            network.head[-1].bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    one = transition()
    slots = tree_map(lambda leaf: leaf.repeat_interleave(2, 0) if isinstance(leaf, torch.Tensor) else leaf, one)
    mask = torch.tensor([[False, True, False, False], [False, False, True, False]])
    slots = slots._replace(weight=torch.tensor([1.0, 0.0]), next_action_mask=mask, successor=torch.tensor([1, 1]))
    # of the second slot: 0.5 + 0.9 · 3 − Q(s, 0) = 2.2, and ½ less by Huber
    assert model.loss(slots)[0].item() == pytest.approx(1.7)


@pytest.mark.parametrize("distribution", ["c51", "quantiles"])
def test_a_distribution_of_returns_is_that_of_the_best_legal_next_action(distribution):
    model = tiny_choosy(DQN, choosy(), distribution=distribution, n_atoms=5, n_quantiles=5, v_min=-4.0, v_max=4.0, net_arch=[])
    torch.manual_seed(3)
    with torch.no_grad():
        model.target.head[-1].bias.normal_(std=2.0)
        model.target.head[-1].weight.zero_()
        values = model.target.value(torch.zeros(1, 2))[0, :, 0]
    order = values.argsort(descending=True)
    losses = []
    for k in (0, 1, 3):  # the k better ones are illegal
        mask = torch.ones(1, 4, dtype=torch.bool)
        mask[0, order[:k]] = False
        only = torch.zeros(1, 4, dtype=torch.bool)
        only[0, order[k]] = True
        losses.append(model.loss(transition(next_action_mask=mask))[0].item())
        assert losses[-1] == model.loss(transition(next_action_mask=only))[0].item()
    assert len(set(losses)) == 3 and losses[0] == model.loss(transition())[0].item()


def test_the_expectation_of_sac_runs_over_legal_next_actions():
    model = tiny_choosy(SAC, choosy(), net_arch=[], ent_coef=0.5)
    with torch.no_grad():
        for layer in (model.network.layers[0], model.target.layers[0]):
            layer.weight.zero_()
        model.network.layers[0].bias.copy_(torch.tensor([0.0, math.log(3), 50.0, 50.0]))
        for critic, values in zip(model.target.layers[0].bias, ((1.0, 2.0, 100.0, 100.0), (3.0, 1.0, -100.0, 100.0)), strict=True):
            critic.copy_(torch.tensor(values).view_as(critic))
        batch = transition(next_action_mask=torch.tensor([[True, True, False, False]]))
        none = torch.zeros(1, 0)
        found = model.next_value(batch, none).item()
    # π = (¼, ¾), min Q = (1, 1), H = log 4 − ¾ log 3
    entropy = math.log(4) - 0.75 * math.log(3)
    assert found == pytest.approx(1 + 0.5 * entropy)
    q, policy = torch.tensor([[[1.0], [1.0], [-100.0], [100.0]]]), model.policy(torch.zeros(1, 2), batch.next_action_mask, batch, none)
    by_parts = soft_value(expected(q, policy.probs, 1), policy.entropy, torch.tensor([0.5]))
    assert by_parts.item() == pytest.approx(1 + 0.5 * entropy)


def test_the_entropy_that_a_temperature_aims_at_can_be_had():
    hybrid = SAC(choosy("hybrid"), target_entropy={"continuous": -1.0, "discrete": 0.9}).actions
    target = torch.tensor([-1.0, 0.9])
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    found = hybrid.attainable(target, mask)
    assert torch.equal(hybrid.attainable(target, ()), target)
    assert found[:, 0].tolist() == [-1] * 3
    assert found[:, 1].tolist() == pytest.approx([0.9, 0.9 * math.log(2) / math.log(3), 0])
    pair = SAC(choosy("multi-discrete")).actions
    mask = torch.tensor([[True, True, True, False, True], [True, False, True, True, True]])
    left = [math.log(4) / math.log(6), math.log(3) / math.log(6)]  # 2 · 2 and 1 · 3 of 2 · 3
    assert pair.attainable(torch.tensor([1.0]), mask).squeeze(-1).tolist() == pytest.approx(left)


# ---------------------------------------------------------------- files, policies and the command line


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm, way", [(PPO, "key"), (DQN, "key"), (SAC, "info")])
def test_a_policy_from_a_file_takes_the_mask_from_the_observation_or_as_an_argument(algorithm, way, tmp_path):
    model = tiny_choosy(algorithm, choosy("discrete", way))
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    loaded = algorithm.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.spaces == model.spaces and loaded.spaces.masked
    policy, env = load_policy(tmp_path / "a.ckpt"), Choosy(way)
    for deterministic in (True, False):
        obs, info = env.reset()
        for _ in range(30):
            action, _ = policy.act(obs, action_mask=info.get("action_mask"), deterministic=deterministic)
            obs, _, terminated, truncated, info = env.step(int(action))
            obs, info = env.reset() if terminated or truncated else (obs, info)
    rows = np.array([[0, 1], [0, 2], [1, 2]], np.float32)
    masks = np.eye(4, dtype=np.int8)[[0, 3, 2]]
    obs = {"where": rows, "action_mask": masks} if way == "key" else rows
    actions, _ = policy.act(obs, action_mask=None if way == "key" else masks)
    assert actions.tolist() == [1, 4, 3]
    if way == "key":
        assert policy.act({"where": rows}, action_mask=masks)[0].tolist() == [1, 4, 3]
        assert policy.act(obs, action_mask=masks[::-1])[0].tolist() == [3, 4, 1]  # what is beside it wins
    with pytest.raises(SettingError, match=r"^observation 1 allows no action: its action_mask is all false$"):
        policy.act(rows if way == "info" else {"where": rows}, action_mask=np.eye(4)[:3] * np.array([[1], [0], [1]]))
    with pytest.raises(SettingError, match=r"^this policy was trained with masks: give an action_mask"):
        policy.act(rows if way == "info" else {"where": rows})
    with pytest.raises(SettingError, match=r"must have 4 entries, one for each choice: got shape \(3,\) for 4"):
        policy.act(rows if way == "info" else {"where": rows}, action_mask=np.ones((3, 3)))


@pytest.mark.thorough
def test_a_policy_of_parts_takes_masks_flat_or_as_a_tree(tmp_path):
    model = tiny_choosy(PPO, choosy("nested"))
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    policy, obs = load_policy(tmp_path / "a.ckpt"), np.zeros((2, 2), np.float32)
    flat = np.array([[1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0]])
    pair, bits, last = np.split(flat, [6, 10], 1)
    for mask in (
        flat,
        (None, {"pair": (pair[:, :2], pair[:, 2:]), "bits": (bits[:, :2], bits[:, 2:])}, last),
        (None, {"pair": pair, "bits": bits}, last),
    ):
        (_, parts, choice), _ = policy.act(obs, action_mask=mask)
        assert parts["pair"].tolist() == [[0, 1], [1, 3]] and choice.tolist() == [1, 0]
        assert parts["bits"].tolist() == [[1, 0], [0, 1]]
        (_, parts, choice), _ = policy.act(obs[0], action_mask=tree_map(lambda leaf: None if leaf is None else leaf[0], mask))
        assert parts["pair"].tolist() == [0, 1] and int(choice) == 1


@pytest.mark.parametrize("algorithm", [PPO, TD3])
def test_masks_of_continuous_actions_are_refused(algorithm):
    class Masked(ScriptedBox):
        def reset(self, **arguments):
            return super().reset(**arguments)[0], {"action_mask": np.ones(2)}

    with pytest.raises(SettingError, match=r"^environment 0 of Masked has an action_mask, but its action space"):
        algorithm(Masked)


def test_a_model_of_an_environment_without_masks_is_not_trained_on_one_that_has_some():
    model = tiny(PPO, max_env_steps=16)
    unmasked = {"spaces": Spaces(Scripted.observation_space, Choosy.action_spaces["discrete"])}
    with pytest.raises(SettingError, match=r"^environment 0 of .*Choosy-v0 has an action_mask, but the first reset had none"):
        fit(tiny_choosy(PPO, choosy(), **unmasked))
    with pytest.raises(SettingError, match=r"^the environment's spaces differ from those of the model"):
        fit(tiny_choosy(PPO, choosy("discrete", "key"), **unmasked))
    with pytest.raises(SettingError, match=r"^environment 0 of .*Scripted-v0 has no action_mask, but the model was made with"):
        fit(tiny(PPO, spaces=model.spaces._replace(masked=True)))


@pytest.mark.thorough
def test_checkpoints_of_before_say_nothing_of_masks(tmp_path):
    fit(tiny(PPO)).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"].pop("masked") is False
    torch.save(checkpoint, tmp_path / "b.ckpt")
    (tmp_path / "b.ckpt.json").unlink(missing_ok=True)
    assert not PPO.load_from_checkpoint(tmp_path / "b.ckpt").spaces.masked
    checkpoint["lightning_rl"]["masked"] = "yes"
    torch.save(checkpoint, tmp_path / "c.ckpt")
    with pytest.raises(SettingError, match=r"lightning_rl/masked must be true or false, got 'yes'"):
        PPO.load_from_checkpoint(tmp_path / "c.ckpt")


FIT = (
    "fit --model PPO --model.env.id tests.environments:Choosy-v0 --model.env.num_envs 2 --model.n_steps 8 --model.batch_size 16 "
    "--model.max_env_steps 32 --evaluation.episodes 2 --evaluation.num_envs 2 --trainer.accelerator cpu --trainer.run_name a "
)


@pytest.mark.thorough
def test_the_command_line_trains_and_evaluates_with_masks(folder, capfd):
    assert run(FIT, capfd)[0] == 0
    (checkpoint,) = folder.rglob("best.ckpt")
    status, out, _ = run(f"evaluate --ckpt_path {checkpoint} --episodes 4 --stochastic --json --import tests.environments", capfd)
    assert status == 0 and json.loads(out.splitlines()[-1])["episodes"] == 4


@pytest.mark.thorough
def test_the_command_line_says_in_one_line_where_nothing_is_legal(folder, capfd):
    status, _, said = run(FIT + "--model.env.kwargs.stuck 2", capfd)
    line = "error: environment 0 of tests.environments:Choosy-v0 allows no action: its action_mask is all false"
    assert (status, said.strip()) == (2, line)


def test_evaluation_names_the_environment_where_nothing_is_legal():
    model = tiny_choosy(PPO, choosy())
    stuck = iter([None, 1])
    evaluator = RolloutEvaluator(episodes=2, num_envs=2, env=lambda: Choosy(stuck=next(stuck)))
    with pytest.raises(SettingError, match=r"^environment 1 of Choosy allows no action: its action_mask is all false$"):
        evaluator.play(model)


def test_an_evaluation_without_masks_is_refused_for_a_model_with_masks():
    class Unmasked(Scripted):
        action_space = Discrete(4)

    model = tiny_choosy(PPO, choosy())
    evaluator = RolloutEvaluator(episodes=1, num_envs=1, env=Unmasked)
    with pytest.raises(SettingError, match=r"^environment 0 of Unmasked has no action_mask, but the model was made with"):
        evaluator.play(model)


@pytest.mark.thorough
def test_our_trainer_runs_evaluates_and_saves_with_masks_of_all_kinds(tmp_path):
    evaluation = EvaluationConfig(every_n_env_steps=32, episodes=2, num_envs=2)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, evaluation=evaluation)
    trainer.fit(tiny_choosy(SAC, choosy("nested", "method", form="tree")))
    assert (trainer.run_folder / "checkpoints" / "best.ckpt").is_file()
