"""Faults planted in the grouped kernels: each is detected, in every order of events."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from fusedmoe.kernels.gluon.grouped import columns, dhidden, dweight, pipeline
from fusedmoe.kernels.gluon.grouped.pipeline import bulk_load
from tests.gluon_interpreter import KernelFault
from tests.kernels.gluon.grouped_cases import check_dhidden, check_dweight, check_product, check_up

COUNTS = (3, 0, 9, 11)
# Full tiles before and after tiles with a remainder.
WHOLE = (24, 0, 9, 11, 24)
# Products over rows: several steps, the last one partial; one step; and no step.
DEEP = (37, 0, 3, 50)
Change = Callable[[Any], Any]
Check = Callable[..., None]


def _without(place: int) -> Change:
    """Omit the call with this number in each program; calls without effect are not counted."""

    def change(original: Any) -> Any:
        calls = 0

        def function(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += bool(keywords.get("pred", True))
            return None if calls - 1 == place else original(*arguments, **keywords)

        return function

    return change


def _called_by(name: str, change: Change) -> Change:
    """Apply the change only to calls from a function of this name."""

    def make(original: Any) -> Any:
        changed = change(original)

        def function(*arguments: Any, **keywords: Any) -> Any:
            called = changed if sys._getframe(1).f_code.co_name == name else original
            return called(*arguments, **keywords)

        return function

    return make


def _never(original: Any) -> Any:
    return lambda *arguments, **keywords: None


def _all_but_first(original: Any) -> Any:
    calls = count()
    return lambda: original() if next(calls) == 0 else None


def _fewer_in_flight(original: Any) -> Any:
    return lambda num_outstanding=0, deps=(): original(num_outstanding + 1, deps)


def _no_wait_at_the_end(original: Any) -> Any:
    return lambda num_outstanding=0, deps=(): original(1, deps)


def _copy_after_arrival(copy: Any) -> Any:
    """Start each step's copies in the next step, after the arrival at their own stage's barrier."""
    delayed: list[Any] = []

    def function(*arguments: Any, **keywords: Any) -> None:
        delayed.append(lambda: copy(*arguments, **keywords))
        if len(delayed) > 1:
            delayed.pop(0)()

    return function


# The function to replace, the change, and the expected message. First for all kernels, then for gathered rows, then for
# one kernel.
IN_ALL: dict[str, tuple[Any, Change, str]] = {
    "inverted full phase": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it + stages, stages),
        "deadlock|wrong phase|is read",
    ),
    "inverted empty phase": (
        pipeline.await_empty,
        lambda wait: lambda empty, it, stages: wait(empty, it + stages, stages),
        "deadlock|wrong phase",
    ),
    "full phase reset for each tile": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it % 4, stages),
        "wrong phase|deadlock|is read|is written",
    ),
    "load without wait for empty stage": (pipeline.await_empty, _never, "is written without|too many|is read"),
    "wgmma without wait for full stage": (pipeline.await_full, _never, "is read (before|without)"),
    "load waits for previous stage": (
        pipeline.await_empty,
        lambda wait: lambda empty, it, stages: wait(empty, it + 2 * stages - 1, stages),
        "is written without|wrong phase|deadlock|too many",
    ),
    "wgmma reads adjacent stage": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it + 1, stages),
        "is read (before|without)|deadlock|wrong phase",
    ),
    "stage released one step early": (
        pipeline.release,
        lambda release: lambda empty, it, stages, pred: release(empty, it + 1, stages, True),
        "is written without|is read without|too many|deadlock|wrong phase",
    ),
    "stage never released": (pipeline.release, _never, "deadlock"),
    "lost arrival": (mbarrier.arrive, _without(3), "deadlock|wrong phase|is written without|is read"),
    "missing wait for overlapped wgmma": (
        warpgroup_mma_wait,
        _fewer_in_flight,
        "is written without waiting for the read|registers",
    ),
    "missing wait for last wgmma": (
        warpgroup_mma_wait,
        _no_wait_at_the_end,
        "is written without waiting for the read|registers",
    ),
    "too few expected bytes": (
        mbarrier.expect,
        lambda expect: lambda bar, bytes: expect(bar, bytes // 2),
        "more bytes came|is read without waiting|too many",
    ),
    "too many expected bytes": (
        mbarrier.expect,
        lambda expect: lambda bar, bytes: expect(bar, bytes + 16),
        "deadlock.* 16 bytes missing",
    ),
    "lost bulk copy": (bulk_load, _without(4), "deadlock|is read"),
    "lost expect": (mbarrier.expect, _without(2), "deadlock|more bytes came|too many|is read|is written"),
    "barrier count one too high": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, count + 1),
        "deadlock",
    ),
    "missing fence after barrier init": (fence_async_shared, _without(0), "may not find"),
}
IN_GATHER: dict[str, tuple[Any, Change, str]] = {
    "missing fence before wgmma": (fence_async_shared, _all_but_first, "is read without a fence"),
    "lost fence": (fence_async_shared, _without(2), "is read without a fence"),
    "thread skips wait for async copies": (
        pipeline.threads_barrier,
        _never,
        "is read without waiting",
    ),
    "missing wait for async copies": (async_copy.wait_group, _never, "is read without waiting"),
    "one copy group too many in flight": (
        async_copy.wait_group,
        lambda wait: lambda number: wait(number + 1),
        "is read without waiting",
    ),
    "copy groups never committed": (async_copy.commit_group, _never, "is read without waiting|under way"),
    "rows announced one step early": (
        pipeline.mark_filled,
        lambda fill: lambda full, it, stages, pred: fill(full, it + 1, stages, True),
        "is read|deadlock|too many|wrong phase",
    ),
}


# Gathered rows whose copies arrive by themselves.
IN_COPIES_ARRIVE: dict[str, tuple[Any, Change, str]] = {
    "missing fence after wait for copies": (
        fence_async_shared,
        _called_by("multiply", _never),
        "is read without a fence after the write by cp.async",
    ),
    "copies arrive at next stage": (
        pipeline._arrive_with_copies,
        lambda arrive: lambda full, it, stages: arrive(full, it + 1, stages),
        "is read (before|without)|deadlock|too many|wrong phase",
    ),
    "arrival one stage early": (
        pipeline.copy_rows,
        _copy_after_arrival,
        "is read (before|without)|is written without",
    ),
    "copies never arrive": (pipeline._arrive_with_copies, _never, "deadlock"),
    "lost arrival of copies": (async_copy.mbarrier_arrive, _without(2), "deadlock|wrong phase|is read|is written"),
    "barrier counts copies once": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, min(count, 2)),
        "too many",
    ),
}
IN_COOPERATIVE: dict[str, tuple[Any, Change, str]] = {
    "barrier counts one warp group": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, 1),
        "is written without|wrong phase|deadlock|too many|is read",
    ),
}
IN_PINGPONG: dict[str, tuple[Any, Change, str]] = {
    "missing wait for pingpong turn": (pipeline.await_turn, _never, "wrong phase|is read|too many|is written without"),
    "pingpong turn never passed": (pipeline.pass_turn, _never, "deadlock"),
    "wrong first pingpong turn": (
        pipeline.await_turn,
        lambda wait: lambda turn, number, group: wait(turn, number + 1, group),
        "deadlock|wrong phase|is read",
    ),
}
IN_BOXES: dict[str, tuple[Any, Change, str]] = {
    "missing fence before bulk store": (
        fence_async_shared,
        _called_by("store_box", _never),
        "is read without a fence",
    ),
    "thread skips barrier before bulk store": (
        columns.threads_barrier,
        _called_by("store_box", _never),
        "is read without|is written without",
    ),
    "box overwritten before its bulk store": (
        tma.store_wait,
        _called_by("store_box", _never),
        "is written without waiting for the read by bulk stores",
    ),
    "one bulk store too many in flight": (
        tma.store_wait,
        _called_by("store_box", lambda wait: lambda pendings: wait(pendings + bool(pendings))),
        "is written without waiting for the read by bulk stores",
    ),
    "thread-stored box stored by bulk copy": (
        tma.store_wait,
        _called_by("store_box", lambda wait: lambda pendings: wait(pendings) if pendings else None),
        "is written without waiting for the read by bulk stores",
    ),
    "missing wait for last bulk stores": (tma.store_wait, _called_by("_multiply", _never), "ends without waiting"),
}
IN_DHIDDEN: dict[str, tuple[Any, Change, str]] = {
    "missing fence before stage release": (
        fence_async_shared,
        _called_by("_release_projections", _never),
        "is written without a fence after the read",
    ),
    "thread releases stage before other reads": (
        pipeline.threads_barrier,
        _called_by("_release_projections", _never),
        "is written without waiting for the read",
    ),
    "missing wait for H": (pipeline.await_full, _called_by("_box", _never), "is read (before|without)"),
    "stage of H never released": (pipeline.release, _called_by("_release_projections", _never), "deadlock"),
    "stage released twice": (
        pipeline.release,
        _called_by(
            "_release_projections",
            lambda release: lambda empty, it, stages, pred: release(empty, it // 2 * 2, stages, pred),
        ),
        "deadlock|is written without|wrong phase|too many",
    ),
    "H read one step early": (
        dhidden._box,
        lambda box: lambda bufs, ring, it, first, rows, stages: box(bufs, ring, it + stages - 1, first, rows, stages),
        "deadlock|is read (before|without)|wrong phase|is written without",
    ),
    "H loaded for one half only": (
        pipeline.expect_bytes,
        _called_by(
            "load_gathered", lambda announce: lambda full, it, stages, size: announce(full, it, stages, size // 2)
        ),
        "more bytes came|is read without waiting|too many",
    ),
}
IN_DWEIGHT: dict[str, tuple[Any, Change, str]] = {
    "partial step never announced": (
        pipeline.mark_filled,
        _called_by("_load", _never),
        "deadlock|wrong phase|is read",
    ),
    "late wait for first row indices": (
        async_copy.commit_group,
        _without(0),
        "is read (before|without)|under way",
    ),
    "row indices of adjacent step": (
        dweight._load_row_indices,
        lambda look: lambda sources, ptr, it, *others: look(sources, ptr, it + 1, *others),
        "is read (before|without)|is written without",
    ),
    "empty expert releases a stage": (
        pipeline.release,
        lambda release: lambda empty, it, stages, pred: release(empty, it, stages, True),
        "too many|is written without|is read without|wrong phase|deadlock",
    ),
}


# Kernels, and the faults planted in each.
CASES: dict[str, tuple[Check, dict[str, tuple[Any, Change, str]]]] = {
    "product": (partial(check_product, WHOLE, 40, 40, True, slots=2), IN_ALL | IN_COOPERATIVE | IN_BOXES),
    "product pingpong": (
        partial(check_product, WHOLE, 40, 40, False, slots=2, pingpong=True),
        IN_ALL | IN_PINGPONG | IN_BOXES,
    ),
    "up": (
        partial(check_up, WHOLE, 40, 40, slots=3),
        IN_ALL | IN_COOPERATIVE | IN_GATHER | IN_BOXES,
    ),
    "up, copies arrive": (
        # Not a multiple of the stages in a program's steps, after which signals one stage off would match again.
        partial(check_up, WHOLE, 40, 40, slots=3, stages=4, copies_arrive=True),
        IN_ALL | IN_COOPERATIVE | IN_COPIES_ARRIVE | IN_BOXES,
    ),
    "dhidden": (partial(check_dhidden, COUNTS, 40, 40), IN_ALL | IN_COOPERATIVE | IN_GATHER | IN_DHIDDEN),
    "dweight": (
        # Enough programs for a group to have boxes of both kinds.
        partial(check_dweight, DEEP, 24, 40, "right", slots=2, programs=3),
        IN_ALL | IN_COOPERATIVE | IN_GATHER | IN_BOXES | IN_DWEIGHT,
    ),
}
PLANTED = [(kernel, fault) for kernel, (_, faults) in CASES.items() for fault in faults]


def _require_detection(kernel: str, fault: str, seeds: range) -> None:
    """Require detection in every order of events."""
    check, faults = CASES[kernel]
    what, change, words = faults[fault]
    for seed in seeds:
        with pytest.raises(KernelFault) as found:
            check(seed=seed, changed={what: change})
        first = str(found.value).split("\n")[0]
        assert re.search(words, first), first


@pytest.mark.parametrize("kernel, fault", PLANTED[::6])
def test_injected_faults_are_detected(kernel: str, fault: str) -> None:
    _require_detection(kernel, fault, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("kernel, fault", PLANTED)
def test_injected_faults_are_detected_in_many_event_orders(kernel: str, fault: str) -> None:
    _require_detection(kernel, fault, range(10))
