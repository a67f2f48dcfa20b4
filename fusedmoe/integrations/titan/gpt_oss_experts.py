"""gpt-oss's experts of torchtitan by this library's products and activation.

Shape suffixes are torchtitan's: G is both halves of the up projection, one column of each in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from fusedmoe import ops


class FusedGptOssExperts(GptOssGroupedExperts):
    """The parameters of torchtitan's experts, with another forward.

    Products and the activation run in the dtype of the rows. (Torchtitan's own experts always compute in bfloat16.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_SD: Tensor, layout: ops.Layout, score_N: Tensor) -> Tensor:
        """[S, D] for each token (or received row) the sum of its sorted rows' results, times their scores."""
        of_parts = _ranks_with_a_part(self.mlp1_weight_EGD)
        up_EGD, up_bias_EG, down_EDF, down_bias_ED = (
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(x_SD.dtype)
            for parameter in (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        )
        h_NG = ops.grouped_linear(ops.permute(x_SD, layout), layout, up_EGD, up_bias_EG)
        a_NF = ops.clamped_swiglu(h_NG, limit=self.swiglu_limit)
        if of_parts > 1:  # each adds its part of the bias; the gradient is that of all of it, on every rank
            down_bias_ED = down_bias_ED + (down_bias_ED / of_parts - down_bias_ED).detach()
        rows_ND = ops.grouped_linear(a_NF, layout, down_EDF, down_bias_ED)
        return ops.unpermute((rows_ND * score_N[:, None]).to(x_SD.dtype), layout)


def _ranks_with_a_part(weight: Tensor) -> int:
    """Ranks over which tensor parallelism splits each expert."""
    if not isinstance(weight, DTensor):
        return 1
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1
