"""The Gluon kernel for one grouped product, in the interpreter, against float64."""

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
@pytest.mark.parametrize("stages, programs, slots", [(2, 1, 2), (4, 3, 1), *slowly((3, 50, 2))])
def test_rings_and_grids(stages: int, programs: int, slots: int, pingpong: bool) -> None:
    check_product(WHOLE_AND_NOT, 40, 40, True, stages=stages, programs=programs, slots=slots, pingpong=pingpong)


@pytest.mark.parametrize("pingpong, boxes", [(False, 10), (True, 4)], ids=["together", "by turns"])
def test_what_leaves_by_bulk_copies(pingpong: bool, boxes: int) -> None:
    """Rows of a group that are all its expert's, in boxes of 16 columns; the other rows are stored by threads."""
    stored = []

    def noted(store: Any) -> Any:
        return lambda desc, coord, box: (stored.append(coord), store(desc, coord, box))[1]

    changed = {bulk_store: noted}
    check_product((17, 3, 6), 24, 24, True, bias=True, pingpong=pingpong, changed=changed)
    assert len(stored) == boxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_box_that_runs_into_padding_is_found(dtype: torch.dtype) -> None:
    def wrong(store: Any) -> Any:
        return lambda x, out, slot, row, end, *others: store(x, out, slot, row, end + 2, *others)

    with pytest.raises(AssertionError):
        check_product((8, 7), 24, 24, True, dtype, changed={store_box: wrong})


@pytest.mark.parametrize("transposed", [True, *slowly(False)], ids=["down", "dinput"])
def test_tiles_as_on_a_gpu(transposed: bool) -> None:
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE, stages=4, slots=2)
    check_product((130, 0, 70), 328, 264, transposed, tile=LARGE_TURNS, stages=6, pingpong=True)


def test_another_order_of_events() -> None:
    check_product(ALL_ODD, 56, 40, True, seed=1)
    check_product(ALL_ODD, 56, 40, False, seed=1, pingpong=True)
