"""A captured pass as a list of instructions with a dependency graph (Lancet §4.1).

Nodes of the graph that compute or communicate, in order, and for each all that has to be done before it.
"""

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

#: The class of the operators of a graph.
OPERATOR: type = type(torch.ops.aten.view.default)

_COLLECTIVES = "_c10d_functional"
_VIEWS = frozenset(
    {
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    }
)  # fmt: skip


def schema_of(target: Any) -> Any:
    """Return the schema of an operator; None for any other callable."""
    return schema_of_operator(target) if isinstance(target, OPERATOR) else None


# What a size is taken for that only values decide, as that of `nonzero`: the same on all ranks, whose plans must agree.
_UNKNOWN_SIZE = 4096


def is_start(node: fx.Node) -> bool:
    """Returns whether the node starts a collective; a wait ends it."""
    return _space(node) == _COLLECTIVES and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    return _space(node) == _COLLECTIVES and name_of(node) == "wait_tensor"


def is_all_to_all(node: fx.Node) -> bool:
    return _space(node) == _COLLECTIVES and name_of(node) == "all_to_all_single"


def is_view(node: fx.Node) -> bool:
    """Returns whether the node computes nothing: its result is its input, seen in another way."""
    return (
        node.op == "get_attr" or node.target is operator.getitem or (_space(node) == "aten" and name_of(node) in _VIEWS)
    )


def computes(node: fx.Node) -> bool:
    return not (is_start(node) or is_wait(node) or is_view(node))


def is_random(node: fx.Node) -> bool:
    """Returns whether the node draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return argument_of(node, "dropout_p") != 0.0


def mutates(node: fx.Node) -> bool:
    """Returns whether the node may change memory that another one reads; so may all that nothing is known of."""
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable or node.op in ("call_module", "call_method")


def is_assertion(node: fx.Node) -> bool:
    return _space(node) == "aten" and name_of(node) in ("_assert_async", "_assert_scalar", "_assert_tensor_metadata")


def describe(node: fx.Node) -> str:
    """Returns the name of a node, its operator, its place in the graph and the line of the model that it comes from."""
    place, count = list(node.graph.nodes).index(node), len(node.graph.nodes)
    lines = re.findall(r'File "(.+)", line (\d+), in', node.stack_trace or "")
    line = f", {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return f"{node.name} ({node.target}, node {place} of {count}{line})"


def group_of(start: fx.Node) -> Any:
    """Returns the process group of a collective: its name, or itself."""
    return argument_of(start, "group_name") or argument_of(start, "group")


def argument_of(node: fx.Node, name: str) -> Any:
    """Returns the argument of that name that an operator is given; None where it has none."""
    for place, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def concrete(number: Any) -> int:
    """Returns a size; for a symbolic one its value when the graph was captured, where it had one."""
    if isinstance(number, int):
        return number
    hint = number.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def bytes_of(node: fx.Node) -> int:
    """Returns the bytes of a node's tensor."""
    tensor = node.meta["val"]
    return math.prod(map(concrete, tensor.shape)) * int(tensor.element_size())


# Sets of instructions are integers whose bit i stands for instruction i: a pass of thousands of them is analysed in no
# time.


def bits(numbers: int) -> Iterator[int]:
    """Yields the elements of a set, in order."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


def union(sets: Iterable[int]) -> int:
    """Returns the union of sets."""
    return reduce(operator.or_, sets, 0)


def wait_once(graph: fx.Graph) -> None:
    """Has each collective with one result waited for once, before anything else is done with what comes.

    Models may wait twice (`wait_tensor` is called by whoever uses the tensor, and by its author), look at the tensor in
    another way first, or wait for what was computed of it: a tensor that has come is as it is.
    """
    wait: Any = torch.ops._c10d_functional.wait_tensor.default
    # No node that uses a tensor moves, and so the first of them stays the first.
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        # Collectives that have a gradient of their own become those without: both passes are written out here.
        if _space(node) == f"{_COLLECTIVES}_autograd" and not node.kwargs:
            node.target = getattr(torch.ops._c10d_functional, name_of(node)).default
        if is_start(node) and isinstance(node.meta["val"], torch.Tensor):
            if all(user.op == "output" for user in node.users):
                continue  # whoever called waits
            if len(node.users) == 1 and is_wait(next(iter(node.users))):
                continue
            with graph.inserting_after(node):
                came = graph.call_function(wait, (node,))
            came.meta = {**node.meta}
            node.replace_all_uses_with(came, lambda user, came=came: user is not came)
            min(came.users, key=places.__getitem__).prepend(came)
        elif is_wait(node) and _has_come(node.all_input_nodes[0]):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


_BY_SHAPE = {
    "empty_like": torch.ops.aten.empty.memory_format,
    "new_empty": torch.ops.aten.empty.memory_format,
    "rand_like": torch.ops.aten.rand.default,
    "randn_like": torch.ops.aten.randn.default,
}


def draw_by_shape(graph: fx.Graph) -> None:
    """Has random numbers that are drawn in the shape of a tensor, as a gate's noise is, not wait for its values.

    The numbers are the same. A range in micro-batches may then begin before the tensor: the noise is drawn first.
    """
    for node in graph.nodes:
        if _space(node) != "aten" or name_of(node) not in _BY_SHAPE:
            continue
        value = node.meta["val"]
        # Others lie in memory, and are drawn, in the order of the tensor.
        if value.is_contiguous() and all(isinstance(size, int) for size in value.shape):
            node.target = _BY_SHAPE[name_of(node)]
            node.args, node.kwargs = ([*value.shape],), {"dtype": value.dtype, "device": value.device}


def shift_in_one(graph: fx.Graph) -> None:
    """Has zeros before all rows but the last, as `torch.cat` puts them where a count leaves out its own row, be one
    operator of all rows, `constant_pad_nd`: of it a chunk needs but one row of the chunk before."""
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
        alike = (
            shapes[0] == shapes[3]
            and values[0].dtype == values[3].dtype
            and all(v.is_contiguous() for v in values[::3])
        )
        sliced = [argument_of(kept, name) for name in ("dim", "start", "step")]
        if alike and shapes[1][dim] == 1 and sliced[0] % len(shapes[0]) == dim and sliced[1:] in ([None, 1], [0, 1]):
            pads = [0, 0] * (len(shapes[0]) - 1 - dim) + [1, -1]
            node.target, node.args, node.kwargs = aten.constant_pad_nd.default, (source, pads), {}


def _has_come(node: fx.Node) -> bool:
    """Returns whether a tensor is complete: no collective that writes it may still be on the way."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and not is_start(node)


class Instructions:
    """The instructions of a graph.

    Attributes:
        nodes: all but inputs and output, in the graph's order.
        place: of each node in `nodes`.
        ancestors, descendants: for each instruction the set of those that it waits for, and of those that wait for it:
            for data, for their order where both draw random numbers, or since one of them changes memory in place.
        computing: the set of those that compute.
        starts: the places of the collectives, in order.
        waits: for each of `starts` the set of instructions that wait for it to end.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.ancestors: list[int] = []
        direct: list[set[int]] = []
        last_random, last_change = set[int](), set[int]()
        for index, node in enumerate(self.nodes):
            before = {self.place[needed] for needed in node.all_input_nodes if needed in self.place} | last_change
            if is_random(node):  # results are those of the model as it is: numbers are drawn in its order
                before |= last_random
                last_random = {index}
            if mutates(node):  # whoever may read that memory reads it before, or after
                before.update(range(index))
                last_change = {index}
            self.ancestors.append(union(self.ancestors[needed] | 1 << needed for needed in before))
            direct.append(before)
        self.descendants = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            for needed in direct[index]:
                self.descendants[needed] |= self.descendants[index] | 1 << index
        self.computing = sum(1 << index for index, node in enumerate(self.nodes) if computes(node))
        self.starts = [index for index, node in enumerate(self.nodes) if is_start(node)]
        self.waits = {start: self._waits(start) for start in self.starts}

    def nodes_of(self, numbers: int) -> list[fx.Node]:
        """Returns the nodes of a set, in order."""
        return [self.nodes[index] for index in bits(numbers)]

    def beside(self, start: int) -> int:
        """Returns the compute instructions that may run beside a collective: no path leads from one to the other."""
        return self.computing & ~(self.ancestors[start] | self.descendants[start] | 1 << start)

    def weight_gradients(self, gradients: Collection[fx.Node]) -> int:
        """Returns the instructions that serve gradients of parameters alone, and no all-to-all.

        Collectives of these gradients, and what comes after such a collective, are not among them.
        """
        results = list(self.nodes[0].graph.nodes)[-1].all_input_nodes if self.nodes else []
        # An all-to-all is never put off for the sake of a weight gradient.
        ends = [node for node in results if node not in gradients]
        ends += [self.nodes[start] for start in self.starts if is_all_to_all(self.nodes[start])]
        # Of these, what follows a collective of a gradient, and what must keep its place, is not free to move.
        found = self._with_ancestors(gradients) & ~self._with_ancestors(ends)
        for index in bits(found):
            node = self.nodes[index]
            if is_start(node):
                found &= ~(self.descendants[index] | 1 << index)
            elif is_random(node) or mutates(node) or is_wait(node):
                found &= ~(1 << index)
        return found

    def _with_ancestors(self, nodes: Iterable[fx.Node]) -> int:
        places = (self.place[node] for node in nodes if node in self.place)
        return union(self.ancestors[index] | 1 << index for index in places)

    def _waits(self, start: int) -> int:
        found, ends = 0, [self.nodes[start]]
        while ends:
            for user in ends.pop().users:
                if is_wait(user):
                    found |= 1 << self.place[user]
                elif user.target is operator.getitem:
                    ends.append(user)
        return found


def _space(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "") if node.op == "call_function" else ""


def name_of(node: fx.Node) -> str:
    """Returns the operator's name without its namespace; "" where the node calls none."""
    schema = schema_of(node.target)
    return "" if schema is None else str(schema.name).partition("::")[2]
