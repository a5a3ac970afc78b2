"""A graph of ATen's operations, such as a small loss with its gradient, computed in numpy.

For small tensors torch spends its time on what surrounds the arithmetic: dispatch, autograd, new memory. Here all that is settled once:
each result has an array of its own, views are taken when the graph is read, and what is left is a list of calls. What numpy lacks, such as
the error function, torch computes in the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lightning_rl.networks.numpy_activations import ACTIVATIONS
from lightning_rl.networks.numpy_ops import ARITHMETIC, Call, Maker, NotInNumpy, aten, by_torch
from lightning_rl.networks.numpy_places import FILLED, MOVES, VIEWS

MAKERS: dict[Any, Maker] = {**ARITHMETIC, **ACTIVATIONS, **MOVES}
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)


class NumpyGraph:
    """Calls that compute the outputs of a graph, and the arrays where they and its inputs lie.

    Args:
        module: with a graph of operations without side effects but on its own tensors; each node knows its value's shape and type.
        placed: arrays of inputs, by their number, that lie where they are for good. Others are made, to be written before each call.
        first: how many of the outputs a call computes; `compute_others` computes the rest.

    Raises:
        NotInNumpy: there is an operation that is not known, nor has torch one of the kind that writes its result where it is told.
    """

    def __init__(self, module: GraphModule, placed: Mapping[int, np.ndarray], first: int) -> None:
        *nodes, output = module.graph.nodes
        outputs: Any = output.args[0]
        inputs = [node for node in nodes if node.op == "placeholder"]
        reader = Reader(module, {_root(node) for node in nodes if _changes(node)})
        reader.values |= {node: placed[k] if k in placed else _array(node.meta["val"]) for k, node in enumerate(inputs)}
        reads = [node for node in nodes if any(_root(each) in reader.changed for each in (node, *node.all_input_nodes))]
        needed = _with_ancestors([*outputs[:first], *reads])
        self.calls: list[Call] = []
        self.later: list[Call] = []
        for calls, now in ((self.calls, True), (self.later, False)):
            for node in nodes[len(inputs) :]:
                if (node in needed) == now:
                    reader.read(node, calls)
        self.inputs = [reader.values[node] for node in inputs]
        self.outputs = [reader.values[node] for node in outputs]
        self.at_once = [_root(node) in needed for node in outputs]
        """Which of them a call computes."""
        self.nbytes = sum(value.nbytes for value in reader.values.values() if isinstance(value, np.ndarray) and value.base is None)
        """Of all results."""

    def __call__(self) -> None:
        """Compute the first outputs from the inputs."""
        with np.errstate(all="ignore"):  # what is not finite is found where torch's would be
            for call in self.calls:
                call()

    def compute_others(self) -> None:
        """Compute the other outputs, after a call."""
        with np.errstate(all="ignore"):
            for call in self.later:
                call()


class Reader:
    """Finds the place of each node's value, and the calls that bring it there. Equal operations share one, constants are computed now.

    Args:
        module: whose graph it is.
        changed: nodes whose memory other nodes write into.
    """

    def __init__(self, module: GraphModule, changed: set[Node]) -> None:
        self.module, self.changed = module, changed
        self.values: dict[Node, Any] = {}
        self.known: dict[Any, Any] = {}
        self.constant: set[Node] = set()

    def read(self, node: Node, calls: list[Call]) -> None:
        """A node whose arguments are known."""
        self.values[node] = self._value(node, calls)

    def _value(self, node: Node, calls: list[Call]) -> Any:
        """Where a node's value will be, from that of the nodes before it."""
        changes = _root(node) in self.changed
        sees_changes = changes or any(_root(each) in self.changed for each in node.all_input_nodes)
        names = [map_arg(each, self._name) for each in (node.args, tuple(node.kwargs.items()))]
        key = (node.target, getattr(node.meta.get("val"), "dtype", None), *names)
        if not sees_changes and key in self.known:
            return self.known[key]
        begin = self._begin(node)
        constant = not changes and (begin is not None or all(each in self.constant for each in node.all_input_nodes))
        value = self._make(node, [] if constant else calls, constant) if begin is None else begin
        if constant:
            self.constant.add(node)
        elif begin is not None:
            calls.append(partial(np.copyto, value, begin.copy()))
        if not sees_changes:
            self.known[key] = value
        return value

    def _begin(self, node: Node) -> np.ndarray | None:
        """A value that depends on no input, such as zeros to write into."""
        target: Any = node.target
        if node.op == "get_attr":
            return np.array(getattr(self.module, target))
        if target in FILLED:
            args, kwargs = self._arguments(node)
            value = _array(node.meta["val"])
            value.fill(FILLED[target](*args, **kwargs))
            return value
        if node.all_input_nodes:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise NotInNumpy(str(target))
        return np.array(target(*node.args, **node.kwargs))

    def _make(self, node: Node, calls: list[Call], constant: bool) -> Any:
        args, kwargs = self._arguments(node)
        target: Any = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        if target in VIEWS:
            return VIEWS[target](*args, **kwargs)
        if target in PRODUCTS and node not in self.changed and (factor := self._times_one(node)) is not None:
            return factor
        operation = _in_new_memory(target)
        maker = MAKERS[operation] if operation in MAKERS else by_torch(operation)
        out = args[0] if _changes(node) else _array(node.meta["val"])
        new = maker(out, *args, **kwargs)
        calls += new
        for call in new if constant else ():
            call()
        return out

    def _arguments(self, node: Node) -> tuple[Any, Any]:
        args, kwargs = (map_arg(each, self.values.__getitem__) for each in (node.args, node.kwargs))
        return args, kwargs

    def _times_one(self, node: Node) -> np.ndarray | None:
        """The other factor of a product with ones, with which every gradient begins."""
        wanted = node.meta["val"]
        for one, other in (node.args, node.args[::-1]):
            ones = one == 1 if not isinstance(one, Node) else one in self.constant and bool((self.values[one] == 1).all())
            if ones and isinstance(other, Node) and _root(other) not in self.changed and other.meta["val"].dtype == wanted.dtype:
                return np.broadcast_to(self.values[other], tuple(wanted.shape))
        return None

    def _name(self, node: Node) -> tuple[str, int]:
        return "value", id(self.values[node])


def _array(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_array(each) for each in value]
    return np.empty(tuple(value.shape), torch.empty(0, dtype=value.dtype).numpy().dtype)


def _changes(node: Node) -> bool:
    """Whether it writes into its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _in_new_memory(target: Any) -> Any:
    """The operation that returns what this one writes into its first argument; or itself."""
    if not target._schema.is_mutable:
        return target
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"))
    return getattr(packet, target._overloadname, None)


def _root(node: Node) -> Node:
    """The node in whose memory a value lies."""
    while node.target in VIEWS or node.target is operator.getitem or _changes(node):
        node = node.all_input_nodes[0]
    return node


def _with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
