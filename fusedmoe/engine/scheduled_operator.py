"""Dispatch, experts and combine by a plan as one operator, for `torch.compile` graphs of a scheduled layer.

    y_SM, _ = through_experts_in_graph(dispatcher, Routed(x_SM, layout, weight_SK), experts, bad)

The operator gets its dispatcher's number as a tensor, and looks up ranks and plans when the graph runs. One graph
therefore serves all layers of the same shape, and plans may change without recompilation. Tensors for backward, which
is a separate operator, are outputs with one unbacked size for tokens and one for pairs.

A rank without tokens takes part in all collectives of the plan. For its backward pass the operator also returns a zero
with a gradient, which `PlannedLayer.run_captured` adds to the auxiliary loss.

An activation checkpoint recomputes the operator, communication included, unless it saves the results
(`fusedmoe.training.save_communication`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fusedmoe import handles
from fusedmoe.autograd.exchange_operators import NONFINITE_INPUT, rebuild_exchange
from fusedmoe.autograd.experts import backward_flops, row_flops
from fusedmoe.autograd.order import row_weights
from fusedmoe.comm.exchange import AgreedMetadata
from fusedmoe.comm.metadata import ExpertCalls, NonFiniteCount
from fusedmoe.compat.torch import autograd_recording
from fusedmoe.engine.chunk_experts import AddGrads, AutogradExperts, ChunkExperts, GroupedExperts, Totals, grad_flags
from fusedmoe.engine.chunks import concat
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import LocalExperts, Routed, SharedExpert
from fusedmoe.engine.module_hooks import has_parametrisations, needs_module_call
from fusedmoe.engine.planned import PlannedBatch, SavedForward, run_backward, run_forward
from fusedmoe.engine.run import AssignedPlans, Plans
from fusedmoe.engine.shared_expert_task import SharedExpertTask
from fusedmoe.kernels.deduplicate import ReceivedPairs, deduplicate_tokens
from fusedmoe.kernels.derivatives import operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.experts import NeedsGrad, Weights
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.runtime.recorder import active_recorder
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.step import pass_by_degree
from fusedmoe.schedule.task import PHASES


def through_experts_in_graph(
    dispatcher: Collectives, routed: Routed, experts: LocalExperts, bad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run dispatch, experts and combine by the dispatcher's plans, as one operator. Collective.

    Args:
        experts: experts by this library's kernels (`GroupedExperts`), or `dispatcher.graph_module` with at most four
            parameters, whose forward is recomputed in backward. All other experts run without a plan.
        bad: scalar count of non-finite values.
    Returns:
        [S, M], and a zero to add to the loss: through it, a rank without tokens takes part in the backward exchange.
    Saves for backward:
        Received tokens R·M, pre-activations of P pairs P·H (gated 2·P·H), and 3·P integers.
    Raises:
        RankError: on every rank, if any has non-finite values, fails or times out.
    """
    chunk_experts = experts.in_chunks(routed.x_SM)
    params = [None if parameter is None else _to_local(parameter) for parameter in chunk_experts.parameters]
    module = dispatcher.graph_module
    if isinstance(chunk_experts, GroupedExperts):
        b2_start, activation = chunk_experts.weights.b2_start, chunk_experts.activation.name
    elif module is None or len(params) > 4 or len(params) != len([*module.parameters()]):
        return dispatcher.run_by_operators(routed, experts, bad), routed.x_SM.new_zeros(())
    else:
        params, b2_start, activation = params + [None] * (4 - len(params)), 0, ""
    shared = _shared_arguments(routed.shared)
    # Inside an operator `requires_grad` is always False.
    needing = params if shared[0] is None else [*params, *shared[1:5], shared[0]]
    needs_grad = grad_flags(needing) if torch.is_grad_enabled() else [False] * len(needing)
    y_SM, zero, *_, shared_SM = scheduled_experts(
        routed.x_SM,
        row_weights(routed.weight_SK, routed.layout),
        *params,
        b2_start,
        activation,
        needs_grad,
        *shared,
        routed.layout.tensors,
        bad,
        torch.is_grad_enabled(),
        dispatcher.topology.ep.size,
        dispatcher.topology.esp.size,
        dispatcher.handle_number,
    )
    if routed.shared is not None and shared[0] is not None:
        routed.shared.result = shared_SM
    return y_SM, zero


def _shared_arguments(shared: SharedExpert | None) -> tuple[Any, ...]:
    """Return the operator's arguments for a shared expert: its tokens, four parameters, `b2_start` and activation.

    The tokens are None if there is none, or if it must run after the operator: with hooks, adapters, parametrizations.
    """
    nothing = None, None, None, None, None, 0, ""
    if shared is None or needs_module_call(shared.module) or has_parametrisations(shared.module):
        return nothing
    experts = shared.module.in_chunks(shared.x_SM)
    if not isinstance(experts, GroupedExperts):
        return nothing
    parameters = (None if each is None else _to_local(each) for each in experts.parameters)
    return shared.x_SM, *parameters, experts.weights.b2_start, experts.activation.name


class _RecomputedExperts:
    """Experts by autograd that recompute their graph in backward, because an operator can save only tensors."""

    can_rechunk = needs_input_rows = tokens_require_grad = weights_require_grad = True

    def __init__(self, experts: ChunkExperts) -> None:
        self._experts, self.parameters = experts, experts.parameters

    def for_backward(self) -> _RecomputedExperts:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        with autograd_recording():
            y_RM, _ = self._experts.forward(x_RM, layout, weight_R)
        return y_RM, x_RM.new_empty((layout.rows, 0))

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        assert x_RM is not None
        with autograd_recording():
            _, graph = self._experts.forward(x_RM, layout, weight_R)
            return self._experts.backward(dy_RM, x_RM, graph, layout, weight_R, totals)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        assert x_RM is not None
        with autograd_recording():
            _, graph = self._experts.forward(x_RM, layout, weight_R)
            return self._experts.backward_rows(dy_RM, x_RM, graph, layout, weight_R)


def _experts(
    dispatcher: Collectives, params: Sequence[Tensor | None], b2_start: int, activation: str, needs_grad: Sequence[bool]
) -> ChunkExperts:
    w1, w2, b1, b2 = params
    if activation:
        assert w1 is not None and w2 is not None
        return GroupedExperts(Weights(w1, w2, b1, b2, b2_start), activation, needs_grad[:4])
    module = dispatcher.graph_module
    assert module is not None
    # The graph's tensors, not the module's: if the parameters are sharded, a graph has this rank's part.
    pairs = zip(params, needs_grad[:4], strict=True)
    leaves = [param.detach().requires_grad_(needs) for param, needs in pairs if param is not None]
    parameters = dict(zip((name for name, _ in module.named_parameters()), leaves, strict=True))

    def compute(x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> Tensor:
        y_RM: Tensor = torch.func.functional_call(module, parameters, (x_RM, layout, weight_R))
        return y_RM

    return _RecomputedExperts(AutogradExperts(compute, leaves, module))


def _to_local(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dispatcher(number: Tensor, operation: str) -> Collectives:
    dispatcher: Collectives = handles.require(f"dispatcher {int(number)}", operation)
    return dispatcher


def _plans(dispatcher: Collectives, x_SM: Tensor, exchange: Any, experts: ChunkExperts) -> AssignedPlans:
    assigned = dispatcher.find_plans(x_SM, exchange, lambda: experts)
    if assigned is not None:
        return assigned
    kinds = runnable_kinds(Capabilities(dispatcher.topology.ep.size, dispatcher.topology.esp.size), "itself")
    order = POLICIES["sequential"].order
    return AssignedPlans(Plans(*(pass_by_degree(order, kinds, 1, phase) for phase in PHASES)))


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
    needs_grad: list[bool],
    shared_x_SM: Tensor | None,
    shared_w1: Tensor | None,
    shared_w2: Tensor | None,
    shared_b1: Tensor | None,
    shared_b2: Tensor | None,
    shared_b2_start: int,
    shared_activation: str,
    layout: LayoutTensors,
    bad: Tensor | None,
    keep: bool,
    peers: int,
    shards: int,
    number: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the forward of a planned layer; return results and the tensors for backward (empty without `keep`).

    `peers` and `shards`, the sizes of ep and esp, are read by the fake implementation only.

    Args:
        weight_N: [N] router weights of the layout's rows, padding included.
        w1, w2, b1, b2: as in `Weights`; for experts by autograd, their parameters in order.
        activation: a name of `fusedmoe.kernels.activation.ACTIVATIONS`; "": autograd computes.
        needs_grad: of w1, w2, b1, b2; with a shared expert also of its parameters and its tokens.
        shared_x_SM: tokens of the shared expert, which the plan computes; None: there is none.
    Returns:
        y_SM; a zero; x_RM and h_PH of all chunks; router weights and `ReceivedPairs` as received; on the host:
        `ExchangeSizes`, and the number of chunks with the values from which plans are chosen; the pre-activations and
        the results of the shared expert.
    """
    dispatcher = _dispatcher(number, "scheduled_experts")
    with dispatcher.topology.guard("fusedmoe::scheduled_experts"):
        refusal = None if bad is None else NonFiniteCount(bad, NONFINITE_INPUT)
        # A graph stores sizes only, not the forwarding of tokens inside a node.
        routed = Routed(x_SM, Layout.of(layout), None, refusal)
        *_, sent, exchange = dispatcher.exchange_metadata(routed, ExpertCalls.CHUNKS, by_node=False, weight_N=weight_N)
        experts = _experts(dispatcher, (w1, w2, b1, b2), b2_start, activation, needs_grad)
        run = dispatcher.runner.start(_plans(dispatcher, x_SM, exchange, experts), x_SM.device, active_recorder())
        of_shared = (shared_w1, shared_w2, shared_b1, shared_b2), shared_b2_start, shared_activation
        batch = PlannedBatch(sent, exchange, experts, run, _shared_experts(*of_shared, needs_grad))
        y_SM, saved = run_forward(batch, x_SM, weight_N, shared_x_SM, save_for_backward=keep)
        sizes = torch.tensor(exchange.sizes.send_PC, device="cpu"), torch.tensor(exchange.sizes.recv_QPC, device="cpu")
        chunks = saved.chunks
        plan_inputs = [len(chunks.exchanges), exchange.max_pairs, exchange.tokens_per_pair]
        weight_P, nothing_M = x_SM.new_empty(0), x_SM.new_empty((0, x_SM.shape[1]))
        if not keep:
            activations = x_SM.new_empty((0, *_activation_shape(w1, activation)))
            x_RM, pairs = nothing_M, ReceivedPairs(*(each.new_empty(0, device=x_SM.device) for each in saved.pairs))
            weight_P = weight_P if weight_N is None else weight_N.new_empty(0)
        else:
            x_RM, pairs = concat(saved.x_RM) if experts.needs_input_rows else nothing_M, saved.pairs
            activations = concat(saved.activations)
            if weights := [weight for weight in saved.weight_R if weight is not None]:
                weight_P = chunks.join(weights)
        host = *sizes, torch.tensor(plan_inputs, dtype=torch.float64, device="cpu")
        task = saved.shared
        shared_SM = x_SM.new_empty(0) if task is None else task.take_result()
        shared_h = x_SM.new_empty(0) if task is None or not keep else task.activations[0]
        return y_SM, x_SM.new_zeros(()), x_RM, activations, weight_P, *pairs, *host, shared_h, shared_SM


def _shared_experts(
    params: Sequence[Tensor | None], b2_start: int, activation: str, needs_grad: Sequence[bool]
) -> GroupedExperts | None:
    w1, w2, b1, b2 = params
    if w1 is None or w2 is None:
        return None
    experts = GroupedExperts(Weights(w1, w2, b1, b2, b2_start), activation, needs_grad[4:8])
    experts.tokens_require_grad = needs_grad[8]
    return experts


def _activation_shape(w1: Any, activation: str) -> tuple[int, ...]:
    return tuple(w1.shape[1:-1]) if activation else (0,)


@register_fake(scheduled_experts)
def _(
    x_SM: Tensor, weight_N: Any, w1: Any, w2: Any, b1: Any, b2: Any, b2_start: int, activation: str, *others: Any
) -> tuple[Tensor, ...]:
    needs_grad, shared_x_SM, shared_w1, *_, layout, _, keep, peers, shards, _ = others
    tokens, pairs = (torch.library.get_ctx().new_dynamic_size() if keep else 0 for _ in range(2))
    counts_E = layout[0]
    send_PC = counts_E.new_empty((peers, counts_E.shape[0] // peers + 1), device="cpu")
    return (
        x_SM.new_empty((x_SM.shape[0], w2.shape[1] if activation else x_SM.shape[1])),
        x_SM.new_empty(()),
        x_SM.new_empty((tokens if needs_grad[0] or not activation else 0, x_SM.shape[1])),
        x_SM.new_empty((pairs, *_activation_shape(w1, activation))),
        x_SM.new_empty(0) if weight_N is None else weight_N.new_empty(pairs),
        counts_E.new_empty(pairs),
        counts_E.new_empty(pairs),
        send_PC,
        send_PC.new_empty((shards, *send_PC.shape)),
        send_PC.new_empty(3, dtype=torch.float64),
        *_shared_results(x_SM, shared_x_SM, shared_w1, keep),
    )


def _shared_results(like: Tensor, x_SM: Tensor | None, w1: Any, keep: bool) -> tuple[Tensor, Tensor]:
    if x_SM is None:
        return like.new_empty(0), like.new_empty(0)
    shape = (x_SM.shape[0], *w1.shape[1:-1]) if keep else (0,)
    return x_SM.new_empty(shape), x_SM.new_empty(x_SM.shape)


@register_flops(scheduled_experts, get_raw=True)
def _(x_SM: Tensor, weight_N: Any, *others: Any, out_val: Any, **_: Any) -> int:
    parameters, activation, keep = others[:4], others[5], others[16]
    # Pairs received from each rank; the last column has tokens. Without a backward pass no result has as many rows.
    rows = out_val[5].shape[0] if keep else int(out_val[8][..., :-1].sum())
    flops = rows * row_flops(*_stack_shapes(activation, [None if p is None else p.shape for p in parameters]))
    if (shared_x_SM := others[7]) is not None:
        flops += shared_x_SM.shape[0] * row_flops(others[8].shape, others[9].shape)
    return int(flops)


def _stack_shapes(activation: str, shapes: Sequence[Any]) -> list[Any]:
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
    needs_grad: list[bool],
    shared_x_SM: Tensor | None,
    shared_w1: Tensor | None,
    shared_w2: Tensor | None,
    shared_b1: Tensor | None,
    shared_b2: Tensor | None,
    shared_b2_start: int,
    shared_activation: str,
    shared_dy_SM: Tensor | None,
    layout: LayoutTensors,
    number: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x_SM, weight_N, w1, w2, b1 and b2, and of the shared expert's parameters and tokens.

    Empty tensors stand for gradients that are not needed.

    Args:
        kept: tensors that `scheduled_experts` returned for backward.
        rows: length of weight_N; None: all weights are 1.
    """
    x_RM, h_PH, weight_P, expert_P, token_P, send_PC, recv_QPC, plan_inputs, shared_h = kept
    dispatcher = _dispatcher(number, "scheduled_experts_backward")
    topology = dispatcher.topology
    with topology.guard("fusedmoe::scheduled_experts_backward"):
        given = dispatcher.all_to_all, send_PC, recv_QPC, x_RM.device, layout[2] is None
        agreed = AgreedMetadata(max_pairs=int(plan_inputs[1]), tokens_per_pair=float(plan_inputs[2]))
        exchange = rebuild_exchange(topology, *given, f"a graph with {dispatcher.name}", agreed)
        padded, num_pairs = deduplicate_tokens(Layout.of(layout), topology.ep.size), exchange.pair_exchange.num_sent
        sent = padded.exact(exchange.num_sent, num_pairs)
        params = w1, w2, b1, b2
        experts = _experts(dispatcher, params, b2_start, activation, needs_grad)
        run = dispatcher.runner.start(_plans(dispatcher, x_RM, exchange, experts), x_RM.device, active_recorder())
        shared_params = shared_w1, shared_w2, shared_b1, shared_b2
        shared = _shared_experts(shared_params, shared_b2_start, shared_activation, needs_grad)
        batch = PlannedBatch(sent, exchange, experts, run, shared)
        pairs, forward_degree = ReceivedPairs(expert_P, token_P), int(plan_inputs[0])
        chunks = batch.chunks(pairs, forward_degree)
        nothing: list[Any] = [None] * forward_degree
        x = [*x_RM.split([exchange.num_rows for exchange in chunks.exchanges])] if experts.needs_input_rows else nothing
        h = [*h_PH.split([layout.rows for layout in chunks.received])]
        weights = nothing if rows is None else [*chunks.split(weight_P)]
        task = None if shared is None else SharedExpertTask(shared, shared_x_SM, [shared_h])
        saved = SavedForward(pairs, chunks, x, h, weights, rows, task)
        del x, h, weights
        dx_SM, dweight_N, totals = run_backward(batch, saved, dy_SM, shared_dy_SM)
        assert dx_SM is not None
        dweight_N = x_RM.new_empty(0) if dweight_N is None else dweight_N.contiguous()
        assert totals is not None
        grads = _fill_gradients(totals, params, needs_grad[:4], x_RM)
        own = () if task is None or task.totals is None else (*task.totals, task.result)
        own_params, own_needs = (*shared_params, shared_x_SM), needs_grad[4:] or [False] * 5
        return dx_SM, dweight_N, *grads, *_fill_gradients(own, own_params, own_needs, x_RM)


def _fill_gradients(
    totals: Iterable[Tensor | None], params: Sequence[Tensor | None], needs_grad: Sequence[bool], like: Tensor
) -> list[Any]:
    # Autograd returns None for parameters that no row of this rank used.
    return [
        like.new_empty(0)
        if not needs or p is None
        else torch.zeros_like(p)
        if total is None
        else _to_local(total).to(p.dtype)
        for total, p, needs in zip_longest(totals, params, needs_grad)
    ]


@register_fake(scheduled_experts_backward)
def _(dy_SM: Tensor, kept: list[Tensor], rows: int | None, *others: Any) -> tuple[Tensor, ...]:
    x_RM, _, weight_P, *_ = kept
    dweight_N = x_RM.new_empty(0) if rows is None else weight_P.new_empty(rows)
    needs_grad = others[6] if len(others[6]) == 9 else [*others[6], *[False] * 5]
    params = *others[:4], *others[8:12], others[7]
    grads = (torch.empty_like(p) if needs else x_RM.new_empty(0) for p, needs in zip(params, needs_grad, strict=True))
    return x_RM.new_empty((dy_SM.shape[0], x_RM.shape[1])), dweight_N, *grads


@register_flops(scheduled_experts_backward)
def _(dy_SM: Any, kept: Any, rows: Any, *others: Any, **_: Any) -> int:
    parameters, activation, needs_grad = others[:4], others[5], others[6]
    flops = 0
    if (shared_shape := others[7]) is not None:
        flops = shared_shape[0] * backward_flops(NeedsGrad(needs_grad[8], False, *needs_grad[4:8]), *others[8:10])
    if activation:
        needs = NeedsGrad(True, rows is not None, *needs_grad[:4])
        return int(flops + kept[3][0] * backward_flops(needs, *parameters[:2]))
    return int(flops + 3 * kept[3][0] * row_flops(*_stack_shapes(activation, parameters)))


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    _, weight_N, *parameters = inputs[:6]
    ctx.b2_start, ctx.activation, ctx.needs_grad, *shared = inputs[6:14]
    ctx.shared_form, layout, number = inputs[14:16], inputs[16], inputs[-1]
    y_SM, _, *kept, _ = output
    ctx.mark_non_differentiable(*kept)
    # A rank without tokens has only the gradient of the zero, and takes part in the backward exchange.
    ctx.set_materialize_grads(False)
    ctx.rows, ctx.size = None if weight_N is None else weight_N.shape[0], y_SM.shape
    ctx.save_for_backward(*parameters, number, *shared, *layout, *kept)


def _gradients(ctx: Any, dy_SM: Tensor | None, dzero: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    w1, w2, b1, b2, number, *saved = ctx.saved_tensors
    shared, layout, kept, shared_dy_SM = saved[:5], saved[5:10], saved[10:], others[-1]
    if dy_SM is None:
        if dzero is None and shared_dy_SM is None:
            return (None,) * 22
        dy_SM = kept[0].new_zeros(ctx.size)
    given = (ctx.rows, w1, w2, b1, b2, ctx.b2_start, ctx.activation, ctx.needs_grad)
    given = (*given, *shared, *ctx.shared_form, shared_dy_SM, layout, number)
    dx_SM, dweight_N, *every = scheduled_experts_backward(dy_SM, kept, *given)
    needed = (*ctx.needs_grad, *[False] * 5)
    *grads, dshared_x = (grad if needs else None for grad, needs in zip(every, needed, strict=False))
    dweight_N = None if ctx.rows is None else dweight_N
    return dx_SM, dweight_N, *grads[:4], *(None,) * 3, dshared_x, *grads[4:], *(None,) * 8


register_gradient(scheduled_experts, _gradients, _save_for_backward)
