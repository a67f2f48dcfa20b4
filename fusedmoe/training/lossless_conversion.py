"""Checks that a dtype conversion changes values by rounding only: no overflow, lost fraction or imaginary part."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.training.plain_values import dtype_name

# Elements converted to float64 at once.
_CHUNK_ELEMENTS = 2**20
# Integers up to this bound are exact in float64.
_MAX_EXACT_INTEGER = 2**53


def is_lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether converting `source` to `target` can change a value by more than rounding."""
    if source == target:
        return False
    if source.is_complex and target.is_complex:
        source, target = source.to_real(), target.to_real()
    if source.is_floating_point and target.is_floating_point:
        # Some one-byte dtypes lack a sign, zero or infinities.
        return torch.finfo(source).max > torch.finfo(target).max or target.itemsize == 1
    return source not in (target, torch.bool)


def describe_lost_value(value: Tensor, dtype: torch.dtype) -> str | None:
    """Describe the first value that the conversion to `dtype` would not preserve; None without one.

    Preserved are floating-point numbers up to rounding (including underflow to zero), infinities and NaN if `dtype` has
    them, integers exactly, and 0 or 1 as bool.
    """
    if not is_lossy(value.dtype, dtype):
        return None
    if value.is_complex():
        parts = torch.view_as_real(value.detach().resolve_conj())
        if dtype.is_complex:
            return describe_lost_value(parts, dtype.to_real())
        lost = parts[..., 1] != 0
        return _describe_value(value[lost][0], dtype) if lost.any() else describe_lost_value(parts[..., 0], dtype)
    if dtype.is_complex:
        dtype = dtype.to_real()
    for chunk in value.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        lost = ~_is_preserved(chunk, dtype)
        if lost.any():
            return _describe_value(chunk[lost][0], dtype)
    return None


def require_convertible(operation: str, key: str, source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        return
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu")).to(torch.float32)
        torch.zeros(1, dtype=source, device="cpu").double()
    except (RuntimeError, NotImplementedError) as error:
        names = [dtype_name(one) for one in (source, target)]
        raise ConfigError(
            f"{operation}: {key} is {names[0]}, which PyTorch does not convert to {names[1]}. Use the dtype of "
            "the save."
        ) from error


def require_lossless(operation: str, key: str, value: Tensor, dtype: torch.dtype) -> None:
    lost = describe_lost_value(value, dtype)
    if lost is not None:
        raise ConfigError(f"{operation}: {key} {lost}. Use a wider dtype, or convert the saved value.")


def _is_preserved(value: Tensor, dtype: torch.dtype) -> Tensor:
    exact = value.double()  # represents all values of all floating-point dtypes
    if dtype == torch.bool:
        return (exact == 0) | (exact == 1)
    if not value.is_floating_point():
        return _are_integers_preserved(value, dtype)
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        return (exact == exact.trunc()) & (exact >= float(bounds.min)) & (exact < float(bounds.max + 1))
    after, eps, least = value.to(dtype).double(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounded = exact.isfinite() & ((after - exact).abs() <= eps * exact.abs().clamp_min(least))
    return (after == exact) | (after.isnan() & exact.isnan()) | rounded


def _are_integers_preserved(value: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch supports few operations on unsigned integers. uint64 values from 2^63 are negative as int64.
    wide = value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
    small = wide >= 0 if value.dtype == torch.uint64 else torch.ones_like(wide, dtype=torch.bool)
    if dtype.is_floating_point:
        return small & (wide.abs() <= _MAX_EXACT_INTEGER) & (wide.to(dtype).double() == wide.double())
    bounds = torch.iinfo(dtype)
    return small & (wide >= bounds.min) & (wide <= min(bounds.max, torch.iinfo(torch.int64).max))


def _describe_value(number: Tensor, dtype: torch.dtype) -> str:
    source, target = map(dtype_name, (number.dtype, dtype))
    return f"has the {source} number {number.item()}, which {target} cannot hold"
