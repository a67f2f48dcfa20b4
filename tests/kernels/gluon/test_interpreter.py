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


def _squares(how: str, seed: int, changed: Any = None) -> tuple[Tensor, Tensor]:
    """What the kernel computes, and what it should."""
    x = torch.randn(N, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.full((SIZE, SIZE), torch.nan)
    given = TensorDescriptor.from_tensor(x.view(-1, SIZE), [SIZE, SIZE], LAYOUT) if how == "bulk" else x
    interpret(small.squares_kernel, 1, given, out, N, how, SIZE, LAYOUT, seed=seed, changed=changed or {})
    return out, (x.double() @ x.double().mT).sum(0)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(8))
def test_a_right_kernel_computes_what_it_should_in_every_order(how: str, seed: int) -> None:
    found, right = _squares(how, seed)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def _nothing(original: Any) -> Callable[..., None]:
    return lambda *arguments, **keywords: None


def _found(how: str, changed: Any, words: str) -> None:
    """The fault is found, whichever the seed, and called by one of these words."""
    for seed in range(5):
        with pytest.raises(KernelFault, match=words):
            _squares(how, seed, changed)


@pytest.mark.parametrize("how", ["copy", "write"])
def test_what_threads_wrote_is_not_read_without_a_fence(how: str) -> None:
    _found(how, {small.fence_rows: _nothing}, "is read without a fence after the write")


@pytest.mark.parametrize("how", ["copy", "write"])
def test_one_thread_does_not_arrive_before_the_others_have_written(how: str) -> None:
    _found(how, {threads_barrier: _nothing}, "is read without waiting for the write")


@pytest.mark.parametrize("how", ["copy", "write"])
def test_one_thread_does_not_arrive_before_the_fences_of_the_others(how: str) -> None:
    """They fence, but after they have waited for each other."""
    fences = []

    def later(fence: Any) -> Any:
        fences.append(fence)
        return lambda: None

    changed = {small.fence_rows: later, threads_barrier: lambda meet: lambda: (meet(), fences[-1]())}
    _found(how, changed, "is read without a fence after the write")


def _read_back(changed: Any) -> Tensor:
    x = torch.randn(N * SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    given = TensorDescriptor.from_tensor(x, [SIZE, SIZE], LAYOUT)
    for seed in range(5):
        interpret(small.copies_kernel, 1, given, out, N, SIZE, LAYOUT, seed=seed, changed=changed)
    assert out.equal(x)
    return out


def test_what_threads_read_is_not_written_by_bulk_copies_without_a_fence() -> None:
    _read_back({})
    with pytest.raises(KernelFault, match="is written without a fence after the read by 0"):
        _read_back({small.fence_rows: _nothing})
    with pytest.raises(KernelFault, match="is written without waiting for the read by 0"):
        _read_back({threads_barrier: _nothing})


def test_bulk_copies_find_barriers_that_are_initialised() -> None:
    _found("bulk", {small.fence_barriers: _nothing}, "may not find barrier 1")


def test_a_copy_that_nobody_waits_for_is_not_read() -> None:
    _found("copy", {hopper.async_copy.wait_group: _nothing}, "is read without waiting for the write")


def test_registers_are_not_read_before_the_wait_for_the_product() -> None:
    with pytest.raises(
        KernelFault, match=r"registers of the product in test_interpreter.py:\d+ are read .* before a wait"
    ):
        interpret(_impatient_kernel, 1, LAYOUT, seed=0)


@pytest.mark.parametrize("how", HOW)
def test_a_partition_that_waits_for_ever_is_reported_with_the_barrier(how: str) -> None:
    _found(how, {small.hand_back: _nothing}, r"deadlock: (.*; )?1 .* waits for phase . of barrier")


def test_too_few_bytes_complete_a_phase_too_early() -> None:
    changed = {hopper.mbarrier.expect: lambda expect: lambda bar, bytes: expect(bar, bytes - 2)}
    _found("bulk", changed, "more bytes came")


def test_too_many_bytes_are_waited_for_in_vain() -> None:
    changed = {hopper.mbarrier.expect: lambda expect: lambda bar, bytes: expect(bar, bytes + 2)}
    _found("bulk", changed, "deadlock.*2 bytes missing")


def test_an_arrival_too_many() -> None:
    changed = {small.hand_back: lambda original: lambda bar: (original(bar), original(bar))}
    _found("bulk", changed, "too many|wrong phase|deadlock|without waiting")


def test_a_stage_is_not_written_while_it_may_be_read() -> None:
    # The producer does not wait at all.
    def change(wait: Any) -> Any:
        return lambda bar, phase: None if bar.memory.number == 2 else wait(bar, phase)

    _found("bulk", {hopper.mbarrier.wait: change}, "is written without waiting|too many")


def test_a_stage_is_not_handed_back_before_its_product_has_read_it() -> None:
    changed = {hopper.warpgroup_mma_wait: lambda wait: lambda num_outstanding, deps: wait(1, deps)}
    _found("bulk", changed, "is written without waiting for the read by wgmma")


def test_the_wrong_phase() -> None:
    changed = {hopper.mbarrier.wait: lambda wait: lambda bar, phase: wait(bar, phase ^ 1)}
    _found("bulk", changed, "wrong phase|deadlock|is read (before|without)|is written without waiting")


def test_the_message_ends_with_what_came_before() -> None:
    with pytest.raises(KernelFault, match=r"small.py:\d+\nThe last events:\n  "):
        _squares("write", 0, {small.fence_rows: _nothing})


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


def test_what_it_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(NotInterpreted, match="atomic_add"):
        interpret(_unknown_kernel, 1, torch.zeros(1), seed=0)


@pytest.mark.parametrize("kernel", [_unknown_of_tensor_kernel, _unknown_of_memory_kernel])
def test_methods_that_it_does_not_know_are_refused_by_name(kernel: Any) -> None:
    with pytest.raises(NotInterpreted, match="(logical_and of a tensor|_reinterpret of shared memory)"):
        interpret(kernel, 1, torch.zeros(1), LAYOUT, seed=0)


def test_arguments_that_it_does_not_know_are_refused_by_name() -> None:
    with pytest.raises(NotInterpreted, match="load: .*cache_modifier"):
        interpret(_unknown_argument_kernel, 1, torch.zeros(1), seed=0)


def _order(seed: int) -> list[str]:
    """Who waited and arrived, one after the other."""
    order = []

    def change(original: Any) -> Any:
        def function(bar: Any, *arguments: Any, **keywords: Any) -> Any:
            order.append(f"{bar.memory.number} {bar.memory.schedule.running.name}")
            return original(bar, *arguments, **keywords)

        return function

    _squares("bulk", seed, {hopper.mbarrier.wait: change, hopper.mbarrier.arrive: change})
    return order


def test_a_seed_is_an_order_and_others_are_others() -> None:
    assert _order(3) == _order(3)
    assert len({tuple(_order(seed)) for seed in range(12)}) >= 4


def test_places_outside_of_a_tensor() -> None:
    with pytest.raises(KernelFault, match="element 3 of a tensor of 3 elements"):
        interpret(_outside_kernel, 1, torch.zeros(3), 3, seed=0)


def test_whole_numbers_overflow_as_on_a_gpu() -> None:
    """Beside plain numbers, too, which are Python's own and never would."""
    out = torch.zeros(2, dtype=torch.int64)
    interpret(_overflowing_kernel, 1, torch.tensor([2], dtype=torch.int32), out, seed=0)
    assert out.tolist() == [-2, -2]


def test_memory_that_nobody_wrote_is_poison() -> None:
    out, registers = torch.zeros(2), gl.BlockedLayout([1], [32], [4], [0])
    interpret(_unwritten_kernel, 1, out, 3, None, registers, seed=0)
    assert out.isnan().tolist() == [False, True]
    with pytest.raises(KernelFault, match="is read before anything was written"):
        interpret(_unwritten_kernel, 1, out, 2, None, registers, seed=0)
