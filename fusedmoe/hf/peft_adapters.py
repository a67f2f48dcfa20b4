"""Low-rank adapters on the experts of transformers' models, as peft's LoRA makes them (`target_parameters`).

peft's wrapper of a parameter registers a parametrisation before each forward of the experts and takes it away
afterwards; who reads the parameter meanwhile gets W + scale·B·A, and its gradient is as large as W. Here W and the
factors are read apart, and `fusedmoe.autograd.low_rank_experts` computes with them:

    matrix(experts, "down_proj")        W, and the adapter that is active on it, without a read of the parameter

Registering alone folds B·A into W once, to compare shapes. So for peft 0.21, whose wrapper is known, importing
`fusedmoe.hf` replaces `ParamWrapper._activate_lora`: for experts that this library computes it leaves the factors
beside the module, and for all others it does what it did. It is replaced at import because a forward and the
recomputation of an activation checkpoint must run the same code.

Over ranks peft makes plain parameters of whole adapters, also beside experts that are split. `share_adapters` has them
begin equal and get one gradient; a step with adapters that it has not seen is refused.
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

from fusedmoe.comm import Group
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.compat.peft import CHECKED, is_factors_proxy, is_full_proxy, lora_module
from fusedmoe.errors import ConfigError
from fusedmoe.hf.quantised import quantised
from fusedmoe.kernels import LowRank

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_HELD, _SHARED = "_fusedmoe_adapters", "_fusedmoe_shared"


def matrix(experts: Any, name: str) -> tuple[Any, LowRank | None]:
    """Returns a parameter of experts and the low-rank adapter that is active on it, None if there is none.

    Where the adapter cannot be told apart from the parameter, or the parameter is trained beside it, the parameter is
    what peft makes of both.
    """
    held: LowRank | None = experts.__dict__.get(_HELD, {}).get(name)
    if (bits := quantised(experts, name)) is not None:
        if parametrize.is_parametrized(experts, name) and len(experts.parametrizations[name]) > 1:
            _refuse_quantised(experts, name)
        return bits, held
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
    # What lhs @ rhs makes has the parameter's shape: [E, in, out] if transposed, and then B is on the right.
    a, b = (proxy.lhs.mT, proxy.rhs.mT) if experts.is_transposed else (proxy.rhs, proxy.lhs)
    return original, LowRank(a, b, float(proxy.scaling))


def folded(weight: Tensor, adapter: LowRank | None, transposed: bool) -> Tensor:
    """Returns W + scale·B·A in full, where low-rank products do not serve; W is [E, in, out] if transposed."""
    if adapter is None:
        return weight
    lhs, rhs = (adapter.a_ErI.mT, adapter.b_EOr.mT) if transposed else (adapter.b_EOr, adapter.a_ErI)
    return torch.baddbmm(weight, lhs, rhs, alpha=adapter.scale)


def stored(experts: Any, name: str) -> Any:
    """Returns a parameter without what adapters add to it: for its shape, dtype and device."""
    if (bits := quantised(experts, name)) is not None:
        return bits
    if parametrize.is_parametrized(experts, name) and not is_evaluated(experts, name):
        return getattr(experts.parametrizations[name], "original", None)
    return getattr(experts, name, None)


def is_evaluated(experts: Any, name: str) -> bool:
    """Returns whether only a read of a parameter says what it is: a parametrisation that is not peft's made it."""
    if not parametrize.is_parametrized(experts, name) or quantised(experts, name) is not None:
        return False
    return not all(is_factors_proxy(each) or is_full_proxy(each) for each in experts.parametrizations[name])


def refuse_split_merges() -> None:
    """Have peft refuse to merge an adapter into a rank's part of a parameter, for models over ranks."""
    layer = lora_module()
    if layer is None:
        return
    for wrapper in (layer.ParamWrapper, layer.Linear):
        if not hasattr(wrapper.merge, "_fusedmoe"):
            wrapper.merge = _merging(wrapper.merge)


_Activation = Callable[[Any, list[str]], AbstractContextManager[None]]


def activation(original: _Activation, computes: Callable[[Any], bool]) -> _Activation:
    """Make the function by which peft's wrapper leaves an adapter's factors beside experts.

    Args:
        original: peft's own.
        computes: returns whether this library computes a module of experts.
    """

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        experts, parameter = self.get_base_layer(), self.parameter_name
        if not names or not (computes(experts) and _serves(self, experts, parameter)):
            with original(self, active_adapters):
                yield
            return
        held = experts.__dict__.setdefault(_HELD, {})
        held[parameter] = LowRank.joined([_factors(self, name) for name in names])
        try:
            yield
        finally:
            del held[parameter]

    activate.original = original  # type: ignore[attr-defined]
    return activate


def _merging(original: Callable[..., None]) -> Callable[..., None]:
    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(self, "parameter_name", "weight")  # of a linear layer
        # Where FSDP has split a linear layer with its adapter, peft adds parts to parts.
        parts = name == "weight" and all(isinstance(each, DTensor) for each in self.lora_A.parameters())
        layer = self.get_base_layer()
        if isinstance(dict(layer.named_parameters(recurse=False)).get(name), DTensor) and not parts:
            _refuse_split(layer, name, "merge it in one process, into a model that is not split")
        original(self, *args, **kwargs)

    merge._fusedmoe = True  # type: ignore[attr-defined]
    return merge


def _refuse_split(experts: Any, name: str, cure: str) -> NoReturn:
    # peft adds all of the adapter to a rank's part of the parameter.
    kind = type(experts).__name__.removeprefix("Parametrized")
    raise ConfigError(
        f"fusedmoe.hf: {kind}.{name} is split over ranks, so that its adapter cannot be added to it; {cure}"
    )


def _serves(wrapper: Any, experts: Any, name: str) -> bool:
    """Returns whether a parameter of experts is a matrix for each, frozen, and adapted by peft alone."""
    if name not in _MATRICES or wrapper.num_experts == 1:
        return False
    parameter = quantised(experts, name)
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
        f"fusedmoe.hf: {type(experts).__name__}.{name} is quantised, and its adapter is added to all of it; this is "
        f"known of peft {CHECKED} alone: install that, or choose another experts_implementation"
    )


def _factors(wrapper: Any, adapter: str) -> LowRank:
    """Returns an adapter's factors in the parameter's dtype, as peft does."""
    # Linear layers hold them: A is [E·r, in], of one expert after the other, and in B, [out, r·E], experts alternate.
    parameter, experts = stored(wrapper.get_base_layer(), wrapper.parameter_name), wrapper.num_experts
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a_ErI, b_EOr = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    # All ranks have the factors of all experts, which peft saves as in one process; each reads those of its own.
    if isinstance(parameter, DTensor):
        local = wrapper.get_base_layer().num_experts
        first = parameter.device_mesh.get_local_rank("ep") * local
        a_ErI, b_EOr = a_ErI[first : first + local], b_EOr[first : first + local]
    return LowRank(a_ErI.to(parameter.dtype), b_EOr.to(parameter.dtype), float(wrapper.scaling[adapter]))


def factors_in_use(experts: Any) -> list[Tensor]:
    """Returns what adapters add to the parameters by now: tensors that are no parameters of the module."""
    held = [factor for adapter in experts.__dict__.get(_HELD, {}).values() for factor in adapter[:2]]
    lists = experts.parametrizations.values() if parametrize.is_parametrized(experts) else ()
    proxies = [proxy for parametrisations in lists for proxy in parametrisations]
    given = (getattr(proxy, name, None) for proxy in proxies for name in ("lhs", "rhs", "delta_weight"))
    return [*held, *(tensor for tensor in given if isinstance(tensor, Tensor))]


def share_adapters(model: nn.Module, world: Group) -> None:
    """Has peft's adapters in a model with expert parallelism be the same on all ranks; collective, done once for each.

    Values become those of the first rank; gradients become the mean over the ranks' batches, as FSDP has it for all
    other parameters: each time that a backward pass has made one.
    """
    for name, parameter in _adapters_of(model):
        if hasattr(parameter, _SHARED) or isinstance(parameter, DTensor):
            continue
        # Gloo and NCCL broadcast by whatever waits; a sum of zeros and one rank's values waits with a bound.
        with torch.no_grad():
            all_reduce(world, parameter if world.index == 0 else parameter.zero_(), operation=f"sharing {name}")
        trained, operation = parameter.requires_grad, f"sum of the gradient of {name}"
        # A hook is for what is trained; an adapter that is not yet may be later.
        parameter.requires_grad_(True).register_hook(partial(_mean, world, operation))
        parameter.requires_grad_(trained)
        setattr(parameter, _SHARED, True)


def _mean(world: Group, operation: str, grad: Tensor) -> Tensor:
    return all_reduce(world, grad.detach().clone(), operation=operation).div_(world.size)


def require_shared(experts: nn.Module) -> None:
    """Refuses adapters in the model of these experts whose gradients would be each rank's own.

    Raises:
        ConfigError: naming one of them.
    """
    # Experts do not know the model around them: all that live are looked through, once for a model.
    models = [value for value in gc.get_objects() if issubclass(type(value), PreTrainedModel)]
    for model in (value for value in models if any(module is experts for module in value.modules())):
        for name, parameter in _adapters_of(model):
            if parameter.requires_grad and not (isinstance(parameter, DTensor) or hasattr(parameter, _SHARED)):
                raise ConfigError(
                    f"fusedmoe.hf: each rank would keep its own gradient of {name}, an adapter in a model with expert "
                    "parallelism; call fusedmoe.hf.apply(model) after peft has made it"
                )


def _adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields all parameters of peft's adapters in a model, whatever of it is in use."""
    for prefix, module in model.named_modules():
        for name in getattr(module, "adapter_layer_names", ()):
            owner = getattr(module, name, None)
            if isinstance(owner, nn.Module):
                yield from owner.named_parameters(f"{prefix}.{name}".lstrip("."))


_warned: set[tuple[str, str]] = set()


def _warn_once(experts: Any, name: str, why: str) -> None:
    kind = type(experts).__name__.removeprefix("Parametrized")  # as PyTorch calls a class with parametrisations
    if (kind, name) not in _warned and not torch.compiler.is_compiling():
        _warned.add((kind, name))
        warnings.warn(
            f"fusedmoe.hf: the adapter of {kind}.{name} is added to the parameter in full, with a gradient of "
            f"the parameter's size, as peft itself does: {why}",
            stacklevel=3,
        )
