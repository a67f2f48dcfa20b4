"""Time each kernel of a layer on a GPU against its hardware limit, at all shapes (run by `make bench-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.gpu.case import make_case
from bench.gpu.clock import Step
from bench.gpu.device import has_gpu
from bench.gpu.kernels import KERNELS, kernel_steps
from bench.gpu.session import Session, ShapeSkipped, free_memory, nothing_kept, waiting
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.suite import Row, measure_kernels

pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU")

Measured = dict[str, tuple[Step, Row]]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def measured(request: pytest.FixtureRequest, gpu: Session) -> Iterator[Measured]:
    shape = request.param
    try:
        seconds = gpu.seconds_for("kernels", shape)
    except ShapeSkipped as why:
        pytest.skip(str(why))
    with nothing_kept(), gpu.piece("kernels", shape):
        found = measure(gpu, shape, seconds)
    yield found
    found.clear()
    free_memory()


def measure(gpu: Session, shape: Shape, seconds: float) -> Measured:
    steps = kernel_steps(make_case(shape, gpu.device))
    rows = gpu.add("kernels", shape, measure_kernels(shape, steps, gpu.clock, seconds))
    return {step.name: (step, row) for step, row in zip(steps, rows, strict=True)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark, measured: Measured, kernel: str) -> None:  # type: ignore[no-untyped-def]
    """The result is in `extra_info`; pytest-benchmark's own times are host times, including launches and caches."""
    if kernel not in measured:
        pytest.skip("not spread over virtual ranks")
    step, row = measured[kernel]
    benchmark.extra_info.update(row)
    benchmark.pedantic(waiting(step.run), setup=lambda: ((step.before(),), {}), rounds=3)
