"""False metadata from a faulty rank: expert assignments, sizes, dtypes and bytes that differ from its rows.

Each lie contradicts another fact the ranks hold. A consistent lie, such as one expert in place of another, is
undetectable: it is a valid token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fusedmoe.blocks import forward as blocks_forward
from fusedmoe.comm import exchange
from fusedmoe.comm.exchange import Exchange, RowExchange
from fusedmoe.comm.metadata import RowForm
from fusedmoe.engine import collectives_dispatcher
from fusedmoe.kernels import deduplicate

#: Map from a right message, or a part of it, to a wrong one; None where none exists.
Lie = Callable[[random.Random, Any], Any]


def _changed(values: Tensor, at: int, value: int) -> Tensor:
    changed = values.clone()
    changed[at] = value
    return changed


def _other_expert(rng: random.Random, code_N: Tensor) -> Tensor:
    at = rng.randrange(len(code_N))
    wrong = rng.choice([-4, -2, 2, 4, 2**14])  # mostly an existing index, or one out of range
    return _changed(code_N, at, int(code_N[at]) + wrong)


def _other_start(rng: random.Random, code_N: Tensor) -> Tensor:
    """Add or remove a token boundary."""
    at = rng.randrange(len(code_N))
    return _changed(code_N, at, int(code_N[at]) ^ 1)


def _late_start(rng: random.Random, code_N: Tensor) -> Tensor | None:
    """Keep the token count, but start the first token at its second pair."""
    if len(code_N) < 2 or int(code_N[1]) & 1:
        return None
    return _changed(_changed(code_N, 0, int(code_N[0]) - 1), 1, int(code_N[1]) + 1)


def _noise(rng: random.Random, message: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    bytes_B = message.contiguous().view(torch.uint8)
    return torch.randint_like(bytes_B, 256, generator=generator).view(message.dtype).view(message.shape)


def _zeros(rng: random.Random, message: Tensor) -> Tensor | None:
    return torch.zeros_like(message) if message.any() else None


def _moved_pair(rng: random.Random, counts_E: Tensor) -> Tensor | None:
    """Move a pair to another expert's count."""
    from_E = counts_E.nonzero()[:, 0].tolist()
    if not from_E or len(counts_E) < 2:
        return None
    source = rng.choice(from_E)
    target = rng.choice([expert for expert in range(len(counts_E)) if expert != source])
    return _changed(_changed(counts_E, source, int(counts_E[source]) - 1), target, int(counts_E[target]) + 1)


def _more(rng: random.Random, counts: Tensor) -> Tensor:
    at = rng.randrange(counts.numel())
    return _changed(counts.reshape(-1), at, int(counts.reshape(-1)[at]) + rng.choice([1, 2, 1000])).view(counts.shape)


def _fewer_tokens(rng: random.Random, tokens_Wp: Tensor) -> Tensor | None:
    flat = tokens_Wp.reshape(-1)
    some = flat.nonzero()[:, 0].tolist()
    if not some:
        return None
    at = rng.choice(some)
    return _changed(flat, at, int(flat[at]) - 1).view(tokens_Wp.shape)


def _number(rng: random.Random, table: bytes) -> bytes:
    """Write an impossible number into the metadata exchange: negative, or more rows than any rank has."""
    numbers = np.frombuffer(table, np.int64).copy()
    numbers[rng.randrange(len(numbers))] = rng.choice([-1, -(2**40), 2**40, 2**62, 10**6])
    return numbers.tobytes()


def _bytes(rng: random.Random, table: bytes) -> bytes:
    return rng.randbytes(len(table))


def _one_more(rng: random.Random, table: bytes) -> bytes:
    """Announce one more pair than is sent, for some expert."""
    numbers = np.frombuffer(table, np.int64).copy()
    numbers[rng.randrange(len(numbers))] += 1
    return numbers.tobytes()


def _shorter(rng: random.Random, rows: Tensor) -> Tensor:
    return rows[:-1]


def _longer(rng: random.Random, rows: Tensor) -> Tensor:
    return torch.cat([rows, rows[:1]])


def _other_dtype(rng: random.Random, form: RowForm) -> RowForm:
    return form._replace(dtype=torch.float16)


def _other_width(rng: random.Random, form: RowForm) -> RowForm:
    return form._replace(width=form.width + rng.choice([-1, 1, 1000]))


def _other_weights(rng: random.Random, form: RowForm) -> RowForm:
    return form._replace(weights=rng.choice([None, torch.float16, torch.bfloat16]))


LIES: dict[str, tuple[Lie, ...]] = {
    "wrong codes": (_other_expert, _other_start, _late_start, _noise, _zeros),
    "wrong pairs": (_moved_pair, _more),
    "wrong tokens": (_fewer_tokens, _more),
    "wrong table": (_number, _bytes, _one_more),
    "wrong form": (_other_dtype, _other_width, _other_weights),
    "wrong message": (_noise, _shorter, _longer),
    "wrong rows": (_shorter, _longer),
}


@contextmanager
def lying(name: str, rng: random.Random, strikes: Callable[[], None]) -> Iterator[None]:
    """Make this rank lie once, in one of the first messages of its kind.

    Args:
        strikes: called at the lie.
    """
    lie, wait, told = rng.choice(LIES[name]), rng.randrange(3), False

    def once(right: Any) -> Any:
        nonlocal wait, told
        if told or right is None or (isinstance(right, Tensor) and right.numel() == 0):
            return right
        wait -= 1
        wrong = None if wait >= 0 else lie(rng, right)
        if wrong is None:
            return right
        told = True
        strikes()
        return wrong

    exchange_metadata, compare_calls, dispatch = (
        exchange.exchange_metadata,
        exchange.compare_calls,
        RowExchange.dispatch,
    )

    def pack(code_N: Tensor | None, weight_N: Tensor | None) -> Tensor | None:
        if name == "wrong codes":
            return deduplicate.pack(once(code_N), weight_N)
        message = deduplicate.pack(code_N, weight_N)
        return once(message) if name == "wrong message" else message

    def exchanged(algorithm: Any, esp: Any, counts_E: Tensor, form: RowForm, *more: Any, **named: Any) -> Exchange:
        if name == "wrong pairs":
            counts_E = once(counts_E)
        elif name == "wrong tokens" and (tokens := named.get("tokens")) is not None:
            named["tokens"] = tokens._replace(tokens_Wp=once(tokens.tokens_Wp))
        elif name == "wrong form":
            form = once(form)
        return exchange_metadata(algorithm, esp, counts_E, form, *more, **named)

    def begun(group: Any, operation: str, details: str = "", data: bytes = b"") -> list[bytes]:
        wrong = name == "wrong table" and group.handle is not None and data and operation == "exchange of counts"
        return compare_calls(group, operation, details, once(data) if wrong else data)

    def dispatched(self: RowExchange, rows: Tensor) -> Tensor:
        return dispatch(self, once(rows) if name == "wrong rows" else rows)

    with ExitStack() as stack:
        for where in (exchange, blocks_forward):
            stack.enter_context(patch.object(where, "pack", pack))
        stack.enter_context(patch.object(exchange, "compare_calls", begun))
        for where in (exchange, collectives_dispatcher):
            stack.enter_context(patch.object(where, "exchange_metadata", exchanged))
        stack.enter_context(patch.object(RowExchange, "dispatch", dispatched))
        yield
