"""`make bench`: one layer on a CPU compared with dense products of equal FLOP, on 1 and 2 threads."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest
import torch

from bench.layer_cost import Shape, layer_step, make_layer, measure, schedule_ratio
from bench.meter import measure_use, page_faults
from fusedmoe import MoELayer


def step_and_clear(layer: MoELayer, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> None:
    """Run a step and free its results, including gradients."""
    layer_step(layer, x_SM, dy_SM)
    layer.zero_grad(set_to_none=True)
    x_SM.grad = None


@pytest.mark.parametrize("threads", [1, 2])
def test_layer_beside_dense_products(benchmark, threads: int) -> None:  # type: ignore[no-untyped-def]
    shape = Shape()
    cost = measure(shape, threads, rounds=5)
    layer = make_layer(shape)
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    dy_SM = torch.randn(shape.S, shape.M)
    use = measure_use(partial(step_and_clear, layer, x_SM, dy_SM), x_SM.device)
    faults = page_faults(partial(layer_step, layer, x_SM, dy_SM))
    benchmark.extra_info.update(shape=asdict(shape), **asdict(cost), **use._asdict(), page_faults=faults)
    benchmark.pedantic(layer_step, args=(layer, x_SM, dy_SM), rounds=5, warmup_rounds=1)
    print(f"\n{threads} threads: layer / products = {cost.ratio:.3f}, / products into preallocated memory")
    print(f"= {cost.bare_ratio:.3f}, gate + order + combine = {cost.routing:.1%}, {faults} page faults per step")
    if use.peak_bytes is not None:
        print(f"peak memory: {use.peak_bytes / 2**20:.0f} MiB above the memory before the step, gradients included")


def test_schedule_of_one_chunk_beside_none(benchmark) -> None:  # type: ignore[no-untyped-def]
    """Overhead below 2% in one process without communication. Many short steps, since machine speed drifts."""
    shape = Shape(S=2048)
    ratio = schedule_ratio(shape, 2, rounds=60)
    layer = make_layer(shape)
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    benchmark.extra_info.update(shape=asdict(shape), threads=2, ratio=ratio)
    benchmark.pedantic(layer_step, args=(layer, x_SM, torch.randn(shape.S, shape.M)), rounds=3, warmup_rounds=1)
    print(f"\nschedule of one chunk / none = {ratio:.3f}")
