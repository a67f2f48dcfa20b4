"""Configurations of the grouped products are correct, and the checks detect an incorrect one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import correctness
from bench.gpu.correctness import check
from fusedmoe.kernels.layout import Tiles
from fusedmoe.kernels.triton.grouped import call as grouped_call
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Config,
    Variant,
    bucket,
    candidates,
    is_even,
    order_by_shape,
)
from tests.marks import interpreted_slowly, slowly

COUNTS = (0, 1, 37, 0, 0, 65, 0)
# Two steps and more than a tile; neither a whole number of tiles, nor is the second step whole.
SIDES = {True: (64, 80), False: (67, 81)}
SMALL = Config(32, 64, 32, 4, 1, 4)


def variant(
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    even: bool = True,
    bulk: bool = True,
    gather: bool = True,
    extra: bool = True,
) -> Variant:
    activation = {"up": "swiglu", "dhidden": "geglu"}.get(operation, "")
    gather = gather and operation not in ("down", "dinput")
    extra = extra and operation != "dinput"
    name = str(dtype).removeprefix("torch.")
    return Variant(operation, name, "ieee", activation, gather, extra, even, bulk and even)


def check_small(variant: Variant, config: Config, device: torch.device) -> str:
    return check(variant, config, device, COUNTS, SIDES[variant.even])


@pytest.mark.parametrize(("even", "bulk"), [(True, True), (False, False), *interpreted_slowly((True, False))])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_check_passes_for_correct_kernels(operation: str, even: bool, bulk: bool, device: torch.device) -> None:
    for flag in (True, False):
        assert check_small(variant(operation, even=even, bulk=bulk, gather=flag, extra=flag), SMALL, device) == ""


@pytest.mark.parametrize("dtype", [torch.float32, *interpreted_slowly(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_configuration_passes_check(operation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run every configuration that this machine may choose, at the sizes of the check: outputs and gradients."""
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    bulk = capability is None or capability >= (9, 0)
    for even, flag in itertools.product((True, False), repeat=2):
        if capability is None and even != flag:
            continue
        case = variant(operation, dtype=dtype, even=even, bulk=bulk, gather=flag, extra=flag)
        choices = [one.config for one in candidates(operation, dtype, capability, even)]
        faults = {config: (check_small if capability is None else check)(case, config, device) for config in choices}
        assert set(faults.values()) == {""}, (case, faults)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("operation", ["up", "dhidden"])
def test_check_passes_with_every_activation(operation: str, activation: str, device: torch.device) -> None:
    assert check_small(variant(operation)._replace(activation=activation), SMALL, device) == ""


@pytest.mark.parametrize(
    ("operation", "count"), [("down", 1), ("dw1", 1), *slowly(*((operation, None) for operation in OPERATIONS))]
)
def test_hopper_configurations_pass_check(operation: str, count: int | None, device: torch.device) -> None:
    """Run Hopper's configurations at the sizes of a GPU's check. The interpreter runs only their tiles.

    count: number of configurations, drawn anew each time; None: all.
    """
    if device.type == "cuda":
        pytest.skip("float32 does not fit them")
    configs = [*{candidate.config for candidate in candidates(operation, torch.bfloat16, (9, 0))}]
    for config in random.sample(configs, count or len(configs)):
        assert check(variant(operation), config, device) == ""
        if operation in ("up", "dhidden"):
            assert check(variant(operation)._replace(activation="gelu"), config, device) == ""


def test_check_sizes_are_even_and_odd_as_named() -> None:
    assert all(is_even(*correctness.EVEN, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert not any(is_even(*correctness.ODD, dtype) for dtype in (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_check_detects_one_wrong_value(
    operation: str, error: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"down": "product", "dinput": "product", "dw1": "dweight", "dw2": "dweight"}.get(operation, operation)
    launcher = getattr(correctness, name)

    def wrong(*args: object) -> object:
        found = launcher(*args)
        last = found if isinstance(found, Tensor) else found[-1]
        last[min(COUNTS[-2] + 30, len(last) - 2)] += error * last[1].abs().mean()
        return found

    monkeypatch.setattr(correctness, name, wrong)
    assert "wrong" in check_small(variant(operation), SMALL, device)


@pytest.mark.parametrize("operation", ["up", "down", "dhidden", "dinput"])
def test_check_detects_lost_tile(operation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiles = grouped_call.make_tiles

    def lossy(*args: Any) -> Tiles:
        tiles = make_tiles(*args)
        tiles.table[2, 0] = -1
        return tiles

    monkeypatch.setattr(grouped_call, "make_tiles", lossy)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *args, **kwargs: Tensor.new_zeros(self, *args, **kwargs))
    assert "wrong" in check_small(variant(operation), SMALL, device)


def test_row_bucket_is_power_of_two_per_expert() -> None:
    assert [bucket(rows, 4) for rows in (0, 3, 4, 11, 16, 4095, 4096)] == [1, 1, 1, 2, 4, 512, 1024]
    assert bucket(0, 0) == 1


def test_default_configuration_depends_on_shape() -> None:
    choices = candidates("down", torch.bfloat16, (9, 0))
    shapes = [(4096, 1024), (4096, 256), (100, 1024), (16, 1024)]
    first = [order_by_shape(choices, rows, depth)[0] for rows, depth in shapes]
    assert [(config.bm, config.bn) for config in first] == [(128, 256), (128, 128), (64, 256), (64, 128)]
    for shape in shapes:
        assert sorted(map(str, order_by_shape(choices, *shape))) == sorted(str(choice.config) for choice in choices)
    for operation, dtype, capability, even in itertools.product(
        OPERATIONS, (torch.bfloat16, torch.float32), ((8, 0), (9, 0), (10, 0), (12, 0), None), (True, False)
    ):
        found = candidates(operation, dtype, capability, even)
        assert 1 <= len(found) <= 6 and any(not candidate.rows and not candidate.depth for candidate in found)
        assert len({candidate.config for candidate in found}) == len(found)
