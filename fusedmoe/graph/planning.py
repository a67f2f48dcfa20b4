"""Planning of a captured pass: the first rank decides and caches its decisions on disk; all ranks apply them.

Weight gradients are assigned to all-to-alls and the instructions reordered. Then ranges are split into micro-batches.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fusedmoe.comm.topology import Topology
from fusedmoe.files import cache_dir, read_cache_file
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.graph.instructions import Instructions, bytes_of, group_of, is_all_to_all, is_collective, is_compute
from fusedmoe.graph.micro_batches import PlanSettings, RangeReport, SplitCache, select_ranges
from fusedmoe.graph.operator_costs import (
    MeasuredCosts,
    OperatorCosts,
    all_to_all_s,
    all_to_all_times,
    load_numbers,
    node_s,
)
from fusedmoe.graph.own_places import OwnPlacesCheck
from fusedmoe.graph.rewriting import InstructionRange, rewrite
from fusedmoe.graph.weight_gradients import BaseOrder, assign_units, base_order_of, exposed_gaps, full_order, reorder
from fusedmoe.runtime.cache import fingerprint, machine_facts, write_or_warn
from fusedmoe.runtime.progress import ProgressBar

Show = Callable[[int, int], object]


@dataclass
class AllToAllReport:
    """One all-to-all of a pass.

    Attributes:
        name, size: name of the starting node, and bytes.
        seconds: predicted duration without contention.
        overlapped_s: predicted seconds of computation between start and wait, including weight gradients.
        weights: overlapped weight gradients, each as the names of its instructions joined by " + ".
    """

    name: str
    size: int
    seconds: float
    overlapped_s: float = 0.0
    weights: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        return min(self.seconds, self.overlapped_s)


@dataclass
class PassReport:
    """Plan of one captured pass.

    Attributes:
        phase: "forward", "backward", or "inference".
        collectives: all-to-alls, in order. Inside a range, `seconds` is without chunks and `overlapped_s` is 0.
        ranges: ranges that run in chunks.
        leftover: weight gradients not overlapped with any all-to-all.
        seconds, planning_s: predicted duration of the pass, and seconds spent on planning.
        cached: whether the plan was loaded from disk.
        order: names of the instructions in execution order.
    """

    phase: str
    instructions: int = 0
    collectives: list[AllToAllReport] = field(default_factory=list)
    ranges: list[RangeReport] = field(default_factory=list)
    leftover: tuple[str, ...] = ()
    seconds: float = 0.0
    planning_s: float = 0.0
    cached: bool = False
    order: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        """Return the predicted seconds of all-to-alls hidden by computation, within and outside of ranges."""
        within_s = sum(max(0.0, one.whole_s - one.seconds) for one in self.ranges)
        return sum(one.hidden_s for one in self.collectives) + within_s

    def __str__(self) -> str:
        total_s = sum(one.seconds for one in self.collectives)
        found = f", planned in {self.planning_s:.2f} s" if not self.cached else ", from the plan cache"
        lines = [
            f"{self.phase}: {self.instructions} instructions, {len(self.collectives)} all-to-alls of "
            f"{_ms(total_s)}, {_ms(self.hidden_s)} of it hidden, {_ms(self.seconds)} in all by prediction{found}"
        ]
        for one in self.collectives:
            overlapped = f", overlapped with {', '.join(map(_abbreviate, one.weights))}" if one.weights else ""
            lines.append(f"  {one.name}: {one.size} bytes, {_ms(one.seconds)}, hidden {_ms(one.hidden_s)}{overlapped}")
        for ranged in self.ranges:
            lines.append(
                f"  {ranged.first} … {ranged.last} in {ranged.chunks} chunks: {ranged.split} of {ranged.count} "
                f"instructions split, {ranged.all_to_alls} all-to-alls, {_ms(ranged.whole_s)} → {_ms(ranged.seconds)}"
            )
        if self.leftover:
            lines.append(f"  not overlapped: {', '.join(map(_abbreviate, self.leftover))}")
        return "\n".join(lines)


def _abbreviate(unit: str) -> str:
    names = unit.split(" + ")
    return unit if len(names) < 3 else f"{names[0]} + … + {names[-1]} ({len(names)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def plan_pass(
    module: fx.GraphModule,
    phase: str,
    gradients: Collection[fx.Node],
    settings: PlanSettings,
    given_costs: OperatorCosts | None,
    results: int | None = None,
) -> tuple[PassReport, OwnPlacesCheck | None]:
    """Plan a pass that has all-to-alls and rewrite its graph. Collective over the ranks of the graph's groups.

    Args:
        gradients: outputs of the graph that are gradients of parameters.
        given_costs: costs to use instead of measured costs.
        results: number of leading outputs that are not saved for backward; None: all.
    Returns:
        The report, and the check of the first run if rows run in chunks.
    """
    graph = module.graph
    instructions = Instructions(graph)
    starts = [instructions.nodes[start] for start in instructions.starts]
    all_to_alls = list(filter(is_all_to_all, starts))
    graph_ranks = GraphRanks(list(dict.fromkeys(map(group_of, starts))), settings.timeout_s)
    structure, sizes = _descriptions(instructions)
    graph_ranks.require_same(structure)
    # Sizes may differ between ranks, as in a last batch. Then nothing is split: chunks follow the first rank's sizes.
    same_sizes = len(set(graph_ranks.all_gather(hashlib.sha256(sizes.encode()).hexdigest()))) == 1
    path, costs, cached_text = None, given_costs, ""
    if given_costs is None:
        device = all_to_alls[0].meta["val"].device
        hosts = graph_ranks.all_gather(socket.gethostname())
        facts = machine_facts(Topology(), device, torch.float32)
        points = all_to_all_times(graph_ranks, all_to_alls, device, facts | {"hosts": len(set(hosts))})
        facts |= {"ranks of hosts": sorted(Counter(hosts).values())}
        own = cache_dir() / f"operators-{fingerprint(facts)}.json"
        costs = MeasuredCosts(points, graph_ranks.broadcast_decision(lambda: load_numbers(own)), own)
        facts |= {"settings": asdict(settings), "alike": same_sizes, "phase": phase, "graph": sizes}
        facts |= {"points": points, "gradients": sorted(map(str, gradients))}
        path = cache_dir() / f"graph-{fingerprint(facts)}.json"
        cached_text = graph_ranks.broadcast_decision(lambda: read_cache_file(path) or "")
    assert costs is not None
    plan: dict[str, Any] = json.loads(cached_text or "{}")
    with ProgressBar(f"planning the {phase} pass") as bar:
        show: Show = bar.show if graph_ranks.is_leader else _return_zero
        seconds = _return_zero if cached_text else _instruction_seconds(graph_ranks, instructions, costs, show)
        base_order = base_order_of(instructions, gradients, seconds)
        if not cached_text:
            plan["beside"] = graph_ranks.broadcast_decision(
                partial(_assign_weight_gradients, instructions, base_order, seconds, costs)
            )
        units_of_start = {int(start): units for start, units in plan["beside"].items()}
        # Weight gradients first: ranges are consecutive instructions in the final order.
        reorder(graph, instructions, full_order(instructions, base_order, units_of_start))
        old, instructions = instructions, Instructions(graph)
        if not cached_text:
            hidden_s = {}
            for start, overlap_s in base_order.overlap_s.items():
                units = [base_order.units[unit] for unit in units_of_start.get(start, ())]
                added_s = sum(seconds(node) for unit in units for node in old.nodes_of(unit))
                hidden_s[instructions.position[old.nodes[start]]] = overlap_s + added_s
            chunks, rows = settings.chunks if same_sizes else 1, settings.own_places and phase != "backward"
            settings = replace(settings, chunks=chunks, own_places=rows)
            decide = partial(_decide_ranges, instructions, seconds, hidden_s, costs, settings, show, {})
            # The first run requests costs that no rank has measured yet; the second decides with agreed costs.
            _measure_together(graph_ranks, costs, decide)
            plan |= graph_ranks.broadcast_decision(decide)
            if path is not None and isinstance(costs, MeasuredCosts) and graph_ranks.is_leader:
                costs.save()
                write_or_warn(path, json.dumps(plan), "what was planned")
    report = _report(old, instructions, phase, plan, base_order.units, units_of_start)
    chosen = [InstructionRange(*(planned[key] for key in InstructionRange._fields)) for planned in plan["ranges"]]
    splits = [(instructions.nodes[one.stop - 1], one.split(instructions), one.chunks) for one in chosen]
    by_rows = [one for one in splits if any(op_split.has_rows for op_split in one[1].split.values())]
    check = OwnPlacesCheck(module, by_rows, results, graph_ranks) if by_rows else None
    for instruction_range in chosen:
        rewrite(graph, instructions, instruction_range)
    graph.lint()
    report.cached = bool(cached_text)
    report.order = tuple(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))
    return report, check


def _return_zero(*_: Any) -> float:
    return 0.0


def _measure_together(graph_ranks: GraphRanks, costs: OperatorCosts, run: Callable[[], Any]) -> None:
    """Call `run`, which requests costs, and merge all ranks' measurements; do nothing with given costs. Collective."""
    if isinstance(costs, MeasuredCosts):
        graph_ranks.run_guarded(run)
        costs.merge([json.loads(text) for text in graph_ranks.all_gather(json.dumps(costs.unshared))])


def _instruction_seconds(
    graph_ranks: GraphRanks, instructions: Instructions, costs: OperatorCosts, show: Show
) -> Callable[[fx.Node], float]:
    """Return the seconds of each instruction, equal on ranks with equal graphs. Collective."""

    def request_costs() -> dict[fx.Node, float]:
        found = {}
        for node in instructions.nodes:
            found[node] = node_s(costs, node)
            show(len(found), len(instructions.nodes))
        return found

    # All ranks measure concurrently, as in a step: ranks of one machine share memory bandwidth.
    _measure_together(graph_ranks, costs, request_costs)
    return graph_ranks.run_guarded(request_costs).__getitem__


def _assign_weight_gradients(
    instructions: Instructions, base_order: BaseOrder, seconds: Callable[[fx.Node], float], costs: OperatorCosts
) -> dict[int, list[int]]:
    starts, gaps = exposed_gaps(instructions, base_order, partial(all_to_all_s, costs))
    units_of_start: dict[int, list[int]] = {start: [] for start in starts}
    for unit, number in enumerate(
        assign_units(gaps, [sum(map(seconds, instructions.nodes_of(unit))) for unit in base_order.units])
    ):
        if number is not None:
            units_of_start[starts[number]].append(unit)
    return units_of_start


def _decide_ranges(
    instructions: Instructions,
    seconds: Callable[[fx.Node], float],
    hidden_s: Mapping[int, float],
    costs: OperatorCosts,
    settings: PlanSettings,
    show: Show,
    split_cache: SplitCache,
) -> dict[str, Any]:
    """Choose the ranges to run in chunks.

    Returns a JSON-serializable dict: "ranges" from `select_ranges`; "collectives", the predicted and overlapped seconds
    of each all-to-all by position; and "seconds", the predicted duration of the pass.
    """
    ranges = select_ranges(instructions, seconds, hidden_s, costs, settings, show, split_cache)
    inside = {position for one, _ in ranges for position in range(one.start, one.stop)}
    pipelined = [one._asdict() | {"report": vars(what)} for one, what in ranges]
    seconds_s = sum(what.seconds for _, what in ranges)
    seconds_s += sum(seconds(node) for position, node in enumerate(instructions.nodes) if position not in inside)
    collectives = {}
    for start in instructions.starts:
        if is_all_to_all(instructions.nodes[start]):
            duration_s, overlapped_s = all_to_all_s(costs, instructions.nodes[start]), hidden_s.get(start, 0.0)
            # All-to-alls in ranges are hidden by their chunks, not by neighbouring computation.
            collectives[start] = duration_s, 0.0 if start in inside else overlapped_s
            seconds_s += 0.0 if start in inside else max(0.0, duration_s - overlapped_s)
    return {"collectives": collectives, "ranges": pipelined, "seconds": seconds_s}


def _report(
    old: Instructions,
    instructions: Instructions,
    phase: str,
    plan: dict[str, Any],
    units: list[int],
    units_of_start: dict[int, list[int]],
) -> PassReport:
    """Return the report of a planned pass. `units` and `units_of_start` refer to `old`, the order before planning."""
    names = [" + ".join(node.name for node in old.nodes_of(unit) if is_compute(node)) for unit in units]
    report = PassReport(phase, len(instructions.nodes), seconds=plan["seconds"])
    for text, (seconds, overlapped_s) in plan["collectives"].items():
        node = instructions.nodes[int(text)]
        weights = tuple(names[unit] for unit in units_of_start.get(old.position[node], ()))
        report.collectives.append(AllToAllReport(node.name, bytes_of(node), seconds, overlapped_s, weights))
    report.ranges = [RangeReport(**one["report"]) for one in plan["ranges"]]
    used = {unit for found in units_of_start.values() for unit in found}
    report.leftover = tuple(name for unit, name in enumerate(names) if unit not in used)
    return report


def _descriptions(instructions: Instructions) -> tuple[str, str]:
    """Return descriptions of a graph's operators: with their dependencies, and with their arguments and sizes."""
    structure, sizes = [], []
    for index, node in enumerate(instructions.nodes):
        # The repr of a Python function has an address, which differs between processes.
        called = node.target.__qualname__ if isinstance(node.target, FunctionType) else node.target
        needs = [
            str(instructions.position[one]) if one in instructions.position else "input" for one in node.all_input_nodes
        ]
        structure.append(f"{index} {called} {' '.join(needs)}")
        group = group_of(node) if is_collective(node) else None
        args = [str(argument) for argument in (*node.args, *node.kwargs.values()) if argument is not group]
        sizes.append(f"{index} {called} {' '.join(args)} {node.meta.get('val')}")
    return "\n".join(structure), "\n".join(sizes)
