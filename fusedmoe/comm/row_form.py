"""The form of the rows of an exchange, which ranks compare before any row is sent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Bounds of what `RowForm.packed` has room for.
_MOST_WIDTH, _MOST_K = 2**40, 2**16


class RowForm(NamedTuple):
    """The form of the rows that a rank sends, which must be the same on all ranks of an exchange.

    Attributes:
        dtype: of the rows.
        width: elements of a row.
        k: the most (token, k) pairs of a row.
        weights: dtype of the router weights that are sent with the rows; None: no weights are sent.
    """

    dtype: torch.dtype
    width: int
    k: int
    weights: torch.dtype | None

    @classmethod
    def of(cls, x_SM: Tensor, layout: Layout, weights: Tensor | None) -> RowForm:
        """Return the form of tokens [S, M] with this layout of their rows, and these router weights."""
        return cls(x_SM.dtype, x_SM.shape[1], layout.k, None if weights is None else weights.dtype)

    @lru_cache(maxsize=256)  # noqa: B019, a form is a value
    def refusal(self) -> str:
        """Describe what is wrong with the form; "" where nothing is."""
        for what, dtype in (("rows", self.dtype), ("router weights", self.weights)):
            if dtype not in _DTYPES and dtype is not None:
                return f"{what} of {dtype} cannot travel; convert them to one of {', '.join(map(str, _DTYPES))}"
        if self.width >= _MOST_WIDTH or self.k >= _MOST_K:
            return f"rows of {self.width} elements for {self.k} experts; the bounds are {_MOST_WIDTH} and {_MOST_K}"
        return ""

    @lru_cache(maxsize=256)  # noqa: B019
    def packed(self) -> int:
        """Return the form as one number below 2⁶³."""
        dtype, weights = _DTYPES.index(self.dtype), 1 + _DTYPES.index(self.weights) if self.weights in _DTYPES else 0
        return ((self.width * _MOST_K + self.k) * len(_DTYPES) + dtype) * (len(_DTYPES) + 1) + weights

    @classmethod
    def unpacked(cls, number: int) -> RowForm:
        rest, weights = divmod(number, len(_DTYPES) + 1)
        rest, dtype = divmod(rest, len(_DTYPES))
        return cls(_DTYPES[dtype], *divmod(rest, _MOST_K), (None, *_DTYPES)[weights])


def differ(forms: Mapping[int, int]) -> tuple[str, int | None]:
    """Describe in what the rows of ranks differ; also return the rank that differs from all others, if there is one.

    Args:
        forms: of each rank, packed.
    """
    of_ranks = {int(rank): RowForm.unpacked(int(number)) for rank, number in sorted(forms.items())}
    names = {"dtype": "dtypes", "width": "widths", "k": "numbers of experts for a token (K)"}
    names["weights"] = "dtypes of router weights"
    name = next(name for name in names if len({getattr(form, name) for form in of_ranks.values()}) > 1)
    holders: dict[object, list[int]] = {}
    for rank, form in of_ranks.items():
        holders.setdefault(getattr(form, name), []).append(rank)
    each = ", ".join(
        f"{value} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'}" for value, ranks in holders.items()
    )
    alone = [ranks[0] for ranks in holders.values() if len(ranks) == 1]
    odd = alone[0] if len(holders) == 2 and len(alone) == 1 else None
    text = f"rows of different {names[name]} cannot travel together: {each}. Every rank must give the layer the same"
    return text, odd
