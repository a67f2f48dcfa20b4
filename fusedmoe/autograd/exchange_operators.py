"""Tokens between ranks as PyTorch operators, `torch.ops.fusedmoe.*`: eager, compiled and checkpointed layers take them.

    *tokens, row_N, code_N = deduplicate(layout, peers)               which tokens go to which rank
    send_PC, come_QPC = exchange_metadata(counts_E, tokens_W, bad, *form, way)
    x_RM, weight_N, order_N, *layout = dispatch(x_TM, weight_N, row_N, code_N, k, send_PC, come_QPC, way)
    …                                                                 experts
    y_TM = combine(y_RM, send_PC, come_QPC, len(x_TM), way)

Operators take tensors and plain values, so process groups stand behind a name, `way`: in graphs that of a `Way`, which
layers share; in eager mode that of a `Crossing`, one batch's way, whose ranks have met already. How many rows come is
known when a graph runs, not when it is made: sizes without a value (`new_dynamic_size`), one of tokens and one of pairs
for all results of a dispatch. Each operator needs the one before, forward and backward, so that no compiler can change
the order of what ranks do together; and none is computed twice in a backward pass, since compilers recompute only
operators that they know.

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

from fusedmoe.comm import exchange
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import Agreed, Exchange, ExchangeSizes
from fusedmoe.comm.metadata import ExpertCalls, NonFinite, RowForm, TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.hooks import Direction, HookContext, Hooks, carry
from fusedmoe.kernels.deduplicate import sending
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.runtime.recorder import Recorder, span

# A graph holds the name of a way, and one graph is to do for all layers that exchange over the same process groups: so
# several ways may have a name, and whichever of them is open stands for it. Each holds the set that it is in: a name
# goes with its last way.
_ways: WeakValueDictionary[str, WeakSet[Way]] = WeakValueDictionary()
_crossings: WeakValueDictionary[str, Crossing] = WeakValueDictionary()
_new_number = count()

#: Why a rank of a graph refuses.
BAD_NUMBERS = "the input or router logits are NaN or infinite. Look at the layer's input and at the gate's weights"


class Way:
    """The ranks and the algorithm by which rows of a layer travel, under a name for as long as it is held.

    Ways over the same process groups, by the same algorithm, have the same name, whichever layers and topologies they
    are of. It has no ranks in it, so that ranks that do the same compile the same graphs.

    Attributes:
        name: which graphs know it by.
    """

    recorder: Recorder | None = None  # none in graphs

    def __init__(self, topology: Topology, all_to_all: AllToAll) -> None:
        self.topology, self.all_to_all = topology, all_to_all
        self.name = f"{all_to_all.identity}, {topology.esp.identity}"
        self._alike = _ways.setdefault(self.name, WeakSet())
        self._alike.add(self)

    @property
    def is_open(self) -> bool:
        """Tells whether rows can travel: a topology that was closed has no process groups, others still may."""
        return self.topology.ep.is_open and self.topology.esp.is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> Way:
        return self  # as its topology

    def __reduce__(self) -> tuple[Any, ...]:
        return Way, (self.topology, self.all_to_all)


class Crossing:
    """One batch's way to the experts' ranks and back, once its ranks have met.

    In eager mode operators know it by its name. The graph of its batch keeps it, so that the layer may be gone by the
    backward pass.

    Attributes:
        part: the collectives that rows go by.
        sharded: experts are split over esp.   travels: there are other ranks.
        hooks: see rows on the wire, forward and backward.   recorder: takes spans of both passes.
        turned: the ranks have compared that they have a backward pass.
    """

    def __init__(
        self, topology: Topology, part: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
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


def exchange_of_sizes(
    topology: Topology,
    all_to_all: AllToAll,
    send_PC: Tensor,
    come_QPC: Tensor,
    device: torch.device,
    by_pairs: bool,
    call: str,
    agreed: Agreed | None = None,
) -> Exchange:
    """Makes an exchange again of the sizes (`ExchangeSizes`), and what else its ranks agreed on, that a graph holds."""
    grid = topology.expert_grid
    ranks_QP = None if grid is None else grid[topology.edp.index].t().numpy()
    sizes = ExchangeSizes(send_PC.numpy(), come_QPC.numpy())
    return Exchange(all_to_all, topology.esp, sizes, device, by_pairs, call, ranks_QP, agreed=agreed)


class _Traffic:
    """The collectives of one operator, as a context: errors inside are told to the other ranks.

    `send` takes rows to all shards of their experts, `bring_back` takes their results to the ranks of the tokens.
    """

    def __init__(
        self, way: str, operation: str, send_PC: Tensor, come_QPC: Tensor, device: torch.device, by_pairs: bool = False
    ) -> None:
        crossing = _crossings.get(way)
        if crossing is None:  # in a graph
            layers = _way(way, operation)
            with layers.topology.guard(f"fusedmoe::{operation}"):
                # A graph has carried sizes alone: collectives for them are made again, here and in the backward.
                given = layers.all_to_all, send_PC, come_QPC, device, by_pairs
                part = exchange_of_sizes(layers.topology, *given, "a layer's graph")
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
            # Other ranks may wait in the same collective: they end with this error, not with a time-out.
            self.crossing.topology.stop(f"fusedmoe::{self.operation}", error)

    def send(self, x_TM: Tensor) -> Tensor:
        part, crossing = self.part, self.crossing
        if len(x_TM) > part.sent:
            x_TM = x_TM[: part.sent]  # padding does not travel
        if crossing.hooks or crossing.recorder is not None:
            with span(crossing.recorder, "dispatch", kind="dispatch", resource="inter", phase=self.phase):
                rows = carry(crossing.hooks, "dispatch", part.dispatch, x_TM, HookContext(self.phase))
        else:
            rows = part.dispatch(x_TM)
        if crossing.sharded:
            with span(crossing.recorder, "all-gather", kind="all-gather", resource="intra", phase=self.phase):
                rows = part.all_gather(rows)
        # An operator returns memory of its own.
        return rows if crossing.travels else rows.clone()

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


def _padded(back: Tensor, rows: int) -> Tensor:
    # Rows of padding did not travel, and their sum must not be what memory held before.
    padded = back.new_zeros((rows, *back.shape[1:]))
    padded[: len(back)] = back
    return padded


@operator("deduplicate")
def deduplicate(layout: LayoutTensors, peers: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chooses the tokens that go to each rank: the five tensors of `Sending.tokens`, `row_N` and `code_N`."""
    tokens, row_N, code_N, _ = sending(Layout.of(layout), peers)
    assert tokens.source_N is not None and row_N is not None and code_N is not None
    return tokens.counts_E, tokens.offsets_E1, tokens.source_N, tokens.pair_N, tokens.row_SK, row_N, code_N


@register_fake(deduplicate)
def _(layout: LayoutTensors, peers: int) -> tuple[Tensor, ...]:
    of = Layout.of(layout)
    # No token goes to a rank twice, and none without a pair: bounds that need no numbers.
    rows = torch.sym_min(of.rows, of.tokens * peers)
    like, small = of.row_SK, torch.int16 if of.experts < 2**14 else torch.int32
    counts_W, offsets_W1 = like.new_empty(peers), like.new_empty(peers + 1, dtype=torch.int32)
    source_T, pair_T, row_SK = like.new_empty(rows), like.new_empty(rows), like.new_empty(like.shape)
    row_N = like.new_empty(of.rows)
    return counts_W, offsets_W1, source_T, pair_T, row_SK, row_N, row_N.to(small)


@operator("exchange_metadata")
def exchange_metadata(
    counts_E: Tensor,
    tokens_W: Tensor | None,
    bad: Tensor | None,
    dtype: torch.dtype,
    width: int,
    k: int,
    weights: torch.dtype | None,
    way: str,
) -> tuple[Tensor, Tensor]:
    """Exchange the numbers of tokens and pairs between the ranks, as `fusedmoe.comm.exchange.exchange_metadata`.

    Args:
        counts_E: pairs of this rank for each expert.   tokens_W: its tokens for each rank; None: a row for each pair.
        bad: more than 0 where router logits, or what they are made of, are not finite, a scalar; then no rank goes on.
        dtype, width, k, weights: as in `RowForm`.
    Returns:
        `ExchangeSizes.send_PC` and `ExchangeSizes.come_QPC`, on the host.
    Raises:
        RankError: of what an exchange refuses.
    """
    found = _way(way, "exchange_metadata")
    with found.topology.guard("fusedmoe::exchange_metadata"):
        refusal = None if bad is None else NonFinite(bad, BAD_NUMBERS)
        made = exchange.exchange_metadata(
            found.all_to_all,
            found.topology.esp,
            counts_E,
            RowForm(dtype, width, k, weights),
            refusal,
            tokens=None if tokens_W is None else TokenCounts(tokens_W),
            expert_calls=ExpertCalls.MODULE,  # operators follow, without a plan
        )
    return torch.tensor(made.sizes.send_PC, device="cpu"), torch.tensor(made.sizes.come_QPC, device="cpu")


@register_fake(exchange_metadata)
def _(counts_E: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, way = others
    topology = next(iter(_ways[way])).topology
    peers, shards = topology.ep.size, topology.esp.size
    send_PC = counts_E.new_empty((peers, counts_E.shape[0] // peers + 1), device="cpu")
    return send_PC, send_PC.new_empty((shards, *send_PC.shape))


@operator("dispatch")
def dispatch(
    x_TM: Tensor,
    weight_N: Tensor | None,
    row_N: Tensor | None,
    code_N: Tensor | None,
    k: int,
    send_PC: Tensor,
    come_QPC: Tensor,
    way: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sends tokens, and returns those for this rank's experts, the weight of each of their sorted rows (none of None),
    the pair of each, numbered as received, and their layout.

    Args:
        x_TM: [T, M] tokens by destination.   weight_N: [N] weight of each row of the experts' layout.
        row_N, code_N: as `deduplicate` gives them; None: a row travels for each pair.
        k: the most pairs of a token.
    """
    with _Traffic(way, "dispatch", send_PC, come_QPC, x_TM.device, code_N is None) as traffic:
        part = traffic.part
        x_RM = traffic.send(x_TM)
        received, weight_P = part.exchange_pairs(code_N, weight_N, row_N, k)
        layout, order_N = received.sort(part.rows, part.experts, k)
        sorted_N = x_TM.new_empty(0) if weight_P is None else weight_P[order_N]
        assert layout.source_N is not None
        numbers = layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK
        return x_RM, sorted_N, order_N, *numbers


@register_fake(dispatch)
def _(x_TM: Tensor, weight_N: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    _, code_N, k, _, come_QPC, _ = others
    # How many come is known when the graph runs.
    tokens, experts = torch.library.get_ctx().new_dynamic_size(), come_QPC.shape[2] - 1
    pairs = tokens if code_N is None else torch.library.get_ctx().new_dynamic_size()
    like = x_TM.new_empty(0, dtype=torch.long)
    return (
        x_TM.new_empty((tokens, x_TM.shape[1])),
        x_TM.new_empty(0) if weight_N is None else weight_N.new_empty(pairs),
        like.new_empty(pairs),
        like.new_empty(experts),
        like.new_empty(experts + 1, dtype=torch.int32),
        like.new_empty(pairs),
        like.new_empty(pairs),
        like.new_empty((tokens, k)),
    )


@operator("dispatch_backward")
def dispatch_backward(
    dx_RM: Tensor | None,
    dweight_N: Tensor | None,
    order_N: Tensor,
    row_N: Tensor | None,
    code_N: Tensor | None,
    k: int,
    send_PC: Tensor,
    come_QPC: Tensor,
    tokens: int,
    rows: int,
    way: str,
) -> tuple[Tensor, Tensor]:
    """Returns gradients of `tokens` tokens, and of the weights of `rows` rows (none of None, of either)."""
    with _Traffic(way, "dispatch_backward", send_PC, come_QPC, order_N.device, row_N is None) as traffic:
        dx_TM = order_N.new_empty(0) if dx_RM is None else traffic.bring_back(dx_RM.contiguous(), tokens)
        if dweight_N is None:
            return dx_TM, dx_TM.new_empty(0)
        dweight_P = torch.empty_like(dweight_N).index_copy_(0, order_N, dweight_N.contiguous())
        return dx_TM, traffic.part.return_weights(dweight_P, row_N, rows).contiguous()


@register_fake(dispatch_backward)
def _(dx_RM: Tensor | None, dweight_N: Tensor | None, order_N: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, rows = others[5:7]
    dx_TM = order_N.new_empty(0) if dx_RM is None else dx_RM.new_empty((tokens, dx_RM.shape[1]))
    return dx_TM, dx_TM.new_empty(0) if dweight_N is None else dweight_N.new_empty(rows)


@operator("combine")
def combine(y_RM: Tensor, send_PC: Tensor, come_QPC: Tensor, tokens: int, way: str) -> Tensor:
    """Returns the results of the tokens that were sent, and zeros for padding: `tokens` in all."""
    with _Traffic(way, "combine", send_PC, come_QPC, y_RM.device) as traffic:
        return traffic.bring_back(y_RM.contiguous(), tokens)


@register_fake(combine)
def _(y_RM: Tensor, send_PC: Tensor, come_QPC: Tensor, tokens: int, way: str) -> Tensor:
    return y_RM.new_empty((tokens, y_RM.shape[1]))


@operator("combine_backward")
def combine_backward(dy_TM: Tensor, send_PC: Tensor, come_QPC: Tensor, received: int, way: str) -> Tensor:
    """Returns gradients of the `received` results."""
    with _Traffic(way, "combine_backward", send_PC, come_QPC, dy_TM.device) as traffic:
        return traffic.send(dy_TM.contiguous())


@register_fake(combine_backward)
def _(dy_TM: Tensor, send_PC: Tensor, come_QPC: Tensor, received: int, way: str) -> Tensor:
    return dy_TM.new_empty((received, dy_TM.shape[1]))


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TM, weight_N, row_N, code_N, ctx.k, send_PC, come_QPC, ctx.way = inputs
    ctx.crossing = _crossings.get(ctx.way)
    ctx.tokens, ctx.rows = x_TM.shape[0], None if weight_N is None else weight_N.shape[0]
    part = None if ctx.crossing is None else ctx.crossing.part
    # A graph does not hold which gradients no rank needs.
    ctx.learn = (True, True) if part is None else (part.tokens_require_grad, part.weights_require_grad)
    if not all(ctx.learn):
        ctx.mark_non_differentiable(*(rows for rows, learns in zip(output, ctx.learn, strict=False) if not learns))
        ctx.set_materialize_grads(False)  # or there would be zeros for these
        ctx.shapes = x_TM.new_empty(()).expand(output[0].shape), output[1].new_empty(()).expand(output[1].shape)
    ctx.save_for_backward(output[2], row_N, code_N, send_PC, come_QPC)


def _dispatch_gradient(ctx: Any, dx_RM: Tensor | None, dweight_N: Tensor | None, *_: Any) -> tuple[Any, ...]:
    order_N, row_N, code_N, *sizes = ctx.saved_tensors
    tokens_learn, weights_learn = ctx.learn[0], ctx.learn[1] and ctx.rows is not None
    if tokens_learn and dx_RM is None:
        dx_RM = torch.zeros_like(ctx.shapes[0])
    if weights_learn and dweight_N is None:
        dweight_N = torch.zeros_like(ctx.shapes[1])
    given = dx_RM if tokens_learn else None, dweight_N if weights_learn else None
    rows = ctx.rows if weights_learn else 0
    dx_TM, dweight = dispatch_backward(*given, order_N, row_N, code_N, ctx.k, *sizes, ctx.tokens, rows, ctx.way)
    return dx_TM if tokens_learn else None, dweight if weights_learn else None, None, None, None, None, None, None


def _keep_dispatch_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dx_RM, dweight_N, _, row_N, code_N, ctx.k, send_PC, come_QPC, ctx.tokens, _, ctx.way = inputs
    ctx.crossing, ctx.given = _crossings.get(ctx.way), (dx_RM is not None, dweight_N is not None)
    ctx.save_for_backward(row_N, code_N, send_PC, come_QPC)


def _dispatch_backward_gradient(ctx: Any, g_TM: Tensor, g_N: Tensor) -> tuple[Any, ...]:
    row_N, code_N, *sizes = ctx.saved_tensors
    tokens, weights = ctx.given
    if not tokens:  # weights travel beside tokens, as narrow as can be
        g_TM = g_N.new_zeros((ctx.tokens, 1))
    g_RM, g_weight, *_ = dispatch(g_TM, g_N if weights else None, row_N, code_N, ctx.k, *sizes, ctx.way)
    return g_RM if tokens else None, g_weight if weights else None, *(None,) * 9


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps what the way back needs, of `combine` and of its backward alike."""
    rows, send_PC, come_QPC, _, ctx.way = inputs
    ctx.crossing, ctx.rows = _crossings.get(ctx.way), rows.shape[0]
    ctx.save_for_backward(send_PC, come_QPC)


def _combine_gradient(ctx: Any, dy_TM: Tensor) -> tuple[Any, ...]:
    return combine_backward(dy_TM, *ctx.saved_tensors, ctx.rows, ctx.way), None, None, None, None


def _combine_backward_gradient(ctx: Any, g_RM: Tensor) -> tuple[Any, ...]:
    return combine(g_RM, *ctx.saved_tensors, ctx.rows, ctx.way), None, None, None, None


register_gradient(dispatch, _dispatch_gradient, _keep_dispatch)
register_gradient(dispatch_backward, _dispatch_backward_gradient, _keep_dispatch_backward)
register_gradient(combine, _combine_gradient, _keep_combine)
register_gradient(combine_backward, _combine_backward_gradient, _keep_combine)
