"""Products whose warps are specialised. On a GPU these tests have a process of their own: a pipeline that stalls, or a
wrong copy, takes the GPU from its process and every test behind."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.triton.grouped import call as grouped_call
from fusedmoe.kernels.triton.grouped.configs import Config, candidates
from fusedmoe.kernels.triton.grouped.correctness import check
from fusedmoe.kernels.triton.grouped.tiles import Tiles
from tests.kernels.device.test_autotune import COUNTS, SIDES, variant


@pytest.mark.parametrize("operation", ["down", "dinput"])
@pytest.mark.parametrize("counts", [(0, 1, 37, 0, 0, 65, 0), (0, 0, 0), (300,)])
def test_specialised_programs(operation: str, counts: tuple[int, ...], device: torch.device) -> None:
    """Tile after tile by a few programs, fewer and more than there are tiles. The interpreter runs one warp after the
    other, hence this says nothing of what the warps of a GPU do to one another: there `check` decides."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they are for Hopper")
    sizes = (32, 64, 32, 4, 1) if device.type == "cpu" else (128, 256, 64, 4, 3)
    for extra, group in product((True, False), (1, 8)):
        config = Config(*sizes, group, specialised=True)
        assert check(variant(operation, dtype=dtype, extra=extra), config, device, counts, (64, 80)) == ""


def test_specialised_programs_lose_no_tile_unseen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device says one tile too few, the check says so."""
    if device.type == "cuda":
        pytest.skip("float32 does not fit them")
    make_tiles = grouped_call.make_tiles

    def lossy(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
        tiles = make_tiles(offsets_E1, rows, block_rows)
        tiles.used.sub_(1)
        return tiles

    monkeypatch.setattr(grouped_call, "make_tiles", lossy)
    config = Config(32, 64, 32, 4, 1, 4, specialised=True)
    assert "wrong" in check(variant("down"), config, device, COUNTS, SIDES[True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operation", ["down", "dinput"])
def test_every_specialised_configuration(operation: str, dtype: torch.dtype, device: torch.device) -> None:
    """That may be chosen on this GPU, on the sizes of the tuner's check."""
    if device.type == "cpu":
        pytest.skip("the interpreter chooses none")
    special = [one.config for one in candidates(operation, dtype, torch.cuda.get_device_capability())]
    special = [config for config in special if config.specialised]
    if not special:
        pytest.skip("this GPU chooses none")
    for extra in (True, False):
        for config in special:
            assert check(variant(operation, dtype=dtype, extra=extra), config, device) == "", config
