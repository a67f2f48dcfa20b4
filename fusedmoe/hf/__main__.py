"""`python -m fusedmoe.hf` prints a table of the installed transformers' expert classes and their computation."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers

from fusedmoe.errors import ConfigError
from fusedmoe.hf.module_experts import check_experts, fused_activation, is_clamped_swiglu

COMPUTATIONS = (
    "one fused operation",
    "grouped products, gpt-oss's activation by a kernel",
    "grouped products, the module's own activation",
    "refused, by name",
)


class StandInConfig:
    """Configuration that returns a plausible value for any attribute an expert class reads."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if re.search("act", name) and not re.search("size|factor", name):
            return "silu"
        if re.search("experts|num_local", name):
            return 4
        if re.search("eps", name):
            return 1e-6
        if re.search("alpha|limit|beta|scale|cap", name):
            return 1.5
        return 16 if re.search("size|dim|hidden", name) else False


def expert_classes() -> list[tuple[str, str]]:
    """Return (module, class) of each class that `use_experts_implementation` decorates in transformers."""
    classes = []
    assert transformers.__file__ is not None
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsed instead of imported, which takes seconds for most modules.
        for node in ast.parse(text).body if "@use_experts_implementation" in text else ():
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else ()
            if any("use_experts_implementation" in ast.unparse(decorator) for decorator in decorators):
                assert isinstance(node, ast.ClassDef)
                classes.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return classes


def make_experts(module: str, name: str) -> Any:
    return getattr(import_module(module), name)(StandInConfig())


def computation_of(experts: Any) -> str:
    try:
        check_experts(experts)
    except ConfigError:
        return COMPUTATIONS[3]
    if fused_activation(experts) is not None:
        return COMPUTATIONS[0]
    return COMPUTATIONS[1] if experts.has_gate and is_clamped_swiglu(experts) else COMPUTATIONS[2]


def census() -> dict[str, list[str]]:
    """Return the names of all expert classes by computation, without their common suffix."""
    by_computation: dict[str, list[str]] = {way: [] for way in COMPUTATIONS}
    for module, name in expert_classes():
        by_computation[computation_of(make_experts(module, name))].append(name.removesuffix("Experts"))
    return by_computation


def table(by_computation: Mapping[str, Sequence[str]]) -> str:
    rows = [f"| {way} | {', '.join(sorted(names)) or 'none'} |" for way, names in by_computation.items()]
    return "\n".join(["| computed as | classes |", "|---|---|", *rows])


if __name__ == "__main__":
    found = census()
    print(f"transformers {transformers.__version__}: {sum(map(len, found.values()))} classes of experts\n")
    print(table(found))
