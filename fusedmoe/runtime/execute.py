"""Executor: runs the tasks of a plan in the order of each resource, and optionally records them.

    execute(plan, {"dispatch": send, "expert": compute, …}, stop=topology_fail, recorder=recorder)

One function (body) runs all tasks of a kind. Bodies exchange tensors through shared state; the plan's dependencies
ensure that inputs are complete.

On a CPU, compute tasks run on the calling thread and each kind of link has a thread, whose collectives release the GIL.
With CUDA, each resource is a stream and each dependency an event: one thread launches all tasks in the plan's
`sequence`, the launch order that NCCL requires on all ranks (`nccl.md`), without waiting. A CUDA graph can capture
them.
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
from fusedmoe.kernels.backend import device_uses_triton
from fusedmoe.runtime.recorder import Recorder, is_profiling, span
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.task import (
    COUNT_EXCHANGE,
    FUSED,
    PIPELINE,
    RESOURCES,
    SPARSE_GATHER,
    SPARSE_REDUCE,
    WEIGHT_GRADIENTS,
    Task,
    TaskKind,
    resources_of,
)
from fusedmoe.threads import POLL_S, WorkerThread

Bodies = Mapping[str, Callable[[Task], None]]

#: Owner of the plan a layer follows: the layer's schedule, a training step (`fusedmoe.training.plan_step`), or blocks
#: in micro-batches (`fusedmoe.pipeline`).
PlanOwner = Literal["itself", "step", "blocks"]


def execute(
    plan: Plan,
    bodies: Bodies,
    *,
    stop: Callable[[BaseException], None],
    streams: Mapping[str, torch.cuda.Stream] | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Run every task of the plan once, without gradients. Returns when all are complete (CUDA: launched).

    Args:
        bodies: for each kind in the plan, the function that runs its tasks. Only bodies wait for other ranks.
        stop: called with an exception of a body, to abort this rank's collectives and notify other ranks.
        streams: one stream per resource, with CUDA.
    Raises:
        ConfigError: a kind without a body, or a fused operation, which only kernels can run. No task has run.
        Exception: the first exception of a body.
    """
    if not plan.kinds <= bodies.keys() or not plan.kinds.isdisjoint(FUSED):
        require_runnable(plan, [kind for kind in bodies if kind not in FUSED], "execute: the plan")
    body = _make_body(bodies, recorder)
    with torch.no_grad():
        if streams is None and plan.overlaps:
            _run_on_threads(plan, body, stop)
            return
        try:
            if streams is not None:
                _run_on_streams(plan, body, streams)
            else:
                for task in plan.sequence:
                    body(task)
        except BaseException as error:
            stop(error)
            raise


def _make_body(bodies: Bodies, recorder: Recorder | None) -> Callable[[Task], None]:
    if recorder is None and not is_profiling():
        return lambda task: bodies[task.kind](task)

    def body(task: Task) -> None:
        kind, chunk, layer, phase, _ = task
        (on,) = resources_of(kind)  # the hardware may differ from the queue
        with span(recorder, kind, kind=kind, resource=on, chunk=chunk, layer=layer, phase=phase):
            bodies[kind](task)

    return body


def _run_on_threads(plan: Plan, body: Callable[[Task], None], stop: Callable[[BaseException], None]) -> None:
    """Run compute on the calling thread and each kind of link on a separate thread; return when all are complete.

    After a `RankError` on which all ranks have agreed, tasks that do not depend on the failed task still run: no rank
    waits for a task that another rank skipped.
    """
    done = {task: threading.Event() for task in plan.tasks}
    errors: list[BaseException] = []
    agreed: list[BaseException] = []
    skipped: set[Task] = set()
    links: list[tuple[WorkerThread, Future[None]]] = []
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def fail(error: BaseException) -> None:
        errors.append(error)
        try:
            if errors[0] is error:
                stop(error)
        finally:
            for event in done.values():
                event.set()

    def work(resource: str) -> None:
        ended = False
        for task in plan.on(resource):
            for earlier in plan.waits[task]:
                # Detect link threads that have died.
                while not done[earlier].wait(POLL_S):
                    for thread, works in links:
                        thread.is_done(works)
            if errors:
                return
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
            # Autograd modes are thread-local. Casts without gradients must not enter the caller's autocast cache.
            cast = torch.autocast("cpu", dtype, cache_enabled=False) if autocast else nullcontext()
            with torch.inference_mode(inference), torch.no_grad(), cast:
                work(resource)
        except BaseException as error:
            fail(error)

    try:
        for resource in RESOURCES[1:]:
            if plan.on(resource):
                thread = WorkerThread(f"fusedmoe {resource}")
                links.append((thread, thread.submit(partial(link, resource))))
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
            # The traceback refers to these lists: the cycle would keep tensors and process groups alive.
            errors.clear()
            agreed.clear()


def _run_on_streams(plan: Plan, body: Callable[[Task], None], streams: Mapping[str, torch.cuda.Stream]) -> None:
    caller = torch.cuda.current_stream()
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
        with torch.cuda.stream(stream) if stream != caller else nullcontext():
            body(task)
            done[task] = torch.cuda.Event()
            done[task].record(stream)
    for stream in used:
        caller.wait_stream(stream)


@dataclass(frozen=True)
class Capabilities:
    """Properties of a layer and its ranks that determine the supported kinds of tasks.

    Attributes:
        ep, esp: sizes of the expert-parallel and expert-sharding groups.
        has_grouped_experts: experts use the library's grouped products, not modules.
        is_kernel_only: only kernels access rows between the gate and the experts' results: no hooks, no einsum order,
            no dynamic placement.
        has_heap: returns whether all ranks have symmetric memory. May be collective.
        has_replicas: experts have replicas on other ranks (`fusedmoe.placement`).
    """

    ep: int = 1
    esp: int = 1
    has_grouped_experts: bool = True
    is_kernel_only: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    has_heap: Callable[[], bool] = lambda: False
    has_replicas: bool = False


def runnable_kinds(layer: Capabilities, plan_owner: PlanOwner) -> tuple[str, ...]:
    """Return the kinds of tasks that a plan made by `plan_owner` may contain. May be collective (`has_heap`)."""
    # Hooks may act in dispatch and combine even without peers.
    parts = PIPELINE if layer.esp > 1 else PIPELINE[::2]
    after = (TaskKind.GRADIENT_ALL_REDUCE, TaskKind.LOSS, TaskKind.OPTIMIZER)
    if plan_owner == "step":
        # The plan contains attention, gate and other work only for their duration: autograd runs them.
        return (TaskKind.ATTENTION, TaskKind.GATE, TaskKind.OTHER, COUNT_EXCHANGE, *parts, *after)
    if plan_owner == "blocks":
        copied = (SPARSE_GATHER, SPARSE_REDUCE) if layer.has_replicas else ()
        return (TaskKind.ATTENTION, TaskKind.PERMUTE, *parts, *WEIGHT_GRADIENTS.values(), *copied, *after)
    # Fused operations are available only to layers that follow their own schedule.
    split = layer.ep > 1 or layer.esp > 1
    has_kernels = device_uses_triton(layer.device) and layer.dtype != torch.float64
    # `has_heap` may be collective: only if all other conditions hold.
    if not (split and layer.has_grouped_experts and layer.is_kernel_only and has_kernels and layer.has_heap()):
        return parts
    over_experts, over_shards = FUSED
    return (*parts, over_experts if layer.ep > 1 else over_shards)


def require_runnable(plan: Plan, kinds: Collection[str], whose: str) -> None:
    """Raise `ConfigError`, beginning with `whose`, if the plan has a task whose kind is not in `kinds`."""
    if not plan.kinds.issubset(kinds):
        unsupported = next(task for task in plan.sequence if task.kind not in kinds)
        raise ConfigError(
            f"{whose} has {task_name(unsupported)} ({unsupported.kind}), which cannot run here; "
            f"supported: {', '.join(kinds)}"
        )


class Streams:
    """CUDA streams for the resources of a plan, created on first use. Not copied or pickled."""

    _link_streams: dict[str, torch.cuda.Stream] | None = None

    def on(self, device: torch.device) -> dict[str, torch.cuda.Stream] | None:
        """Return a stream per resource, the current one for compute; None on a CPU."""
        if device.type != "cuda":
            return None
        if self._link_streams is None:
            self._link_streams = {link: torch.cuda.Stream(device) for link in ("intra", "inter")}
        return {"compute": torch.cuda.current_stream(device), **self._link_streams}

    def __getstate__(self) -> dict[str, object]:
        return {}
