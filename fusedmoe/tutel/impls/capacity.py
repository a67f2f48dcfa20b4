"""How many rows of a rank an expert accepts (Tutel's rule)."""

from __future__ import annotations

from collections.abc import Callable

# Beyond it rows are rounded up to full tiles.
_TILED, _TILE = 256, 128


def capacity_of(
    factor: float, top_k: int, tokens: int, experts: int, most_chosen: Callable[[], int], alignment: int = 1
) -> int:
    """k·int(f·⌈T/E⌉) for f > 0; what is needed for f = 0; the smaller of it and k·int(−f·⌈T/E⌉) for f < 0.

    Worked example: 24 tokens, 4 experts, k = 2, f = 1.25 give 2·int(1.25·6) = 14; with alignment 4, 16.

    Args:
        most_chosen: tells how many tokens of any rank chose the same expert; asked for f ≤ 0 only.
        alignment: the result is rounded up to a multiple.
    """
    share = -(-tokens // experts)
    if factor > 0:
        capacity = top_k * int(factor * share)
    else:
        capacity = most_chosen()
        if factor < 0:
            capacity = min(capacity, top_k * int(-factor * share))
    return -(-capacity // alignment) * alignment


def alignment_of(shards: int, overlap_degree: int, megablocks_size: int = 0) -> int:
    """What Tutel rounds the capacity up to: a multiple of shards · degree, and of a block of its sparse products.

    This admits tokens, and so changes results with the degree. A degree that the scheduler picks counts as 1 here.
    """
    block = max(megablocks_size, 1)
    alignment = -(-shards * overlap_degree // block) * block
    return -(-alignment // _TILE) * _TILE if alignment > _TILED else alignment
