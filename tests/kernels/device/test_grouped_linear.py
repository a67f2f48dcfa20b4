"""A linear map of each expert's rows: values and gradients compared with float64."""

from __future__ import annotations

import pytest
import torch

from fusedmoe import autograd
from fusedmoe.autograd.grouped import grouped_linear
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.grouped import define_product
from tests.kernels.device.test_padding import padded, rows_of_nan_behind
from tests.kernels.routings import choose

E, K, O = 4, 24, 40  # noqa: E741  what a product makes


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_equals_float64_with_gradients(device: torch.device, transposed: bool, bias: bool) -> None:
    """Experts without rows, padding of NaN, strides."""
    layout, kept = padded(device)
    counts = layout.counts_E.cpu()
    rows_NK = rows_of_nan_behind(kept, torch.empty(layout.rows, 2 * K, device=device))[:, ::2].requires_grad_()
    shape = (E, O, K) if transposed else (E, K, O)
    weight = torch.randn(*shape[::2], shape[1], device=device).transpose(1, 2).requires_grad_()
    bias_EO = torch.randn(E, O, device=device, requires_grad=True) if bias else None
    out_NO = grouped_linear(rows_NK, layout, weight, bias_EO, transposed=transposed)
    dout_NO = rows_of_nan_behind(kept, out_NO.detach())
    out_NO.backward(dout_NO)

    expert_N = torch.arange(E).repeat_interleave(counts)
    given = [
        None if t is None else t.detach().cpu().double().requires_grad_() for t in (rows_NK[:kept], weight, bias_EO)
    ]
    rows, matrix, shift = given
    assert rows is not None and matrix is not None
    pieces = [rows[expert_N == e] @ (matrix[e].t() if transposed else matrix[e]) for e in range(E)]
    exact = torch.cat(pieces) if shift is None else torch.cat(pieces) + shift[expert_N]
    exact.backward(dout_NO[:kept].cpu().double())

    def close(found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
        assert found is not None and wanted is not None
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2e-3, atol=2e-3)

    close(out_NO[:kept], exact.detach())
    assert rows_NK.grad is not None and not out_NO[kept:].any() and not rows_NK.grad[kept:].any()
    close(rows_NK.grad[:kept], rows.grad)
    close(weight.grad, matrix.grad)
    if bias_EO is not None and shift is not None:
        close(bias_EO.grad, shift.grad)


def test_grouped_linear_with_empty_experts(device: torch.device) -> None:
    layout = autograd.order(torch.full((5, 1), 2, device=device), E)
    weight = torch.randn(E, O, K, device=device, requires_grad=True)
    rows_NK = torch.randn(5, K, device=device)
    out_NO = grouped_linear(rows_NK, layout, weight)
    wanted = define_product(rows_NK.cpu(), torch.full((5,), 2), weight.detach().cpu(), True)
    torch.testing.assert_close(out_NO.detach().cpu(), wanted, rtol=2e-3, atol=2e-3)
    out_NO.sum().backward()
    assert weight.grad is not None and weight.grad[2].any() and not weight.grad[[0, 1, 3]].any()


def test_grouped_linear_without_rows(device: torch.device) -> None:
    layout = autograd.order(torch.empty(0, 2, dtype=torch.long, device=device), E)
    weight = torch.randn(E, O, K, device=device, requires_grad=True)
    out_NO = grouped_linear(torch.empty(0, K, device=device), layout, weight)
    out_NO.sum().backward()
    assert out_NO.shape == (0, O) and weight.grad is not None and not weight.grad.any()


def test_grouped_linear_rejects_wrong_shapes(device: torch.device) -> None:
    layout = autograd.order(choose(6, 2, E, 0.0).to(device), E)
    rows_NK, weight = torch.randn(layout.rows, K, device=device), torch.randn(E, O, K, device=device)
    for match, given in {
        "rows_NK must be": (rows_NK[1:], layout, weight),
        r"weight must be \[4, O, 24\], got \[3, 40, 24\]": (rows_NK, layout, weight[1:]),
        r"weight must be \[4, O, 24\], got \[4, 24, 40\]": (rows_NK, layout, weight.transpose(1, 2)),
        r"bias_EO must be \[4, 40\]": (rows_NK, layout, weight, torch.zeros(E, K, device=device)),
        "weight is torch.float16": (rows_NK, layout, weight.half()),
        "rows_NK must hold floating-point": (rows_NK.int(), layout, weight),
    }.items():
        with pytest.raises(ConfigError, match=match):
            grouped_linear(*given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"weight must be \[4, 24, O\]"):
        grouped_linear(rows_NK, layout, weight, transposed=False)
