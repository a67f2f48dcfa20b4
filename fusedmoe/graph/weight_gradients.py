"""Weight gradients beside all-to-alls, and the order of a whole pass (Lancet §4).

A pass runs what the next collective waits for, starts it, and then all that it can before it waits: first what was due
anyway, then the weight gradients that were placed beside this all-to-all, and only then the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.instructions import Instructions, bits, computes, is_all_to_all, is_start, is_wait, union
from fusedmoe.schedule.policies.lancet_plans import Gap, Placement, place_exactly, place_greedily, with_leftovers

# Up to so many choices (a weight gradient and an all-to-all) the exact programme is asked, and for so long.
_EXACT, _LIMIT = 400, 2.0


@dataclass
class Skeleton:
    """The order of a pass without its weight gradients.

    Attributes:
        units: the weight gradients, as sets of instructions that run together: no other instruction lies between them.
        rest: weight gradients in no unit, and what depends on their collectives; they come last.
        order: all other instructions. A negative number −1 − i stands before the first wait for collective `starts[i]`.
        due_s: for each start, seconds of what runs beside it in any case.
        reached: for each start, all that runs before the wait for it.
    """

    units: list[int]
    rest: int
    order: list[int] = field(default_factory=list)
    due_s: dict[int, float] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)


def units_of(instructions: Instructions, gradients: Collection[fx.Node]) -> list[int]:
    """Returns the weight gradients in units: instructions that depend on each other and on the same all-to-alls."""
    # A unit's instructions need nothing between them that is not of the unit, and none of them has a path to or from an
    # all-to-all that another one has not: they can run as one, wherever one of them can.
    free = instructions.weight_gradients(gradients)
    collectives = union(1 << start for start in instructions.starts if is_all_to_all(instructions.nodes[start]))
    seen = 0
    units = []
    for first in bits(free):
        if seen >> first & 1:
            continue
        # All of a unit waits for the same all-to-alls, so that one place in the order suits all of it.
        behind = instructions.ancestors[first] & collectives
        unit, ends = 0, [first]
        while ends:
            index = ends.pop()
            if not (free & ~seen) >> index & 1 or instructions.ancestors[index] & collectives != behind:
                continue
            seen |= 1 << index
            unit |= 1 << index
            near = [*instructions.nodes[index].all_input_nodes, *instructions.nodes[index].users]
            ends += [instructions.place[node] for node in near if node in instructions.place]
        # Views alone hide nothing: they run where they are needed.
        if any(map(computes, instructions.nodes_of(unit))):
            units.append(unit)
    return units


def skeleton(
    instructions: Instructions, gradients: Collection[fx.Node], seconds: Callable[[fx.Node], float]
) -> Skeleton:
    """Returns the order without weight gradients: collectives start as early, and end as late, as can be."""
    units = units_of(instructions, gradients)
    inside = union(units)
    # What comes behind a weight gradient and is none itself, for instance its all-reduce.
    bare = Skeleton(units, union(instructions.descendants[index] for index in bits(inside)) & ~inside)
    later = inside | bare.rest
    done = 0
    pending: list[int] = []

    def run(indices: int) -> None:
        nonlocal done
        for index in bits(indices & ~done):
            bare.order.append(index)
            done |= 1 << index
            # Collectives of a link run one after the other: what is computed now hides the first of them.
            if pending and computes(instructions.nodes[index]):
                bare.due_s[pending[0]] += seconds(instructions.nodes[index])

    def behind_pending() -> int:
        waits = (wait for start in pending for wait in bits(instructions.waits[start]))
        return union(instructions.descendants[wait] | 1 << wait for wait in waits)

    def run_late(indices: int) -> None:
        """Runs these instructions, each wait after all that does not need it."""
        while True:
            run(indices & ~behind_pending())
            # A wait ends the time in which its collective is hidden: the oldest that is needed is waited for first.
            oldest = next((start for start in pending if instructions.waits[start] & indices & ~done), None)
            if oldest is None:
                break
            bare.order.append(-1 - instructions.starts.index(oldest))
            bare.reached[oldest] = done
            pending.remove(oldest)
            run(instructions.waits[oldest] & indices)

    for start in instructions.starts:
        if later >> start & 1:
            continue
        # Only what this collective needs: all else can still hide it.
        run_late(instructions.ancestors[start] & ~later & ~done)
        run(1 << start)
        if instructions.waits[start]:
            pending.append(start)
            bare.due_s[start] = 0.0
        # What would have run by now in the order as captured, and need not wait.
        run(((1 << start) - 1) & ~later & ~done & ~behind_pending())
    run_late(((1 << len(instructions.nodes)) - 1) & ~later & ~done)
    return bare


def gaps_of(
    instructions: Instructions, bare: Skeleton, comm_s: Callable[[fx.Node], float]
) -> tuple[list[int], list[Gap]]:
    """Returns the all-to-alls that are waited for, and of each the seconds that nothing hides yet, with its units."""
    nodes = instructions.nodes
    collectives = union(1 << start | waits for start, waits in instructions.waits.items())
    starts = [start for start in instructions.starts if start in bare.reached and is_all_to_all(nodes[start])]
    gaps = []
    for start in starts:
        beside, late = instructions.beside(start), collectives & ~bare.reached[start]
        allowed = frozenset(
            number
            for number, unit in enumerate(bare.units)
            # No path either way, and no other collective is needed that has not ended by then.
            if not unit & instructions.computing & ~beside
            and not any(instructions.ancestors[index] & late for index in bits(unit))
        )
        gaps.append(Gap(max(0.0, comm_s(nodes[start]) - bare.due_s[start]), allowed))
    return starts, gaps


def place(gaps: Sequence[Gap], seconds: Sequence[float]) -> Placement:
    """Returns the all-to-all beside which each unit runs, leftovers too; exact where choices are few, with OR-Tools."""
    placed = place_greedily(gaps, seconds)
    if 0 < sum(len(gap.allowed) for gap in gaps) <= _EXACT:
        with suppress(ConfigError):  # without OR-Tools the greedy placement stands
            placed = place_exactly(gaps, seconds, limit=_LIMIT)
    return with_leftovers(placed, gaps)


def ordered(instructions: Instructions, bare: Skeleton, beside: dict[int, list[int]]) -> list[int]:
    """Returns the whole order. `beside`: for each start the units beside it; the others come last."""
    done, order = 0, []

    def run(indices: int) -> None:
        nonlocal done
        for index in bits(indices):
            for needed in bits((instructions.ancestors[index] | 1 << index) & ~done):
                order.append(needed)
                done |= 1 << needed

    def start_ready() -> None:
        """Starts the collectives of gradients that are there."""
        for index in bits(bare.rest & ~done):
            needed = instructions.ancestors[index] & ~done
            # Not one that needs what has not run yet, nor one that has to wait.
            ready = is_start(instructions.nodes[index]) and not needed & ~bare.rest
            if ready and not any(map(is_wait, instructions.nodes_of(needed))):
                run(1 << index)

    for index in bare.order:
        if index >= 0:
            run(1 << index)
            continue
        for unit in sorted(beside.get(instructions.starts[-1 - index], ()), key=bare.units.__getitem__):
            run(bare.units[unit])
        start_ready()
    # Units beside no all-to-all hold nothing up at the end.
    run(union(bare.units) & ~done)
    start_ready()
    run((1 << len(instructions.nodes)) - 1)
    return order


def reorder(graph: fx.Graph, instructions: Instructions, order: Sequence[int]) -> None:
    """Puts the nodes of a graph into an order.

    Raises `ConfigError` for one in which an instruction stands before one that it waits for.
    """
    done = 0
    for index in order:
        if early := instructions.ancestors[index] & ~done:
            node, late = instructions.nodes[index], instructions.nodes_of(early)[0]
            raise ConfigError(f"graph: {node.name} stands before {late.name}, for which it waits")
        done |= 1 << index
    # Inputs stay in front, the output behind.
    end = next(iter(reversed(graph.nodes)))
    for index in order:
        end.prepend(instructions.nodes[index])
    graph.lint()
