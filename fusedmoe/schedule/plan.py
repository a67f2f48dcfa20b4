"""Plans: a schedule as a value. Tasks, what each waits for, and one order per resource.

    plan = Plan.parse('''
        compute: E0 E1
        intra: AG0 AG1 RS0 RS1
        inter: D0 D1 C0 C1
    ''')

A resource runs one task at a time, in its order; a task starts when the one before it on its resource and all that it
waits for have ended. Every rank computes the same plan from the same numbers, so every rank issues its collectives in
the same order, and no race decides it.

The plan says which resource a task is on: a policy that has a single queue for communication puts all-gathers on
`inter`. What a task waits for follows from its kind, chunk, layer and phase (`task.standard_dependencies`); where it
does not, the plan says so (`after`).

Plans as text:

    compute: E0 E1 E2                       a line for each resource that has tasks
    intra: AG0 AG1 AG2 RS0 RS1 RS2
    inter: D0 D1 D2 AR0(4194304) C0 C1 C2
    after AR0: E0                           only for a task that does not wait for what the rules say

A word is the symbol of a kind (`task.SYMBOLS`) and a chunk; in parentheses the bytes of a gradient-all-reduce. A fused
operation computes and sends at once: it has the symbols of its parts, `DEC0`, stands on the lines of compute and of its
link, and starts when it has come to the front on both. Words with a prefix belong to other layers and passes: `f3.D0`
to layer 3 forward, `b3.D0` backward, `f.L` to no layer, `.Opt` to neither. Words without a prefix belong to layer 0
forward, or to what `layer:` and `phase:` lines ahead of the orders say: a plan of one layer and pass is written so.
# starts a comment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.events import followers_of, issue_order
from fusedmoe.schedule.task import (
    FUSED,
    LINKS,
    PHASES,
    PIPELINE,
    RESOURCES,
    SYMBOLS,
    Task,
    TaskKind,
    resources_of,
    standard_dependencies,
)

_SYMBOLS = {kind: symbol or kind for kind, symbol in SYMBOLS.items()}
_KINDS = {symbol: kind for kind, symbol in _SYMBOLS.items()}
_LETTERS = {"forward": "f", "backward": "b", None: ""}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}

_WORD = re.compile(
    r"(?:(?P<phase>[fb]?)(?P<layer>\d{0,9})(?P<dot>\.))?(?P<kind>[A-Za-z]+)(?P<chunk>\d{0,9})(?:\((?P<size>\d{1,18})\))?",
    re.ASCII,
)

# The layer and phase of a word without a prefix.
_PLACE: tuple[int | None, str | None] = (0, "forward")

Orders = dict[str, tuple[Task, ...]]


def name(task: Task) -> str:
    """Returns a task in a word, with its prefix and without its size: b3.D0."""
    return f"{_LETTERS[task.phase]}{'' if task.layer is None else task.layer}.{_short(task)}"


def _write(orders: Mapping[str, Iterable[Task]], after: Mapping[Task, Iterable[Task]]) -> str:
    """Returns the text of a plan, the same everywhere."""
    # A plan of one layer and pass is written without prefixes, which would say the same on every word.
    places = {(task.layer, task.phase) for order in orders.values() for task in order}
    (layer, phase), word = places.pop() if len(places) == 1 else (None, None), name
    lines = []
    if layer is not None and phase is not None:
        lines = [f"phase: {phase}"] * (phase != _PLACE[1]) + [f"layer: {layer}"] * (layer != _PLACE[0])
        word = _short
    for resource, order in orders.items():
        words = [word(task) + ("" if task.size is None else f"({task.size})") for task in order]
        if words:
            lines.append(f"{resource}: {' '.join(words)}")
    for task, before in after.items():
        lines.append(" ".join([f"after {word(task)}:", *map(word, before)]))
    return "\n".join(lines)


def _read(source: str) -> tuple[Orders, dict[Task, tuple[Task, ...]]]:
    """Returns the orders and the unusual dependencies that a text gives."""
    layer, phase = _PLACE
    orders: Orders = {}
    waits: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        head, colon, rest = line.partition("#")[0].strip().partition(":")
        if not head and not colon:
            continue
        words = rest.split()
        if head in ("phase", "layer") and orders:
            raise ConfigError(f"plan, line {number}: {head!r} has to stand ahead of the orders")
        if head == "phase" and len(words) == 1 and words[0] in PHASES:
            phase = words[0]
        elif head == "layer" and len(words) == 1 and re.fullmatch(r"[0-9]{1,9}", words[0]):
            layer = int(words[0])
        elif head in RESOURCES and colon:
            if head in orders:
                raise ConfigError(f"plan, line {number}: {head!r} occurs twice; put all its tasks into one line")
            orders[head] = tuple(_task(word, layer, phase, number) for word in words)
        elif head.startswith("after ") and colon:
            waits.append((number, head.removeprefix("after ").strip(), words))
        else:
            known = ", ".join(f"'{word}: …'" for word in (*RESOURCES, "phase", "layer", "after TASK"))
            raise ConfigError(f"plan, line {number}: {line.strip()!r} is none of {known}")
    # `after` lines name tasks without sizes: a task's first four fields are its name.
    named = {task[:4]: task for order in orders.values() for task in order}
    after: dict[Task, tuple[Task, ...]] = {}
    for number, word, words in waits:
        tasks = []
        for each in (word, *words):
            task = _task(each, layer, phase, number)
            if task[:4] not in named:
                raise ConfigError(f"plan, line {number}: there is no {each} in the plan; add it to a resource")
            tasks.append(named[task[:4]])
        after[tasks[0]] = tuple(tasks[1:])
    return orders, after


def _task(word: str, layer: int | None, phase: str | None, line: int) -> Task:
    match = _WORD.fullmatch(word)
    if match is None or match["kind"] not in _KINDS:
        known = " ".join(_KINDS)
        raise ConfigError(f"plan, line {line}: {word!r} is not a task such as D0 or b3.AR1(4096); symbols: {known}")
    if match["dot"]:
        phase, layer = _PHASES[match["phase"]], _integer(match["layer"])
    return Task(_KINDS[match["kind"]], _integer(match["chunk"]), layer, phase, _integer(match["size"]))


def _short(task: Task) -> str:
    return f"{_SYMBOLS[task.kind]}{'' if task.chunk is None else task.chunk}"


def _integer(digits: str | None) -> int | None:
    return int(digits) if digits else None


@dataclass(frozen=True)
class Plan:
    """The order of the tasks on each resource, first come, first served. Checked when it is made.

    Example: rank 0 of two, a layer forward in two chunks, D dispatch, E expert, C combine.

        plan = Plan.parse("compute: E0 E1\\ninter: D0 D1 C0 C1")

        plan.dependencies     E0 after D0, E1 after D1, C0 after E0, C1 after E1
        plan.sequence         D0 D1 E0 C0 E1 C1

    Where D and C take 2 ms a chunk and E takes 3 ms, `simulate` makes of it a timeline of 10 ms instead of the 14 ms of
    one chunk; `draw` paints it so:

        compute   . . E0E0E0E1E1E1. .
        inter     D0D0D1D1. C0C0. C1C1

    `execute` calls a body for each task: on a CPU D0, D1, C0, C1 on the thread of the link between nodes, E0 and E1 on
    the caller's thread, each after what it depends on. Rank 1 does the same with the same plan, so the two are in
    the same all-to-all at every moment.

    Two plans are equal when they have the same orders and the same dependencies.

    Attributes:
        compute, intra, inter: the order of each resource.
        after: the tasks that a task waits for, where these are not what `standard_dependencies` says.
        dependencies: for each task the tasks that it waits for, apart from the ones before it on its resources.
        sequence: all tasks in an order in which one thread can issue them: each after all that it waits for, and of
            those that could start together, first inter, then intra, then compute.
        before: for each place in `sequence` the places of all that its task waits for, the ones before it on its
            resources too.
    Raises:
        ConfigError: a task of an unknown kind or on a resource that cannot run it, a fused operation that is not on
            both of its resources, a task that occurs twice, chunks that do not fit together, a dependency on a task
            that the plan lacks, and tasks that wait in a circle, the orders included. The message names the task and
            the cure.
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
        object.__setattr__(self, "after", _changed(standard, self.after))
        object.__setattr__(self, "dependencies", {**standard, **self.after})
        sequence, before = _sequence(self)
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "before", before)

    def __hash__(self) -> int:
        return hash((self.compute, self.intra, self.inter))

    def __iter__(self) -> Iterator[Task]:
        """Yields all `tasks`."""
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def orders(self) -> dict[str, tuple[Task, ...]]:
        """The order of each resource, by its name."""
        return {"compute": self.compute, "intra": self.intra, "inter": self.inter}

    def on(self, resource: str) -> tuple[Task, ...]:
        """Returns the tasks of one resource ("compute", "intra" or "inter"), in order."""
        return self.orders[resource]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, resource by resource; a fused operation, which is on two, stands with compute."""
        return (*self.compute, *(task for task in self.intra + self.inter if task.kind not in FUSED))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of tasks that the plan has."""
        return frozenset(task.kind for task in self.tasks)

    @cached_property
    def resources(self) -> dict[Task, tuple[str, ...]]:
        """The resources that each task is on: one, and of a fused operation compute and its link."""
        resources: dict[Task, tuple[str, ...]] = {}
        for resource, order in self.orders.items():
            resources |= {task: (*resources.get(task, ()), resource) for task in order}
        return resources

    @cached_property
    def graph(self) -> tuple[list[list[int]], list[int]]:
        """Numbers that the event loop goes by, beside `before`: for each place in `sequence` the places of what waits
        for its task, and the number of its resource (of a fused operation, of compute) in `RESOURCES`."""
        on = (self.resources[task][0] for task in self.sequence)
        return followers_of(self.before), [RESOURCES.index(resource) for resource in on]

    @cached_property
    def works(self) -> list[int]:
        """The number in `RESOURCES` of what each task in `sequence` keeps busy (of a fused operation, of compute), also
        where one queue has the tasks of both links."""
        return [RESOURCES.index(resources_of(task.kind)[0]) for task in self.sequence]

    @cached_property
    def waits(self) -> dict[Task, tuple[Task, ...]]:
        """The tasks on other resources that each task waits for: its own resource runs in order in any case."""
        on, sequence = self.resources, self.sequence
        return {
            task: tuple(sequence[place] for place in before if on[sequence[place]][0] != on[task][0])
            for task, before in zip(sequence, self.before, strict=True)
        }

    @cached_property
    def overlaps(self) -> bool:
        """True if any two tasks can run at the same time."""
        # In a chain each task waits for the one before it in the sequence.
        return any(place and place - 1 not in before for place, before in enumerate(self.before))

    @cached_property
    def degrees(self) -> dict[tuple[str | None, int | None], int]:
        """The number of chunks of each (phase, layer) that has a pipeline."""
        degrees: dict[tuple[str | None, int | None], int] = {}
        for task in self.tasks:
            if task.chunk is not None and (task.kind in PIPELINE or task.kind in FUSED):
                where = (task.phase, task.layer)
                degrees[where] = max(degrees.get(where, 0), task.chunk + 1)
        return degrees

    @property
    def largest_bucket(self) -> int | None:
        """The bytes of its largest gradient all-reduce; None: it has none."""
        sizes = (task.size or 0 for task in self.inter if task.kind == TaskKind.GRADIENT_ALL_REDUCE)
        return max(sizes, default=None)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are the same on every rank and machine for equal plans."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """Returns one line a resource, by the grammar at the top of this module; `parse` reads it back."""
        return _write(self.orders, self.after)

    @classmethod
    def from_orders(
        cls, orders: Mapping[str, Iterable[Task]], after: Mapping[Task, tuple[Task, ...]] | None = None
    ) -> Plan:
        """Returns the plan of the orders by resource; a resource that is missing has no tasks."""
        compute, intra, inter = (tuple(orders.get(resource, ())) for resource in RESOURCES)
        return cls(compute, intra, inter, after or {})

    @classmethod
    def parse(cls, source: str) -> Plan:
        """Returns the plan that a text stands for. Raises `ConfigError`, naming the line, for what is not one."""
        return cls.from_orders(*_read(source))


def _changed(
    standard: Mapping[Task, tuple[Task, ...]], after: Mapping[Task, Iterable[Task]]
) -> dict[Task, tuple[Task, ...]]:
    """Returns the entries of `after` that say something else than the standard, in a canonical order."""
    changed = {}
    for task, given in after.items():
        tasks = tuple(given)
        for named in (task, *tasks):
            if named not in standard:
                missing = f"there is no {name(named)} in the plan"
                raise ConfigError(f"plan: after {name(task)}: {missing}; add it to a resource")
        if set(tasks) != set(standard[task]):
            changed[task] = tuple(sorted(set(tasks), key=name))
    return dict(sorted(changed.items(), key=lambda item: name(item[0])))


def _sequence(plan: Plan) -> tuple[tuple[Task, ...], tuple[tuple[int, ...], ...]]:
    """Returns `Plan.sequence` and `Plan.before`."""
    # Tasks go by number: inter first, so that of tasks that start together collectives are issued first.
    tasks = tuple(dict.fromkeys((*plan.inter, *plan.intra, *plan.compute)))
    number = {task: index for index, task in enumerate(tasks)}
    before = [[number[waited] for waited in plan.dependencies[task]] for task in tasks]
    for order in (plan.inter, plan.intra, plan.compute):
        for earlier, index in pairwise(number[task] for task in order):
            if earlier not in before[index]:
                before[index].append(earlier)
    # Tasks of a circle, and those behind it, never get ready: they are missing from the order.
    places = issue_order(before, followers_of(before))
    if len(places) != len(tasks):
        stuck = set(tasks) - {tasks[index] for index in places}
        raise ConfigError(_circle(plan.orders, plan.dependencies, stuck))
    place = {index: position for position, index in enumerate(places)}
    sequence = tuple(tasks[index] for index in places)
    return sequence, tuple(tuple(place[waited] for waited in before[index]) for index in places)


def _check_tasks(orders: Mapping[str, Sequence[Task]]) -> None:
    """Raises `ConfigError` unless each task is one, stands where it can run, and has all chunks beside it."""
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
                raise ConfigError(f"plan: {name(task)} has a size; only a gradient-all-reduce can have one")
            if (resource == "compute") == (kind in LINKS) and kind not in FUSED:
                cure = f"put it on {LINKS[kind]}" if kind in LINKS else "put it on compute"
                raise ConfigError(f"plan: {name(task)} ({kind}) cannot run on {resource}; {cure}")
            on = places.setdefault(task[:4], [])
            if on and (resource in on or kind not in FUSED):
                where = f"{on[0]} and {resource}" if resource not in on else f"{resource} twice"
                raise ConfigError(f"plan: {name(task)} is on {where}; take one of them away")
            if kind in PIPELINE or kind in FUSED:
                chunks.setdefault((phase, layer), {}).setdefault(kind, set()).add(chunk)
            on.append(resource)
    for named, on in places.items():
        usual = resources_of(named[0])
        if named[0] in FUSED and set(on) != set(usual):
            where = f"plan: {name(Task(*named))} ({named[0]}) is on {' and '.join(on)}"
            raise ConfigError(f"{where}, but computes and sends at once; put it on {' and '.join(usual)}")
    for place, by_kind in chunks.items():
        _check_chunks(place, by_kind)


def _circle(orders: Mapping[str, Sequence[Task]], dependencies: Mapping[Task, Sequence[Task]], stuck: set[Task]) -> str:
    """Returns which of the stuck tasks wait for each other: a circle, each link with its reason."""
    links = [(earlier, task, resource) for resource, tasks in orders.items() for earlier, task in pairwise(tasks)]
    seen: dict[Task, int] = {}
    path: list[tuple[str, str]] = []
    task = next(task for tasks in orders.values() for task in tasks if task in stuck)
    while task not in seen:
        seen[task] = len(path)
        needed = next((waited for waited in dependencies[task] if waited in stuck), None)
        if needed is not None:
            path.append((f"{name(task)} needs {name(needed)}", ""))
        else:
            # It needs no stuck task, so one stands ahead of it on a resource.
            needed, resource = next((e, on) for e, later, on in links if later == task and e in stuck)
            cure = f"move {name(task)} forward on {resource}"
            path.append((f"{name(task)} stands behind {name(needed)} on {resource}", cure))
        task = needed
    reasons = path[seen[task] :]
    cure = next((cure for _, cure in reasons if cure), "change what they need")
    return f"plan: it would never end: {', '.join(reason for reason, _ in reasons)}; {cure}"


def _check_chunks(place: tuple[str | None, int | None], chunks: Mapping[str, set[int | None]]) -> None:
    """Raises `ConfigError` unless the pipeline of one layer and phase has chunks 0, 1, … r − 1 of each of its kinds."""
    phase, layer = place
    fused = next((kind for kind in chunks if kind in FUSED), None)
    extra_kind = next((kind for kind in chunks if kind != fused), None)
    if fused is not None and extra_kind is not None:
        whole, part = (name(Task(kind, min(chunks[kind], key=str), layer, phase)) for kind in (fused, extra_kind))
        where = f"plan: {part} ({extra_kind}) is beside {whole} ({fused})"
        raise ConfigError(f"{where}, which does all of a chunk's way; take one of them away")
    degree = max(map(len, chunks.values()))
    for kind, numbers in chunks.items():
        missing = next((chunk for chunk in range(degree) if chunk not in numbers), None)
        if missing is not None:
            extra = [name(Task(kind, chunk, layer, phase)) for chunk in numbers - set(range(degree))]
            cure = f"number {extra[0]} from 0 on" if extra else "add it, or take that chunk away everywhere"
            has = f"the layer has {degree} chunk{'s' * (degree > 1)}"
            raise ConfigError(f"plan: {name(Task(kind, missing, layer, phase))} is missing: {has}; {cure}")
