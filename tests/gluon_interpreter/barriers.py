"""Barriers in shared memory (mbarrier): arrivals and bytes that a phase waits for, and the clocks they carry.

A wait distinguishes only odd phases from even phases. The barrier therefore records which phases each waiter has
passed. Passing the same phase twice, or skipping a phase without an ordering event, is a counting error and raises
before it causes harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.gluon_interpreter.clocks import Clock
from tests.gluon_interpreter.faults import KernelFault
from tests.gluon_interpreter.schedule import EventOrder

_MOST = (1 << 20) - 1  # maximum arrivals and bytes of a barrier


@dataclass(eq=False)
class Barrier:
    """`phase`: number of completed phases; `missing` arrivals and `bytes` of the current phase."""

    name: str
    schedule: EventOrder
    count: int
    phase: int = 0
    bytes: int = 0
    missing: int = field(init=False)
    _made: tuple[str, int] = field(init=False)
    _coming: Clock = field(default_factory=Clock)  # clock of the current phase
    _brought: Clock = field(default_factory=Clock)  # clock of the last phase
    _passed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.count <= _MOST:
            raise KernelFault(f"{self.name} cannot count {self.count} arrivals")
        self.missing = self.count
        self._made = self.schedule.running.name, self.schedule.running.tick()

    def awaits_bulk(self) -> None:
        """Register a bulk copy, which requires an initialized and fenced barrier."""
        actor, tick = self._made
        if self.schedule.running.clock.fenced.get(actor, 0) < tick:
            raise KernelFault(f"a bulk copy may not find {self.name}, initialised without a fence")

    def __str__(self) -> str:
        return f"{self.name} (in phase {self.phase}: {self.missing} arrivals and {self.bytes} bytes missing)"

    def arrive(self, clock: Clock, count: int, bytes: int = 0) -> None:
        """Record arrivals, and expect `bytes` more."""
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
        """Block until the current phase has the other parity. The phase before the first has parity 1."""
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
