"""Vector environments that live on a device: they give and take tensors.

Such an environment is a `gymnasium.vector.VectorEnv` with an attribute `device`: its observations are trees of tensors `[N, ...]`, rewards,
terminations and truncations tensors `[N]`, its metadata name the autoreset mode, SAME_STEP or NEXT_STEP. In SAME_STEP the info of a step
that ended an episode has `final_obs [N, ...]`, of which the rows of copies that ended count. A mask of the next actions is
`info["action_mask"]`, that of actions at `final_obs` is `info["final_action_mask"]`, which only replay and random steps read.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import Tensor

from lightning_rl.envs import Info, Options
from lightning_rl.spaces import MASK
from lightning_rl.types import Tree, tree_map, tree_to_numpy

FINAL_MASK = "final_action_mask"


def gives_tensors(envs: VectorEnv) -> bool:
    """Return whether a vector environment gives and takes tensors."""
    return hasattr(envs, "device") and not isinstance(envs, HostView)


class HostView(VectorWrapper):
    """Environments on a device, seen with arrays: for everything that works on the host. `env` is what it shows."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.target: Any = env.device  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return tree_to_numpy(obs), on_host(info)

    def step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Info]:
        taken = tree_map(lambda leaf: torch.as_tensor(np.ascontiguousarray(leaf), device=self.target), actions)
        obs, reward, terminated, truncated, info = self.env.step(taken)
        info = on_host(info)
        if FINAL_MASK in info:  # where gymnasium has it
            info["final_info"] = {**info, MASK: info[FINAL_MASK]}
        return *tree_to_numpy((obs, reward, terminated, truncated)), info


def on_host(info: Any) -> Any:
    """Return an info with arrays for tensors."""
    if isinstance(info, dict):
        return {key: on_host(value) for key, value in info.items()}
    if isinstance(info, tuple):
        return tuple(map(on_host, info))
    return info.detach().cpu().numpy() if isinstance(info, Tensor) else info
