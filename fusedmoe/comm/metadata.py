"""Metadata exchange: before rows are sent, every rank sends every other rank the row counts to expect.

The message from one rank to another is a row of int64 columns; the checksum is the sum of all other columns:

    pairs of each of the receiver's experts | tokens of each micro-batch | checksum | the fields of `Metadata`

To add a column, add a field to `Metadata`, pass its value as a keyword of `exchange_metadata`, and read it there from
`received`.
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
from fusedmoe.kernels.deduplicate import SentTokens
from fusedmoe.kernels.layout import Layout
from fusedmoe.names import WIRES

INPUT_CHECK = "the check of the layer's input"
# A dtype is sent as its index; 0: no router weights.
_ROW_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUM_DTYPES = len(_ROW_DTYPES)


class RowForm(NamedTuple):
    """Dtypes and sizes of a rank's rows, the same on all ranks of an exchange.

    Attributes:
        width: elements per row.
        k: maximum number of (token, k) pairs per row.
        weights: dtype of the router weights sent with the rows; None if none are sent.
        wire: name of the format between ranks (`WireFormat`).
    """

    dtype: torch.dtype
    width: int
    k: int
    weights: torch.dtype | None
    wire: str = WIRES[0]

    @classmethod
    def of(cls, x_SM: Tensor, layout: Layout, weights: Tensor | None) -> RowForm:
        return cls(x_SM.dtype, x_SM.shape[1], layout.k, None if weights is None else weights.dtype)

    @lru_cache(maxsize=256)  # noqa: B019, a form is a value
    def refusal(self) -> str:
        """Return why rows of this form cannot be sent, else ""."""
        for what, dtype in (("rows", self.dtype), ("router weights", self.weights)):
            if dtype not in _ROW_DTYPES:
                return (
                    f"{what} of {dtype} cannot be sent; convert them to one of {', '.join(map(str, _ROW_DTYPES[1:]))}"
                )
        return ""

    @lru_cache(maxsize=256)  # noqa: B019, a form is a value
    def columns(self) -> tuple[int, int, int, int, int]:
        return (
            _ROW_DTYPES.index(self.dtype),
            self.width,
            self.k,
            _ROW_DTYPES.index(self.weights),
            WIRES.index(self.wire),
        )

    @classmethod
    def of_columns(cls, dtype: int, width: int, k: int, weights: int, wire: int) -> RowForm:
        row_dtype = _ROW_DTYPES[dtype]
        assert row_dtype is not None
        return cls(row_dtype, width, k, _ROW_DTYPES[weights], WIRES[wire])


class ExpertCalls(IntEnum):
    """How a rank must call its experts. The ranks of an exchange cannot mix MODULE and CHUNKS."""

    EITHER = 0
    #: As a module, for all rows at once: required by hooks on the experts and by an exchange without a plan.
    MODULE = 1
    #: Chunk by chunk: required by a plan inside a compiled graph or for whole blocks.
    CHUNKS = 2


class Metadata(NamedTuple):
    """Fields of a metadata message: this rank's values to send, or the int64 arrays [Q, P] received from all ranks.

    Q is the axis of ESP ranks, P the axis of EP ranks.

    Attributes:
        dtype, width, k, weights, wire: `RowForm.columns`, which must be equal on all ranks.
        rank: the sender's global rank.
        is_refused: 1 if the sender refuses its input. No rank then sends rows.
        tokens_require_grad, weights_require_grad: 1 if the sender needs these gradients.
        num_tokens, num_pairs: tokens and (token, k) pairs that the sender sends, summed over destinations.
        num_nonfinite: NaN or infinite values in the sender's input, which count as a refusal.
    """

    dtype: Any
    width: Any
    k: Any
    weights: Any
    wire: Any
    rank: Any
    is_refused: Any = False
    expert_calls: Any = ExpertCalls.EITHER
    tokens_require_grad: Any = True
    weights_require_grad: Any = True
    # Computed on the device:
    num_tokens: Any = 0
    num_pairs: Any = 0
    num_nonfinite: Any = 0


class NonFiniteCount(NamedTuple):
    """Number of NaN and infinite values, on the device until the metadata exchange copies it to the host.

    `text`: the error message for a nonzero number; the same on all ranks.
    """

    number: Tensor
    text: str


class TokenCounts(NamedTuple):
    """Tokens that a rank sends, where one row may serve several (token, k) pairs.

    Attributes:
        tokens_Wp: [W] or [W, p] integers, tokens sent to each rank per micro-batch.
        by_node: the same tokens by destination node, for two-level forwarding; None: sent directly to each rank.
        has_row_per_pair: True if each pair has its own row.
    """

    tokens_Wp: Tensor
    by_node: SentTokens | None = None
    has_row_per_pair: bool = False


class AgreedMetadata(NamedTuple):
    """Values that the metadata exchange makes equal on all ranks; defaults apply without one.

    Attributes:
        form: None if the ranks have not compared their row forms.
        max_pairs: the largest number of pairs that a rank sends.
        tokens_per_pair: tokens sent by all ranks divided by pairs sent by all ranks, from 1/K to 1.
        needs_module_calls: True if some rank calls its experts as a module. No rank may then run a plan.
        tokens_require_grad, weights_require_grad: True if some rank needs these gradients.
    """

    form: RowForm | None = None
    max_pairs: int = 0
    tokens_per_pair: float = 1.0
    needs_module_calls: bool = False
    tokens_require_grad: bool = True
    weights_require_grad: bool = True


def describe_difference(forms: Mapping[int, RowForm]) -> tuple[str, int | None]:
    """Return an error text for different row forms by rank, and the rank at fault if only one differs."""
    names = {"dtype": "dtypes", "width": "widths", "k": "numbers of experts for a token (K)"}
    names |= {"weights": "dtypes of router weights", "wire": "formats between ranks (wire)"}
    name = next(name for name in names if len({getattr(form, name) for form in forms.values()}) > 1)
    holders: dict[object, list[int]] = {}
    for rank, form in sorted(forms.items()):
        holders.setdefault(getattr(form, name), []).append(rank)
    each = ", ".join(
        f"{value} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'}" for value, ranks in holders.items()
    )
    alone = [ranks[0] for ranks in holders.values() if len(ranks) == 1]
    odd = alone[0] if len(holders) == 2 and len(alone) == 1 else None
    text = f"rows of different {names[name]} cannot be exchanged: {each}. Pass the same to the layer on every rank"
    return text, odd


def require_callable_experts(received: Metadata, ep: Group, esp: Group) -> None:
    """Raise `RankError` on all ranks if some call their experts as a module and others in chunks (`ExpertCalls`)."""
    module, chunks = (
        received.rank[received.expert_calls == calls] for calls in (ExpertCalls.MODULE, ExpertCalls.CHUNKS)
    )
    if module.size and chunks.size:
        conflict = (
            f"rank {module.min()} calls its experts as a module, and rank {chunks.min()} in chunks, by a plan in a "
            "compiled graph. Register the same hooks on every rank, and compile the layer on every rank or on none"
        )
        ep.board.refuse(INPUT_CHECK, conflict, ep.size * esp.size)
        raise RankError(f"rank {ep.job.rank}: {INPUT_CHECK}: {conflict}", agreed=True)


def require_equal_row_forms(received: Metadata, ep: Group, esp: Group) -> None:
    me, ranks = ep.job.rank, received.rank.ravel().tolist()
    columns = zip(*(column.ravel().tolist() for column in received[: len(RowForm._fields)]), strict=True)
    forms = {rank: RowForm.of_columns(*numbers) for rank, numbers in zip(ranks, columns, strict=True)}
    text, odd = describe_difference(forms)
    if odd is None or odd == me:
        ep.board.refuse(INPUT_CHECK, text, ep.size * esp.size)
        raise RankError(f"rank {me}: {INPUT_CHECK}: {text}", agreed=True)
    raise RankError(f"rank {me}: ended because {Verdict(odd, INPUT_CHECK, text)}", agreed=True)
