"""The Gluon interpreter finds missing fences, waits and barriers in small kernels with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmoe.kernels.gluon.grouped.pipeline import threads_barrier
from tests.gluon_interpreter import KernelFault, NotInterpreted, interpret
from tests.kernels.gluon import small

SIZE, N = 16, 5
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
HOW = ("bulk", "copy", "write")


def _run_squares(how: str, seed: int, changed: Any = None) -> tuple[Tensor, Tensor]:
    """Return the kernel's result and the expected result."""
    x = torch.randn(N, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.full((SIZE, SIZE), torch.nan)
    given = TensorDescriptor.from_tensor(x.view(-1, SIZE), [SIZE, SIZE], LAYOUT) if how == "bulk" else x
    interpret(small.squares_kernel, 1, given, out, N, how, SIZE, LAYOUT, seed=seed, changed=changed or {})
    return out, (x.double() @ x.double().mT).sum(0)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(8))
def test_correct_kernel_passes_in_every_event_order(how: str, seed: int) -> None:
    found, right = _run_squares(how, seed)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def _no_op(original: Any) -> Callable[..., None]:
    return lambda *arguments, **keywords: None


def _require_fault(how: str, changed: Any, words: str) -> None:
    """Require detection for every seed, with a message that contains one of these words."""
    for seed in range(5):
        with pytest.raises(KernelFault, match=words):
            _run_squares(how, seed, changed)


@pytest.mark.parametrize("how", ["copy", "write"])
def test_missing_fence_after_thread_write_is_detected(how: str) -> None:
    _require_fault(how, {small.fence_rows: _no_op}, "is read without a fence after the write")


@pytest.mark.parametrize("how", ["copy", "write"])
def test_missing_barrier_after_thread_write_is_detected(how: str) -> None:
    _require_fault(how, {threads_barrier: _no_op}, "is read without waiting for the write")


@pytest.mark.parametrize("how", ["copy", "write"])
def test_fence_after_barrier_is_detected(how: str) -> None:
    """The other threads fence, but only after the barrier."""
    fences = []

    def later(fence: Any) -> Any:
        fences.append(fence)
        return lambda: None

    changed = {small.fence_rows: later, threads_barrier: lambda meet: lambda: (meet(), fences[-1]())}
    _require_fault(how, changed, "is read without a fence after the write")


def _read_back(changed: Any) -> Tensor:
    x = torch.randn(N * SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    given = TensorDescriptor.from_tensor(x, [SIZE, SIZE], LAYOUT)
    for seed in range(5):
        interpret(small.copies_kernel, 1, given, out, N, SIZE, LAYOUT, seed=seed, changed=changed)
    assert out.equal(x)
    return out


def test_missing_fence_before_bulk_copy_is_detected() -> None:
    _read_back({})
    with pytest.raises(KernelFault, match="is written without a fence after the read by 0"):
        _read_back({small.fence_rows: _no_op})
    with pytest.raises(KernelFault, match="is written without waiting for the read by 0"):
        _read_back({threads_barrier: _no_op})


def test_missing_fence_after_barrier_init_is_detected() -> None:
    _require_fault("bulk", {small.fence_barriers: _no_op}, "may not find barrier 1")


def test_missing_wait_for_async_copy_is_detected() -> None:
    _require_fault("copy", {hopper.async_copy.wait_group: _no_op}, "is read without waiting for the write")


def test_register_read_before_wgmma_wait_is_detected() -> None:
    with pytest.raises(
        KernelFault, match=r"registers of the product in test_interpreter.py:\d+ are read .* before a wait"
    ):
        interpret(_impatient_kernel, 1, LAYOUT, seed=0)


@pytest.mark.parametrize("how", HOW)
def test_deadlock_error_names_barrier(how: str) -> None:
    _require_fault(how, {small.hand_back: _no_op}, r"deadlock: (.*; )?1 .* waits for phase . of barrier")


def test_too_few_expected_bytes_are_detected() -> None:
    changed = {hopper.mbarrier.expect: lambda expect: lambda bar, bytes: expect(bar, bytes - 2)}
    _require_fault("bulk", changed, "more bytes came")


def test_too_many_expected_bytes_are_detected() -> None:
    changed = {hopper.mbarrier.expect: lambda expect: lambda bar, bytes: expect(bar, bytes + 2)}
    _require_fault("bulk", changed, "deadlock.*2 bytes missing")


def test_extra_barrier_arrival_is_detected() -> None:
    changed = {small.hand_back: lambda original: lambda bar: (original(bar), original(bar))}
    _require_fault("bulk", changed, "too many|wrong phase|deadlock|without waiting")


def test_stage_write_before_read_is_detected() -> None:
    # The producer does not wait at all.
    def change(wait: Any) -> Any:
        return lambda bar, phase: None if bar.memory.number == 2 else wait(bar, phase)

    _require_fault("bulk", {hopper.mbarrier.wait: change}, "is written without waiting|too many")


def test_stage_release_before_wgmma_read_is_detected() -> None:
    changed = {hopper.warpgroup_mma_wait: lambda wait: lambda num_outstanding, deps: wait(1, deps)}
    _require_fault("bulk", changed, "is written without waiting for the read by wgmma")


def test_wrong_barrier_phase_is_detected() -> None:
    changed = {hopper.mbarrier.wait: lambda wait: lambda bar, phase: wait(bar, phase ^ 1)}
    _require_fault("bulk", changed, "wrong phase|deadlock|is read (before|without)|is written without waiting")


def test_fault_message_lists_last_events() -> None:
    with pytest.raises(KernelFault, match=r"small.py:\d+\nThe last events:\n  "):
        _run_squares("write", 0, {small.fence_rows: _no_op})


@gluon.jit
def _impatient_kernel(LAYOUT: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    buf = gl.allocate_shared_memory(gl.bfloat16, [16, 16], LAYOUT)
    buf.store(gl.zeros([16, 16], gl.bfloat16, mma))
    hopper.fence_async_shared()
    threads_barrier()
    acc = hopper.warpgroup_mma(buf, buf, gl.zeros([16, 16], gl.float32, mma), is_async=True)
    acc = acc * 2


@gluon.jit
def _unknown_kernel(x_ptr):
    gl.atomic_add(x_ptr, 1)


@gluon.jit
def _unknown_of_tensor_kernel(x_ptr, LAYOUT: gl.constexpr):
    gl.load(x_ptr).logical_and(True)


@gluon.jit
def _unknown_of_memory_kernel(x_ptr, LAYOUT: gl.constexpr):
    gl.allocate_shared_memory(gl.float32, [4], LAYOUT)._reinterpret(gl.int32, [4], LAYOUT)


@gluon.jit
def _unknown_argument_kernel(x_ptr):
    gl.load(x_ptr, cache_modifier=".cg")


@gluon.jit
def _overflowing_kernel(x_ptr, out_ptr):
    x = gl.load(x_ptr)
    gl.store(out_ptr, gl.minimum(x, 7) * 2147483647)
    gl.store(out_ptr + 1, gl.maximum(1, x) * 2147483647)


@gluon.jit
def _outside_kernel(x_ptr, N):
    gl.store(x_ptr + N, 1.0)


@gluon.jit
def _unwritten_kernel(out_ptr, N: gl.constexpr, LAYOUT: gl.constexpr, REGISTERS: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [4], LAYOUT)
    buf.slice(0, N).store(gl.zeros([N], gl.float32, REGISTERS))
    gl.store(out_ptr + gl.arange(0, 2, layout=REGISTERS), buf.slice(2, 2).load(REGISTERS))


def test_unsupported_operation_raises_by_name() -> None:
    with pytest.raises(NotInterpreted, match="atomic_add"):
        interpret(_unknown_kernel, 1, torch.zeros(1), seed=0)


@pytest.mark.parametrize("kernel", [_unknown_of_tensor_kernel, _unknown_of_memory_kernel])
def test_unsupported_methods_raise_by_name(kernel: Any) -> None:
    with pytest.raises(NotInterpreted, match="(logical_and of a tensor|_reinterpret of shared memory)"):
        interpret(kernel, 1, torch.zeros(1), LAYOUT, seed=0)


def test_unsupported_arguments_raise_by_name() -> None:
    with pytest.raises(NotInterpreted, match="load: .*cache_modifier"):
        interpret(_unknown_argument_kernel, 1, torch.zeros(1), seed=0)


def _order(seed: int) -> list[str]:
    """Return the order of the threads' waits and arrivals."""
    order = []

    def change(original: Any) -> Any:
        def function(bar: Any, *arguments: Any, **keywords: Any) -> Any:
            order.append(f"{bar.memory.number} {bar.memory.schedule.running.name}")
            return original(bar, *arguments, **keywords)

        return function

    _run_squares("bulk", seed, {hopper.mbarrier.wait: change, hopper.mbarrier.arrive: change})
    return order


def test_seed_determines_event_order() -> None:
    assert _order(3) == _order(3)
    assert len({tuple(_order(seed)) for seed in range(12)}) >= 4


def test_out_of_bounds_store_is_detected() -> None:
    with pytest.raises(KernelFault, match="element 3 of a tensor of 3 elements"):
        interpret(_outside_kernel, 1, torch.zeros(3), 3, seed=0)


def test_integers_overflow_as_on_gpu() -> None:
    """Also in combination with Python's own integers, which do not overflow."""
    out = torch.zeros(2, dtype=torch.int64)
    interpret(_overflowing_kernel, 1, torch.tensor([2], dtype=torch.int32), out, seed=0)
    assert out.tolist() == [-2, -2]


def test_uninitialized_memory_is_poisoned() -> None:
    out, registers = torch.zeros(2), gl.BlockedLayout([1], [32], [4], [0])
    interpret(_unwritten_kernel, 1, out, 3, None, registers, seed=0)
    assert out.isnan().tolist() == [False, True]
    with pytest.raises(KernelFault, match="is read before anything was written"):
        interpret(_unwritten_kernel, 1, out, 2, None, registers, seed=0)
