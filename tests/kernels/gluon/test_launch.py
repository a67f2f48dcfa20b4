"""The launchers of the Gluon form compared with the definitions, in the interpreter: operands, tables and grid."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import slowly

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from bench.gpu.correctness import check
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.gluon.grouped import launch
from fusedmoe.kernels.layout import Tiles, define_tiles
from fusedmoe.kernels.triton.grouped import call as grouped_call
from fusedmoe.kernels.triton.grouped.configs import HopperConfig, Variant
from tests.gluon_interpreter import interpret

SMALL = HopperConfig(32, 64, 64, stages=3, group=2)
TURNS = replace(SMALL, pingpong=True)
# Configuration with two halves of columns.
HALVES = HopperConfig(32, 128, 64, stages=3, group=2)
# Configuration for a matrix, whose height is contiguous in shared memory.
MATRIX = HopperConfig(64, 64, 64, stages=3, group=2)
COUNTS, SIDES = (0, 1, 37, 0, 0, 65, 0), (128, 80)
_SORTED = ("down", "dinput")
MULTIPROCESSORS = 4


class Interpreted:
    """Kernel whose launches run in the interpreter; it records each launch's number of programs."""

    def __init__(self, kernel: Any, programs: list[int]) -> None:
        self._kernel, self._programs = kernel, programs
        self._names = {parameter.name for parameter in kernel.params}

    def __getitem__(self, grid: tuple[int]) -> Any:
        self._programs.append(grid[0])

        def run(*args: Any, **keywords: Any) -> None:
            own = {name: value for name, value in keywords.items() if name in self._names}
            interpret(self._kernel, grid[0], *args, seed=0, **own)

        return run


def plain_tiles(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
    table = torch.tensor(define_tiles(offsets_E1.diff().tolist(), rows, block_rows), dtype=torch.int32)
    return Tiles(table, (table[:, :1] >= 0).sum(0, dtype=torch.int32))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    for name in ("up_kernel", "product_kernel", "dhidden_kernel", "dweight_kernel"):
        monkeypatch.setattr(launch, name, Interpreted(getattr(launch, name), found))
    gpu = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(grouped_call, "make_tiles", plain_tiles)
    return found


def variant(operation: str, *, activation: str = "", extra: bool = False, dtype: str = "bfloat16") -> Variant:
    return Variant(operation, dtype, "ieee", activation, operation not in _SORTED, extra, True, True)


def check_on_cpu(of: Variant, config: HopperConfig = SMALL) -> str:
    return check(of, config, torch.device("cpu"), COUNTS, SIDES)


@pytest.mark.parametrize(
    ("operation", "extra"), [("down", True), ("dinput", False), *slowly(("down", False), ("dinput", True))]
)
def test_product_launcher_equals_definition(operation: str, extra: bool, programs: list[int]) -> None:
    assert check_on_cpu(variant(operation, extra=extra)) == ""
    assert programs == [3, MULTIPROCESSORS], "first by so few programs that each has several tiles"
    assert check_on_cpu(variant(operation, extra=extra), TURNS) == ""


@pytest.mark.parametrize("extra", [True, *slowly(False)])
@pytest.mark.parametrize("activation", ["swiglu", *slowly(*(one for one in ACTIVATIONS if one != "swiglu"))])
def test_up_launcher_equals_definition(activation: str, extra: bool, programs: list[int]) -> None:
    assert check_on_cpu(variant("up", activation=activation, extra=extra), HALVES) == ""
    assert programs == [3, MULTIPROCESSORS]


@pytest.mark.parametrize("extra", [True, *slowly(False)])
@pytest.mark.parametrize("activation", ["swiglu", *slowly(*(one for one in ACTIVATIONS if one != "swiglu"))])
def test_dhidden_launcher_equals_definition(activation: str, extra: bool, programs: list[int]) -> None:
    assert check_on_cpu(variant("dhidden", activation=activation, extra=extra)) == ""
    assert programs == [3, MULTIPROCESSORS]


@pytest.mark.parametrize("extra", [True, False], ids=["accumulated", "overwritten"])
@pytest.mark.parametrize("operation", ["dw1", "dw2"])
def test_dweight_launcher_equals_definition(operation: str, extra: bool, programs: list[int]) -> None:
    assert check_on_cpu(variant(operation, extra=extra), MATRIX) == ""
    # Added to float32 and to half precision.
    assert programs == [3] * (1 + extra) + [MULTIPROCESSORS] * (1 + extra)


@pytest.mark.parametrize("operation", ["down", "dw1"])
def test_launchers_equal_definition_in_float16(operation: str, programs: list[int]) -> None:
    assert check_on_cpu(variant(operation, dtype="float16"), MATRIX) == ""


def test_program_count_is_at_most_tile_count(programs: list[int]) -> None:
    assert check(variant("down"), SMALL, torch.device("cpu"), (5,), (64, 64)) == ""
    assert programs == [2, 2], "42 rows at the most: two tiles"


def test_output_slots_fit_shared_memory() -> None:
    wide, turns = HopperConfig(128, 256, 64), HopperConfig(128, 128, 64, stages=5, pingpong=True)
    assert [launch.num_result_boxes(config) for config in (wide, replace(wide, stages=3), turns)] == [2, 4, 2]
    assert launch.num_result_boxes(replace(wide, stages=3), 2, 3) == 3, "and not five, which do not divide a tile's six"
    assert launch.num_result_boxes(wide, sources=1) == 2, "beside numbers of rows, which take two of the three KiB left"
    assert launch.num_result_boxes(replace(wide, bm=256, bn=128), sources=1) == 1
    with pytest.raises(ValueError, match="no shared memory left for result boxes"):
        launch.num_result_boxes(replace(turns, stages=7))


@pytest.mark.parametrize("what", ["used", "table", "n_col_tiles"])
def test_check_detects_wrong_launch_argument(what: str, programs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile or column count that is one too small omits results; so does a lost tile."""
    if what == "n_col_tiles":
        monkeypatch.setattr(launch.triton, "cdiv", lambda size, block: size // block)
    else:

        def wrong(*args: Any) -> Tiles:
            tiles = plain_tiles(*args)
            if what == "used":
                return tiles._replace(used=tiles.used - 1)
            tiles.table[1] = tiles.table[0]
            return tiles

        monkeypatch.setattr(grouped_call, "make_tiles", wrong)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *args, **kwargs: Tensor.new_zeros(self, *args, **kwargs))
    fault = check_on_cpu(variant("dinput"))
    assert "are wrong" in fault and fault.endswith(", by 3 programs")
