"""Losses of small networks in numpy together with their gradients, for `compile: auto`.

A loss is written down as for `compile: true` (`traced.py`), and its graph computed in numpy (`networks/numpy_graph.py`), which takes no
compiler and a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.algorithms.compiled import CompiledLoss, shapes_of, vector_of, why
from lightning_rl.algorithms.reads import Reads
from lightning_rl.algorithms.run_log import Metric
from lightning_rl.algorithms.traced import COUNTS, Traced, tensors_of
from lightning_rl.networks.flat import FlatParameters
from lightning_rl.networks.numpy_graph import NumpyGraph
from lightning_rl.networks.numpy_mlp import MAX_WIDTH, is_watched
from lightning_rl.types import tree_leaves

UPDATES_BEFORE = 100
"""How many updates of a run are made as they are written: short runs are not worth the trace."""
MOST_BYTES = 2**24
"""Of all arrays of a loss: larger ones leave the processor's cache, where torch is as fast."""
MOST_PROGRAMS = 16
"""Of one loss: one that needs more is computed by torch."""
OURS = ("lightning_rl.", "torch.nn.")


def numpy_losses(algorithm: Any, names: Sequence[str]) -> dict[str, NumpyLoss]:
    """Those of the losses that numpy computes faster, by their names; only of this package's own algorithms and networks, whose code is
    known to do nothing else."""
    ours = all(type(module).__module__.startswith(OURS) for module in algorithm.modules())
    if not ours or algorithm.memory is not None or algorithm.trainer.precision != "32-true":
        return {}
    pairs = enumerate(zip(names, algorithm.raw_optimizers(), strict=False))
    losses = {name: (k, getattr(algorithm, name)) for k, (name, optimizer) in pairs if is_small(vector_of(optimizer))}
    return {name: NumpyLoss(algorithm, loss, k) for name, (k, loss) in losses.items() if loss.__module__.startswith(OURS)}


def is_small(vector: Any) -> bool:
    """Whether it holds narrow layers on a CPU, all in their places."""
    if not isinstance(vector, FlatParameters) or vector.device.type != "cpu" or vector.dtype != torch.float32:
        return False
    narrow = all(part.dim() <= 3 and max((0, *part.shape[-2:])) < MAX_WIDTH for part in vector.parts)
    ends = np.cumsum([0, *(part.numel() for part in vector.parts)])
    return narrow and all(part.data_ptr() == vector.data_ptr() + 4 * end for part, end in zip(vector.parts, ends, strict=False))


class NumpyLoss(CompiledLoss):
    """A loss that is computed in numpy once a run is under way, if numpy can, and as it is written otherwise.

    What it reads from attributes may change: then it is written down anew. This is looked at where updates begin, and before each if there
    are callbacks that follow updates and are not ours.

    Args:
        algorithm: whose it is.
        loss: the method, see `CompiledLoss`.
        optimizer: the number of its optimizer.
    """

    def __init__(self, algorithm: Any, loss: Callable[..., Any], optimizer: int) -> None:
        super().__init__(algorithm, loss, algorithm.raw_optimizers()[optimizer])
        self.optimizer, self.made = optimizer, 0
        self.watchful = not all(type(callback).__module__.startswith(OURS) for callback in algorithm._followers)

    def begin(self) -> None:
        """Updates begin: forget what no longer holds."""
        optimizer = self.algorithm.raw_optimizers()[self.optimizer]
        if vector_of(optimizer) is not self.vector:
            self.vector = vector_of(optimizer)
            self.programs.clear()
        self.programs = {shapes: program for shapes, program in self.programs.items() if program is None or program.holds()}

    def __call__(self, *batch: Any) -> Any:
        if self.algorithm.updates < UPDATES_BEFORE:
            return self.loss(*batch)
        if self.watchful:
            self.begin()
        leaves = tree_leaves(batch)
        tensors, shapes = tensors_of(leaves), shapes_of(leaves)
        if shapes not in self.programs:
            self.programs[shapes] = self._program(batch)
        program = self.programs[shapes]
        return self.loss(*batch) if program is None else self.play(program.seen, batch, *program(tensors))

    def _program(self, batch: Any) -> NumpyProgram | None:
        self.made += 1
        if not is_small(self.vector):
            return None
        if self.made > MOST_PROGRAMS:
            self._say_why(f"what it reads changed {MOST_PROGRAMS} times")
            return None
        try:
            program = NumpyProgram(Traced(self.algorithm, self.loss, self.vector, batch))
        except Exception as error:  # torch and numpy have many ways to say that something cannot be done like this; autograd can
            self._say_why(why(error))
            return None
        return program if program.graph.nbytes <= MOST_BYTES and program.holds() else None

    def _say_why(self, reason: str) -> None:
        self.algorithm.say(f"compile auto: {self.name} is left to torch: {reason}")


class NumpyProgram:
    """A loss and its gradient as a graph in numpy, for batches of one shape."""

    def __init__(self, traced: Traced) -> None:
        self.reads = Reads(traced.algorithm.modules(), {*COUNTS, "log_rows", "finite", "learned"})
        with self.reads.noted():
            module, used = traced.written_down()
        held = traced.held
        lie = {n: traced.examples[k].numpy() for n, k in enumerate(used) if k == 0 or k in held}
        places = [*(held[k] for k in used if k in held), *((kept, name) for _, kept, name in traced.learned)]
        self.held = [(kept, name, kept[name], kept[name].data_ptr()) for kept, name in places]
        self.seen = traced.seen
        self.graph = NumpyGraph(module, lie, first=2)
        self.copied = [(self.graph.inputs[n], traced.sources[k]) for n, k in enumerate(used) if n not in lie]
        self.loss = self.graph.outputs[1]
        self.gradient, _, *self.outputs = map(torch.from_numpy, self.graph.outputs)
        self.others = [value if known else None for value, known in zip(self.outputs, self.graph.at_once[2:], strict=True)]
        self.runs = self.others_of = 0

    def holds(self) -> bool:
        """Whether all that it was made from is as it was."""
        held = all(kept.get(name) is each and each.data_ptr() == place for kept, name, each, place in self.held)
        return held and not any(is_watched(each) for _, _, each, _ in self.held) and self.reads.hold()

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """The gradient, the loss, and what else there is, which must be asked before the next call, for the tensors of a batch."""
        for array, source in self.copied:
            np.copyto(array, source(tensors).detach().numpy())
        self.graph()
        self.runs += 1
        others = [value if value is not None else partial(self._other, k, self.runs) for k, value in enumerate(self.others)]
        return self.gradient.clone(), torch.from_numpy(self.loss.copy()), others

    def _other(self, k: int, run: int) -> Tensor:
        if run != self.runs:
            raise RuntimeError("what a loss returns beside its value is to be asked before the next one is computed")
        if self.others_of != run:
            self.graph.compute_others()
            self.others_of = run
        return self.outputs[k].clone()
