"""Measured seconds of instructions: each operator once, all-to-alls interpolated between measured sizes (Lancet §3)."""

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

from fusedmoe.comm.collectives import max_over_ranks_s, wait
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import group_of as process_group_of
from fusedmoe.files import cache_dir, read_cache_file
from fusedmoe.graph.graph_ranks import GraphRanks, resolve_group
from fusedmoe.graph.instructions import OPERATOR, bytes_of, concrete_size, group_of, is_compute
from fusedmoe.runtime.cache import fingerprint, write_or_warn
from fusedmoe.threads import WorkerThread

T = TypeVar("T")

_MEASURING = "measuring all-to-alls"

#: Smallest measured collective in bytes. Each further size is twice as large.
FIRST_BYTES = 1024

# Timed repetitions after a warm-up run; fewer for operators that take longer than _LONG_S.
_REPEATS = 3
_LONG_S, _LONG_REPEATS = 0.05, 2
# Estimate for an operator that cannot run on synthetic inputs: launch seconds, plus its bytes at this bandwidth.
_LAUNCH_S, _BYTES_PER_S = 5e-6, 5e9


class OperatorCosts(Protocol):
    """Seconds used for planning: measured, or given by the user (`GraphBackend(costs=…)`)."""

    def operator_s(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Return the seconds of an operator. Tensors may be fake."""

    def collective_s(self, size: float) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank."""


@dataclass
class MeasuredCosts:
    """Seconds of operators, measured on first use.

    Attributes:
        points: seconds of all-to-alls by size in bytes, ascending. Interpolated linearly, constant below the first
            size, and proportional to the size above the last one.
        measured, unshared: seconds by `operator_key`, and the measurements not yet shared with other ranks.
        path: cache file, or None.
    """

    points: dict[int, float]
    measured: dict[str, float] = field(default_factory=dict)
    path: Path | None = None
    unshared: dict[str, float] = field(default_factory=dict)

    def save(self) -> None:
        if self.path is not None:
            write_or_warn(self.path, json.dumps(self.measured), "measured operator costs")

    def operator_s(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        key = operator_key(target, args, kwargs)
        if key not in self.measured:
            self.measured[key] = self.unshared[key] = measure_operator(target, args, kwargs)
        return self.measured[key]

    def merge(self, found: Iterable[Mapping[str, float]]) -> None:
        """Merge the `unshared` measurements of all ranks: the slowest per operator, because all ranks wait for it."""
        slowest: dict[str, float] = {}
        for key, seconds in (pair for own in found for pair in own.items()):
            slowest[key] = max(seconds, slowest.get(key, 0.0))
        self.measured |= slowest
        self.unshared.clear()

    def collective_s(self, size: float) -> float:
        largest, largest_s = list(self.points.items())[-1]
        if size > largest:
            return largest_s * size / largest
        return float(np.interp(size, list(self.points), list(self.points.values())))


def node_s(costs: OperatorCosts, node: fx.Node) -> float:
    """Return the seconds of an operator that computes; 0 for views, collectives, waits and Python functions."""
    if not is_compute(node) or not isinstance(node.target, OPERATOR):
        return 0.0
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda one: map_aggregate(one.meta.get("val"), _concrete_sizes)
    )
    return costs.operator_s(node.target, args, kwargs)


def _concrete_sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(*_layout(value), dtype=value.dtype, device=value.device)
    return concrete_size(value) if isinstance(value, torch.SymInt) else value


def _layout(tensor: torch.Tensor) -> list[list[int]]:
    return [[concrete_size(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())]


def all_to_all_s(costs: OperatorCosts, node: fx.Node) -> float:
    return costs.collective_s(bytes_of(node.all_input_nodes[0]))


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate((args, dict(kwargs)), leaves.append)
    return leaves


def operator_key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    def name(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape, stride = ("x".join(map(str, numbers)) for numbers in _layout(value))
            return f"{str(value.dtype).removeprefix('torch.')}[{shape}:{stride}]@{value.device.type}"
        return str(concrete_size(value)) if isinstance(value, torch.SymInt) else repr(value)

    return f"{target}({', '.join(map(name, _flatten(args, kwargs)))})"


def measure_operator(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Measure the seconds of an operator on synthetic tensors; estimate them if it does not accept these."""

    def synthesize(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete_size(value) if isinstance(value, torch.SymInt) else value
        sizes, strides = _layout(value)
        # Keep the strides, because they affect speed.
        length = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if all(sizes) else 0
        flat = torch.zeros(max(length, 0), dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point:
            flat.normal_(generator=torch.Generator(value.device).manual_seed(0))
        return flat.as_strided(sizes, strides)

    tensors = [value for value in _flatten(args, kwargs) if isinstance(value, torch.Tensor)]
    device = next((value.device for value in tensors), torch.device("cpu"))
    draws = torch.Tag.nondeterministic_seeded in target.tags

    def run() -> list[float]:
        own_args, own_kwargs = map_aggregate((args, dict(kwargs)), synthesize)
        time_call(lambda: target(*own_args, **own_kwargs), device)
        seconds = [time_call(lambda: target(*own_args, **own_kwargs), device)]
        while len(seconds) < (_REPEATS if seconds[0] < _LONG_S else _LONG_REPEATS):
            seconds.append(time_call(lambda: target(*own_args, **own_kwargs), device))
        return seconds

    with torch.random.fork_rng(enabled=draws):
        try:
            seconds = run_outside_capture(run, device)
        except (RuntimeError, IndexError, TypeError, ValueError):
            moved = sum(concrete_size(value.numel()) * value.element_size() for value in tensors)
            return _LAUNCH_S + moved / _BYTES_PER_S
    return statistics.median_low(seconds)  # disturbances only increase times


def run_outside_capture(call: Callable[[], T], device: torch.device) -> T:
    """Call a function eagerly during a graph capture, without gradients, and return its result."""

    def run() -> T:
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return call()

    # A new thread has no dispatch modes. With the capture's Python dispatcher a collective would hold the GIL while it
    # waits, and deadlock with its process group's thread.
    helper = WorkerThread("fusedmoe-measure")
    return helper.result(helper.submit(run))


def time_call(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measured_sizes(largest: float) -> list[int]:
    sizes = [FIRST_BYTES]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def all_to_all_times(
    graph_ranks: GraphRanks, all_to_alls: Sequence[fx.Node], device: torch.device, facts: dict[str, Any]
) -> dict[int, float]:
    """Return the seconds of all-to-alls in the group of `all_to_alls[0]` by size in bytes. Collective.

    Args:
        graph_ranks: ranks that run the graph; they use the leader's cache.
        all_to_alls: nodes of the graph; the largest input determines the sizes to measure.
        facts: key of the cache entry, to which the group's size and backend are added.
    """
    handle = resolve_group(group_of(all_to_alls[0]))
    facts = facts | {"group": {"size": dist.get_world_size(handle), "backend": dist.get_backend(handle)}}
    path = cache_dir() / f"all-to-all-{fingerprint(facts)}.json"
    measured = graph_ranks.broadcast_decision(lambda: load_numbers(path))
    sizes = measured_sizes(max(bytes_of(one.all_input_nodes[0]) for one in all_to_alls))
    missing = [size for size in sizes if str(size) not in measured]
    if missing:
        group = process_group_of(handle, "captured graph's", graph_ranks.timeout_s)
        found = run_outside_capture(partial(measure_all_to_alls, group, device, missing), device)
        measured |= dict(zip(map(str, missing), found, strict=True))
        if graph_ranks.is_leader:
            write_or_warn(path, json.dumps(measured), "measured all-to-all costs")
    return dict(sorted((int(size), seconds) for size, seconds in measured.items()))


def measure_all_to_alls(group: Group, device: torch.device, sizes: Sequence[int]) -> list[float]:
    """Return the slowest rank's median seconds of an all-to-all of each size in bytes. Collective over the group."""
    medians_s = []
    for size in sizes:
        data = torch.zeros(group.size * -(-size // group.size), dtype=torch.uint8, device=device)
        out = torch.empty_like(data)

        def run(data: torch.Tensor = data, out: torch.Tensor = out) -> None:
            wait(dist.all_to_all_single(out, data, group=group.handle, async_op=True), group, _MEASURING)

        run()
        medians_s.append(statistics.median(time_call(run, device) for _ in range(_REPEATS)))
    return max_over_ranks_s(group, medians_s, _MEASURING)


def load_numbers(path: Path) -> dict[str, float]:
    """Load numbers from a cache file; {} if it is missing or unreadable."""
    found: dict[str, float] = json.loads(read_cache_file(path) or "{}")
    return found
