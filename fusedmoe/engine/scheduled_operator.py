"""The way through the experts by a plan as one operator: what a graph of `torch.compile` holds of a scheduled layer.

    y_SM, _ = through_experts_in_graph(dispatcher, Routed(x_SM, layout, weight_SK), experts, bad)

Tokens, router weights and parameters go in, sums of results come out; between them the ranks exchange metadata, find
their plans and work by these in chunks, as without a compiler (`engine/collectives_dispatcher.py`). Whose ranks and
plans is known when a graph runs: the operator gets the number of its dispatcher as a tensor, as if a parameter. So
one graph does for all layers that are alike, and plans may change under it. What the backward needs are results: tokens
as received, what experts keep of their rows, and what the ranks have told each other, with one size for all that is a
token's and one for all that is a pair's. The gradient is an operator of its own, which sends once there and back.

No compiler computes it twice in a backward pass, but an activation checkpoint does, which sends twice then, unless it
keeps the results (`fusedmoe.training.save_communication`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.exchange_operators import BAD_NUMBERS, exchange_of_sizes
from fusedmoe.autograd.experts import backward_flops, row_flops
from fusedmoe.comm.exchange import Agreed
from fusedmoe.comm.metadata import ExpertCalls, NonFinite
from fusedmoe.compat.torch import recording
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts, Rest, Totals, learning
from fusedmoe.engine.chunks import concatenated
from fusedmoe.engine.collectives_dispatcher import (
    Collectives,
    RowBatch,
    TokensBackward,
    TokensForward,
    dispatchers,
)
from fusedmoe.engine.dispatcher import LocalExperts, Routed, weight_of_rows
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import gather_sum as kernels
from fusedmoe.kernels.deduplicate import Received, sending
from fusedmoe.kernels.derivatives import operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.experts import Wanted, Weights
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.step import pass_by_degree
from fusedmoe.schedule.task import PHASES


def through_experts_in_graph(
    dispatcher: Collectives, routed: Routed, experts: LocalExperts, bad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Does what `Collectives.by_operators` does, by the dispatcher's plans.

    Args:
        experts: by kernels of this library (`GroupedExperts`), or `dispatcher.local` with four parameters at most. The
            backward computes the latter again, for an operator keeps no graph. Others go without a plan, as do experts
            that must be called as a module (`must_be_called`).
        bad: how many numbers are not finite, a scalar; all ranks end where there are any.
    Returns:
        [S, M], and a zero whose gradient is the operator's: added to the loss it ties the ranks' exchange to that where
        this rank has no tokens.
    Saves for backward:
        Received tokens, R·M, pre-activations of P pairs, P·H (gated 2·P·H), and 3·P numbers of pairs.
    Raises:
        RankError: on every rank, for numbers that are not finite on any; a rank fails or does not come.
    """
    chunk_experts = experts.in_chunks(routed.x_SM)
    own = [None if parameter is None else _local(parameter) for parameter in chunk_experts.parameters]
    if isinstance(chunk_experts, GroupedExperts):
        b2_start, activation = chunk_experts.weights.b2_start, chunk_experts.activation.name
    elif dispatcher.local is None or len(own) > 4 or len(own) != len([*dispatcher.local.parameters()]):
        return dispatcher.by_operators(routed, experts, bad), routed.x_SM.new_zeros(())
    else:
        own, b2_start, activation = own + [None] * (4 - len(own)), 0, ""
    # Inside an operator no tensor says that it learns.
    learns = learning(own) if torch.is_grad_enabled() else [False] * 4
    y_SM, zero, *_ = scheduled_experts(
        routed.x_SM,
        weight_of_rows(routed.weight_SK, routed.layout),
        *own,
        b2_start,
        activation,
        learns,
        routed.layout.tensors,
        bad,
        torch.is_grad_enabled(),
        dispatcher.topology.ep.size,
        dispatcher.topology.esp.size,
        dispatcher.number,
    )
    return y_SM, zero


class _AutogradAgain:
    """Experts by autograd, whose graph is made once more in the backward pass: an operator keeps tensors alone."""

    any_degree = keeps_rows = tokens_learn = weights_learn = True

    def __init__(self, experts: ChunkExperts) -> None:
        self._experts, self.parameters = experts, experts.parameters

    def for_backward(self) -> _AutogradAgain:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        with recording():
            y_RM, _ = self._experts.forward(x_RM, layout, weight_R)
        return y_RM, x_RM.new_empty((layout.rows, 0))

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        assert x_RM is not None
        with recording():
            _, graph = self._experts.forward(x_RM, layout, weight_R)
            return self._experts.backward(dy_RM, x_RM, graph, layout, weight_R, totals)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        assert x_RM is not None
        with recording():
            _, graph = self._experts.forward(x_RM, layout, weight_R)
            return self._experts.backward_rows(dy_RM, x_RM, graph, layout, weight_R)


def _experts(
    dispatcher: Collectives, own: Sequence[Tensor | None], b2_start: int, how: str, learns: Sequence[bool]
) -> ChunkExperts:
    """Makes the experts of an operator of what it was given."""
    w1, w2, b1, b2 = own
    if how:
        assert w1 is not None and w2 is not None
        return GroupedExperts(Weights(w1, w2, b1, b2, b2_start), how, learns)
    module = dispatcher.local
    assert module is not None
    # The graph's, not the module's: where these are sharded, a graph has this rank's part.
    leaves = [one.detach().requires_grad_(learn) for one, learn in zip(own, learns, strict=True) if one is not None]
    parameters = dict(zip((name for name, _ in module.named_parameters()), leaves, strict=True))

    def compute(x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> Tensor:
        y_RM: Tensor = torch.func.functional_call(module, parameters, (x_RM, layout, weight_R))
        return y_RM

    return _AutogradAgain(AutogradExperts(compute, leaves, module))


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dispatcher(number: Tensor) -> Collectives:
    dispatcher = dispatchers.get(int(number))
    if dispatcher is None:
        raise ConfigError("scheduled_experts: the layer is gone; keep it until the backward pass has ended")
    return dispatcher


def _plans(dispatcher: Collectives, x_SM: Tensor, exchange: Any, experts: ChunkExperts) -> Assigned:
    """Returns the plans to work by; one thing after the other where nothing is to overlap."""
    assigned = dispatcher.plans(x_SM, exchange, lambda: experts)
    if assigned is not None:
        return assigned
    kinds = runnable_kinds(Capabilities(dispatcher.topology.ep.size, dispatcher.topology.esp.size), "itself")
    order = POLICIES["sequential"].order
    return Assigned(Plans(*(pass_by_degree(order, kinds, 1, phase) for phase in PHASES)))


@operator("scheduled_experts")
def scheduled_experts(
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor | None,
    w2: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    activation: str,
    learns: list[bool],
    layout: LayoutTensors,
    bad: Tensor | None,
    keep: bool,
    peers: int,
    shards: int,
    number: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the sums of each token's results, a zero, and what a backward pass needs (nothing without `keep`).

    Args:
        weight_N: [N] router weights of the rows of the layout, which may end with padding.
        bad: see `through_experts_in_graph`.
        w1, w2, b1, b2: as in `Weights`; of experts by autograd their parameters, in order.
        activation: a name of `fusedmoe.kernels.activation.ACTIVATIONS`; "" has autograd compute.
        learns: which of the four have gradients.
        peers, shards: ranks that experts are split over, and of an expert.   number: the dispatcher's.
    Returns:
        y_SM, zero, x_RM and h_PH of all chunks, weights and `Received` of pairs as received, `ExchangeSizes` on the
        host, and there the number of chunks with what plans are found by.
    """
    dispatcher = _dispatcher(number)
    with dispatcher.topology.guard("fusedmoe::scheduled_experts"):
        refusal = None if bad is None else NonFinite(bad, BAD_NUMBERS)
        # A graph keeps sizes alone, and not where a node forwards tokens to.
        routed = Routed(x_SM, Layout.of(layout), None, refusal)
        *_, sent, exchange = dispatcher.exchange_metadata(routed, ExpertCalls.CHUNKS, by_node=False, weight_N=weight_N)
        experts = _experts(dispatcher, (w1, w2, b1, b2), b2_start, activation, learns)
        run = dispatcher.run(_plans(dispatcher, x_SM, exchange, experts), exchange, x_SM.device, None)
        batch, degree = RowBatch(sent, exchange, experts, run), run.plans.degrees[0]
        received, weight_P = exchange.exchange_pairs(sent.code_N, weight_N, sent.row_N, sent.k)
        chunks = batch.chunks(received, degree)
        weights = [None] * degree if weight_P is None else chunks.split(weight_P)
        forward = TokensForward(batch, chunks, kernels.permute(x_SM, chunks.layout), weights)
        forward.keep = keep
        out_TM = forward.run()
        assert out_TM is not None
        y_SM = kernels.gather_sum(out_TM, chunks.layout)
        zero = x_SM.new_zeros(())
        sizes = torch.tensor(exchange.sizes.send_PC, device="cpu"), torch.tensor(exchange.sizes.come_QPC, device="cpu")
        known = torch.tensor([degree, exchange.most_pairs, exchange.share], dtype=torch.float64, device="cpu")
        if not keep:
            rows = x_SM.new_empty((0, x_SM.shape[1])), x_SM.new_empty((0, *_kept_shape(w1, activation)))
            received = Received(*(number.new_empty(0, device=x_SM.device) for _ in range(2)))
            weight_P = None if weight_P is None else weight_P.new_empty(0)
        else:
            read = [chunk.x_RM for chunk in forward.own.values() if chunk.x_RM is not None]
            x_RM = concatenated(read) if experts.keeps_rows else x_SM.new_empty((0, x_SM.shape[1]))
            rows = x_RM, concatenated([chunk.kept for chunk in forward.own.values()])
        weight_P = x_SM.new_empty(0) if weight_P is None else weight_P.contiguous()
        return y_SM, zero, *rows, weight_P, *received, *sizes, known


def _kept_shape(w1: Any, activation: str) -> tuple[int, ...]:
    """Returns the shape of what experts keep of a row."""
    return tuple(w1.shape[1:-1]) if activation else (0,)


@register_fake(scheduled_experts)
def _(
    x_SM: Tensor, weight_N: Any, w1: Any, w2: Any, b1: Any, b2: Any, b2_start: int, activation: str, *others: Any
) -> tuple[Tensor, ...]:
    learns, layout, _, keep, peers, shards, _ = others
    # How many come is known when the graph runs.
    tokens, pairs = (torch.library.get_ctx().new_dynamic_size() if keep else 0 for _ in range(2))
    counts_E = layout[0]
    send_PC = counts_E.new_empty((peers, counts_E.shape[0] // peers + 1), device="cpu")
    return (
        x_SM.new_empty((x_SM.shape[0], w2.shape[1] if activation else x_SM.shape[1])),
        x_SM.new_empty(()),
        x_SM.new_empty((tokens if learns[0] or not activation else 0, x_SM.shape[1])),
        x_SM.new_empty((pairs, *_kept_shape(w1, activation))),
        x_SM.new_empty(0) if weight_N is None else weight_N.new_empty(pairs),
        counts_E.new_empty(pairs),
        counts_E.new_empty(pairs),
        send_PC,
        send_PC.new_empty((shards, *send_PC.shape)),
        send_PC.new_empty(3, dtype=torch.float64),
    )


@register_flops(scheduled_experts, get_raw=True)
def _(x_SM: Tensor, weight_N: Any, *others: Any, out_val: Any, **_: Any) -> int:
    parameters, activation, keep = others[:4], others[5], others[9]
    # Pairs that come from each rank, and behind them their tokens. Without a backward pass no result has as many rows.
    rows = out_val[5].shape[0] if keep else int(out_val[8][..., :-1].sum())
    return int(rows * row_flops(*_stacks(activation, [None if p is None else p.shape for p in parameters])))


def _stacks(activation: str, shapes: Sequence[Any]) -> list[Any]:
    """Returns the shapes of stacks of matrices; by autograd any parameter of three dimensions is taken for one."""
    return list(shapes[:2] if activation else (shape for shape in shapes if shape is not None and len(shape) > 2))


@operator("scheduled_experts_backward")
def scheduled_experts_backward(
    dy_SM: Tensor,
    kept: list[Tensor],
    rows: int | None,
    w1: Tensor | None,
    w2: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    activation: str,
    learns: list[bool],
    layout: LayoutTensors,
    number: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns gradients of x_SM, weight_N, w1, w2, b1 and b2; an empty tensor for what was None.

    Args:
        kept: what the forward pass returned for it.   rows: N; None: there were no weights.
    """
    x_RM, h_PH, weight_P, expert_P, token_P, send_PC, come_QPC, known = kept
    dispatcher = _dispatcher(number)
    topology = dispatcher.topology
    with topology.guard("fusedmoe::scheduled_experts_backward"):
        given = dispatcher.all_to_all, send_PC, come_QPC, x_RM.device, layout[2] is None
        agreed = Agreed(most_pairs=int(known[1]), share=float(known[2]))
        exchange = exchange_of_sizes(topology, *given, f"a graph with {dispatcher.name}", agreed)
        sent = sending(Layout.of(layout), topology.ep.size).exact(exchange.sent, exchange.pairs.sent)
        own = w1, w2, b1, b2
        experts = _experts(dispatcher, own, b2_start, activation, learns)
        run = dispatcher.run(_plans(dispatcher, x_RM, exchange, experts), exchange, x_RM.device, None)
        # Ranks compare first what they call: another one may have no backward pass.
        exchange.turn()
        batch, received = RowBatch(sent, exchange, experts, run), Received(expert_P, token_P)
        (_, degree), forward_degree = run.plans.degrees, int(known[0])
        forward_chunks = batch.chunks(received, forward_degree)
        chunks = forward_chunks if degree == forward_degree else batch.chunks(received, degree)
        weights = [None] * degree if rows is None else chunks.split(weight_P)
        rows_of = [part.rows for part in forward_chunks.parts]
        x: Any = x_RM.split(rows_of) if experts.keeps_rows else [None] * forward_degree
        h = h_PH.split([chunk_layout.rows for chunk_layout in forward_chunks.received])
        rows_TM = kernels.permute(dy_SM.contiguous(), chunks.layout)
        backward = TokensBackward(batch, forward_chunks, chunks, rows_TM, weights, x, h)
        del rows_TM  # a chunk gives up what it has sent
        dx_TM = backward.run()
        assert dx_TM is not None
        dx_SM = kernels.gather_sum(dx_TM, chunks.layout)
        dweight_N = x_RM.new_empty(0)
        if rows is not None:
            dweights = [chunk.weight_R.to(weight_P.dtype) for chunk in backward.own.values()]  # type: ignore[union-attr]
            dweight_N = exchange.return_weights(chunks.join(dweights), sent.row_N, rows).contiguous()
        totals = backward.totals[backward.layer]
        assert totals is not None
        # Parameters that no row of this rank has used have no gradient by autograd.
        grads: list[Any] = [
            x_RM.new_empty(0)
            if not learn or p is None
            else torch.zeros_like(p)
            if total is None
            else _local(total).to(p.dtype)
            for total, p, learn in zip_longest(totals, own, learns)
        ]
        return dx_SM, dweight_N, *grads


@register_fake(scheduled_experts_backward)
def _(dy_SM: Tensor, kept: list[Tensor], rows: int | None, *others: Any) -> tuple[Tensor, ...]:
    x_RM, _, weight_P, *_ = kept
    dweight_N = x_RM.new_empty(0) if rows is None else weight_P.new_empty(rows)
    learns = others[6]
    grads = (torch.empty_like(p) if learn else x_RM.new_empty(0) for p, learn in zip(others, learns, strict=False))
    return x_RM.new_empty((dy_SM.shape[0], x_RM.shape[1])), dweight_N, *grads


@register_flops(scheduled_experts_backward)
def _(dy_SM: Any, kept: Any, rows: Any, *others: Any, **_: Any) -> int:
    parameters, activation, learns = others[:4], others[5], others[6]
    if activation:
        return int(kept[3][0] * backward_flops(Wanted(True, rows is not None, *learns), *parameters[:2]))
    # Autograd computes the forward again, and two products for each of its own.
    return int(3 * kept[3][0] * row_flops(*_stacks(activation, parameters)))


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    _, weight_N, w1, w2, b1, b2, ctx.b2_start, ctx.activation, ctx.learns, layout, *_, number = inputs
    y_SM, _, *kept = output
    ctx.mark_non_differentiable(*kept)
    # Ranks without tokens have a gradient of the zero alone: they go back with the others.
    ctx.set_materialize_grads(False)
    ctx.rows, ctx.size = None if weight_N is None else weight_N.shape[0], y_SM.shape
    ctx.save_for_backward(w1, w2, b1, b2, number, *layout, *kept)


def _gradients(ctx: Any, dy_SM: Tensor | None, dzero: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    w1, w2, b1, b2, number, *saved = ctx.saved_tensors
    layout, kept = saved[:5], saved[5:]
    if dy_SM is None:
        if dzero is None:
            return (None,) * 15
        dy_SM = kept[0].new_zeros(ctx.size)
    given = (ctx.rows, w1, w2, b1, b2, ctx.b2_start, ctx.activation, ctx.learns, layout, number)
    dx_SM, dweight_N, dw1, dw2, db1, db2 = scheduled_experts_backward(dy_SM, kept, *given)
    grads = (grad if learn else None for grad, learn in zip((dw1, dw2, db1, db2), ctx.learns, strict=True))
    return dx_SM, None if ctx.rows is None else dweight_N, *grads, *(None,) * 9


register_gradient(scheduled_experts, _gradients, _keep)
