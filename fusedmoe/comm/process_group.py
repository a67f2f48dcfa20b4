"""Process groups that their members make, and nobody else; and how several of NCCL's go together.

`torch.distributed.new_group(use_local_synchronization=True)` is meant for that, but names a group by how many groups
the process has: members that have made different numbers of others (`new_group` of some ranks is enough) wait for each
other under different names. Where the default group is bound to a device it also splits that group's communicator, for
which NCCL waits for all ranks of the job. And it sorts ranks, where a group's order says who holds which experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fusedmoe.comm.group import Job

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def launch_in_order_of_issue() -> None:
    """Has NCCL launch what several communicators do in the order in which the host issues it (`runtime/nccl.md`).

    NCCL reads the variable when it first launches something: call this before. A value that is set already stays.
    """
    os.environ.setdefault(_LAUNCH_ORDER, "1")


def make_process_group(job: Job, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A new process group of these ranks, in this order. Collective over them: each makes the same ones in turn."""
    assert job.board is not None
    c10d: Any = dist.distributed_c10d
    name = job.board.name_group(ranks)
    with _unbound():
        handle, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(job.rank),
            list(ranks),
            dist.Backend(dist.get_backend()),
            c10d._get_default_store(),
            name,
            timeout=patience(job),
        )
    c10d._world.pg_group_ranks[handle] = {rank: place for place, rank in enumerate(ranks)}
    made: dist.ProcessGroup = handle
    return made


def patience(job: Job) -> timedelta:
    """The backend's own time-out. It comes after the job's, and ends what a rank that gave up had begun: Gloo's threads
    would otherwise keep its process from ending for as long as the default group's time-out says."""
    return timedelta(seconds=job.timeout_s + 2.0)


@contextmanager
def _unbound() -> Iterator[None]:
    """The default group without its device: its communicator is not split then."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
