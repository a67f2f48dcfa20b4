"""Torchtitan's models with this library's token dispatch and kernels, as override names:

    torchtitan … --override.imports fusedmoe.titan.routed_experts,fusedmoe.titan.selective_ac

Use one of `token_dispatcher`, which replaces the dispatch and keeps torchtitan's experts, and `routed_experts`, which
replaces both. `routed_experts={"schedule": "auto"}` overlaps communication with computation;
`fusedmoe.training.tune_model` measures plans during training. With `selective_ac`, selective activation checkpointing
runs each exchange once. Parameters, their names and shardings stay torchtitan's.

Shape suffixes are torchtitan's: T tokens, D model dim, K top-k, E experts, e local experts, F expert hidden dim, G both
halves of gpt-oss's up projection (interleaved columns), N rows sorted by expert, R received tokens, S tokens or
received tokens.
"""

from __future__ import annotations

from fusedmoe.autograd.order import take_pairs
from fusedmoe.compat import require_version

require_version("torchtitan", "0.3", "0.4", "fusedmoe.titan")

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from fusedmoe import PipelinedBlocks, Schedule, Topology, autograd
from fusedmoe.autograd.experts import WeightParts, experts_in_parts
from fusedmoe.autograd.grouped import clamped_swiglu, grouped_linear
from fusedmoe.blocks.external_blocks import ExpertsInput, ExternalBlock, pipeline_external
from fusedmoe.comm import make_all_to_all
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, JoinedExperts
from fusedmoe.engine.chunk_experts import GroupedExperts as GroupedChunks
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Handle
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import Layout, Weights
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.schedule import with_wire
from fusedmoe.layers.scheduled_exchange import ExternalExperts, ScheduledExchange, shared_topology
from fusedmoe.training import KEPT_OPERATORS

__all__ = ["pipeline", "routed_experts", "selective_ac", "token_dispatcher"]

_TIMEOUT_S, _NAME = 300.0, "fusedmoe.titan"


class DispatchMetadata(NamedTuple):
    """Layout and scores of the received tokens' rows, and the dispatch handle (None without expert parallelism)."""

    layout: Layout
    scores_N: Tensor
    handle: Handle | None


class TokenDispatcher(BaseEPTokenDispatcher):
    """Sends each token once to every rank that hosts its experts, and returns one sum per rank.

    Scores are sent with the tokens and applied on the experts' ranks. Waits are bounded. NaN or infinite tokens or
    scores raise on all ranks before rows are sent.

    Raises:
        RankError: in a step, or in `init_buffer`: a rank failed, did not join within `timeout_s`, or has such inputs.
        ConfigError: without expert parallelism: such inputs (on CUDA in a later call).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        timeout_s: float = _TIMEOUT_S
        """Maximum wait for other ranks in seconds (see `fusedmoe.Topology`)."""
        schedule: Any = "off"
        """Schedule of dispatch, experts and combine, as in `fusedmoe.MoELayer`."""
        wire: str | None = None
        """Format of rows between ranks, as in `fusedmoe.Schedule`; None: that of the schedule."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._timeout_s, self._wire = config.timeout_s, find_wire_format(config.wire)
        self._schedule = with_wire(config.schedule, config.wire)
        self._collectives: Collectives | None = None
        self._checks = InputChecks(Topology(), _NAME)
        self._experts: ExternalExperts | None = None
        self.exchange: ScheduledExchange | None = None

    def set_experts(self, experts: ExternalExperts) -> None:
        self._experts = experts
        self.exchange = ScheduledExchange(Topology(), experts, self._schedule, _NAME)

    def init_buffer(self) -> None:
        """Create the topology. Collective over the expert-parallel mesh."""
        if self.ep_mesh is None:
            return
        topology = shared_topology(self.ep_mesh.get_group(), timeout_s=self._timeout_s)
        self._checks = InputChecks(topology, _NAME)
        if self._experts is None:
            self._collectives = Collectives(topology, make_all_to_all("direct", topology, self._wire), name=_NAME)
        else:
            self.exchange = ScheduledExchange(topology, self._experts, self._schedule, _NAME)
            self._collectives = self.exchange.dispatcher.collectives

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Return rows [N, D] sorted by expert, the row count of each local expert [e], and the metadata. Collective."""
        if spmd.is_type_checking():
            raise ConfigError(
                "fusedmoe.titan.token_dispatcher: torchtitan's type checks do not support rows sent by this library; "
                "use fusedmoe.titan.routed_experts, or leave --debug.spmd_typechecking out"
            )
        nonfinite_flag = self._checks.nonfinite_flag(x_TD, topk_scores_TK)
        layout = autograd.order(topk_expert_ids_TK, self.num_experts)
        scores_N = take_pairs(topk_scores_TK, layout)
        if self._collectives is None:
            return autograd.permute(x_TD, layout), layout.counts_E, DispatchMetadata(layout, scores_N, None)
        x_RD, handle = self._collectives.dispatch_by_operators(x_TD, scores_N, layout, nonfinite_flag)
        assert handle.weight_N is not None
        # Torchtitan's experts need one row per (token, expert), sorted by expert.
        rows_ND = autograd.permute(x_RD, handle.layout)
        return rows_ND, handle.layout.counts_E, DispatchMetadata(handle.layout, handle.weight_N, handle)

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        """Return [T, D], the score-weighted sum of each token's results, in the dtype of `x_TD`. Collective."""
        layout, scores_N, handle = metadata
        # Weighted on the experts' rank: one sum per token is returned.
        rows_ND = (routed_output_RD * scores_N[:, None]).to(routed_output_RD.dtype)
        y_RD = autograd.unpermute(rows_ND, layout)
        if handle is not None:
            assert self._collectives is not None
            y_RD = self._collectives.combine_by_operators(y_RD, handle)
        return y_RD.to(x_TD.dtype)

    def through_experts(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Tensor:
        """Dispatch tokens, run the experts and combine, as scheduled. Return [T, D]."""
        assert self.exchange is not None
        layout = autograd.order(topk_expert_ids_TK, self.num_experts)
        return self.exchange.through_experts(x_TD, layout, topk_scores_TK)


class FusedExperts(GroupedExperts):
    """Torchtitan's SwiGLU experts with the same parameters and a fused forward, without copies of sorted rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: Layout, score_N: Tensor) -> Tensor:
        return experts_in_parts(x_SD, layout, score_N, self._parts(), _WEIGHT_PARTS, "swiglu")

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        if not torch.compiler.is_compiling():
            return JoinedExperts(self._parts(), _WEIGHT_PARTS, "swiglu")
        # A graph concatenates its parts, and splits their gradients.
        w13, w2_EDF = _join_weights([part.to(x_SD.dtype) for part in self._parts()])
        return GroupedChunks(Weights(w13, w2_EDF), "swiglu")

    def widths(self) -> tuple[int, int]:
        return self.w2_EDF.shape[1], self.w2_EDF.shape[2]

    def _parts(self) -> list[Tensor]:
        return [_local(parameter) for parameter in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]


class FusedGptOssExperts(GptOssGroupedExperts):
    """Gpt-oss's experts with the same parameters and another forward.

    GEMMs and activation run in the rows' dtype; torchtitan's own experts always compute in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: Layout, score_N: Tensor) -> Tensor:
        return self._compute(self._local_parameters(), x_SD, layout, score_N)

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        parameters = self._local_parameters()
        return AutogradExperts(partial(self._compute, parameters), parameters, self)

    def widths(self) -> tuple[int, int]:
        return self.mlp2_weight_EDF.shape[1], self.mlp2_weight_EDF.shape[2]

    def _local_parameters(self) -> list[Tensor]:
        names = (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        return [_local(parameter) for parameter in names]

    def _compute(self, parameters: Sequence[Tensor], x_SD: Tensor, layout: Layout, score_N: Tensor | None) -> Tensor:
        shards = _tensor_parallel_ranks(self)
        up_EGD, up_bias_EG, down_EDF, down_bias_ED = (parameter.to(x_SD.dtype) for parameter in parameters)
        h_NG = grouped_linear(autograd.permute(x_SD, layout), layout, up_EGD, up_bias_EG)
        a_NF = clamped_swiglu(h_NG, limit=self.swiglu_limit)
        if shards > 1:
            # Each rank adds 1/shards of the bias, with the gradient of the whole bias.
            down_bias_ED = down_bias_ED + (down_bias_ED / shards - down_bias_ED).detach()
        rows_ND = grouped_linear(a_NF, layout, down_EDF, down_bias_ED)
        assert score_N is not None
        return autograd.unpermute((rows_ND * score_N[:, None]).to(x_SD.dtype), layout)


class _InnerExperts(ExternalExperts):
    @property
    def reads_parameters_once(self) -> bool:  # type: ignore[override]
        return isinstance(self.module, FusedExperts)

    def graph_module(self) -> torch.nn.Module | None:
        # An operator cannot see the sharding of gpt-oss's parameters, by which its experts divide their biases.
        shared = isinstance(self.module, FusedGptOssExperts) and _tensor_parallel_ranks(self.module) > 1
        return None if shared else self.module


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine as one module.

    GEMMs run, and tokens are sent, in the tokens' dtype (FSDP's mixed precision), or in autocast's. Scores are float32.
    With tensor parallelism inside experts, a rank has a slice of F and returns a partial sum, as in torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        inner_experts: FusedExperts.Config | FusedGptOssExperts.Config
        token_dispatcher: TokenDispatcher.Config

        def __setattr__(self, name: str, value: Any) -> None:
            if hasattr(self, name):  # after construction
                _check_replacement(name, getattr(self, name), value)
            object.__setattr__(self, name, value)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = self.inner_experts
        self.token_dispatcher.set_experts(
            _InnerExperts(inner, self.token_dispatcher.num_experts, inner.widths(), gated=True)
        )

    @property
    def fusedmoe_exchange(self) -> ScheduledExchange:
        exchange: ScheduledExchange = self.token_dispatcher.exchange
        return exchange

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """Return [B, L, D], the sum of each token's results, in the dtype of x_BLD."""
        kind = x_BLD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BLD.dtype
        # Torchtitan's type checks do not know these operators.
        with spmd.no_typecheck():
            scores_TK, ids_TK = topk_scores_BLK.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
            x_TD = x_BLD.flatten(0, 1).to(dtype)
            y_TD = self.token_dispatcher.through_experts(x_TD, scores_TK, ids_TK)
            return y_TD.view(x_BLD.shape).to(x_BLD.dtype)


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """Torchtitan's selective activation checkpointing that also saves received tokens and their counts.

    A recomputed block then repeats the expert computation only (as `fusedmoe.training.save_communication`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | KEPT_OPERATORS


def _check_replacement(name: str, held: Any, value: Any) -> None:
    """Raise `ConfigError` if another override replaces a part of `routed_experts`; warn if it has no effect."""
    if name in ("inner_experts", "token_dispatcher") and type(value) is not type(held):
        text = f"another override, or quantisation, replaces {name} by {_name(value)} after {_NAME}.routed_experts"
        raise ConfigError(f"{text}; leave one of the two out")
    if value is held and name == "inner_experts":
        text = f"another override claims {name} without effect: the experts are {_name(value)}"
        warnings.warn(f"{_NAME}.routed_experts: {text}. Leave one of the two out", stacklevel=4)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _tensor_parallel_ranks(experts: nn.Module) -> int:
    weight = next(experts.parameters())  # reading an attribute would evaluate a parametrisation
    if not isinstance(weight, DTensor):
        return 1
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1


def _join_weights(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return contiguous [e, 2, F, D] and [e, D, F]."""
    w1_EFD, w2_EDF, w3_EFD = parts
    # SiLU applies to SwiGLU's gate half, w1; w3 multiplies.
    return torch.stack((w1_EFD, w3_EFD), 1), w2_EDF.contiguous()


def _split_weights(w13: Tensor, w2_EDF: Tensor) -> Sequence[Tensor]:
    w1_EFD, w3_EFD = w13.unbind(1)
    return w1_EFD, w2_EDF, w3_EFD


_WEIGHT_PARTS = WeightParts(_join_weights, _split_weights)

_EXPERTS = {GroupedExperts.Config: FusedExperts.Config, GptOssGroupedExperts.Config: FusedGptOssExperts.Config}


@override(target=AllToAllTokenDispatcher.Config, description="Dispatch and combine by fusedmoe")
def token_dispatcher(
    cfg: AllToAllTokenDispatcher.Config, *, timeout_s: float = _TIMEOUT_S, wire: str | None = None
) -> TokenDispatcher.Config:
    """Replace the dispatcher's configuration by this library's.

    Args:
        timeout_s: maximum wait for other ranks, in seconds.
        wire: format of rows between ranks, as for `fusedmoe.Schedule`; None: the rows' dtype.
    Raises:
        ConfigError: a dispatcher that pads rows, for quantised experts; an unknown `wire`.
    """
    find_wire_format(wire)
    if type(cfg) is not AllToAllTokenDispatcher.Config:
        raise ConfigError(
            f"fusedmoe.titan.token_dispatcher: {_name(cfg)} does more than send rows, such as pad them for quantised "
            "experts, which would be lost; leave this override or the quantisation of experts out"
        )
    return derive(cfg, TokenDispatcher.Config, timeout_s=timeout_s, wire=wire)


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine by fusedmoe")
def routed_experts(
    cfg: RoutedExperts.Config,
    *,
    timeout_s: float = _TIMEOUT_S,
    schedule: str | Schedule = "off",
    wire: str | None = None,
) -> FusedRoutedExperts.Config:
    """Replace the routed experts' configuration: dispatcher and kernels become this library's.

    Args:
        timeout_s: maximum wait for other ranks, in seconds.
        schedule: as for `fusedmoe.MoELayer`, under expert parallelism. Compiled blocks run as with "off".
        wire: format of rows between ranks, as for `fusedmoe.Schedule`; None: that of the schedule.
    Raises:
        ConfigError: experts or a dispatcher of an unsupported class (supported: torchtitan's plain ones and gpt-oss's);
            an unknown schedule or `wire`.
    """
    if isinstance(schedule, str):
        Schedule.named(schedule)  # checked before the model is built
    with_wire(schedule, wire)
    inner, dispatcher = cfg.inner_experts, cfg.token_dispatcher
    if isinstance(dispatcher, TokenDispatcher.Config):
        before = "routed_experts" if isinstance(cfg, FusedRoutedExperts.Config) else "token_dispatcher"
        raise ConfigError(f"{_NAME}.routed_experts: {_NAME}.{before} was applied before; name one of them, once")
    if type(cfg) is not RoutedExperts.Config or type(inner) not in _EXPERTS:
        raise ConfigError(
            f"fusedmoe.titan.routed_experts supports plain SwiGLU experts and gpt-oss's, but not {_name(inner)} in "
            f"{_name(cfg)}; use fusedmoe.titan.token_dispatcher, which keeps the experts"
        )
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ConfigError(
            f"fusedmoe.titan.routed_experts sends rows itself, but {_name(dispatcher)} was chosen; set the model's "
            "moe_comm_backend to 'standard', or leave this override out"
        )
    return derive(
        cfg,
        FusedRoutedExperts.Config,
        inner_experts=derive(inner, _EXPERTS[type(inner)]),
        token_dispatcher=derive(dispatcher, TokenDispatcher.Config, timeout_s=timeout_s, schedule=schedule, wire=wire),
    )


@override(target=activation_checkpoint.SelectiveAC.Config, description="Each fusedmoe exchange runs once")
def selective_ac(cfg: activation_checkpoint.SelectiveAC.Config) -> SelectiveAC.Config:
    """Replace the policy's configuration by one that saves received tokens.

    Raises:
        ConfigError: a policy of another class.
    """
    if type(cfg) is not activation_checkpoint.SelectiveAC.Config:
        raise ConfigError(
            f"fusedmoe.titan.selective_ac would lose what {_name(cfg)} saves; leave this override out, and add "
            "fusedmoe.training.KEPT_OPERATORS to the result of its get_save_ops"
        )
    return derive(cfg, SelectiveAC.Config)


#: Block classes that only add their experts' output to their own.
FAMILIES = ("DeepSeekV3TransformerBlock", "GptOssTransformerBlock", "Qwen3TransformerBlock")


def pipeline(
    model: nn.Module,
    degrees: tuple[int, int] | None = (2, 2),
    *,
    policy: str | None = None,
    recompute: bool = False,
    wire: str | None = None,
) -> list[PipelinedBlocks]:
    """Pipeline a model's blocks: attention of one micro-batch overlaps with the experts of another. Collective.

    As `fusedmoe.hf.pipeline`, for torchtitan's blocks. Losses and gradients equal those of sequential blocks.

    Args:
        model: a model built with the override `fusedmoe.titan.routed_experts`, after parallelisation and
            initialisation. Its blocks must be of DeepSeek-V3 (also Kimi K2), gpt-oss or Qwen3, not compiled, and
            without activation checkpoints.
        degrees, policy, recompute, wire: as for `fusedmoe.hf.pipeline`.
    Returns:
        The pipelined blocks, as `fusedmoe.hf.pipeline`.
    Raises:
        ConfigError: an unknown policy; blocks of another class or in activation checkpoints. From a training forward:
            compiled blocks, tensor parallelism, type checks. From a forward: masks of variable length.
        RankError: ranks with different blocks or degrees.
    """
    return pipeline_external(model, TitanBlocks(), degrees, policy, recompute, wire)


class TitanBlocks:
    """Torchtitan's blocks with the interface of `pipeline_external` (`DecoderLibrary`)."""

    who: str = f"{_NAME}.pipeline"
    families: tuple[str, ...] = FAMILIES

    def read(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsInput:
        x_BLD, scores_BLK, ids_BLK, _ = args
        return x_BLD, ids_BLK.flatten(0, 1), scores_BLK.flatten(0, 1)

    def k(self, block: ExternalBlock) -> int:
        routed: Any = getattr(block.owner, block.attribute)
        return int(routed.token_dispatcher.top_k)

    def plain_tensors(self, block: ExternalBlock) -> AbstractContextManager[None]:
        return nullcontext()

    def why_not_split(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        return "torchtitan's type checks are on; leave --debug.spmd_typechecking out" if _is_type_checking() else None


def _is_type_checking() -> bool:
    return bool(spmd.is_type_checking())


def _name(cfg: object) -> str:
    return f"{type(cfg).__module__}.{type(cfg).__qualname__}"
