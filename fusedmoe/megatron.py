"""Megatron-core's models with this library's exchange of tokens and kernels, by their layer specs:

    spec = fusedmoe.megatron.routed_experts(get_gpt_layer_local_spec(num_experts=8))

`token_dispatcher` sends tokens by this library, and leaves the experts to Megatron; `routed_experts` is both, with the
experts by this library's kernels. Router, losses, shared experts and the names in checkpoints stay Megatron's. With
`schedule="auto"` either has what travels overlap what is computed; `fusedmoe.training.tune_model` measures plans while
a loop trains.

Shape suffixes: T tokens of this rank, D model, K choices, E experts, e experts of this rank, H an expert's hidden
width, N rows sorted by expert, R tokens received, S either tokens or received tokens.
"""

from __future__ import annotations

from fusedmoe.compat.megatron import VERSIONS
from fusedmoe.versions import refused

if (error := refused("megatron-core", *VERSIONS, "fusedmoe.megatron")) is not None:
    raise error

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, PartExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Handle, LocalExperts
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import Layout
from fusedmoe.layers.scheduled_exchange import ExternalExperts, ScheduledExchange, shared_topology

__all__ = ["MegatronMoELayer", "StackedExperts", "StagedDispatcher", "routed_experts", "token_dispatcher"]

_TIMEOUT_S = 300.0
# Scopes of CUDA graphs that may be captured: the layer asks on the host how many rows come, so it cannot be.
_CAPTURED = {"attn", "mlp", "mamba"}
#: Refused settings that Megatron has from 0.19 on.
SINCE_0_19 = (
    "overlap_dispatch_backward_with_experts_wgrad",
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "moe_mlp_glu_interleave_size",
)
# Our names of Megatron's activation functions, without and with a gate.
_ACTIVATIONS = {
    nn.functional.silu: ("silu", "swiglu"),
    nn.functional.gelu: ("gelu", "geglu"),
    nn.functional.relu: ("relu", None),
}


class MegatronMoELayer(MoELayer):
    """Megatron's layer, whose tokens travel by this library.

    Args: as for Megatron's `MoELayer`, and
        timeout_s: seconds that a rank waits for others.
        schedule: as of `fusedmoe.MoELayer`.
    Attributes:
        fusedmoe_exchange: takes tokens to their experts by the schedule, and their results back.
    Raises:
        ConfigError: a setting of which this layer could keep only a part, named.
        RankError: from a step, or where it is made: a rank fails, or does not come within `timeout_s`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        timeout_s: float = _TIMEOUT_S,
        schedule: str | Schedule = "off",
        **options: Any,
    ) -> None:
        # Before Megatron makes its own dispatcher, whose refusals would speak of other things.
        _check(config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **options)
        # In place of the dispatcher that Megatron's constructor has just made.
        experts = _OwnExperts(self.experts, config)
        self.token_dispatcher = StagedDispatcher(config, groups, timeout_s, experts, schedule)

    @property
    def fusedmoe_exchange(self) -> ScheduledExchange:
        exchange: ScheduledExchange = self.token_dispatcher.exchange
        return exchange

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of each received token's results; by a schedule that of each token's."""
        if self.token_dispatcher.in_chunks:
            return self.token_dispatcher.by_schedule(hidden_states), None
        if isinstance(self.experts, StackedExperts):
            return self.token_dispatcher.through_experts(self.experts, hidden_states), None
        output, bias = super().routed_experts_compute(hidden_states, probs)
        return output, bias


class _OwnExperts(ExternalExperts):
    """The experts of a layer, ours or Megatron's."""

    def __init__(self, experts: Any, config: Any) -> None:
        widths = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        super().__init__(experts, config.num_moe_experts, widths, bool(config.gated_linear_unit))

    @property
    def reads_once(self) -> bool:  # type: ignore[override]
        return isinstance(self.module, StackedExperts)

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        if isinstance(self.module, StackedExperts):
            return super().__call__(x_SM, layout, weight_N)
        return _by_rows(self.module, x_SM, layout, weight_N)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if isinstance(self.module, StackedExperts):
            return super().in_chunks(x_SM)
        return AutogradExperts(self, list(self.module.parameters()), self.module)


def _by_rows(experts: Callable[..., Any], x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
    """Calls Megatron's experts, which take sorted rows; returns the sum of each token's results."""
    layout = layout.exact()
    rows, bias = experts(autograd.permute(x_SM, layout), layout.counts_E.cpu(), weight_N)
    assert bias is None, "biases of Megatron's experts are added on the tokens' ranks, where nothing knows them"
    return autograd.unpermute(rows, layout)


class StagedDispatcher(MoETokenDispatcher):
    """Megatron's six stages: a token goes once to each rank with experts for it, and the sum of its results back.

    Tokens cross the expert-parallel ranks by all-to-alls. Where each expert is split, the ranks of its shards gather
    them and scatter the sums. Waits are bounded, and an error names the rank at fault, the operation and the cure. As
    with Megatron's own dispatchers, a stage leaves what the next one needs in the object: the six run one after the
    other, once for each forward.

    Args:
        pg_collection: Megatron's process groups `ep`, `expt_tp` and `tp_ep`. Making the dispatcher is collective over
            the last.
        timeout_s: seconds that a rank waits for others.
        experts: of this rank.
        schedule: with another one than "off" tokens, experts and results go by it in the stage of the experts, and the
            two stages that would send do nothing.
    Attributes:
        exchange: makes the way by the schedule.
    Raises:
        ConfigError: groups that are no grid of ranks; with one rank, from a step, tokens or weights that are NaN or
            infinite (on CUDA from a later one).
        RankError: from a step, or where it is made: a rank fails, does not come within `timeout_s`, or has such tokens
            or weights; nothing is sent then.
    """

    def __init__(
        self, config: Any, pg_collection: Any, timeout_s: float, experts: ExternalExperts, schedule: str | Schedule
    ) -> None:
        super().__init__(config, pg_collection)
        topology = Topology()
        if self.ep_size * self.tp_size > 1:
            places = _places(pg_collection.tp_ep, pg_collection.ep, pg_collection.expt_tp)
            topology = shared_topology(pg_collection.tp_ep, places, timeout_s)
        self.exchange = ScheduledExchange(topology, experts, schedule, "fusedmoe.megatron")

    @property
    def in_chunks(self) -> bool:
        """Tells whether tokens go by a plan."""
        return self._collectives is not None and not self.exchange.plans_nothing

    @property
    def _collectives(self) -> Collectives | None:
        collectives: Collectives | None = self.exchange.dispatcher.collectives
        return collectives

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts […, D] tokens by [T, E] routing map and weights; returns the tokens, and the weight of each pair."""
        self._shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, self._shape[-1])
        if self.config.moe_pad_expert_input_to_capacity:
            # The map then has padding in it, tokens with a weight of 0, up to the capacity: they contribute nothing.
            routing_map = routing_map & (probs != 0)
        number_TK, self._weight_TK = chosen(routing_map, probs, self.config.moe_router_topk)
        self._layout = autograd.order(number_TK, routing_map.shape[1])
        if self.in_chunks:
            return x_TD, probs
        self._bad = self.exchange.checks.of_given(x_TD, probs)
        if self._collectives is None:
            # On one rank nothing travels: the experts gather rows themselves, and want no padding.
            self._layout = self._layout.exact()
        return x_TD, autograd.take_pairs(self._weight_TK, self._layout)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [R, D] the tokens of this rank's experts, and the weight of each of their sorted rows. Collective."""
        if self.in_chunks:
            return hidden_states, probs
        if self._collectives is None:
            self._handle = Handle(self._layout, probs)
            return hidden_states, probs
        x_RD, self._handle = self._collectives.dispatch_by_operators(hidden_states, probs, self._layout, self._bad)
        assert self._handle.weight_N is not None
        return x_RD, self._handle.weight_N

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows sorted by expert, how many each has (on the host), and their weights."""
        layout = self._handle.layout
        return autograd.permute(hidden_states, layout), layout.counts_E.cpu(), probs

    def through_experts(self, experts: LocalExperts, hidden_states: Tensor) -> Tensor:
        """Runs experts that gather rows, apply weights and sum results themselves, between dispatch and combine."""
        return experts(hidden_states, self._handle.layout, self._handle.weight_N)

    def by_schedule(self, hidden_states: Tensor) -> Tensor:
        """Returns [T, D] the sum of each token's results: dispatch, experts and combine, by the schedule."""
        return self.exchange.through_experts(hidden_states, self._layout, self._weight_TK)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the sum of each received token's results."""
        return autograd.unpermute(hidden_states, self._handle.layout)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns [T, D] the sum of each token's results. Collective."""
        if self.in_chunks or self._collectives is None:
            return hidden_states
        return self._collectives.combine_by_operators(hidden_states, self._handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the results in the shape of the tokens."""
        return hidden_states.view(self._shape)


class StackedExperts(SequentialMLP):
    """The parameters of `SequentialMLP` with another forward: no copies of rows sorted by expert.

    Products run in the dtype of the rows. Weights multiply the results in float32. Each pass copies the rank's weights.

    Args: as for `SequentialMLP`.
    Raises:
        ConfigError: experts with biases, in 8 or 4 bits, with weights on their input, or with an activation that the
            kernels do not have, named.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None, **options: Any
    ) -> None:
        self._activation = _activation(config)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **options)
        self._gated = bool(config.gated_linear_unit)

    def forward(self, x_SD: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """Returns [S, D]: for each token given the sum of its sorted rows' results, times their weights."""
        if any(map(has_hooks, self.children())):
            # The modules of each expert must be called, as Megatron does.
            return _by_rows(super().forward, x_SD, layout, weight_N)
        how = autograd.WeightParts(self._join, _split)
        return autograd.experts_in_parts(x_SD, layout, weight_N, self._parts(), how, self._activation)

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        """Returns the same experts for a schedule."""
        return PartExperts(self._parts(), autograd.WeightParts(self._join, _split), self._activation)

    def _parts(self) -> list[Tensor]:
        # First products of all experts, then second ones, as `_join` splits them.
        return [getattr(expert, name).weight for name in ("linear_fc1", "linear_fc2") for expert in self.local_experts]

    def _join(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Makes [e, (2,) H, D] and [e, D, H]."""
        # One copy for the pass, freed at its end: the kernels read the experts as one tensor.
        up, down = (torch.stack(list(half)) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
        return up.unflatten(1, (2, -1)) if self._gated else up, down


def _check(config: Any) -> None:
    if names := ", ".join(name for name, is_set in REFUSED.items() if is_set(config)):
        raise ConfigError(
            f"fusedmoe.megatron: the layer sends rows itself, as many as there are, and cannot do {names}; leave that "
            "out, or fusedmoe.megatron"
        )


def _is_set(config: Any, name: str) -> bool:
    return getattr(config, name, None) not in (None, False)


def _captures_layer(config: Any) -> bool:
    # Megatron 0.19 has renamed the scope.
    scopes = config.cuda_graph_modules if hasattr(config, "cuda_graph_modules") else config.cuda_graph_scope
    captured = {getattr(scope, "name", str(scope)) for scope in scopes or ()}
    return config.cuda_graph_impl != "none" and not (captured and captured <= _CAPTURED)


def chosen(routing_map: Tensor, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Makes [T, K] numbers of experts (ascending, -1 for none) and weights of [T, E] booleans and weights."""
    experts = routing_map.shape[1]
    index_E = torch.arange(experts, device=routing_map.device)
    # The map has true for a chosen expert; the K smallest numbers are the chosen ones, in ascending order.
    number_TK = torch.where(routing_map, index_E, experts).topk(min(k, experts), largest=False).values
    weight_TK = probs.gather(1, number_TK.clamp(max=experts - 1))
    return number_TK.masked_fill(number_TK == experts, -1), weight_TK


def _places(tp_ep: Any, ep: Any, expt_tp: Any) -> Tensor:
    """Returns [EP, ESP]: places in their common group of the ranks that hold the shards of an expert."""
    ranks, across, parts = (dist.get_process_group_ranks(group) for group in (tp_ep, ep, expt_tp))
    # The order of Megatron's axes says whether the shards of an expert are on neighbouring ranks.
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
        f"no rows and columns of {ranks}; initialise Megatron's parallel state with an order in which tp and ep adjoin"
    )


def _split(w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    """Returns the matrices of each expert, of both products."""
    up = w1.flatten(1, 2) if w1.dim() == 4 else w1
    return *up.unbind(), *w2.unbind()


def _known_activation(config: Any) -> str | None:
    return _ACTIVATIONS.get(config.activation_func, (None, None))[bool(config.gated_linear_unit)]


def _activation(config: Any) -> str:
    act, known = config.activation_func, _known_activation(config)
    name = getattr(act, "__name__", repr(act)) + (" with a gate" if config.gated_linear_unit else "")
    refused = [option for option, is_set in REFUSED_EXPERTS.items() if is_set(config)]
    if known is None or refused:
        names = ", ".join(f"activation_func={name}" if option == "activation_func" else option for option in refused)
        raise ConfigError(
            f"fusedmoe.megatron.routed_experts computes experts with silu, gelu (each with a gate or without) or relu, "
            f"and none with {names}; take fusedmoe.megatron.token_dispatcher, which leaves the experts to Megatron"
        )
    return known


#: Settings of Megatron that both functions refuse, and when. The guide's table has the same names.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "moe_token_dispatcher_type='flex'": lambda config: config.moe_token_dispatcher_type == "flex",
    "moe_router_padding_for_quantization": lambda config: config.moe_router_padding_for_quantization,
    "moe_shared_expert_overlap": lambda config: config.moe_shared_expert_overlap,
    "overlap_moe_expert_parallel_comm": lambda config: config.overlap_moe_expert_parallel_comm,
    "cuda_graph_scope": _captures_layer,
    "transformer_impl='inference_optimized'": lambda config: config.transformer_impl == "inference_optimized",
    **{name: partial(_is_set, name=name) for name in SINCE_0_19[:3]},
}
#: Those that only `routed_experts` refuses.
REFUSED_EXPERTS: dict[str, Callable[[Any], bool]] = {
    "add_bias_linear": lambda config: config.add_bias_linear,
    "fp8": lambda config: bool(config.fp8),
    "fp4": lambda config: bool(config.fp4),
    "moe_apply_probs_on_input": lambda config: config.moe_apply_probs_on_input,
    "activation_func_clamp_value": lambda config: config.activation_func_clamp_value is not None,
    "glu_linear_offset": lambda config: config.glu_linear_offset != 0,
    "activation_func": lambda config: _known_activation(config) is None,
    "moe_mlp_glu_interleave_size": partial(_is_set, name="moe_mlp_glu_interleave_size"),
}


def token_dispatcher(spec: Any, *, timeout_s: float = _TIMEOUT_S, schedule: str | Schedule = "off") -> Any:
    """Returns a spec whose layers of experts send tokens by this library. The experts stay Megatron's.

    Args:
        spec: of a transformer layer, of a block of them (dense layers stay as they are), or of a layer of experts.
        timeout_s: seconds that a rank waits for others.
        schedule: what travels overlaps what is computed by it where experts are over ranks, as of
            `fusedmoe.MoELayer`: "off", "auto", the name of a policy, or a `fusedmoe.Schedule`. With "auto" and names
            the first step measures the machine, and keeps that on disk. Megatron's own experts run by autograd in each
            chunk, with equal numbers of chunks in both passes.
    Returns:
        Another spec of the same kind; the given spec does not change.
    Raises:
        ConfigError: a spec without a layer of experts of Megatron's; the modules in its place are named; an unknown
            schedule.
    """
    return _replaced(spec, None, timeout_s, schedule)


def routed_experts(spec: Any, *, timeout_s: float = _TIMEOUT_S, schedule: str | Schedule = "off") -> Any:
    """Returns a spec whose layers of experts send tokens, and compute experts, by this library.

    Their parameters are those of Megatron's `SequentialMLP`, whichever experts the spec has: `local_experts.0.…`. In
    distributed checkpoints they have the names that all of Megatron's experts have there.

    Args, Returns, Raises: as for `token_dispatcher`.
    """
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return _replaced(spec, linears, timeout_s, schedule)


def _replaced(spec: Any, linears: MLPSubmodules | None, timeout_s: float, schedule: str | Schedule) -> Any:
    if isinstance(schedule, str):
        Schedule.named(schedule)  # refused here rather than when the model is built
    # Names of modules that are no layer of experts: an error names them.
    unlike: list[str] = []

    def of_experts(mlp: Any) -> Any:
        # A spec, a constructor with arguments (from Megatron 0.19 on), or the class itself where there is no choice.
        curried = isinstance(mlp, partial)
        module = mlp.func if curried else getattr(mlp, "module", mlp)
        if module is not MoELayer:
            module = getattr(module, "__self__", module)  # the class of `as_mlp_submodule`
            unlike.append(getattr(module, "__name__", repr(module)))
            return mlp
        inside = mlp.keywords["submodules"] if curried else mlp.submodules
        if linears is not None:
            own = partial(StackedExperts, submodules=linears)
            inside = replace(inside, experts=own if curried else ModuleSpec(StackedExperts, submodules=linears))
        params = {"timeout_s": timeout_s, "schedule": schedule}
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
    if len(unlike) == (1 if layers is None else len(layers)):
        raise ConfigError(
            f"fusedmoe.megatron: the spec has no layer of experts of Megatron's MoELayer, but "
            f"{', '.join(set(unlike))}; give num_experts where it is made, and put this library in before others"
        )
    return made
