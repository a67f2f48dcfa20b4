"""Torchtitan's token dispatcher and experts with this library's exchange of rows and kernels.

Torchtitan's overrides put them in, by name, without a change to its code or to a model's (see `fusedmoe.titan`).
Parameters, their names and how they are sharded stay as they are: checkpoints, optimizers, FSDP and the adapters for
Hugging Face's format see no difference.

Shape suffixes are torchtitan's: T tokens, D model, K choices, E experts, e experts of this rank, F an expert's hidden
width, G both halves of gpt-oss's up projection (a column of each in turn), N rows sorted by expert, R tokens
received, S either tokens or received tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from fusedmoe import Topology, ops
from fusedmoe.dispatchers import Collectives, Dispatcher, Handle, InputChecks, Local, LocalExperts, Routed
from fusedmoe.errors import ConfigError
from fusedmoe.training import KEPT_OPERATORS


class DispatchMetadata(NamedTuple):
    """Facts about a dispatch that `combine` needs.

    Attributes:
        layout: sorts rows of the tokens received by expert.   scores_N: their scores.   handle: of these tokens; None:
            nothing travels.
    """

    layout: ops.Layout
    scores_N: Tensor
    handle: Handle | None


class TokenDispatcher(BaseEPTokenDispatcher):
    """Sends rows to the ranks of their experts, and results back.

    Waits are bounded, and an error names the rank at fault, the operation and the cure. Input that cannot be sent, and
    tokens or scores that are NaN or infinite, are refused on all ranks before anything is sent.

    Raises:
        RankError: from a step, or where meshes are wired: a rank fails, or does not come within `timeout_s`.
        ConfigError: without expert-parallel ranks, tokens or scores that are NaN or infinite (on CUDA from a later
            call).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        timeout_s: float = 300.0
        """Seconds that a rank waits for others (see `fusedmoe.Topology`)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._timeout_s = config.timeout_s
        self._dispatcher: Dispatcher = Local()
        self._checks = InputChecks(Topology(), "fusedmoe.titan")

    def init_buffer(self) -> None:
        """Makes the ranks' topology. Collective over the expert-parallel mesh, if there is one."""
        if self.ep_mesh is not None:
            topology = Topology.from_group(self.ep_mesh.get_group(), timeout_s=self._timeout_s)
            self._checks = InputChecks(topology, "fusedmoe.titan")
            self._dispatcher = Collectives(topology, ops.make_all_to_all("direct", topology), name="fusedmoe.titan")

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
        layout = ops.order(topk_expert_ids_TK, self.num_experts)
        scores_N = ops.take_pairs(topk_scores_TK, layout)
        if not isinstance(self._dispatcher, Collectives):
            return ops.permute(x_TD, layout), layout.counts_E, DispatchMetadata(layout, scores_N, None)
        x_RD, handle = self._dispatcher.dispatch_by_operators(x_TD, scores_N, layout, bad)
        assert handle.weight_N is not None
        # Tokens arrive once; torchtitan's experts want a row for each of their experts, sorted by these.
        rows_ND = ops.permute(x_RD, handle.layout)
        return rows_ND, handle.layout.counts_E, DispatchMetadata(handle.layout, handle.weight_N, handle)

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        """Returns [T, D] the sum of each token's results, each times its score in the wider dtype of the two."""
        layout, scores_N, handle = metadata
        # On the experts' rank, so that one sum of a token's results comes back.
        rows_ND = (routed_output_RD * scores_N[:, None]).to(routed_output_RD.dtype)
        y_RD = ops.unpermute(rows_ND, layout)
        if handle is not None:
            assert isinstance(self._dispatcher, Collectives)
            y_RD = self._dispatcher.combine_by_operators(y_RD, handle)
        return y_RD.to(x_TD.dtype)

    def through_experts(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, experts: LocalExperts
    ) -> Tensor:
        """Does dispatch, experts and combine as one, with experts that gather rows, apply scores and sum results.

        Scores travel with the rows, so that no result has to be kept for their gradient.

        Returns:
            [T, D] the sum of each token's results.
        """
        bad = self._checks.of_given(x_TD, topk_scores_TK)
        layout = ops.order(topk_expert_ids_TK, self.num_experts)
        routed = Routed(x_TD, layout, topk_scores_TK)
        if isinstance(self._dispatcher, Collectives):
            return self._dispatcher.by_operators(routed, experts, bad)
        return self._dispatcher.through_experts(routed, experts)


class FusedExperts(GroupedExperts):
    """Torchtitan's SwiGLU experts, with their parameters and another forward: no copies of rows sorted by expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: ops.Layout, score_N: Tensor) -> Tensor:
        """Returns [S, D]: for each token (or received row) the sum of its sorted rows' results, times their scores."""
        parts = [_local(parameter) for parameter in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        return ops.experts_in_parts(x_SD, layout, score_N, parts, _PARTS, "swiglu")


class FusedGptOssExperts(GptOssGroupedExperts):
    """Gpt-oss's experts, with their parameters and another forward.

    Products and the activation run in the dtype of the rows. (Torchtitan's own experts always compute in bfloat16.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: ops.Layout, score_N: Tensor) -> Tensor:
        """Returns [S, D]: for each token (or received row) the sum of its sorted rows' results, times their scores."""
        shards = _tensor_parallel_ranks(self.mlp1_weight_EGD)
        up_EGD, up_bias_EG, down_EDF, down_bias_ED = (
            _local(parameter).to(x_SD.dtype)
            for parameter in (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        )
        h_NG = ops.grouped_linear(ops.permute(x_SD, layout), layout, up_EGD, up_bias_EG)
        a_NF = ops.clamped_swiglu(h_NG, limit=self.swiglu_limit)
        if shards > 1:
            # Each rank adds its share of the bias, so that the sum has it once; the gradient is whole on every rank.
            down_bias_ED = down_bias_ED + (down_bias_ED / shards - down_bias_ED).detach()
        rows_ND = ops.grouped_linear(a_NF, layout, down_EDF, down_bias_ED)
        return ops.unpermute((rows_ND * score_N[:, None]).to(x_SD.dtype), layout)


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine as one.

    Products run, and rows travel, in the dtype of the tokens, which is that of FSDP's mixed precision; under autocast
    in its dtype. (Torchtitan's own experts always compute in bfloat16.) Scores are float32, and multiply the experts'
    results in float32. Where tensor parallelism splits each expert, a rank has a part of F, and returns a part of the
    sum, as in torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        inner_experts: FusedExperts.Config | FusedGptOssExperts.Config
        token_dispatcher: TokenDispatcher.Config

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
            y_TD = self.token_dispatcher.through_experts(x_TD, scores_TK, ids_TK, self.inner_experts)
            return y_TD.view(x_BLD.shape).to(x_BLD.dtype)


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """Torchtitan's policy of selective activation checkpoints, which also saves what travelled.

    A block that backward computes again takes the rows, and the numbers of rows, that came the first time. What the
    experts computed is computed again. (See `fusedmoe.training.save_communication`.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | KEPT_OPERATORS


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _tensor_parallel_ranks(weight: Tensor) -> int:
    """Returns over how many ranks tensor parallelism splits each expert."""
    if not isinstance(weight, DTensor):
        return 1
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1


def _join(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Makes [e, 2, F, D] and [e, D, F], contiguous."""
    w1_EFD, w2_EDF, w3_EFD = parts
    return torch.stack((w1_EFD, w3_EFD), 1), w2_EDF.contiguous()


def _split(w13: Tensor, w2_EDF: Tensor) -> Sequence[Tensor]:
    w1_EFD, w3_EFD = w13.unbind(1)
    return w1_EFD, w2_EDF, w3_EFD


_PARTS = ops.WeightParts(_join, _split)
