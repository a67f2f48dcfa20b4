"""A transformer's blocks in micro-batches: what each does before its experts, as `fusedmoe.pipeline` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.pipeline import Along, Parts, PipelinedBlocks, pipeline
from fusedmoe.models.attention import Attention
from fusedmoe.models.block import Block
from fusedmoe.models.feedforward import DenseFeedForward
from fusedmoe.models.sequence import TokenSplit


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
    """The same for some positions of all samples, on one MP rank; keys and values go on to those that follow."""

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


class MicroBatches:
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
        """What the last block with experts gives, and this rank's share of all auxiliary losses."""
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
