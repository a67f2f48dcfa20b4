"""Every class of experts that transformers has: right, or refused by name."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fusedmoe.hf
from fusedmoe.errors import ConfigError
from fusedmoe.hf import experts_forward

MODELS = Path(transformers.__file__).parent / "models"


def classes() -> list[tuple[str, str]]:
    """(module, class) of all that `use_experts_implementation` decorates."""
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "@use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            decorated = isinstance(node, ast.ClassDef) and any(
                "use_experts_implementation" in ast.unparse(one) for one in node.decorator_list
            )
            if decorated:
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))  # type: ignore[attr-defined]
    return found


class AnyConfig:
    """Numbers and names that suit what they are called; every class has names of its own."""

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


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), classes(), ids=lambda value: value.rpartition(".")[2])
def test_class(module: str, name: str) -> None:
    made: Any = getattr(import_module(module), name)(AnyConfig()).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.5, 0.5)
    number_TK = torch.rand(21, made.num_experts).topk(2).indices
    results = []
    for implementation in ("eager", "batched_mm", fusedmoe.hf.NAME):
        made.config._experts_implementation = implementation
        made.zero_grad()
        torch.manual_seed(5)
        x_TH = torch.randn(21, made.down_proj.shape[2 if made.is_transposed else 1], dtype=torch.float64)
        weight_TK = torch.rand(21, 2, dtype=torch.float64)
        leaves = (x_TH.requires_grad_(), weight_TK.requires_grad_())
        try:
            y_TH = made(x_TH, number_TK, weight_TK)
        except ConfigError as error:
            assert implementation == fusedmoe.hf.NAME and name in str(error), error
            return
        y_TH.square().sum().backward()
        results.append([y_TH.detach(), *(leaf.grad for leaf in (*leaves, *made.parameters()))])
    eager, batched, ours = results
    # Some of them, and norms that they have, compute in float32 whatever comes in.
    parts = [type(part) for part in made.modules()]
    close = 1e-5 if any("float" in inspect.getsource(kind) for kind in parts if kind.__module__ == module) else 1e-10
    for index, grad in enumerate(ours):
        assert grad is not None
        for others in (batched, eager):
            torch.testing.assert_close(grad, others[index], rtol=close, atol=close)


def test_there_are_classes() -> None:
    assert len(classes()) >= 60
    with pytest.raises(ConfigError, match="has no has_gate"):
        experts_forward(torch.nn.Identity(), *(torch.zeros(1, 1),) * 3)
