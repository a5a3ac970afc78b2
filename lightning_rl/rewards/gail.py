"""Generative adversarial imitation (Ho and Ermon 2016, https://arxiv.org/abs/1606.03476), with a gradient penalty, optionally as VAIL."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_rl.distributions import Distribution, make_distribution
from lightning_rl.errors import check_flag
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.networks.encoders import OneHotEncoder, TreeEncoder
from lightning_rl.networks.mlp import mlp
from lightning_rl.processes.ranks import mean_over_ranks
from lightning_rl.rewards.signal import LearnedSignal
from lightning_rl.spaces import Spaces
from lightning_rl.types import Experience, State, Tree, tree_leaves, tree_map

EPSILON = 1e-7
PENALTY = 10.0
BOTTLENECK, INFORMATION, BETA_RATE = 128, 0.5, 5e-4
"""VAIL's width of the code, bound of its information, and step size of β (Peng et al. 2019)."""


class GAIL(LearnedSignal):
    """Rewards imitation of demonstrations: −log(1 − D), where the discriminator D separates demonstrations from the policy's own steps.

    L = −E[log D_E + log(1 − D_π)] + 10 · E[(‖∇D(x̂)‖ − 1)²], with x̂ interpolated between a demonstrated and an own row by one random u per
    row, and the norm over all inputs together (Gulrajani et al. 2017). With `use_vail`, D sees a noisy code whose information is held at
    0.5 by a learned coefficient β.

    Args:
        spaces: spaces of the environment.
        actions: returns the policy's distribution, after it is built.
        demo_path: a Minari id or path, or a `.demo` file of Unity or a folder of such files.
        use_actions: D also sees actions, on the environment's scale, and whether the episode terminated.
        use_vail: use the variational bottleneck (Peng et al. 2019, https://arxiv.org/abs/1810.00821).
        learning_rate: learning rate of Adam.
        encoding_size: width of the hidden layers.
        encoder: image encoder, as for the algorithm.
        normalize: normalize observations by running statistics of the demonstrations.
        gamma, strength, ignore_done: see `RewardSignal`.
    """

    def __init__(
        self,
        spaces: Spaces,
        actions: Callable[[], Distribution],
        demo_path: str,
        gamma: float = 0.99,
        strength: float = 1.0,
        ignore_done: bool = False,
        use_actions: bool = False,
        use_vail: bool = False,
        learning_rate: float = 3e-4,
        encoding_size: int = 128,
        encoder: str = "auto",
        normalize: bool = False,
    ) -> None:
        super().__init__(spaces, gamma, strength, ignore_done, learning_rate, encoding_size, normalize)
        check_flag("reward_signals.gail.use_actions", use_actions)
        check_flag("reward_signals.gail.use_vail", use_vail)
        self.actions, self.use_actions, self.demo_path = actions, use_actions, demo_path
        self.encode = TreeEncoder(spaces.observation, encoder, encoding_size)
        width = make_distribution(spaces.action).num_features + 1 if use_actions else 0
        self.body = mlp(self.encode.num_features + width, [encoding_size, encoding_size], "silu")
        self.bottleneck = Bottleneck(encoding_size) if use_vail else None
        self.head = nn.Linear(BOTTLENECK if use_vail else encoding_size, 1)
        nn.init.xavier_uniform_(self.head.weight, 0.2)
        nn.init.zeros_(self.head.bias)
        self.scales = [float(getattr(leaf, "scale", 1.0)) for leaf in self.encode.leaves]
        for leaf in self.encode.leaves:
            if hasattr(leaf, "scale"):
                leaf.scale = 1.0  # type: ignore[assignment]  # `inputs` scales them, before the gradient penalty
        self.shown: Experience | None = None
        self.generator = torch.Generator()

    def show(self, obs: Tree, action: Tree, terminated: Tensor, seed: int) -> None:
        """Set the demonstrations before training, as rows `[M, ...]`: `action` as sampled, `terminated` if the episode ended there."""
        obs = tree_map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, obs)  # as in rollouts
        self.shown = Experience(obs, action, (), (), terminated)
        self.generator.manual_seed(seed)

    def reward(self, experience: Experience) -> Tensor:
        return -torch.log1p(-self.discriminate(self.inputs(experience), noisy=False)[0] * (1 - EPSILON))

    def loss(self, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.shown is not None
        weight, device = experience.weight, experience.weight.device
        rows = torch.randint(len(self.shown.terminated), (len(weight),), generator=self.generator)
        shown = tree_map(lambda leaf: leaf[rows].to(device), self.shown)
        self.normalizer.update(shown.obs)
        policy, expert = self.inputs(experience), self.inputs(shown)
        (judged, code), (judged_expert, expert_code) = self.discriminate(policy), self.discriminate(expert)
        loss = mean(discriminator_loss(judged_expert, judged), weight)
        between = torch.rand(len(weight), generator=self.generator).to(device)
        penalty = mean(gradient_penalty(lambda inputs: self.discriminate(inputs)[0], policy, expert, between), weight)
        metrics = {"loss": loss, "grad_mag_loss": penalty}
        metrics |= {"policy_estimate": mean(judged, weight), "expert_estimate": mean(judged_expert, weight)}
        total = loss + PENALTY * penalty
        if self.bottleneck is not None:
            information = mean(kl_divergence(expert_code, code, self.bottleneck.sigma), weight)
            price, beta = self.bottleneck.price(information)
            total, metrics = total + price, metrics | {"beta": beta, "kl_loss": information}
        return total, metrics

    def get_state(self) -> State:
        return {"generator": self.generator.get_state()}

    def set_state(self, state: State) -> None:
        self.generator.set_state(torch.from_numpy(state["generator"]))

    def inputs(self, experience: Experience) -> list[Tensor]:
        """Return all inputs of D as floats `[..., *leaf]`: observations normalized, bytes in [0, 1], choices one-hot."""
        inputs = []
        for leaf, encoder, scale in zip(tree_leaves(self.normalizer(experience.obs)), self.encode.leaves, self.scales, strict=True):
            if isinstance(encoder, OneHotEncoder):
                leaf = encoder(leaf)
            inputs.append(leaf if leaf.is_floating_point() else leaf.float() * scale)
        if self.use_actions:
            action = self.actions().features(experience.action)
            inputs.append(torch.cat([action, experience.terminated.unsqueeze(-1).to(action)], -1))
        return inputs

    def discriminate(self, inputs: list[Tensor], noisy: bool = True) -> tuple[Tensor, Tensor]:
        """Return D(x) in (0, 1), and its code before noise."""
        leaves = zip(self.encode.leaves, inputs, strict=False)
        features = [x if isinstance(encoder, OneHotEncoder) else encoder(x) for encoder, x in leaves]
        seen = code = self.body(torch.cat([*features, *inputs[len(features) :]], -1))
        if self.bottleneck is not None:
            code = self.bottleneck(code)
            seen = self.bottleneck.draw(code, self.generator) if noisy else code
        return self.head(seen).squeeze(-1).float().sigmoid(), code


class Bottleneck(nn.Module):
    """A code z = μ + σ ξ whose information about the input is held at 0.5 by a coefficient β, which rises while there is more."""

    beta: Tensor

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.mean = nn.Linear(num_inputs, BOTTLENECK)
        nn.init.kaiming_normal_(self.mean.weight, nonlinearity="linear")
        self.mean.weight.detach().mul_(0.1)
        nn.init.zeros_(self.mean.bias)
        self.sigma = nn.Parameter(torch.ones(BOTTLENECK))
        self.register_buffer("beta", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(x)

    def draw(self, code: Tensor, generator: torch.Generator) -> Tensor:
        return code + self.sigma * torch.randn(code.shape, generator=generator).to(code)

    def price(self, information: Tensor) -> tuple[Tensor, Tensor]:
        """Return β (KL − 0.5) and its β, and then update β by the mean information of all ranks."""
        excess, beta = information - INFORMATION, self.beta.clone()
        self.beta.copy_((self.beta + BETA_RATE * mean_over_ranks(excess.detach())).clamp(min=0))
        return beta * excess, beta


def discriminator_loss(expert: Tensor, policy: Tensor) -> Tensor:
    """Compute −log D_E − log(1 − D_π) for each row (Ho and Ermon 2016, eq. 17)."""
    return -(expert + EPSILON).log() - (1 - policy + EPSILON).log()


def gradient_penalty(discriminator: Callable[[list[Tensor]], Tensor], policy: list[Tensor], expert: list[Tensor], u: Tensor) -> Tensor:
    """Compute (‖∇D(x̂)‖ − 1)² for each row, x̂ = u policy + (1 − u) expert (Gulrajani et al. 2017, eq. 3)."""
    mixed = []
    for x, shown in zip(policy, expert, strict=True):
        share = u.view(-1, *[1] * (x.dim() - 1))
        mixed.append((share * x + (1 - share) * shown).detach().requires_grad_())
    gradients = torch.autograd.grad(discriminator(mixed).sum(), mixed, create_graph=True)
    squares = torch.stack([gradient.reshape(len(u), -1).square().sum(1) for gradient in gradients]).sum(0)
    return ((squares + EPSILON).sqrt() - 1).square()


def kl_divergence(expert: Tensor, policy: Tensor, sigma: Tensor) -> Tensor:
    """Compute the information of both codes, Σ_d −(1 + log σ² − ½ μ_E² − ½ μ_π² − σ²), for each row (Peng et al. 2019, eq. 8)."""
    variance = sigma.square()
    return -(1 + variance.log() - 0.5 * expert.square() - 0.5 * policy.square() - variance).sum(-1)
