"""Every kernel in many orders of events: values and gradients, over irregular routings, sizes, rings and grids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from fusedmoe.kernels.activation import ACTIVATIONS
from tests.kernels.gluon.grouped_cases import ROUTINGS, check_dhidden, check_dweight, check_product, check_up

pytestmark = pytest.mark.slow
KERNELS = ("up", "product", "dhidden", "dweight")
# Number of orders for each combination of sizes, stages and programs.
ORDERS = 30
SIZES = ((40, 24), (8, 8), (72, 40), (16, 104), (56, 16))
# The steps of a matrix's gradient are rows, so these cases have more rows.
DEEP = {"several steps": (50, 0, 16, 1), "steps with a rest": (0, 37, 20, 0)}


@pytest.mark.parametrize("routing", [*ROUTINGS, *DEEP])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_in_many_event_orders(kernel: str, routing: str) -> None:
    counts, activations = (ROUTINGS | DEEP)[routing], [*ACTIVATIONS]
    for seed in range(ORDERS):
        depth, columns = SIZES[seed % len(SIZES)]
        dtype, odd = (torch.bfloat16, torch.float16)[seed // 5 % 2], bool(seed // 3 % 2)
        stages, programs = 2 + seed % 4, 1 + seed % 3
        ring = {"stages": stages, "programs": programs, "seed": seed, "dtype": dtype}
        lag, activation = seed // 4 % (stages - 1), activations[seed % len(activations)]
        if kernel == "up":
            slots = (1, 1 + ACTIVATIONS[activation].num_projections)[seed // 7 % 2]
            check_up(counts, depth, columns, activation, bias=odd, slots=slots, lag=lag, **ring)
        elif kernel == "product":
            turns, slots = seed % 2 == 0, 1 + seed // 7 % 2
            check_product(counts, depth, columns, odd, bias=seed // 6 % 2 == 0, pingpong=turns, slots=slots, **ring)
        elif kernel == "dhidden":
            check_dhidden(counts, depth, columns, activation, weighted=odd, lag=lag, **ring)
        else:
            # This kernel makes a step visible before it starts the next one.
            ring["stages"] += stages == 2
            slots = 1 + seed // 7 % 2
            check_dweight(counts, depth, columns, "left" if odd else "right", lag=max(lag, 1), slots=slots, **ring)
