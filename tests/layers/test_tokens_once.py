"""Each token is sent once per rank with experts for it: results, summation order, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import comb

import pytest
import torch
from torch import Tensor

from fusedmoe.comm.topology import Topology
from tests.cluster import Cluster
from tests.layers.tokens_once import (
    DEGREES,
    Batch,
    Wire,
    check,
    counted,
    drawn,
    tokens_of,
    travel,
    travel_by_pairs,
)
from tests.marks import slowly


def topology_of(ep: int, esp: int) -> Topology:
    """Build nodes of two ranks, or of four in a world of eight."""
    return Topology.from_sizes(ep, esp, ranks_per_node=4 if ep * esp == 8 else 2, timeout_s=30)


def check_random_layouts(rank: int, world: int, seeds: range) -> None:
    made = cache(topology_of)
    for seed in seeds:
        batch = drawn(seed, world)
        check(batch, rank, made(batch.ep, batch.esp))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "seeds"),
    [
        (4, range(2)),
        *slowly((2, range(20)), (4, range(2, 20)), (8, range(8))),
    ],
    ids=str,
)
def test_random_layouts_equal_definition(cluster: Cluster, world: int, seeds: range) -> None:
    """Compare 48 random layouts with the definition."""
    cluster.run(world, check_random_layouts, seeds, timeout_s=500)


def distinct_choices(S: int, experts: int, K: int, generator: torch.Generator) -> Tensor:
    return torch.rand(S, experts, generator=generator).argsort(1)[:, :K]


def choices_of(S: int, experts: int, K: int, generator: torch.Generator, least: int = 0) -> Tensor:
    return torch.randint(least, experts, (S, K), generator=generator)


def choices_on_one_rank(
    S: int, experts: int, K: int, ep: int, generator: torch.Generator, to: int | None = None
) -> Tensor:
    """All of a token's experts are on one rank: a different one per token, or always rank `to`."""
    here = experts // ep
    rank_S = torch.arange(S) % ep if to is None else torch.full((S,), to)
    return distinct_choices(S, here, K, generator) + rank_S[:, None] * here


# name -> (ranks of ep) -> the batch.
UGLY: dict[str, Callable[[int], Batch]] = {
    "an empty rank": lambda ep: Batch("", 2 * ep, lambda rank, g: distinct_choices(9 * (rank != 1), 2 * ep, 2, g), ep),
    "all but one rank are empty": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(9 * (rank == 1), 2 * ep, 2, g), ep
    ),
    "no token at all": lambda ep: Batch("", 2 * ep, lambda rank, g: distinct_choices(0, 2 * ep, 2, g), ep),
    "one token in all": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(int(rank == 1), 2 * ep, 2, g), ep
    ),
    "K = E": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(7 + rank, 2 * ep, 2 * ep, g), ep, network="swiglu"
    ),
    "K > E": lambda ep: Batch("", ep, lambda rank, g: choices_of(7 + rank, ep, 2 * ep + 1, g), ep),
    "repeated ids": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: choices_of(8, 2 * ep, 1, g).expand(8, 4).contiguous(), ep, network="geglu"
    ),
    "some repeated ids": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(11, 2 * ep, 5, g), ep),
    "all experts of a token on one rank": lambda ep: Batch(
        "", 3 * ep, lambda rank, g: choices_on_one_rank(9, 3 * ep, 3, ep, g), ep
    ),
    "all tokens to one rank": lambda ep: Batch(
        "", 3 * ep, lambda rank, g: choices_on_one_rank(9, 3 * ep, 2, ep, g, ep - 1), ep
    ),
    "dropped pairs": lambda ep: Batch("", 2 * ep, lambda rank, g: distinct_choices(15, 2 * ep, 3, g), ep, capacity=3),
    "all pairs dropped": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(5, 2 * ep, 2, g), ep, capacity=0
    ),
    "ids of -1": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(16, 2 * ep, 2, g, -ep).clamp(min=-1), ep),
    "no id but -1": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(6, 0, 2, g, -1), ep),
    "no id but -1 on a rank": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(6, rank and ep, 2, g, -1), ep),
    "ties": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(9, 2 * ep, 3, g), ep, weights=lambda w: torch.full_like(w, 0.5)
    ),
    "weights of zero": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(9, 2 * ep, 3, g), ep, weights=lambda w: torch.where(w > 0, w, 0.0)
    ),
    "no weight but zero": lambda ep: Batch(
        "", 2 * ep, lambda rank, g: distinct_choices(9, 2 * ep, 3, g), ep, weights=torch.zeros_like
    ),
    "one expert a rank": lambda ep: Batch("", ep, lambda rank, g: distinct_choices(9, ep, 2, g), ep),
    "one choice": lambda ep: Batch("", 3 * ep, lambda rank, g: distinct_choices(9, 3 * ep, 1, g), ep),
    "no choice": lambda ep: Batch("", 2 * ep, lambda rank, g: distinct_choices(4, 2 * ep, 0, g), ep),
    "not contiguous": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(9, 2 * ep, 3, g, -1), ep, strided=True),
    "modules": lambda ep: Batch("", 2 * ep, lambda rank, g: choices_of(9, 2 * ep, 3, g, -1), ep, network="custom"),
}
WAYS = [(2, 2, 1, "direct"), (4, 2, 2, "direct"), (4, 4, 1, "1dh"), (4, 4, 1, "2dh"), (2, 1, 2, "direct")]
WAYS += [(8, 8, 1, "1dh"), (8, 8, 1, "2dh")]


def check_edge_cases(rank: int, world: int, names: list[str], ep: int, esp: int, dispatch: str) -> None:
    topology = topology_of(ep, esp)
    for seed, name in enumerate(names):
        batch = replace(UGLY[name](ep), name=name, esp=esp, dispatch=dispatch, seed=seed)
        if esp > 1 and batch.network == "custom":
            continue
        check(batch, rank, topology)
        if "-1" in name:
            given, found = tokens_of(batch, rank), travel(batch, rank, topology, (2, 2))
            alone_S = (given.expert_SK < 0).all(1)
            assert not found.y[alone_S].any() and not found.dx[alone_S].any()
            assert not found.dweight[given.expert_SK < 0].any()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "ep", "esp", "dispatch", "names"),
    [(*WAYS[0], list(UGLY)[::2]), *slowly(*((*way, list(UGLY)) for way in WAYS))],
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) else str(value),
)
def test_edge_cases_equal_definition(
    cluster: Cluster, world: int, ep: int, esp: int, dispatch: str, names: list[str]
) -> None:
    cluster.run(world, check_edge_cases, names, ep, esp, dispatch, timeout_s=250)


def check_summation_order(rank: int, world: int, ep: int, esp: int, dispatch: str) -> None:
    """Each product of two numbers is rounded once in every order, so differing bits reveal the summation order."""
    topology = topology_of(ep, esp)
    one_number = Batch(
        "sums", 4 * ep, lambda rank, g: choices_of(23 + 9 * rank, 4 * ep, 7, g, -1), ep, esp, dispatch, "relu",
        M=1, H=esp, weights=lambda w: w * 10 ** (8 * w.sin()),
    )  # fmt: skip
    modules = replace(one_number, network="custom", M=6)
    cases: list[tuple[Batch, tuple[tuple[int, int] | None, ...]]] = [(one_number, (*DEGREES, (7, 3), (1, 9)))]
    if esp == 1:  # modules are not split
        cases.append((modules, (None, (1, 1), (2, 2), (5, 5))))
    for batch, all_degrees in cases:
        plain, *others = (travel(batch, rank, topology, degrees) for degrees in all_degrees)
        assert len(plain.y) == 23 + 9 * rank and plain.y.any()
        for degrees, found in zip(all_degrees[1:], others, strict=True):
            for name in ("y", "dx", "dweight"):
                assert torch.equal(getattr(found, name), getattr(plain, name)), (batch.network, degrees, name)


@pytest.mark.parametrize(
    ("world", "ep", "esp", "dispatch"),
    [pytest.param(*way, marks=() if way == WAYS[0] else pytest.mark.slow) for way in WAYS],
    ids=str,
)
def test_summation_order_is_independent_of_plan(cluster: Cluster, world: int, ep: int, esp: int, dispatch: str) -> None:
    cluster.run(world, check_summation_order, ep, esp, dispatch)


def count_rows_leaving(rank: int, world: int, batch: Batch) -> tuple[list[Wire], Wire]:
    """Count the rows that leave this rank: by tokens without and with a plan, and by pairs."""
    topology, by_degrees = topology_of(batch.ep, batch.esp), []
    for degrees in (None, (2, 3)):
        with counted() as wire:
            travel(batch, rank, topology, degrees)
        by_degrees.append(wire)
    with counted() as of_pairs:
        travel_by_pairs(batch, rank, topology)
    return by_degrees, of_pairs


def count_tokens_and_pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Count tokens and pairs of each rank for each rank of its experts' group, [world, ep]."""
    tokens, pairs = [], []
    for rank in range(batch.ep * batch.esp):
        rank_SK = tokens_of(batch, rank).expert_SK // (batch.experts // batch.ep)
        tokens.append([int((rank_SK == peer).any(1).sum()) for peer in range(batch.ep)])
        pairs.append([int((rank_SK == peer).sum()) for peer in range(batch.ep)])
    return torch.tensor(tokens), torch.tensor(pairs)


def count_rows_crossing(counts_WW: Tensor, own: int) -> int:
    """Count rows that leave a rank in two passes: dispatch sends in one direction what combine sends in the other."""
    sent, came = counts_WW[own].sum() - counts_WW[own, own], counts_WW[:, own].sum() - counts_WW[own, own]
    return 2 * int(sent + came)


def batch_of(ep: int, esp: int, dispatch: str, S: int, experts: int, K: int, M: int) -> Batch:
    return Batch(
        "bytes", experts, Distinct(S, experts, K), ep, esp, dispatch, network="swiglu", M=M, H=esp, dtype=torch.float32
    )


class Distinct:
    """Choices that can be pickled for other processes."""

    def __init__(self, S: int, experts: int, K: int) -> None:
        self.sizes = S, experts, K

    def __call__(self, rank: int, generator: torch.Generator) -> Tensor:
        return distinct_choices(*self.sizes, generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("W", "E", "K"),
    [(2, 128, 8), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((4, 128, 8), (2, 8, 2), (4, 16, 4)))],
    ids=str,
)
def test_sent_bytes_equal_formula(cluster: Cluster, W: int, E: int, K: int) -> None:
    """Rows of 1 KiB are within 3% of the formula, including metadata, narrow rows and 10 bytes per pair."""
    S = 1500
    expected = 4 * S * (W - 1) * (1 - comb(E - E // W, K) / comb(E, K))
    for width in (1024, 96):
        batch = batch_of(W, 1, "direct", S, E, K, width // 4)
        tokens_WW, pairs_WW = count_tokens_and_pairs(batch)
        for rank, (by_degrees, of_pairs) in enumerate(cluster.run(W, count_rows_leaving, batch)):
            rows, pairs = count_rows_crossing(tokens_WW, rank), count_rows_crossing(pairs_WW, rank)
            assert abs(rows / expected - 1) < 0.02 and rows <= pairs
            # Forward sends a 2-byte packed expert assignment and a 4-byte weight per pair; backward returns the
            # weight's gradient.
            left, came = (counts - pairs_WW[rank, rank] for counts in (pairs_WW[rank].sum(), pairs_WW[:, rank].sum()))
            for wire in by_degrees:
                assert sum(wire.of_width(width).values()) == rows
                beside = wire.bytes - rows * width
                assert beside == 6 * left + 4 * came
                if width >= 1024:
                    assert abs(wire.bytes / (expected * width) - 1) < 0.03
            assert sum(of_pairs.of_width(width).values()) == pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dispatch"),
    [(4, "2dh"), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((4, "1dh"), (8, "2dh"), (8, "1dh")))],
    ids=str,
)
def test_token_is_sent_once_per_node(cluster: Cluster, world: int, dispatch: str) -> None:
    """Count the rows between and inside nodes; rows of 1 KiB are within 3% of the formula, including metadata."""
    M, experts, places = 256, 32, world // 2
    batch = batch_of(world, 1, dispatch, 400, experts, 8, M)
    tokens_WW, _ = count_tokens_and_pairs(batch)
    node_WSK = [tokens_of(batch, rank).expert_SK // (experts // 2) for rank in range(world)]
    nodes_WN = torch.tensor([[int((node_SK == node).any(1).sum()) for node in range(2)] for node_SK in node_WSK])
    for rank, (by_degrees, _) in enumerate(cluster.run(world, count_rows_leaving, batch)):
        node, place = divmod(rank, places)
        # The ranks whose tokens this rank forwards to other nodes: its own, or all ranks that it leads.
        mine = [] if dispatch == "1dh" and place else range(places) if dispatch == "1dh" else [place]
        own, others = ([n * places + peer for peer in mine] for n in (node, 1 - node))
        across = 2 * int(nodes_WN[own, 1 - node].sum() + nodes_WN[others, node].sum())
        # They are forwarded to the other ranks of this node; other ranks send this one the tokens that they received
        # from other nodes.
        held, here = [*own, *others], torch.arange(world) // places == node
        here[rank] = False
        inside = int(tokens_WW[held][:, here].sum() + tokens_WW[:, rank].sum() - tokens_WW[held, rank].sum())
        if dispatch == "1dh":  # the leader also receives the tokens to forward, and returns their results
            inside += int(nodes_WN[rank].sum() if place else nodes_WN[here].sum())
        for wire in by_degrees:
            rows = wire.of_width(4 * M)
            assert rows.get("ep across nodes", 0) == across and rows["ep in node"] == 2 * inside
            crossed = sum(width * count for (axis, width), count in wire.rows.items() if axis == "ep across nodes")
            assert crossed <= 1.03 * across * 4 * M


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "esp", "dispatch"),
    [(4, 1, "2dh"), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((4, 1, "1dh"), (4, 2, "direct")))],
    ids=str,
)
def test_rows_never_exceed_pairs(cluster: Cluster, world: int, esp: int, dispatch: str) -> None:
    """Rows never exceed pairs in each group: tokens between nodes, inside nodes, and for all shards."""
    width, ep = 96, world // esp
    batch = batch_of(ep, esp, dispatch, 300, 16, 4, width // 4)
    tokens_WW, _ = count_tokens_and_pairs(batch)
    for rank, (by_degrees, of_pairs) in enumerate(cluster.run(world, count_rows_leaving, batch)):
        most = of_pairs.of_width(width)
        for wire in by_degrees:
            rows = wire.of_width(width)
            assert rows.keys() == most.keys() and all(rows[axis] <= most[axis] for axis in most), (rows, most)
            if esp > 1:
                own, shard = divmod(rank, esp)
                came = tokens_WW[:, own].view(ep, esp).sum(0)  # by shard
                assert rows["ep"] == count_rows_crossing(tokens_WW[shard::esp], own)
                # Each pass gathers this shard's received rows, and scatters the sums of the other shards' rows.
                assert rows["esp"] == 2 * int(came[shard] * (esp - 1) + came.sum() - came[shard])
