"""The interpreted language: the replacement of each Gluon function during a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia import hopper

from fusedmoe.kernels.gluon.grouped import pipeline
from tests.gluon_interpreter.barriers import Barrier
from tests.gluon_interpreter.copies import BulkStores, ThreadCopies, bulk_copy, cp_async
from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.products import TensorCores
from tests.gluon_interpreter.schedule import EventOrder
from tests.gluon_interpreter.shared import SharedMemory, View
from tests.gluon_interpreter.values import Pointer, Value, calculate, numbers, torch_dtype


class Language:
    """Gluon for one program: `functions` are pairs of a Gluon function and its replacement."""

    def __init__(self, schedule: EventOrder, program: int, programs: int) -> None:
        self._schedule, self._program, self._programs = schedule, program, programs
        self._memory = SharedMemory(schedule)
        self._copies, self._cores = ThreadCopies(schedule), TensorCores(schedule)
        self._stores = BulkStores(schedule)
        self._warps: dict[str, int] = {}  # of each partition
        self._barriers: dict[tuple[int, tuple[tuple[int, int], ...]], Barrier] = {}
        self.functions: list[tuple[Any, Callable[..., Any]]] = [
            (range, lambda *bounds: range(*(int(bound) for bound in bounds))),
            (gl.static_range, lambda *bounds: range(*bounds)),
            (gl.program_id, lambda axis: self._program),
            (gl.num_programs, lambda axis: self._programs),
            (gl.load, self.load),
            (gl.store, self.store),
            (gl.allocate_shared_memory, self.allocate),
            (gl.warp_specialize, self.warp_specialize),
            (pipeline.threads_barrier, self.meet),
            (hopper.fence_async_shared, self.fence),
            (hopper.warpgroup_mma, self.multiply),
            (hopper.warpgroup_mma_wait, self.wait_for_products),
            (hopper.mbarrier.init, self.init),
            (hopper.mbarrier.expect, self.expect),
            (hopper.mbarrier.arrive, self.arrive),
            (hopper.mbarrier.wait, self.wait),
            (pipeline.bulk_load, self.bulk_copy),
            (pipeline.bulk_store, self.bulk_store),
            (hopper.tma.store_wait, self.wait_for_stores),
            (pipeline.copy_rows, self.copy),
            (hopper.async_copy.commit_group, self.commit),
            (hopper.async_copy.wait_group, self.wait_for_copies),
            (hopper.async_copy.mbarrier_arrive, self.arrive_with_copies),
            *_ARITHMETIC,
        ]

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        pointer.store(value, mask)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> View:
        return self._memory.allocate(dtype, torch_dtype(dtype), shape)

    def warp_specialize(self, functions: Sequence[Any], warps: Sequence[int], registers: Any = None) -> None:
        if len(warps) != len(functions) - 1 or (registers is not None and len(registers) != len(warps)):
            raise KernelFault(f"{len(functions)} partitions, {len(warps)} numbers of warps")
        partitions = [
            (f"{number} ({function.__name__})", partial(function, *values))
            for number, (function, values) in enumerate(functions)
        ]
        self._warps = {name: number for (name, _), number in zip(partitions[1:], warps, strict=True)}
        self._schedule.run(partitions)
        self._stores.end()

    def fence(self) -> None:
        self._schedule.event("fence_async_shared")
        self._schedule.running.clock.fence(self._threads())

    def meet(self) -> None:
        self._schedule.event("barrier of threads")
        self._schedule.running.clock.meet()

    def multiply(self, a: Any, b: Any, acc: Any, *, is_async: bool = False) -> Any:
        self._schedule.event("warpgroup_mma")
        result = self._cores.start(a, b, acc)
        return result if is_async else self._cores.wait(0, (result,))

    def wait_for_products(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        self._schedule.event(f"warpgroup_mma_wait {num_outstanding}")
        return self._cores.wait(num_outstanding, deps)

    def init(self, view: View, count: int) -> None:
        self._barriers[view.memory.number, view.box] = Barrier(
            f"barrier {view.memory.number}{[start for start, _ in view.box[:1]]}", self._schedule, count
        )

    def expect(self, view: View, bytes: int, pred: Any = True) -> None:
        if pred:
            barrier = self._barrier(view)
            self._schedule.event(f"expect {bytes}, {barrier}")
            barrier.arrive(self._schedule.running.clock.of_one(self._threads()), 1, bytes)

    def arrive(self, view: View, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier = self._barrier(view)
            self._schedule.event(f"arrive {count}, {barrier}")
            barrier.arrive(self._schedule.running.clock.of_one(self._threads()), count)

    def wait(self, view: View, phase: Any, pred: Any = True) -> None:
        if pred:
            barrier = self._barrier(view)
            self._schedule.event(f"wait {int(phase)}, {barrier}")
            barrier.wait(int(phase))

    def bulk_copy(self, descriptor: Any, coord: Sequence[Any], barrier: View, result: View, pred: Any = True) -> None:
        if pred:
            self._schedule.event("bulk copy")
            bulk_copy(self._schedule, descriptor, coord, self._barrier(barrier), result)

    def bulk_store(self, descriptor: Any, coord: Sequence[Any], src: View) -> None:
        self._schedule.event("bulk store")
        self._stores.start(descriptor, coord, src)

    def wait_for_stores(self, pendings: int) -> None:
        self._schedule.event(f"store_wait {pendings}")
        self._stores.wait(pendings)

    def copy(self, smem: View, pointer: Pointer, mask: Any = None) -> None:
        self._schedule.event("cp.async")
        self._copies.start(smem, pointer, mask)

    def commit(self) -> None:
        self._copies.commit()

    def wait_for_copies(self, num_outstanding: int = 0) -> None:
        self._schedule.event(f"wait_group {num_outstanding}")
        self._copies.wait(num_outstanding)

    def arrive_with_copies(self, mbarrier: View, increment_count: bool = True) -> None:
        name = self._schedule.running.name
        if increment_count or name not in self._warps:
            raise NotInterpreted("copies that add to the count of arrivals, or of a partition of unknown size")
        barrier = self._barrier(mbarrier)
        self._schedule.event(f"copies arrive, {barrier}")
        self._copies.arrive(barrier, 32 * self._warps[name])

    def _threads(self) -> tuple[str, str]:
        """Actors of the running partition's threads."""
        name = self._schedule.running.name
        return name, cp_async(name)

    def _barrier(self, view: View) -> Barrier:
        barrier = self._barriers.get((view.memory.number, view.box))
        if barrier is None:
            raise KernelFault("a barrier that was not initialised")
        return barrier


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    return lambda x: Value(function(torch.as_tensor(numbers(x))))


def _of_type(x: Any, other: Any) -> Value:
    """Convert an integer to the tensor's type: a wider type would hide an overflow on the GPU."""
    if isinstance(x, Value):
        return x
    return Value(torch.as_tensor(numbers(x), dtype=numbers(other).dtype if isinstance(x, int) else None))


def _extreme(whole: Callable[[Any, Any], Any], tensors: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def function(x: Any, y: Any) -> Any:
        if not isinstance(x, Value) and not isinstance(y, Value):
            return whole(x, y)
        return calculate(tensors, _of_type(x, y), _of_type(y, x))

    return function


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32))


def _zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Value:
    return Value(torch.zeros([*shape], dtype=torch_dtype(dtype)))


def _full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(torch.full([*shape], numbers(value), dtype=torch_dtype(dtype)))


def _sum(value: Value, axis: int) -> Value:
    return Value(value.data.sum(axis))


# Inline instructions of kernels, as accurate as their replacements.
_INSTRUCTIONS = {"ex2.approx.ftz.f32 $0, $1;": torch.exp2, "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal}


def _instruction(asm: str, constraints: str, args: Sequence[Value], dtype: Any, is_pure: bool, pack: int) -> Value:
    if asm not in _INSTRUCTIONS:
        raise NotInterpreted(asm)
    (x,) = args
    return Value(_INSTRUCTIONS[asm](x.data))


def _where(condition: Value, x: Any, y: Any) -> Value:
    return Value(torch.where(condition.data, numbers(x), numbers(y)))


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise KernelFault(f"static_assert fails: {message}")


_ARITHMETIC: list[tuple[Any, Callable[..., Any]]] = [
    (gl.arange, _arange),
    (gl.zeros, _zeros),
    (gl.full, _full),
    (gl.sum, _sum),
    (gl.where, _where),
    (gl.inline_asm_elementwise, _instruction),
    (gl.static_assert, _static_assert),
    (gl.convert_layout, lambda value, layout: value),
    (gl.minimum, _extreme(min, torch.minimum)),
    (gl.maximum, _extreme(max, torch.maximum)),
    (gl.exp, _torch(torch.exp)),
    (gl.erf, _torch(torch.erf)),
]
