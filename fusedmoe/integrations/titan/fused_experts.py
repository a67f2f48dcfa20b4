"""Torchtitan's routed experts by this library's kernels: no copies of rows sorted by expert, nor of their results.

Shape suffixes are torchtitan's, as in `fusedmoe.integrations.titan.token_dispatcher`; F is the experts' hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from fusedmoe import ops
from fusedmoe.integrations.titan.gpt_oss_experts import FusedGptOssExperts
from fusedmoe.integrations.titan.token_dispatcher import TokenDispatcher
from fusedmoe.integrations.weights_in_parts import WeightParts, experts_in_parts


class FusedExperts(GroupedExperts):
    """The parameters of torchtitan's experts, with another forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: ops.Layout, score_N: Tensor) -> Tensor:
        """[S, D] for each token (or received row) the sum of its sorted rows' results, times their scores."""
        parts = [
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for parameter in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        ]
        return experts_in_parts(x_SD, layout, score_N, parts, _PARTS, "swiglu")


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
        """[B, L, D] the sum of each token's results, in the dtype of x_BLD."""
        kind = x_BLD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BLD.dtype
        # Their type checks know no operators of ours; they are told what they need where this module begins and ends.
        with spmd.no_typecheck():
            scores_TK, ids_TK = topk_scores_BLK.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
            x_TD = x_BLD.flatten(0, 1).to(dtype)
            y_TD = self.token_dispatcher.through_experts(x_TD, scores_TK, ids_TK, self.inner_experts)
            return y_TD.view(x_BLD.shape).to(x_BLD.dtype)


def _join(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[e, 2, F, D] and [e, D, F], contiguous."""
    w1_EFD, w2_EDF, w3_EFD = parts
    return torch.stack((w1_EFD, w3_EFD), 1), w2_EDF.contiguous()


def _split(w13: Tensor, w2_EDF: Tensor) -> Sequence[Tensor]:
    w1_EFD, w3_EFD = w13.unbind(1)
    return w1_EFD, w2_EDF, w3_EFD


_PARTS = WeightParts(_join, _split)
