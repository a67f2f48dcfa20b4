"""Sequence splits over ranks, and single-rank attention and feed-forward, compared with plain formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedmoe.comm.topology import Topology
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import Attention, DenseFeedForward, TokenSplit, rotary_angles, rotate

SMALL = ModelConfig(layers=2, model_dim=16, heads=4, hidden=8, experts=4, k=2, capacity_factor=None, seq_len=7, batch=2)


def split_on(rank: int, ranks: int, length: int) -> TokenSplit:
    topology: Any = SimpleNamespace(mp=SimpleNamespace(index=rank, size=ranks))
    return TokenSplit.from_length(length, topology)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 8])
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_token_split_orders_rows_by_rank_and_sample(ranks: int, length: int, samples: int) -> None:
    splits = [split_on(rank, ranks, length) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(ranks)]
    own = [list(range(split.start, split.stop)) for split in splits]
    assert own == chunks + [[]] * (ranks - len(chunks))

    # Layout on each rank, [rank, sample, position], and in attention, [sample, position].
    by_rank = [(sample, place) for part in own for sample in range(samples) for place in part]
    by_sample = sorted(by_rank)
    split = splits[-1]
    assert split.row_counts(samples) == [samples * len(part) for part in own]
    y_BLM = split.to_samples(torch.tensor(by_rank, dtype=torch.float64).view(-1, 2), samples)
    assert y_BLM.shape == (samples, length, 2)
    assert [tuple(row) for row in y_BLM.flatten(0, 1).tolist()] == by_sample
    assert [tuple(row) for row in split.to_ranks(y_BLM).tolist()] == by_rank


def test_token_split_avoids_copy_for_one_rank_or_sample() -> None:
    for ranks, samples in ((1, 3), (4, 1)):
        split = split_on(0, ranks, 6)
        rows = torch.randn(6 * samples, 2)
        shaped = split.to_samples(rows, samples)
        assert shaped.data_ptr() == rows.data_ptr() == split.to_ranks(shaped).data_ptr()


def unsplit(length: int) -> TokenSplit:
    return TokenSplit.from_length(length, Topology())


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_equals_formula(objective: str, kv_heads: int) -> None:
    config = replace(SMALL, objective=objective, kv_heads=kv_heads, positions="learned", bias=True)
    attention = Attention(config, Topology(), 0, dtype=torch.float64)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x_BLM = torch.randn(3, 5, 16, dtype=torch.float64)
    actual = attention(x_BLM, unsplit(5))

    assert attention.qkv_bias is not None and attention.out_bias is not None
    sharing, head = 4 // kv_heads, 4
    weight = attention.qkv_weight.view(kv_heads, sharing + 2, head, 16)
    bias = attention.qkv_bias.view(kv_heads, sharing + 2, head)
    expected = attention.out_bias.expand(3, 5, 16).clone()
    for h in range(4):
        group, own = divmod(h, sharing)
        q, k, v = (x_BLM @ weight[group, i].T + bias[group, i] for i in (own, sharing, sharing + 1))
        score = q @ k.transpose(1, 2) / head**0.5
        if objective == "causal":
            score = score.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected += score.softmax(-1) @ v @ attention.out_weight[:, h * head : (h + 1) * head].T
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_rotary_scores_depend_only_on_distance() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    angles = rotary_angles(20, 8, torch.device("cpu"), torch.float64)
    scores = rotate(q.expand(1, 1, 20, 8), *angles)[0, 0] @ rotate(k.expand(1, 1, 20, 8), *angles)[0, 0].T
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(("expert", "activation"), [("ffn", "gelu"), ("ffn", "geglu"), ("swiglu", "gelu")])
def test_dense_feed_forward_equals_formula(expert: str, activation: str) -> None:
    config = replace(SMALL, expert=expert, activation=activation, bias=True)
    dense = DenseFeedForward(config, Topology(), dtype=torch.float64)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x_SM = torch.randn(6, 16, dtype=torch.float64)
    assert dense.up_bias is not None and dense.down_bias is not None
    if activation == "gelu" and expert == "ffn":
        mid = F.gelu(x_SM @ dense.up_weight.T + dense.up_bias)
    else:
        gate, up = (x_SM @ dense.up_weight[i].T + dense.up_bias[i] for i in (0, 1))
        mid = (F.silu if expert == "swiglu" else F.gelu)(gate) * up
    expected = mid @ dense.down_weight.T + dense.down_bias
    actual = dense(x_SM.view(2, 3, 16), unsplit(3)).flatten(0, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
