"""The dense parts of a block, split over the MP group: attention by its heads, a feed-forward by its hidden dim.

Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3) with sequence parallelism (Korthikanti et al. 2022,
section 4.2): between these parts every MP rank holds a slice of each sequence. An all-gather brings the sequences
together in front of the heads or hidden units of this rank, a reduce-scatter adds these up behind them. Backward, the
two change places.

The values of parameters do not depend on how many ranks hold them. Every rank draws the whole tensor, on the CPU in
float32 from torch's default generator, and keeps its shard: after `torch.manual_seed(seed)` a model is the same model
on one rank and on forty-eight, on every device and in every dtype, and the ranks' generators stay in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe import Topology
from fusedmoe.autograd import gather_rows, reduce_scatter_rows, split_counts
from fusedmoe.comm import Group
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS, define_activation
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.recorder import Recorder, in_layer, recorded

_BASE = 10000.0


@dataclass(frozen=True)
class TokenSplit:
    """Sequences of L positions, of each of which every MP rank has the same slice, as `torch.chunk` would split L.

    Any number of samples can be split so, some of a batch (a micro-batch) as well as all: rank m's rows are those of
    [B, P_m, M], sample by sample, so that some samples are a slice of them.

    Worked example: L = 5, three ranks: lengths (2, 2, 1), the second rank holds positions 2 and 3 of every sample.
    Ranks may be left without positions: L = 5, four ranks: lengths (2, 2, 1, 0).

    Attributes:
        length: L.   lengths: positions of each MP rank.   start, stop: this rank's positions.
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

    def rows(self, samples: int) -> list[int]:
        """Returns the rows of each MP rank of so many samples."""
        return [samples * length for length in self.lengths]

    def by_sample(self, rows_TM: Tensor, samples: int) -> Tensor:
        """Maps rows as the ranks have them, rank after rank (after a gather), to [samples, L, M]."""
        # Of one rank or one sample the two orders are the same: nothing is copied.
        if len(self.lengths) == 1 or samples == 1:
            return rows_TM.view(samples, self.length, rows_TM.shape[-1])
        parts = rows_TM.split(self.rows(samples))
        shaped = (part.view(samples, n, part.shape[-1]) for part, n in zip(parts, self.lengths, strict=True))
        return torch.cat(list(shaped), dim=1)

    def by_rank(self, y_BLM: Tensor) -> Tensor:
        """Maps [samples, L, M] to rows in the order of the ranks (before a reduce-scatter)."""
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
    """A parameter of normal numbers; with a group, this rank's chunk of them along `dim`.

    On the meta device it is without values, as everything there.
    """
    # Nothing is drawn there: the generator of a job that only plans stays where it was.
    if torch.empty(0, device=device).is_meta:
        return nn.Parameter(shard(torch.empty(shape, device=device, dtype=dtype), group, dim))
    # The whole tensor on every rank, so that all ranks' generators stay in step.
    whole = torch.randn(shape, dtype=torch.float32, device="cpu") * std
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    return nn.Parameter(shard(whole, group, dim).to(device=device, dtype=dtype))


def zero_parameter(*shape: int, group: Group | None = None, dim: int = 0, **make: Any) -> nn.Parameter:
    """A parameter of zeros; with a group, this rank's chunk along `dim`."""
    return nn.Parameter(shard(torch.zeros(shape, **make), group, dim))


def shard(whole: Tensor, group: Group | None, dim: int) -> Tensor:
    """This rank's chunk of a tensor; the size along `dim` is a multiple of the group's."""
    if group is None or group.size == 1:
        return whole
    # In memory of its own: a view would keep the whole.
    return whole.chunk(group.size, dim)[group.index].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def fill_parameters(module: Any, std_of: Mapping[str, float]) -> None:
    """Draw a module's own parameters anew, as `normal_parameter` does; parameters without std become zeros."""
    for name, parameter in module.named_parameters(recurse=False):
        shape, dim, group = list(parameter.shape), 0, None
        if (axes := getattr(module, "shardings", {}).get(name)) is not None:
            dim, group = axes["mp"], module.topology.mp
            shape[dim] *= group.size  # they divide
        value = torch.zeros_like(parameter, device="cpu")
        if name in std_of:
            value = normal_parameter(
                *shape, std=std_of[name], group=group, dim=dim, device="cpu", dtype=parameter.dtype
            )
        if not parameter.is_meta:
            parameter.copy_(value)


def rotary_angles(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles, both [length, head_dim / 2], computed in float64."""
    turn = _BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angle_LD = torch.arange(length, device=device, dtype=torch.float64)[:, None] * turn
    return angle_LD.cos().to(dtype), angle_LD.sin().to(dtype)


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Turns channel i together with channel i + D/2, position by position; same shape and dtype."""
    left, right = x_BHLD.chunk(2, dim=-1)
    return torch.cat((left * cos_LD - right * sin_LD, right * cos_LD + left * sin_LD), dim=-1).to(x_BHLD.dtype)


class Attention(nn.Module):
    """Multi-head or grouped-query attention, causal or over the whole sequence.

    The rows of `qkv_weight` come key head by key head: the query heads that share it, the key, the value, D rows each.
    So a chunk of the rows is a set of whole heads, and one product makes all three.

    Attributes:
        qkv_weight: [(heads + 2·kv_heads)·D / MP, M].   out_weight: [M, heads·D / MP].   out_bias: [M] or None.
    """

    qkv_bias: nn.Parameter | None
    out_bias: nn.Parameter | None
    shardings = {"qkv_weight": {"mp": 0}, "qkv_bias": {"mp": 0}, "out_weight": {"mp": 1}}

    def __init__(self, config: ModelConfig, topology: Topology, layer: int, **make: Any) -> None:
        super().__init__()
        mp = topology.mp
        if config.key_heads % mp.size:
            raise ConfigError(
                f"{config.key_heads} heads (of keys) do not split over mp = {mp.size} ranks; "
                "choose an mp that divides them, or other heads"
            )
        self.config, self.topology, self.layer = config, topology, layer
        self.recorder: Recorder | None = None
        dim, head = config.model_dim, config.head_dim
        rows = (config.heads + 2 * config.key_heads) * head
        self.qkv_weight = normal_parameter(rows, dim, std=dim**-0.5, group=mp, **make)
        self.register_parameter("qkv_bias", zero_parameter(rows, group=mp, **make) if config.bias else None)
        # Two residual branches a block: together they keep the variance of the stream (GPT-2).
        std = dim**-0.5 * (2 * config.layers) ** -0.5
        self._std_of = {"qkv_weight": dim**-0.5, "out_weight": std}
        self.out_weight = normal_parameter(dim, config.heads * head, std=std, group=mp, dim=1, **make)
        self.register_parameter("out_bias", zero_parameter(dim, **make) if config.bias else None)

    def reset_parameters(self) -> None:
        fill_parameters(self, self._std_of)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Maps samples, [B, P, M] -> [B, P, M], each with P positions on this rank; collective over the MP group."""
        mp, recorder = self.topology.mp, in_layer(self.recorder, self.layer)
        # What the product would be cast to is cast before it travels: half as many bytes cross.
        if torch.is_autocast_enabled(x_BPM.device.type):
            x_BPM = x_BPM.to(torch.get_autocast_dtype(x_BPM.device.type))
        counts = split.rows(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, recorder)
        x_BLM = split.by_sample(x_TM, len(x_BPM))
        y_BLM = recorded(recorder, self._heads, x_BLM, kind="attention")
        y_SM = reduce_scatter_rows(split.by_rank(y_BLM), mp, counts, recorder)
        y_BPM = y_SM.view(x_BPM.shape)
        return y_BPM if self.out_bias is None else y_BPM + self.out_bias

    def continued(self, x_BPM: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Maps positions after others, [B, P, M] -> [B, P, M], on one MP rank; also returns their keys and values,
        [B, heads, P, D] each, which `past` has of the positions before."""
        y_BPM, own = self._attend(x_BPM, past)
        return (y_BPM if self.out_bias is None else y_BPM + self.out_bias), own

    def _heads(self, x_BLM: Tensor) -> Tensor:
        return self._attend(x_BLM, ())[0]

    def _attend(self, x_BLM: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """This rank's heads over whole sequences: [B, L, M] -> [B, L, M], its part of the sum; and keys and values."""
        config, mp = self.config, self.topology.mp.size
        keys, sharing = config.key_heads // mp, config.heads // config.key_heads
        qkv = F.linear(x_BLM, self.qkv_weight, self.qkv_bias)
        qkv = qkv.unflatten(-1, (keys, sharing + 2, config.head_dim))
        q_BHLD = qkv[:, :, :, :sharing].flatten(2, 3).transpose(1, 2)
        k_BHLD, v_BHLD = (qkv[:, :, :, sharing + i].transpose(1, 2) for i in (0, 1))
        before = sum(keys.shape[2] for keys, _ in past)
        if config.positions == "rope":
            # In the dtype of the products under autocast, in float64 throughout a float64 model.
            every = rotary_angles(before + x_BLM.shape[1], config.head_dim, q_BHLD.device, q_BHLD.dtype)
            angles = [of[before:] for of in every]
            q_BHLD, k_BHLD = rotate(q_BHLD, *angles), rotate(k_BHLD, *angles)
        own, causal, seen = (k_BHLD, v_BHLD), config.objective == "causal", None
        # PyTorch's `is_causal` aligns the first query with the first key: after a past, a mask says what is seen.
        if before:
            k_BHLD, v_BHLD = (torch.cat([*(one[i] for one in past), own[i]], 2) for i in (0, 1))
            seen = torch.ones(q_BHLD.shape[2], k_BHLD.shape[2], dtype=torch.bool, device=x_BLM.device).tril(before)
        y_BHLD = F.scaled_dot_product_attention(
            q_BHLD, k_BHLD, v_BHLD, attn_mask=seen, is_causal=causal and seen is None, enable_gqa=sharing > 1
        )
        return F.linear(y_BHLD.transpose(1, 2).flatten(2), self.out_weight), own


class DenseFeedForward(nn.Module):
    """Two matrices with an activation between them, which may be a gated one: what an expert of the same config is.

    Attributes:
        up_weight: [H / MP, M], or [2, H / MP, M] for a gated activation.   up_bias: [H / MP] or [2, H / MP], or None.
        down_weight: [M, H / MP].   down_bias: [M] or None.
    """

    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, topology: Topology, **make: Any) -> None:
        super().__init__()
        mp, dim, hidden = topology.mp, config.model_dim, config.hidden
        if hidden % mp.size:
            raise ConfigError(f"hidden = {hidden} does not split over mp = {mp.size} ranks")
        self.topology, self.activation = topology, config.nonlinearity
        self.recorder: Recorder | None = None
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        split = len(halves)
        self.shardings = {"up_weight": {"mp": split}, "up_bias": {"mp": split}, "down_weight": {"mp": 1}}
        self.up_weight = normal_parameter(*halves, hidden, dim, std=dim**-0.5, group=mp, dim=split, **make)
        up_bias = zero_parameter(*halves, hidden, group=mp, dim=split, **make) if config.bias else None
        self.register_parameter("up_bias", up_bias)
        std = hidden**-0.5 * (2 * config.layers) ** -0.5
        self._std_of = {"up_weight": dim**-0.5, "down_weight": std}
        self.down_weight = normal_parameter(dim, hidden, std=std, group=mp, dim=1, **make)
        self.register_parameter("down_bias", zero_parameter(dim, **make) if config.bias else None)

    def reset_parameters(self) -> None:
        fill_parameters(self, self._std_of)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Maps samples, [B, P, M] -> [B, P, M], each with P positions on this rank; collective over the MP group."""
        mp, counts = self.topology.mp, split.rows(len(x_BPM))
        # Rows stay in the order in which they come together, rank after rank: nothing here looks at their neighbours.
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, self.recorder)
        bias = None if self.up_bias is None else self.up_bias.flatten()
        up_TH = F.linear(x_TM, self.up_weight.flatten(0, -2), bias).unflatten(1, self.up_weight.shape[:-1])
        y_TM = F.linear(define_activation(self.activation, up_TH), self.down_weight)
        y_BPM = reduce_scatter_rows(y_TM, mp, counts, self.recorder).view(x_BPM.shape)
        return y_BPM if self.down_bias is None else y_BPM + self.down_bias
