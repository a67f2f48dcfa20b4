"""Collectives on whole tensors with equal parts, by the library's on rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.comm import collectives
from fusedmoe.comm.all_to_all import Traffic, make_all_to_all
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.tutel.impls.placement import topology_of


def part_of(length: int, group: Group) -> int:
    """How much of a dimension each rank has.

    Raises:
        ConfigError: the ranks cannot have equal parts.
    """
    if length % group.size:
        raise ConfigError(f"a dimension of {length} has no equal parts for the {group.size} ranks of the {group}")
    return length // group.size


def swap_parts(group: Group, rows: Tensor) -> Tensor:
    """[W·n, …]: part i goes to rank i, and the parts that come lie in rank order. Its own adjoint."""
    counts = [part_of(len(rows), group)] * group.size
    return collectives.all_to_all_rows(group, rows, counts, counts)


def swap_parts_2dh(handle: dist.ProcessGroup | None, rows: Tensor) -> Tensor:
    """The same by the two-level algorithm, inside nodes of LOCAL_SIZE ranks first."""
    algorithm = make_all_to_all("2dh", topology_of(handle))
    size = algorithm.group.size
    count = part_of(len(rows), algorithm.group)
    traffic = Traffic([count] * size, [count] * size, np.full((size, size), count))
    return algorithm.exchange(rows, traffic, "all-to-all")


def start_swap(group: Group, rows: Tensor) -> Callable[[], Tensor]:
    """Starts `swap_parts`; the result is called for."""
    if group.handle is None:
        return lambda: rows
    part_of(len(rows), group)
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=group.handle, async_op=True)

    def finish() -> Tensor:
        collectives.wait(work, group, "all-to-all")
        return out

    return finish


def gather_parts(group: Group, rows: Tensor) -> Tensor:
    """[n, …] of each rank -> [W·n, …]."""
    return collectives.all_gather_rows(group, rows, [len(rows)] * group.size)


def sum_and_split(group: Group, rows: Tensor) -> Tensor:
    """[W·n, …] of each rank -> this rank's [n, …] of the sum, taken in rank order."""
    return collectives.reduce_scatter_rows(group, rows, [part_of(len(rows), group)] * group.size)


def own_part(group: Group, rows: Tensor) -> Tensor:
    """This rank's [n, …] of [W·n, …]."""
    count = part_of(len(rows), group)
    return rows[group.index * count : (group.index + 1) * count]


def padded_parts(flat: Tensor, group: Group) -> Tensor:
    """A flat tensor with zeros up to equal parts."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % group.size))
