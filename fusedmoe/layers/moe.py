"""The mixture-of-experts layer. `MoELayer`'s docstring is the map of a token's way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_results
from fusedmoe.autograd.parallel import MpInput, MpTokens
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import module_states
from fusedmoe.engine.dispatcher import Dispatcher, Routed
from fusedmoe.engine.graph_dispatch import by_operators_in_graph
from fusedmoe.engine.module_hooks import must_be_called
from fusedmoe.engine.run import GradientReducer, Plans
from fusedmoe.engine.wrappers import NotScripted, WrapperCheck, not_traced
from fusedmoe.experts.networks import Experts, require_own_experts
from fusedmoe.gates.base import Gate, SoftRouting
from fusedmoe.gates.whole_batch import ExpertChoice
from fusedmoe.hooks import Hooks, enter, leave, listed
from fusedmoe.kernels.backend import require_floats
from fusedmoe.kernels.derivatives import constant_in_graphs, count_flops, graph_takes_sizes, keep_out_of_graphs
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers import input_checks
from fusedmoe.layers.assembly import (
    agree_on_parts,
    make_dispatcher,
    make_plans,
    require_library_dispatch,
    require_parts,
    set_up_experts,
)
from fusedmoe.layers.layer_plans import LayerParts
from fusedmoe.layers.load import Load
from fusedmoe.losses import Packing
from fusedmoe.orders import Dropless, Order, Sparse
from fusedmoe.runtime.recorder import Recorder, in_layer, record_with, span
from fusedmoe.schedule.task import Task

if TYPE_CHECKING:  # what only layers with a schedule load
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.layers.scheduled_exchange import ScheduledExchange
    from fusedmoe.schedule.cost import CostModel

Placements = Literal["ep", "fssdp"]


class MoELayer(nn.Module):
    """A mixture-of-experts layer over DP, MP, EP and ESP (FSMoE §2.2, Fig. 2).

        y[s] = Σ over the chosen experts i of s that did not drop it of weight_i(s) · expert_i(x[s])  (+ shared(x[s]))

    The way of a token, all in `forward`; shapes: S tokens of this rank, M model_dim, K choices, N = S·K rows at most:

    1. Input is checked, padding left out; MP ranks take their own tokens.  `input_checks.py`, `../autograd/parallel.py`
    2. The gate chooses: x_SM → expert_SK, weight_SK, auxiliary loss.       `gates/base.py`
    3. The order sorts rows by expert, drops what exceeds the capacity.     `orders.py`, `../kernels/layout.py`
    4. Ranks tell each other how many tokens come, or why not.              `../comm/exchange.py`
    5. Dispatch: a token goes once to each rank with experts for it.        `../engine/collectives_dispatcher.py`
    6. Experts compute its rows, and sum them; see `../kernels/experts.py`. `expert_networks.py`
    7. Combine: these sums go back, and are added rank by rank.             `../engine/collectives_dispatcher.py`
    8. The shared expert's result is added; MP ranks get all results.       `../autograd/parallel.py`

    Steps 4 to 7 are the dispatcher's (`../engine/dispatcher.py` has a worked example, and the other dispatchers). With
    a schedule they go in chunks, by a plan, which `../engine/run.py` runs; in a graph of `torch.compile` all four are
    one operator then, `../engine/scheduled_operator.py`. The backward goes the same way from 8 to 1: what is a combine
    there and back is a dispatch, and the other way round.

    Every rank routes its own tokens, as many as it has, none included; capacity and auxiliary losses are decided on
    them alone. Given each rank's tokens, results do not depend on where the experts are nor on the dispatch algorithm
    (to rounding: each rank, or node, adds up what its experts make of a token), nor on the order's means, sorting or
    products.

    Args:
        model_dim: M.
        gate: decides which experts see a token; `gate.experts` experts in all, split evenly over EP.
        experts: the experts' network; each rank makes the parameters of its own.
        order: how rows are laid out; by default `Dropless` for a gate without capacity, else `Sparse`.
        topology: where ranks stand; by default a world of one (data parallelism around it needs nothing else).
        dispatch: all-to-all algorithm, "direct", "1dh" or "2dh", or "auto": the first batch tries all three, and the
            shortest stays (`pipeline`, and compiled layers without a schedule, take "direct"). Or a `Dispatcher` of
            your own, which has the say over how tokens travel, and whose hooks are its own; such a layer takes no
            schedule, no plans and no placement.
        hooks: user code at six seams, `Hooks`.
        shared: an experts' network that sees every token (DeepSeek's shared expert), replicated on all ranks.
        mp_input: what the model-parallel ranks pass in. "replicated": all the same x; each routes its slice of the
            tokens and all return the same y. "partial": summands of x, summed on the way in (MP-ReduceScatter); y as
            before. "split": slices already; y is the slice's. With the first two, the loss is the same on all MP ranks,
            and gradients of x and of replicated parameters are whole on each, `sync_gradients(…,
            mp_loss="replicated")`; with "split" they are summands.
        schedule: chunks that overlap what travels with what is computed; results do not depend on it. "off"; "auto",
            the best by prediction (in a training loop `fusedmoe.training.tune_step` measures); the name of a policy;
            or a `Schedule`. With "auto" and names the first forward, in each dtype, is collective over all ranks,
            replicas included: it measures the machine, and keeps that on disk (`fusedmoe.runtime.cache`). A layer does
            not watch its steps: what was measured holds until `measured_costs(tokens, again_s=…)` is called, by which
            the next forward is planned. `PlanChooser` notices steps that drift by itself.
        placement: "ep": each rank has as many experts, in order, for good. "fssdp": any rank owns any number of them,
            and `fusedmoe.training.ShardedExperts` has them copied as load asks; results are those of "ep", to rounding.
        device, dtype: of the parameters.

    Attributes:
        dispatcher: takes tokens to their experts and sums back.
        parts: the kinds of tasks that plans of this layer have, by collectives.
        placed: where the experts are, with "fssdp"; None where they do not move, as with one rank.
        aux_loss: the gate's weighted auxiliary losses in the last forward, a scalar to add to the loss. Like the task's
            loss, it is the same on every rank of an MP group, except with mp_input="split", where it is this rank's
            summand of the group's mean.
        load_E, dropped: how many slots chose each expert in the last forward, on this rank; how many were dropped.
        recorder: measures each part while set (see `fusedmoe.runtime.recorder`).
        number: its place among the model's layers with experts, from 0, in timelines and profiles; None: not set.

    Saves for backward, parameters aside, for P rows that the experts here compute (P = N where nothing travels), T
    tokens sent and R tokens received, with a `TopK` gate, a `Sparse` or `Dropless` order, feed-forward experts (H is
    their `hidden`, g = 2 for a gated activation, else 1), in elements:
    - in x's dtype: S·M for x, P·g·H/ESP for the pre-activation, and with EP·ESP > 1 or hooks R·M for tokens received;
    - in float32 (float64 for float64): S·K + P router weights, and E·(S + 1) for the balance loss, if it is on;
    - integers, of 8 bytes at most: 2·S·K + 4·N + 2·S + 4·E or less, and with EP·ESP > 1 or hooks
      S·K + 2·N + 2·T + 4·P + R·K + 8·E more.
    The activation, the experts' outputs and any padding are never saved. Other gates save as much, or say so; `Einsum`
    saves its matrices, S·E·C twice; under autocast x and the experts' parameters are also saved in the lower precision.

    Raises:
        ConfigError: parts of another kind or sizes that cannot work, found when the layer is made or called in a world
            of one.
        RankError: in a larger world, on every rank alike, before anything is sent, naming the rank at fault: layers
            that differ (found when they are made: collective), input of a wrong shape, dtype or device, bad logits.
    """

    __jit_ignored_attributes__ = NotScripted()

    def __new__(cls, *_: Any, **__: Any) -> Self:
        keep_out_of_graphs(MoELayer, "_guarded")
        keep_out_of_graphs(MoELayer, "refuse")
        constant_in_graphs(graph_takes_sizes)
        count_flops()
        return super().__new__(cls)

    def __init__(
        self,
        model_dim: int,
        gate: Gate,
        experts: Experts,
        *,
        order: Order | None = None,
        topology: Topology | None = None,
        dispatch: str | Dispatcher = "direct",
        hooks: Iterable[Hooks] = (),
        shared: Experts | None = None,
        mp_input: MpInput = "replicated",
        schedule: str | Schedule = "off",
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model_dim, self.mp_input, self.hooks = model_dim, mp_input, listed(hooks)
        require_parts(gate, experts, shared, order, topology, placement)
        require_floats("MoELayer", dtype)
        self.topology = Topology() if topology is None else topology
        self.mp_tokens = MpTokens(self.topology.mp, mp_input)
        self.order = order or (Dropless() if gate.capacity_factor is None else Sparse())
        self.dispatch = str(dispatch)
        self.gate, self.experts, self.shared = gate, experts, shared
        agree_on_parts(self, repr(schedule), placement, dtype or torch.get_default_dtype())
        if isinstance(dispatch, Dispatcher):
            off = schedule is None or schedule == "off"
            asks = None if placement == "ep" else f"placement={placement!r}"
            require_library_dispatch(dispatch, asks if off else f"schedule={schedule!r}")
        gate.setup(model_dim, device=device, dtype=dtype)
        parts = LayerParts(self.topology, gate, self.order, experts)
        moves = placement == "fssdp" and self.topology.ep.size > 1
        self.placed = set_up_experts(parts, shared, model_dim, moves, device, dtype)
        self.recorder: Recorder | None = None
        self.number: int | None = None
        self._plans = make_plans(schedule, parts, moves, bool(self.hooks))
        self.parts = self._plans.kinds
        self.dispatcher = make_dispatcher(dispatch, self._plans, self.hooks, self.placed)
        self.checks = input_checks.InputChecks(self.topology, carried=self.dispatcher.collectives is not None)
        axes = [group.axis for group in (self.topology.ep, self.topology.esp) if group.size > 1]
        copies = self.topology.edp.ranks
        self.require_wrapper = WrapperCheck(self.experts, self.topology.rank, copies, axes) if axes else None
        self.load = Load(gate.experts)
        self.aux_loss = torch.zeros((), device="cpu")
        self.register_load_state_dict_pre_hook(require_own_experts)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """[..., M] -> [..., M], any number of tokens. Under autocast the experts compute in the autocast dtype.

        `mask` [...], booleans, is true for tokens and false for padding. What is padding takes no part: it has no
        expert, no place in a capacity, no share in loads, losses and metrics, and its output is zero, the shared
        expert's too. All else is as if the padding were not there. Hooks see all of x and y. How many tokens there are
        is asked of the mask's device, once a forward: on CUDA that waits, unless the mask is on the host.

        `cu_seqlens` [sequences + 1], int32 or int64, as FlashAttention has them: the gate's balance loss is then taken
        in each packed sequence of this rank's tokens, padding left out, and averaged over the sequences that have any.
        For `DeepSeekV3` without `sequence`, and MP ranks with mp_input="split"; others are refused.

        `torch.compile(fullgraph=True)` takes the layer in, unless it has hooks, MP ranks, placements, a mask before
        `ExpertChoice` or, with a schedule, experts of your own. Else, and with a mask or rows that travel without
        `fullgraph`, a compiled model calls it as it is. Where no rows travel nothing waits for the device, so that a
        CUDA graph can hold the layer; on CUDA logits that are not finite are then told by a later call, or by `check`.
        """
        # How many tokens a mask leaves is known when a graph runs, and `ExpertChoice` would need to know before.
        takes = mask is None or (graph_takes_sizes() and not isinstance(self.gate, ExpertChoice))
        # A graph checks cu_seqlens on this rank alone, and other ranks would wait for it.
        takes = takes and (cu_seqlens is None or self.topology.size == 1)
        if torch.compiler.is_compiling() and self._compiles and takes:
            if self.require_wrapper is not None:
                self.require_wrapper()
            return self._forward(x, mask, cu_seqlens, None)
        return self._guarded(x, mask, cu_seqlens)

    def _guarded(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        # Asked here, where nearly always nothing has changed: a token's way has no call for it then.
        check = self.require_wrapper
        if check is not None and check.passed != (len(module_states), id(next(self.experts.parameters(), None))):
            check()
        if torch.jit.is_tracing():
            raise not_traced()
        recorder = in_layer(self.recorder, self.number)
        with self.topology.guard("MoELayer.forward"), record_with(recorder):
            self.checks.tell_logits()
            return self._forward(x, mask, cu_seqlens, recorder)

    def refuse(self, refusal: str) -> None:
        """Raise `refusal` on all ranks, whose next call is a forward pass of this layer. Collective over ep and esp."""
        with self.topology.guard("MoELayer.forward"):
            like = next(self.experts.parameters(), None)
            nothing_SM = input_checks.no_tokens(None, self.model_dim, like)
            self._route(nothing_SM, refusal, in_layer(self.recorder, self.number), False)

    @property
    def _compiles(self) -> bool:
        """Tells whether a compiler can take the layer in: all that it does are operators."""
        if self.hooks or self.topology.mp.size > 1 or not self.dispatcher.compiles:
            return False
        # Where tokens travel it must be whole, or each of its operators would be a graph's end.
        whole = self.dispatcher.collectives is None or graph_takes_sizes()
        return whole and (not self._by_plan or self._plans.compiles)

    @property
    def _by_plan(self) -> bool:
        return self.dispatcher.follows_plans and not self._plans.plans_nothing

    def _forward(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, recorder: Recorder | None) -> Tensor:
        x = enter(self.hooks, x) if self.hooks and isinstance(x, Tensor) else x
        x_SM, refusal = self.checks.tokens(x, self.model_dim, self.experts)
        packing = None
        if cu_seqlens is not None:
            packing, refusal = input_checks.packing_of(cu_seqlens, x, refusal, self.gate, self.mp_tokens.joint)
        if mask is not None:  # from here to the end the padding is not there
            real_S, refusal = input_checks.real_tokens(mask, x, refusal, self.gate)
            x_SM = x_SM.index_select(0, real_S)
            packing = packing and packing.select(real_S)
        if self.mp_tokens.joint:  # the ranks of an MP group have the same tokens: each routes a slice
            x_SM, refusal = self.checks.agree_on_tokens(x_SM, refusal, self.mp_input)
            counts = self.mp_tokens.counts(len(x_SM))
            y_SM = self._route(self.mp_tokens.take(x_SM, counts, recorder), refusal, recorder, mask is not None)
            y_SM = self.mp_tokens.join(y_SM, counts, recorder)
        else:
            y_SM = self._route(x_SM, refusal, recorder, mask is not None, packing)
        if mask is not None:
            y_SM = y_SM.new_zeros(x.shape[:-1].numel(), self.model_dim).index_copy(0, real_S, y_SM)
        y = y_SM.view(x.shape)
        return leave(self.hooks, y) if self.hooks else y

    def _route(
        self,
        x_SM: Tensor,
        refusal: str | None,
        recorder: Recorder | None,
        masked: bool,
        packing: Packing | None = None,
    ) -> Tensor:
        with span(recorder, "gate", kind="gate", phase="forward"):
            if packing is not None:
                routing = self.gate(x_SM, packing)
            else:
                routing = self.mp_tokens.call(self.gate, x_SM) if self.mp_tokens.joint else self.gate(x_SM)
            refusal = refusal or self.checks.of_routing(routing, self.gate, x_SM)
            if refusal is not None:
                routing = input_checks.no_routing(x_SM)  # this rank sends nothing but why
        if self.topology.ep.size == self.topology.esp.size == 1:
            self.checks.refuse(refusal)  # no exchange would tell it
        if self.placed is not None and isinstance(routing, SoftRouting):
            raise input_checks.no_load(self.gate)
        x_SM = x_SM.to(self.experts.row_dtype(x_SM))
        with span(recorder, "permute", kind="permute", phase="forward"):
            ordered = self.order.order(x_SM, routing, self.gate.experts)
        # Behind the order, which says on CUDA what is wrong with numbers of experts.
        self.load.count(routing, ordered.kept_E, self.gate, self.training, ordered.all_kept)
        bad = self.checks.bad_logits(routing)
        routed = Routed(ordered.x_SM, ordered.layout, ordered.weight_SK, refusal or bad)
        aux = routing.aux_loss
        if torch.compiler.is_compiling() and (collectives := self.dispatcher.collectives) is not None:
            number = None if bad is None else bad.number
            if self._by_plan and not must_be_called(self.experts):
                from fusedmoe.engine.scheduled_operator import through_experts_in_graph

                y_SM, zero = through_experts_in_graph(collectives, routed, self.experts, number)
                # Gradients of the loss go through the exchange, where this rank has no others.
                aux = aux if masked or len(y_SM) else aux + zero
            else:
                y_SM, aux = by_operators_in_graph(collectives, routed, self.experts, number, aux, masked)
        else:
            y_SM = self.dispatcher.through_experts(routed, self.experts)
            self.load.sent(self.dispatcher.travelled)
        with span(recorder, "unpermute", kind="unpermute", phase="forward"):
            y_SM = self.order.restore(y_SM, ordered)
        check_results(type(self.experts).__name__, y_SM, x_SM)
        if self.shared is not None:
            every = contiguous_layout(torch.full((1,), x_SM.shape[0], device=x_SM.device), x_SM.shape[0])
            shared_SM = self.mp_tokens.call(self.shared, x_SM, every, None)
            check_results(type(self.shared).__name__, shared_SM, x_SM)
            y_SM = y_SM + shared_SM
        if self.topology.mp.size > 1:
            aux = self.mp_tokens.aux(aux)
        self.aux_loss = self.load.keep_aux(aux, self.gate, self.training)
        return y_SM

    def set_plan(
        self, plans: Plans | None, gradients: GradientReducer | None = None, beside: Sequence[Task] = ()
    ) -> None:
        """Has the layer work by these plans, the same on every rank, whatever its schedule; None: by it again.

        Args:
            gradients: reduces the gradient buckets that the backward plan has, and those `beside` what follows it.
        Raises:
            ConfigError: plans with other tasks than this layer can run, or without some of its parts; plans for a
                dispatcher of your own.
        """
        require_library_dispatch(self.dispatch, None if plans is None else "set_plan")
        self._plans.assign(plans, gradients, beside)

    def measured_costs(self, tokens: int, *, again_s: float | None = None) -> CostModel:
        """Returns the costs of this machine, and of this layer for so many tokens of each rank, for plans by cost;
        measured now, or before (`fusedmoe.runtime.cache`). Collective over all ranks.

        Args:
            again_s: measure in any case, for about so many seconds; the same on every rank. A schedule that measures
                plans the next forward in the parameters' dtype by it; kernels that send by themselves stay as chosen.
        Raises:
            ConfigError: experts that do not say how much they compute.
        """
        from fusedmoe.layers.measure import measure_layer

        with self.topology.guard("MoELayer.measured_costs"):
            like = next(self.parameters()).new_empty(tokens, self.model_dim)
            costs = measure_layer(self._plans, like, again_s=again_s)
            if again_s is not None:
                self._plans.renew(like, costs)
            return costs

    def update_gate(self) -> None:
        """Tells a gate that balances without a loss (DeepSeek-V3) the load of all ranks since the last call; call it
        after each optimizer step. Collective."""
        self.load.tell(self.gate, self.topology.world)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}  # copies and pickles are not part of a graph

    @property
    def expert_ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks over which the experts are split along ep and esp, as `fusedmoe.training` asks."""
        return {"ep": self.topology.ep.ranks, "esp": self.topology.esp.ranks}

    @property
    def load_E(self) -> Tensor:
        """[E] int64: slots that chose each expert in the last forward, on this rank, drops included."""
        return self.load.chosen_E

    @property
    def dropped(self) -> int:
        """The number of slots of the last forward that were dropped (on CUDA this waits for the device)."""
        return self.load.dropped()

    def check(self) -> None:
        """Raises what a forward would that knew of bad router logits in forwards before, and of waits for other ranks
        that ended early; waits for the device. Only what runs on CUDA without waiting needs it, graphs above all."""
        with self.topology.guard("MoELayer.check"):
            self.topology.check()
            self.checks.tell_logits(wait=True)

    def extra_repr(self) -> str:
        return (
            f"model_dim={self.model_dim}, order={self.order}, dispatch={self.dispatch!r}, "
            f"schedule={str(self._plans)!r}, {self.topology}"
        )


def number_layers(layers: Iterable[MoELayer | ScheduledExchange]) -> None:
    """Gives the layers of a model their numbers for timelines and profiles, in this order."""
    for number, layer in enumerate(layers):
        layer.number = number
