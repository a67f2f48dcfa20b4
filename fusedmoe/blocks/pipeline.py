"""Micro-batch pipelining of MoE blocks: overlaps attention, experts and communication (FlowMoE, Lancet).

Results equal those of whole batches (Lancet §5.1). `blocks/__init__.py` lists the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.blocks.backward import BlocksBackward
from fusedmoe.blocks.batch import Batch, find_call_reason, read_batch, require_callable
from fusedmoe.blocks.cuts import BlockDegrees, ExternalCall, degrees_of, even_plan
from fusedmoe.blocks.forward import BlocksForward
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.blocks.requirements import require_followable, require_splittable
from fusedmoe.blocks.sequential import run_sequentially
from fusedmoe.blocks.state import BlockState
from fusedmoe.compat.torch import without_saved_tensor_hooks
from fusedmoe.engine.chunk_experts import cast_totals
from fusedmoe.engine.dispatcher import ForwardDecision
from fusedmoe.engine.module_hooks import with_call_reason
from fusedmoe.engine.run import AssignedPlans, GradientReducer, Plans, Run, Runner, reduce_in_backward
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Function, exclude_from_graphs
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import require_degrees
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.sparse_collectives import add_sparse_collectives
from fusedmoe.schedule.task import SPARSE_GATHER, STAGES
from fusedmoe.schedule.workload import Workload

Along = Literal["samples", "positions"]


class Parts(NamedTuple):
    """A block, x → y + experts(u) where (y, u) = dense(x)."""

    dense: nn.Module
    experts: MoELayer


class _AssignedBlockPlans(NamedTuple):
    assigned: AssignedPlans
    degrees: list[BlockDegrees]


class PipelinedBlocks(nn.Module):
    """Blocks of dense parts and experts whose micro-batches overlap, made by `pipeline`.

    Attributes:
        routes_first: per block, whether the whole batch is routed before the first row is sent.
        plans: plans of both passes; None: the blocks run sequentially, each layer with its own plans.
        recorder: if set, records the tasks.
    """

    plans: Plans | None

    def __init__(
        self,
        blocks: Iterable[tuple[nn.Module, MoELayer]],
        degrees: tuple[int, int] = (1, 1),
        along: Along = "samples",
        recompute: bool = False,
        wire: str | None = None,
    ) -> None:
        # Compiled graphs support neither a plan's threads nor the autograd graphs of micro-batches.
        exclude_from_graphs(PipelinedBlocks, "_run_by_plans")
        super().__init__()
        parts = [_parts_of(block, number) for number, block in enumerate(blocks)]
        if not parts:
            raise ConfigError("pipeline: no blocks")
        require_degrees(degrees)
        if along not in ("samples", "positions"):
            raise ConfigError(f"pipeline: along = {along!r}; choose samples or positions")
        self.dense = nn.ModuleList(block.dense for block in parts)
        self.experts = nn.ModuleList(block.experts for block in parts)
        self.topology, self.along = parts[0].experts.topology, along
        self.recorder: Recorder | None = None
        for number, block in enumerate(parts):
            require_splittable(block.experts, number, parts[0].experts)
        # A separate group: sizes of one chunk are exchanged while rows of another chunk are gathered over these ranks.
        sizes = self.topology.duplicate_group(self.topology.esp, "sizes")
        if wire is not None:
            for block in parts:
                block.experts.set_wire(wire)
        self._blocks = [MoEBlock(*block, sizes, along == "positions", recompute) for block in parts]
        self._runner = Runner(self.topology, "pipeline")
        self._assigned: _AssignedBlockPlans | None = None  # None: the layers' own plans
        self._followed = ForwardDecision[_AssignedBlockPlans]()
        self._call_reason = ForwardDecision[str]()  # why the blocks run sequentially
        kinds, routes_first = parts[0].experts.parts, self.routes_first
        plans = (even_plan(phase, degree, kinds, routes_first) for phase, degree in zip(STAGES, degrees, strict=True))
        self.set_plan(Plans(*map(self.with_copies, plans)))

    @property
    def routes_first(self) -> list[bool]:
        return [block.routes_first for block in self._blocks]

    @property
    def dense_parameters(self) -> list[list[nn.Parameter]]:
        return [block.dense.parameters for block in self._blocks]

    def with_copies(self, plan: Plan) -> Plan:
        """Return the plan with tasks that transfer replica weights and gradients of dynamically placed experts."""
        return add_sparse_collectives(
            plan, [number for number, block in enumerate(self._blocks) if block.experts.has_replicas]
        )

    def workload(self, x: Tensor) -> Workload:
        return self._blocks[0].workload(x)

    def set_plan(self, plans: Plans | None, gradients: GradientReducer | None = None) -> None:
        """Set the plans of both passes. Collective over all ranks.

        Args:
            plans: tasks of all blocks: attention (with gate), dispatch, all-gather, expert, reduce-scatter, combine,
                weight gradients, gradient all-reduces. If a plan has no sparse collectives (`with_copies` adds them),
                replica weights are sent from the start of the model's forward, and replica gradients after the blocks'
                backward. None: the blocks run sequentially, each layer with its own plans.
            gradients: reduces the gradient buckets of the backward plan; None: the plan has none.
        Raises:
            ConfigError: plans that these blocks cannot run.
            RankError: the ranks have different plans.
        """
        assigned = None
        facts: dict[str, Any] = dict.fromkeys(("chunks of dense part and rows", "forward plan", "backward plan"))
        if plans is not None:
            self.require_runnable(plans, gradients)
            degrees = [degrees_of(plans, number) for number in range(len(self._blocks))]
            assigned = _AssignedBlockPlans(AssignedPlans(plans, gradients), degrees)
            chunks = [(block.dense, block.rows) for block in degrees]
            facts = dict(zip(facts, (chunks, plans.forward.fingerprint, plans.backward.fingerprint), strict=True))
        self.topology.require_equal_facts(facts, "pipeline")
        self.plans, self._assigned = plans, assigned
        gathered = () if plans is None else [task.layer for task in plans.forward if task.kind == SPARSE_GATHER]
        for number, block in enumerate(self._blocks):
            block.experts.send_replicas(by_tasks=number in gathered)

    def require_runnable(self, plans: Plans, gradients: GradientReducer | None = None) -> None:
        require_followable(self._blocks, plans, reduces_gradients=gradients is not None)

    def forward(self, x: Tensor, mask: Tensor | None = None, calls: Sequence[ExternalCall] | None = None) -> Tensor:
        """Run the blocks: [B, …, M] -> [B, …, M]. Collective. Sets `experts[i].aux_loss` for each block i.

        Args:
            mask: [B, …] booleans, false for padding, for which experts contribute zero (see `MoELayer.forward`); dense
                parts process all of x. Copied to the host once.
            calls: further arguments of another library's blocks (`RoutingDense`).
        Raises:
            ConfigError: in a job of one rank: input of wrong shape, dtype or device, non-finite logits, or a dense part
                whose results are not as in `pipeline`. In any job: a selective activation checkpoint.
            RankError: the same errors in a job of several ranks, raised on every rank before rows are sent. If all
                ranks catch it, they can continue with the next batch, except after an error in a dense part in which
                ranks of an MP group or FSDP2 wait for each other.
        """
        active_plans = self._followed.decide(lambda: self._assigned)
        if active_plans is None:
            return run_sequentially(self._blocks, x, mask, self.recorder)
        return self._run_by_plans(x, mask, calls, active_plans)

    def _run_by_plans(
        self, x: Tensor, mask: Tensor | None, calls: Sequence[ExternalCall] | None, active_plans: _AssignedBlockPlans
    ) -> Tensor:
        blocks, topology = self._blocks, self.topology
        # Another library's blocks check their modules themselves.
        why = None if calls is not None else self._call_reason.decide(partial(find_call_reason, blocks))
        if why is not None:
            with with_call_reason(why):
                z = run_sequentially(blocks, x, mask, self.recorder)
            return reduce_in_backward(z, active_plans.assigned)
        require_callable(blocks)
        with topology.guard("pipeline"):
            batch = read_batch(blocks, x, mask, calls)
            run = self._runner.start(active_plans.assigned, batch.x.device, self.recorder)
            z, aux = _run_planned(blocks, active_plans.degrees, batch, run)
            for block, loss in zip(blocks, aux, strict=True):
                block.store_aux_loss(loss)
        return z if z.shape == batch.shape else z.view(batch.shape)

    def extra_repr(self) -> str:
        plans = () if self.plans is None else (self.plans.forward, self.plans.backward)
        degrees = tuple(max(plan.degrees.values(), default=1) for plan in plans) or "off"
        return f"degrees={degrees}, along={self.along!r}"


def _run_planned(
    blocks: Sequence[MoEBlock], degrees: Sequence[BlockDegrees], batch: Batch, run: Run
) -> tuple[Tensor, list[Tensor]]:
    """Run blocks in micro-batches. Return z, like `batch.x`, and each block's auxiliary loss. Collective."""
    x, keep = batch.x, torch.is_grad_enabled()
    states = [block.begin(x, batch.split, each, keep) for block, each in zip(blocks, degrees, strict=True)]
    parameters = [parameter for state in states for parameter in (*state.module_parameters, *state.experts.parameters)]
    needs_backward = keep and any(one is not None and one.requires_grad for one in (x, *parameters))
    if keep and not needs_backward:
        # Another rank may need gradients, and its backward needs this rank; the first exchange of sizes reports it.
        x = x.detach().requires_grad_()
    # A checkpoint would recompute and resend everything in the backward of each micro-batch, in different orders on
    # different ranks.
    with without_saved_tensor_hooks(only_checkpoints=True):
        z, *aux = _PlannedBlocks.apply(x, batch, run, blocks, states, keep, needs_backward, *parameters)
    if (exchange := states[0].exchange) is not None and not exchange.tokens_require_grad:
        return z.detach(), [loss.detach() for loss in aux]
    return z, aux


class _PlannedBlocks(Function):
    """Autograd function of all blocks: [B, …, M] -> [B, …, M] and one scalar per block. Once differentiable.

    Saves for backward, per block, the graph of dense part and gate, received tokens R·M, and pre-activations of P pairs
    P·H (gated 2·P·H). If the passes have different row chunks, backward copies them, one block at a time.
    """

    operation = "fusedmoe.pipeline"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        batch: Batch,
        run: Run,
        blocks: Sequence[MoEBlock],
        states: list[BlockState],
        keep: bool,
        needs_backward: bool,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        z, aux = BlocksForward(run, blocks, states, batch, keep, needs_backward).run()
        ctx.given, ctx.states = (run, batch.split), states if keep else None
        ctx.set_materialize_grads(False)
        ctx.like = z.shape, z.dtype, z.device
        return (z, *aux)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, *daux: Tensor | None) -> tuple[Tensor | None, ...]:
        states, ctx.states = ctx.states, None  # tasks free tensors after use: no second backward
        if states is None:
            raise RuntimeError("the backward of a pipeline runs once: what it needs is gone; call its forward again")
        if dz is None:  # the loss has auxiliary losses only
            shape, dtype, device = ctx.like
            dz = torch.zeros(shape, dtype=dtype, device=device)
        run, split = ctx.given
        backward = BlocksBackward(run, split, states, dz, daux)
        dx = backward.run()
        grads: list[Tensor | None] = []
        for state, totals, dense in zip(states, backward.totals.values(), backward.dense_gradients, strict=True):
            grads += [dense.get(index) for index in range(len(state.leaves))]
            grads += cast_totals(totals, state.experts.parameters)
        return dx if ctx.needs_input_grad[0] else None, *(None,) * 6, *grads


def pipeline(
    blocks: Iterable[tuple[nn.Module, MoELayer]],
    degrees: tuple[int, int] = (1, 1),
    along: Along = "samples",
    recompute: bool = False,
    wire: str | None = None,
) -> PipelinedBlocks:
    """Combine blocks into one module that runs them in micro-batches, with plans for forward and backward.

    Results equal running the blocks sequentially: an expert with a capacity keeps the same rows as in the whole batch.
    With k > 1 and a capacity, all micro-batches are routed before the first row is sent.

    `fusedmoe.training.plan_step` makes plans from costs, including gradient all-reduces.

    A block computes y + experts(u), where (y, u) = dense(x). The dense part maps samples [b, …, M] to y and u of the
    same shape. Its result for a sample must not depend on other samples. Along positions, its signature is
    (y, u, present) = dense(x, past), where x is [B, l, M], a range of positions of all samples. `present` is a tuple of
    tensors for later positions (such as keys and values). `past` lists `present` of all earlier ranges, in order.

    Of the layers' schedules, only `wire` is used. Their `Hooks` run once per micro-batch: `before_moe_start` receives
    its tokens, [b, …, M], in the plan's order. A batch shared by an MP group may have any number of samples; a multiple
    of the group's size keeps all ranks busy.

    Blocks run sequentially, without plans, if any of their modules has PyTorch hooks (except hooks of sharding wrappers
    of dense parts), a gate or experts have a replaced `forward`, or a dense part, gate, shared expert or custom expert
    is parametrized. Ranks must have the same hooks.

    Args:
        blocks: pairs of a dense part and a `MoELayer`. The modules keep their parameters.
        degrees: number of micro-batches, forward and backward. If a batch has fewer samples, some are empty.
        along: "samples", or "positions" of a causal model: micro-batches are consecutive parts of the sequence, so one
            sample suffices.
        recompute: save only the inputs of dense parts, and recompute the rest in backward. A reentrant checkpoint
            around the blocks saves memory; a checkpoint with `use_reentrant=False` does not.
        wire: format of rows between ranks (`Schedule`), in place of that of the layers' schedules; None: the latter.
    Raises:
        ConfigError: an unknown `wire`, or one with the policy "fused"; a block is not such a pair, or cannot be split:
            gates that use the whole batch, orders with a custom layout, custom dispatchers, custom expert modules with
            different degrees.
        RankError: the ranks have different blocks or degrees. Construction is collective.
    """
    return PipelinedBlocks(blocks, degrees, along, recompute, wire)


def _parts_of(block: object, number: int) -> Parts:
    match block:
        case (nn.Module() as dense, MoELayer() as experts):
            return Parts(dense, experts)
    kinds = ", ".join(type(part).__name__ for part in block) if isinstance(block, Sequence) else type(block).__name__
    raise ConfigError(
        f"pipeline: block {number} is of {kinds}; give a dense part (x -> y, u: attention, say) and its MoELayer"
    )
