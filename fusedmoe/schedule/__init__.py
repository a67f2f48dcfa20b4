"""Plans of training steps as plain Python, without torch: costs, policies, the simulator, timelines and pictures.

costs = CostModel.from_json(Path("costs.json").read_text())
step = workload.step_costs(costs, gradient_bytes, kinds)
plan = POLICIES["fsmoe"].plan(step)
draw([simulate(plan, step)], Path("step.png"), title="fsmoe")

task, plan                          tasks, their dependencies, and one order of tasks per resource
cost, workload, step_costs          costs of a machine, a layer, and a step of several layers
machines, refit                     cost models of machines we have not measured; costs fitted to measured steps
passes, step, list_schedule         task orders of one pass, of a step, and of any task graph
policies                            published systems: functions from costs to a plan
events, simulate, bound             predicted time of a plan, and a lower bound for all plans
timeline, draw                      start and end of each task, measured or predicted; pictures
plan_chooser, candidates, trials    the fastest plan, measured while a job trains
"""

from __future__ import annotations

from fusedmoe.schedule.cost import LINES, Contention, CostModel, Costs, Line
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, register_policy
from fusedmoe.schedule.policies.sparse_collectives import with_sparse
from fusedmoe.schedule.refit import observe, refit
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload, uniform_share

__all__ = [
    "ChunkedPass",
    "Contention",
    "CostModel",
    "Costs",
    "LINES",
    "Line",
    "POLICIES",
    "Plan",
    "PlanChooser",
    "StepCosts",
    "TESTBEDS",
    "Task",
    "Timeline",
    "Workload",
    "draw",
    "makespan",
    "observe",
    "one_queue",
    "refit",
    "register_policy",
    "simulate",
    "step_plan",
    "three_queues",
    "uniform_share",
    "with_sparse",
]
