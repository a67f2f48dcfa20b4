"""Plans: a schedule as a value. Tasks, what each waits for, and one order per resource.

    plan = Plan.parse('''
        compute: E0 E1
        intra: AG0 AG1 RS0 RS1
        inter: D0 D1 C0 C1
    ''')

A resource runs one task at a time, in its order; a task starts when the one before it on its resource and all that it
waits for have ended. Every rank computes the same plan from the same numbers, so every rank issues its collectives in
the same order, and no race decides it.

A fused operation computes and sends at once: it stands on compute and on its link, and starts when it has come to the
front on both.

    compute: DEC0 DEC1
    inter: DEC0 DEC1

Which resource a task is on, the plan says: a policy that has a single queue for communication puts all-gathers on
`inter`. What a task waits for follows from its kind, chunk, layer and phase (`task.standard_dependencies`); where it
does not, the plan says so (`after`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fusedmoe.errors import ConfigError
from fusedmoe.schedule import text
from fusedmoe.schedule.events import followers_of, issue_order
from fusedmoe.schedule.task import FUSED, LINKS, PIPELINE, Task, resources_of, standard_dependencies
from fusedmoe.schedule.timeline import PHASES, RESOURCES, SYMBOLS


@dataclass(frozen=True)
class Plan:
    """The order of the tasks on each resource, first come, first served. Checked when it is made.

    `after`: what a task waits for, where that is not what `standard_dependencies` says; it replaces that.

    Two plans are equal when they have the same orders and the same dependencies.

    Raises `ConfigError`, naming the task and the cure: a task of an unknown kind or on a resource that cannot run it,
    a fused operation that is not on both of its resources, a task that occurs twice, chunks that do not fit together, a
    dependency on a task that the plan lacks, and tasks that wait for each other in a circle, the orders included: such
    a plan would never end.
    """

    compute: tuple[Task, ...] = ()
    intra: tuple[Task, ...] = ()
    inter: tuple[Task, ...] = ()
    after: Mapping[Task, tuple[Task, ...]] = field(default_factory=dict)
    #: For each task what it waits for, apart from the ones before it on its resources.
    dependencies: Mapping[Task, tuple[Task, ...]] = field(init=False, repr=False, compare=False)
    #: All tasks in an order in which one thread can issue them: each after all that it waits for. They would start in
    #: this order if each took the same time; of those that start together, first inter, then intra, then compute.
    sequence: tuple[Task, ...] = field(init=False, repr=False, compare=False)
    #: For each place in `sequence` the places of all that its task waits for, the ones before it on its resources too.
    before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for resource in RESOURCES:
            object.__setattr__(self, resource, tuple(getattr(self, resource)))
        _check_tasks({resource: self.on(resource) for resource in RESOURCES})
        standard = standard_dependencies(self)
        changed = _changed(standard, self.after)
        object.__setattr__(self, "after", changed)
        object.__setattr__(self, "dependencies", {**standard, **changed})
        sequence, before = _sequence(self)
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "before", before)

    def __hash__(self) -> int:
        return hash((self.compute, self.intra, self.inter))

    def __iter__(self) -> Iterator[Task]:
        """All tasks, resource by resource; one that is on several of them comes once, with compute."""
        yield from self.compute
        for order in (self.intra, self.inter):
            yield from (task for task in order if task.kind not in FUSED)

    def __len__(self) -> int:
        return len(self.sequence)

    def on(self, resource: str) -> tuple[Task, ...]:
        """The tasks of one resource ("compute", "intra" or "inter"), in order."""
        order: tuple[Task, ...] = getattr(self, resource)
        return order

    @cached_property
    def resources(self) -> dict[Task, tuple[str, ...]]:
        """The resources that each task is on: one, and of a fused operation compute and its link."""
        found: dict[Task, tuple[str, ...]] = {}
        for resource in RESOURCES:
            for task in self.on(resource):
                found[task] = (*found.get(task, ()), resource)
        return found

    @cached_property
    def graph(self) -> tuple[list[list[int]], list[int]]:
        """For each place in `sequence` the places of what waits for its task, and the number of its resource (of a
        fused operation, of compute) in `RESOURCES`: what the event loop goes by, beside `before`."""
        number = {resource: place for place, resource in enumerate(RESOURCES)}
        return followers_of(self.before), [number[self.resources[task][0]] for task in self.sequence]

    @cached_property
    def degrees(self) -> dict[tuple[str | None, int | None], int]:
        """The number of chunks of each (phase, layer) that has a pipeline."""
        found: dict[tuple[str | None, int | None], int] = {}
        for task in self:
            if task.chunk is not None and (task.kind in PIPELINE or task.kind in FUSED):
                where = (task.phase, task.layer)
                found[where] = max(found.get(where, 0), task.chunk + 1)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are the same on every rank and machine for equal plans."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """One line a resource; `parse` reads it back. The grammar is in `schedule/text.py`."""
        return text.write({resource: self.on(resource) for resource in RESOURCES}, self.after)

    @classmethod
    def from_orders(
        cls, orders: Mapping[str, Iterable[Task]], after: Mapping[Task, tuple[Task, ...]] | None = None
    ) -> Plan:
        """The plan of the orders by resource; a resource that is missing has no tasks."""
        compute, intra, inter = (tuple(orders.get(resource, ())) for resource in RESOURCES)
        return cls(compute, intra, inter, after or {})

    @classmethod
    def parse(cls, source: str) -> Plan:
        """The plan that a text stands for. Raises `ConfigError`, naming the line, for what is not one."""
        orders, after = text.read(source)
        return cls.from_orders(orders, after)


def _changed(
    standard: Mapping[Task, tuple[Task, ...]], after: Mapping[Task, Iterable[Task]]
) -> dict[Task, tuple[Task, ...]]:
    """The entries of `after` that say something else than the standard, in a canonical order."""
    changed = {}
    for task, given in after.items():
        tasks = tuple(given)
        for one in (task, *tasks):
            if one not in standard:
                raise ConfigError(
                    f"plan: after {text.name(task)}: there is no {text.name(one)} in the plan; add it to a resource"
                )
        if set(tasks) != set(standard[task]):
            changed[task] = tuple(sorted(set(tasks), key=text.name))
    return dict(sorted(changed.items(), key=lambda item: text.name(item[0])))


def _sequence(plan: Plan) -> tuple[tuple[Task, ...], tuple[tuple[int, ...], ...]]:
    """`Plan.sequence` and `Plan.before`. A task that never gets ready is part of a circle, or behind one."""
    number = {task: 0 for order in (plan.inter, plan.intra, plan.compute) for task in order}
    tasks = tuple(number)
    for index, task in enumerate(tasks):
        number[task] = index
    before = [[number[one] for one in plan.dependencies[task]] for task in tasks]
    for order in (plan.inter, plan.intra, plan.compute):
        numbers = [number[task] for task in order]
        for earlier, index in zip(numbers, numbers[1:], strict=False):
            if earlier not in before[index]:
                before[index].append(earlier)
    places = issue_order(before, followers_of(before))
    if len(places) != len(tasks):
        stuck = set(tasks) - {tasks[index] for index in places}
        raise ConfigError(_circle({resource: plan.on(resource) for resource in RESOURCES}, plan.dependencies, stuck))
    place = [0] * len(tasks)
    for position, index in enumerate(places):
        place[index] = position
    sequence = tuple(tasks[index] for index in places)
    return sequence, tuple(tuple(place[one] for one in before[index]) for index in places)


def _check_tasks(orders: Mapping[str, Sequence[Task]]) -> None:
    """Raises `ConfigError` unless each task is one, stands where it can run, and has all chunks beside it."""
    places: dict[tuple[str, int | None, int | None, str | None], list[str]] = {}
    fused: list[Task] = []
    chunks: dict[tuple[str | None, int | None], dict[str, set[int | None]]] = {}
    for resource, tasks in orders.items():
        for task in tasks:
            kind, chunk, layer, phase, size = task
            if kind not in SYMBOLS:
                raise ConfigError(f"plan: kind {kind!r} of {task!r} is not one of {', '.join(SYMBOLS)}")
            if phase is not None and phase not in PHASES:
                raise ConfigError(f"plan: phase {phase!r} of {task!r} is not one of {', '.join(PHASES)}, or None")
            for what, number, least in (("chunk", chunk, 0), ("layer", layer, 0), ("size", size, 1)):
                if number is not None and (type(number) is not int or number < least):
                    raise ConfigError(f"plan: {what} {number!r} of {task!r} is not an integer from {least}, or None")
            if size is not None and kind != "gradient-all-reduce":
                raise ConfigError(f"plan: {text.name(task)} has a size; only a gradient-all-reduce can have one")
            if (resource == "compute") == (kind in LINKS) and kind not in FUSED:
                cure = f"put it on {LINKS[kind]}" if kind in LINKS else "put it on compute"
                raise ConfigError(f"plan: {text.name(task)} ({kind}) cannot run on {resource}; {cure}")
            found = places.setdefault(task[:4], [])
            if found and (resource in found or kind not in FUSED):
                where = f"{found[0]} and {resource}" if resource not in found else f"{resource} twice"
                raise ConfigError(f"plan: {text.name(task)} is on {where}; take one of them away")
            if not found:
                if kind in FUSED:
                    fused.append(task)
                if kind in PIPELINE or kind in FUSED:
                    chunks.setdefault((phase, layer), {}).setdefault(kind, set()).add(chunk)
            found.append(resource)
    for task in fused:
        _check_places(task, places[task[:4]])
    for place, of in chunks.items():
        _check_chunks(place, of)


def _circle(orders: Mapping[str, Sequence[Task]], dependencies: Mapping[Task, Sequence[Task]], stuck: set[Task]) -> str:
    """The shortest way to say which of the stuck tasks wait for each other: a circle, each link with its reason."""
    behind: dict[Task, list[tuple[Task, str]]] = {}
    for resource, tasks in orders.items():
        for one, task in zip(tasks, tasks[1:], strict=False):
            behind.setdefault(task, []).append((one, resource))
    seen: dict[Task, int] = {}
    path: list[tuple[str, str]] = []
    task = next(task for tasks in orders.values() for task in tasks if task in stuck)
    while task not in seen:
        seen[task] = len(path)
        needed = next((one for one in dependencies[task] if one in stuck), None)
        if needed is not None:
            path.append((f"{text.name(task)} needs {text.name(needed)}", ""))
            task = needed
        else:
            earlier, resource = next(found for found in behind[task] if found[0] in stuck)
            cure = f"move {text.name(task)} forward on {resource}"
            path.append((f"{text.name(task)} stands behind {text.name(earlier)} on {resource}", cure))
            task = earlier
    reasons = path[seen[task] :]
    cure = next((cure for _, cure in reasons if cure), "change what they need")
    return f"plan: it would never end: {', '.join(reason for reason, _ in reasons)}; {cure}"


def _check_places(task: Task, found: Sequence[str]) -> None:
    """A fused operation is on compute and on its link."""
    usual = resources_of(task.kind)
    if set(found) != set(usual):
        where = f"plan: {text.name(task)} ({task.kind}) is on {' and '.join(found)}"
        raise ConfigError(f"{where}, but computes and sends at once; put it on {' and '.join(usual)}")


def _check_chunks(place: tuple[str | None, int | None], of: Mapping[str, set[int | None]]) -> None:
    """The pipeline of one layer and phase has chunks 0, 1, … r − 1 of each of its parts, and each part once."""
    phase, layer = place
    fused = next((kind for kind in of if kind in FUSED), None)
    other = next((kind for kind in of if kind != fused), None)
    if fused is not None and other is not None:
        whole, one = (text.name(Task(kind, min(of[kind], key=str), layer, phase)) for kind in (fused, other))
        raise ConfigError(
            f"plan: {one} ({other}) is beside {whole} ({fused}), which does all of a chunk's way; take one of them away"
        )
    degree = max(map(len, of.values()))
    for kind, found in of.items():
        missing = next((chunk for chunk in range(degree) if chunk not in found), None)
        if missing is not None:
            extra = [text.name(Task(kind, chunk, layer, phase)) for chunk in found - set(range(degree))]
            cure = f"number {extra[0]} from 0 on" if extra else "add it, or take that chunk away everywhere"
            raise ConfigError(
                f"plan: {text.name(Task(kind, missing, layer, phase))} is missing: the layer has {degree} "
                f"chunk{'s' * (degree > 1)}; {cure}"
            )
