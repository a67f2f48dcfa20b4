"""The order of events: partitions that hand over a baton, and operations that end some time later.

Both are drawn from a seed. How often partitions change and how soon operations end is drawn once a program: all manner
of orders come up, those too in which one partition is far ahead or everything ends as late as it can.
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
    """One line of execution: what ran before the partitions were made, or one of these."""

    name: str
    clock: Clock
    weight: float = 1.0
    baton: Lock = field(default_factory=Lock)
    ready: Callable[[], bool] | None = None  # what it waits for
    waits_for: Callable[[], str] = lambda: ""
    done: bool = False

    def can_run(self) -> bool:
        return not self.done and (self.ready is None or self.ready())

    def tick(self) -> int:
        """Counts an event of its own."""
        self.clock.seen[self.name] = now = self.clock.seen.get(self.name, 0) + 1
        return now


@dataclass(eq=False)
class Late:
    """An operation that has been started: `land` makes it take place, once `may_land`."""

    what: str
    land: Callable[[], None]
    may_land: Callable[[], bool] = lambda: True


class _Stopped(BaseException):
    """Ends a partition because another has failed."""


class EventOrder:
    """Runs one program; `running` is the partition whose turn it is."""

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
        """Adds who was running and what came before."""
        fault.partition, fault.events = self.running.name, tuple(self._events)

    def event(self, what: str) -> None:
        """Comes before an operation that others can notice: here something else may come first."""
        while self.late and self.random.random() < self._lands and self._land_one():
            pass
        if self.random.random() < self._changes:
            self._hand_over()
        self._events.append(f"{self.running.name}: {what}")

    def block(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Returns once it is ready."""
        self.running.ready, self.running.waits_for = ready, waits_for
        if not ready():
            self._hand_over()
        self.running.ready = None

    def land(self, operation: Late) -> None:
        """Makes it take place now, unless it has."""
        if operation in self.late:
            self.late.remove(operation)
            self._events.append(f"{operation.what} takes place")
            operation.land()

    def run(self, functions: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Runs all as partitions, which know what this one knows; it goes on when all have ended and knows it too."""
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
        """Whose turn it is; operations end where all wait."""
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
    """Operations that each partition starts, which take place late and one after the other.

    Attributes:
        started: how many each partition has.
    """

    def __init__(self, schedule: EventOrder) -> None:
        self.started: defaultdict[str, int] = defaultdict(int)
        self._schedule = schedule
        self._under_way: defaultdict[str, deque[Late]] = defaultdict(deque)

    def next_number(self) -> int:
        """Returns the number, from 1 on, of what the running partition starts now."""
        name = self._schedule.running.name
        self.started[name] += 1
        return self.started[name]

    def start(self, what: str, land: Callable[[], None]) -> None:
        """Lets it be under way."""
        under_way = self._under_way[self._schedule.running.name]

        def land_first() -> None:
            under_way.popleft()
            land()

        late = Late(what, land_first, lambda: under_way[0] is late)
        under_way.append(late)
        self._schedule.late.append(late)

    def wait(self, outstanding: int) -> int:
        """Lands all of the running partition but so many, and returns how many have ended."""
        name = self._schedule.running.name
        under_way = self._under_way[name]
        while len(under_way) > outstanding:
            self._schedule.land(under_way[0])
        return max(0, self.started[name] - outstanding)
