"""The Gluon kernel for weight gradients, in the interpreter, compared with float64."""

from __future__ import annotations

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tests.kernels.gluon.grouped_cases import EACH_ROUTING, LARGE, ROUTINGS, check_dweight

ALL_ODD = ROUTINGS["all odd"]
SIDES = pytest.mark.parametrize("gather", ["right", "left"], ids=["dw1", "dw2"])


@SIDES
@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_dweight_of_every_routing(routing: str, gather: str) -> None:
    check_dweight(ROUTINGS[routing], 24, 40, gather)


@SIDES
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("height, width", [(72, 40), (16, 32), *slowly((8, 8), (24, 104))])
def test_dweight_of_sizes_not_divisible_by_tile(height: int, width: int, gather: str, dtype: torch.dtype) -> None:
    check_dweight((17, 0, 33, 16), height, width, gather, dtype)


@SIDES
@pytest.mark.parametrize("stages, lag, programs", [(3, 1, 1), (5, 3, 3), *slowly((5, 1, 1), (4, 2, 50))])
def test_dweight_with_any_stage_and_program_count(stages: int, lag: int, programs: int, gather: str) -> None:
    check_dweight((40, 1, 37), 24, 40, gather, stages=stages, lag=lag, programs=programs)


@SIDES
@pytest.mark.parametrize("added", [torch.float32, *slowly(torch.bfloat16)], ids=["in_place", "widened"])
@pytest.mark.parametrize("routing", ["empty between", *slowly("nothing", "one row", "all odd")])
def test_dweight_accumulates_into_addend(routing: str, added: torch.dtype, gather: str) -> None:
    check_dweight(ROUTINGS[routing], 24, 40, gather, added=added)
    check_dweight(ROUTINGS[routing], 40, 72, gather, added=added, programs=3, seed=1)


@SIDES
def test_dweight_with_gpu_tile_sizes(gather: str) -> None:
    check_dweight((200, 0, 70), 136, 264, gather, tile=LARGE, stages=4, lag=2, slots=2)


@SIDES
def test_dweight_in_other_event_order(gather: str) -> None:
    check_dweight((37, 0, 21, 3), 24, 40, gather, seed=1)
