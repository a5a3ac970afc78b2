"""MA-POCA: returns of groups, baselines that do not know the own action, and credit for what comes after a death."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

import lightning_rl as lrl
from lightning_rl import GRU, LSTM, POCA, PPO, SettingError
from lightning_rl.data.groups import GroupRollout, add_group_values, group_minibatches, group_returns
from lightning_rl.data.rollout import NO_ENDS, Ends, Unroll, make_batch
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.actor_critic import ScalarValue
from lightning_rl.networks.group_critic import GroupActorCritic, GroupCritic
from lightning_rl.returns import gae
from lightning_rl.spaces import Spaces
from tests.agents import Crew
from tests.algorithms.test_sharing_agents import watch
from tests.fitting import Rows, fit, tiny, weights

GAMMA, LAMBDA = 0.9, 0.8


def column(*numbers):
    """A value for each of T steps of one group, `[T, 1, 1]`."""
    return torch.tensor(numbers).view(-1, 1, 1)


# ---------------------------------------------------------------- returns


class Table:
    """A network whose V is the sum of what those see who are there, and whose baselines are 0.4 and 0.55."""

    group_size, value_head = 2, ScalarValue(None)

    def value(self, obs, memory, start, present):
        return (obs.unflatten(-2, (-1, 2)).squeeze(-1) * present).sum(-1, keepdim=True)

    def evaluate(self, obs, action, memory, start, mask, present, baselines):
        z = torch.tensor([9.0, 0.4, 0.55]).view(3, 1).expand(*present.shape[:-1], 3, 1)
        return torch.zeros(*action.shape, 1), (), z


def death(truncated=False, keeps_next=False):
    """Agent 0 dies at t = 0 with reward −0.1; agent 1 gets 1 at t = 2, its last. V = 0.5, 0.6, 0.8, and 0.7 of its last observation."""
    obs = torch.tensor([[0.3, 0.2], [50.0, 0.6], [50.0, 0.8], [5.0, 5.0]]).unsqueeze(-1)  # of the absent and of the next episode: large
    reward = torch.tensor([[-0.1, 0.0], [0.0, 0.0], [0.0, 1.0]]).unsqueeze(-1)
    valid = torch.tensor([[True, True], [False, True], [False, True]])
    over = torch.tensor([[True, False], [False, False], [False, True]])
    cut = torch.tensor([[False, False], [False, False], [False, truncated]])
    start = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    ends = Ends(np.array([2]), np.array([1]), np.array([[0.7]], np.float32)) if truncated else NO_ENDS
    if keeps_next:  # then the last observations of who terminated are kept too
        ends = Ends(np.array([0, 2]), np.array([0, 1]), np.array([[30.0], [0.7]], np.float32))
    next_obs = obs[1:] if keeps_next else ()
    unroll = Unroll(obs, torch.zeros(3, 2), (), reward, over & ~cut, cut, valid, start, (), torch.zeros(1, 2, 1), next_obs, ends)
    return add_group_values(unroll, torch.tensor([True, True]), Table(), torch.device("cpu"), True)


def returns(groups, reward, gamma=GAMMA, gae_lambda=LAMBDA):
    return group_returns(groups, reward, torch.tensor([gamma]), torch.tensor([False]), gae_lambda)


@pytest.mark.parametrize(("truncated", "expected"), [(False, [0.63008, 0.864, 1.0]), (True, [0.956672, 1.3176, 1.63])])
def test_a_death_does_not_end_the_return_of_the_group(truncated, expected):
    groups = death(truncated)
    reward = (groups.rows.reward.unflatten(1, (1, 2)) * groups.present.unsqueeze(-1)).sum(2)
    found = returns(groups, reward)
    assert groups.value.flatten().tolist() == pytest.approx([0.5, 0.6, 0.8])
    assert groups.over.flatten().tolist() == [False, False, True] and groups.terminated.any() == (not truncated)
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    if not truncated:
        assert (found.unsqueeze(2) - groups.baseline)[0].flatten().tolist() == pytest.approx([0.23008, 0.08008], abs=1e-6)
        own = gae(column(-0.1), column(0.0), column(0.5), column(0.0), column(0.0), LAMBDA)
        assert own.item() == pytest.approx(-0.6)  # by its own row


def test_a_stream_that_ignores_terminations_goes_on_from_the_last_observation_of_a_group_and_not_from_its_next_episode():
    groups = death(keeps_next=True)
    assert groups.next_value.flatten().tolist() == pytest.approx([0.6, 0.8, 0.7]) and groups.terminated.flatten().tolist() == [0, 0, 1]
    reward = (groups.rows.reward.unflatten(1, (1, 2)) * groups.present.unsqueeze(-1)).sum(2)
    assert returns(groups, reward)[-1].item() == pytest.approx(1.0), "a stream that heeds them ends there"
    beyond = group_returns(groups, reward, torch.tensor([GAMMA]), torch.tensor([True]), LAMBDA)
    assert beyond[-1].item() == pytest.approx(1.0 + GAMMA * 0.7)


@pytest.mark.parametrize("keeps_next", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_group_whose_episode_is_abandoned_bootstraps_from_what_those_who_were_there_see_in_the_next_row(dies, keeps_next):
    obs = torch.tensor([[0.3, 0.2], [0.1, 0.5], [0.25, 0.8], [5.0, 5.0]]).unsqueeze(-1)
    valid = torch.tensor([[True, True], [True, True], [False, False]])  # nobody acts in the last step, which begins the next episode
    dead, cut = torch.zeros(2, 3, 2, dtype=torch.bool)
    dead[1, 0], cut[1] = dies, torch.tensor([not dies, True])
    start = torch.tensor([[True, True], [False, False], [dies, False], [True, True]])
    ends = Ends(np.array([1]), np.array([0]), np.array([[30.0]], np.float32)) if keeps_next and dies else NO_ENDS
    next_obs = obs[1:] if keeps_next else ()
    unroll = Unroll(obs, torch.zeros(3, 2), (), torch.zeros(3, 2, 1), dead, cut, valid, start, (), torch.zeros(1, 2, 1), next_obs, ends)
    groups = add_group_values(unroll, torch.tensor([True, True]), Table(), torch.device("cpu"), True)
    assert groups.next_value[:2].flatten().tolist() == pytest.approx([0.1 + 0.5, 0.8 if dies else 0.25 + 0.8])
    assert groups.over.flatten().tolist() == [False, True, False] and not groups.terminated.any()
    assert torch.equal(groups.present.squeeze(1), valid)


def test_an_observation_of_who_terminated_is_in_no_value():
    groups = death(truncated=True)
    assert groups.next_value.flatten().tolist() == pytest.approx([0.6, 0.8, 0.7])


def alone(value, next_value, terminated):
    """A group whose last members end in the last step."""
    over = torch.zeros(len(value), 1, dtype=torch.bool)
    over[-1] = True
    return GroupRollout((), torch.ones(len(value), 1, 1, dtype=torch.bool), over, over & terminated, value, next_value, ())


@pytest.mark.parametrize(
    ("terminated", "expected", "advantage"),
    [
        (True, [0.932273, 0.9702, 1.0], [0.832273, 0.4702, 0.45]),
        (False, [1.370121, 1.435748, 1.495], [1.270121, 0.935748, 0.945]),
    ],
)
def test_returns_of_a_group_and_advantages_over_its_baselines(terminated, expected, advantage):
    groups = alone(column(0.2, 0.4, 0.6), column(0.4, 0.6, 0.5), terminated)
    found = returns(groups, column(0.0, 0.0, 1.0), 0.99, 0.95)
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert (found - column(0.1, 0.5, 0.55)).flatten().tolist() == pytest.approx(advantage, abs=1e-6)


def test_the_last_row_of_who_dies_is_worth_what_the_others_will_get():
    groups = alone(column(0.0), column(0.9), True)._replace(over=torch.tensor([[False]]), terminated=torch.tensor([[False]]))
    assert returns(groups, column(-0.01)).item() == pytest.approx(0.8)


# ---------------------------------------------------------------- the critic


def make_critic(agents=3, seed=0, **settings):
    torch.manual_seed(seed)
    spaces = Spaces(Box(-1, 1, (4,), np.float32), Discrete(3), agents=tuple("abcde"[:agents]))
    common = {"net_arch": [16], "activation": "tanh", "streams": 1}
    network = GroupActorCritic(spaces, **common | settings)
    obs, action = torch.rand(5 * agents, 4), torch.randint(3, (5 * agents,))
    present = torch.ones(5, agents, dtype=torch.bool)
    return network, obs, action, present


def judged(network, obs, action, present):
    with torch.no_grad():
        return network.evaluate(obs, action, present=present)[2].squeeze(-1)  # [5, 1 + A]


def test_its_own_action_does_not_move_an_agents_baseline_and_those_of_the_others_do():
    network, obs, action, present = make_critic()
    other = action.clone()
    other[1::3] = (other[1::3] + 1) % 3  # of agent 1
    change = (judged(network, obs, other, present) - judged(network, obs, action, present)).abs()
    assert (change[:, [0, 2]] == 0).all() and (change[:, [1, 3]] > 1e-4).all()


def test_the_absent_move_nothing():
    network, obs, action, present = make_critic()
    present[:, 1] = False
    spoiled, other = obs.clone(), action.clone()
    spoiled[1::3], other[1::3] = 1e3, 2
    before, after = judged(network, obs, action, present), judged(network, spoiled, other, present)
    assert torch.equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])
    present[:, 1] = True
    assert not torch.equal(before, judged(network, obs, action, present))


def test_a_permutation_of_agents_permutes_baselines_and_not_the_value():
    network, obs, action, present = make_critic()
    present[2:, 0] = False
    order = torch.tensor([2, 0, 1])
    rows = (torch.arange(5).unsqueeze(1) * 3 + order).flatten()
    found, expected = judged(network, obs[rows], action[rows], present[:, order]), judged(network, obs, action, present)
    assert torch.allclose(found[:, 0], expected[:, 0], atol=1e-6) and torch.allclose(found[:, 1:], expected[:, 1:][:, order], atol=1e-6)


@pytest.mark.parametrize("agents", [1, 3])
def test_the_baseline_of_who_is_alone_is_the_value(agents):
    network, obs, action, present = make_critic(agents)
    present[:, 1:] = False
    found = judged(network, obs, action, present)
    assert torch.equal(found[:, 0], found[:, 1])


def test_the_critic_sees_how_many_agents_are_present():
    critic, seen = GroupCritic(2, 1, 8, [4], "tanh", 1), []
    critic.head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][:, 0, -1].tolist()))
    critic(torch.rand(3, 3, 2), torch.tensor([[True, False, False], [True, False, True], [True, True, True]]))
    assert seen[0] == pytest.approx([-1 / 3, 1 / 3, 1])
    seen.clear()
    critic(torch.rand(1, 1, 2), torch.tensor([[True]]))
    assert seen[0] == [1]


def test_values_of_groups_that_come_together_are_those_of_each_alone():
    network, obs, _, present = make_critic(memory=LSTM(4, 4))
    present[1, 2] = False
    start, memory = torch.ones(15, dtype=torch.bool), network.initial_memory(15)
    with torch.no_grad():
        together = network.value(obs, memory, start, present)
        apart = [network.value(obs[3 * e : 3 * e + 3], network.initial_memory(3), start[:3], present[e : e + 1]) for e in range(5)]
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)


# ---------------------------------------------------------------- learning


def test_one_agent_alone_learns_as_ppo_does_with_returns_of_lambda():
    model = tiny(POCA, env={"num_envs": 2, "kwargs": {"size": 1}}, n_steps=16, normalize_advantage=False)
    gradients = []

    def training_step(groups, batch_idx):
        batch = model.make_batch(groups)
        rollout, discount = model.prepare(groups.rows._replace(value=groups.value, next_value=groups.next_value))
        rows = make_batch(rollout, discount, model.gae_lambda)
        assert torch.allclose(batch.advantage.flatten(), rows.advantage, atol=1e-5)
        assert torch.allclose(batch.returns, rows.returns, atol=1e-5)
        (part,) = group_minibatches(batch, 32, False, model.generator)
        ours, _ = model.loss(part, 0.2, None, 0.01, True)
        log_prob, entropy, z = model.network.evaluate(rows.obs, rows.action)
        ratio = (log_prob - rows.log_prob).sum(-1).exp()
        theirs = losses.mean(losses.clipped_surrogate(ratio, rows.advantage, 0.2), rows.weight)
        value_loss = losses.mean((z[:, 0] - rows.returns).square(), rows.weight)
        theirs = theirs + 0.5 * 1.5 * value_loss - 0.01 * losses.mean(entropy.sum(-1), rows.weight)
        for loss in (ours, theirs):
            given = torch.autograd.grad(loss, model.network.parameters(), allow_unused=True, materialize_grads=True)
            gradients.append(torch.nn.utils.parameters_to_vector(given))

    model.training_step = training_step
    fit(model, max_steps=1)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5) and gradients[0].abs().max() > 0.01


class Mixed(Crew):
    """A crew that sees pictures, and answers with a choice and two numbers each."""

    def __init__(self):
        super().__init__("tests.environments:Image-v0", size=3)

    def action_space(self, agent):
        return Dict({"which": Discrete(3), "where": Box(-1, 1, (2,), np.float32)})

    def step(self, actions):
        return super().step({agent: action["which"] for agent, action in actions.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("share_encoder", [True, False])
def test_it_learns_from_pictures_with_choices_and_numbers(share_encoder):
    model = tiny(POCA, "tests.algorithms.test_poca.Mixed", share_encoder=share_encoder, encoder_features=8, ratio="per_part")
    before = weights(model)
    fit(model)
    assert model.network.distribution.num_features == 5 and model.network.shares == share_encoder
    assert torch.isfinite(weights(model)).all() and not torch.equal(before, weights(model))


@pytest.mark.thorough
def test_metrics_say_what_the_group_got_and_how_well_it_is_foreseen():
    logger = Rows()
    fit(tiny(POCA, "tests.agents.Mortal", max_env_steps=200), logger=logger)
    names = {name for _, row in logger.rows for name in row}
    assert {"train/explained_variance", "train/baseline_explained_variance", "train/baseline_loss", "train/value_loss"} <= names
    got = [row["rollout/group_ep_rew_mean"] for _, row in logger.rows]
    # a gets t each of four steps, b gets 10 + t in its two, and each 0.1 for action 1
    assert all(27 <= each <= 27.6 for each in got)


@pytest.mark.parametrize(("group_reward", "expected"), [("sum", [10, 12, 2, 3]), ("mean", [5, 6, 2, 3])])
def test_a_group_is_paid_the_sum_or_the_mean_of_those_who_are_there(group_reward, expected):
    model, seen = tiny(POCA, "tests.agents.Mortal", group_reward=group_reward, gamma=0.0, n_steps=4), []
    make = model.make_batch
    model.make_batch = lambda groups: seen.append(make(groups)) or seen[-1]
    fit(model, max_steps=1)
    assert seen[0].returns.view(4, 2)[:, 0].tolist() == pytest.approx(expected, abs=0.21)


@pytest.mark.thorough
def test_a_last_sequence_that_is_shorter_is_filled_with_steps_that_do_not_count():
    model, seen = tiny(POCA, "tests.agents.Visited", memory=GRU(4, 3), batch_size=6, max_env_steps=60), []
    make = model.make_batch
    model.make_batch = lambda groups: seen.append((groups, make(groups))) or seen[-1][1]
    fit(model)
    for groups, batch in seen:
        assert len(batch.weight) == 2 * 9 and int((batch.weight > 0).sum()) == int(groups.present.sum())
        assert float(batch.weight.sum()) == pytest.approx(1) and float(batch.group_weight.sum()) == pytest.approx(1)
        assert batch.episode_start.shape == (3, 6, 2)


@pytest.mark.thorough
def test_it_is_a_learner_among_others_and_may_be_frozen(tmp_path):
    def run(folder, **behaviors):
        torch.manual_seed(0)
        model = lrl.MultiAgent({"id": "tests.agents.Teams", "num_envs": 2}, behaviors, max_env_steps=48)
        trainer = lrl.Trainer(default_root_dir=folder, enable_progress_bar=False, logger=())
        trainer.fit(model)
        return model, trainer.run_folder

    small = {"net_arch": [8], "n_epochs": 1, "n_steps": 6}
    blue = lrl.Behavior("blue_*", partial(PPO, batch_size=12, **small))
    model, folder = run(tmp_path / "one", red=lrl.Behavior("red_*", partial(POCA, batch_size=12, **small)), blue=blue)
    assert model.learners["red"].updates == model.learners["blue"].updates == 4 and model.learners["red"].network.group_size == 2
    again, _ = run(tmp_path / "other", red=lrl.Behavior("red_*", lrl.FrozenPolicy(folder, "red")), blue=blue)
    assert torch.equal(weights(model.learners["red"]), weights(again.algorithms["red"]))
    policy = lrl.load_policy(folder, behavior="red")
    assert policy.act(np.zeros(2, np.float32))[0] in (0, 1)


SAME_TIME, MORTAL = "POCA is for agents that move at the same time", "tests.agents.Mortal"
NO_TEAMS = "self_play of POCA needs self_play.teams, a pattern of agents for each team such as [red_*, blue_*]; or use PPO"


@pytest.mark.parametrize(
    ("env", "settings", "line"),
    [
        ("CartPole-v1", {}, "POCA is for groups of agents, but CartPole-v1 has one agent; use PPO"),
        ("tests.agents.InTurn", {}, f"{SAME_TIME}, but those of tests.agents.InTurn move in turn; use PPO"),
        (MORTAL, {"self_play": {"save_steps": 24}}, NO_TEAMS),
        (MORTAL, {"batch_size": 5}, "batch_size 5 does not divide n_steps * env.num_envs = 8 * 2 = 16 steps of groups; use 2 or 4"),
        (MORTAL, {"attention_size": 6}, "attention_size 6 must be a multiple of 4, the heads of the attention"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(env, settings, line):
    with pytest.raises(SettingError) as raised:
        tiny(POCA, env, **settings)
    assert str(raised.value) == line


# ---------------------------------------------------------------- games


def group_returns_of(model, agents=2):
    """The return of each group that ended in a run, with the steps of agents until then."""
    made, paid, found, steps = watch(model), np.zeros(model.num_envs // agents), [], 0
    fit(model)
    for step in made:
        there, ended = step.valid.reshape(-1, agents), (step.terminated | step.truncated).reshape(-1, agents)
        paid += (step.reward.reshape(-1, agents) * there).sum(1)
        steps += int(there.sum())
        for e in np.flatnonzero((ended | ~there).all(1)):
            found.append((steps, paid[e]))
            paid[e] = 0.0
    return np.array(found)


SACRIFICE = {"net_arch": [32], "learning_rate": 3e-3, "n_steps": 32, "n_epochs": 3, "ent_coef": 0.005, "max_env_steps": 8_000}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("algorithm", "settings"), [(POCA, {"batch_size": 32}), (POCA, {"batch_size": 32, "counterfactual": False}), (PPO, {"batch_size": 64})]
)
def test_an_agent_gives_itself_up_where_credit_goes_beyond_its_death_and_nowhere_else(algorithm, settings, seed):
    torch.manual_seed(seed)
    found = group_returns_of(algorithm({"id": "lightning_rl.envs.games.sacrifice", "num_envs": 8}, **SACRIFICE, **settings))
    last = found[found[:, 0] >= 0.8 * 8_000, 1].mean()
    assert last >= 0.65 if algorithm is POCA else last <= 0.2


def final_rewards(seed, continuous, **settings):
    """What walkers got at their ends."""
    torch.manual_seed(seed)
    env = {"id": "lightning_rl.envs.games.walkers", "num_envs": 8, "kwargs": {"continuous": continuous}}
    small = {"net_arch": [32], "learning_rate": 5e-3, "n_steps": 16, "batch_size": 32, "n_epochs": 3, "max_env_steps": 3_000}
    model = POCA(env, **(small | settings))
    made = watch(model)
    fit(model)
    told = np.concatenate([step.info["is_success"][step.info["_is_success"]] for step in made if step.info])
    return 1.06 * (2 * told - 1)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("continuous", [False, True])
def test_two_walkers_find_their_goals(continuous, seed):
    assert final_rewards(seed, continuous)[-20:].mean() >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"memory": LSTM(16, 8)}, {"clip_range_vf": 0.2}, {"value_transform": "symlog", "value_support": [-4, 4]}]
)
def test_walkers_find_their_goals_with_a_memory_and_other_values(settings):
    assert final_rewards(0, False, max_env_steps=6_000, **settings)[-20:].mean() >= 0.9
