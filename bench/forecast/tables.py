"""The forecast as tables: kernels beside what was measured, candidates, and passes beside what others published."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.forecast.machine import Gpu
from bench.forecast.measured import Measured
from bench.forecast.model import gluon_s, other_s, triton_s
from bench.forecast.work import PRODUCTS, work
from bench.gpu.kernels import PASSES, kernel_costs
from bench.gpu.shapes import Shape
from bench.report import PUBLISHED
from fusedmoe.kernels.triton.grouped.configs import HopperConfig, Variant, bucket, by_shape, gluon_candidates

# What the tuner calls each product.
_OPERATION = {"dW1": "dw1", "dW2": "dw2"}


def candidates(operation: str, shape: Shape) -> list[HopperConfig]:
    """Those of the Gluon form, in the order in which the tuner tries them."""
    gathers, activation = operation not in ("down", "dinput"), "swiglu" if operation in ("up", "dhidden") else ""
    name = _OPERATION.get(operation, operation)
    variant = Variant(name, "bfloat16", "ieee", activation, gathers, False, True, True)
    depth = int(work(operation, shape).depth)
    found = by_shape(gluon_candidates(variant, (9, 0)), bucket(shape.rows, shape.E), depth)
    return [one for one in found if isinstance(one, HopperConfig)]


def candidate_seconds(operation: str, shape: Shape, gpu: Gpu) -> dict[HopperConfig, float]:
    cost = kernel_costs(shape)[operation]
    return {one: gluon_s(work(operation, shape), cost, one, gpu) for one in candidates(operation, shape)}


def kernel_seconds(name: str, shape: Shape, gpu: Gpu, gluon: bool = False) -> float:
    """`gluon`: in that form, where there is one and it is faster."""
    cost = kernel_costs(shape)[name]
    if name not in PRODUCTS:
        return other_s(name, cost, shape.rows, gpu)
    seconds = triton_s(work(name, shape), cost, gpu)
    return min([seconds, *candidate_seconds(name, shape, gpu).values()]) if gluon else seconds


def pass_tflops(name: str, shape: Shape, gpu: Gpu, gluon: bool = False) -> float:
    seconds = sum(kernel_seconds(kernel, shape, gpu, gluon) for kernel in PASSES[name])
    return shape.flops(name) / seconds / 1e12


def check_table(shapes: Sequence[Shape], gpu: Gpu, found: Measured) -> str:
    """The Triton form: forecast, measured, and by how much the forecast is too long."""
    names = PASSES["both"]
    rows, errors = [], []
    for shape in shapes:
        cells = [shape.name]
        for name in names:
            seconds, real = kernel_seconds(name, shape, gpu), found.seconds.get((name, shape.name))
            if real is None:  # the shape has come since
                cells.append(f"{1e6 * seconds:.0f}/–")
                continue
            errors.append(seconds / real - 1)
            cells.append(f"{1e6 * seconds:.0f}/{1e6 * real:.0f} {errors[-1]:+.0%}")
        rows.append(cells)
    sizes = [abs(error) for error in errors]
    word = f"{statistics.median(sizes):.1%} in the median, {max(sizes):.0%} at the most"
    title = f"The Triton form on an {gpu.name}: microseconds forecast/measured ({found.file.name}); off by {word}"
    return _table(title, ["shape", *names], rows)


def candidate_table(shapes: Sequence[Shape], gpu: Gpu, found: Measured | None) -> str:
    rows = []
    for shape in shapes:
        for operation in PRODUCTS:
            flops = kernel_costs(shape)[operation].flops
            triton = kernel_seconds(operation, shape, gpu)
            cells = [shape.name, operation, f"{1e6 * triton:.0f}"]
            real = None if found is None else found.seconds.get((operation, shape.name))
            cells.append("" if real is None else f"{1e6 * real:.0f}")
            for one, seconds in candidate_seconds(operation, shape, gpu).items():
                tile = f"{one.bm}x{one.bn}{' by turns' if one.pingpong else ''}"
                cells.append(f"{tile} {1e6 * seconds:.0f} ({flops / seconds / 1e12:.0f})")
            rows.append(cells)
    head = ["shape", "operation", "Triton forecast", "measured", "Gluon, tried first", "and second"]
    title = f"Candidates of the Gluon form on an {gpu.name}: microseconds (TFLOP/s), in the order of trying them"
    return _table(title, head, rows)


def pass_table(shapes: Sequence[Shape], gpu: Gpu, found: Measured | None) -> str:
    sonic = PUBLISHED["SonicMoE"]

    def pair(shape: Shape, gluon: bool) -> str:
        return "/".join(f"{pass_tflops(name, shape, gpu, gluon):.0f}" for name in ("forward", "backward"))

    rows = []
    for shape in shapes:
        real = [None if found is None else found.tflops.get((name, shape.name)) for name in ("forward", "backward")]
        rows.append(
            [
                shape.name,
                "" if None in real else "/".join(f"{rate:.0f}" for rate in real),
                pair(shape, gluon=False),
                pair(shape, gluon=True),
                "/".join(f"{rate:.0f}" for rate in sonic.tflops.get(shape.name, ())),
            ]
        )
    head = ["shape", "Triton measured", "Triton forecast", "with Gluon forecast", f"SonicMoE, {sonic.gpu}, published"]
    return _table(f"Passes on an {gpu.name}: TFLOP/s forward/backward", head, rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, "", *text])
