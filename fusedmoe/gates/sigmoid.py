"""Sigmoid gates: that of BASE layers and StableMoE; DeepSeek-V3's, with loss-free balancing and packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import require_values
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate, RouterGate, Routing, check_count, trait_applies
from fusedmoe.gates.topk import gather_selected, top_experts
from fusedmoe.kernels.gate import GateRule, normalize_by_sum
from fusedmoe.losses import Packing, balance_loss, packed_balance_loss, z_loss

_REQUIREMENT = "cu_seqlens must ascend from 0 to the number of tokens"


class Sigmoid(RouterGate):
    """Top-k of the logits, each weighted by its sigmoid (Lewis et al. 2021, BASE; Dai et al. 2022, StableMoE).

    h = x·Wᵀ, weight = σ(h) of the selected experts, not normalized. Ties select the lower index. The choice is greedy,
    as in StableMoE and in BASE's evaluation; BASE's balanced assignment in training is not included.

    Parameters: `weight_EM` [E, M]. Losses: "balance" (on σ(h) divided by its sum over all experts; counts all k
    choices), "z". Default: none.
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "z")

    def rule(self) -> GateRule:
        return self.make_rule("sigmoid", normalize=False)

    def choose(self, *scores: Tensor) -> Routing:
        (logits_SE,) = scores
        expert_SK = top_experts(logits_SE, self.k)
        terms = {
            "balance": lambda: balance_loss(normalize_by_sum(logits_SE.sigmoid()), expert_SK),
            "z": lambda: z_loss(logits_SE),
        }
        return self.routing(expert_SK, gather_selected(logits_SE, expert_SK).sigmoid(), logits_SE, terms)


class DeepSeekV3(RouterGate):
    """Sigmoid gate with a bias for the selection only (DeepSeek-AI 2024, DeepSeek-V3, §2.1.2).

    s = σ(x·Wᵀ). Selects by s + bias: first the `groups_kept` of the `groups` groups of E/groups consecutive experts
    with the highest sum of their two best experts, then the k best experts in these groups; ties by lower index. The
    weight is s without the bias, times `route_scale`, and if `normalize` and k > 1 divided by Σ s over the selected
    experts. A sum below 1e-20 counts as one: if all selected scores underflow, weights and gradients are zero.

    After each step `update(load_E)` moves the bias by `bias_rate`·sign(mean load − load). The bias has no gradient and
    stays float32, whatever dtype the module is cast to or loads.

    Parameters: `weight_EM` [E, M]. Buffer: `bias_E` [E], in the state dict. Losses: "balance" on s divided by its sum
    over all experts, counts all k choices (the paper's eq. 17–20 with `sequence`), "z". Default: none.

    Args:
        groups: number of expert groups, divides E (V3: 8 for 256 experts, one per node).
        groups_kept: groups available to a token (V3: 4); None: all.
        normalize: divide the weights of a token by their sum (k > 1).
        route_scale: factor on the weights (V3: 2.5).
        bias_rate: step of the bias (V3: 0.001); 0 keeps it constant.
        sequence: tokens per sequence for a balance loss per sequence; a mask may exclude only whole sequences. None:
            over all tokens of the rank, or per packed sequence if `MoELayer` is called with `cu_seqlens`.
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "z")
    bias_E: Tensor

    def __init__(
        self,
        experts: int,
        k: int = 8,
        capacity_factor: float | None = None,
        *,
        groups: int = 1,
        groups_kept: int | None = None,
        normalize: bool = True,
        route_scale: float = 1.0,
        bias_rate: float = 0.001,
        sequence: int | None = None,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)
        groups_kept = groups if groups_kept is None else groups_kept
        check_count(self, "groups", groups)
        check_count(self, "groups_kept", groups_kept)
        self.require(experts % groups == 0, f"{experts} experts do not divide into {groups} groups")
        self.require(groups_kept <= groups, f"groups_kept = {groups_kept} is more than its {groups} groups")
        # Otherwise a token would get duplicates, or experts outside its groups.
        reachable = groups_kept * (experts // groups)
        self.require(k <= reachable, f"k = {k} is more than the {reachable} experts of {groups_kept} groups")
        self.require(0 <= bias_rate < torch.inf, f"bias_rate must be at least 0, got {bias_rate}")
        self.require(0 < route_scale < torch.inf, f"route_scale must be positive, got {route_scale}")
        if sequence is not None:
            check_count(self, "sequence", sequence)
        self.groups = groups
        self.groups_kept = groups_kept
        self.normalize = normalize
        self.route_scale = route_scale
        self.bias_rate = bias_rate
        self.sequence = sequence

    def setup(
        self, model_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        # First: `setup` ends with `reset_parameters`, which zeroes the bias.
        if self.model_dim is None:
            self.register_buffer("bias_E", torch.zeros(self.experts, dtype=torch.float32, device=device))
        super().setup(model_dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias_E)

    @property
    def loss_sequence(self) -> int | None:
        return self.sequence if "balance" in self.aux else None

    @property
    def one_kernel(self) -> bool:
        return self.groups_kept == self.groups  # the kernel does not support groups

    def rule(self) -> GateRule:
        normalize = self.normalize and self.k > 1
        return self.make_rule("sigmoid", normalize=normalize, scale=self.route_scale, sequence=self.loss_sequence)

    def choice_bias(self) -> Tensor:
        return self.bias_E

    def choose(self, *scores: Tensor) -> Routing:
        return self.choose_packed(None, *scores)

    def choose_packed(self, packing: Packing | None, *scores: Tensor) -> Routing:
        (logits_SE,) = scores
        score_SE = logits_SE.sigmoid()
        expert_SK = self._select_in_groups(score_SE.detach() + self.bias_E.to(score_SE.dtype))
        weight_SK = score_SE.gather(1, expert_SK)
        if self.normalize and self.k > 1:
            weight_SK = normalize_by_sum(weight_SK)

        def balance() -> Tensor:
            if packing is not None:
                return packed_balance_loss(normalize_by_sum(score_SE), expert_SK, packing)
            return balance_loss(normalize_by_sum(score_SE), expert_SK, sequence=self.sequence)

        terms = {"balance": balance, "z": lambda: z_loss(logits_SE)}
        return self.routing(expert_SK, weight_SK * self.route_scale, logits_SE, terms)

    def _select_in_groups(self, biased_SE: Tensor) -> Tensor:
        if self.groups_kept == self.groups:
            return top_experts(biased_SE, self.k)
        size = self.experts // self.groups
        best_SG2 = biased_SE.unflatten(1, (self.groups, size)).topk(min(2, size), dim=2).values
        kept_SG = top_experts(best_SG2.sum(2), self.groups_kept)
        outside_SG = torch.ones(best_SG2.shape[:2], dtype=torch.bool, device=biased_SE.device)
        outside_SG.scatter_(1, kept_SG, False)
        outside_SE = outside_SG.repeat_interleave(size, dim=1)
        return top_experts(biased_SE.masked_fill(outside_SE, -torch.inf), self.k)

    def update(self, load_E: Tensor) -> None:
        """Move the bias by ±`bias_rate` towards an even load.

        `load_E`: [E] tokens that selected each expert in the step, summed over all ranks.

        Raises:
            ConfigError: wrong shape, or before `setup`.
        """
        self.require(self.model_dim is not None, "no bias yet: call setup(model_dim) before update()")
        self.require(load_E.shape == (self.experts,), f"load must be [{self.experts}], got {list(load_E.shape)}")
        # In float64: rounding the mean must not turn an even load into a step.
        with torch.no_grad():
            self._cast_bias_to_float32()  # `bias_E.data` and the attribute can be assigned in any dtype
            load_E = load_E.to(device=self.bias_E.device, dtype=torch.float64)
            self.bias_E += self.bias_rate * (load_E.mean() - load_E).sign()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Module casts must not affect the bias: near 1, bfloat16 cannot represent a step of 0.001.
        before = getattr(self, "bias_E", None)
        module = super()._apply(fn, recurse)
        if before is not None and self.bias_E.dtype != torch.float32:
            self.bias_E = before.to(self.bias_E.device, torch.float32)
        return module

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._cast_bias_to_float32()  # `assign=True` uses the state's tensors

    def _cast_bias_to_float32(self) -> None:
        if getattr(self, "bias_E", None) is not None and self.bias_E.dtype != torch.float32:
            self.bias_E = self.bias_E.float()


def read_cu_seqlens(gate: Gate, cu_seqlens: Any, x: Tensor) -> Packing:
    """Validate `cu_seqlens` and assign each token of x, [..., M], to its sequence, without device synchronization.

    Raises:
        ConfigError: the gate has no loss per packed sequence, or `cu_seqlens` has an invalid dtype, shape, device or
            values. On CUDA and in a graph a device-side assertion checks the values.
    """
    tokens, name = x.shape[:-1].numel(), type(gate).__name__
    if not trait_applies(type(gate), "choose_packed", ("forward", "route", "choose")):
        raise ConfigError(f"MoELayer got cu_seqlens, but its {name} gate has no loss per sequence; use DeepSeekV3")
    if gate.loss_sequence is not None:
        raise ConfigError(
            f"MoELayer got cu_seqlens, but its {name} gate computes its loss per {gate.loss_sequence} tokens; create "
            "the gate without `sequence`"
        )
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.dim() != 1
        or len(cu_seqlens) == 0
    ):
        is_tensor = isinstance(cu_seqlens, Tensor)
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if is_tensor else type(cu_seqlens).__name__
        raise ConfigError(
            f"MoELayer: cu_seqlens must be int32 or int64 [sequences + 1], the first token of each sequence and then "
            f"the number of tokens, {tokens}; got {got}"
        )
    if cu_seqlens.device != x.device and cu_seqlens.device.type != "cpu":
        raise ConfigError(
            f"MoELayer got cu_seqlens on {cu_seqlens.device} but input on {x.device}; move one with .to()"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
        require_values("MoELayer", right, _REQUIREMENT)
    else:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] != tokens or starts != sorted(starts):
            given = f"{starts[:8]}"[:-1] + (", …]" if len(starts) > 8 else "]")
            raise ConfigError(f"MoELayer: {_REQUIREMENT}, {tokens}; got {given} that ends with {starts[-1]}")
    ends_B = cu_seqlens[1:].to(x.device, torch.long)
    # A token's sequence is the number of sequences that end at or before it; this skips empty sequences.
    return Packing(torch.searchsorted(ends_B, torch.arange(tokens, device=x.device), right=True), len(ends_B))
