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
from fusedmoe.graph.instructions import Instructions, bits, computes, is_all_to_all, is_start, is_wait
from fusedmoe.schedule.policies.lancet_plans import Gap, Placement, place_exactly, place_greedily, with_leftovers

# Up to so many choices (a weight gradient and an all-to-all) the exact programme is asked, and for so long.
_EXACT, _LIMIT = 400, 2.0


@dataclass
class Skeleton:
    """The order of a pass without its weight gradients.

    Attributes:
        units: the weight gradients: sets of instructions that go together, since none but them lie between them.
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


def units_of(of: Instructions, gradients: Collection[fx.Node]) -> list[int]:
    """The weight gradients in units: what belongs together and waits for the same all-to-alls.

    A unit's instructions need nothing between them that is not of the unit, and none of them has a path to or from an
    all-to-all that another one has not.
    """
    free = of.weight_gradients(gradients)
    collectives = sum(1 << start for start in of.starts if is_all_to_all(of.nodes[start]))
    seen: dict[int, int] = {}
    units = []
    for first in bits(free):
        if first in seen:
            continue
        behind = of.ancestors[first] & collectives
        unit, ends = 0, [first]
        while ends:
            index = ends.pop()
            if index in seen or not free >> index & 1 or of.ancestors[index] & collectives != behind:
                continue
            seen[index] = first
            unit |= 1 << index
            near = [*of.nodes[index].all_input_nodes, *of.nodes[index].users]
            ends += [of.place[node] for node in near if node in of.place]
        if any(computes(node) for node in of.of(unit)):
            units.append(unit)
    return units


def skeleton(of: Instructions, gradients: Collection[fx.Node], seconds: Callable[[fx.Node], float]) -> Skeleton:
    """The order without weight gradients: collectives as early as they can start, waits as late as they can be."""
    units = units_of(of, gradients)
    inside = 0
    for unit in units:
        inside |= unit
    # What comes behind a weight gradient and is none itself, for instance its all-reduce.
    behind = 0
    for index in bits(inside):
        behind |= of.descendants[index]
    found = Skeleton(units, behind & ~inside)
    later = inside | found.rest
    done = 0
    pending: list[int] = []
    number = {start: place for place, start in enumerate(of.starts)}

    def run(indices: int) -> None:
        nonlocal done
        for index in bits(indices & ~done):
            found.order.append(index)
            done |= 1 << index
            if pending and computes(of.nodes[index]):
                found.due_s[pending[0]] += seconds(of.nodes[index])

    def behind_pending() -> int:
        blocked = 0
        for start in pending:
            for wait in bits(of.waits[start]):
                blocked |= of.descendants[wait] | 1 << wait
        return blocked

    def run_late(indices: int) -> None:
        """Runs these instructions, each wait after all that does not need it."""
        while True:
            run(indices & ~behind_pending())
            wanted = [start for start in pending if of.waits[start] & indices & ~done]
            if not wanted:
                break
            found.order.append(-1 - number[wanted[0]])
            found.reached[wanted[0]] = done
            pending.remove(wanted[0])
            run(of.waits[wanted[0]] & indices)

    for start in of.starts:
        if later >> start & 1:
            continue
        run_late(of.ancestors[start] & ~later & ~done)
        run(1 << start)
        if of.waits[start]:
            pending.append(start)
            found.due_s[start] = 0.0
        # What would have run by now in the order as captured, and need not wait.
        run(((1 << start) - 1) & ~later & ~done & ~behind_pending())
    run_late(((1 << len(of.nodes)) - 1) & ~later & ~done)
    return found


def gaps_of(of: Instructions, bare: Skeleton, comm_s: Callable[[fx.Node], float]) -> tuple[list[int], list[Gap]]:
    """The all-to-alls of a pass with something to wait for, and what of each is left to hide."""
    collectives = sum(1 << start for start in of.starts)
    for waits in of.waits.values():
        collectives |= waits
    starts = [start for start in of.starts if start in bare.reached and is_all_to_all(of.nodes[start])]
    gaps = []
    for start in starts:
        beside, late = of.beside(start), collectives & ~bare.reached[start]
        allowed = frozenset(
            number
            for number, unit in enumerate(bare.units)
            # No path either way, and no other collective is needed that has not ended by then.
            if not unit & of.computing & ~beside and not any(of.ancestors[index] & late for index in bits(unit))
        )
        gaps.append(Gap(max(0.0, comm_s(of.nodes[start]) - bare.due_s[start]), allowed))
    return starts, gaps


def place(gaps: Sequence[Gap], seconds: Sequence[float]) -> Placement:
    """The all-to-all beside which each unit goes, leftovers too; exact where choices are few and OR-Tools is there."""
    placed = place_greedily(gaps, seconds)
    if 0 < sum(len(gap.allowed) for gap in gaps) <= _EXACT:
        with suppress(ConfigError):  # without OR-Tools the greedy placement stands
            placed = place_exactly(gaps, seconds, limit=_LIMIT)
    return with_leftovers(placed, gaps)


def ordered(of: Instructions, bare: Skeleton, beside: dict[int, list[int]]) -> list[int]:
    """The whole order. `beside`: for each start the units beside it; others come last."""
    done, order = 0, []

    def run(index: int) -> None:
        nonlocal done
        for one in bits((of.ancestors[index] | 1 << index) & ~done):
            order.append(one)
            done |= 1 << one

    def start_ready() -> None:
        """Collectives of gradients start as soon as these are there."""
        for index in bits(bare.rest & ~done):
            needed = of.ancestors[index] & ~done
            # Not one that needs what has not run yet, nor one that has to wait.
            if is_start(of.nodes[index]) and not needed & ~bare.rest and not any(map(is_wait, of.of(needed))):
                run(index)

    for index in bare.order:
        if index >= 0:
            run(index)
            continue
        for unit in sorted(beside.get(of.starts[-1 - index], ()), key=lambda one: bare.units[one]):
            for one in bits(bare.units[unit]):
                run(one)
        start_ready()
    left = 0
    for unit in bare.units:
        left |= unit
    for index in bits(left & ~done):
        run(index)
    start_ready()
    for index in range(len(of.nodes)):
        run(index)
    return order


def reorder(graph: fx.Graph, of: Instructions, order: Sequence[int]) -> None:
    """Puts the nodes of a graph into an order.

    Raises `ConfigError` for one in which an instruction stands before one that it waits for.
    """
    done = 0
    for index in order:
        if of.ancestors[index] & ~done:
            late = of.of(of.ancestors[index] & ~done)[0]
            raise ConfigError(f"graph: {of.nodes[index].name} stands before {late.name}, for which it waits")
        done |= 1 << index
    last = None
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        last = node
    for index in order:
        node = of.nodes[index]
        if last is None:
            graph._root.append(node)
        else:
            last.append(node)
        last = node
    graph.lint()
