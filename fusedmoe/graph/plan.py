"""Planning a captured pass: one rank decides, all do the same.

First all instructions are put in order, weight gradients beside all-to-alls; then, forward, ranges of instructions are
split. What the first rank has decided is kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusedmoe.comm.topology import Topology
from fusedmoe.graph.agree import Meeting, resolve
from fusedmoe.graph.costs import (
    Costs,
    Measured,
    Points,
    load_numbers,
    measure_points,
    node_s,
    point_sizes,
    start_s,
)
from fusedmoe.graph.instructions import Instructions, bytes_of, computes, group_of, is_all_to_all, is_start
from fusedmoe.graph.micro import Range, chosen_ranges, rewrite
from fusedmoe.graph.report import Collective, Pipelined, Report
from fusedmoe.graph.weights import gaps_of, ordered, place, reorder, skeleton
from fusedmoe.runtime.cache import cache_dir, fingerprint, machine_facts, read, write
from fusedmoe.runtime.progress import WorkBar

Show = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """How passes are planned; see `Backend`."""

    parts: int
    groups: int
    reach: int | None
    timeout_s: float


def planned(
    module: fx.GraphModule, phase: str, gradients: Collection[fx.Node], settings: Settings, given: Costs | None
) -> Report:
    """Plans a pass that has all-to-alls and rewrites its graph. Collective over the ranks of the graph's groups.

    Args:
        gradients: results of the graph that are gradients of parameters.
        given: costs that are not to be measured.
    """
    graph = module.graph
    of = Instructions(graph)
    if phase != "backward":  # its order is the same whatever things cost
        reorder(graph, of, ordered(of, skeleton(of, gradients, _nothing), {}))
        of = Instructions(graph)
    all_to_alls = [of.nodes[start] for start in of.starts if is_all_to_all(of.nodes[start])]
    groups = list(dict.fromkeys(group_of(of.nodes[start]) for start in of.starts))
    meeting = Meeting(groups, settings.timeout_s)
    meeting.same(_structure(of))
    sizes = _sizes(of)
    alike = len(set(meeting.all(hashlib.sha256(sizes.encode()).hexdigest()))) == 1
    splits = settings if alike and phase != "backward" else None
    device = all_to_alls[0].meta["val"].device
    points = None if given is not None else _points(meeting, all_to_alls, device)
    path = None
    if points is not None:
        facts = machine_facts(Topology(), device, torch.float32) | {"settings": asdict(settings), "alike": alike}
        facts |= {"phase": phase, "graph": sizes, "points": asdict(points), "gradients": sorted(map(str, gradients))}
        path = cache_dir() / f"graph-{fingerprint(facts)}.json"
    kept = []

    def decide() -> str:
        text = read(path) if path is not None else None
        if text is not None and _valid(text):
            kept.append(True)
            return text
        with WorkBar(f"planning the {phase} pass") as bar:
            costs = given if points is None else Measured.load(points, device)
            assert costs is not None
            text = json.dumps(_decided(of, gradients, costs, splits, bar.show))
        if path is not None:
            assert isinstance(costs, Measured)
            costs.save()
            write(path, text, "what was planned")
        return text

    plan: dict[str, Any] = json.loads(meeting.decided(decide))
    beside = {int(start): units for start, units in plan["beside"].items()}
    bare = skeleton(of, gradients, _nothing)
    report = _report(of, phase, plan, bare.units, beside)
    if phase == "backward":
        reorder(graph, of, ordered(of, bare, beside))
    for one in plan["ranges"]:
        rewrite(graph, of, Range(one["start"], one["stop"], one["parts"], one["axes"], one["before"]))
    graph.lint()
    report.cached = bool(kept)
    report.order = tuple(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))
    return report


def _nothing(node: fx.Node) -> float:
    return 0.0


def _decided(
    of: Instructions, gradients: Collection[fx.Node], costs: Costs, split: Settings | None, show: Show
) -> dict[str, Any]:
    """The plan, as what JSON can hold. `split`: how ranges are split; None: not at all."""
    known: dict[fx.Node, float] = {}

    def seconds(node: fx.Node) -> float:
        if node not in known:
            known[node] = node_s(costs, node)
            show(len(known), len(of.nodes))
        return known[node]

    bare = skeleton(of, gradients, seconds)
    starts, gaps = gaps_of(of, bare, lambda node: start_s(costs, node))
    placed = place(gaps, [sum(seconds(node) for node in of.of(unit)) for unit in bare.units])
    beside: dict[int, list[int]] = {start: [] for start in starts}
    for unit, number in enumerate(placed):
        if number is not None:
            beside[starts[number]].append(unit)
    ranges = []
    if split is not None and split.parts > 1:
        ranges = chosen_ranges(
            of, seconds, lambda start: bare.due_s.get(start, 0.0), costs, split.parts, split.groups, split.reach, show
        )
    collectives = {}
    for start in of.starts:
        if is_all_to_all(of.nodes[start]):
            weights_s = sum(seconds(one) for unit in beside.get(start, ()) for one in of.of(bare.units[unit]))
            within = any(one.start <= start < one.stop for one, _ in ranges)
            due_s = 0.0 if within else bare.due_s.get(start, 0.0) + weights_s
            collectives[start] = (start_s(costs, of.nodes[start]), due_s)
    pipelined = [one._asdict() | {"report": vars(what)} for one, what in ranges]
    return {"beside": beside, "collectives": collectives, "ranges": pipelined}


def _report(
    of: Instructions, phase: str, plan: dict[str, Any], units: list[int], beside: dict[int, list[int]]
) -> Report:
    def names(numbers: Collection[int]) -> tuple[str, ...]:
        units_of = ([node.name for node in of.of(units[number]) if computes(node)] for number in numbers)
        return tuple(" + ".join(found) for found in units_of)

    report = Report(phase, len(of.nodes))
    for text, (seconds, beside_s) in plan["collectives"].items():
        node = of.nodes[int(text)]
        weights = names(beside.get(int(text), ()))
        report.collectives.append(Collective(node.name, bytes_of(node), seconds, beside_s, weights))
    report.ranges = [Pipelined(**one["report"]) for one in plan["ranges"]]
    used = {unit for found in beside.values() for unit in found}
    report.leftover = names([number for number in range(len(units)) if number not in used])
    return report


def _structure(of: Instructions) -> str:
    """The graph without its sizes and groups, the same on ranks that go the same way through a model."""
    lines = []
    for index, node in enumerate(of.nodes):
        needs = [str(of.place[one]) if one in of.place else "input" for one in node.all_input_nodes]
        lines.append(f"{index} {node.target} {' '.join(needs)}")
    return "\n".join(lines)


def _sizes(of: Instructions) -> str:
    """The graph with its sizes and without its groups."""
    lines = []
    for index, node in enumerate(of.nodes):
        group = group_of(node) if is_start(node) else None
        args = [str(argument) for argument in (*node.args, *node.kwargs.values()) if argument is not group]
        lines.append(f"{index} {node.target} {' '.join(args)} {node.meta.get('val')}")
    return "\n".join(lines)


def _points(meeting: Meeting, all_to_alls: list[fx.Node], device: torch.device) -> Points:
    """Of the first all-to-all's group: known, or measured by all ranks. Collective."""
    handle = resolve(group_of(all_to_alls[0]))
    sizes = point_sizes(max(bytes_of(one.all_input_nodes[0]) for one in all_to_alls))
    facts = machine_facts(Topology(), device, torch.float32)
    hosts = meeting.all(socket.gethostname())
    world = {"size": dist.get_world_size(handle), "backend": dist.get_backend(handle), "hosts": len(set(hosts))}
    path = cache_dir() / f"all-to-all-{fingerprint(facts | {'group': world})}.json"
    known = load_numbers(path) if meeting.leader else {}
    missing = json.loads(meeting.decided(lambda: json.dumps([size for size in sizes if str(size) not in known])))
    if missing:
        with unset_fake_temporarily():
            found = measure_points(handle, device, missing)
        known |= dict(zip(map(str, missing), found, strict=True))
        if meeting.leader:
            write(path, json.dumps(known, indent=0) + "\n", "what all-to-alls take")
    chosen = sorted((int(size), seconds) for size, seconds in known.items())
    return Points(tuple(size for size, _ in chosen), tuple(seconds for _, seconds in chosen)) if chosen else _NONE


# Of ranks that do not decide.
_NONE = Points((1.0,), (0.0,))


def _valid(text: str) -> bool:
    try:
        plan = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(plan, dict) and plan.keys() == {"beside", "collectives", "ranges"}
