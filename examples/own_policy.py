"""A policy of your own: how many chunks the rows of a layer travel in, from what the layer is and what it costs.

python examples/own_policy.py                                              # what it would take, by prediction
torchrun --standalone --nproc-per-node 2 examples/own_policy.py            # and in a layer
torchrun --standalone --nproc-per-node 2 examples/own_policy.py train --schedule half_a_millisecond --steps 20
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe.cli.main import main as command
from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload


def half_a_millisecond(workload: Workload, costs: StepCosts) -> Plan:
    """Chunks whose experts compute for about half a millisecond."""

    def chunks(phase: str) -> list[ChunkedPass]:
        whole_s = [layer.chunks[phase]["expert"].seconds(1) for layer in costs.layers]
        return [ChunkedPass(three_queues, max(1, min(16, round(seconds / 0.5e-3)))) for seconds in whole_s]

    return step_plan(costs, chunks("forward"), chunks("backward"))


fusedmoe.register_policy("half_a_millisecond", half_a_millisecond)

# Made up: 10 µs to start anything, 10 GB/s between ranks, 1 TFLOP/s.
MACHINE = CostModel({name: Line(1e-5, 1e-12 if name == "gemm" else 1e-10) for name in LINES})


def predicted() -> dict[str, float]:
    """Milliseconds of a step of four layers, by policy."""
    layer = Workload(batch=8, seq_len=512, model_dim=512, hidden=1024, experts=8, ep=2)
    costs = layer.step_costs(MACHINE, [layer.gradient_bytes()] * 4, ("dispatch", "expert", "combine"))
    names = ("sequential", "tutel", "fsmoe", "half_a_millisecond")
    return {name: 1e3 * makespan(POLICIES[name].plan(costs), costs) for name in names}


def main() -> dict[str, float]:
    found = predicted()
    for name, step_ms in found.items():
        print(f"{name}: {step_ms:.1f} ms a step, by prediction")
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size())
        torch.manual_seed(0)  # the same gate on every rank
        layer = fusedmoe.MoELayer(
            model_dim=64,
            gate=fusedmoe.gates.TopK(experts=8, k=2),
            experts=fusedmoe.experts.SwiGLU(hidden=128),
            topology=topology,
            # By name it would measure this machine first: schedule="half_a_millisecond".
            schedule=fusedmoe.Schedule(half_a_millisecond, costs=MACHINE),
        )
        layer(torch.randn(4096, 64)).square().mean().backward()
        if topology.is_first:
            print(layer)
        topology.close()
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the command, which knows the policy by its name
        sys.exit(command())
    main()
