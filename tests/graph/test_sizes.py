"""Compiled training with dynamic sizes: results are unchanged, and dynamic dimensions are not split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from fusedmoe.graph import GraphBackend
from tests.graph.models import AllToAll, Steady

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_dynamic_dimension_is_planned_but_not_split(world: None) -> None:
    """With a dynamic dimension, the backward pass is planned and nothing is split."""
    model = nn.Sequential(nn.Linear(8, 8), AllToAll(), nn.Linear(8, 8), AllToAll(), nn.Linear(8, 8)).double()
    backend = GraphBackend(costs=Steady())
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for size in (4, 6, 10):
        x_SM = torch.randn(size, 8, dtype=torch.float64)
        assert torch.allclose(compiled(x_SM), model(x_SM), rtol=0, atol=1e-12)
        compiled(x_SM).sum().backward()
    assert [report.phase for report in backend.reports] == ["forward", "backward"]
    assert not backend.reports[0].ranges and backend.reports[1].collectives[1].weights


@pytest.mark.slow
def test_data_dependent_row_counts_equal_eager(world: None) -> None:
    """Data-dependent row counts: results are unchanged."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.send = nn.Linear(8, 8), nn.Linear(8, 8), AllToAll()

        def forward(self, x_SM: Tensor) -> Tensor:
            h_SM = self.send(self.first(x_SM))
            rows = (h_SM.detach()[:, 0] > 0).nonzero()[:, 0]
            return self.send(h_SM.index_add(0, rows, self.second(h_SM[rows])))

    model, backend = Chosen().double(), GraphBackend(costs=Steady())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            x_SM = torch.randn(6, 8, dtype=torch.float64)
            results = []
            for run in (model, compiled):
                model.zero_grad()
                run(x_SM).square().sum().backward()
                results.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
            for one, other in zip(*results, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert [report.phase for report in backend.reports] == ["forward", "backward"]


@pytest.mark.slow
def test_dynamic_row_count_is_not_split(world: None) -> None:
    """Dropless experts, a product between dispatch and combine: without a static size nothing is split or checked."""

    def call(x_NM: Tensor, w_MM: Tensor) -> Tensor:
        size = [x_NM.shape[0]]
        rows_NM = all_to_all_single_autograd(x_NM, size, size, dist.group.WORLD)
        return all_to_all_single_autograd(rows_NM @ w_MM, size, size, dist.group.WORLD)

    given = [torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (12, 8)]
    torch._dynamo.mark_dynamic(given[0], 0)
    backend = GraphBackend(costs=Steady(), own_places=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for run in (torch.no_grad, torch.enable_grad):
        with run():
            torch.testing.assert_close(compiled(*given), call(*given), rtol=1e-12, atol=1e-12)
    found, right = (torch.autograd.grad(run(*given).square().sum(), given) for run in (compiled, call))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert [report.phase for report in backend.reports] == ["inference", "forward", "backward"]
