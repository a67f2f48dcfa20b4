"""What chunks take: of a part of a layer, and of a fused operation, which sends and receives rows while it computes.

A fused operation's kernels work tile by tile: the product that takes rows computes a tile when its rows have come, and
the one that gives results sends a tile's on when they are computed. So links and products are stages that equal tiles
go through, and take together the longest stage, and one tile of every other. Nothing overlaps but the product that
takes the rows, or that gives them:

    dispatch-expert forward       signal + [dispatch | up] + down
    expert-combine forward        up + signal + [down | combine]
    dispatch-expert backward      signal + [dispatch | down] + weight gradients + up

What stands in | takes max(…) + a tile of the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusedmoe.schedule.cost import FusedCosts, LinkUse, Overlap
from fusedmoe.schedule.task import FUSED, LINKS, road_with


@dataclass(frozen=True)
class Chunks:
    """Each of r chunks takes alpha_s + whole_s/r seconds."""

    alpha_s: float
    whole_s: float

    def seconds(self, degree: int) -> float:
        return self.alpha_s + self.whole_s / degree

    def __add__(self, other: Chunks) -> Chunks:
        """One after the other."""
        return Chunks(self.alpha_s + other.alpha_s, self.whole_s + other.whole_s)

    def __mul__(self, times: float) -> Chunks:
        return Chunks(self.alpha_s * times, self.whole_s * times)


@dataclass(frozen=True)
class TiledChunks:
    """Each of r chunks takes alpha_s + signals_s, its weight gradients, and its steps one after the other.

    Attributes:
        alpha_s: starts of the products.
        signals_s: of rows that have come, until the kernel that waits for them goes on; one for each link's part.
        steps: by resource, seconds for all rows; what is in one step goes through it tile by tile.
        tile: rows of a tile, as a share of all rows; a chunk of fewer rows is one tile.
        weights: gradients of weights, beside which nothing travels.
    """

    alpha_s: float
    signals_s: float
    steps: tuple[Mapping[str, float], ...]
    tile: float
    weights: Chunks = Chunks(0.0, 0.0)

    def seconds(self, degree: int) -> float:
        tile = min(1.0, self.tile * degree)
        total = self.alpha_s + self.signals_s + self.weights.seconds(degree)
        for step in self.steps:
            longest = max(step.values())
            total += (longest + tile * (sum(step.values()) - longest)) / degree
        return total

    def overlap(self, degree: int) -> Overlap:
        """What one of so many chunks spends its seconds on."""
        links = {}
        for link in dict.fromkeys(resource for step in self.steps for resource in step if resource != "compute"):
            steps = [step for step in self.steps if link in step]
            work_s = sum(step[link] for step in steps) / degree
            slack_s = sum(max(step.values()) - step[link] for step in steps) / degree
            links[link] = LinkUse(work_s, slack_s)
        computed = sum(step["compute"] for step in self.steps) / degree
        return Overlap(links, self.alpha_s + self.weights.seconds(degree) + computed)


def tiled_parts(
    parts: Mapping[str, Chunks], phase: str, products: int, weights: Chunks, rows: float, costs: FusedCosts
) -> dict[str, TiledChunks]:
    """What each fused operation takes that a machine has for a layer of these parts.

    A part's bytes travel as fast as its collective takes them by its line (β·n), and no collective has to start: a
    signal for each takes the place of α. Products take what their line says. FLOP of products are equal.

    Args:
        parts: of the layer's pass, the expert's weight gradients included.
        products: of the expert's forward pass; the last of them gives the results. Backward, gradients of results meet
            that one first.
        weights: of the expert's backward pass; nothing forward.
        rows: that the rank's experts compute in all chunks.
    """
    expert = parts["expert"] + weights * -1.0
    last = 1 / products if phase == "forward" else (products - 1) / products
    found = {}
    for kind, own in FUSED.items():
        place = own.index("expert")
        links = [LINKS[part] for part in own if part != "expert"]
        if road_with(kind, parts) is not None and costs.signal_s.keys() >= set(links):
            steps = (
                {LINKS[part]: parts[part].whole_s for part in own[:place]} | {"compute": (1 - last) * expert.whole_s},
                {LINKS[part]: parts[part].whole_s for part in own[place + 1 :]} | {"compute": last * expert.whole_s},
            )
            signals_s = sum(costs.signal_s[link] for link in links)
            found[kind] = TiledChunks(expert.alpha_s, signals_s, steps, min(1.0, costs.tile_rows / rows), weights)
    return found
