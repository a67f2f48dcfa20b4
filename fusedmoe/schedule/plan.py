"""Plans: a schedule as a value, with tasks, their dependencies, and the task order of each resource.

A resource runs one task at a time, in order. A task starts when the previous task on its resource and all its
dependencies have ended. All ranks compute the same plan from the same costs, so they issue collectives in the same
order.

The plan assigns tasks to resources: a policy with one communication queue puts all-gathers on `inter`. Dependencies
follow from kind, chunk, layer and phase (`task.standard_dependencies`); `after` lists the exceptions.

The text form of a plan:

    compute: E0 E1 E2                       a line for each resource that has tasks
    intra: AG0 AG1 AG2 RS0 RS1 RS2
    inter: D0 D1 D2 AR0(4194304) C0 C1 C2
    after AR0: E0                           only for non-standard dependencies

A word is the symbol of a kind (`task.SYMBOLS`) and a chunk, with the bytes of a gradient-all-reduce in parentheses. A
fused operation has the symbols of its parts (`DEC0`), is listed on compute and on its link, and starts when it is next
on both. A prefix names layer and pass: `f3.D0` is in layer 3 forward, `b3.D0` backward, `f.L` in no layer, `.Opt` in
neither. Words without a prefix are in layer 0 forward, or in the layer and phase set by `layer:` and `phase:` lines
before the orders. # starts a comment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.task import (
    FUSED,
    LINKS,
    PHASES,
    PIPELINE,
    RESOURCES,
    SYMBOLS,
    Task,
    TaskKind,
    invert_dependencies,
    issue_order,
    resources_of,
    standard_dependencies,
)

_SYMBOL_BY_KIND = {kind: symbol or kind for kind, symbol in SYMBOLS.items()}
_KIND_BY_SYMBOL = {symbol: kind for kind, symbol in _SYMBOL_BY_KIND.items()}
_LETTER_BY_PHASE = {"forward": "f", "backward": "b", None: ""}
_PHASE_BY_LETTER = {letter: phase for phase, letter in _LETTER_BY_PHASE.items()}

_TASK_PATTERN = re.compile(
    r"(?:(?P<phase>[fb]?)(?P<layer>\d{0,9})(?P<dot>\.))?(?P<kind>[A-Za-z]+)(?P<chunk>\d{0,9})(?:\((?P<size>\d{1,18})\))?",
    re.ASCII,
)

_DEFAULT_LAYER_AND_PHASE: tuple[int | None, str | None] = (0, "forward")

Orders = dict[str, tuple[Task, ...]]


def task_name(task: Task) -> str:
    """Return a task's name with prefix, without size: b3.D0."""
    return f"{_LETTER_BY_PHASE[task.phase]}{'' if task.layer is None else task.layer}.{_name_without_prefix(task)}"


def _format_plan(orders: Mapping[str, Iterable[Task]], after: Mapping[Task, Iterable[Task]]) -> str:
    places = {(task.layer, task.phase) for order in orders.values() for task in order}
    (layer, phase), word = places.pop() if len(places) == 1 else (None, None), task_name
    lines = []
    if layer is not None and phase is not None:
        lines = [f"phase: {phase}"] * (phase != _DEFAULT_LAYER_AND_PHASE[1]) + [f"layer: {layer}"] * (
            layer != _DEFAULT_LAYER_AND_PHASE[0]
        )
        word = _name_without_prefix
    for resource, order in orders.items():
        words = [word(task) + ("" if task.size is None else f"({task.size})") for task in order]
        if words:
            lines.append(f"{resource}: {' '.join(words)}")
    for task, before in after.items():
        lines.append(" ".join([f"after {word(task)}:", *map(word, before)]))
    return "\n".join(lines)


def _parse_plan(source: str) -> tuple[Orders, dict[Task, tuple[Task, ...]]]:
    layer, phase = _DEFAULT_LAYER_AND_PHASE
    orders: Orders = {}
    waits: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        head, colon, rest = line.partition("#")[0].strip().partition(":")
        if not head and not colon:
            continue
        words = rest.split()
        if head in ("phase", "layer") and orders:
            raise ConfigError(f"plan, line {number}: {head!r} must precede the orders")
        if head == "phase" and len(words) == 1 and words[0] in PHASES:
            phase = words[0]
        elif head == "layer" and len(words) == 1 and re.fullmatch(r"[0-9]{1,9}", words[0]):
            layer = int(words[0])
        elif head in RESOURCES and colon:
            if head in orders:
                raise ConfigError(f"plan, line {number}: {head!r} occurs twice; put all its tasks on one line")
            orders[head] = tuple(_parse_task(word, layer, phase, number) for word in words)
        elif head.startswith("after ") and colon:
            waits.append((number, head.removeprefix("after ").strip(), words))
        else:
            known = ", ".join(f"'{word}: …'" for word in (*RESOURCES, "phase", "layer", "after TASK"))
            raise ConfigError(f"plan, line {number}: {line.strip()!r} is not one of {known}")
    # Words of `after` lines have no sizes: the first four fields identify a task.
    named = {task[:4]: task for order in orders.values() for task in order}
    after: dict[Task, tuple[Task, ...]] = {}
    for number, word, words in waits:
        tasks = []
        for each in (word, *words):
            task = _parse_task(each, layer, phase, number)
            if task[:4] not in named:
                raise ConfigError(f"plan, line {number}: {each} is not in the plan; add it to a resource")
            tasks.append(named[task[:4]])
        after[tasks[0]] = tuple(tasks[1:])
    return orders, after


def _parse_task(word: str, layer: int | None, phase: str | None, line: int) -> Task:
    match = _TASK_PATTERN.fullmatch(word)
    if match is None or match["kind"] not in _KIND_BY_SYMBOL:
        known = " ".join(_KIND_BY_SYMBOL)
        raise ConfigError(f"plan, line {line}: {word!r} is not a task such as D0 or b3.AR1(4096); symbols: {known}")
    if match["dot"]:
        phase, layer = _PHASE_BY_LETTER[match["phase"]], _parse_optional_int(match["layer"])
    return Task(
        _KIND_BY_SYMBOL[match["kind"]],
        _parse_optional_int(match["chunk"]),
        layer,
        phase,
        _parse_optional_int(match["size"]),
    )


def _name_without_prefix(task: Task) -> str:
    return f"{_SYMBOL_BY_KIND[task.kind]}{'' if task.chunk is None else task.chunk}"


def _parse_optional_int(digits: str | None) -> int | None:
    return int(digits) if digits else None


@dataclass(frozen=True)
class Plan:
    r"""Task order of each resource, executed first come, first served.

    Example: one of two ranks, a layer forward in two chunks, D dispatch, E expert, C combine.

        plan = Plan.parse("compute: E0 E1\ninter: D0 D1 C0 C1")

        plan.dependencies     E0 after D0, E1 after D1, C0 after E0, C1 after E1
        plan.sequence         D0 D1 E0 C0 E1 C1

    If D and C take 2 ms per chunk and E takes 3 ms, `simulate` returns a timeline of 10 ms (14 ms with one chunk),
    which `draw` renders:

        compute   . . E0E0E0E1E1E1. .
        inter     D0D0D1D1. C0C0. C1C1

    Attributes:
        compute, intra, inter: task order of each resource.
        after: dependencies that differ from `standard_dependencies`, by task.
        dependencies: dependencies of each task, without previous tasks on its resources.
        sequence: all tasks in a topological order in which one thread can issue them. Among tasks that can start
            together, inter precedes intra and compute.
        before: for each index in `sequence`, the indices of all tasks it waits for, including previous tasks on its
            resources.
    Raises:
        ConfigError: an unknown kind, a task on a resource that cannot run it, a fused operation that is not on both of
            its resources, a duplicate task, inconsistent chunks, a dependency on a missing task, or a cycle. The
            message names the task and the fix.
    """

    compute: tuple[Task, ...] = ()
    intra: tuple[Task, ...] = ()
    inter: tuple[Task, ...] = ()
    after: Mapping[Task, tuple[Task, ...]] = field(default_factory=dict)
    dependencies: Mapping[Task, tuple[Task, ...]] = field(init=False, repr=False, compare=False)
    sequence: tuple[Task, ...] = field(init=False, repr=False, compare=False)
    before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for resource in RESOURCES:
            object.__setattr__(self, resource, tuple(getattr(self, resource)))
        _check_tasks(self.orders)
        standard = standard_dependencies(self.tasks)
        object.__setattr__(self, "after", _nonstandard_dependencies(standard, self.after))
        object.__setattr__(self, "dependencies", {**standard, **self.after})
        sequence, before = _topological_sequence(self)
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "before", before)

    def __hash__(self) -> int:
        return hash((self.compute, self.intra, self.inter))

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def orders(self) -> dict[str, tuple[Task, ...]]:
        return {"compute": self.compute, "intra": self.intra, "inter": self.inter}

    def on(self, resource: str) -> tuple[Task, ...]:
        return self.orders[resource]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, resource by resource; fused operations once, with compute."""
        return (*self.compute, *(task for task in self.intra + self.inter if task.kind not in FUSED))

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(task.kind for task in self.tasks)

    @cached_property
    def resources(self) -> dict[Task, tuple[str, ...]]:
        """Resources of each task: one, or compute and a link for fused operations."""
        resources: dict[Task, tuple[str, ...]] = {}
        for resource, order in self.orders.items():
            resources |= {task: (*resources.get(task, ()), resource) for task in order}
        return resources

    @cached_property
    def graph(self) -> tuple[list[list[int]], list[int]]:
        """Indices of each task's dependents, and index of the resource where it is queued, in the order of `sequence`.

        Fused operations have the index of compute.
        """
        on = (self.resources[task][0] for task in self.sequence)
        return invert_dependencies(self.before), [RESOURCES.index(resource) for resource in on]

    @cached_property
    def works(self) -> list[int]:
        """Index in `RESOURCES` of the hardware that each task in `sequence` occupies; compute for fused operations.

        Differs from `graph` if one queue serves both links.
        """
        return [RESOURCES.index(resources_of(task.kind)[0]) for task in self.sequence]

    @cached_property
    def waits(self) -> dict[Task, tuple[Task, ...]]:
        """Dependencies of each task on other resources."""
        on, sequence = self.resources, self.sequence
        return {
            task: tuple(sequence[place] for place in before if on[sequence[place]][0] != on[task][0])
            for task, before in zip(sequence, self.before, strict=True)
        }

    @cached_property
    def overlaps(self) -> bool:
        """True if any two tasks can run at the same time."""
        # Without overlap, each task waits for its predecessor in the sequence.
        return any(place and place - 1 not in before for place, before in enumerate(self.before))

    @cached_property
    def degrees(self) -> dict[tuple[str | None, int | None], int]:
        """Number of chunks of each (phase, layer) with a pipeline."""
        degrees: dict[tuple[str | None, int | None], int] = {}
        for task in self.tasks:
            if task.chunk is not None and (task.kind in PIPELINE or task.kind in FUSED):
                where = (task.phase, task.layer)
                degrees[where] = max(degrees.get(where, 0), task.chunk + 1)
        return degrees

    @property
    def largest_bucket(self) -> int | None:
        """Bytes of the largest gradient all-reduce, or None."""
        sizes = (task.size or 0 for task in self.inter if task.kind == TaskKind.GRADIENT_ALL_REDUCE)
        return max(sizes, default=None)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for equal plans on every rank and machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """Return the text form (module docstring); `parse` is the inverse."""
        return _format_plan(self.orders, self.after)

    @classmethod
    def from_orders(
        cls, orders: Mapping[str, Iterable[Task]], after: Mapping[Task, tuple[Task, ...]] | None = None
    ) -> Plan:
        """Return the plan of orders by resource name; a missing resource has no tasks."""
        compute, intra, inter = (tuple(orders.get(resource, ())) for resource in RESOURCES)
        return cls(compute, intra, inter, after or {})

    @classmethod
    def parse(cls, source: str) -> Plan:
        """Parse the text form. Raises `ConfigError` with the line number."""
        return cls.from_orders(*_parse_plan(source))


def _nonstandard_dependencies(
    standard: Mapping[Task, tuple[Task, ...]], after: Mapping[Task, Iterable[Task]]
) -> dict[Task, tuple[Task, ...]]:
    changed = {}
    for task, given in after.items():
        tasks = tuple(given)
        for named in (task, *tasks):
            if named not in standard:
                missing = f"{task_name(named)} is not in the plan"
                raise ConfigError(f"plan: after {task_name(task)}: {missing}; add it to a resource")
        if set(tasks) != set(standard[task]):
            changed[task] = tuple(sorted(set(tasks), key=task_name))
    return dict(sorted(changed.items(), key=lambda item: task_name(item[0])))


def _topological_sequence(plan: Plan) -> tuple[tuple[Task, ...], tuple[tuple[int, ...], ...]]:
    # Inter has the lowest indices: among tasks that start together, collectives are issued first.
    tasks = tuple(dict.fromkeys((*plan.inter, *plan.intra, *plan.compute)))
    number = {task: index for index, task in enumerate(tasks)}
    before = [[number[waited] for waited in plan.dependencies[task]] for task in tasks]
    for order in (plan.inter, plan.intra, plan.compute):
        for earlier, index in pairwise(number[task] for task in order):
            if earlier not in before[index]:
                before[index].append(earlier)
    places = issue_order(before, invert_dependencies(before))
    if len(places) != len(tasks):
        stuck = set(tasks) - {tasks[index] for index in places}
        raise ConfigError(_describe_cycle(plan.orders, plan.dependencies, stuck))
    place = {index: position for position, index in enumerate(places)}
    sequence = tuple(tasks[index] for index in places)
    return sequence, tuple(tuple(place[waited] for waited in before[index]) for index in places)


def _check_tasks(orders: Mapping[str, Sequence[Task]]) -> None:
    places: dict[tuple[str, int | None, int | None, str | None], list[str]] = {}
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
            if size is not None and kind != TaskKind.GRADIENT_ALL_REDUCE:
                raise ConfigError(f"plan: {task_name(task)} has a size; only a gradient-all-reduce can have one")
            if (resource == "compute") == (kind in LINKS) and kind not in FUSED:
                cure = f"put it on {LINKS[kind]}" if kind in LINKS else "put it on compute"
                raise ConfigError(f"plan: {task_name(task)} ({kind}) cannot run on {resource}; {cure}")
            on = places.setdefault(task[:4], [])
            if on and (resource in on or kind not in FUSED):
                where = f"{on[0]} and {resource}" if resource not in on else f"{resource} twice"
                raise ConfigError(f"plan: {task_name(task)} is on {where}; remove one of them")
            if kind in PIPELINE or kind in FUSED:
                chunks.setdefault((phase, layer), {}).setdefault(kind, set()).add(chunk)
            on.append(resource)
    for named, on in places.items():
        usual = resources_of(named[0])
        if named[0] in FUSED and set(on) != set(usual):
            where = f"plan: {task_name(Task(*named))} ({named[0]}) is on {' and '.join(on)}"
            raise ConfigError(f"{where}, but it computes and sends; put it on {' and '.join(usual)}")
    for place, by_kind in chunks.items():
        _check_chunks(place, by_kind)


def _describe_cycle(
    orders: Mapping[str, Sequence[Task]], dependencies: Mapping[Task, Sequence[Task]], stuck: set[Task]
) -> str:
    links = [(earlier, task, resource) for resource, tasks in orders.items() for earlier, task in pairwise(tasks)]
    seen: dict[Task, int] = {}
    path: list[tuple[str, str]] = []
    task = next(task for tasks in orders.values() for task in tasks if task in stuck)
    while task not in seen:
        seen[task] = len(path)
        needed = next((waited for waited in dependencies[task] if waited in stuck), None)
        if needed is not None:
            path.append((f"{task_name(task)} needs {task_name(needed)}", ""))
        else:
            needed, resource = next((e, on) for e, later, on in links if later == task and e in stuck)
            cure = f"move {task_name(task)} forward on {resource}"
            path.append((f"{task_name(task)} is after {task_name(needed)} on {resource}", cure))
        task = needed
    reasons = path[seen[task] :]
    cure = next((cure for _, cure in reasons if cure), "change their dependencies")
    return f"plan: circular wait: {', '.join(reason for reason, _ in reasons)}; {cure}"


def _check_chunks(place: tuple[str | None, int | None], chunks: Mapping[str, set[int | None]]) -> None:
    """Raise `ConfigError` unless all kinds in one pass of a layer have the same chunks 0 to r − 1.

    A fused kind must be the only kind. `place`: phase and layer. `chunks`: chunk numbers by kind.
    """
    phase, layer = place
    fused = next((kind for kind in chunks if kind in FUSED), None)
    extra_kind = next((kind for kind in chunks if kind != fused), None)
    if fused is not None and extra_kind is not None:
        whole, part = (task_name(Task(kind, min(chunks[kind], key=str), layer, phase)) for kind in (fused, extra_kind))
        where = f"plan: {part} ({extra_kind}) duplicates a part of {whole} ({fused})"
        raise ConfigError(f"{where}; remove one of them")
    degree = max(map(len, chunks.values()))
    for kind, numbers in chunks.items():
        missing = next((chunk for chunk in range(degree) if chunk not in numbers), None)
        if missing is not None:
            extra = [task_name(Task(kind, chunk, layer, phase)) for chunk in numbers - set(range(degree))]
            cure = f"number {extra[0]} from 0" if extra else "add it, or remove this chunk from all kinds"
            has = f"the layer has {degree} chunk{'s' * (degree > 1)}"
            raise ConfigError(f"plan: {task_name(Task(kind, missing, layer, phase))} is missing: {has}; {cure}")
