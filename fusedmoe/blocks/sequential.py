"""Blocks without micro-batches: sequentially, each layer with its own plans."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedmoe.blocks.batch import find_input_error
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.recorder import Recorder


def run_sequentially(
    blocks: Sequence[MoEBlock], x: Tensor, mask: Tensor | None, recorder: Recorder | None = None
) -> Tensor:
    """Run the blocks on a whole batch, [B, …, M] -> [B, …, M]. Collective."""
    with blocks[0].layer.topology.guard("pipeline"):
        if (refusal := find_input_error(blocks, x)) is not None:
            _refuse(blocks[0], refusal)
        for block in blocks:
            x = _run_block(block, x, mask, recorder)
    return x


def _run_block(block: MoEBlock, x: Tensor, mask: Tensor | None, recorder: Recorder | None) -> Tensor:
    block.layer.recorder = recorder
    try:
        y, u = block.dense.run_unsplit(x)
    except ConfigError as error:
        _refuse(block, str(error))
        raise
    with block.experts.without_tasks():
        # `layer` includes the shared expert and the hooks.
        z: Tensor = y + block.layer(u, mask)
    return z


def _refuse(block: MoEBlock, refusal: str) -> None:
    """Raise `refusal` on all ranks: at their next token exchange, or now if they may wait for each other before it."""
    if block.dense.has_collectives:
        block.layer.checks.refuse(refusal)
    block.layer.refuse(refusal)
