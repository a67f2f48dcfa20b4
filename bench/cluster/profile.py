"""What collectives and computation take in a setting, measured there just before the policies are."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.cluster.parts import Computation
from bench.cluster.setting import LIMIT, Setting
from fusedmoe.comm.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_rows,
)
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.schedule.cost import CostModel, Line, fit
from fusedmoe.schedule.workload import Chunks, LayerCosts, StackCosts

_REPEATS = 5


@dataclass(frozen=True)
class Profile:
    """What was measured, the same on every rank.

    `points`: what was fitted, (size, seconds) by name. `one_way_s`: a whole all-to-all over one process group instead
    of one for each direction.
    """

    model: CostModel
    stack: StackCosts
    points: dict[str, list[tuple[float, float]]]
    one_way_s: float

    def to_json(self) -> dict[str, Any]:
        backward = self.stack.layers[0].chunks["backward"]
        return {
            "lines": {name: vars(line) for name, line in self.model.lines.items()},
            "contention": self.model.contention,
            "chunks": {
                phase: {kind: vars(chunks) for kind, chunks in of.items()}
                for phase, of in self.stack.layers[0].chunks.items()
            },
            "dense_s": self.stack.layers[0].dense_s,
            "gradient_bytes": self.stack.layers[0].gradient_bytes,
            "all_to_all": {"duplex_s": backward["dispatch"].seconds(1), "one_process_group_s": self.one_way_s},
            "points": self.points,
        }


def measure(setting: Setting, topology: Topology, computation: Computation) -> Profile:
    """Collective. All ranks measure at the same time, so that what they share is shared as in a step."""
    clock = Clock(topology)
    sent = setting.row_bytes
    gradient = setting.layers * computation.gradient_bytes
    calls: dict[str, tuple[int, Callable[[int], Callable[[], Any]]]] = {
        "all-to-all/ep": (sent, lambda size: _all_to_all(topology.ep, size)),
        "all-reduce/dp": (gradient, lambda size: lambda: all_reduce(topology.dp, torch.zeros(size // 4))),
    }
    if setting.esp > 1:
        calls["all-gather/esp"] = (sent * setting.esp, lambda size: _all_gather(topology.esp, size))
        calls["reduce-scatter/esp"] = (sent * setting.esp, lambda size: _reduce_scatter(topology.esp, size))
    for name, (whole, call) in calls.items():
        for part in (LIMIT, 4, 2, 1):
            clock.add(name, whole / part, call(whole // part))
    compute = _compute_calls(setting, computation)
    for (name, part), work in compute.items():
        clock.add(name, part, work)
    one_way = Topology.from_sizes(ep=2, esp=setting.esp, mp=setting.esp, ranks_per_node=setting.ranks_per_node)
    clock.add("one way", sent, _all_to_all(one_way.ep, sent))
    points = clock.medians()
    lines = {name: fit(points[name]) for name in calls}
    products = [(setting.expert_flop / 2 * part, seconds / 2) for part, seconds in points["expert forward"]]
    lines["gemm"] = fit(products)
    contention = _contention(setting, topology, clock, lines) if setting.esp > 1 else 1.0
    model = CostModel(lines, contention, setting.name)
    layer = _layer_costs(setting, computation, lines, points)
    stack = StackCosts((layer,) * setting.layers, lines["all-reduce/dp"], contention)
    return Profile(model, stack, points, points["one way"][0][1])


def _layer_costs(
    setting: Setting, computation: Computation, lines: dict[str, Line], points: dict[str, list[tuple[float, float]]]
) -> LayerCosts:
    def chunks(line: Line, volume: float) -> Chunks:
        return Chunks(max(0.0, line.alpha_s), line.beta_s * volume)

    sent, gathered = setting.row_bytes, setting.row_bytes * setting.esp
    found: dict[str, dict[str, Chunks]] = {}
    for phase in ("forward", "backward"):
        found[phase] = {
            "dispatch": chunks(lines["all-to-all/ep"], sent),
            "expert": chunks(fit(points[f"expert {phase}"]), 1.0),
            "combine": chunks(lines["all-to-all/ep"], sent),
        }
        if setting.esp > 1:
            found[phase]["all-gather"] = chunks(lines["all-gather/esp"], gathered)
            found[phase]["reduce-scatter"] = chunks(lines["reduce-scatter/esp"], gathered)
    forward_s, both_s = (points[f"attention {what}"][0][1] for what in ("forward", "both"))
    dense_s = {"forward": {"attention": forward_s}, "backward": {"attention": max(0.0, both_s - forward_s)}}
    return LayerCosts(found, dense_s, computation.gradient_bytes)


class Clock:
    """Measures calls in turn, on all ranks at once; of each the median, on the slowest rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._calls: list[tuple[str, float, Callable[[], Any]]] = []

    def add(self, name: str, size: float, call: Callable[[], Any]) -> None:
        self._calls.append((name, size, call))

    def medians(self) -> dict[str, list[tuple[float, float]]]:
        """(size, seconds) of all calls by name. Collective."""
        seconds: list[list[float]] = [[] for _ in self._calls]
        for repeat in range(1 + _REPEATS):  # the first is not counted
            for number, (_, _, call) in enumerate(self._calls):
                taken = self.seconds(call)
                if repeat:
                    seconds[number].append(taken)
        every = all_gather_object(self._topology.world, seconds)
        found: dict[str, list[tuple[float, float]]] = {}
        for number, (name, size, _) in enumerate(self._calls):
            slowest = [max(of) for of in zip(*(rank[number] for rank in every), strict=True)]
            found.setdefault(name, []).append((size, statistics.median(slowest)))
        return found

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call that all ranks begin together; on this rank."""
        all_reduce(self._topology.world, torch.zeros(1), operation="start of a measurement")
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _contention(setting: Setting, topology: Topology, clock: Clock, lines: dict[str, Line]) -> float:
    """The share of its speed that a link keeps while the other one is in use: two streams of equal length, together."""
    inter = _all_to_all(topology.ep, setting.row_bytes)
    alone_s = lines["all-to-all/ep"].seconds(setting.row_bytes)
    size = max(4096, int(lines["all-gather/esp"].amount(alone_s / 2)) // 4096 * 4096)
    gather = _all_gather(topology.esp, size)

    def intra() -> None:
        gather()
        gather()

    def together() -> None:
        other = threading.Thread(target=intra)
        other.start()
        inter()
        other.join()

    slower = []
    for _ in range(_REPEATS):
        alone = max(_slowest(topology, clock.seconds(inter)), _slowest(topology, clock.seconds(intra)))
        slower.append(alone / _slowest(topology, clock.seconds(together)))
    return min(1.0, statistics.median(slower))


def _slowest(topology: Topology, seconds: float) -> float:
    return float(all_reduce(topology.world, torch.tensor([seconds], dtype=torch.float64), "max").item())


def _compute_calls(setting: Setting, computation: Computation) -> dict[tuple[str, float], Callable[[], Any]]:
    """Parts of the computation by name and share of the whole."""
    capacity, local = setting.S // setting.E, setting.E // 2
    x_SM = torch.randn(setting.S, setting.M)

    def both() -> None:
        computation.attention(0, x_SM)
        computation.attention_backward(0, x_SM)

    calls: dict[tuple[str, float], Callable[[], Any]] = {
        ("attention forward", 1.0): lambda: computation.attention(0, x_SM),
        ("attention both", 1.0): both,
    }
    for part in (LIMIT, 4, 2, 1):
        rows = torch.randn(setting.ranks, local, capacity // part, setting.M)
        slots = slice(0, capacity // part)
        calls["expert forward", 1 / part] = lambda rows=rows, slots=slots: computation.experts(0, rows, slots)
        calls["expert backward", 1 / part] = lambda rows=rows, slots=slots: computation.experts_backward(0, rows, slots)
    return calls


def _all_to_all(group: Group, size: int) -> Callable[[], Any]:
    rows = torch.zeros(group.size, size // 4 // group.size)
    return lambda: all_to_all_rows(group, rows, [1] * group.size, [1] * group.size)


def _all_gather(group: Group, size: int) -> Callable[[], Any]:
    """`size`: of what is gathered."""
    rows = torch.zeros(1, size // 4 // group.size)
    return lambda: all_gather_rows(group, rows, [1] * group.size)


def _reduce_scatter(group: Group, size: int) -> Callable[[], Any]:
    rows = torch.zeros(group.size, size // 4 // group.size)
    return lambda: reduce_scatter_rows(group, rows, [1] * group.size)
