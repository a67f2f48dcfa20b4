"""What collectives and computation take in a setting, measured there just before the policies are."""

from __future__ import annotations

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
from fusedmoe.runtime.profiler import contention_of
from fusedmoe.runtime.profiler import profile as measure
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import CostModel, line_through
from fusedmoe.schedule.observed import Observed
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import observe, refit
from fusedmoe.schedule.step import ChunkedPass, StepSplit, micro_schedule, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import LINKS
from fusedmoe.schedule.timeline import PHASES, Timeline
from fusedmoe.schedule.workload import Workload

# For the library's profiler. Of blocks all that counts is measured again, among the policies.
_BUDGET_S, _BUDGET_OF_BLOCKS_S = 20.0, 6.0
_REPEATS = 3
# Steps that are done to measure what computes: whole, and in as many chunks as may be.
_DEGREES = (1, LIMIT)
# In how many buckets a layer's gradient goes where all-reduces are measured; smaller ones are faster than their line by
# what the link's token bucket lets through unhindered.
_BUCKETS = (1, 2, 4)
# Chunks that travel inside a node and between nodes, alone and at the same time.
_INTER, _INTRA = "inter: D0 D1 D2 D3", "intra: AG0 RS0 AG1 RS1 AG2 RS2 AG3 RS3"
_LINKS = {
    "link between nodes": Plan.parse(_INTER),
    "links inside a node": Plan.parse(_INTRA),
    "both links": Plan.parse("\n".join([_INTER, _INTRA, *(f"after AG{chunk}:" for chunk in range(4))])),
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Profile:
    """What was measured, the same on every rank. `points`: (size, seconds) by name. `seen`: of what computes."""

    model: CostModel
    stack: StepCosts
    seconds: float
    points: Mapping[str, Points]
    seen: Observed

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
            "observed": self.seen.as_dict(),
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
        self._before = _stack(setting, step, self._found.costs)
        self._probes = _probes(self._before)
        self._steps: list[list[list[Timeline]]] = [[] for _ in self._probes]
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
        for plan, steps in zip(self._probes, self._steps, strict=True):
            recorder = Recorder(self._topology.rank)
            self._exchanging.seconds(partial(self._step.run, plan, recorder))
            steps.append(all_gather_object(self._topology.world, recorder.timeline()))

    def profile(self) -> Profile:
        """By the medians so far."""
        setting, found = self._setting, self._found
        seen = Observed()
        for plan, steps in zip(self._probes, self._steps, strict=True):
            seen |= observe(plan, self._before, steps[1:])
        # Of what travels its lines are better: links with buckets let small messages through.
        seen = Observed({sample: s for sample, s in seen.seconds.items() if sample.kind not in LINKS})
        points = {**found.points, **self._exchanging.medians()}
        lines = {**found.costs.lines, "all-to-all/ep": line_through(points["all-to-all"])}
        if setting.blocks:
            lines |= {name: line_through(points[name]) for name in lines if name in self._exchanging.names}
        if setting.emulated_flops is not None:
            products = seen.get("expert", "forward").items()
            lines["gemm"] = line_through([(setting.expert_flop / 2 / count, s / 2) for count, s in products])
        contention = found.costs.contention
        if "both links" in points:
            contention = contention_of(*(points[links][0][1] for links in _LINKS))
        model = replace(found.costs, lines=lines, contention=contention)
        stack = refit(_stack(setting, self._step, model), seen)
        return Profile(model, stack, found.seconds, points, seen)


def _probes(costs: StepCosts) -> list[Plan]:
    """Steps in so many chunks; of blocks also such whose weight gradients are tasks of their own."""
    if costs.can_split:
        splits = [StepSplit(degree, degree, weights=weights) for degree in _DEGREES for weights in (False, True)]
        return [micro_schedule(costs, split).plan() for split in splits]
    passes = ([ChunkedPass(three_queues, degree)] * len(costs.layers) for degree in _DEGREES)
    return [step_plan(costs, of, of) for of in passes]


def _stack(setting: Setting, step: Step, model: CostModel) -> StepCosts:
    """What a step costs by lines alone: a rank's rows go in equal shares to all experts."""
    esp = setting.esp
    layer = Workload(1, setting.S * esp, setting.M, setting.H, setting.E, k=1, ep=setting.ep, esp=esp)
    costs = layer.step_costs(model, [step.gradient_bytes] * setting.layers, layer.volumes(), whole=setting.blocks)
    alike = replace(costs.layers[0], regroup_s=0.0)  # rows lie so that no pass copies those of the other
    return replace(costs, layers=(alike,) * setting.layers)


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
