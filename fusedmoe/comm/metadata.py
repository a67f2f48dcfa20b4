"""The metadata exchange: before rows are sent, each rank sends every other rank the numbers of rows to expect.

The message from one rank to another is a row of int64 columns. The checksum is the sum of all others, before and after:

    pairs of each of the receiver's experts | tokens of each micro-batch | checksum | the fields of `Metadata`

To add a column: a field of `Metadata`, its value as a keyword of `exchange_metadata` in the caller that has it, and a
line of `exchange_metadata` that reads `received`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.comm.failure.board import Verdict
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError
from fusedmoe.kernels.deduplicate import Sending
from fusedmoe.kernels.layout import Layout

#: The name of the operation in errors about bad input.
CHECK = "the check of the layer's input"
# A column has the index of a dtype; 0 is that of router weights that are not sent.
_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUM_DTYPES = len(_DTYPES)


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
            if dtype not in _DTYPES:
                return f"{what} of {dtype} cannot travel; convert them to one of {', '.join(map(str, _DTYPES[1:]))}"
        return ""

    @lru_cache(maxsize=256)  # noqa: B019, a form is a value
    def columns(self) -> tuple[int, int, int, int]:
        """Return each field as an integer, for `Metadata`."""
        return _DTYPES.index(self.dtype), self.width, self.k, _DTYPES.index(self.weights)

    @classmethod
    def of_columns(cls, dtype: int, width: int, k: int, weights: int) -> RowForm:
        """Return the form with these `columns`."""
        row_dtype = _DTYPES[dtype]
        assert row_dtype is not None
        return cls(row_dtype, width, k, _DTYPES[weights])


class ExpertCalls(IntEnum):
    """Ability of a rank to call its experts, which the ranks of an exchange compare."""

    EITHER = 0
    #: As a module, for all rows at once: hooks on the experts need it, and an exchange without a plan does it.
    MODULE = 1
    #: Chunk by chunk: a plan that is in a graph, or is that of whole blocks.
    CHUNKS = 2


class Metadata(NamedTuple):
    """Columns of the message of one rank: its own numbers, or the int64 arrays [Q, P] received from all ranks.

    Attributes:
        dtype, width, k, weights: the fields of `RowForm`, as `RowForm.columns` encodes them; the same on all ranks.
        rank: the sender's rank in the job.
        is_refused: 1 where the sender refuses its input. No rank then sends rows.
        expert_calls: an `ExpertCalls`.
        tokens_require_grad, weights_require_grad: 1 where the sender needs gradients of its tokens, of router weights.
        num_tokens, num_pairs: tokens, and (token, k) pairs, that the sender sends to all ranks.
        num_nonfinite: values that are NaN or infinite in the sender's input. Unless 0, no rank sends rows.
    """

    dtype: Any
    width: Any
    k: Any
    weights: Any
    rank: Any
    is_refused: Any = False
    expert_calls: Any = ExpertCalls.EITHER
    tokens_require_grad: Any = True
    weights_require_grad: Any = True
    # From here on the device computes the values.
    num_tokens: Any = 0
    num_pairs: Any = 0
    num_nonfinite: Any = 0


class NonFinite(NamedTuple):
    """A count of values that are NaN or infinite, which the host does not read before the metadata exchange.

    Attributes:
        number: their count, an integer scalar on the device of the rows.
        text: the error where it is not 0; the same on all ranks.
    """

    number: Tensor
    text: str


class TokenCounts(NamedTuple):
    """Tokens that a rank sends, where one token has several pairs.

    Attributes:
        tokens_Wp: [W] or [W, p] integers, tokens for each rank, of each micro-batch.
        hop: the same tokens by node (`sending` of them over nodes), for a two-level algorithm to forward there; None:
            each rank receives its tokens from the sender.
        by_pairs: a row is sent for each pair all the same.
    """

    tokens_Wp: Tensor
    hop: Sending | None = None
    by_pairs: bool = False


class Agreed(NamedTuple):
    """Numbers of a metadata exchange that are the same on all ranks. An exchange of known sizes has the defaults.

    Attributes:
        form: of the rows; None: not compared.
        most_pairs: the most pairs that any of the ranks sends.
        share: tokens that are sent for each pair, over all ranks, from 1/K to 1.
        as_module: some rank calls its experts as a module: no rank may work by a plan.
        tokens_require_grad, weights_require_grad: some rank needs gradients of its tokens, of its router weights.
    """

    form: RowForm | None = None
    most_pairs: int = 0
    share: float = 1.0
    as_module: bool = False
    tokens_require_grad: bool = True
    weights_require_grad: bool = True


def describe_difference(forms: Mapping[int, RowForm]) -> tuple[str, int | None]:
    """Describe in what the rows of ranks differ; also return the rank that differs from all others, if there is one.

    Args:
        forms: of each rank.
    """
    names = {"dtype": "dtypes", "width": "widths", "k": "numbers of experts for a token (K)"}
    names["weights"] = "dtypes of router weights"
    name = next(name for name in names if len({getattr(form, name) for form in forms.values()}) > 1)
    holders: dict[object, list[int]] = {}
    for rank, form in sorted(forms.items()):
        holders.setdefault(getattr(form, name), []).append(rank)
    each = ", ".join(
        f"{value} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'}" for value, ranks in holders.items()
    )
    alone = [ranks[0] for ranks in holders.values() if len(ranks) == 1]
    odd = alone[0] if len(holders) == 2 and len(alone) == 1 else None
    text = f"rows of different {names[name]} cannot travel together: {each}. Every rank must give the layer the same"
    return text, odd


def require_callable_experts(received: Metadata, ep: Group, esp: Group) -> None:
    """Raise on all ranks where one rank must call its experts as a module and another one cannot."""
    module, chunks = (
        received.rank[received.expert_calls == calls] for calls in (ExpertCalls.MODULE, ExpertCalls.CHUNKS)
    )
    if module.size and chunks.size:
        conflict = (
            f"rank {module.min()} calls its experts as a module, and rank {chunks.min()} chunk by chunk, by a plan in "
            "a compiled graph. Register the same hooks on every rank, and compile the layer on every rank or on none"
        )
        ep.board.refuse(CHECK, conflict, ep.size * esp.size)
        raise RankError(f"rank {ep.job.rank}: {CHECK}: {conflict}", agreed=True)


def refuse_forms(received: Metadata, ep: Group, esp: Group) -> None:
    """Raise on all ranks for rows of different forms. Where one rank differs from all others, its peers name it."""
    me, ranks = ep.job.rank, received.rank.ravel().tolist()
    columns = zip(*(column.ravel().tolist() for column in received[: len(RowForm._fields)]), strict=True)
    forms = {rank: RowForm.of_columns(*numbers) for rank, numbers in zip(ranks, columns, strict=True)}
    text, odd = describe_difference(forms)
    if odd is None or odd == me:
        ep.board.refuse(CHECK, text, ep.size * esp.size)
        raise RankError(f"rank {me}: {CHECK}: {text}", agreed=True)
    raise RankError(f"rank {me}: ended because {Verdict(odd, CHECK, text)}", agreed=True)
