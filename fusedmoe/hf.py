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
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
from fusedmoe.hf_metrics import MetricsCallback, registered_experts
from fusedmoe.plans import layer_policies
from fusedmoe.training import StepTuning

__all__ = ["NAME", "ExpertParallel", "MetricsCallback", "PlanTuningCallback", "apply", "experts_forward"]

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
        top_k_index: [T, K] integers; the number of experts, or more, stands for an expert of another rank: no row is
            computed for it.
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
    given = (hidden_states, top_k_index, experts.down_proj)
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
    # By expert, so that each matrix is read once.
    pairs.sort(key=number_P.__getitem__)
    pair_N, counts = torch.tensor(pairs, dtype=torch.long), Counter(number_P[pair] for pair in pairs)
    token_N = pair_N // K if K else pair_N
    rows_NI = hidden_states.to(dtype)[token_N]
    rows_NI = _product(experts, rows_NI, "gate_up_proj" if experts.has_gate else "up_proj", counts)
    rows_NI = experts._apply_gate(rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = _product(experts, rows_NI.to(dtype), "down_proj", counts)
    if experts.has_post_expert_norm:
        rows_NH = experts.post_expert_norm(rows_NH)
    # Weights and sums in float32 at least, as in the library's own kernels.
    total = torch.promote_types(dtype, torch.float32)
    rows_NH = rows_NH.to(total) * top_k_weights.flatten()[pair_N, None].to(total)
    return rows_NH.new_zeros(hidden_states.shape).index_add_(0, token_N, rows_NH).to(hidden_states.dtype)


def _product(experts: Any, rows_NI: Tensor, name: str, counts: dict[int, int]) -> Tensor:
    """Returns [N, O]: each row times its expert's matrix, plus its bias. `counts`: experts and their rows, in order."""
    weight, transposed, dtype = getattr(experts, name), experts.is_transposed, rows_NI.dtype
    weight_EIO = weight if transposed else weight.transpose(1, 2)
    out_NO = rows_NI.new_empty((len(rows_NI), weight_EIO.shape[2]))
    skinny = _SKINNY if dtype in (torch.float32, torch.float64) and not transposed else 0
    sizes = list(counts.values())
    for number, rows, out, size in zip(counts, rows_NI.split(sizes), out_NO.split(sizes), sizes, strict=True):
        matrix_IO = weight_EIO.select(0, number).to(dtype)
        # Few rows wait for the weight alone, which BLAS reads faster from the left where it is [out, in].
        if 1 < size <= skinny:
            out.copy_(torch.mm(matrix_IO.t(), rows.t()).t())
        else:
            torch.mm(rows, matrix_IO, out=out)
    if experts.has_bias:
        bias_EO = getattr(experts, f"{name}_bias")
        out_NO += bias_EO[[number for number, size in counts.items() for _ in range(size)]].to(dtype)
    return out_NO


def row_dtype(experts: Any, hidden_states: Tensor) -> torch.dtype:
    """Returns the dtype in which rows are computed and sent."""
    kind = hidden_states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else experts.down_proj.dtype


def compute(experts: Any, x_TH: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
    """Returns [T, H]: Σ over each token's rows n of weight_N[n]·FFN_e(x_TH), in the dtype of x_TH."""

    # The one fused operation where the flags say that it is the module's; else products and the module's own gate.
    activation = fused_activation(experts)
    if activation is not None:
        return ops.experts(x_TH, layout, weight_N, fused_weights(experts, x_TH.dtype), activation)
    up, up_bias, down, down_bias = _parameters(experts, x_TH.dtype)
    # `grouped_linear` takes [E, in, out], and calls [E, out, in] transposed.
    transposed = not experts.is_transposed
    rows_NI = ops.grouped_linear(ops.permute(x_TH, layout), layout, up, up_bias, transposed=transposed)
    if experts.has_gate and is_clamped_swiglu(experts):
        rows_NI = ops.clamped_swiglu(rows_NI, experts.alpha, experts.limit)
    else:
        rows_NI = experts._apply_gate(rows_NI) if experts.has_gate else experts.act_fn(rows_NI)
    rows_NH = ops.grouped_linear(rows_NI.to(x_TH.dtype), layout, down, down_bias, transposed=transposed)
    if experts.has_post_expert_norm:
        # Before the weights, as in the module's own forward.
        rows_NH = experts.post_expert_norm(rows_NH).to(x_TH.dtype)
    if weight_N is not None:
        rows_NH = rows_NH * weight_N[:, None].to(x_TH.dtype)
    return ops.unpermute(rows_NH, layout)


def _parameters(experts: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns both products' matrices and biases."""

    def parameter(name: str) -> Tensor | None:
        value = getattr(experts, name, None) if experts.has_bias or not name.endswith("bias") else None
        return None if value is None else value.to(dtype)

    name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, up_bias, down, down_bias = map(parameter, (name, f"{name}_bias", "down_proj", "down_proj_bias"))
    assert up is not None and down is not None
    return up, up_bias, down, down_bias


def fused_weights(experts: Any, dtype: torch.dtype) -> ops.Weights:
    """Returns the parameters of experts with a `fused_activation`, as its operation takes them."""
    up, up_bias, down, down_bias = _parameters(experts, dtype)
    halves = (2,) if experts.has_gate else ()
    w1 = up.reshape(len(up), *halves, -1, up.shape[2])
    b1 = None if up_bias is None else up_bias.reshape(w1.shape[:-1])
    return ops.Weights(w1, down, b1, down_bias)


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
    for name in names:
        tensor = getattr(experts, name, None)
        dims = 2 if name.endswith("bias") else 3
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or tensor.dtype not in _DTYPES:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{who}: {name} must be a tensor of {dims} dimensions in one of {', '.join(map(str, _DTYPES))}, got "
                f"{got}; load the model without quantisation, or choose another experts_implementation"
            )


class _LocalExperts(ExternalExperts):
    """The experts of this rank as dispatchers call them."""

    def __init__(self, experts: Any, ranks: int) -> None:
        widths = experts.down_proj.shape[1:]
        model_dim, hidden = reversed(widths) if experts.is_transposed else widths
        super().__init__(experts, experts.num_experts * ranks, (model_dim, hidden), experts.has_gate)

    def __call__(self, x_SM: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
        return compute(self.module, x_SM, layout, weight_N)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        activation = fused_activation(self.module)
        if activation is None:
            return AutogradExperts(self, list(self.module.parameters()))
        return GroupedExperts(fused_weights(self.module, x_SM.dtype), activation)


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
            that are NaN or infinite.
    """

    schedule = "off"

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        check_experts(experts)
        self._experts: Any = experts
        self._topology = shared_topology(ep_mesh.get_group())
        self._sharing = shared_topology(tp_mesh.get_group()).world
        local, name = _LocalExperts(experts, self._topology.ep.size), f"fusedmoe.hf: {type(experts).__name__}"
        self._exchange = ScheduledExchange(self._topology, local, self.schedule, name)
        setattr(experts, EXCHANGE, self._exchange)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, H] in the dtype of `hidden_states`, of [T, H], [T, K] numbers of all experts and [T, K] weights.

        Compiled models take it into their graphs, but not over ranks that share a batch: there a graph breaks.
        """
        if not torch.compiler.is_compiling() or self._sharing.size > 1:
            return self._called(hidden_states, top_k_index, top_k_weights)
        bad = self._exchange.checks.of_given(hidden_states, top_k_weights)
        x_TH = hidden_states.to(row_dtype(self._experts, hidden_states))
        layout = ops.order(top_k_index, self.num_local_experts * self._topology.ep.size)
        y_TH = self._exchange.by_operators(Routed(x_TH, layout, top_k_weights), bad)
        return y_TH.to(hidden_states.dtype)

    @torch.compiler.disable
    def _called(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, topology, sharing = self._experts, self._topology, self._sharing
        self._exchange.checks.tell_logits()
        counts = ops.split_counts(len(hidden_states), sharing)
        # Ranks that share a batch route the same tokens: each sends its chunk of them only.
        start, stop = sum(counts[: sharing.index]), sum(counts[: sharing.index + 1])
        x_TH, weight_TK = ops.split_rows(hidden_states, sharing, counts), ops.split_rows(top_k_weights, sharing, counts)
        refusal = self._exchange.checks.of_numbers(x_TH, weight_TK)
        x_TH = x_TH.to(row_dtype(experts, hidden_states))
        layout = ops.order(top_k_index[start:stop], self.num_local_experts * topology.ep.size)
        y_TH = self._exchange.by_plan(Routed(x_TH, layout, weight_TK, refusal))
        return ops.join_rows(y_TH, sharing, counts).to(hidden_states.dtype)


def apply(model: Any, schedule: str | Schedule | None = None) -> Any:
    """Sets this library for the experts of a model of transformers, after a look at who else changed them; returns it.

    Args:
        model: a `PreTrainedModel`, bare or in a wrapper (DistributedDataParallel, FSDP, PEFT, `torch.compile`), with
            accelerate's hooks (`device_map`, offloading) or without, at any time before or between steps.
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
