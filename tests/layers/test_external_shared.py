"""The shared experts of other libraries' layers that a plan may call."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fusedmoe.layers.external_shared import can_offer
from tests.cluster import Cluster

M = 4


def refuse_wrapped(rank: int, world: int) -> None:
    x = torch.randn(3, M)
    assert can_offer(nn.Linear(M, M), x) and not can_offer(nn.Linear(M, M), x.t()[:M])
    hooked, replaced, viewed, split = (nn.Sequential(nn.Linear(M, M)) for _ in range(4))
    hooked[0].register_forward_hook(lambda *_: None)
    replaced[0].forward = lambda x: x
    weight = nn.Parameter(torch.zeros(M, M))
    del viewed[0].weight
    viewed[0].weight = weight.view(M, M)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    split[0].weight = nn.Parameter(DTensor.from_local(torch.zeros(M, M), mesh, [Replicate()]))
    for module in (hooked, replaced, viewed, split):
        assert not can_offer(module, x)


def test_plans_do_not_call_wrapped_shared_experts(cluster: Cluster) -> None:
    cluster.run(2, refuse_wrapped)
