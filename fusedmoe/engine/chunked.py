"""The pipelined layer: dispatch, experts and combine in chunks, forward and backward each by a plan of its own.

A chunk has its share of every expert's rows (see `engine/chunked.py`), so each row meets the same experts and is added
up in the same order whatever the plan. The backward is written out, from what the forward stored: received rows and
pre-activations of each chunk. Router weights cross in one message of their own before the first chunk, their gradients
in one after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe.autograd.exchange import received_layout
from fusedmoe.autograd.hooks import Direction, HookContext, Hooks, carry
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.engine.chunks import Kept, chunk_order, in_chunks, inverse
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gather_sum import gather_sum, permute, put_slots
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import Bodies, execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task


class GradientPieces(Protocol):
    """Reduces gradients in pieces; see `fusedmoe.training.stream`."""

    def reduce(self, task: Task) -> None: ...

    def begin(self, tasks: Sequence[Task]) -> None: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Plans:
    """The order of work of a layer's two passes; each has its tasks once, all of one layer."""

    forward: Plan
    backward: Plan

    def of(self, direction: Direction) -> Plan:
        return self.forward if direction == "forward" else self.backward


class Followed(NamedTuple):
    """Plans that a layer follows.

    Attributes:
        gradients: reduces the gradient pieces that the backward plan has, and those `beside` what follows it.
    """

    plans: Plans
    gradients: GradientPieces | None = None
    beside: Sequence[Task] = ()


@cache
def one_chunk(sharded: bool) -> Plans:
    """One chunk, with the steps inside a node where experts are sharded."""

    def of(phase: str) -> Plan:
        dispatch, gather, expert, scatter, combine = (Task(kind, 0, 0, phase) for kind in PIPELINE)
        return Plan((expert,), (gather, scatter) if sharded else (), (dispatch, combine))

    return Plans(of("forward"), of("backward"))


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What a call of `pipeline` needs beside tensors.

    Attributes:
        layout: of the rows that travel: tokens sorted by expert, without slack.
        exchange: made of that layout's counts.
        experts: the local ones.
        stop: told of an exception on this rank while others wait for it.
        streams: one for each resource, on CUDA.
        gradients: reduces the gradient pieces in the backward plan, and those `beside` what follows it.
    """

    layout: Layout
    exchange: Exchange
    experts: ChunkExperts
    plans: Plans
    stop: Callable[[BaseException], None]
    hooks: Sequence[Hooks] = ()
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None
    gradients: GradientPieces | None = None
    beside: Sequence[Task] = ()

    def degree(self, direction: Direction) -> int:
        return max(self.plans.of(direction).degrees.values(), default=1)

    @cached_property
    def forward_chunks(self) -> Chunks:
        return Chunks(self, self.degree("forward"))

    @cached_property
    def backward_chunks(self) -> Chunks:
        same = self.degree("backward") == self.degree("forward")
        return self.forward_chunks if same else Chunks(self, self.degree("backward"))

    def run(
        self, direction: Direction, chunks: Chunks, rows_NM: Tensor, compute: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Takes rows in chunk order to their experts, calls `compute(chunk, received rows)`, brings results back."""
        at: list[Tensor] = list(rows_NM.split([part.sent for part in chunks.parts]))
        # A stream must not get memory back for new tensors while another still reads it: all tensors that go from one
        # to another live until the streams have met again, at the end of `execute`.
        alive: list[Tensor] = []

        def transfer(name: str, i: int, rows: Tensor) -> Tensor:
            return carry(
                self.hooks, name, getattr(chunks.parts[i], name), rows, HookContext(direction, i, len(chunks.parts))
            )

        def body(step: Callable[[int, Tensor], Tensor]) -> Callable[[Task], None]:
            def run(task: Task) -> None:
                i = task.chunk or 0
                if self.streams is not None:
                    alive.append(at[i])
                at[i] = step(i, at[i])

            return run

        bodies: Bodies = {
            "dispatch": body(partial(transfer, "dispatch")),
            "all-gather": body(lambda i, rows: chunks.parts[i].all_gather(rows)),
            "expert": body(compute),
            "reduce-scatter": body(lambda i, rows: chunks.parts[i].reduce_scatter(rows)),
            "combine": body(partial(transfer, "combine")),
        }
        if self.gradients is not None:
            self.gradients.wait()
            bodies = {**bodies, "gradient-all-reduce": self.gradients.reduce}
        plan = self.plans.of(direction)
        execute(plan, bodies, stop=self.stop, streams=self.streams, recorder=self.recorder)
        return at[0] if len(at) == 1 else torch.cat(at)


class Chunks:
    """The rows of a call in chunks: what this rank sends, and what it receives."""

    def __init__(self, pipeline: Pipeline, degree: int) -> None:
        exchange, layout = pipeline.exchange, pipeline.layout
        self.parts: list[Part] = exchange.parts(degree)
        segments_G = exchange.counts_RE.reshape(-1)
        #: For each row received, in chunk order, its number without chunks.
        self.order_R: Tensor | None = None
        #: The rows sent, in chunk order.
        self.layout = layout
        if degree > 1:
            self.order_R = chunk_order(segments_G, exchange.rows, degree)
            self.layout = in_chunks(layout, chunk_order(layout.counts_E, layout.rows, degree))
        #: Each chunk's received rows sorted by local expert.
        self.received = [received_layout(part.counts_RE, part.rows) for part in self.parts]
        sizes = [part.rows for part in self.parts]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def split(self, value_R: Tensor) -> list[Tensor]:
        """Values of received rows, numbered without chunks -> those of each chunk, sorted by expert."""
        in_order = value_R if self.order_R is None else value_R[self.order_R]
        parts = in_order.split([part.rows for part in self.parts])
        return [value[layout.slot_N] for value, layout in zip(parts, self.received, strict=True)]

    def join(self, value_parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        pairs = zip(value_parts, self.received, strict=True)
        in_order = torch.cat([put_slots(value, layout)[:, 0] for value, layout in pairs])
        if self.order_R is None:
            return in_order
        return torch.empty_like(in_order).index_put_((self.order_R,), in_order)

    def rows_of(self, others: Chunks) -> list[tuple[Tensor, Tensor]]:
        """For each chunk here, where its received rows are among all of `others`, as received and as sorted."""
        number_R = inverse(others.numbers())
        pairs = zip(others.starts, others.received, strict=True)
        sorted_R = torch.cat([start + layout.row_SK[:, 0] for start, layout in pairs])
        found = []
        for mine, layout in zip(self.numbers().split([part.rows for part in self.parts]), self.received, strict=True):
            received = number_R[mine]
            found.append((received, sorted_R[received[layout.slot_N]]))
        return found

    def numbers(self) -> Tensor:
        """[R]: of each row received, in chunk order, the number without chunks."""
        if self.order_R is None:
            return torch.arange(sum(part.rows for part in self.parts), device=self.received[0].slot_N.device)
        return self.order_R


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_N: Tensor | None, run: Pipeline, *parameters: Tensor | None) -> Tensor:
        chunks = run.forward_chunks
        weights: list[Tensor | None] = [None] * len(chunks.parts)
        if weight_N is not None:
            weights = list(chunks.split(run.exchange.all_gather(run.exchange.dispatch(weight_N[:, None]))[:, 0]))
        received: list[Any] = [None] * len(chunks.parts)
        kept: list[Any] = [None] * len(chunks.parts)

        def compute(i: int, x_RM: Tensor) -> Tensor:
            received[i] = x_RM
            y_RM, kept[i] = run.experts.forward(x_RM, chunks.received[i], weights[i])
            return y_RM

        out_NM = run.run("forward", chunks, permute(x_SM, chunks.layout), compute)
        # What a chunk keeps is a tensor, or a graph of its own.
        tensors = kept if run.experts.any_degree else []
        ctx.run, ctx.kept = replace(run, experts=run.experts.for_backward()), [] if tensors else kept
        ctx.weighted = None if weight_N is None else weight_N.dtype
        ctx.save_for_backward(*received, *weights, *tensors, *parameters)
        return gather_sum(out_NM, chunks.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        run: Pipeline = ctx.run
        there, chunks = run.forward_chunks, run.backward_chunks
        count = len(there.parts)
        saved = ctx.saved_tensors
        received, weights, rest = saved[:count], saved[count : 2 * count], saved[2 * count :]
        kept, ctx.kept = (rest[:count] if run.experts.any_degree else ctx.kept), None
        parameters = rest[count:] if run.experts.any_degree else rest
        if chunks is not there:
            kept_x, kept_h = Kept(received), Kept(kept)
            weights = (None,) * len(chunks.parts) if ctx.weighted is None else chunks.split(there.join(weights))
            places = chunks.rows_of(there)
        dweights: list[Any] = [None] * len(chunks.parts)
        totals: Totals = None

        def compute(j: int, dy_RM: Tensor) -> Tensor:
            nonlocal totals
            if chunks is there:
                x, h = received[j], kept[j]
            else:
                x, h = kept_x.rows(places[j][0]), kept_h.rows(places[j][1])
            dx_RM, dweights[j], totals = run.experts.backward(dy_RM, x, h, chunks.received[j], weights[j], totals)
            return dx_RM

        drows_NM = run.run("backward", chunks, permute(dy_SM.contiguous(), chunks.layout), compute)
        dx_SM = gather_sum(drows_NM, chunks.layout)
        dweight_N = None
        if ctx.weighted is not None:
            dweight_R1 = chunks.join([dweight.to(ctx.weighted) for dweight in dweights])[:, None]
            dweight_N = run.exchange.combine(run.exchange.reduce_scatter(dweight_R1))[:, 0]
        if run.gradients is not None:
            run.gradients.begin(run.beside)
        pairs = zip(totals or (), parameters, strict=True)
        grads = (None if total is None or p is None else total.to(p.dtype) for total, p in pairs)
        return dx_SM, dweight_N, None, *grads


def pipeline(x_SM: Tensor, weight_N: Tensor | None, run: Pipeline) -> Tensor:
    """Σ over a token's rows of their weighted results, through the experts' ranks, by the plans of `run`. Collective.

    Args:
        x_SM: [S, M] tokens; `run.layout` says which rows copy which.
        weight_N: [N] router weight of each sorted row, or None for 1.
    Returns:
        [S, M]
    Saves for backward:
        received rows, R·M, and what the experts keep, the pre-activation R·H (gated 2·R·H); where the two plans differ
        in degree, the backward copies both once.
    Raises:
        ConfigError: plans that these experts cannot follow.
        RankError: see `fusedmoe.comm.collectives`.
    """
    if not run.experts.any_degree and run.degree("forward") != run.degree("backward"):
        raise ConfigError(
            f"experts that are modules of their own need one degree for both passes, not {run.degree('forward')} "
            f"forward and {run.degree('backward')} backward: their backward follows the forward's chunks"
        )
    return _Pipelined.apply(x_SM, weight_N, run, *run.experts.parameters)
