"""Dense part and gate of a block, for whole batches and for micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe.blocks.cuts import MicroBatch
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.compat.torch import module_states
from fusedmoe.engine.module_hooks import find_hook, find_replaced_forward, has_parametrisations
from fusedmoe.engine.shared_expert_task import single_expert_layout
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate, Routing, outside_autocast
from fusedmoe.gates.choice_override import ChoiceOverride, GivenExperts
from fusedmoe.hooks import apply_start_hooks
from fusedmoe.layers.input_checks import check_routing, find_tokens_error
from fusedmoe.layers.moe import MoELayer


class DenseResult(NamedTuple):
    """Results of a block's dense part, gate and shared expert for one micro-batch.

    Attributes:
        u: input of the experts, like x, in the dtype to send.
        shared: value to add to the experts' results before `MoEBlock.end`, like x; None: nothing.
        gate_scores: the gate's scores, [S, …] each, of the tokens that this rank routes.
        present: tensors that later micro-batches of the same samples read; empty if micro-batches are whole samples.
    """

    y: Tensor
    u: Tensor
    shared: Tensor | None
    gate_scores: tuple[Tensor, ...]
    routing: Routing
    present: tuple[Tensor, ...]


class DenseInputs(NamedTuple):
    """Inputs of a dense part and its gate for one micro-batch, besides x.

    Attributes:
        drawn: the gate's random numbers for these tokens.
        given: the experts of these tokens, if routing is replayed.
        arguments: passed to dense parts that contain the router (`RoutingDense`).
    """

    micro_batch: MicroBatch
    drawn: tuple[Tensor, ...]
    given: GivenExperts | None
    arguments: object = None


class DenseRunner:
    """Runs dense part, shared expert and gate of one block.

    `has_end`: the shared expert's result is added at the end of the block (`MoEBlock.end`); otherwise it is part of y.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, in_positions: bool, recompute: bool, has_end: bool) -> None:
        self._layer, self._recompute = layer, recompute
        self._part = _DensePart(dense, layer, in_positions, has_end)
        self._names: list[str] = []

    def begin(self, keep: bool) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters of dense part, gate and shared expert, and detached leaves to pass to `run` instead.

        Hooks on the parameters thus run once, with complete gradients. `keep`: a backward pass may follow.
        """
        named = self._named_parameters()  # anew for each call: adapters may have been added since the last
        self._names, own = list(named), list(named.values())
        return own, [parameter.detach().requires_grad_(keep and parameter.requires_grad) for parameter in own]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._named_parameters().values())

    def run_unsplit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, u = self._call_or_checkpoint(self._part.run_unsplit, x)
        return y, u

    @property
    def shared_expert(self) -> nn.Module | None:
        """The shared expert, of the layer or of another library's block, for predictions."""
        of_block: nn.Module | None = getattr(self._part.dense, "shared_expert", None)
        return of_block if self._layer.shared is None else self._layer.shared

    @property
    def call_reason(self) -> str | None:
        """Why modules must run on whole batches: hooks, a replaced `forward` or a parametrization; None: no reason."""
        dense, layer = self._part.dense, self._layer
        # Hooks of sharding wrappers must run in each micro-batch.
        hook = find_hook(dense, ("fusedmoe", "torch.distributed")) or find_hook(layer, ("fusedmoe",))
        hook = hook or find_replaced_forward(layer.experts) or find_replaced_forward(layer.gate)
        parts = [dense, layer.gate, layer.shared, None if layer.experts.reads_parameters_once else layer.experts]
        parametrised = (part for part in parts if part is not None and has_parametrisations(part))
        return hook or next((f"a parametrisation in {type(part).__name__}" for part in parametrised), None)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        # Another library's block contains its experts, whose gradients the exchange handles.
        of_experts = {id(parameter) for parameter in self._layer.experts.parameters()}
        return {name: one for name, one in self._part.named_parameters() if id(one) not in of_experts}

    def run(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        inputs: DenseInputs,
        past: Sequence[tuple[Tensor, ...]],
        deferred: DeferredGradients | None,
    ) -> DenseResult:
        """Run dense part and gate on one micro-batch, [b, …, M].

        Args:
            past: `present` of earlier micro-batches of the same samples.
        Raises:
            ConfigError: an invalid result on this rank.
            RankError: as ConfigError, on several ranks, if other ranks may wait in their dense parts.
        """
        named, part = dict(zip(self._names, parameters, strict=True)), self._part  # the graph must not hold self
        for name, parameter in named.items():
            # Gate and shared expert are replicated over MP ranks, which route slices: their gradients are summed.
            if not name.startswith("dense."):
                named[name] = self._layer.mp_tokens.with_summed_gradient(parameter)

        def compute(x: Tensor, past: Sequence[tuple[Tensor, ...]]) -> Any:
            with nullcontext() if deferred is None else deferred:
                return torch.func.functional_call(part, named, (x, inputs, past))

        try:
            y, u, shared, scores, present = self._call_or_checkpoint(compute, x, past)
            # Losses are computed for the whole batch: route without losses.
            gate = self._layer.gate.without_losses()
            with outside_autocast(u.device.type), _override_choice(gate, inputs.given):
                routing = gate.choose(*scores)
            check_routing(gate, routing, u.reshape(-1, u.shape[-1])[inputs.micro_batch.routed_indices])
        except ConfigError as error:
            # Other ranks may wait in their dense parts: report it now. Otherwise the next exchange does.
            if self.has_collectives:
                self._layer.checks.refuse(str(error))
            raise
        assert isinstance(routing, Routing)
        return DenseResult(y, u, shared, scores, routing, present)

    @property
    def has_collectives(self) -> bool:
        return self._layer.topology.mp.size > 1 or any(module in module_states for module in self._part.modules())

    def choose(self, scores: tuple[Tensor, ...], given: GivenExperts | None) -> Routing:
        gate = self._layer.gate
        with outside_autocast(scores[0].device.type), _override_choice(gate, given):
            routing = gate.choose(*scores)
        assert isinstance(routing, Routing)
        if gate.tap is not None:
            gate.tap.record_choice(
                None if given is None else given.with_live_rows(routing.expert_SK), routing.expert_SK
            )
        return routing

    def _call_or_checkpoint(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if not (self._recompute and torch.is_grad_enabled()):
            return compute(*inputs)
        # No early stop: all ranks must issue the same collectives in the recomputation.
        with set_checkpoint_early_stop(False):
            return checkpoint(compute, *inputs, use_reentrant=False)


class RoutingDense(nn.Module):
    """Base of dense parts that contain the router: (y, u, scores) = dense(x, arguments).

    `scores` are the inputs of the layer's gate, [S, …] each, for all tokens of x; `arguments` are those of
    `PipelinedBlocks.forward`.
    """


class _DensePart(nn.Module):
    """Dense part, shared expert and gate scores of a block for one micro-batch."""

    def __init__(self, dense: nn.Module, layer: MoELayer, in_positions: bool, has_end: bool) -> None:
        super().__init__()
        self.dense, self.gate, self.shared = dense, layer.gate, layer.shared
        self._hooks, self._mp_tokens, self._has_end = layer.hooks, layer.mp_tokens, has_end
        self._row_dtype, self._in_positions = layer.experts.row_dtype, in_positions
        self._expert_parameters = layer.experts.parameters  # not its own parameters

    def forward(
        self, x: Tensor, inputs: DenseInputs, past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
        micro_batch, drawn, given, arguments = inputs
        y, u, present, scores = self._call_dense(x, past, arguments)
        if self._hooks:
            u = apply_start_hooks(self._hooks, u, micro_batch.number, micro_batch.count)
            u = require_same_shape(u, x, "before_moe_start")
        u_SM = self._mp_tokens.shard(u.reshape(-1, x.shape[-1]), micro_batch.rows)
        if micro_batch.indices_in_slice is not None:
            u_SM = u_SM.index_select(0, micro_batch.indices_in_slice)
        if isinstance(self.dense, RoutingDense):
            scores = tuple(score[micro_batch.routed_indices] for score in scores)
        else:
            with outside_autocast(u_SM.device.type), _override_choice(self.gate, given):
                scores = self.gate.score(u_SM, *drawn)
        u_SM = u_SM.to(self._row_dtype(u_SM))
        shared: Tensor | None = None
        if self.shared is not None:
            shared = micro_batch.scatter_to_tokens(self.shared(u_SM, single_expert_layout(u_SM), None)).view(y.shape)
        # Added inside the graph unless it must pass through the end of the block.
        if shared is not None and not self._has_end:
            y, shared = y + shared, None
        return y, micro_batch.scatter_to_tokens(u_SM).view(x.shape), shared, scores, present

    def run_unsplit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._call_dense(x, (), None)[:2]

    def _call_dense(
        self, x: Tensor, past: Sequence[tuple[Tensor, ...]], arguments: object
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        if isinstance(self.dense, RoutingDense):
            y, u, scores = self._check_results(self.dense(x, arguments), x, ("y", "u", "scores"))
            return y, u, (), scores
        if self._in_positions:
            y, u, present = self._check_results(self.dense(x, past), x, ("y", "u", "present"))
            return y, u, present, ()
        y, u = self._check_results(self.dense(x), x, ("y", "u"))
        return y, u, (), ()

    def _check_results(self, given: Any, x: Tensor, names: tuple[str, ...]) -> tuple[Any, ...]:
        dense, shape = type(self.dense).__name__, list(x.shape)
        if not isinstance(given, (tuple, list)) or len(given) != len(names):
            got = f"{len(given)} results" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
            raise ConfigError(f"pipeline: the dense part {dense} gave {got}; it must give ({', '.join(names)})")
        for name, result in zip(("y", "u"), given, strict=False):
            if isinstance(result, Tensor) and result.shape != x.shape:
                sizes = f"{list(result.shape)}, not {shape} as x"
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is {sizes}")
            if isinstance(result, Tensor) and result.device != x.device:
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is on {result.device}, x on {x.device}")
            like: Tensor | None = next(self._expert_parameters(), None) if name == "u" else None
            if text := find_tokens_error(f"pipeline: the dense part {dense} gave {name}", result, x.shape[-1], like):
                raise ConfigError(text)
        return tuple(given)


def _override_choice(gate: Gate, given: GivenExperts | None) -> AbstractContextManager[Any]:
    return nullcontext() if given is None else ChoiceOverride(gate.experts, lambda *_: given)


def require_same_shape(result: Tensor, like: Tensor, hook: str) -> Tensor:
    """Return a hook's result. Raise `ConfigError` unless it has the shape of the hook's input, `like`."""
    if result.shape != like.shape:
        raise ConfigError(
            f"pipeline: hooks at {hook} made {list(result.shape)} of {list(like.shape)}. Between blocks tokens keep "
            "their shape: change it in the dense parts, or use MoELayer(schedule=…) with such hooks"
        )
    return result
