"""What a block of a model amounts to, for the choice of a schedule."""

from __future__ import annotations

from fusedmoe.models.config import ModelConfig
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
    return Workload(
        batch=max(1, config.batch * esp // mp),
        seq_len=config.seq_len,
        model_dim=config.model_dim,
        hidden=config.hidden,
        experts=config.experts,
        k=config.k,
        capacity_factor=config.capacity_factor,
        expert=config.expert,
        ep=ep,
        esp=esp,
        itemsize=itemsize,
    )
