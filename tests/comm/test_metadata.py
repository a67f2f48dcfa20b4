"""The metadata exchange: the columns of its message, which message is refused, and what all ranks have afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import ROOM
from fusedmoe.comm.exchange import _foreign_sender, _message, exchange_metadata
from fusedmoe.comm.metadata import ExpertCalls, Metadata, NonFinite, RowForm, TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from tests.cluster import Cluster

FORM = RowForm(torch.float32, 16, 2, torch.bfloat16)
COUNTS_PE, TOKENS_Pp = torch.tensor([[1, 2], [0, 4]]), torch.tensor([[2], [3]])


def test_the_message_has_the_documented_columns() -> None:
    own = Metadata(*FORM.columns(), rank=5, expert_calls=ExpertCalls.CHUNKS, weights_require_grad=False)
    message_PC = _message(COUNTS_PE, TOKENS_Pp, own, NonFinite(torch.tensor(3, dtype=torch.int32), "a text"))
    assert message_PC.dtype == torch.int64
    for row, pairs, tokens in zip(message_PC.tolist(), COUNTS_PE.tolist(), TOKENS_Pp.tolist(), strict=True):
        assert row[:2] == pairs and row[2:3] == tokens and 2 * row[3] == sum(row)
        assert Metadata(*row[4:]) == own._replace(num_tokens=5, num_pairs=7, num_nonfinite=3)


def refused(rank: int, world: int) -> list[str]:
    """What passes though a number of a message was changed: the column, and by how much."""
    topology, passed = Topology.from_sizes(world), []
    own = Metadata(*FORM.columns(), rank=0)
    table_QPC = _message(COUNTS_PE[:1].repeat(world, 1), TOKENS_Pp[:1].repeat(world, 1), own, None)[None].numpy()
    fields = len(Metadata._fields)
    rank_column = table_QPC.shape[-1] - fields + Metadata._fields.index("rank")
    table_QPC[..., rank_column] += np.arange(world)
    table_QPC[..., -fields - 1] += np.arange(world)

    def sender(messages: np.ndarray) -> int | None:
        received = Metadata(*messages[..., -fields:].transpose(2, 0, 1))
        return _foreign_sender(messages, received, 2, topology.ep, topology.esp)

    assert sender(table_QPC) is None
    for column in range(table_QPC.shape[-1]):
        for change in (-1, 1, 2**40, -(2**62)):
            changed = table_QPC.copy()
            changed[0, 1, column] += change
            if sender(changed) != 1:
                passed.append(f"column {column}, {change}")
    # Messages of another operation whose checksum is right: all zeros, which are a message of rank 0 without pairs, and
    # a dtype that does not exist.
    zeros, dtype = table_QPC.copy(), table_QPC.copy()
    zeros[0, 0] = 0
    for offset in (fields, fields + 1):
        dtype[0, 1, -offset] += 50
    if sender(zeros) != 0 or sender(dtype) != 1:
        passed.append("another operation's message")
    return passed


def test_a_message_with_any_number_changed_is_refused(cluster: Cluster) -> None:
    assert cluster.run(2, refused) == [[], []]


def exchanged(rank: int, world: int, experts: int) -> dict[str, Any]:
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
    agreed = ("form", "most_pairs", "share", "as_module", "tokens_require_grad", "weights_require_grad")
    sizes = {"pairs": exchange.counts_RE.tolist(), "sent": exchange.sent, "received": exchange.received}
    return {name: getattr(exchange, name) for name in agreed} | sizes


@pytest.mark.parametrize("experts", [4, 400])
def test_what_the_ranks_have_afterwards(cluster: Cluster, experts: int) -> None:
    """Few numbers are carried by the envelopes that ranks compare, many by an all-to-all."""
    local = experts // 2
    assert (8 * (experts + 16) > ROOM) == (experts == 400)
    for rank, found in enumerate(cluster.run(2, exchanged, experts)):
        assert found == {
            "form": FORM,
            "most_pairs": 4 * experts,
            "share": 0.5,
            "as_module": False,
            "tokens_require_grad": True,
            "weights_require_grad": False,
            "pairs": [[2] * local, [4] * local],
            "sent": (rank + 1) * experts,
            "received": 3 * local,
        }


def other_abilities(rank: int, world: int) -> tuple[bool, str]:
    topology = Topology.from_sizes(world)
    given = make_all_to_all("direct", topology), topology.esp, torch.ones(4, dtype=torch.long), FORM
    calls = ExpertCalls.MODULE if rank else ExpertCalls.EITHER
    as_module = exchange_metadata(*given, expert_calls=calls).as_module
    with pytest.raises(RankError) as caught:
        exchange_metadata(*given, expert_calls=ExpertCalls.MODULE if rank else ExpertCalls.CHUNKS)
    return as_module, str(caught.value)


def test_abilities_to_call_experts(cluster: Cluster) -> None:
    for rank, (as_module, text) in enumerate(cluster.run(2, other_abilities)):
        assert as_module
        assert text.startswith(
            f"rank {rank}: the check of the layer's input: rank 1 calls its experts as a module, and"
        )
        assert "rank 0 chunk by chunk" in text
