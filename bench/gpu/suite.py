"""Result rows of one shape: check, measure, count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.gpu.case import Case
from bench.gpu.clock import Clock, Step, Times
from bench.gpu.costs import Cost
from bench.gpu.kernels import PASSES, kernel_costs, pass_costs
from bench.gpu.layer import Layer, Unavailable
from bench.gpu.memory import saved_bytes
from bench.gpu.notes import gpu_works
from bench.gpu.ours import NAME, OURS
from bench.gpu.reference import Reference, find_errors, wrong
from bench.gpu.shapes import Shape
from bench.gpu.spool import Spool
from bench.meter import measure_use

# Duration of a variant's energy measurement.
_ENERGY_S = 0.5

Row = dict[str, Any]
Maker = Callable[[Case], Layer]


class WrongResult(Exception):
    """Raised for errors beyond rounding, for which times are meaningless."""


class ContextLost(Exception):
    """Raised if the GPU accepts no more work from this process."""


def measure_kernels(shape: Shape, steps: Sequence[Step], clock: Clock, seconds: float) -> list[Row]:
    times, costs = clock.measure(steps, seconds), kernel_costs(shape)
    return [
        _row(shape, "kernel", step.name, NAME, [costs[step.name]], costs[step.name].flops, times[step.name])
        | {**step.told(), **clock.conditions}
        for step in steps
    ]


def ready_layers(case: Case, makers: Mapping[str, Maker], right: Reference, spool: Spool) -> list[tuple[Layer, Row]]:
    """Return the variants with correct results, with common fields of their rows; others are skipped.

    Raises:
        WrongResult: the library's own layer is wrong.
        ContextLost: a variant has broken the process's CUDA context.
    """
    ready = []
    for name, make in makers.items():
        with spool.work("passes", case.shape.name, name):
            try:
                layer = make(case)
                errors = find_errors(layer, case, right)
                if faults := wrong(errors):
                    raise WrongResult("wrong result: " + ", ".join(faults))
                found = {"version": layer.version, "errors": errors, "saved_bytes": saved_bytes(layer)}
                use = measure_use(partial(_both, layer, case), case.x_SM.device, _ENERGY_S)
                ready.append((layer, found | {"peak_bytes": use.peak_bytes, "energy_j": use.energy_j}))
            except Exception as error:
                if name == NAME:
                    raise
                if name in OURS and not isinstance(error, Unavailable):
                    spool.add("wrong", suite="passes", shape=case.shape.name, name=name)
                known = isinstance(error, Unavailable | WrongResult)
                word = str(error) if known else f"{type(error).__name__}: {error}"
                spool.add("skipped", suite="passes", shape=case.shape.name, name=name, word=word.splitlines()[0])
                if not gpu_works():
                    spool.add("lost", suite="passes", shape=case.shape.name, name=name)
                    raise ContextLost(f"after {name}: {word}") from error
    return ready


def _both(layer: Layer, case: Case) -> None:
    layer.backward(layer.forward(), case.dy_SM)


def pass_steps(layer: Layer, case: Case) -> list[Step]:
    """Return a step per pass, named "variant pass". Forward saves tensors for backward, as in training."""
    return [
        Step(f"{layer.name} forward", lambda _: layer.forward()),
        Step(f"{layer.name} backward", lambda y_SM: layer.backward(y_SM, case.dy_SM), layer.forward),
        Step(f"{layer.name} both", lambda _: layer.backward(layer.forward(), case.dy_SM)),
    ]


def measure_passes(
    shape: Shape, ready: Sequence[tuple[Layer, Row]], steps: Sequence[Step], clock: Clock, seconds: float
) -> list[Row]:
    """Return a row per variant and pass; `steps`: those of `pass_steps` of all variants."""
    times = clock.measure(steps, seconds)
    return [
        _row(shape, "pass", name, layer.name, pass_costs(shape, name), shape.flops(name), times[f"{layer.name} {name}"])
        | found
        | clock.conditions
        for layer, found in ready
        for name in PASSES
    ]


def _row(shape: Shape, kind: str, name: str, variant: str, parts: list[Cost], flops: int, times: Times) -> Row:
    return {
        "shape": shape.name,
        "kind": kind,
        "name": name,
        "variant": variant,
        "parts": [list(part) for part in parts],
        "flops": flops,
        "measured_ms": times.median_ms,
        "low_ms": times.low_ms,
        "high_ms": times.high_ms,
        "runs": times.runs,
    }
