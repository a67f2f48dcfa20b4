"""The gates' products: in small models summed in an order that no CPU chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedmoe.layers.gates.linear import router_logits
from fusedmoe.tutel.gates import product
from fusedmoe.tutel.gates.product import gate_product


def by_hand(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One float32 operation at a time."""
    logits = np.empty((len(x), len(weight)), np.float32)
    for s, e in np.ndindex(*logits.shape):
        sums = [np.float32(0)] * 4
        for m in range(x.shape[1]):
            sums[m % 4] = np.float32(sums[m % 4] + np.float32(x[s, m] * weight[e, m]))
        logits[s, e] = np.float32(np.float32(sums[0] + sums[2]) + np.float32(sums[1] + sums[3]))
    return logits


@pytest.mark.parametrize("shape", [(24, 4, 16), (7, 3, 10), (1, 5, 64), (3, 1, 2), (0, 4, 16)])
def test_small_products_are_summed_in_order(shape: tuple[int, int, int]) -> None:
    S, E, M = shape
    x_SM = torch.randn(M, S).t().requires_grad_()  # not contiguous
    weight_EM = torch.randn(E, M, requires_grad=True)
    logits_SE = gate_product(x_SM, weight_EM, fp32=False)
    expected = by_hand(x_SM.detach().numpy(), weight_EM.detach().numpy())
    np.testing.assert_array_equal(logits_SE.detach().numpy(), expected)

    wide_SM, wide_EM = (t.detach().double().requires_grad_() for t in (x_SM, weight_EM))
    (wide_SM @ wide_EM.t()).square().sum().backward()
    logits_SE.square().sum().backward()
    torch.testing.assert_close(x_SM.grad.double(), wide_SM.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight_EM.grad.double(), wide_EM.grad, rtol=1e-5, atol=1e-4)


def test_larger_ones_and_other_dtypes_are_the_librarys() -> None:
    for S, E, M, dtype in [(200, 8, 64, torch.float32), (4, 2, 66, torch.float32), (24, 4, 16, torch.float64)]:
        x_SM, weight_EM = torch.randn(S, M, dtype=dtype), torch.randn(E, M, dtype=dtype)
        assert gate_product(x_SM, weight_EM, fp32=False).equal(router_logits(x_SM, weight_EM))
    x_SM, weight_EM = torch.randn(24, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    assert gate_product(x_SM, weight_EM, fp32=False).dtype == torch.bfloat16
    assert gate_product(x_SM, weight_EM, fp32=True).equal(product.summed_in_order(x_SM.float(), weight_EM.float()))
