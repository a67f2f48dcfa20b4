"""Mixture-of-experts models of Hugging Face transformers with this library's kernels and exchange of tokens.

    import fusedmoe.hf

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1", experts_implementation="fusedmoe")

Importing it registers the name "fusedmoe" in both of transformers' registries: of experts, and of how tokens reach
experts on other ranks (`DistributedConfig(ep_size=…, ep_implementation="fusedmoe")`). `apply(model)` sets it for a
model that there is already, and says what stands in its way. Nothing of transformers is replaced, and parameters stay
as they are: checkpoints, LoRA, optimizers and `Trainer` see no difference. `Trainer(…, callbacks=[MetricsCallback()])`
logs what the routing is like.

With experts over ranks `apply(model, schedule="auto")`, or `ep_implementation="fusedmoe-auto"`, has what travels
overlap what is computed; `Trainer(…, callbacks=[PlanTuningCallback()])` measures plans while a model trains.

A forward of a model's experts, in the order of this file: `experts_forward` looks at the numbers, sorts tokens by
expert and calls `compute`; with expert parallelism `ExpertParallel` sends the tokens in between.

What a module computes is read from the flags that `use_experts_implementation` gives it (transformers 5.23), never from
shapes. Plain experts (weights [E, out, in], both halves in one, SiLU or another activation of ours) are one fused
operation; others (transposed weights, gates and norms of their own) are grouped products, and between them gpt-oss's
activation by a kernel of ours or the module's own functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, TrainerCallback
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from fusedmoe import Schedule, Topology, ops
from fusedmoe.dispatchers import (
    EXCHANGE,
    AutogradExperts,
    ChunkExperts,
    ExternalExperts,
    GroupedExperts,
    InputChecks,
    Routed,
    ScheduledExchange,
    not_finite,
    shared_topology,
)
from fusedmoe.errors import ConfigError
from fusedmoe.hf_adapters import (
    factors_in_use,
    folded,
    matrix,
    replace_activation,
    require_shared,
    share_adapters,
    stored,
)
from fusedmoe.hf_metrics import MetricsCallback, registered_experts
from fusedmoe.hf_padding import mask_padding
from fusedmoe.hf_quantised import QuantisedMatrices
from fusedmoe.plans import layer_policies
from fusedmoe.training import StepTuning

__all__ = [
    "NAME",
    "ExpertParallel",
    "MetricsCallback",
    "PlanTuningCallback",
    "apply",
    "experts_forward",
    "mask_padding",
]

#: The name in transformers' registries.
NAME = "fusedmoe"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Pairs of a token and an expert up to which products wait for weights, and no order is worth while.
_FEW = 128
# Products with two or three rows wait for the weight alone; BLAS reads one that is [out, in] faster from the left.
_SKINNY = 3
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
# Where transformers' own forward functions of experts are: its registry's, and that of expert parallelism.
_OWN = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sum of each token's experts: the function in transformers' registry.

    Args:
        self: the experts' module.
        hidden_states: [T, H].
        top_k_index: [T, K] integers; −1 stands for no expert, and the number of experts, or more, for one of another
            rank: no row is computed for it.
        top_k_weights: [T, K].
    Returns:
        [T, H] in the dtype of `hidden_states`; products run in that of the parameters, under autocast in its own.
    Saves for backward:
        Where the experts are one operation, tokens and pre-activations (see `fusedmoe.ops.experts`).
    Raises:
        ConfigError: a module that is none of these, named; shapes that do not fit; tokens or weights that are NaN or
            infinite (on CUDA from a later call).
    """
    check_experts(self)
    refuse_bad_numbers(self, hidden_states, top_k_weights)
    if _is_few(self, hidden_states, top_k_index):
        return few_tokens(self, hidden_states, top_k_index, top_k_weights)
    # Where nothing is split, a number that does not exist is a mistake, which `order` refuses.
    number_TK = (
        top_k_index.masked_fill(top_k_index >= self.num_experts, -1) if self._is_expert_parallel else top_k_index
    )
    layout = ops.order(number_TK, self.num_experts)
    x_TH = hidden_states.to(row_dtype(self, hidden_states))
    y_TH = compute(self, x_TH, layout, ops.take_pairs(top_k_weights, layout))
    return y_TH.to(hidden_states.dtype)


def refuse_bad_numbers(experts: Any, *tensors: Tensor) -> None:
    """Looks for NaN and infinity in what a module of experts was given, as `MoELayer` does in router logits."""
    checks, name = experts.__dict__.get("_fusedmoe_checks"), f"fusedmoe.hf: {type(experts).__name__}"
    if not torch.compiler.is_compiling():
        if checks is None:
            checks = experts._fusedmoe_checks = InputChecks(Topology(), name)
    # In a graph nobody could ask later, so the numbers are asserted on the device.
    elif checks is None:
        ops.require_values(name, not_finite(*tensors) == 0, "tokens or router weights are NaN or infinite")
        return
    checks.of_given(*tensors)


def _is_few(experts: Any, hidden_states: Tensor, top_k_index: Tensor) -> bool:
    """Returns whether calls cost more than rows do, as where a model decodes on a CPU."""
    # First: in a graph, asking for a number of tokens would bind the graph to that side of the limit.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not ops.numbers_only():
        return False
    given = (hidden_states, top_k_index, stored(experts, "down_proj"))
    if isinstance(given[2], QuantisedMatrices):
        return False
    return top_k_index.numel() <= _FEW and all(tensor.device.type == "cpu" for tensor in given)


def few_tokens(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts_forward` for some tokens on a CPU, without gradients: a product for each expert that was chosen."""
    dtype, K = row_dtype(experts, hidden_states), top_k_index.shape[1]
    number_P = top_k_index.flatten().tolist()
    if not experts._is_expert_parallel and max(number_P, default=0) >= experts.num_experts:
        raise ConfigError(
            f"fusedmoe.hf: chosen experts must be numbers from 0 to {experts.num_experts - 1}, got {max(number_P)}"
        )
    pairs = [pair for pair, number in enumerate(number_P) if 0 <= number < experts.num_experts]
    x_TH, first = hidden_states.to(dtype), "gate_up_proj" if experts.has_gate else "up_proj"
    if len(x_TH) == 1:
        # Between products that read all of a cache each call costs many times what it does alone: one token is not
        # sorted, looked up or added up row by row.
        numbers, sizes, token_N = [number_P[pair] for pair in pairs], [1] * len(pairs), None
        rows = [x_TH] * len(pairs)
    else:
        # By expert, so that each matrix is read once.
        pairs.sort(key=number_P.__getitem__)
        counts = Counter(number_P[pair] for pair in pairs)
        numbers, sizes = list(counts), list(counts.values())
        token_N = torch.tensor([pair // K for pair in pairs], dtype=torch.long)
        rows = [*x_TH[token_N].split_with_sizes(sizes)]
    if not pairs:
        return torch.zeros_like(hidden_states)
    rows_NI = _product(experts, rows, first, numbers, sizes)
    rows_NI = experts._apply_gate(rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = _product(experts, rows_NI.to(dtype).split_with_sizes(sizes), "down_proj", numbers, sizes)
    if experts.has_post_expert_norm:
        rows_NH = experts.post_expert_norm(rows_NH)
    # Weights and sums in float32 at least, as in the library's own kernels.
    total = torch.promote_types(dtype, torch.float32)
    rows_NH, weight_1P = rows_NH.to(total), top_k_weights.reshape(1, -1).to(total)
    weight_1N = weight_1P if token_N is None and len(pairs) == K else weight_1P[:, pairs]
    if token_N is None:
        return torch.mm(weight_1N, rows_NH).to(hidden_states.dtype)
    rows_NH = rows_NH * weight_1N.t()
    return rows_NH.new_zeros(hidden_states.shape).index_add_(0, token_N, rows_NH).to(hidden_states.dtype)


def _product(experts: Any, rows: Sequence[Tensor], name: str, numbers: list[int], sizes: list[int]) -> Tensor:
    """Returns [N, O]: the rows [n, I] of each of some experts times its matrix, plus its bias.

    Args:
        numbers, sizes: of the experts, and how many rows each has.
    """
    (weight, adapter), transposed, dtype = matrix(experts, name), experts.is_transposed, rows[0].dtype
    weight_EIO = weight if transposed else weight.transpose(1, 2)
    skinny = _SKINNY if dtype in (torch.float32, torch.float64) and not transposed else 0
    parts = []
    for number, rows_nI, size in zip(numbers, rows, sizes, strict=True):
        matrix_IO = weight_EIO.select(0, number).to(dtype)
        # Few rows wait for the weight alone, which BLAS reads faster from the left where it is [out, in].
        if 1 < size <= skinny:
            parts.append(torch.mm(matrix_IO.t(), rows_nI.t()).t())
        else:
            parts.append(torch.mm(rows_nI, matrix_IO))
        if adapter is not None:
            low = rows_nI @ adapter.a_ErI[number].t().to(dtype)
            parts[-1] = torch.addmm(parts[-1], low, adapter.b_EOr[number].t().to(dtype), alpha=adapter.scale)
    out_NO = torch.cat(parts)
    if experts.has_bias:
        bias_EO = getattr(experts, f"{name}_bias")
        out_NO += bias_EO[[number for number, size in zip(numbers, sizes, strict=True) for _ in range(size)]].to(dtype)
    return out_NO


def row_dtype(experts: Any, hidden_states: Tensor) -> torch.dtype:
    """Returns the dtype in which rows are computed and sent."""
    kind = hidden_states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else stored(experts, "down_proj").dtype


def compute(experts: Any, x_TH: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
    """Returns [T, H]: Σ over each token's rows n of weight_N[n]·FFN_e(x_TH), in the dtype of x_TH."""
    (up, up_adapter), (down, down_adapter) = (_matrix(experts, name, x_TH.dtype) for name in _names(experts))
    up_bias, down_bias = _biases(experts, x_TH.dtype)
    adapters = ops.Adapters(up_adapter, down_adapter)
    bits = any(isinstance(each, QuantisedMatrices) for each in (up, down))
    # Products beside frozen ones know no gradient of these.
    if any(each is not None and each.requires_grad for each in (up, down, up_bias, down_bias)):
        if bits:
            raise ConfigError(f"fusedmoe.hf: {type(experts).__name__} is quantised in part: freeze all its parameters")
        up, down = (folded(w, each, experts.is_transposed) for w, each in zip((up, down), adapters, strict=True))
        adapters = ops.Adapters(None, None)
    # The one fused operation where the flags say that it is the module's; else products and the module's own gate.
    activation = fused_activation(experts)
    if bits:
        assert activation is not None  # else refused
        matrices: tuple[Any, Any] = up, down
        stored_weights = ops.StoredWeights(*matrices, up_bias, down_bias)
        return ops.low_rank_experts(x_TH, layout, weight_N, stored_weights, adapters, activation)
    if activation is not None:
        weights = fused_weights(experts, up, up_bias, down, down_bias)
        if any(each is not None for each in adapters):
            return ops.low_rank_experts(x_TH, layout, weight_N, weights, adapters, activation)
        return ops.experts(x_TH, layout, weight_N, weights, activation)
    rows_NI = _linear(experts, ops.permute(x_TH, layout), layout, up, up_bias, adapters.up)
    if experts.has_gate and is_clamped_swiglu(experts):
        rows_NI = ops.clamped_swiglu(rows_NI, experts.alpha, experts.limit)
    else:
        rows_NI = experts._apply_gate(rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = _linear(experts, rows_NI.to(x_TH.dtype), layout, down, down_bias, adapters.down)
    if experts.has_post_expert_norm:
        # Before the weights, as in the module's own forward.
        rows_NH = experts.post_expert_norm(rows_NH).to(x_TH.dtype)
    if weight_N is not None:
        rows_NH = rows_NH * weight_N[:, None].to(x_TH.dtype)
    return ops.unpermute(rows_NH, layout)


def _names(experts: Any) -> tuple[str, str]:
    """Returns the names of the matrices of both products."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _matrix(experts: Any, name: str, dtype: torch.dtype) -> tuple[Tensor, ops.LowRank | None]:
    """Returns a product's matrix and the adapter on it, in a dtype."""
    weight, adapter = matrix(experts, name)
    return weight.to(dtype), None if adapter is None else adapter.to(dtype)


def _biases(experts: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """Returns the biases of both products, in a dtype."""
    biases = (getattr(experts, f"{name}_bias", None) if experts.has_bias else None for name in _names(experts))
    return [None if bias is None else bias.to(dtype) for bias in biases]


def fused_weights(
    experts: Any, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> ops.Weights:
    """Returns both products' parameters as the operation of experts with a `fused_activation` takes them."""
    w1 = up.reshape(len(up), *((2,) if experts.has_gate else ()), -1, up.shape[2])
    b1 = None if up_bias is None else up_bias.reshape(w1.shape[:-1])
    return ops.Weights(w1, down, b1, down_bias)


def _linear(
    experts: Any, rows_NI: Tensor, layout: ops.Layout, weight: Tensor, bias: Tensor | None, adapter: ops.LowRank | None
) -> Tensor:
    # They take [E, in, out], and call [E, out, in] transposed.
    transposed = not experts.is_transposed
    if adapter is None:
        return ops.grouped_linear(rows_NI, layout, weight, bias, transposed=transposed)
    return ops.low_rank_linear(rows_NI, layout, weight, adapter, bias, transposed=transposed)


def is_clamped_swiglu(experts: Any) -> bool:
    """Returns whether a module's own gate is gpt-oss's, tried out once: another version's may be another function.

    A graph that is compiled before any such call has the module's own function.
    """
    known: bool | None = experts.__dict__.get("_fusedmoe_clamped_swiglu")
    if known is None and not torch.compiler.is_compiling():
        known = experts._fusedmoe_clamped_swiglu = _computes_clamped_swiglu(experts)
    return bool(known)


def _computes_clamped_swiglu(experts: Any) -> bool:
    alpha, limit = (getattr(experts, name, None) for name in ("alpha", "limit"))
    if not (isinstance(alpha, (int, float)) and isinstance(limit, (int, float)) and limit > 0):
        return False
    # Beyond the limit on both sides, so that the clamps are seen, in every combination of both halves.
    side = torch.linspace(-2.0 * limit, 2.0 * limit, 16, dtype=torch.float64)
    # Eight columns: halves side by side, instead of interleaved, are another function of them.
    tried_NH = torch.cartesian_prod(side, side).view(-1, 8)
    try:
        with torch.no_grad():
            gated: Tensor = experts._apply_gate(tried_NH)
    # It needs rows of the module's own width or dtype: then it is not this function.
    except Exception:
        return False
    wanted = ops.clamped_swiglu(tried_NH, alpha, limit)
    return gated.shape == wanted.shape and torch.allclose(gated, wanted, rtol=1e-12, atol=1e-12)


def fused_activation(experts: Any) -> str | None:
    """Returns the activation of a network that is one operation of ours; None for others."""
    if experts.is_transposed or not experts.is_concatenated or experts.has_post_expert_norm:
        return None
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        return None
    plain = _activation(experts.act_fn)
    return {"silu": "swiglu", "gelu": "geglu"}.get(plain) if experts.has_gate else plain or None


def _activation(act: Any) -> str:
    """Returns our name of an activation of theirs; "" for one that we do not have."""
    # By class, not by isinstance: a subclass may compute something else.
    kind = type(act)
    if kind in (SiLUActivation, nn.SiLU):
        return "silu"
    if (kind is GELUActivation and act.act is nn.functional.gelu) or (kind is nn.GELU and act.approximate == "none"):
        return "gelu"
    return {nn.ReLU: "relu", GELUTanh: "gelu_tanh"}.get(kind, "")


def check_experts(experts: Any) -> None:
    """Refuses, by name, a module whose flags or parameters say nothing that this library computes."""
    who = f"fusedmoe.hf: {type(experts).__module__}.{type(experts).__name__}"
    lacks = [flag for flag in (*_FLAGS, "num_experts", "_is_expert_parallel") if not hasattr(experts, flag)]
    if lacks:
        raise ConfigError(
            f"{who} has no {', '.join(lacks)}: transformers' use_experts_implementation gives them to modules of "
            "experts. Choose another experts_implementation for this model"
        )
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if experts.has_bias else []
    # Found here, at the first forward with adapters, or by `apply`.
    if parametrize.is_parametrized(experts):
        replace_activation(computes)
    for name in names:
        tensor = stored(experts, name)
        dims = 2 if name.endswith("bias") else 3
        stores = isinstance(tensor, (Tensor, QuantisedMatrices))
        if not stores or tensor.dim() != dims or tensor.dtype not in _DTYPES:
            got = f"{tensor.dtype} {list(tensor.shape)}" if stores else type(tensor).__name__
            raise ConfigError(
                f"{who}: {name} must be a tensor of {dims} dimensions in one of {', '.join(map(str, _DTYPES))}, got "
                f"{got}; load the model without quantisation, or with bitsandbytes' 4 bits or torchao's 8 for each "
                "expert, or choose another experts_implementation"
            )
        if isinstance(tensor, QuantisedMatrices) and fused_activation(experts) is None:
            raise ConfigError(
                f"{who}: {name} is quantised, which only experts whose gate is SwiGLU or alike are computed with; load "
                "the model without quantisation, or choose another experts_implementation"
            )


class _LocalExperts(ExternalExperts):
    """The experts of this rank as dispatchers call them."""

    def __init__(self, experts: Any, ranks: int) -> None:
        widths = stored(experts, "down_proj").shape[1:]
        model_dim, hidden = reversed(widths) if experts.is_transposed else widths
        super().__init__(experts, experts.num_experts * ranks, (model_dim, hidden), experts.has_gate)

    def __call__(self, x_SM: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
        return compute(self.module, x_SM, layout, weight_N)

    def in_graphs(self) -> nn.Module:
        return _Computed(self.module)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        experts, activation, factors = self.module, fused_activation(self.module), factors_in_use(self.module)
        (up, _), (down, _) = (_matrix(experts, name, x_SM.dtype) for name in _names(experts))
        if activation is None or factors or any(isinstance(each, QuantisedMatrices) for each in (up, down)):
            return AutogradExperts(self, [*experts.parameters(), *factors])
        up_bias, down_bias = _biases(experts, x_SM.dtype)
        return GroupedExperts(fused_weights(experts, up, up_bias, down, down_bias), activation)


class _Computed(nn.Module):
    """A module of experts whose forward is `compute`."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, x_SM: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
        return compute(self._experts, x_SM, layout, weight_N)


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
    # Layers that no pass with gradients has gone through: the first one asks whether adapters are shared, for all.
    _unasked: ClassVar[WeakSet[ExpertParallel]] = WeakSet()

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._unasked.add(self)
        check_experts(experts)
        self._experts: Any = experts
        self._topology = shared_topology(ep_mesh.get_group())
        self._sharing = shared_topology(tp_mesh.get_group()).world
        ops.name_for_graphs(self._sharing)
        local, name = _LocalExperts(experts, self._topology.ep.size), f"fusedmoe.hf: {type(experts).__name__}"
        self._exchange = ScheduledExchange(self._topology, local, self.schedule, name)
        setattr(experts, EXCHANGE, self._exchange)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, H] in the dtype of `hidden_states`, of [T, H], [T, K] numbers of all experts and [T, K] weights.

        Compiled models take it into their graphs, with `fullgraph=True`; without, they call it as it is.
        """
        if not (torch.compiler.is_compiling() and ops.graph_takes_sizes()):
            return self._called(hidden_states, top_k_index, top_k_weights)
        sharing, exchange = self._sharing, self._exchange
        counts = ops.split_counts(hidden_states.shape[0], sharing)
        given = (hidden_states, top_k_index, top_k_weights)
        x_TH, number_TK, weight_TK = (ops.split_rows(value, sharing, counts) for value in given)
        bad = exchange.checks.of_given(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(self._experts, hidden_states))
        layout = ops.order(number_TK, self.num_local_experts * self._topology.ep.size)
        y_TH = exchange.in_graph(Routed(x_TH, layout, weight_TK), bad)
        return ops.join_rows(y_TH, sharing, counts).to(hidden_states.dtype)

    @torch.compiler.disable
    def _called(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, topology, sharing = self._experts, self._topology, self._sharing
        if self in self._unasked and torch.is_grad_enabled():
            require_shared(experts)
            self._unasked.clear()
        self._exchange.checks.tell_logits()
        counts = ops.split_counts(len(hidden_states), sharing)
        # Ranks that share a batch route the same tokens: each sends its chunk of them only.
        start, stop = sum(counts[: sharing.index]), sum(counts[: sharing.index + 1])
        x_TH, weight_TK = ops.split_rows(hidden_states, sharing, counts), ops.split_rows(top_k_weights, sharing, counts)
        refusal = self._exchange.checks.for_exchange(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(experts, hidden_states))
        layout = ops.order(top_k_index[start:stop], self.num_local_experts * topology.ep.size)
        y_TH = self._exchange.by_plan(Routed(x_TH, layout, weight_TK, refusal))
        return ops.join_rows(y_TH, sharing, counts).to(hidden_states.dtype)


def apply(model: Any, schedule: str | Schedule | None = None) -> Any:
    """Sets this library for the experts of a model of transformers, after a look at who else changed them; returns it.

    Args:
        model: a `PreTrainedModel`, bare or in a wrapper (DistributedDataParallel, FSDP, PEFT, `torch.compile`), with
            accelerate's hooks (`device_map`, offloading) or without, at any time before or between steps. With expert
            parallelism and adapters of peft it is collective: adapters are then the same on all ranks, gradients too.
        schedule: what travels overlaps what is computed by it where experts are over ranks, as `MoELayer(schedule=…)`
            has it: "off", "auto", the name of a policy, or a `fusedmoe.Schedule`. With "auto" and names the first
            forward measures the machine, and keeps that on disk. None: as before. The same on all ranks; collective.
    Raises:
        ConfigError: a model without experts that transformers' registry serves; experts whose forward another library
            has replaced, which is named; experts that this library cannot compute, named; experts outside of any
            `PreTrainedModel`; an unknown schedule, or one for experts whose tokens transformers itself sends.
        RankError: ranks with different schedules.
    """
    modules = registered_experts(model)
    who = type(model).__name__
    if not modules:
        raise ConfigError(
            f"fusedmoe.hf.apply: {who} has no experts that transformers' registry serves: it is dense, or its experts "
            "are modules of their own. For such a model see fusedmoe.MoELayer"
        )
    for name, module in modules.items():
        # A replaced forward never asks transformers' registry, so setting the name would change nothing.
        owner = _owner(module)
        if owner not in _OWN:
            raise ConfigError(
                f"fusedmoe.hf.apply: {owner} has replaced the forward of {name} ({type(module).__name__}), so that no "
                "experts_implementation has an effect; leave that part of it out, and apply this first"
            )
        check_experts(module)
    replace_activation(computes)
    if any(module._is_expert_parallel for module in modules.values()):
        _share_adapters(model)
    for owner_of_experts in _outermost(model):
        owner_of_experts.set_experts_implementation(NAME)
    for name, module in modules.items():
        chosen = getattr(module.config, "_experts_implementation", None)
        # A model that does not pass the choice on to its parts, or a module outside of any model.
        if chosen != NAME:
            raise ConfigError(
                f"fusedmoe.hf.apply: {name or 'it'} ({type(module).__name__}) keeps experts_implementation={chosen!r}, "
                f"which only the PreTrainedModel that it belongs to can set; apply this to that model, not to {who}"
            )
    if schedule is not None:
        _set_schedule(modules, schedule)
    return model


def _share_adapters(model: Any) -> None:
    """Has adapters in a model over ranks be the same on all of them."""
    if not any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        return
    config: Any = next(_outermost(model)).config.distributed_config
    if config.tp_size > 1 or config.pp_size > 1:
        raise ConfigError(
            f"fusedmoe.hf.apply: {type(model).__name__} has adapters, and tp_size={config.tp_size}, "
            "with which gradients of adapters are not the mean over all ranks; use fsdp_size and ep_size alone"
        )
    share_adapters(model, Topology.from_group(torch.distributed.group.WORLD).world)


def _set_schedule(modules: dict[str, Any], schedule: str | Schedule) -> None:
    if isinstance(schedule, str):
        Schedule.named(schedule)  # a wrong name is refused where nothing travels, too
    for name, module in modules.items():
        exchange = getattr(module, EXCHANGE, None)
        if exchange is not None:
            exchange.set_schedule(schedule)
        elif module._is_expert_parallel and schedule != "off":
            raise ConfigError(
                f"fusedmoe.hf.apply: transformers itself sends the tokens of {name} ({type(module).__name__}), and no "
                f"schedule has an effect; load the model with DistributedConfig(…, ep_implementation={NAME!r})"
            )


class PlanTuningCallback(TrainerCallback):
    """Measures plans while `Trainer` trains, and keeps to the fastest; see `fusedmoe.training.StepTuning`.

        Trainer(model, …, callbacks=[PlanTuningCallback()])

    Where experts are not over ranks nothing travels, and it does nothing. Where a model is trained again it begins with
    what it has found.

    Args: as for `StepTuning`.
    Attributes:
        tuning: what measures, while a model is trained over ranks and after.
    Raises:
        ConfigError: when training begins, a model without experts that transformers' registry serves, or whose tokens
            transformers itself sends.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given
        self.tuning: StepTuning | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        modules = registered_experts(model)
        travels = any(module._is_expert_parallel for module in modules.values())
        self.tuning = StepTuning(model, **self._given) if travels or not modules else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__exit__(None)


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields models of transformers with experts that are in no other such model."""
    if isinstance(module, PreTrainedModel):
        if registered_experts(module):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)


def computes(experts: Any) -> bool:
    """Returns whether the forward of a module of experts is this library's."""
    return getattr(experts.config, "_experts_implementation", None) == NAME and _owner(experts) in _OWN


def _owner(module: Any) -> str:
    """Returns the Python module that a forward function is from, under accelerate's hooks and Dynamo's wrappers."""
    forward: Any = vars(module).get("forward", type(module).forward)
    while True:
        if isinstance(forward, partial):
            # accelerate's hooks keep the forward that they call in `_old_forward`.
            hooked = _home(forward.func) == "accelerate.hooks"
            forward = module._old_forward if hooked else forward.func
        elif hasattr(forward, "_torchdynamo_orig_callable"):
            forward = forward._torchdynamo_orig_callable
        else:
            return _home(forward)


def _home(function: Any) -> str:
    # Wrapped functions say that they are from where the wrapped one is; their globals do not.
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "something unknown"))


ExpertsInterface.register(NAME, experts_forward)
EPImplementationInterface.register(NAME, ExpertParallel)
for _name in ("auto", *layer_policies()):
    EPImplementationInterface.register(
        f"{NAME}-{_name}", type("ExpertParallel", (ExpertParallel,), {"schedule": _name, "__module__": __name__})
    )
