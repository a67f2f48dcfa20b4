"""Numbers that a conversion would change by more than rounding: too large, not whole, or with an imaginary part."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

# So many are looked at at once, in float64 beside those that were read.
_NUMBERS = 2**20
# Integers up to here are exact in float64.
_EXACT = 2**53


def may_lose(have: torch.dtype, become: torch.dtype) -> bool:
    """Returns whether some number of dtype `have` is lost as `become`, so that they must be looked at."""
    if have == become:
        return False
    if have.is_complex and become.is_complex:
        have, become = have.to_real(), become.to_real()
    if have.is_floating_point and become.is_floating_point:
        # Some dtypes of one byte have no sign, zero or infinities.
        return torch.finfo(have).max > torch.finfo(become).max or become.itemsize == 1
    return have not in (become, torch.bool)


def lost_number(value: Tensor, dtype: torch.dtype) -> str | None:
    """Describes the first number that a conversion would not keep, in words that follow a tensor's name; else None."""
    # Kept are floating-point numbers but for rounding (and what is too small, as zero), infinities and NaN where they
    # exist, integers exactly, and what is 0 or 1 as a bool.
    if not may_lose(value.dtype, dtype):
        return None
    if value.is_complex():
        parts = torch.view_as_real(value.detach().resolve_conj())
        if dtype.is_complex:
            return lost_number(parts, dtype.to_real())
        lost = parts[..., 1] != 0
        return _told(value[lost][0], dtype) if lost.any() else lost_number(parts[..., 0], dtype)
    if dtype.is_complex:
        dtype = dtype.to_real()
    for chunk in value.detach().reshape(-1).split(_NUMBERS):
        lost = ~_kept(chunk, dtype)
        if lost.any():
            return _told(chunk[lost][0], dtype)
    return None


def require_convertible(operation: str, key: str, have: torch.dtype, become: torch.dtype) -> None:
    """Raise `ConfigError`, which begins with `operation`, for dtypes between which PyTorch converts nothing."""
    if have == become:
        return
    try:
        torch.empty(1, dtype=become, device="cpu").copy_(torch.zeros(1, dtype=have, device="cpu")).to(torch.float32)
        torch.zeros(1, dtype=have, device="cpu").double()
    except (RuntimeError, NotImplementedError) as error:
        names = [str(one).removeprefix("torch.") for one in (have, become)]
        raise ConfigError(
            f"{operation}: {key} is {names[0]}, which PyTorch does not convert to {names[1]}. Give the model the dtype "
            "of the save."
        ) from error


def refuse_lost(operation: str, key: str, value: Tensor, dtype: torch.dtype) -> None:
    """Raises `ConfigError`, which begins with `operation`, if `lost_number` finds one in what is called `key`."""
    lost = lost_number(value, dtype)
    if lost is not None:
        raise ConfigError(f"{operation}: {key} {lost}. Give the model a dtype that can, or convert what was saved.")


def _kept(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [n] bool: which numbers of value [n] stay as they are, to rounding."""
    exact = value.double()  # which has all numbers of all floating-point dtypes
    if dtype == torch.bool:
        return (exact == 0) | (exact == 1)
    if not value.is_floating_point():
        return _kept_integers(value, dtype)
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        return (exact == exact.trunc()) & (exact >= float(bounds.min)) & (exact < float(bounds.max + 1))
    after, eps, least = value.to(dtype).double(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounded = exact.isfinite() & ((after - exact).abs() <= eps * exact.abs().clamp_min(least))
    return (after == exact) | (after.isnan() & exact.isnan()) | rounded


def _kept_integers(value: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch computes little in unsigned integers. The larger half of those of 64 bits is below zero as int64.
    wide = value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
    small = wide >= 0 if value.dtype == torch.uint64 else torch.ones_like(wide, dtype=torch.bool)
    if dtype.is_floating_point:
        return small & (wide.abs() <= _EXACT) & (wide.to(dtype).double() == wide.double())
    bounds = torch.iinfo(dtype)
    return small & (wide >= bounds.min) & (wide <= min(bounds.max, torch.iinfo(torch.int64).max))


def _told(number: Tensor, dtype: torch.dtype) -> str:
    have, become = (str(one).removeprefix("torch.") for one in (number.dtype, dtype))
    return f"has the {have} number {number.item()}, which {become} cannot hold"
