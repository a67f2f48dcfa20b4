"""Faults planted in the grouped kernels: each is found, whichever the order of events was going to be."""

from __future__ import annotations

import re
from collections.abc import Callable
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

from fusedmoe.kernels.gluon.grouped import pipeline
from fusedmoe.kernels.gluon.interpreter import KernelFault
from tests.kernels.gluon.grouped_cases import check_product, check_up

COUNTS = (3, 0, 9, 11)
SEEDS = range(10)
Change = Callable[[Any], Any]


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


def _never(original: Any) -> Any:
    return lambda *arguments, **keywords: None


def _all_but_first(original: Any) -> Any:
    calls = count()
    return lambda: original() if next(calls) == 0 else None


def _fewer_in_flight(original: Any) -> Any:
    return lambda num_outstanding=0, deps=(): original(num_outstanding + 1, deps)


def _no_wait_at_the_end(original: Any) -> Any:
    return lambda num_outstanding=0, deps=(): original(1, deps)


# What is changed, what of, and what the message says.
IN_BOTH: dict[str, tuple[Any, Change, str]] = {
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
    "the load does not wait for empty stages": (pipeline.await_empty, _never, "is written without|too many"),
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
    "one bulk copy is lost": (tma.async_copy_global_to_shared, _without(4), "deadlock|is read"),
    "one expectation is lost": (mbarrier.expect, _without(2), "deadlock|more bytes came|too many|is read|is written"),
    "barriers count one arrival more": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, count + 1),
        "deadlock",
    ),
    "bulk copies may find barriers that are not initialised": (fence_async_shared, _without(0), "may not find"),
    "barriers of both groups count one": (
        mbarrier.init,
        lambda init: lambda bar, count: init(bar, 1),
        "is written without|wrong phase|deadlock|too many|is read",
    ),
}
IN_UP: dict[str, tuple[Any, Change, str]] = {
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


def _is_found(check: Callable[..., None], what: Any, change: Change, words: str) -> None:
    """In every order of events."""
    for seed in SEEDS:
        with pytest.raises(KernelFault) as found:
            check(COUNTS, 40, 40, seed=seed, changed={what: change})
        first = str(found.value).split("\n")[0]
        assert re.search(words, first), first


@pytest.mark.parametrize("fault", IN_BOTH)
def test_faults_in_product(fault: str) -> None:
    _is_found(lambda *sizes, **more: check_product(*sizes, True, **more), *IN_BOTH[fault])


@pytest.mark.parametrize("fault", [*IN_BOTH, *IN_UP])
def test_faults_in_up(fault: str) -> None:
    _is_found(check_up, *(IN_UP | IN_BOTH)[fault])
