"""What was planned for a captured graph, for whoever wants to read it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Collective:
    """One all-to-all of a pass.

    Attributes:
        name: of the node that starts it. `size`: its bytes. `seconds`: what it takes by itself.
        beside_s: predicted, of the computation between its start and its wait; weight gradients are part of it.
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
class Pipelined:
    """Instructions in micro-batches, `first` to `last`. `split` of `count` compute in pieces, the others as a whole.

    `seconds`: predicted, of all of them; `whole_s`: unsplit.
    """

    first: str
    last: str
    parts: int
    split: int
    count: int
    all_to_alls: int
    seconds: float
    whole_s: float


@dataclass
class Report:
    """The plan of one captured pass.

    Attributes:
        phase: "forward", "backward", or "inference".
        instructions: how many the pass has. `collectives`: its all-to-alls, in order, of which those in `ranges` are
            listed by what they take unsplit.
        leftover: weight gradients that run beside no all-to-all.
        planning_s: what planning took. `cached`: whether the plan was found on disk.
        order: the names of the instructions, as they run.
    """

    phase: str
    instructions: int = 0
    collectives: list[Collective] = field(default_factory=list)
    ranges: list[Pipelined] = field(default_factory=list)
    leftover: tuple[str, ...] = ()
    planning_s: float = 0.0
    cached: bool = False
    order: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        """Predicted seconds of all-to-all that computation hides: beside whole ones, and within ranges."""
        return sum(one.hidden_s for one in self.collectives) + sum(
            max(0.0, one.whole_s - one.seconds) for one in self.ranges
        )

    def __str__(self) -> str:
        total_s = sum(one.seconds for one in self.collectives)
        found = f", found in {self.planning_s:.2f} s" if not self.cached else ", as planned before"
        lines = [
            f"{self.phase}: {self.instructions} instructions, {len(self.collectives)} all-to-alls of "
            f"{_ms(total_s)}, {_ms(self.hidden_s)} of it hidden{found}"
        ]
        for one in self.collectives:
            beside = f", beside it {', '.join(map(_short, one.weights))}" if one.weights else ""
            lines.append(f"  {one.name}: {one.size} bytes, {_ms(one.seconds)}, hidden {_ms(one.hidden_s)}{beside}")
        for of in self.ranges:
            lines.append(
                f"  {of.first} … {of.last} in {of.parts} parts: {of.split} of {of.count} instructions split, "
                f"{of.all_to_alls} all-to-alls, {_ms(of.whole_s)} → {_ms(of.seconds)}"
            )
        if self.leftover:
            lines.append(f"  beside none: {', '.join(map(_short, self.leftover))}")
        return "\n".join(lines)


def _short(unit: str) -> str:
    names = unit.split(" + ")
    return unit if len(names) < 3 else f"{names[0]} + … + {names[-1]} ({len(names)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
