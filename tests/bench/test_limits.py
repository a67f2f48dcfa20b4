"""Kernel costs and limits, computed by hand."""

from __future__ import annotations

import pytest

from bench.gpu.costs import Cost
from bench.gpu.kernels import KERNELS, PASSES, kernel_costs, pass_costs
from bench.gpu.limits import Ceilings, highest, limit_s, measure_ceilings
from bench.gpu.rehearsal import FakeClock
from bench.gpu.shapes import SHAPES

MIXTRAL = SHAPES[-1]
H200 = Ceilings(790e12, 4.3e12)


def test_shapes_equal_published_model_sizes() -> None:
    sizes = [(shape.S, shape.M, shape.H, shape.E, shape.K) for shape in SHAPES]
    assert sizes == [
        (40960, 768, 256, 128, 8),
        (24576, 1536, 256, 128, 8),
        (24576, 1536, 1024, 32, 2),
        (32768, 4096, 256, 256, 16),
        (32768, 4096, 1024, 64, 4),
        (32768, 4096, 512, 256, 16),
        (262144, 4096, 768, 128, 8),
        (8192, 2048, 768, 128, 8),
        (8192, 4096, 14336, 8, 2),
    ]


def test_mixtral_kernel_costs_equal_hand_computation() -> None:
    """T = 8192 tokens, d = 4096, n = 14336, E = 8, K = 2, so R = 16384 rows; two bytes an element."""
    tokens, rows, hidden, w2 = 8192 * 4096, 16384 * 4096, 16384 * 14336, 8 * 14336 * 4096
    one_product = 2 * 16384 * 14336 * 4096
    right = {
        "up": Cost(2 * one_product, 2 * (tokens + 2 * w2 + 3 * hidden)),
        "down": Cost(one_product, 2 * (hidden + w2 + rows)),
        "dhidden": Cost(one_product, 2 * (tokens + w2 + 5 * hidden)),
        "dinput": Cost(2 * one_product, 2 * (2 * hidden + 2 * w2 + rows)),
        "dW1": Cost(2 * one_product, 2 * (tokens + 2 * hidden + 2 * w2)),
        "dW2": Cost(one_product, 2 * (tokens + hidden + w2)),
        "gather-and-sum": Cost(2 * rows, 2 * (rows + tokens) + 8 * 16384 + 4 * 16384),
        "dX sum": Cost(rows, 2 * (rows + tokens) + 8 * 16384),
        "gate forward": Cost(2 * tokens * 8, 2 * (tokens + 8 * 4096) + 4 * 8192 * 8 + 12 * 16384),
    }
    found = kernel_costs(MIXTRAL)
    assert set(found) == set(KERNELS)
    assert {name: found[name] for name in right} == right


def test_mixtral_roofline_equals_hand_computation() -> None:
    """P bounds the products, B bounds the sums: 6·R·d·n FLOP forward, and (R + T)·d elements twice."""
    products_s = 6 * 16384 * 4096 * 14336 / 790e12
    sum_s = (2 * (16384 + 8192) * 4096 + 8 * 16384) / 4.3e12
    order_s = (8 * (2 * 16384 + 2 * 16384 + 8) + 4 * 9) / 4.3e12
    weights_s = 4 * 16384 / 4.3e12
    forward_s = limit_s(pass_costs(MIXTRAL, "forward"), H200)
    backward_s = limit_s(pass_costs(MIXTRAL, "backward"), H200)
    assert forward_s == pytest.approx(products_s + sum_s + weights_s + order_s, rel=1e-12)
    assert backward_s == pytest.approx(2 * products_s + sum_s, rel=1e-12)
    assert limit_s(pass_costs(MIXTRAL, "both"), H200) == pytest.approx(forward_s + backward_s, rel=1e-12)
    assert forward_s == pytest.approx(7.36e-3, rel=0.01)


def test_small_experts_are_memory_bound() -> None:
    """1.4B: the bytes of the down projection, 4·R·(n + d) plus weights, take longer than its FLOP."""
    down = kernel_costs(SHAPES[0])["down"]
    assert limit_s([down], H200) == down.bytes / 4.3e12 > down.flops / 790e12


def test_pass_flop_equals_sum_of_kernel_flop() -> None:
    assert {kernel for kernels in PASSES.values() for kernel in kernels} <= set(KERNELS)
    for shape in SHAPES:
        for name in PASSES:
            parts = pass_costs(shape, name)
            assert shape.flops(name) == pytest.approx(sum(part.flops for part in parts), rel=0.02)


def test_ceilings_are_derived_from_measured_times() -> None:
    import torch

    found = measure_ceilings(FakeClock(4.0, 0.5), torch.device("cpu"), size=32, copied_bytes=2048)
    assert found == pytest.approx((2 * 32**3 / 4e-3, 2 * 2048 / 0.5e-3))
    assert highest([Ceilings(1, 5), Ceilings(2, 3)]) == Ceilings(2, 5)
