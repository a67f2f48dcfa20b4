"""Which kinds of tasks can run: by each thing that decides it, and what is said of a plan with others."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.runtime import runnable as module
from fusedmoe.runtime.runnable import Here, require_runnable, runnable_kinds
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import fused_pass
from fusedmoe.schedule.task import FUSED, PIPELINE
from fusedmoe.schedule.timeline import KINDS

CUDA = torch.device("cuda", 0)
ALL = Here(2, 1, dtype=torch.bfloat16, device=CUDA, heap=lambda: True)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Triton's interpreter serves CPUs."""
    monkeypatch.setattr(module, "triton_serves", lambda device: device.type == "cuda")


def test_kernels_send_by_themselves_only_where_all_allows_it() -> None:
    """In every combination: one axis, the library's products, nothing between, a dtype and a device with kernels, a
    heap; and only in a layer that follows itself."""
    seen = set()
    for ep, esp, grouped, direct, dtype, device, heap in itertools.product(
        (1, 2, 8),
        (1, 4),
        (True, False),
        (True, False),
        (torch.float32, torch.bfloat16, torch.float64),
        (CUDA, torch.device("cpu")),
        (True, False),
    ):
        here = Here(ep, esp, grouped, direct, dtype, device, lambda heap=heap: heap)
        parts = PIPELINE if esp > 1 else PIPELINE[::2]
        kinds = runnable_kinds(here, "itself")
        own = set(kinds) - set(parts)
        assert set(parts) <= set(kinds) and own <= FUSED.keys()
        can = grouped and direct and dtype != torch.float64 and device == CUDA and heap and (ep > 1) != (esp > 1)
        assert own == ({"dispatch-expert-combine" if ep > 1 else "all-gather-expert-reduce-scatter"} if can else set())
        seen |= own
        for follows in ("step", "blocks"):
            others = runnable_kinds(here, follows)  # type: ignore[arg-type]
            assert set(parts) <= set(others) <= set(KINDS) and FUSED.keys().isdisjoint(others)
            assert ("weight-gradient" in others) == (follows == "blocks") and "gradient-all-reduce" in others
    assert seen == FUSED.keys()  # no kind is there that nothing runs


def test_the_heap_is_asked_last() -> None:
    """It is collective: a rank that asked alone would wait for the others."""

    def asked() -> bool:
        raise AssertionError("asked for the heap")

    with pytest.raises(AssertionError, match="asked for the heap"):
        runnable_kinds(replace(ALL, heap=asked), "itself")
    for change in ({"esp": 2}, {"ep": 1}, {"grouped": False}, {"direct": False}, {"dtype": torch.float64}):
        runnable_kinds(replace(ALL, heap=asked, **change), "itself")  # type: ignore[arg-type]
    runnable_kinds(replace(ALL, heap=asked, device=torch.device("cpu")), "itself")
    for follows in ("step", "blocks"):
        runnable_kinds(replace(ALL, heap=asked), follows)  # type: ignore[arg-type]


def test_a_plan_with_others_is_refused_with_what_can_run() -> None:
    plan = Plan.parse("compute: b2.E0 b2.WG0\ninter: b2.D0 b2.C0")
    require_runnable(plan, runnable_kinds(ALL, "blocks"), "a plan")
    what = r"the backward plan has b2\.WG0 \(weight-gradient\), which cannot run here; what can: attention, dispatch,"
    with pytest.raises(ConfigError, match=what):
        require_runnable(plan, runnable_kinds(ALL, "step"), "the backward plan")
    for kind in FUSED:
        with pytest.raises(ConfigError, match=rf"\({kind}\), which cannot run here"):
            require_runnable(fused_pass(kind, 2, "forward"), runnable_kinds(ALL, "step"), "a plan")
