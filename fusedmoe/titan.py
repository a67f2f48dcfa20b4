"""Torchtitan's models with this library's exchange of tokens and kernels, by names of overrides:

    torchtitan … --override.imports fusedmoe.titan.routed_experts,fusedmoe.titan.selective_ac

`token_dispatcher` sends tokens by this library, and leaves the experts to torchtitan; `routed_experts` is both, with
the experts by this library's kernels; take one of them. `routed_experts={"schedule": "auto"}` has what travels overlap
what is computed, and `fusedmoe.training.tune_model` measures plans while a loop trains; `pipeline(model)` has attention
of some samples go beside the experts of others, over all blocks. `selective_ac` has selective activation checkpointing
run each exchange once. Parameters, their names and how they are sharded stay torchtitan's.

Shape suffixes are torchtitan's: T tokens, D model, K choices, E experts, e experts of this rank, F an expert's hidden
width, G both halves of gpt-oss's up projection (a column of each in turn), N rows sorted by expert, R tokens
received, S either tokens or received tokens.
"""

from __future__ import annotations

from fusedmoe.compat.torchtitan import VERSIONS
from fusedmoe.versions import refused

if (error := refused("torchtitan", *VERSIONS, "fusedmoe.titan")) is not None:
    raise error

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
from fusedmoe.blocks.external_blocks import ExpertsInput, ExternalBlock, pipeline_external
from fusedmoe.comm import make_all_to_all
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, PartExperts
from fusedmoe.engine.chunk_experts import GroupedExperts as GroupedChunks
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Handle
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import Layout, Weights
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.scheduled_exchange import ExternalExperts, ScheduledExchange, shared_topology
from fusedmoe.training import KEPT_OPERATORS

__all__ = ["FusedRoutedExperts", "SelectiveAC", "TokenDispatcher"]
__all__ += ["pipeline", "routed_experts", "selective_ac", "token_dispatcher"]

_TIMEOUT_S, _NAME = 300.0, "fusedmoe.titan"


class DispatchMetadata(NamedTuple):
    """The layout of received tokens' rows, the scores of these rows, and the tokens' handle; None where none travel."""

    layout: Layout
    scores_N: Tensor
    handle: Handle | None


class TokenDispatcher(BaseEPTokenDispatcher):
    """Sends a token once to each rank with experts for it, and the sum of its results there back.

    Scores travel with tokens, and multiply results on the experts' ranks.

    Waits are bounded, and an error names the rank at fault, the operation and the cure. Input that cannot be sent, and
    tokens or scores that are NaN or infinite, are refused on all ranks before anything is sent.

    Raises:
        RankError: from a step, or where meshes are wired: a rank fails, or does not come within `timeout_s`.
        ConfigError: without expert-parallel ranks, tokens or scores that are NaN or infinite (on CUDA from a later
            call).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        timeout_s: float = _TIMEOUT_S
        """Seconds that a rank waits for others (see `fusedmoe.Topology`)."""
        schedule: Any = "off"
        """When tokens travel and the experts that this serves compute; as of `fusedmoe.MoELayer`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._timeout_s, self._schedule = config.timeout_s, config.schedule
        self._collectives: Collectives | None = None
        self._checks = InputChecks(Topology(), _NAME)
        self._experts: ExternalExperts | None = None
        self.exchange: ScheduledExchange | None = None

    def serve(self, experts: ExternalExperts) -> None:
        """Has `through_experts` take tokens to these experts."""
        self._experts = experts
        self.exchange = ScheduledExchange(Topology(), experts, self._schedule, _NAME)

    def init_buffer(self) -> None:
        """Makes the ranks' topology. Collective over the expert-parallel mesh, if there is one."""
        if self.ep_mesh is None:
            return
        topology = shared_topology(self.ep_mesh.get_group(), timeout_s=self._timeout_s)
        self._checks = InputChecks(topology, _NAME)
        if self._experts is None:
            self._collectives = Collectives(topology, make_all_to_all("direct", topology), name=_NAME)
        else:
            self.exchange = ScheduledExchange(topology, self._experts, self._schedule, _NAME)
            self._collectives = self.exchange.dispatcher.collectives

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Returns [N, D] rows for this rank's experts, sorted by expert; [e] how many of each; and the metadata."""
        # A check that would fail far from here, in torchtitan's own code.
        if spmd.is_type_checking():
            raise ConfigError(
                "fusedmoe.titan.token_dispatcher: torchtitan's type checks know no rows that this library sent; take "
                "fusedmoe.titan.routed_experts, or leave --debug.spmd_typechecking out"
            )
        bad = self._checks.of_given(x_TD, topk_scores_TK)
        layout = autograd.order(topk_expert_ids_TK, self.num_experts)
        scores_N = autograd.take_pairs(topk_scores_TK, layout)
        if self._collectives is None:
            return autograd.permute(x_TD, layout), layout.counts_E, DispatchMetadata(layout, scores_N, None)
        x_RD, handle = self._collectives.dispatch_by_operators(x_TD, scores_N, layout, bad)
        assert handle.weight_N is not None
        # Tokens arrive once; torchtitan's experts want a row for each of their experts, sorted by these.
        rows_ND = autograd.permute(x_RD, handle.layout)
        return rows_ND, handle.layout.counts_E, DispatchMetadata(handle.layout, handle.weight_N, handle)

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        """Returns [T, D] the sum of each token's results, each times its score in the wider dtype of the two."""
        layout, scores_N, handle = metadata
        # On the experts' rank, so that one sum of a token's results comes back.
        rows_ND = (routed_output_RD * scores_N[:, None]).to(routed_output_RD.dtype)
        y_RD = autograd.unpermute(rows_ND, layout)
        if handle is not None:
            assert self._collectives is not None
            y_RD = self._collectives.combine_by_operators(y_RD, handle)
        return y_RD.to(x_TD.dtype)

    def through_experts(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor) -> Tensor:
        """Does dispatch, experts and combine as one, with the experts that this `serve`s, by the schedule.

        Scores travel with the tokens, so that no result has to be kept for their gradient.

        Returns:
            [T, D] the sum of each token's results.
        """
        assert self.exchange is not None
        layout = autograd.order(topk_expert_ids_TK, self.num_experts)
        return self.exchange.through_experts(x_TD, layout, topk_scores_TK)


class FusedExperts(GroupedExperts):
    """Torchtitan's SwiGLU experts, with their parameters and another forward: no copies of rows sorted by expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: Layout, score_N: Tensor) -> Tensor:
        """Returns [S, D]: for each token given the sum of its sorted rows' results, times their scores."""
        return autograd.experts_in_parts(x_SD, layout, score_N, self._parts(), _PARTS, "swiglu")

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        """Returns the same experts for a schedule."""
        if not torch.compiler.is_compiling():
            return PartExperts(self._parts(), _PARTS, "swiglu")
        # A graph joins its parts itself, and splits their gradients.
        w13, w2_EDF = _join([part.to(x_SD.dtype) for part in self._parts()])
        return GroupedChunks(Weights(w13, w2_EDF), "swiglu")

    def widths(self) -> tuple[int, int]:
        """Returns D, and F over all ranks."""
        return self.w2_EDF.shape[1], self.w2_EDF.shape[2]

    def _parts(self) -> list[Tensor]:
        return [_local(parameter) for parameter in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]


class FusedGptOssExperts(GptOssGroupedExperts):
    """Gpt-oss's experts, with their parameters and another forward.

    Products and the activation run in the dtype of the rows. (Torchtitan's own experts always compute in bfloat16.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: Layout, score_N: Tensor) -> Tensor:
        """Returns [S, D]: for each token given the sum of its sorted rows' results, times their scores."""
        return self._compute(self._parameters_here(), x_SD, layout, score_N)

    def in_chunks(self, x_SD: Tensor) -> ChunkExperts:
        """Returns the same experts for a schedule."""
        parameters = self._parameters_here()
        return AutogradExperts(partial(self._compute, parameters), parameters, self)

    def widths(self) -> tuple[int, int]:
        """Returns D, and F over all ranks."""
        return self.mlp2_weight_EDF.shape[1], self.mlp2_weight_EDF.shape[2]

    def _parameters_here(self) -> list[Tensor]:
        names = (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        return [_local(parameter) for parameter in names]

    def _compute(self, parameters: Sequence[Tensor], x_SD: Tensor, layout: Layout, score_N: Tensor | None) -> Tensor:
        shards = _tensor_parallel_ranks(self)
        up_EGD, up_bias_EG, down_EDF, down_bias_ED = (parameter.to(x_SD.dtype) for parameter in parameters)
        h_NG = autograd.grouped_linear(autograd.permute(x_SD, layout), layout, up_EGD, up_bias_EG)
        a_NF = autograd.clamped_swiglu(h_NG, limit=self.swiglu_limit)
        if shards > 1:
            # Each rank adds its share of the bias, so that the sum has it once; the gradient is whole on every rank.
            down_bias_ED = down_bias_ED + (down_bias_ED / shards - down_bias_ED).detach()
        rows_ND = autograd.grouped_linear(a_NF, layout, down_EDF, down_bias_ED)
        assert score_N is not None
        return autograd.unpermute((rows_ND * score_N[:, None]).to(x_SD.dtype), layout)


class _InnerExperts(ExternalExperts):
    """Torchtitan's inner experts."""

    @property
    def reads_once(self) -> bool:  # type: ignore[override]
        return isinstance(self.module, FusedExperts)

    def in_graphs(self) -> torch.nn.Module | None:
        # Gpt-oss's share their biases by how their parameters lie, of which an operator sees nothing.
        shared = isinstance(self.module, FusedGptOssExperts) and _tensor_parallel_ranks(self.module) > 1
        return None if shared else self.module


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine as one.

    Products run, and tokens travel, in the tokens' dtype, which is that of FSDP's mixed precision; under autocast
    in its dtype. (Torchtitan's own experts always compute in bfloat16.) Scores are float32, and multiply the experts'
    results in float32. Where tensor parallelism splits each expert, a rank has a part of F, and returns a part of the
    sum, as in torchtitan.

    Attributes:
        fusedmoe_exchange: takes tokens to their experts by the schedule, and their results back.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        inner_experts: FusedExperts.Config | FusedGptOssExperts.Config
        token_dispatcher: TokenDispatcher.Config

        def __setattr__(self, name: str, value: Any) -> None:
            if hasattr(self, name):  # after it was made
                _check_replacement(name, getattr(self, name), value)
            object.__setattr__(self, name, value)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        inner = self.inner_experts
        self.token_dispatcher.serve(_InnerExperts(inner, self.token_dispatcher.num_experts, inner.widths(), gated=True))

    @property
    def fusedmoe_exchange(self) -> ScheduledExchange:
        exchange: ScheduledExchange = self.token_dispatcher.exchange
        return exchange

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Returns [B, L, D] the sum of each token's results, in the dtype of x_BLD."""
        kind = x_BLD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BLD.dtype
        # Their type checks know no operators of ours; they are told what they need where this module begins and ends.
        with spmd.no_typecheck():
            scores_TK, ids_TK = topk_scores_BLK.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
            x_TD = x_BLD.flatten(0, 1).to(dtype)
            y_TD = self.token_dispatcher.through_experts(x_TD, scores_TK, ids_TK)
            return y_TD.view(x_BLD.shape).to(x_BLD.dtype)


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """Torchtitan's policy of selective activation checkpoints, which also saves what travelled.

    A block that backward computes again takes the tokens, and the numbers of them, that came the first time. What the
    experts computed is computed again. (See `fusedmoe.training.save_communication`.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | KEPT_OPERATORS


def _check_replacement(name: str, held: Any, value: Any) -> None:
    """Refuse another override of a part of `routed_experts`. Warn if it claims the part and leaves it."""
    if name in ("inner_experts", "token_dispatcher") and type(value) is not type(held):
        text = f"another override, or quantisation, replaces {name} by {_name(value)} after {_NAME}.routed_experts"
        raise ConfigError(f"{text}; leave one of the two out")
    if value is held and name == "inner_experts":
        text = f"another override claims {name} and leaves it as it is, without effect: the experts are {_name(value)}"
        warnings.warn(f"{_NAME}.routed_experts: {text}. Leave one of the two out", stacklevel=4)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _tensor_parallel_ranks(experts: nn.Module) -> int:
    """Returns over how many ranks tensor parallelism splits each expert."""
    weight = next(experts.parameters())  # reading an attribute would evaluate a parametrisation
    if not isinstance(weight, DTensor):
        return 1
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1


def _join(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Makes [e, 2, F, D] and [e, D, F], contiguous."""
    w1_EFD, w2_EDF, w3_EFD = parts
    # SwiGLU's halves, the gate first: w1 goes through SiLU, w3 multiplies.
    return torch.stack((w1_EFD, w3_EFD), 1), w2_EDF.contiguous()


def _split(w13: Tensor, w2_EDF: Tensor) -> Sequence[Tensor]:
    w1_EFD, w3_EFD = w13.unbind(1)
    return w1_EFD, w2_EDF, w3_EFD


_PARTS = autograd.WeightParts(_join, _split)

# Torchtitan's experts, and ours in their place.
_EXPERTS = {GroupedExperts.Config: FusedExperts.Config, GptOssGroupedExperts.Config: FusedGptOssExperts.Config}


@override(target=AllToAllTokenDispatcher.Config, description="Tokens travel by fusedmoe's exchange")
def token_dispatcher(cfg: AllToAllTokenDispatcher.Config, *, timeout_s: float = _TIMEOUT_S) -> TokenDispatcher.Config:
    """Replaces the dispatcher's configuration by this library's.

    Args:
        timeout_s: seconds that a rank waits for others.
    Raises:
        ConfigError: a dispatcher that pads rows, for quantised experts.
    """
    # A derived configuration adds behaviour that this dispatcher would drop.
    if type(cfg) is not AllToAllTokenDispatcher.Config:
        raise ConfigError(
            f"fusedmoe.titan.token_dispatcher: {_name(cfg)} does more than send rows, such as pad them for quantised "
            "experts, which would be lost; leave this override or the quantisation of experts out"
        )
    return derive(cfg, TokenDispatcher.Config, timeout_s=timeout_s)


@override(target=RoutedExperts.Config, description="Rows travel, and experts compute, by fusedmoe")
def routed_experts(
    cfg: RoutedExperts.Config, *, timeout_s: float = _TIMEOUT_S, schedule: str | Schedule = "off"
) -> FusedRoutedExperts.Config:
    """Replaces the routed experts' configuration: dispatcher and kernels are this library's.

    Args:
        timeout_s: seconds that a rank waits for others.
        schedule: what travels overlaps what is computed by it where experts are over ranks, as of
            `fusedmoe.MoELayer`: "off", "auto", the name of a policy, or a `fusedmoe.Schedule`. With "auto" and names
            the first step measures the machine, and keeps that on disk. Blocks that are compiled go as by "off".
    Raises:
        ConfigError: experts, or a dispatcher, of another kind than torchtitan's plain ones and gpt-oss's, named; an
            unknown schedule.
    """
    if isinstance(schedule, str):
        Schedule.named(schedule)  # refused here rather than when the model is built
    inner, dispatcher = cfg.inner_experts, cfg.token_dispatcher
    if isinstance(dispatcher, TokenDispatcher.Config):
        before = "routed_experts" if isinstance(cfg, FusedRoutedExperts.Config) else "token_dispatcher"
        raise ConfigError(f"{_NAME}.routed_experts: {_NAME}.{before} was applied before; name one of them, once")
    if type(cfg) is not RoutedExperts.Config or type(inner) not in _EXPERTS:
        raise ConfigError(
            f"fusedmoe.titan.routed_experts computes plain SwiGLU experts and gpt-oss's, and not {_name(inner)} in "
            f"{_name(cfg)}; take fusedmoe.titan.token_dispatcher, which leaves the experts as they are"
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
        token_dispatcher=derive(dispatcher, TokenDispatcher.Config, timeout_s=timeout_s, schedule=schedule),
    )


@override(target=activation_checkpoint.SelectiveAC.Config, description="Each exchange of fusedmoe runs once")
def selective_ac(cfg: activation_checkpoint.SelectiveAC.Config) -> SelectiveAC.Config:
    """Replaces the policy's configuration by one that saves what travelled.

    Raises:
        ConfigError: a policy of another class, named.
    """
    if type(cfg) is not activation_checkpoint.SelectiveAC.Config:
        raise ConfigError(
            f"fusedmoe.titan.selective_ac would lose what {_name(cfg)} saves; leave this override out, and add "
            "fusedmoe.training.KEPT_OPERATORS to what its get_save_ops returns"
        )
    return derive(cfg, SelectiveAC.Config)


#: Classes of blocks that add what their experts give to what they return, and do nothing else with it.
FAMILIES = ("DeepSeekV3TransformerBlock", "GptOssTransformerBlock", "Qwen3TransformerBlock")


def pipeline(
    model: nn.Module,
    degrees: tuple[int, int] | None = (2, 2),
    *,
    policy: str | None = None,
    recompute: bool = False,
) -> list[PipelinedBlocks]:
    """Has a model's blocks go in micro-batches: attention of one beside the experts, and the travelling tokens, of
    another, over all blocks (`fusedmoe.pipeline`).

    Losses and gradients are those of the blocks one after the other. Schedules of the layers rest meanwhile. FSDP keeps
    all blocks' parameters gathered from the first block's forward pass to the last one's, and so in the backward pass.

    Args:
        model: with `routed_experts` in it, on its ranks and with its parameters initialised: blocks of DeepSeek-V3
            (Kimi K2's too), gpt-oss or Qwen3, not compiled, without activation checkpoints.
        degrees, policy, recompute: as `fusedmoe.hf.pipeline` takes them.
    Returns:
        The blocks that follow each other with experts, as `fusedmoe.hf.pipeline` does.
    Raises:
        ConfigError: an unknown policy; blocks of another class, in activation checkpoints among them; from a forward,
            blocks that are compiled, tensor parallelism, type checks, masks of variable length. Each names the cure.
        RankError: ranks with different blocks or degrees. Collective.
    """
    return pipeline_external(model, TitanBlocks(), degrees, policy, recompute)


class TitanBlocks:
    """Blocks of torchtitan as `pipeline_external` sees them (`DecoderDoor`)."""

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

    def refuses(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        return "torchtitan's type checks know none; leave --debug.spmd_typechecking out" if _checks_types() else None


def _checks_types() -> bool:
    return bool(spmd.is_type_checking())


def _name(cfg: object) -> str:
    return f"{type(cfg).__module__}.{type(cfg).__qualname__}"
