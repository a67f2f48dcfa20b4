"""Proofs, from the captured graph alone, that each place of an expert's buffer is one token's own (Lancet §5.2).

The dispatch product puts tokens into places, rows_PM = send_SPᵀ · x_SM, and the combine product reads them back,
y_SM = weight_SP · rows_PM. Micro-batches may go through both where

    1. send[s, p] ≠ 0 and send[t, p] ≠ 0 only if s = t: no two tokens are in one place;
    2. weight[s, p] ≠ 0 only if send[s, p] ≠ 0: a token reads no place that it has not filled, and so nobody else's;
    3. rows come back to the places from which they set out, and nobody but the combine product looks at them.

An element that is not 0 has factors that are not 0, and what these compare is then so. For 1 there is one rule:

    Of a running sum r over flags (0 or 1), r[t] ≠ r[u] where t ≠ u and both flags are 1. So if an element of `send` is
    not 0 only where r[t] + constant is an index of the place p and the flag at t is 1, then p decides t, and with it
    the token.

As in cumsum(one_hot(expert)) − 1, the places of most gates with a capacity. For 2 the factors of `send` must be among
those of `weight`, or `send` be weight > 0 of a weight that is never below 0. What no rule proves is not proven: modulo,
flags that are sums, places without a limit, sums that a short dtype rounds. Numbers that are not finite are no
concern of the rules: what they spoil is found where the products are computed (`fusedmoe.graph.part_rows`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

import torch
from torch import fx

from fusedmoe.graph.axes import PRODUCTS, shape_of
from fusedmoe.graph.elements import (
    ZERO,
    CutVariable,
    Elements,
    Formula,
    Index,
    NotKnown,
    Place,
    Variable,
    flat,
    number,
    put,
    selection,
    source_of,
    unflat,
    variables_of,
)
from fusedmoe.graph.instructions import argument_of, group_of, is_all_to_all, is_assertion, is_wait, mutates, name_of

# How often variables are cut in two before a proof is given up.
_CUTS = 64
# What experts may do with rows: of each the gradient is 0 where that of its result is, whatever it is given. So what
# the backward pass finds in places that no token took makes no difference to it.
_HARMLESS = frozenset({"relu", "gelu", "silu", "sigmoid", "tanh", "mul", "add", "sub", "neg", "_to_copy"})
# Never below 0, and where they are 0 so is their derivative.
_POSITIVE = frozenset({"_softmax", "softmax", "sigmoid", "exp", "relu"})
# Of which the result, or the first of several, is some of what they are given.
_SOME = frozenset({"gather", "amax", "index_select"})
_FIRST_SOME = frozenset({"topk", "max", "sort", "kthvalue"})
_FLIPPED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def proven(graph: fx.Graph, results: int | None) -> frozenset[fx.Node]:
    """The dispatch and combine products of a graph through which micro-batches of tokens may go.

    Args:
        results: how many of the graph's results somebody else sees, the first ones; the others are kept for the
            backward pass. None: all of them.
    """
    found: set[fx.Node] = set()
    travelled: set[fx.Node] = set()
    for node in graph.nodes:
        if mutates(node) and not is_assertion(node) and node.op == "call_function":
            break  # from here on a tensor may be another than it was
        if is_all_to_all(node) or not travelled.isdisjoint(node.all_input_nodes):
            travelled.add(node)
        if _is_crossing(node) and node.args[1] in travelled:
            found |= _of_combine(node, travelled, results)
    return frozenset(found)


def _of_combine(combine: fx.Node, travelled: Collection[fx.Node], results: int | None) -> set[fx.Node]:
    """A combine product with all dispatch products whose rows it reads; nothing where something is not proven."""
    cuts: dict[str, int] = {}
    for _ in range(_CUTS):
        try:
            return _Proof(combine, travelled, Elements(cuts)).holds(results)
        except CutVariable as cut:
            cuts[cut.variable.name] = cut.size
        except (NotKnown, RecursionError):
            break
    return set()


class _Proof:
    """That of one combine product.

    Args:
        travelled: all nodes that depend on what other ranks have sent.
    """

    def __init__(self, combine: fx.Node, travelled: Collection[fx.Node], elements: Elements) -> None:
        self._combine, self._travelled, self._elements = combine, travelled, elements
        self._path: set[fx.Node] = {combine}
        self._others: set[fx.Node] = set()
        self._been: set[Any] = set()
        self._sources: dict[fx.Node, Index] = {}

    def holds(self, results: int | None) -> set[fx.Node]:
        weight: Any = self._combine.args[0]
        rows: Any = self._combine.args[1]
        (tokens, places), of_rows = _known_shape(weight)[-2:], _known_shape(rows)
        token, place = self._elements.variable(tokens), self._elements.variable(places)
        outer = (ZERO,) * (len(of_rows) - 2)
        self._trace(rows, (*outer, place, self._elements.variable(of_rows[-1])), None, None)
        if not self._sources or not self._others.isdisjoint(self._path) or not self._unseen(results):
            raise NotKnown
        reads = Facts(self._elements)
        reads.note(self._elements.of(weight, (*outer, token, place)))
        for dispatch, taken in self._sources.items():
            send: Any = dispatch.args[0]
            of_send = _known_shape(send)
            outer, any_place = (ZERO,) * (len(of_send) - 2), self._elements.variable(of_send[-2])
            if of_send[-1] != tokens:
                raise NotKnown
            own, sent = Facts(self._elements), self._elements.of(send, (*outer, any_place, token))
            own.note(sent)
            if not self._elements.is_flag(sent) or not own.decides(token, any_place):
                raise NotKnown
            if not reads.hold(self._elements.of(send, (*outer, taken, token))):
                raise NotKnown
        return {self._combine, *self._sources}

    def _trace(self, node: fx.Node, place: Place, other: Index | None, back: Index | None) -> None:
        """Follows rows from where they are read to where they set out.

        `other`: the rank on which they are, None on this one; `back`: the number of this rank, once they have been to
        another.
        """
        if (node, place, other, back) in self._been:
            return
        self._been.add((node, place, other, back))
        self._path.add(node)
        if back is not None and other is None and _is_crossing(node):  # they are back on this rank
            if self._sources.setdefault(node, place[-2]) != place[-2]:
                raise NotKnown
            return
        if is_wait(node):
            return self._trace(node.all_input_nodes[0], place, other, back)
        if is_all_to_all(node):
            return self._travel(node, place, other, back)
        moved = source_of(node, place)
        if moved is not None:
            between = node.args[0]
            assert isinstance(between, fx.Node)
            self._path.add(between)  # of several results, as those of a split
            return self._trace(*moved, other, back)
        name, inputs = name_of(node), node.all_input_nodes
        if name in PRODUCTS:
            first, second = node.args[-2:]
            assert isinstance(first, fx.Node)
            if node.kwargs or any(one in self._travelled for one in inputs if one is not first) or first is second:
                raise NotKnown
            columns = self._elements.variable(_known_shape(first)[-1])
            self._others.update(one for one in inputs if one is not first)
            return self._trace(first, (*place[:-1], columns), other, back)
        if name not in _HARMLESS:
            raise NotKnown
        set_out = back is not None and other is None  # what is there of rows before they travel nothing tells
        rows = [one for one in inputs if set_out or one in self._travelled]
        if not rows or any(shape_of(one) != shape_of(node) for one in rows):
            raise NotKnown
        self._others.update(set(inputs) - set(rows))
        for one in rows:
            self._trace(one, place, other, back)

    def _travel(self, node: fx.Node, place: Place, other: Index | None, back: Index | None) -> None:
        """Rows come from another rank: block b of what this rank gets is what rank b has for it."""
        shares = [argument_of(node, f"{name}_split_sizes") for name in ("output", "input")]
        shape = _known_shape(node)
        ranks = len(shares[0])
        if len({str(rows) for of in shares for rows in of}) != 1 or shape_of(node.all_input_nodes[0]) != shape:
            raise NotKnown
        block, inner = unflat(place[0], (ranks, shape[0] // ranks))
        if back is None:
            other, back = block, self._elements.variable(ranks)
            self._group = (str(group_of(node)), ranks)
            block = back
        else:
            if other is None or block != back or self._group != (str(group_of(node)), ranks):
                raise NotKnown
            block, other = other, None
        self._trace(
            node.all_input_nodes[0], (flat((block, inner), (ranks, shape[0] // ranks)), *place[1:]), other, back
        )

    def _unseen(self, results: int | None) -> bool:
        """Whether nobody but the combine product, and the backward pass, looks at the rows."""
        (output,) = (node for node in self._combine.graph.nodes if node.op == "output")
        given: Any = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
        seen = {one for one in (given if results is None else given[:results]) if isinstance(one, fx.Node)}

        def kept(node: fx.Node) -> bool:
            """Whether it only goes, as it is, to the backward pass."""
            if node in seen:
                return False
            moves = node.target is operator.getitem or name_of(node) in _MOVES
            return node is output or (moves and all(map(kept, node.users)))

        rows = self._path - {self._combine}
        return not rows & seen and all(user in self._path or kept(user) for node in rows for user in node.users)


_MOVES = frozenset(
    {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "permute", "transpose", "t", "detach", "alias", "clone"}
)


class Facts:
    """What holds where a formula is not 0."""

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        self._true: set[Formula] = set()
        self._found: dict[int, set[Variable]] = {}

    def note(self, formula: Formula) -> None:
        """This one is not 0."""
        if formula in self._true:
            return
        self._true.add(formula)
        kind = formula[0]
        if kind == "times":
            for one in formula[1]:
                self.note(one)
        elif kind == "sum":
            for variable in formula[1]:  # there are such indices
                self._found.setdefault(variable.size, set()).add(variable)
            self.note(formula[2])
        elif kind == "cast":
            self.note(formula[1])
        elif kind == "where":
            _, condition, one, other = formula
            if other == number(0) or self._elements.bounds(other) == (0, 0):
                self.note(condition)
                self.note(one)
            elif self._elements.bounds(one) == (0, 0):
                self.note(("not", condition))
                self.note(other)
        elif kind == "not" and formula[1][0] == "compare" and formula[1][1] in _FLIPPED:
            _, name, left, right = formula[1]
            if self._elements.bounds(left) is not None and self._elements.bounds(right) is not None:
                self.note(("compare", _FLIPPED[name], left, right))
        elif kind == "compare":
            _, name, left, right = formula
            if name == "gt" and self._least(right) >= 0 or name == "ne" and self._elements.bounds(right) == (0, 0):
                self.note(left)

    def _least(self, formula: Formula) -> float:
        if formula[0] == "number":
            return float(formula[1])
        found = self._elements.bounds(formula)
        return float("-inf") if found is None else found[0]

    def decides(self, token: Index, place: Index) -> bool:
        """Whether the place decides which token it is."""
        known = set(place.variables)
        pairs = [(one[2], one[3]) for one in self._true if one[:2] == ("compare", "eq")]
        pairs = [(self._plain(left), self._plain(right)) for left, right in pairs]
        changed = True
        while changed and not token.variables <= known:
            changed = False
            for one, other in (*pairs, *((right, left) for left, right in pairs)):
                if other[0] not in ("index", "number") or not variables_of(other) <= known:
                    continue
                running = _running(one)
                if running is None:
                    continue
                _, _, dim, at = running
                rest = set().union(*(index.variables for where, index in enumerate(at) if where != dim))
                new = at[dim].variables - known
                if new and rest <= known and at[dim].injective and self._counts(running):
                    known |= new
                    changed = True
        return token.variables <= known

    def _counts(self, running: Formula) -> bool:
        """Whether a running sum is one of flags, and the flag at its own place is 1."""
        elements = self._elements
        return elements.is_flag(elements.summand(running, generic=True)) and self._is_one(elements.summand(running))

    def _is_one(self, formula: Formula) -> bool:
        return self._elements.is_flag(formula) and self.hold(formula)

    def hold(self, formula: Formula) -> bool:
        """Whether this one is not 0, either; and where it is 0, so are the derivatives by what these facts are of."""
        if formula in self._true:
            return self._never_negative(formula)
        kind = formula[0]
        if kind == "number":
            return bool(formula[1])
        if kind == "times":
            # Two small numbers may give 0.
            numbers = [one for one in formula[1] if not self._elements.is_flag(one)]
            return len(numbers) < 2 and all(map(self.hold, formula[1]))
        if kind == "sum":
            return self._never_negative(formula[2]) and any(
                self.hold(put(formula[2], values)) for values in self._candidates(formula[1])
            )
        if kind == "where":
            _, condition, one, other = formula
            return (self.hold(condition) and self.hold(one)) or (self.hold(one) and self.hold(other))
        if kind == "compare":
            _, name, left, right = formula
            if name == "eq":
                return ("compare", "eq", right, left) in self._true or self._plain(left) == self._plain(right)
            if (name == "gt" and right == number(0)) or (name == "ne" and right == number(0)):
                return self.hold(left) and self._never_negative(left)
        return False

    def _candidates(self, variables: Collection[Variable]) -> Iterator[dict[Variable, Index]]:
        """Indices that are known to be, in the place of these."""
        choices = [sorted(self._found.get(variable.size, ())) for variable in variables]
        for chosen in product(*choices):
            yield {one: Index(((other, 1),)) for one, other in zip(variables, chosen, strict=True)}

    def _never_negative(self, formula: Formula) -> bool:
        """Whether it is never below 0; and if it is 0 because a leaf of it is, so is its derivative by what made it."""
        found, kind = self._elements.bounds(formula), formula[0]
        if found is not None:
            return found[0] >= 0
        if kind == "number":
            return bool(formula[1] >= 0)
        if kind == "leaf":
            return is_positive(formula[1])
        if kind == "looked up":
            return is_positive(formula[1])
        if kind == "times":
            return all(map(self._never_negative, formula[1]))
        if kind == "sum":
            return self._never_negative(formula[2])
        if kind == "where":
            return all(map(self._never_negative, formula[2:]))
        return kind == "cast" and self._never_negative(formula[1])

    def _plain(self, formula: Formula) -> Formula:
        """The same number in fewer words, where these facts hold."""
        elements, kind = self._elements, formula[0]
        if kind == "times":
            left = [self._plain(one) for one in formula[1] if not self._is_one(one)]
            return number(1) if not left else left[0] if len(left) == 1 else ("times", tuple(left))
        if kind == "plus":
            return ("plus", self._plain(formula[1]), formula[2], self._plain(formula[3]))
        if kind == "clamp":
            inner = self._plain(formula[1])
            return inner if self._within(inner, formula[2], formula[3]) else (kind, inner, *formula[2:])
        if kind == "where" and self.hold(formula[1]):
            return self._plain(formula[2])
        if kind == "looked up":
            size = _known_shape(formula[1])[formula[2]]
            index = self._index_of(formula[4], size)
            return formula if index is None else self._plain(elements.at(formula, index))
        if kind == "sum" and (chosen := selection(formula)) is not None:
            place, index, other = chosen
            value = self._index_of(other, index.last + 1)
            if value is not None:
                factors = formula[2][1] if formula[2][0] == "times" else (formula[2],)
                sizes = [variable.size for variable, _ in index.terms]
                digits = dict(zip((one for one, _ in index.terms), unflat(value, sizes), strict=True))
                rest = tuple(put(one, digits) for number_, one in enumerate(factors) if number_ != place)
                return self._plain(("times", rest))
        if self._is_one(formula):
            return number(1)
        return formula

    def _index_of(self, formula: Formula, size: int) -> Index | None:
        """The index, below `size`, that something is known to be."""
        for one in sorted((one for one in self._true if one[:2] == ("compare", "eq")), key=repr):
            for left, right in ((one[2], one[3]), (one[3], one[2])):
                if left == formula and right[0] == "index" and right[1].last < size:
                    index: Index = right[1]
                    return index
        return None

    def _within(self, formula: Formula, low: int | None, high: int | None) -> bool:
        """Whether a whole number is from `low` to `high`."""
        found = self._elements.bounds(formula)
        if found is None or (low is not None and found[0] < low and not self._at_least(formula, low)):
            return False
        return high is None or found[1] <= high or self._at_most(formula, high)

    def _at_most(self, formula: Formula, high: int) -> bool:
        limits = {("compare", "lt"): high + 1, ("compare", "le"): high}
        return any(
            one[3][0] == "number" and one[3][1] <= limits[one[:2]] and self._plain(one[2]) == formula
            for one in self._true
            if one[:2] in limits
        )

    def _at_least(self, formula: Formula, low: int) -> bool:
        """A flag that is 1 in a running sum makes it 1 at least."""
        base, constant = _parts(formula)
        return base[0] == "running" and self._counts(base) and 1 + constant >= low


def is_positive(node: fx.Node) -> bool:
    """Whether no element of a tensor is ever below 0, and where one is 0 its derivative is, too."""
    name = name_of(node)
    if node.target is operator.getitem:
        of, which = node.args
        picked = of.args[0] if isinstance(of, fx.Node) and name_of(of) in _FIRST_SOME else None
        return isinstance(which, int) and which == 0 and isinstance(picked, fx.Node) and is_positive(picked)
    first = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(first, fx.Node):
        return False
    if name in _POSITIVE:
        return True
    if name == "div":
        return not node.kwargs and is_positive(first) and _not_below_0(node.args[1])
    return (
        name in _SOME or name in _MOVES or name in ("expand", "select", "slice", "_to_copy", "sum")
    ) and is_positive(first)


def _known_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor; `NotKnown` where a size of it is decided when the graph runs."""
    shape = shape_of(node)
    if shape is None:
        raise NotKnown
    return shape


def _not_below_0(divisor: Any) -> bool:
    if not isinstance(divisor, fx.Node):
        return isinstance(divisor, (int, float)) and divisor >= 0
    if name_of(divisor) in ("clamp", "clamp_min") and len(divisor.args) > 1:
        return not isinstance(divisor.args[1], fx.Node) and _not_below_0(divisor.args[1])
    return is_positive(divisor)


def _running(formula: Formula) -> Formula | None:
    """The running sum that a formula is, but for a constant."""
    base, _ = _parts(formula)
    return base if base[0] == "running" else None


def _parts(formula: Formula) -> tuple[Formula, int]:
    """Something and the constant that is added to it."""
    constant = 0
    while formula[0] == "plus" and formula[3][0] == "number" and float(formula[3][1]).is_integer():
        constant += formula[2] * int(formula[3][1])
        formula = formula[1]
    return formula, constant


def _is_crossing(node: fx.Node) -> bool:
    """Whether it may be the product over all tokens or places of one batch."""
    shape = shape_of(node)
    return name_of(node) in ("mm", "bmm") and shape is not None and (len(shape) == 2 or shape[0] == 1)
