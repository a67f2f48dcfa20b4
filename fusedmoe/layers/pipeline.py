"""Whole models in micro-batches: attention, experts and what travels between them, across layers (FlowMoE, Lancet)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor, nn

from fusedmoe.autograd.hooks import Hooks
from fusedmoe.comm.all_to_all import ALGORITHMS
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import GradientReducer, Plans, Run
from fusedmoe.engine.stack import through_stack
from fusedmoe.engine.state import Cut
from fusedmoe.errors import ConfigError
from fusedmoe.layers.gates import Gate
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.orders import Einsum, Order
from fusedmoe.layers.schedule import require_degrees
from fusedmoe.layers.stage import BlockStage
from fusedmoe.runtime.execute import Here, Streams, require_runnable, runnable_kinds
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.list_schedule import list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import STAGES, Task
from fusedmoe.schedule.workload import Workload

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


class PipelinedBlocks(nn.Module):
    """Blocks of dense parts and experts whose micro-batches overlap; see `pipeline`.

    Attributes:
        dense, experts: the blocks' parts.
        waits: of each block, whether all of a batch is routed before its first row is sent.
        recorder: measures the tasks while it is set.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[nn.Module, MoELayer]],
        degrees: tuple[int, int] = (1, 1),
        along: Along = "samples",
        recompute: bool = False,
    ) -> None:
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
            _refuse(layer, number, self.topology)
        sizes = self.topology.beside(self.topology.esp, "sizes")
        self._stages = [BlockStage(*block, sizes, along == "positions", recompute) for block in parts]
        self._streams, self._cut = Streams(), Cut(self.topology.ep.size, int(along == "positions"))
        kinds, waits = self._layers()[0].parts, self.waits
        plans = (_even_plan(phase, degree, kinds, waits) for phase, degree in zip(STAGES, degrees, strict=True))
        self.follow(Plans(*plans))

    @property
    def waits(self) -> list[bool]:
        return [stage.waits for stage in self._stages]

    @property
    def dense_parameters(self) -> list[list[nn.Parameter]]:
        """Of each block what its dense part, gate and shared expert learn."""
        return [list(stage.dense_parameters) for stage in self._stages]

    def workload(self, x: Tensor) -> Workload:
        """What one block amounts to for a batch like x, [B, L, …, M], for plans by cost: its dense part counts as
        attention, four projections and the scores of L positions.

        Raises:
            ConfigError: experts that do not say how much they compute.
        """
        layer, topology = self._layers()[0], self.topology
        found = layer.experts.workload(1, x.dtype.itemsize, topology.ep.size, topology.esp.size)
        length = max(1, x[:1, ..., 0].numel())
        samples = max(1, len(x))
        rows = layer.order.rows_per_token(layer.gate, samples * length)
        return replace(found, batch=samples * topology.esp.size, seq_len=length, k=1, capacity_factor=rows)

    def follow(self, plans: Plans, gradients: GradientReducer | None = None) -> None:
        """From now on both passes run by these plans. Collective over all ranks.

        Args:
            plans: of all blocks' tasks: attention (with gate), dispatch, all-gather, expert, reduce-scatter, combine,
                weight gradients, gradient all-reduces; each part of a layer in as many chunks as the plan has.
            gradients: reduces what the backward plan has of gradient all-reduces.
        Raises:
            ConfigError: plans that these blocks cannot follow.
            RankError: ranks with different plans.
        """
        for phase in STAGES:
            self._check(phase, plans, gradients)
        found = {"forward plan": plans.forward.fingerprint, "backward plan": plans.backward.fingerprint}
        self.topology.agree(found, "pipeline")
        self.plans, self._gradients = plans, gradients

    def forward(self, x: Tensor) -> Tensor:
        """[B, …, M] -> [B, …, M]; collective. `experts[i].aux_loss` is then the auxiliary loss of block i."""
        with self.topology.guard("pipeline"):
            least = 2 if self.along == "samples" else 3
            if x.dim() < least or x.shape[-1] != self._layers()[0].model_dim:
                want = f"[samples, {'positions, ' * (least - 2)}…, {self._layers()[0].model_dim}]"
                raise ConfigError(f"pipeline got input of shape {list(x.shape)}; it takes {want}")
            z, aux = through_stack(x, self._stages, self._run(x), self._cut)
        for layer, loss in zip(self._layers(), aux, strict=True):
            layer.aux_loss = loss / self.topology.mp.size
        return z

    def _run(self, x: Tensor) -> Run:
        stop = partial(self.topology.stop, "pipeline")
        streams = self._streams.on(x.device)
        return Run(self.plans, stop, recorder=self.recorder, streams=streams, gradients=self._gradients)

    def _check(self, phase: str, plans: Plans, gradients: GradientReducer | None) -> None:
        plan = plans.forward if phase == "forward" else plans.backward
        here = Here(self.topology.ep.size, self.topology.esp.size)
        require_runnable(plan, runnable_kinds(here, "blocks"), f"pipeline: the {phase} plan")
        for task in plan:
            if task.phase != phase or (task.layer or 0) >= len(self._stages):
                raise ConfigError(f"pipeline: {task} is not of the {phase} pass of {len(self._stages)} blocks")
            if task.kind == "gradient-all-reduce" and gradients is None:
                raise ConfigError("pipeline: the plan reduces gradients, so follow() needs what reduces them")
        kinds = {"attention", *self._layers()[0].parts}
        for number, stage in enumerate(self._stages):
            counts = Counter(task.kind for task in plan if task.layer == number)
            lacks = sorted(kinds - counts.keys())
            if lacks:
                raise ConfigError(f"pipeline: the {phase} plan has no {lacks[0]} of block {number}")
            if phase == "forward" and stage.waits and counts["attention"] > 1 and not counts["order"]:
                raise ConfigError(
                    f"pipeline: block {number} cannot tell whose rows there is room for before all of a batch is "
                    "routed (k > 1 with a capacity): the plan needs an order task between attention and dispatch"
                )
            degrees = plans.forward.degrees.get(("forward", number)), plans.backward.degrees.get(("backward", number))
            if degrees[0] != degrees[1] and not stage.any_degree:
                raise ConfigError(
                    f"pipeline: block {number}: experts that are modules of their own need one degree for both passes, "
                    f"not {degrees}"
                )

    def _layers(self) -> list[MoELayer]:
        return list(self.experts)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        degrees = [max(plan.degrees.values(), default=1) for plan in (self.plans.forward, self.plans.backward)]
        return f"degrees={tuple(degrees)}, along={self.along!r}"


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

    Args:
        blocks: pairs of a dense part and a `MoELayer`, see `Parts`. Parameters stay the modules' own.
        degrees: micro-batches forward and backward; a batch of fewer samples has empty ones.
        along: "samples", or "positions" of a causal model: chunks of a sequence follow each other, so that one sample
            is enough.
        recompute: keep only inputs of dense parts for the backward pass, and compute the rest again there.
    Raises:
        ConfigError: what is no such pair; blocks that cannot be split: gates that look at the whole batch, orders by
            products, hooks, tokens that are the same on the ranks of an MP group, experts of their own kind with
            different degrees.
        RankError: ranks with different blocks or degrees. Making one is collective.
    """
    return PipelinedBlocks(blocks, degrees, along, recompute)


def _parts_of(block: object, number: int) -> Parts:
    match block:
        case (nn.Module() as dense, MoELayer() as experts):
            return Parts(dense, experts)
    found = ", ".join(type(one).__name__ for one in block) if isinstance(block, Sequence) else type(block).__name__
    raise ConfigError(
        f"pipeline: block {number} is of {found}; give a dense part (x -> y, u: attention, say) and its MoELayer"
    )


def unsplit_part(gate: Gate, order: Order | None, hooks: Sequence[Hooks]) -> Literal["gate", "order", "hooks"] | None:
    """The part of a layer that micro-batches cannot go through; None where there is none."""
    if not gate.splits:
        return "gate"
    if isinstance(order, Einsum):
        return "order"
    return "hooks" if hooks else None


def _refuse(layer: MoELayer, number: int, topology: Topology) -> None:
    part, gate = unsplit_part(layer.gate, layer.order, layer.hooks), type(layer.gate).__name__
    for wrong, text in (
        (part == "gate", f"{gate} looks at whole batches, so that only what follows it can be split: use schedule=…"),
        (part == "order", "an order by products cannot be split: use Sparse() or Dropless()"),
        (part == "hooks", "hooks see whole layers: use MoELayer(schedule=…) with them"),
        (layer.dispatch not in ALGORITHMS, "a dispatcher of your own takes whole layers: name an all-to-all algorithm"),
        (layer.placed is not None, "experts under a placement are whole layers': use MoELayer(schedule=…) with them"),
        (
            layer.topology is not topology and topology.size * layer.topology.size > 1,
            "all blocks must have the same topology",
        ),
        (
            topology.mp.size > 1 and layer.mp_input != "split",
            f"mp_input={layer.mp_input!r}, but micro-batches take each rank's own tokens: use mp_input='split'",
        ),
    ):
        if wrong:
            raise ConfigError(f"pipeline: block {number}: {text}")


def _even_plan(phase: str, degree: int, kinds: Sequence[str], waits: Sequence[bool]) -> Plan:
    """All parts take as long as each other: for who knows no costs."""
    tasks: list[Task] = []
    layers = range(len(waits))
    for layer in layers if phase == "forward" else reversed(layers):
        for kind in STAGES[phase]:
            if kind == "order" and phase == "forward" and waits[layer]:
                tasks.append(Task(kind, None, layer, phase))
            elif kind in ("attention", *kinds):
                tasks += [Task(kind, chunk, layer, phase) for chunk in range(degree)]
    return list_plan(tasks, dict.fromkeys(tasks, 1.0))
