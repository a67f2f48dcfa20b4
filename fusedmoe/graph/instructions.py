"""A captured pass as a list of instructions with a dependency graph (Lancet §4.1)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import fx

from fusedmoe.compat.torch import schema_of_operator

OPERATOR: type = type(torch.ops.aten.view.default)

_COLLECTIVES = "_c10d_functional"
_VIEWS = frozenset(
    {
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    }
)  # fmt: skip


def schema_of(target: Any) -> Any:
    return schema_of_operator(target) if isinstance(target, OPERATOR) else None


# Substitute for data-dependent sizes, as of `nonzero`: equal on all ranks.
_UNKNOWN_SIZE = 4096


def is_collective(node: fx.Node) -> bool:
    return _namespace(node) == _COLLECTIVES and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    return _namespace(node) == _COLLECTIVES and name_of(node) == "wait_tensor"


def is_all_to_all(node: fx.Node) -> bool:
    return _namespace(node) == _COLLECTIVES and name_of(node) == "all_to_all_single"


def is_view(node: fx.Node) -> bool:
    return (
        node.op == "get_attr"
        or node.target is operator.getitem
        or (_namespace(node) == "aten" and name_of(node) in _VIEWS)
    )


def is_compute(node: fx.Node) -> bool:
    return not (is_collective(node) or is_wait(node) or is_view(node))


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return argument_of(node, "dropout_p") != 0.0


def is_mutating(node: fx.Node) -> bool:
    """Return whether the node may modify memory that another node reads; True for opaque calls."""
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable or node.op in ("call_module", "call_method")


def is_assertion(node: fx.Node) -> bool:
    assertions = ("_assert_async", "_assert_scalar", "_assert_tensor_metadata")
    return _namespace(node) == "aten" and name_of(node) in assertions


def describe(node: fx.Node) -> str:
    position, count = list(node.graph.nodes).index(node), len(node.graph.nodes)
    lines = re.findall(r'File "(.+)", line (\d+), in', node.stack_trace or "")
    line = f", {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return f"{node.name} ({node.target}, node {position} of {count}{line})"


def group_of(start: fx.Node) -> Any:
    return argument_of(start, "group_name") or argument_of(start, "group")


def argument_of(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by name, or its default; None if the operator has no such argument."""
    for index, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            given = node.args[index] if index < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def concrete_size(number: Any) -> int:
    """Return a size as int: of a symbolic size its value at capture, or 4096 if unknown."""
    if isinstance(number, int):
        return number
    hint = number.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def bytes_of(node: fx.Node) -> int:
    tensor = node.meta["val"]
    return math.prod(map(concrete_size, tensor.shape)) * int(tensor.element_size())


# Sets of instructions are ints whose bit i stands for instruction i.


def set_bits(bit_set: int) -> Iterator[int]:
    while bit_set:
        lowest = bit_set & -bit_set
        yield lowest.bit_length() - 1
        bit_set ^= lowest


def union(bit_sets: Iterable[int]) -> int:
    return reduce(operator.or_, bit_sets, 0)


def insert_single_waits(graph: fx.Graph) -> None:
    """Rewrite the graph to wait exactly once for each collective with one result, directly before its first use.

    Models may wait twice (in the collective's wrapper and at the use), or for a view of the result. Autograd
    collectives are replaced by plain ones, because both passes are already traced.
    """
    wait: Any = torch.ops._c10d_functional.wait_tensor.default
    positions = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if _namespace(node) == f"{_COLLECTIVES}_autograd" and not node.kwargs:
            node.target = getattr(torch.ops._c10d_functional, name_of(node)).default
        if is_collective(node) and isinstance(node.meta["val"], torch.Tensor):
            if all(user.op == "output" for user in node.users):
                continue  # the caller waits
            if len(node.users) == 1 and is_wait(next(iter(node.users))):
                continue
            with graph.inserting_after(node):
                came = graph.call_function(wait, (node,))
            came.meta = {**node.meta}
            node.replace_all_uses_with(came, lambda user, came=came: user is not came)
            min(came.users, key=positions.__getitem__).prepend(came)
        elif is_wait(node) and _already_waited(node.all_input_nodes[0]):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


_BY_SHAPE = {
    "empty_like": torch.ops.aten.empty.memory_format,
    "new_empty": torch.ops.aten.empty.memory_format,
    "rand_like": torch.ops.aten.rand.default,
    "randn_like": torch.ops.aten.randn.default,
}


def decouple_random_draws(graph: fx.Graph) -> None:
    """Make random draws in the shape of a tensor (a gate's noise) independent of the tensor's values.

    The numbers do not change. A micro-batched range can then start before the tensor, but after the draw.
    """
    for node in graph.nodes:
        if _namespace(node) != "aten" or name_of(node) not in _BY_SHAPE:
            continue
        value = node.meta["val"]
        # Non-contiguous tensors are drawn in memory order.
        if value.is_contiguous() and all(isinstance(size, int) for size in value.shape):
            node.target = _BY_SHAPE[name_of(node)]
            node.args, node.kwargs = ([*value.shape],), {"dtype": value.dtype, "device": value.device}


def fuse_shifts(graph: fx.Graph) -> None:
    """Rewrite `torch.cat` of a row of zeros and all rows but the last as one `constant_pad_nd`.

    A chunk of the result then needs only one row of the previous chunk. Gates use it for exclusive counts.
    """
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target is not aten.cat.default or len(node.args[0]) != 2:
            continue
        zeros, kept = node.args[0]
        dim, source = node.args[1] if len(node.args) > 1 else 0, kept.args[0] if name_of(kept) == "slice" else None
        if source is None or name_of(zeros) not in ("zeros", "new_zeros", "zeros_like"):
            continue
        values = [one.meta["val"] for one in (node, zeros, kept, source)]
        shapes = [tuple(value.shape) for value in values]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            continue
        dim %= max(1, len(shapes[0]))
        matches = (
            shapes[0] == shapes[3]
            and values[0].dtype == values[3].dtype
            and all(v.is_contiguous() for v in values[::3])
        )
        sliced = [argument_of(kept, name) for name in ("dim", "start", "step")]
        if matches and shapes[1][dim] == 1 and sliced[0] % len(shapes[0]) == dim and sliced[1:] in ([None, 1], [0, 1]):
            pads = [0, 0] * (len(shapes[0]) - 1 - dim) + [1, -1]
            node.target, node.args, node.kwargs = aten.constant_pad_nd.default, (source, pads), {}


def _already_waited(node: fx.Node) -> bool:
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and not is_collective(node)


class Instructions:
    """Instructions of a graph and their dependencies.

    Attributes:
        nodes: all nodes but inputs and output, in graph order.
        position: index of each node in `nodes`.
        ancestors, descendants: for each instruction, the set of instructions that it depends on, and the set of those
            that depend on it: by data, by order of random draws, or by in-place changes of memory.
        computing: set of the instructions that compute.
        starts: positions of the instructions that start a collective, in order.
        waits: for each start, the set of instructions that wait for it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.ancestors: list[int] = []
        direct: list[set[int]] = []
        last_random, last_change = set[int](), set[int]()
        for index, node in enumerate(self.nodes):
            before = {self.position[needed] for needed in node.all_input_nodes if needed in self.position} | last_change
            if is_random(node):  # draw in the captured order, for equal results
                before |= last_random
                last_random = {index}
            if is_mutating(node):
                before.update(range(index))
                last_change = {index}
            self.ancestors.append(union(self.ancestors[needed] | 1 << needed for needed in before))
            direct.append(before)
        self.descendants = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            for needed in direct[index]:
                self.descendants[needed] |= self.descendants[index] | 1 << index
        self.computing = sum(1 << index for index, node in enumerate(self.nodes) if is_compute(node))
        self.starts = [index for index, node in enumerate(self.nodes) if is_collective(node)]
        self.waits = {start: self._wait_set(start) for start in self.starts}

    def nodes_of(self, numbers: int) -> list[fx.Node]:
        return [self.nodes[index] for index in set_bits(numbers)]

    def overlappable(self, start: int) -> int:
        """Return the set of computing instructions that may overlap with a collective: no path connects them."""
        return self.computing & ~(self.ancestors[start] | self.descendants[start] | 1 << start)

    def weight_gradients(self, gradients: Collection[fx.Node]) -> int:
        """Return a bit set of the instructions that only parameter gradients need, and that may therefore run later.

        No all-to-all and no other output of the graph needs them. Excludes collectives of these gradients and
        everything after them, and random, mutating and waiting instructions.

        Args:
            gradients: the graph outputs that are parameter gradients.
        """
        results = list(self.nodes[0].graph.nodes)[-1].all_input_nodes if self.nodes else []
        ends = [node for node in results if node not in gradients]
        ends += [self.nodes[start] for start in self.starts if is_all_to_all(self.nodes[start])]
        found = self._ancestor_set(gradients) & ~self._ancestor_set(ends)
        for index in set_bits(found):
            node = self.nodes[index]
            if is_collective(node):
                found &= ~(self.descendants[index] | 1 << index)
            elif is_random(node) or is_mutating(node) or is_wait(node):
                found &= ~(1 << index)
        return found

    def _ancestor_set(self, nodes: Iterable[fx.Node]) -> int:
        positions = (self.position[node] for node in nodes if node in self.position)
        return union(self.ancestors[index] | 1 << index for index in positions)

    def _wait_set(self, start: int) -> int:
        found, ends = 0, [self.nodes[start]]
        while ends:
            for user in ends.pop().users:
                if is_wait(user):
                    found |= 1 << self.position[user]
                elif user.target is operator.getitem:
                    ends.append(user)
        return found


def _namespace(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "") if node.op == "call_function" else ""


def name_of(node: fx.Node) -> str:
    """Return the operator's name without namespace; "" for other nodes."""
    schema = schema_of(node.target)
    return "" if schema is None else str(schema.name).partition("::")[2]
