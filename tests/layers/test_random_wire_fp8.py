"""Random layers with fp8 between ranks: schedules equal the layer without one, close to the layer without fp8."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology
from fusedmoe.experts import SwiGLU
from fusedmoe.hooks import Hooks
from tests.cluster import Cluster
from tests.layers.test_wire_fp8 import batch, errors, require_equal, step


def check_random_layer(rank: int, world: int, seed: int) -> None:
    draw = random.Random(seed)
    topology = Topology.from_sizes(ep=world)
    dim, experts = draw.choice([24, 127, 128, 130, 300]), draw.choice([2, 4, 8])
    k, policy = draw.randint(1, min(3, experts)), draw.choice(["sequential", "fsmoe", "tutel", "joint"])
    degrees, hooks = (draw.randint(1, 4), draw.randint(1, 4)), draw.choice([(), (Hooks(),)])
    tokens, wire = [draw.choice([0, 1, 19]), draw.randint(8, 30)], draw.choice(["fp8", "fp8-both"])
    data = batch(topology, tokens[rank], dim=dim)

    def make_layer(schedule: Any) -> MoELayer:
        torch.manual_seed(seed)
        gate = fusedmoe.gates.TopK(experts=experts, k=k)
        return MoELayer(
            dim, gate, experts=SwiGLU(48), topology=topology, schedule=schedule, dtype=torch.float64, hooks=hooks
        )

    exact = step(make_layer("off"), *data)
    expected = step(make_layer(Schedule("off", wire=wire)), *data)
    layer = make_layer(Schedule(policy, degrees=degrees, wire=wire))
    require_equal(step(layer, *data), expected)
    require_equal(step(layer, *data, partial(checkpoint, layer, use_reentrant=False)), expected)
    if tokens[rank]:
        found = errors(expected, exact)
        assert found["y"] < 0.1 and found["x"] < 0.1, found


@pytest.mark.parametrize("seed", range(5))
def test_random_layers(cluster: Cluster, seed: int) -> None:
    cluster.run(2, check_random_layer, seed)
