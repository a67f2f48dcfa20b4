"""Groups of ranks that communicate along one axis of the topology, and the pool of process groups that they lease.

A process group costs threads and connections (Gloo) or a communicator and memory on the GPU (NCCL). So each is made
once for its ranks, its purpose and its time-out, by its members alone, and every topology that needs it leases it.

PyTorch's `new_group(use_local_synchronization=True)` is meant for groups that their members make, but does not do:

- It names a group by how many groups the process has. Members that have made different numbers of groups (a
  `new_group` of some ranks is enough) wait for each other under different names.
- Where the default group is bound to a device it splits that group's communicator, for which NCCL waits for all ranks.
- It sorts ranks, where a group's order says which rank holds which experts.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

from fusedmoe.comm.failure.blame import lost
from fusedmoe.comm.failure.board import Board, attempt
from fusedmoe.comm.patient_store import PatientStore
from fusedmoe.compat.torch import default_store, destroy_group, make_group, register_group, set_timeout
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.threads import LOOK_S, Helper


@dataclass(frozen=True)
class Job:
    """A job as all its groups share it: this rank, how long a wait may last, where failures are posted.

    The board is None exactly in a world of one. `heaps`: symmetric memory of its groups that is in use.
    """

    rank: int = 0
    timeout_s: float = 300.0
    board: Board | None = None
    heaps: WeakSet[Any] = field(default_factory=WeakSet, compare=False, repr=False)

    def refuse_pickle(self) -> None:
        """Refuses to pickle an object of a job of several ranks."""
        if self.board is not None:
            raise ConfigError(
                f"rank {self.rank}: pickle, or torch.save, of a model over ranks: its process groups stay in this "
                "process, and its experts are this rank's. Save model.state_dict() on each rank, or all ranks' by "
                "fusedmoe.training.save_checkpoint; inside the process copy.deepcopy copies the model"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_pickle()
        # Heaps stay in their process.
        return Job, (self.rank, self.timeout_s)


class Group:
    """The ranks along one axis of the topology, this rank among them.

    Attributes:
        axis: the name of the axis, for errors.
        ranks: global numbers, in the group's order.   index: this rank's place among them.   size: how many they are.
        handle: their process group; None exactly when the group has one rank (then every collective is a no-op and
            nothing needs initialising).
        downward: a second process group of the same ranks, for rows to lower ones (`collectives`); None without.
        job: what it shares with the other groups.   board: the job's, of a group that communicates.
        on_gpu: whether tensors must lie on this rank's GPU to travel over it (NCCL).
    """

    # Plain attributes, since each collective of each step reads them.
    handle: dist.ProcessGroup | None
    downward: dist.ProcessGroup | None
    #: By which operators of a graph find it, where it has one.
    graph_name = ""

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
        # Only a group of one can have none.
        self.board: Board = self.job.board  # type: ignore[assignment]
        self.on_gpu = handle is not None and dist.get_backend(handle) == "nccl"

    def __getattr__(self, name: str) -> Any:
        # Python asks only for what is not there: `close` has deleted it.
        if name in ("handle", "downward"):
            raise ConfigError(
                "this topology was closed, and its process groups are gone: use it before close(), or make another"
            )
        raise AttributeError(name)

    def close(self) -> None:
        """Lets go of the process groups: the group cannot communicate from then on."""
        self.__dict__.pop("handle", None)
        self.__dict__.pop("downward", None)

    @property
    def is_open(self) -> bool:
        return "handle" in self.__dict__

    @property
    def identity(self) -> str:
        """The axis and the numbers of its process groups: the same for two groups over which rows travel alike."""
        # Numbered when first asked for: ranks that ask in the same order say the same.
        handles = [handle for handle in (self.handle, self.downward) if handle is not None]
        for handle in handles:
            if handle not in _NUMBERS:
                _NUMBERS[handle] = next(_new_number)
        return f"{self.axis} {[_NUMBERS[handle] for handle in handles]}"

    def refuse(self, operation: str, text: str) -> NoReturn:
        """Raises what is wrong with this rank's part in an operation that has not begun, and tells the other ranks."""
        # Alone there is nobody to tell, and the caller's mistake is one of configuration.
        if self.job.board is None:
            raise ConfigError(f"{operation}: {text}")
        self.job.board.post(self.job.rank, operation, text)
        raise RankError(f"rank {self.job.rank}: {operation} over the {self}: {text}")

    def ended(self, operation: str, verdict: object) -> RankError:
        """Returns the error for an operation that a verdict ended."""
        return RankError(f"rank {self.job.rank}: {operation} over the {self} ended because {verdict}")

    def __getstate__(self) -> dict[str, Any]:
        self.job.refuse_pickle()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # Process groups cannot be copied.
        return self

    def __str__(self) -> str:
        return f"{self.axis} group {list(self.ranks)}"


# Numbers for `identity` are by process group: topologies that share one need not lie alike on all ranks, nor end there
# at the same time.
_NUMBERS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_new_number = count()

# Seconds that a peer may take to be gone after a wait of PyTorch's own broke, on top of the time that has passed.
_SLOW_EXIT_S = 6.0

#: A rank's process groups of the same ranks and purpose: the number of the one that it could use, 0 for none, and how
#: many it has made.
Held = tuple[int, int]


def launch_in_order_of_issue() -> None:
    """Has NCCL launch the operations of several communicators in the order in which the host issues them."""
    # NCCL reads it at its first launch. A value that is set already stays.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@dataclass(eq=False)
class Leased:
    """A process group of the pool, its number among those of its ranks and purpose, and how many leases are out."""

    key: tuple[str, float]
    # Weak: a process group lives in the tables of `torch.distributed`, until it is destroyed there.
    handle: ref[dist.ProcessGroup]
    number: int
    leases: int = 0


class ProcessGroups:
    """The process groups that this rank has made for topologies, so that the next one can use them, too."""

    def __init__(self) -> None:
        # By ranks and purpose, and time-out.
        self._made: dict[tuple[str, float], Leased] = {}
        self._last: dict[str, int] = {}
        self._layers: Counter[tuple[int, ...]] = Counter()

    def number_layer(self, ranks: tuple[int, ...]) -> int:
        """Counts another layer of these ranks; returns how many they have made."""
        self._layers[ranks] += 1
        return self._layers[ranks]

    def held(self, timeout_s: float) -> dict[str, Held]:
        """Returns what this rank holds, by ranks and purpose, for the other ranks to compare."""
        alive = {key: made.number for key, made in self._made.items() if made.handle() is not None}
        return {name: (alive.get((name, timeout_s), 0), last) for name, last in self._last.items()}

    def lease(
        self, job: Job, purpose: str, ranks: Sequence[int], held: Sequence[Mapping[str, Held]] | None = None
    ) -> Leased:
        """Leases the process group of these ranks, in this order, for one purpose. Collective over them.

        `held`: what each of the ranks holds, where they have just told each other; else they do so here.
        """
        ranks = tuple(ranks)
        name = f"{purpose}/{','.join(map(str, ranks))}"
        key = (name, job.timeout_s)
        if held is None:
            own = self.held(job.timeout_s).get(name, (0, 0))
            assert job.board is not None
            operation = f"making a process group for {purpose}"
            held = [{name: value} for value in job.board.meet(ranks, own, job.timeout_s, operation=operation)]
        of_ranks = [rank.get(name, (0, 0)) for rank in held]
        # All use the old one or all make a new one, whosever garbage has been collected by now: where one rank lacks
        # the group, or holds another, under a number that none has used.
        numbers = {number for number, _ in of_ranks}
        if len(numbers) > 1 or 0 in numbers:
            number = max(last for _, last in of_ranks) + 1
            handle = _make(job, ranks, f"fusedmoe/{attempt()}/{name}/{number}")
            self._made[key], self._last[name] = Leased(key, ref(handle), number), number
        self._made[key].leases += 1
        return self._made[key]

    def give_back(self, leases: Iterable[Leased]) -> dict[str, int]:
        """Ends leases; returns, by ranks and purpose, how many of the same process groups are still out."""
        # Their process groups stay, for the next topology, until `destroy`.
        for lease in leases:
            lease.leases -= 1
        return {lease.key[0]: lease.leases for lease in leases if self._made.get(lease.key) is lease}

    def destroy(self, lease: Leased) -> None:
        """Frees a process group that none of its members uses any more, unless a newer one has replaced it."""
        if self._made.get(lease.key) is lease:
            del self._made[lease.key]
            handle = lease.handle()
            if handle is not None:  # by None PyTorch would mean the default group
                destroy_group(handle)


_OF_JOB: WeakKeyDictionary[dist.ProcessGroup, ProcessGroups] = WeakKeyDictionary()


def process_groups() -> ProcessGroups:
    """Returns the pool of the job: of `torch.distributed`'s default group, which must be there."""
    # The pool may outlive its job, and so holds process groups weakly: modules of PyTorch that are imported late keep
    # the default group of that time for ever, as default values of arguments.
    default: Any = dist.group.WORLD
    return _OF_JOB.setdefault(default, ProcessGroups())


def _make(job: Job, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    """Makes a process group of these ranks, in this order. Collective over them, under the same name."""
    operation, where, patience = "making a process group", f"ranks {list(ranks)}", _patience(job)
    deadline, board = time.monotonic() + patience.total_seconds(), job.board
    assert board is not None
    backend, bound = dist.Backend(dist.get_backend()), _to_connect(patience)
    # Gloo waits for the address of each rank as long as for a fifth of a connection: no longer than a rank may pause.
    store = default_store() if bound == patience else PatientStore(default_store(), patience)
    make = partial(make_group, ranks, ranks.index(job.rank), backend, store, name, bound)
    try:
        with _unbound():
            # In a thread that is left behind: where the store's host is stopped, its client blocks for ever.
            making, noted = Helper("fusedmoe-group").begin(make), False
            while not (making.done() or time.monotonic() > deadline or board.read() or board.gone(ranks)):
                try:
                    making.exception(LOOK_S)
                except NoAnswer:
                    board.waits(f"{operation} over {where}", ranks)
                    noted = True
            handle = making.result(0.0)
            set_timeout(patience, handle)
            if noted:
                board.waits("")
    except (RuntimeError, NoAnswer) as error:
        if isinstance(error, NoAnswer):
            making.add_done_callback(_unmake)
        if str(error) in _NO_ROOM:
            text = f"{error}. Raise its limits of memory and of threads (ulimit -v, ulimit -u, the container's)"
            said = board.post(job.rank, operation, text)
            raise RankError(f"rank {job.rank}: {operation} over {where} ended because {said}") from error
        # Where the time was up, a rank that is gone has been so for long.
        reason = str(error) or f"not all ranks came within {patience.total_seconds():g} s"
        exit_s = max(1.0, deadline - time.monotonic())
        raise lost(board, ranks, operation, where, reason, exit_s, board.absent(ranks)) from error
    register_group(handle, ranks)
    _STORES[handle] = store
    return handle


# What a process group was made with: C++ holds no reference to an object that is written in Python.
_STORES: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


def _unmake(making: Future[Any]) -> None:
    """Frees a process group that was made after this rank had stopped waiting for it."""
    if making.exception() is None:
        handle = making.result()
        register_group(handle, ())
        # Unless it went with the default group.
        with suppress(ValueError):
            dist.destroy_process_group(handle)


# The words with which Gloo fails where the system has no thread for it.
_NO_ROOM = {os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM)}


def _patience(job: Job) -> timedelta:
    """Returns the time-out of the backend, which passes after the job's."""
    # It ends what a rank that gave up had begun: Gloo's threads would otherwise keep the rank's process from ending for
    # as long as the default group's time-out says.
    return timedelta(seconds=job.timeout_s + 2.0)


@contextmanager
def bounded(group: Group, operation: str) -> Iterator[None]:
    """Wraps collectives of PyTorch's own over a group: bounds them by the job's time-out, notes them on the board.

    Raises:
        RankError: a connection broke, or a rank did not come. Other errors of theirs stay as they are.
    """
    job, handle = group.job, group.handle
    if handle is None:
        yield
        return
    # PyTorch's own collectives wait as long as their process group says.
    set_timeout(timedelta(seconds=job.timeout_s), handle)
    try:
        with group.board.noted(f"{operation} over the {group}", group.ranks):
            yield
    except RuntimeError as error:
        reason = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in reason:
            raise
        exit_s, absent = min(_SLOW_EXIT_S, group.board.exit_s), []
        # A rank that was gone by then has been so for long.
        if "Timed out" in reason:
            exit_s, absent = 1.0, group.board.absent(group.ranks)
        raise lost(group.board, group.ranks, operation, f"the {group}", reason, exit_s, absent) from error
    finally:
        set_timeout(_patience(job), handle)


def _to_connect(patience: timedelta) -> timedelta:
    """Returns the time-out with which a process group is made: how long its thread waits where ranks end meanwhile."""
    if dist.get_backend() != "gloo":
        return patience
    # Gloo waits five times as long for a connection, and nothing can end that wait.
    return min(patience, max(patience / 5, timedelta(seconds=2)))


@contextmanager
def _unbound() -> Iterator[None]:
    """Takes the device from the default group meanwhile, so that its communicator is not split."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
