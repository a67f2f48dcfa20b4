"""Return values of rollout engines, in the form that replay reads."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedmoe import ConfigError, routing

L, K, E = 4, 2, 8


def random_choices(rows: int, seed: int, dtype: Any = np.int16) -> Any:
    return np.random.default_rng(seed).permuted(np.tile(np.arange(E), (rows, L, 1)), axis=2)[..., :K].astype(dtype)


def expected_rows(
    sequences: list[Any], tokens: list[int], layer: int, length: int | None, left: bool, first: bool
) -> Tensor:
    """Row by row."""
    rows: list[list[list[int]]] = []
    for sequence, count in zip(sequences, tokens, strict=True):
        own = [sequence[t, layer].tolist() if t < len(sequence) else [-1] * K for t in range(count)]
        padding = [[-1] * K] * (0 if length is None else length - count)
        rows.append(padding + own if left else own + padding)
    if first:
        assert length is not None
        rows = [[rows[b][t] for b in range(len(rows))] for t in range(length)]
    return torch.tensor([row for sequence in rows for row in sequence])


LAYOUTS = [(None, False, False), (9, False, False), (9, True, False), (9, False, True), (9, True, True)]


@pytest.mark.parametrize(("length", "left", "first"), LAYOUTS)
@pytest.mark.parametrize("moe_layers", [None, [1, 3]])
def test_read_vllm_equals_definition(length: int | None, left: bool, first: bool, moe_layers: list[int] | None) -> None:
    parts = [
        (random_choices(3, 1), random_choices(4, 2)),
        (random_choices(1, 3), random_choices(1, 4)),
        (random_choices(5, 5), random_choices(0, 6)),
    ]
    tokens = [7, 3, 5]  # of the second the last token's choice is missing
    found = routing.read_vllm(parts, tokens, moe_layers=moe_layers, padded_to=length, left=left, sequence_first=first)
    joined = [np.concatenate(each) for each in parts]
    for layer, one in zip(range(L) if moe_layers is None else moe_layers, found, strict=True):
        assert one.dtype == torch.int16
        assert torch.equal(one.long(), expected_rows(joined, tokens, layer, length, left, first))


@pytest.mark.parametrize("flat", [False, True])
def test_read_sglang_equals_definition(flat: bool) -> None:
    sequences = [random_choices(6, 1, np.int32), random_choices(2, 2, np.int32)]
    given: list[Any] = list(sequences)
    if flat:
        sent = [base64.b64encode(sequence.tobytes()) for sequence in sequences]
        given = [np.frombuffer(base64.b64decode(text), "int32").copy() for text in sent]
    for length, left, first in LAYOUTS:
        found = routing.read_sglang(
            given, [7, 3], layers_and_k=(L, K), padded_to=length, left=left, sequence_first=first
        )
        for layer, one in enumerate(found):
            assert torch.equal(one.long(), expected_rows(sequences, [7, 3], layer, length, left, first))


@pytest.mark.parametrize(
    ("sequences", "tokens", "more", "says"),
    [
        ([(random_choices(3, 1), random_choices(2, 2))], [7], {}, "sequence 0 has 5 rows for 7 tokens"),
        ([(random_choices(3, 1), random_choices(2, 2))], [4], {}, "sequence 0 has 5 rows for 4 tokens"),
        ([(random_choices(3, 1), random_choices(2, 2))], [5], {"padded_to": 4}, r"5 rows for 5 tokens \(at most 4\)"),
        (
            [(random_choices(3, 1), random_choices(2, 2)[:, :1])],
            [5],
            {},
            r"prompt and generated tokens must be \[P, L, K\]",
        ),
        ([(random_choices(3, 1), random_choices(2, 2))] * 2, [5], {}, "2 sequences, but 1 entries in tokens"),
        ([], [], {}, "0 sequences"),
        (
            [(random_choices(3, 1), random_choices(2, 2)), (random_choices(1, 1)[:, :2],) * 2],
            [5, 2],
            {},
            r"sequence 1 must be integers",
        ),
        ([(random_choices(3, 1), random_choices(2, 2))], [5], {"moe_layers": [4]}, "no layer 4 among the 4"),
        ([(random_choices(3, 1), random_choices(2, 2))], [5], {"sequence_first": True}, "needs padded_to"),
        ([(random_choices(3, 1).astype(float), random_choices(2, 2).astype(float))], [5], {}, "must be integers"),
    ],
)
def test_read_vllm_rejects_invalid_sequences(
    sequences: Any, tokens: list[int], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        routing.read_vllm(sequences, tokens, **more)


def test_read_sglang_rejects_flat_arrays_of_wrong_size() -> None:
    with pytest.raises(ConfigError, match="sequence 0 has 7 values, not a multiple"):
        routing.read_sglang([np.zeros(7, np.int32)], [2], layers_and_k=(L, K))
    with pytest.raises(ConfigError, match="sequence 0 must be integers"):
        routing.read_sglang([np.zeros(8, np.int32)], [2])
