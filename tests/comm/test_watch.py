"""Missed waits of kernels are reported, also on a GPU, where the host does not wait for kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.one_sided import heap as heap_module
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.training import replicated_parameters


class FakeGpu:
    """A fake GPU: launches run when the stream is synchronized."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: list[Callable[[], None]] = []
        self.waits = 0
        self.captures = False
        patch.setattr(
            heap_module, "_allocate_failure_record", lambda count, device: torch.zeros(count, dtype=torch.int64)
        )
        patch.setattr(heap_module, "_synchronize", lambda device: self.settle())

    def settle(self) -> bool:
        if self.captures:
            return False
        self.waits += 1
        while self.launched:
            self.launched.pop(0)()
        return True


class FakeHeap(Heap):
    """A heap of two ranks on that GPU; this process is one of them."""

    backend = "made up"

    def __init__(self) -> None:
        super().__init__(Group("ep", (4, 7), 0, job=Job(4, 30.0)), torch.device("cuda", 0))
        self.freed = 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        own = torch.zeros(size, dtype=torch.uint8)
        return own, [own.data_ptr(), own.data_ptr()]

    def _all_gather(self, thing: object) -> list[object]:
        return [thing, thing]

    def _free(self) -> None:
        self.freed += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    for name in ("tensor", "arange"):
        make_here = partial(lambda function, *args, device=None, **more: function(*args, **more), getattr(torch, name))
        monkeypatch.setattr(torch, name, make_here)
    return FakeGpu(monkeypatch)


def make() -> tuple[FakeHeap, ReceiveBuffers]:
    heap = FakeHeap()
    return heap, ReceiveBuffers(heap, BufferSizes(300, 2, 4, 8, torch.float32, degree=4))


def missed_wait(
    buffers: ReceiveBuffers, signals: Tensor, index: int, expected: int = 5, seen: int = 3
) -> Callable[[], None]:
    """A kernel whose wait for that signal times out; leaves the record of `one_sided.remote.wait`."""

    def run() -> None:
        if not buffers.watch.record[0]:
            buffers.watch.record.copy_(torch.tensor([1, index, expected, seen, signals.data_ptr()]))
        buffers.watch.stop.fill_(1)

    return run


def test_missed_wait_is_reported_later_without_sync(gpu: FakeGpu) -> None:
    _, buffers = make()
    signals = buffers.tokens.signals
    tile_3_of_peer_1_in_slot_1 = signals[0].numel() + signals.shape[2] + 2
    with buffers.watch.guard_launches():
        gpu.launched.append(missed_wait(buffers, signals, tile_3_of_peer_1_in_slot_1))
    with buffers.watch.guard_launches():  # later kernels that do not miss
        gpu.launched.append(missed_wait(buffers, buffers.results.signals, 0))
    assert gpu.waits == 0 and len(gpu.launched) == 2
    gpu.launched.pop(0)()
    told = "rank 4: experts over the ep group .*tile 2 of the tokens of rank 7, expected signal 5, seen 3"
    with pytest.raises(RankError, match=told), buffers.watch.guard_launches():
        pass


def test_missed_wait_of_last_exchange_is_reported(gpu: FakeGpu) -> None:
    """A miss in the last exchange is reported at the end of a step, by a layer's check, and on closing the heap."""
    for end in ("close", "check", "with"):
        heap, buffers = make()
        gpu.launched = [missed_wait(buffers, buffers.results.signals, 4 * 1 + 2)]
        with pytest.raises(RankError, match="combine over the ep group .*chunk 2 of the results of rank 7"):
            if end == "with":
                with heap:
                    pass
            else:
                getattr(heap, end)()
        assert heap.freed == 0 and heap.is_abandoned == (end != "check")
    heap, buffers = make()
    heap.close()
    heap.close()
    assert heap.freed == 1


def test_partially_written_record_is_read_completely(gpu: FakeGpu) -> None:
    """The reason is written first, the rest a moment later."""
    _, buffers = make()
    gpu.launched = [lambda: buffers.watch.record.copy_(torch.tensor([1, 1, 9, 8, buffers.tokens.credits.data_ptr()]))]
    buffers.watch.record[0] = 1
    with pytest.raises(RankError, match="dispatch over the ep group .*the credit of rank 7, expected signal 9, seen 8"):
        buffers.watch.check()


def test_graph_capture_never_synchronizes(gpu: FakeGpu) -> None:
    heap, buffers = make()
    gpu.captures = True
    buffers.watch.record[0] = 1
    with buffers.watch.guard_launches():
        gpu.launched = [missed_wait(buffers, buffers.metadata.signals, 0)]
    heap.check()
    assert gpu.waits == 0
    gpu.captures = False
    buffers.watch.record[0] = 0
    with pytest.raises(RankError, match="part 0 of the routing metadata of rank 4"):
        heap.check()


def test_missed_wait_prevents_use_of_gradients(gpu: FakeGpu) -> None:
    heap, buffers = make()
    topology = Topology()
    topology.job = heap.group.job
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    layer = fusedmoe.MoELayer(4, fusedmoe.gates.TopK(2), fusedmoe.experts.FeedForward(4), topology=topology)
    for step in (lambda: replicated_parameters.reduce_gradients([], [], topology), layer.check):
        buffers.watch.record.zero_()
        gpu.launched = [missed_wait(buffers, buffers.metadata.signals, 0)]
        with pytest.raises(RankError, match="part 0 of the routing metadata of rank 4"):
            step()
    heap.abandon()
    layer.check()
