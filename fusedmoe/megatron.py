"""Megatron-core's models with this library's exchange of rows and kernels, by their layer specs:

    spec = fusedmoe.megatron.routed_experts(get_gpt_layer_local_spec(num_experts=8))

`token_dispatcher` sends rows by this library, and leaves the experts to Megatron; `routed_experts` is both, with the
experts by this library's kernels. See `fusedmoe.integrations.megatron`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from fusedmoe.errors import ConfigError
from fusedmoe.integrations.megatron import MegatronMoELayer, StackedExperts

__all__ = ["routed_experts", "token_dispatcher"]

_TIMEOUT_S = 300.0


def token_dispatcher(spec: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """Returns a spec whose layers of experts send rows by this library. The experts stay Megatron's.

    Args:
        spec: of a transformer layer, of a block of them (dense layers stay as they are), or of a layer of experts.
        timeout_s: seconds that a rank waits for others.
    Returns:
        Another spec of the same kind; the given spec does not change.
    Raises:
        ConfigError: a spec without a layer of experts of Megatron's; the modules in its place are named.
    """
    return _replaced(spec, None, timeout_s)


def routed_experts(spec: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """Returns a spec whose layers of experts send rows, and compute experts, by this library.

    Their parameters are those of Megatron's `SequentialMLP`, whichever experts the spec has: `local_experts.0.…`. In
    distributed checkpoints they have the names that all of Megatron's experts have there.

    Args, Returns, Raises: as for `token_dispatcher`.
    """
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return _replaced(spec, ModuleSpec(module=StackedExperts, submodules=linears), timeout_s)


def _replaced(spec: Any, experts: ModuleSpec | None, timeout_s: float) -> Any:
    unlike: list[str] = []  # names of modules that are no layer of experts

    def of_experts(mlp: Any) -> Any:
        # A spec, or the class itself where a layer has no parts to choose.
        module = getattr(mlp, "module", mlp)
        if module is not MoELayer:
            unlike.append(getattr(module, "__name__", repr(module)))
            return mlp
        inside = mlp.submodules if experts is None else replace(mlp.submodules, experts=experts)
        params = {**mlp.params, "timeout_s": timeout_s}
        return replace(mlp, module=MegatronMoELayer, submodules=inside, params=params)

    def of_layer(layer: Any) -> Any:
        inside: Any = getattr(layer, "submodules", None)
        if not hasattr(inside, "mlp"):
            return of_experts(layer)
        return replace(layer, submodules=replace(inside, mlp=of_experts(inside.mlp)))

    layers = getattr(spec, "layer_specs", None)
    made = of_layer(spec) if layers is None else replace(spec, layer_specs=[of_layer(layer) for layer in layers])
    if len(unlike) == (1 if layers is None else len(layers)):
        raise ConfigError(
            f"fusedmoe.megatron: the spec has no layer of experts of Megatron's MoELayer, but "
            f"{', '.join(set(unlike))}; give num_experts where it is made, and put this library in before others"
        )
    return made
