"""The forward of a module of experts of transformers: numbers looked at, tokens sorted by expert, products, sums.

What a module computes is read from the flags that `use_experts_implementation` gives it (transformers 5.23), never from
shapes. Plain experts (weights [E, out, in], both halves in one, SiLU or another activation of ours) are one fused
operation; others (transposed weights, gates and norms of their own) are grouped products, and between them gpt-oss's
activation by a kernel of ours or the module's own functions.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, groupby
from math import isfinite
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from fusedmoe import Topology, autograd
from fusedmoe.autograd.checks import require_values
from fusedmoe.compat.transformers import apply_gate, gate_of, has_default_gate, implementation_of, is_expert_parallel
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.engine.recomputation import unselected
from fusedmoe.errors import ConfigError
from fusedmoe.hf.peft_adapters import folded, is_evaluated, matrix, stored
from fusedmoe.hf.quantised import QuantisedMatrices
from fusedmoe.kernels import Adapters, Layout, LowRank, StoredWeights, Weights
from fusedmoe.kernels.derivatives import numbers_only
from fusedmoe.layers.input_checks import InputChecks, not_finite

#: The name in transformers' registries.
NAME = "fusedmoe"
#: Where transformers' own forward functions of experts are: its registry's, and that of expert parallelism.
OWN = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Pairs of a token and an expert up to which products wait for weights, and no order is worth while.
_FEW = 128
# Products with two or three rows wait for the weight alone; BLAS reads one that is [out, in] faster from the left.
_SKINNY = 3
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


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
        Where the experts are one operation, tokens and pre-activations (see `fusedmoe.autograd.experts`).
    Raises:
        ConfigError: a module that is none of these, named; shapes that do not fit; tokens or weights that are NaN or
            infinite (on CUDA from a later call).
    """
    parameters = read_parameters(self)
    if _is_few(parameters.down, hidden_states, top_k_index):
        return few_tokens(self, parameters, hidden_states, top_k_index, top_k_weights)
    refuse_bad_numbers(self, hidden_states, top_k_weights)
    # Where nothing is split, a number that does not exist is a mistake, which `order` refuses.
    number_TK = (
        top_k_index.masked_fill(top_k_index >= self.num_experts, -1) if is_expert_parallel(self) else top_k_index
    )
    layout = autograd.order(number_TK, self.num_experts)
    x_TH = hidden_states.to(row_dtype(parameters.down, hidden_states))
    y_TH = compute(self, parameters, x_TH, layout, autograd.take_pairs(top_k_weights, layout))
    return y_TH.to(hidden_states.dtype)


class Parameters(NamedTuple):
    """The parameters of a module of experts for one forward, and the low-rank adapters of its matrices."""

    up: Any
    up_adapter: LowRank | None
    up_bias: Tensor | None
    down: Any
    down_adapter: LowRank | None
    down_bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Parameters:
        read: list[Any] = [None if each is None else each.to(dtype) for each in self]
        return Parameters(*read)


def read_parameters(experts: Any) -> Parameters:
    """Read a module's parameters, each of them once: a parametrisation may change its state when it is evaluated.

    Raises:
        ConfigError: as `check_experts`.
    """
    check_experts(experts)
    read: list[Any] = []
    for name in matrix_names(experts):
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        read += [*matrix(experts, name), bias]
    if parametrize.is_parametrized(experts):
        for name, tensor in zip(parameter_names(experts), (read[0], read[3], read[2], read[5]), strict=False):
            if is_evaluated(experts, name):
                _check_parameter(experts, name, tensor)
    return Parameters(*read)


def refuse_bad_numbers(experts: Any, *tensors: Tensor) -> None:
    """Looks for NaN and infinity in what a module of experts was given, as `MoELayer` does in router logits."""
    checks, name = experts.__dict__.get("_fusedmoe_checks"), f"fusedmoe.hf: {type(experts).__name__}"
    if not torch.compiler.is_compiling():
        if checks is None:
            checks = experts._fusedmoe_checks = InputChecks(Topology(), name)
    # In a graph nobody could ask later, so the numbers are asserted on the device.
    elif checks is None:
        require_values(name, not_finite(*tensors) == 0, "tokens or router weights are NaN or infinite")
        return
    checks.of_given(*tensors)


def _is_few(down: Any, hidden_states: Tensor, top_k_index: Tensor) -> bool:
    """Returns whether calls cost more than rows do, as where a model decodes on a CPU."""
    # First: in a graph, asking for a number of tokens would bind the graph to that side of the limit.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not numbers_only():
        return False
    if isinstance(down, QuantisedMatrices):
        return False
    given = (hidden_states, top_k_index, down)
    return top_k_index.numel() <= _FEW and all(tensor.device.type == "cpu" for tensor in given)


def few_tokens(
    experts: Any, parameters: Parameters, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` for some tokens on a CPU, without gradients: a product for each expert that was chosen.

    A product reads more than a cache holds, and after it a call takes several times as long as otherwise. So there are
    few calls, and what needs no product is done before the first.
    """
    # A finite sum is of finite numbers only; where it is not, all are looked at.
    if not (isfinite(hidden_states.sum()) and isfinite(sum(top_k_weights.flatten().tolist()))):
        refuse_bad_numbers(experts, hidden_states, top_k_weights)
    dtype, (T, K), E = row_dtype(parameters.down, hidden_states), top_k_index.shape, experts.num_experts
    number_P = top_k_index.flatten()
    # By expert, so that each matrix is read once; one token has one row for each.
    number_N, pair_N = (number_P, None) if T == 1 else number_P.sort(stable=True)
    numbers = number_N.tolist()
    if not is_expert_parallel(experts) and max(numbers, default=0) >= E:
        raise ConfigError(f"fusedmoe.hf: chosen experts must be numbers from 0 to {E - 1}, got {max(numbers)}")
    here = [row for row, number in enumerate(numbers) if 0 <= number < E]
    if not here:
        return torch.zeros_like(hidden_states)
    x_TH, total = hidden_states.to(dtype), torch.promote_types(dtype, torch.float32)
    weight_TK = top_k_weights.to(total)
    if some := len(here) < len(numbers):
        here_N = torch.tensor(here, device="cpu")
        number_N, numbers = number_N[here_N], [numbers[row] for row in here]
        pair_N = here_N if pair_N is None else pair_N[here_N]
        weight_N1 = weight_TK.reshape(-1, 1)[pair_N]
    if pair_N is None:
        rows_NH = x_TH.expand(K, -1)
    else:
        token_N = pair_N.div(K, rounding_mode="floor")
        rows_NH = x_TH.index_select(0, token_N)
    up, up_adapter, up_bias, down, down_adapter, down_bias = parameters
    up_NI, down_NH = (
        None if bias is None else bias.index_select(0, number_N).to(dtype) for bias in (up_bias, down_bias)
    )
    transposed = experts.is_transposed
    runs, ends_E = [(number, len([*run])) for number, run in groupby(numbers)], None
    # Many experts in one call, in which each costs a fraction of a call, also one without rows.
    if T > 1 and 4 * len(runs) > E:
        size_of = dict(runs)
        ends_E = torch.tensor(
            [*accumulate(size_of.get(number, 0) for number in range(E))], dtype=torch.int32, device="cpu"
        )
    rows_NI = _product(up, up_adapter, transposed, rows_NH, runs, ends_E, up_NI)
    rows_NI = apply_gate(experts, rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = _product(down, down_adapter, transposed, rows_NI.to(dtype), runs, ends_E, down_NH)
    if experts.has_post_expert_norm:
        rows_NH = experts.post_expert_norm(rows_NH)
    # Weights and sums in float32 at least, as in the library's own kernels.
    rows_NH = rows_NH.to(total)
    if some:
        y_TH = rows_NH.new_zeros(hidden_states.shape).index_add_(0, token_N, rows_NH * weight_N1)
    elif pair_N is None:
        y_TH = torch.mm(weight_TK, rows_NH)
    else:  # each token has K rows, which lie together in the order of pairs
        rows_TKH = torch.empty_like(rows_NH).index_copy_(0, pair_N, rows_NH).view(T, K, -1)
        y_TH = torch.bmm(weight_TK.unsqueeze(1), rows_TKH).squeeze(1)
    return y_TH.to(hidden_states.dtype)


def _product(
    weight: Tensor,
    adapter: LowRank | None,
    transposed: bool,
    rows_NI: Tensor,
    runs: list[tuple[int, int]],
    ends_E: Tensor | None,
    bias_NO: Tensor | None,
) -> Tensor:
    """Returns [N, O]: the rows of each of some experts times its matrix, plus their biases.

    Args:
        runs: each of these experts and how many rows it has, in the order of the rows.
        ends_E: int32; where each expert's rows end, to multiply in one call if that serves.
        bias_NO: of each row; written over.
    """
    dtype = rows_NI.dtype
    weight_EIO = weight if transposed else weight.transpose(1, 2)
    skinny = _SKINNY if dtype in (torch.float32, torch.float64) and not transposed else 0
    converts = weight.dtype != dtype
    if ends_E is not None and adapter is None and not (skinny or converts) and _takes_groups(rows_NI, weight):
        grouped_NO: Tensor = nn.functional.grouped_mm(rows_NI, weight_EIO, offs=ends_E)
        return grouped_NO if bias_NO is None else grouped_NO.add_(bias_NO)
    out_NO = rows_NI.new_empty(len(rows_NI), weight_EIO.shape[2]) if bias_NO is None else bias_NO
    sizes, beta = [size for _, size in runs], 0 if bias_NO is None else 1
    parts = rows_NI.split_with_sizes(sizes), out_NO.split_with_sizes(sizes)
    for (number, size), rows_nI, out_nO in zip(runs, *parts, strict=True):
        matrix_IO = weight_EIO[number].to(dtype) if converts else weight_EIO[number]
        # Few rows wait for the weight alone, which BLAS reads faster from the left where it is [out, in].
        if 1 < size <= skinny:
            product_nO = torch.mm(matrix_IO.t(), rows_nI.t()).t()
            out_nO.add_(product_nO) if beta else out_nO.copy_(product_nO)
        else:
            out_nO.addmm_(rows_nI, matrix_IO, beta=beta)
        if adapter is not None:
            low = rows_nI @ adapter.a_ErI[number].t().to(dtype)
            out_nO.addmm_(low, adapter.b_EOr[number].t().to(dtype), alpha=adapter.scale)
    return out_NO


def _takes_groups(rows_NI: Tensor, weight: Tensor) -> bool:
    """Returns whether PyTorch multiplies the rows of all experts in one call, which spares one for each."""
    known = hasattr(nn.functional, "grouped_mm") and rows_NI.dtype in (torch.float32, torch.bfloat16)
    # PyTorch 2.10 refuses weights that lie as a file has them.
    return known and rows_NI.is_contiguous() and weight.data_ptr() % 16 == rows_NI.data_ptr() % 16 == 0


def row_dtype(down: Any, hidden_states: Tensor) -> torch.dtype:
    """Returns the dtype in which rows are computed and sent, of experts with this second matrix."""
    kind, dtype = hidden_states.device.type, down.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def compute(experts: Any, parameters: Parameters, x_TH: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
    """Returns [T, H]: Σ over each token's rows n of weight_N[n]·FFN_e(x_TH), in the dtype of x_TH."""
    up, up_adapter, up_bias, down, down_adapter, down_bias = parameters.to(x_TH.dtype)
    adapters = Adapters(up_adapter, down_adapter)
    bits = any(isinstance(each, QuantisedMatrices) for each in (up, down))
    if bits and is_expert_parallel(experts):
        _refuse_split(experts)
    # Products beside frozen ones know no gradient of these.
    if any(each is not None and each.requires_grad for each in (up, down, up_bias, down_bias)):
        if bits:
            raise ConfigError(f"fusedmoe.hf: {type(experts).__name__} is quantised in part: freeze all its parameters")
        up, down = (folded(w, each, experts.is_transposed) for w, each in zip((up, down), adapters, strict=True))
        adapters = Adapters(None, None)
    # The one fused operation where the flags say that it is the module's; else products and the module's own gate.
    activation = fused_activation(experts)
    if bits:
        assert activation is not None  # else refused
        matrices: tuple[Any, Any] = up, down
        stored_weights = StoredWeights(*matrices, up_bias, down_bias)
        return autograd.low_rank_experts(x_TH, layout, weight_N, stored_weights, adapters, activation)
    if activation is not None:
        weights = fused_weights(experts, up, up_bias, down, down_bias)
        if any(each is not None for each in adapters):
            return autograd.low_rank_experts(x_TH, layout, weight_N, weights, adapters, activation)
        return autograd.experts(x_TH, layout, weight_N, weights, activation)
    rows_NI = _linear(experts, autograd.permute(x_TH, layout), layout, up, up_bias, adapters.up)
    if experts.has_gate and is_clamped_swiglu(experts):
        rows_NI = autograd.clamped_swiglu(rows_NI, experts.alpha, experts.limit)
    else:
        rows_NI = apply_gate(experts, rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = _linear(experts, rows_NI.to(x_TH.dtype), layout, down, down_bias, adapters.down)
    if experts.has_post_expert_norm:
        # Before the weights, as in the module's own forward.
        rows_NH = experts.post_expert_norm(rows_NH).to(x_TH.dtype)
    if weight_N is not None:
        rows_NH = rows_NH * weight_N[:, None].to(x_TH.dtype)
    return autograd.unpermute(rows_NH, layout)


def matrix_names(experts: Any) -> tuple[str, str]:
    """Returns the names of the matrices of both products."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def parameter_names(experts: Any) -> list[str]:
    """Returns the names of the parameters that both products read: the matrices, then the biases."""
    names = matrix_names(experts)
    return [*names, *(f"{name}_bias" for name in names)] if experts.has_bias else [*names]


def fused_weights(experts: Any, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Weights:
    """Returns both products' parameters as the operation of experts with a `fused_activation` takes them."""
    w1 = up.reshape(len(up), *((2,) if experts.has_gate else ()), -1, up.shape[2])
    b1 = None if up_bias is None else up_bias.reshape(w1.shape[:-1])
    return Weights(w1, down, b1, down_bias)


def _linear(
    experts: Any, rows_NI: Tensor, layout: Layout, weight: Tensor, bias: Tensor | None, adapter: LowRank | None
) -> Tensor:
    # They take [E, in, out], and call [E, out, in] transposed.
    transposed = not experts.is_transposed
    if adapter is None:
        return autograd.grouped_linear(rows_NI, layout, weight, bias, transposed=transposed)
    return autograd.low_rank_linear(rows_NI, layout, weight, adapter, bias, transposed=transposed)


def is_clamped_swiglu(experts: Any) -> bool:
    """Returns whether a module's own gate is gpt-oss's, tried out once: another version's may be another function.

    A graph that is compiled before any such call has the module's own function.
    """
    gate = gate_of(experts), *_clamp(experts)
    known: tuple[Any, bool] | None = experts.__dict__.get("_fusedmoe_clamped_swiglu")
    if known is not None and known[0] == gate:
        return known[1]
    if torch.compiler.is_compiling() or None in gate:
        return False
    # Outside of a checkpoint's bookkeeping: the recomputation does not try the gate again.
    with unselected():
        experts._fusedmoe_clamped_swiglu = gate, _computes_clamped_swiglu(experts)
    return bool(experts._fusedmoe_clamped_swiglu[1])


def _clamp(experts: Any) -> list[float | None]:
    """Returns the numbers `alpha` and `limit` of a clamped gate, None for anything else."""
    given = (getattr(experts, name, None) for name in ("alpha", "limit"))
    return [value if isinstance(value, (int, float)) else None for value in given]


def _computes_clamped_swiglu(experts: Any) -> bool:
    alpha, limit = _clamp(experts)
    if alpha is None or limit is None or limit <= 0:
        return False
    # Beyond the limit on both sides, so that the clamps are seen, in every combination of both halves.
    side = torch.linspace(-2.0 * limit, 2.0 * limit, 16, dtype=torch.float64, device="cpu")
    # Eight columns: halves side by side, instead of interleaved, are another function of them.
    tried_NH = torch.cartesian_prod(side, side).view(-1, 8)
    try:
        with torch.no_grad():
            gated = apply_gate(experts, tried_NH)
    # It needs rows of the module's own width or dtype: then it is not this function.
    except Exception:
        return False
    wanted = autograd.clamped_swiglu(tried_NH, alpha, limit)
    return gated.shape == wanted.shape and torch.allclose(gated, wanted, rtol=1e-12, atol=1e-12)


def fused_activation(experts: Any) -> str | None:
    """Returns the activation of a network that is one operation of ours; None for others."""
    if experts.is_transposed or not experts.is_concatenated or experts.has_post_expert_norm:
        return None
    # Somebody may have replaced the gate of one module, or have put hooks on its activation.
    if experts.has_gate and not has_default_gate(experts):
        return None
    plain = _activation(experts.act_fn)
    return {"silu": "swiglu", "gelu": "geglu"}.get(plain) if experts.has_gate else plain or None


def _activation(act: Any) -> str:
    """Returns our name of an activation of theirs; "" for one that we do not have."""
    if is_changed(act):
        return ""
    # By class, not by isinstance: a subclass may compute something else.
    kind = type(act)
    if kind in (SiLUActivation, nn.SiLU):
        return "silu"
    if (kind is GELUActivation and act.act is nn.functional.gelu) or (kind is nn.GELU and act.approximate == "none"):
        return "gelu"
    return {nn.ReLU: "relu", GELUTanh: "gelu_tanh"}.get(kind, "")


def is_changed(module: Any) -> bool:
    """Returns whether a module's call does more than its class says: hooks, or another forward."""
    return isinstance(module, nn.Module) and ("forward" in vars(module) or has_hooks(module))


def check_experts(experts: Any) -> None:
    """Refuses, by name, a module whose flags or parameters say nothing that this library computes."""
    # A decoder's few products take little longer than to look again at what is known. It is known of plain parameters
    # alone, by all that the checks depend on, so that it holds whatever becomes of the module.
    held = () if torch.compiler.is_compiling() else experts.named_parameters(recurse=False)
    plain = [(name, p.dtype, p.dim()) for name, p in held if type(p) is nn.Parameter]
    seen = (type(experts), *plain)
    if plain and experts.__dict__.get("_fusedmoe_seen") == seen:
        return
    who = f"fusedmoe.hf: {type(experts).__module__}.{type(experts).__name__}"
    lacks = [flag for flag in (*_FLAGS, "num_experts") if not hasattr(experts, flag)]
    if lacks:
        raise ConfigError(
            f"{who} has no {', '.join(lacks)}: transformers' use_experts_implementation gives them to modules of "
            "experts. Choose another experts_implementation for this model"
        )
    names = parameter_names(experts)
    for name in names:
        # Others are looked at when they have been evaluated.
        if not is_evaluated(experts, name):
            _check_parameter(experts, name, stored(experts, name))
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
            f"{got}; load the model without quantisation, or with bitsandbytes' 4 bits or torchao's 8 for each "
            "expert, or choose another experts_implementation"
        )
    if isinstance(tensor, QuantisedMatrices) and is_expert_parallel(experts):
        _refuse_split(experts)
    if isinstance(tensor, QuantisedMatrices) and fused_activation(experts) is None:
        raise ConfigError(
            f"{who}: {name} is quantised, which only experts whose gate is SwiGLU or alike are computed with; load "
            "the model without quantisation, or choose another experts_implementation"
        )


def _refuse_split(experts: Any) -> NoReturn:
    # What quantises a matrix that is split makes each rank a whole one.
    raise ConfigError(
        f"fusedmoe.hf: {type(experts).__name__} is quantised and split over ranks, and each rank would have all of it; "
        "load it without ep_size, or without quantisation"
    )


def computes(experts: Any) -> bool:
    """Returns whether the forward of a module of experts is this library's."""
    # Without a config: a module of somebody else's, whose parameter has an adapter of peft.
    return implementation_of(experts) == NAME and owner(experts) in OWN


def owner(module: Any) -> str:
    """Returns the Python module that a forward function is from, under accelerate's hooks and Dynamo's wrappers."""
    forward: Any = vars(module).get("forward", type(module).forward)
    while True:
        if isinstance(forward, partial):
            # accelerate's hooks are a partial object around the forward that they call.
            hooked = _home(forward.func) == "accelerate.hooks"
            forward = vars(forward)["__wrapped__"] if hooked else forward.func
        elif hasattr(forward, "__wrapped__") and _home(forward) in _HOMES_OF_COMPILERS:
            forward = forward.__wrapped__
        else:
            return _home(forward)


def _home(function: Any) -> str:
    # Wrapped functions say that they are from where the wrapped one is; their globals do not.
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "something unknown"))


# Python modules of the wrappers of functions that a compiler takes or leaves out. Found at import: Dynamo traces
# `owner` and can make no such wrapper in a graph.
_HOMES_OF_COMPILERS = frozenset(
    _home(wrap(_home))
    for wrap in (
        partial(torch.compile, backend="eager"),
        torch.compiler.disable,
        partial(torch.compiler.disable, recursive=False),
    )
)
