"""Dispatch, combine and their expert-sharding parts as differentiable functions. None of them saves a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from fusedmoe.autograd.hooks import Direction, HookContext, Hooks, run_hooks
from fusedmoe.autograd.linear import Move, linear
from fusedmoe.comm.exchange import Exchange
from fusedmoe.runtime.recorder import Recorder, span


def dispatch(
    rows_NM: Tensor, exchange: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
) -> Tensor:
    """[N, M] -> [R, M]: rows sorted by expert to rows received, by (source rank, local expert). Collective over ep; the
    backward is a combine."""
    there, back = _wire("dispatch", exchange.dispatch), _wire("combine", exchange.combine)
    return _both_ways(rows_NM, there, back, hooks, recorder)


def combine(
    rows_NM: Tensor, exchange: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
) -> Tensor:
    """[R, M] -> [N, M]: results of the rows received to results of the rows sent, in their order. Collective over ep;
    the backward dispatches."""
    there, back = _wire("combine", exchange.combine), _wire("dispatch", exchange.dispatch)
    return _both_ways(rows_NM, there, back, hooks, recorder)


def all_gather(rows_RM: Tensor, exchange: Exchange, recorder: Recorder | None = None) -> Tensor:
    """The rows of all expert-sharding peers. The backward is a reduce-scatter."""
    there, back = _shard("all-gather", exchange.all_gather), _shard("reduce-scatter", exchange.reduce_scatter)
    return _both_ways(rows_RM, there, back, (), recorder)


def reduce_scatter(rows_RM: Tensor, exchange: Exchange, recorder: Recorder | None = None) -> Tensor:
    """This rank's rows of the sum over the expert shards. The backward is an all-gather."""
    there, back = _shard("reduce-scatter", exchange.reduce_scatter), _shard("all-gather", exchange.all_gather)
    return _both_ways(rows_RM, there, back, (), recorder)


class _wire:
    """A move between nodes with its hooks and its span."""

    resource = "inter"

    def __init__(self, name: str, move: Move) -> None:
        self.name, self.move = name, move

    def __call__(self, hooks: Sequence[Hooks], recorder: Recorder | None, direction: Direction, rows: Tensor) -> Tensor:
        context = HookContext(direction)
        rows = run_hooks(hooks, f"before_{self.name}", rows, context)
        with span(recorder, self.name, kind=self.name, resource=self.resource, phase=direction):
            rows = self.move(rows)
        return run_hooks(hooks, f"after_{self.name}", rows, context)


class _shard(_wire):
    """The same inside a node, without hooks."""

    resource = "intra"


def _both_ways(rows: Tensor, there: _wire, back: _wire, hooks: Sequence[Hooks], recorder: Recorder | None) -> Tensor:
    return linear(rows, partial(there, hooks, recorder, "forward"), partial(back, hooks, recorder, "backward"))
