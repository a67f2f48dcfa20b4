from __future__ import annotations

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tests.kernels.gluon.grouped_cases import EACH_ROUTING, LARGE, LARGE_TURNS, ROUTINGS, check_product

ALL_ODD = ROUTINGS["all odd"]


@pytest.mark.parametrize("transposed", [True, False], ids=["down", "dinput"])
@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_every_routing(routing: str, transposed: bool) -> None:
    check_product(ROUTINGS[routing], 40, 40, transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("depth, columns", [(72, 40), *slowly((8, 8), (16, 16), (24, 104))])
def test_sizes_that_divide_nothing(depth: int, columns: int, dtype: torch.dtype) -> None:
    check_product(ALL_ODD, depth, columns, True, dtype)
    check_product(ALL_ODD, depth, columns, False, dtype)


def test_a_bias_of_some_columns() -> None:
    check_product(ALL_ODD, 24, 40, True, bias=True)


@pytest.mark.parametrize("pingpong", [False, True], ids=["together", "by turns"])
@pytest.mark.parametrize("stages, programs", [(2, 1), (4, 3), *slowly((3, 50))])
def test_rings_and_grids(stages: int, programs: int, pingpong: bool) -> None:
    check_product(ALL_ODD, 40, 40, True, stages=stages, programs=programs, pingpong=pingpong)


@pytest.mark.parametrize("transposed", [True, *slowly(False)], ids=["down", "dinput"])
def test_tiles_as_on_a_gpu(transposed: bool) -> None:
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE, stages=4)
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE_TURNS, stages=6, pingpong=True)


@pytest.mark.parametrize("seed", [1, *slowly(*range(2, 9))])
def test_orders_of_events(seed: int) -> None:
    check_product(ALL_ODD, 56, 40, True, seed=seed)
    check_product(ALL_ODD, 56, 40, False, seed=seed, pingpong=True)
