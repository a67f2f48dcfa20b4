"""Dense parts of a block with tensor parallelism over the MP group: attention by heads, feed-forward by hidden dim.

Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3) with sequence parallelism (Korthikanti et al. 2022,
section 4.2): outside these parts every MP rank holds a slice of each sequence. An all-gather assembles the sequences,
and a reduce-scatter sums the results of this rank's heads or hidden units. Backward exchanges the two.

Every rank draws whole parameters, on the CPU in float32 from torch's default generator, and keeps its shard:
`torch.manual_seed(seed)` gives the same model for any number of ranks, device and dtype, and the ranks' generators stay
in sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe import Topology
from fusedmoe.autograd.parallel import gather_rows, reduce_scatter_rows, split_counts
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS, define_activation
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.recorder import Recorder, layer_recorder, record_operation

_ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class TokenSplit:
    """Split of sequences of L positions over the MP ranks, equal for all sequences, as `torch.chunk` would split L.

    Rank m's rows are [B, P_m, M]. L = 5 gives lengths (2, 2, 1) on three ranks and (2, 2, 1, 0) on four.

    Attributes:
        length: L.
        lengths: positions of each MP rank.
        start, stop: this rank's positions.
    """

    length: int
    lengths: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def from_length(cls, length: int, topology: Topology) -> TokenSplit:
        lengths = split_counts(length, topology.mp)
        start = sum(lengths[: topology.mp.index])
        return cls(length, tuple(lengths), start, start + lengths[topology.mp.index])

    def row_counts(self, samples: int) -> list[int]:
        return [samples * length for length in self.lengths]

    def to_samples(self, rows_TM: Tensor, samples: int) -> Tensor:
        """Reorder rows concatenated by rank (after a gather) to [samples, L, M]."""
        if len(self.lengths) == 1 or samples == 1:
            return rows_TM.view(samples, self.length, rows_TM.shape[-1])
        parts = rows_TM.split(self.row_counts(samples))
        shaped = (part.view(samples, n, part.shape[-1]) for part, n in zip(parts, self.lengths, strict=True))
        return torch.cat(list(shaped), dim=1)

    def to_ranks(self, y_BLM: Tensor) -> Tensor:
        """Reorder [samples, L, M] to rows concatenated by rank (before a reduce-scatter)."""
        if len(self.lengths) == 1 or len(y_BLM) == 1:
            return y_BLM.flatten(0, 1)
        return torch.cat([part.flatten(0, 1) for part in y_BLM.split(self.lengths, dim=1)])


def normal_parameter(
    *shape: int,
    std: float,
    group: Group | None = None,
    dim: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Create a normally distributed parameter; with a group, this rank's chunk along `dim`."""
    # A job that only plans leaves the generator unchanged.
    if torch.empty(0, device=device).is_meta:
        return nn.Parameter(shard(torch.empty(shape, device=device, dtype=dtype), group, dim))
    whole = torch.randn(shape, dtype=torch.float32, device="cpu") * std
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    return nn.Parameter(shard(whole, group, dim).to(device=device, dtype=dtype))


def zero_parameter(*shape: int, group: Group | None = None, dim: int = 0, **factory_kwargs: Any) -> nn.Parameter:
    return nn.Parameter(shard(torch.zeros(shape, **factory_kwargs), group, dim))


def shard(whole: Tensor, group: Group | None, dim: int) -> Tensor:
    if group is None or group.size == 1:
        return whole
    # A view would keep the whole tensor alive.
    return whole.chunk(group.size, dim)[group.index].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def reset_direct_parameters(module: Any, std_of: Mapping[str, float]) -> None:
    """Reinitialize a module's direct parameters as `normal_parameter` does; parameters without a std become zero."""
    for name, parameter in module.named_parameters(recurse=False):
        shape, dim, group = list(parameter.shape), 0, None
        if (axes := getattr(module, "shardings", {}).get(name)) is not None:
            dim, group = axes["mp"], module.topology.mp
            shape[dim] *= group.size  # always divisible
        value = torch.zeros_like(parameter, device="cpu")
        if name in std_of:
            value = normal_parameter(
                *shape, std=std_of[name], group=group, dim=dim, device="cpu", dtype=parameter.dtype
            )
        if not parameter.is_meta:
            parameter.copy_(value)


def rotary_angles(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, [length, head_dim / 2] each, computed in float64."""
    frequency_D = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angle_LD = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency_D
    return angle_LD.cos().to(dtype), angle_LD.sin().to(dtype)


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Apply rotary embeddings to channel pairs (i, i + D/2); keeps shape and dtype."""
    left, right = x_BHLD.chunk(2, dim=-1)
    return torch.cat((left * cos_LD - right * sin_LD, right * cos_LD + left * sin_LD), dim=-1).to(x_BHLD.dtype)


class Attention(nn.Module):
    """Multi-head or grouped-query attention, causal or bidirectional.

    The rows of `qkv_weight` are ordered by key head: the query heads that share it, the key, the value, D rows each. A
    chunk of the rows is thus a set of whole heads, and one GEMM computes all three.

    Attributes:
        qkv_weight: [(heads + 2·kv_heads)·D / MP, M].
        out_weight, out_bias: [M, heads·D / MP]; [M] or None.
    """

    qkv_bias: nn.Parameter | None
    out_bias: nn.Parameter | None
    shardings = {"qkv_weight": {"mp": 0}, "qkv_bias": {"mp": 0}, "out_weight": {"mp": 1}}

    def __init__(self, config: ModelConfig, topology: Topology, layer: int, **factory_kwargs: Any) -> None:
        super().__init__()
        mp = topology.mp
        if config.key_heads % mp.size:
            raise ConfigError(
                f"{config.key_heads} key heads do not split over mp = {mp.size} ranks; "
                "choose an mp that divides them, or other heads"
            )
        self.config, self.topology, self.layer = config, topology, layer
        self.recorder: Recorder | None = None
        self._make_projections(**factory_kwargs)

    def _make_projections(self, **factory_kwargs: Any) -> None:
        config, mp, dim, head = self.config, self.topology.mp, self.config.model_dim, self.config.head_size
        rows = (config.heads + 2 * config.key_heads) * head
        self.qkv_weight = normal_parameter(rows, dim, std=dim**-0.5, group=mp, **factory_kwargs)
        self.register_parameter("qkv_bias", zero_parameter(rows, group=mp, **factory_kwargs) if config.bias else None)
        # Two residual branches per block: this scaling preserves the variance of the residual stream (GPT-2).
        std = dim**-0.5 * (2 * config.layers) ** -0.5
        self._std_of = {"qkv_weight": dim**-0.5, "out_weight": std}
        self.out_weight = normal_parameter(dim, config.heads * head, std=std, group=mp, dim=1, **factory_kwargs)
        self.register_parameter("out_bias", zero_parameter(dim, **factory_kwargs) if config.bias else None)

    def reset_parameters(self) -> None:
        reset_direct_parameters(self, self._std_of)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Map [B, P, M] -> [B, P, M], with P positions per sample on this rank; collective over the MP group."""
        mp, recorder = self.topology.mp, layer_recorder(self.recorder, self.layer)
        # Autocast would cast after communication, which would send twice the bytes.
        if torch.is_autocast_enabled(x_BPM.device.type):
            x_BPM = x_BPM.to(torch.get_autocast_dtype(x_BPM.device.type))
        counts = split.row_counts(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, recorder)
        x_BLM = split.to_samples(x_TM, len(x_BPM))
        y_BLM = record_operation(recorder, self._heads, x_BLM, kind="attention")
        y_SM = reduce_scatter_rows(split.to_ranks(y_BLM), mp, counts, recorder)
        y_BPM = y_SM.view(x_BPM.shape)
        return y_BPM if self.out_bias is None else y_BPM + self.out_bias

    def forward_with_past(
        self, x_BPM: Tensor, past: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map later positions [B, P, M] -> [B, P, M] on one MP rank; `past` holds keys and values of earlier positions.

        Also returns the keys and values of these positions, [B, heads, P, D] each.
        """
        y_BPM, own = self._attend(x_BPM, past)
        return (y_BPM if self.out_bias is None else y_BPM + self.out_bias), own

    def _heads(self, x_BLM: Tensor) -> Tensor:
        return self._attend(x_BLM, ())[0]

    def _attend(self, x_BLM: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply this rank's heads to whole sequences; return its partial sum [B, L, M], and keys and values."""
        queries_per_key = self.config.heads // self.config.key_heads
        before = sum(keys.shape[2] for keys, _ in past)
        q_BHLD, k_BHLD, v_BHLD = self._project(x_BLM, before)
        own, causal, seen = (k_BHLD, v_BHLD), self.config.objective == "causal", None
        # PyTorch's `is_causal` aligns the first query with the first key, which is wrong after earlier positions.
        if before:
            k_BHLD, v_BHLD = (torch.cat([*(one[i] for one in past), own[i]], 2) for i in (0, 1))
            seen = torch.ones(q_BHLD.shape[2], k_BHLD.shape[2], dtype=torch.bool, device=x_BLM.device).tril(before)
        y_BHLD = F.scaled_dot_product_attention(
            q_BHLD, k_BHLD, v_BHLD, attn_mask=seen, is_causal=causal and seen is None, enable_gqa=queries_per_key > 1
        )
        return F.linear(y_BHLD.transpose(1, 2).flatten(2), self.out_weight), own

    def _project(self, x_BLM: Tensor, before: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, [B, heads, L, D], after `before` earlier positions."""
        config = self.config
        keys, queries_per_key = config.key_heads // self.topology.mp.size, config.heads // config.key_heads
        qkv = F.linear(x_BLM, self.qkv_weight, self.qkv_bias)
        qkv = qkv.unflatten(-1, (keys, queries_per_key + 2, config.head_size))
        q_BHLD = qkv[:, :, :, :queries_per_key].flatten(2, 3).transpose(1, 2)
        k_BHLD, v_BHLD = (qkv[:, :, :, queries_per_key + i].transpose(1, 2) for i in (0, 1))
        if config.positions == "rope":
            # In the GEMM's dtype under autocast; in float64 for a float64 model.
            angles_LD = rotary_angles(before + x_BLM.shape[1], config.head_size, q_BHLD.device, q_BHLD.dtype)
            angles = [of[before:] for of in angles_LD]
            q_BHLD, k_BHLD = rotate(q_BHLD, *angles), rotate(k_BHLD, *angles)
        return q_BHLD, k_BHLD, v_BHLD


class DenseFeedForward(nn.Module):
    """Feed-forward network with a plain or gated activation, like an expert of the same config. H: `dense_size`.

    Attributes:
        up_weight, up_bias: [H / MP, M] and [H / MP], with a leading 2 for a gated activation; the bias may be None.
        down_weight, down_bias: [M, H / MP]; [M] or None.
    """

    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, topology: Topology, **factory_kwargs: Any) -> None:
        super().__init__()
        mp, dim, hidden = topology.mp, config.model_dim, config.dense_size
        if hidden % mp.size:
            raise ConfigError(f"hidden = {hidden} does not split over mp = {mp.size} ranks")
        self.topology, self.activation = topology, config.nonlinearity
        self.recorder: Recorder | None = None
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        split = len(halves)
        self.shardings = {"up_weight": {"mp": split}, "up_bias": {"mp": split}, "down_weight": {"mp": 1}}
        self.up_weight = normal_parameter(*halves, hidden, dim, std=dim**-0.5, group=mp, dim=split, **factory_kwargs)
        up_bias = zero_parameter(*halves, hidden, group=mp, dim=split, **factory_kwargs) if config.bias else None
        self.register_parameter("up_bias", up_bias)
        std = hidden**-0.5 * (2 * config.layers) ** -0.5
        self._std_of = {"up_weight": dim**-0.5, "down_weight": std}
        self.down_weight = normal_parameter(dim, hidden, std=std, group=mp, dim=1, **factory_kwargs)
        self.register_parameter("down_bias", zero_parameter(dim, **factory_kwargs) if config.bias else None)

    def reset_parameters(self) -> None:
        reset_direct_parameters(self, self._std_of)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Map [B, P, M] -> [B, P, M], with P positions per sample on this rank; collective over the MP group."""
        mp, counts = self.topology.mp, split.row_counts(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, self.recorder)
        bias = None if self.up_bias is None else self.up_bias.flatten()
        up_TH = F.linear(x_TM, self.up_weight.flatten(0, -2), bias).unflatten(1, self.up_weight.shape[:-1])
        y_TM = F.linear(define_activation(self.activation, up_TH), self.down_weight)
        y_BPM = reduce_scatter_rows(y_TM, mp, counts, self.recorder).view(x_BPM.shape)
        return y_BPM if self.down_bias is None else y_BPM + self.down_bias
