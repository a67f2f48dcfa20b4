"""All-to-all algorithms: direct, and two hierarchical ones that send fewer and larger messages between nodes.

- `direct`: every rank sends to every rank.
- `2dh` (Tutel, DeepSpeed): ranks with equal local ranks exchange across nodes, then forward inside the node.
- `1dh` (Hetu): the ranks of a node gather their rows at a leader; leaders exchange, and each scatters in its node.

Rows of rank 0 for ranks 0 to 3 on two nodes of two ranks, 2dh:

    rank 0   a b | c d        across: a b stay, c d are sent to rank 2, which has rank 0's index in its node
    rank 2   c d              inside: c stays, d is sent to rank 3

A token for several ranks of a node is sent to that node once (`comm/forwarding.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_rows, all_to_all_rows, device_of
from fusedmoe.comm.failure.blame import foreign_data_error
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.comm.wire_format import WireFormat
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.deduplicate import SentTokens, deduplicate_tokens
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.layout import Layout
from fusedmoe.names import ALGORITHMS


@dataclass(frozen=True, eq=False)
class Traffic:
    """Row counts of one all-to-all: sent to each rank (direct) or node (two levels), received from each rank."""

    send: list[int]
    recv: list[int]


class AllToAll:
    """All-to-all over the ranks of `group`.

    `wire`: format in which callers encode rows of tokens before they exchange them; None: the tensors' own dtype.
    """

    group: Group
    wire: WireFormat | None = None

    @property
    def identity(self) -> str:
        """Algorithm, process groups and format. Algorithms with equal identities can share a compiled graph."""
        raise NotImplementedError

    def select_tokens(self, layout: Layout, forwards: bool) -> tuple[SentTokens, TokenCounts | None]:
        """Return the tokens to send to each rank, and their counts; None: one row per pair is sent.

        `forwards`: a two-level algorithm may send a token once per node, which forwards it.
        """
        sent = deduplicate_tokens(layout, self.group.size)
        return sent, None if sent.code_N is None else TokenCounts(sent.tokens.counts_E)

    def make_traffic(self, send: list[int], recv: list[int]) -> Traffic:
        """Return the traffic for these rows per rank. Collective for two-level algorithms."""
        raise NotImplementedError

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        """Send [sum(send), ...] ordered by destination; return [sum(recv), ...] ordered by source. Collective.

        Ranks must have compared their calls before (`collectives.compare_calls`).
        """
        raise NotImplementedError

    def exchange_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        """Send rows [sum(recv), ...] to their sources; return this rank's, [sum(send), ...]. Collective.

        Sums the rows of a token that was forwarded to several ranks of a node.
        """
        raise NotImplementedError


def make_all_to_all(name: str, topology: Topology, wire: WireFormat | None = None) -> AllToAll:
    """Return the named algorithm over the expert-parallel group. Collective for two-level algorithms.

    `wire`: format of the rows; None: the tensors' own dtype.

    Raises:
        ConfigError: unknown name, or nodes with unequal numbers of the group's ranks.
    """
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown dispatch algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}, or auto, or pass an "
            "instance of a subclass of fusedmoe.Dispatcher"
        )
    group = topology.ep
    wire = wire and wire.for_group_sizes(group.size, topology.esp.size)
    if name == "direct":
        return DirectAllToAll(group, wire)
    # All ranks must raise if one does, so check all ep groups.
    groups = [group.ranks] if topology.expert_grid is None else topology.expert_grid.transpose(1, 2).flatten(0, 1)
    for ranks in (tuple(int(rank) for rank in each) for each in groups):
        nodes = _group_ranks_by_node(ranks, topology.ranks_per_node)
        if len({len(node) for node in nodes}) > 1 or [rank for node in nodes for rank in node] != list(ranks):
            raise ConfigError(
                f"dispatch={name!r} needs the same number of ranks of each ep group on every node, in order, but nodes "
                f"of {topology.ranks_per_node} ranks hold {nodes}. Use dispatch='direct' or another ranks_per_node."
            )
    grid = _group_ranks_by_node(group.ranks, topology.ranks_per_node)
    node, local_rank = divmod(group.index, len(grid[0]))
    intra_node_group = topology.subgroup("ep in node", tuple(grid[node]))
    inter_node_group = None
    if name == "2dh" or local_rank == 0:
        inter_node_group = topology.subgroup("ep across nodes", tuple(ranks[local_rank] for ranks in grid))
    return TwoLevelAllToAll(group, intra_node_group, inter_node_group, len(grid), name == "1dh", wire)


def _format_suffix(wire: WireFormat | None) -> str:
    return "" if wire is None else f" in {wire}"


def _group_ranks_by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


@dataclass(frozen=True, eq=False)
class DirectAllToAll(AllToAll):
    """A single all-to-all collective over the whole group."""

    group: Group
    wire: WireFormat | None = None

    @property
    def identity(self) -> str:
        return f"direct over {self.group.identity}{_format_suffix(self.wire)}"

    def make_traffic(self, send: list[int], recv: list[int]) -> Traffic:
        return Traffic(send, recv)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        return all_to_all_rows(self.group, rows, traffic.send, traffic.recv, operation, is_compared=True)

    def exchange_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        return all_to_all_rows(self.group, rows, traffic.recv, traffic.send, operation, is_compared=True)


@dataclass(frozen=True, eq=False)
class TwoLevelTraffic(Traffic):
    """Row counts of a two-level all-to-all, the same on all ranks except `forwarding_layout`.

    Attributes:
        nodes_npN: rows sent to node N by the rank with index p in node n.
        ranks_npNP: of these, rows delivered to the rank with index P in node N.
        forwarding_layout: sorts the rows received from other nodes by the local rank to which they are forwarded. None:
            each row has one destination.
    """

    nodes_npN: np.ndarray
    ranks_npNP: np.ndarray
    forwarding_layout: Layout | None = None


@dataclass(frozen=True, eq=False)
class TwoLevelAllToAll(AllToAll):
    """2DH and 1DH: send rows to their node, then forward them inside it.

    Attributes:
        intra_node_group: the group's ranks on this node.
        inter_node_group: one rank per node, with which this rank exchanges; None on ranks that are not leaders (1DH).
        has_leader: True for 1DH.
    """

    group: Group
    intra_node_group: Group
    inter_node_group: Group | None
    num_nodes: int
    has_leader: bool
    wire: WireFormat | None = None

    @property
    def name(self) -> str:
        return "1dh" if self.has_leader else "2dh"

    @property
    def identity(self) -> str:
        groups = (self.group, self.intra_node_group, self.inter_node_group)
        identities = ", ".join(group.identity for group in groups if group is not None)
        return f"{self.name} over {identities}, {self.num_nodes} nodes{_format_suffix(self.wire)}"

    def select_tokens(self, layout: Layout, forwards: bool) -> tuple[SentTokens, TokenCounts | None]:
        sent, tokens = super().select_tokens(layout, forwards)
        if tokens is None or not forwards:
            return sent, tokens
        by_node = deduplicate_tokens(sent.tokens, self.num_nodes)
        return sent._replace(tokens=by_node.tokens), tokens._replace(by_node=by_node)

    def make_traffic(self, send: list[int], recv: list[int]) -> TwoLevelTraffic:
        ranks_npNP = self.all_gather_counts(torch.tensor(send, device=device_of(self.group)), recv)
        nodes_npN = ranks_npNP.sum(3)
        node, local_rank = self._node_and_local_rank
        return TwoLevelTraffic(nodes_npN[node, local_rank].tolist(), recv, nodes_npN, ranks_npNP)

    def uniform_traffic(self, count: int) -> TwoLevelTraffic:
        """Return the traffic of `count` rows between each pair of ranks. No communication."""
        local_size, size = self.intra_node_group.size, self.group.size
        ranks_npNP = np.full((self.num_nodes, local_size, self.num_nodes, local_size), count)
        return TwoLevelTraffic([count * local_size] * self.num_nodes, [count] * size, ranks_npNP.sum(3), ranks_npNP)

    def all_gather_counts(self, send_W: Tensor, recv: list[int]) -> np.ndarray:
        """Return every rank's send counts as [n, p, N, P]. Collective.

        Args:
            send_W: this rank's counts; additional columns are appended to [n, p, N, P].
            recv: counts expected from each rank. A mismatch raises `RankError`.
        """
        group, operation = self.group, "exchange of counts"
        table = all_gather_rows(group, send_W.view(1, -1), [1] * group.size, operation).cpu().numpy()
        local_size = self.intra_node_group.size
        counts_npW = table.reshape(self.num_nodes, local_size, self.num_nodes, -1)
        node, local_rank = self._node_and_local_rank
        sent_W, rows = counts_npW[:, :, node, local_rank].reshape(-1), counts_npW.reshape(group.size, -1)
        for rank, sent, counts_N, expected in zip(group.ranks, sent_W, rows, recv, strict=True):
            if sent != expected or (counts_N < 0).any():
                raise foreign_data_error(group.board, operation, f"the {group}", rank)
        return counts_npW

    @property
    def _node_and_local_rank(self) -> tuple[int, int]:
        return divmod(self.group.index, self.intra_node_group.size)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert isinstance(traffic, TwoLevelTraffic)
        return self._forward_inside_node(self.send_across_nodes(rows, traffic.nodes_npN, operation), traffic, operation)

    def exchange_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert isinstance(traffic, TwoLevelTraffic)
        rows = self._return_rows_inside_node(rows, traffic, operation)
        out_pN, in_np = self._inter_node_counts(traffic.nodes_npN)
        if self.inter_node_group is not None:
            send, recv = in_np.sum(1).tolist(), out_pN.sum(0).tolist()
            rows = all_to_all_rows(self.inter_node_group, rows, send, recv, operation, is_compared=True)
        if not self.has_leader:
            return rows
        # The leader holds rows by (source node, local index).
        local_size, scatter = self.intra_node_group.size, [0] * self.intra_node_group.size
        if self.inter_node_group is not None:
            rows, scatter = transpose_blocks(rows, out_pN.T, (1, 0)), out_pN.sum(1).tolist()
        home = _send_counts_to_leader(sum(traffic.send), local_size)
        return all_to_all_rows(self.intra_node_group, rows, scatter, home, operation, is_compared=True)

    def send_across_nodes(self, rows: Tensor, nodes_npN: np.ndarray, operation: str) -> Tensor:
        """Send rows [n, ...], ordered by node; return the rows for this node, ordered by source rank. Collective.

        With 1dh only the leader receives rows.
        """
        out_pN, in_np = self._inter_node_counts(nodes_npN)
        if self.has_leader:
            local_size = self.intra_node_group.size
            gathered = [0] * local_size if self.inter_node_group is None else out_pN.sum(1).tolist()
            to_leader = _send_counts_to_leader(len(rows), local_size)
            rows = all_to_all_rows(self.intra_node_group, rows, to_leader, gathered, operation, is_compared=True)
            if self.inter_node_group is None:
                return rows
            rows = transpose_blocks(rows, out_pN, (1, 0))
        assert self.inter_node_group is not None
        send, recv = out_pN.sum(0).tolist(), in_np.sum(1).tolist()
        return all_to_all_rows(self.inter_node_group, rows, send, recv, operation, is_compared=True)

    def _inter_node_counts(self, nodes_npN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of rows sent by (local index, node), and received by (node, local index).

        With 2dh these are this rank's rows; with 1dh those of the whole node, on every rank, although only the leader
        sends them. Both include rows that stay on the node.

        Args:
            nodes_npN: rows sent to node N by the rank with local index p in node n.
        """
        (node, _), mine = self._node_and_local_rank, self.inter_node_local_ranks
        return nodes_npN[node, mine], nodes_npN[:, mine, node]

    @property
    def inter_node_local_ranks(self) -> slice:
        """Local indices whose rows this rank sends across nodes: its own with 2dh, all with 1dh."""
        local_rank = self._node_and_local_rank[1]
        return slice(None) if self.has_leader else slice(local_rank, local_rank + 1)

    def _forward_inside_node(self, rows: Tensor, traffic: TwoLevelTraffic, operation: str) -> Tensor:
        node, local_rank = self._node_and_local_rank
        if self.inter_node_group is not None:
            arrived_npP = traffic.ranks_npNP[:, self.inter_node_local_ranks, node]
            layout = traffic.forwarding_layout
            rows = transpose_blocks(rows, arrived_npP, (2, 0, 1)) if layout is None else permute(rows, layout)
        send, recv = self._intra_node_counts(traffic)
        rows = all_to_all_rows(self.intra_node_group, rows, send, recv, operation, is_compared=True)
        # The leader's rows are already ordered by rank; other ranks deliver the rows of one index on all nodes.
        return rows if self.has_leader else transpose_blocks(rows, traffic.ranks_npNP[:, :, node, local_rank].T, (1, 0))

    def _return_rows_inside_node(self, rows: Tensor, traffic: TwoLevelTraffic, operation: str) -> Tensor:
        node, local_rank = self._node_and_local_rank
        if not self.has_leader:
            rows = transpose_blocks(rows, traffic.ranks_npNP[:, :, node, local_rank], (1, 0))
        send, recv = self._intra_node_counts(traffic)
        rows = all_to_all_rows(self.intra_node_group, rows, recv, send, operation, is_compared=True)
        if self.inter_node_group is None:
            return rows
        if traffic.forwarding_layout is not None:
            if self.wire is not None and self.wire.encodes_results:
                return self.wire.sum_encoded(rows, traffic.forwarding_layout)
            return gather_sum(rows, traffic.forwarding_layout)
        return transpose_blocks(
            rows, traffic.ranks_npNP[:, self.inter_node_local_ranks, node].transpose(2, 0, 1), (1, 2, 0)
        )

    def _intra_node_counts(self, traffic: TwoLevelTraffic) -> tuple[list[int], list[int]]:
        (node, local_rank), local_size = self._node_and_local_rank, self.intra_node_group.size
        if self.has_leader:
            is_leader = self.inter_node_group is not None
            send = traffic.ranks_npNP[:, :, node].sum((0, 1)).tolist() if is_leader else [0] * local_size
            return send, _send_counts_to_leader(sum(traffic.recv), local_size)
        send_nP, recv_np = traffic.ranks_npNP[:, local_rank, node], traffic.ranks_npNP[:, :, node, local_rank]
        return send_nP.sum(0).tolist(), recv_np.sum(0).tolist()


def _send_counts_to_leader(count: int, size: int) -> list[int]:
    return [count] + [0] * (size - 1)


def chunk_size(counts: np.ndarray, part: int, degree: int) -> np.ndarray:
    """Return the number of rows in part i of r, which are rows ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋ of n."""
    return counts * (part + 1) // degree - counts * part // degree


def transpose_blocks(rows: Tensor, sizes: np.ndarray, permutation: tuple[int, ...]) -> Tensor:
    """Reorder blocks of sizes[i, j, …] rows as `transpose(permutation)` reorders array entries.

    With sizes [[1, 2], [0, 1]] and permutation (1, 0), rows a|bb||c become a||bb|c.
    """
    return rows.index_select(0, block_order(sizes, permutation, rows.device))


def block_order(sizes: np.ndarray, permutation: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row indices of `transpose_blocks`, [rows] int64. Does not synchronize with the device."""
    # A row's source is its block's start before the transpose plus its offset in the block.
    start = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    start, size = (
        start.reshape(sizes.shape).transpose(permutation).reshape(-1),
        sizes.transpose(permutation).reshape(-1),
    )
    offset, rows = np.cumsum(size) - size, int(size.sum())
    first, repeats = torch.from_numpy(np.stack([start - offset, size])).to(device)
    index = torch.arange(rows, device=device)
    return index.add_(torch.repeat_interleave(first, repeats, output_size=rows))
