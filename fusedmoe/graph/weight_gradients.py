"""Overlap of weight gradients with all-to-alls, and the instruction order of a whole pass (Lancet §4).

Before a pass waits for an all-to-all, it runs independent instructions and the weight gradients assigned to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.instructions import Instructions, is_all_to_all, is_collective, is_compute, is_wait, set_bits, union
from fusedmoe.schedule.policies.lancet_plans import Gap, GapAssignment, place_exactly, place_greedily, place_leftovers

# Solve exactly for up to this many pairs of weight gradient and all-to-all, within this time in seconds.
_MAX_EXACT, _LIMIT = 400, 2.0


@dataclass
class BaseOrder:
    """Order of a pass without its weight gradients.

    Attributes:
        units: weight gradients, as sets of instructions that run consecutively.
        rest: set of the units' dependents that are in no unit, such as the gradients' all-reduce.
        order: all other instructions; −1 − i marks the position before the first wait for collective `starts[i]`.
        overlap_s: for each start, seconds of computation that overlap with its collective, without weight gradients.
        run_before_wait: for each start, the set of instructions that run before its wait.
    """

    units: list[int]
    rest: int
    order: list[int] = field(default_factory=list)
    overlap_s: dict[int, float] = field(default_factory=dict)
    run_before_wait: dict[int, int] = field(default_factory=dict)


def units_of(instructions: Instructions, gradients: Collection[fx.Node]) -> list[int]:
    """Group weight gradients into units: connected instructions that depend on the same all-to-alls."""
    free = instructions.weight_gradients(gradients)
    collectives = union(1 << start for start in instructions.starts if is_all_to_all(instructions.nodes[start]))
    seen = 0
    units = []
    for first in set_bits(free):
        if seen >> first & 1:
            continue
        behind = instructions.ancestors[first] & collectives
        unit, ends = 0, [first]
        while ends:
            index = ends.pop()
            if not (free & ~seen) >> index & 1 or instructions.ancestors[index] & collectives != behind:
                continue
            seen |= 1 << index
            unit |= 1 << index
            near = [*instructions.nodes[index].all_input_nodes, *instructions.nodes[index].users]
            ends += [instructions.position[node] for node in near if node in instructions.position]
        if any(map(is_compute, instructions.nodes_of(unit))):
            units.append(unit)
    return units


def base_order_of(
    instructions: Instructions, gradients: Collection[fx.Node], seconds: Callable[[fx.Node], float]
) -> BaseOrder:
    """Order a pass without weight gradients: collectives start as early and are waited for as late as possible."""
    units = units_of(instructions, gradients)
    inside = union(units)
    base_order = BaseOrder(units, union(instructions.descendants[index] for index in set_bits(inside)) & ~inside)
    later = inside | base_order.rest
    done = 0
    pending: list[int] = []

    def run(indices: int) -> None:
        nonlocal done
        for index in set_bits(indices & ~done):
            base_order.order.append(index)
            done |= 1 << index
            # A link runs one collective at a time: computation hides the oldest pending one.
            if pending and is_compute(instructions.nodes[index]):
                base_order.overlap_s[pending[0]] += seconds(instructions.nodes[index])

    def after_pending() -> int:
        waits = (wait for start in pending for wait in set_bits(instructions.waits[start]))
        return union(instructions.descendants[wait] | 1 << wait for wait in waits)

    def run_late(indices: int) -> None:
        """Run these instructions, each wait after all instructions that do not need it."""
        while True:
            run(indices & ~after_pending())
            # A wait ends the overlap of its collective: first wait for the oldest needed one.
            oldest = next((start for start in pending if instructions.waits[start] & indices & ~done), None)
            if oldest is None:
                break
            base_order.order.append(-1 - instructions.starts.index(oldest))
            base_order.run_before_wait[oldest] = done
            pending.remove(oldest)
            run(instructions.waits[oldest] & indices)

    for start in instructions.starts:
        if later >> start & 1:
            continue
        # Only this collective's dependencies: everything else can still hide it.
        run_late(instructions.ancestors[start] & ~later & ~done)
        run(1 << start)
        if instructions.waits[start]:
            pending.append(start)
            base_order.overlap_s[start] = 0.0
        run(((1 << start) - 1) & ~later & ~done & ~after_pending())
    run_late(((1 << len(instructions.nodes)) - 1) & ~later & ~done)
    return base_order


def exposed_gaps(
    instructions: Instructions, base_order: BaseOrder, comm_s: Callable[[fx.Node], float]
) -> tuple[list[int], list[Gap]]:
    """Return the starts of all-to-alls and, for each, its seconds not hidden yet and the units that may hide them."""
    nodes = instructions.nodes
    collectives = union(1 << start | waits for start, waits in instructions.waits.items())
    starts = [
        start for start in instructions.starts if start in base_order.run_before_wait and is_all_to_all(nodes[start])
    ]
    gaps = []
    for start in starts:
        overlappable, late = instructions.overlappable(start), collectives & ~base_order.run_before_wait[start]
        allowed = frozenset(
            number
            for number, unit in enumerate(base_order.units)
            # No path in either direction, nor a dependency on a collective that has not completed.
            if not unit & instructions.computing & ~overlappable
            and not any(instructions.ancestors[index] & late for index in set_bits(unit))
        )
        gaps.append(Gap(max(0.0, comm_s(nodes[start]) - base_order.overlap_s[start]), allowed))
    return starts, gaps


def assign_units(gaps: Sequence[Gap], seconds: Sequence[float]) -> GapAssignment:
    """Assign units of weight gradients to all-to-alls: optimally for few choices with OR-Tools, else greedily."""
    placed = place_greedily(gaps, seconds)
    if 0 < sum(len(gap.allowed) for gap in gaps) <= _MAX_EXACT:
        with suppress(ConfigError):  # without OR-Tools, keep the greedy placement
            placed = place_exactly(gaps, seconds, limit=_LIMIT)
    return place_leftovers(placed, gaps)


def full_order(instructions: Instructions, base_order: BaseOrder, units_of_start: dict[int, list[int]]) -> list[int]:
    """Return the order of the whole pass. `units_of_start` has the units that run before each wait; others run last."""
    done, order = 0, []

    def run(indices: int) -> None:
        nonlocal done
        for index in set_bits(indices):
            for needed in set_bits((instructions.ancestors[index] | 1 << index) & ~done):
                order.append(needed)
                done |= 1 << needed

    def start_ready() -> None:
        for index in set_bits(base_order.rest & ~done):
            needed = instructions.ancestors[index] & ~done
            # Exclude collectives whose dependencies have not run or that would have to wait.
            ready = is_collective(instructions.nodes[index]) and not needed & ~base_order.rest
            if ready and not any(map(is_wait, instructions.nodes_of(needed))):
                run(1 << index)

    for index in base_order.order:
        if index >= 0:
            run(1 << index)
            continue
        for unit in sorted(units_of_start.get(instructions.starts[-1 - index], ()), key=base_order.units.__getitem__):
            run(base_order.units[unit])
        start_ready()
    run(union(base_order.units) & ~done)
    start_ready()
    run((1 << len(instructions.nodes)) - 1)
    return order


def reorder(graph: fx.Graph, instructions: Instructions, order: Sequence[int]) -> None:
    """Reorder the nodes of a graph. Raises `ConfigError` if an instruction would precede a dependency."""
    done = 0
    for index in order:
        if early := instructions.ancestors[index] & ~done:
            node, late = instructions.nodes[index], instructions.nodes_of(early)[0]
            raise ConfigError(f"graph: {node.name} precedes {late.name}, on which it depends")
        done |= 1 << index
    end = next(iter(reversed(graph.nodes)))
    for index in order:
        end.prepend(instructions.nodes[index])
    graph.lint()
