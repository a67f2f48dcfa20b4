"""Private names of transformers, checked against 5.23 and 5.24. Importing it imports transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation
from transformers.utils import output_capturing

from fusedmoe.compat import require_names

CHECKED = "5.23 to 5.24"


@use_experts_implementation
class _Probe(nn.Module):
    """Expert module with the attributes that transformers sets on each expert module, and no parameters."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self) -> None:
        """Compute nothing."""


for _owner, _names in (
    (_Probe(None), ("_is_expert_parallel", "_apply_gate")),
    (PreTrainedConfig, ("_experts_implementation",)),
    (PreTrainedModel, ("_can_record_outputs",)),
    (output_capturing, ("_active_collector",)),
):
    require_names("transformers", transformers.__version__, CHECKED, _owner, *_names)

_DEFAULT_GATE = _Probe._apply_gate  # type: ignore[attr-defined] # transformers adds it


def is_registered(module: nn.Module) -> bool:
    """Return whether transformers' registry serves this expert module. False for wrappers around one."""
    return "_is_expert_parallel" in vars(module)


def is_expert_parallel(experts: Any) -> bool:
    return bool(experts._is_expert_parallel)


def implementation_of(experts: Any) -> str | None:
    """Return the `experts_implementation` of a module; None for a module without a config."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def apply_gate(experts: Any, rows_NH: Tensor) -> Tensor:
    gated: Tensor = experts._apply_gate(rows_NH)
    return gated


def gate_of(experts: Any) -> Any:
    return vars(experts).get("_apply_gate", type(experts)._apply_gate)


def has_default_gate(experts: Any) -> bool:
    """Return whether the gate is `act_fn(gate) * up`, for the class and the module."""
    return gate_of(experts) is _DEFAULT_GATE


def captures_outputs() -> bool:
    return bool(output_capturing._active_collector.get())


def recorders_of(module: nn.Module, output: str) -> list[Any]:
    """Return the `OutputRecorder`s or classes of modules that transformers records for the model output `output`."""
    recorded = (getattr(module, "_can_record_outputs", None) or {}).get(output)
    return [*recorded] if isinstance(recorded, (list, tuple)) else [recorded]
