"""The Gluon kernel for one grouped product, in the interpreter, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")


from fusedmoe.kernels.gluon.grouped.columns import store_box
from fusedmoe.kernels.gluon.grouped.pipeline import bulk_store
from tests.kernels.gluon.grouped_cases import EACH_ROUTING, LARGE, LARGE_TURNS, ROUTINGS, check_product

ALL_ODD = ROUTINGS["all odd"]
WHOLE_AND_NOT = (24, 0, 3, 17)


@pytest.mark.parametrize("transposed", [True, False], ids=["down", "dinput"])
@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_product_of_every_routing(routing: str, transposed: bool) -> None:
    check_product(ROUTINGS[routing], 40, 40, transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("depth, columns", [(72, 40), *slowly((8, 8), (16, 16), (24, 104))])
def test_product_of_sizes_not_divisible_by_tile(depth: int, columns: int, dtype: torch.dtype) -> None:
    check_product(ALL_ODD, depth, columns, True, dtype)
    check_product(ALL_ODD, depth, columns, False, dtype)


def test_product_with_bias() -> None:
    check_product(ALL_ODD, 24, 40, True, bias=True)


@pytest.mark.parametrize("pingpong", [False, True], ids=["cooperative", "pingpong"])
@pytest.mark.parametrize("stages, programs, slots", [(2, 1, 2), (4, 3, 1), *slowly((3, 50, 2))])
def test_product_with_any_stage_and_program_count(stages: int, programs: int, slots: int, pingpong: bool) -> None:
    check_product(WHOLE_AND_NOT, 40, 40, True, stages=stages, programs=programs, slots=slots, pingpong=pingpong)


@pytest.mark.parametrize("pingpong, boxes", [(False, 10), (True, 4)], ids=["cooperative", "pingpong"])
def test_full_boxes_are_stored_by_bulk_copies(pingpong: bool, boxes: int) -> None:
    """Row groups of a single expert leave in boxes of 16 columns; threads store the other rows."""
    stored = []

    def noted(store: Any) -> Any:
        return lambda desc, coord, box: (stored.append(coord), store(desc, coord, box))[1]

    changed = {bulk_store: noted}
    check_product((17, 3, 6), 24, 24, True, bias=True, pingpong=pingpong, changed=changed)
    assert len(stored) == boxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_box_overlapping_padding_is_detected(dtype: torch.dtype) -> None:
    def wrong(store: Any) -> Any:
        return lambda x, out, slot, row, end, *others: store(x, out, slot, row, end + 2, *others)

    with pytest.raises(AssertionError):
        check_product((8, 7), 24, 24, True, dtype, changed={store_box: wrong})


@pytest.mark.parametrize("transposed", [True, *slowly(False)], ids=["down", "dinput"])
def test_product_with_gpu_tile_sizes(transposed: bool) -> None:
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE, stages=4, slots=2)
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE_TURNS, stages=6, pingpong=True)


def test_product_in_other_event_order() -> None:
    check_product(ALL_ODD, 56, 40, True, seed=1)
    check_product(ALL_ODD, 56, 40, False, seed=1, pingpong=True)
