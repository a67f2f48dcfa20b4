"""The Gluon kernel for the up-projection and activation, in the interpreter, compared with float64."""

from __future__ import annotations

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tests.gluon_interpreter import NotInterpreted
from tests.kernels.gluon.grouped_cases import EACH_ACTIVATION, EACH_ROUTING, LARGE, ROUTINGS, check_up

ALL_ODD = ROUTINGS["all odd"]


@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_up_of_every_routing(routing: str) -> None:
    check_up(ROUTINGS[routing], 40, 24)


@pytest.mark.parametrize("routing", EACH_ROUTING)
def test_up_whose_copies_arrive_of_every_routing(routing: str) -> None:
    check_up(ROUTINGS[routing], 40, 24, copies_arrive=True)


@pytest.mark.parametrize("stages, seed", [(2, 0), (3, 1), (5, 2), *slowly(*((4, seed) for seed in range(3, 20)))])
def test_up_whose_copies_arrive_in_other_event_orders(stages: int, seed: int) -> None:
    check_up((24, 0, 3, 17), 56, 24, stages=stages, lag=0, programs=3, seed=seed, copies_arrive=True)


@pytest.mark.parametrize("bias", [True, *slowly(False)])
@pytest.mark.parametrize("activation", EACH_ACTIVATION)
def test_up_of_every_activation(activation: str, bias: bool) -> None:
    check_up(ALL_ODD, 32, 24, activation, bias=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
@pytest.mark.parametrize("dim, hidden", [(72, 40), *slowly((8, 8), (16, 16), (24, 56))])
def test_up_of_sizes_not_divisible_by_tile(dim: int, hidden: int, dtype: torch.dtype) -> None:
    check_up(ALL_ODD, dim, hidden, dtype=dtype)


@pytest.mark.parametrize(
    "stages, lag, slots, programs", [(2, 0, 3, 1), (5, 3, 1, 3), *slowly((3, 0, 1, 1), (4, 2, 3, 50))]
)
def test_up_with_any_stage_and_program_count(stages: int, lag: int, slots: int, programs: int) -> None:
    check_up((24, 0, 3, 17), 40, 24, stages=stages, lag=lag, slots=slots, programs=programs)


def test_interpreter_refuses_copies_that_raise_the_count_of_arrivals() -> None:
    changed = {async_copy.mbarrier_arrive: lambda arrive: lambda bar, increment_count: arrive(bar)}
    with pytest.raises(NotInterpreted, match="add to the count of arrivals"):
        check_up((3,), 40, 24, copies_arrive=True, changed=changed)


def test_box_ends_at_half_boundary() -> None:
    check_up((16, 8), 24, 8)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["swiglu", *slowly("relu")])
def test_up_with_gpu_tile_sizes(activation: str) -> None:
    check_up((130, 0, 70), 328, 264, activation, tile=LARGE, stages=4, lag=2, slots=2)


def test_up_in_other_event_order() -> None:
    check_up(ALL_ODD, 56, 24, seed=1)
