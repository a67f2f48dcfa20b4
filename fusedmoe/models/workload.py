"""What a block of a model amounts to, for the choice of a schedule."""

from __future__ import annotations

from fusedmoe.layers.orders import Sparse
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.parts import make_gate, make_order
from fusedmoe.schedule.workload import Workload


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
    rows = (make_order(config) or Sparse()).rows_per_token(make_gate(config), tokens)
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
    )
