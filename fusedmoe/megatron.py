"""Megatron-core's models with this library's token dispatch and kernels, through layer specs:

    spec = fusedmoe.megatron.routed_experts(get_gpt_layer_local_spec(num_experts=8))

`token_dispatcher` replaces the dispatch and keeps Megatron's experts; `routed_experts` replaces both. Router, losses,
shared experts and checkpoint names stay Megatron's. `schedule="auto"` overlaps communication with computation;
`fusedmoe.training.tune_model` measures plans during training.

Shape suffixes: T tokens of this rank, D model dim, K top-k, E experts, e local experts, H expert hidden dim, N rows
sorted by expert, R received tokens, S tokens or received tokens.
"""

from __future__ import annotations

from fusedmoe.autograd.order import take_pairs
from fusedmoe.compat import require_version

require_version("megatron-core", "0.16", "0.20", "fusedmoe.megatron")

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from fusedmoe import Schedule, Topology, autograd
from fusedmoe.autograd.experts import WeightParts, experts_in_parts
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, JoinedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Handle, LocalExperts
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.environment import single_queue_warning
from fusedmoe.errors import ConfigError, warn
from fusedmoe.kernels import Layout
from fusedmoe.layers.external_shared import can_offer
from fusedmoe.layers.schedule import with_wire
from fusedmoe.layers.scheduled_exchange import ExternalExperts, ScheduledExchange, shared_topology

__all__ = ["routed_experts", "token_dispatcher"]

_TIMEOUT_S = 300.0
# CUDA graph scopes without the MoE layer, which cannot be captured because the host reads the row counts.
_CAPTURABLE_SCOPES = {"attn", "mlp", "mamba"}
#: Unsupported settings that exist since Megatron 0.19.
SINCE_0_19 = (
    "overlap_dispatch_backward_with_experts_wgrad",
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "moe_mlp_glu_interleave_size",
)
# Names in this library, without and with a gate.
_ACTIVATIONS = {
    nn.functional.silu: ("silu", "swiglu"),
    nn.functional.gelu: ("gelu", "geglu"),
    nn.functional.relu: ("relu", None),
}


class MegatronMoELayer(MoELayer):
    """Megatron's layer with this library's token dispatch.

    Args: as for Megatron's `MoELayer`, and
        timeout_s: maximum wait for other ranks, in seconds.
        schedule, wire: as for `fusedmoe.MoELayer` and `fusedmoe.Schedule`.
    Raises: as `StagedDispatcher`, and `ConfigError` for an unsupported setting.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        timeout_s: float = _TIMEOUT_S,
        schedule: str | Schedule = "off",
        wire: str | None = None,
        **options: Any,
    ) -> None:
        # Before Megatron constructs its own dispatcher, which would raise unrelated errors.
        _require_supported(config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        own = config
        if config.moe_shared_expert_overlap:
            # Plans call the shared expert as one module, which Megatron's option would split between its own stages.
            own = copy(config)
            own.moe_shared_expert_overlap = False
        super().__init__(own, submodules, layer_number, groups, **options)
        experts = _LayerExperts(self.experts, config)
        self.token_dispatcher = StagedDispatcher(own, groups, timeout_s, experts, with_wire(schedule, wire))
        self._shared_in_plan: tuple[Tensor, Tensor | None] | None = None  # input of the shared expert, and its result

    @property
    def fusedmoe_exchange(self) -> ScheduledExchange:
        exchange: ScheduledExchange = self.token_dispatcher.exchange
        return exchange

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Return the results of the shared expert; None: the plan computes it, and `postprocess` adds it."""
        self._shared_in_plan = None
        if not self._plans_shared_expert(hidden_states):
            result: Tensor | None = super().shared_experts_compute(hidden_states)
            return result
        self._shared_in_plan = hidden_states, None
        return None

    def _plans_shared_expert(self, x: Tensor) -> bool:
        shared, config = self.shared_experts, self.config
        if shared is None or not self.token_dispatcher.uses_plan or self.shared_experts_recompute:
            return False
        if torch.compiler.is_compiling():
            return False
        # With tensor parallelism, its products communicate. Fused gradients are not returned by autograd.
        alone = config.tensor_model_parallel_size == 1 and not config.gradient_accumulation_fusion
        return alone and not (config.fp8 or config.fp4) and can_offer(shared, x)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the summed results of each received token or, with a schedule, of each token of this rank."""
        if self._shared_in_plan is not None:
            x, _ = self._shared_in_plan
            output, result = self.token_dispatcher.run_schedule_with_shared(hidden_states, self.shared_experts, x)
            self._shared_in_plan = x, result
            return output, None
        if self.token_dispatcher.uses_plan:
            return self.token_dispatcher.run_schedule(hidden_states), None
        if isinstance(self.experts, StackedExperts):
            return self.token_dispatcher.through_experts(self.experts, hidden_states), None
        output, bias = super().routed_experts_compute(hidden_states, probs)
        return output, bias

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Restore the tokens' shape, and add the results of the shared expert."""
        if self._shared_in_plan is not None:
            (x, result), self._shared_in_plan = self._shared_in_plan, None
            shared_expert_output = self.shared_experts(x) if result is None else result.view(x.shape)
        summed: Tensor = super().postprocess(output, shared_expert_output)
        return summed


class _LayerExperts(ExternalExperts):
    """A layer's experts, this library's or Megatron's, with the interface of the scheduled exchange."""

    def __init__(self, experts: Any, config: Any) -> None:
        widths = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        super().__init__(experts, config.num_moe_experts, widths, bool(config.gated_linear_unit))

    @property
    def reads_parameters_once(self) -> bool:  # type: ignore[override]
        return isinstance(self.module, StackedExperts)

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        if isinstance(self.module, StackedExperts):
            return super().__call__(x_SM, layout, weight_N)
        return _run_on_sorted_rows(self.module, x_SM, layout, weight_N)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if isinstance(self.module, StackedExperts):
            return super().in_chunks(x_SM)
        return AutogradExperts(self, list(self.module.parameters()), self.module)


def _run_on_sorted_rows(experts: Callable[..., Any], x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
    layout = layout.exact()
    rows, bias = experts(autograd.permute(x_SM, layout), layout.counts_E.cpu(), weight_N)
    assert bias is None, "biases of Megatron's experts are added on the tokens' ranks, which do not have them"
    return autograd.unpermute(rows, layout)


class StagedDispatcher(MoETokenDispatcher):
    """Megatron's six dispatcher stages: each token is sent once to every rank that hosts one of its experts.

    Each such rank returns one sum per token. Tokens cross the expert-parallel ranks by all-to-all; the ranks that share
    an expert gather them and scatter the sums. Call the six stages in order, once per forward: each stores state for
    the next. With a `schedule` other than "off", the experts' stage runs dispatch, experts and combine by the schedule,
    and the two communication stages do nothing.

    Args:
        pg_collection: Megatron's process groups `ep`, `expt_tp` and `tp_ep`. Construction is collective over the last.
        timeout_s: maximum wait for other ranks, in seconds.
    Raises:
        ConfigError: groups that do not form a grid; with one rank, in a step: NaN or infinite tokens or weights (on
            CUDA in a later step).
        RankError: in a step or the constructor: a rank failed, did not join within `timeout_s`, or has such tokens or
            weights. Nothing is sent then.
    """

    def __init__(
        self, config: Any, pg_collection: Any, timeout_s: float, experts: ExternalExperts, schedule: str | Schedule
    ) -> None:
        super().__init__(config, pg_collection)
        topology = Topology()
        if self.ep_size * self.tp_size > 1:
            places = _expert_grid(pg_collection.tp_ep, pg_collection.ep, pg_collection.expt_tp)
            topology = shared_topology(pg_collection.tp_ep, places, timeout_s)
        self.exchange = ScheduledExchange(topology, experts, schedule, "fusedmoe.megatron")
        if self.uses_plan and (text := single_queue_warning()):
            _warn_once(f"fusedmoe.megatron: {text}")

    @property
    def uses_plan(self) -> bool:
        """True if a plan of the schedule processes the tokens."""
        return self._collectives is not None and self.exchange.can_plan

    @property
    def _collectives(self) -> Collectives | None:
        collectives: Collectives | None = self.exchange.dispatcher.collectives
        return collectives

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sort tokens [..., D] by routing map and weights [T, E]; return the tokens and the weight of each pair."""
        self._shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, self._shape[-1])
        if self.config.moe_pad_expert_input_to_capacity:
            # The map then contains padding up to the capacity: tokens with weight 0, which contribute nothing.
            routing_map = routing_map & (probs != 0)
        expert_TK, self._weight_TK = experts_from_map(routing_map, probs, self.config.moe_router_topk)
        self._layout = autograd.order(expert_TK, routing_map.shape[1])
        if self.uses_plan:
            return x_TD, probs
        self._nonfinite_flag = self.exchange.checks.nonfinite_flag(x_TD, probs)
        if self._collectives is None:
            # With one rank the experts gather rows themselves and need no padding.
            self._layout = self._layout.exact()
        return x_TD, take_pairs(self._weight_TK, self._layout)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the received tokens [R, D] and each sorted row's weight. Collective; no-op with a plan."""
        if self.uses_plan:
            return hidden_states, probs
        if self._collectives is None:
            self._handle = Handle(self._layout, probs)
            return hidden_states, probs
        x_RD, self._handle = self._collectives.dispatch_by_operators(
            hidden_states, probs, self._layout, self._nonfinite_flag
        )
        assert self._handle.weight_N is not None
        return x_RD, self._handle.weight_N

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows sorted by expert, the row count of each expert (on the host), and the rows' weights."""
        layout = self._handle.layout
        return autograd.permute(hidden_states, layout), layout.counts_E.cpu(), probs

    def through_experts(self, experts: LocalExperts, hidden_states: Tensor) -> Tensor:
        return experts(hidden_states, self._handle.layout, self._handle.weight_N)

    def run_schedule(self, hidden_states: Tensor) -> Tensor:
        return self.exchange.through_experts(hidden_states, self._layout, self._weight_TK)

    def run_schedule_with_shared(
        self, hidden_states: Tensor, shared: nn.Module, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As `run_schedule`; also return `shared(x)`, [S, D]. None: it was not computed."""
        return self.exchange.through_experts_with_shared(hidden_states, self._layout, self._weight_TK, shared, x)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return autograd.unpermute(hidden_states, self._handle.layout)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return [T, D], the sum of each token's results. Collective; no-op with a plan."""
        if self.uses_plan or self._collectives is None:
            return hidden_states
        return self._collectives.combine_by_operators(hidden_states, self._handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


class StackedExperts(SequentialMLP):
    """`SequentialMLP` with the same parameters and a fused forward, without copies of sorted rows.

    GEMMs run in the rows' dtype; weights multiply results in float32. Each pass copies the rank's expert weights once.
    Raises `ConfigError` for experts with biases, in 8 or 4 bits, with weights applied to their input, or with an
    unsupported activation.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None, **options: Any
    ) -> None:
        self._activation = _activation(config)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **options)
        self._gated = bool(config.gated_linear_unit)

    def forward(self, x_SD: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """Return [S, D]: the weighted sum of the results of each token's sorted rows."""
        if any(map(has_hooks, self.children())):
            # Call each expert's modules: their hooks must run.
            return _run_on_sorted_rows(super().forward, x_SD, layout, weight_N)
        how = WeightParts(self._join, _split)
        return experts_in_parts(x_SD, layout, weight_N, self._parts(), how, self._activation)

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        return JoinedExperts(self._parts(), WeightParts(self._join, _split), self._activation)

    def _parts(self) -> list[Tensor]:
        return [getattr(expert, name).weight for name in ("linear_fc1", "linear_fc2") for expert in self.local_experts]

    def _join(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Stack the experts' weights, all up then all down projections, to contiguous [e, (2,) H, D] and [e, D, H]."""
        up, down = (torch.stack(list(half)) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
        return up.unflatten(1, (2, -1)) if self._gated else up, down


@cache
def _warn_once(text: str) -> None:
    warn(text, stacklevel=2)


def _require_supported(config: Any) -> None:
    if names := ", ".join(name for name, is_set in REFUSED.items() if is_set(config)):
        raise ConfigError(
            f"fusedmoe.megatron: the layer sends a variable number of rows and does not support {names}; disable that "
            "setting, or do not use fusedmoe.megatron"
        )


def _is_set(config: Any, name: str) -> bool:
    return getattr(config, name, None) not in (None, False)


def _captures_layer(config: Any) -> bool:
    scopes = config.cuda_graph_modules if hasattr(config, "cuda_graph_modules") else config.cuda_graph_scope
    captured = {getattr(scope, "name", str(scope)) for scope in scopes or ()}
    return config.cuda_graph_impl != "none" and not (captured and captured <= _CAPTURABLE_SCOPES)


def experts_from_map(routing_map: Tensor, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Convert a routing map and weights [T, E] to expert indices (ascending, -1 for none) and weights [T, K]."""
    experts = routing_map.shape[1]
    index_E = torch.arange(experts, device=routing_map.device)
    # The map is True for chosen experts: the K smallest indices are those, in ascending order.
    expert_TK = torch.where(routing_map, index_E, experts).topk(min(k, experts), largest=False).values
    weight_TK = probs.gather(1, expert_TK.clamp(max=experts - 1))
    return expert_TK.masked_fill(expert_TK == experts, -1), weight_TK


def _expert_grid(tp_ep: Any, ep: Any, expt_tp: Any) -> Tensor:
    """Return [EP, ESP]: indices in the common group of the ranks that hold each expert's shards."""
    ranks, across, parts = (dist.get_process_group_ranks(group) for group in (tp_ep, ep, expt_tp))
    # Megatron's axis order determines whether the shards of an expert are on neighbouring ranks.
    for places in (
        torch.arange(len(ranks), device="cpu").view(len(across), len(parts)),
        torch.arange(len(ranks), device="cpu").view(len(parts), len(across)).t(),
    ):
        grid = torch.tensor(ranks, device="cpu")[places]
        row, column = (int(at) for at in (grid == dist.get_rank()).nonzero()[0])
        if grid[row].tolist() == parts and grid[:, column].tolist() == across:
            return places
    raise ConfigError(
        f"fusedmoe.megatron: the ranks {parts} that share an expert, and {across} that have other experts, are "
        f"not rows and columns of {ranks}; initialise Megatron's parallel state with an order in which tp and ep adjoin"
    )


def _split(w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    up = w1.flatten(1, 2) if w1.dim() == 4 else w1
    return *up.unbind(), *w2.unbind()


def _supported_activation(config: Any) -> str | None:
    return _ACTIVATIONS.get(config.activation_func, (None, None))[bool(config.gated_linear_unit)]


def _activation(config: Any) -> str:
    act, known = config.activation_func, _supported_activation(config)
    name = getattr(act, "__name__", repr(act)) + (" with a gate" if config.gated_linear_unit else "")
    refused = [option for option, is_set in REFUSED_EXPERTS.items() if is_set(config)]
    if known is None or refused:
        names = ", ".join(f"activation_func={name}" if option == "activation_func" else option for option in refused)
        raise ConfigError(
            f"fusedmoe.megatron.routed_experts supports silu, gelu (each with or without a gate) or relu, but not "
            f"{names}; use fusedmoe.megatron.token_dispatcher, which keeps Megatron's experts"
        )
    return known


#: Megatron settings that both functions reject, with the condition. The guide's table has the same names.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "moe_token_dispatcher_type='flex'": lambda config: config.moe_token_dispatcher_type == "flex",
    "moe_router_padding_for_quantization": lambda config: config.moe_router_padding_for_quantization,
    "overlap_moe_expert_parallel_comm": lambda config: config.overlap_moe_expert_parallel_comm,
    "cuda_graph_scope": _captures_layer,
    "transformer_impl='inference_optimized'": lambda config: config.transformer_impl == "inference_optimized",
    **{name: partial(_is_set, name=name) for name in SINCE_0_19[:3]},
}
#: Settings that only `routed_experts` rejects.
REFUSED_EXPERTS: dict[str, Callable[[Any], bool]] = {
    "add_bias_linear": lambda config: config.add_bias_linear,
    "fp8": lambda config: bool(config.fp8),
    "fp4": lambda config: bool(config.fp4),
    "moe_apply_probs_on_input": lambda config: config.moe_apply_probs_on_input,
    "activation_func_clamp_value": lambda config: config.activation_func_clamp_value is not None,
    "glu_linear_offset": lambda config: config.glu_linear_offset != 0,
    "activation_func": lambda config: _supported_activation(config) is None,
    "moe_mlp_glu_interleave_size": partial(_is_set, name="moe_mlp_glu_interleave_size"),
}


def token_dispatcher(
    spec: Any, *, timeout_s: float = _TIMEOUT_S, schedule: str | Schedule = "off", wire: str | None = None
) -> Any:
    """Return a spec whose MoE layers dispatch tokens with this library and keep Megatron's experts.

    Args:
        spec: of a transformer layer, a block of layers (dense layers are unchanged), or an MoE layer.
        timeout_s: maximum wait for other ranks, in seconds.
        schedule: as for `fusedmoe.MoELayer`, under expert parallelism. Megatron's own experts run with autograd per
            chunk, with equal numbers of chunks in both passes.
        wire: format of rows between ranks, as for `fusedmoe.Schedule`; None: that of the schedule.
    Returns:
        A new spec of the same kind.
    Raises:
        ConfigError: the spec has no Megatron MoE layer; an unknown schedule or `wire`.
    """
    return _replace_layers(spec, None, timeout_s, schedule, wire)


def routed_experts(
    spec: Any, *, timeout_s: float = _TIMEOUT_S, schedule: str | Schedule = "off", wire: str | None = None
) -> Any:
    """Return a spec whose MoE layers dispatch tokens and compute experts with this library.

    Parameters are named as in Megatron's `SequentialMLP`, `local_experts.0.…`, for any experts in the spec. In
    distributed checkpoints they have the names common to all Megatron experts.

    Args, Returns, Raises: as for `token_dispatcher`.
    """
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return _replace_layers(spec, linears, timeout_s, schedule, wire)


def _replace_layers(
    spec: Any, linears: MLPSubmodules | None, timeout_s: float, schedule: str | Schedule, wire: str | None
) -> Any:
    if isinstance(schedule, str):
        Schedule.named(schedule)  # checked before the model is built
    with_wire(schedule, wire)
    other_modules: list[str] = []

    def of_experts(mlp: Any) -> Any:
        # `mlp` is a spec, a constructor with arguments (since Megatron 0.19), or the class itself.
        curried = isinstance(mlp, partial)
        module = mlp.func if curried else getattr(mlp, "module", mlp)
        if module is not MoELayer:
            module = getattr(module, "__self__", module)  # the class of `as_mlp_submodule`
            other_modules.append(getattr(module, "__name__", repr(module)))
            return mlp
        inside = mlp.keywords["submodules"] if curried else mlp.submodules
        if linears is not None:
            own = partial(StackedExperts, submodules=linears)
            inside = replace(inside, experts=own if curried else ModuleSpec(StackedExperts, submodules=linears))
        params = {"timeout_s": timeout_s, "schedule": schedule, "wire": wire}
        if curried:
            return partial(MegatronMoELayer, **{**mlp.keywords, "submodules": inside, **params})
        return replace(mlp, module=MegatronMoELayer, submodules=inside, params={**mlp.params, **params})

    def of_layer(layer: Any) -> Any:
        inside: Any = getattr(layer, "submodules", None)
        if not hasattr(inside, "mlp"):
            return of_experts(layer)
        return replace(layer, submodules=replace(inside, mlp=of_experts(inside.mlp)))

    layers = getattr(spec, "layer_specs", None)
    made = of_layer(spec) if layers is None else replace(spec, layer_specs=[of_layer(layer) for layer in layers])
    if len(other_modules) == (1 if layers is None else len(layers)):
        raise ConfigError(
            f"fusedmoe.megatron: the spec has no Megatron MoELayer, but {', '.join(set(other_modules))}; pass "
            "num_experts when making the spec, and apply fusedmoe.megatron before other changes to it"
        )
    return made
