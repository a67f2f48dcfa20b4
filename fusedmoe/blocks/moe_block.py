"""A block of pipelined blocks: a dense part (such as attention) and its `MoELayer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from fusedmoe.autograd.aux_loss import guard_aux_loss
from fusedmoe.autograd.parallel import MpTokens
from fusedmoe.blocks.block_experts import BlockExperts
from fusedmoe.blocks.cuts import BlockDegrees, MicroBatch, cut
from fusedmoe.blocks.dense_part import DenseRunner, require_same_shape
from fusedmoe.blocks.state import BlockState, Split
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import ExpertCalls, RowForm, TokenCounts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.gates.base import Routing
from fusedmoe.hooks import apply_end_hooks, hooks_and_wire
from fusedmoe.layers.moe import MoELayer
from fusedmoe.orders import Ordered
from fusedmoe.schedule.workload import Workload, uniform_share


class MoEBlock:
    """A dense part and its `MoELayer`, split into steps between the exchanges of each micro-batch.

    Args:
        sizes: group for the exchange of sizes.
    Attributes:
        has_matrix_order: the order computes the rows as a matrix times tokens; otherwise rows are copies of tokens.
        has_end: `end` processes the experts' results; otherwise they are only added to the dense part's output.
        routes_first: dropped rows are known only once all tokens of a batch are routed.
        mp: ranks that share the same tokens, of which each routes a slice; otherwise a group of one.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, sizes: Group, in_positions: bool, recompute: bool) -> None:
        self.layer, self._sizes_group, self.in_positions = layer, sizes, in_positions
        gate, order, topology, tokens = layer.gate, layer.order, layer.topology, layer.mp_tokens
        self.num_experts = gate.experts
        self.hooks, wire = hooks_and_wire(layer.hooks, layer.plans.wire)
        self.has_matrix_order = not order.copies
        self.has_end = bool(layer.hooks) or tokens.is_joint or self.has_matrix_order
        self.has_capacity = gate.capacity_factor is not None and order.drops
        # Which rows exceed the capacity depends on all first choices, and on all positions of earlier samples.
        self.routes_first = self.has_capacity and (gate.k > 1 or in_positions)
        self.dense = DenseRunner(dense, layer, in_positions, recompute, self.has_end)
        self.experts = BlockExperts(layer)
        # "auto" needs a whole batch to time algorithms.
        algorithm = "direct" if layer.dispatch == "auto" else layer.dispatch
        self._collectives = Collectives(topology, make_all_to_all(algorithm, topology, wire))
        # A separate group: results are joined while dense parts may communicate over the MP group.
        self.mp = topology.duplicate_group(topology.mp, "joins") if tokens.is_joint else Group("mp")
        self._result_tokens = MpTokens(self.mp, layer.mp_input)

    def workload(self, x: Tensor) -> Workload:
        """Return the workload of a batch like x, [B, …, M], whose dense part counts as attention and shared expert.

        Raises:
            ConfigError: the experts do not describe their workload.
        """
        layer, topology = self.layer, self.layer.topology
        experts = layer.experts.workload(1, x.dtype.itemsize, topology.ep.size, topology.esp.size)
        length = max(1, x[:1, ..., 0].numel())
        # MP ranks that share tokens also share the dense part's work.
        samples = max(1, len(x) // self.mp.size)
        rows = layer.order.mean_rows_per_token(layer.gate, samples * length)
        # Plans precede routing: assume uniformly chosen experts.
        share = 1.0 if self.has_matrix_order else uniform_share(layer.gate.experts, layer.gate.k, topology.ep.size)
        batch = samples * topology.esp.size
        workload = replace(experts, batch=batch, seq_len=length, k=1, capacity_factor=rows, share=share)
        workload = layer.plans.encoded(workload)
        shared = self.dense.shared_expert
        if shared is None:
            return workload
        return workload.with_shared_expert(sum(one.numel() for one in shared.parameters() if one.dim() > 1))

    def order(self, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Ordered:
        routing = Routing(expert_SK, weight_SK, None, None, u_SM.new_zeros(()), None)
        return self.layer.order.order(u_SM, routing, self.num_experts)

    def end(self, y: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Gather over `mp` the results y [b, …, M] of each rank's own tokens, and apply the layer's end hooks.

        Differentiable. Communicates in forward only. Raises `ConfigError` if a hook changes the shape.
        """
        z_SM = self._result_tokens.gather(y.reshape(-1, y.shape[-1])[micro_batch.routed_indices], micro_batch.rows)
        z = apply_end_hooks(self.hooks, z_SM.view(y.shape), micro_batch.number, micro_batch.count)
        return require_same_shape(z, y, "before_moe_end")

    def exchange(
        self,
        counts: Tensor,
        tokens_Pp: Tensor,
        like: Tensor,
        routings: Sequence[Routing],
        refusal: str | None,
        needs_backward: bool,
    ) -> Exchange:
        """Exchange the metadata of a chunk, and errors. Collective.

        Args:
            counts: pairs by (peer, micro-batch, local expert of the peer), flat.
            tokens_Pp: tokens by peer and micro-batch.
            like: a tensor of the dtype to send.
            refusal: error message of this rank, which all ranks raise.
            needs_backward: this rank needs the blocks' backward.
        """
        # Non-finite logits are reported with the sizes, before rows are sent.
        reported = self.layer.checks.refusal_to_report(refusal or self.experts.refusal, *routings)
        # A refusing rank has no routing; its form is not compared.
        k, weights = (routings[0].expert_SK.shape[-1], routings[0].weight_SK.dtype) if routings else (0, None)
        form = RowForm(like.dtype, self.layer.model_dim, k, weights)
        return self._collectives.exchange_counts(
            counts,
            form,
            reported,
            tokens=TokenCounts(tokens_Pp, has_row_per_pair=self.has_matrix_order),
            shard_counts=self._sizes_group,
            expert_calls=ExpertCalls.CHUNKS,
            tokens_require_grad=needs_backward,
            weights_require_grad=needs_backward,
        )

    def begin(self, x: Tensor, split: Split, degrees: BlockDegrees, keep: bool) -> BlockState:
        """Begin a call for a batch like x, [B, …, M]: return its state, and fetch replicas.

        Collective over the experts' ranks, under a placement. `keep`: a backward pass may follow.
        """
        own, leaves = self.dense.begin(keep)
        cuts = cut(degrees.dense, degrees.rows, split.axis, x.shape[split.axis])
        chunks, num_held, replicas = self.experts.begin(x)
        return BlockState(chunks, self.hooks, own, leaves, cuts, degrees, num_held, replicas)

    def store_aux_loss(self, loss: Tensor) -> None:
        """Set the layer's auxiliary loss, as its own forward does."""
        layer = self.layer
        loss = layer.mp_tokens.aux_loss_share(loss)
        layer.aux_loss = guard_aux_loss(loss, "MoELayer.aux_loss", None, if_any=not layer.gate.aux)
