"""Where rows go and come from without collectives: windows, and the addresses in them, as kernels are told.

A peer is far where this GPU cannot address its memory: it is on another node. Rows for it are first stored in memory of
this rank that NVSHMEM may read (staging), and go on from there; `fusedmoe/kernels/network.py` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Bounds(NamedTuple):
    """What ends the waits of kernels; see `fusedmoe.kernels.remote.wait`."""

    stop: Tensor
    record: Tensor
    limit_ns: int


class Network(NamedTuple):
    """How rows get to far peers: by NVSHMEM.

    Attributes:
        pe_W: int32, each rank's PE.
        spare: [1] int64 of the symmetric memory, which anybody may set and nobody reads.
        libraries: what kernels with NVSHMEM's functions are linked with.
    """

    pe_W: Tensor
    spare: Tensor
    libraries: Mapping[str, str]

    @property
    def options(self) -> dict[str, Any]:
        """What a launch of such a kernel takes."""
        return {"extern_libs": dict(self.libraries)}


def linked(network: Network | None) -> dict[str, Any]:
    """The same of a kernel that has the constexpr `NVSHMEM`."""
    return {"NVSHMEM": False} if network is None else {"NVSHMEM": True, **network.options}


def far_pointers(network: Network | None) -> tuple[Tensor | None, Tensor | None]:
    """PEs and the spare signal, for kernels."""
    return (None, None) if network is None else (network.pe_W, network.spare)


class Place(NamedTuple):
    """A window as kernels see it.

    Attributes:
        rows: [slots, W, C, M], this rank's copy: what the W ranks put here; or [slots, 1, C, M], the same rows for all.
        row_table: [W] all ranks' copies, 0 for those that are far.
        signals: [slots, W, T] int64 of each rank, T = C / tile where tiles have signals.   signal_table: of these.
        tile: rows for which there is one signal.
        credits: [W] int64, of each peer the last exchange of this rank's that it has read.   credit_table: of these.
        me: this rank's place.
        network: leads to far peers; None where none is.
        staging: [slots, W, C, M], rows for far peers on their way; None where none is, or where they have theirs.
    """

    rows: Tensor
    row_table: Tensor
    signals: Tensor
    signal_table: Tensor
    tile: int
    credits: Tensor
    credit_table: Tensor
    me: int
    network: Network | None = None
    staging: Tensor | None = None

    @property
    def slots(self) -> int:
        return self.rows.shape[0]

    @property
    def peers(self) -> int:
        return self.credits.numel()

    def slot(self, epoch: int) -> int:
        return (epoch - 1) % self.slots


class Addresses(NamedTuple):
    """Where each of some rows goes.

    Attributes:
        peer_N: int32, to whom.
        store_N: int64, what a kernel stores to: at the peer, or, where that is far, in staging, where rows that follow
            one another lie together.
        target_N: int64, of this rank's symmetric memory: where the row goes in the peer's. 0 where that is near; None
            where nobody is far.
        network: leads to far peers; None where none is.
    """

    peer_N: Tensor
    store_N: Tensor
    target_N: Tensor | None = None
    network: Network | None = None


class Mark(NamedTuple):
    """The signal of this rank at every peer: number `place` of their `signals`, whose addresses `table` [W] has."""

    signals: Tensor
    place: int
    table: Tensor


class Put(NamedTuple):
    """Rows that go to other ranks' memory.

    Attributes:
        like: of the rows' dtype.
        addresses: of the rows.   weight_N: factors, or None for 1.
        wanted_W: int32, rows of each peer.
        signal_W: int64, the addresses of what to set to `epoch` when they are all there; for far peers a spare one.
        mark: the same signal once more, for far peers.
    """

    like: Tensor
    addresses: Addresses
    weight_N: Tensor | None
    wanted_W: Tensor
    signal_W: Tensor
    epoch: int
    mark: Mark
