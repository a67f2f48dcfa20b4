"""Plans of training steps: costs, policies, the simulator, timelines and figures. Does not import torch.

costs = CostModel.from_json(Path("costs.json").read_text())
step = workload.step_costs(costs, gradient_bytes, kinds)
plan = POLICIES["fsmoe"].plan(step)
draw([simulate(plan, step)], Path("step.png"), title="fsmoe")

task, plan                          tasks, dependencies, and the task order of each resource
cost, workload, step_costs          costs of a machine, a layer, and a step
machines, refit                     cost models from data sheets; costs fitted to measured steps
passes, step, list_schedule         task orders of a pass, a step, and any task graph
policies                            published systems as functions from costs to a plan
events, simulate, bound             predicted time of a plan; lower bound over all plans
timeline, draw                      start and end of each task; figures
plan_chooser, candidates, trials    choice of the fastest plan during training
"""

from __future__ import annotations

from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import GradientPartition, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan, simulate
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
    "makespan",
    "micro_schedule",
    "simulate",
    "step_plan",
    "three_queues",
]
