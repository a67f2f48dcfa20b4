"""Torchtitan's token dispatcher, by this library's exchange.

Shape suffixes are torchtitan's: T tokens, D model, K choices, E experts, e experts of this rank, N rows sent, R rows
received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import spmd_types as spmd
from torch import Tensor
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from fusedmoe import ops
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import Collectives, Dispatcher, Handle, Local, LocalExperts, Routed
from fusedmoe.errors import ConfigError
from fusedmoe.layers.input_checks import InputChecks


class DispatchMetadata(NamedTuple):
    """What `combine` needs of a `dispatch`.

    Attributes:
        layout: sorts the rows sent.   scores_N: their scores.   handle: of the rows received; None: none were sent.
    """

    layout: ops.Layout
    scores_N: Tensor
    handle: Handle | None


class TokenDispatcher(BaseEPTokenDispatcher):
    """Rows to the ranks of their experts and back.

    What a rank waits for is bounded, and an error names the rank at fault, the operation and the cure; input that
    cannot be sent, and tokens or scores that are NaN or infinite, are refused on all ranks before anything is.

    Raises:
        RankError: from a step, or where meshes are wired: a rank fails, or does not come within `timeout_s`.
        ConfigError: without expert-parallel ranks, tokens or scores that are NaN or infinite (on CUDA from a later
            call).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        timeout_s: float = 300.0
        """How long a rank waits for others, in seconds (see `fusedmoe.Topology`)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._timeout_s = config.timeout_s
        self._dispatcher: Dispatcher = Local()
        self._checks = InputChecks(Topology(), "fusedmoe.titan")

    def init_buffer(self) -> None:
        """Makes the ranks' topology. Collective over the expert-parallel mesh, if there is one."""
        if self.ep_mesh is not None:
            topology = Topology.from_group(self.ep_mesh.get_group(), timeout_s=self._timeout_s)
            self._checks = InputChecks(topology, "fusedmoe.titan")
            self._dispatcher = Collectives(topology, ops.make_all_to_all("direct", topology), name="fusedmoe.titan")

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """[R, D] rows for this rank's experts, sorted by expert; [e] how many of each; what `combine` asks for."""
        if spmd.is_type_checking():
            raise ConfigError(
                "fusedmoe.titan.token_dispatcher: torchtitan's type checks know no rows that this library sent; take "
                "fusedmoe.titan.routed_experts, or leave --debug.spmd_typechecking out"
            )
        bad = self._checks.of_given(x_TD, topk_scores_TK)
        layout = ops.order(topk_expert_ids_TK, self.num_experts)
        scores_N = ops.take_pairs(topk_scores_TK, layout)
        if not isinstance(self._dispatcher, Collectives):
            return ops.permute(x_TD, layout), layout.counts_E, DispatchMetadata(layout, scores_N, None)
        rows_RD, handle = self._dispatcher.dispatch_by_operators(ops.permute(x_TD, layout), None, layout, bad)
        metadata = DispatchMetadata(layout, scores_N, handle)
        return ops.permute(rows_RD, handle.layout), handle.layout.counts_E, metadata

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        """[T, D] the sum of each token's results, each times its score in the wider dtype of the two."""
        layout, scores_N, handle = metadata
        rows_ND = routed_output_RD
        if handle is not None:
            assert isinstance(self._dispatcher, Collectives)
            rows_ND = self._dispatcher.combine_by_operators(ops.unpermute(rows_ND, handle.layout), handle)
        rows_ND = (rows_ND * scores_N[:, None]).to(rows_ND.dtype)
        return ops.unpermute(rows_ND, layout).to(x_TD.dtype)

    def through_experts(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, experts: LocalExperts
    ) -> Tensor:
        """[T, D] the same as one, with experts that gather rows, apply scores and sum results themselves.

        Scores travel with the rows, so that no result has to be kept for their gradient.
        """
        bad = self._checks.of_given(x_TD, topk_scores_TK)
        layout = ops.order(topk_expert_ids_TK, self.num_experts)
        routed = Routed(x_TD, layout, topk_scores_TK)
        if isinstance(self._dispatcher, Collectives):
            return self._dispatcher.by_operators(routed, experts, bad)
        return self._dispatcher.through_experts(routed, experts)
