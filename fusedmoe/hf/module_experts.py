"""Forward of transformers' expert modules: check inputs, sort tokens by expert, grouped GEMMs, weighted sums.

The flags that `use_experts_implementation` sets on a module (transformers 5.23) choose the computation. Plain experts
(weights [E, out, in], concatenated halves, SiLU or another known activation) run as one fused operator. Other experts
(transposed weights, custom gates or norms) run as grouped GEMMs around the module's own activation, or around a kernel
for gpt-oss's activation.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, groupby
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from fusedmoe import Topology, autograd
from fusedmoe.autograd.checks import require_values
from fusedmoe.autograd.grouped import clamped_swiglu, grouped_linear
from fusedmoe.autograd.low_rank import low_rank_experts, low_rank_linear
from fusedmoe.autograd.order import take_pairs
from fusedmoe.compat.transformers import apply_gate, gate_of, has_default_gate, implementation_of, is_expert_parallel
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.engine.recomputation import without_selective_checkpoint
from fusedmoe.errors import ConfigError
from fusedmoe.hf.peft_adapters import add_adapter, base_parameter, needs_evaluation, read_matrix
from fusedmoe.hf.quantised import QuantisedMatrices
from fusedmoe.kernels import Layout, Weights
from fusedmoe.kernels.derivatives import is_first_order_only
from fusedmoe.kernels.low_rank import Adapters, LowRank, StoredWeights
from fusedmoe.layers.input_checks import InputChecks, count_nonfinite

NAME = "fusedmoe"
#: Python modules of transformers' own expert forwards: its registry's, and expert parallelism's.
TRANSFORMERS_MODULES = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Up to this many (token, expert) pairs a product is bound by reading weights, and sorting does not pay off.
_MAX_FEW_PAIRS = 128
# BLAS multiplies two or three rows faster with an [out, in] weight as left operand.
_MAX_SKINNY_ROWS = 3
_REQUIRED_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, for transformers' registry.

    Args:
        self: the expert module.
        hidden_states: [T, M].
        top_k_index: [T, K]. −1 means no expert; with expert parallelism, num_experts or more an expert of another rank.
        top_k_weights: [T, K].
    Returns:
        [T, M] in the dtype of `hidden_states`. GEMMs run in the parameters' dtype, or in autocast's.
    Raises:
        ConfigError: an unsupported module; shapes that do not match; NaN or infinite tokens or weights (on CUDA
            raised by a later call).

    Saves tokens and pre-activations for backward.
    """
    parameters = read_parameters(self)
    if _is_overhead_bound(parameters.down, hidden_states, top_k_index):
        return forward_few_tokens(self, parameters, hidden_states, top_k_index, top_k_weights)
    require_finite_inputs(self, hidden_states, top_k_weights)
    # `order` raises for an out-of-range index, which is an error without expert parallelism.
    expert_TK = (
        top_k_index.masked_fill(top_k_index >= self.num_experts, -1) if is_expert_parallel(self) else top_k_index
    )
    layout = autograd.order(expert_TK, self.num_experts)
    x_TM = hidden_states.to(row_dtype(parameters.down, hidden_states))
    y_TM = compute_experts(self, parameters, x_TM, layout, take_pairs(top_k_weights, layout))
    return y_TM.to(hidden_states.dtype)


class ExpertParameters(NamedTuple):
    """Parameters and low-rank adapters of an expert module for one forward."""

    up: Any
    up_adapter: LowRank | None
    up_bias: Tensor | None
    down: Any
    down_adapter: LowRank | None
    down_bias: Tensor | None

    def to(self, dtype: torch.dtype) -> ExpertParameters:
        read: list[Any] = [None if each is None else each.to(dtype) for each in self]
        return ExpertParameters(*read)


def read_parameters(experts: Any) -> ExpertParameters:
    """Read each parameter of a module once, because evaluating a parametrisation may change its state.

    Raises `ConfigError` as `check_experts` does.
    """
    check_experts(experts)
    read: list[Any] = []
    for name in matrix_names(experts):
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        read += [*read_matrix(experts, name), bias]
    if parametrize.is_parametrized(experts):
        for name, tensor in zip(parameter_names(experts), (read[0], read[3], read[2], read[5]), strict=False):
            if needs_evaluation(experts, name):
                _check_parameter(experts, name, tensor)
    return ExpertParameters(*read)


def require_finite_inputs(experts: Any, *tensors: Tensor) -> None:
    """Raise `ConfigError` for NaN or infinite inputs: now on a CPU, in a later call on CUDA.

    In a graph the device asserts that the values are finite, unless an eager call has come before.
    """
    checks, name = experts.__dict__.get("_fusedmoe_checks"), f"fusedmoe.hf: {type(experts).__name__}"
    if not torch.compiler.is_compiling():
        if checks is None:
            checks = experts._fusedmoe_checks = InputChecks(Topology(), name)
    elif checks is None:
        require_values(name, count_nonfinite(*tensors) == 0, "tokens or router weights are NaN or infinite")
        return
    checks.nonfinite_flag(*tensors)


def _is_overhead_bound(down: Any, hidden_states: Tensor, top_k_index: Tensor) -> bool:
    """Return whether call overhead exceeds the row computation, as when a model decodes on a CPU."""
    # First: reading the number of tokens in a graph would specialise the graph on the threshold.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not is_first_order_only():
        return False
    if isinstance(down, QuantisedMatrices):
        return False
    given = (hidden_states, top_k_index, down)
    return top_k_index.numel() <= _MAX_FEW_PAIRS and all(tensor.device.type == "cpu" for tensor in given)


def forward_few_tokens(
    experts: Any, parameters: ExpertParameters, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute `experts_forward` for few tokens on a CPU without gradients: one GEMM per chosen expert and matrix.

    Where possible, many chosen experts share one grouped GEMM per matrix. The overhead of calls dominates. It
    grows severalfold once a GEMM has evicted the CPU cache, so most other calls are made before the first GEMM.
    """
    # A sum is finite only if all values are.
    if not (isfinite(hidden_states.sum()) and isfinite(sum(top_k_weights.flatten().tolist()))):
        require_finite_inputs(experts, hidden_states, top_k_weights)
    dtype, (T, K), E = row_dtype(parameters.down, hidden_states), top_k_index.shape, experts.num_experts
    expert_P = top_k_index.flatten()
    # Sorted by expert, to read each matrix once. A single token has one row per expert.
    expert_N, pair_N = (expert_P, None) if T == 1 else expert_P.sort(stable=True)
    numbers = expert_N.tolist()
    if not is_expert_parallel(experts) and max(numbers, default=0) >= E:
        raise ConfigError(f"fusedmoe.hf: chosen experts must be numbers from 0 to {E - 1}, got {max(numbers)}")
    local_rows = [row for row, number in enumerate(numbers) if 0 <= number < E]
    if not local_rows:
        return torch.zeros_like(hidden_states)
    x_TM, total = hidden_states.to(dtype), torch.promote_types(dtype, torch.float32)
    weight_TK = top_k_weights.to(total)
    if has_other_experts := len(local_rows) < len(numbers):
        local_N = torch.tensor(local_rows, device="cpu")
        expert_N, numbers = expert_N[local_N], [numbers[row] for row in local_rows]
        pair_N = local_N if pair_N is None else pair_N[local_N]
        weight_N1 = weight_TK.reshape(-1, 1)[pair_N]
    if pair_N is None:
        rows_NM = x_TM.expand(K, -1)
    else:
        token_N = pair_N.div(K, rounding_mode="floor")
        rows_NM = x_TM.index_select(0, token_N)
    up, up_adapter, up_bias, down, down_adapter, down_bias = parameters
    up_NH, down_NM = (
        None if bias is None else bias.index_select(0, expert_N).to(dtype) for bias in (up_bias, down_bias)
    )
    transposed = experts.is_transposed
    runs, ends_E = [(number, len([*run])) for number, run in groupby(numbers)], None
    # One grouped call for many experts: an expert without rows costs a fraction of a call.
    if T > 1 and 4 * len(runs) > E:
        size_of = dict(runs)
        ends_E = torch.tensor(
            [*accumulate(size_of.get(number, 0) for number in range(E))], dtype=torch.int32, device="cpu"
        )
    rows_NH = _multiply_by_experts(up, up_adapter, transposed, rows_NM, runs, ends_E, up_NH)
    rows_NH = apply_gate(experts, rows_NH) if experts.has_gate else experts.act_fn(rows_NH)
    rows_NM = _multiply_by_experts(down, down_adapter, transposed, rows_NH.to(dtype), runs, ends_E, down_NM)
    if experts.has_post_expert_norm:
        rows_NM = experts.post_expert_norm(rows_NM)
    rows_NM = rows_NM.to(total)
    if has_other_experts:
        y_TM = rows_NM.new_zeros(hidden_states.shape).index_add_(0, token_N, rows_NM * weight_N1)
    elif pair_N is None:
        y_TM = torch.mm(weight_TK, rows_NM)
    else:
        rows_TKM = torch.empty_like(rows_NM).index_copy_(0, pair_N, rows_NM).view(T, K, -1)
        y_TM = torch.bmm(weight_TK.unsqueeze(1), rows_TKM).squeeze(1)
    return y_TM.to(hidden_states.dtype)


def _multiply_by_experts(
    weight: Tensor,
    adapter: LowRank | None,
    transposed: bool,
    rows_NI: Tensor,
    runs: list[tuple[int, int]],
    ends_E: Tensor | None,
    bias_NO: Tensor | None,
) -> Tensor:
    """Multiply the rows of each expert by its matrix and add the biases. Returns [N, O].

    Args:
        runs: (expert, number of rows) in row order.
        ends_E: int32, end of each expert's rows, to allow one grouped call; None disallows it.
        bias_NO: bias of each row; overwritten.
    """
    dtype = rows_NI.dtype
    weight_EIO = weight if transposed else weight.transpose(1, 2)
    skinny = _MAX_SKINNY_ROWS if dtype in (torch.float32, torch.float64) and not transposed else 0
    needs_cast = weight.dtype != dtype
    if ends_E is not None and adapter is None and not (skinny or needs_cast) and _can_use_grouped_mm(rows_NI, weight):
        grouped_NO: Tensor = nn.functional.grouped_mm(rows_NI, weight_EIO, offs=ends_E)
        return grouped_NO if bias_NO is None else grouped_NO.add_(bias_NO)
    out_NO = rows_NI.new_empty(len(rows_NI), weight_EIO.shape[2]) if bias_NO is None else bias_NO
    sizes, beta = [size for _, size in runs], 0 if bias_NO is None else 1
    parts = rows_NI.split_with_sizes(sizes), out_NO.split_with_sizes(sizes)
    for (number, size), rows_nI, out_nO in zip(runs, *parts, strict=True):
        matrix_IO = weight_EIO[number].to(dtype) if needs_cast else weight_EIO[number]
        if 1 < size <= skinny:
            product_nO = torch.mm(matrix_IO.t(), rows_nI.t()).t()
            out_nO.add_(product_nO) if beta else out_nO.copy_(product_nO)
        else:
            out_nO.addmm_(rows_nI, matrix_IO, beta=beta)
        if adapter is not None:
            low = rows_nI @ adapter.a_ErI[number].t().to(dtype)
            out_nO.addmm_(low, adapter.b_EOr[number].t().to(dtype), alpha=adapter.scale)
    return out_NO


def _can_use_grouped_mm(rows_NI: Tensor, weight: Tensor) -> bool:
    known = hasattr(nn.functional, "grouped_mm") and rows_NI.dtype in (torch.float32, torch.bfloat16)
    # PyTorch 2.10 rejects unaligned weights, as memory-mapped files have them.
    return known and rows_NI.is_contiguous() and weight.data_ptr() % 16 == rows_NI.data_ptr() % 16 == 0


def row_dtype(down: Any, hidden_states: Tensor) -> torch.dtype:
    """Return the dtype in which rows are computed and sent, for experts with this down projection."""
    kind, dtype = hidden_states.device.type, down.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def compute_experts(
    experts: Any, parameters: ExpertParameters, x_TM: Tensor, layout: Layout, weight_N: Tensor | None
) -> Tensor:
    """Return the sum of each token's experts, weighted by `weight_N` unless it is None: [T, M] in the dtype of x_TM.

    Raises:
        ConfigError: quantised experts have trained parameters.
    """
    up, up_adapter, up_bias, down, down_adapter, down_bias = parameters.to(x_TM.dtype)
    adapters = Adapters(up_adapter, down_adapter)
    is_quantised = any(isinstance(each, QuantisedMatrices) for each in (up, down))
    # Low-rank operators compute no gradients of the matrices.
    if any(each is not None and each.requires_grad for each in (up, down, up_bias, down_bias)):
        if is_quantised:
            raise ConfigError(f"fusedmoe.hf: {type(experts).__name__} is quantised in part: freeze all its parameters")
        up, down = (add_adapter(w, each, experts.is_transposed) for w, each in zip((up, down), adapters, strict=True))
        adapters = Adapters(None, None)
    activation = fused_activation(experts)
    if is_quantised:
        assert activation is not None
        matrices: tuple[Any, Any] = up, down
        stored_weights = StoredWeights(*matrices, up_bias, down_bias)
        return low_rank_experts(x_TM, layout, weight_N, stored_weights, adapters, activation)
    if activation is not None:
        weights = fused_weights(experts, up, up_bias, down, down_bias)
        if any(each is not None for each in adapters):
            return low_rank_experts(x_TM, layout, weight_N, weights, adapters, activation)
        return autograd.experts(x_TM, layout, weight_N, weights, activation)
    rows_NH = _linear(experts, autograd.permute(x_TM, layout), layout, up, up_bias, adapters.up)
    if experts.has_gate and is_clamped_swiglu(experts):
        rows_NH = clamped_swiglu(rows_NH, experts.alpha, experts.limit)
    else:
        rows_NH = apply_gate(experts, rows_NH) if experts.has_gate else experts.act_fn(rows_NH)
    rows_NM = _linear(experts, rows_NH.to(x_TM.dtype), layout, down, down_bias, adapters.down)
    if experts.has_post_expert_norm:
        rows_NM = experts.post_expert_norm(rows_NM).to(x_TM.dtype)
    if weight_N is not None:
        rows_NM = rows_NM * weight_N[:, None].to(x_TM.dtype)
    return autograd.unpermute(rows_NM, layout)


def matrix_names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def parameter_names(experts: Any) -> list[str]:
    names = matrix_names(experts)
    return [*names, *(f"{name}_bias" for name in names)] if experts.has_bias else [*names]


def fused_weights(experts: Any, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Weights:
    w1 = up.reshape(len(up), *((2,) if experts.has_gate else ()), -1, up.shape[2])
    b1 = None if up_bias is None else up_bias.reshape(w1.shape[:-1])
    return Weights(w1, down, b1, down_bias)


def _linear(
    experts: Any, rows_NI: Tensor, layout: Layout, weight: Tensor, bias: Tensor | None, adapter: LowRank | None
) -> Tensor:
    # The operator expects [E, in, out] and treats [E, out, in] as transposed.
    transposed = not experts.is_transposed
    if adapter is None:
        return grouped_linear(rows_NI, layout, weight, bias, transposed=transposed)
    return low_rank_linear(rows_NI, layout, weight, adapter, bias, transposed=transposed)


def is_clamped_swiglu(experts: Any) -> bool:
    """Return whether the module's gate computes gpt-oss's clamped SwiGLU, tested numerically once.

    False while compiling before the first eager call: the graph then uses the module's own gate.
    """
    gate = gate_of(experts), *_clamp_constants(experts)
    known: tuple[Any, bool] | None = experts.__dict__.get("_fusedmoe_clamped_swiglu")
    if known is not None and known[0] == gate:
        return known[1]
    if torch.compiler.is_compiling() or None in gate:
        return False
    # Hidden from activation checkpointing: the recomputation does not repeat this test.
    with without_selective_checkpoint():
        experts._fusedmoe_clamped_swiglu = gate, _computes_clamped_swiglu(experts)
    return bool(experts._fusedmoe_clamped_swiglu[1])


def _clamp_constants(experts: Any) -> list[float | None]:
    given = (getattr(experts, name, None) for name in ("alpha", "limit"))
    return [value if isinstance(value, (int, float)) else None for value in given]


def _computes_clamped_swiglu(experts: Any) -> bool:
    alpha, limit = _clamp_constants(experts)
    if alpha is None or limit is None or limit <= 0:
        return False
    # Values beyond the limits on both sides, in every combination of both halves.
    side = torch.linspace(-2.0 * limit, 2.0 * limit, 16, dtype=torch.float64, device="cpu")
    # Eight columns distinguish interleaved halves from concatenated ones.
    probe_NH = torch.cartesian_prod(side, side).view(-1, 8)
    try:
        with torch.no_grad():
            gated = apply_gate(experts, probe_NH)
    except Exception:
        return False
    expected = clamped_swiglu(probe_NH, alpha, limit)
    return gated.shape == expected.shape and torch.allclose(gated, expected, rtol=1e-12, atol=1e-12)


def fused_activation(experts: Any) -> str | None:
    """Return the name of the fused expert operator's activation; None if that operator cannot compute the module."""
    if experts.is_transposed or not experts.is_concatenated or experts.has_post_expert_norm:
        return None
    if experts.has_gate and not has_default_gate(experts):
        return None
    plain = _activation_name(experts.act_fn)
    return {"silu": "swiglu", "gelu": "geglu"}.get(plain) if experts.has_gate else plain or None


def _activation_name(act: Any) -> str:
    """Return this library's name of an activation module; "" if unsupported."""
    if isinstance(act, nn.Module) and ("forward" in vars(act) or has_hooks(act)):
        return ""
    kind = type(act)  # exactly: a subclass may compute something else
    if kind in (SiLUActivation, nn.SiLU):
        return "silu"
    if (kind is GELUActivation and act.act is nn.functional.gelu) or (kind is nn.GELU and act.approximate == "none"):
        return "gelu"
    return {nn.ReLU: "relu", GELUTanh: "gelu_tanh"}.get(kind, "")


def check_experts(experts: Any) -> None:
    """Raise `ConfigError` if a module's flags or parameters are unsupported."""
    # Cached for plain parameters: in decoding these checks take almost as long as the GEMMs.
    held = () if torch.compiler.is_compiling() else experts.named_parameters(recurse=False)
    plain = [(name, p.dtype, p.dim()) for name, p in held if type(p) is nn.Parameter]
    seen = (type(experts), *plain)
    if plain and experts.__dict__.get("_fusedmoe_seen") == seen:
        return
    who = f"fusedmoe.hf: {type(experts).__module__}.{type(experts).__name__}"
    lacks = [flag for flag in (*_REQUIRED_FLAGS, "num_experts") if not hasattr(experts, flag)]
    if lacks:
        raise ConfigError(
            f"{who} has no {', '.join(lacks)}: transformers' use_experts_implementation sets them on expert modules. "
            "Choose another experts_implementation for this model"
        )
    names = parameter_names(experts)
    for name in names:
        if not needs_evaluation(experts, name):
            _check_parameter(experts, name, base_parameter(experts, name))
    if not torch.compiler.is_compiling() and {name for name, *_ in plain} >= set(names):
        experts._fusedmoe_seen = seen


def _check_parameter(experts: Any, name: str, tensor: Any) -> None:
    who = f"fusedmoe.hf: {type(experts).__module__}.{type(experts).__name__}"
    dims = 2 if name.endswith("bias") else 3
    stores = isinstance(tensor, (Tensor, QuantisedMatrices))
    if not stores or tensor.dim() != dims or tensor.dtype not in _DTYPES:
        got = f"{tensor.dtype} {list(tensor.shape)}" if stores else type(tensor).__name__
        raise ConfigError(
            f"{who}: {name} must be a tensor of {dims} dimensions in one of {', '.join(map(str, _DTYPES))}, got "
            f"{got}; load the model without quantisation, with bitsandbytes 4-bit or torchao 8-bit quantisation per "
            "expert, or choose another experts_implementation"
        )
    if isinstance(tensor, QuantisedMatrices) and is_expert_parallel(experts):
        # Quantisers replace a split matrix by a whole one on each rank.
        raise ConfigError(
            f"fusedmoe.hf: {type(experts).__name__} is quantised and split over ranks, so each rank would hold all of "
            "it; load it without ep_size, or without quantisation"
        )
    if isinstance(tensor, QuantisedMatrices) and fused_activation(experts) is None:
        raise ConfigError(
            f"{who}: {name} is quantised, which only experts whose gate is SwiGLU or similar support; load the model "
            "without quantisation, or choose another experts_implementation"
        )


def is_fused(experts: Any) -> bool:
    return implementation_of(experts) == NAME and defining_module(experts) in TRANSFORMERS_MODULES


def defining_module(module: Any) -> str:
    """Return the name of the Python module that defines a forward, inside accelerate's hooks and Dynamo's wrappers."""
    forward: Any = vars(module).get("forward", type(module).forward)
    while True:
        if isinstance(forward, partial):
            hooked = _module_of(forward.func) == "accelerate.hooks"
            forward = vars(forward)["__wrapped__"] if hooked else forward.func
        elif hasattr(forward, "__wrapped__") and _module_of(forward) in _COMPILER_MODULES:
            forward = forward.__wrapped__
        else:
            return _module_of(forward)


def _module_of(function: Any) -> str:
    # By globals: wrappers copy `__module__` from the function they wrap.
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "something unknown"))


# Python modules of the compiler's function wrappers. Computed at import: Dynamo cannot create a wrapper in a graph.
_COMPILER_MODULES = frozenset(
    _module_of(wrap(_module_of))
    for wrap in (
        partial(torch.compile, backend="eager"),
        torch.compiler.disable,
        partial(torch.compiler.disable, recursive=False),
    )
)
