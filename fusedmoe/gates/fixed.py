"""Gates without parameters: Hash, which maps tokens to fixed experts, and Random."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.gates.base import Gate, Routing, router_dtype
from fusedmoe.gates.topk import top_experts


def _to_signed_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = _to_signed_int64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _to_signed_int64(0x94D049BB133111EB)


class Hash(Gate):
    """Fixed random hash of tokens to experts (Roller et al. 2021, Hash Layers).

    Every (token, expert) pair has a hash. A token is routed to the k experts with the highest hashes, which are uniform
    over all k-subsets. The hash is the 64-bit finalizer of splitmix64, equal on every device, process and version;
    `seed` selects another one (for example per layer).

    The hash is of the ids in the attribute `token_ids` if set, as in the paper: an integer tensor with S elements in
    token order, valid until replaced. Otherwise it is of the token's row rounded to bfloat16; any change of a row then
    changes its experts. Use ids for training.

    The weight is the constant 1/k. No parameters, logits, losses or random numbers.

    Raises:
        ConfigError: in forward, if `token_ids` does not have one id per token.
    """

    splits: ClassVar[bool] = True

    def __init__(self, experts: int, k: int = 1, capacity_factor: float | None = None, *, seed: int = 0) -> None:
        super().__init__(experts, k, capacity_factor)
        self.seed = seed
        self.token_ids: Tensor | None = None

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        # Micro-batches slice drawn tensors, so also the ids.
        return () if self.token_ids is None else (self._id_keys(self.token_ids, x_SM),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            key_S = drawn[0] if drawn else self._row_keys(x_SM)
            # Salts of different experts and seeds are far apart.
            salt_E = _hash64(
                torch.arange(self.experts, device=x_SM.device) + _to_signed_int64((self.seed + 1) * _GOLDEN)
            )
            expert_SK = top_experts(_hash64(_hash64(key_S)[:, None] + salt_E), self.k)
        return expert_SK, constant_weights(self, x_SM)

    def choose(self, *scores: Tensor) -> Routing:
        expert_SK, weight_SK = scores
        return self.routing(expert_SK, weight_SK)

    def _id_keys(self, token_ids: Tensor, x_SM: Tensor) -> Tensor:
        self.require(
            not token_ids.is_floating_point() and token_ids.numel() == x_SM.shape[0],
            f"token_ids must be {x_SM.shape[0]} integers, one per token, got {token_ids.dtype} {list(token_ids.shape)}",
        )
        return token_ids.reshape(-1).to(device=x_SM.device, dtype=torch.int64)

    def _row_keys(self, x_SM: Tensor) -> Tensor:
        # + 0.0 maps -0 to 0. int32 addition wraps around, so its order does not matter.
        bits_SM = (x_SM.to(torch.bfloat16) + 0.0).view(torch.int16)
        factor_M = _hash64(torch.arange(1, x_SM.shape[1] + 1, device=x_SM.device)).to(torch.int32)
        return (bits_SM * factor_M).sum(1, dtype=torch.int32).to(torch.int64)


class Random(Gate):
    """Uniformly random k distinct experts per token (Zuo et al. 2022, THOR; Lancet's random gate).

    The weight is the constant 1/k. No parameters, logits or losses. Random: the choice, in training and evaluation,
    from the default generator of the input's device (S·E uniform draws).
    """

    splits: ClassVar[bool] = True

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        return (torch.rand(x_SM.shape[0], self.experts, dtype=torch.float32, device=x_SM.device),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return top_experts(drawn[0], self.k), constant_weights(self, x_SM)

    def choose(self, *scores: Tensor) -> Routing:
        expert_SK, weight_SK = scores
        return self.routing(expert_SK, weight_SK)


def constant_weights(gate: Gate, x_SM: Tensor) -> Tensor:
    return torch.full((x_SM.shape[0], gate.k), 1 / gate.k, dtype=router_dtype(x_SM), device=x_SM.device)


def _hash64(value: Tensor) -> Tensor:
    value = (value ^ _logical_shift(value, 30)) * _FIRST_MULTIPLIER
    value = (value ^ _logical_shift(value, 27)) * _SECOND_MULTIPLIER
    return value ^ _logical_shift(value, 31)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
