"""All-to-alls of some rows of a buffer: rows of zeros, or that nobody asked for, stay where they are (Lancet §5.1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusedmoe.graph.instructions import argument_of, group_of, is_all_to_all, is_wait

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_all_to_all = torch.ops._c10d_functional.all_to_all_single
_wait = torch.ops._c10d_functional.wait_tensor


class StartedAllToAll(NamedTuple):
    """An all-to-all that has started: the rows that come, and the place of each in the buffer. `sent`: how many go."""

    came_NM: Tensor
    place_N: Tensor
    sent: int

    def rows(self) -> Tensor:
        """The rows, once they are here."""
        came_NM: Tensor = _wait(self.came_NM)
        return came_NM


def start_some(rows_NM: Tensor, sends_P: Tensor, ranks: int, group: Any) -> StartedAllToAll:
    """Sends rows of a buffer of P places, of which each rank gets an equal share. The host learns how many rows come.

    Args:
        rows_NM: the rows that are sent, in the order of their places.
        sends_P: bool, the places that have one.
    """
    share = [len(sends_P) // ranks] * ranks
    comes_P = _wait(_all_to_all(sends_P.to(torch.uint8), share, share, group)).bool()
    counts = torch.stack([comes_P.reshape(ranks, -1).sum(-1), sends_P.reshape(ranks, -1).sum(-1)]).tolist()
    return StartedAllToAll(_all_to_all(rows_NM, *counts, group), comes_P.nonzero().squeeze(-1), sum(counts[1]))


class UnderWay(NamedTuple):
    """What `IrregularAllToAlls` has started, and the shape of the buffer."""

    started: StartedAllToAll
    shape: torch.Size


class IrregularAllToAlls:
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

    def start(self, x: Tensor, ranks: int, group: object) -> UnderWay:
        """Sends an equal share of the first dimension to each rank."""
        x_NM = x.flatten(0, -2).contiguous()
        sends_N = (x_NM.view(_BITS[x.element_size()]) != 0).any(-1)
        started = start_some(x_NM[sends_N], sends_N, ranks, group)
        self.rows += len(x_NM)
        self.sent += started.sent
        return UnderWay(started, x.shape)

    def wait(self, underway: UnderWay) -> Tensor:
        started, shape = underway
        came_NM = started.rows()
        out = came_NM.new_zeros(shape)
        out.flatten(0, -2).index_copy_(0, started.place_N, came_NM)
        return out
