"""Models whose activations, and so whose loss, are the same on all ranks of an MP group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import training
from fusedmoe.comm.topology import Topology
from tests.cluster import Cluster


def build(topology: Topology | None, mp_input: str) -> nn.Module:
    torch.manual_seed(5)
    layer = fusedmoe.MoELayer(
        8,
        fusedmoe.gates.TopK(experts=4, k=2, aux={}),  # without drops and losses that depend on how tokens are sliced
        fusedmoe.experts.SwiGLU(8),
        shared=fusedmoe.experts.FeedForward(4),
        topology=topology,
        mp_input=mp_input,  # type: ignore[arg-type]
    )
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)).double()


def data(replica: int) -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))


def gradients(rank: int, world: int, ep: int, mp: int, wrapped: bool) -> dict[str, Tensor]:
    topology = Topology.from_sizes(ep=ep, mp=mp)
    model = build(topology, "replicated")
    x = data(topology.dp.index)
    if wrapped:
        wrapper = training.distributed_data_parallel(model, topology, mp_loss="replicated")
        wrapper(x).square().mean().backward()
    else:
        model(x).square().mean().backward()
        training.sync_gradients(model, topology, mp_loss="replicated")
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize("wrapped", [False, True], ids=["synced", "wrapped"])
@pytest.mark.parametrize(("world", "ep", "mp"), [(2, 1, 2), (4, 2, 2), (4, 4, 4)])
def test_gradients_are_those_of_one_process(cluster: Cluster, world: int, ep: int, mp: int, wrapped: bool) -> None:
    whole = build(None, "replicated")
    torch.stack([whole(data(replica)).square().mean() for replica in range(world // mp)]).mean().backward()
    for rank, found in enumerate(cluster.run(world, gradients, ep, mp, wrapped)):
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            expected = parameter.grad
            if name.startswith("1.experts."):
                expected = expected.chunk(ep)[rank % ep]
            error = (found[name] - expected).norm() / expected.norm().clamp(min=1e-6)  # an expert may be idle
            assert error < 1e-10, (rank, name, float(error))


def test_unknown_convention_is_refused() -> None:
    model = nn.Linear(2, 2)
    replica = training.replicas.replicas(model, Topology())[0]
    with pytest.raises(fusedmoe.ConfigError, match="choose summands or replicated"):
        training.replicas.divisor(replica, Topology(), "shared")  # type: ignore[arg-type]
