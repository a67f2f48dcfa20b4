"""Operators and their inputs: requirements on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe import hooks  # noqa: F401  it registers operators
from fusedmoe.autograd import experts, gate, grouped, low_rank, order  # noqa: F401  they register the gradients
from fusedmoe.autograd.order import order_operator
from fusedmoe.kernels.layout import Layout, contiguous_layout
from tests.kernels.routings import choose

Cases = dict[str, list[tuple[Any, ...]]]


def cases(device: torch.device) -> Cases:
    """Inputs for each of the operators that every device has."""
    expert_SK = choose(13, 2, 4, 0.3).to(device)
    layout = Layout(*order_operator(expert_SK, 4, 5, None, True))
    full = Layout(*order_operator(choose(13, 2, 4, 0.0).to(device), 4, None, None, True))  # slack of H has no value

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    gated = (random(4, 2, 6, 8), random(4, 8, 6), None, None, 0)
    biased = (random(4, 6, 8), random(4, 8, 6), random(4, 6), random(4, 3), 2)
    plain = contiguous_layout(torch.tensor([3, 0, 4, 6], device=device), 13)
    frozen = (torch.randn(4, 2, 6, 8, device=device), torch.randn(4, 8, 6, device=device), None, None, 0)
    up, down = (random(4, 3, 8), random(4, 12, 3)), (random(4, 2, 6), random(4, 8, 2))
    linear = random(4, 3, 8), random(4, 6, 3)
    return {
        "order": [(expert_SK, 4, 5, torch.rand(13, device=device), True), (expert_SK, 4, None, None, True)],
        "permute": [(random(13, 8), layout.tensors)],
        "unpermute": [(random(layout.rows, 8), layout.tensors)],
        "take_pairs": [(random(13, 2), layout.tensors)],
        "put_pairs": [(random(layout.rows), layout.tensors)],
        "experts": [
            (random(13, 8), random(full.rows), *gated, full.tensors, "swiglu"),
            (random(13, 8), random(full.rows), *biased, full.tensors, "gelu"),
            (random(13, 8), None, *biased, plain.tensors, "relu"),
        ],
        "grouped_linear": [
            (random(full.rows, 8), random(4, 6, 8), random(4, 6), True, full.tensors),
            (random(13, 8), random(4, 8, 6), None, False, plain.tensors),
        ],
        "low_rank_experts": [
            (random(13, 8), random(full.rows), *frozen, *up, *down, [0.5, 2.0], full.tensors, "swiglu"),
            (random(13, 8), None, *frozen, None, None, *down, [1.0, 1.5], full.tensors, "swiglu"),
        ],
        "low_rank_linear": [
            (random(13, 8), torch.randn(4, 6, 8, device=device), None, *linear, 0.5, True, plain.tensors),
        ],
        "clamped_swiglu": [(random(13, 8), 1.702, 0.5), (random(0, 8), 1.0, 7.0)],
    }


def check(name: str, several: list[tuple[Any, ...]]) -> None:
    """Schema, fake and gradient registration agree with the operator's results, eagerly and traced."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.startswith("gate"):
        tests.append("test_aot_dispatch_dynamic")  # cannot sum expert numbers and weights
    for inputs in several:
        torch.library.opcheck(getattr(torch.ops.fusedmoe, name).default, inputs, test_utils=tests)
