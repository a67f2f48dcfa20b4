"""All-to-all algorithms: direct, and two that send less across nodes in fewer, larger messages.

All of them move the same rows to the same ranks, bit for bit; they differ in which ranks carry them. A row is
mostly a token, which a rank sends once to each rank with experts for it; so it crosses to a node once for each of them.

- `direct`: every rank sends to every rank.
- `1dh` (Hetu): the ranks of a node gather their rows at a leader, the leaders exchange, each leader scatters.
- `2dh` (Tutel, DeepSpeed): ranks of a node first exchange rows by the destination's place in its node, then ranks of
  equal place exchange across nodes. W ranks on nodes of L send messages L times as large, to W/L peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_rows, all_to_all_rows, device_of
from fusedmoe.comm.failure.blame import other_operation
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError

ALGORITHMS = ("direct", "1dh", "2dh")


@dataclass(frozen=True, eq=False)
class Traffic:
    """Rows that travel: to and from each rank; and for two-level algorithms between [source, destination]."""

    send: list[int]
    recv: list[int]
    pairs_WW: np.ndarray | None = None

    def back(self) -> Traffic:
        """Returns the traffic of the same rows on their way home."""
        return Traffic(self.recv, self.send, None if self.pairs_WW is None else self.pairs_WW.T)


@dataclass(frozen=True, eq=False)
class AllToAll:
    """An algorithm that moves rows between the ranks of one group."""

    group: Group

    @property
    def identity(self) -> str:
        """Name and process groups: a compiled graph of one algorithm serves others of the same identity."""
        raise NotImplementedError

    def traffic(self, send: list[int], recv: list[int]) -> Traffic:
        """Completes the rows that this rank sends and receives by those between all pairs of ranks. Collective."""
        group, operation = self.group, "exchange of counts"
        row = torch.tensor(send, device=device_of(group)).view(1, -1)
        pairs_WW = all_gather_rows(group, row, [1] * group.size, operation).cpu().numpy()
        for rank, sent_W, received in zip(group.ranks, pairs_WW, recv, strict=True):
            if sent_W[group.index] != received or (sent_W < 0).any():
                raise other_operation(group.board, operation, f"the {group}", rank)
        return Traffic(send, recv, pairs_WW)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        """Moves [sum(send), ...], ordered by destination, to [sum(recv), ...], ordered by source. Collective.

        The ranks have compared what they call (`collectives.begin`).
        """
        raise NotImplementedError


def make_all_to_all(name: str, topology: Topology) -> AllToAll:
    """Makes the algorithm of that name over the topology's expert-parallel group. Collective for two-level algorithms.

    Raises:
        ConfigError: unknown name, or a group that does not cover its nodes evenly.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown dispatch algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")
    group = topology.ep
    if name == "direct":
        return Direct(group)
    # The ep groups of all ranks are checked, so that every rank refuses if one must.
    groups = [group.ranks] if topology.expert_grid is None else topology.expert_grid.transpose(1, 2).flatten(0, 1)
    for ranks in (tuple(int(rank) for rank in each) for each in groups):
        nodes = _by_node(ranks, topology.ranks_per_node)
        if len({len(node) for node in nodes}) > 1 or [rank for node in nodes for rank in node] != list(ranks):
            raise ConfigError(
                f"dispatch={name!r} needs the same number of ranks of each ep group on every node, in order, but nodes "
                f"of {topology.ranks_per_node} ranks hold {nodes}. Use dispatch='direct' or another ranks_per_node."
            )
    # Subgroups are made by their members only, and pooled: layers of one topology share them.
    grid = _by_node(group.ranks, topology.ranks_per_node)
    node, place = divmod(group.index, len(grid[0]))
    inside = topology.subgroup("ep in node", tuple(grid[node]))
    # With 1dh only leaders talk across nodes.
    talks = name == "2dh" or place == 0
    across = topology.subgroup("ep across nodes", tuple(ranks[place] for ranks in grid)) if talks else None
    if name == "1dh":
        return OneLeader(group, inside, across, len(grid))
    assert across is not None
    return TwoLevel(group, inside, across)


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


class Direct(AllToAll):
    """The algorithm of one collective over the whole group."""

    @property
    def identity(self) -> str:
        return f"direct over {self.group.identity}"

    def traffic(self, send: list[int], recv: list[int]) -> Traffic:
        return Traffic(send, recv)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        return all_to_all_rows(self.group, rows, traffic.send, traffic.recv, operation, agreed=True)


@dataclass(frozen=True, eq=False)
class OneLeader(AllToAll):
    """The 1DH algorithm: gather at the node's leader, exchange between leaders, scatter."""

    # The ranks of this node, the leader first; the leaders of all nodes, None on ranks that are none.
    inside: Group
    leaders: Group | None
    nodes: int

    @property
    def identity(self) -> str:
        leaders = "" if self.leaders is None else f", {self.leaders.identity}"
        return f"1dh over {self.group.identity}, {self.inside.identity}{leaders}, {self.nodes} nodes"

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert traffic.pairs_WW is not None
        places = self.inside.size
        # Rows by source node n, source place p, destination node N, destination place P.
        rows_npNP = traffic.pairs_WW.reshape(self.nodes, places, self.nodes, places)
        node, place = divmod(self.group.index, places)
        out_pNP, in_npP, scatter = rows_npNP[node], rows_npNP[:, :, node], [0] * places
        gathered = scatter if self.leaders is None else out_pNP.sum((1, 2)).tolist()
        rows = all_to_all_rows(self.inside, rows, _only(0, len(rows), places), gathered, operation, agreed=True)
        if self.leaders is not None:
            # The leader holds rows by (source place, destination); leaders exchange them by destination node; what came
            # from each node is by (source place, destination place), and goes out by destination place.
            rows = regroup(rows, out_pNP, (1, 0, 2))
            send, recv = out_pNP.sum((0, 2)).tolist(), in_npP.sum((1, 2)).tolist()
            rows = all_to_all_rows(self.leaders, rows, send, recv, operation, agreed=True)
            rows = regroup(rows, in_npP, (2, 0, 1))
            scatter = in_npP.sum((0, 1)).tolist()
        home = _only(0, int(rows_npNP[:, :, node, place].sum()), places)
        return all_to_all_rows(self.inside, rows, scatter, home, operation, agreed=True)


@dataclass(frozen=True, eq=False)
class TwoLevel(AllToAll):
    """The 2DH algorithm: exchange inside the node by the destination's place in its own, then across nodes."""

    inside: Group
    # The ranks of this rank's place on each node.
    across: Group

    @property
    def identity(self) -> str:
        return f"2dh over {self.group.identity}, {self.inside.identity}, {self.across.identity}"

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert traffic.pairs_WW is not None
        nodes, places = self.across.size, self.inside.size
        rows_npNP = traffic.pairs_WW.reshape(nodes, places, nodes, places)
        node, place = divmod(self.group.index, places)
        # After the first exchange this rank holds rows of all places of its node for its own place on every node.
        own_NP, held_pN = rows_npNP[node, place], rows_npNP[node, :, :, place]
        rows = regroup(rows, own_NP, (1, 0))
        rows = all_to_all_rows(self.inside, rows, own_NP.sum(0).tolist(), held_pN.sum(1).tolist(), operation, True)
        rows = regroup(rows, held_pN, (1, 0))
        send, recv = held_pN.sum(0).tolist(), rows_npNP[:, :, node, place].sum(1).tolist()
        return all_to_all_rows(self.across, rows, send, recv, operation, agreed=True)


def _only(index: int, count: int, size: int) -> list[int]:
    return [count if i == index else 0 for i in range(size)]


def regroup(rows: Tensor, sizes: np.ndarray, axes: tuple[int, ...]) -> Tensor:
    """Reorders blocks of sizes[i, j, …] rows, the last index fastest, as `transpose(axes)` reorders an array's entries.

    With sizes [[1, 2], [0, 1]] and axes (1, 0), rows a|bb||c become a||bb|c.
    """
    # Where each block starts, then the same in the new order; a row's source is its block's start plus its place there.
    start = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    start, size = start.reshape(sizes.shape).transpose(axes).reshape(-1), sizes.transpose(axes).reshape(-1)
    offset = np.cumsum(size) - size
    index = np.repeat(start - offset, size) + np.arange(size.sum())
    return rows.index_select(0, torch.from_numpy(index).to(rows.device))
