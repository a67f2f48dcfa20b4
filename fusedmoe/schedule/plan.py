"""Plans: a schedule as a value. Tasks, what each waits for, and one order per resource.

    plan = Plan.parse('''
        compute: E0 E1
        intra: AG0 AG1 RS0 RS1
        inter: D0 D1 C0 C1
    ''')

A resource runs one task at a time, in its order; a task starts when the one before it on its resource and all that it
waits for have ended. Every rank computes the same plan from the same numbers, so every rank issues its collectives in
the same order, and no race decides it.

Which resource a task is on, the plan says: a policy that has a single queue for communication puts all-gathers on
`inter`. What a task waits for follows from its kind, chunk, layer and phase (`task.standard_dependencies`); where it
does not, the plan says so (`after`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fusedmoe.errors import ConfigError
from fusedmoe.schedule import text
from fusedmoe.schedule.task import LINKS, PIPELINE, Task, standard_dependencies
from fusedmoe.schedule.timeline import PHASES, RESOURCES, SYMBOLS


@dataclass(frozen=True)
class Plan:
    """The order of the tasks on each resource, first come, first served. Checked when it is made.

    `after`: what a task waits for, where that is not what `standard_dependencies` says; it replaces that.

    Two plans are equal when they have the same orders and the same dependencies.

    Raises `ConfigError`, naming the task and the cure: a task of an unknown kind or on a resource that cannot run it,
    a task that occurs twice, chunks that do not fit together, a dependency on a task that the plan lacks, and tasks
    that wait for each other in a circle, the orders included: such a plan would never end.
    """

    compute: tuple[Task, ...] = ()
    intra: tuple[Task, ...] = ()
    inter: tuple[Task, ...] = ()
    after: Mapping[Task, tuple[Task, ...]] = field(default_factory=dict)
    #: For each task what it waits for, apart from the one before it on its resource.
    dependencies: Mapping[Task, tuple[Task, ...]] = field(init=False, repr=False, compare=False)
    #: All tasks in an order in which one thread can issue them: each after all that it waits for. They would start in
    #: this order if each took the same time; of those that start together, first inter, then intra, then compute.
    sequence: tuple[Task, ...] = field(init=False, repr=False, compare=False)
    #: For each place in `sequence` the places of all that its task waits for, the one before it on its resource too.
    before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for resource in RESOURCES:
            object.__setattr__(self, resource, tuple(getattr(self, resource)))
        _check_tasks(self)
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
        """All tasks, resource by resource."""
        yield from self.compute
        yield from self.intra
        yield from self.inter

    def __len__(self) -> int:
        return len(self.compute) + len(self.intra) + len(self.inter)

    def on(self, resource: str) -> tuple[Task, ...]:
        """The tasks of one resource ("compute", "intra" or "inter"), in order."""
        order: tuple[Task, ...] = getattr(self, resource)
        return order

    @cached_property
    def resources(self) -> dict[Task, str]:
        """The resource that each task is on."""
        return {task: resource for resource in RESOURCES for task in self.on(resource)}

    @cached_property
    def degrees(self) -> dict[tuple[str | None, int | None], int]:
        """The number of chunks of each (phase, layer) that has a pipeline."""
        found: dict[tuple[str | None, int | None], int] = {}
        for task in self:
            if task.kind in PIPELINE and task.chunk is not None:
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
    def of(cls, orders: Mapping[str, Iterable[Task]], after: Mapping[Task, tuple[Task, ...]] | None = None) -> Plan:
        """The plan of the orders by resource; a resource that is missing has no tasks."""
        compute, intra, inter = (tuple(orders.get(resource, ())) for resource in RESOURCES)
        return cls(compute, intra, inter, after or {})

    @classmethod
    def parse(cls, source: str) -> Plan:
        """The plan that a text stands for. Raises `ConfigError`, naming the line, for what is not one."""
        orders, after = text.read(source)
        return cls.of(orders, after)


def _check_tasks(plan: Plan) -> None:
    places: dict[tuple[str, int | None, int | None, str | None], str] = {}
    chunks: dict[tuple[str | None, int | None], dict[str, set[int | None]]] = {}
    for resource in RESOURCES:
        for task in plan.on(resource):
            kind, chunk, layer, phase, size = task
            if kind not in SYMBOLS:
                raise ConfigError(f"plan: kind {kind!r} of {task!r} is not one of {', '.join(SYMBOLS)}")
            if phase is not None and phase not in PHASES:
                raise ConfigError(f"plan: phase {phase!r} of {task!r} is not one of {', '.join(PHASES)}, or None")
            for name, number, least in (("chunk", chunk, 0), ("layer", layer, 0), ("size", size, 1)):
                if number is not None and (type(number) is not int or number < least):
                    raise ConfigError(f"plan: {name} {number!r} of {task!r} is not an integer from {least}, or None")
            if size is not None and kind != "gradient-all-reduce":
                raise ConfigError(f"plan: {text.name(task)} has a size; only a gradient-all-reduce can have one")
            if (resource == "compute") == (kind in LINKS):
                cure = f"put it on {LINKS[kind]}" if kind in LINKS else "put it on compute"
                raise ConfigError(f"plan: {text.name(task)} ({kind}) cannot run on {resource}; {cure}")
            named = task[:4]
            if named in places:
                where = f"{places[named]} and {resource}" if places[named] != resource else f"{resource} twice"
                raise ConfigError(f"plan: {text.name(task)} is on {where}; take one of them away")
            places[named] = resource
            if kind in PIPELINE:
                chunks.setdefault((phase, layer), {}).setdefault(kind, set()).add(chunk)
    for place, of in chunks.items():
        _check_chunks(place, of)


def _check_chunks(place: tuple[str | None, int | None], of: Mapping[str, set[int | None]]) -> None:
    """The pipeline of one layer and phase has chunks 0, 1, … r − 1 of each of its parts."""
    degree = max(map(len, of.values()))
    for kind, found in of.items():
        missing = next((chunk for chunk in range(degree) if chunk not in found), None)
        if missing is not None:
            phase, layer = place
            extra = [text.name(Task(kind, chunk, layer, phase)) for chunk in found - set(range(degree))]
            cure = f"number {extra[0]} from 0 on" if extra else "add it, or take that chunk away everywhere"
            raise ConfigError(
                f"plan: {text.name(Task(kind, missing, layer, phase))} is missing: the layer has {degree} "
                f"chunk{'s' * (degree > 1)}; {cure}"
            )


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
    tasks = (*plan.inter, *plan.intra, *plan.compute)
    number = {task: index for index, task in enumerate(tasks)}
    before = [[number[one] for one in plan.dependencies[task]] for task in tasks]
    first = 0
    for order in (plan.inter, plan.intra, plan.compute):
        for index in range(first + 1, first + len(order)):
            if index - 1 not in before[index]:
                before[index].append(index - 1)
        first += len(order)
    followers: list[list[int]] = [[] for _ in tasks]
    for index, found in enumerate(before):
        for one in found:
            followers[one].append(index)
    waits = [len(found) for found in before]
    ready = [index for index, count in enumerate(waits) if not count]
    places: list[int] = []
    while ready:
        places.extend(ready)
        found = []
        for one in ready:
            for index in followers[one]:
                waits[index] -= 1
                if not waits[index]:
                    found.append(index)
        ready = sorted(found)
    if len(places) != len(tasks):
        raise ConfigError(_circle(plan, {task for task, count in zip(tasks, waits, strict=True) if count}))
    place = [0] * len(tasks)
    for position, index in enumerate(places):
        place[index] = position
    sequence = tuple(tasks[index] for index in places)
    return sequence, tuple(tuple(place[one] for one in before[index]) for index in places)


def _circle(plan: Plan, stuck: set[Task]) -> str:
    """The shortest way to say which tasks wait for each other: a circle, each link with its reason."""
    earlier = {task: one for r in RESOURCES for one, task in zip(plan.on(r), plan.on(r)[1:], strict=False)}
    seen: dict[Task, int] = {}
    path: list[tuple[Task, str]] = []
    task = next(task for task in plan if task in stuck)
    while task not in seen:
        seen[task] = len(path)
        needed = next((one for one in plan.dependencies[task] if one in stuck), None)
        if needed is not None:
            path.append((task, f"{text.name(task)} needs {text.name(needed)}"))
            task = needed
        else:
            path.append((task, f"{text.name(task)} stands behind {text.name(earlier[task])} on {plan.resources[task]}"))
            task = earlier[task]
    circle = path[seen[task] :]
    behind = next((one for one, reason in circle if "stands behind" in reason), None)
    cure = f"move {text.name(behind)} forward on {plan.resources[behind]}" if behind else "change what they need"
    return f"plan: it would never end: {', '.join(reason for _, reason in circle)}; {cure}"
