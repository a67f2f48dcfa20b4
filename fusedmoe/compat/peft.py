"""Private names of peft, checked against 0.21."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from fusedmoe.compat import require_names, require_parameters

CHECKED = "0.21"
_LORA = "peft.tuners.lora.layer"


def lora_module() -> Any | None:
    """Return peft's module of LoRA layers; None if peft is not installed or has an unchecked version.

    Raises:
        ImportError: a checked version lacks a private name.
    """
    if find_spec("peft") is None:
        return None
    found = version("peft")
    if not found.startswith(f"{CHECKED}."):
        return None
    layer = import_module(_LORA)
    require_names("peft", found, CHECKED, layer.ParamWrapper, "_activate_lora")
    require_parameters("peft", found, CHECKED, layer.ParamWrapper._activate_lora, "self", "active_adapters")
    return layer


def replace_activation(make: Callable[[Any], Any]) -> None:
    """Replace peft's function that activates adapters by `make(original)`. At most once per process.

    No effect if peft is not installed or has an unchecked version.
    """
    layer = lora_module()
    if layer is not None and not hasattr(layer.ParamWrapper._activate_lora, "original"):
        layer.ParamWrapper._activate_lora = make(layer.ParamWrapper._activate_lora)


def is_factors_proxy(parametrization: Any) -> bool:
    """Return whether a parametrization is one adapter of peft, which holds `lhs`, `rhs` and `scaling`."""
    return _is_lora(parametrization) and hasattr(parametrization, "lhs")


def is_full_proxy(parametrization: Any) -> bool:
    """Return whether a parametrization is the sum of peft's active adapters, of the parameter's size."""
    return _is_lora(parametrization) and hasattr(parametrization, "delta_weight")


def _is_lora(parametrization: Any) -> bool:
    return type(parametrization).__module__ == _LORA


def call_after_injection(call: Callable[[], None]) -> None:
    """Call `call` after every injection of a peft adapter into a model, with any version of peft."""
    if find_spec("peft") is None:
        return
    tuner = import_module("peft.tuners.tuners_utils").BaseTuner
    inject = tuner.inject_adapter

    @wraps(inject)
    def inject_adapter(*args: Any, **kwargs: Any) -> Any:
        try:
            return inject(*args, **kwargs)
        finally:
            call()

    tuner.inject_adapter = inject_adapter
