"""peft's LoRA adapters on the experts of transformers' models (`target_parameters`).

Before each forward peft registers a parametrisation on an adapted parameter: reading it computes W + scale·B·A with a
gradient as large as W. `read_matrix` reads W and the factors separately, for `autograd.low_rank.low_rank_experts`.

Registration alone computes W + scale·B·A once, to compare shapes. Importing `fusedmoe.hf` therefore replaces
`ParamWrapper._activate_lora` of peft 0.21 by a function that attaches the factors to experts that this library
computes. A forward and its recomputation under activation checkpointing thus run the same code.

With expert parallelism peft creates plain, unsplit adapter parameters on every rank. `synchronize_adapters`
synchronises their values and gradients; a step with unsynchronised adapters raises an error.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.group import Group
from fusedmoe.compat.peft import CHECKED, is_factors_proxy, is_full_proxy, lora_module
from fusedmoe.errors import ConfigError
from fusedmoe.hf.quantised import quantised_matrices
from fusedmoe.kernels.low_rank import LowRank

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_ADAPTERS, _SYNCHRONIZED = "_fusedmoe_adapters", "_fusedmoe_shared"


def read_matrix(experts: Any, name: str) -> tuple[Any, LowRank | None]:
    """Return an expert parameter and its active low-rank adapter or None, without evaluating the parametrisation.

    If the adapter cannot be separated, or the parameter itself is trained, evaluate the parametrisation instead, and
    warn if it is peft's. Raises `ConfigError` for a quantised parameter whose adapter cannot be separated.
    """
    held: LowRank | None = experts.__dict__.get(_ADAPTERS, {}).get(name)
    if (quantised := quantised_matrices(experts, name)) is not None:
        if parametrize.is_parametrized(experts, name) and len(experts.parametrizations[name]) > 1:
            _refuse_quantised(experts, name)
        return quantised, held
    if held is not None or not parametrize.is_parametrized(experts, name):
        return getattr(experts, name, None), held
    parametrisations = experts.parametrizations[name]
    proxy = parametrisations[0]
    plain = len(parametrisations) == 1 and is_factors_proxy(proxy)
    original = getattr(parametrisations, "original", None)
    if not plain or not isinstance(original, Tensor) or original.dim() != 3 or original.requires_grad:
        if is_factors_proxy(proxy) or is_full_proxy(proxy):
            _warn_once(experts, name, "the parameter is trained, too" if plain else "it is given as a full matrix")
        return getattr(experts, name), None
    # lhs @ rhs has the parameter's shape; if transposed, B is on the right.
    a, b = (proxy.lhs.mT, proxy.rhs.mT) if experts.is_transposed else (proxy.rhs, proxy.lhs)
    return original, LowRank(a, b, float(proxy.scaling))


def add_adapter(weight: Tensor, adapter: LowRank | None, transposed: bool) -> Tensor:
    """Return W + scale·B·A, where W is [E, in, out] if transposed; without an adapter, W."""
    if adapter is None:
        return weight
    lhs, rhs = (adapter.a_ErI.mT, adapter.b_EOr.mT) if transposed else (adapter.b_EOr, adapter.a_ErI)
    return torch.baddbmm(weight, lhs, rhs, alpha=adapter.scale)


def base_parameter(experts: Any, name: str) -> Any:
    """Return a parameter without adapters."""
    if (quantised := quantised_matrices(experts, name)) is not None:
        return quantised
    if parametrize.is_parametrized(experts, name) and not needs_evaluation(experts, name):
        return getattr(experts.parametrizations[name], "original", None)
    return getattr(experts, name, None)


def needs_evaluation(experts: Any, name: str) -> bool:
    """Return whether an unquantised parameter has a parametrisation other than peft's and must be evaluated."""
    if not parametrize.is_parametrized(experts, name) or quantised_matrices(experts, name) is not None:
        return False
    return not all(is_factors_proxy(each) or is_full_proxy(each) for each in experts.parametrizations[name])


def forbid_split_merges() -> None:
    """Make peft refuse to merge an adapter into one rank's part of a parameter."""
    layer = lora_module()
    if layer is None:
        return
    for wrapper in (layer.ParamWrapper, layer.Linear):
        if not hasattr(wrapper.merge, "_fusedmoe"):
            wrapper.merge = _refuse_split_merge(wrapper.merge)


_Activation = Callable[[Any, list[str]], AbstractContextManager[None]]


def factor_activation(original: _Activation, is_fused: Callable[[Any], bool]) -> _Activation:
    """Return a replacement of peft's `_activate_lora` that attaches the factors to experts for which `is_fused`."""

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        experts, parameter = self.get_base_layer(), self.parameter_name
        if not names or not (is_fused(experts) and _is_supported(self, experts, parameter)):
            with original(self, active_adapters):
                yield
            return
        held = experts.__dict__.setdefault(_ADAPTERS, {})
        held[parameter] = LowRank.joined([_adapter_factors(self, name) for name in names])
        try:
            yield
        finally:
            del held[parameter]

    activate.original = original  # type: ignore[attr-defined]
    return activate


def _refuse_split_merge(original: Callable[..., None]) -> Callable[..., None]:
    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(self, "parameter_name", "weight")
        # peft merges part by part if FSDP has split a linear layer and its adapter alike.
        parts = name == "weight" and all(isinstance(each, DTensor) for each in self.lora_A.parameters())
        layer = self.get_base_layer()
        if isinstance(dict(layer.named_parameters(recurse=False)).get(name), DTensor) and not parts:
            _refuse_split(layer, name, "merge it in one process, into a model that is not split")
        original(self, *args, **kwargs)

    merge._fusedmoe = True  # type: ignore[attr-defined]
    return merge


def _refuse_split(experts: Any, name: str, fix: str) -> NoReturn:
    kind = type(experts).__name__.removeprefix("Parametrized")
    raise ConfigError(f"fusedmoe.hf: {kind}.{name} is split over ranks, so its adapter cannot be merged into it; {fix}")


def _is_supported(wrapper: Any, experts: Any, name: str) -> bool:
    """Return whether a parameter holds one matrix per expert, is frozen, and is adapted by peft alone.

    Warns if the parameter is trained. Raises `ConfigError` if it is trained and split over ranks.
    """
    if name not in _MATRICES or wrapper.num_experts == 1:
        return False
    parameter = quantised_matrices(experts, name)
    if parameter is None:
        if parametrize.is_parametrized(experts, name):
            return False
        parameter = getattr(experts, name)
    if parameter.requires_grad and isinstance(parameter, DTensor):
        _refuse_split(experts, name, "freeze the parameter, or load the model without ep_size")
    if parameter.requires_grad:
        _warn_once(experts, name, "the parameter is trained, too")
    return parameter.dim() == 3 and parameter.dtype in _FLOATS and not parameter.requires_grad


def _refuse_quantised(experts: Any, name: str) -> NoReturn:
    raise ConfigError(
        f"fusedmoe.hf: {type(experts).__name__}.{name} is quantised, and this peft version adds the adapter to all of "
        f"it; install peft {CHECKED}, or choose another experts_implementation"
    )


def _adapter_factors(wrapper: Any, adapter: str) -> LowRank:
    """Return an adapter's factors for this rank's experts in the parameter's dtype."""
    # peft stores A as [E·r, in], expert-major; in B, [out, r·E], the expert varies fastest.
    parameter, experts = base_parameter(wrapper.get_base_layer(), wrapper.parameter_name), wrapper.num_experts
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a_ErI, b_EOr = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    # All ranks hold the factors of all experts, as peft saves them.
    if isinstance(parameter, DTensor):
        local = wrapper.get_base_layer().num_experts
        first = parameter.device_mesh.get_local_rank("ep") * local
        a_ErI, b_EOr = a_ErI[first : first + local], b_EOr[first : first + local]
    return LowRank(a_ErI.to(parameter.dtype), b_EOr.to(parameter.dtype), float(wrapper.scaling[adapter]))


def active_factors(experts: Any) -> list[Tensor]:
    """Return the factor and delta tensors of the active adapters."""
    held = [factor for adapter in experts.__dict__.get(_ADAPTERS, {}).values() for factor in adapter[:2]]
    lists = experts.parametrizations.values() if parametrize.is_parametrized(experts) else ()
    proxies = [proxy for parametrisations in lists for proxy in parametrisations]
    given = (getattr(proxy, name, None) for proxy in proxies for name in ("lhs", "rhs", "delta_weight"))
    return [*held, *(tensor for tensor in given if isinstance(tensor, Tensor))]


def synchronize_adapters(model: nn.Module, world: Group) -> None:
    """Synchronise peft adapters in a model with expert parallelism, once per adapter. Collective.

    All ranks receive the first rank's values. Backward averages gradients over the ranks, as FSDP does.
    """
    for name, parameter in _adapters_of(model):
        if hasattr(parameter, _SYNCHRONIZED) or isinstance(parameter, DTensor):
            continue
        # An all-reduce of one rank's values and zeros, because a broadcast's wait would be unbounded.
        with torch.no_grad():
            all_reduce(world, parameter if world.index == 0 else parameter.zero_(), operation=f"sharing {name}")
        trained, operation = parameter.requires_grad, f"sum of the gradient of {name}"
        # Frozen adapters may be trained later.
        parameter.requires_grad_(True).register_hook(partial(_average_gradient, world, operation))
        parameter.requires_grad_(trained)
        setattr(parameter, _SYNCHRONIZED, True)


def _average_gradient(world: Group, operation: str, grad: Tensor) -> Tensor:
    return all_reduce(world, grad.detach().clone(), operation=operation).div_(world.size)


def require_synchronized(experts: nn.Module) -> None:
    """Raise `ConfigError` that names an adapter of the experts' model whose gradient is not shared across ranks."""
    # Experts have no reference to their model.
    models = [value for value in gc.get_objects() if issubclass(type(value), PreTrainedModel)]
    for model in (value for value in models if any(module is experts for module in value.modules())):
        for name, parameter in _adapters_of(model):
            if parameter.requires_grad and not (isinstance(parameter, DTensor) or hasattr(parameter, _SYNCHRONIZED)):
                raise ConfigError(
                    f"fusedmoe.hf: the gradient of {name}, an adapter in a model with expert parallelism, would differ "
                    "between ranks; call fusedmoe.hf.apply(model) after peft has added the adapter"
                )


def _adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for name in getattr(module, "adapter_layer_names", ()):
            owner = getattr(module, name, None)
            if isinstance(owner, nn.Module):
                yield from owner.named_parameters(f"{prefix}.{name}".lstrip("."))


_warned: set[tuple[str, str]] = set()


def _warn_once(experts: Any, name: str, why: str) -> None:
    kind = type(experts).__name__.removeprefix("Parametrized")  # PyTorch's prefix
    if (kind, name) not in _warned and not torch.compiler.is_compiling():
        _warned.add((kind, name))
        warnings.warn(
            f"fusedmoe.hf: the adapter of {kind}.{name} is added to the parameter in full, with a gradient of "
            f"the parameter's size, as peft itself does: {why}",
            stacklevel=3,
        )
