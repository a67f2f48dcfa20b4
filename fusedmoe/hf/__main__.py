"""`python -m fusedmoe.hf` prints how each class of experts of the installed transformers is computed, as a table.

The table of docs/guides/hugging-face.md is this one; tests compare each class's numbers with those of its own code.
"""

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

#: Ways in which experts are computed, in the order of the table.
WAYS = (
    "one fused operation",
    "grouped products, gpt-oss's activation by a kernel",
    "grouped products, the module's own activation",
    "refused, by name",
)


class StandInConfig:
    """A configuration with a number or name, by what it is called, for whatever a class of experts asks."""

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
    """Returns (module, class) of all that transformers' `use_experts_implementation` decorates."""
    classes = []
    assert transformers.__file__ is not None
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        # Reading is cheap; most of these modules take seconds to import.
        for node in ast.parse(text).body if "@use_experts_implementation" in text else ():
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else ()
            if any("use_experts_implementation" in ast.unparse(decorator) for decorator in decorators):
                assert isinstance(node, ast.ClassDef)
                classes.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return classes


def make_experts(module: str, name: str) -> Any:
    """Makes a module of experts, of four small ones."""
    return getattr(import_module(module), name)(StandInConfig())


def way_of(experts: Any) -> str:
    """Returns the way in which a module of experts is computed, one of `WAYS`."""
    try:
        check_experts(experts)
    except ConfigError:
        return WAYS[3]
    if fused_activation(experts) is not None:
        return WAYS[0]
    return WAYS[1] if experts.has_gate and is_clamped_swiglu(experts) else WAYS[2]


def census() -> dict[str, list[str]]:
    """Returns the names of all classes of experts by way, without what all their names end with."""
    by_way: dict[str, list[str]] = {way: [] for way in WAYS}
    for module, name in expert_classes():
        by_way[way_of(make_experts(module, name))].append(name.removesuffix("Experts"))
    return by_way


def table(by_way: Mapping[str, Sequence[str]]) -> str:
    """Returns a census as a table in Markdown."""
    rows = [f"| {way} | {', '.join(sorted(names)) or 'none'} |" for way, names in by_way.items()]
    return "\n".join(["| computed as | classes |", "|---|---|", *rows])


if __name__ == "__main__":
    found = census()
    print(f"transformers {transformers.__version__}: {sum(map(len, found.values()))} classes of experts\n")
    print(table(found))
