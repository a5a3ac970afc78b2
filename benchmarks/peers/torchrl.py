"""PPO of TorchRL on scenarios of VMAS, all agents with one policy and one critic, built as its tutorial of several agents builds it.

Its collector, GAE, replay buffer without replacement and clipped loss, with their defaults; nothing is logged or saved, so that the
tutorial's `RewardSum` is left out too. 64 x 64 tanh for policy and critic each. Steps are those of agents: a frame of TorchRL is a step of
a copy and holds all of its agents, so a minibatch has the rows of ours in a third as many frames where there are three. What it does
otherwise: a normal distribution through tanh whose σ depends on the observation, its entropy from a sample, Huber's loss for values,
advantages as they are, and each episode's end as a termination.
"""

from __future__ import annotations

import torch
from cases import Case
from clock import Clock, measure
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

SEEN, VALUE, LOG_PROB = ("agents", "observation"), ("agents", "state_value"), ("agents", "action_log_prob")
NORMAL = [("agents", "loc"), ("agents", "scale")]


def mlp(env: VmasEnv, outputs: int) -> MultiAgentMLP:
    """Two hidden layers that all agents share, each for what it sees itself."""
    return MultiAgentMLP(
        n_agent_inputs=env.observation_spec[SEEN].shape[-1],
        n_agent_outputs=outputs,
        n_agents=env.n_agents,
        centralised=False,
        share_params=True,
        depth=2,
        num_cells=64,
        activation_class=nn.Tanh,
    )


def make_policy(env: VmasEnv) -> ProbabilisticActor:
    """Draws actions within the bounds."""
    action = env.full_action_spec_unbatched[env.action_key]
    net = nn.Sequential(mlp(env, 2 * action.shape[-1]), NormalParamExtractor())
    return ProbabilisticActor(
        module=TensorDictModule(net, in_keys=[SEEN], out_keys=NORMAL),
        spec=env.full_action_spec_unbatched,
        in_keys=NORMAL,
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": action.space.low, "high": action.space.high},
        return_log_prob=True,
        log_prob_key=LOG_PROB,
    )


def make_loss(case: Case, env: VmasEnv, policy: ProbabilisticActor) -> ClipPPOLoss:
    """The clipped surrogate, with the estimate of advantages."""
    critic = TensorDictModule(mlp(env, 1), in_keys=[SEEN], out_keys=[VALUE])
    loss = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=case.settings["ent_coef"])
    ends = {"done": ("agents", "done"), "terminated": ("agents", "terminated")}
    loss.set_keys(reward=env.reward_key, action=env.action_key, sample_log_prob=LOG_PROB, value=VALUE, **ends)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=case.settings["gamma"], lmbda=case.settings["gae_lambda"])
    return loss


def for_agents(data: TensorDict, env: VmasEnv) -> None:
    """Give each agent the end of its copy's episode, which the estimate of advantages wants beside its reward."""
    after = data["next"]
    for name in ("done", "terminated"):
        after["agents", name] = after[name].unsqueeze(-1).expand(after[env.reward_key].shape)


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    torch.manual_seed(1)
    given, frames, batch = case.settings, case.rows // case.agents, case.settings["batch_size"] // case.agents
    env = VmasEnv(case.env.removeprefix("vmas."), num_envs=case.num_envs, continuous_actions=True, max_steps=100, device=device, seed=1)
    policy = make_policy(env)
    loss = make_loss(case, env, policy)
    collector = Collector(env, policy, device=device, frames_per_batch=frames, total_frames=case.steps // case.agents)
    replay = ReplayBuffer(storage=LazyTensorStorage(frames, device=device), sampler=SamplerWithoutReplacement(), batch_size=batch)
    optimizer = torch.optim.Adam(loss.parameters(), given["learning_rate"])
    clock.follow_torch()
    clock.start()
    steps = updates = 0
    for data in collector:
        for_agents(data, env)
        with torch.no_grad():
            loss.value_estimator(data, params=loss.critic_network_params, target_params=loss.target_critic_network_params)
        replay.extend(data.reshape(-1))
        steps += data.numel() * case.agents
        for _ in range(given["n_epochs"] * (frames // batch)):
            found = loss(replay.sample())
            (found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), given["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
        collector.update_policy_weights_()
    clock.stop()
    collector.shutdown()
    return steps, updates


if __name__ == "__main__":
    measure(train)
