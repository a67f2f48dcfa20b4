"""Summing the gradients of all copies of a parameter, in flat buffers of bounded size."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.replicas import Replica, local_part

# Small gradients share a collective, and no second copy of large ones is made.
BUCKET_BYTES = 32 * 2**20

_NONE, _DENSE, _SPARSE = 0, 1, 2


@torch.no_grad()
def reduce_gradients(copies: list[Replica], divisors: list[int], topology: Topology) -> None:
    """Replaces each gradient by the sum over its copies, divided by its divisor. Collective over the world.

    Sums run in at least float32, whatever the dtype of the gradient, and give the same bits on every rank that holds a
    copy. Where some rank has a gradient and another has none, the latter counts as zero: an optimizer steps the whole
    parameter on all ranks or on none, as it would in one process.

    Args:
        copies: the same parameters in the same order on every rank, save for names that only some ranks have.
        divisors: one for each.
    Raises:
        ConfigError: a sparse gradient (on every rank).
        RankError: another rank failed or did not come, in these sums or in the pass before.
    """
    present = _present(copies, topology)
    topology.check()  # the host has just waited for the pass: what it missed must not get into sums and steps
    buckets: dict[tuple[tuple[int, ...], torch.dtype, int], list[tuple[Replica, bool]]] = {}
    for replica, divisor, has in zip(copies, divisors, present, strict=True):
        dtype = torch.promote_types(replica.parameter.dtype, torch.float32)
        buckets.setdefault((replica.group.ranks, dtype, divisor), []).append((replica, has))
    # In an order that does not depend on which names this rank has: ranks share several of the groups.
    for (_, dtype, divisor), members in sorted(buckets.items(), key=lambda item: repr(item[0])):
        gradients = [_writable_gradient(replica) for replica, has in members if has]
        if members[0][0].group.size > 1:
            _reduce(members[0][0].group, gradients, dtype, divisor)
        elif divisor != 1:
            for gradient in gradients:
                gradient.div_(divisor)


def _present(copies: list[Replica], topology: Topology) -> list[bool]:
    """Whether any rank has a gradient, for each parameter; one collective for all parameters of a kind, and one wait of
    the host for all of them."""
    states = [_state(replica) for replica in copies]
    kinds: dict[tuple[int, ...], list[int]] = {}
    for i, replica in enumerate(copies):
        # A parameter split over ranks is one tensor and has a gradient on all of them or on none.
        kinds.setdefault(replica.group.ranks if replica.named else topology.world.ranks, []).append(i)
    found, in_order = [], [members for _, members in sorted(kinds.items())]
    for members in in_order:
        first = copies[members[0]]
        group = first.group if first.named else topology.world
        flags = torch.tensor([states[i] for i in members], dtype=torch.uint8, device=device_of(group))
        found.append(all_reduce(group, flags, "max", "exchange of which gradients exist"))
    if found:
        for i, state in zip(chain(*in_order), torch.cat(found).tolist(), strict=True):
            states[i] = state
    for replica, state in zip(copies, states, strict=True):
        if state == _SPARSE:
            refusal = f"the gradient of {replica.name} is sparse. Make its embedding with sparse=False."
            topology.fail("gradient all-reduce", refusal)
            raise ConfigError(f"rank {topology.rank}: gradient all-reduce over the {replica.group}: {refusal}")
    return [state != _NONE for state in states]


def _state(replica: Replica) -> int:
    gradient = replica.parameter.grad
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _writable_gradient(replica: Replica) -> Tensor:
    """This rank's part of the gradient, zeros if there is none, in memory that each element has to itself."""
    parameter = replica.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    part = local_part(parameter.grad)
    if any(stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)):
        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        part = local_part(parameter.grad)
    return part


def _reduce(group: Group, gradients: list[Tensor], dtype: torch.dtype, divisor: int) -> None:
    total = sum(gradient.numel() for gradient in gradients)
    bucket = _Bucket(group, min(total, BUCKET_BYTES // dtype.itemsize), dtype, divisor)
    for gradient in gradients:
        bucket.add(gradient)
    bucket.flush()


class _Bucket:
    """A flat buffer that gradients are laid into end to end; each time it is full, a collective empties it."""

    def __init__(self, group: Group, size: int, dtype: torch.dtype, divisor: int) -> None:
        self._group, self._divisor = group, divisor
        self._buffer = torch.empty(size, dtype=dtype, device=device_of(group))
        self._filled = 0
        self._pieces: list[tuple[Tensor, Tensor]] = []  # (part of a flat gradient, its place in the buffer)
        self._copied: list[tuple[Tensor, Tensor]] = []  # (gradient that cannot be viewed flat, its flat copy)

    def add(self, gradient: Tensor) -> None:
        flat = gradient.contiguous().view(-1)
        start = 0
        while start < flat.numel():
            size = min(flat.numel() - start, self._buffer.numel() - self._filled)
            place = self._buffer[self._filled : self._filled + size]
            piece = flat[start : start + size]
            place.copy_(piece)
            self._pieces.append((piece, place))
            start, self._filled = start + size, self._filled + size
            if self._filled == self._buffer.numel():
                self.flush()
        if not gradient.is_contiguous():
            self._copied.append((gradient, flat))

    def flush(self) -> None:
        if self._filled:
            filled = self._buffer[: self._filled]
            all_reduce(self._group, filled, operation="gradient all-reduce").div_(self._divisor)
            for piece, place in self._pieces:
                piece.copy_(place)
        for gradient, flat in self._copied:
            gradient.copy_(flat.view(gradient.shape))
        self._filled, self._pieces, self._copied = 0, [], []
