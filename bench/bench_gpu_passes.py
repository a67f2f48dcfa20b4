"""Time the experts' forward and backward on a GPU against their limit and other libraries (run by `make bench-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu.case import make_case
from bench.gpu.clock import Step
from bench.gpu.device import has_gpu
from bench.gpu.kernels import PASSES
from bench.gpu.ours import NAME, OURS
from bench.gpu.peers import PEERS
from bench.gpu.reference import make_reference
from bench.gpu.session import Session, ShapeSkipped, free_memory, nothing_kept, waiting
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.suite import Row, measure_passes, pass_steps, ready_layers
from bench.gpu.with_router import measure_with_router

pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU")

Measured = dict[str, tuple[Step, Row]]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def measured(request: pytest.FixtureRequest, gpu: Session) -> Iterator[Measured]:
    shape = request.param
    try:
        seconds = gpu.seconds_for("passes", shape)
    except ShapeSkipped as why:
        pytest.skip(str(why))
    with nothing_kept(), gpu.piece("passes", shape):
        found = measure(gpu, shape, seconds)
    yield found
    found.clear()
    free_memory()


def measure(gpu: Session, shape: Shape, seconds: float) -> Measured:
    # Skip variants that hung or started too slowly, and peers whose timing never ended.
    out = gpu.spool.left_out()
    timing_hung = any(work["name"] == "timing" and work["shape"] == shape.name for work in gpu.spool.unfinished())
    makers = {**OURS, **({} if timing_hung else PEERS)}
    case = make_case(shape, gpu.device)
    right = make_reference(case, torch.float32)
    wanted = {name: make for name, make in makers.items() if name == NAME or name not in out}
    ready = ready_layers(case, wanted, right, gpu.spool)
    del right
    free_memory()
    steps = [step for layer, _ in ready for step in pass_steps(layer, case)]
    with gpu.spool.work("passes", shape.name, "timing"):
        rows = measure_passes(shape, ready, steps, gpu.clock, seconds)
    routed = measure_with_router(case, gpu.clock, gpu.spool, out)
    rows = gpu.add("passes", shape, [*rows, *routed])[: len(rows)]
    return {step.name: (step, row) for step, row in zip(steps, rows, strict=True)}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("variant", [*OURS, *PEERS])
def test_pass(benchmark, measured: Measured, variant: str, name: str) -> None:  # type: ignore[no-untyped-def]
    """The result is in `extra_info`; pytest-benchmark's own times are host times, including launches and caches."""
    if f"{variant} {name}" not in measured:
        pytest.skip(f"{variant} is left out, see above")
    step, row = measured[f"{variant} {name}"]
    benchmark.extra_info.update(row)
    benchmark.pedantic(waiting(step.run), setup=lambda: ((step.before(),), {}), rounds=3)
