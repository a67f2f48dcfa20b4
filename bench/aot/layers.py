"""Run layers of given sizes without data, to record the launches of a benchmark.

with standin.recording(90) as launches:
    run(SHAPES[0])
"""

from __future__ import annotations

import torch

from bench.gpu.case import Case
from bench.gpu.kernels import kernel_steps
from bench.gpu.layer import Layer
from bench.gpu.ours import fusedmoe_layer
from bench.gpu.ranks import puts_layer
from bench.gpu.shapes import Shape
from bench.gpu.spread import COUNTS

DEVICE = torch.device("meta")


def empty_case(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Case:
    """`make_case` without memory."""

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=DEVICE)

    S, M, H, E, K = shape.S, shape.M, shape.H, shape.E, shape.K
    return Case(
        shape,
        x_SM=empty(S, M),
        dy_SM=empty(S, M),
        expert_SK=empty(S, K, dtype=torch.int64),
        weight_SK=empty(S, K, dtype=torch.float32),
        router_EM=empty(E, M),
        w1=empty(E, 2, H, M),
        w2=empty(E, M, H),
    )


def run(shape: Shape, dtype: torch.dtype = torch.bfloat16, counts: tuple[int, ...] = COUNTS) -> None:
    """Run a layer's kernels individually, both passes, and the passes over virtual ranks with one-sided puts.

    `counts`: numbers of virtual ranks, for shapes that are split over ranks.
    """
    case = empty_case(shape, dtype)
    for step in kernel_steps(case):
        step.run(step.before())
    layers = [fusedmoe_layer(case)]
    if shape.spread:
        layers += [puts_layer(case, count) for count in counts if shape.E % count == 0]
    for layer in layers:
        both_passes(layer, case)


def both_passes(layer: Layer, case: Case) -> None:
    layer.backward(layer.forward(), case.dy_SM)
