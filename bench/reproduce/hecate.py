"""Hecate: model sizes, memory (Figure 13), stragglers, inter-node traffic, and bytes of the sparse collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from bench.placement.baselines import CLUSTER_A, Policy, expert_parallelism, hecate, predicted_volume
from bench.placement.made_loads import make_loads
from bench.placement.replay import Outcome, replay
from bench.reproduce.table import Part, Progress, Row, Table
from fusedmoe.placement.hecate import WINDOW, materialise, predict_load
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import gather_transfers, link_bytes

SIZES = Table(
    "hecate-table1",
    "Parameters of the models, in billions",
    "Hecate",
    "Table 1",
    "computed",
    text="For each layer 4·d² of attention and 2·d·2d for each of 64 experts.",
)
# d_model, layers; printed billions of parameters.
_MODELS = {
    "GPT-MoE-S": (768, 12, 1.84),
    "GPT-MoE-L": (1536, 12, 7.36),
    "BERT-MoE": (1024, 12, 3.27),
    "BERT-MoE-Deep": (1024, 24, 6.54),
}
_EXPERTS = 64


def parameters(model_dim: int, layers: int) -> float:
    """Return billions of parameters of a model in Table 1."""
    return layers * model_dim**2 * (4 + 4 * _EXPERTS) / 1e9


def sizes(progress: Progress) -> list[Table]:
    rows = (
        Row(name, paper, (parameters(model_dim, layers),), "{:.2f}")
        for name, (model_dim, layers, paper) in _MODELS.items()
    )
    return [replace(SIZES, rows=tuple(rows))]


MEMORY = Table(
    "hecate-figure13",
    "Memory of experts relative to expert parallelism",
    "Hecate",
    "Fig. 13, §5.3",
    "simulated",
    ("by arithmetic", "this library"),
    text="By arithmetic: experts that a rank owns take 1 of parameters, 1 of gradients and 6 of optimizer state; "
    "copies take the number of parameters that the paper prints, and gradients of one layer at a time, of 12. This "
    "library: its placements on made loads, 12 layers of 64 experts on 4 nodes of 8 ranks, at the peak of the "
    "fullest rank.",
    reasons=(
        "Neither m, t nor the model of the experiment is printed. Here m = t = {m}, which gives the paper's share of "
        "parameters: that row is an input, and the other rows depend on it.",
        "Copies of one layer of 12 instead of all. With the printed 90.2% in its place the arithmetic gives the "
        "printed 11.6% too.",
        "The library's simulation counts gradients of copies in all layers at once.",
    ),
)
_PARAMETERS, _FREED, _STATE = 5.73, 0.902, 6
_LAYERS, _NODES = 12, NodeLayout(32, 8)


def memory_by_arithmetic(parameters: float, part: float) -> tuple[float, float]:
    """Return the memory of Hecate, without and with re-materialisation, relative to expert parallelism.

    Args:
        parameters: ratio with to without replicas, as printed.
        part: fraction of all layers' replicas that exists at a time, as gradients, and re-materialised.
    """
    owned, copies = 1 + 1 + _STATE, parameters - 1
    return (owned + copies + part * copies) / owned, (owned + 2 * part * copies) / owned


def memory(progress: Progress) -> list[Table]:
    owned = _EXPERTS / _NODES.num_ranks
    room = round((_PARAMETERS - 1) * owned)
    trace = make_loads(WINDOW + 3, _LAYERS, _NODES.num_ranks, _EXPERTS, seed=0)
    policies: tuple[Policy, ...] = (
        expert_parallelism,
        partial(hecate, t=room, m=room, searches=False),
    )
    found = []
    for number, policy in enumerate(policies):
        found.append(replay(trace, policy, _NODES, CLUSTER_A))
        progress(number + 1, len(policies))
    ep, ours = (int(one.peak_I.max()) for one in found)
    share = 1 + int(found[1].replicas_I.max()) / (_LAYERS * owned)
    plain, again = memory_by_arithmetic(_PARAMETERS, 1 / _LAYERS)
    printed = memory_by_arithmetic(_PARAMETERS, 1 - _FREED)
    rows = (
        Row("parameters", _PARAMETERS, (_PARAMETERS, share), "{:.2f}×", (1,)),
        Row("all", 1.64, (plain, ours / ep), "{:.2f}×", (1, 3)),
        Row("all, re-materialising", 1.116, (again, None), "{:.3f}×", (2,)),
        Row("… with the printed part of copies", 1.116, (printed[1], None), "{:.3f}×", (2,)),
        Row("parameters of copies saved by rematerialisation", _FREED, (1 - 1 / _LAYERS, None), "{:.1%}", (2,)),
    )
    reasons = tuple(reason.format(m=room) for reason in MEMORY.reasons)
    return [replace(MEMORY, rows=rows, reasons=reasons)]


STRAGGLERS = Table(
    "hecate-stragglers",
    "Stragglers, ingress and all-to-alls, against expert parallelism",
    "Hecate",
    "§1, §5.3 (Figs. 11, 12), Fig. 15",
    "simulated",
    ("m = 2", "m = 4"),
    text="24 layers of 32 experts on 4 nodes of 4 ranks, t = 8, as BERT-MoE-Deep on 16 GPUs; {iterations} iterations "
    "of made loads whose popularity falls by Zipf's law and drifts. The paper prints neither loads nor m and t.",
    reasons=(
        "Other loads, m, t, model and machine; the paper's figures are measured, on 32 GPUs of cluster B unless they "
        "say something else, with room for copies that it does not print (Fig. 13 has 4.73 for each owned expert).",
        "The paper's is of whole training on cluster A, ours of the busiest rank's work in the mean; a step has "
        "attention too, which no straggler makes longer.",
        "Without the time in which owners move, which the paper spreads over 100 iterations. On our loads owners "
        "matter less and copies more.",
    ),
)
_ITERATIONS, _OVERLAP, _ROOMS = 40, 8, (2, 4)
_RANKS = NodeLayout(16, 4)


def stragglers(progress: Progress) -> list[Table]:
    """Compare every figure for both memory sizes: the published algorithm, then with this library's search."""
    trace = make_loads(_ITERATIONS, 24, _RANKS.num_ranks, 32, seed=0)
    policies: dict[tuple[str, int], Policy] = {
        ("ep", 0): expert_parallelism,
        ("sharded", 0): partial(hecate, t=0, m=0, searches=False),
    }
    for m in _ROOMS:
        own = partial(hecate, t=_OVERLAP, m=m)
        policies |= {
            ("published", m): partial(own, searches=False),
            ("copies", m): partial(own, searches=False, sharded=False),
            ("searched", m): own,
        }
    found: dict[tuple[str, int], Outcome] = {}
    for number, (key, policy) in enumerate(policies.items()):

        def show(done: int, total: int, number: int = number) -> None:
            progress(number + done / total, len(policies))

        found[key] = replay(trace, policy, _RANKS, CLUSTER_A, show=show)
    rows = straggler_rows(found)
    return [replace(STRAGGLERS, rows=tuple(rows), text=STRAGGLERS.text.format(iterations=_ITERATIONS - WINDOW))]


def straggler_rows(found: dict[tuple[str, int], Outcome]) -> list[Row]:
    ep, sharded = found["ep", 0], found["sharded", 0]

    def of(name: str, how: Callable[[Outcome], float]) -> tuple[float, ...]:
        return tuple(how(found[name, m]) for m in _ROOMS)

    times = "{:.1f}×"
    rows = [Row("expert parallelism: busiest rank over the mean", "up to 5.18×", (ep.straggler,) * 2, times, (2,))]
    for name, what in (("published", "Algorithms 1 and 2"), ("searched", "with this library's search")):
        rows += [
            Row(f"busiest rank computes less, {what}", None, of(name, lambda one: ep.straggler / one.straggler), times),
            Row(
                f"busiest rank receives less from other nodes, {what}",
                None,
                of(name, lambda one: ep.ingress_bytes / one.ingress_bytes),
                times,
            ),
            Row(
                f"all-to-alls shorter, {what}",
                12.3,
                of(name, lambda one: float(ep.exchange_IL.sum() / one.exchange_IL.sum())),
                times,
                (1,),
            ),
            Row(
                f"layers faster, geometric mean, {what}", 11.87, of(name, lambda one: geomean(one, ep)), "{:.2f}×", (1,)
            ),
            Row(f"… the least, {what}", 2.8, of(name, lambda one: float(one.speedup_L(ep).min())), times, (1,)),
            Row(f"… the most, {what}", 18.8, of(name, lambda one: float(one.speedup_L(ep).max())), times, (1,)),
        ]
    both = [found["published", m].layers_s for m in _ROOMS]
    copies = of("copies", lambda one: one.layers_s)
    form = "{:.2f}×"
    rows += [
        Row("faster than sharding alone", 3.32, tuple(sharded.layers_s / one for one in both), form, (1, 3)),
        Row("faster than copies alone", 1.27, tuple(a / b for a, b in zip(copies, both, strict=True)), form, (1, 3)),
    ]
    return rows


def geomean(one: Outcome, ep: Outcome) -> float:
    return float(np.exp(np.log(one.speedup_L(ep)).mean()))


VOLUMES = Table(
    "hecate-volume",
    "Bytes of the sparse collectives, counted one by one",
    "Hecate",
    "Eqs. 1 and 2",
    "computed",
    ("m = 2", "m = 4"),
    text="Placements of Algorithm 1 for the loads of the table above. λS: bytes of the experts that travel. Means over "
    "the layers, unless stated otherwise.",
    reasons=(
        "The paper's is a limit. An expert travels along a chain from node to node, so no rank sends it twice on one "
        "kind of link.",
        "As printed, Eq. 2 counts each group once for every expert that travels. Set right, each expert counts "
        "2·(d − 1)/d, which tends to 2 as its group of d ranks grows.",
    ),
)


def volumes(progress: Progress) -> list[Table]:
    loads = predict_load(make_loads(WINDOW, 24, _RANKS.num_ranks, 32, seed=0).load_ILE)
    even, nbytes = Placement.even(_RANKS.num_ranks, 32), CLUSTER_A.expert_bytes
    busiest, sent, groups = [], [], []
    for m in _ROOMS:
        placements = [materialise(even, load_E, _RANKS, _OVERLAP, m) for load_E in loads]
        moved = [one for one in placements if one != even]
        said = [predicted_volume(even, one, _RANKS, nbytes) for one in moved]
        counted = [link_bytes(gather_transfers(even, one, _RANKS), _RANKS, nbytes) for one in moved]
        busiest.append(max(one.max() / of.limit for one, of in zip(counted, said, strict=True)))
        sent.append(float(np.mean([one[::2].sum() / of.total for one, of in zip(counted, said, strict=True)])))
        groups.append(float(np.mean([group_share(one) for one in moved])))
    rows = (
        Row("SparseAllGather, busiest rank, of λS, the most", "at most 1", tuple(busiest), "{:.2f}", (1,)),
        Row("bytes that are sent, of those predicted", None, tuple(sent), "{:.3f}"),
        Row("both collectives for a member of a group, of 2λS", "tends to 1", tuple(groups), "{:.2f}", (2,)),
    )
    return [replace(VOLUMES, rows=rows)]


def group_share(placement: Placement) -> float:
    """Return the corrected Eq. 2 as a fraction of 2λS: the mean of (d − 1)/d over experts sent to d ranks."""
    ranks_E = placement.holds_EW.sum(axis=1)
    ranks = ranks_E[ranks_E > 1]
    return float(((ranks - 1) / ranks).mean())


PARTS = (
    Part((SIZES,), 1, sizes),
    Part((MEMORY,), 4, memory),
    Part((STRAGGLERS,), 60, stragglers),
    Part((VOLUMES,), 1, volumes),
)

#: Omitted figures, and reasons.
LEFT_OUT = {
    "Figs. 9, 10, 14": "speed-ups of whole training on the authors' clusters; times of attention and loads are not "
    "printed. `make bench-placement` reports the policies on synthetic loads.",
    "Fig. 12, sparse collectives": "times of NCCL on cluster B.",
    "Fig. 13, SmartMoE and FlexMoE": "their reserved memory is not printed.",
    "Fig. 15, intervals of re-sharding": "end-to-end runs whose loads are not printed.",
}
