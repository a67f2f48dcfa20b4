"""One block of the transformer: attention, then experts (or a dense feed-forward), each behind a norm.

What its config says in words becomes parts, and a workload for the choice of a schedule; several blocks become one
pipeline of micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe import Along, MoELayer, Parts, PipelinedBlocks, Placements, Topology, pipeline
from fusedmoe.errors import ConfigError
from fusedmoe.experts import FeedForward
from fusedmoe.gates import GATES, Gate, SoftMoE
from fusedmoe.hooks import Hooks
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import Attention, DenseFeedForward, TokenSplit
from fusedmoe.orders import ORDERS, Order, Sparse
from fusedmoe.plans import Workload, uniform_share


def make_gate(config: ModelConfig) -> Gate:
    """The gate named in the config. Of experts, k and capacity_factor it is given those that it takes.

    Raises:
        ConfigError: no such gate or option, or experts that are not settled.
    """
    if config.gate not in GATES:
        raise ConfigError(f"gate = {config.gate!r} is not one of {', '.join(GATES)}")
    if config.experts is None:
        raise ConfigError("the number of experts is not settled: give `experts`, or call with_experts(ranks)")
    kind = GATES[config.gate]
    known = inspect.signature(kind).parameters
    arguments = {"experts": config.experts, "k": config.k, "capacity_factor": config.capacity_factor}
    arguments = {name: value for name, value in arguments.items() if name in known}
    for name in config.gate_options:
        if name not in known:
            raise ConfigError(f"gate {config.gate} has no option {name!r}; it has {', '.join(known)}")
    return kind(**{**arguments, **config.gate_options})


def make_experts(config: ModelConfig) -> FeedForward:
    """The experts of one layer."""
    return FeedForward(config.hidden, config.nonlinearity, config.bias)


def make_shared(config: ModelConfig) -> FeedForward | None:
    """The expert that every token visits, if there is one."""
    return FeedForward(config.shared_hidden, config.nonlinearity, config.bias) if config.shared_hidden else None


def make_order(config: ModelConfig) -> Order | None:
    """The order named in the config; None leaves it to the layer."""
    if config.order is None:
        return None
    if config.order not in ORDERS:
        raise ConfigError(f"order = {config.order!r} is not one of {', '.join(ORDERS)}")
    return ORDERS[config.order]()


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)), on this MP rank's slice of each sequence."""

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layer: int,
        *,
        dispatch: str = "direct",
        hooks: Sequence[Hooks] = (),
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm = make_norm(config, **make)
        number = layer // config.moe_every  # blocks without experts go with the next one that has them
        self.attention = Attention(config, topology, number, **make)
        self.experts_norm = make_norm(config, **make)
        self.experts: MoELayer | DenseFeedForward
        if has_experts(config, layer):
            self.experts = MoELayer(
                config.model_dim,
                make_gate(config),
                make_experts(config),
                order=make_order(config),
                topology=topology,
                dispatch=dispatch,
                hooks=hooks,
                shared=make_shared(config),
                mp_input="split",
                placement=placement,
                **make,
            )
            self.experts.number = number
        else:
            self.experts = DenseFeedForward(config, topology, **make)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Some samples, [B, P, M] -> [B, P, M], of which this rank has P positions each, and this rank's share of their
        auxiliary loss (a scalar)."""
        x_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), split)
        if isinstance(self.experts, DenseFeedForward):
            return x_BPM + self.experts(self.experts_norm(x_BPM), split), x_BPM.new_zeros(())
        x_BPM = x_BPM + self.experts(self.experts_norm(x_BPM))
        return x_BPM, self.experts.aux_loss


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Returns whether block `layer` (from 0) has experts: with `moe_every` = n, the last of every n blocks."""
    return (layer + 1) % config.moe_every == 0


def make_norm(
    config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.model_dim, device=device, dtype=dtype)


class BeforeExperts(nn.Module):
    """Blocks without experts, if any, and the attention of the one with experts.

    Attributes:
        split: of the positions of the batch that comes.
    """

    split: TokenSplit

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        *dense, last = blocks
        self.before = nn.ModuleList(dense)
        self.attention_norm, self.attention, self.experts_norm = last.attention_norm, last.attention, last.experts_norm

    def forward(self, x_BPM: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.before:
            x_BPM, _ = block(x_BPM, self.split)
        y_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), self.split)
        return y_BPM, self.experts_norm(y_BPM)


class BeforeExpertsInPositions(BeforeExperts):
    """Attention, and what else comes before experts, for some positions of all samples, on one MP rank.

    Keys and values go on to later positions.
    """

    def forward(  # type: ignore[override]
        self, x_BPM: Tensor, past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        own: list[Tensor] = []

        def attend(norm: nn.Module, attention: Attention) -> Tensor:
            at = len(own)
            y_BPM, found = attention.continued(norm(x_BPM), [(of[at], of[at + 1]) for of in past])
            own.extend(found)
            return x_BPM + y_BPM

        for block in self.before:
            assert isinstance(block, Block) and isinstance(block.experts, DenseFeedForward)
            x_BPM = attend(block.attention_norm, block.attention)
            part = TokenSplit(x_BPM.shape[1], (x_BPM.shape[1],), 0, x_BPM.shape[1])
            x_BPM = x_BPM + block.experts(block.experts_norm(x_BPM), part)
        x_BPM = attend(self.attention_norm, self.attention)
        return x_BPM, self.experts_norm(x_BPM), tuple(own)


class BlockPipeline:
    """Blocks up to the last one with experts, as one pipeline; the parameters stay the blocks' own.

    Attributes:
        pipelined: the blocks with experts.   rest: the blocks after the last of them.
    Raises:
        ConfigError: no block has experts, or one cannot be split (`fusedmoe.pipeline`). Making one is collective.
    """

    def __init__(self, blocks: Sequence[Block], recompute: bool, along: Along) -> None:
        groups = list(_groups(blocks))
        if not groups:
            raise ConfigError("micro-batches: the model has no experts, so there is nothing to overlap")
        attention = groups[0][-1].attention
        if along == "positions" and (attention.config.objective != "causal" or attention.topology.mp.size > 1):
            raise ConfigError("micro-batches along positions: only causal models with whole sequences on a rank (mp=1)")
        kind = BeforeExperts if along == "samples" else BeforeExpertsInPositions
        self._parts = [kind(group) for group in groups]
        experts = [group[-1].experts for group in groups]
        pairs = zip(self._parts, experts, strict=True)
        parts = [Parts(dense, layer) for dense, layer in pairs if isinstance(layer, MoELayer)]
        self.pipelined: PipelinedBlocks = pipeline(parts, along=along, recompute=recompute)
        self.rest = list(blocks)[sum(map(len, groups)) :]

    def __call__(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Returns the last block's output, and this rank's share of all auxiliary losses."""
        for part in self._parts:
            part.split = split
        y_BPM = self.pipelined(x_BPM)
        aux = x_BPM.new_zeros(())
        for layer in self.pipelined.experts:
            assert isinstance(layer, MoELayer)
            aux = aux + layer.aux_loss
        return y_BPM, aux


def _groups(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks that follow each other, of which only the last has experts."""
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if not isinstance(block.experts, DenseFeedForward):
            yield group
            group = []


def block_workload(config: ModelConfig, ep: int, esp: int, mp: int, itemsize: int) -> Workload:
    """The attention and the experts of one block, as one rank sees them.

    The tokens are those of the ranks that share an expert's shards: each has 1/mp of its replica's batch. Blocks
    without experts (`moe_every`) are not in it.

    Args:
        ep, esp, mp: ranks along these axes.
        itemsize: bytes of an element that travels.
    """
    assert config.experts is not None
    batch = max(1, config.batch * esp // mp)
    tokens = max(1, batch * config.seq_len // esp)
    # Of the gate and the order as they are made: some take one expert a token, or no capacity, whatever is asked for.
    gate, order = make_gate(config), make_order(config) or Sparse()
    rows = order.rows_per_token(gate, tokens)
    # Rows that are made of tokens, and no copies of them, travel each by itself.
    copies = order.copies and not isinstance(gate, SoftMoE)
    return Workload(
        batch=batch,
        seq_len=config.seq_len,
        model_dim=config.model_dim,
        hidden=config.hidden,
        experts=config.experts,
        k=1,
        capacity_factor=rows,
        expert=config.expert,
        ep=ep,
        esp=esp,
        itemsize=itemsize,
        share=uniform_share(config.experts, gate.k, ep) if copies else 1.0,
    )
