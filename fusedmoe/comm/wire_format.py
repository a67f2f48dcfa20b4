"""Formats of rows between ranks: the tensors' own dtype, or fp8 (`Schedule(wire=…)`).

A token is encoded by its own rank and decoded by the ranks that compute with it. The levels of an all-to-all and the
all-gather over ESP copy bytes, and the scales of a token depend on no other token, so received values are the same with
every plan. Expert assignments, router weights and their gradients keep their dtypes, as do reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.wire import pack_fp8, packed_width, unpack_fp8
from fusedmoe.names import WIRES


@dataclass(frozen=True)
class WireFormat:
    """fp8 rows [n, M] as [n, M + 4·⌈M/128⌉] bytes (`fusedmoe.kernels.wire`). Autograd treats encoding as the identity.

    Attributes:
        encodes_results: rows of combine are encoded, in addition to those of dispatch.
    """

    encodes_results: bool = False

    def __str__(self) -> str:
        return WIRES[2] if self.encodes_results else WIRES[1]

    def encode(self, rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            raise ConfigError(f"wire={str(self)!r} got rows of {rows.dtype}; leave out the hook that has changed them")
        return pack_fp8(rows)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return unpack_fp8(encoded, dtype)

    def transfer(self, move: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return the rows that `move` sends and receives in this format."""
        return self.decode(move(self.encode(rows)), rows.dtype)

    def sum_encoded(self, encoded: Tensor, layout: Layout) -> Tensor:
        """Return encoded sums of encoded rows, in the order of `gather_sum`."""
        return self.encode(gather_sum(self.decode(encoded, torch.float32), layout))

    def for_group_sizes(self, ep: int, esp: int) -> WireFormat | None:
        """Return the format for groups of these sizes: None on one rank; results are sent over EP only."""
        return None if ep * esp == 1 else WireFormat(self.encodes_results and ep > 1)

    def element_bytes(self, width: int) -> tuple[float, float | None]:
        """Return the bytes per element of dispatched rows and of combined rows; None: those of the rows' dtype."""
        encoded = packed_width(width) / width
        return encoded, encoded if self.encodes_results else None


def find_wire_format(wire: object) -> WireFormat | None:
    """Return the format of a name in `WIRES`; None for "bf16" and None. Raise `ConfigError` for other values."""
    if wire is None or wire == WIRES[0]:
        return None
    if not isinstance(wire, str) or wire not in WIRES:
        raise ConfigError(f"wire = {wire!r}; choose {', '.join(WIRES)} (bf16: the tensors' own dtype)")
    return WireFormat(encodes_results=wire == WIRES[2])
