"""Row collectives over a model-parallel (MP) group: conversions between split, replicated and partial tensors.

| function | from -> to | forward | backward |
|---|---|---|---|
| gather_rows | split -> all rows, used differently on every rank | all-gather | reduce-scatter |
| reduce_scatter_rows | partial -> split | reduce-scatter | all-gather |
| split_rows | replicated -> split | slice | all-gather |
| join_rows | split -> replicated | all-gather | slice |

A split tensor is [counts[group.index], M]; every other tensor is [sum(counts), M]. `counts[i]` is the number of rows of
the group's i-th rank. A replicated tensor has the same rows and gradient on every rank; a partial tensor is a summand.
Shapes are validated before anything is sent (ConfigError, RankError). None saves a tensor for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedmoe import handles
from fusedmoe.autograd.checks import check_count
from fusedmoe.comm import collectives
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import linear, operator, register_fake, register_gradient
from fusedmoe.runtime.recorder import Recorder, active_recorder, span


def split_counts(rows: int, group: Group) -> list[int]:
    """Return the number of rows of each rank if `rows` rows are split as by `torch.chunk`: the last ranks may get none.

    Raises:
        ConfigError: `rows` is not an integer >= 0.
    """
    check_count("split_counts", "rows", rows, 0)
    size = -(-rows // group.size)
    return [min(size, max(0, rows - i * size)) for i in range(group.size)]


def gather_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    return _linear_collective("gather_rows", x_SM, group, "all-gather", "reduce-scatter", counts, recorder)


def reduce_scatter_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    return _linear_collective("reduce_scatter_rows", x_SM, group, "reduce-scatter", "all-gather", counts, recorder)


def split_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    if torch.compiler.is_compiling() and group.graph_name:
        return split_operator(x_SM, counts, group.index, group.graph_name)
    return _linear_collective("split_rows", x_SM, group, "slice", "all-gather", counts, recorder)


def join_rows(x_SM: Tensor, group: Group, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
    if torch.compiler.is_compiling() and group.graph_name:
        return join_operator(x_SM, counts, group.index, group.graph_name)
    return _linear_collective("join_rows", x_SM, group, "all-gather", "slice", counts, recorder)


def name_for_graphs(group: Group) -> None:
    """Register a group for `split_rows` and `join_rows` in compiled graphs. Ranks call it in the same order.

    Groups over the same process groups share a name, and so a graph.
    """
    if group.size > 1:
        group.graph_name = group.identity
        group.graph_handle = handles.register(group.graph_name, group)


@operator("split_rows")
def split_operator(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return x_SM.split(counts)[index].clone()


@register_fake(split_operator)
def _(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return x_SM.new_empty((counts[index], *x_SM.shape[1:]))


@operator("join_rows")
def join_operator(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return collectives.all_gather_rows(handles.require(group, "join_rows"), x_SM, counts)


@register_fake(join_operator)
def _(x_SM: Tensor, counts: list[int], index: int, group: str) -> Tensor:
    return x_SM.new_empty((sum(counts), *x_SM.shape[1:]))


def _save_args(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.args = inputs[1:]


for _forward, _backward in ((split_operator, join_operator), (join_operator, split_operator)):
    register_gradient(_forward, lambda ctx, grad, back=_backward: (back(grad, *ctx.args), None, None, None), _save_args)


def mean_over(value: Tensor, group: Group) -> Tensor:
    """Return the mean of a scalar over the group. Each rank's gradient is 1/size of the mean's."""
    if group.size == 1:
        return value
    return linear(
        value,
        # The all-reduce is in place, and v belongs to the caller.
        lambda v: collectives.all_reduce(group, v.clone()) / group.size,
        lambda grad: grad / group.size,
        "mean_over",
    )


def sum_gradient(value: Tensor, group: Group) -> Tensor:
    """All-reduce the gradient of a value, for parameters that each rank applies to different rows."""
    if group.size == 1:
        return value
    return linear(value, lambda v: v, lambda grad: collectives.all_reduce(group, grad.clone()), "sum_gradient")


def _linear_collective(
    name: str,
    x_SM: Tensor,
    group: Group,
    forward: str,
    backward: str,
    counts: Sequence[int],
    recorder: Recorder | None,
) -> Tensor:
    # Checked before sending, because ranks with different row counts would deadlock.
    if len(counts) != group.size or any(not isinstance(count, int) or count < 0 for count in counts):
        group.refuse(name, f"counts must have a number of rows for each of {group.size} ranks, got {list(counts)}")
    rows = counts[group.index] if forward == "all-gather" else sum(counts)
    if not isinstance(x_SM, Tensor) or x_SM.dim() < 1 or x_SM.shape[0] != rows:
        got = list(x_SM.shape) if isinstance(x_SM, Tensor) else type(x_SM).__name__
        group.refuse(name, f"by counts = {list(counts)} this rank passes in {rows} rows, but got {got}")
    if group.size == 1:
        return x_SM
    return linear(
        x_SM,
        partial(_move, forward, "forward", group, counts, recorder),
        partial(_move, backward, "backward", group, counts, recorder),
        name,
    )


def _move(
    kind: str, phase: str, group: Group, counts: Sequence[int], recorder: Recorder | None, rows: Tensor
) -> Tensor:
    if kind == "slice":
        # A view would keep the rows of all ranks in memory.
        return rows.split(list(counts))[group.index].clone()
    collective = collectives.all_gather_rows if kind == "all-gather" else collectives.reduce_scatter_rows
    with span(recorder, f"{group.axis} {kind}", kind=kind, resource="intra", phase=phase):
        return collective(group, rows, counts)


MpInput = Literal["replicated", "split", "partial"]


class MpTokens:
    """Split a layer's tokens over an MP group and join the results.

    Attributes:
        is_joint: True if the ranks share their tokens: each routes a slice of them and gets the results of all. False
            (`mp_input="split"`, or a single rank): each routes its own tokens and gets their results.

    Raises:
        ConfigError: unknown `mp_input`.
    """

    def __init__(self, group: Group, mp_input: MpInput) -> None:
        if mp_input not in ("replicated", "split", "partial"):
            raise ConfigError(f"mp_input = {mp_input!r}; choose replicated, split or partial")
        self.group, self.mp_input = group, mp_input
        self.is_joint = group.size > 1 and mp_input != "split"

    def counts(self, tokens: int) -> list[int]:
        return split_counts(tokens, self.group) if self.is_joint else [tokens]

    def shard(self, x_SM: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's tokens. Collective if tokens are partial; otherwise the backward is collective."""
        move = reduce_scatter_rows if self.mp_input == "partial" else split_rows
        return move(x_SM, self.group, counts, active_recorder()) if self.is_joint else x_SM

    def gather(self, y_SM: Tensor, counts: Sequence[int]) -> Tensor:
        """All-gather the results of all ranks' tokens. Collective in forward only."""
        return join_rows(y_SM, self.group, counts, active_recorder()) if self.is_joint else y_SM

    def call_module(self, module: nn.Module, *inputs: Any) -> Any:
        """Call a replicated module on this rank's tokens and sum its parameters' gradients over the group."""
        if not self.is_joint:
            return module(*inputs)
        parameters = {name: self.with_summed_gradient(parameter) for name, parameter in module.named_parameters()}
        return torch.func.functional_call(module, parameters, inputs)

    def with_summed_gradient(self, parameter: Tensor) -> Tensor:
        """Return the parameter, whose gradient is all-reduced over the MP group."""
        return sum_gradient(parameter, self.group) if self.is_joint else parameter

    def aux_loss_share(self, aux: Tensor) -> Tensor:
        """Return the auxiliary loss that this rank adds to its own loss: the mean over the group.

        With mp_input="split": this rank's summand of the mean.
        """
        return aux / self.group.size if self.mp_input == "split" else mean_over(aux, self.group)
