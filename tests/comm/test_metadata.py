"""The metadata exchange: message columns, refused messages, and the results on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import MAX_DATA_BYTES
from fusedmoe.comm.exchange import _find_foreign_sender, _make_messages, exchange_metadata
from fusedmoe.comm.metadata import ExpertCalls, Metadata, NonFiniteCount, RowForm, TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from tests.cluster import Cluster

FORM = RowForm(torch.float32, 16, 2, torch.bfloat16)
COUNTS_PE, TOKENS_Pp = torch.tensor([[1, 2], [0, 4]]), torch.tensor([[2], [3]])


def test_metadata_message_has_documented_columns() -> None:
    own = Metadata(*FORM.columns(), rank=5, expert_calls=ExpertCalls.CHUNKS, weights_require_grad=False)
    message_PC = _make_messages(COUNTS_PE, TOKENS_Pp, own, NonFiniteCount(torch.tensor(3, dtype=torch.int32), "a text"))
    assert message_PC.dtype == torch.int64
    for row, pairs, tokens in zip(message_PC.tolist(), COUNTS_PE.tolist(), TOKENS_Pp.tolist(), strict=True):
        assert row[:2] == pairs and row[2:3] == tokens and 2 * row[3] == sum(row)
        assert Metadata(*row[4:]) == own._replace(num_tokens=5, num_pairs=7, num_nonfinite=3)


def undetected_changes(rank: int, world: int) -> list[str]:
    """Return the single changes that pass unnoticed: the column and the difference."""
    topology, passed = Topology.from_sizes(world), []
    own = Metadata(*FORM.columns(), rank=0)
    table_QPC = _make_messages(COUNTS_PE[:1].repeat(world, 1), TOKENS_Pp[:1].repeat(world, 1), own, None)[None].numpy()
    fields = len(Metadata._fields)
    rank_column = table_QPC.shape[-1] - fields + Metadata._fields.index("rank")
    table_QPC[..., rank_column] += np.arange(world)
    table_QPC[..., -fields - 1] += np.arange(world)

    def sender(messages: np.ndarray) -> int | None:
        received = Metadata(*messages[..., -fields:].transpose(2, 0, 1))
        return _find_foreign_sender(messages, received, 2, topology.ep, topology.esp)

    assert sender(table_QPC) is None
    for column in range(table_QPC.shape[-1]):
        for change in (-1, 1, 2**40, -(2**62)):
            changed = table_QPC.copy()
            changed[0, 1, column] += change
            if sender(changed) != 1:
                passed.append(f"column {column}, {change}")
    # Messages of another operation with a right checksum: all zeros (rank 0 without pairs); and an unknown dtype.
    zeros, dtype = table_QPC.copy(), table_QPC.copy()
    zeros[0, 0] = 0
    for offset in (fields, fields + 1):
        dtype[0, 1, -offset] += 50
    if sender(zeros) != 0 or sender(dtype) != 1:
        passed.append("another operation's message")
    return passed


def test_message_with_any_changed_number_is_rejected(cluster: Cluster) -> None:
    assert cluster.run(2, undetected_changes) == [[], []]


def run_metadata_exchange(rank: int, world: int, experts: int) -> dict[str, Any]:
    """Rank r sends r + 1 pairs for each expert, two for each of its tokens."""
    topology = Topology.from_sizes(world)
    counts_E = torch.full((experts,), 2 * (rank + 1))
    exchange = exchange_metadata(
        make_all_to_all("direct", topology),
        topology.esp,
        counts_E,
        FORM,
        tokens=TokenCounts(counts_E.view(world, -1).sum(1) // 2),
        tokens_require_grad=rank == 1,
        weights_require_grad=False,
    )
    with pytest.raises(TypeError, match="is_known"):
        exchange_metadata(make_all_to_all("direct", topology), topology.esp, counts_E, FORM, is_known=True)
    agreed = (
        "form",
        "max_pairs",
        "tokens_per_pair",
        "needs_module_calls",
        "tokens_require_grad",
        "weights_require_grad",
    )
    sizes = {"pairs": exchange.counts_RE.tolist(), "sent": exchange.num_sent, "received": exchange.num_received}
    return {name: getattr(exchange, name) for name in agreed} | sizes


@pytest.mark.parametrize("experts", [4, 400])
def test_metadata_exchange_returns_counts_of_all_ranks(cluster: Cluster, experts: int) -> None:
    """The compared envelopes carry short messages; an all-to-all carries long ones."""
    local = experts // 2
    assert (8 * (experts + 16) > MAX_DATA_BYTES) == (experts == 400)
    for rank, found in enumerate(cluster.run(2, run_metadata_exchange, experts)):
        assert found == {
            "form": FORM,
            "max_pairs": 4 * experts,
            "tokens_per_pair": 0.5,
            "needs_module_calls": False,
            "tokens_require_grad": True,
            "weights_require_grad": False,
            "pairs": [[2] * local, [4] * local],
            "sent": (rank + 1) * experts,
            "received": 3 * local,
        }


def exchange_different_expert_calls(rank: int, world: int) -> tuple[bool, str]:
    topology = Topology.from_sizes(world)
    given = make_all_to_all("direct", topology), topology.esp, torch.ones(4, dtype=torch.long), FORM
    calls = ExpertCalls.MODULE if rank else ExpertCalls.EITHER
    needs_module_calls = exchange_metadata(*given, expert_calls=calls).needs_module_calls
    with pytest.raises(RankError) as caught:
        exchange_metadata(*given, expert_calls=ExpertCalls.MODULE if rank else ExpertCalls.CHUNKS)
    return needs_module_calls, str(caught.value)


def test_unequal_expert_call_abilities_are_reported(cluster: Cluster) -> None:
    for rank, (needs_module_calls, text) in enumerate(cluster.run(2, exchange_different_expert_calls)):
        assert needs_module_calls
        assert text.startswith(
            f"rank {rank}: the check of the layer's input: rank 1 calls its experts as a module, and"
        )
        assert "rank 0 in chunks" in text
