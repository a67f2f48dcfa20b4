"""FlowMoE (NeurIPS'25): its theorems, model sizes, and the gains of its components (Tables 3, 5 and A.3)."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.cluster.blocks import with_buckets
from bench.reproduce.sample import costs_of, sampled
from bench.reproduce.table import Part, Progress, Row, Table
from bench.simulate.grid import LAYERS
from fusedmoe.schedule.cost import Line, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import one_queue_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import PlanSearch, pipemoe, sequential
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import ROUNDING, makespan, simulate
from fusedmoe.schedule.step import gradient_buckets
from fusedmoe.schedule.step_costs import ChunkTimes, LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.task_orders import fill_idle_slots
from fusedmoe.training.plan_tuning import BucketSearch

SIZES = Table(
    "flowmoe-table2",
    "Parameters of the models, in millions",
    "FlowMoE",
    "Tables 2 and A.10",
    "computed",
    text="16 GPUs. Attention: 4·M² for each block. Experts: 2·M·H + M + H for each of 16·E/P experts of a block.",
    reasons=(
        "The printed figure has gates too, M·E a block; those of the other models are of projections alone.",
        "The printed figure has 8·M a block more; the paper does not explain them.",
        "A digit is misprinted: no other size of the experts in this model fits, and every other row is met.",
        "Rounded down in the paper.",
    ),
)
# Layers, M, H, experts per GPU; printed millions of parameters of attention and experts; reasons for differences.
_MODELS = {
    "GPT2-Tiny-MoE": (12, 256, 512, 1, 3.2, 50.4, (1,), (4,)),
    "BERT-Large-MoE": (24, 512, 1024, 2, 25.2, 806.5, (), ()),
    "LLaMA2-MoE": (32, 1024, 4096, 1, 134.2, 4297.6, (), ()),
    "LLaMA2-MoE-L": (64, 1024, 4096, 1, 268.4, 8595.2, (), ()),
    "DeepSeek-V2-S": (4, 5120, 1536, 2, 419.6, 2014.1, (2,), ()),
    "DeepSeek-V2-M": (7, 5120, 1536, 2, 734.3, 3524.7, (2,), ()),
    "BERT-Large-MoE-w": (24, 512, 1024, 8, 25.2, 3325.9, (), (3,)),
}
_GPUS = 16


def parameters(layers: int, model_dim: int, hidden: int, experts: int) -> tuple[float, float]:
    """Return millions of parameters of attention projections, and of all experts on 16 GPUs."""
    of_expert = 2 * model_dim * hidden + model_dim + hidden
    return layers * 4 * model_dim**2 / 1e6, layers * _GPUS * experts * of_expert / 1e6


def sizes(progress: Progress) -> list[Table]:
    rows = []
    for name, (*of, attention, experts, why, why_experts) in _MODELS.items():
        ours = parameters(*of)
        rows.append(Row(f"{name}, attention", attention, ours[:1], "{:.1f}", why))
        rows.append(Row(f"{name}, experts", experts, ours[1:], "{:.1f}", why_experts))
    return [replace(SIZES, rows=tuple(rows))]


THEOREMS = Table(
    "flowmoe-theorems",
    "Theorems 1 and 2 on random backward passes",
    "FlowMoE",
    "§3.3, §4.1, appendices B and C",
    "simulated",
    text="One to three layers of one to three chunks in the order of Eqs. 4 and 5, with random times. Theorem 1: each "
    "layer's all-reduce goes to a random place between later all-to-alls; a step is longer if it takes longer than "
    "with all of them at its end. Theorem 2: the pool of Algorithm 2 runs a layer's all-reduce in equal parts.",
    reasons=(
        "As stated the theorem has no such condition. Its proof takes the all-reduce for ready when its turn comes; "
        "where it is not, the link waits, and so does everything behind it.",
        "The theorem is of parts without start-up; with it, as the paper says, a size between can be best. The "
        "all-reduce of the first layer is always exposed, and there every start counts.",
    ),
)
_INSERTIONS, _SPLITS = 20_000, 400
_PARTS, _START_SHARES = (1, 2, 4, 16, 64), (0.01, 0.1)
# Insertions that take as long as all parts of one pass.
_SPLIT_COST = 25
# Bytes of an all-reduce, arbitrary.
_UNIT, _REDUCE = 2**20, "gradient-all-reduce"


class Pass(NamedTuple):
    """A backward pass without all-reduces; `reduce_s`: seconds of each layer's."""

    orders: dict[str, list[Task]]
    seconds: dict[Task, float]
    layers: int
    reduce_s: float


def random_pass(rng: random.Random) -> Pass:
    layers, degree = rng.randint(1, 3), rng.randint(1, 3)
    orders: dict[str, list[Task]] = {"compute": [], "inter": []}
    seconds: dict[Task, float] = {}
    for layer in reversed(range(layers)):
        for kind in ("dispatch", "expert", "combine", "attention"):
            tasks = [Task(kind, chunk, layer, "backward") for chunk in range(degree)]
            orders["inter" if kind in ("dispatch", "combine") else "compute"] += tasks
            seconds |= dict.fromkeys(tasks, rng.uniform(0.1, 2.0))
    return Pass(orders, seconds, layers, rng.uniform(0.1, 2.0))


def inserted(rng: random.Random, of: Pass) -> tuple[bool, bool]:
    """Insert each all-reduce at a random later position on the link.

    Returns whether the link then waits for one while an all-to-all is ready, and whether the step is longer than with
    all all-reduces at its end.
    """
    inter, place, reduces = list(of.orders["inter"]), 0, []
    for layer in reversed(range(of.layers)):
        reduces.append(Task(_REDUCE, 0, layer, "backward"))
        own = max(at for at, task in enumerate(inter) if task.layer == layer)
        place = rng.randint(max(own + 1, place), len(inter))
        inter.insert(place, reduces[-1])
        place += 1
    costs = TaskDurations(of.seconds | dict.fromkeys(reduces, of.reduce_s))
    plan = Plan.from_orders({**of.orders, "inter": inter})
    last = tuple(of.orders["compute"][-1:])
    at_the_end = Plan.from_orders({**of.orders, "inter": [*of.orders["inter"], *reduces]}, dict.fromkeys(reduces, last))
    longer = makespan(plan, costs) > makespan(at_the_end, costs) * (1 + ROUNDING)
    return keeps_waiting(plan, costs), longer


def keeps_waiting(plan: Plan, costs: TaskDurations) -> bool:
    """Return whether the link is idle until an all-reduce is ready although the next all-to-all is ready."""
    spans = {(span.kind, span.chunk, span.layer): span for span in simulate(plan, costs).spans}
    for place, reduce in enumerate(plan.inter):
        behind = next((task for task in plan.inter[place + 1 :] if task.kind != _REDUCE), None)
        if reduce.kind == _REDUCE and behind is not None:
            earlier = [*plan.dependencies[behind], *plan.inter[max(0, place - 1) : place]]
            could_s = max((spans[task[:3]].end_s for task in earlier), default=0.0)
            if spans[reduce[:3]].start_s > could_s * (1 + ROUNDING):
                return True
    return False


def in_parts(of: Pass, parts: int, start_share: float) -> float:
    """Return the seconds of a pass with each all-reduce in `parts` equal parts, scheduled from the pool.

    Each part takes its fraction of `reduce_s`, and `start_share` of `reduce_s` to start.
    """
    line = Line(start_share * of.reduce_s, of.reduce_s / _UNIT)
    buckets = gradient_buckets([_UNIT] * of.layers, _UNIT // parts)
    seconds = of.seconds | {bucket: line.seconds(bucket.size or 0) for bucket in buckets}
    return makespan(fill_idle_slots(of.orders, seconds, buckets, line), TaskDurations(seconds))


def theorems(progress: Progress) -> list[Table]:
    rng = random.Random(0)
    longer: dict[bool, list[bool]] = {False: [], True: []}
    total = _INSERTIONS + _SPLIT_COST * _SPLITS
    for number in range(_INSERTIONS):
        waits, worse = inserted(rng, random_pass(rng))
        longer[waits].append(worse)
        progress(number + 1, total)
    free_off, dear_worse, between = 0, Counter[float](), Counter[float]()
    for number in range(_SPLITS):
        of = random_pass(rng)
        free = [in_parts(of, parts, 0.0) for parts in _PARTS]
        # Without pre-emption, one part per layer can block the link.
        free_off += free[-1] > min(free) + of.layers * of.reduce_s / _PARTS[-1] * (1 + ROUNDING)
        for share in _START_SHARES:
            dear = [in_parts(of, parts, share) for parts in _PARTS]
            dear_worse[share] += dear[_PARTS.index(16)] > dear[0] * (1 + ROUNDING)
            between[share] += min(dear) < min(dear[0], dear[-1]) * (1 - ROUNDING)
        progress(_INSERTIONS + _SPLIT_COST * (number + 1), total)
    rows = [
        Row("1: insertions for which the link never waits", None, (len(longer[False]),), "{:,.0f}"),
        Row("1: longer steps among these", 0.0, (_share(longer[False]),), "{:.1%}"),
        Row("1: insertions for which it waits", None, (len(longer[True]),), "{:,.0f}"),
        Row("1: longer steps among those", 0.0, (_share(longer[True]),), "{:.1%}", (1,)),
        Row(f"2: α = 0, {_PARTS[-1]} parts longer than the best", 0.0, (free_off / _SPLITS,), "{:.1%}"),
    ]
    for share in _START_SHARES:
        start = f"2: α = {share:.0%} of the all-reduce"
        rows.append(Row(f"{start}, 16 parts longer than one", None, (dear_worse[share] / _SPLITS,), "{:.0%}", (2,)))
        rows.append(Row(f"{start}, best of 2 to 16 parts", None, (between[share] / _SPLITS,), "{:.0%}", (2,)))
    return [replace(THEOREMS, rows=tuple(rows))]


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


ITERATIONS = Table(
    "flowmoe-table3",
    "An iteration on 16 GPUs, from the paper's own task times",
    "FlowMoE",
    "Table 3 (16 GPUs), from Table 1",
    "simulated",
    ("10%", "30%", "50%", "70%", "90%"),
    text="Table 1 prints what attention with gates, all-reduces and the whole iteration of vanilla expert parallelism "
    "take; the rest is all-to-alls and experts together. Our columns are all that this leaves open: the share of the "
    "experts in it. Tutel from vanillaEP: that rest in two chunks. FlowMoE from Tutel: the rest is what Tutel's "
    "printed time leaves of it; then R = 2 and all-reduces in 16 buckets a block, by list scheduling. Backward "
    "computes twice as long as forward; nothing takes time to start.",
    reasons=(
        "The printed Tutel is faster than two chunks can make the printed vanillaEP, whatever the share, except for "
        "BERT-Large-MoE: its all-to-alls and kernels differ. So vanillaEP's task times predict Tutel's poorly.",
        "Which share holds is not printed. Start-ups, the loss, the optimizer and the embedding take time there and "
        "none here.",
    ),
)
# Milliseconds, 16 GPUs. Table 1: attention and gate, all-reduce, iteration; Table 3: Tutel, FlowMoE. And blocks.
_TASKS_MS = {
    "GPT2-Tiny-MoE": (23.5, 32.6, 169.5, 129.3, 95.6, 12),
    "BERT-Large-MoE": (61.9, 98.3, 537.8, 501.1, 351.9, 24),
    "LLaMA2-MoE": (308.4, 368.8, 1987.7, 1534.1, 1124.0, 32),
    "DeepSeek-V2-S": (870.2, 1247.8, 5843.3, 4481.4, 3205.3, 4),
}
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_DEGREE, _BUCKETS = 2, 16


def moe_s(share: float, whole_s: float, degree: int) -> float:
    """Return the seconds of both passes of a layer in `degree` chunks.

    Sequentially, all-to-alls and experts take `whole_s`, of which experts are the fraction `share`.
    """
    forward_s, exchange_s = share * whole_s / 3, (1 - share) * whole_s / 4
    chunk = exchange_s / degree
    return sum(one_queue_s(degree, ChunkTimes(chunk, 0.0, times * forward_s / degree, 0.0, chunk)) for times in (1, 2))


def flowmoe_s(share: float, whole_s: float, attention_s: float, reduce_s: float, layers: int) -> float:
    """Return the seconds of FlowMoE's step; per layer: `whole_s`, attention of both passes, all-reduce."""
    free = StageTime(0.0, 0.0)
    exchange = replace(free, whole_s=(1 - share) * whole_s / 4)
    chunks, dense = {}, {}
    for phase, times in (("forward", 1), ("backward", 2)):
        expert = replace(free, whole_s=times * share * whole_s / 3)
        chunks[phase] = {"dispatch": exchange, "expert": expert, "combine": exchange}
        dense[phase] = {"attention": replace(free, whole_s=times * attention_s / 3)}
    whole = {phase: {kind: part.seconds(1) for kind, part in of.items()} for phase, of in dense.items()}
    weights = {"expert": chunks["backward"]["expert"] * 0.5, "attention": dense["backward"]["attention"] * 0.5}
    layer = LayerCosts(chunks, whole, _UNIT, MicroBatches(dense, weights))
    costs = StepCosts((layer,) * layers, Line(0.0, reduce_s / _UNIT))
    return micro_schedule(costs, StepSplit(_DEGREE, _DEGREE, _UNIT // _BUCKETS)).makespan_s()


def iterations(progress: Progress) -> list[Table]:
    rows = []
    for number, (name, (attention, reduce, vanilla, tutel, flowmoe, layers)) in enumerate(_TASKS_MS.items()):
        dense_ms = attention + reduce
        rest_ms, pipelined_ms = vanilla - dense_ms, tutel - dense_ms
        from_vanilla = tuple(dense_ms + moe_s(share, rest_ms, _DEGREE) for share in _SHARES)
        from_tutel = tuple(
            1e3
            * flowmoe_s(
                share,
                pipelined_ms / moe_s(share, 1.0, _DEGREE) / layers / 1e3,
                attention / layers / 1e3,
                reduce / layers / 1e3,
                layers,
            )
            for share in _SHARES
        )
        rows.append(Row(f"{name}, Tutel from vanillaEP", tutel, from_vanilla, "{:.1f} ms", (1,)))
        rows.append(Row(f"{name}, FlowMoE from Tutel", flowmoe, from_tutel, "{:.1f} ms", (2,)))
        progress(number + 1, len(_TASKS_MS))
    return [replace(ITERATIONS, rows=tuple(rows))]


ABLATION = Table(
    "flowmoe-table5",
    "FlowMoE part by part, speed-up over vanilla expert parallelism",
    "FlowMoE",
    "Table 5",
    "simulated",
    ("costs of A", "costs of B"),
    text=f"Mean over {{cases}} of the layers of FSMoE's Table 4 on each of its testbeds, a step of {LAYERS} layers. "
    "FlowMoE's own clusters have no printed costs. S_p: the bytes of a gradient bucket.",
    reasons=(
        "Other machines and layers: the paper's is one layer of M = H = 8192 on 16 GPUs. The gain of a part "
        "depends on the ratio of communication to computation.",
        "Our tuned S_p is the best of five sizes, by prediction; the paper's is tuned while steps run.",
    ),
)
# Printed speed-ups.
TABLE_5 = {
    "experts (Tutel)": 1.46,
    "experts, attention": 1.61,
    "experts, all-reduce, S_p = 1 MB": 1.68,
    "experts, all-reduce, tuned S_p": 1.82,
    "FlowMoE": 2.05,
}
CASES = 40
_MB = 2**20


def speedups(costs: StepCosts) -> list[float]:
    """Return the speed-ups over sequential execution, in the order of `TABLE_5`."""
    experts = pipemoe(costs)
    search = PlanSearch(costs)
    sized = [with_buckets(costs, experts, -(-max(costs.gradient_bytes) // count)) for count in (1, 2, 4, 8, 16)]
    plans = [
        experts,
        search.ablation["attention"],
        with_buckets(costs, experts, _MB),
        min(sized, key=lambda plan: makespan(plan, costs)),
        search.plan("flowmoe"),
    ]
    whole_s = makespan(sequential(costs), costs)
    return [whole_s / makespan(plan, costs) for plan in plans]


def ablation(progress: Progress) -> list[Table]:
    found: dict[str, list[list[float]]] = {name: [] for name in TESTBEDS}
    for number, (name, work) in enumerate(cases := list(sampled(CASES))):
        found[name].append(speedups(costs_of(name, work)))
        progress(number + 1, len(cases))
    means = {name: [statistics.mean(of) for of in zip(*rows, strict=True)] for name, rows in found.items()}
    rows = tuple(
        Row(
            name,
            paper,
            tuple(means[testbed][place] for testbed in TESTBEDS),
            "{:.2f}×",
            (1, 2) if "tuned" in name else (1,),
        )
        for place, (name, paper) in enumerate(TABLE_5.items())
    )
    return [replace(ABLATION, rows=rows, text=ABLATION.text.format(cases=CASES))]


TUNING = Table(
    "flowmoe-table-a3",
    "How S_p is found: step time relative to Bayesian optimisation",
    "FlowMoE",
    "Table A.3",
    "simulated",
    ("costs of A", "costs of B"),
    text=f"The same {CASES} layers of each testbed with FlowMoE's chunks. Eight samples for Bayesian optimisation and "
    "for the grid; random: a new S_p in every step. The paper's figure is the mean over its four models.",
    reasons=(
        "Start-up costs of all-reduces on FlowMoE's clusters are not printed. With the start-up costs of FSMoE's "
        "testbeds, most sizes are nearly as good as the best.",
    ),
)
# Printed milliseconds: Bayesian optimisation, grid search, random search.
_TUNED_MS = ((95.6, 101.3, 109.3), (351.9, 373.80, 388.96), (1124.0, 1208.23, 1250.09), (3205.3, 3498.8, 3902.75))
_SAMPLES = 8


def tuned(costs: StepCosts, seed: int) -> tuple[float, float]:
    """Return the step time with a grid's S_p, and the mean with random ones, relative to Bayesian optimisation."""
    split, largest = StepSplit.from_plan(PlanSearch(costs).plan("flowmoe")), max(costs.gradient_bytes)

    def seconds(size: int) -> float:
        return micro_schedule(costs, split._replace(bucket_bytes=size)).makespan_s(costs.contention)

    search = BucketSearch(largest, _SAMPLES, seed)
    while (size := search.next()) is not None:
        search.tried.append((size, seconds(size)))
    best_s = min(took for _, took in search.tried)
    grid_s = min(seconds(largest * part // _SAMPLES) for part in range(1, _SAMPLES + 1))
    chance = np.random.default_rng(seed + 1)
    random_s = statistics.mean(seconds(max(2**16, int(largest * chance.uniform()))) for _ in range(_SAMPLES))
    return grid_s / best_s, random_s / best_s


def tuning(progress: Progress) -> list[Table]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TESTBEDS}
    for number, (name, work) in enumerate(cases := list(sampled(CASES))):
        found[name].append(tuned(costs_of(name, work), number))
        progress(number + 1, len(cases))
    rows = []
    for place, what in enumerate(("grid search", "random sizes")):
        paper = statistics.mean(of[place + 1] / of[0] for of in _TUNED_MS)
        ours = tuple(statistics.mean(of[place] for of in found[name]) for name in TESTBEDS)
        rows.append(Row(what, f"{paper:.3f} (mean of four)", ours, "{:.3f}", (1,)))
    return [replace(TUNING, rows=tuple(rows))]


PARTS = (
    Part((SIZES,), 1, sizes),
    Part((THEOREMS,), 25, theorems),
    Part((ITERATIONS,), 1, iterations),
    Part((ABLATION,), 25, ablation),
    Part((TUNING,), 25, tuning),
)

#: Omitted figures, and reasons.
LEFT_OUT = {
    "Tables 3 and A.7, 4 and 8 GPUs": "task times (Table 1) are printed for 16 GPUs only.",
    "Table 3, FasterMoE, FSMoE and ScheMoE": "Table 1 does not separate intra-node from inter-node traffic, which "
    "FSMoE needs; this library has no policies for FasterMoE and ScheMoE.",
    "Tables 4, A.4, A.5, A.6": "they depend on start-up costs of the authors' clusters, which are not printed.",
    "Fig. 6 (675 layers)": "costs of the clusters are not printed, and the baseline is ScheMoE.",
    "Tables 6, A.8 to A.11": "energy, memory and utilization of the authors' GPUs.",
    "Table A.12": "clusters with slowed-down GPUs; their task times are not printed.",
}
