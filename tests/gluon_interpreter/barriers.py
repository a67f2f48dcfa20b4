"""Barriers in shared memory (mbarrier): arrivals and bytes that a phase waits for, and what those bring along.

A wait tells odd phases from even ones alone. So a barrier knows who waited for which: one that passes by a phase it
knows, or has missed one of which nobody has told it that it is over, has counted wrong, and is told so before it does
harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.gluon_interpreter.clocks import Clock
from tests.gluon_interpreter.faults import KernelFault
from tests.gluon_interpreter.schedule import EventOrder

_MOST = (1 << 20) - 1  # arrivals and bytes that a barrier can count


@dataclass(eq=False)
class Barrier:
    """`phase`: how many are complete; `missing` arrivals and `bytes` of the current one."""

    name: str
    schedule: EventOrder
    count: int
    phase: int = 0
    bytes: int = 0
    missing: int = field(init=False)
    _made: tuple[str, int] = field(init=False)
    _coming: Clock = field(default_factory=Clock)  # what the current phase brings along
    _brought: Clock = field(default_factory=Clock)  # what the last one did
    _passed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.count <= _MOST:
            raise KernelFault(f"{self.name} cannot count {self.count} arrivals")
        self.missing = self.count
        self._made = self.schedule.running.name, self.schedule.running.tick()

    def awaits_bulk(self) -> None:
        """A bulk copy is to arrive, which must find the barrier initialised."""
        actor, tick = self._made
        if self.schedule.running.clock.fenced.get(actor, 0) < tick:
            raise KernelFault(f"a bulk copy may not find {self.name}, initialised without a fence")

    def __str__(self) -> str:
        return f"{self.name} (in phase {self.phase}: {self.missing} arrivals and {self.bytes} bytes missing)"

    def arrive(self, clock: Clock, count: int, bytes: int = 0) -> None:
        """`bytes` more are expected."""
        if count > self.missing:
            raise KernelFault(f"{count} arrivals are too many: {self}")
        self.missing -= count
        self.bytes += bytes
        self._coming.join(clock)
        self._complete()

    def bytes_came(self, clock: Clock, bytes: int) -> None:
        self.bytes -= bytes
        self._coming.join(clock)
        self._complete()

    def _complete(self) -> None:
        if self.missing == 0 and self.bytes < 0:
            raise KernelFault(f"more bytes came than were expected: {self}")
        if self.missing == 0 and self.bytes == 0:
            self._brought, self._coming = self._coming, Clock()
            self.missing = self.count
            self.phase += 1
            self._brought.seen[self.name] = self.phase

    def wait(self, parity: int) -> None:
        """Returns once the current phase is not one of this parity. Before the first there was one of parity 1."""
        if parity not in (0, 1):
            raise KernelFault(f"a phase is 0 or 1, not {parity}: {self}")
        self.schedule.block(lambda: self.phase & 1 != parity, lambda: f"phase {parity} of {self}")
        waiter = self.schedule.running
        last, now = self._passed.get(waiter.name, -1), self.phase - 1
        if waiter.name in self._passed and now == last:
            raise KernelFault(f"wrong phase: it passes a phase that it has passed before, {self}")
        if now > last + 1 and waiter.clock.seen.get(self.name, 0) < now:
            raise KernelFault(f"wrong phase: it has missed a phase, {self}")
        self._passed[waiter.name] = now
        waiter.clock.join(self._brought)
