"""What the gates share whose routing is one operation, `fusedmoe.ops.gate`, wherever its kernels serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fusedmoe.autograd.gate import GateChoice, GateRule
from fusedmoe.kernels.gate import fits_kernels, has_kernels
from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.losses import balance_loss_of_sums, z_loss_of_sums


def serves(gate: Gate, *tensors: Tensor) -> bool:
    """Whether a gate with such operands (tokens and matrix, or logits) has kernels."""
    return has_kernels(*tensors) and fits_kernels(gate.experts, gate.k)


def make_rule(gate: Gate, score: str, *, normalize: bool, scale: float = 1.0, sequence: int | None = None) -> GateRule:
    """The gate's rule, with the sums that its auxiliary losses need."""
    balance = "balance" in gate.aux
    return GateRule(
        gate.k,
        score,
        normalize=normalize,
        scale=scale,
        statistics=balance,
        sequence=sequence if balance else None,
        logsumexp="z" in gate.aux,
    )


def make_routing(
    gate: Gate, choice: GateChoice, other_losses: Mapping[str, Callable[[], Tensor]] | None = None
) -> Routing:
    """The routing that a choice by `make_rule` is."""

    def balance() -> Tensor:
        assert choice.score_BE is not None and choice.count_BE is not None
        return balance_loss_of_sums(choice.score_BE, choice.count_BE, *choice.expert_SK.shape)

    def z() -> Tensor:
        assert choice.logsumexp_S is not None
        return z_loss_of_sums(choice.logsumexp_S)

    terms = {"balance": balance, "z": z, **(other_losses or {})}
    return Routing(
        expert_SK=choice.expert_SK,
        weight_SK=choice.weight_SK,
        capacity=gate.row_capacity(choice.expert_SK.shape[0]),
        priority_S=None,
        aux_loss=gate.weigh(choice.weight_SK, terms),
        logits_SE=choice.logits_SE,
    )
