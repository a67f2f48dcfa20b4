"""The order of events: partitions that pass a baton, and operations that complete later.

Both are drawn from a seed. The rates of switching and of completion are drawn once per program. This covers varied
orders, including a partition far ahead, and completion as late as possible.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Lock, Thread

from tests.gluon_interpreter.clocks import Clock
from tests.gluon_interpreter.faults import KernelFault

_EVENTS = 40


@dataclass(eq=False)
class Strand:
    """One line of execution: the program before its partitions, or one partition."""

    name: str
    clock: Clock
    weight: float = 1.0
    baton: Lock = field(default_factory=Lock)
    ready: Callable[[], bool] | None = None  # condition it waits for
    waits_for: Callable[[], str] = lambda: ""
    done: bool = False

    def can_run(self) -> bool:
        return not self.done and (self.ready is None or self.ready())

    def tick(self) -> int:
        """Count an event of this strand."""
        self.clock.seen[self.name] = now = self.clock.seen.get(self.name, 0) + 1
        return now


@dataclass(eq=False)
class Late:
    """A started operation: `land` makes it take effect, once `may_land`."""

    what: str
    land: Callable[[], None]
    may_land: Callable[[], bool] = lambda: True


class _Stopped(BaseException):
    """Ends a partition because another one has failed."""


class EventOrder:
    """The order of events of one program; `running` is the current partition."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.running = Strand("start", Clock())
        self.late: list[Late] = []
        self._partitions: list[Strand] = [self.running]
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._failure: BaseException | None = None
        self._changes = random.choice((0.02, 0.2, 0.7))
        self._lands = random.choice((0.0, 0.05, 0.3, 0.9))

    def tell(self, fault: KernelFault) -> None:
        """Add the running partition and the recent events to a fault."""
        fault.partition, fault.events = self.running.name, tuple(self._events)

    def event(self, what: str) -> None:
        """Mark a point before an observable operation, where other events may be inserted."""
        while self.late and self.random.random() < self._lands and self._land_one():
            pass
        if self.random.random() < self._changes:
            self._hand_over()
        self._events.append(f"{self.running.name}: {what}")

    def block(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Block until the condition is true."""
        self.running.ready, self.running.waits_for = ready, waits_for
        if not ready():
            self._hand_over()
        self.running.ready = None

    def land(self, operation: Late) -> None:
        """Complete the operation now, if still pending."""
        if operation in self.late:
            self.late.remove(operation)
            self._events.append(f"{operation.what} takes place")
            operation.land()

    def run(self, functions: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run functions as partitions, which inherit the caller's clock; the caller then joins their clocks."""
        before, self._partitions = self.running, []
        before.clock.meet()
        threads = []
        for name, function in functions:
            partition = Strand(name, before.clock.copy(), weight=self.random.choice((1.0, 1.0, 20.0)))
            partition.baton.acquire()
            self._partitions.append(partition)
            threads.append(Thread(target=self._partition, args=(partition, function, before), name=name, daemon=True))
        for thread in threads:
            thread.start()
        before.baton.acquire()
        self._give(self._next())
        before.baton.acquire()
        before.baton.release()
        if self._failure is not None:
            for partition in self._partitions:
                if not partition.done:
                    partition.baton.release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self.running = before
        for partition in self._partitions:
            partition.clock.meet()
            before.clock.join(partition.clock)

    def _partition(self, partition: Strand, function: Callable[[], None], before: Strand) -> None:
        partition.baton.acquire()
        try:
            if self._failure is None:
                function()
                partition.done = True
                if any(not other.done for other in self._partitions):
                    self._give(self._next())
                    return
        except _Stopped:
            return
        except BaseException as error:
            self._failure = error
        else:
            if self._failure is not None:
                return
        partition.done = True
        before.baton.release()

    def _hand_over(self) -> None:
        this, other = self.running, self._next()
        if other is this:
            return
        self._give(other)
        this.baton.acquire()
        if self._failure is not None:
            raise _Stopped

    def _give(self, other: Strand) -> None:
        self.running = other
        other.baton.release()

    def _next(self) -> Strand:
        """Choose the next partition; if all wait, complete an operation."""
        while True:
            able = [partition for partition in self._partitions if partition.can_run()]
            if able:
                return self.random.choices(able, [partition.weight for partition in able])[0]
            if not self._land_one():
                raise self._deadlock()

    def _land_one(self) -> bool:
        able = [operation for operation in self.late if operation.may_land()]
        if able:
            self.land(self.random.choice(able))
        return bool(able)

    def _deadlock(self) -> KernelFault:
        waiting = (f"{it.name} waits for {it.waits_for()}" for it in self._partitions if not it.done)
        return KernelFault(f"deadlock: {'; '.join(waiting)}")


class InOrder:
    """Operations of each partition that complete late and in order.

    Attributes:
        started: number of operations of each partition.
    """

    def __init__(self, schedule: EventOrder) -> None:
        self.started: defaultdict[str, int] = defaultdict(int)
        self._schedule = schedule
        self._under_way: defaultdict[str, deque[Late]] = defaultdict(deque)

    def next_number(self) -> int:
        """Return the number, from 1, of the running partition's next operation."""
        name = self._schedule.running.name
        self.started[name] += 1
        return self.started[name]

    def start(self, what: str, land: Callable[[], None]) -> None:
        """Add an operation in flight."""
        under_way = self._under_way[self._schedule.running.name]

        def land_first() -> None:
            under_way.popleft()
            land()

        late = Late(what, land_first, lambda: under_way[0] is late)
        under_way.append(late)
        self._schedule.late.append(late)

    def wait(self, outstanding: int) -> int:
        """Complete all but `outstanding` operations of the running partition; return the number of completed ones."""
        name = self._schedule.running.name
        under_way = self._under_way[name]
        while len(under_way) > outstanding:
            self._schedule.land(under_way[0])
        return max(0, self.started[name] - outstanding)
