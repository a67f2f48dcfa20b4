"""Whole models in micro-batches: attention, experts and what travels between them, across layers (FlowMoE, Lancet)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.autograd.chunk_experts import ChunkExperts
from fusedmoe.autograd.pieces import Cuts
from fusedmoe.autograd.pipeline import Plans
from fusedmoe.autograd.stack import Choice, Stack, through_stack
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers.gates.base import Routing
from fusedmoe.layers.gates.linear import outside_autocast
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.orders import Dropless, Einsum
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.runtime.streams import Streams
from fusedmoe.schedule.listing import list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import ROADS, Task


class Parts(NamedTuple):
    """A block, x → y + experts(u) where (y, u) = dense(x).

    `dense`: takes some samples [b, …, M]; y has their shape, and u is what the experts see, [b, …, M]. What it does to
    a sample must not depend on the others.
    """

    dense: nn.Module
    experts: MoELayer


class PipelinedBlocks(nn.Module):
    """Blocks of dense parts and experts whose micro-batches overlap; see `pipeline`."""

    def __init__(self, blocks: Iterable[Parts], degrees: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        parts = [Parts(*block) for block in blocks]
        if not parts:
            raise ConfigError("pipeline: no blocks")
        if min(degrees) < 1:
            raise ConfigError(f"pipeline: degrees must be at least 1, not {degrees}")
        self.dense = nn.ModuleList(block.dense for block in parts)
        self.experts = nn.ModuleList(block.experts for block in parts)
        self.topology = parts[0].experts.topology
        self.degrees = degrees
        self.recorder: Recorder | None = None
        for number, layer in enumerate(self._layers()):
            _refuse(layer, number, self.topology, degrees)
        sizes = self.topology.beside(self.topology.esp)
        self._stages = [_Stage(block, sizes) for block in parts]
        waits = [stage.waits for stage in self._stages]
        kinds = self._layers()[0].parts
        self._plans = Plans(
            _even_plan("forward", degrees[0], kinds, waits), _even_plan("backward", degrees[1], kinds, waits)
        )
        self._cuts = Cuts.of(*degrees)
        self.topology.agree({"plans": [str(self._plans.forward), str(self._plans.backward)]}, "pipeline")
        self._streams = Streams()

    def forward(self, x: Tensor) -> Tensor:
        """[B, …, M] -> [B, …, M]; collective. `experts[i].aux_loss` is then the auxiliary loss of block i."""
        with self.topology.guard("pipeline"):
            if x.dim() < 2 or x.shape[-1] != self._layers()[0].model_dim:
                want = f"[samples, …, {self._layers()[0].model_dim}]"
                raise ConfigError(f"pipeline got input of shape {list(x.shape)}; it takes {want}")
            z, aux = through_stack(x, self._stack(x))
        for layer, loss in zip(self._layers(), aux, strict=True):
            layer.aux_loss = loss
        return z

    def _stack(self, x: Tensor) -> Stack:
        topology, streams = self.topology, self._streams.on(x.device)
        stop = partial(topology.stop, "pipeline")
        return Stack(self._stages, self._cuts, self._plans, topology.ep.size, stop, self.recorder, streams)

    def _layers(self) -> list[MoELayer]:
        return list(self.experts)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"degrees={self.degrees}"


def pipeline(blocks: Iterable[Parts], degrees: tuple[int, int] = (1, 1)) -> PipelinedBlocks:
    """Blocks as one module that runs them in micro-batches, forward and backward each by a plan of its own.

    The results are those of the blocks one after the other: the gate routes token by token, and an expert with a
    capacity takes the rows that it would take of the whole batch. A layer whose tokens compete by more than their order
    (k > 1 with a capacity) has all of a batch's micro-batches routed before the first is sent.

    Args:
        blocks: pairs of a dense part and a `MoELayer`, see `Parts`. Parameters stay the modules' own.
        degrees: micro-batches forward and backward; a batch of fewer samples has empty ones.
    Raises:
        ConfigError: blocks that cannot be split: gates that look at the whole batch, orders by products, hooks, ranks
            that split tokens (MP), experts of their own kind with different degrees.
        RankError: ranks with different blocks or degrees. Making one is collective.
    """
    return PipelinedBlocks(blocks, degrees)


def _refuse(layer: MoELayer, number: int, topology: Topology, degrees: tuple[int, int]) -> None:
    gate = layer.gate
    name, like = type(gate).__name__, next(layer.experts.parameters(), torch.empty(0))
    for wrong, text in (
        (not gate.splits, f"{name} looks at whole batches, so that only what follows it can be split: use schedule=…"),
        (isinstance(layer.order, Einsum), "an order by products cannot be split: use Sparse() or Dropless()"),
        (bool(layer.hooks), "hooks see whole layers: use MoELayer(schedule=…) with them"),
        (
            layer.topology is not topology and topology.size * layer.topology.size > 1,
            "all blocks must have the same topology",
        ),
        (topology.mp.size > 1, "tokens that are split over mp ranks do not come in whole samples"),
        (
            degrees[0] != degrees[1] and not layer.experts.in_chunks(like).any_degree,
            f"experts that are modules of their own need one degree for both passes, not {degrees}",
        ),
    ):
        if wrong:
            raise ConfigError(f"pipeline: block {number}: {text}")


def _even_plan(phase: str, degree: int, kinds: Sequence[str], waits: Sequence[bool]) -> Plan:
    """All parts take as long as each other: for who knows no costs."""
    tasks: list[Task] = []
    layers = range(len(waits))
    for layer in layers if phase == "forward" else reversed(layers):
        for kind in ROADS[phase]:
            if kind == "order" and phase == "forward" and waits[layer]:
                tasks.append(Task(kind, None, layer, phase))
            elif kind in ("attention", *kinds):
                tasks += [Task(kind, chunk, layer, phase) for chunk in range(degree)]
    return list_plan(tasks, dict.fromkeys(tasks, 1.0))


class _Stage:
    """A block as a stack calls it."""

    def __init__(self, block: Parts, sizes: Group) -> None:
        self._layer, self._sizes = block.experts, sizes
        self._dense = _DensePart(block)
        self._names = [name for name, _ in self._dense.named_parameters()]
        gate = block.experts.gate
        self.experts_in_all = gate.experts
        self._limited = gate.capacity_factor is not None and not isinstance(block.experts.order, Dropless)
        self.waits = self._limited and gate.k > 1

    @property
    def dense_parameters(self) -> list[Tensor]:
        return list(self._dense.parameters())

    def capacity(self, tokens: int) -> int | None:
        return self._layer.gate.row_capacity(tokens) if self._limited else None

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._layer.gate.draw(x.reshape(-1, x.shape[-1]))

    def piece(
        self, parameters: Sequence[Tensor], x: Tensor, drawn: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Routing]:
        named = dict(zip(self._names, parameters, strict=True))
        y, u_SM, scores = torch.func.functional_call(self._dense, named, (x, drawn))
        return y, u_SM, scores, self.choose(scores)

    def choose(self, scores: tuple[Tensor, ...]) -> Routing:
        with outside_autocast(scores[0].device.type):
            routing = self._layer.gate.choose(*scores)
        assert isinstance(routing, Routing)
        return routing

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        assert isinstance(routing, Routing)
        self._layer.count(routing, kept_E)

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice]) -> Exchange:
        found = (self._layer.refuse_logits(routing) for routing in routings if isinstance(routing, Routing))
        refusal = next((text for text in found if text), None)
        esp = self._layer.topology.esp
        return Exchange(self._layer.all_to_all, esp, counts, like.dtype, refusal, self._sizes)

    def experts(self, like: Tensor) -> ChunkExperts:
        experts = self._layer.experts
        return experts.in_chunks(like.new_empty(0, dtype=experts.row_dtype(like)))


class _DensePart(nn.Module):
    """What a block computes of a piece by itself: its dense part, the shared expert, and the gate's scores."""

    def __init__(self, block: Parts) -> None:
        super().__init__()
        self.dense, self.gate, self.shared = block.dense, block.experts.gate, block.experts.shared
        self._row_dtype = block.experts.experts.row_dtype

    def forward(self, x: Tensor, drawn: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        y, u = self.dense(x)
        u_SM = u.reshape(-1, x.shape[-1])
        with outside_autocast(u_SM.device.type):
            scores = self.gate.score(u_SM, *drawn)
        u_SM = u_SM.to(self._row_dtype(u_SM))
        if self.shared is not None:
            every = contiguous_layout(torch.full((1,), len(u_SM), device=u_SM.device), len(u_SM))
            y = y + self.shared(u_SM, every, None).view(y.shape)
        return y, u_SM, scores
