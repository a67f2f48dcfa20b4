"""Schedules of whole models on a stack of blocks: components of FlowMoE and Lancet, FSMoE, joint; and bucket sizes.

A step consists of forward, backward and gradient all-reduces, as in the other settings. In addition, attention runs in
micro-batches, weight gradients can be separate tasks, and gradients are reduced in buckets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.cluster.setting import LIMIT
from bench.cluster.step import Step
from bench.cluster.turns import in_turns, seconds_of, spread
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.schedule.passes import one_queue
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch, fsmoe, pipemoe, sequential
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.policies.lancet_plans import NUM_MICRO_BATCHES, lancet_plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, idle_slot_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.training.plan_tuning import BucketSearch

#: Untuned bucket size: small relative to a layer's gradient, as FlowMoE's 1 MB is in its models.
UNTUNED_BYTES = 32 * 1024
# Number of bucket sizes in the fine sweep; number of samples of the tuner, and steps per sample.
_SIZES = 12
_SAMPLES, _STEPS = 8, 3


def plans_by_policy(costs: StepCosts, limit: int) -> dict[str, Plan]:
    """Return every policy's plan by name: FlowMoE's Table 5, Lancet's two passes, FSMoE and joint."""
    parts = [k for k in NUM_MICRO_BATCHES if k <= limit]
    experts = pipemoe(costs, limit)
    sizes = [max(costs.gradient_bytes) // buckets for buckets in (1, 2, 4, 8, 16)]
    tuned = (with_buckets(costs, experts, size) for size in sizes)
    return {
        "sequential": sequential(costs, limit),
        "experts": experts,
        "experts, attention": PlanSearch(costs, limit).ablation["attention"],
        "experts, all-reduce": with_buckets(costs, experts, UNTUNED_BYTES),
        "experts, all-reduce, S_p": min(tuned, key=lambda plan: makespan(plan, costs)),
        "flowmoe": POLICIES["flowmoe"].plan(costs, limit),
        "lancet, ranges": lancet_plan(costs, parts, weights=False),
        "lancet, weights": lancet_plan(costs, (1,)),
        "lancet": lancet_plan(costs, parts),
        "fsmoe": fsmoe(costs, limit),
        "joint": POLICIES["joint"].plan(costs, limit),
    }


def with_buckets(costs: StepCosts, plan: Plan, bucket_bytes: int) -> Plan:
    """Return a plan of these degrees with gradient buckets wherever the communication queue is idle."""
    found = plan.degrees
    forward, backward = (
        [ChunkedPass(one_queue, found[phase, layer]) for layer in range(len(costs.layers))]
        for phase in ("forward", "backward")
    )
    return idle_slot_plan(costs, forward, backward, bucket_bytes)


def measure_buckets(topology: Topology, step: Step, costs: StepCosts, rounds: int) -> dict[str, Any]:
    """Compare the bucket size S_p found by FlowMoE's tuner with a fine sweep. Collective."""
    largest, split = max(costs.gradient_bytes), StepSplit.from_plan(POLICIES["flowmoe"].plan(costs, LIMIT))

    def plan_of(size: int) -> Plan:
        return micro_schedule(costs, split._replace(bucket_bytes=size)).plan()

    search = BucketSearch(largest, _SAMPLES)
    while (size := search.next()) is not None:
        run = partial(step.run, plan_of(size))
        taken_s = [max(all_gather_object(topology.world, seconds_of(topology, run))) for _ in range(_STEPS)]
        search.tried.append((size, statistics.median(taken_s)))
    chosen = min(search.tried, key=lambda one: one[1])[0]
    topology.require_equal_facts({"bucket_bytes": chosen}, "the size of gradient buckets")
    sizes = sorted({chosen, *_sizes(largest)})
    plans = {size: plan_of(size) for size in sizes}
    runs: Mapping[str, Callable[[], Any]] = {str(size): partial(step.run, of) for size, of in plans.items()}
    seconds = in_turns(topology, runs, rounds)
    rows: Sequence[dict[str, Any]] = [
        {"bytes": size, **spread(seconds[str(size)]), "predicted_s": makespan(plans[size], costs)} for size in sizes
    ]
    best = min(rows, key=lambda one: one["median_s"])
    own = next(one for one in rows if one["bytes"] == chosen)
    regret = own["median_s"] / best["median_s"] - 1.0
    return {
        "degrees": (split.forward, split.backward),
        "tried": search.tried,
        "chosen": chosen,
        "best": best["bytes"],
        "regret": regret,
        "rows": rows,
    }


def _sizes(largest: int) -> list[int]:
    return [round(largest * 64 ** (-number / (_SIZES - 1))) for number in range(_SIZES)]
