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


class ShardedModule(nn.Module):
    """Module with normally distributed or zero parameters, of which each rank holds a shard.

    Attributes:
        shardings: for sharded parameters, the dimension that is split over the MP group.
    """

    topology: Topology
    shardings: Mapping[str, Mapping[str, int]] = {}

    def register_parameters(
        self, specs: Mapping[str, tuple[Sequence[int], float] | None], **factory_kwargs: Any
    ) -> None:
        """Draw parameters from the shapes of whole parameters and standard deviations; None for an absent one."""
        self._std_of: dict[str, float] = getattr(self, "_std_of", {})
        for name, spec in specs.items():
            made = None
            if spec is not None:
                self._std_of[name] = spec[1]
                made = nn.Parameter(self._draw(name, *spec, **factory_kwargs))
            self.register_parameter(name, made)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the direct parameters again, for example after `to_empty`."""
        for name, parameter in self.named_parameters(recurse=False):
            shape = list(parameter.shape)
            if name in self.shardings:
                shape[self.shardings[name]["mp"]] *= self.topology.mp.size  # always divisible
            value = self._draw(name, shape, self._std_of[name], device="cpu", dtype=parameter.dtype)
            if not parameter.is_meta:
                parameter.copy_(value)

    def _draw(
        self,
        name: str,
        shape: Sequence[int],
        std: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        # A job that only plans leaves the generator unchanged.
        if not std or torch.empty(0, device=device).is_meta:
            return self._shard(name, torch.zeros(shape, device=device, dtype=dtype))
        whole = torch.randn(shape, dtype=torch.float32, device="cpu") * std
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else device
        return self._shard(name, whole).to(device=device, dtype=dtype)

    def _shard(self, name: str, whole: Tensor) -> Tensor:
        mp = self.topology.mp
        if name not in self.shardings or mp.size == 1:
            return whole
        # A view would keep the whole tensor alive.
        shards = whole.chunk(mp.size, self.shardings[name]["mp"])
        return shards[mp.index].clone(memory_format=torch.contiguous_format)


def rotary_angles(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, [length, head_dim / 2] each, computed in float64."""
    frequency_D = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angle_LD = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency_D
    return angle_LD.cos().to(dtype), angle_LD.sin().to(dtype)


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Apply rotary embeddings to channel pairs (i, i + D/2); keeps shape and dtype."""
    left, right = x_BHLD.chunk(2, dim=-1)
    return torch.cat((left * cos_LD - right * sin_LD, right * cos_LD + left * sin_LD), dim=-1).to(x_BHLD.dtype)


def residual_scale(config: ModelConfig) -> float:
    """Return the scale of output projections that preserves the variance of the residual stream (GPT-2)."""
    return (2 * config.layers) ** -0.5  # two residual branches per block


class Attention(ShardedModule):
    """Multi-head or grouped-query attention, causal or bidirectional.

    The rows of `qkv_weight` are ordered by key head: the query heads that share it, the key, the value, D rows each. A
    chunk of the rows is thus a set of whole heads, and one GEMM computes all three.

    Attributes:
        qkv_weight: [(heads + 2·kv_heads)·D / MP, M].
        out_weight, out_bias: [M, heads·D / MP]; [M] or None.
    """

    qkv_weight: nn.Parameter
    qkv_bias: nn.Parameter | None
    out_weight: nn.Parameter
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
        config, dim, head = self.config, self.config.model_dim, self.config.head_size
        rows = (config.heads + 2 * config.key_heads) * head
        specs: dict[str, tuple[Sequence[int], float] | None] = {
            "qkv_weight": ((rows, dim), dim**-0.5),
            "qkv_bias": ((rows,), 0.0) if config.bias else None,
            "out_weight": ((dim, config.heads * head), dim**-0.5 * residual_scale(config)),
            "out_bias": ((dim,), 0.0) if config.bias else None,
        }
        self.register_parameters(specs, **factory_kwargs)

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


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    Queries come from a latent vector of `q_rank` channels (None: directly from the token), keys and values from one of
    `kv_rank`. A key has N channels from the latent vector and R = `rope_dim` rotated channels that all heads share. A
    value has V channels.

    Attributes:
        q_down_weight, q_up_weight: [q_rank, M], and [heads·(N + R) / MP, q_rank or M]; the first may be None.
        kv_down_weight, kv_up_weight: [kv_rank + R, M] and [heads·(N + V) / MP, kv_rank].
        out_weight: [M, heads·V / MP].
    """

    q_down_weight: nn.Parameter | None
    q_up_weight: nn.Parameter
    kv_down_weight: nn.Parameter
    kv_up_weight: nn.Parameter
    shardings = {"q_up_weight": {"mp": 0}, "kv_up_weight": {"mp": 0}, "out_weight": {"mp": 1}}

    def _make_projections(self, **factory_kwargs: Any) -> None:
        config, dim = self.config, self.config.model_dim
        assert config.kv_rank is not None and config.rope_dim is not None and config.value_dim is not None
        heads, source = config.heads, config.q_rank or dim
        fixed = config.head_size - config.rope_dim
        shapes = {
            "q_down_weight": (config.q_rank or 0, dim),
            "q_up_weight": (heads * config.head_size, source),
            "kv_down_weight": (config.kv_rank + config.rope_dim, dim),
            "kv_up_weight": (heads * (fixed + config.value_dim), config.kv_rank),
        }
        specs: dict[str, tuple[Sequence[int], float] | None]
        specs = {name: (shape, shape[1] ** -0.5) for name, shape in shapes.items() if shape[0]}
        specs["out_weight"] = ((dim, heads * config.value_dim), dim**-0.5 * residual_scale(config))
        self.register_parameters({"q_down_weight": None} | specs | {"out_bias": None}, **factory_kwargs)
        self.q_norm = None if config.q_rank is None else nn.RMSNorm(config.q_rank, **factory_kwargs)
        self.kv_norm = nn.RMSNorm(config.kv_rank, **factory_kwargs)

    def _project(self, x_BLM: Tensor, before: int) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self.config, self.config.heads // self.topology.mp.size
        assert config.kv_rank is not None and config.rope_dim is not None
        fixed = config.head_size - config.rope_dim
        q_BLQ = x_BLM if self.q_norm is None else self.q_norm(F.linear(x_BLM, self.q_down_weight))  # type: ignore[arg-type]
        q_BHLD = F.linear(q_BLQ, self.q_up_weight).unflatten(-1, (heads, -1)).transpose(1, 2)
        latent = F.linear(x_BLM, self.kv_down_weight)
        c_BLC, r_BLR = latent.split([config.kv_rank, config.rope_dim], -1)
        kv = F.linear(self.kv_norm(c_BLC), self.kv_up_weight).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_BHLN, v_BHLV = kv[..., :fixed], kv[..., fixed:]
        angles_LD = rotary_angles(before + x_BLM.shape[1], config.rope_dim, q_BHLD.device, q_BHLD.dtype)
        angles = [of[before:] for of in angles_LD]
        k_BHLR = rotate(r_BLR[:, None], *angles).expand(-1, heads, -1, -1)
        q_BHLD = torch.cat([q_BHLD[..., :fixed], rotate(q_BHLD[..., fixed:], *angles)], -1)
        return q_BHLD, torch.cat([k_BHLN, k_BHLR], -1), v_BHLV


class DenseFeedForward(ShardedModule):
    """Feed-forward network with a plain or gated activation, like an expert of the same config. H: `dense_size`.

    Attributes:
        up_weight, up_bias: [H / MP, M] and [H / MP], with a leading 2 for a gated activation; the bias may be None.
        down_weight, down_bias: [M, H / MP]; [M] or None.
    """

    up_weight: nn.Parameter
    up_bias: nn.Parameter | None
    down_weight: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, topology: Topology, **factory_kwargs: Any) -> None:
        super().__init__()
        dim, hidden = config.model_dim, config.dense_size
        if hidden % topology.mp.size:
            raise ConfigError(f"hidden = {hidden} does not split over mp = {topology.mp.size} ranks")
        self.topology, self.activation = topology, config.nonlinearity
        self.recorder: Recorder | None = None
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        split = len(halves)
        self.shardings = {"up_weight": {"mp": split}, "up_bias": {"mp": split}, "down_weight": {"mp": 1}}
        specs: dict[str, tuple[Sequence[int], float] | None] = {
            "up_weight": ((*halves, hidden, dim), dim**-0.5),
            "up_bias": ((*halves, hidden), 0.0) if config.bias else None,
            "down_weight": ((dim, hidden), hidden**-0.5 * residual_scale(config)),
            "down_bias": ((dim,), 0.0) if config.bias else None,
        }
        self.register_parameters(specs, **factory_kwargs)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Map [B, P, M] -> [B, P, M], with P positions per sample on this rank; collective over the MP group."""
        mp, counts = self.topology.mp, split.row_counts(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, self.recorder)
        bias = None if self.up_bias is None else self.up_bias.flatten()
        up_TH = F.linear(x_TM, self.up_weight.flatten(0, -2), bias).unflatten(1, self.up_weight.shape[:-1])
        y_TM = F.linear(define_activation(self.activation, up_TH), self.down_weight)
        y_BPM = reduce_scatter_rows(y_TM, mp, counts, self.recorder).view(x_BPM.shape)
        return y_BPM if self.down_bias is None else y_BPM + self.down_bias
