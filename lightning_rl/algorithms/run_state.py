"""What a run holds beside networks, optimizers and callbacks: with it, a run that continues is the one that never stopped."""

from __future__ import annotations

import io
import random
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from lightning_rl.errors import SettingError
from lightning_rl.ranks import of_all_ranks
from lightning_rl.saving.plain import to_arrays, to_plain


def run_states(algorithm: Any) -> list[Any]:
    """The state of each rank as plain data, known to all ranks."""
    own = to_plain(run_state(algorithm))
    if algorithm.trainer.world_size == 1:
        return [own]
    file = io.BytesIO()
    torch.save(own, file)  # the pickles of `all_gather_object` do not know all types of tensors
    return [torch.load(io.BytesIO(state), weights_only=True) for state in of_all_ranks(file.getvalue())]


def run_state(algorithm: Any) -> dict[str, Any]:
    """Of this rank: experience, the place in the log, what learns beside, what was done about bad values, and all random generators."""
    return {
        "num_envs": algorithm.collector.num_envs,
        "data": algorithm.dataset.get_state(),
        "log": algorithm.log_rows.get_state(),
        "guard": algorithm.guard.get_state(),
        "beside": [learner.get_state() for learner in algorithm.side_learners],
        "learning": algorithm.generator.get_state(),
        "noise": algorithm.noise.get_state(),
        "random": random_state(),
    }


def continue_run(algorithm: Any) -> None:
    """Be the run that the checkpoint was made of, as far as it and the environments allow; what they do not is said in one line.

    Raises:
        SettingError: what the checkpoint holds is not the state of such a run.
    """
    state, collector = algorithm.own_state, algorithm.collector
    new_episodes: str | None = "the checkpoint holds none of a run"
    if algorithm.ranks:
        there = f"{len(algorithm.ranks)} x {algorithm.ranks[0]['num_envs']}"
        new_episodes = f"the checkpoint has {there} (ranks x env.num_envs), not {algorithm.trainer.world_size} x {algorithm.num_envs}"
    if state is not None:
        try:
            new_episodes = set_run_state(algorithm, to_arrays(state))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
            reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
            raise SettingError(f"the checkpoint's run cannot be continued ({reason}); --init_from takes only its weights") from error
    else:
        if algorithm.global_rank == 0:  # one rank brings what all ranks had
            collector.env_steps, collector.statistics.episodes = algorithm.env_steps, algorithm.episodes
        if load_buffer(algorithm):
            algorithm.dataset.buffer.cut()
            algorithm.dataset.buffer.draw_anew(algorithm.seed)  # several ranks may have taken the same one
    if new_episodes is not None:
        algorithm.say(f"{algorithm.dataset.anew}: {new_episodes}")
    algorithm.ranks = []


def set_run_state(algorithm: Any, state: dict[str, Any]) -> str | None:
    """The inverse of `run_state`; why something is done anew after all, if it is."""
    load_buffer(algorithm)
    new_episodes = algorithm.dataset.set_state(state["data"])
    algorithm.log_rows.set_state(state["log"])
    for learner, own in zip(algorithm.side_learners, state["beside"], strict=True):
        if (anew := learner.set_state(own)) is not None:
            algorithm.say(anew)
    algorithm.guard.set_state(state["guard"])
    algorithm.generator.set_state(torch.from_numpy(state["learning"]))
    algorithm.noise.set_state(torch.from_numpy(state["noise"]))
    set_random_state(state["random"])
    return new_episodes


def saved_buffer(algorithm: Any) -> tuple[dict[str, Any], int] | None:
    """The manifest of the replay buffer that a checkpoint holds for this rank, and the rank that saved it: not always the same one where
    there were more or fewer. None if there is no buffer, or it is of another number of environments.
    """
    if not algorithm.ranks:
        return None
    number = algorithm.global_rank % len(algorithm.ranks)
    state = algorithm.ranks[number]
    manifest = state["data"].get("replay")
    return None if manifest is None or state["num_envs"] != algorithm.num_envs else (manifest, number)


def load_buffer(algorithm: Any) -> bool:
    """Take over the replay buffer that a checkpoint holds for this rank; whether there is one."""
    saved = saved_buffer(algorithm)
    if saved is None:
        return False
    manifest, number = saved
    algorithm.dataset.load_buffer(manifest, Path(algorithm.trainer.ckpt_path).parent / "last.ckpt.d" / f"rank{number}")
    return True


def random_state() -> dict[str, Any]:
    """The generators that belong to everyone in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse; generators of accelerators that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    for device, words in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
        torch.cuda.set_rng_state(torch.from_numpy(words), device)
