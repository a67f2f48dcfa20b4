"""Groups of ranks along one axis of the topology, and the pool of process groups that topologies lease from.

A process group needs threads and connections (Gloo) or a communicator and GPU memory (NCCL), so the pool creates one
per combination of ranks, purpose and timeout. Only its members take part.

PyTorch's `new_group(use_local_synchronization=True)` is unsuitable:

- Members that have created different numbers of groups wait for each other under different names.
- With a device-bound default group it splits that group's communicator, and NCCL then waits for all ranks.
- It sorts the ranks, but the order of a group determines which rank holds which experts.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

from fusedmoe.comm.failure.blame import connection_lost_error
from fusedmoe.comm.failure.board import Board, restart_count
from fusedmoe.comm.fixed_timeout_store import FixedTimeoutStore
from fusedmoe.compat.torch import default_store, destroy_group, make_group, register_group
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.handles import GraphHandle
from fusedmoe.threads import POLL_S, WorkerThread


@dataclass(frozen=True)
class Job:
    """State shared by all groups of a job. `board` is None only for one rank.

    `heaps`: open symmetric heaps of the job's groups.
    """

    rank: int = 0
    timeout_s: float = 300.0
    board: Board | None = None
    heaps: WeakSet[Any] = field(default_factory=WeakSet, compare=False, repr=False)

    def refuse_pickle(self) -> None:
        if self.board is not None:
            raise ConfigError(
                f"rank {self.rank}: cannot pickle or torch.save a model that spans several ranks: process groups "
                "belong to one process, and ranks hold different experts. Save model.state_dict() on each rank, or use "
                "fusedmoe.training.save_checkpoint; copy.deepcopy copies the model inside the process"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_pickle()
        return Job, (self.rank, self.timeout_s)


class Group:
    """The ranks along one axis of the topology, including this rank.

    Attributes:
        axis: the axis name, for errors.
        ranks: global ranks in group order.
        index: position of this rank in `ranks`.
        handle: the process group. None for one rank: every collective is then a no-op.
        downward: second process group for rows sent to lower ranks; None without duplex.
        uses_nccl: True if tensors must be on this rank's GPU (NCCL).
    """

    # Plain attributes: every collective of every step reads them.
    handle: dist.ProcessGroup | None
    downward: dist.ProcessGroup | None
    #: Name under which compiled graphs find this group (`fusedmoe.handles`); "" without such a graph.
    graph_name = ""
    graph_handle: GraphHandle | None = None

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...] = (0,),
        index: int = 0,
        handle: dist.ProcessGroup | None = None,
        job: Job | None = None,
        downward: dist.ProcessGroup | None = None,
    ) -> None:
        self.axis, self.ranks, self.index, self.size = axis, ranks, index, len(ranks)
        self.handle, self.downward = handle, downward
        self.job = job or Job()
        # None for one rank.
        self.board: Board = self.job.board  # type: ignore[assignment]
        self.uses_nccl = handle is not None and dist.get_backend(handle) == "nccl"

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that `close` deletes.
        if name in ("handle", "downward"):
            raise ConfigError(
                "this topology was closed and its process groups were released: use it before close(), or make another"
            )
        raise AttributeError(name)

    def close(self) -> None:
        """Release the process groups. Later collectives raise."""
        self.__dict__.pop("handle", None)
        self.__dict__.pop("downward", None)

    @property
    def is_open(self) -> bool:
        return "handle" in self.__dict__

    @property
    def identity(self) -> str:
        """The axis and the numbers of its process groups. Groups with equal identities share process groups."""
        # Numbered on first use, in the same order on all ranks.
        handles = [handle for handle in (self.handle, self.downward) if handle is not None]
        for handle in handles:
            if handle not in _ID_BY_PROCESS_GROUP:
                _ID_BY_PROCESS_GROUP[handle] = next(_group_id_counter)
        return f"{self.axis} {[_ID_BY_PROCESS_GROUP[handle] for handle in handles]}"

    def refuse(self, operation: str, text: str) -> NoReturn:
        """Raise an error about this rank's arguments before an operation starts, and post it to all ranks."""
        if self.job.board is None:
            raise ConfigError(f"{operation}: {text}")
        self.job.board.post(self.job.rank, operation, text)
        raise RankError(f"rank {self.job.rank}: {operation} over the {self}: {text}")

    def verdict_error(self, operation: str, verdict: object) -> RankError:
        return RankError(f"rank {self.job.rank}: {operation} over the {self} ended because {verdict}")

    def __getstate__(self) -> dict[str, Any]:
        self.job.refuse_pickle()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __str__(self) -> str:
        return f"{self.axis} group {list(self.ranks)}"


# Numbers, because topologies that share process groups may differ between ranks.
_ID_BY_PROCESS_GROUP: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_group_id_counter = count()

# Seconds that a peer's process may take to end after a failed PyTorch collective.
_MAX_SLOW_EXIT_S = 6.0

#: Number of a rank's usable process group (0 if none), and the largest number so far.
GroupNumber = tuple[int, int]


def set_nccl_launch_order() -> None:
    """Make NCCL launch operations of several communicators in host order. A user's setting has precedence."""
    # NCCL reads the variable at its first launch.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@dataclass(eq=False)
class PooledGroup:
    """A pooled process group, its number among the groups of equal ranks and purpose, and its active leases."""

    key: tuple[str, float]
    # `torch.distributed` owns the process group until it is destroyed.
    handle: ref[dist.ProcessGroup]
    group_number: int
    num_leases: int = 0


class ProcessGroups:
    """This rank's process groups, for reuse by later topologies."""

    def __init__(self) -> None:
        self._pooled_groups: dict[tuple[str, float], PooledGroup] = {}
        self._last_group_numbers: dict[str, int] = {}
        self._num_layers_by_ranks: Counter[tuple[int, ...]] = Counter()

    def next_layer_number(self, ranks: tuple[int, ...]) -> int:
        self._num_layers_by_ranks[ranks] += 1
        return self._num_layers_by_ranks[ranks]

    def group_numbers(self, timeout_s: float) -> dict[str, GroupNumber]:
        """Return the numbers of this rank's process groups by ranks and purpose."""
        alive = {key: pooled.group_number for key, pooled in self._pooled_groups.items() if pooled.handle() is not None}
        return {name: (alive.get((name, timeout_s), 0), last) for name, last in self._last_group_numbers.items()}

    def lease(
        self,
        job: Job,
        purpose: str,
        ranks: Sequence[int],
        numbers_of_ranks: Sequence[Mapping[str, GroupNumber]] | None = None,
    ) -> PooledGroup:
        """Lease the process group of these ranks, in this order, for one purpose. Collective over them.

        `numbers_of_ranks`: `group_numbers()` of every rank, in rank order; None exchanges it here.
        """
        ranks = tuple(ranks)
        name = f"{purpose}/{','.join(map(str, ranks))}"
        key = (name, job.timeout_s)
        if numbers_of_ranks is None:
            own = self.group_numbers(job.timeout_s).get(name, (0, 0))
            assert job.board is not None
            operation = f"making a process group for {purpose}"
            numbers_of_ranks = [
                {name: value} for value in job.board.all_gather_json(ranks, own, job.timeout_s, operation=operation)
            ]
        of_ranks = [rank.get(name, (0, 0)) for rank in numbers_of_ranks]
        # All ranks reuse a process group or all create one: garbage collection may differ between ranks.
        numbers = {number for number, _ in of_ranks}
        if len(numbers) > 1 or 0 in numbers:
            number = max(last for _, last in of_ranks) + 1
            handle = _make_process_group(job, ranks, f"fusedmoe/{restart_count()}/{name}/{number}")
            self._pooled_groups[key], self._last_group_numbers[name] = PooledGroup(key, ref(handle), number), number
        self._pooled_groups[key].num_leases += 1
        return self._pooled_groups[key]

    def release(self, groups: Iterable[PooledGroup]) -> dict[str, int]:
        """End a lease of each group. Return the numbers of remaining leases, by ranks and purpose."""
        # Unleased process groups are kept for the next topology until `destroy`.
        for pooled in groups:
            pooled.num_leases -= 1
        return {pooled.key[0]: pooled.num_leases for pooled in groups if self._pooled_groups.get(pooled.key) is pooled}

    def destroy(self, pooled: PooledGroup) -> None:
        """Destroy a process group that no member uses, unless a newer one has replaced it."""
        if self._pooled_groups.get(pooled.key) is pooled:
            del self._pooled_groups[pooled.key]
            handle = pooled.handle()
            if handle is not None:  # None would mean the default group
                destroy_group(handle)


def device_backend(handle: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend of a process group on a type of device, such as "gloo" on CPUs after `init_process_group()`.

    `torch.distributed.get_backend` returns the initialisation string, "undefined" without one.
    """
    by_device = dict(pair.split(":", 1) for pair in dist.get_backend_config(handle).split(","))
    return by_device.get(device_type) or dist.get_backend(handle)


_POOL_BY_DEFAULT_GROUP: WeakKeyDictionary[dist.ProcessGroup, ProcessGroups] = WeakKeyDictionary()


def process_groups() -> ProcessGroups:
    """Return the pool of the current default group, which must be initialised."""
    # Weak references: the pool may outlive its job, as PyTorch modules imported late keep the default group in default
    # arguments.
    default: Any = dist.group.WORLD
    return _POOL_BY_DEFAULT_GROUP.setdefault(default, ProcessGroups())


def _make_process_group(job: Job, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    """Create a process group of these ranks, in this order. Collective over them."""
    operation, where, timeout = "making a process group", f"ranks {list(ranks)}", _backend_timeout(job)
    deadline, board = time.monotonic() + timeout.total_seconds(), job.board
    assert board is not None
    backend, bound = dist.Backend(dist.get_backend()), _connect_timeout(timeout)
    # Gloo waits a fifth as long for a rank's address as for a connection, less than a rank may pause.
    store = default_store() if bound == timeout else FixedTimeoutStore(default_store(), timeout)
    make = partial(make_group, ranks, ranks.index(job.rank), backend, store, name, bound)
    try:
        with _without_bound_device():
            # In a thread that can be abandoned: a client of a stopped store host blocks forever.
            creation, has_recorded_wait = WorkerThread("fusedmoe-group").submit(make), False
            while not (creation.done() or time.monotonic() > deadline or board.read() or board.ended_ranks(ranks)):
                try:
                    creation.exception(POLL_S)
                except NotDone:
                    board.record_wait(f"{operation} over {where}", ranks)
                    has_recorded_wait = True
            handle = creation.result(0.0)
            handle.set_timeout(timeout)
            if has_recorded_wait:
                board.record_wait("")
    except (RuntimeError, NotDone) as error:
        if isinstance(error, NotDone):
            creation.add_done_callback(_destroy_late_group)
        if str(error) in _OUT_OF_RESOURCES_TEXTS:
            text = f"{error}. Raise the limits on memory and threads (ulimit -v, ulimit -u, the container's)"
            verdict = board.post(job.rank, operation, text)
            raise RankError(f"rank {job.rank}: {operation} over {where} ended because {verdict}") from error
        # After a timeout, a missing rank has been missing for long.
        reason = str(error) or f"not all ranks joined within {timeout.total_seconds():g} s"
        exit_s = max(1.0, deadline - time.monotonic())
        raise connection_lost_error(
            board, ranks, operation, where, reason, exit_s, board.absent_ranks(ranks)
        ) from error
    register_group(handle, ranks)
    _STORE_BY_PROCESS_GROUP[handle] = store
    return handle


# C++ holds no reference to a store written in Python.
_STORE_BY_PROCESS_GROUP: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


def _destroy_late_group(creation: Future[Any]) -> None:
    if creation.exception() is None:
        handle = creation.result()
        register_group(handle, ())
        # It may have been destroyed with the default group.
        with suppress(ValueError):
            dist.destroy_process_group(handle)


# Gloo's error texts when the system cannot start another thread.
_OUT_OF_RESOURCES_TEXTS = {os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM)}


def _backend_timeout(job: Job) -> timedelta:
    # Bounds operations of an abandoned wait: Gloo's threads would keep the process alive for the default group's
    # timeout.
    return timedelta(seconds=job.timeout_s + 2.0)


@contextmanager
def limit_collective_time(group: Group, operation: str) -> Iterator[None]:
    """Bound PyTorch collectives over a group by the job's timeout, and record the wait on the failure board.

    Raises:
        RankError: a connection broke, or a rank did not join. Other errors propagate unchanged.
    """
    job, handle = group.job, group.handle
    if handle is None:
        yield
        return
    handle.set_timeout(timedelta(seconds=job.timeout_s))
    try:
        with group.board.recorded_wait(f"{operation} over the {group}", group.ranks):
            yield
    except RuntimeError as error:
        reason = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in reason:
            raise
        exit_s, absent = min(_MAX_SLOW_EXIT_S, group.board.exit_s), []
        # After a timeout, a missing rank has been missing for long.
        if "Timed out" in reason:
            exit_s, absent = 1.0, group.board.absent_ranks(group.ranks)
        raise connection_lost_error(
            group.board, group.ranks, operation, f"the {group}", reason, exit_s, absent
        ) from error
    finally:
        handle.set_timeout(_backend_timeout(job))


def _connect_timeout(timeout: timedelta) -> timedelta:
    if dist.get_backend() != "gloo":
        return timeout
    # Gloo waits five times this long for a connection, and the wait cannot be interrupted.
    return min(timeout, max(timeout / 5, timedelta(seconds=2)))


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Clear the default group's bound device, so that PyTorch does not split its communicator."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
