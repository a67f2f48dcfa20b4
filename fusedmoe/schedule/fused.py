"""What a fused operation takes, which sends and receives rows while it computes.

Its kernels work tile by tile: the product that takes rows computes a tile when its rows have come, and the one that
gives results sends a tile's on when they are computed. So link and products are stages that equal tiles go through, and
take together the longest stage, and one tile of the other. Nothing overlaps but the product that takes the rows, and
the one that gives them:

    forward     signal + [there | up] + signal + [down | back]
    backward    signal + [there | down] + signal + [up | back] + weight gradients

What stands in | takes max(…) + a tile of the shorter one. Nothing else is in the layer: it does all of its road.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.task import FUSED, LINKS
from fusedmoe.schedule.timeline import PHASES
from fusedmoe.schedule.workload import GEMMS, Workload


def fused_s(kind: str, workload: Workload, model: CostModel) -> dict[str, float] | None:
    """Seconds of both passes of a layer by a fused operation, in one chunk: more only add starts and tiles. None where
    the machine's costs know nothing of it.

    A part's bytes travel as fast as its collective takes them by its line (β·n), and no collective has to start: a
    signal for each takes the place of α. Products take what their line says, and FLOP of products are equal.
    """
    first, _, last = FUSED[kind]
    link = LINKS[first]
    if model.fused is None or link not in model.fused.signal_s:
        return None
    layer, tile = workload.layer_costs(model), min(1.0, model.fused.tile_rows / workload.rows)
    found = {}
    for phase in PHASES:
        parts = layer.chunks[phase]
        there, back = parts[first].whole_s, parts[last].whole_s
        # Of the backward pass, half is the weights' gradients.
        whole_s = parts["expert"].whole_s / (1 if phase == "forward" else 2)
        down_s = whole_s / GEMMS[workload.expert]
        up_s = whole_s - down_s
        steps = ((there, up_s), (down_s, back)) if phase == "forward" else ((there, down_s), (up_s, back))
        apart_s = parts["expert"].seconds(1) - whole_s  # all starts, and gradients of weights
        found[phase] = apart_s + 2 * model.fused.signal_s[link] + sum(tiled_s(step, tile) for step in steps)
    return found


def tiled_s(stages_s: Sequence[float], tile: float) -> float:
    """Seconds of all rows, a tile after the other, through stages that take so many for all of them. `tile`: rows of a
    tile as a share of all."""
    longest = max(stages_s)
    return longest + tile * (sum(stages_s) - longest)
