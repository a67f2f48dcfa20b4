"""SoftMoE: every slot is a mixture of tokens, every token a mixture of slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from fusedmoe.layers.gates.base import Gate, SoftRouting, check_count, fill_normal
from fusedmoe.layers.gates.router import router_dtype, router_logits
from fusedmoe.losses import z_loss


class SoftMoE(Gate):
    """Soft dispatch and combine, nothing dropped (Puigcerver et al. 2024, From Sparse to Soft, eq. 1–3 and
    §2.3).

    logits = l2norm(x) · (scale · l2norm(Φ)) [S, N], N = E·slots; dispatch = softmax over tokens (dimension
    0), combine = softmax over slots (dimension 1). Without ``normalize`` the logits are x·Φ. Column n belongs
    to expert n // slots. Each slot mixes all S tokens of the rank, later ones included: not for causal
    language models.

    Random: nothing. Parameters: ``weight_NM`` [E·slots, M] normal with standard deviation 1/√M; with
    ``normalize``, ``scale`` [1], one at the start. Losses: "z" (on the [S, N] logits). Default: none.
    ``k`` is E: every expert has a share in every token.

    Args:
        slots: p ≥ 1, inputs per expert.
        normalize: l2-normalise tokens and slot parameters (matters for large model dimensions).
    """

    needs_whole_batch: ClassVar[bool] = True
    losses: ClassVar[tuple[str, ...]] = ("z",)
    weight_NM: nn.Parameter
    scale: nn.Parameter

    def __init__(
        self,
        experts: int,
        slots: int = 1,
        *,
        normalize: bool = True,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, experts, None, aux=aux)
        check_count(self, "slots", slots)
        self.slots = slots
        self.normalize = normalize

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight_NM": (self.experts * self.slots, model_dim)}
        if self.normalize:
            shapes["scale"] = (1,)  # not a scalar: fully sharded data parallelism splits dimension 0
        return shapes

    def reset_parameters(self) -> None:
        fill_normal(self.weight_NM, self.weight_NM.shape[1] ** -0.5)
        if self.normalize:
            nn.init.ones_(self.scale)

    def route(self, x_SM: Tensor) -> SoftRouting:
        if self.normalize:
            x_SM = x_SM.to(router_dtype(x_SM))
            weight_NM = nn.functional.normalize(self.weight_NM.to(x_SM.dtype), dim=1)
            logits_SN = router_logits(nn.functional.normalize(x_SM, dim=1), weight_NM * self.scale.to(x_SM.dtype))
        else:
            logits_SN = router_logits(x_SM, self.weight_NM)
        return SoftRouting(
            dispatch_SN=logits_SN.softmax(0),
            combine_SN=logits_SN.softmax(1),
            slots=self.slots,
            aux_loss=self.weigh(logits_SN, {"z": lambda: z_loss(logits_SN)}),
            logits_SE=logits_SN.detach(),
        )

    def row_capacity(self, tokens: int) -> int:
        """Each expert computes ``slots`` rows, however many tokens there are."""
        return self.slots
