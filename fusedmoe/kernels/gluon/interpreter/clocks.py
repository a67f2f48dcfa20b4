"""What has come before what: vector clocks of everything that touches memory.

A clock says of each actor how many of its events have come before. Actors are partitions and, as they are late, the
copies and products that a partition starts ("cp.async 2", say), each in the order in which it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Ticks = dict[str, int]


def join(into: Ticks, other: Ticks) -> None:
    for actor, tick in other.items():
        if into.get(actor, 0) < tick:
            into[actor] = tick


@dataclass
class Clock:
    """What a partition, or a barrier for it, knows of.

    Attributes:
        seen: what has come before.
        fenced: that part of it which tensor cores and bulk copies may read, had threads written it. A writer's own
            fence adds to it: a fence in another thread, after the barrier, is not relied on.
        fencing: what each thread has fenced for itself. Where one arrives at a barrier for all of them it does not
            speak for the others' fences, unless they have waited for each other.
    """

    seen: Ticks = field(default_factory=dict)
    fenced: Ticks = field(default_factory=dict)
    fencing: Ticks = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        join(self.seen, other.seen)
        join(self.fenced, other.fenced)

    def copy(self) -> Clock:
        return Clock(dict(self.seen), dict(self.fenced))

    def fence(self, actors: tuple[str, ...]) -> None:
        """What these actors wrote may be read through the async proxy, as far as each thread knows."""
        join(self.fencing, {actor: self.seen[actor] for actor in actors if actor in self.seen})

    def meet(self) -> None:
        """All threads have come this far."""
        join(self.fenced, self.fencing)
