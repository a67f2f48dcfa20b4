"""What a single element of a captured tensor is, as a formula of the indices at which it is looked at.

    one_hot(expert_S, E)[s, e]                      1 where expert_S[s] = e, else 0
    cumsum(mask_SE, 0)[s, e]                        the running sum of mask_SE[·, e] up to s
    einsum("se,sc->sec", mask_SE, slot_SC)[s, e, c] mask_SE[s, e] · slot_SC[s, c]

Views, permutations and broadcasts are gone in it: they say only at which indices their input is looked at. What is not
known is a leaf: some number, the same wherever the same element of the same tensor is looked at.

Numbers are as the machine computes them. An operator on whole numbers is in a formula only where its result is exact
in its dtype, bounds and all; otherwise it is a leaf.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from fusedmoe.graph.axes import PERMUTES, RESHAPES, permuted, shape_of
from fusedmoe.graph.instructions import name_of

_SAME = frozenset({"clone", "detach", "alias", "contiguous", "lift_fresh_copy"})
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
# Whole numbers up to here are exact.
_EXACT = {
    torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8, torch.bool: 1,
    torch.int64: 2**63 - 1, torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.int8: 127, torch.uint8: 255,
}  # fmt: skip


class NotKnown(Exception):
    """Nothing can be said of it."""


class Variable(NamedTuple):
    """An index, from 0 to below `size`."""

    name: str
    size: int


class CutVariable(Exception):
    """A reshape cuts a variable v in two, v = upper · size + lower. Whoever made it looks again with these two."""

    def __init__(self, variable: Variable, size: int) -> None:
        super().__init__(f"{variable} at {size}")
        self.variable, self.size = variable, size


class Index(NamedTuple):
    """constant + Σ coefficient · variable, the coefficients above 0, sorted by the largest."""

    terms: tuple[tuple[Variable, int], ...] = ()
    constant: int = 0

    @property
    def last(self) -> int:
        """The largest value."""
        return self.constant + sum(step * (variable.size - 1) for variable, step in self.terms)

    @property
    def variables(self) -> set[Variable]:
        return {variable for variable, _ in self.terms}

    def plus(self, other: Index) -> Index:
        steps: dict[Variable, int] = dict(self.terms)
        for variable, step in other.terms:
            steps[variable] = steps.get(variable, 0) + step
        ordered = sorted(steps.items(), key=lambda item: (-item[1], item[0].name))
        return Index(tuple(ordered), self.constant + other.constant)

    def times(self, factor: int) -> Index:
        if factor < 1:
            raise NotKnown
        return Index(tuple((variable, step * factor) for variable, step in self.terms), self.constant * factor)

    def put(self, values: Mapping[Variable, Index]) -> Index:
        """With values in the place of variables."""
        found = Index((), self.constant)
        for variable, step in self.terms:
            found = found.plus(values.get(variable, Index(((variable, 1),))).times(step))
        return found

    @property
    def injective(self) -> bool:
        """Whether other values of its variables always give another value of it."""
        below = 0
        for variable, step in reversed(self.terms):
            if step <= below:
                return False
            below += step * (variable.size - 1)
        return True

    @property
    def counts_all(self) -> bool:
        """Whether it takes each value from 0 on, once."""
        count = 1
        for variable, step in reversed(self.terms):
            if step != count:
                return False
            count *= variable.size
        return self.constant == 0


ZERO = Index()
Place: TypeAlias = tuple[Index, ...]
#: ("leaf", node, place), ("number", value), ("index", Index), ("times", (factors…)), ("plus", a, sign, b),
#: ("sum", (variables…), of), ("running", node, dim, place), ("compare", operator, a, b), ("not", a),
#: ("where", condition, a, b), ("clamp", a, lowest, highest), ("cast", a), ("looked up", node, dim, place, at).
Formula: TypeAlias = tuple[Any, ...]


def number(value: Any) -> Formula:
    return ("number", value)


def flat(place: Place, shape: Sequence[int]) -> Index:
    """The place in memory order."""
    found = ZERO
    for index, size in zip(place, shape, strict=True):
        found = (found.times(size) if found != ZERO else ZERO).plus(index)
    return found


def unflat(index: Index, shape: Sequence[int]) -> Place:
    """The indices of an element by its place in memory order.

    Raises:
        CutVariable: a variable counts in two dimensions.
        NotKnown: the indices are no sums of the variables.
    """
    if 0 in shape:
        raise NotKnown
    digits = [ZERO] * len(shape)
    left, constant = dict(index.terms), index.constant
    below = 1
    for dim in reversed(range(len(shape))):
        upper = below * shape[dim]
        digit = Index((), constant // below % shape[dim])
        for variable, step in [*left.items()]:
            if step >= upper or shape[dim] == 1:
                continue
            if step % below:
                raise NotKnown
            if step * (variable.size - 1) >= upper:
                if upper % step or variable.size % (upper // step):
                    raise NotKnown
                raise CutVariable(variable, upper // step)
            digit = digit.plus(Index(((variable, step // below),)))
            del left[variable]
        if digit.last >= shape[dim]:
            raise NotKnown  # one would be carried
        digits[dim], below = digit, upper
    if left or constant >= below:
        raise NotKnown
    return tuple(digits)


class Elements:
    """The elements of a graph's tensors as formulas. `cuts`: variables that are to be made of two, by name, each with
    the size of the lower one."""

    def __init__(self, cuts: Mapping[str, int]) -> None:
        self._cuts, self._count = cuts, 0
        self._known: dict[Any, Formula] = {}
        self._bounds: dict[Formula, tuple[int, int] | None] = {}

    def variable(self, size: int) -> Index:
        """A new one; 0 where there is one value only."""
        self._count += 1
        return self._made(f"v{self._count}", size)

    def _made(self, name: str, size: int) -> Index:
        if size == 1:
            return ZERO
        lower = self._cuts.get(name, 0)
        if not lower or size % lower:
            return Index(((Variable(name, size), 1),))
        return self._made(f"{name}+", size // lower).times(lower).plus(self._made(f"{name}-", lower))

    def of(self, node: fx.Node, place: Place) -> Formula:
        """The element of a node there.

        Raises:
            CutVariable, NotKnown: as for `unflat`.
        """
        key = (node, place)
        if key not in self._known:
            found = self._formula(node, place)
            if found[0] in ("times", "plus", "sum", "running", "index", "number") and not self._exact(found, node):
                found = ("leaf", node, place)
            self._known[key] = found
        return self._known[key]

    def _exact(self, formula: Formula, node: fx.Node) -> bool:
        found = self.bounds(formula)
        if found is None:
            return formula[0] in ("times", "sum", "number")  # of which only signs and zeros are of use
        return max(-found[0], found[1]) <= _EXACT.get(node.meta["val"].dtype, 0)

    def _formula(self, node: fx.Node, place: Place) -> Formula:
        leaf = ("leaf", node, place)
        moved = source_of(node, place)
        if moved is not None:
            return self.of(*moved)
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return leaf
        shape, name, args = shape_of(node), name_of(node), node.args
        if shape is None or any(shape_of(one) is None for one in node.all_input_nodes):
            return leaf

        def given(one: Any) -> Formula:
            if not isinstance(one, fx.Node):
                return number(one)
            return self.of(one, broadcast(place, shape, shape_of(one) or ()))

        whole = len(node.kwargs) == 0
        if name == "_to_copy":
            return self._cast(given(args[0]), node.meta["val"].dtype)
        if name == "arange":
            return _arange(node, place) or leaf
        if name in _FILLED:
            return number(_FILLED[name])
        if name in ("full", "full_like") and isinstance(args[1], (bool, int, float)):
            return number(args[1])
        if name == "mul" or name == "logical_and" or (name == "bitwise_and" and _is_bool(node)):
            factors = [given(one) for one in args[:2]]
            if name == "logical_and":
                factors = [self._cast(one, torch.bool) for one in factors]
            return _product(factors)
        if name in ("add", "sub") and whole:
            return ("plus", given(args[0]), 1 if name == "add" else -1, given(args[1]))
        if name in _COMPARES:
            return ("compare", name, given(args[0]), given(args[1]))
        if name == "logical_not" or (name == "bitwise_not" and _is_bool(node)):
            return ("not", self._cast(given(args[0]), torch.bool))
        if name == "where" and len(args) == 3:
            return ("where", *(given(one) for one in args))
        if name == "masked_fill" and not isinstance(args[2], fx.Node):
            return ("where", given(args[1]), number(args[2]), given(args[0]))
        if name in ("clamp", "clamp_min", "clamp_max"):
            return _clamp(node, given) or leaf
        if name == "sum" and len(args) > 1 and set(node.kwargs) <= {"dtype"}:
            return self._sum(node, place)
        if name in ("mm", "bmm"):
            left, right = args
            along = self.variable(shape_of(left)[-1])  # type: ignore[arg-type,index]
            of = _product(
                [self.of(left, (*place[:-1], along)), self.of(right, (*place[:-2], along, place[-1]))]  # type: ignore[arg-type]
            )
            return _summed(along, of)
        if name == "cumsum":
            return ("running", node, int(args[1]) % len(shape), place)  # type: ignore[arg-type]
        if name == "gather" and whole:
            return self._gather(node, place) or leaf
        if name == "scatter" and target._overloadname == "value":
            return self._scatter(node, place) or leaf
        return leaf

    def _cast(self, of: Formula, dtype: torch.dtype) -> Formula:
        found = self.bounds(of)
        if dtype == torch.bool:
            return of if found in ((0, 1), (0, 0), (1, 1)) else ("compare", "ne", of, number(0))
        exact = found is not None and max(-found[0], found[1]) <= _EXACT.get(dtype, 0)
        return of if exact and found is not None and (found[0] >= 0 or dtype.is_signed) else ("cast", of)

    def _sum(self, node: fx.Node, place: Place) -> Formula:
        source: Any = node.args[0]
        shape = shape_of(source) or ()
        given: Any = node.args[1]
        dims = sorted({int(dim) % len(shape) for dim in given}) if given else [*range(len(shape))]
        kept = iter(place)
        along, inner = ZERO, []
        for dim, size in enumerate(shape):
            if dim not in dims:
                inner.append(next(kept))
                continue
            if len(node.args) > 2 and node.args[2]:
                next(kept)
            variable = self.variable(size)
            along, inner = along.plus(variable), [*inner, variable]
        return _summed(along, self._cast(self.of(source, tuple(inner)), node.meta["val"].dtype))

    def _gather(self, node: fx.Node, place: Place) -> Formula | None:
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
        dim = int(dim) % len(place)  # type: ignore[arg-type]
        return ("looked up", source, dim, place, self.of(index, place))

    def _scatter(self, node: fx.Node, place: Place) -> Formula | None:
        base, dim, index, value = node.args[:4]
        assert isinstance(base, fx.Node) and isinstance(index, fx.Node)
        dim = int(dim) % len(place)  # type: ignore[arg-type]
        one = tuple(1 if at == dim else size for at, size in enumerate(shape_of(base) or ()))
        if shape_of(index) != one or isinstance(value, fx.Node):
            return None
        at = self.of(index, (*place[:dim], ZERO, *place[dim + 1 :]))
        return ("where", ("compare", "eq", at, ("index", place[dim])), number(value), self.of(base, place))

    def summand(self, running: Formula, generic: bool = False) -> Formula:
        """What a running sum adds at its own place; or, `generic`, anywhere along its axis."""
        _, node, dim, place = running
        source: Any = node.args[0]
        if generic:
            place = (*place[:dim], self.variable((shape_of(source) or ())[dim]), *place[dim + 1 :])
        return self._cast(self.of(source, place), node.meta["val"].dtype)

    def at(self, looked_up: Formula, index: Index) -> Formula:
        """What is looked up, at this index."""
        _, node, dim, place, _ = looked_up
        return self.of(node, (*place[:dim], index, *place[dim + 1 :]))

    def is_flag(self, formula: Formula) -> bool:
        """Whether it is 0 or 1."""
        found = self.bounds(formula)
        return found is not None and found[0] >= 0 and found[1] <= 1

    def bounds(self, formula: Formula) -> tuple[int, int] | None:
        """The least and the largest value of what is a whole number; None where nothing is known."""
        if formula not in self._bounds:
            self._bounds[formula] = self._found_bounds(formula)
        return self._bounds[formula]

    def _found_bounds(self, formula: Formula) -> tuple[int, int] | None:
        kind = formula[0]
        if kind == "number":
            value = formula[1]
            whole = isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer())
            return (int(value), int(value)) if whole else None
        if kind == "index":
            return formula[1].constant, formula[1].last
        if kind in ("compare", "not"):
            return 0, 1
        if kind == "leaf":
            return (0, 1) if _is_bool(formula[1]) else None
        if kind == "times":
            found = (1, 1)
            for one in formula[1]:
                other = self.bounds(one)
                if other is None:
                    return None
                products = [a * b for a in found for b in other]
                found = min(products), max(products)
            return found
        if kind == "looked up":
            _, node, dim, _, _ = formula
            return self.bounds(self.at(formula, self.variable((shape_of(node) or ())[dim])))
        if kind == "running":
            of, size = self.bounds(self.summand(formula, generic=True)), (shape_of(formula[1]) or ())[formula[2]]
            return None if of is None else (min(of[0], of[0] * size), max(of[1], of[1] * size))
        if kind == "sum":
            of, size = self.bounds(formula[2]), 1
            if of is None:
                return None
            if selection(formula) is not None:  # all but one are 0
                return min(of[0], 0), max(of[1], 0)
            for variable in formula[1]:
                size *= variable.size
            return min(of[0], of[0] * size), max(of[1], of[1] * size)
        if kind == "plus":
            left, right = self.bounds(formula[1]), self.bounds(formula[3])
            if left is None or right is None:
                return None
            low, high = right if formula[2] > 0 else (-right[1], -right[0])
            return left[0] + low, left[1] + high
        if kind == "where":
            one, other = self.bounds(formula[2]), self.bounds(formula[3])
            return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))
        if kind == "clamp":
            inner = self.bounds(formula[1])
            if inner is None:
                return None
            low, high = inner if formula[2] is None else (max(formula[2], inner[0]), max(formula[2], inner[1]))
            return (low, high) if formula[3] is None else (min(formula[3], low), min(formula[3], high))
        return None


def selection(total: Formula) -> tuple[int, Index, Formula] | None:
    """Of a sum over places of which one factor is 1 where an index is something else, and 0 elsewhere: the factor's
    number, the index and that something; None of other sums."""
    _, variables, of = total
    for place, one in enumerate(of[1] if of[0] == "times" else (of,)):
        if one[:2] != ("compare", "eq"):
            continue
        for index, other in ((one[2], one[3]), (one[3], one[2])):
            if index[0] != "index" or index[1].variables != set(variables):
                continue
            if index[1].counts_all and not variables_of(other) & set(variables):
                return place, index[1], other
    return None


def variables_of(formula: Any) -> set[Variable]:
    """All variables in it."""
    if isinstance(formula, Index):
        return formula.variables
    if isinstance(formula, Variable):
        return {formula}
    return set().union(*map(variables_of, formula)) if isinstance(formula, tuple) else set()


def put(formula: Any, values: Mapping[Variable, Index]) -> Any:
    """A formula with values in the place of variables."""
    if isinstance(formula, Index):
        return formula.put(values)
    if isinstance(formula, Variable) or not isinstance(formula, tuple):
        return formula
    return tuple(put(one, values) for one in formula)


def source_of(node: fx.Node, place: Place) -> tuple[fx.Node, Place] | None:
    """Of what only moves elements: its input, and where the element is there; None of all else."""
    if node.op != "call_function" or shape_of(node) is None and node.target is not operator.getitem:
        return None
    shape, name, args = shape_of(node) or (), name_of(node), node.args
    first = args[0] if args else None
    if node.target is operator.getitem:
        return _piece(node, place)
    source = shape_of(first) if isinstance(first, fx.Node) else None
    if source is None:
        return None
    assert isinstance(first, fx.Node)
    if name in _SAME:
        return first, place
    if name in RESHAPES:
        return first, unflat(flat(place, shape), source)
    if name == "expand":
        return first, broadcast(place, shape, source)
    if name in PERMUTES:
        order = permuted(name, args, len(shape))
        return first, tuple(place[order.index(dim)] for dim in range(len(shape)))
    if name == "select":
        dim, at = (int(one) for one in args[1:3])  # type: ignore[arg-type]
        dim, at = dim % len(source), at % source[dim % len(source)]
        return first, (*place[:dim], Index((), at), *place[dim:])
    if name == "slice":
        given: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start = int(given[0]) % len(source), int(given[1] or 0)
        start = max(0, start + source[dim]) if start < 0 else start
        moved = place[dim].times(int(given[3])).plus(Index((), start))
        return first, (*place[:dim], moved, *place[dim + 1 :])
    return None


def _piece(node: fx.Node, place: Place) -> tuple[fx.Node, Place] | None:
    """Of a tensor that was split."""
    of, which = node.args
    if not isinstance(of, fx.Node) or name_of(of) not in ("split", "split_with_sizes"):
        return None
    first, sizes = of.args[0], [value.shape for value in of.meta["val"]]
    dim = int(of.args[2] if len(of.args) > 2 else of.kwargs.get("dim", 0)) % len(place)  # type: ignore[arg-type]
    assert isinstance(first, fx.Node) and isinstance(which, int)
    start = sum(int(shape[dim]) for shape in sizes[:which])
    return first, (*place[:dim], place[dim].plus(Index((), start)), *place[dim + 1 :])


def broadcast(place: Place, shape: Sequence[int], own: Sequence[int]) -> Place:
    """Where an operand that is broadcast to `shape` is looked at."""
    return tuple(ZERO if size == 1 else index for index, size in zip(place[len(shape) - len(own) :], own, strict=True))


def _arange(node: fx.Node, place: Place) -> Formula | None:
    args = node.args
    if not all(isinstance(one, int) for one in args):
        return None
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    assert isinstance(start, int) and isinstance(step, int)
    return ("index", place[0].times(step).plus(Index((), start))) if start >= 0 and step > 0 else None


def _clamp(node: fx.Node, given: Callable[[Any], Formula]) -> Formula | None:
    args, name = node.args, name_of(node)
    low = args[1] if name != "clamp_max" and len(args) > 1 else node.kwargs.get("min")
    high = args[-1] if name == "clamp_max" else args[2] if len(args) > 2 else node.kwargs.get("max")
    if not all(one is None or isinstance(one, int) for one in (low, high)):
        return None
    return ("clamp", given(args[0]), low, high)


def _product(factors: Sequence[Formula]) -> Formula:
    found: list[Formula] = []
    for one in factors:
        found += one[1] if one[0] == "times" else [one]
    return ("times", tuple(found))


def _summed(along: Index, of: Formula) -> Formula:
    variables = tuple(sorted(along.variables))
    return ("sum", variables, of) if variables else of


def _is_bool(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool
