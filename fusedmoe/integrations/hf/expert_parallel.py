"""Expert parallelism of Hugging Face's models: rows travel by this library's exchange."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from fusedmoe import ops
from fusedmoe.autograd.parallel import join_rows, split_counts, split_rows
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import Collectives, Routed
from fusedmoe.integrations.hf.expert_function import check_experts, compute, row_dtype
from fusedmoe.layers.input_checks import InputChecks


class ExpertParallel(EPImplementation):
    """Each rank's tokens to the ranks of their experts, and the results back: `ep_implementation="fusedmoe"`.

    Ranks that share a batch (`tp_mesh`) send a part of its rows each, and gather the results. Under autocast rows
    travel in the lower precision. Whatever `experts_implementation` says, this library computes the experts.

    Args: as transformers gives them: the experts' module, the ranks that split the experts, and those that share a
        batch. Making one is collective over both.
    Raises:
        ConfigError: experts that cannot be computed (`check_experts`).
        RankError: a rank does not come, or fails; later, from a step, too, and there if a rank has tokens or weights
            that are NaN or infinite.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        check_experts(experts)
        self._experts: Any = experts
        self._topology = Topology.from_group(ep_mesh.get_group())
        self._sharing = Topology.from_group(tp_mesh.get_group()).world
        self._checks = InputChecks(self._topology, f"fusedmoe.hf: {type(experts).__name__}")
        self._all_to_all = ops.make_all_to_all("direct", self._topology)
        self._call = f"fusedmoe.hf {self._topology.number_layer()}"
        self._operators = Collectives(self._topology, self._all_to_all, name="fusedmoe.hf")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K] numbers of all experts, and [T, K] weights: [T, H] in the dtype of `hidden_states`.

        Compiled models take it into their graphs, but for ranks that share a batch, which it is called on as it is.
        """
        if not torch.compiler.is_compiling() or self._sharing.size > 1:
            return self._called(hidden_states, top_k_index, top_k_weights)
        bad = self._checks.of_given(hidden_states, top_k_weights)
        x_TH = hidden_states.to(row_dtype(self._experts, hidden_states))
        layout = ops.order(top_k_index, self.num_local_experts * self._topology.ep.size)
        y_TH = self._operators.by_operators(Routed(x_TH, layout, top_k_weights), partial(compute, self._experts), bad)
        return y_TH.to(hidden_states.dtype)

    @torch.compiler.disable
    def _called(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, topology, sharing = self._experts, self._topology, self._sharing
        self._checks.tell_logits()
        counts = split_counts(len(hidden_states), sharing)
        start, stop = sum(counts[: sharing.index]), sum(counts[: sharing.index + 1])
        x_TH, weight_TK = split_rows(hidden_states, sharing, counts), split_rows(top_k_weights, sharing, counts)
        refusal = self._checks.of_numbers(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(experts, hidden_states))
        layout = ops.order(top_k_index[start:stop], self.num_local_experts * topology.ep.size).exact()
        dtype, call = x_TH.dtype, self._call
        exchange = ops.Exchange(self._all_to_all, topology.esp, layout.counts_E, dtype, refusal, call=call)
        rows_NH, weight_N = ops.permute(x_TH, layout), ops.take_pairs(weight_TK, layout)

        def on_rows(rows_RH: Tensor, received: ops.Layout, weight_R: Tensor | None) -> Tensor:
            return compute(experts, rows_RH, received, weight_R)

        y_NH = ops.through_experts(rows_NH, weight_N, exchange, on_rows)
        y_TH = ops.unpermute(y_NH, layout)
        return join_rows(y_TH, sharing, counts).to(hidden_states.dtype)
