"""What the gates share whose routing is one operation, `fusedmoe.ops.gate`, wherever its kernels serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fusedmoe.autograd.gate import GateChoice, GateRule
from fusedmoe.kernels.gate import fits_kernels, has_kernels
from fusedmoe.layers.gates.base import Gate, Routing


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
    terms = {"balance": lambda: balance_loss(choice), "z": lambda: z_loss(choice), **(other_losses or {})}
    return Routing(
        expert_SK=choice.expert_SK,
        weight_SK=choice.weight_SK,
        capacity=gate.row_capacity(choice.expert_SK.shape[0]),
        priority_S=None,
        aux_loss=gate.weigh(choice.weight_SK, terms),
        logits_SE=choice.logits_SE,
    )


def balance_loss(choice: GateChoice) -> Tensor:
    """`fusedmoe.layers.losses.balance_loss` from the sums of a choice."""
    assert choice.score_BE is not None and choice.count_BE is not None
    S, K = choice.expert_SK.shape
    B, E = choice.score_BE.shape
    length = S // B
    return (choice.score_BE * choice.count_BE).sum() * (E / max(B * length * length * K, 1))


def z_loss(choice: GateChoice) -> Tensor:
    """`fusedmoe.layers.losses.z_loss` from the logsumexp of a choice."""
    assert choice.logsumexp_S is not None
    return choice.logsumexp_S.square().sum() / max(choice.logsumexp_S.shape[0], 1)
