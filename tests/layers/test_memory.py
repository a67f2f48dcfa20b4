"""The layer saves for backward exactly the tensors that its docstring lists."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import FeedForward, SwiGLU
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.marks import slowly


def saved_elements(layer: MoELayer, x: Tensor) -> dict[torch.dtype, int]:
    """Count the saved elements of each dtype in a forward: tensors saved by autograd, and the layouts' integers.

    A storage counts once and in full, however little of it a saved tensor uses.
    """
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages: dict[int, tuple[torch.dtype, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (tensor.dtype, storage.nbytes() // tensor.itemsize)
        return tensor

    layouts: list[weakref.ref[Layout]] = []
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        plain = Layout.__init__

        def made(layout: Layout, *given: Any, **more: Any) -> None:
            plain(layout, *given, **more)
            layouts.append(weakref.ref(layout))

        patch.setattr(Layout, "__init__", made)
        y = layer(x)
    for layout in filter(None, (one() for one in layouts)):
        torch.utils._pytree.tree_map_only(Tensor, note, vars(layout))
    assert y.requires_grad
    total: dict[torch.dtype, int] = {}
    for dtype, size in storages.values():
        total[dtype] = total.get(dtype, 0) + size
    return total


def assert_saved_elements(
    layer: MoELayer, S: int, M: int, H: int, K: int, dtype: torch.dtype, topology: Topology | None = None
) -> None:
    x_SM = torch.randn(S, M, dtype=dtype, requires_grad=True)
    saved = saved_elements(layer, x_SM)
    E, g = layer.gate.experts, 2 if isinstance(layer.experts, SwiGLU) else 1
    N = P = int(layer.load_E.sum()) - layer.dropped
    travels, ep, esp, R, T = bool(layer.hooks), 1, 1, S, S
    if topology is not None:  # nothing is dropped here
        travels, ep, esp = True, topology.ep.size, topology.esp.size
        load_E = all_reduce(topology.world, layer.load_E.clone())
        P = int(load_E.view(ep, -1)[topology.ep.index].sum())
        # A token is sent once to each rank, or set of shards, with experts for it.
        ranks_S = [set(ranks) for ranks in (layer.gate(x_SM).expert_SK // (E // ep)).tolist()]
        tokens_W = torch.tensor([sum(rank in ranks for ranks in ranks_S) for rank in range(ep)])
        T, R = int(tokens_W.sum()), int(all_reduce(topology.world, tokens_W.clone())[topology.ep.index])
    # gather_selected() holds the chosen experts, and autograd does not show them.
    integers = S * K + sum(saved.pop(dtype) for dtype in list(saved) if not dtype.is_floating_point)
    of_travel = S * K + 2 * N + 2 * T + 4 * P + R * K + 8 * E if travels else 0
    assert 0 < integers <= 2 * S * K + 4 * N + 2 * S + 4 * E + of_travel
    expected = {dtype: S * M + P * g * H // esp + (R * M if travels else 0)}
    router = torch.promote_types(dtype, torch.float32)
    expected[router] = expected.get(router, 0) + S * K + P + (E * (S + 1) if layer.gate.aux else 0)
    assert saved == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("experts", [SwiGLU, FeedForward])
@pytest.mark.parametrize(
    "S, M, H, E, K",
    [
        (33, 8, 40, 6, 3),
        pytest.param(40, 16, 24, 4, 2, marks=pytest.mark.slow),
        pytest.param(64, 24, 8, 16, 5, marks=pytest.mark.slow),
    ],
)
def test_saved_tensors_equal_documented_sizes(
    experts: type[FeedForward], dtype: torch.dtype, S: int, M: int, H: int, E: int, K: int
) -> None:
    assert_saved_elements(MoELayer(M, fusedmoe.gates.TopK(experts=E, k=K), experts(H), dtype=dtype), S, M, H, K, dtype)


@pytest.mark.parametrize("aux", [{}, {"balance": 1.0}], ids=str)
def test_saved_tensors_with_dropped_tokens(aux: dict[str, float]) -> None:
    layer = MoELayer(16, fusedmoe.gates.TopK(experts=4, k=2, capacity_factor=0.5, aux=aux), SwiGLU(24))
    assert_saved_elements(layer, 50, 16, 24, 2, torch.float32)
    assert layer.dropped > 0


def test_saved_tensors_with_hooks() -> None:
    layer = MoELayer(16, fusedmoe.gates.TopK(experts=4, k=2), FeedForward(24), hooks=[fusedmoe.Hooks()])
    assert_saved_elements(layer, 50, 16, 24, 2, torch.float32)


def test_no_grad_forward_saves_nothing() -> None:
    layer = MoELayer(16, fusedmoe.gates.TopK(experts=4, k=2), SwiGLU(24))
    saved: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        assert not layer(torch.randn(50, 16)).requires_grad
    assert not saved


def check_on_rank(
    rank: int, world: int, ep: int, esp: int, experts: type[FeedForward], dtype: torch.dtype, degrees: tuple[int, int]
) -> None:
    topology = Topology.from_sizes(ep, esp)
    schedule = None if degrees == (0, 0) else fusedmoe.Schedule("fsmoe", degrees=degrees)
    more = {"topology": topology, "dtype": dtype, "schedule": schedule}
    layer = MoELayer(16, fusedmoe.gates.TopK(experts=4, k=2), experts(24), **more)
    assert_saved_elements(layer, 30 + 20 * rank, 16, 24, 2, dtype, topology)


@pytest.mark.parametrize(
    ("ep", "esp", "dtype"),
    [
        *((2, 1, torch.float32), (1, 2, torch.bfloat16), (2, 2, torch.float32)),
        *slowly((2, 1, torch.bfloat16), (1, 2, torch.float32), (2, 2, torch.bfloat16)),
    ],
    ids=str,
)
def test_saved_tensors_of_parallel_layer(cluster: Cluster, ep: int, esp: int, dtype: torch.dtype) -> None:
    cluster.run(ep * esp, check_on_rank, ep, esp, SwiGLU if ep == 2 else FeedForward, dtype, (0, 0))


@pytest.mark.parametrize("degrees", [(1, 1), (2, 2), (3, 2)], ids=str)
def test_saved_tensors_with_schedule(cluster: Cluster, degrees: tuple[int, int]) -> None:
    cluster.run(2, check_on_rank, 2, 1, SwiGLU, torch.float32, degrees)
