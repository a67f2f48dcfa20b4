"""The launchers of the grouped products launch exactly the kernels that are compiled ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.aot.standin import TARGETS, table_of
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.gluon.grouped import launch as gluon_launch
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.one_sided import Addresses, Bounds, Network, PeerSignal, Put, Wait
from fusedmoe.kernels.triton import layout as triton_layout
from fusedmoe.kernels.triton.grouped import dhidden, dweight, product, up
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Config,
    ConfigCandidate,
    Key,
    Variant,
    candidates,
    gluon_candidates,
    has_bulk_copies,
    is_even,
)
from fusedmoe.kernels.triton.jit import MAX_REGISTERS
from tests.kernels import aot
from tests.kernels.cases import AotCase
from tests.kernels.cases import gluon as gluon_cases
from tests.kernels.cases.grouped import EVEN, ODD, aot_cases, can_widen, variants

ROWS, EXPERTS, PEERS = 100, 3, 8
LIBRARIES = {"libnvshmem_device": "/somewhere/libnvshmem_device.bc"}
KERNELS = (up, dhidden, product, dweight)


class Launch:
    """A kernel's arguments by name, its options, and its linked libraries."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        names = [parameter.name for parameter in kernel.params]
        self.kernel = kernel
        self.arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in keywords.items() if k in names}
        self.options = {k: v for k, v in keywords.items() if k not in names}
        self.libraries = self.options.pop("extern_libs", {})

    def is_case(self, case: AotCase) -> bool:
        if case.kernel is not self.kernel or case.options != self.options or set(case.arguments) != set(self.arguments):
            return False
        if self.libraries != (LIBRARIES if case.libraries is nvshmem_bitcode else {}):
            return False
        return all(self._is(value, case.arguments[name]) for name, value in self.arguments.items())

    @staticmethod
    def _is(value: Any, told: Any) -> bool:
        if isinstance(value, TensorDescriptor | GluonDescriptor):
            kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[value.base.dtype]
            layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
            return told == f"tensordesc<{kind}[{', '.join(map(str, value.block_shape))}]{layout}>"
        if isinstance(value, Tensor):
            return told == value.dtype
        return (told in ("i32", "i64") and type(value) is int) or (told == value and type(told) is type(value))


class Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **keywords: self.launches.append(Launch(self.kernel, args, keywords))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record all launches instead of running them."""
    found: list[Launch] = []
    for module in KERNELS:
        name = f"{module.__name__.rpartition('.')[2]}_kernel"
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    monkeypatch.setattr(triton_layout, "tiles_kernel", Recorder(triton_layout.tiles_kernel, []))
    return found


class Flight(NamedTuple):
    """Signals that launches wait for, and puts: from and to remote peers if there is a network."""

    wait: Wait
    put: Put


def flight(variant: Variant, columns: int, far: bool) -> Flight:
    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    i32, i64 = torch.int32, torch.int64
    network = Network(empty(PEERS, dtype=i32), empty(1, dtype=i64), LIBRARIES) if far else None
    bounds = Bounds(empty(1, dtype=i64), empty(4, dtype=i64), 10**9)
    epoch = empty(PEERS, dtype=i64)
    wait = Wait(empty(2, PEERS, 4, dtype=i64), 128, epoch, bounds, network)
    target_N = empty(ROWS, dtype=i64) if far else None
    addresses = Addresses(empty(ROWS, dtype=i32), empty(ROWS, dtype=i64), target_N, network)
    weight_N = empty(ROWS, dtype=torch.float32) if variant.operation == "down" else None
    like = empty(1, columns, dtype=getattr(torch, variant.dtype))
    mark = PeerSignal(empty(2, PEERS, 8, dtype=i64), 5, empty(PEERS, dtype=i64))
    num_rows_W, counter_W, signal_W = (empty(PEERS, dtype=dtype) for dtype in (i32, i32, i64))
    return Flight(wait, Put(like, addresses, weight_N, num_rows_W, counter_W, signal_W, epoch, mark))


def run(
    variant: Variant,
    bulk_copies: bool,
    sides: tuple[int, int],
    config: Config,
    far: bool | None = None,
    widens: bool = False,
) -> Variant:
    """Run a variant's launcher on tensors without memory; return the variant that the launcher derived.

    `widens`: the gradient of a matrix is added to one of half precision. `far`: whether peers of awaited rows and of
    put results are far; None: no peers.
    """
    dtype = getattr(torch, variant.dtype)
    asked: list[Key] = []

    def choose(key: Key, launch: Callable[[Config], object]) -> Config:
        asked.append(key)
        return config

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    source_N = empty(ROWS, dtype=torch.int64) if variant.gather else None
    offsets_E1 = empty(EXPERTS + 1, dtype=torch.int32)
    layout = Layout(offsets_E1[1:].long(), offsets_E1, source_N, empty(ROWS, dtype=torch.int64), empty(ROWS, 1))
    call = GroupedCall(layout, empty(0), choose, bulk_copies)
    call.precision = variant.precision
    (depth, columns), operation = sides, variant.operation
    wait, put = (None, None) if far is None else flight(variant, columns, far)
    if operation in ("up", "dhidden"):
        activation = ACTIVATIONS[variant.activation]
        halves = (2,) if activation.gated else ()
        w1, w2 = empty(EXPERTS, *halves, columns, depth), empty(EXPERTS, depth, columns)
        if operation == "up":
            b1 = empty(EXPERTS, *halves, columns) if variant.extra else None
            up.up(call, empty(ROWS, depth), Weights(w1, w2, b1), activation, wait)
        else:
            weight_N = empty(ROWS, dtype=torch.float32) if variant.extra else None
            h = empty(ROWS, activation.num_projections * columns)
            dhidden.dhidden(call, empty(ROWS, depth), h, weight_N, Weights(w1, w2), activation, wait=wait)
    elif operation in ("down", "dinput"):
        transposed = operation == "down"
        b = empty(EXPERTS, columns, depth) if transposed else empty(EXPERTS, depth, columns)
        bias = empty(EXPERTS, columns) if variant.extra else None
        product.product(call, operation, empty(ROWS, depth), b, transposed, bias, put=put)
    else:
        gather = {"dw1": "right", "dw2": "left"}[operation]
        total = empty(EXPERTS, depth, columns, dtype=dtype if widens else torch.float32) if variant.extra else None
        dweight.dweight(call, operation, empty(ROWS, depth), empty(ROWS, columns), gather, total)
    (key,) = asked
    return key.variant


def all_choices() -> Iterator[tuple[Variant, int, Config]]:
    """Yield every possible choice for every target."""
    for target in TARGETS:
        table = table_of(target)
        for variant in variants(has_bulk_copies(table)):
            for choice in candidates(variant.operation, getattr(torch, variant.dtype), table, variant.even):
                yield variant, target, choice.config


def test_launched_kernels_are_compiled_ahead_of_time(launches: list[Launch]) -> None:
    cases: dict[str, list[AotCase]] = {}
    for case in aot_cases():
        cases.setdefault(case.name, []).append(case)
    for variant, target, config in all_choices():
        sides = EVEN if variant.even else ODD[0]
        for widens in (False, True)[: 1 + can_widen(variant)]:
            launches.clear()
            assert run(variant, has_bulk_copies(table_of(target)), sides, config, widens=widens) == variant
            (launch,) = launches
            name = f"{variant} {config}{'' if variant.even else ' {}x{}'.format(*sides)}{' widened' * widens}"
            (case,) = cases[name]
            assert target in case.targets, name
            assert launch.is_case(case), (name, launch.arguments, case.arguments)


def test_gluon_launches_are_compiled_ahead_of_time(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("up_kernel", "product_kernel", "dhidden_kernel", "dweight_kernel"):
        monkeypatch.setattr(gluon_launch, name, Recorder(getattr(gluon_launch, name), launches))
    monkeypatch.setattr(gluon_launch, "_grid", lambda config, out, most: (1,))
    cases = {case.name: case for case in gluon_cases.aot_cases()}
    for variant in variants(True):
        both = itertools.product(gluon_candidates(variant, (9, 0)), (False, True)[: 1 + can_widen(variant)])
        for candidate, widens in both:
            launches.clear()
            assert run(variant, True, EVEN, candidate.config, widens=widens) == variant
            (launch,) = launches
            case = cases.pop(f"{variant} {candidate.config}{' widened' * widens}")
            assert launch.is_case(case), (case.name, launch.arguments, case.arguments)
    assert cases.keys() == {"warp groups"}  # of the benchmark


def test_in_flight_launches_are_compiled_ahead_of_time(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Near and remote peers, for the variants that represent the rest; a launch that puts is completed by another."""
    finished: list[Put] = []
    monkeypatch.setattr(product, "finish_put", finished.append)
    cases = {case.name: case for case in aot_cases() if " in flight" in case.name}
    met = set()
    for variant, target, config in all_choices():
        sides, puts = EVEN if variant.even else ODD[0], variant.operation in ("down", "dinput")
        name = f"{variant} {config}{'' if variant.even else ' {}x{}'.format(*sides)} in flight"
        if name not in cases:
            continue
        for far in (False, True):
            launches.clear()
            finished.clear()
            assert run(variant, has_bulk_copies(table_of(target)), sides, config, far) == variant
            (launch,) = launches
            assert len(finished) == puts
            taken = replace(config, registers=MAX_REGISTERS) if far and puts else config
            name = f"{variant} {taken}{'' if variant.even else ' {}x{}'.format(*sides)} in flight{' nvshmem' * far}"
            case = cases[name]
            assert target in case.targets and launch.is_case(case), (name, launch.arguments, case.arguments)
            met.add(case.name)
    assert met == cases.keys() and any("dinput" in name for name in met)


def test_variants_cover_all_launcher_variants() -> None:
    """The enumeration contains every variant that launchers can derive: all fields, with all their values."""
    for bulk_copies in (False, True):
        known = set(variants(bulk_copies))
        taken = set()
        fields = (OPERATIONS, (torch.bfloat16, torch.float16, torch.float32), ("ieee", "tf32"), (False, True))
        for operation, dtype, precision, even in itertools.product(*fields):
            if precision == "tf32" and dtype != torch.float32:
                continue
            call = GroupedCall.__new__(GroupedCall)
            call.dtype, call.precision, call._bulk = dtype, precision, bulk_copies
            sides = EVEN if even else ODD[0]
            activations = tuple(ACTIVATIONS) if operation in ("up", "dhidden") else ("",)
            gathers = (False,) if operation in ("down", "dinput") else (False, True)
            extras = (False,) if operation == "dinput" else (False, True)
            taken |= {
                call.variant(operation, *sides, *flags) for flags in itertools.product(activations, gathers, extras)
            }
        assert taken == known


def test_case_sizes_cover_every_divisibility() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert is_even(*EVEN, dtype) and not any(is_even(*sides, dtype) for sides in ODD)
    kinds = {tuple("one" if n == 1 else "16" if n % 16 == 0 else "odd" for n in sides) for sides in ODD}
    assert kinds == {("odd", "odd"), ("16", "16"), ("16", "odd"), ("odd", "16"), ("one", "odd"), ("odd", "one")}


def test_configuration_missing_from_record_is_detected(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """The cases follow the choice: an added configuration also becomes a case, which the record then lacks."""
    new = Config(64, 64, 64, 4, 2)
    module = "tests.kernels.cases.grouped"
    more = [*candidates("up", torch.bfloat16, (9, 0)), ConfigCandidate(new)]

    def with_another(operation: str, dtype: torch.dtype, capability: Any, even: bool = True) -> Any:
        found = candidates(operation, dtype, capability, even)
        return more if (operation, dtype, capability, even) == ("up", torch.bfloat16, (9, 0), True) else found

    before = {case.name for case in aot_cases()}
    monkeypatch.setattr(f"{module}.candidates", with_another)
    added = {case.name for case in aot_cases()} - before
    assert len(added) == len(ACTIVATIONS) * 4 + 2 and all(str(new) in name for name in added)
    assert aot.missing(aot.recorded()[1]) and not before & {name for name, _ in aot.missing(aot.recorded()[1])}
