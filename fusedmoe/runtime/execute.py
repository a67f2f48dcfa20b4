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
from fusedmoe.runtime.recorder import Recorder, span
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
    resources_of,
)
from fusedmoe.threads import LOOK_S, Helper

Bodies = Mapping[str, Callable[[Task], None]]

#: What plans a layer follows: those of its own schedule, that of a training step (`fusedmoe.training.plan_step`), or
#: that of blocks in micro-batches (`fusedmoe.pipeline`).
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
        bodies: for each kind in the plan, what does its tasks.
        stop: told of an exception in a body, so that other ranks learn of it, and with them the collectives that this
            rank is still waiting in. All waits are those of the bodies; nothing here waits longer than these.
            After a `RankError` that the ranks have agreed on, what does not follow from its task is done still: the
            same on all ranks, so that nobody waits for a part of another's.
        streams: one for each resource, on CUDA.
    Raises:
        ConfigError: a task of a kind without a body, or a fused operation: kernels run these, not a plan's tasks.
            Nothing has run then.
        what a body raised; of several the first.
    """
    require_runnable(plan, [kind for kind in bodies if kind not in FUSED], "execute: the plan")
    run = _Run(plan, bodies, recorder)
    with torch.no_grad():
        if streams is None and _overlaps(plan):
            run.on_threads(stop)
            return
        try:
            if streams is not None:
                run.on_streams(streams)
            else:
                for task in plan.sequence:
                    run.body(task)
        except BaseException as error:
            stop(error)
            raise


def _overlaps(plan: Plan) -> bool:
    """Whether any two tasks can run at the same time; else threads have nothing to give."""
    # In a chain each task waits for the one before it in the sequence.
    return any(place and place - 1 not in before for place, before in enumerate(plan.before))


class _Run:
    """One execution of a plan."""

    def __init__(self, plan: Plan, bodies: Bodies, recorder: Recorder | None) -> None:
        self._plan, self._bodies, self._recorder = plan, bodies, recorder

    def body(self, task: Task) -> None:
        kind, chunk, layer, phase, _ = task
        (on,) = resources_of(kind)  # where it works, also where another link's thread or stream runs it
        with span(self._recorder, kind, kind=kind, resource=on, chunk=chunk, layer=layer, phase=phase):
            self._bodies[kind](task)

    def on(self, task: Task) -> str:
        """The resource whose thread or stream runs a task."""
        return self._plan.resources[task][0]

    def waits(self) -> dict[Task, list[Task]]:
        """What each task waits for, but for what its own thread or stream runs before it in any case."""
        sequence = self._plan.sequence
        return {
            task: [sequence[one] for one in before if self.on(sequence[one]) != self.on(task)]
            for task, before in zip(sequence, self._plan.before, strict=True)
        }

    def on_threads(self, stop: Callable[[BaseException], None]) -> None:
        done = {task: threading.Event() for task in self._plan}
        waits = self.waits()
        errors: list[BaseException] = []
        agreed: list[BaseException] = []
        skipped: set[Task] = set()
        links: list[tuple[Helper, Future[None]]] = []

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
            for task in self._plan.on(resource):
                for earlier in waits[task]:
                    while not done[earlier].wait(LOOK_S):
                        for thread, works in links:
                            thread.check(works)
                if errors:
                    return
                ended = ended or not skipped.isdisjoint(waits[task])
                try:
                    if not ended:
                        self.body(task)
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
                with torch.no_grad():  # a thread starts with gradients on
                    work(resource)
            except BaseException as error:
                fail(error)

        try:
            for resource in RESOURCES[1:]:
                if self._plan.on(resource):
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

    def on_streams(self, streams: Mapping[str, torch.cuda.Stream]) -> None:
        caller = torch.cuda.current_stream()
        begun = torch.cuda.Event()
        begun.record(caller)
        used = [stream for resource, stream in streams.items() if self._plan.on(resource)]
        for stream in used:
            stream.wait_event(begun)
        done: dict[Task, torch.cuda.Event] = {}
        waits = self.waits()
        for task in self._plan.sequence:
            stream = streams[self.on(task)]
            for earlier in waits[task]:
                stream.wait_event(done[earlier])
            with torch.cuda.stream(stream) if stream != caller else nullcontext():
                self.body(task)
                done[task] = torch.cuda.Event()
                done[task].record(stream)
        for stream in used:
            caller.wait_stream(stream)


@dataclass(frozen=True)
class Capabilities:
    """What a layer and its ranks can do: it decides which kinds of tasks run here.

    Attributes:
        ep, esp: ranks that share the experts, and the shards of each.
        grouped: the experts are the library's own products; else modules.
        direct: nothing but kernels sees rows between the gate's choice and the experts' results: no hooks, no order by
            products, no experts that move.
        dtype, device: of the rows.
        heap: whether all of the ranks have memory that kernels of the others address. Asked last, and only where all
            else allows it: it may be collective.
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


def runnable_kinds(here: Capabilities, follows: Follows) -> tuple[str, ...]:
    """The kinds of tasks that plans may have.

    Dispatch and combine without peers are among them: hooks may act there. Fused operations do all of a layer that
    follows its own schedule; in a step's plan nothing runs them. Where experts are split over both axes, rows go from
    every rank straight to all shards of their experts. What
    autograd runs beside a step's tasks is in its plan for what it takes.
    """
    parts = PIPELINE if here.esp > 1 else PIPELINE[::2]
    if follows == "step":
        return ("attention", "gate", "other", COUNTS, *parts, "gradient-all-reduce", "loss", "optimizer")
    if follows == "blocks":
        kinds = ("attention", "permute", *parts, *WEIGHT_GRADIENTS.values(), "gradient-all-reduce")
        return (*kinds, *((GATHER, REDUCE) if here.copies else ()), "loss", "optimizer")
    split = here.ep > 1 or here.esp > 1
    served = triton_serves(here.device) and here.dtype != torch.float64
    if not (split and here.grouped and here.direct and served and here.heap()):
        return parts
    over_experts, over_shards = FUSED
    return (*parts, over_experts if here.ep > 1 else over_shards)


def require_runnable(plan: Plan, kinds: Collection[str], whose: str) -> None:
    """Raises `ConfigError`, naming the task and what can run, for a plan with a task of another kind."""
    strange = next((task for task in plan.sequence if task.kind not in kinds), None)
    if strange is not None:
        raise ConfigError(
            f"{whose} has {name(strange)} ({strange.kind}), which cannot run here; what can: {', '.join(kinds)}"
        )


class Streams:
    """The CUDA streams that a plan runs on, made on first use; copies and pickles make their own."""

    _links: dict[str, torch.cuda.Stream] | None = None

    def on(self, device: torch.device) -> dict[str, torch.cuda.Stream] | None:
        """A stream for each resource, the current one for computation; None where the device is no GPU."""
        if device.type != "cuda":
            return None
        if self._links is None:
            self._links = {link: torch.cuda.Stream(device) for link in ("intra", "inter")}
        return {"compute": torch.cuda.current_stream(device), **self._links}

    def __getstate__(self) -> dict[str, object]:
        return {}
