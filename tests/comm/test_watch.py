"""Waits of kernels that ended early are told, on a GPU too, where nobody on the host waits for the kernels."""

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
from fusedmoe.training import copies


class Gpu:
    """A made-up one: what is launched runs when the stream is waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: list[Callable[[], None]] = []
        self.waits = 0
        self.captures = False
        patch.setattr(heap_module, "_shared", lambda count, device: torch.zeros(count, dtype=torch.int64))
        patch.setattr(heap_module, "_settle", lambda device: self.settle())

    def settle(self) -> bool:
        if self.captures:
            return False
        self.waits += 1
        while self.launched:
            self.launched.pop(0)()
        return True


class MadeUpHeap(Heap):
    """Of two ranks, of which this process is one, on that GPU."""

    backend = "made up"

    def __init__(self) -> None:
        super().__init__(Group("ep", (4, 7), 0, job=Job(4, 30.0)), torch.device("cuda", 0))
        self.freed = 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        own = torch.zeros(size, dtype=torch.uint8)
        return own, [own.data_ptr(), own.data_ptr()]

    def _gather(self, thing: object) -> list[object]:
        return [thing, thing]

    def _free(self) -> None:
        self.freed += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    for name in ("tensor", "arange"):
        make_here = partial(lambda function, *args, device=None, **more: function(*args, **more), getattr(torch, name))
        monkeypatch.setattr(torch, name, make_here)
    return Gpu(monkeypatch)


def make() -> tuple[MadeUpHeap, ReceiveBuffers]:
    heap = MadeUpHeap()
    return heap, ReceiveBuffers(heap, BufferSizes(300, 2, 4, 8, torch.float32, degree=4))


def misses(
    buffers: ReceiveBuffers, signals: Tensor, index: int, expected: int = 5, seen: int = 3
) -> Callable[[], None]:
    """A kernel whose wait for that signal ends early, as `fusedmoe.kernels.triton.one_sided.remote.wait` leaves it."""

    def run() -> None:
        if not buffers.watch.record[0]:
            buffers.watch.record.copy_(torch.tensor([1, index, expected, seen, signals.data_ptr()]))
        buffers.watch.stop.fill_(1)

    return run


def test_nobody_waits_and_a_later_look_tells(gpu: Gpu) -> None:
    _, buffers = make()
    signals = buffers.tokens.signals
    tile_3_of_peer_1_in_slot_1 = signals[0].numel() + signals.shape[2] + 2
    with buffers.watch.over():
        gpu.launched.append(misses(buffers, signals, tile_3_of_peer_1_in_slot_1))
    with buffers.watch.over():  # other kernels follow, of which this is no miss
        gpu.launched.append(misses(buffers, buffers.results.signals, 0))
    assert gpu.waits == 0 and len(gpu.launched) == 2
    gpu.launched.pop(0)()
    told = "rank 4: experts over the ep group .*tile 2 of the tokens of rank 7, expected signal 5, seen 3"
    with pytest.raises(RankError, match=told), buffers.watch.over():
        pass


def test_a_miss_at_the_very_end_is_told(gpu: Gpu) -> None:
    """In the last exchange: where a step ends, where a layer is asked, where the heap is closed."""
    for end in ("close", "check", "with"):
        heap, buffers = make()
        gpu.launched = [misses(buffers, buffers.results.signals, 4 * 1 + 2)]
        with pytest.raises(RankError, match="combine over the ep group .*chunk 2 of the results of rank 7"):
            if end == "with":
                with heap:
                    pass
            else:
                getattr(heap, end)()
        assert heap.freed == 0 and heap.abandoned == (end != "check")
    heap, buffers = make()
    heap.close()
    heap.close()
    assert heap.freed == 1


def test_a_record_in_the_middle_of_being_written(gpu: Gpu) -> None:
    """The reason comes first, the rest a moment later."""
    _, buffers = make()
    gpu.launched = [lambda: buffers.watch.record.copy_(torch.tensor([1, 1, 9, 8, buffers.tokens.credits.data_ptr()]))]
    buffers.watch.record[0] = 1
    with pytest.raises(RankError, match="dispatch over the ep group .*the credit of rank 7, expected signal 9, seen 8"):
        buffers.watch.check()


def test_while_a_graph_is_captured_nothing_is_waited_for(gpu: Gpu) -> None:
    heap, buffers = make()
    gpu.captures = True
    buffers.watch.record[0] = 1
    with buffers.watch.over():
        gpu.launched = [misses(buffers, buffers.metadata.signals, 0)]
    heap.check()
    assert gpu.waits == 0
    gpu.captures = False
    buffers.watch.record[0] = 0
    with pytest.raises(RankError, match="part 0 of the routing metadata of rank 4"):
        heap.check()


def test_gradients_of_a_pass_that_missed_something_are_not_used(gpu: Gpu) -> None:
    heap, buffers = make()
    topology = Topology()
    topology.job = heap.group.job
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    layer = fusedmoe.MoELayer(4, fusedmoe.gates.TopK(2), fusedmoe.experts.FeedForward(4), topology=topology)
    for step in (lambda: copies.reduce_gradients([], [], topology), layer.check):
        buffers.watch.record.zero_()
        gpu.launched = [misses(buffers, buffers.metadata.signals, 0)]
        with pytest.raises(RankError, match="part 0 of the routing metadata of rank 4"):
            step()
    heap.abandon()
    layer.check()
