"""One layer's pass: the orders of its chunks, how long it takes, in how many chunks, and which gradients it hides.

Each function of an order gives the order of every resource for one layer and pass, as `Plan` takes it:

    three_queues    inter D0 D1 AR0 C0 C1    intra AG0 AG1 RS0 RS1     (FSMoE Fig. 3d, spec line F10)
    alternating     inter D0 D1 D2 AR0 C0 C1 C2    intra AG0 AG1 RS0 AG2 RS1 RS2
    one_queue       inter D0 AG0 D1 AG1 AR0 RS0 C0 RS1 C1              (one queue for all communication: Tutel, PipeMoE)

`buckets` are the gradient all-reduces that run in the middle, when the last chunk is on its way to the experts.

How long a pass takes is known in closed form, or else from the simulator. There D, AG, X, RS, C are the seconds of one
chunk's dispatch, all-gather, expert, reduce-scatter and combine, gar those of the gradient all-reduces in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import ALONE, Contention, Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, StageTime, chunk_times, pass_bound_s
from fusedmoe.schedule.task import LINKS, PIPELINE, Task, TaskKind

Orders = dict[str, list[Task]]
Order = Callable[[Collection[str], int, str, int, Iterable[Task]], Orders]


def three_queues(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Orders chunks so that links inside a node and between nodes work at the same time.

    `kinds`: those that a chunk goes through: the parts that the layer has, of `task.PIPELINE`.
    """
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    return {"compute": experts, "intra": gathered + reduced, "inter": [*there, *buckets, *back]}


def alternating(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Orders chunks like `three_queues`, but a chunk is reduced as soon as the one after it is gathered."""
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    # Where the links inside the node are the busiest ones, the last all-gather then holds up no chunk that is ready.
    intra = [*gathered[:1], *_in_turn(gathered[1:], reduced[:-1]), *reduced[-1:]]
    return {"compute": experts, "intra": intra, "inter": [*there, *buckets, *back]}


def one_queue(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Orders chunks so that no two collectives run at the same time; a chunk is gathered as soon as it has arrived."""
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    return {"compute": experts, "inter": [*_in_turn(there, gathered), *buckets, *_in_turn(reduced, back)]}


def _chunks(kinds: Collection[str], degree: int, phase: str, layer: int) -> list[list[Task]]:
    return [[Task(part, chunk, layer, phase) for chunk in range(degree) if part in kinds] for part in PIPELINE]


def _in_turn(first: list[Task], second: list[Task]) -> list[Task]:
    if not (first and second):
        return first or second
    return [task for pair in zip(first, second, strict=True) for task in pair]


def three_queues_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """Returns T(r) of `three_queues` without contention: exact for any times (F11)."""
    # The longest path through the tasks, along chunks and along resources, has r − 1 steps from a chunk to the next,
    # all on the resource whose task is longest; only the path through gar, and the one that goes from the last
    # all-gather to the first reduce-scatter, walk through the chunks twice.
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(
        r * (d + c) + gar,
        chain + (r - 1) * (max(d, ag) + max(rs, c)),
        chain + x + (r - 1) * max(d, ag, x, rs, c),
    )


def one_queue_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """Returns T(r) of `one_queue`: exact for any times where links leave computation alone, by the same argument."""
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(r * chain + gar, chain + x + (r - 1) * max(d + ag, x, rs + c))


class DegreeChoice(NamedTuple):
    """A degree and the seconds that the pass takes with it."""

    degree: int
    seconds: float


def choose_degree(
    chunks: Mapping[str, StageTime],
    gar: float = 0.0,
    *,
    order: Order = three_queues,
    contention: Contention = ALONE,
    limit: int = MAX_DEGREE,
    least: int = 1,
) -> DegreeChoice:
    """Returns the degree from `least` to `limit` with the shortest pass (F12); of several the smallest.

    `chunks`: times of the parts that the layer has. Raises `ConfigError` for a limit below 1.
    """
    if limit < 1:
        raise ConfigError(f"choose_degree: the limit must be at least 1, not {limit}")

    def bound_s(degree: int) -> float:
        times = chunk_times(chunks, degree)
        least_s = pass_bound_s(degree, times, gar, contention)
        # Contention makes no pass shorter.
        return max(least_s, three_queues_s(degree, times, gar)) if order is three_queues else least_s

    # In the order of what a degree takes at least, up to the first where this is longer than the best one found: no
    # later one can win. Where there is a closed form the bound would cost as much as the pass.
    closed = _is_closed(order, contention)
    bounds_s = {degree: 0.0 if closed else bound_s(degree) for degree in range(least, limit + 1)}
    choices: list[DegreeChoice] = []
    best_s = math.inf
    for degree in sorted(bounds_s, key=bounds_s.__getitem__):
        if bounds_s[degree] > best_s * (1 + ROUNDING):
            break
        choices.append(DegreeChoice(degree, pass_s(chunks, degree, gar, order=order, contention=contention)))
        best_s = min(best_s, choices[-1].seconds)
    return min(choice for choice in choices if choice.seconds <= best_s * (1 + ROUNDING))


def pass_s(
    chunks: Mapping[str, StageTime],
    degree: int,
    gar: float = 0.0,
    *,
    order: Order = three_queues,
    contention: Contention = ALONE,
) -> float:
    """Returns the seconds of one layer's pass with this degree."""
    if _is_closed(order, contention):
        closed_s = one_queue_s if order is one_queue else three_queues_s
        return closed_s(degree, chunk_times(chunks, degree), gar)
    plan = _pass_plan(order, tuple(chunks), degree, gar > 0)
    of = {kind: part.seconds(degree) for kind, part in chunks.items()} | {TaskKind.GRADIENT_ALL_REDUCE: gar}
    return makespan(plan, Durations({task: of[task.kind] for task in plan}, contention))


def _is_closed(order: Order, contention: Contention) -> bool:
    """Returns True where an order's pass has a closed form: nothing that it runs at once disturbs each other."""
    if order is one_queue:
        return not any(contention.disturbs(("compute", link)) for link in LINKS.values())
    return order is three_queues and contention == ALONE


@lru_cache(maxsize=1024)
def _pass_plan(order: Order, kinds: tuple[str, ...], degree: int, with_gradient: bool) -> Plan:
    buckets = [Task(TaskKind.GRADIENT_ALL_REDUCE, 0, 1, "backward")] if with_gradient else []
    return Plan.from_orders(order(kinds, degree, "backward", 0, buckets))


class Partition(NamedTuple):
    """Bytes in each layer's two places, by layer; 0: no bucket there. The rest runs at the end."""

    middle: tuple[float, ...]
    beside: tuple[float, ...]
