"""What collectives and computation take in a setting, measured there just before the policies are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.cluster.parts import Computation
from bench.cluster.setting import LIMIT, Setting
from fusedmoe.comm.collectives import all_gather_object, all_reduce, all_to_all_rows
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.profile import line_through, profile
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.timeline import PHASES
from fusedmoe.schedule.workload import Chunks, LayerCosts, StackCosts

_BUDGET_S = 20.0
_REPEATS = 5


@dataclass(frozen=True)
class Profile:
    """What was measured, the same on every rank. `points`: (size, seconds) by name."""

    model: CostModel
    stack: StackCosts
    seconds: float
    points: Mapping[str, Sequence[tuple[float, float]]]

    def to_json(self) -> dict[str, Any]:
        layer = self.stack.layers[0]
        return {
            "seconds": self.seconds,
            "lines": {name: vars(line) for name, line in self.model.lines.items()},
            "contention": self.model.contention,
            "chunks": {phase: {kind: vars(chunks) for kind, chunks in layer.chunks[phase].items()} for phase in PHASES},
            "dense_s": layer.dense_s,
            "gradient_bytes": layer.gradient_bytes,
            "points": self.points,
        }


class Profiler:
    """Collectives, matrix products and contention by the library's profiler; what computes in a step by itself, in the
    sizes that it has there, as often as `round` is called. Of an emulated accelerator also the matrix products.

    All ranks measure at the same time, so that what they share is shared as in a step. Everything is collective.
    """

    def __init__(self, setting: Setting, topology: Topology, computation: Computation) -> None:
        self._setting, self._computation = setting, computation
        self._found = profile(topology, torch.device("cpu"), budget_s=_BUDGET_S, machine=setting.name)
        self._clock = Clock(topology)
        for name, part, call in _parts(setting, computation):
            self._clock.add(name, part, call)
        one_way = Topology.from_sizes(ep=2, esp=setting.esp, mp=setting.esp, ranks_per_node=setting.ranks_per_node)
        for name, group in (("all-to-all", topology.ep), ("all-to-all over one process group", one_way.ep)):
            self._clock.add(name, setting.row_bytes, _all_to_all(group, setting.row_bytes))
        for _ in range(1 + _REPEATS):  # the first is not counted
            self._clock.round()

    def round(self) -> None:
        """Measures every part once more: machines are not always equally fast."""
        self._clock.round()

    def profile(self) -> Profile:
        """By the medians so far."""
        setting, found, points = self._setting, self._found, self._clock.medians()
        model = found.costs
        if setting.emulated_flops is not None:
            products = [(setting.expert_flop / 2 * part, seconds / 2) for part, seconds in points["expert forward"]]
            model = replace(model, lines={**model.lines, "gemm": line_through(products)})
        layer = _layer_costs(setting, self._computation, model, points)
        stack = StackCosts((layer,) * setting.layers, model.line("all-reduce/dp"), model.contention)
        return Profile(model, stack, found.seconds, {**found.points, **points})


def _layer_costs(
    setting: Setting, computation: Computation, model: CostModel, points: Mapping[str, list[tuple[float, float]]]
) -> LayerCosts:
    def chunks(line: Line, volume: float) -> Chunks:
        return Chunks(line.alpha_s, line.beta_s * volume)

    sent, gathered = setting.row_bytes, setting.row_bytes * setting.esp
    found: dict[str, dict[str, Chunks]] = {}
    for phase in PHASES:
        exchange = chunks(model.line("all-to-all/ep"), sent)
        expert = chunks(line_through(points[f"expert {phase}"]), 1.0)
        found[phase] = {"dispatch": exchange, "expert": expert, "combine": exchange}
        if setting.esp > 1:
            found[phase]["all-gather"] = chunks(model.line("all-gather/esp"), gathered)
            found[phase]["reduce-scatter"] = chunks(model.line("reduce-scatter/esp"), gathered)
    forward_s, both_s = (points[f"attention {what}"][0][1] for what in ("forward", "both"))
    dense_s = {"forward": {"attention": forward_s}, "backward": {"attention": max(0.0, both_s - forward_s)}}
    return LayerCosts(found, dense_s, computation.gradient_bytes)


class Clock:
    """Measures calls in turn, on all ranks at once; of each the median, on the slowest rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._calls: list[tuple[str, float, Callable[[], Any]]] = []
        self._rounds: list[list[float]] = []

    def add(self, name: str, size: float, call: Callable[[], Any]) -> None:
        self._calls.append((name, size, call))

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
        """Of one call that all ranks begin together; on this rank."""
        all_reduce(self._topology.world, torch.zeros(1), operation="start of a measurement")
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _parts(setting: Setting, computation: Computation) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """What computes: its name, the share of the whole, and what does it."""
    capacity, local = setting.S // setting.E, setting.E // 2
    x_SM = torch.randn(setting.S, setting.M)

    def both() -> None:
        computation.attention(0, x_SM)
        computation.attention_backward(0, x_SM)

    yield "attention forward", 1.0, partial(computation.attention, 0, x_SM)
    yield "attention both", 1.0, both
    for part in (LIMIT, 4, 2, 1):
        rows, slots = torch.randn(setting.ranks, local, capacity // part, setting.M), slice(0, capacity // part)
        yield "expert forward", 1 / part, partial(computation.experts, 0, rows, slots)
        yield "expert backward", 1 / part, partial(computation.experts_backward, 0, rows, slots)


def _all_to_all(group: Group, size: int) -> Callable[[], Any]:
    rows = torch.zeros(group.size, size // 4 // group.size)
    return lambda: all_to_all_rows(group, rows, [1] * group.size, [1] * group.size)
