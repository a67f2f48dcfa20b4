"""Gradients synchronised after each micro-batch equal those of one process, whatever changes them between syncs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training import clip_grad_norm, sync_gradients
from tests.cluster import Cluster

BATCHES = 3


def _model(topology: Topology) -> nn.Module:
    torch.manual_seed(1)
    gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.FeedForward(6)
    moe = fusedmoe.MoELayer(4, gate, experts, topology=topology, mp_input="split")
    return nn.Sequential(nn.Linear(4, 4), moe, nn.Linear(4, 4)).double()


def _loss(model: nn.Module, rank: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + batch)
    return model(torch.randn(2 + rank, 4, generator=generator, dtype=torch.float64)).square().mean()


def _whole(world: int, replicas: int, batch: int) -> dict[str, Tensor]:
    """The gradients of a micro-batch in one process; ranks are summands of the losses of their replicas."""
    model = _model(Topology())
    (sum(_loss(model, rank, batch) for rank in range(world)) / replicas).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _own(model: nn.Module, topology: Topology, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient."""
    if "experts" not in name:
        return whole
    layer: fusedmoe.MoELayer = model[1]  # type: ignore[assignment]
    for axis, group in (("ep", topology.ep), ("esp", topology.esp)):
        whole = whole.chunk(group.size, layer.experts.shardings[name.removeprefix("1.experts.")][axis])[group.index]
    return whole


def _norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def _check_repeated_sync(rank: int, world: int, sizes: dict[str, int]) -> None:
    topology = Topology.from_sizes(**sizes)
    batches = [_whole(world, topology.dp.size, batch) for batch in range(BATCHES)]
    for between in ("nothing", "sync", "halve", "clip", "clip, sync", "zero", "none", "one rank's none"):
        model = _model(topology)
        total = {name: torch.zeros_like(gradient) for name, gradient in batches[0].items()}
        for batch in range(BATCHES):
            _loss(model, rank, batch).backward()
            sync_gradients(model, topology)
            total = {name: gradient + batches[batch][name] for name, gradient in total.items()}
            if "clip" in between:
                norm = float(_norm(total))
                assert float(clip_grad_norm(model, topology, norm / 2)) == pytest.approx(norm)
                total = {name: gradient * (norm / 2 / (norm + 1e-6)) for name, gradient in total.items()}
            if "sync" in between:
                sync_gradients(model, topology)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    parameter.grad, _own(model, topology, name, total[name]), rtol=1e-9, atol=1e-12
                )
                if between == "halve":
                    parameter.grad.mul_(0.5)
            if between == "halve":
                total = {name: gradient / 2 for name, gradient in total.items()}
            if between in ("zero", "none") or (between == "one rank's none" and batch == 0):
                # Equal values are zeros in memory on one rank and no tensor on another.
                model.zero_grad(set_to_none=between == "none" or (between != "zero" and rank == 0))
                total = {name: torch.zeros_like(gradient) for name, gradient in total.items()}


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"esp": 2}, {"mp": 2}])
def test_sync_after_each_micro_batch_equals_one_process(cluster: Cluster, sizes: dict[str, int]) -> None:
    cluster.run(2, _check_repeated_sync, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep": 4}, {"ep": 2}, {"ep": 2, "esp": 2}, {"ep": 2, "mp": 2}])
def test_sync_after_each_micro_batch_on_four_ranks(cluster: Cluster, sizes: dict[str, int]) -> None:
    cluster.run(4, _check_repeated_sync, sizes)


def _check_unused_and_in_place(rank: int, world: int) -> None:
    """Parameters without a second gradient on some rank, and gradients written in place."""
    topology = Topology.from_sizes(ep=world)
    model = _model(topology)
    expected = [_whole(world, world, batch) for batch in (0, 1)]
    _loss(model, rank, 0).backward()
    sync_gradients(model, topology)
    # The last layer is not used again; its gradient is kept.
    _loss(model[:2], rank, 1).backward()
    sync_gradients(model, topology)
    torch.testing.assert_close(model[2].weight.grad, expected[0]["2.weight"], rtol=1e-9, atol=1e-12)
    # An assigned gradient is rank-local, and zeros are zeros; any other value is ambiguous.
    weight = model[1].experts.w1  # type: ignore[union-attr]
    own = torch.full_like(weight, 3.0 * world)
    weight.grad = own.clone()
    sync_gradients(model, topology)
    torch.testing.assert_close(weight.grad, own / world)
    model.zero_grad(set_to_none=False)
    sync_gradients(model, topology)
    assert not weight.grad.any()
    if rank == 0:
        weight.grad.copy_(own)
    with pytest.raises(ConfigError, match=r"rank \d: .*1.experts.w1 has been synchronised.*Set its .grad to None"):
        sync_gradients(model, topology)


def test_sync_of_in_place_and_missing_gradients(cluster: Cluster) -> None:
    cluster.run(2, _check_unused_and_in_place)
