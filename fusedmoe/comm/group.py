"""Groups of ranks that communicate along one axis of the topology, and the pool of process groups that they lease.

A process group costs threads and connections (Gloo) or a communicator and memory on the GPU (NCCL). So each is made
once for its ranks, its purpose and its time-out, by its members alone, and every topology that needs it leases it.

`torch.distributed.new_group(use_local_synchronization=True)` is meant for groups that their members make, but names a
group by how many groups the process has: members that have made different numbers of others (`new_group` of some ranks
is enough) wait for each other under different names. Where the default group is bound to a device it also splits that
group's communicator, for which NCCL waits for all ranks of the job. And it sorts ranks, where a group's order says who
holds which experts.
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
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

from fusedmoe.comm.failure import Board, attempt, stopped
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.threads import LOOK_S, Helper


@dataclass(frozen=True)
class Job:
    """What every group of a job shares: this rank, how long a wait may last, where failures are posted.

    The board is None exactly in a world of one. `heaps`: symmetric memory of its groups that is in use
    (`fusedmoe.comm.heap`).
    """

    rank: int = 0
    timeout_s: float = 300.0
    board: Board | None = None
    heaps: WeakSet[Any] = field(default_factory=WeakSet, compare=False, repr=False)

    def refuse_pickle(self) -> None:
        """Raises `ConfigError` for what is about to be pickled and has ranks to talk to."""
        if self.board is not None:
            raise ConfigError(
                f"rank {self.rank}: pickle, or torch.save, of a model over ranks: its process groups stay in this "
                "process, and its experts are this rank's. Save model.state_dict() on each rank, or all ranks' by "
                "fusedmoe.training.save_checkpoint; inside the process copy.deepcopy copies the model"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_pickle()
        return Job, (self.rank, self.timeout_s)  # heaps stay in their process


class Lease:
    """A process group, for as long as the topology that has leased it is open.

    `key`: by which the pool knows it: ranks and purpose, and the time-out.
    """

    def __init__(self, handle: dist.ProcessGroup, key: tuple[str, float] = ("", 0.0)) -> None:
        self._handle: dist.ProcessGroup | None = handle
        self.key = key

    @property
    def handle(self) -> dist.ProcessGroup:
        if self._handle is None:
            raise ConfigError(
                "this topology was closed, and its process groups are gone: use it before close(), or make another"
            )
        return self._handle

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def end(self) -> None:
        self._handle = None


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the topology, this one among them.

    `ranks` are global, in the group's order; `index` is this rank's place among them; `lease` is of their process
    group, None exactly when the group has one rank (then every collective is a no-op and nothing needs initialising).
    `downward`: of a second process group of the same ranks, for rows to lower ones (see `collectives`); None without.
    """

    axis: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    lease: Lease | None = None
    job: Job = field(default_factory=Job)
    downward: Lease | None = None

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The process group; None for a group of one.

        Raises:
            ConfigError: the topology was closed.
        """
        return None if self.lease is None else self.lease.handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count_call(self) -> int:
        """The number of a layer's call over the group, the same on all of its ranks."""
        return 0 if self.handle is None else process_groups().count_call(self.handle)

    @property
    def board(self) -> Board:
        """The job's board, of a group that communicates."""
        assert self.job.board is not None
        return self.job.board

    def refuse(self, operation: str, text: str) -> NoReturn:
        """Raises what is wrong with this rank's part in an operation that has not begun, and tells the other ranks."""
        if self.job.board is None:
            raise ConfigError(f"{operation}: {text}")
        self.job.board.post(self.job.rank, operation, text)
        raise RankError(f"rank {self.job.rank}: {operation} over the {self}: {text}")

    def __getstate__(self) -> dict[str, Any]:
        self.job.refuse_pickle()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # process groups cannot be copied

    def __str__(self) -> str:
        return f"{self.axis} group {list(self.ranks)}"


# A store that a process hosts goes last when the process ends.
_HOST_EXIT_S = 1.0
# How long a peer may take to be gone after a wait of PyTorch's own broke, on top of the time that has passed.
_SLOW_EXIT_S = 6.0

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

#: What a rank says of its groups of some ranks and one purpose: the number of the one it could use, 0 for none, and how
#: many it has made.
Held = tuple[int, int]


def launch_in_order_of_issue() -> None:
    """Has NCCL launch what several communicators do in the order in which the host issues it (`runtime/nccl.md`).

    NCCL reads the variable when it first launches something: call this before. A value that is set already stays.
    """
    os.environ.setdefault(_LAUNCH_ORDER, "1")


@dataclass
class _Made:
    """A process group, its number among those of its ranks and purpose, and how many leases of it are out.

    The reference is weak: a process group lives in the tables of `torch.distributed`, until it is destroyed there.
    """

    handle: ref[dist.ProcessGroup]
    number: int
    leases: int = 0


class ProcessGroups:
    """The process groups that this rank has made for topologies, so that the next one can use them, too.

    Members of a group must all use the old one or all make a new one. Which of the two cannot be left to when each
    rank's garbage is collected, so ranks compare what they hold before each lease (`held`).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, float], _Made] = {}
        self._last: dict[str, int] = {}
        self._layers: Counter[tuple[int, ...]] = Counter()
        # By process group: topologies that share one need not lie alike on all ranks, nor end there at the same time.
        self._calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

    def count_call(self, handle: dist.ProcessGroup) -> int:
        """How many calls of layers there were over a process group, this one included."""
        self._calls[handle] = number = self._calls.get(handle, 0) + 1
        return number

    def number_layer(self, ranks: tuple[int, ...]) -> int:
        """How many layers these ranks have made, another one included."""
        self._layers[ranks] += 1
        return self._layers[ranks]

    def held(self, timeout_s: float) -> dict[str, Held]:
        """What this rank holds by ranks and purpose, for other ranks to compare."""
        return {name: (self._number(name, timeout_s), last) for name, last in self._last.items()}

    def _number(self, name: str, timeout_s: float) -> int:
        made = self._made.get((name, timeout_s))
        return 0 if made is None or made.handle() is None else made.number

    def lease(
        self, job: Job, purpose: str, ranks: Sequence[int], held: Sequence[Mapping[str, Held]] | None = None
    ) -> Lease:
        """The process group of these ranks, in this order, for one purpose. Collective over them.

        Args:
            held: what each of its ranks holds, where they have just told each other; else they do so here.
        Raises:
            RankError: one of them failed, or did not come within the job's time-out.
        """
        ranks = tuple(ranks)
        name, key = _name(purpose, ranks), (_name(purpose, ranks), job.timeout_s)
        if held is None:
            own = {of: value for of, value in self.held(job.timeout_s).items() if of == name}
            assert job.board is not None
            held = job.board.meet(ranks, own, job.timeout_s, operation=f"making a process group for {purpose}")
        every = [of.get(name, (0, 0)) for of in held]
        numbers = {number for number, _ in every}
        if len(numbers) > 1 or 0 in numbers:
            number = max(last for _, last in every) + 1
            handle = _make(job, ranks, f"fusedmoe/{attempt()}/{name}/{number}")
            self._made[key], self._last[name] = _Made(ref(handle), number), number
        made = self._made[key]
        made.leases += 1
        there = made.handle()
        assert there is not None
        return Lease(there, key)

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Ends leases. Their process groups stay, for the next topology, until `destroy`."""
        for lease in leases:
            if (made := self._of(lease)) is not None:
                made.leases -= 1

    def leased(self, leases: Iterable[Lease]) -> dict[str, int]:
        """By ranks and purpose how many leases of the same process groups are out."""
        return {lease.key[0]: made.leases for lease in leases if (made := self._of(lease)) is not None}

    def destroy(self, lease: Lease) -> None:
        """Frees a process group that no member of it uses any more."""
        if self._of(lease) is not None:
            del self._made[lease.key]
            c10d: Any = dist.distributed_c10d
            tag = c10d._world.pg_to_tag.get(lease.handle)
            dist.destroy_process_group(lease.handle)
            c10d._world.tags_to_pg.pop(tag, None)  # its list of this group alone, which PyTorch leaves there empty

    def _of(self, lease: Lease) -> _Made | None:
        """The process group that was made for a lease, unless a newer one has replaced it."""
        made = self._made.get(lease.key)
        return made if made is not None and made.handle() is lease.handle else None


_OF_JOB: WeakKeyDictionary[dist.ProcessGroup, ProcessGroups] = WeakKeyDictionary()


def process_groups() -> ProcessGroups:
    """The pool of the job: that of `torch.distributed`'s default group, which must be there.

    Modules of PyTorch that are imported late keep the default group for ever, as default values of arguments.
    """
    default: Any = dist.group.WORLD
    return _OF_JOB.setdefault(default, ProcessGroups())


def _name(purpose: str, ranks: tuple[int, ...]) -> str:
    return f"{purpose}/{','.join(map(str, ranks))}"


def _make(job: Job, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    """A new process group of these ranks, in this order. Collective over them, under the same name."""
    c10d: Any = dist.distributed_c10d
    operation, where, patience = "making a process group", f"ranks {list(ranks)}", _patience(job)
    deadline, board = time.monotonic() + patience.total_seconds(), job.board
    assert board is not None
    make = partial(
        c10d._new_process_group_helper,
        len(ranks),
        ranks.index(job.rank),
        list(ranks),
        dist.Backend(dist.get_backend()),
        c10d._get_default_store(),
        name,
        timeout=_to_connect(patience),
    )
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
            handle, _ = making.result(0.0)
            _set_timeout(patience, handle)
            if noted:
                board.waits("")
    except (RuntimeError, NoAnswer) as error:
        if isinstance(error, NoAnswer):
            making.add_done_callback(_unmake)
        if str(error) in _NO_ROOM:
            text = f"{error}. Raise its limits of memory and of threads (ulimit -v, ulimit -u, the container's)"
            said = board.post(job.rank, operation, text)
            raise RankError(f"rank {job.rank}: {operation} over {where} ended because {said}") from error
        # Where the time was up, whoever is gone has been so for long.
        reason = str(error) or f"not all ranks came within {patience.total_seconds():g} s"
        exit_s = max(1.0, deadline - time.monotonic())
        raise lost(job, ranks, operation, where, reason, exit_s, board.absent(ranks)) from error
    c10d._world.pg_group_ranks[handle] = {rank: place for place, rank in enumerate(ranks)}
    made: dist.ProcessGroup = handle
    return made


def _unmake(making: Future[Any]) -> None:
    """Frees a process group that was made when this rank did not wait for it any more."""
    c10d: Any = dist.distributed_c10d
    if making.exception() is None:
        handle, _ = making.result()
        c10d._world.pg_group_ranks[handle] = {}
        with suppress(ValueError):  # it went with the default group
            dist.destroy_process_group(handle)


# What Gloo raises where the system has no thread for it.
_NO_ROOM = {os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM)}


def lost(
    job: Job,
    ranks: Sequence[int],
    operation: str,
    where: str,
    reason: str,
    exit_s: float | None = None,
    absent: Sequence[int] = (),
) -> RankError:
    """The error for a broken connection. A peer that raised has posted why; a peer that was killed has not.

    `exit_s`: how long a peer may take to be gone; None: as an error makes it take. `absent`: who had not come when the
    connection could not be made.
    """
    me, board = job.rank, job.board
    assert board is not None
    others = tuple(rank for rank in ranks if rank != me)
    here, earlier, cut_off = f"{operation} over {where}", None, False
    deadline, dead = time.monotonic() + (board.exit_s if exit_s is None else exit_s), board.gone(others)
    while (said := board.explain()) is None and not dead and time.monotonic() < deadline:
        board.waits(here, ranks)
        earlier = earlier or board.waiting(others)
        time.sleep(0.02)
        dead = board.gone(others)
        if board.cut_off and not cut_off:  # nobody will say why any more
            cut_off, deadline = True, min(deadline, time.monotonic() + _HOST_EXIT_S)
    verdict: object = said
    if verdict is None and dead:
        verdict = board.post(dead[0], operation, "its process ended (an error, killed, or out of memory); see its log")
    elif verdict is None:
        silent = stopped(earlier or {}, board.waiting(others))  # on other hosts: those on this one have been asked
        mine = f"it lost its connection to one of ranks {list(others)}; see their logs for the first error ({reason})"
        gone = f"its connection to rank {me} broke, and it waits no more: it ended, or its host; see its log ({reason})"
        late = f"it did not come: it is late, or it was stopped, or its host; see its log ({reason})"
        if silent:
            verdict = board.blame(silent[0], operation, gone)
        elif absent:
            verdict = board.blame(absent[0], operation, late)
        else:
            verdict = board.blame(me, operation, mine)
    return RankError(f"rank {me}: {here} ended because {verdict}")


def _patience(job: Job) -> timedelta:
    """The time-out of the backend.

    It comes after the job's, and ends what a rank that gave up had begun: Gloo's threads would otherwise keep its
    process from ending for as long as the default group's time-out says.
    """
    return timedelta(seconds=job.timeout_s + 2.0)


def _set_timeout(patience: timedelta, handle: dist.ProcessGroup) -> None:
    c10d: Any = dist.distributed_c10d
    (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(patience, handle)  # public from PyTorch 2.14 on


@contextmanager
def bounded(group: Group, operation: str) -> Iterator[None]:
    """A context around collectives of PyTorch's own over a group: bounded by the job's time-out, noted on the board.

    Raises:
        RankError: a connection broke, or a rank did not come. What else they raise stays as it is.
    """
    job, handle = group.job, group.handle
    if handle is None:
        yield
        return
    _set_timeout(timedelta(seconds=job.timeout_s), handle)
    try:
        with group.board.noted(f"{operation} over the {group}", group.ranks):
            yield
    except RuntimeError as error:
        reason = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in reason:
            raise
        exit_s, absent = min(_SLOW_EXIT_S, group.board.exit_s), []
        if "Timed out" in reason:  # whoever was gone by then has been so for long
            exit_s, absent = 1.0, group.board.absent(group.ranks)
        raise lost(job, group.ranks, operation, f"the {group}", reason, exit_s, absent) from error
    finally:
        _set_timeout(_patience(job), handle)


def _to_connect(patience: timedelta) -> timedelta:
    """The time-out with which a process group is made: what its thread waits for, if others end meanwhile.

    Gloo waits five times as long for a connection, and nothing can end that wait. The ranks have just met.
    """
    if dist.get_backend() != "gloo":
        return patience
    return min(patience, max(patience / 5, timedelta(seconds=2)))


@contextmanager
def _unbound() -> Iterator[None]:
    """The default group without its device: its communicator is not split then."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
