"""The executor: runs a plan's tasks, each resource in the plan's order, and measures them if asked to.

    execute(plan, {"dispatch": send, "expert": compute, …}, stop=topology_fail, recorder=recorder)

A body is a function of the task's chunk that does the work of all tasks of one kind; what it needs from other tasks it
finds where these have put it, and the plan's dependencies see to it that it is there.

On a CPU, computation runs on the calling thread and each kind of link on a thread of its own, whose collectives wait
without holding the interpreter. On CUDA, every resource is a stream and every dependency an event: the host issues the
tasks in the plan's `sequence` and waits for nothing, so that a CUDA graph can capture the whole. One thread issues them
in an order that all ranks share, which is what NCCL asks for where several communicators are in use (`nccl.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.backend import triton_serves
from fusedmoe.runtime.recorder import Recorder, profiling, span
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.task import (
    COUNTS,
    FUSED,
    GATHER,
    PIPELINE,
    REDUCE,
    RESOURCES,
    WEIGHT_GRADIENTS,
    Task,
    TaskKind,
    resources_of,
)
from fusedmoe.threads import LOOK_S, Helper

Bodies = Mapping[str, Callable[[Task], None]]

#: Whose plans a layer follows: its own schedule's, a training step's (`fusedmoe.training.plan_step`), or that of blocks
#: in micro-batches (`fusedmoe.pipeline`).
Follows = Literal["itself", "step", "blocks"]


def execute(
    plan: Plan,
    bodies: Bodies,
    *,
    stop: Callable[[BaseException], None],
    streams: Mapping[str, torch.cuda.Stream] | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Runs every task of the plan once, without gradients, and returns when all are done (on CUDA: issued).

    Args:
        bodies: the function that does the tasks of a kind, for each kind in the plan.
        stop: called with an exception in a body, so that other ranks learn of it, and with them the collectives that
            this rank is still waiting in. All waits are those of the bodies; nothing here waits longer than these.
        streams: a stream for each resource, on CUDA.
    Raises:
        ConfigError: a task of a kind without a body, or a fused operation: kernels run these, not a plan's tasks.
            Nothing has run then.
        Exception: what a body raised; of several the first.
    """
    if not plan.kinds <= bodies.keys() or not plan.kinds.isdisjoint(FUSED):
        require_runnable(plan, [kind for kind in bodies if kind not in FUSED], "execute: the plan")
    body = _measured(bodies, recorder)
    with torch.no_grad():
        # Threads have nothing to give where no two tasks can run at the same time.
        if streams is None and plan.overlaps:
            _on_threads(plan, body, stop)
            return
        try:
            if streams is not None:
                _on_streams(plan, body, streams)
            else:
                for task in plan.sequence:
                    body(task)
        except BaseException as error:
            stop(error)
            raise


def _measured(bodies: Bodies, recorder: Recorder | None) -> Callable[[Task], None]:
    """Returns what runs a task: the body of its kind, inside a span where anybody listens."""
    if recorder is None and not profiling():
        return lambda task: bodies[task.kind](task)

    def body(task: Task) -> None:
        kind, chunk, layer, phase, _ = task
        (on,) = resources_of(kind)  # where it works, also where another link's thread or stream runs it
        with span(recorder, kind, kind=kind, resource=on, chunk=chunk, layer=layer, phase=phase):
            bodies[kind](task)

    return body


def _on_threads(plan: Plan, body: Callable[[Task], None], stop: Callable[[BaseException], None]) -> None:
    """Runs compute on the calling thread and each kind of link on a thread of its own; returns when all are done.

    After a `RankError` that the ranks have agreed on, tasks that do not follow from its task still run: the same on all
    ranks, so that no rank waits for a task that another one left out.
    """
    done = {task: threading.Event() for task in plan.tasks}
    errors: list[BaseException] = []
    agreed: list[BaseException] = []
    skipped: set[Task] = set()
    links: list[tuple[Helper, Future[None]]] = []
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def fail(error: BaseException) -> None:
        errors.append(error)
        try:
            if errors[0] is error:
                stop(error)
        finally:
            # Nobody may wait for a task that will never run.
            for event in done.values():
                event.set()

    def work(resource: str) -> None:
        ended = False
        for task in plan.on(resource):
            for earlier in plan.waits[task]:
                # Waits in slices, and looks between them whether the threads of the links still live.
                while not done[earlier].wait(LOOK_S):
                    for thread, works in links:
                        thread.check(works)
            if errors:
                return
            # What follows from a task that was skipped is skipped, on all ranks alike.
            ended = ended or not skipped.isdisjoint(plan.waits[task])
            try:
                if not ended:
                    body(task)
            except RankError as error:
                if not error.agreed:
                    raise
                agreed.append(error)
                ended = True
            if ended:
                skipped.add(task)
            done[task].set()

    def link(resource: str) -> None:
        try:
            # Modes are a thread's own, and hooks compute here, too. Casts without gradients are not for the caller, who
            # would find them in the cache.
            cast = torch.autocast("cpu", dtype, cache_enabled=False) if autocast else nullcontext()
            with torch.inference_mode(inference), torch.no_grad(), cast:
                work(resource)
        except BaseException as error:
            fail(error)

    try:
        # Links first: their threads wait for the network while computation begins here.
        for resource in RESOURCES[1:]:
            if plan.on(resource):
                thread = Helper(f"fusedmoe {resource}")
                links.append((thread, thread.begin(partial(link, resource))))
                thread.end()
        work(RESOURCES[0])
    except BaseException as error:
        fail(error)
    for thread, works in links:
        thread.result(works)
    if errors or agreed:
        try:
            raise (errors or agreed)[0]
        finally:
            # Its traceback leads to these lists: a circle would keep tensors and process groups until the collector
            # comes by.
            errors.clear()
            agreed.clear()


def _on_streams(plan: Plan, body: Callable[[Task], None], streams: Mapping[str, torch.cuda.Stream]) -> None:
    """Issues the tasks in the plan's sequence, each on its resource's stream behind the events of what it waits for."""
    caller = torch.cuda.current_stream()
    # Streams of the links must not run ahead of what the caller's stream has issued before.
    begun = torch.cuda.Event()
    begun.record(caller)
    used = [stream for resource, stream in streams.items() if plan.on(resource)]
    for stream in used:
        stream.wait_event(begun)
    done: dict[Task, torch.cuda.Event] = {}
    for task in plan.sequence:
        stream = streams[plan.resources[task][0]]
        for earlier in plan.waits[task]:
            stream.wait_event(done[earlier])
        # Switching to the stream that is current already would cost time for nothing.
        with torch.cuda.stream(stream) if stream != caller else nullcontext():
            body(task)
            done[task] = torch.cuda.Event()
            done[task].record(stream)
    for stream in used:
        caller.wait_stream(stream)


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a layer and its ranks, which decide the kinds of tasks that run here.

    Attributes:
        ep, esp: ranks that share the experts, and the shards of each.
        grouped: the experts are the library's own products; else modules.
        direct: nothing but kernels sees rows between the gate's choice and the experts' results: no hooks, no order by
            products, no experts that move.
        dtype, device: of the rows.
        heap: tells whether all of the ranks have memory that kernels of the others address. It may be collective.
        copies: experts are copied to other ranks for a while (`fusedmoe.layers.dynamic_experts`).
    """

    ep: int = 1
    esp: int = 1
    grouped: bool = True
    direct: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    heap: Callable[[], bool] = lambda: False
    copies: bool = False


def runnable_kinds(layer: Capabilities, follows: Follows) -> tuple[str, ...]:
    """Returns the kinds of tasks that plans may have."""
    # Dispatch and combine without peers are among them: hooks may act there.
    parts = PIPELINE if layer.esp > 1 else PIPELINE[::2]
    after = (TaskKind.GRADIENT_ALL_REDUCE, TaskKind.LOSS, TaskKind.OPTIMIZER)
    if follows == "step":
        # What autograd runs beside a step's tasks is in its plan for the time that it takes.
        return (TaskKind.ATTENTION, TaskKind.GATE, TaskKind.OTHER, COUNTS, *parts, *after)
    if follows == "blocks":
        copied = (GATHER, REDUCE) if layer.copies else ()
        return (TaskKind.ATTENTION, TaskKind.PERMUTE, *parts, *WEIGHT_GRADIENTS.values(), *copied, *after)
    # Fused operations do all of a layer that follows its own schedule; in a step's plan nothing runs them.
    split = layer.ep > 1 or layer.esp > 1
    served = triton_serves(layer.device) and layer.dtype != torch.float64
    # The heap is asked for last, and only where all else allows it: it may be collective.
    if not (split and layer.grouped and layer.direct and served and layer.heap()):
        return parts
    # Where experts are split over both axes, rows go from every rank straight to all shards of their experts.
    over_experts, over_shards = FUSED
    return (*parts, over_experts if layer.ep > 1 else over_shards)


def require_runnable(plan: Plan, kinds: Collection[str], whose: str) -> None:
    """Raises `ConfigError`, naming the task and what can run, for a plan with a task of another kind."""
    if not plan.kinds.issubset(kinds):
        strange = next(task for task in plan.sequence if task.kind not in kinds)
        raise ConfigError(
            f"{whose} has {name(strange)} ({strange.kind}), which cannot run here; what can: {', '.join(kinds)}"
        )


class Streams:
    """The CUDA streams that a plan runs on, made on first use; copies and pickles make their own."""

    _links: dict[str, torch.cuda.Stream] | None = None

    def on(self, device: torch.device) -> dict[str, torch.cuda.Stream] | None:
        """Returns a stream for each resource, the current one for computation; None where the device is no GPU."""
        if device.type != "cuda":
            return None
        if self._links is None:
            self._links = {link: torch.cuda.Stream(device) for link in ("intra", "inter")}
        return {"compute": torch.cuda.current_stream(device), **self._links}

    def __getstate__(self) -> dict[str, object]:
        return {}
