"""Whole models in micro-batches: attention, experts and what travels between them, across layers (FlowMoE, Lancet).

A batch is cut along its samples, or along its positions; `blocks/__init__.py` has its way step by step. The backward
is written out, task by task, from what the forward stored: the graphs of dense parts and gates, and of each chunk
received tokens and pre-activations. What a token meets on its way is what it would meet in the whole batch: the gate
chooses token by token, and rows that exceed an expert's capacity are those that would in the whole batch (Lancet §5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.autograd.aux_loss import without_a_graph
from fusedmoe.blocks.backward import BlocksBackward
from fusedmoe.blocks.cuts import BlockDegrees, ExternalCall, degrees_of, even_plan
from fusedmoe.blocks.forward import BlocksForward
from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.blocks.state import BlockState, Split
from fusedmoe.comm.all_to_all import ALGORITHMS
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import saved_tensor_hooks_removed
from fusedmoe.engine.chunk_experts import gradients_of
from fusedmoe.engine.dispatcher import recomputing, selects
from fusedmoe.engine.module_hooks import called_for
from fusedmoe.engine.run import Assigned, GradientReducer, Plans, Run, reduced_behind
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Function, keep_out_of_graphs
from fusedmoe.layers.input_checks import no_tokens, of_input, of_mask
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import require_degrees
from fusedmoe.runtime.execute import Capabilities, Streams, require_runnable, runnable_kinds
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.policies.sparse_collectives import add_sparse
from fusedmoe.schedule.task import FUSED, GATHER, REDUCE, STAGES, TaskKind
from fusedmoe.schedule.workload import Workload, uniform_share

#: The axis along which `pipeline` splits a batch.
Along = Literal["samples", "positions"]


class Parts(NamedTuple):
    """A block, x → y + experts(u) where (y, u) = dense(x).

    `dense`: takes some samples [b, …, M]; y has their shape, and u is what the experts see, [b, …, M]. What it does to
    a sample must not depend on the others.

    Along positions it takes some positions of all samples, [B, l, M], and what it gave for those before, and gives a
    third result for those to come: (y, u, own) = dense(x, past), where own is a tuple of tensors (keys and values, say)
    and past the list of those tuples, in order.
    """

    dense: nn.Module
    experts: MoELayer


class _Assigned(NamedTuple):
    """Plans that were set, what reduces the gradients in them, and their degrees by block."""

    plans: Plans
    gradients: GradientReducer | None
    degrees: list[BlockDegrees]


class PipelinedBlocks(nn.Module):
    """Blocks of dense parts and experts whose micro-batches overlap; see `pipeline`.

    Attributes:
        dense, experts: the blocks' parts.
        waits: of each block, whether all of a batch is routed before its first row is sent.
        plans: that both passes run by; None: the blocks go one after the other, each layer by its own plans.
        recorder: measures the tasks while it is set.
    """

    plans: Plans | None

    def __init__(
        self,
        blocks: Iterable[tuple[nn.Module, MoELayer]],
        degrees: tuple[int, int] = (1, 1),
        along: Along = "samples",
        recompute: bool = False,
    ) -> None:
        # No graph can hold a plan's threads, and graphs of micro-batches.
        keep_out_of_graphs(PipelinedBlocks, "_by_plans")
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
        for number, layer in enumerate(self._layers()):
            _refuse(layer, number, self.topology, parts[0].experts.mp_tokens.joint)
        # Sizes of one chunk are exchanged while rows of another are gathered over the same ranks: a group of their own.
        sizes = self.topology.beside(self.topology.esp, "sizes")
        self._blocks = [MoEBlock(*block, sizes, along == "positions", recompute) for block in parts]
        self._streams = Streams()
        self._assigned: _Assigned | None = None  # None: by the layers' own plans
        # Of the last forward that was not a recomputation.
        self._followed: _Assigned | None = None
        self._why: str | None = None  # the blocks are called one after the other
        kinds, waits = self._layers()[0].parts, self.waits
        plans = (even_plan(phase, degree, kinds, waits) for phase, degree in zip(STAGES, degrees, strict=True))
        self.set_plan(Plans(*map(self.with_copies, plans)))

    @property
    def waits(self) -> list[bool]:
        return [block.waits for block in self._blocks]

    @property
    def dense_parameters(self) -> list[list[nn.Parameter]]:
        """Parameters of each block's dense part, gate and shared expert."""
        return [block.dense_parameters for block in self._blocks]

    def with_copies(self, plan: Plan) -> Plan:
        """Adds to a plan of these blocks the sparse collectives of those whose experts move (`ShardedExperts`)."""
        return add_sparse(plan, [number for number, layer in enumerate(self._layers()) if layer.placed is not None])

    def workload(self, x: Tensor) -> Workload:
        """Describes one block's work for a batch like x, [B, L, …, M], for plans by cost: its dense part counts as
        attention, four projections and the scores of L positions.

        Raises:
            ConfigError: experts that do not say how much they compute.
        """
        layer, topology = self._layers()[0], self.topology
        experts = layer.experts.workload(1, x.dtype.itemsize, topology.ep.size, topology.esp.size)
        length = max(1, x[:1, ..., 0].numel())
        # Of tokens in common each rank has its part, of the dense parts' work as well.
        samples = max(1, len(x) // (topology.mp.size if layer.mp_tokens.joint else 1))
        rows = layer.order.rows_per_token(layer.gate, samples * length)
        # Which tokens go where is known once they are routed; planned is for experts that are chosen alike.
        share = 1.0 if self._blocks[0].makes_rows else uniform_share(layer.gate.experts, layer.gate.k, topology.ep.size)
        batch = samples * topology.esp.size
        return replace(experts, batch=batch, seq_len=length, k=1, capacity_factor=rows, share=share)

    def set_plan(self, plans: Plans | None, gradients: GradientReducer | None = None) -> None:
        """Sets the plans by which both passes run from now on. Collective over all ranks.

        Args:
            plans: of all blocks' tasks: attention (with gate), dispatch, all-gather, expert, reduce-scatter, combine,
                weight gradients, gradient all-reduces; each part of a layer in as many chunks as the plan has. Copies
                of experts that move, and their gradients, travel when the plan says so (`with_copies`); where it says
                nothing of them, from the beginning of the model's forward pass on, and from the end of the blocks'
                backward pass. None: the blocks go one after the other, each layer by its own plans.
            gradients: reduces what the backward plan has of gradient all-reduces.
        Raises:
            ConfigError: plans that these blocks cannot follow.
            RankError: ranks with different plans.
        """
        assigned = None
        facts: dict[str, Any] = dict.fromkeys(("chunks of dense part and rows", "forward plan", "backward plan"))
        if plans is not None:
            self.require_runnable(plans, gradients)
            assigned = _Assigned(plans, gradients, [degrees_of(plans, number) for number in range(len(self._blocks))])
            chunks = [(block.dense, block.rows) for block in assigned.degrees]
            facts = dict(zip(facts, (chunks, plans.forward.fingerprint, plans.backward.fingerprint), strict=True))
        # All ranks issue their collectives in the order of one plan; with two they would wait for each other.
        self.topology.agree(facts, "pipeline")
        self.plans, self._assigned = plans, assigned
        gathered = () if plans is None else [task.layer for task in plans.forward if task.kind == GATHER]
        # Copies of experts that no task of the plan brings come at the beginning of the model's forward pass.
        for number, layer in enumerate(self._layers()):
            if layer.placed is not None:
                layer.placed.travel = "by tasks" if number in gathered else "at once"

    def require_runnable(self, plans: Plans, gradients: GradientReducer | None = None) -> None:
        """Raises `ConfigError` for plans that these blocks cannot follow (`set_plan`)."""
        for phase in STAGES:
            self._check(phase, plans, gradients)

    def forward(self, x: Tensor, mask: Tensor | None = None, calls: Sequence[ExternalCall] | None = None) -> Tensor:
        """[B, …, M] -> [B, …, M]; collective. `experts[i].aux_loss` is then the auxiliary loss of block i.

        `mask` [B, …], booleans, is false for padding, to which experts add nothing (see `MoELayer.forward`); dense
        parts see all of x. It is copied to the host once, unless it is there. `calls`: what else blocks of another
        library take (`RoutingDense`).

        Raises:
            ConfigError: in a world of one, input of a wrong shape, dtype or device, logits that are not finite, or a
                dense part that gives anything but what `Parts` says; on all ranks, a selective activation checkpoint.
            RankError: the same in a larger world, on every rank alike, naming the rank at fault. Nothing of that has
                been sent, and who catches it on all ranks can go on with the next batch. Ranks of an MP group and of
                FSDP2 may wait for each other in dense parts: there, and where a dense part raises, the job is over.
        """
        if not (again := recomputing()):
            self._followed = self._assigned
        followed = self._followed  # a recomputation saves as much as the forward pass only by the same plans
        if followed is None:
            return self._one_by_one(x, mask)
        return self._by_plans(x, mask, followed, calls, again)

    def _one_by_one(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Runs the blocks one after the other, each layer by its own plans."""
        with self.topology.guard("pipeline"):
            if (refusal := self._wrong(x)) is not None:
                self._blocks[0].refuse(refusal)
            for block in self._blocks:
                x = block.whole(x, mask, self.recorder)
        return x

    def _by_plans(
        self, x: Tensor, mask: Tensor | None, followed: _Assigned, calls: Sequence[ExternalCall] | None, again: bool
    ) -> Tensor:
        """Runs the blocks in micro-batches: `forward` where there are plans."""
        if not again and calls is None:
            self._why = next(filter(None, (block.why_called for block in self._blocks)), None)
        if self._why is not None:
            given = Assigned(followed.plans, followed.gradients)
            with called_for(self._why):
                z = self._one_by_one(x, mask)
            return z if given.gradients is None else reduced_behind(z, given, None)
        for block in self._blocks:
            block.require_nothing_between_layers()
        for layer in self._layers():
            if layer.require_wrapper is not None:
                layer.require_wrapper()
        with self.topology.guard("pipeline"):
            # On CUDA nothing waited for the check of the last forward's logits; it is told now.
            for layer in self._layers():
                layer.checks.tell_logits()
            if selects():  # it lets each operator's results be taken once, and dense parts have graphs of their own
                raise ConfigError(
                    "pipeline: a selective activation checkpoint cannot look into micro-batches; leave out context_fn, "
                    "and use fusedmoe.pipeline(…, recompute=True)"
                )
            # A refused batch is replaced by one without samples: other ranks learn of it with the first sizes.
            refusal = self._wrong(x)
            if isinstance(mask, Tensor):
                mask = mask.cpu()
            if refusal is None and mask is not None:
                refusal = of_mask("pipeline", mask, x, *(layer.gate for layer in self._layers()))
            if refusal is not None:
                x, mask = self._no_samples(x, refusal), None
            z, aux = self._in_micro_batches(x, mask, followed, refusal, calls)
            for layer, loss in zip(self._layers(), aux, strict=True):
                # As after the layer's own forward, so that a model's loss need not know of the pipeline.
                loss = layer.mp_tokens.aux(loss)
                layer.aux_loss = without_a_graph(loss, "MoELayer.aux_loss", None, if_any=not layer.gate.aux)
        return z if z.shape == x.shape else z.view(x.shape)

    def _in_micro_batches(
        self,
        x: Tensor,
        mask: Tensor | None,
        followed: _Assigned,
        refusal: str | None,
        calls: Sequence[ExternalCall] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the blocks by the plans followed; returns z, and each block's auxiliary loss. Collective."""
        plans, gradients, degrees = followed
        batch, split = self._split(x)
        stop, streams = partial(self.topology.stop, "pipeline"), self._streams.on(x.device)
        run = Run(plans, stop, recorder=self.recorder, streams=streams, gradients=gradients)
        keep = torch.is_grad_enabled()
        # Once for all chunks: under autocast the experts' parameters are cast here.
        states = [block.begin(batch, split, degree, keep) for block, degree in zip(self._blocks, degrees, strict=True)]
        # Each parameter is an input, so that autograd takes its gradient from the backward pass.
        parameters = [parameter for state in states for parameter in (*state.own, *state.experts.parameters)]
        learns = keep and any(one is not None and one.requires_grad for one in (batch, *parameters))
        if keep and not learns:
            # Another rank may learn, and its backward needs this one's: they tell each other with the first sizes.
            batch = batch.detach().requires_grad_()
        mask = None if mask is None else mask.reshape(batch.shape[:-1])
        given = batch, mask, run, split, self._blocks, states, keep, learns, refusal, calls
        # A checkpoint would compute all again, and send it, from the midst of the backward of each micro-batch's graph:
        # ranks would meet there in any order.
        with saved_tensor_hooks_removed(only_checkpoints=True):
            z, *aux = _ThroughBlocks.apply(*given, *parameters)
        if (exchange := states[0].exchange) is not None and not exchange.tokens_require_grad:
            return z.detach(), [loss.detach() for loss in aux]
        return z, aux

    def _wrong(self, x: object) -> str | None:
        """Says what is wrong with a batch, if anything. Its dtype may be that of any parameter of the first block."""
        layer, dense = self._layers()[0], self._blocks[0].dense_parameters
        like: Tensor | None = next(layer.experts.parameters(), None)
        least = 2 if self.along == "samples" else 3
        return of_input("pipeline got input", x, layer.model_dim, like, least, {parameter.dtype for parameter in dense})

    def _no_samples(self, x: object, refusal: str) -> Tensor:
        """Makes a batch that stands for a refused one, until all ranks have heard of that.

        Raises:
            ConfigError, RankError: there is no exchange by which they would, or others may not come to it: they may
                wait in a dense part.
        """
        layer, topology = self._layers()[0], self.topology
        # Where no exchange would tell the others, or they wait in a dense part, the refusal is told now.
        if self._blocks[0].communicates or topology.ep.size == topology.esp.size == 1:
            layer.checks.refuse(refusal)
        nothing = no_tokens(x, layer.model_dim, next(layer.experts.parameters(), None))
        return nothing if self.along == "samples" else nothing[None]

    def _split(self, x: Tensor) -> tuple[Tensor, Split]:
        """Returns a batch, and how it is cut. Of one that an MP group has in common, each rank routes some samples,
        first those of rank 0: each micro-batch has some of every rank's, so that all have work at all times."""
        peers, mp, layer = self.topology.ep.size, self.topology.mp, self._layers()[0]
        if layer.mp_tokens.joint:
            x_SM, refusal = layer.checks.agree_on_tokens(x.reshape(-1, layer.model_dim), None, layer.mp_input)
            layer.checks.refuse(refusal)
            x = x_SM.view(x.shape)
        if self.along == "positions":
            return x, Split(peers, 1, in_order=True)
        # [rank, samples of each]: cut along the second axis, every micro-batch has samples of every rank.
        if layer.mp_tokens.joint and len(x) % mp.size == 0:
            return x.view(mp.size, len(x) // mp.size, *x.shape[1:]), Split(peers, 1)
        return x, Split(peers)

    def _check(self, phase: str, plans: Plans, gradients: GradientReducer | None) -> None:
        plan = plans.forward if phase == "forward" else plans.backward
        if any(task.kind in FUSED for task in plan):
            # The executor gives a task one resource. These hold computation and a link at once, from the first token
            # to the last result: the micro-batches beside them, which are there to fill both, would have nothing left.
            raise ConfigError(
                f"pipeline: the {phase} plan has fused operations, which leave micro-batches nothing to overlap with: "
                "use MoELayer(schedule='fused') without a pipeline, or a plan by collectives"
            )
        # What these ranks can run depends on their groups: without ESP there is no all-gather, say.
        copies = any(layer.placed is not None for layer in self._layers())
        here = Capabilities(self.topology.ep.size, self.topology.esp.size, copies=copies)
        require_runnable(plan, runnable_kinds(here, "blocks"), f"pipeline: the {phase} plan")
        for task in plan:
            if task.phase != phase or (task.layer or 0) >= len(self._blocks):
                raise ConfigError(f"pipeline: {task} is not of the {phase} pass of {len(self._blocks)} blocks")
            sparse = {GATHER: "forward", REDUCE: "backward"}.get(task.kind)
            if sparse is not None and (self._layers()[task.layer or 0].placed is None or phase != sparse):
                raise ConfigError(
                    f"pipeline: the {phase} plan has {name(task)}, and copies come forward, and their gradients go "
                    "backward, of blocks with placement='fssdp' alone"
                )
            if task.kind == TaskKind.GRADIENT_ALL_REDUCE and gradients is None:
                raise ConfigError("pipeline: the plan reduces gradients, so set_plan() needs what reduces them")
        # What each block needs: all its parts, and one degree in both passes where its graphs are the forward's.
        kinds = {TaskKind.ATTENTION, *self._layers()[0].parts}
        for number, block in enumerate(self._blocks):
            counts = Counter(task.kind for task in plan if task.layer == number)
            lacks = sorted(kinds - counts.keys())
            if lacks:
                raise ConfigError(f"pipeline: the {phase} plan has no {lacks[0]} of block {number}")
            if phase == "forward" and block.waits and counts[TaskKind.ATTENTION] > 1 and not counts[TaskKind.PERMUTE]:
                raise ConfigError(
                    f"pipeline: block {number} cannot tell whose rows there is room for before all of a batch is "
                    "routed (k > 1 with a capacity): the plan needs a permute task between attention and dispatch"
                )
            degrees = plans.forward.degrees.get(("forward", number)), plans.backward.degrees.get(("backward", number))
            if degrees[0] != degrees[1] and not block.any_degree:
                raise ConfigError(
                    f"pipeline: block {number}: experts that are modules of their own need one degree for both passes, "
                    f"not {degrees}"
                )

    def _layers(self) -> list[MoELayer]:
        return list(self.experts)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        plans = () if self.plans is None else (self.plans.forward, self.plans.backward)
        degrees = tuple(max(plan.degrees.values(), default=1) for plan in plans) or "off"
        return f"degrees={degrees}, along={self.along!r}"


class _ThroughBlocks(Function):
    """The batch through all blocks: [B, …, M], and a scalar for each block; differentiable once.

    Saves for backward of each block what autograd keeps of its dense part and gate, R received tokens, R·M, and what
    the experts keep of their P pairs, the pre-activation P·H (gated 2·P·H); where rows have other chunks in the two
    passes, the backward copies these once, one block at a time.
    """

    operation = "fusedmoe.pipeline"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        run: Run,
        split: Split,
        modules: Sequence[MoEBlock],
        states: list[BlockState],
        keep: bool,
        learns: bool,
        refusal: str | None,
        calls: Sequence[ExternalCall] | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        forward = BlocksForward(run, split, modules, states, x, mask, keep, learns, refusal, calls)
        z, aux = forward.run()
        ctx.given, ctx.blocks = (run, split), states if keep else None
        ctx.set_materialize_grads(False)
        ctx.like = z.shape, z.dtype, z.device
        return (z, *aux)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, *daux: Tensor | None) -> tuple[Tensor | None, ...]:
        blocks, ctx.blocks = ctx.blocks, None  # what a task has used is freed at once, so there is no second time
        if blocks is None:
            raise RuntimeError("the backward of a pipeline runs once: what it needs is gone; call its forward again")
        if dz is None:  # the loss is made of auxiliary losses alone
            shape, dtype, device = ctx.like
            dz = torch.zeros(shape, dtype=dtype, device=device)
        run, split = ctx.given
        backward = BlocksBackward(run, split, blocks, dz, daux)
        dx = backward.run()
        grads: list[Tensor | None] = []
        for block, totals, dense in zip(blocks, backward.totals.values(), backward.dense, strict=True):
            grads += [dense.get(place) for place in range(len(block.parameters))]
            grads += gradients_of(totals, block.experts.parameters)
        return dx if ctx.needs_input_grad[0] else None, *(None,) * 9, *grads


def pipeline(
    blocks: Iterable[tuple[nn.Module, MoELayer]],
    degrees: tuple[int, int] = (1, 1),
    along: Along = "samples",
    recompute: bool = False,
) -> PipelinedBlocks:
    """Blocks as one module that runs them in micro-batches, forward and backward each by a plan of its own.

    The results are those of the blocks one after the other: the gate routes token by token, and an expert with a
    capacity takes the rows that it would take of the whole batch. A layer whose tokens compete by more than their order
    (k > 1 with a capacity) has all of a batch's micro-batches routed before the first is sent.

    `fusedmoe.training.plan_step` makes plans of these by what they cost, with gradient all-reduces between the rest.

    Layers keep what is theirs: hooks, `mp_input`, orders, shared experts, experts under a placement. Their schedules
    rest, "fused" among them: the plan here is that of all blocks. Hooks are called for each micro-batch, with its
    number: `before_moe_start` sees the tokens of one, [b, …, M], in the order of the plan. Tokens that an MP group has
    in common may be those of any number of samples; where it is a multiple of the group, each micro-batch has as many
    of every rank's.

    Hooks on modules see whole batches, and a parametrisation is evaluated once: with hooks on any module of the blocks
    (those of a wrapper that shards dense parts aside), or with a parametrised dense part, gate or shared expert, blocks
    go one after the other, as without plans. Ranks must have the same hooks.

    Args:
        blocks: pairs of a dense part and a `MoELayer`, see `Parts`. Parameters stay the modules' own.
        degrees: micro-batches forward and backward; a batch of fewer samples has empty ones.
        along: "samples", or "positions" of a causal model: chunks of a sequence follow each other, so that one sample
            is enough.
        recompute: keep only inputs of dense parts for the backward pass, and compute the rest again there. A checkpoint
            around the blocks saves memory if it is reentrant; with `use_reentrant=False` they keep what they keep.
    Raises:
        ConfigError: what is no such pair; blocks that cannot be split: gates that look at the whole batch, orders with
            a layout of their own, dispatchers of your own, experts of their own kind with different degrees.
        RankError: ranks with different blocks or degrees. Making one is collective.
    """
    return PipelinedBlocks(blocks, degrees, along, recompute)


def _parts_of(block: object, number: int) -> Parts:
    match block:
        case (nn.Module() as dense, MoELayer() as experts):
            return Parts(dense, experts)
    kinds = ", ".join(type(part).__name__ for part in block) if isinstance(block, Sequence) else type(block).__name__
    raise ConfigError(
        f"pipeline: block {number} is of {kinds}; give a dense part (x -> y, u: attention, say) and its MoELayer"
    )


def _refuse(layer: MoELayer, number: int, topology: Topology, joint: bool) -> None:
    gate, order = type(layer.gate).__name__, type(layer.order).__name__
    for wrong, text in (
        (not layer.gate.splits, f"{gate} looks at whole batches; only what follows it can be split: use schedule=…"),
        (
            not layer.order.splits,
            f"{order} has a layout() or restore() of its own, of whole batches: use schedule=…, or Sparse()",
        ),
        (
            layer.dispatch not in (*ALGORITHMS, "auto"),
            "a dispatcher of your own takes whole layers: name an all-to-all algorithm",
        ),
        (
            layer.topology is not topology and topology.size * layer.topology.size > 1,
            "all blocks must have the same topology",
        ),
        (
            layer.mp_tokens.joint != joint,
            "either all blocks have mp_input='split', or none: x is either an MP rank's own tokens or the group's",
        ),
    ):
        if wrong:
            raise ConfigError(f"pipeline: block {number}: {text}")
