"""What a selective activation checkpoint keeps so that nothing travels twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedmoe.autograd import exchange_operators, gate, order  # noqa: F401  they register the operators

#: Which experts see a token, and all that ranks do together: for a policy of one's own.
KEPT = frozenset(
    getattr(torch.ops.fusedmoe, name).default
    for name in ("gate", "gate_from_logits", "order", "meet", "dispatch", "combine")
) | {torch.ops.aten.topk.default}


def save_communication() -> tuple[Any, Any]:
    """Contexts for a checkpoint that keeps routing and the rows that have travelled, and computes all else again.

        torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=fusedmoe.training.save_communication
        )

    Each exchange between ranks happens once, and experts chosen among equals are the same in both passes. It keeps, for
    a layer, two numbers for each of a token's experts, the rows received, and the results sent back. With a schedule
    the layer exchanges again as it computes again: chunks are no operators.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
