"""A loss as a function of tensors alone, for `compiled.py` and `numpy_losses.py`.

It may see nothing change from call to call but its batch, the parameters and buffers of the algorithm, its draws, and the counts of a run.
All these go in as tensors, so that Python that decides by their values is an error when the function is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from lightning_rl.errors import SettingError
from lightning_rl.networks.flat import FlatParameters
from lightning_rl.networks.tape import in_torch
from lightning_rl.types import Tree, tree_leaves, tree_map

COUNTS = {"progress": torch.float64, "began_at": torch.int64, "env_steps": torch.int64, "updates": torch.int64, "episodes": torch.int64}
Source = Callable[[Sequence[Tensor]], Tensor]
"""An input, from the tensors of a batch."""


class Seen(NamedTuple):
    """What a loss did beside its value.

    checked: names under which it asked whether it is finite.  returned: its tree, true where it had a function.  recorded: names.
    """

    checked: list[str]
    returned: Tree
    recorded: list[str]


class Traced:
    """The gradient of a loss, the loss, what else it returned, what it recorded, and errors of its batch, from `sources`.

    Args:
        algorithm: whose loss it is.
        loss: its method.
        vector: of the optimizer, whose gradient is meant.
        batch: arguments of the loss.
    """

    seen: Seen

    def __init__(self, algorithm: Any, loss: Callable[..., Any], vector: FlatParameters, batch: Tree) -> None:
        self.algorithm, self.vector, self.batch, self.given = algorithm, vector, batch, tensors_of(tree_leaves(batch))
        self.loss = loss
        kept = [each for module in algorithm.modules() for each in (module._parameters, module._buffers)]
        places = [(each, name) for each in kept for name, tensor in each.items() if tensor is not None]
        part_of = {id(part): k for k, part in enumerate(vector.parts)}
        self.learned = [(part_of[id(each[name])], each, name) for each, name in places if id(each[name]) in part_of]
        self.others = [(each, name) for each, name in places if id(each[name]) not in part_of]
        self.held = {1 + len(self.given) + k: place for k, place in enumerate(self.others)}
        """Inputs that are parameters and buffers, by their number: the dictionary that has them, and their name there."""
        flat, rows = vector.detach(), map(itemgetter, range(len(self.given)))
        held = (partial(_held, *place) for place in self.others)
        counts = (partial(_count, algorithm, name, dtype) for name, dtype in COUNTS.items())
        self.sources: list[Source] = [lambda _: flat, *rows, *held, *counts]
        self.examples, self.first_draw = [source(self.given).detach() for source in self.sources], len(self.sources)
        draws = self._draws()
        self.sources += draws.sources
        self.examples += draws.examples

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        rest = iter(inputs)
        vector = next(rest).detach().requires_grad_()
        batch = [next(rest) for _ in self.given]
        parts = self.vector.parts
        pieces = [piece.view_as(part) for piece, part in zip(vector.split([part.numel() for part in parts]), parts, strict=True)]
        with ExitStack() as stack:
            for each, name in self.others:
                stack.enter_context(replaced(each, {name: next(rest).detach()}))
            for k, each, name in self.learned:
                stack.enter_context(replaced(each, {name: pieces[k]}))
            stack.enter_context(replaced(vars(self.algorithm), {name: next(rest) for name in COUNTS}))
            with torch.enable_grad(), Given(rest):
                loss, *others = self._run(batch)
                (gradient,) = torch.autograd.grad(loss, vector)
        return [gradient, *(each.detach() for each in (loss, *others))]

    def written_down(self) -> tuple[GraphModule, list[int]]:
        """The function as a graph of torch's own operations, and which of the inputs it takes."""
        module = make_fx(self, tracing_mode="fake")(*self.examples)  # real tensors would let numpy read what is a constant then
        module.graph.eliminate_dead_code()
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        used = [k for k, node in enumerate(inputs) if node.users or k >= self.first_draw]  # what is drawn is drawn, used or not
        for k in set(range(len(inputs))).difference(used):
            module.graph.erase_node(inputs[k])
        module.recompile()
        return module, used

    def _draws(self) -> Noted:
        """Run the loss once as it is, to see what it draws; as if it had not."""
        generator: Generator = self.algorithm.noise
        state = generator.get_state()
        try:
            with Noted() as draws:
                self._run(self.given)
        finally:
            generator.set_state(state)
        return draws

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        rest, log, checked, errors = iter(tensors), Recording(), [], []
        batch = tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self.batch)

        def finite(name: str, loss: Tensor) -> Tensor:
            checked.append(name)
            return loss

        def learned(batch: Any, function: Callable[[], Tensor]) -> None:
            errors.append(function())

        with in_torch(), replaced(vars(self.algorithm), {"log_rows": log, "finite": finite, "learned": learned}):
            returned = self.loss(*batch)
            recorded = {name: _mean([_called(value) for value in values]) for name, values in log.recorded.items()}
        self.seen = Seen(checked, tree_map(callable, returned), list(recorded))
        return [*map(_called, tree_leaves(returned)), *recorded.values(), *errors]


class Recording:
    """Keeps what is recorded as it is, in place of a `RunLog`, which keeps numbers."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[Any]] = {}

    def record(self, **values: Any) -> None:
        for name, value in values.items():
            self.recorded.setdefault(name, []).append(value)


class Noted(TorchFunctionMode):
    """Keeps how random tensors were drawn from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Source] = []
        self.examples: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if kwargs and kwargs.get("generator") is not None:
            in_place = bool(args) and result is args[0]
            if any(isinstance(each, Tensor) for each in (*args[in_place:], *kwargs.values())):
                raise SettingError(f"compile: a loss draws by numbers that change, in {function.__name__}; draw noise and compute the rest")
            self.sources.append(partial(_drawn, function, in_place, args, kwargs))
            self.examples.append(result.clone())
        return result


class Given(TorchFunctionMode):
    """Gives tensors instead of drawing them."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            drawn = next(self.tensors)
            in_place = getattr(function, "__name__", "").endswith("_")
            return args[0].copy_(drawn) if in_place else drawn
        return function(*args, **(kwargs or {}))


@contextmanager
def replaced(dictionary: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """A dictionary with other values for a while, such as that of an object's attributes."""
    before = {name: dictionary[name] for name in values if name in dictionary}
    dictionary.update(values)
    try:
        yield
    finally:
        dictionary.update(before)
        for name in values.keys() - before.keys():
            del dictionary[name]


def tensors_of(leaves: Iterable[Any]) -> list[Tensor]:
    """Those that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def _held(kept: dict[str, Tensor], name: str, _: Sequence[Tensor]) -> Tensor:
    return kept[name]  # asked each time, for it may be another tensor then


def _count(algorithm: Any, name: str, dtype: torch.dtype, _: Sequence[Tensor]) -> Tensor:
    return torch.tensor(getattr(algorithm, name), dtype=dtype)


def _drawn(function: Any, in_place: bool, args: Any, kwargs: Any, _: Sequence[Tensor]) -> Tensor:
    return function(torch.empty_like(args[0]), *args[1:], **kwargs) if in_place else function(*args, **kwargs)
