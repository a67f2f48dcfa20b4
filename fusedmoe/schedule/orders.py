"""The orders in which the chunks of one layer's pass can go through its resources.

Each function gives the order of every resource for one layer and pass, as `Plan` takes it:

    three_queues    inter D0 D1 AR0 C0 C1    intra AG0 AG1 RS0 RS1     (FSMoE Fig. 3d, spec line F10)
    alternating     inter D0 D1 D2 AR0 C0 C1 C2    intra AG0 AG1 RS0 AG2 RS1 RS2
    one_queue       inter D0 AG0 D1 AG1 AR0 RS0 C0 RS1 C1              (one queue for all communication: Tutel, PipeMoE)

`pieces` are the gradient all-reduces that run in the middle, when the last chunk is on its way to the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fusedmoe.schedule.task import PIPELINE, Task

Orders = dict[str, list[Task]]
Order = Callable[[Collection[str], int, str, int, Iterable[Task]], Orders]


def three_queues(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, pieces: Iterable[Task] = ()
) -> Orders:
    """Links inside the node and between nodes work at the same time.

    `kinds`: those that a chunk goes through: the parts that the layer has, of `task.PIPELINE`.
    """
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    return {"compute": experts, "intra": gathered + reduced, "inter": [*there, *pieces, *back]}


def alternating(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, pieces: Iterable[Task] = ()
) -> Orders:
    """As `three_queues`, but a chunk is reduced as soon as the one after it is gathered.

    Where the links inside the node are the busiest ones, the last all-gather holds up no chunk that is ready.
    """
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    intra = [*gathered[:1], *_in_turn(gathered[1:], reduced[:-1]), *reduced[-1:]]
    return {"compute": experts, "intra": intra, "inter": [*there, *pieces, *back]}


def one_queue(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, pieces: Iterable[Task] = ()
) -> Orders:
    """No two collectives at the same time; a chunk is gathered as soon as it has arrived."""
    there, gathered, experts, reduced, back = _chunks(kinds, degree, phase, layer)
    return {"compute": experts, "inter": [*_in_turn(there, gathered), *pieces, *_in_turn(reduced, back)]}


def _chunks(kinds: Collection[str], degree: int, phase: str, layer: int) -> list[list[Task]]:
    """The tasks of each part."""
    return [[Task(part, chunk, layer, phase) for chunk in range(degree) if part in kinds] for part in PIPELINE]


def _in_turn(first: list[Task], second: list[Task]) -> list[Task]:
    if not (first and second):
        return first or second
    return [task for pair in zip(first, second, strict=True) for task in pair]
