"""Metadata of an exchange: the terms on which ranks meet, and the errors where these do not fit together."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class ExpertCalls(IntEnum):
    """Ability of a rank to call its experts, which the ranks of an exchange compare."""

    EITHER = 0
    #: As a module, for all rows at once: hooks on the experts need it, and an exchange without a plan does it.
    MODULE = 1
    #: Chunk by chunk: a plan that is in a graph, or is that of whole blocks.
    CHUNKS = 2


def calls_conflict(ranks_QP: np.ndarray, calls_QP: np.ndarray) -> str | None:
    """Return the error where one rank must call its experts as a module and another one cannot; None without any.

    Args:
        calls_QP: `ExpertCalls` of each rank.
    """
    each = (sorted(ranks_QP[calls_QP == calls].tolist()) for calls in (ExpertCalls.MODULE, ExpertCalls.CHUNKS))
    module, chunks = each
    if not (module and chunks):
        return None
    return (
        f"rank {module[0]} calls its experts as a module, and rank {chunks[0]} chunk by chunk, by a plan in a compiled "
        "graph. Register the same hooks on every rank, and compile the layer on every rank or on none"
    )
