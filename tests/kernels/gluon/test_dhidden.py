"""The Gluon kernel for the gradient of the hidden activations, in the interpreter, compared with float64."""

from __future__ import annotations

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tests.kernels.gluon.grouped_cases import EACH_ACTIVATION, EACH_ROUTING, LARGE, ROUTINGS, check_dhidden

ALL_ODD = ROUTINGS["all odd"]


@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_dhidden_of_every_routing(routing: str) -> None:
    check_dhidden(ROUTINGS[routing], 40, 40)


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no weight", "weight"])
@pytest.mark.parametrize("activation", EACH_ACTIVATION)
def test_dhidden_of_every_activation(activation: str, weighted: bool) -> None:
    check_dhidden(ALL_ODD, 32, 40, activation, weighted=weighted)


@pytest.mark.parametrize("wanted", ["dh ds", *slowly("dh", "a ds", "ds")])
def test_dhidden_stores_requested_results_only(wanted: str) -> None:
    for activation in ("swiglu", "gelu"):
        check_dhidden(ALL_ODD, 32, 40, activation, wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("dim, hidden", [(72, 40), *slowly((8, 8), (16, 16), (24, 104))])
def test_dhidden_of_sizes_not_divisible_by_tile(dim: int, hidden: int, dtype: torch.dtype) -> None:
    check_dhidden(ALL_ODD, dim, hidden, dtype=dtype)
    check_dhidden(ALL_ODD, dim, hidden, "relu", dtype)


@pytest.mark.parametrize("stages, lag, programs", [(2, 0, 1), (5, 3, 3), *slowly((3, 0, 1), (4, 2, 50))])
def test_dhidden_with_any_stage_and_program_count(stages: int, lag: int, programs: int) -> None:
    check_dhidden(ALL_ODD, 40, 24, stages=stages, lag=lag, programs=programs)


@pytest.mark.parametrize("activation", ["gelu", *slowly("swiglu")])
def test_dhidden_with_gpu_tile_sizes(activation: str) -> None:
    check_dhidden((130, 0, 70), 328, 264, activation, tile=LARGE, stages=4, lag=2)


@pytest.mark.parametrize("seed", [1, 2])
def test_dhidden_in_other_event_orders(seed: int) -> None:
    check_dhidden(ALL_ODD, 56, 24, seed=seed)
