"""Planning of a captured pass: the first rank decides, and all do the same; with a report for the user.

First all instructions are put in order, weight gradients beside all-to-alls; then ranges of instructions are split.
What the first rank has decided is kept on disk.
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
from fusedmoe.files import cache_dir, read_kept
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.graph.instructions import Instructions, bytes_of, computes, group_of, is_all_to_all, is_start
from fusedmoe.graph.micro_batches import KnownSplits, Pipelined, PlanSettings, chosen_ranges
from fusedmoe.graph.operator_costs import (
    MeasuredCosts,
    OperatorCosts,
    all_to_all_points,
    load_numbers,
    node_s,
    start_s,
)
from fusedmoe.graph.own_places import OwnPlacesCheck
from fusedmoe.graph.rewriting import InstructionRange, rewrite
from fusedmoe.graph.weight_gradients import Skeleton, gaps_of, ordered, place, reorder, skeleton
from fusedmoe.runtime.cache import fingerprint, machine_facts, write
from fusedmoe.runtime.progress import WorkBar

Show = Callable[[int, int], object]


@dataclass
class Collective:
    """One all-to-all of a pass.

    Attributes:
        name: of the node that starts it. `size`: its bytes. `seconds`: what it takes by itself.
        beside_s: predicted, of the computation between its start and its wait; weight gradients are a part of it.
        weights: of each, the names of its instructions, joined by " + ".
    """

    name: str
    size: int
    seconds: float
    beside_s: float = 0.0
    weights: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        return min(self.seconds, self.beside_s)


@dataclass
class PassReport:
    """The plan of one captured pass.

    Attributes:
        phase: "forward", "backward", or "inference".
        instructions: how many the pass has. `collectives`: its all-to-alls, in order, of which those in `ranges` are
            listed by what they take unsplit.
        leftover: weight gradients that run beside no all-to-all.
        seconds: predicted, of the pass.
        planning_s: what planning took. `cached`: whether the plan was found on disk.
        order: the names of the instructions, as they run.
    """

    phase: str
    instructions: int = 0
    collectives: list[Collective] = field(default_factory=list)
    ranges: list[Pipelined] = field(default_factory=list)
    leftover: tuple[str, ...] = ()
    seconds: float = 0.0
    planning_s: float = 0.0
    cached: bool = False
    order: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        """Predicted seconds of all-to-all that computation hides: beside whole ones, and within ranges."""
        within_s = sum(max(0.0, one.whole_s - one.seconds) for one in self.ranges)
        return sum(one.hidden_s for one in self.collectives) + within_s

    def __str__(self) -> str:
        total_s = sum(one.seconds for one in self.collectives)
        found = f", found in {self.planning_s:.2f} s" if not self.cached else ", as planned before"
        lines = [
            f"{self.phase}: {self.instructions} instructions, {len(self.collectives)} all-to-alls of "
            f"{_ms(total_s)}, {_ms(self.hidden_s)} of it hidden, {_ms(self.seconds)} in all by prediction{found}"
        ]
        for one in self.collectives:
            beside = f", beside it {', '.join(map(_short, one.weights))}" if one.weights else ""
            lines.append(f"  {one.name}: {one.size} bytes, {_ms(one.seconds)}, hidden {_ms(one.hidden_s)}{beside}")
        for ranged in self.ranges:
            lines.append(
                f"  {ranged.first} … {ranged.last} in {ranged.chunks} chunks: {ranged.split} of {ranged.count} "
                f"instructions split, {ranged.all_to_alls} all-to-alls, {_ms(ranged.whole_s)} → {_ms(ranged.seconds)}"
            )
        if self.leftover:
            lines.append(f"  beside none: {', '.join(map(_short, self.leftover))}")
        return "\n".join(lines)


def _short(unit: str) -> str:
    names = unit.split(" + ")
    return unit if len(names) < 3 else f"{names[0]} + … + {names[-1]} ({len(names)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def planned(
    module: fx.GraphModule,
    phase: str,
    gradients: Collection[fx.Node],
    settings: PlanSettings,
    given: OperatorCosts | None,
    results: int | None = None,
) -> tuple[PassReport, OwnPlacesCheck | None]:
    """Plans a pass that has all-to-alls and rewrites its graph. Collective over the ranks of the graph's groups.

    Returns the report and, where tokens go through layers in chunks, the check that must run first.

    Args:
        gradients: results of the graph that are gradients of parameters.
        given: costs that are not to be measured.
        results: how many of the graph's results, the first ones, are not kept for the backward pass; None: all.
    """
    graph = module.graph
    instructions = Instructions(graph)
    starts = [instructions.nodes[start] for start in instructions.starts]
    all_to_alls = list(filter(is_all_to_all, starts))
    graph_ranks = GraphRanks(list(dict.fromkeys(map(group_of, starts))), settings.timeout_s)
    structure, sizes = _texts(instructions)
    # Ranks may have different sizes (a last batch, say), but the same collectives, or they would wait for ever.
    graph_ranks.require_same(structure)
    # Where sizes differ nothing is split: a plan's chunks are those of the first rank's sizes.
    alike = len(set(graph_ranks.all(hashlib.sha256(sizes.encode()).hexdigest()))) == 1
    path, costs, kept = None, given, ""
    if given is None:
        # Costs depend on the machine and on how ranks share it: both are part of the files' names.
        device = all_to_alls[0].meta["val"].device
        hosts = graph_ranks.all(socket.gethostname())
        facts = machine_facts(Topology(), device, torch.float32)
        points = all_to_all_points(graph_ranks, all_to_alls, device, facts | {"hosts": len(set(hosts))})
        facts |= {"ranks of hosts": sorted(Counter(hosts).values())}
        own = cache_dir() / f"operators-{fingerprint(facts)}.json"
        costs = MeasuredCosts(points, graph_ranks.from_first(lambda: load_numbers(own)), own)
        # All that the plan depends on; what is left out here would be found by a job that differs in it.
        facts |= {"settings": asdict(settings), "alike": alike, "phase": phase, "graph": sizes}
        facts |= {"points": asdict(points), "gradients": sorted(map(str, gradients))}
        path = cache_dir() / f"graph-{fingerprint(facts)}.json"
        kept = graph_ranks.from_first(lambda: read_kept(path) or "")
    assert costs is not None
    plan: dict[str, Any] = json.loads(kept or "{}")
    bare = skeleton(instructions, gradients, _nothing)
    with WorkBar(f"planning the {phase} pass") as bar:
        show: Show = bar.show if graph_ranks.leader else _nothing
        if not kept:
            seconds = _seconds_of_all(graph_ranks, instructions, costs, show)
            bare = skeleton(instructions, gradients, seconds)
            plan["beside"] = graph_ranks.from_first(partial(_placed, instructions, bare, seconds, costs))
        beside = {int(start): units for start, units in plan["beside"].items()}
        # Weight gradients first, since ranges are made of consecutive instructions, in their final order.
        reorder(graph, instructions, ordered(instructions, bare, beside))
        old, instructions = instructions, Instructions(graph)
        if not kept:
            hidden_s = {
                instructions.place[old.nodes[start]]: due_s
                + sum(seconds(node) for unit in beside.get(start, ()) for node in old.nodes_of(bare.units[unit]))
                for start, due_s in bare.due_s.items()
            }
            chunks, rows = settings.chunks if alike else 1, settings.own_places and phase != "backward"
            settings = replace(settings, chunks=chunks, own_places=rows)
            decide = partial(_decided, instructions, seconds, hidden_s, costs, settings, show, {})
            # The first run asks for seconds of chunks that no rank has measured; the second decides, from agreed ones.
            _measure_together(graph_ranks, costs, decide)
            plan |= graph_ranks.from_first(decide)
            # The first rank alone keeps it: it is the one that is asked when the next job starts.
            if path is not None and graph_ranks.leader:
                assert isinstance(costs, MeasuredCosts)
                costs.save()
                write(path, json.dumps(plan), "what was planned")
    report = _report(old, instructions, phase, plan, bare.units, beside)
    chosen = [InstructionRange(*(planned[key] for key in InstructionRange._fields)) for planned in plan["ranges"]]
    # Before the graph is rewritten: the check runs it as captured.
    splits = [(instructions.nodes[one.stop - 1], one.split(instructions), one.chunks) for one in chosen]
    by_rows = [one for one in splits if any(way.by_rows for way in one[1].split.values())]
    check = OwnPlacesCheck(module, by_rows, results, graph_ranks) if by_rows else None
    for instruction_range in chosen:
        rewrite(graph, instructions, instruction_range)
    graph.lint()
    report.cached = bool(kept)
    report.order = tuple(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))
    return report, check


def _nothing(*_: Any) -> float:
    return 0.0


def _measure_together(graph_ranks: GraphRanks, costs: OperatorCosts, run: Callable[[], Any]) -> None:
    """Runs what asks for seconds of operators on all ranks at once, after which they know the same. Collective."""
    # Where costs are given, nothing is to be measured.
    if isinstance(costs, MeasuredCosts):
        graph_ranks.guarded(run)
        costs.agree([json.loads(text) for text in graph_ranks.all(json.dumps(costs.fresh))])


def _seconds_of_all(
    graph_ranks: GraphRanks, instructions: Instructions, costs: OperatorCosts, show: Show
) -> Callable[[fx.Node], float]:
    """Returns the seconds of each instruction, the same on all ranks that captured the same. Collective."""

    def ask() -> dict[fx.Node, float]:
        found = {}
        for node in instructions.nodes:
            found[node] = node_s(costs, node)
            show(len(found), len(instructions.nodes))
        return found

    # All ranks measure at the same time, as they compute in a step: those of one machine share its memory, and one that
    # computes while the others wait is faster.
    _measure_together(graph_ranks, costs, ask)
    return graph_ranks.guarded(ask).__getitem__


def _placed(
    instructions: Instructions, bare: Skeleton, seconds: Callable[[fx.Node], float], costs: OperatorCosts
) -> dict[int, list[int]]:
    """Returns the weight gradients beside each all-to-all."""
    starts, gaps = gaps_of(instructions, bare, partial(start_s, costs))
    beside: dict[int, list[int]] = {start: [] for start in starts}
    for unit, number in enumerate(place(gaps, [sum(map(seconds, instructions.nodes_of(unit))) for unit in bare.units])):
        if number is not None:
            beside[starts[number]].append(unit)
    return beside


def _decided(
    instructions: Instructions,
    seconds: Callable[[fx.Node], float],
    hidden_s: Mapping[int, float],
    costs: OperatorCosts,
    settings: PlanSettings,
    show: Show,
    known: KnownSplits,
) -> dict[str, Any]:
    """Returns the `chosen_ranges` of a pass in order, and its seconds, as JSON can hold them."""
    ranges = chosen_ranges(instructions, seconds, hidden_s, costs, settings, show, known)
    inside = {place for one, _ in ranges for place in range(one.start, one.stop)}
    pipelined = [one._asdict() | {"report": vars(what)} for one, what in ranges]
    seconds_s = sum(what.seconds for _, what in ranges)
    seconds_s += sum(seconds(node) for place, node in enumerate(instructions.nodes) if place not in inside)
    collectives = {}
    for start in instructions.starts:
        if is_all_to_all(instructions.nodes[start]):
            taken_s, beside_s = start_s(costs, instructions.nodes[start]), hidden_s.get(start, 0.0)
            # All-to-alls within ranges are hidden by their chunks, and not by what stands beside them.
            collectives[start] = taken_s, 0.0 if start in inside else beside_s
            seconds_s += 0.0 if start in inside else max(0.0, taken_s - beside_s)
    return {"collectives": collectives, "ranges": pipelined, "seconds": seconds_s}


def _report(
    old: Instructions,
    instructions: Instructions,
    phase: str,
    plan: dict[str, Any],
    units: list[int],
    beside: dict[int, list[int]],
) -> PassReport:
    """Returns the report; `old`: the instructions before they were put in order, as `units` and `beside` count them."""
    names = [" + ".join(node.name for node in old.nodes_of(unit) if computes(node)) for unit in units]
    report = PassReport(phase, len(instructions.nodes), seconds=plan["seconds"])
    for text, (seconds, beside_s) in plan["collectives"].items():
        node = instructions.nodes[int(text)]
        weights = tuple(names[unit] for unit in beside.get(old.place[node], ()))
        report.collectives.append(Collective(node.name, bytes_of(node), seconds, beside_s, weights))
    report.ranges = [Pipelined(**one["report"]) for one in plan["ranges"]]
    used = {unit for found in beside.values() for unit in found}
    report.leftover = tuple(name for unit, name in enumerate(names) if unit not in used)
    return report


def _texts(instructions: Instructions) -> tuple[str, str]:
    """Returns the graph twice: without its sizes and groups, as ranks that take one way through a model have it alike;
    and with its sizes."""
    structure, sizes = [], []
    for index, node in enumerate(instructions.nodes):
        # Of a function of Python its name: its text has an address, which is another one in each process.
        called = node.target.__qualname__ if isinstance(node.target, FunctionType) else node.target
        needs = [str(instructions.place[one]) if one in instructions.place else "input" for one in node.all_input_nodes]
        structure.append(f"{index} {called} {' '.join(needs)}")
        group = group_of(node) if is_start(node) else None
        args = [str(argument) for argument in (*node.args, *node.kwargs.values()) if argument is not group]
        sizes.append(f"{index} {called} {' '.join(args)} {node.meta.get('val')}")
    return "\n".join(structure), "\n".join(sizes)
