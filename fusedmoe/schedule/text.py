"""Plans as text, written and read.

    compute: E0 E1 E2                       a line for each resource that has tasks
    intra: AG0 AG1 AG2 RS0 RS1 RS2
    inter: D0 D1 D2 AR0(4194304) C0 C1 C2
    after AR0: E0                           only for a task that does not wait for what the rules say

A word is the symbol of a kind (`timeline.SYMBOLS`) and a chunk; in parentheses the bytes of a gradient-all-reduce.
A fused operation has the symbols of its parts, `DEC0`, and stands on the lines of all that it occupies.
Words with a prefix belong to other layers and passes: `f3.D0` to layer 3 forward, `b3.D0` backward, `f.L` to no layer,
`.Opt` to neither. Words without one belong to layer 0 forward, or to what `layer:` and `phase:` lines ahead of the
orders say: a plan of one layer and pass is written so. # starts a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.timeline import PHASES, RESOURCES, SYMBOLS

_SYMBOLS = {kind: symbol or kind for kind, symbol in SYMBOLS.items()}
_KINDS = {symbol: kind for kind, symbol in _SYMBOLS.items()}
_LETTERS = {"forward": "f", "backward": "b", None: ""}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}

_WORD = re.compile(
    r"(?:(?P<phase>[fb]?)(?P<layer>\d*)(?P<dot>\.))?(?P<kind>[A-Za-z]+)(?P<chunk>\d*)(?:\((?P<size>\d+)\))?", re.ASCII
)

_PLACE = (0, "forward")  # the layer and phase of a word without a prefix

Orders = dict[str, tuple[Task, ...]]


def name(task: Task) -> str:
    """A task in a word, with its prefix and without its size: b3.D0."""
    return f"{_LETTERS[task.phase]}{_number(task.layer)}.{_short(task)}"


def write(orders: Mapping[str, Iterable[Task]], after: Mapping[Task, Iterable[Task]]) -> str:
    """The text of a plan, ending without a line break. The same plan gives the same text everywhere."""
    places = {(task.layer, task.phase) for order in orders.values() for task in order}
    lines = []
    common = places.pop() if len(places) == 1 else None
    if common is not None and None not in common:
        layer, phase = common
        lines += [f"phase: {phase}"] * (phase != _PLACE[1]) + [f"layer: {layer}"] * (layer != _PLACE[0])
        word = _short
    else:
        word = name
    for resource, order in orders.items():
        words = [word(task) + ("" if task.size is None else f"({task.size})") for task in order]
        if words:
            lines.append(f"{resource}: {' '.join(words)}")
    for task, before in after.items():
        lines.append(" ".join([f"after {word(task)}:", *map(word, before)]))
    return "\n".join(lines)


def read(source: str) -> tuple[Orders, dict[Task, tuple[Task, ...]]]:
    """The orders and the unusual dependencies that a text gives.

    Raises:
        ConfigError: a line or a word that the grammar does not know, a resource twice, or `after` with a task that no
            order has.
    """
    layer: int | None = _PLACE[0]
    phase: str | None = _PLACE[1]
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
        elif head == "layer" and len(words) == 1 and words[0].isdecimal():
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
    named = {task[:4]: task for order in orders.values() for task in order}
    after: dict[Task, tuple[Task, ...]] = {}
    for number, word, words in waits:
        tasks = []
        for one in (word, *words):
            task = _task(one, layer, phase, number)
            if task[:4] not in named:
                raise ConfigError(f"plan, line {number}: there is no {one} in the plan; add it to a resource")
            tasks.append(named[task[:4]])
        after[tasks[0]] = tuple(tasks[1:])
    return orders, after


def _task(word: str, layer: int | None, phase: str | None, line: int) -> Task:
    found = _WORD.fullmatch(word)
    if found is None or found["kind"] not in _KINDS:
        known = " ".join(_KINDS)
        raise ConfigError(f"plan, line {line}: {word!r} is not a task such as D0 or b3.AR1(4096); symbols: {known}")
    if found["dot"]:
        phase, layer = _PHASES[found["phase"]], _integer(found["layer"])
    return Task(_KINDS[found["kind"]], _integer(found["chunk"]), layer, phase, _integer(found["size"]))


def _short(task: Task) -> str:
    return f"{_SYMBOLS[task.kind]}{_number(task.chunk)}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _integer(digits: str | None) -> int | None:
    return int(digits) if digits else None
