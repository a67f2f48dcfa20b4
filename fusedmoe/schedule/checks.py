"""What makes a plan one that can run, and what is said of one that cannot: the task, what is wrong, and the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.task import FUSED, LINKS, PIPELINE, Task, resources_of
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import PHASES, SYMBOLS

Orders = Mapping[str, Sequence[Task]]


def check_tasks(orders: Orders) -> None:
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
            for field, number, least in (("chunk", chunk, 0), ("layer", layer, 0), ("size", size, 1)):
                if number is not None and (type(number) is not int or number < least):
                    raise ConfigError(f"plan: {field} {number!r} of {task!r} is not an integer from {least}, or None")
            if size is not None and kind != "gradient-all-reduce":
                raise ConfigError(f"plan: {name(task)} has a size; only a gradient-all-reduce can have one")
            if (resource == "compute") == (kind in LINKS) and kind not in FUSED:
                cure = f"put it on {LINKS[kind]}" if kind in LINKS else "put it on compute"
                raise ConfigError(f"plan: {name(task)} ({kind}) cannot run on {resource}; {cure}")
            found = places.setdefault(task[:4], [])
            if found and (resource in found or kind not in FUSED):
                where = f"{found[0]} and {resource}" if resource not in found else f"{resource} twice"
                raise ConfigError(f"plan: {name(task)} is on {where}; take one of them away")
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


def circle(orders: Orders, dependencies: Mapping[Task, Sequence[Task]], stuck: set[Task]) -> str:
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
            path.append((f"{name(task)} needs {name(needed)}", ""))
            task = needed
        else:
            earlier, resource = next(found for found in behind[task] if found[0] in stuck)
            cure = f"move {name(task)} forward on {resource}"
            path.append((f"{name(task)} stands behind {name(earlier)} on {resource}", cure))
            task = earlier
    reasons = path[seen[task] :]
    cure = next((cure for _, cure in reasons if cure), "change what they need")
    return f"plan: it would never end: {', '.join(reason for reason, _ in reasons)}; {cure}"


def _check_places(task: Task, found: Sequence[str]) -> None:
    """A fused operation is on compute and on its link."""
    usual = resources_of(task.kind)
    if set(found) != set(usual):
        where = f"plan: {name(task)} ({task.kind}) is on {' and '.join(found)}"
        raise ConfigError(f"{where}, but computes and sends at once; put it on {' and '.join(usual)}")


def _check_chunks(place: tuple[str | None, int | None], of: Mapping[str, set[int | None]]) -> None:
    """The pipeline of one layer and phase has chunks 0, 1, … r − 1 of each of its parts, and each part once."""
    phase, layer = place
    fused = next((kind for kind in of if kind in FUSED), None)
    other = next((kind for kind in of if kind != fused), None)
    if fused is not None and other is not None:
        whole, one = (name(Task(kind, min(of[kind], key=str), layer, phase)) for kind in (fused, other))
        raise ConfigError(
            f"plan: {one} ({other}) is beside {whole} ({fused}), which does all of a chunk's way; take one of them away"
        )
    degree = max(map(len, of.values()))
    for kind, found in of.items():
        missing = next((chunk for chunk in range(degree) if chunk not in found), None)
        if missing is not None:
            extra = [name(Task(kind, chunk, layer, phase)) for chunk in found - set(range(degree))]
            cure = f"number {extra[0]} from 0 on" if extra else "add it, or take that chunk away everywhere"
            raise ConfigError(
                f"plan: {name(Task(kind, missing, layer, phase))} is missing: the layer has {degree} "
                f"chunk{'s' * (degree > 1)}; {cure}"
            )
