"""Expert choices in Tutel's layer."""

from __future__ import annotations

import torch

from fusedmoe import routing
from fusedmoe.tutel import moe


def test_record_and_replay() -> None:
    torch.manual_seed(0)
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": 2, "gate_noise": 1.0, "capacity_factor": 0},
        model_dim=8,
        experts={"type": "ffn", "num_experts_per_device": 6, "hidden_size_per_expert": 8},
    ).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    with routing.record(layer) as first:
        layer(x)
    with routing.record(layer) as second:
        layer(x)
    assert not torch.equal(first["MOELayer"], second["MOELayer"])  # its gate draws noise
    with routing.replay(layer, first), routing.record(layer) as found:
        y = layer(x)
    assert torch.equal(found["MOELayer"], first["MOELayer"])
    count_E = torch.bincount(first["MOELayer"].flatten().long(), minlength=6)
    assert torch.equal(layer.dispatch_count.long().flatten(), count_E)
    (y.square().sum() + layer.l_aux).backward()
    assert layer.gates[0].wg.weight.grad.abs().sum() > 0
