"""Seconds of instructions: each operator is measured once, collectives lie between measured points (Lancet §3).

An operator is known by its name and the shapes, strides and dtypes of what it is given, a collective by its bytes. What
was measured is kept on disk, one file for each machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_aggregate

from fusedmoe.files import cache_dir, read_kept
from fusedmoe.graph.graph_ranks import GraphRanks, resolve
from fusedmoe.graph.instructions import OPERATOR, bytes_of, computes, concrete, group_of
from fusedmoe.runtime.cache import fingerprint, write
from fusedmoe.threads import Helper

T = TypeVar("T")

#: The smallest collective that is measured; each further one is twice as large.
FIRST_BYTES = 1024

# The first run of an operator is not counted: its memory is new, and a library may set itself up.
_REPEATS = 3
# An operator that takes longer is measured fewer times.
_LONG_S, _LONG_REPEATS = 0.05, 2
# Of one whose inputs cannot be made up: a launch, and the bytes that it reads and writes at this speed.
_LAUNCH_S, _BYTES_PER_S = 5e-6, 5e9


class OperatorCosts(Protocol):
    """Seconds from which graphs are planned: measured ones, or a user's own (`GraphBackend(costs=…)`)."""

    def operator_s(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Seconds of an operator on such arguments: tensors, fake or real, of which only the shapes count."""

    def collective_s(self, size: float) -> float:
        """Seconds of an all-to-all of so many bytes on each rank."""


@dataclass(frozen=True)
class Points:
    """Seconds of a collective between measured points, in a straight line from each to the next.

    `sizes`: bytes, ascending. Below the first it takes as long as that one, above the last longer in proportion.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        if size > self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        return float(np.interp(size, self.sizes, self.seconds))


@dataclass
class MeasuredCosts:
    """Seconds of operators on this machine. They are measured when they are asked for, unless they are known.

    `points`: of all-to-alls. `known`: seconds by operator. `path`: where these are kept; None: nowhere. `fresh`: what
    this rank has measured, and others may not know.
    """

    points: Points
    known: dict[str, float] = field(default_factory=dict)
    path: Path | None = None
    fresh: dict[str, float] = field(default_factory=dict)

    def save(self) -> None:
        if self.path is not None:
            write(self.path, json.dumps(self.known), "what operators take")

    def operator_s(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        key = operator_key(target, args, kwargs)
        if key not in self.known:
            self.known[key] = self.fresh[key] = measure(target, args, kwargs)
        return self.known[key]

    def agree(self, found: Iterable[Mapping[str, float]]) -> None:
        """Takes what every rank has measured (its `fresh`): of each operator the seconds of the slowest rank."""
        # All others wait for that one at the next all-to-all.
        slowest: dict[str, float] = {}
        for key, seconds in (pair for own in found for pair in own.items()):
            slowest[key] = max(seconds, slowest.get(key, 0.0))
        self.known |= slowest
        self.fresh.clear()

    def collective_s(self, size: float) -> float:
        return self.points.at(size)


def node_s(costs: OperatorCosts, node: fx.Node) -> float:
    """Seconds of a node that computes; 0 for one that does not."""
    # Views and waits cost the device nothing, and functions of Python cannot be measured without their arguments.
    if not computes(node) or not isinstance(node.target, OPERATOR):
        return 0.0
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda one: map_aggregate(one.meta.get("val"), _plain)
    )
    return costs.operator_s(node.target, args, kwargs)


def _plain(value: Any) -> Any:
    """Returns the value with sizes as they were when the graph was captured."""
    if isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(*_layout(value), dtype=value.dtype, device=value.device)
    return concrete(value) if isinstance(value, torch.SymInt) else value


def _layout(tensor: torch.Tensor) -> list[list[int]]:
    """Returns the sizes and the strides of a tensor, as numbers."""
    return [[concrete(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())]


def start_s(costs: OperatorCosts, node: fx.Node) -> float:
    """Seconds of the collective that a node starts."""
    return costs.collective_s(bytes_of(node.all_input_nodes[0]))


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """List what the arguments of an operator hold, in nested sequences and dictionaries too."""
    leaves: list[Any] = []
    map_aggregate((args, dict(kwargs)), leaves.append)
    return leaves


def operator_key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    def name(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape, stride = ("x".join(map(str, numbers)) for numbers in _layout(value))
            return f"{str(value.dtype).removeprefix('torch.')}[{shape}:{stride}]@{value.device.type}"
        return str(concrete(value)) if isinstance(value, torch.SymInt) else repr(value)

    return f"{target}({', '.join(map(name, _leaves(args, kwargs)))})"


def measure(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Returns the seconds of an operator on made-up tensors: numbers of a normal distribution, indices of 0."""

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete(value) if isinstance(value, torch.SymInt) else value
        sizes, strides = _layout(value)
        # The memory that the strides reach, gaps and overlaps included: they decide how fast an operator is.
        length = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if all(sizes) else 0
        flat = torch.zeros(max(length, 0), dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point:
            flat.normal_(generator=torch.Generator(value.device).manual_seed(0))
        return flat.as_strided(sizes, strides)

    tensors = [value for value in _leaves(args, kwargs) if isinstance(value, torch.Tensor)]
    device = next((value.device for value in tensors), torch.device("cpu"))
    draws = torch.Tag.nondeterministic_seeded in target.tags

    def run() -> list[float]:
        own_args, own_kwargs = map_aggregate((args, dict(kwargs)), made)
        timed(lambda: target(*own_args, **own_kwargs), device)
        seconds = [timed(lambda: target(*own_args, **own_kwargs), device)]
        while len(seconds) < (_REPEATS if seconds[0] < _LONG_S else _LONG_REPEATS):
            seconds.append(timed(lambda: target(*own_args, **own_kwargs), device))
        return seconds

    with torch.random.fork_rng(enabled=draws):
        try:
            seconds = outside_of_capture(run, device)
        except (RuntimeError, IndexError, TypeError, ValueError):  # it takes no made-up numbers
            moved = sum(concrete(value.numel()) * value.element_size() for value in tensors)
            return _LAUNCH_S + moved / _BYTES_PER_S
    return statistics.median_low(seconds)  # what disturbs a measurement makes it longer


def outside_of_capture(call: Callable[[], T], device: torch.device) -> T:
    """Make a call inside a capture in which operators compute, as if nothing were captured."""

    def run() -> T:
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return call()

    # Each thread has modes of its own, and a new one has none. (With the capture's dispatcher in Python a collective
    # would keep the interpreter's lock while it waits, and a thread of its process group would wait for the lock.)
    helper = Helper("fusedmoe-measure")
    return helper.result(helper.begin(run))


def timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def point_sizes(largest: float) -> list[int]:
    """Returns 1 KB·2^i, up to the first that is not below `largest` bytes."""
    sizes = [FIRST_BYTES]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def all_to_all_points(
    graph_ranks: GraphRanks, all_to_alls: Sequence[fx.Node], device: torch.device, facts: dict[str, Any]
) -> Points:
    """Returns points of the first all-to-all's group, as the first rank has kept them or as all measure. Collective.

    `facts`: all that the seconds depend on besides the group.
    """
    group = resolve(group_of(all_to_alls[0]))
    facts = facts | {"group": {"size": dist.get_world_size(group), "backend": dist.get_backend(group)}}
    path = cache_dir() / f"all-to-all-{fingerprint(facts)}.json"
    known = graph_ranks.from_first(lambda: load_numbers(path))
    sizes = point_sizes(max(bytes_of(one.all_input_nodes[0]) for one in all_to_alls))
    missing = [size for size in sizes if str(size) not in known]
    if missing:
        found = outside_of_capture(partial(measure_points, group, device, missing, graph_ranks.wait), device)
        known |= dict(zip(map(str, missing), found, strict=True))
        if graph_ranks.leader:
            write(path, json.dumps(known), "what all-to-alls take")
    by_size = sorted((int(size), seconds) for size, seconds in known.items())
    return Points(tuple(size for size, _ in by_size), tuple(seconds for _, seconds in by_size))


def measure_points(
    group: Any, device: torch.device, sizes: Sequence[int], wait: Callable[[dist.Work], None]
) -> list[float]:
    """Returns the seconds of all-to-alls of so many bytes on the slowest rank. Collective over the group."""
    count = dist.get_world_size(group)
    medians_s = []
    for size in sizes:
        data = torch.zeros(count * -(-size // count), dtype=torch.uint8, device=device)
        out = torch.empty_like(data)

        def run(data: torch.Tensor = data, out: torch.Tensor = out) -> None:
            wait(dist.all_to_all_single(out, data, group=group, async_op=True))

        run()  # connections are made with the first message
        medians_s.append(statistics.median(timed(run, device) for _ in range(_REPEATS)))
    # Who waits for an all-to-all waits for the slowest rank; and all ranks plan with the same numbers.
    slowest = torch.tensor(medians_s, dtype=torch.float64, device=device)
    wait(dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group, async_op=True))
    return slowest.tolist()


def load_numbers(path: Path) -> dict[str, float]:
    """Returns the numbers that `MeasuredCosts.save` has written; none where they cannot be read."""
    found: dict[str, float] = json.loads(read_kept(path) or "{}")
    return found
