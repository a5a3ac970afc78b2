"""What a policy makes of demonstrated actions, whatever their space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_rl.distributions import Distribution
from lightning_rl.distributions.distribution import split_mask
from lightning_rl.losses import imitation as losses
from lightning_rl.types import Tree

TOP = ((5, 10), (10, 20))
"""k of the top-k accuracies that are told of branches with more than so many choices."""

BOX_LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Generator | None], Tensor]] = {
    "nll": lambda leaf, x, action, generator: -leaf.evaluate(x, action)[0],
    "mse": lambda leaf, x, action, generator: losses.squared_error(leaf.mode(x), action),
    "drawn": lambda leaf, x, action, generator: leaf.drawn_error(x, action, generator),
}


def imitate(
    distribution: Distribution,
    x: Tensor,
    action: Tree,
    mask: Tree,
    box_loss: str,
    label_smoothing: float = 0.0,
    generator: Generator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each dimension or branch `[B, D]`, and how near the policy is to the actions, by name, `[B]` each.

    Choices and bits have cross-entropy, continuous dimensions what `box_loss` says: `nll`, −log π(a|s); `mse`, the squared error of the
    mean; or `drawn`, that of a drawn action, with the bounds at -1 and 1, which σ follows as well.
    Of choices there is their accuracy and rank (0 is the most likely one), the mean over branches; of dimensions the mean absolute
    deviation of the mean, in the environment's units.

    Args:
        distribution: of the policy.
        x: its input, `[B, num_inputs]`.
        action: demonstrated ones, as sampled.
        mask: which choices are legal.
        box_loss: of continuous dimensions.
        label_smoothing: ε of the cross-entropy.
        generator: of the draws.
    """
    costs, told = [], defaultdict(list)
    leaves = distribution.leaves()
    inputs, masks = x.split([leaf.num_inputs for leaf in leaves], -1), split_mask(mask, [leaf.mask_width for leaf in leaves])
    for leaf, part, done, legal in zip(leaves, inputs, distribution.flat(action), masks, strict=True):
        if leaf.sizes:
            log_p, choice = losses.branches(leaf.log_probs(part, legal), leaf.sizes), leaf.choices(done)
            costs.append(losses.cross_entropy(log_p, choice, label_smoothing))
            rank = losses.rank(log_p.detach(), choice)
            told["accuracy"].append(losses.accuracy(log_p.detach(), choice))
            told["action_rank"].append(rank)
            for k, many in TOP:
                large = [branch for branch, size in enumerate(leaf.sizes) if size > many]
                if large:
                    told[f"top_{k}_accuracy"].append(losses.top_k_accuracy(rank[:, large], k))
        else:
            costs.append(BOX_LOSSES[box_loss](leaf, part, done, generator))
            told["mean_abs_deviation"].append(deviation(leaf, leaf.mode(part), done))
    return torch.cat(costs, -1), {name: torch.cat(parts, -1).mean(-1) for name, parts in told.items()}


def deviation(leaf: Any, mean: Tensor, action: Tensor) -> Tensor:
    """|μ − a| as the environment gets them, `[B, D]`."""
    there, here = (leaf.to_env(each.detach().cpu().numpy()) for each in (mean, action))
    return torch.as_tensor(abs(there - here), device=mean.device).flatten(1)
