"""FSMoE (ASPLOS'25): its performance model, degrees, and the speed-ups of its Table 5 and Figures 6 and 7."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from bench.paper_degree import paper_cases, paper_degree, unconstrained_degree
from bench.reproduce.table import Part, Progress, Row, Table
from bench.simulate.grid import LAYERS, PUBLISHED, run_grid, workloads
from fusedmoe.models.config import MODELS
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, fit
from fusedmoe.schedule.machines import TESTBEDS, Testbed
from fusedmoe.schedule.passes import choose_degree, three_queues_s
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import ChunkTimes, StageTime, StepCosts, chunk_times
from fusedmoe.schedule.workload import Workload

_FIG_5 = "the paper's Fig. 5, in the units that fit its Table 2 (`fusedmoe/schedule/machines.py`)"

TABLE_2 = Table(
    "fsmoe-table2",
    "Times of the operations of one layer, from the fitted lines",
    "FSMoE",
    "Table 2, from Fig. 5",
    "computed",
    ("by the lines",),
    text="B = 4, L = 1024. Each time is α + β·n with the coefficients of Fig. 5; all-to-all is dispatch and combine "
    "together, all-gather and reduce-scatter are over expert shards and model-parallel ranks. Of Table 2 only "
    "these columns can be computed: no coefficients are printed for routing, ordering and attention.",
    reasons=(
        "The paper prints neither k nor f of this table; k = 2 and f = 1 fit Mixtral-7B on testbed A. On testbed B its "
        "collectives take longer than the printed lines give, for both models alike.",
        "The products of GPT2-XL's experts on 8 GPUs are small, and take longer than the line of all sizes gives.",
        "The lines are as fitted, with exponents and units of print that had to be set right; only r² shows how far "
        "single times are from them.",
        "Parameters of attention are not printed. Ours: 4·M² for GPT2-XL, 2.5·M² for Mixtral-7B, whose 32 heads share "
        "8 of keys and values. Three projections, not four, fit the paper's GPT2-XL on testbed A (last rows).",
    ),
)
# Printed milliseconds: all-to-all, all-gather, reduce-scatter and experts forward; experts and all-reduce backward.
_PRINTED_MS = {
    ("A", "GPT2-XL"): (6.9, 4.6, 5.4, 3.1, 6.1, 5.26),
    ("A", "Mixtral-7B"): (19.5, 12.3, 13.7, 15.6, 31.8, 26.45),
    ("B", "GPT2-XL"): (11.2, 15.5, 15.7, 6.7, 13.0, 7.3),
    ("B", "Mixtral-7B"): (28.3, 39.6, 40.8, 58.5, 119.7, 32.1),
}
_OPERATIONS = ("all-to-all", "all-gather", "reduce-scatter", "experts", "experts, backward", "all-reduce")
# M, H, expert network, and attention parameters in M².
_LAYERS = {
    "GPT2-XL": (MODELS["GPT2-XL-MoE"].model_dim, MODELS["GPT2-XL-MoE"].hidden, "ffn", 4.0),
    "Mixtral-7B": (MODELS["Mixtral-7B"].model_dim, MODELS["Mixtral-7B"].hidden, "swiglu", 2.5),
}


def operations_ms(testbed: Testbed, model_dim: int, hidden: int, expert: str, projections: float) -> list[float]:
    """Return milliseconds of `_OPERATIONS`: B = 4, L = 1024, k = 2, f = 1. `projections`: of attention, in M²."""
    nodes, gpus, line = testbed.nodes, testbed.gpus, testbed.costs.line
    work = Workload(4, 1024, model_dim, hidden, nodes, 2, 1.0, expert, nodes, gpus)
    there, back = work.layer_costs(testbed.costs).chunks.values()
    shared = work.tokens * work.model_dim * work.itemsize
    found = [
        there["dispatch"].seconds(1) + there["combine"].seconds(1),
        there["all-gather"].seconds(1) + line("all-gather/esp").seconds(shared),
        there["reduce-scatter"].seconds(1) + line("reduce-scatter/esp").seconds(shared),
        there["expert"].seconds(1),
        back["expert"].seconds(1),
        line("all-reduce/dp").seconds(work.itemsize * projections * model_dim**2 / gpus),
    ]
    return [1e3 * seconds for seconds in found]


def table_2(progress: Progress) -> list[Table]:
    rows = []
    for (name, model), printed in _PRINTED_MS.items():
        ours = operations_ms(TESTBEDS[name], *_LAYERS[model])
        for operation, paper_ms, own_ms in zip(_OPERATIONS, printed, ours, strict=True):
            why, form = (3,), "{:.1f} ms"
            if operation == "all-reduce":
                why, form = ((4,) if name == "A" else (1, 4)), "{:.2f} ms"
            elif operation.startswith("experts"):
                why = (2,) if (name, model) == ("A", "GPT2-XL") else (3,)
            elif name == "B" or model == "GPT2-XL":
                why = (1,)
            rows.append(Row(f"{name}, {model}, {operation}", paper_ms, (own_ms,), form, why))
    for name in TESTBEDS:
        own_ms = operations_ms(TESTBEDS[name], *_LAYERS["GPT2-XL"][:3], 3.0)[-1]
        paper_ms = _PRINTED_MS[name, "GPT2-XL"][-1]
        why = (4,) if name == "A" else (1, 4)
        rows.append(Row(f"{name}, GPT2-XL, all-reduce of 3·M²", paper_ms, (own_ms,), "{:.2f} ms", why))
    return [replace(TABLE_2, rows=tuple(rows))]


TABLE_5 = Table(
    "fsmoe-table5",
    "Mean speed-up over Tutel, 1,458 layers on each testbed",
    "FSMoE",
    "Table 5",
    "simulated",
    ("links alone", "with contention"),
    text=f"All cases of the paper's Table 4, a step of {LAYERS} equal layers forward and backward. Costs: {_FIG_5}. "
    "Tutel is Tutel with PipeMoE's degrees, as there. The number of heads changes nothing: 486 cases stand for 1,458.",
    reasons=(
        "Links alone: traffic inside nodes and between them does not slow each other down. Then FSMoE, the only "
        "policy that uses both links at a time, gains more than on real nodes.",
        "With contention: while both links work, each has 0.65 (A) or 0.75 (B) of its speed. No such number is "
        "printed; these are chosen to meet the paper's FSMoE, and the other figures do not depend on them.",
        "The rest of a step is not printed: the number of layers, gates, orders, launches, the optimizer. Here a "
        "layer has attention's products and the model-parallel collectives; gates and orders take no time.",
    ),
)
_NAMES = {"tutel_improved": "Tutel-Improved", "fsmoe_no_iio": "FSMoE-No-IIO", "fsmoe": "FSMoE"}


def table_5(progress: Progress) -> list[Table]:
    """Compare the whole grid, except policies of whole models, which the paper does not have."""
    found = {(one.testbed, one.contention < 1): one for one in run_grid(sample=0, progress=progress)}
    rows = [
        Row(
            f"{testbed}, {_NAMES[policy]}",
            PUBLISHED[testbed][policy],
            tuple(found[testbed, slowed].speedup(policy) for slowed in (False, True)),
            "{:.2f}×",
            (1, 2) if policy == "fsmoe" else (3,),
        )
        for testbed in TESTBEDS
        for policy in _NAMES
    ]
    return [replace(TABLE_5, rows=tuple(rows))]


DEGREES = Table(
    "fsmoe-degrees",
    "Layers whose best numbers of chunks differ forward and backward, of 1,458",
    "FSMoE",
    "§2.3, §4.4",
    "simulated",
    ("links alone", "with contention"),
    text=f"For each case of Table 4 the best degree of each pass without gradients to reduce. Costs: {_FIG_5}.",
    reasons=(
        "The paper counts on testbed B, by measurement, and does not state how many chunks it tried. Up to 8, as Tutel "
        "does, the count is nearly the paper's. Each case counts for its three numbers of heads.",
    ),
)
_HEADS = 3


def differing(testbed: Testbed, contention: Contention, limit: int, cases: Sequence[Workload] | None = None) -> int:
    """Count the cases of Table 4 whose best degrees up to `limit` differ between the passes."""
    found = 0
    for work in workloads(testbed) if cases is None else cases:
        chunks = work.layer_costs(testbed.costs).chunks.values()
        best = {choose_degree(one, contention=contention, max_degree=limit).degree for one in chunks}
        found += _HEADS * (len(best) > 1)
    return found


def degrees(progress: Progress) -> list[Table]:
    """Count the cases whose passes have different best degrees, by maximum number of chunks."""
    tried = [("B", 8), ("B", 4), ("B", 16), ("A", 8)]
    rows = []
    for number, (name, limit) in enumerate(tried):
        testbed = TESTBEDS[name]
        ours = tuple(differing(testbed, contention, limit) for contention in (NO_CONTENTION, testbed.costs.contention))
        paper = PUBLISHED["B"]["differing_degrees"] if (name, limit) == ("B", 8) else None
        rows.append(Row(f"{name}, up to {limit} chunks", paper, ours, "{:.0f}", (1,) if paper else ()))
        progress(number + 1, len(tried))
    return [replace(DEGREES, rows=tuple(rows))]


ALGORITHM_1 = Table(
    "fsmoe-algorithm1",
    "The printed cases and Algorithm 1, against the exact time of a pass",
    "FSMoE",
    "§4.2, Algorithm 1",
    "computed",
    text="The exact time assumes first-in-first-out links, which the closed form of this library gives and "
    "simulation confirms. Regret: how much longer a pass takes with the chosen degree than with the best one, in the "
    "mean over the passes of Table 4's layers, backward with the layer's own all-reduce.",
    reasons=(
        "The paper takes its cases for exact, and prints no regret. They are exact where an all-gather takes as long "
        "as a reduce-scatter, which the paper assumes.",
        "As its lines stand, Algorithm 1 takes the least of four minima although each holds in its own case only; §4.2 "
        "has these cases as constraints.",
    ),
)
SOLVER = Table(
    "fsmoe-solver",
    "What a choice of degrees takes",
    "FSMoE",
    "§6.2",
    "measured",
    text="One choice is for one pass. Mean over the same passes.",
    reasons=(
        "Another processor, and SciPy's solver from two starts in each of eight regions; the paper does not state how "
        "it is called.",
        "The paper prints an upper limit; here 24 points, as there.",
    ),
)
_RANDOM, _SLSQP_EVERY = 20_000, 6


def printed_against_exact(cases: int, seed: int = 0) -> tuple[float, float, float]:
    """Return how often the printed cases are inexact for random passes, and the largest relative difference.

    The fractions are of all passes, and of those with AG = RS.
    """
    rng = random.Random(seed)
    off, off_even, largest = 0, 0, 0.0
    for _ in range(cases):
        d, ag, x, rs = (rng.random() for _ in range(4))
        r, gar = rng.randint(1, 12), rng.choice([0.0, 4 * rng.random()])
        times = ChunkTimes(d, ag, x, rs, d)
        error = _relative(paper_cases(r, times, gar).seconds, three_queues_s(r, times, gar))
        even = times._replace(reduce_scatter=ag)
        off += error > 1e-9
        off_even += _relative(paper_cases(r, even, gar).seconds, three_queues_s(r, even, gar)) > 1e-9
        largest = max(largest, error)
    return off / cases, off_even / cases, largest


def _relative(one: float, exact: float) -> float:
    return abs(one - exact) / exact


Passes = Iterator[tuple[Mapping[str, StageTime], float]]


def passes(testbed: Testbed, every: int = 1) -> Passes:
    """Return both passes of every `every`-th case, each with the seconds of its gradient all-reduce."""
    for work in list(workloads(testbed))[::every]:
        layer = work.layer_costs(testbed.costs)
        yield layer.chunks["forward"], 0.0
        yield layer.chunks["backward"], testbed.costs.line("all-reduce/dp").seconds(layer.gradient_bytes)


def regrets(found: Passes, choose: Callable[[Mapping[str, StageTime], float], int]) -> list[float]:
    """Return by pass the relative excess time of the chosen degree over the best one."""
    return [
        three_queues_s(degree, chunk_times(chunks, degree), gar) / choose_degree(chunks, gar).seconds - 1.0
        for chunks, gar in found
        for degree in (choose(chunks, gar),)
    ]


def algorithm_1(progress: Progress) -> list[Table]:
    off, off_even, largest = printed_against_exact(_RANDOM)
    rows = [
        Row("random passes where the printed cases are wrong", None, (off,), "{:.0%}", (1,)),
        Row("… where AG = RS", None, (off_even,), "{:.0%}", (1,)),
        Row("largest error of the printed cases there", None, (largest,), "{:.0%}", (1,)),
    ]
    spent: dict[str, list[float]] = {"slsqp": [], "exact": []}

    def timed(name: str, choose: Callable[..., int]) -> Callable[[Mapping[str, StageTime], float], int]:
        def chosen(chunks: Mapping[str, StageTime], gar: float) -> int:
            began = time.perf_counter()
            degree = choose(chunks, gar)
            spent[name].append(time.perf_counter() - began)
            progress(len(spent["slsqp"]), total)
            return degree

        return chosen

    total = 2 * sum(len(range(0, len(list(workloads(one))), _SLSQP_EVERY)) for one in TESTBEDS.values())
    for name, testbed in TESTBEDS.items():
        literal = regrets(passes(testbed), lambda chunks, gar: unconstrained_degree(chunks, gar).degree)
        slsqp = timed("slsqp", lambda chunks, gar: paper_degree(chunks, gar).degree)
        constrained = regrets(passes(testbed, _SLSQP_EVERY), slsqp)
        regrets(passes(testbed, _SLSQP_EVERY), timed("exact", lambda chunks, gar: choose_degree(chunks, gar).degree))
        for what, of, form in (
            ("Algorithm 1 as its lines stand", literal, "{:.1%}"),
            (f"with the cases of §4.2, every {_SLSQP_EVERY}th layer", constrained, "{:.2%}"),
        ):
            rows.append(Row(f"mean regret, {name}, {what}", None, (statistics.mean(of),), form, (2,)))
    fitted = _seconds(lambda: fit([(2**20 * n, 1e-4 + 1e-9 * 2**20 * n) for n in range(1, 25)]))
    took = [
        Row("a choice by SLSQP", 193.0, (1e3 * statistics.mean(spent["slsqp"]),), "{:.0f} ms", (1,)),
        Row("a choice by the closed form", None, (1e3 * statistics.mean(spent["exact"]),), "{:.3f} ms"),
        Row("a fit by least squares", "under 10 ms", (1e3 * fitted,), "{:.3f} ms", (2,)),
    ]
    return [replace(ALGORITHM_1, rows=tuple(rows)), replace(SOLVER, rows=tuple(took))]


def _seconds(call: Callable[[], object], times: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


MODELS_TABLE = Table(
    "fsmoe-figure6",
    "Mean speed-up of FSMoE on whole models",
    "FSMoE",
    "Figs. 6 and 7, §6.4",
    "simulated",
    ("links alone", "with contention"),
    text="GPT2-XL, Mixtral-7B and, on A, Mixtral-22B with B = 1, k = 2, f = 1.2, one expert a node; L = 1024 on A and "
    f"256 on B; 7 layers of Mixtral-7B on B, 33 of Mixtral-22B. Costs: {_FIG_5}.",
    reasons=(
        "Contention is chosen for Table 5 and used as it is. Gates, orders, the embedding, the loss and the optimizer "
        "take no time here, which makes every speed-up larger.",
        "The averages' weights are not printed; here every model and testbed counts once.",
        "Fig. 7's models are not named in the text; here the three of testbed A, P = 48.",
    ),
)
# Name, testbed, layers, M, H, expert network; L is the testbed's.
_MODELS = (
    ("GPT2-XL", "A", MODELS["GPT2-XL-MoE"].layers, *_LAYERS["GPT2-XL"][:3]),
    ("Mixtral-7B", "A", MODELS["Mixtral-7B"].layers, *_LAYERS["Mixtral-7B"][:3]),
    ("Mixtral-22B", "A", 33, 6144, 16384, "swiglu"),
    ("GPT2-XL", "B", MODELS["GPT2-XL-MoE"].layers, *_LAYERS["GPT2-XL"][:3]),
    ("Mixtral-7B", "B", 7, *_LAYERS["Mixtral-7B"][:3]),
)
_SEQUENCE = {"A": 1024, "B": 256}
_OVER = {"pipemoe": ("Tutel", 1.19), "tutel_improved": ("Tutel-Improved", 1.12), "lina": ("PipeMoE+Lina", 1.14)}
_OVER["fsmoe_no_iio"] = ("FSMoE-No-IIO", 1.07)
_FIG_7 = {512: 1.17, 1024: 1.19, 2048: 1.17}


def gains(
    name: str, layers: int, model_dim: int, hidden: int, expert: str, seq_len: int, over: Sequence[str], alone: bool
) -> list[float]:
    """Return FSMoE's speed-up over each policy in `over` for a step of such layers."""
    testbed = TESTBEDS[name]
    work = Workload(1, seq_len, model_dim, hidden, testbed.nodes, 2, 1.2, expert, testbed.nodes, testbed.gpus)
    layer = work.layer_costs(testbed.costs)
    contention = NO_CONTENTION if alone else testbed.costs.contention
    costs = StepCosts((layer,) * layers, testbed.costs.line("all-reduce/dp"), contention)
    ours_s = makespan(POLICIES["fsmoe"].plan(costs), costs)
    return [makespan(POLICIES[policy].plan(costs), costs) / ours_s for policy in over]


def models(progress: Progress) -> list[Table]:
    whole = [(name, *of, _SEQUENCE[name], tuple(_OVER)) for _, name, *of in _MODELS]
    varied = {
        length: [(name, *of, length, ("pipemoe",)) for _, name, *of in _MODELS if name == "A"] for length in _FIG_7
    }
    found: dict[tuple[Any, ...], list[list[float]]] = {}
    for step in (steps := [*whole, *chain(*varied.values())]):
        found[step] = [gains(*step, alone) for alone in (True, False)]
        progress(len(found), len(steps))
    rows = [
        Row(f"over {name}, all models", paper, _means([found[one] for one in whole], place), "{:.2f}×", (1, 2))
        for place, (name, paper) in enumerate(_OVER.values())
    ]
    rows += [
        Row(f"over Tutel, A, L = {length}", paper, _means([found[one] for one in varied[length]], 0), "{:.2f}×", (1, 3))
        for length, paper in _FIG_7.items()
    ]
    return [replace(MODELS_TABLE, rows=tuple(rows))]


def _means(group: Sequence[Sequence[Sequence[float]]], place: int) -> tuple[float, ...]:
    return tuple(statistics.mean(one[which][place] for one in group) for which in (0, 1))


PARTS = (
    Part((TABLE_2,), 1, table_2),
    Part((TABLE_5,), 20, table_5),
    Part((DEGREES,), 2, degrees),
    Part((ALGORITHM_1, SOLVER), 45, algorithm_1),
    Part((MODELS_TABLE,), 4, models),
)

#: Omitted figures, and reasons.
LEFT_OUT = {
    "Tables 1, 3, 4": "notation, servers, and the parameter grid, which is the grid of Table 5.",
    "Table 6, and speed-ups over DeepSpeed-MoE (Figs. 6 to 8)": "times of gates and of another system's kernels on the "
    "authors' GPUs; their coefficients are not printed.",
    "Fig. 7, 16 and 32 GPUs": "Fig. 5 has coefficients for the whole testbed only.",
    "Fig. 8": "GPipe on two stages needs the time of point-to-point messages and the number of micro-batches; neither "
    "is printed.",
}
