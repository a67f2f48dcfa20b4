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
        fenced: that part of it which tensor cores may read, had threads written it, and over which bulk copies may
            write. The thread's own fence adds to it: a fence in another, after the barrier, is not relied on.
        fencing: what each thread has fenced for itself. Where one arrives at a barrier for all of them it does not
            speak for the others' fences, unless they have waited for each other.
        met: what all threads had seen when they last waited for each other.
        known_to_one: what one thread has waited for and the others have not heard of.
    """

    seen: Ticks = field(default_factory=dict)
    fenced: Ticks = field(default_factory=dict)
    fencing: Ticks = field(default_factory=dict)
    met: Ticks = field(default_factory=dict)
    known_to_one: Ticks = field(default_factory=dict)

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
        join(self.seen, self.known_to_one)
        self.met = dict(self.seen)

    def of_one(self, actors: tuple[str, ...]) -> Clock:
        """What one thread speaks for when it arrives at a barrier: of what these actors do, who are all threads
        together, only what came before they last waited for each other."""
        known = {actor: tick for actor, tick in self.seen.items() if actor not in actors}
        return Clock(known | {actor: self.met[actor] for actor in actors if actor in self.met}, dict(self.fenced))
