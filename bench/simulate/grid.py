"""Simulation of FSMoE's study of configured layers (§6.3, Tables 4 and 5): 1,458 cases on two testbeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import NO_CONTENTION, Contention
from fusedmoe.schedule.machines import TESTBEDS, Testbed
from fusedmoe.schedule.passes import choose_degree
from fusedmoe.schedule.policies import POLICIES, PlanSearch, micro_batch_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload

#: Default number of layers of a simulated step.
LAYERS = 4

#: Named Tutel in the paper: Tutel with PipeMoE's degrees.
BASELINE = "pipemoe"

#: Columns of a result in order: policies, and the lower bound of any schedule.
COLUMNS = (
    *("sequential", "tutel", "tutel_improved", "lina", "fsmoe_no_iio", "fsmoe"),
    *("lancet", "flowmoe", "joint", "bound"),
)

#: FlowMoE's components, cumulative (its Table 5).
ABLATION = ("pipelined experts", "attention", "all-reduce", "tuned")

#: Default number of cases per testbed in which policies of whole models are simulated.
SAMPLE = 48

#: Measured in the paper: mean speed-ups over Tutel (Table 5), cases whose best degrees differ (§2.3).
PUBLISHED: dict[str, dict[str, float]] = {
    "A": {"tutel_improved": 1.09, "fsmoe_no_iio": 1.12, "fsmoe": 1.18},
    "B": {"tutel_improved": 1.08, "fsmoe_no_iio": 1.16, "fsmoe": 1.22, "differing_degrees": 912},
}

ASSUMPTIONS = (
    "Coefficients: Fig. 5, in the units that give the times of Table 2; collectives in fp32, k = 2, E = nodes.",
    "A step is {layers} equal layers, forward and backward; no loss, no optimizer. Backward begins when all of the "
    "batch has gone forward. The last gradient is never hidden.",
    "The dense part is attention's matrix products (4·B·L·M² + 2·B·L²·M MAC over N_MP ranks) and the model-parallel "
    "reduce-scatter and all-gather of B·L rows; backward, products take twice as long. It does not contend.",
    "A layer's dense gradient is 4·M²/N_MP + M·E elements. Gates, orders and the heads' number take no time.",
    "Speed-ups are over Tutel with PipeMoE, as in Table 5: one communication queue, one degree for both passes, the "
    "best by a model of all-to-all and experts alone, gradients reduced after the backward pass. Column tutel is "
    "Tutel's own choice instead: the better of 1, 2, 4, 8 for the whole layer.",
    "lancet, flowmoe and joint split attention too, into micro-batches that go on from layer to layer, and lancet and "
    "joint run weight gradients (half of the experts' backward pass, and attention's projections) by themselves; in "
    "n = {sample} cases of each testbed, drawn once; the bound in these too. The ablation is over Tutel as well.",
    "The bound: no plan with up to 16 equal chunks or micro-batches of each part of each layer takes less, whatever "
    "the order of its tasks.",
    "f = * (no drop) has the volume of f = 1. Degrees go up to 16; differing degrees are counted up to 8.",
    "ideal: links do not disturb each other. calibrated: a link goes on at {contention} of its speed while the other "
    "works too; this number is chosen to meet the paper's FSMoE, the other figures follow.",
)

# Table 4; B's sequences are shorter. The number of heads, which has three values, has no effect.
_BATCH, _MODEL_DIM, _HIDDEN_SCALE = (1, 2, 4), (1024, 2048, 4096), (2, 3, 4)
_CAPACITY, _EXPERT, _HEADS = (1.2, 2.4, None), ("ffn", "swiglu"), 3

_DIFFERING_LIMIT = 8


@dataclass(frozen=True)
class Result:
    """Seconds of a step in the cases of one testbed: [cases] by column, and for the baseline and the ablation.

    NaN for cases outside of the sample for policies of whole models.
    """

    testbed: str
    contention: float
    seconds: dict[str, Any]
    differing_degrees: int
    #: Name of a policy of the caller's own, simulated with the others.
    own: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS if self.own is None else (*COLUMNS, self.own)

    def speedup(self, name: str) -> float:
        """Return the mean of baseline time / time over all available cases."""
        return float(np.nanmean(self.seconds[BASELINE] / self.seconds[name]))

    def sampled_speedup(self, name: str) -> float:
        """Return the mean of baseline time / time over the cases of `joint` and the bound."""
        sampled = ~np.isnan(self.seconds["joint"])
        return float((self.seconds[BASELINE] / self.seconds[name])[sampled].mean())

    def num_cases(self, name: str) -> int:
        """Return the number of simulated cases of a column."""
        return int((~np.isnan(self.seconds[name])).sum())

    def speedups(self) -> dict[str, float]:
        return {name: self.speedup(name) for name in self.columns}

    def gaps(self) -> Any:
        """Return the joint policy's excess over the bound, relative to the bound, [sampled cases]."""
        gaps = self.seconds["joint"] / self.seconds["bound"] - 1.0
        return gaps[~np.isnan(gaps)]

    def as_dict(self) -> dict[str, Any]:
        """Return means over all cases and over the sample, differing degrees, and quantiles of the gaps, as JSON."""
        gaps = self.gaps()
        quantiles = {f"p{share}": float(np.quantile(gaps, share / 100)) for share in (0, 25, 50, 75, 90, 100)}
        return {
            "contention": self.contention,
            **self.speedups(),
            "cases": {name: self.num_cases(name) for name in (*self.columns, *ABLATION)},
            "sampled": {name: self.sampled_speedup(name) for name in self.columns},
            "ablation": {name: self.speedup(name) for name in ABLATION},
            "differing_degrees": self.differing_degrees,
            "gap_to_bound": {"mean": float(gaps.mean()), **quantiles},
        }


def workloads(testbed: Testbed) -> Iterator[Workload]:
    """Yield the 486 distinct cases; each represents three numbers of heads."""
    for batch, seq_len, model_dim, scale, capacity, expert in product(
        _BATCH, testbed.seq_lens, _MODEL_DIM, _HIDDEN_SCALE, _CAPACITY, _EXPERT
    ):
        yield Workload(
            batch,
            seq_len,
            model_dim,
            scale * model_dim,
            testbed.nodes,
            2,
            capacity,
            expert,
            testbed.nodes,
            testbed.gpus,
        )


def step_costs(testbed: Testbed, workload: Workload, layers: int) -> StepCosts:
    """Return the costs of a step of equal layers, without contention."""
    layer = workload.layer_costs(testbed.costs)
    return StepCosts((layer,) * layers, testbed.costs.line("all-reduce/dp"), workload=workload)


def sample_costs(layers: int) -> Iterator[StepCosts]:
    """Yield the costs of one case of each testbed."""
    for testbed in TESTBEDS.values():
        yield step_costs(testbed, next(workloads(testbed)), layers)


# Cost of a case with policies of whole models, in units of other cases.
_WHOLE_CASES = 35


def run_grid(
    layers: int = LAYERS,
    sample: int = SAMPLE,
    progress: Callable[[int, int], None] = lambda done, total: None,
    own: str | None = None,
) -> list[Result]:
    """Simulate both testbeds, each first without and then with its contention.

    `sample`: number of cases per testbed in which policies of whole models are simulated, too. `progress` is called
    with the finished and the total number of cases; a sampled case is weighted by its cost. `own`: a registered policy
    to simulate with the others.
    """
    cases = [(name, testbed, list(workloads(testbed))) for name, testbed in TESTBEDS.items()]
    total, done = sum(len(found) + _WHOLE_CASES * min(sample, len(found)) for _, _, found in cases), 0
    results = []
    for name, testbed, found in cases:
        contentions = (NO_CONTENTION, testbed.costs.contention)
        rows: list[list[dict[str, float]]] = [[] for _ in contentions]
        differing = [0 for _ in contentions]
        sampled = set(random.Random(0).sample(range(len(found)), min(sample, len(found))))
        for number, workload in enumerate(found):
            costs = step_costs(testbed, workload, layers)
            for index, row in enumerate(_rows(costs, contentions, own)):
                whole = _whole_row(replace(costs, contention=contentions[index])) if number in sampled else {}
                rows[index].append(row | whole)
                degrees = {
                    choose_degree(chunks, contention=contentions[index], max_degree=_DIFFERING_LIMIT).degree
                    for chunks in costs.layers[0].chunks.values()
                }
                differing[index] += _HEADS * (len(degrees) > 1)
            done += 1 + _WHOLE_CASES * (number in sampled)
            progress(done, total)
        for contention, part, count in zip(contentions, rows, differing, strict=True):
            names = dict.fromkeys((BASELINE, *COLUMNS, *ABLATION, *([] if own is None else [own])))
            columns = {name: np.array([row.get(name, np.nan) for row in part]) for name in names}
            results.append(Result(name, contention.speed_fraction("intra", "inter"), columns, count, own))
    return results


def _rows(costs: StepCosts, contentions: tuple[Contention, ...], own: str | None = None) -> Iterator[dict[str, float]]:
    """Yield, for each contention, the seconds by column of policies that plan layer by layer.

    Policies with a single communication queue have equal times for all contentions.
    """
    same = {name: makespan(POLICIES[name].plan(costs), costs) for name in (BASELINE, *COLUMNS) if name in _ONE_QUEUE}
    for contention in contentions:
        here = replace(costs, contention=contention)
        three = ["fsmoe"] if own is None or POLICIES[own].uses_micro_batches else ["fsmoe", own]
        # As a single layer sees them: without micro-batches.
        layers = here.by_layer()
        yield same | {name: makespan(POLICIES[name].plan(layers), layers) for name in three}


# Their plans do not use intra-node links.
_ONE_QUEUE = ("sequential", "tutel", "pipemoe", "tutel_improved", "lina", "fsmoe_no_iio")


def _whole_row(costs: StepCosts) -> dict[str, float]:
    model = PlanSearch(costs)
    plans = {name: model.plan(name) for name in micro_batch_policies()} | model.ablation
    return {name: makespan(plan, costs) for name, plan in plans.items()} | {"bound": bound_s(costs)}
