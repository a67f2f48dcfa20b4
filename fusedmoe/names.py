"""Names that select parts of a layer or job, for settings and help texts. Does not import torch."""

from __future__ import annotations

#: Keys of `kernels.activation.ACTIVATIONS`.
ACTIVATIONS = ("swiglu", "geglu", "silu", "gelu", "gelu_tanh", "relu")
#: Keys of `gates.GATES`.
GATES = (
    *("topk", "switch", "gshard", "sigmoid", "xmoe", "softmoe", "expert_choice", "batch_prioritised", "hash"),
    *("random", "deepseek_v3"),
)
#: Keys of `orders.ORDERS`.
ORDERS = ("sparse", "dropless", "einsum")
#: All-to-all algorithms (`MoELayer(dispatch=)`).
ALGORITHMS = ("direct", "1dh", "2dh")
#: Formats of rows between ranks (`Schedule(wire=)`): the tensors' dtype, fp8 in dispatch, fp8 in dispatch and combine.
FP8_WIRES = ("fp8", "fp8-both")
WIRES = ("bf16", *FP8_WIRES)
#: Policies of `placement.ShardedExperts`: Hecate, Hecate without the search after Algorithm 1, and static experts.
PLACEMENT_POLICIES = ("hecate", "algorithm1", "ep")
#: `balance` of `placement.ShardedExperts`: replicas from the loads of earlier steps; also from the batch's own routing;
#: or from the latter only if this saves more time than planning takes.
PLACEMENT_BALANCES = ("predicted", "exact", "auto")
