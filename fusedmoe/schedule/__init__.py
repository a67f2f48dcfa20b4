"""Plans of training steps: costs, policies, the simulator, timelines and figures. Does not import torch.

costs = CostModel.from_json(Path("costs.json").read_text())
step = workload.step_costs(costs, gradient_bytes, kinds)
plan = POLICIES["fsmoe"].plan(step)
draw([simulate(plan, step)], Path("step.png"), title="fsmoe")

A policy maps the costs of a step to a plan: the tasks of each resource, in order. The simulator predicts its timeline.
"""

from __future__ import annotations

from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import GradientPartition, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload

__all__ = [
    "ChunkedPass",
    "CostModel",
    "LINES",
    "Line",
    "POLICIES",
    "GradientPartition",
    "Plan",
    "StepCosts",
    "StepSplit",
    "TESTBEDS",
    "Workload",
    "draw",
    "micro_schedule",
    "simulate",
    "step_plan",
    "three_queues",
]
