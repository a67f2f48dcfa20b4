"""Plans of training steps as plain Python: costs, policies, the simulator, timelines and pictures.

    costs = CostModel.from_json(Path("costs.json").read_text())
    step = workload.step_costs(costs, gradient_bytes, kinds)
    plan = POLICIES["fsmoe"].plan(step)
    draw([simulate(plan, step)], Path("step.png"), title="fsmoe")

Nothing here imports torch. `fusedmoe.measuring` measures costs and runs steps; `fusedmoe.training.plan_step` has a
model follow a plan.
"""

from __future__ import annotations

from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.candidates import PlanCandidate
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Costs, Line, Observed
from fusedmoe.schedule.draw import MAX_TIMELINES, draw, ms
from fusedmoe.schedule.machines import MACHINES, TESTBEDS, Machine, scale_of, slowest_of, spread_of
from fusedmoe.schedule.passes import alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.policies.sparse_collectives import hidden_s, with_sparse
from fusedmoe.schedule.refit import Row, compare, observe, refit
from fusedmoe.schedule.simulate import at_work, critical_path, makespan, simulate, stretches
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.timeline import Timeline, align, save_trace
from fusedmoe.schedule.workload import IN_LAYERS, Workload, uniform_share

__all__ = ["Plan", "Task", "TaskKind", "PHASES", "WEIGHT_GRADIENTS"]
__all__ += ["LINES", "Contention", "CostModel", "Costs", "Line", "Observed"]
__all__ += ["StepCosts", "IN_LAYERS", "Workload", "uniform_share"]
__all__ += ["MACHINES", "TESTBEDS", "Machine", "scale_of", "slowest_of", "spread_of"]
__all__ += ["POLICIES", "layer_policies", "PlanCandidate", "PlanChooser"]
__all__ += ["hidden_s", "overlap_degree", "with_sparse"]
__all__ += ["ChunkedPass", "StepSplit", "alternating", "micro_schedule", "one_queue", "step_plan", "three_queues"]
__all__ += ["MAX_TIMELINES", "Timeline", "align", "draw", "ms", "save_trace"]
__all__ += ["at_work", "bound_s", "critical_path", "makespan", "simulate", "stretches"]
__all__ += ["Row", "compare", "observe", "refit"]
