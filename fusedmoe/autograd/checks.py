"""Argument checks of the public operations.

Values (expert ids, indices of a handmade layout) are checked on the host for CPU tensors. On CUDA and under
`torch.compile` the check is a device assertion, without a host synchronization.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout


def refuse(operation: str, text: str) -> NoReturn:
    # Messages are formatted only on failure, because `torch.compile` specializes on any size that is formatted.
    raise ConfigError(f"{operation}: {text}")


def require_values(operation: str, holds: Tensor, text: str) -> None:
    """Raise, or assert on the device, unless a scalar tensor is true."""
    if uses_triton(holds) or torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(holds, f"{operation}: {text}")
    elif not holds.is_meta and not holds:
        refuse(operation, text)


def check_count(operation: str, name: str, value: Any, minimum: int) -> None:
    """Require an integer >= `minimum`, including symbolic integers of `torch.compile`."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < minimum:
        refuse(operation, f"{name} must be an integer of at least {minimum}, got {value!r}")


def check_tensor(operation: str, name: str, value: Any, like: Tensor | None = None) -> None:
    if not isinstance(value, Tensor):
        refuse(operation, f"{name} must be a tensor, got {type(value).__name__}")
    if like is not None and value.device != like.device:
        refuse(operation, f"{name} is on {value.device}, not on {like.device}; move one with .to()")


def check_rows(operation: str, name: str, rows: Any, count: int | None, like: Tensor | None = None) -> None:
    """Require a [count, M] tensor on the device of `like`; with `count` None, any number of rows."""
    if not isinstance(rows, Tensor) or (like is not None and rows.device != like.device):
        check_tensor(operation, name, rows, like)  # raises with the right message
    if rows.dim() != 2 or (count is not None and rows.shape[0] != count):
        expected = "[rows, M]" if count is None else f"[{count}, M]"
        refuse(operation, f"{name} must be {expected}, got {list(rows.shape)}")


def check_floats(operation: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        refuse(operation, f"{name} must hold floating-point numbers, got {tensor.dtype}")


def check_integers(operation: str, name: str, value: Any, dims: int, like: Tensor | None = None) -> None:
    if not isinstance(value, Tensor) or (like is not None and value.device != like.device):
        check_tensor(operation, name, value, like)
    is_integer = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    if not is_integer or value.dim() != dims:
        refuse(operation, f"{name} must be integers in {dims} dimensions, got {value.dtype} {list(value.shape)}")


#: For invalid expert ids; `most` is the largest valid id.
CHOICE = "chosen experts must be numbers from 0 to {most}, or -1 for an empty pair; these hold others"


def check_choice(operation: str, expert_SK: Any, experts: int) -> None:
    """Require [S, K] integers in [0, experts), or -1 for an empty pair. The kernel of `order` checks CUDA tensors."""
    check_count(operation, "experts", experts, 1)
    check_integers(operation, "expert_SK", expert_SK, 2)
    if uses_triton(expert_SK):
        return
    text = CHOICE.format(most=experts - 1)
    if torch.compiler.is_compiling() or expert_SK.is_meta:
        require_values(operation, ((expert_SK >= -1) & (expert_SK < experts)).all(), text)
    elif expert_SK.numel():
        # One pass: in a decoding step with few tokens, a check takes almost as long as a layer.
        smallest, largest = (extreme.item() for extreme in expert_SK.aminmax())
        if smallest < -1 or largest >= experts:
            refuse(operation, text)


def check_row_weights(operation: str, weight_N: Any, layout: Layout) -> None:
    check_tensor(operation, "weight_N", weight_N, layout.row_SK)
    if weight_N.shape != (layout.rows,) or not weight_N.is_floating_point():
        cure = "take_pairs(weight_SK, layout) gives them"
        got = f"got {weight_N.dtype} {list(weight_N.shape)}"
        refuse(operation, f"weight_N must be [{layout.rows}] floating-point numbers, one for each row ({cure}), {got}")


def check_results(name: str, out_SM: Any, rows_SM: Tensor) -> None:
    if not isinstance(out_SM, Tensor) or out_SM.shape != rows_SM.shape:
        got = list(out_SM.shape) if isinstance(out_SM, Tensor) else repr(out_SM)
        raise ConfigError(f"{name} was given rows of shape {list(rows_SM.shape)} and returned {got}")


def check_layout(operation: str, layout: Any) -> None:
    if not isinstance(layout, Layout):
        refuse(operation, f"layout must be a Layout, as `order` makes it, got {type(layout).__name__}")
    # Layouts of `order` and of exchanges are consistent by construction.
    if layout.verified:
        return
    dims = {"counts_E": 1, "offsets_E1": 1, "source_N": 1, "pair_N": 1, "row_SK": 2}
    for (name, n), part in zip(dims.items(), layout.tensors, strict=True):
        if part is None and name == "source_N":
            continue
        check_integers(operation, f"layout.{name}", part, n, layout.counts_E)
        dtype = torch.int32 if name == "offsets_E1" else torch.int64
        if part is not None and part.dtype != dtype:
            refuse(operation, f"layout.{name} must be {dtype}, got {part.dtype}")
    sizes_match = len(layout.offsets_E1) == layout.experts + 1
    if layout.source_N is None:
        sizes_match = sizes_match and layout.k == 1 and layout.tokens == layout.rows
    else:
        sizes_match = sizes_match and len(layout.source_N) == layout.rows
    cure = "build it with `order`, or see fusedmoe.kernels.Layout for the meaning of each field"
    if not sizes_match:
        refuse(operation, f"the parts of this layout have sizes that do not fit each other; {cure}")
    require_values(operation, _is_consistent(layout), f"the numbers in this layout do not fit each other; {cure}")


def _is_consistent(layout: Layout) -> Tensor:
    """Return a scalar tensor: whether all fields describe the same rows. Never synchronizes with the device."""
    # One conjunction makes a single device assertion on CUDA.
    offsets_E1, source_N, pair_N, row_SK = layout.offsets_E1.long(), layout.source_N, layout.pair_N, layout.row_SK
    pairs, kept = max(row_SK.numel(), 1), offsets_E1[-1]
    row_N = torch.arange(layout.rows, device=row_SK.device)
    padding_N = row_N >= kept
    is_valid = (offsets_E1[0] == 0) & (offsets_E1.diff() == layout.counts_E).all() & (layout.counts_E >= 0).all()
    is_valid &= (kept <= layout.rows) & (kept == (row_SK >= 0).sum()) & ((row_SK >= -1) & (row_SK < kept)).all()
    is_valid &= ((pair_N >= 0) & (pair_N < pairs)).all()
    if row_SK.numel():
        is_valid &= ((row_SK.reshape(-1)[pair_N.clamp(0, pairs - 1)] == row_N) | padding_N).all()
    if source_N is None:
        return is_valid & (kept == layout.rows)
    # A row's token is its pair's token. Kernels read a padding row's token, so it must be valid.
    token_of_pair_N = pair_N.div(max(layout.k, 1), rounding_mode="floor")
    is_token_N = (source_N >= 0) & (source_N < max(layout.tokens, 1))
    return is_valid & ((source_N == token_of_pair_N) | padding_N & is_token_N).all()


def check_weights(operation: str, weights: Any, activation: str, x_SM: Tensor, experts: int) -> None:
    if not isinstance(weights, Weights):
        refuse(operation, f"weights must be fusedmoe.kernels.Weights, got {type(weights).__name__}")
    if activation not in ACTIVATIONS:
        refuse(operation, f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    gated, dim = ACTIVATIONS[activation].gated, x_SM.shape[1]
    for name, tensor in (("w1", weights.w1), ("w2", weights.w2), ("b1", weights.b1), ("b2", weights.b2)):
        if tensor is None and name in ("b1", "b2"):
            continue
        if not isinstance(tensor, Tensor) or tensor.device != x_SM.device:
            check_tensor(operation, name, tensor, x_SM)
        if tensor is not None and tensor.dtype != x_SM.dtype:
            cure = "convert one with .to(), or use autocast"
            refuse(operation, f"the rows are {x_SM.dtype} and the experts' {name} is {tensor.dtype}; {cure}")
    w1, w2, b1, b2 = weights.w1, weights.w2, weights.b1, weights.b2
    if w1.dim() != (4 if gated else 3) or (gated and w1.shape[1] != 2):
        form = "[e, 2, H, M], since it is gated" if gated else "[e, H, M], since it is not gated"
        refuse(operation, f"for {activation!r} w1 must be {form}; got {list(w1.shape)}")
    if w1.shape[0] != experts:
        refuse(operation, f"the weights are of {w1.shape[0]} experts, but the layout's rows of {experts}")
    if w1.shape[-1] != dim:
        refuse(operation, f"w1 is for rows of width {w1.shape[-1]}, but these are {dim} wide")
    if w2.dim() != 3 or w2.shape[0] != experts or w2.shape[2] != w1.shape[-2]:
        refuse(operation, f"w2 must be [{experts}, M, {w1.shape[-2]}], to fit w1; got {list(w2.shape)}")
    if b1 is not None and b1.shape != w1.shape[:-1]:
        refuse(operation, f"b1 must be {list(w1.shape[:-1])}, to fit w1; got {list(b1.shape)}")
    if b2 is not None:
        check_count(operation, "b2_start", weights.b2_start, 0)
        if b2.dim() != 2 or b2.shape[0] != experts or weights.b2_start + b2.shape[1] > w2.shape[1]:
            form = f"[{experts}, m] for the m columns from {weights.b2_start} on, of {w2.shape[1]}"
            refuse(operation, f"b2 must be {form}; got {list(b2.shape)}")
