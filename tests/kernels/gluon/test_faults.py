"""Faults planted in the grouped kernels: each is found, whichever the order of events was going to be."""

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

from fusedmoe.kernels.gluon.grouped import columns, dhidden, dweight, gathered, pipeline
from fusedmoe.kernels.gluon.grouped.pipeline import bulk_load
from tests.gluon_interpreter import KernelFault
from tests.kernels.gluon.grouped_cases import check_dhidden, check_dweight, check_product, check_up

COUNTS = (3, 0, 9, 11)
# Tiles without a rest before such that have one, and behind them.
WHOLE = (24, 0, 9, 11, 24)
# Of products over rows: several steps, of which the last is not full, one step, and none.
DEEP = (37, 0, 3, 50)
Change = Callable[[Any], Any]
Check = Callable[..., None]


def _without(place: int) -> Change:
    """Leaves out the call of this number, in each program; those that do nothing do not count."""

    def change(original: Any) -> Any:
        calls = 0

        def function(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += bool(keywords.get("pred", True))
            return None if calls - 1 == place else original(*arguments, **keywords)

        return function

    return change


def _called_by(name: str, change: Change) -> Change:
    """Only where a function of this name calls."""

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


# What is changed, what of, and what the message says. In all kernels; where rows are looked up; in one.
IN_ALL: dict[str, tuple[Any, Change, str]] = {
    "phases of full turned round": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it + stages, stages),
        "deadlock|wrong phase|is read",
    ),
    "phases of empty turned round": (
        pipeline.await_empty,
        lambda wait: lambda empty, it, stages: wait(empty, it + stages, stages),
        "deadlock|wrong phase",
    ),
    "phases of full begin again with each tile": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it % 4, stages),
        "wrong phase|deadlock|is read|is written",
    ),
    "the load does not wait for empty stages": (pipeline.await_empty, _never, "is written without|too many|is read"),
    "the products do not wait for full stages": (pipeline.await_full, _never, "is read (before|without)"),
    "the load waits for the stage before": (
        pipeline.await_empty,
        lambda wait: lambda empty, it, stages: wait(empty, it + 2 * stages - 1, stages),
        "is written without|wrong phase|deadlock|too many",
    ),
    "the products read the stage beside": (
        pipeline.await_full,
        lambda wait: lambda full, it, stages: wait(full, it + 1, stages),
        "is read (before|without)|deadlock|wrong phase",
    ),
    "a stage is given back a step early": (
        pipeline.release,
        lambda release: lambda empty, it, stages, pred: release(empty, it + 1, stages, True),
        "is written without|is read without|too many|deadlock|wrong phase",
    ),
    "a stage is never given back": (pipeline.release, _never, "deadlock"),
    "one arrival is lost": (mbarrier.arrive, _without(3), "deadlock|wrong phase|is written without|is read"),
    "a product is not waited for while the next runs": (
        warpgroup_mma_wait,
        _fewer_in_flight,
        "is written without waiting for the read|registers",
    ),
    "the last product is not waited for": (
        warpgroup_mma_wait,
        _no_wait_at_the_end,
        "is written without waiting for the read|registers",
    ),
    "fewer bytes are expected": (
        mbarrier.expect,
        lambda expect: lambda bar, bytes: expect(bar, bytes // 2),
        "more bytes came|is read without waiting|too many",
    ),
    "more bytes are expected": (
        mbarrier.expect,
        lambda expect: lambda bar, bytes: expect(bar, bytes + 16),
        "deadlock.* 16 bytes missing",
    ),
    "one bulk copy is lost": (bulk_load, _without(4), "deadlock|is read"),
    "one expectation is lost": (mbarrier.expect, _without(2), "deadlock|more bytes came|too many|is read|is written"),
    "barriers count one arrival more": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, count + 1),
        "deadlock",
    ),
    "bulk copies may find barriers that are not initialised": (fence_async_shared, _without(0), "may not find"),
}
WHERE_ROWS_ARE_LOOKED_UP: dict[str, tuple[Any, Change, str]] = {
    "no fence between copies and products": (fence_async_shared, _all_but_first, "is read without a fence"),
    "one fence is lost": (fence_async_shared, _without(2), "is read without a fence"),
    "one thread does not wait for the copies of the others": (
        pipeline.threads_barrier,
        _never,
        "is read without waiting",
    ),
    "copies are not waited for": (async_copy.wait_group, _never, "is read without waiting"),
    "one group of copies too many is in flight": (
        async_copy.wait_group,
        lambda wait: lambda number: wait(number + 1),
        "is read without waiting",
    ),
    "groups are never closed": (async_copy.commit_group, _never, "is read without waiting|under way"),
    "rows are said to be there a step early": (
        pipeline.fill,
        lambda fill: lambda full, it, stages, pred: fill(full, it + 1, stages, True),
        "is read|deadlock|too many|wrong phase",
    ),
}


TOGETHER: dict[str, tuple[Any, Change, str]] = {
    "barriers of both groups count one": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, 1),
        "is written without|wrong phase|deadlock|too many|is read",
    ),
}
BY_TURNS: dict[str, tuple[Any, Change, str]] = {
    "turns are not awaited": (pipeline.await_turn, _never, "wrong phase|is read|too many|is written without"),
    "turns are not passed on": (pipeline.pass_turn, _never, "deadlock"),
    "the first turn is the other group's": (
        pipeline.await_turn,
        lambda wait: lambda turn, number, group: wait(turn, number + 1, group),
        "deadlock|wrong phase|is read",
    ),
}
IN_BOXES: dict[str, tuple[Any, Change, str]] = {
    "no fence between threads and the bulk copies of what they wrote": (
        fence_async_shared,
        _called_by("store_box", _never),
        "is read without a fence",
    ),
    "one thread does not wait for the others before it stores a box": (
        columns.threads_barrier,
        _called_by("store_box", _never),
        "is read without|is written without",
    ),
    "boxes are written before they are stored": (
        tma.store_wait,
        _called_by("store_box", _never),
        "is written without waiting for the read by bulk stores",
    ),
    "one box too many is under way": (
        tma.store_wait,
        _called_by("store_box", lambda wait: lambda pendings: wait(pendings + bool(pendings))),
        "is written without waiting for the read by bulk stores",
    ),
    "boxes that threads store are taken for bulk copies": (
        tma.store_wait,
        _called_by("store_box", lambda wait: lambda pendings: wait(pendings) if pendings else None),
        "is written without waiting for the read by bulk stores",
    ),
    "the last boxes are not waited for": (tma.store_wait, _called_by("_multiply", _never), "ends without waiting"),
}
IN_DHIDDEN: dict[str, tuple[Any, Change, str]] = {
    "no fence before a stage that threads have read is given back": (
        fence_async_shared,
        _called_by("_give_back", _never),
        "is written without a fence after the read",
    ),
    "one thread gives a stage back before the others have read it": (
        pipeline.threads_barrier,
        _called_by("_give_back", _never),
        "is written without waiting for the read",
    ),
    "H is not waited for": (pipeline.await_full, _called_by("_box", _never), "is read (before|without)"),
    "a stage of H is never given back": (pipeline.release, _called_by("_give_back", _never), "deadlock"),
    "one stage of the two is given back twice": (
        pipeline.release,
        _called_by(
            "_give_back", lambda release: lambda empty, it, stages, pred: release(empty, it // 2 * 2, stages, pred)
        ),
        "deadlock|is written without|wrong phase|too many",
    ),
    "H is read a step early": (
        dhidden._box,
        lambda box: lambda bufs, ring, it, first, rows, stages: box(bufs, ring, it + stages - 1, first, rows, stages),
        "deadlock|is read (before|without)|wrong phase|is written without",
    ),
    "H comes for one half alone": (
        gathered.announce,
        _called_by(
            "load_gathered", lambda announce: lambda full, it, stages, size: announce(full, it, stages, size // 2)
        ),
        "more bytes came|is read without waiting|too many",
    ),
}
IN_DWEIGHT: dict[str, tuple[Any, Change, str]] = {
    "rows that do not fill a step are never announced": (
        pipeline.fill,
        _called_by("_load", _never),
        "deadlock|wrong phase|is read",
    ),
    "which rows the first steps read is waited for too late": (
        async_copy.commit_group,
        _without(0),
        "is read (before|without)|under way",
    ),
    "rows are looked up for the step beside": (
        dweight._look_up,
        lambda look: lambda sources, ptr, it, *others: look(sources, ptr, it + 1, *others),
        "is read (before|without)|is written without",
    ),
    "an expert without rows gives a stage back": (
        pipeline.release,
        lambda release: lambda empty, it, stages, pred: release(empty, it, stages, True),
        "too many|is written without|is read without|wrong phase|deadlock",
    ),
}


# Kernels, and what is planted in each.
CASES: dict[str, tuple[Check, dict[str, tuple[Any, Change, str]]]] = {
    "product": (partial(check_product, WHOLE, 40, 40, True, slots=2), IN_ALL | TOGETHER | IN_BOXES),
    "product by turns": (
        partial(check_product, WHOLE, 40, 40, False, slots=2, pingpong=True),
        IN_ALL | BY_TURNS | IN_BOXES,
    ),
    "up": (
        partial(check_up, WHOLE, 40, 40, slots=3),
        IN_ALL | TOGETHER | WHERE_ROWS_ARE_LOOKED_UP | IN_BOXES,
    ),
    "dhidden": (partial(check_dhidden, COUNTS, 40, 40), IN_ALL | TOGETHER | WHERE_ROWS_ARE_LOOKED_UP | IN_DHIDDEN),
    "dweight": (
        # So many programs that a group has boxes of both kinds.
        partial(check_dweight, DEEP, 24, 40, "right", slots=2, programs=3),
        IN_ALL | TOGETHER | WHERE_ROWS_ARE_LOOKED_UP | IN_BOXES | IN_DWEIGHT,
    ),
}
PLANTED = [(kernel, fault) for kernel, (_, faults) in CASES.items() for fault in faults]


def _is_found(kernel: str, fault: str, seeds: range) -> None:
    """In every order of events."""
    check, faults = CASES[kernel]
    what, change, words = faults[fault]
    for seed in seeds:
        with pytest.raises(KernelFault) as found:
            check(seed=seed, changed={what: change})
        first = str(found.value).split("\n")[0]
        assert re.search(words, first), first


@pytest.mark.parametrize("kernel, fault", PLANTED[::6])
def test_planted_faults(kernel: str, fault: str) -> None:
    _is_found(kernel, fault, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("kernel, fault", PLANTED)
def test_planted_faults_in_many_orders(kernel: str, fault: str) -> None:
    _is_found(kernel, fault, range(10))
