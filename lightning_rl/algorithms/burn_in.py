"""A start in which only the value function learns, for a policy that was learned elsewhere."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, Optimizer


def end_burn_in(algorithm: Any, optimizer: Optimizer) -> None:
    """After learning: if the burn-in of the value function ends with this iteration, let Adam begin anew.

    Adam corrects the bias of its moments by one count of steps for all parameters (Kingma and Ba 2015, alg. 1). Those of the policy were 0
    until now: after a long burn-in its first steps would be up to (1 − 0.9ᵏ) / √(1 − 0.999ᵏ) = 6.6 (k = 12) times as long as the learning
    rate, and could undo in one rollout what it was begun with. RMSprop corrects nothing and goes on.
    """
    if isinstance(optimizer, Adam) and algorithm.began_at < algorithm.critic_burn_in_steps <= algorithm.env_steps:
        optimizer.state.clear()
