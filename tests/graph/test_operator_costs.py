"""OperatorCosts of captured instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusedmoe.graph import operator_costs as costs
from fusedmoe.graph.operator_costs import (
    MeasuredCosts,
    load_numbers,
    measure_operator,
    measured_sizes,
    node_s,
    operator_key,
)

aten = torch.ops.aten


def test_cost_points_are_interpolated_linearly() -> None:
    measured = MeasuredCosts({1024: 1.0, 2048: 2.0, 4096: 3.0})
    assert [measured.collective_s(size) for size in (0, 1024, 1536, 3072, 4096, 8192)] == [1.0, 1.0, 1.5, 2.5, 3.0, 6.0]
    assert MeasuredCosts({1024: 2.0}).collective_s(512) == 2.0


def test_measured_sizes_are_powers_of_two() -> None:
    assert measured_sizes(1) == [1024]
    assert measured_sizes(5000) == [1024, 2048, 4096, 8192]
    assert measured_sizes(8192)[-1] == 8192


def test_operator_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(costs, "measure_operator", lambda target, args, kwargs: calls.append(str(target)) or 0.5)
    measured = MeasuredCosts({1024: 1.0}, {}, tmp_path / "operators.json")
    inputs = (torch.randn(4, 8), torch.randn(8, 2))
    module = make_fx(lambda a, b: ((a @ b).relu() @ b.t(), a @ b), tracing_mode="fake")(*inputs)
    total = sum(node_s(measured, node) for node in module.graph.nodes if node.op == "call_function")
    # The two products share one measurement, and a view is not measured.
    assert calls == ["aten.mm.default", "aten.relu.default", "aten.mm.default"] and total == 2.0
    measured.save()
    assert load_numbers(tmp_path / "operators.json") == measured.measured
    again = MeasuredCosts({1024: 1.0}, load_numbers(tmp_path / "operators.json"))
    assert again.operator_s(aten.mm.default, inputs, {}) == 0.5 and len(calls) == 3


def test_operator_key_has_shapes_strides_and_arguments() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    keys = {
        operator_key(aten.sum.dim_IntList, (a, [0]), {}),
        operator_key(aten.sum.dim_IntList, (a, [1]), {}),
        operator_key(aten.sum.dim_IntList, (b.t(), [0]), {}),
        operator_key(aten.sum.dim_IntList, (a.double(), [0]), {}),
        operator_key(aten.mean.dim, (a, [0]), {}),
    }
    assert len(keys) == 5


def test_measure_preserves_rng_state_and_estimates_failures() -> None:
    """Measuring preserves the job's random state; an operator that fails on invented inputs is estimated."""
    x, table = torch.randn(100), torch.randn(7, 3)
    state = torch.get_rng_state()
    assert measure_operator(aten.native_dropout.default, (x, 0.5, True), {}) > 0
    assert measure_operator(aten.embedding.default, (table, torch.tensor([6, 6])), {}) > 0
    assert torch.equal(torch.get_rng_state(), state)
    wrong = measure_operator(aten.mm.default, (torch.zeros(1000, 1000), torch.zeros(3, 3)), {})
    assert wrong == pytest.approx(5e-6 + (1_000_000 + 9) * 4 / 5e9)


def test_malformed_cost_file_is_ignored_with_warning(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    assert load_numbers(path) == {}
    for text in ("{", "[1]", '{"a": "b", "c": -1.0}'):
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"{path} .*The file is ignored"):
            assert load_numbers(path) == {}
