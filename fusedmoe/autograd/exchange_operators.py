"""Rows between ranks as PyTorch operators, `torch.ops.fusedmoe.*`: eager, compiled and checkpointed layers take them.

    send_PE, come_QPE = meet(counts_E, bad, dtype, way)
    rows_RM, weight_R, *layout = dispatch(rows_NM, weight_N, send_PE, come_QPE, way)
    …                                                        experts
    y_NM = combine(out_RM, send_PE, come_QPE, len(rows_NM), way)

Operators take tensors and plain values, so process groups stand behind a name, `way`: in graphs that of a `Way`, which
layers share; in eager mode that of a `Crossing`, one batch's way, whose ranks have exchanged sizes already. How many
rows come is known when a graph runs, not when it is made: a size without a value (`new_dynamic_size`), one for all
results of a dispatch. Each operator needs the one before, forward and backward, so that no compiler can change the
order of what ranks do together; and none is computed twice in a backward pass, since compilers recompute only operators
that they know.

Dispatch and combine are linear, so their derivatives are right as often as autograd asks:

    operator    gradient             gradient of that
    dispatch    dispatch_backward    dispatch
    combine     combine_backward     combine

Rows that are sent may end with padding (`Layout`), which does not travel; rows that come have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.hooks import Direction, HookContext, Hooks, carry
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient
from fusedmoe.kernels.layout import sort_received
from fusedmoe.runtime.recorder import Recorder, span

# A graph holds the name of a way, and one graph is to do for all layers that exchange over the same process groups: so
# several ways may have a name, and whichever of them is open stands for it.
_ways: dict[str, WeakSet[Way]] = {}
_crossings: WeakValueDictionary[str, Crossing] = WeakValueDictionary()
_new_number = count()


class Way:
    """The ranks and the algorithm by which rows of a layer travel, under a name for as long as somebody holds it.

    Ways over the same process groups, by the same algorithm, have the same name, whichever layers and topologies they
    are of. It has no ranks in it, so that ranks that do the same compile the same graphs.

    Attributes:
        name: which graphs know it by.
    """

    def __init__(self, topology: Topology, all_to_all: AllToAll) -> None:
        self.topology, self.all_to_all = topology, all_to_all
        self.name = f"{all_to_all.identity}, {topology.esp.identity}"
        _ways.setdefault(self.name, WeakSet()).add(self)

    @property
    def is_open(self) -> bool:
        """Tells whether rows can travel: a topology that was closed has no process groups, others still may."""
        return self.topology.ep.is_open and self.topology.esp.is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> Way:
        return self  # as its topology

    def __reduce__(self) -> tuple[Any, ...]:
        return Way, (self.topology, self.all_to_all)


class Crossing:
    """One batch's way to the experts' ranks and back, once their ranks have exchanged sizes.

    In eager mode operators know it by its name. The graph of its batch keeps it, so that the layer may be gone by the
    backward pass.

    Attributes:
        part: the collectives that rows go by.
        sharded: experts are split over esp.   travels: there are other ranks.
        hooks: see rows on the wire, forward and backward.   recorder: takes spans of both passes.
        turned: the ranks have compared that they have a backward pass.
    """

    def __init__(
        self, topology: Topology, part: Part, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
    ) -> None:
        self.topology, self.part, self.hooks, self.recorder = topology, part, hooks, recorder
        self.sharded = topology.esp.size > 1
        self.travels = self.sharded or topology.ep.size > 1
        self.turned = False
        self.name = f"crossing {next(_new_number)}"
        _crossings[self.name] = self


def _way(name: str, operation: str) -> Way:
    ways = list(_ways.get(name, ()))
    if not ways:
        raise ConfigError(f"{operation}: the layer of {name} is gone; keep it until the backward pass has ended")
    return next((way for way in ways if way.is_open), ways[0])  # a closed one says so itself


class _Traffic:
    """The collectives of one operator, as a context: errors inside are told to the other ranks.

    `send` takes rows to all shards of their experts, `bring_back` takes their results to the ranks of the tokens.
    """

    def __init__(self, way: str, operation: str, send_PE: Tensor, come_QPE: Tensor, device: torch.device) -> None:
        crossing = _crossings.get(way)
        if crossing is None:  # in a graph
            layers = _way(way, operation)
            with layers.topology.guard(f"fusedmoe::{operation}"):
                sizes = send_PE.numpy(), come_QPE.numpy()
                part = Part(layers.all_to_all, layers.topology.esp, *sizes, device, "a layer's graph")
            crossing = Crossing(layers.topology, part)
        backward = operation.endswith("_backward")
        # A backward pass begins with that of combine; where a graph has none, with that of dispatch.
        if operation == "combine_backward" or (backward and not crossing.turned):
            crossing.part.turn()
        crossing.turned = operation == "combine_backward"
        self.operation, self.crossing, self.part = operation, crossing, crossing.part
        self.phase: Direction = "backward" if backward else "forward"

    def __enter__(self) -> _Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.crossing.topology.stop(f"fusedmoe::{self.operation}", error)

    def send(self, rows_NM: Tensor) -> Tensor:
        part, crossing = self.part, self.crossing
        if len(rows_NM) > part.sent:
            rows_NM = rows_NM[: part.sent]  # padding does not travel
        if crossing.hooks or crossing.recorder is not None:
            with span(crossing.recorder, "dispatch", kind="dispatch", resource="inter", phase=self.phase):
                rows = carry(crossing.hooks, "dispatch", part.dispatch, rows_NM, HookContext(self.phase))
        else:
            rows = part.dispatch(rows_NM)
        if crossing.sharded:
            with span(crossing.recorder, "all-gather", kind="all-gather", resource="intra", phase=self.phase):
                rows = part.all_gather(rows)
        # An operator returns memory of its own.
        return rows if crossing.travels else rows.clone()

    def send_weights(self, weight_N: Tensor) -> Tensor:
        weight_R1 = self.part.dispatch(weight_N[: self.part.sent, None])
        return self.part.all_gather(weight_R1) if self.crossing.sharded else weight_R1

    def bring_back(self, rows_RM: Tensor, rows: int) -> Tensor:
        """Returns what became of the rows that were sent, and zeros for padding: `rows` in all."""
        part, crossing = self.part, self.crossing
        if crossing.sharded:
            with span(crossing.recorder, "reduce-scatter", kind="reduce-scatter", resource="intra", phase=self.phase):
                rows_RM = part.reduce_scatter(rows_RM)
        if crossing.hooks or crossing.recorder is not None:
            with span(crossing.recorder, "combine", kind="combine", resource="inter", phase=self.phase):
                back = carry(crossing.hooks, "combine", part.combine, rows_RM, HookContext(self.phase))
        else:
            back = part.combine(rows_RM)
        if len(back) < rows:
            return _padded(back, rows)
        return back if crossing.travels else back.clone()

    def bring_weights_back(self, weight_R1: Tensor, rows: int) -> Tensor:
        weight_R1 = self.part.reduce_scatter(weight_R1) if self.crossing.sharded else weight_R1
        back = self.part.combine(weight_R1)
        return (_padded(back, rows) if len(back) < rows else back)[:, 0]


def _padded(back: Tensor, rows: int) -> Tensor:
    padded = back.new_zeros((rows, *back.shape[1:]))
    padded[: len(back)] = back
    return padded


@operator("meet")
def meet(counts_E: Tensor, bad: Tensor | None, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor]:
    """Tells the ranks how many rows travel: `Exchange`.

    Args:
        counts_E: rows of this rank for each expert.   dtype: of the rows.
        bad: more than 0 where router logits, or what they are made of, are not finite, a scalar; then no rank goes on.
    Returns:
        `send_PE` and `come_QPE` of the exchange, on the host.
    Raises:
        RankError: of what an exchange refuses.
    """
    found = _way(way, "meet")
    with found.topology.guard("fusedmoe::meet"):
        text = "the input or router logits are NaN or infinite. Look at the layer's input and at the gate's weights"
        refusal = text if bad is not None and int(bad) else None
        made = Exchange(found.all_to_all, found.topology.esp, counts_E, dtype, refusal)
    return torch.tensor(made.send_PE), torch.tensor(made.come_QPE)


@register_fake(meet)
def _(counts_E: Tensor, bad: Tensor | None, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor]:
    topology = next(iter(_ways[way])).topology
    peers, shards = topology.ep.size, topology.esp.size
    send_PE = counts_E.new_empty((peers, counts_E.shape[0] // peers), device="cpu")
    return send_PE, send_PE.new_empty((shards, *send_PE.shape))


@operator("dispatch")
def dispatch(
    rows_NM: Tensor, weight_N: Tensor | None, send_PE: Tensor, come_QPE: Tensor, way: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sends rows, and returns those of this rank's experts, the weight of each sorted one (none of None), and their
    layout."""
    with _Traffic(way, "dispatch", send_PE, come_QPE, rows_NM.device) as traffic:
        rows_RM = traffic.send(rows_NM)
        layout = sort_received(traffic.part.counts_RE, traffic.part.rows)
        weight_R = rows_NM.new_empty(0)
        if weight_N is not None:
            weight_R = traffic.send_weights(weight_N)[layout.pair_N, 0]
        assert layout.source_N is not None
        return rows_RM, weight_R, layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK


@register_fake(dispatch)
def _(rows_NM: Tensor, weight_N: Tensor | None, send_PE: Tensor, come_QPE: Tensor, way: str) -> tuple[Tensor, ...]:
    rows, experts = torch.library.get_ctx().new_dynamic_size(), send_PE.shape[1]
    like = rows_NM.new_empty(0, dtype=torch.long)
    return (
        rows_NM.new_empty((rows, rows_NM.shape[1])),
        rows_NM.new_empty(0) if weight_N is None else weight_N.new_empty(rows),
        like.new_empty(experts),
        like.new_empty(experts + 1, dtype=torch.int32),
        like.new_empty(rows),
        like.new_empty(rows),
        like.new_empty((rows, 1)),
    )


@operator("dispatch_backward")
def dispatch_backward(
    drows_RM: Tensor,
    dweight_R: Tensor | None,
    pair_R: Tensor,
    send_PE: Tensor,
    come_QPE: Tensor,
    rows: int,
    way: str,
) -> tuple[Tensor, Tensor]:
    """Returns gradients of `rows` rows and of their weights (none of None)."""
    with _Traffic(way, "dispatch_backward", send_PE, come_QPE, drows_RM.device) as traffic:
        drows_NM = traffic.bring_back(drows_RM.contiguous(), rows)
        if dweight_R is None:
            return drows_NM, drows_RM.new_empty(0)
        arrived_R1 = torch.empty_like(dweight_R[:, None]).index_copy_(0, pair_R, dweight_R[:, None].contiguous())
        return drows_NM, traffic.bring_weights_back(arrived_R1, rows).contiguous()


@register_fake(dispatch_backward)
def _(drows_RM: Tensor, dweight_R: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    rows = others[3]
    dweight_N = drows_RM.new_empty(0) if dweight_R is None else dweight_R.new_empty(rows)
    return drows_RM.new_empty((rows, drows_RM.shape[1])), dweight_N


@operator("combine")
def combine(out_RM: Tensor, send_PE: Tensor, come_QPE: Tensor, rows: int, way: str) -> Tensor:
    """Returns the results of the rows that were sent, and zeros for padding: `rows` in all."""
    with _Traffic(way, "combine", send_PE, come_QPE, out_RM.device) as traffic:
        return traffic.bring_back(out_RM.contiguous(), rows)


@register_fake(combine)
def _(out_RM: Tensor, send_PE: Tensor, come_QPE: Tensor, rows: int, way: str) -> Tensor:
    return out_RM.new_empty((rows, out_RM.shape[1]))


@operator("combine_backward")
def combine_backward(dy_NM: Tensor, send_PE: Tensor, come_QPE: Tensor, received: int, way: str) -> Tensor:
    """Returns gradients of the `received` results."""
    with _Traffic(way, "combine_backward", send_PE, come_QPE, dy_NM.device) as traffic:
        return traffic.send(dy_NM.contiguous())


@register_fake(combine_backward)
def _(dy_NM: Tensor, send_PE: Tensor, come_QPE: Tensor, received: int, way: str) -> Tensor:
    return dy_NM.new_empty((received, dy_NM.shape[1]))


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows_NM, weight_N, send_PE, come_QPE, ctx.way = inputs
    ctx.crossing = _crossings.get(ctx.way)
    ctx.rows, ctx.weighted = rows_NM.shape[0], weight_N is not None
    ctx.save_for_backward(output[5], send_PE, come_QPE)


def _dispatch_gradient(ctx: Any, drows_RM: Tensor, dweight_R: Tensor, *_: Any) -> tuple[Any, ...]:
    pair_R, send_PE, come_QPE = ctx.saved_tensors
    weighted = dweight_R if ctx.weighted else None
    drows_NM, dweight_N = dispatch_backward(drows_RM, weighted, pair_R, send_PE, come_QPE, ctx.rows, ctx.way)
    return drows_NM, dweight_N if ctx.weighted else None, None, None, None


def _keep_dispatch_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, dweight_R, _, send_PE, come_QPE, _, ctx.way = inputs
    ctx.crossing, ctx.weighted = _crossings.get(ctx.way), dweight_R is not None
    ctx.save_for_backward(send_PE, come_QPE)


def _dispatch_backward_gradient(ctx: Any, g_NM: Tensor, g_N: Tensor) -> tuple[Any, ...]:
    g_RM, g_R, *_ = dispatch(g_NM, g_N if ctx.weighted else None, *ctx.saved_tensors, ctx.way)
    return g_RM, g_R if ctx.weighted else None, None, None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    out_RM, send_PE, come_QPE, _, ctx.way = inputs
    ctx.crossing, ctx.received = _crossings.get(ctx.way), out_RM.shape[0]
    ctx.save_for_backward(send_PE, come_QPE)


def _combine_gradient(ctx: Any, dy_NM: Tensor) -> tuple[Any, ...]:
    return combine_backward(dy_NM, *ctx.saved_tensors, ctx.received, ctx.way), None, None, None, None


def _keep_combine_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy_NM, send_PE, come_QPE, _, ctx.way = inputs
    ctx.crossing, ctx.rows = _crossings.get(ctx.way), dy_NM.shape[0]
    ctx.save_for_backward(send_PE, come_QPE)


def _combine_backward_gradient(ctx: Any, g_RM: Tensor) -> tuple[Any, ...]:
    return combine(g_RM, *ctx.saved_tensors, ctx.rows, ctx.way), None, None, None, None


register_gradient(dispatch, _dispatch_gradient, _keep_dispatch)
register_gradient(dispatch_backward, _dispatch_backward_gradient, _keep_dispatch_backward)
register_gradient(combine, _combine_gradient, _keep_combine)
register_gradient(combine_backward, _combine_backward_gradient, _keep_combine_backward)
