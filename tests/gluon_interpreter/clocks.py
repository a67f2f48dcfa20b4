"""Vector clocks of every memory access, which define the order of events.

A clock holds the number of past events of each actor. Actors are partitions and, because they complete late, the
copies and products that a partition starts (such as "cp.async 2"), each in its order of completion.
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
    """The clock of a partition, or of a barrier on its behalf.

    Attributes:
        seen: past events.
        fenced: the part of `seen` that tensor cores may read and bulk copies may overwrite, if threads wrote it.
            Only the thread's own fence extends it: a fence in another thread, after the barrier, does not count.
        fenced_by_reader: the part of `seen` that the partition has fenced after it has waited for it. Valid for the
            partition's own products and bulk copies only.
        fencing: the events each thread has fenced for itself. A thread that arrives at a barrier for all threads
            carries the fences of the other threads only if they have synchronized.
        met: the events all threads had seen at their last synchronization.
        known_to_one: events that one thread has waited for and the others have not.
    """

    seen: Ticks = field(default_factory=dict)
    fenced: Ticks = field(default_factory=dict)
    fencing: Ticks = field(default_factory=dict)
    met: Ticks = field(default_factory=dict)
    known_to_one: Ticks = field(default_factory=dict)
    fenced_by_reader: Ticks = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        join(self.seen, other.seen)
        join(self.fenced, other.fenced)

    def copy(self) -> Clock:
        return Clock(dict(self.seen), dict(self.fenced))

    def fence(self, actors: tuple[str, ...]) -> None:
        """Fence for the async proxy, separately for each thread: its own writes, and all that it has waited for.

        `actors`: the partition's own, whose writes are each thread's own until the threads synchronize. The threads
        have all waited for those of other partitions.
        """
        join(self.fencing, {actor: self.seen[actor] for actor in actors if actor in self.seen})
        join(self.fenced_by_reader, {actor: tick for actor, tick in self.seen.items() if actor not in actors})

    def has_fenced(self, actor: str, tick: int) -> bool:
        return max(self.fenced.get(actor, 0), self.fenced_by_reader.get(actor, 0)) >= tick

    def meet(self) -> None:
        """Synchronize all threads of the partition."""
        join(self.fenced, self.fencing)
        join(self.seen, self.known_to_one)
        self.met = dict(self.seen)

    def of_one(self, actors: tuple[str, ...]) -> Clock:
        """The clock that one thread carries to a barrier.

        It covers these actors, which act for all threads, only up to the threads' last synchronization.
        """
        known = {actor: tick for actor, tick in self.seen.items() if actor not in actors}
        return Clock(known | {actor: self.met[actor] for actor in actors if actor in self.met}, dict(self.fenced))
