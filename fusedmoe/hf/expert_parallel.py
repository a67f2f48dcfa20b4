"""Expert parallelism for transformers' models with this library's token dispatch."""

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
from fusedmoe.autograd.parallel import join_rows, name_for_graphs, split_counts, split_rows
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.hf.module_experts import (
    check_experts,
    compute_experts,
    fused_activation,
    fused_weights,
    matrix_names,
    read_parameters,
    row_dtype,
)
from fusedmoe.hf.peft_adapters import active_factors, base_parameter, forbid_split_merges, require_synchronized
from fusedmoe.hf.quantised import QuantisedMatrices
from fusedmoe.kernels import Layout
from fusedmoe.kernels.derivatives import graph_allows_dynamic_sizes, mark_constant_in_graphs
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange, shared_topology


class _LocalExperts(ExternalExperts):
    """This rank's experts, with the interface of dispatchers."""

    def __init__(self, experts: Any, ranks: int) -> None:
        widths = base_parameter(experts, "down_proj").shape[1:]
        model_dim, hidden = reversed(widths) if experts.is_transposed else widths
        super().__init__(experts, experts.num_experts * ranks, (model_dim, hidden), experts.has_gate)

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return compute_experts(self.module, read_parameters(self.module), x_SM, layout, weight_N)

    @property
    def reads_parameters_once(self) -> bool:  # type: ignore[override]
        return fused_activation(self.module) is not None or bool(active_factors(self.module))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        # transformers itself calls the module, around the whole exchange.
        return ((name, module) for name, module in self.module.named_modules() if name)

    def graph_module(self) -> nn.Module:
        return _ExpertsGraphModule(self.module)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        experts, activation, factors = self.module, fused_activation(self.module), active_factors(self.module)
        quantised = any(isinstance(base_parameter(experts, name), QuantisedMatrices) for name in matrix_names(experts))
        if activation is None or factors or quantised:
            return AutogradExperts(self, [*experts.parameters(), *factors], experts)
        up, _, up_bias, down, _, down_bias = read_parameters(experts).to(x_SM.dtype)
        return GroupedExperts(fused_weights(experts, up, up_bias, down, down_bias), activation)


class _ExpertsGraphModule(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return compute_experts(self._experts, read_parameters(self._experts), x_SM, layout, weight_N)


class ExpertParallel(EPImplementation):
    """Expert parallelism with this library's dispatch (`ep_implementation="fusedmoe"`).

    Each token is sent once to each rank that hosts some of its experts, which returns one sum per token. Ranks that
    share a batch (`tp_mesh`) each send a part of its tokens and gather the results. Under autocast tokens are sent in
    the lower precision. This library computes the experts, whatever `experts_implementation` is. Subclasses are
    registered for schedules, as "fusedmoe-auto".

    Args:
        experts: the experts' module.
        ep_mesh, tp_mesh: the mesh that splits the experts, and the mesh that shares a batch. Construction is collective
            over both.
    Attributes:
        schedule: initial schedule.
    Raises:
        ConfigError: unsupported experts (`check_experts`). In a training pass: peft adapters that `apply` has not
            synchronised.
        RankError: a rank failed or did not join. In a pass: a rank has NaN or infinite tokens or weights.
    """

    schedule = "off"
    # Layers whose next training pass checks that the adapters of all layers are synchronised.
    _unchecked_layers: ClassVar[WeakSet[ExpertParallel]] = WeakSet()
    _layers: ClassVar[WeakSet[ExpertParallel]] = WeakSet()

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        mark_constant_in_graphs(graph_allows_dynamic_sizes)
        self._unchecked_layers.add(self)
        self._layers.add(self)
        check_experts(experts)
        forbid_split_merges()
        self._experts: Any = experts
        self._topology = shared_topology(ep_mesh.get_group())
        self._batch_group = shared_topology(tp_mesh.get_group()).world
        name_for_graphs(self._batch_group)
        local, name = _LocalExperts(experts, self._topology.ep.size), f"fusedmoe.hf: {type(experts).__name__}"
        self._exchange = ScheduledExchange(self._topology, local, self.schedule, name)
        setattr(experts, EXCHANGE, self._exchange)

    @classmethod
    def check_adapters_again(cls) -> None:
        """Make the next training pass check again that adapters are synchronised over ranks."""
        cls._unchecked_layers.update(cls._layers)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, M] in the dtype of `hidden_states`, from [T, M], [T, K] global expert indices and [T, K] weights.

        In compiled models it runs eagerly unless graphs allow dynamic sizes, as with `fullgraph=True`.
        """
        if torch.compiler.is_compiling() and graph_allows_dynamic_sizes():
            return self._dispatch_and_combine(hidden_states, top_k_index, top_k_weights)
        return self._forward_eager(hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable
    def _forward_eager(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self._experts
        if self in self._unchecked_layers and torch.is_grad_enabled():
            require_synchronized(experts)
            self._unchecked_layers.clear()
        # Evaluate a parametrisation once, not in each chunk.
        with parametrize.cached() if parametrize.is_parametrized(experts) else nullcontext():
            return self._dispatch_and_combine(hidden_states, top_k_index, top_k_weights)

    def _dispatch_and_combine(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        batch_group, exchange, in_graph = self._batch_group, self._exchange, torch.compiler.is_compiling()
        if not in_graph:
            exchange.checks.raise_deferred()
        counts = split_counts(hidden_states.shape[0], batch_group)
        # Ranks that share a batch route the same tokens, and each sends its part.
        given = (hidden_states, top_k_index, top_k_weights)
        x_TM, expert_TK, weight_TK = (split_rows(value, batch_group, counts) for value in given)
        find_bad = exchange.checks.nonfinite_flag if in_graph else exchange.checks.values_refusal
        bad: Any = find_bad(x_TM, weight_TK)
        x_TM = x_TM.to(row_dtype(base_parameter(self._experts, "down_proj"), hidden_states))
        layout = autograd.order(expert_TK, self.num_local_experts * self._topology.ep.size)
        if in_graph:
            y_TM = exchange.run_in_graph(Routed(x_TM, layout, weight_TK), bad)
        else:
            y_TM = exchange.run_by_plan(Routed(x_TM, layout, weight_TK, bad))
        return join_rows(y_TM, batch_group, counts).to(hidden_states.dtype)
