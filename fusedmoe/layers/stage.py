"""A block as a stack of layers calls it (`fusedmoe.engine.stack`): modules, told apart from what runs them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe.autograd.deferred import DeferredGradients
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import Collectives
from fusedmoe.engine.state import Choice, Dense
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.layers.gates.router import outside_autocast
from fusedmoe.layers.input_checks import check_routing
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.orders import Dropless, Order


class BlockStage:
    """One block.

    Args:
        dense, layer: its parts.
        sizes: carries the sizes of exchanges beside what the layer's own groups carry.
        in_positions: the dense part takes positions, and what it gave for those before.
        recompute: keep the dense part's input only.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, sizes: Group, in_positions: bool, recompute: bool) -> None:
        self._layer, self._sizes, self._recompute = layer, sizes, recompute
        self._dense = _DensePart(dense, layer, in_positions)
        self._names = [name for name, _ in self._dense.named_parameters()]
        self._collectives = Collectives(layer.topology, make_all_to_all(layer.dispatch, layer.topology))
        gate = layer.gate
        self.experts_in_all = gate.experts
        self._limited = _limited(gate, layer.order)
        self.waits = must_wait(gate, layer.order, in_positions)
        like = next(layer.experts.parameters(), torch.empty(0))
        self.any_degree = layer.experts.in_chunks(like).any_degree

    @property
    def dense_parameters(self) -> list[nn.Parameter]:
        return list(self._dense.parameters())

    def capacity(self, tokens: int) -> int | None:
        return self._layer.gate.row_capacity(tokens) if self._limited else None

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._layer.gate.draw(x.reshape(-1, x.shape[-1]))

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        drawn: tuple[Tensor, ...],
        past: Sequence[tuple[Tensor, ...]],
        later: DeferredGradients | None,
    ) -> Dense:
        named, part = dict(zip(self._names, parameters, strict=True)), self._dense  # a graph may keep what computes

        def compute(x: Tensor, past: Sequence[tuple[Tensor, ...]]) -> Any:
            with nullcontext() if later is None else later:
                return torch.func.functional_call(part, named, (x, drawn, past))

        if self._recompute and torch.is_grad_enabled():
            # To its end: a dense part that communicates must do so on all ranks alike.
            with set_checkpoint_early_stop(False):
                y, u, scores, own = checkpoint(compute, x, past, use_reentrant=False)
        else:
            y, u, scores, own = compute(x, past)
        # Losses are the whole batch's.
        gate = copy.copy(self._layer.gate)
        gate.aux = {}
        with outside_autocast(u.device.type):
            routing = gate.choose(*scores)
        check_routing(gate, routing, u.reshape(-1, u.shape[-1]))
        assert isinstance(routing, Routing)
        return Dense(y, u, scores, routing, own)

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
        return self._collectives.exchange(counts, like.dtype, refusal, sizes=self._sizes)

    def experts(self, like: Tensor) -> ChunkExperts:
        experts = self._layer.experts
        return experts.in_chunks(like.new_empty(0, dtype=experts.row_dtype(like)))


class _DensePart(nn.Module):
    """What a block computes of a piece by itself: its dense part, the shared expert, and the gate's scores."""

    def __init__(self, dense: nn.Module, layer: MoELayer, in_positions: bool) -> None:
        super().__init__()
        self.dense, self.gate, self.shared = dense, layer.gate, layer.shared
        self._row_dtype, self._in_positions = layer.experts.row_dtype, in_positions

    def forward(
        self, x: Tensor, drawn: tuple[Tensor, ...], past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        own: tuple[Tensor, ...] = ()
        if self._in_positions:
            y, u, own = self._results(self.dense(x, past), x, ("y", "u", "own"))
        else:
            y, u = self._results(self.dense(x), x, ("y", "u"))
        u_SM = u.reshape(-1, x.shape[-1])
        with outside_autocast(u_SM.device.type):
            scores = self.gate.score(u_SM, *drawn)
        u_SM = u_SM.to(self._row_dtype(u_SM))
        if self.shared is not None:
            every = contiguous_layout(torch.full((1,), len(u_SM), device=u_SM.device), len(u_SM))
            y = y + self.shared(u_SM, every, None).view(y.shape)
        return y, u_SM.view(x.shape), scores, own

    def _results(self, found: Any, x: Tensor, names: tuple[str, ...]) -> tuple[Any, ...]:
        """What the dense part gave. A tensor by itself would come apart into samples."""
        dense, shape = type(self.dense).__name__, list(x.shape)
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            got = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise ConfigError(f"pipeline: the dense part {dense} gave {got}; it must give ({', '.join(names)})")
        for name, one in zip(("y", "u"), found, strict=False):
            if one.shape != x.shape:
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is {list(one.shape)}, not {shape} as x")
        return tuple(found)


def must_wait(gate: Gate, order: Order | None, in_positions: bool) -> bool:
    """Whether it takes all of a batch to know which rows an expert has no room for.

    `order`: None: the one that a layer has by default. `in_positions`: sequences are cut, not batches.
    """
    # Of a sample's first positions nobody knows what the samples before it will ask for.
    return _limited(gate, order) and (gate.k > 1 or in_positions)


def _limited(gate: Gate, order: Order | None) -> bool:
    return gate.capacity_factor is not None and not isinstance(order, Dropless)
