"""FSMoE's study of configured layers (§6.3, Tables 4 and 5), in simulation: 1,458 cases on the two testbeds of
`fusedmoe.schedule.machines`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import ALONE, Contention
from fusedmoe.schedule.machines import TESTBEDS, Testbed
from fusedmoe.schedule.passes import choose_degree
from fusedmoe.schedule.policies import POLICIES, PlanSearch, whole_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload

#: Layers of a simulated step, unless the caller says otherwise.
LAYERS = 4

#: What the paper calls Tutel: Tutel with PipeMoE's degrees.
BASELINE = "pipemoe"

#: The columns of a result, in order: policies, and the bound that no schedule beats.
COLUMNS = (
    *("sequential", "tutel", "tutel_improved", "lina", "fsmoe_no_iio", "fsmoe"),
    *("lancet", "flowmoe", "joint", "bound"),
)

#: FlowMoE part by part, each with all before it (its Table 5).
ABLATION = ("pipelined experts", "attention", "all-reduce", "tuned")

#: In so many cases of each testbed policies of whole models are simulated, unless the caller says otherwise.
SAMPLE = 48

#: What the paper measured: mean speed-ups over Tutel (Table 5), cases whose best degrees differ (§2.3).
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
    "{sample} cases of each testbed, drawn once; the bound in these too. The ablation is over Tutel as well.",
    "The bound: no plan with up to 16 equal chunks or micro-batches of each part of each layer takes less, whatever "
    "the order of its tasks.",
    "f = * (no drop) has the volume of f = 1. Degrees go up to 16; differing degrees are counted up to 8.",
    "ideal: links do not disturb each other. calibrated: a link goes on at {contention} of its speed while the other "
    "works too; this number is chosen to meet the paper's FSMoE, the other figures follow.",
)

# Table 4; B's sequences are shorter. The number of heads, of which there are three, changes nothing.
_BATCH, _MODEL_DIM, _HIDDEN_SCALE = (1, 2, 4), (1024, 2048, 4096), (2, 3, 4)
_CAPACITY, _EXPERT, _HEADS = (1.2, 2.4, None), ("ffn", "swiglu"), 3

_DIFFERING_LIMIT = 8


@dataclass(frozen=True)
class Result:
    """Seconds of a step in the cases of one testbed: [cases] by column, and with the baseline and the ablation.

    NaN where a case is not in the sample that policies of whole models are simulated in.
    """

    testbed: str
    contention: float
    seconds: dict[str, Any]
    differing_degrees: int

    def speedup(self, name: str) -> float:
        """Mean of baseline's time / time over all cases that there are of it."""
        return float(np.nanmean(self.seconds[BASELINE] / self.seconds[name]))

    def speedups(self) -> dict[str, float]:
        """Returns the mean speed-up of every column."""
        return {name: self.speedup(name) for name in COLUMNS}

    def gaps(self) -> Any:
        """[sampled cases] how much longer the joint policy takes than the bound, as a share of the bound."""
        gaps = self.seconds["joint"] / self.seconds["bound"] - 1.0
        return gaps[~np.isnan(gaps)]

    def as_dict(self) -> dict[str, Any]:
        """The means, the count of differing degrees, and the distribution of the gaps, in plain types."""
        gaps = self.gaps()
        quantiles = {f"p{share}": float(np.quantile(gaps, share / 100)) for share in (0, 25, 50, 75, 90, 100)}
        return {
            "contention": self.contention,
            **self.speedups(),
            "ablation": {name: self.speedup(name) for name in ABLATION},
            "differing_degrees": self.differing_degrees,
            "gap_to_bound": {"mean": float(gaps.mean()), **quantiles},
        }


def workloads(testbed: Testbed) -> Iterator[Workload]:
    """The 486 cases that differ; each stands for three numbers of heads."""
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


# How many others a case takes as long as in which policies of whole models are simulated.
_WHOLE_CASES = 35


def run_grid(
    layers: int = LAYERS,
    sample: int = SAMPLE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Both testbeds, each first without contention and then with its own.

    `sample`: in so many cases of each testbed policies of whole models are simulated too. `progress` is told how much
    is done of all there is, in cases; one of the sample counts for what it takes.
    """
    cases = [(name, testbed, list(workloads(testbed))) for name, testbed in TESTBEDS.items()]
    total, done = sum(len(found) + _WHOLE_CASES * min(sample, len(found)) for _, _, found in cases), 0
    results = []
    for name, testbed, found in cases:
        contentions = (ALONE, testbed.costs.contention)
        rows: list[list[dict[str, float]]] = [[] for _ in contentions]
        differing = [0 for _ in contentions]
        sampled = set(random.Random(0).sample(range(len(found)), min(sample, len(found))))
        for number, workload in enumerate(found):
            layer = workload.layer_costs(testbed.costs)
            costs = StepCosts((layer,) * layers, testbed.costs.line("all-reduce/dp"))
            for index, row in enumerate(_rows(costs, contentions)):
                whole = _whole_row(replace(costs, contention=contentions[index])) if number in sampled else {}
                rows[index].append(row | whole)
                degrees = {
                    choose_degree(chunks, contention=contentions[index], limit=_DIFFERING_LIMIT).degree
                    for chunks in layer.chunks.values()
                }
                differing[index] += _HEADS * (len(degrees) > 1)
            done += 1 + _WHOLE_CASES * (number in sampled)
            progress(done, total)
        for contention, part, count in zip(contentions, rows, differing, strict=True):
            names = dict.fromkeys((BASELINE, *COLUMNS, *ABLATION))
            columns = {name: np.array([row.get(name, np.nan) for row in part]) for name in names}
            results.append(Result(name, contention.share("intra", "inter"), columns, count))
    return results


def _rows(costs: StepCosts, contentions: tuple[Contention, ...]) -> Iterator[dict[str, float]]:
    """Seconds by column of what plans layer by layer, for each contention. What has one communication queue is the same
    for all."""
    same = {name: makespan(POLICIES[name].plan(costs), costs) for name in (BASELINE, *COLUMNS) if name in _ONE_QUEUE}
    for contention in contentions:
        here = replace(costs, contention=contention)
        yield same | {"fsmoe": makespan(POLICIES["fsmoe"].plan(here), here)}


# Their plans have nothing on the links inside the node.
_ONE_QUEUE = ("sequential", "tutel", "pipemoe", "tutel_improved", "lina", "fsmoe_no_iio")


def _whole_row(costs: StepCosts) -> dict[str, float]:
    model = PlanSearch(costs)
    plans = {name: model.plan(name) for name in whole_policies()} | model.ablation
    return {name: makespan(plan, costs) for name, plan in plans.items()} | {"bound": bound_s(costs)}
