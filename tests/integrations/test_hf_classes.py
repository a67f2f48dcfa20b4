"""Every class of experts that transformers has: right, or refused by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers

import fusedmoe.hf
from fusedmoe.errors import ConfigError
from fusedmoe.hf import experts_forward
from fusedmoe.hf.__main__ import census, expert_classes, make_experts


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), expert_classes(), ids=lambda value: value.rpartition(".")[2])
def test_class(module: str, name: str) -> None:
    made = make_experts(module, name).double()
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


@pytest.mark.slow
def test_there_are_expert_classes() -> None:
    assert len(expert_classes()) >= 60
    with pytest.raises(ConfigError, match="has no has_gate"):
        experts_forward(torch.nn.Identity(), *(torch.zeros(1, 1),) * 3)


def version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


@pytest.mark.slow
def test_the_guide_has_the_census() -> None:
    """The table is that of the command; classes of later releases than the oldest have theirs behind the name."""
    page = Path(__file__).parents[2] / "docs/guides/hugging-face.md"
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", page.read_text(encoding="utf-8"), re.MULTILINE))
    installed = version(transformers.__version__)
    for way, names in census().items():
        told = [name.partition(" ") for name in rows[way].split(", ") if name != "none"]
        assert sorted(names) == [name for name, _, since in told if not since or version(since) <= installed]
