"""The layer's operations as functions, for models that bring their own modules.

`gate` and `gate_from_logits` route tokens by a `GateRule`, `order` sorts routing decisions, `permute` and `unpermute`
move rows by them and `take_pairs` router weights, `experts` computes (`grouped_linear` and `clamped_swiglu` for
networks that it does not know), `exchange_metadata` returns an `Exchange`, with which `dispatch`, `combine`,
`all_gather` and `reduce_scatter` send rows between ranks, and `through_experts` does all between permute and unpermute,
with a row for each (token, k) pair. `gather_rows`, `reduce_scatter_rows`, `split_rows` and `join_rows` serve
model-parallel parts; graphs can hold the last two over a group that `name_for_graphs` was given.

For operations of your own: `linear` is a map that is linear in its rows, with its adjoint as its gradient, and
`Function` an autograd function whose second derivative is right or refused by name. `experts_in_parts` reads weights
that lie in parts. `low_rank_experts` and `low_rank_linear` compute with adapters beside frozen matrices. `count_flops`
has PyTorch's `FlopCounterMode` count all of these, as the first layer does.

What does not fit (shapes, dtypes, devices, numbers of experts that do not exist) is refused before anything is computed
or sent: ConfigError, or RankError where other ranks wait.
"""

from __future__ import annotations

from fusedmoe.autograd.aux_loss import without_a_graph
from fusedmoe.autograd.checks import require_values
from fusedmoe.autograd.experts import WeightParts, experts, experts_in_parts
from fusedmoe.autograd.gate import GateChoice, GateRule, gate, gate_from_logits
from fusedmoe.autograd.grouped import clamped_swiglu, grouped_linear
from fusedmoe.autograd.low_rank import low_rank_experts, low_rank_linear
from fusedmoe.autograd.moves import all_gather, combine, dispatch, received_layout, reduce_scatter, through_experts
from fusedmoe.autograd.order import order, permute, take_pairs, unpermute
from fusedmoe.autograd.parallel import (
    gather_rows,
    join_rows,
    name_for_graphs,
    reduce_scatter_rows,
    split_counts,
    split_rows,
)
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import Exchange, exchange_metadata
from fusedmoe.comm.metadata import NonFinite, RowForm, TokenCounts
from fusedmoe.kernels.activation import ACTIVATIONS, define_activation
from fusedmoe.kernels.derivatives import (
    Function,
    Move,
    constant_in_graphs,
    count_flops,
    graph_takes_sizes,
    linear,
    numbers_only,
)
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout, contiguous_layout
from fusedmoe.kernels.low_rank import Adapters, LowRank, Matrices, StoredWeights

__all__ = ["GateChoice", "GateRule", "gate", "gate_from_logits", "without_a_graph"]
__all__ += ["Layout", "contiguous_layout", "order", "permute", "received_layout", "take_pairs", "unpermute"]
__all__ += ["WeightParts", "Weights", "experts", "experts_in_parts", "grouped_linear"]
__all__ += ["Adapters", "LowRank", "Matrices", "StoredWeights", "low_rank_experts", "low_rank_linear"]
__all__ += ["ACTIVATIONS", "clamped_swiglu", "define_activation"]
__all__ += [
    "Exchange",
    "NonFinite",
    "RowForm",
    "TokenCounts",
    "all_gather",
    "combine",
    "dispatch",
    "exchange_metadata",
    "make_all_to_all",
    "reduce_scatter",
    "through_experts",
]
__all__ += ["gather_rows", "join_rows", "name_for_graphs", "reduce_scatter_rows", "split_counts", "split_rows"]
__all__ += [
    "Function",
    "Move",
    "constant_in_graphs",
    "count_flops",
    "graph_takes_sizes",
    "linear",
    "numbers_only",
    "require_values",
]
