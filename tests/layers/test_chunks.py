"""Chunks of rows and micro-batches, rows saved by other chunks, and the worked examples of layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fusedmoe.autograd.experts import experts as experts_of
from fusedmoe.autograd.order import order
from fusedmoe.blocks.cuts import cut
from fusedmoe.comm.all_to_all import LastTokens, block_order, make_all_to_all, share
from fusedmoe.comm.exchange import Exchange, ExchangeSizes
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunks import Kept
from fusedmoe.kernels.deduplicate import decode, inverse, sending
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout, build_layout
from fusedmoe.layers.expert_tables import by_place, held_after, of_experts
from fusedmoe.placement.placement import Placement


def chunk_order(counts_G: np.ndarray, degree: int) -> Tensor:
    sizes_Gi = np.stack([share(counts_G, i, degree) for i in range(degree)], 1)
    return block_order(sizes_Gi, (1, 0), torch.device("cpu"))


@pytest.mark.parametrize("seed", range(20))
def test_kept_rows_of_other_chunks(seed: int) -> None:
    """Segments of any sizes, in so many chunks before and so many after: each row where it belongs, copied."""
    draw = torch.Generator().manual_seed(seed)
    counts_G = torch.randint(0, 9 if seed % 2 else 90, (seed % 7,), generator=draw)
    before, after = (int(n) for n in torch.randint(1, 9, (2,), generator=draw))
    whole = torch.randn(int(counts_G.sum()), 3, generator=draw)
    there, here = (chunk_order(counts_G.numpy(), degree) for degree in (before, after))
    kept = Kept(whole[there].tensor_split(before))
    found = [kept.rows(part) for part in inverse(there)[here].tensor_split(after)]
    assert_close(torch.cat(found), whole[here], rtol=0, atol=0)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_chunks_have_no_tokens_that_come_last(seed: int) -> None:
    """Of a rank's experts some come last: what the counts say of its chunks, beside the pairs that come in each."""
    draw = torch.Generator().manual_seed(seed)
    W, e, K, degree = (int(torch.randint(1, most, (), generator=draw)) for most in (5, 5, 4, 6))
    last_E = torch.rand(W * e, generator=draw) < 0.3
    tokens, pairs, come_PC = [], [], []
    for _ in range(W):
        expert_SK = torch.randint(-1, W * e, (int(torch.randint(0, 30, (), generator=draw)), K), generator=draw)
        sent = sending(build_layout(expert_SK, W * e), W, last_E)
        assert sent.code_N is not None
        here = sent.tokens.counts[0]
        expert_P, token_P = decode(sent.code_N)
        pairs.append([(int(x), int(t)) for x, t in zip(expert_P, token_P, strict=True) if t < here])
        tokens.append(here)
        come_PC.append(torch.bincount(torch.tensor([x for x, _ in pairs[-1]], dtype=torch.long), minlength=e).tolist())
    come_QPC = np.concatenate([np.array(come_PC), np.array(tokens)[:, None]], axis=1)[None]
    topology = Topology()
    exchange = Exchange(
        make_all_to_all("direct", topology), topology.esp, ExchangeSizes(come_QPC[0], come_QPC), torch.device("cpu")
    )
    last_PE = last_E.view(W, e).numpy()
    exchange.last = LastTokens(last_PE, np.random.default_rng(seed).random(W))
    parts, sent_Gi, come_Gi = exchange.cut(degree)
    np.testing.assert_array_equal(come_Gi.sum(1), tokens)
    assert (come_Gi >= 0).all() and [part.rows for part in parts] == come_Gi.sum(0).tolist()
    first, ends_Pi = int(exchange.last.first(degree)[0]), come_Gi.cumsum(1)
    needs = [
        any(last_PE[0, expert] and token < ends_Pi[source, i] for source in range(W) for expert, token in pairs[source])
        for i in range(degree)
    ]
    assert not any(needs[:first])
    if not last_PE[0].any():
        even_Gi = np.stack([share(np.array(tokens), i, degree) for i in range(degree)], 1)
        np.testing.assert_array_equal(come_Gi, even_Gi)
    # As the senders split them, who know the same counts.
    for source, of_source in enumerate(come_PC):
        send_PC = np.tile([*of_source, tokens[source]], (W, 1))
        sizes = ExchangeSizes(send_PC, come_QPC)
        sender = Exchange(make_all_to_all("direct", topology), topology.esp, sizes, torch.device("cpu"))
        sender.last = exchange.last
        np.testing.assert_array_equal(sender.cut(degree).sent_Gi[0], come_Gi[source])


def test_the_worked_example_of_last_tokens() -> None:
    last = LastTokens(np.array([[False, True]]), np.array([0.6]))
    assert last.first(4).tolist() == [2]
    pairs_QE, tokens_Qp = np.array([[3, 5], [8, 0]]), np.array([[8], [8]])
    assert last.chunks(tokens_Qp, pairs_QE, 4, 0)[:, 0].tolist() == [[2, 1, 2, 3], [2, 2, 2, 2]]


@pytest.mark.parametrize("parts", [[0, 0], [4], [0, 3, 0, 5], [1, 1, 1]])
def test_kept_rows_in_any_order(parts: list[int]) -> None:
    draw = torch.Generator().manual_seed(sum(parts))
    pieces = [torch.randn(rows, 2, dtype=torch.float64, generator=draw) for rows in parts]
    kept, whole = Kept(pieces), torch.cat(pieces)
    for count in (0, 1, 20):
        index = torch.randint(len(whole), (count,), generator=draw) if len(whole) else torch.empty(0, dtype=torch.long)
        assert_close(kept.rows(index), whole[index], rtol=0, atol=0)


def test_the_worked_example_of_cuts() -> None:
    """As in `blocks/cuts.py`: 6 samples, rows in 2 chunks forward and 3 backward, dense parts in one."""
    cuts = cut((1, 1), (2, 3), 0, 6)
    samples = [list(range(6)[at[0]]) for at in cuts.rows_at]
    assert samples == [[0, 1], [2], [3], [4, 5]]
    assert [list(chunk) for chunk in cuts.row_chunks["forward"]] == [[0, 1], [2, 3]]
    assert [list(chunk) for chunk in cuts.row_chunks["backward"]] == [[3], [1, 2], [0]]
    assert cuts.dense_chunks["forward"] == cuts.dense_chunks["backward"] == [range(1)]
    assert cuts.rows_in_dense_at == cuts.rows_at and cuts.dense_of == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [0, 1, 5, 12])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_element_is_in_one_micro_batch(size: int, axis: int) -> None:
    cuts = cut((2, 4), (3, 2), axis, size)
    whole = torch.arange(2 * size).view(size, 2) if axis == 0 else torch.arange(2 * size).view(2, size)
    for ats in (cuts.dense_at, cuts.rows_at):
        assert torch.equal(torch.cat([whole[at] for at in ats], axis), whole)
    for p, place in enumerate(cuts.dense_of):
        assert p in cuts.rows_of[place]
        assert torch.equal(whole[cuts.dense_at[place]][cuts.rows_in_dense_at[p]], whole[cuts.rows_at[p]])


def test_the_worked_example_of_copies_in_the_place_of_others() -> None:
    """As in `held_after`: rank 0 gives its copy of 2 up for one of 3, and 4 comes behind it; rank 1 keeps its own."""
    before, after = Placement.parse("0: 0 1 +2\n1: 2 3 4 +0"), Placement.parse("0: 0 1 +3 +4\n1: 2 3 4 +0 +1")
    assert held_after([(0, 1, 2), (2, 3, 4, 0)], before, after) == [(0, 1, 3, 4), (2, 3, 4, 0, 1)]
    with pytest.raises(AssertionError, match="nothing in it"):
        held_after([(0, 1, 2), (2, 3, 4, 0)], before, before.sharding)


def test_the_worked_example_of_places() -> None:
    """As in `by_place`: three rows of expert 0, of which the third goes to its replica, and four of expert 2."""
    layout = order(torch.tensor([[0], [0], [0], [2], [2], [2], [2]]), 3).exact()
    placed = by_place(layout, np.array([[2, 1], [0, 0], [0, 4]]), [[0, 1], [2, 0]])
    assert placed.counts == [2, 0, 4, 1]
    assert placed.source_N is not None and placed.source_N.tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert placed.row_SK[:, 0].tolist() == [0, 1, 6, 2, 3, 4, 5]


def test_the_worked_example_of_some_experts() -> None:
    """As in `of_experts`: the rows 0 1 | 2 | 3 4 of three experts, of which the second is left out."""
    layout = order(torch.tensor([[0, 1], [0, 2], [2, -1]]), 3).exact()
    chosen, rows_n = of_experts(layout, np.array([2, 1, 2]), np.array([True, False, True]))
    assert chosen.counts == [2, 0, 2] and rows_n.tolist() == [0, 1, 3, 4]
    assert chosen.source_N is not None and chosen.source_N.tolist() == [0, 1, 2, 1]
    assert chosen.row_SK.tolist() == [[0, -1], [1, 3], [2, -1]]


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("seed", range(6))
def test_some_experts_and_the_rest(tokens: int, seed: int) -> None:
    """Both together are all experts: sums and every gradient, where parameters of the rest are not numbers yet."""
    draw = torch.Generator().manual_seed(seed)
    experts, k, dim = 5, 3, 4
    expert_SK = torch.rand(tokens, experts, generator=draw).argsort(dim=1)[:, :k]
    expert_SK[torch.rand(tokens, k, generator=draw) < 0.3] = -1
    layout = order(expert_SK, experts).exact()
    chosen_E = (torch.rand(experts, generator=draw) < (0.0, 0.5, 0.5, 0.5, 0.5, 1.0)[seed]).numpy()
    rows_E = np.array(layout.counts)
    x_SM, dy_SM = torch.randn(2, tokens, dim, generator=draw, dtype=torch.float64)
    weight_N = torch.rand(layout.rows, generator=draw, dtype=torch.float64)
    w1_EHM, w2_EMH = torch.randn(2, experts, dim, dim, generator=draw, dtype=torch.float64)

    def leaves(chosen_E: np.ndarray) -> list[Tensor]:
        parameters = [w.clone() for w in (w1_EHM, w2_EMH)]
        for w in parameters:
            w[torch.from_numpy(~chosen_E)] = float("nan")
        return [one.requires_grad_() for one in (x_SM.clone(), weight_N.clone(), *parameters)]

    def run(layout: Layout, rows_n: Tensor, own: list[Tensor]) -> list[Tensor]:
        x_SM, weight_N, w1_EHM, w2_EMH = own
        y_SM = experts_of(x_SM, layout, weight_N[rows_n], Weights(w1_EHM, w2_EMH, None, None, 0), "gelu")
        return [y_SM.detach(), *torch.autograd.grad(y_SM, own, dy_SM)]

    wanted = run(layout, torch.arange(layout.rows), leaves(np.ones(experts, dtype=bool)))
    parts = [run(*of_experts(layout, rows_E, which_E), leaves(which_E)) for which_E in (chosen_E, ~chosen_E)]
    for one, other, both in zip(*parts, wanted, strict=True):
        assert_close(one + other, both, rtol=1e-12, atol=1e-12)
