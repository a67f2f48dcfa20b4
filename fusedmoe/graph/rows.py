"""Irregular all-to-alls: rows of zeros, such as places that no token took, stay where they are (Lancet §5.1).

One small all-to-all tells every rank which rows come, then these alone travel; buffers keep their shapes, and what was
not sent is zero again on the other side. A row counts as zeros where all its bits are 0, so results are the same to the
last bit whatever a model sends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusedmoe.graph.instructions import argument_of, group_of, is_all_to_all, is_wait

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_all_to_all = torch.ops._c10d_functional.all_to_all_single
_wait = torch.ops._c10d_functional.wait_tensor


class Underway(NamedTuple):
    """An all-to-all that has started: the rows that come, and where each goes in a buffer of `shape`."""

    came_NM: Tensor
    place_N: Tensor
    shape: torch.Size


class Irregular:
    """Irregular all-to-alls of captured passes, and how many of their rows travelled.

    Attributes:
        rows: of all buffers that were sent. `sent`: those of them that travelled.
    """

    def __init__(self) -> None:
        self.rows = self.sent = 0

    def put_into(self, graph: fx.Graph) -> None:
        """Makes the all-to-alls of a graph irregular, but for vectors, complex numbers and unequal shares."""
        for node in graph.nodes:
            if not is_all_to_all(node) or len(node.users) != 1 or not is_wait(next(iter(node.users))):
                continue
            shares = {str(rows) for name in ("output", "input") for rows in argument_of(node, f"{name}_split_sizes")}
            sent = argument_of(node, "input")
            value = sent.meta["val"]
            if len(shares) != 1 or value.dim() < 2 or value.is_complex() or value.element_size() not in _BITS:
                continue
            wait = next(iter(node.users))
            ranks = len(argument_of(node, "input_split_sizes"))
            node.target, node.args, node.kwargs = self.start, (sent, ranks, group_of(node)), {}
            wait.target = self.wait

    def start(self, x: Tensor, ranks: int, group: object) -> Underway:
        """Sends an equal share of the first dimension to each rank. The host learns how many rows come."""
        x_NM = x.flatten(0, -2).contiguous()
        sends_N = (x_NM.view(_BITS[x.element_size()]) != 0).any(-1)
        share = [len(x_NM) // ranks] * ranks
        comes_N = _wait(_all_to_all(sends_N.to(torch.uint8), share, share, group)).bool()
        counts = torch.stack([comes_N.reshape(ranks, -1).sum(-1), sends_N.reshape(ranks, -1).sum(-1)]).tolist()
        self.rows += len(x_NM)
        self.sent += sum(counts[1])
        return Underway(_all_to_all(x_NM[sends_N], *counts, group), comes_N.nonzero().squeeze(-1), x.shape)

    def wait(self, underway: Underway) -> Tensor:
        came_NM, place_N, shape = underway
        out = came_NM.new_zeros(shape)
        out.flatten(0, -2).index_copy_(0, place_N, _wait(came_NM))
        return out
