"""Every expert class of transformers is computed correctly or rejected by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers

import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers
from fusedmoe.errors import ConfigError
from fusedmoe.hf.__main__ import census, expert_classes, make_experts
from fusedmoe.hf.module_experts import experts_forward


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), expert_classes(), ids=lambda value: value.rpartition(".")[2])
def test_expert_class_equals_eager_or_is_rejected(module: str, name: str) -> None:
    made = make_experts(module, name).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.5, 0.5)
    number_TK = torch.rand(21, made.num_experts).topk(2).indices
    results = []
    for implementation in ("eager", "batched_mm", "fusedmoe"):
        made.config._experts_implementation = implementation
        made.zero_grad()
        torch.manual_seed(5)
        x_TM = torch.randn(21, made.down_proj.shape[2 if made.is_transposed else 1], dtype=torch.float64)
        weight_TK = torch.rand(21, 2, dtype=torch.float64)
        leaves = (x_TM.requires_grad_(), weight_TK.requires_grad_())
        try:
            y_TM = made(x_TM, number_TK, weight_TK)
        except ConfigError as error:
            assert implementation == "fusedmoe" and name in str(error), error
            return
        y_TM.square().sum().backward()
        results.append([y_TM.detach(), *(leaf.grad for leaf in (*leaves, *made.parameters()))])
    eager, batched, ours = results
    # Some experts, and norms inside them, compute in float32 for any input dtype.
    parts = [type(part) for part in made.modules()]
    close = 1e-5 if any("float" in inspect.getsource(kind) for kind in parts if kind.__module__ == module) else 1e-10
    for index, grad in enumerate(ours):
        assert grad is not None
        for others in (batched, eager):
            torch.testing.assert_close(grad, others[index], rtol=close, atol=close)


@pytest.mark.slow
def test_expert_classes_are_discovered() -> None:
    assert len(expert_classes()) >= 60
    with pytest.raises(ConfigError, match="has no has_gate"):
        experts_forward(torch.nn.Identity(), *(torch.zeros(1, 1),) * 3)


def version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


@pytest.mark.slow
def test_guide_table_equals_expert_class_census() -> None:
    """The guide's table equals the command's output; newer classes are listed with their release."""
    page = Path(__file__).parents[2] / "docs/guides/hugging-face.md"
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", page.read_text(encoding="utf-8"), re.MULTILINE))
    installed = version(transformers.__version__)
    for way, names in census().items():
        told = [name.partition(" ") for name in rows[way].split(", ") if name != "none"]
        assert sorted(names) == [name for name, _, since in told if not since or version(since) <= installed]
