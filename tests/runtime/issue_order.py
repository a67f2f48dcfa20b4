"""The order in which ranks issue collectives over several communicators: recorded, and checked against NCCL's rules.

`fake_streams` runs a CPU through the code path of CUDA plans: one thread issues everything, in the order of the
plan. Overlap between streams becomes sequential; the order of issue is the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fusedmoe.comm import collectives
from fusedmoe.runtime import execute
from fusedmoe.runtime.execute import Streams
from fusedmoe.schedule.task import Task


class Issue(NamedTuple):
    """One collective as one rank issued it.

    Attributes:
        group: the communicator's name, the same on its ranks.   index: this rank's index in it.
        send, recv: elements to and from each rank; for a reduction or a gather, the total.
    """

    group: str
    index: int
    operation: str
    send: tuple[int, ...]
    recv: tuple[int, ...]
    dtype: str
    thread: str


@contextmanager
def recorded() -> Iterator[list[Issue]]:
    """Record the collectives that this rank issues inside, in order."""
    issues: list[Issue] = []

    def note(operation: str, group: Any, tensor: torch.Tensor, send: Sequence[int], recv: Sequence[int]) -> None:
        name, thread = group.group_name, threading.current_thread().name
        issues.append(Issue(name, dist.get_rank(group), operation, tuple(send), tuple(recv), str(tensor.dtype), thread))

    to_all, reduce, gather = dist.all_to_all_single, dist.all_reduce, collectives._all_gather_into_tensor

    def all_to_all_single(out: Any, rows: Any, recv: Any, send: Any, *, group: Any, **more: Any) -> Any:
        note("all-to-all", group, rows, send, recv)
        return to_all(out, rows, recv, send, group=group, **more)

    def all_reduce(tensor: Any, op: Any, *, group: Any, **more: Any) -> Any:
        note(f"all-reduce {op}", group, tensor, [tensor.numel()], [tensor.numel()])
        return reduce(tensor, op, group=group, **more)

    def all_gather(out: Any, rows: Any, *, group: Any, **more: Any) -> Any:
        note("all-gather", group, rows, [rows.numel()], [out.numel()])
        return gather(out, rows, group=group, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", all_to_all_single)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(collectives, "_all_gather_into_tensor", all_gather)
        yield issues


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """Delay each task of a plan by up to 4 ms, with different delays on each rank."""
    clock, measured = random.Random(seed), execute._make_body

    def delayed(*given: Any) -> Callable[[Task], None]:
        body = measured(*given)

        def run(task: Task) -> None:
            time.sleep(clock.random() * 4e-3)
            body(task)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "_make_body", delayed)
        yield


class _Stream:
    """A stream of a device that runs submitted work immediately."""

    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def record(self, stream: object = None) -> None: ...


@contextmanager
def fake_streams() -> Iterator[None]:
    streams = {resource: _Stream() for resource in ("compute", "intra", "inter")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streams, "on", lambda self, device: streams)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: streams["compute"])
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "Event", _Stream)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        yield


def check(issues_W: Sequence[Sequence[Issue]], one_thread: bool) -> None:
    """Check that ranks agree on the operations of each communicator, and on one order of all operations.

    Args:
        issues_W: the issues of each rank.
        one_thread: each rank issued all collectives from one thread, so all of them must be in one order. Otherwise the
            collectives of each thread must be.
    """
    after: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    by_group: dict[str, dict[int, list[Issue]]] = defaultdict(lambda: defaultdict(list))
    for rank, issues in enumerate(issues_W):
        threads = {issue.thread for issue in issues}
        assert not one_thread or len(threads) <= 1, f"rank {rank} issues collectives from {sorted(threads)}"
        last: dict[str, tuple[str, int]] = {}
        for issue in issues:
            own = by_group[issue.group][issue.index]
            here = issue.group, len(own)
            own.append(issue)
            after[here] |= {last[issue.thread]} if issue.thread in last else set()
            last[issue.thread] = here
    for group, of in by_group.items():
        lengths = {index: len(issues) for index, issues in of.items()}
        assert len(set(lengths.values())) == 1, f"{group}: ranks issued {lengths} collectives"
        for number, same in enumerate(zip(*(of[index] for index in sorted(of)), strict=True)):
            _check_one(f"{group}, number {number}: {same}", same)
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        raise AssertionError(f"ranks issue these in different orders: {error.args[1]}") from None


def _check_one(where: str, same: Sequence[Issue]) -> None:
    assert len({(issue.operation, issue.dtype) for issue in same}) == 1, where
    if same[0].operation != "all-to-all":
        assert len({(issue.send, issue.recv) for issue in same}) == 1, where
        return
    for i, one in enumerate(same):
        assert len(one.send) == len(one.recv) == len(same), where
        for j, other in enumerate(same):
            assert one.send[j] == other.recv[i], where
