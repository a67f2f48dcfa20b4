"""Compare two records of one run: bitwise equal, equal up to rounding, or different."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SAME, ROUNDING, DIFFERENT = "same bits", "rounding", "DIFFERENT"

# Largest difference, relative to the tensor's largest value, that counts as rounding in a run of this precision.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Verdict:
    """`status` of a run; `relative` and `ulps` of the worst tensor, which `text` names."""

    status: str
    tensors: int
    relative: float = 0.0
    ulps: float = 0.0
    text: str = ""


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])


def precision(record: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in record.values() if tensor.dtype in LIMITS}
    return max(dtypes, key=lambda dtype: LIMITS[dtype], default=torch.float64)


def distance(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the largest difference relative to the largest value of `before`, and in ulps of `before`'s elements.

    Infinite if only one of two elements is finite.
    """
    wide, other = before.double(), after.double()
    differs = bits(before).view_as(before) != bits(after).view_as(after)
    differs &= ~((wide == other) | (wide.isnan() & other.isnan()))  # ignores signs of zero and payloads of NaN
    if not differs.any():
        return 0.0, 0.0
    wide, other = wide[differs], other[differs]
    if not (wide.isfinite() & other.isfinite()).all():
        return float("inf"), float("inf")
    finite = before.double()
    largest = float(finite[finite.isfinite()].abs().max())
    error = (wide - other).abs()
    # frexp: |x| = m · 2^e with m in [0.5, 1), whose ulp is eps · 2^(e - 1).
    info = torch.finfo(before.dtype)
    exponent = torch.frexp(wide.abs().clamp(min=info.smallest_normal)).exponent
    ulps = error / (info.eps / 2 * torch.exp2(exponent.double()))
    return float(error.max()) / largest if largest else float("inf"), float(ulps.max())


def compare(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], least_precise: torch.dtype = torch.float64
) -> Verdict:
    """Compare two records of one run.

    Args:
        least_precise: least precise dtype of the computation, if no recorded tensor has it.
    """
    if before.keys() != after.keys():
        lost, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
        return Verdict(DIFFERENT, len(after), text=f"not recorded any more: {lost[:3]}; new: {new[:3]}")
    limit = max(LIMITS[precision(before)], LIMITS[least_precise])
    status, worst = SAME, Verdict(SAME, len(after))
    for name, one in before.items():
        other = after[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            text = f"{name}: {one.dtype} {list(one.shape)} became {other.dtype} {list(other.shape)}"
            return Verdict(DIFFERENT, len(after), float("inf"), float("inf"), text)
        if torch.equal(bits(one), bits(other)):
            continue
        if one.dtype not in LIMITS:
            text = f"{name}: {int((one != other).sum())} of {one.numel()} {one.dtype} elements differ"
            return Verdict(DIFFERENT, len(after), float("inf"), float("inf"), text)
        relative, ulps = distance(one, other)
        if relative > limit:
            status = DIFFERENT
        elif status == SAME:
            status = ROUNDING
        if worst.text == "" or relative > worst.relative:
            worst = Verdict(status, len(after), relative, ulps, name)
    return Verdict(status, len(after), worst.relative, worst.ulps, worst.text)
