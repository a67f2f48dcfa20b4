"""Rows over a model-parallel group: the four moves between split, replicated and partial tensors.

`counts[i]` is how many rows the i-th rank of the group owns when rows are split, the same list on every rank; a split
tensor is [counts[group.index], M], any other [sum(counts), M], or the move is refused (ConfigError, RankError) before
anything is sent. None saves a tensor for backward. A replicated tensor
holds the same rows on every rank, and so does its gradient; a partial tensor is a summand.

| function | from -> to | forward | backward |
|---|---|---|---|
| gather_rows | split -> all rows, used differently on every rank | all-gather | reduce-scatter |
| reduce_scatter_rows | partial -> split | reduce-scatter | all-gather |
| split_rows | replicated -> split | slice | all-gather |
| join_rows | split -> replicated | all-gather | slice |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_count
from fusedmoe.comm import collectives
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Move, linear, operator, register_fake, register_gradient
from fusedmoe.runtime.recorder import Recorder, span


def split_counts(rows: int, group: Group) -> list[int]:
    """Splits `rows` rows over a group as evenly as can be, like `torch.chunk`.

    Raises:
        ConfigError: `rows` is not an integer of at least 0.
    """
    check_count("split_counts", "rows", rows, 0)
    # The first ranks have more, the last ones may have none: what `torch.chunk` does.
    size = -(-rows // group.size)
    return [min(size, max(0, rows - i * size)) for i in range(group.size)]


def gather_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    """[counts[group.index], M] -> [sum(counts), M]: all rows, for computations that differ between ranks
    (column-parallel products). Collective; the backward, which saves nothing, is a reduce-scatter."""
    return _linear("gather_rows", x_SM, group, _all_gather, _reduce_scatter, counts, recorder)


def reduce_scatter_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    """[sum(counts), M] -> [counts[group.index], M]: partial sums of all rows to this rank's rows of the sum (after
    row-parallel products). Collective; the backward, which saves nothing, is an all-gather."""
    return _linear("reduce_scatter_rows", x_SM, group, _reduce_scatter, _all_gather, counts, recorder)


def split_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    """[sum(counts), M] -> [counts[group.index], M]: of rows that all ranks have, this rank's. Nothing travels; the
    backward, which saves nothing, is an all-gather."""
    if torch.compiler.is_compiling() and group.graph_name:
        return split_operator(x_SM, counts, group.index, group.graph_name)
    return _linear("split_rows", x_SM, group, _slice, _all_gather, counts, recorder)


def join_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    """[counts[group.index], M] -> [sum(counts), M]: all rows, from which every rank goes on to compute the same.
    Collective; the backward, which saves nothing, is a slice."""
    if torch.compiler.is_compiling() and group.graph_name:
        return join_operator(x_SM, counts, group.index, group.graph_name)
    return _linear("join_rows", x_SM, group, _all_gather, _slice, counts, recorder)


# By the name that graphs know them by.
_groups: WeakValueDictionary[str, Group] = WeakValueDictionary()


def name_for_graphs(group: Group) -> None:
    """Has `split_rows` and `join_rows` over this group go into graphs of `torch.compile`, as operators. Groups over the
    same process groups have the same name, so that one graph does for all. Ranks call it in the same order."""
    if group.size > 1:
        group.graph_name = group.identity
        _groups.setdefault(group.graph_name, group)


@operator("split_rows")
def split_operator(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    """`split_rows` in a graph."""
    return x_SM.split(counts)[index].clone()


@register_fake(split_operator)
def _(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return x_SM.new_empty((counts[index], *x_SM.shape[1:]))


@operator("join_rows")
def join_operator(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    """`join_rows` in a graph."""
    ranks = _groups.get(group)
    if ranks is None:
        raise ConfigError(f"join_rows: nobody holds {group} any more; keep the model until the backward pass has ended")
    return collectives.all_gather_rows(ranks, x_SM, counts)


@register_fake(join_operator)
def _(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return x_SM.new_empty((sum(counts), *x_SM.shape[1:]))


def _keep_move(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.given = inputs[1:]


# Each is linear, and the other one's derivative.
for _there, _back in ((split_operator, join_operator), (join_operator, split_operator)):
    register_gradient(_there, lambda ctx, grad, back=_back: (back(grad, *ctx.given), None, None, None), _keep_move)


def mean_over(value: Tensor, group: Group) -> Tensor:
    """The mean of a scalar over the group, the same on every rank; each rank's gradient is its share of it."""
    if group.size == 1:
        return value
    return linear(
        value,
        # The sum is made in place, and v is the caller's.
        lambda v: collectives.all_reduce(group, v.clone()) / group.size,
        lambda grad: grad / group.size,
        "mean_over",
    )


def sum_gradient(value: Tensor, group: Group) -> Tensor:
    """Returns the value; its gradient is summed over the group: for parameters that each rank applies to other rows."""
    if group.size == 1:
        return value
    return linear(value, lambda v: v, lambda grad: collectives.all_reduce(group, grad.clone()), "sum_gradient")


def _linear(
    name: str,
    x_SM: Tensor,
    group: Group,
    forward: _Kind,
    backward: _Kind,
    counts: Sequence[int],
    recorder: Recorder | None,
) -> Tensor:
    # Refused before anything is sent: ranks that disagree on rows would wait for each other.
    if len(counts) != group.size or any(not isinstance(count, int) or count < 0 for count in counts):
        group.refuse(name, f"counts must say how many rows each of {group.size} ranks has, got {list(counts)}")
    rows = counts[group.index] if forward is _all_gather else sum(counts)
    if not isinstance(x_SM, Tensor) or x_SM.dim() < 1 or x_SM.shape[0] != rows:
        got = list(x_SM.shape) if isinstance(x_SM, Tensor) else type(x_SM).__name__
        group.refuse(name, f"by counts = {list(counts)} this rank passes in {rows} rows, but got {got}")
    if group.size == 1:
        return x_SM
    return linear(
        x_SM, forward(group, counts, recorder, "forward"), backward(group, counts, recorder, "backward"), name
    )


def _all_gather(group: Group, counts: Sequence[int], recorder: Recorder | None, phase: str) -> Move:
    return partial(_recorded, collectives.all_gather_rows, "all-gather", group, counts, recorder, phase)


def _reduce_scatter(group: Group, counts: Sequence[int], recorder: Recorder | None, phase: str) -> Move:
    return partial(_recorded, collectives.reduce_scatter_rows, "reduce-scatter", group, counts, recorder, phase)


def _slice(group: Group, counts: Sequence[int], recorder: Recorder | None, phase: str) -> Move:
    start = sum(counts[: group.index])
    # A copy: a view would hold the memory of all ranks' rows.
    return lambda rows: rows[start : start + counts[group.index]].clone()


def _recorded(
    move: _Collective,
    kind: str,
    group: Group,
    counts: Sequence[int],
    recorder: Recorder | None,
    phase: str,
    rows: Tensor,
) -> Tensor:
    with span(recorder, f"{group.axis} {kind}", kind=kind, resource="intra", phase=phase):
        return move(group, rows, counts)


_Kind = Callable[[Group, Sequence[int], "Recorder | None", str], Move]
_Collective = Callable[[Group, Tensor, Sequence[int]], Tensor]


MpInput = Literal["replicated", "split", "partial"]


class MpTokens:
    """The tokens of an MP group.

    Attributes:
        joint: the ranks pass in the same tokens, or summands of them; each routes a slice, and all get all results.

    Raises:
        ConfigError: an unknown `mp_input`.
    """

    def __init__(self, group: Group, mp_input: MpInput) -> None:
        if mp_input not in ("replicated", "split", "partial"):
            raise ConfigError(f"mp_input = {mp_input!r}; choose replicated, split or partial")
        self.group, self.mp_input = group, mp_input
        self.joint = group.size > 1 and mp_input != "split"

    def counts(self, tokens: int) -> list[int]:
        """Counts the tokens, of those that this rank is given, that each rank routes: those of the first, and so on."""
        return split_counts(tokens, self.group) if self.joint else [tokens]

    def take(self, x_SM: Tensor, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
        """The tokens that this rank routes. Collective, where tokens are partial; else its backward is."""
        if not self.joint:
            return x_SM
        return (reduce_scatter_rows if self.mp_input == "partial" else split_rows)(x_SM, self.group, counts, recorder)

    def join(self, y_SM: Tensor, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
        """The results of all ranks' tokens. Collective; its backward is not."""
        return join_rows(y_SM, self.group, counts, recorder) if self.joint else y_SM

    def call(self, module: nn.Module, *inputs: Any) -> Any:
        """Calls a module whose parameters all ranks have on the tokens that this rank routes."""
        if not self.joint:
            return module(*inputs)
        # Each rank sees a slice of the tokens: its gradient is a summand, and all need the sum.
        parameters = {name: self.whole_gradient(parameter) for name, parameter in module.named_parameters()}
        return torch.func.functional_call(module, parameters, inputs)

    def whole_gradient(self, parameter: Tensor) -> Tensor:
        """Gives each rank the whole gradient, as of all that is replicated over MP."""
        return sum_gradient(parameter, self.group) if self.joint else parameter

    def aux(self, aux: Tensor) -> Tensor:
        """The group's mean of an auxiliary loss, as each rank has to add it to its loss."""
        return aux / self.group.size if self.mp_input == "split" else mean_over(aux, self.group)
