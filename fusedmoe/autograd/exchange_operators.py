"""Rows between ranks as PyTorch operators, `torch.ops.fusedmoe.*`, which `torch.compile` takes into a graph as is.

    send_PE, come_QPE = meet(counts_E, bad, dtype, way)
    rows_RM, weight_R, *layout = dispatch(rows_NM, weight_N, send_PE, come_QPE, way)
    …                                                        experts
    y_NM = combine(out_RM, send_PE, come_QPE, len(rows_NM), way)

Operators take tensors and plain values, so process groups stand behind a name, `Way.name`. How many rows come is known
when a graph runs, not when it is made: a size without a value (`new_dynamic_size`), one for all results of a dispatch.
Each operator needs the one before, forward and backward, so that no compiler can change the order of what ranks do
together; and none is computed twice in a backward pass, since compilers recompute only operators that they know.

Rows that are sent may end with padding (`Layout`), which does not travel; rows that come have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fusedmoe.autograd.moves import received_layout
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient

# A graph holds the name of a way, and one graph is to do for all layers that exchange over the same process groups: so
# several ways may have a name, and whichever of them is open stands for it.
_ways: dict[str, WeakSet[Way]] = {}


class Way:
    """Where rows of a layer travel, under a name for as long as somebody holds it.

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
        """Whether rows can travel: a topology that was closed has no process groups, while others may use them."""
        return self.topology.ep.is_open and self.topology.esp.is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> Way:
        return self  # as its topology

    def __reduce__(self) -> tuple[Any, ...]:
        return Way, (self.topology, self.all_to_all)


@contextmanager
def _guarded(way: str, operation: str) -> Iterator[Way]:
    ways = list(_ways.get(way, ()))
    if not ways:
        raise ConfigError(f"{operation}: the layer of {way} is gone; keep it until the backward pass has ended")
    found = next((one for one in ways if one.is_open), ways[0])  # a closed one says so itself
    with found.topology.guard(f"fusedmoe::{operation}"):
        yield found


@contextmanager
def _part(way: str, operation: str, send_PE: Tensor, come_QPE: Tensor, device: torch.device) -> Iterator[Part]:
    with _guarded(way, operation) as found:
        part = Part(found.all_to_all, found.topology.esp, send_PE.numpy(), come_QPE.numpy(), device, "a layer's graph")
        if operation.endswith("_backward"):
            part.turn()
        yield part


@operator("meet")
def meet(counts_E: Tensor, bad: Tensor | None, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor]:
    """The ranks tell each other how many rows travel: `Exchange`.

    Args:
        counts_E: rows of this rank for each expert.   dtype: of the rows.
        bad: more than 0 where router logits, or what they are made of, are not finite, a scalar; then no rank goes on.
    Returns:
        `send_PE` and `come_QPE` of the exchange, on the host.
    Raises:
        RankError: of what an exchange refuses.
    """
    with _guarded(way, "meet") as found:
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
    """The rows of this rank's experts, the weight of each sorted one (none of None), and the layout that sorts them."""
    with _part(way, "dispatch", send_PE, come_QPE, rows_NM.device) as part:
        rows_RM = part.all_gather(part.dispatch(rows_NM[: part.sent]))
        layout = received_layout(part.counts_RE, part.rows)
        weight_R = rows_NM.new_empty(0)
        if weight_N is not None:
            weight_R = part.all_gather(part.dispatch(weight_N[: part.sent, None]))[layout.pair_N, 0]
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
    """Gradients of `rows` rows and of their weights (none of None)."""
    with _part(way, "dispatch_backward", send_PE, come_QPE, drows_RM.device) as part:
        drows_NM = _sent_back(part, drows_RM.contiguous(), rows)
        if dweight_R is None:
            return drows_NM, drows_RM.new_empty(0)
        arrived_R1 = torch.empty_like(dweight_R[:, None]).index_copy_(0, pair_R, dweight_R[:, None].contiguous())
        return drows_NM, _sent_back(part, arrived_R1, rows)[:, 0].contiguous()


@register_fake(dispatch_backward)
def _(drows_RM: Tensor, dweight_R: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    rows = others[3]
    dweight_N = drows_RM.new_empty(0) if dweight_R is None else dweight_R.new_empty(rows)
    return drows_RM.new_empty((rows, drows_RM.shape[1])), dweight_N


@operator("combine")
def combine(out_RM: Tensor, send_PE: Tensor, come_QPE: Tensor, rows: int, way: str) -> Tensor:
    """The results of the rows that were sent, and zeros for padding: `rows` in all."""
    with _part(way, "combine", send_PE, come_QPE, out_RM.device) as part:
        return _sent_back(part, out_RM.contiguous(), rows)


@register_fake(combine)
def _(out_RM: Tensor, send_PE: Tensor, come_QPE: Tensor, rows: int, way: str) -> Tensor:
    return out_RM.new_empty((rows, out_RM.shape[1]))


@operator("combine_backward")
def combine_backward(dy_NM: Tensor, send_PE: Tensor, come_QPE: Tensor, received: int, way: str) -> Tensor:
    """Gradients of the `received` results."""
    with _part(way, "combine_backward", send_PE, come_QPE, dy_NM.device) as part:
        return part.all_gather(part.dispatch(dy_NM[: part.sent].contiguous()))


@register_fake(combine_backward)
def _(dy_NM: Tensor, send_PE: Tensor, come_QPE: Tensor, received: int, way: str) -> Tensor:
    return dy_NM.new_empty((received, dy_NM.shape[1]))


def _sent_back(part: Part, rows_RM: Tensor, rows: int) -> Tensor:
    """What became of the rows that were sent, and zeros for padding: a tensor of its own, with `rows` in all."""
    back = part.combine(part.reduce_scatter(rows_RM))
    padded = back.new_zeros((rows, *back.shape[1:]))
    padded[: len(back)] = back
    return padded


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows_NM, weight_N, send_PE, come_QPE, ctx.way = inputs
    ctx.rows, ctx.weighted = rows_NM.shape[0], weight_N is not None
    ctx.save_for_backward(output[5], send_PE, come_QPE)


def _dispatch_gradient(ctx: Any, drows_RM: Tensor, dweight_R: Tensor, *_: Any) -> tuple[Any, ...]:
    pair_R, send_PE, come_QPE = ctx.saved_tensors
    weighted = dweight_R if ctx.weighted else None
    drows_NM, dweight_N = dispatch_backward(drows_RM, weighted, pair_R, send_PE, come_QPE, ctx.rows, ctx.way)
    return drows_NM, dweight_N if ctx.weighted else None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    out_RM, send_PE, come_QPE, _, ctx.way = inputs
    ctx.received = out_RM.shape[0]
    ctx.save_for_backward(send_PE, come_QPE)


def _combine_gradient(ctx: Any, dy_NM: Tensor) -> tuple[Any, ...]:
    send_PE, come_QPE = ctx.saved_tensors
    return combine_backward(dy_NM, send_PE, come_QPE, ctx.received, ctx.way), None, None, None, None


register_gradient(dispatch, _dispatch_gradient, _keep_dispatch)
register_gradient(combine, _combine_gradient, _keep_combine)
