"""Expert parallelism of transformers' models by this library's exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize
from transformers.distributed.expert_parallel import EPImplementation

from fusedmoe import autograd
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.hf.module_experts import (
    check_experts,
    compute,
    fused_activation,
    fused_weights,
    matrix_names,
    read_parameters,
    row_dtype,
)
from fusedmoe.hf.peft_adapters import factors_in_use, refuse_split_merges, require_shared, stored
from fusedmoe.hf.quantised import QuantisedMatrices
from fusedmoe.kernels import Layout
from fusedmoe.kernels.derivatives import constant_in_graphs, graph_takes_sizes
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange, shared_topology


class _LocalExperts(ExternalExperts):
    """The experts of this rank as dispatchers call them."""

    def __init__(self, experts: Any, ranks: int) -> None:
        widths = stored(experts, "down_proj").shape[1:]
        model_dim, hidden = reversed(widths) if experts.is_transposed else widths
        super().__init__(experts, experts.num_experts * ranks, (model_dim, hidden), experts.has_gate)

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return compute(self.module, read_parameters(self.module), x_SM, layout, weight_N)

    @property
    def reads_once(self) -> bool:  # type: ignore[override]
        # peft's factors are read as they are.
        return fused_activation(self.module) is not None or bool(factors_in_use(self.module))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        # transformers calls the module itself, around all that the ranks do.
        return ((name, module) for name, module in self.module.named_modules() if name)

    def in_graphs(self) -> nn.Module:
        return _Computed(self.module)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        experts, activation, factors = self.module, fused_activation(self.module), factors_in_use(self.module)
        quantised = any(isinstance(stored(experts, name), QuantisedMatrices) for name in matrix_names(experts))
        if activation is None or factors or quantised:
            return AutogradExperts(self, [*experts.parameters(), *factors], experts)
        up, _, up_bias, down, _, down_bias = read_parameters(experts).to(x_SM.dtype)
        return GroupedExperts(fused_weights(experts, up, up_bias, down, down_bias), activation)


class _Computed(nn.Module):
    """A module of experts whose forward is `compute`."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return compute(self._experts, read_parameters(self._experts), x_SM, layout, weight_N)


class ExpertParallel(EPImplementation):
    """Sends a token once to each rank with experts for it, and one sum back: `ep_implementation="fusedmoe"`.

    Ranks that share a batch (`tp_mesh`) send a chunk of its tokens each, and gather the results. Under autocast
    tokens travel in the lower precision. Whatever `experts_implementation` says, this library computes the experts.

    "fusedmoe" sends one thing after the other, since measuring would surprise whoever asks a model for one answer;
    "fusedmoe-auto", and "fusedmoe-" before the name of a policy, send by this schedule, as `apply(model, schedule=…)`.

    Args: those of transformers: the experts' module, the ranks that split the experts, and those that share a batch.
        Making one is collective over both.
    Attributes:
        schedule: that modules begin with.
    Raises:
        ConfigError: experts that cannot be computed (`check_experts`).
        RankError: a rank does not come, or fails; later, from a step, too, and there if a rank has tokens or weights
            that are NaN or infinite; adapters of peft that `apply` has not seen.
    """

    schedule = "off"
    # Layers through which no pass with gradients has gone since peft made an adapter: the first pass checks, for all
    # layers, whether adapters are shared.
    _unasked: ClassVar[WeakSet[ExpertParallel]] = WeakSet()
    _layers: ClassVar[WeakSet[ExpertParallel]] = WeakSet()

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        constant_in_graphs(graph_takes_sizes)
        self._unasked.add(self)
        self._layers.add(self)
        check_experts(experts)
        refuse_split_merges()
        self._experts: Any = experts
        self._topology = shared_topology(ep_mesh.get_group())
        self._sharing = shared_topology(tp_mesh.get_group()).world
        autograd.name_for_graphs(self._sharing)
        local, name = _LocalExperts(experts, self._topology.ep.size), f"fusedmoe.hf: {type(experts).__name__}"
        self._exchange = ScheduledExchange(self._topology, local, self.schedule, name)
        setattr(experts, EXCHANGE, self._exchange)

    @classmethod
    def check_adapters_again(cls) -> None:
        """Have the next pass with gradients check whether adapters are shared."""
        cls._unasked.update(cls._layers)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, H] in the dtype of `hidden_states`, of [T, H], [T, K] numbers of all experts and [T, K] weights.

        Compiled models take it into their graphs, with `fullgraph=True`; without, they call it as it is.
        """
        if not (torch.compiler.is_compiling() and graph_takes_sizes()):
            return self._called(hidden_states, top_k_index, top_k_weights)
        sharing, exchange = self._sharing, self._exchange
        counts = autograd.split_counts(hidden_states.shape[0], sharing)
        given = (hidden_states, top_k_index, top_k_weights)
        x_TH, number_TK, weight_TK = (autograd.split_rows(value, sharing, counts) for value in given)
        bad = exchange.checks.of_given(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(stored(self._experts, "down_proj"), hidden_states))
        layout = autograd.order(number_TK, self.num_local_experts * self._topology.ep.size)
        y_TH = exchange.in_graph(Routed(x_TH, layout, weight_TK), bad)
        return autograd.join_rows(y_TH, sharing, counts).to(hidden_states.dtype)

    @torch.compiler.disable
    def _called(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self._experts
        if self in self._unasked and torch.is_grad_enabled():
            require_shared(experts)
            self._unasked.clear()
        # A parametrisation is evaluated once in a forward, whatever the number of chunks.
        with parametrize.cached() if parametrize.is_parametrized(experts) else nullcontext():
            return self._exchanged(hidden_states, top_k_index, top_k_weights)

    def _exchanged(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, topology, sharing = self._experts, self._topology, self._sharing
        self._exchange.checks.tell_logits()
        counts = autograd.split_counts(len(hidden_states), sharing)
        # Ranks that share a batch route the same tokens: each sends its chunk of them only.
        start, stop = sum(counts[: sharing.index]), sum(counts[: sharing.index + 1])
        x_TH, weight_TK = (autograd.split_rows(value, sharing, counts) for value in (hidden_states, top_k_weights))
        refusal = self._exchange.checks.for_exchange(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(stored(experts, "down_proj"), hidden_states))
        layout = autograd.order(top_k_index[start:stop], self.num_local_experts * topology.ep.size)
        y_TH = self._exchange.by_plan(Routed(x_TH, layout, weight_TK, refusal))
        return autograd.join_rows(y_TH, sharing, counts).to(hidden_states.dtype)
