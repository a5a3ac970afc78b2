"""Policies of soft actor-critic for any action space."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from lightning_rl.distributions.distribution import Distribution, split_mask
from lightning_rl.distributions.gaussian import SquashedGaussian
from lightning_rl.types import Tree, tree_leaves

MIN_LOG_PROB = -1e9
"""Replaces the log-probability of an illegal choice: its product with the probability 0 must be 0."""


class SoftSample(NamedTuple):
    """A policy at B observations.

    action: `[B, A]`, a reparameterized sample of all continuous dimensions in [-1, 1]; None if there are none.
    probs: `[B, M]`, the probabilities of all choices, branch by branch.
    entropy: `[B, K]`, for each kind of action: −log π of the continuous sample in [-1, 1], the exact entropy of the choices.
    log_prob: `[B, A]`, log-probability of the sample for each dimension; None if there are none.
    """

    action: Tensor | None
    probs: Tensor
    entropy: Tensor
    log_prob: Tensor | None


class SoftActions(nn.Module):
    """A sample of a distribution's continuous dimensions, with the probabilities of all choices of its discrete branches.

    A critic takes the A continuous dimensions as input and returns M values, one for each choice of each branch. Q of an action is the
    mean over branches of the chosen values. A space without choices has one branch with one choice. This is exact for one branch; for
    several branches it is the additive approximation of ML-Agents, which avoids the product of all branches.
    """

    start: Tensor
    distribution: Distribution

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        vars(self)["distribution"] = distribution  # not a submodule: its weights belong to the network
        self.leaves = distribution.leaves()
        self.inputs = [leaf.num_inputs for leaf in self.leaves]
        self.mask_widths = [leaf.mask_width for leaf in self.leaves]
        self.boxes = [isinstance(leaf, SquashedGaussian) for leaf in self.leaves]
        self.widths = [leaf.num_parts for leaf, box in zip(self.leaves, self.boxes, strict=True) if box]
        branches = [leaf.sizes for leaf, box in zip(self.leaves, self.boxes, strict=True) if not box]
        self.sizes = [size for sizes in branches for size in sizes]
        self.leaf_choices = [sum(sizes) for sizes in branches] or [1]
        self.num_actions = sum(self.widths)
        self.num_branches, self.num_choices = max(1, len(self.sizes)), sum(self.leaf_choices)
        self.kinds = ["continuous"] * any(self.boxes) + ["discrete"] * bool(self.sizes)
        self.register_buffer("start", torch.tensor([0, *self.sizes[:-1]]).cumsum(0), persistent=False)

    def noise(self, num: int, generator: Generator) -> Tensor:
        """Sample standard normal noise `[num, A]` for the continuous dimensions."""
        parts = [torch.empty(num, width, device=generator.device).normal_(generator=generator) for width in self.widths]
        return torch.cat(parts or [torch.empty(num, 0, device=generator.device)], -1)

    def evaluate(self, x: Tensor, noise: Tensor, mask: Tree = ()) -> SoftSample:
        """Return the policy for `x [B, num_inputs]`, with continuous dimensions sampled with `noise [B, A]`."""
        draws, log_probs = [], []
        noises = iter(noise.split(self.widths, -1))
        masks = split_mask(mask, self.mask_widths) if len(mask) else [()] * len(self.leaves)
        for leaf, box, part, legal in zip(self.leaves, self.boxes, x.split(self.inputs, -1), masks, strict=True):
            if box:
                draws.append(leaf.rsample(part, next(noises)))
            else:
                log_probs.append(leaf.log_probs(part, legal).clamp(min=MIN_LOG_PROB))
        action, log_prob, probs, entropy = None, None, torch.ones_like(x[:, :1]), []
        if draws:
            action, log_prob = (torch.cat(parts, -1) for parts in zip(*draws, strict=True))
            entropy.append(-log_prob.sum(-1, keepdim=True))
        if log_probs:
            log_p = torch.cat(log_probs, -1)
            probs = log_p.exp()
            entropy.append(-(probs * log_p).sum(-1, keepdim=True))
        return SoftSample(action, probs, torch.cat(entropy, -1), log_prob)

    @torch.no_grad()
    def metrics(self, sample: SoftSample, alpha: Tensor, mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the mean entropy and the temperature α `[K]` of each kind of action, and the entropy of each part of a Dict or Tuple."""
        metrics: dict[str, Tensor] = {}
        for k, kind in enumerate(self.kinds):
            suffix = f"_{kind}" if len(self.kinds) > 1 else ""
            metrics |= {f"entropy{suffix}": mean(sample.entropy[:, k]), f"ent_coef{suffix}": alpha[k]}
        if names := self.distribution.names:
            entropies = self.leaf_entropies(sample)
            metrics |= {f"train/entropy/{part}": mean(entropies[:, k]) for k, part in enumerate(names)}
        return metrics

    @torch.no_grad()
    def leaf_entropies(self, sample: SoftSample) -> Tensor:
        """Return the contribution of each leaf of the action to a sample's entropies, `[B, leaves]`."""
        draws = iter(() if sample.log_prob is None else sample.log_prob.split(self.widths, -1))
        choices = iter(sample.probs.split(self.leaf_choices, -1))
        entropies = [-next(draws).sum(-1) if box else torch.special.entr(next(choices)).sum(-1) for box in self.boxes]
        return torch.stack(entropies, -1)

    def continuous(self, action: Tree) -> Tensor | None:
        """Return the continuous dimensions `[B, A]` of stored actions; None if there are none."""
        if self.boxes == [True]:
            return tree_leaves(action)[0]
        actions = [part for box, part in zip(self.boxes, self.distribution.flat(action), strict=True) if box]
        return torch.cat(actions, -1) if actions else None

    def choices(self, action: Tree) -> Tensor:
        """Return the indices of stored actions' choices among the M, `[B, branches]`."""
        if not self.sizes:
            return self.start.expand(len(tree_leaves(action)[0]), 1)
        parts = self.distribution.flat(action)
        choices = [leaf.choices(part) for leaf, box, part in zip(self.leaves, self.boxes, parts, strict=True) if not box]
        return torch.cat(choices, -1) + self.start

    def target_entropy(self, multiplier: float, scale: float) -> dict[str, float]:
        """Return a target for each kind: multiplier · −dim(A) (Haarnoja et al. 2018b), and scale · Σ log n (Christodoulou 2019)."""
        targets = {"continuous": -multiplier * self.num_actions, "discrete": scale * sum(map(math.log, self.sizes))}
        return {kind: targets[kind] for kind in self.kinds}

    def attainable(self, target: Tensor, mask: Tree) -> Tensor:
        """Return target entropies `[K]`, or with a mask `[B, K]`, where the target for choices scales with the maximum of legal choices.

        That maximum is Σ log n of the legal choices. With an unattainable target, the temperature would rise forever.
        """
        most = sum(map(math.log, self.sizes))
        if isinstance(mask, tuple) or not most:
            return target
        parts = zip(self.leaves, split_mask(mask, self.mask_widths), strict=True)
        shares = [part.float().mean(-1) for leaf, legal in parts if leaf.mask_width for part in legal.split(leaf.sizes, -1)]
        left = 1 + torch.stack(shares, -1).log().sum(-1, keepdim=True) / most
        return torch.cat([target[:-1].expand(len(left), -1), target[-1:] * left], -1)
