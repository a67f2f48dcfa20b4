"""Ranks with different row forms: every rank raises before rows are sent, on every path to an exchange."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedmoe import autograd
from fusedmoe.autograd.order import take_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import Metadata, RowForm, describe_difference
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.errors import RankError
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.schedule import Schedule
from fusedmoe.layers.scheduled_exchange import ExternalExperts, ScheduledExchange
from tests.cluster import Cluster
from tests.marks import slowly

E, M, K = 12, 6, 2
DIFFERENCES = {"width": "widths", "dtype": "dtypes", "weights": "dtypes of router weights", "k": r"\(K\)"}
PATHS = ["operators", "exchange", "plan", "graph", "graph_with_plan", "rows"]


class Weighted(nn.Module):
    """Experts for rows of any width: a row times the sum of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        layout = layout.exact()
        rows = autograd.permute(x_SM, layout) * self.scale.to(x_SM.dtype)
        if weight_N is not None:
            rows = rows * weight_N[: layout.rows, None].to(rows.dtype)
        return autograd.unpermute(rows, layout)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        return AutogradExperts(self, tuple(self.parameters()), self)


def batch(different: str) -> tuple[Tensor, Tensor, Layout]:
    """Draw tokens, weights and layout."""
    width, k = M + (different == "width"), K + (different == "k")
    x_SM = torch.randn(9, width, dtype=torch.float32 if different == "dtype" else torch.float64)
    weight_SK, expert_SK = torch.rand(9, E, dtype=torch.float64).topk(k)
    return x_SM, weight_SK.float() if different == "weights" else weight_SK, autograd.order(expert_SK, E)


def make_exchange(topology: Topology, path: str) -> Any:
    """Return a function that sends a batch."""
    all_to_all = make_all_to_all("direct", topology)
    if path in ("operators", "rows"):
        dispatcher = Collectives(topology, all_to_all)
        experts = Weighted()

        def send(x_SM: Tensor, weight_SK: Tensor, layout: Layout) -> Tensor:
            if path == "operators":
                return dispatcher.run_by_operators(Routed(x_SM, layout, weight_SK), experts)
            form = RowForm.of(x_SM, layout, weight_SK)
            exchange = exchange_metadata(all_to_all, topology.esp, layout.counts_E, form)
            assert exchange.form == form
            rows, weight_N = autograd.permute(x_SM, layout), take_pairs(weight_SK, layout)
            return autograd.unpermute(autograd.through_experts(rows, weight_N, exchange, experts), layout)

        return send
    schedule = Schedule("fsmoe", degrees=(2, 2)) if path.endswith("plan") else "off"
    exchange = ScheduledExchange(topology, ExternalExperts(Weighted(), E, (M, 1), False), schedule, "a test")
    if not path.startswith("graph"):
        return lambda x_SM, weight_SK, layout: exchange.through_experts(x_SM, layout, weight_SK)

    def in_graph(x_SM: Tensor, weight_SK: Tensor, layout: Layout) -> Tensor:
        return exchange.run_in_graph(Routed(x_SM, layout, weight_SK), None)

    return in_graph


def send_unequal_rows(rank: int, world: int, ep: int, culprit: int, path: str, differences: list[str]) -> list[str]:
    """Return the error texts. Later, equal batches work."""
    topology = Topology.from_sizes(ep, world // ep, timeout_s=20)
    send, texts = make_exchange(topology, path), []
    for different in differences:
        torch.manual_seed(rank)
        with pytest.raises(RankError) as caught:
            send(*batch(different if rank == culprit else ""))
        assert caught.value.agreed
        texts.append(str(caught.value))
        assert send(*batch("")).isfinite().all()
    return texts


def require_rejection(cluster: Cluster, world: int, ep: int, path: str) -> None:
    culprit = random.randrange(world)
    for rank, texts in enumerate(
        cluster.run(world, send_unequal_rows, ep, culprit, path, list(DIFFERENCES), timeout_s=60.0)
    ):
        for text, name in zip(texts, DIFFERENCES.values(), strict=True):
            found = rf"rows of different .*{name} cannot be exchanged: "
            if world == 2:  # with two ranks the culprit is undetermined
                found = f"^rank {rank}: the check of the layer's input: {found}.* on rank 0, .* on rank 1"
            elif rank == culprit:
                found = f"^rank {rank}: the check of the layer's input: {found}"
            else:
                found = f"^rank {rank}: ended because rank {culprit} failed in the check of the layer's input: {found}"
            assert re.search(found, text), (found, text)


@pytest.mark.parametrize("path", [PATHS[0], PATHS[4], *slowly(*PATHS[1:4], PATHS[5])])
def test_unequal_row_forms_raise_on_two_ranks(cluster: Cluster, path: str) -> None:
    require_rejection(cluster, 2, 2, path)


@pytest.mark.parametrize("path", [PATHS[2], *slowly(*(path for path in PATHS if path != PATHS[2]))])
def test_unequal_row_form_error_names_differing_rank(cluster: Cluster, path: str) -> None:
    require_rejection(cluster, 3, 3, path)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ep", [1, 2])
def test_unequal_row_forms_raise_on_expert_shards(cluster: Cluster, path: str, ep: int) -> None:
    require_rejection(cluster, 4, ep, path)


def test_row_form_columns_round_trip_and_refusals() -> None:
    forms = [
        RowForm(torch.float64, 0, 0, None),
        RowForm(torch.bfloat16, 2**40, 2**16, torch.bfloat16),
        RowForm(torch.float16, 4096, 8, torch.float32),
    ]
    for form in forms:
        assert form.refusal() == "" and RowForm.of_columns(*form.columns()) == form
        assert Metadata(*form.columns(), rank=0)[: len(form)] == form.columns()
    assert len({form.columns() for form in forms}) == 3
    assert "torch.int32" in RowForm(torch.int32, 1, 1, None).refusal()
    assert "torch.int8" in RowForm(torch.float32, 1, 1, torch.int8).refusal()


def test_describe_difference_names_minority_rank() -> None:
    one, other, third = (RowForm(torch.float32, width, 2, None) for width in (8, 9, 10))
    assert describe_difference({0: one, 1: other})[1] is None
    assert describe_difference({0: one, 1: one, 2: other, 3: other})[1] is None
    text, odd = describe_difference({0: one, 3: one, 5: other})
    assert odd == 5 and "8 on ranks [0, 3], 9 on rank 5" in text
    assert describe_difference({0: one, 1: other, 2: third})[1] is None
