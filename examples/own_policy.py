"""Define a schedule policy that chooses the number of chunks from a layer's workload and costs.

python examples/own_policy.py                                              # predicted step times
torchrun --standalone --nproc-per-node 2 examples/own_policy.py            # also run a layer
torchrun --standalone --nproc-per-node 2 examples/own_policy.py train --schedule half_a_millisecond --steps 20
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe.cli.main import main as command
from fusedmoe.schedule import (
    LINES,
    POLICIES,
    ChunkedPass,
    CostModel,
    Line,
    Plan,
    StepCosts,
    Workload,
    simulate,
    step_plan,
    three_queues,
)


def half_a_millisecond(workload: Workload, costs: StepCosts) -> Plan:
    """Use chunks whose experts compute for about half a millisecond."""

    def chunks(phase: str) -> list[ChunkedPass]:
        whole_s = [layer.chunks[phase]["expert"].seconds(1) for layer in costs.layers]
        return [ChunkedPass(three_queues, max(1, min(16, round(seconds / 0.5e-3)))) for seconds in whole_s]

    return step_plan(costs, chunks("forward"), chunks("backward"))


fusedmoe.register_policy("half_a_millisecond", half_a_millisecond)

# Example costs: 10 µs latency, 10 GB/s between ranks, 1 TFLOP/s.
MACHINE = CostModel({name: Line(1e-5, 1e-12 if name == "gemm" else 1e-10) for name in LINES})


def predicted() -> dict[str, float]:
    """Return the predicted time of a step of four layers in milliseconds, by policy."""
    layer = Workload(batch=8, seq_len=512, model_dim=512, hidden=1024, experts=8, ep=2)
    costs = layer.step_costs(MACHINE, [layer.gradient_bytes()] * 4, ("dispatch", "expert", "combine"))
    names = ("sequential", "tutel", "fsmoe", "half_a_millisecond")
    return {name: 1e3 * simulate(POLICIES[name].plan(costs), costs).duration_s for name in names}


def main() -> dict[str, float]:
    found = predicted()
    for name, step_ms in found.items():
        print(f"{name}: {step_ms:.1f} ms per step (predicted)")
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size())
        torch.manual_seed(0)  # the same gate on every rank
        layer = fusedmoe.MoELayer(
            model_dim=64,
            gate=fusedmoe.gates.TopK(experts=8, k=2),
            experts=fusedmoe.experts.SwiGLU(hidden=128),
            topology=topology,
            # schedule="half_a_millisecond" would measure this machine first.
            schedule=fusedmoe.Schedule(half_a_millisecond, costs=MACHINE),
        )
        layer(torch.randn(4096, 64)).square().mean().backward()
        if topology.is_first:
            print(layer)
        topology.close()
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:  # run the fusedmoe command, which knows the registered policy
        sys.exit(command())
    main()
