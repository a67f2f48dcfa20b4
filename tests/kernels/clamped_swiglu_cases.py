"""Requirements on gpt-oss's activation and its gradient, in plain torch and in kernels, against float64."""

from __future__ import annotations

import torch

from fusedmoe.autograd.grouped import clamped_swiglu
from fusedmoe.kernels.activation import define_clamped_swiglu
from fusedmoe.kernels.backend import INTERPRET

ALPHA, LIMIT = 1.702, 2.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1, 1), (7, 33), (300, 96), (0, 8), (5, 0), (33, 1024))


def check(h_NH: torch.Tensor, da_NI: torch.Tensor) -> None:
    """Compare rows and the gradient of their results, with any strides."""
    h_NH = h_NH.detach().requires_grad_()
    a_NI = clamped_swiglu(h_NH, ALPHA, LIMIT)
    assert a_NI.dtype == h_NH.dtype and a_NI.shape == da_NI.shape
    (dh_NH,) = torch.autograd.grad(a_NI, h_NH, da_NI)
    exact_NH = h_NH.detach().cpu().double().requires_grad_()
    exact_NI = define_clamped_swiglu(exact_NH, ALPHA, LIMIT)
    (dexact_NH,) = torch.autograd.grad(exact_NI, exact_NH, da_NI.cpu().double())
    # One rounding from float32: half a unit (the interpreter truncates bf16), plus float32's own error.
    units = 1.01 if INTERPRET and h_NH.dtype == torch.bfloat16 else 0.51
    accuracy = {"rtol": units * torch.finfo(h_NH.dtype).eps + 3e-6, "atol": 1e-6}
    if h_NH.dtype == torch.float64:
        accuracy = {"rtol": 1e-14, "atol": 1e-14}
    for found, wanted in ((a_NI.detach(), exact_NI.detach()), (dh_NH, dexact_NH)):
        torch.testing.assert_close(found.cpu().double(), wanted, equal_nan=True, **accuracy)


def check_shape(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Many of the rows' values are beyond the bounds."""
    h_NH = (3 * torch.randn(rows, 2 * width, device=device)).to(dtype)
    check(h_NH, torch.randn(rows, width, device=device).to(dtype))


def check_bounds(device: torch.device) -> None:
    """A value on a bound, beyond it or infinite has no gradient. NaN stays NaN."""
    inf, nan = float("inf"), float("nan")
    pairs = [(LIMIT, LIMIT), (-LIMIT, -LIMIT), (inf, 1.0), (1.0, inf), (1.0, -inf), (3.0, -3.0)]
    check(torch.tensor(pairs, device=device), torch.ones(len(pairs), 1, device=device))
    assert clamped_swiglu(torch.tensor([(nan, 1.0), (1.0, nan)], device=device), ALPHA, LIMIT).isnan().all()


def check_strides(device: torch.device) -> None:
    check(torch.randn(9, 40, device=device)[:, ::2], torch.randn(10, 9, device=device).t())
