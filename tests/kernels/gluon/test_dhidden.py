from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tests.kernels.gluon.grouped_cases import (
    EACH_ACTIVATION,
    EACH_ROUTING,
    LARGE,
    LARGE_TURNS,
    ROUTINGS,
    SMALL_TURNS,
    check_dhidden,
)

ALL_ODD = ROUTINGS["all odd"]
TURNS = {"pingpong": True, "tile": SMALL_TURNS}
FORMS = pytest.mark.parametrize("form", [{}, TURNS], ids=["together", "by turns"])
# Tiles and rows of parts that are full and not.
WHOLE_AND_NOT = (40, 0, 3, 17, 26)


@FORMS
@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_every_routing(routing: str, form: dict[str, Any]) -> None:
    check_dhidden(ROUTINGS[routing], 40, 40, **form)


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no weight", "weight"])
@pytest.mark.parametrize("activation", EACH_ACTIVATION)
def test_every_activation(activation: str, weighted: bool) -> None:
    check_dhidden(ALL_ODD, 32, 40, activation, weighted=weighted)
    check_dhidden(WHOLE_AND_NOT, 32, 40, activation, weighted=weighted, **TURNS)


@pytest.mark.parametrize("wanted", ["dh ds", *slowly("dh", "a ds", "ds")])
def test_what_nobody_wants_has_no_place(wanted: str) -> None:
    for activation in ("swiglu", "gelu"):
        check_dhidden(ALL_ODD, 32, 40, activation, wanted=wanted)
        check_dhidden(ALL_ODD, 32, 40, activation, wanted=wanted, **TURNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("dim, hidden", [(72, 40), *slowly((8, 8), (16, 16), (24, 104))])
def test_sizes_that_divide_nothing(dim: int, hidden: int, dtype: torch.dtype) -> None:
    check_dhidden(ALL_ODD, dim, hidden, dtype=dtype)
    check_dhidden(ALL_ODD, dim, hidden, "relu", dtype)
    check_dhidden(ALL_ODD, dim, hidden, dtype=dtype, **TURNS)
    check_dhidden(ALL_ODD, dim, hidden, "relu", dtype, **TURNS)


@pytest.mark.parametrize("stages, lag, programs", [(2, 0, 1), (5, 3, 3), *slowly((3, 0, 1), (4, 2, 50))])
def test_rings_and_grids(stages: int, lag: int, programs: int) -> None:
    check_dhidden(ALL_ODD, 40, 24, stages=stages, lag=lag, programs=programs)


@pytest.mark.parametrize("ahead", [1, 4, *slowly(2, 3, 9)])
@pytest.mark.parametrize("stages, lag, programs", [(2, 0, 1), (4, 2, 3), *slowly((3, 0, 50))])
def test_rings_grids_and_parts_by_turns(stages: int, lag: int, programs: int, ahead: int) -> None:
    check_dhidden(WHOLE_AND_NOT, 40, 72, stages=stages, lag=lag, programs=programs, ahead=ahead, **TURNS)


@pytest.mark.parametrize("activation", ["gelu", *slowly("swiglu")])
def test_tiles_as_on_a_gpu(activation: str) -> None:
    check_dhidden((130, 0, 70), 328, 264, activation, tile=LARGE, stages=4, lag=2)
    check_dhidden((130, 0, 70), 328, 264, activation, tile=LARGE_TURNS, stages=5, lag=3, ahead=6, pingpong=True)


@pytest.mark.parametrize("seed", [1, 2, *slowly(*range(3, 9))])
def test_orders_of_events(seed: int) -> None:
    check_dhidden(ALL_ODD, 56, 24, seed=seed)
    check_dhidden(WHOLE_AND_NOT, 56, 40, seed=seed, **TURNS)
