"""Experts over several ranks without collectives: kernels put tokens, compute tiles as rows arrive, and put results.

Results equal those of the collectives up to rounding: one-sided kernels return one result per (token, k) pair, summed
in the order of k; collectives return one sum per rank.

Both passes run in chunks (`kernels/one_sided.py`), each with its own kernels: a chunk's results may be in flight while
the next chunk is computed. If the passes have different chunks, backward rechunks the saved pre-activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts, Totals, cast_totals
from fusedmoe.engine.chunks import concat
from fusedmoe.engine.route import Route
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import without_sources
from fusedmoe.kernels.triton.experts import backward_rows_in_flight, forward_in_flight
from fusedmoe.runtime.recorder import Recorder, span


class FusedRecording(NamedTuple):
    """A recorder, and the kind and links of its spans (`fusedmoe.schedule.task.FUSED`)."""

    recorder: Recorder | None
    kind: str
    links: tuple[str, ...]


def _span(recording: FusedRecording | None, phase: str, chunk: int) -> AbstractContextManager[None]:
    if recording is None:
        return nullcontext()
    recorder, kind, links = recording
    return span(recorder, kind, kind=kind, chunk=chunk, phase=phase, also=links)


class FusedForward:
    """The forward pass of `fused_experts` in three steps: `send`, `compute`, `finish`.

    Virtual ranks of one process can take the steps alternately.

    Attributes:
        x: received rows [R, M] of each chunk of the backward pass; None if backward does not read them.
        h: pre-activations [R, (2,) H] of each chunk of the forward pass.
    """

    def __init__(
        self, x_SM: Tensor, route: Route, experts: GroupedExperts, recording: FusedRecording | None = None
    ) -> None:
        self._x_SM, self.route, self.experts, self.recording = x_SM, route, experts, recording
        self.x: list[Tensor | None] = []
        self.h: list[Tensor] = []
        self._token_slot = self._result_slot = 0

    def send(self) -> None:
        self._token_slot = self.route.put_tokens(self._x_SM)

    def compute(self) -> None:
        route = self.route
        self._result_slot = route.begin_results()
        chunks = route.forward
        for chunk, arrivals in enumerate(chunks.arrivals):
            x_CM, layout, wait = chunks.rows_in_flight(chunk, self._token_slot)
            put = chunks.make_put(chunk, self._result_slot, arrivals.weight_R)
            with route.buffers.watch.guard_launches(), _span(self.recording, "forward", chunk):
                given = (x_CM, layout, chunks.tiles(chunk), self.experts.weights, self.experts.activation)
                h_RH = forward_in_flight(*given, wait, put)
            self.h.append(h_RH)
        backward = route.backward
        self.x = [*backward.copy_rows(self._token_slot)] if self.experts.needs_input_rows else [None] * len(backward)
        route.mark_as_read(self._token_slot)

    def finish(self) -> Tensor:
        return self.route.wait_for_results(self._result_slot, len(self.route.forward))


class FusedBackward:
    """The backward pass of `fused_experts` in the three steps of `FusedForward`."""

    def __init__(self, forward: FusedForward, dy_SM: Tensor) -> None:
        self._route, self._experts, self._dy_SM = forward.route, forward.experts, dy_SM
        self._x, self._h, self._recording = forward.x, forward.h, forward.recording
        self._token_slot = self._result_slot = 0
        self.totals: Totals = None

    def send(self) -> None:
        self._token_slot = self._route.put_tokens(self._dy_SM)

    def compute(self) -> None:
        route, chunks, experts = self._route, self._route.backward, self._experts
        self._result_slot = route.begin_results()
        intermediates = []
        for chunk, (arrivals, h_RH) in enumerate(zip(chunks.arrivals, self._pre_activations(), strict=True)):
            dy_CM, layout, wait = chunks.rows_in_flight(chunk, self._token_slot)
            put, values = chunks.make_put(chunk, self._result_slot), chunks.value_addresses(chunk, self._result_slot)
            with route.buffers.watch.guard_launches(), _span(self._recording, "backward", chunk):
                dy_RM, hidden = backward_rows_in_flight(
                    dy_CM, h_RH, layout, chunks.tiles(chunk), arrivals.weight_R, experts.weights, experts.activation,
                    wait, put, values, experts.needs_grad,
                )  # fmt: skip
            intermediates.append((dy_RM, hidden))
        if experts.needs_grad.parameters and experts.weights.b2 is None:
            dy = chunks.copy_rows(self._token_slot)
            intermediates = [(dy_RM, hidden) for dy_RM, (_, hidden) in zip(dy, intermediates, strict=True)]
        route.mark_as_read(self._token_slot)
        # Weight gradients last: gradients that other ranks wait for have been sent by now.
        for (dy_RM, hidden), x_RM, arrivals in zip(intermediates, self._x, chunks.arrivals, strict=True):
            if experts.needs_grad.parameters:
                assert dy_RM is not None
                given = (dy_RM, x_RM, hidden, without_sources(arrivals), arrivals.weight_R)
                self.totals = experts.weight_gradients(*given, self.totals)

    def _pre_activations(self) -> Iterator[Tensor]:
        forward, backward = self._route.forward, self._route.backward
        if backward is forward:
            yield from self._h
            return
        h_RH = concat(self._h)
        yield from (h_RH.index_select(0, index_R) for index_R in backward.indices_in(forward))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return gradients of the tokens, [S, M], and of the router weights, [S, K] float32."""
        return self._route.wait_for_results_and_values(self._result_slot, len(self._route.backward))


class _FusedExperts(Function):
    operation = "fusedmoe.engine.one_sided_experts.fused_experts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_SK: Tensor | None,
        route: Route,
        experts: GroupedExperts,
        recording: FusedRecording | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        run = FusedForward(x_SM, route, experts, recording)
        run.send()
        run.compute()
        ctx.run, ctx.weighted = run, None if weight_SK is None else weight_SK.dtype
        return run.finish()

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        # Free rows and pre-activations after this pass: the graph may live longer.
        forward, ctx.run = ctx.run, None
        run = FusedBackward(forward, dy_SM)
        run.send()
        run.compute()
        dx_SM, dweight_SK = run.finish()
        dweight = None if ctx.weighted is None else dweight_SK.to(ctx.weighted)
        return dx_SM, dweight, None, None, None, *cast_totals(run.totals, forward.experts.parameters)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    experts: GroupedExperts,
    degree: int | tuple[int, int] = 1,
    recording: FusedRecording | None = None,
    rows: int | None = None,
    name: str = "fused_experts",
) -> Tensor:
    """Dispatch by one-sided puts, compute and combine: return each token's weighted sum of expert outputs. Collective.

    Args:
        x_SM, weight_SK, layout, buffers, degree: as for `Route`.
        rows: maximum (token, k) pairs received by a rank's experts, the same on all ranks; sets the memory. None: on a
            GPU the maximum that all ranks can send, otherwise the number received. With a bound the host never
            synchronizes, so a CUDA graph can capture both passes.
    Returns:
        [S, M]
    Saves for backward:
        Received rows R·M, unless w1 is frozen; pre-activations R·H (gated 2·R·H), which backward copies once if the
        passes have different numbers of chunks; index tables of about 64·R bytes. R is `rows` if given.
    Raises:
        ConfigError: as `Route`; nothing has been sent.
        RankError: a rank failed or timed out, or an earlier call received more rows than `rows`.
    """
    route = Route(x_SM, weight_SK, layout, buffers, degree, rows, name)
    return _FusedExperts.apply(x_SM, weight_SK, route, experts, recording, *experts.parameters)
