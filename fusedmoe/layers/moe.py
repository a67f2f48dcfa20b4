"""The mixture-of-experts layer. The docstring of `MoELayer` numbers the steps of its forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_results
from fusedmoe.autograd.parallel import MpInput, MpTokens
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import module_states
from fusedmoe.engine.dispatcher import Dispatcher, Routed, SharedExpert
from fusedmoe.engine.shared_expert_task import single_expert_layout
from fusedmoe.engine.wrappers import RefusesScripting, WrapperCheck, jit_error
from fusedmoe.experts.networks import Experts, require_own_experts
from fusedmoe.gates.base import Gate, Routing, SoftRouting
from fusedmoe.hooks import Hooks, apply_end_hooks, apply_start_hooks, validate_hooks
from fusedmoe.kernels.backend import require_float_dtype
from fusedmoe.kernels.derivatives import exclude_from_graphs
from fusedmoe.layers import input_checks
from fusedmoe.layers.assembly import agree_on_parts, make_dispatcher, make_plans, require_parts, set_up_experts
from fusedmoe.layers.layer_plans import LayerParts, PlannedLayer, is_captured, require_library_dispatch
from fusedmoe.layers.load import Load
from fusedmoe.losses import Packing
from fusedmoe.orders import Dropless, Order, Ordered, Sparse
from fusedmoe.runtime.recorder import Recorder, layer_recorder, part_span, record_with

if TYPE_CHECKING:  # imported at run time by layers with a schedule only
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.layers.scheduled_exchange import ScheduledExchange
    from fusedmoe.schedule.cost import CostModel

Placements = Literal["ep", "fssdp"]


class _Tokens(NamedTuple):
    """The tokens that this rank routes in one forward pass.

    Attributes:
        refusal: error message for invalid input, or None.
        packing: the packed sequences of these tokens; None: not packed.
        real_S: indices of these tokens among tokens and padding; None: no mask.
        mp_counts: tokens of each MP rank; None: MP ranks have separate tokens.
    """

    x_SM: Tensor
    refusal: str | None
    packing: Packing | None = None
    real_S: Tensor | None = None
    mp_counts: list[int] | None = None


class MoELayer(PlannedLayer, nn.Module):
    """A mixture-of-experts layer: every token is processed by the K experts that a gate chooses for it.

        y[s] = Σ_i weight_i(s) · expert_i(x[s])  (+ shared(x[s])),   i: the chosen experts of token s, unless dropped

    EP ranks hold different experts, ESP ranks shards of each expert, MP ranks share tokens, DP ranks are replicas
    (FSMoE §2.2, Fig. 2). Steps of `forward` (S: tokens of this rank, M: model_dim, K: choices per token, N ≤ S·K:
    routed rows, R: tokens received):

        x [..., M]
        │ 1. _select_tokens   check the input, remove padding, take this MP rank's slice          → x_SM
        │ 2. _choose_experts  gate: choose experts and weights, compute the auxiliary loss        → expert_SK, weight_SK
        │ 3. _sort_rows       sort (token, k) pairs by expert, drop those beyond the capacity     → layout of N rows
        │ 4. _exchange        metadata: ranks exchange token counts, or the reason for an error
        │ 5.                  dispatch: send each token once to every rank with one of its experts    → x_RM
        │ 6.                  experts: grouped FFN, weighted sum over each token's experts here       → y_RM
        │ 7.                  combine: send these sums back, add them in rank order                   → y_SM
        │ 8. _sum_results     restore the token order, add the shared expert (a schedule computes it during 5 to 7)
        ▼    _restore_tokens  all-gather over MP, insert zeros at padding
        y [..., M]

    The dispatcher runs steps 4 to 7 (worked example: `engine/dispatcher.py`); with a schedule, in chunks that overlap
    (`engine/planned.py`). Code of the steps: `input_checks.py` (1), `gates/` (2), `orders.py` (3), `comm/exchange.py`
    (4), `engine/collectives_dispatcher.py` (5 and 7), `experts/networks.py` (6), `autograd/parallel.py` (MP in 1 and
    8).

    The number of tokens may differ between ranks and may be 0. Capacity and auxiliary losses depend on this rank's
    tokens only. Results do not depend on placement, dispatch algorithm, order or schedule, up to rounding.

    Args:
        model_dim: M.
        gate: chooses experts; `gate.experts` is their number over all ranks, split evenly over EP.
        experts: the network of the experts; each rank allocates the parameters of its own experts.
        order: row layout; default: `Dropless` for a gate without capacity, otherwise `Sparse`.
        topology: process groups; default: one rank (data parallelism around the layer needs no topology).
        dispatch: all-to-all algorithm: "direct", "1dh", "2dh", or "auto", which times all three on the first batch and
            keeps the fastest (`pipeline` and compiled layers without a schedule use "direct"). Or a custom
            `Dispatcher`, which replaces steps 4 to 7; it excludes a schedule, plans and a placement, and runs hooks
            itself.
        hooks: user code at six points of the forward and backward pass (`Hooks`).
        shared: network applied to every token (DeepSeek's shared expert), replicated on all ranks.
        mp_input: input of the model-parallel ranks. "replicated": the same x on all; each routes a slice, and all
            return the same y. "partial": summands of x, which are reduce-scattered; otherwise as "replicated". "split":
            each rank passes in and returns its own slice. With the first two, the loss is the same on all MP ranks, and
            gradients of x and of replicated parameters are complete on each (`sync_gradients(…,
            mp_loss="replicated")`); with "split" they are summands.
        schedule: overlap of communication and computation: "off"; "auto", the fastest by prediction (in a training
            loop, `fusedmoe.training.tune_model` measures instead); the name of a policy; or a `Schedule`. With "auto"
            or a name, the first forward in each dtype is collective over all ranks, replicas included: it measures the
            machine and stores the result on disk (`fusedmoe.runtime.cache`).
        placement: "ep": each rank permanently holds the same number of experts, in order. "fssdp": a rank may own any
            number of experts, and `fusedmoe.training.ShardedExperts` replicates experts according to their load.
        device, dtype: of the parameters.

    Attributes:
        dispatcher: runs steps 4 to 7.
        parts: task kinds in the plans of this layer, when collectives send the tokens.
        placed: the placed experts with "fssdp" on several ranks, otherwise None.
        aux_loss: weighted auxiliary losses of the last forward, a scalar to add to the loss. Like the task loss, it is
            the same on every rank of an MP group; with mp_input="split" it is this rank's summand of the group's mean.
        load_E, dropped: (token, k) pairs per expert in the last forward on this rank, and the number dropped.
        recorder: if set, records the time of each part (`fusedmoe.runtime.recorder`).
        number: index among the model's MoE layers, from 0, in timelines and profiles; None: not set.

    Saves for backward, with a `TopK` gate, a `Sparse` or `Dropless` order and feed-forward experts, without parameters,
    in elements (P: rows computed here, P = N on one rank; T: tokens sent; H: `hidden`; g = 2 for a gated activation,
    otherwise 1):
    - in x's dtype: S·M for x, P·g·H/ESP for the pre-activation, and with EP·ESP > 1 or hooks R·M for received tokens;
    - in float32 (float64 for float64): S·K + P router weights, and E·(S + 1) for the balance loss, if any;
    - integers of at most 8 bytes: up to 2·S·K + 4·N + 2·S + 4·E, and with EP·ESP > 1 or hooks S·K + 2·N + 2·T + 4·P +
      R·K + 8·E more.
    Activations, outputs of the experts and padding are never saved. Other gates save as much, or document it; `Einsum`
    saves its matrices, twice S·E·C with C rows per expert; autocast adds x and expert parameters in lower precision.

    Raises:
        ConfigError: invalid arguments or input, at construction or, on one rank, in a call.
        RankError: on several ranks, on every rank and before anything is sent; names the rank at fault. Layers that
            differ between ranks (construction is collective); input of wrong shape, dtype or device; non-finite router
            logits.
    """

    __jit_ignored_attributes__ = RefusesScripting()

    def __new__(cls, *_: Any, **__: Any) -> Self:
        exclude_from_graphs(MoELayer, "_forward_guarded")
        exclude_from_graphs(MoELayer, "refuse")
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
        self.model_dim, self.mp_input, self.hooks = model_dim, mp_input, validate_hooks(hooks)
        require_parts(gate, experts, shared, order, topology, placement)
        require_float_dtype("MoELayer", dtype)
        self.topology = Topology() if topology is None else topology
        self.mp_tokens = MpTokens(self.topology.mp, mp_input)
        self.order = order or (Dropless() if gate.capacity_factor is None else Sparse())
        self.dispatch = str(dispatch)
        self.gate, self.experts, self.shared = gate, experts, shared
        agree_on_parts(self, repr(schedule), placement, dtype or torch.get_default_dtype())
        if isinstance(dispatch, Dispatcher):
            off = schedule is None or schedule == "off"
            option = None if placement == "ep" else f"placement={placement!r}"
            require_library_dispatch(dispatch, option if off else f"schedule={schedule!r}")
        gate.setup(model_dim, device=device, dtype=dtype)
        parts = LayerParts(self.topology, gate, self.order, experts)
        is_placed = placement == "fssdp" and self.topology.ep.size > 1
        self.placed = set_up_experts(parts, shared, model_dim, is_placed, device, dtype)
        self.recorder: Recorder | None = None
        self.number: int | None = None
        self.plans = make_plans(schedule, parts, is_placed, bool(self.hooks))
        if getattr(shared, "reads_parameters_once", False) and not self.mp_tokens.is_joint:
            self.plans.shared = shared  # graphs cannot set it
        self.parts = self.plans.kinds
        self.dispatcher = make_dispatcher(dispatch, self.plans, self.hooks, self.placed)
        self.checks = input_checks.InputChecks(
            self.topology, exchange_reports_logits=self.dispatcher.collectives is not None
        )
        axes = [group.axis for group in (self.topology.ep, self.topology.esp) if group.size > 1]
        copies = self.topology.edp.ranks
        self.check_wrapper = WrapperCheck(self.experts, self.topology.rank, copies, axes) if axes else None
        self.load = Load(gate.experts)
        self.aux_loss = torch.zeros((), device="cpu")
        self.register_load_state_dict_pre_hook(require_own_experts)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Apply the layer: [..., M] -> [..., M], any number of tokens. Under autocast, experts compute in its dtype.

        Args:
            mask: [...] booleans, true for tokens and false for padding. Results, loads, losses and metrics are the same
                as without the padding; the output at padding is 0. Hooks see all rows of x and y. A mask on the host
                avoids a synchronization with CUDA.
            cu_seqlens: [sequences + 1], int32 or int64, in FlashAttention's format. The gate's balance loss is then
                computed per packed sequence of this rank, without padding, and averaged over the non-empty ones.
                Requires `DeepSeekV3` without `sequence`, and mp_input="split" with several MP ranks.

        `torch.compile(fullgraph=True)` captures the layer, except with hooks, MP ranks, placements, a mask before
        `ExpertChoice`, `cu_seqlens` on several ranks, or a schedule with custom experts. In these cases, and without
        `fullgraph` if there is a mask or several ranks, the layer runs eagerly inside the compiled model. On one rank
        only a mask synchronizes, so a CUDA graph can capture the layer; on CUDA non-finite logits are then reported by
        a later call or by `check`.
        """
        if is_captured(self, mask, cu_seqlens):
            if self.check_wrapper is not None:
                self.check_wrapper()
            return self._forward(x, mask, cu_seqlens)
        return self._forward_guarded(x, mask, cu_seqlens)

    def _forward_guarded(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        # Inlined condition of the check, for speed: nearly always nothing has changed.
        check = self.check_wrapper
        if check is not None and check.checked_state != (len(module_states), id(next(self.experts.parameters(), None))):
            check()
        if torch.jit.is_tracing():
            raise jit_error()
        with self.topology.guard("MoELayer.forward"), record_with(layer_recorder(self.recorder, self.number)):
            self.checks.raise_deferred()
            return self._forward(x, mask, cu_seqlens)

    def refuse(self, refusal: str) -> None:
        """Raise `refusal` on all ranks: here, and in the `forward` of the other ranks. Collective over ep and esp."""
        with self.topology.guard("MoELayer.forward"), record_with(layer_recorder(self.recorder, self.number)):
            like = next(self.experts.parameters(), None)
            nothing_SM = input_checks.empty_tokens(None, self.model_dim, like)
            self._process_tokens(_Tokens(nothing_SM, refusal))

    def _forward(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        x = apply_start_hooks(self.hooks, x) if self.hooks and isinstance(x, Tensor) else x
        tokens = self._select_tokens(x, mask, cu_seqlens)
        y = self._restore_tokens(self._process_tokens(tokens), tokens, x)
        return apply_end_hooks(self.hooks, y) if self.hooks else y

    def _process_tokens(self, tokens: _Tokens) -> Tensor:
        """Steps 2 to 8: choose experts, dispatch tokens, compute, combine results, add the shared expert."""
        routing, refusal = self._choose_experts(tokens)
        x_SM = tokens.x_SM.to(self.experts.row_dtype(tokens.x_SM))
        ordered = self._sort_rows(x_SM, routing)
        shared = None if self.shared is None or self.mp_tokens.is_joint else self.shared_in_plan(self.shared, x_SM)
        y_SM, aux = self._exchange(ordered, routing, refusal, tokens.real_S is not None, shared)
        y_SM = self._sum_results(y_SM, ordered, x_SM, None if shared is None else shared.result)
        if self.topology.mp.size > 1:
            aux = self.mp_tokens.aux_loss_share(aux)
        self.aux_loss = self.load.storable_aux_loss(aux, self.gate, self.training)
        return y_SM

    def _select_tokens(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> _Tokens:
        """Step 1: flatten and check the input, select the unmasked tokens, and slice them over MP ranks."""
        x_SM, refusal = self.checks.flatten_tokens(x, self.model_dim, self.experts)
        packing = real_S = mp_counts = None
        if cu_seqlens is not None:
            packing, refusal = input_checks.read_packing(cu_seqlens, x, refusal, self.gate, self.mp_tokens.is_joint)
        if mask is not None:
            real_S, refusal = input_checks.find_tokens(mask, x, refusal, self.gate)
            x_SM = x_SM.index_select(0, real_S)
            packing = packing and packing.select(real_S)
        if self.mp_tokens.is_joint:  # the ranks of an MP group have the same tokens: each routes a slice
            x_SM, refusal = self.checks.agree_on_tokens(x_SM, refusal, self.mp_input)
            mp_counts = self.mp_tokens.counts(len(x_SM))
            x_SM = self.mp_tokens.shard(x_SM, mp_counts)
        return _Tokens(x_SM, refusal, packing, real_S, mp_counts)

    def _choose_experts(self, tokens: _Tokens) -> tuple[Routing | SoftRouting, str | None]:
        """Step 2: run the gate. Also returns an error message if this rank cannot take part in the exchange."""
        x_SM = tokens.x_SM
        with part_span("gate"):
            if tokens.packing is not None:
                routing = self.gate(x_SM, tokens.packing)
            else:
                routing = self.mp_tokens.call_module(self.gate, x_SM) if self.mp_tokens.is_joint else self.gate(x_SM)
            refusal = tokens.refusal or self.checks.find_routing_error(routing, self.gate, x_SM)
            if refusal is not None:
                routing = input_checks.empty_routing(x_SM)  # no tokens are sent, only the reason
        self.checks.refuse_without_exchange(refusal)
        if self.placed is not None and isinstance(routing, SoftRouting):
            raise input_checks.uniform_load_error(self.gate)
        return routing, refusal

    def _sort_rows(self, x_SM: Tensor, routing: Routing | SoftRouting) -> Ordered:
        """Step 3: sort the rows by expert, and count the load of each expert."""
        with part_span("permute"):
            ordered = self.order.order(x_SM, routing, self.gate.experts)
        # Counted after the order, which on CUDA reports invalid expert ids.
        self.load.count(routing, ordered.kept_E, self.gate, self.training, ordered.all_kept)
        return ordered

    def _exchange(
        self,
        ordered: Ordered,
        routing: Routing | SoftRouting,
        refusal: str | None,
        masked: bool,
        shared: SharedExpert | None,
    ) -> tuple[Tensor, Tensor]:
        """Steps 4 to 7: exchange metadata, dispatch, run the experts, combine. Return y_SM and the auxiliary loss."""
        nonfinite, aux = self.checks.nonfinite_logits(routing), routing.aux_loss
        routed = Routed(ordered.x_SM, ordered.layout, ordered.weight_SK, refusal or nonfinite, shared)
        count = None if nonfinite is None else nonfinite.number
        if (captured := self.run_captured(routed, count, aux, masked)) is not None:
            return captured
        y_SM = self.dispatcher.through_experts(routed, self.experts)
        self.load.count_sent(self.dispatcher.sent_counts)
        return y_SM, aux

    def _sum_results(self, y_SM: Tensor, ordered: Ordered, x_SM: Tensor, shared_SM: Tensor | None) -> Tensor:
        """Step 8: restore the order of this rank's tokens, and add the shared expert's results.

        `shared_SM`: the shared expert's results if a plan has computed them; None: compute them here.
        """
        with part_span("unpermute"):
            y_SM = self.order.restore(y_SM, ordered)
        check_results(type(self.experts).__name__, y_SM, x_SM)
        if self.shared is None:
            return y_SM
        if shared_SM is None:
            shared_SM = self.mp_tokens.call_module(self.shared, x_SM, single_expert_layout(x_SM), None)
        check_results(type(self.shared).__name__, shared_SM, x_SM)
        return y_SM + shared_SM

    def _restore_tokens(self, y_SM: Tensor, tokens: _Tokens, x: Tensor) -> Tensor:
        """Step 8: gather the tokens of all MP ranks, insert zeros at padding, and restore the shape of x."""
        if tokens.mp_counts is not None:
            y_SM = self.mp_tokens.gather(y_SM, tokens.mp_counts)
        if tokens.real_S is not None:
            y_SM = y_SM.new_zeros(x.shape[:-1].numel(), self.model_dim).index_copy(0, tokens.real_S, y_SM)
        return y_SM.view(x.shape)

    def measured_costs(self, tokens: int, *, again_s: float | None = None) -> CostModel:
        """Return the costs of this machine and layer for `tokens` tokens per rank. Collective over all ranks.

        Args:
            again_s: measure for about this many seconds, the same on every rank, instead of reading the cache
                (`fusedmoe.runtime.cache`). A schedule then plans forwards in the parameters' dtype with the new costs,
                but keeps its choice of one-sided kernels.
        Raises:
            ConfigError: the experts do not describe their workload.
        """
        from fusedmoe.layers.measure import measure_layer

        with self.topology.guard("MoELayer.measured_costs"):
            like = next(self.parameters()).new_empty(tokens, self.model_dim)
            costs = measure_layer(self.plans, like, budget_s=again_s)
            if again_s is not None:
                self.plans.set_costs(like, costs)
            return costs

    def set_wire(self, wire: str | None) -> None:
        """Replace the format of rows between ranks (`Schedule`) between steps. Collective.

        Raises `ConfigError` for an unknown format, a custom dispatcher or one-sided kernels; `RankError` for ranks with
        different formats.
        """
        require_library_dispatch(self.dispatch, f"wire={wire!r}")
        self.topology.require_equal_facts({"wire": wire}, "MoELayer")
        self.plans.set_wire(wire)
        self.dispatcher = make_dispatcher(self.dispatch, self.plans, self.hooks, self.placed)

    def update_gate(self) -> None:
        """Pass the load of all ranks since the last call to a gate that balances without a loss (DeepSeek-V3).

        Call it after each optimizer step. Collective.
        """
        self.load.update_gate(self.gate, self.topology.world)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}  # copies and pickles have no graph

    @property
    def expert_ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks over which the experts are split along ep and esp, for `fusedmoe.training`."""
        return {"ep": self.topology.ep.ranks, "esp": self.topology.esp.ranks}

    @property
    def load_E(self) -> Tensor:
        """[E] int64: (token, k) pairs per expert in the last forward on this rank, dropped ones included."""
        return self.load.chosen_E

    @property
    def dropped(self) -> int:
        """Number of (token, k) pairs dropped in the last forward. Synchronizes with the device on CUDA."""
        return self.load.num_dropped()

    def check(self) -> None:
        """Raise errors of earlier forwards that were not reported yet. Synchronizes with the device.

        Such errors are non-finite router logits and faults of one-sided kernels. Needed only on CUDA if nothing else
        synchronizes, as in CUDA graphs.
        """
        with self.topology.guard("MoELayer.check"):
            self.topology.check()
            self.checks.raise_deferred(wait=True)

    def extra_repr(self) -> str:
        return (
            f"model_dim={self.model_dim}, order={self.order}, dispatch={self.dispatch!r}, "
            f"schedule={str(self.plans)!r}, {self.topology}"
        )


def number_layers(layers: Iterable[MoELayer | ScheduledExchange]) -> None:
    """Number the layers of a model in this order, for timelines and profiles."""
    for number, layer in enumerate(layers):
        layer.number = number
