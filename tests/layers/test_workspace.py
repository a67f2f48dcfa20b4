"""Memory that layers use again: nobody sees that it is not new, and steps ask the system for none."""

from __future__ import annotations

import gc
import pickle
import resource
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedmoe.comm.topology import Topology
from fusedmoe.kernels import workspace
from fusedmoe.kernels.workspace import Workspace, empty, shared_workspace
from fusedmoe.layers.expert_networks import FeedForward, SwiGLU
from fusedmoe.layers.gates import TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import Schedule
from tests.cluster import Cluster

M = 16


def poison(patch: pytest.MonkeyPatch) -> None:
    """All tensors come from a workspace, where NaN is in whatever nobody uses any more."""
    give_back, buffer = workspace._give_back, Workspace._buffer

    def spoiled(owner: weakref.ref[Workspace], used: np.ndarray, *rest: object) -> None:
        used.fill(0xFF)
        give_back(owner, used, *rest)  # type: ignore[arg-type]

    def spoiled_buffer(self: Workspace, size: int) -> np.ndarray:
        found = buffer(self, size)
        found.fill(0xFF)
        return found

    patch.setattr(workspace, "_give_back", spoiled)
    patch.setattr(Workspace, "_buffer", spoiled_buffer)
    patch.setattr(workspace, "_SMALLEST", 1)
    patch.setattr(workspace, "_shared", weakref.WeakValueDictionary())  # not that of layers before


@pytest.fixture
def poisoned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        yield


def make(seed: int = 0, experts: type[FeedForward] = SwiGLU, **more: object) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(M, TopK(experts=4, k=2), experts(24), **more)  # type: ignore[arg-type]


def batch(tokens: int = 33, seed: int = 1) -> Tensor:
    return torch.randn(tokens, M, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Copies, and none left behind."""
    found = [one.grad.clone() for one in (x, *layer.parameters()) if one.grad is not None]
    x.grad = None
    layer.zero_grad(set_to_none=True)
    return found


def step(layer: MoELayer, x: Tensor) -> list[Tensor]:
    y = layer(x)
    (y.square().sum() + layer.aux_loss).backward()
    return [y.detach().clone(), *gradients(layer, x)]


def both(work: Callable[[], list[Tensor]]) -> None:
    """The same bits in poisoned memory that is used again, and in new memory."""
    found = [work() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "_SMALLEST", 1 << 60)
        expected = work()
    for each in found:
        assert all(one.isfinite().all() for one in each)
        assert len(each) == len(expected) and all(map(torch.equal, each, expected))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("experts", [SwiGLU, FeedForward])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_new_memory(experts: type[FeedForward], dtype: torch.dtype) -> None:
    layer = make(experts=experts, dtype=dtype)
    x = batch().detach().to(dtype).requires_grad_()
    both(lambda: step(layer, x))
    assert layer._workspace.free_bytes > 0


def twice(layer: MoELayer, x: Tensor) -> list[Tensor]:
    y = layer(x)
    y.sum().backward(retain_graph=True)
    first = gradients(layer, x)
    step(layer, batch(50, seed=2))
    y.sum().backward()
    second = gradients(layer, x)
    assert all(map(torch.equal, first, second))
    return second


def checkpointed(layer: MoELayer, x: Tensor) -> list[Tensor]:
    y = checkpoint(layer, x, use_reentrant=False)
    y.square().sum().backward()
    return [y.detach().clone(), *gradients(layer, x)]


def in_turn(layer: MoELayer, x: Tensor) -> list[Tensor]:
    other = make(seed=5)
    y = other(layer(layer(x)))
    y.square().sum().backward()
    return [y.detach().clone(), *gradients(other, batch()), *gradients(layer, x)]


def with_a_failure(layer: MoELayer, x: Tensor) -> list[Tensor]:
    def fail(_: Tensor) -> None:
        raise RuntimeError("in the middle")

    h = x * 1
    h.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        layer(h).sum().backward()
    gradients(layer, x)
    return step(layer, x)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("work", [twice, checkpointed, in_turn, with_a_failure])
def test_ways_of_autograd(work: Callable[[MoELayer, Tensor], list[Tensor]]) -> None:
    layer = make()
    both(lambda: work(layer, batch()))


@pytest.mark.usefixtures("poisoned")
def test_what_users_keep_stays() -> None:
    """Outputs, what a hook sees, gradients, views and arrays; more outputs than a workspace gives out, too."""
    layer, kept = make(), []
    for seed in range(2 * workspace._RESULTS):
        x = batch(seed=seed)
        y = layer(x)
        y.register_hook(kept.append)
        kept += [y.detach()[3:], torch.from_numpy(y.detach().numpy())]
        y.square().sum().backward()
        kept += [x.grad, *(one.grad for one in layer.parameters())]
        layer.zero_grad(set_to_none=True)
    copies = [one.clone() for one in kept]
    for seed in range(3):
        step(layer, batch(seed=seed))
    assert all(one.isfinite().all() for one in kept) and all(map(torch.equal, kept, copies))


def keep_tensor(one: Tensor) -> object:
    return one


def keep_view(one: Tensor) -> object:
    return one[1:].t()


def keep_array(one: Tensor) -> object:
    return one.numpy()[2:]


def keep_storage(one: Tensor) -> object:
    return one.untyped_storage()


def keep_capsule(one: Tensor) -> object:
    return torch.utils.dlpack.to_dlpack(one)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("keep", [keep_tensor, keep_view, keep_array, keep_storage, keep_capsule])
def test_memory_comes_back_after_its_last_use(keep: Callable[[Tensor], object]) -> None:
    owner, like = shared_workspace(), torch.empty(1)
    first = empty(like, (10, 30))
    place, kept = first.data_ptr(), [keep(first)]
    del first
    second = empty(like, (10, 30))
    assert owner.free_bytes == 0 and second.data_ptr() != place
    kept.clear()
    assert owner.free_bytes == int(workspace._ROOM * 1200)
    assert empty(like, (20, 14)).data_ptr() == place  # a little less
    assert empty(like, (11, 30)).data_ptr() == place  # a little more
    assert empty(like, (9, 10)).data_ptr() != place  # much less


@pytest.mark.usefixtures("poisoned")
def test_tensors_are_like_new_ones() -> None:
    owner, like = shared_workspace(), torch.empty(1)
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.int64):
        made = empty(like.to(dtype), (3, 5))
        assert made.shape == (3, 5) and made.dtype == dtype and made.is_contiguous() and not made._is_view()
        assert made.data_ptr() % 64 == 0 and len(pickle.dumps(made.untyped_storage())) < 2000
    assert empty(like, (0, 5)).shape == (0, 5) and empty(like.to("meta"), (3, 5)).is_meta
    shared = empty(like, (3, 5)).fill_(2).share_memory_()
    assert owner.free_bytes > 0 and (shared == 2).all()
    # Autograd adds up in place only what nobody else may see: not to do so would take new memory.
    leaf = torch.ones(3, 5, requires_grad=True)
    gradient = empty(like, (3, 5)).fill_(1)
    place = gradient.data_ptr()

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            nonlocal gradient
            given, gradient = gradient, grad
            return given

    other = leaf * 1
    (other + Given.apply(leaf)).sum().backward()
    assert leaf.grad is not None and leaf.grad.data_ptr() == place and (leaf.grad == 2).all()


def test_results_that_users_hoard_are_new_memory() -> None:
    owner = Workspace()
    kept = [owner.empty((4 + which % 3,), torch.float32, result=True) for which in range(3 * workspace._RESULTS)]
    assert sum(one is not None for one in kept) == workspace._RESULTS
    kept.clear()
    assert owner.empty((5,), torch.float32, result=True) is not None


def test_results_are_counted_where_memory_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> None:
        raise MemoryError

    owner = Workspace()
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_buffer", none)
        for _ in range(workspace._RESULTS):
            with pytest.raises(MemoryError):
                owner.empty((4,), torch.float32, result=True)
    assert owner.empty((4,), torch.float32, result=True) is not None


@pytest.mark.usefixtures("poisoned")
def test_what_nobody_asks_for_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_PATIENCE", 5)
    owner = shared_workspace()
    for size in range(20):
        empty(torch.empty(1), (4**9 + 100_000 * size,))
    assert owner.free_bytes <= 8 * 4 * (4**9 + 2_000_000)


def test_memory_goes_with_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_shared", weakref.WeakValueDictionary())
    assert empty(torch.empty(1), (1 << 20,)).untyped_storage().resizable()  # nobody holds a workspace
    layers = [MoELayer(M, TopK(experts=4, k=2), SwiGLU(256)) for _ in range(2)]
    layers.append(deepcopy(layers[0]))
    layers.append(pickle.loads(pickle.dumps(layers[0])))
    owner = weakref.ref(layers[0]._workspace)
    assert all(layer._workspace is owner() for layer in layers)
    for layer in layers:
        step(layer, batch(600))
    free = owner()
    assert free is not None and free.free_bytes > 600 * 2 * 512 * 4
    buffers = [weakref.ref(one.buffer) for one in free._free]
    kept = layers[0](batch(600))
    del free, layer
    layers.clear()
    gc.collect()
    assert owner() is None
    kept.sum().backward()  # a graph outlives its layer, and leaves nothing
    del kept
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)


def most_faults(layer: MoELayer, tokens: int, more: int = 0) -> int:
    """Fresh pages in the best of some steps: others' work in this process must not count. Each step has `more` tokens
    than the one before."""

    def faults(tokens: int) -> int:
        x = torch.randn(tokens, layer.model_dim, requires_grad=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min([faults(tokens + number * more) for number in range(8)][2:])


def big(**more: object) -> MoELayer:
    """Pre-activations of 64 MiB for 4096 tokens: more than the C library ever keeps."""
    return MoELayer(M, TopK(experts=4, k=2), SwiGLU(1024), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [0, 16])
def test_steps_ask_the_system_for_no_pages(more: int) -> None:
    pages = 2**26 // resource.getpagesize()
    assert most_faults(big(), 4096, more) < pages // 10


def in_parallel(rank: int, world: int) -> None:
    topology = Topology.from_sizes(world)
    plans: list[str | Schedule] = ["off", Schedule("fsmoe", degrees=(2, 2)), Schedule("fsmoe", degrees=(3, 2))]
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        for schedule in plans:
            layer = make(topology=topology, schedule=schedule)
            both(lambda layer=layer: step(layer, batch(30 + 20 * rank)))  # type: ignore[misc]
    pages = 2**26 // resource.getpagesize()
    assert most_faults(big(topology=topology), 4096) < pages // 10


def test_two_ranks(cluster: Cluster) -> None:
    cluster.run(2, in_parallel)
