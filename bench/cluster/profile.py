"""What collectives and computation take in a setting, measured there just before the policies are."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.cluster.setting import LIMIT, Setting
from bench.cluster.step import Step
from fusedmoe.comm.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_rows,
)
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.profiler import contention_of, line_through
from fusedmoe.runtime.profiler import profile as measure
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, StepSplit, micro_schedule, step_plan
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import WEIGHT_GRADIENTS
from fusedmoe.schedule.timeline import PHASES

# For the library's profiler. Of blocks all that counts is measured again, among the policies.
_BUDGET_S, _BUDGET_OF_BLOCKS_S = 20.0, 6.0
_REPEATS = 3
# Steps that are done to measure what computes: whole, and in as many chunks as may be.
_DEGREES = (1, LIMIT)
# In how many buckets a layer's gradient goes where all-reduces are measured; smaller ones are faster than their line by
# what the link's token bucket lets through unhindered.
_BUCKETS = (1, 2, 4)
# What computes in a layer by its name in what is measured; backward also input and weight gradients by themselves.
_PARTS = ("attention forward", "attention backward", "expert forward", "expert backward")
_APART = {source: (f"{source} backward, input only", f"{kind} backward") for source, kind in WEIGHT_GRADIENTS.items()}

# Chunks that travel inside a node and between nodes, alone and at the same time.
_INTER, _INTRA = "inter: D0 D1 D2 D3", "intra: AG0 RS0 AG1 RS1 AG2 RS2 AG3 RS3"
_LINKS = {
    "link between nodes": Plan.parse(_INTER),
    "links inside a node": Plan.parse(_INTRA),
    "both links": Plan.parse("\n".join([_INTER, _INTRA, *(f"after AG{chunk}:" for chunk in range(4))])),
}

Points = Sequence[tuple[float, float]]
# A kind and phase, and its share of a layer.
Sample = tuple[str, float]


@dataclass(frozen=True)
class Profile:
    """What was measured, the same on every rank. `points`: (size, seconds) by name."""

    model: CostModel
    stack: StepCosts
    seconds: float
    points: Mapping[str, Points]

    def to_json(self) -> dict[str, Any]:
        layer = self.stack.layers[0]
        return {
            "seconds": self.seconds,
            "lines": {name: vars(line) for name, line in self.model.lines.items()},
            "contention": self.model.contention,
            "chunks": {phase: {kind: vars(chunks) for kind, chunks in layer.chunks[phase].items()} for phase in PHASES},
            "dense_s": layer.dense_s,
            "micro": None if layer.micro is None else asdict(layer.micro),
            "gradient_bytes": layer.gradient_bytes,
            "points": self.points,
        }


class Profiler:
    """Collectives and contention by the library's profiler, all-to-alls again in the sizes of the chunks; what computes
    by steps that are done for this alone, since nothing computes as fast there as by itself: caches are cold, and
    threads that send want the processor.

    All ranks measure at the same time, so that what they share is shared as in a step. Everything is collective.
    """

    def __init__(self, setting: Setting, topology: Topology, step: Step) -> None:
        self._setting, self._topology, self._step = setting, topology, step
        budget_s = _BUDGET_OF_BLOCKS_S if setting.blocks else _BUDGET_S
        self._found = measure(topology, torch.device("cpu"), budget_s=budget_s, machine=setting.name)
        alike = dict.fromkeys((*_PARTS, *itertools.chain(*_APART.values())), Line(0.0, 1e-3))
        layers = (_layer_costs(setting, step, self._found.costs, alike),) * setting.layers
        self._probes = _probes(StepCosts(layers))
        self._computing: list[dict[Sample, float]] = []
        self._exchanging = Clock(topology)
        for degree in (1, 2, LIMIT):
            size = setting.row_bytes // degree
            self._exchanging.add("all-to-all", size, _all_to_all(topology.ep, size))
        if setting.blocks:
            self._add_blocks()
        one_way = Topology.from_sizes(ep=2, esp=setting.esp, mp=setting.esp, ranks_per_node=setting.ranks_per_node)
        whole = _all_to_all(one_way.ep, setting.row_bytes)
        self._exchanging.add("all-to-all over one process group", setting.row_bytes, whole)
        for _ in range(1 + _REPEATS):  # the first is not counted
            self.round()

    def _add_blocks(self) -> None:
        """All other collectives in the sizes of chunks and buckets; and what both links take, alone and together."""
        topology, setting, add = self._topology, self._setting, self._exchanging.add
        for buckets in _BUCKETS:
            size = self._step.gradient_bytes // buckets
            add("all-reduce/dp", size, partial(all_reduce, topology.dp, torch.zeros(size // 4)))
        if setting.esp == 1:
            return
        gathered = setting.row_bytes * setting.esp
        for degree in (1, 2, LIMIT):
            each = [1] * setting.esp
            own = torch.zeros(1, gathered // degree // 4 // setting.esp)
            add("all-gather/esp", gathered // degree, partial(all_gather_rows, topology.esp, own, each))
            whole = own.repeat(setting.esp, 1)
            add("reduce-scatter/esp", gathered // degree, partial(reduce_scatter_rows, topology.esp, whole, each))
        # Four chunks: on both links about equally long.
        part, M = self._step.part(setting.S // setting.E // 4), setting.M
        bodies = {
            "dispatch": lambda task: part.dispatch(torch.zeros(part.sent, M)),
            "all-gather": lambda task: part.all_gather(torch.zeros(part.rows // setting.esp, M)),
            "reduce-scatter": lambda task: part.reduce_scatter(torch.zeros(part.rows, M)),
        }
        for links, plan in _LINKS.items():
            run = partial(execute, plan, bodies, stop=partial(topology.stop, "a measurement of both links"))
            add(links, setting.row_bytes, run)

    def round(self) -> None:
        """Measures everything once more: machines are not always equally fast."""
        self._exchanging.round()
        taken: dict[Sample, list[float]] = {}
        for degree, plan in self._probes:
            recorder = Recorder(self._topology.rank)
            self._exchanging.seconds(partial(self._step.run, plan, recorder))
            later = {task.kind for task in plan.compute}
            for span in recorder.timeline().on("compute"):
                share = 1.0 if span.chunk is None else 1.0 / degree
                name = f"{span.kind} {span.phase}"
                if span.phase == "backward" and WEIGHT_GRADIENTS.get(span.kind) in later:
                    name += ", input only"
                taken.setdefault((name, share), []).append(span.duration_s)
        self._computing.append({sample: statistics.mean(seconds) for sample, seconds in taken.items()})

    def profile(self) -> Profile:
        """By the medians so far."""
        setting, found = self._setting, self._found
        points = {**found.points, **self._exchanging.medians(), **self._computed()}
        lines = {**found.costs.lines, "all-to-all/ep": line_through(points["all-to-all"])}
        if setting.blocks:
            lines |= {name: line_through(points[name]) for name in lines if name in self._exchanging.names}
        if setting.emulated_flops is not None:
            products = [(setting.expert_flop / 2 * share, seconds / 2) for share, seconds in points["expert forward"]]
            lines["gemm"] = line_through(products)
        contention = found.costs.contention
        if "both links" in points:
            contention = contention_of(*(points[links][0][1] for links in _LINKS))
        model = replace(found.costs, lines=lines, contention=contention)
        computing = {name: _line(points[name]) for name, _ in self._computing[0]}
        layer = _layer_costs(setting, self._step, model, computing)
        stack = StepCosts((layer,) * setting.layers, model.line("all-reduce/dp"), model.contention)
        return Profile(model, stack, found.seconds, points)

    def _computed(self) -> dict[str, list[tuple[float, float]]]:
        """(share of a layer, seconds) by what computes: medians, on the slowest rank. Collective."""
        ranks = all_gather_object(self._topology.world, self._computing[1:])
        found: dict[str, list[tuple[float, float]]] = {}
        for name, share in self._computing[0]:
            rounds = zip(*([one[name, share] for one in rank] for rank in ranks), strict=True)
            found.setdefault(name, []).append((share, statistics.median(map(max, rounds))))
        return found


def _line(points: Points) -> Line:
    """Of what is never split one point is known, and enough."""
    return line_through(points) if len(points) > 1 else Line(points[0][1], 0.0)


def _probes(costs: StepCosts) -> list[tuple[int, Plan]]:
    """Steps in so many chunks; of blocks also such whose weight gradients are tasks of their own."""
    if costs.can_split:
        return [
            (degree, micro_schedule(costs, StepSplit(degree, degree, weights=weights)).plan())
            for degree in _DEGREES
            for weights in (False, True)
        ]
    passes = {degree: [ChunkedPass(three_queues, degree)] * len(costs.layers) for degree in _DEGREES}
    return [(degree, step_plan(costs, of, of)) for degree, of in passes.items()]


def _layer_costs(setting: Setting, step: Step, model: CostModel, computing: Mapping[str, Line]) -> LayerCosts:
    def chunks(line: Line, volume: float) -> StageTime:
        return StageTime(line.alpha_s, line.beta_s * volume)

    sent, gathered = setting.row_bytes, setting.row_bytes * setting.esp
    found: dict[str, dict[str, StageTime]] = {}
    for phase in PHASES:
        exchange = chunks(model.line("all-to-all/ep"), sent)
        found[phase] = {"dispatch": exchange, "expert": chunks(computing[f"expert {phase}"], 1.0), "combine": exchange}
        if setting.esp > 1:
            found[phase]["all-gather"] = chunks(model.line("all-gather/esp"), gathered)
            found[phase]["reduce-scatter"] = chunks(model.line("reduce-scatter/esp"), gathered)
    dense = {phase: {"attention": chunks(computing[f"attention {phase}"], 1.0)} for phase in PHASES}
    dense_s = {phase: {kind: of.seconds(1) for kind, of in dense[phase].items()} for phase in PHASES}
    micro = None
    if setting.blocks:
        # As a share of all that is backward: what is left for the input is never less than nothing.
        backward = {"expert": found["backward"]["expert"], **dense["backward"]}
        apart = {source: [computing[name].seconds(1.0) for name in names] for source, names in _APART.items()}
        shares = {source: weights_s / (input_s + weights_s) for source, (input_s, weights_s) in apart.items()}
        longer_s = sum(apart["expert"]) - backward["expert"].seconds(1)
        weights = {source: backward[source] * share for source, share in shares.items()}
        micro = MicroBatches(dense, weights, apart_s=max(0.0, longer_s))
    return LayerCosts(found, dense_s, step.gradient_bytes, micro)


class Clock:
    """Measures calls in turn, on all ranks at once; of each the median, on the slowest rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._calls: list[tuple[str, float, Callable[[], Any]]] = []
        self._rounds: list[list[float]] = []

    def add(self, name: str, size: float, call: Callable[[], Any]) -> None:
        self._calls.append((name, size, call))

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self._calls}

    def round(self) -> None:
        """Every call once."""
        self._rounds.append([self.seconds(call) for _, _, call in self._calls])

    def medians(self) -> dict[str, list[tuple[float, float]]]:
        """(size, seconds) of all calls by name, over all rounds but the first. Collective."""
        every = np.array(all_gather_object(self._topology.world, self._rounds[1:]))  # [ranks, rounds, calls]
        medians = np.median(every.max(0), 0)
        found: dict[str, list[tuple[float, float]]] = {}
        for (name, size, _), seconds in zip(self._calls, medians, strict=True):
            found.setdefault(name, []).append((size, float(seconds)))
        return found

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one call that all ranks begin together; on this rank."""
        all_reduce(self._topology.world, torch.zeros(1), operation="start of a measurement")
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _all_to_all(group: Group, size: int) -> Callable[[], Any]:
    rows = torch.zeros(group.size, size // 4 // group.size)
    return lambda: all_to_all_rows(group, rows, [1] * group.size, [1] * group.size)
