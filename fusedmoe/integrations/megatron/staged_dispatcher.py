"""Megatron-core's token dispatcher, in its six stages, by this library's exchange.

Shape suffixes: T tokens of this rank, D model, K choices, E experts, N rows sent, R rows received.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from fusedmoe import ops
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import Collectives, Handle, LocalExperts
from fusedmoe.errors import ConfigError
from fusedmoe.layers.input_checks import InputChecks


class StagedDispatcher(MoETokenDispatcher):
    """Rows to the ranks of their experts and back.

    Rows cross the expert-parallel ranks by all-to-alls. Where experts are split themselves, the ranks of their parts
    gather the rows and scatter the sums. What a rank waits for is bounded, and an error names the rank at fault, the
    operation and the cure. As with Megatron's own dispatchers, what one stage finds for the next lies in the object:
    the six run one after the other, once for each forward.

    Args:
        config: of the model.
        pg_collection: Megatron's process groups `ep`, `expt_tp` and `tp_ep`. Making the dispatcher is collective over
            the last.
        timeout_s: how long a rank waits for others, in seconds.
    Raises:
        ConfigError: groups that are no grid of ranks; with one rank, from a step, tokens or weights that are NaN or
            infinite (on CUDA from a later one).
        RankError: from a step, or where it is made: a rank fails, or does not come within `timeout_s`; a rank has
            tokens or weights that are NaN or infinite, before any row is sent.
    """

    def __init__(self, config: Any, pg_collection: Any, timeout_s: float) -> None:
        super().__init__(config, pg_collection)
        self._exchange: Collectives | None = None
        self._checks = InputChecks(Topology(), "fusedmoe.megatron")
        if self.ep_size * self.tp_size > 1:
            places = _places(pg_collection.tp_ep, pg_collection.ep, pg_collection.expt_tp)
            topology = Topology.from_group(pg_collection.tp_ep, places, timeout_s=timeout_s)
            self._checks = InputChecks(topology, "fusedmoe.megatron")
            self._exchange = Collectives(topology, ops.make_all_to_all("direct", topology), name="fusedmoe.megatron")

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[…, D] tokens, [T, E] who goes where and the weights of that: the rows to send, and the weight of each."""
        self._shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, self._shape[-1])
        self._bad = self._checks.of_given(x_TD, probs)
        number_TK, weight_TK = chosen(routing_map, probs, self.config.moe_router_topk)
        self._layout = ops.order(number_TK, routing_map.shape[1])
        if self._exchange is None:
            self._layout = self._layout.exact()
            return x_TD, ops.take_pairs(weight_TK, self._layout)
        return ops.permute(x_TD, self._layout), ops.take_pairs(weight_TK, self._layout)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[R, D] the rows of this rank's experts, and the weight of each of them sorted. Collective."""
        if self._exchange is None:
            self._handle = Handle(self._layout, probs)
            return hidden_states, probs
        rows_RD, self._handle = self._exchange.dispatch_by_operators(hidden_states, probs, self._layout, self._bad)
        assert self._handle.weight_N is not None
        return rows_RD, self._handle.weight_N

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows sorted by expert, how many each has (on the host, where experts ask for them), and their weights."""
        layout = self._handle.layout
        return ops.permute(hidden_states, layout), layout.counts_E.cpu(), probs

    def through_experts(self, experts: LocalExperts, hidden_states: Tensor) -> Tensor:
        """Between dispatch and combine in one: experts that gather rows, apply weights and sum results themselves."""
        return experts(hidden_states, self._handle.layout, self._handle.weight_N)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The results in the order in which rows came."""
        return ops.unpermute(hidden_states, self._handle.layout)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[N, D] the results of the rows that were sent. Collective."""
        if self._exchange is None:
            return hidden_states
        return self._exchange.combine_by_operators(hidden_states, self._handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum of each token's results, in the shape of the tokens."""
        y_TD = hidden_states if self._exchange is None else ops.unpermute(hidden_states, self._layout)
        return y_TD.view(self._shape)


def chosen(routing_map: Tensor, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[T, E] booleans and weights as [T, K] numbers of experts, ascending, -1 for none, and their weights."""
    experts = routing_map.shape[1]
    index_E = torch.arange(experts, device=routing_map.device)
    number_TK = torch.where(routing_map, index_E, experts).topk(min(k, experts), largest=False).values
    weight_TK = probs.gather(1, number_TK.clamp(max=experts - 1))
    return number_TK.masked_fill(number_TK == experts, -1), weight_TK


def _places(tp_ep: Any, ep: Any, expt_tp: Any) -> Tensor:
    """[EP, ESP] where in their common group the ranks are that have an expert's parts."""
    ranks, across, parts = (dist.get_process_group_ranks(group) for group in (tp_ep, ep, expt_tp))
    # Parts of experts are on neighbours, or the other way round, as the order of Megatron's axes has it.
    for places in (
        torch.arange(len(ranks)).view(len(across), len(parts)),
        torch.arange(len(ranks)).view(len(parts), len(across)).t(),
    ):
        grid = torch.tensor(ranks)[places]
        row, column = (int(at) for at in (grid == dist.get_rank()).nonzero()[0])
        if grid[row].tolist() == parts and grid[:, column].tolist() == across:
            return places
    raise ConfigError(
        f"fusedmoe.megatron: the ranks {parts} that have parts of an expert, and {across} that have other experts, are "
        f"no rows and columns of {ranks}; initialise Megatron's parallel state with an order in which tp and ep adjoin"
    )
