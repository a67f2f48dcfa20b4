"""All-to-all algorithms: direct, and two that send less across nodes, in fewer and larger messages.

- `direct`: every rank sends to every rank.
- `2dh` (Tutel, DeepSpeed): ranks of equal place exchange across nodes; what they get they forward inside their node. So
  W ranks on nodes of L have W/L peers across nodes, and messages L times as large.
- `1dh` (Hetu): the ranks of a node gather their rows at a leader, the leaders exchange, each forwards inside its node.

Two nodes of two ranks, rows of rank 0 for ranks 0 to 3, 2dh:

    rank 0   a b | c d        across: a b stay, c d go to rank 2, which has rank 0's place
    rank 2   c d              inside: c stays, d goes to rank 3

A token that goes to several ranks of a node crosses to it once (`comm/forwarding.py`); rows of other kinds are moved
bit for bit, whatever the algorithm.
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
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.layout import Layout

ALGORITHMS = ("direct", "1dh", "2dh")


@dataclass(frozen=True, eq=False)
class Traffic:
    """Rows that travel by one algorithm.

    Attributes:
        send: rows of this rank by where they go first: to each rank; by two levels, to each node.
        recv: rows that come from each rank.
    """

    send: list[int]
    recv: list[int]


class AllToAll:
    """An algorithm that moves rows between the ranks of one group.

    Attributes:
        group: these ranks.
    """

    group: Group

    @property
    def identity(self) -> str:
        """Name and process groups: a compiled graph of one algorithm serves others of the same identity."""
        raise NotImplementedError

    def traffic(self, send: list[int], recv: list[int]) -> Traffic:
        """Makes the traffic of rows to and from each rank. Collective for two-level algorithms."""
        raise NotImplementedError

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        """Moves [sum(send), ...], ordered by destination, to [sum(recv), ...], ordered by source. Collective.

        The ranks have compared what they call (`collectives.begin`).
        """
        raise NotImplementedError

    def bring_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        """Moves rows the same way home: [sum(recv), ...] -> [sum(send), ...]; of rows that were forwarded to several
        ranks of a node their sum. Collective."""
        raise NotImplementedError


def make_all_to_all(name: str, topology: Topology) -> AllToAll:
    """Makes the algorithm of that name over the topology's expert-parallel group. Collective for two-level algorithms.

    Raises:
        ConfigError: unknown name, or a group that does not cover its nodes evenly.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown dispatch algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}, or auto")
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
    return TwoLevel(group, inside, across, len(grid), name == "1dh")


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


@dataclass(frozen=True, eq=False)
class Direct(AllToAll):
    """The algorithm of one collective over the whole group."""

    group: Group

    @property
    def identity(self) -> str:
        return f"direct over {self.group.identity}"

    def traffic(self, send: list[int], recv: list[int]) -> Traffic:
        return Traffic(send, recv)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        return all_to_all_rows(self.group, rows, traffic.send, traffic.recv, operation, agreed=True)

    def bring_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        return all_to_all_rows(self.group, rows, traffic.recv, traffic.send, operation, agreed=True)


@dataclass(frozen=True, eq=False)
class TwoLevelTraffic(Traffic):
    """Rows that travel by two levels, the same on all ranks but for `layout`.

    Attributes:
        nodes_npN: rows that the rank at place p of node n sends to node N.
        ranks_npNP: rows that become of them at place P of it.
        layout: sorts what this rank gets from other nodes by the places that it forwards it to; None: each row goes to
            one place, and those of each rank lie by place.
    """

    nodes_npN: np.ndarray
    ranks_npNP: np.ndarray
    layout: Layout | None = None


@dataclass(frozen=True, eq=False)
class TwoLevel(AllToAll):
    """The algorithms 2DH and 1DH: rows cross to a node first, and are forwarded inside it.

    Attributes:
        inside: the ranks of this node.
        across: the ranks, one of each node, with which this rank exchanges; None: its node's leader does that.
        nodes: their number.
        leads: the first rank of each node exchanges for all of them (1DH); else each does for itself.
    """

    group: Group
    inside: Group
    across: Group | None
    nodes: int
    leads: bool

    @property
    def name(self) -> str:
        return "1dh" if self.leads else "2dh"

    @property
    def identity(self) -> str:
        across = "" if self.across is None else f", {self.across.identity}"
        return f"{self.name} over {self.group.identity}, {self.inside.identity}{across}, {self.nodes} nodes"

    def traffic(self, send: list[int], recv: list[int]) -> TwoLevelTraffic:
        ranks_npNP = self.tell(torch.tensor(send, device=device_of(self.group)), recv)
        nodes_npN = ranks_npNP.sum(3)
        node, place = self._at
        return TwoLevelTraffic(nodes_npN[node, place].tolist(), recv, nodes_npN, ranks_npNP)

    def even(self, count: int) -> TwoLevelTraffic:
        """Makes the traffic of so many rows from each rank to each; the ranks need not tell each other."""
        places, size = self.inside.size, self.group.size
        ranks_npNP = np.full((self.nodes, places, self.nodes, places), count)
        return TwoLevelTraffic([count * places] * self.nodes, [count] * size, ranks_npNP.sum(3), ranks_npNP)

    def tell(self, send_W: Tensor, recv: list[int]) -> np.ndarray:
        """Returns [n, p, N, P], what each rank has told all others that it sends to each. Collective.

        Args:
            send_W: of this rank; more columns come behind those of the ranks, and are returned as [n, p, N, P + more].
            recv: what this rank knows to come from each.
        """
        group, operation = self.group, "exchange of counts"
        table = all_gather_rows(group, send_W.view(1, -1), [1] * group.size, operation).cpu().numpy()
        places = self.inside.size
        told = table.reshape(self.nodes, places, self.nodes, -1)
        node, place = self._at
        came = told[:, :, node, place].reshape(-1)
        for rank, sent, told_N, known in zip(group.ranks, came, told.reshape(group.size, -1), recv, strict=True):
            if sent != known or (told_N < 0).any():
                raise other_operation(group.board, operation, f"the {group}", rank)
        return told

    @property
    def _at(self) -> tuple[int, int]:
        """The node and the place of this rank."""
        return divmod(self.group.index, self.inside.size)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert isinstance(traffic, TwoLevelTraffic)
        return self._forward(self.cross(rows, traffic.nodes_npN, operation), traffic, operation)

    def bring_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        assert isinstance(traffic, TwoLevelTraffic)
        rows = self._collect(rows, traffic, operation)
        out_pN, in_np = self._crossing(traffic.nodes_npN)
        if self.across is not None:
            rows = all_to_all_rows(self.across, rows, in_np.sum(1).tolist(), out_pN.sum(0).tolist(), operation, True)
        if not self.leads:
            return rows
        # The leader holds rows by (node that they came from, place), and hands them out by place.
        places, scatter = self.inside.size, [0] * self.inside.size
        if self.across is not None:
            rows, scatter = regroup(rows, out_pN.T, (1, 0)), out_pN.sum(1).tolist()
        home = _only(0, sum(traffic.send), places)
        return all_to_all_rows(self.inside, rows, scatter, home, operation, agreed=True)

    def cross(self, rows: Tensor, nodes_npN: np.ndarray, operation: str) -> Tensor:
        """Takes rows to the nodes that they are for: [n, ...] by node -> those for this node, by the rank that sent
        them; none where the leader forwards them. Collective."""
        out_pN, in_np = self._crossing(nodes_npN)
        if self.leads:
            places = self.inside.size
            gathered = [0] * places if self.across is None else out_pN.sum(1).tolist()
            rows = all_to_all_rows(self.inside, rows, _only(0, len(rows), places), gathered, operation, agreed=True)
            if self.across is None:
                return rows
            rows = regroup(rows, out_pN, (1, 0))
        assert self.across is not None
        send, recv = out_pN.sum(0).tolist(), in_np.sum(1).tolist()
        return all_to_all_rows(self.across, rows, send, recv, operation, agreed=True)

    def _crossing(self, nodes_npN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows that this rank takes across, by (place that has them, node), and that it gets, by source."""
        (node, _), mine = self._at, self.crossed
        return nodes_npN[node, mine], nodes_npN[:, mine, node]

    @property
    def crossed(self) -> slice:
        """The places whose rows this rank takes across: with 1dh all, with 2dh its own."""
        place = self._at[1]
        return slice(None) if self.leads else slice(place, place + 1)

    def _forward(self, rows: Tensor, traffic: TwoLevelTraffic, operation: str) -> Tensor:
        """Takes rows that have crossed to the places they are for; returns them by the rank that sent them."""
        node, place = self._at
        if self.across is not None:
            held_npP = traffic.ranks_npNP[:, self.crossed, node]
            rows = regroup(rows, held_npP, (2, 0, 1)) if traffic.layout is None else permute(rows, traffic.layout)
        send, recv = self._inside(traffic)
        rows = all_to_all_rows(self.inside, rows, send, recv, operation, agreed=True)
        # From each place of this node come the rows of that place on all nodes; the leader's are by rank already.
        return rows if self.leads else regroup(rows, traffic.ranks_npNP[:, :, node, place].T, (1, 0))

    def _collect(self, rows: Tensor, traffic: TwoLevelTraffic, operation: str) -> Tensor:
        """Takes rows back to where they crossed; returns them as they came there. The inverse of `_forward`."""
        node, place = self._at
        if not self.leads:
            rows = regroup(rows, traffic.ranks_npNP[:, :, node, place], (1, 0))
        send, recv = self._inside(traffic)
        rows = all_to_all_rows(self.inside, rows, recv, send, operation, agreed=True)
        if self.across is None:
            return rows
        if traffic.layout is not None:
            return gather_sum(rows, traffic.layout)
        return regroup(rows, traffic.ranks_npNP[:, self.crossed, node].transpose(2, 0, 1), (1, 2, 0))

    def _inside(self, traffic: TwoLevelTraffic) -> tuple[list[int], list[int]]:
        """Returns the rows that this rank forwards to each place of its node, and that it gets from each."""
        (node, place), places = self._at, self.inside.size
        if self.leads:
            send = [0] * places if self.across is None else traffic.ranks_npNP[:, :, node].sum((0, 1)).tolist()
            return send, _only(0, sum(traffic.recv), places)
        return traffic.ranks_npNP[:, place, node].sum(0).tolist(), traffic.ranks_npNP[:, :, node, place].sum(0).tolist()


def _only(index: int, count: int, size: int) -> list[int]:
    return [count if i == index else 0 for i in range(size)]


def share(counts: np.ndarray, part: int, degree: int) -> np.ndarray:
    """Returns how many of n rows belong to part i of r: those from ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋."""
    return counts * (part + 1) // degree - counts * part // degree


@dataclass(frozen=True, eq=False)
class LastTokens:
    """Tokens that come last of those for their rank, and so in the last chunks: those with pairs of some experts there.

    Each source's tokens for a rank are split so that none of these is in its first chunks, however many a source has.
    Both ends know counts of pairs alone: a token with two pairs that come last counts twice.

    Worked example, four chunks: 60% of a rank's pairs come last. The first two chunks have none; of a source's 8 tokens
    of which 5 come last they have 2 and 1, and the others 2 and 3. Of 8 tokens of which none does each has 2.

    Attributes:
        last_PE: [ranks, experts of each] booleans, true for the experts whose tokens come last.
        share_P: of a rank's pairs those that come last, the same numbers on all ranks.
    """

    last_PE: np.ndarray
    share_P: np.ndarray

    def last_E(self, device: torch.device) -> Tensor:
        """Returns [E] booleans on a device: the experts of all ranks that these tokens are for."""
        return torch.from_numpy(self.last_PE.reshape(-1)).to(device)

    def first(self, degree: int) -> np.ndarray:
        """Returns [ranks], the first of so many chunks that may have any of them."""
        first_P = np.rint((1 - self.share_P) * degree).astype(int).clip(0, degree - 1)
        return np.where(self.last_PE.any(1), first_P, 0)

    def chunks(self, tokens_Pp: np.ndarray, pairs_PE: np.ndarray, degree: int, rank: int | None = None) -> np.ndarray:
        """Returns [..., degree], the tokens in each chunk.

        Args:
            tokens_Pp, pairs_PE: those for each rank; or with `rank` those for it, from wherever they come.
        """
        at = slice(None) if rank is None else rank
        last_PE, first_P = self.last_PE[at][..., : pairs_PE.shape[-1]], self.first(degree)[at]
        free_Pp = np.maximum(tokens_Pp - (pairs_PE * last_PE).sum(-1, keepdims=True), 0)[..., None]
        count, first, chunk = tokens_Pp[..., None], np.asarray(first_P)[..., None, None], np.arange(degree + 1)
        begun = np.minimum(count * first // degree, free_Pp)
        before = np.minimum(count * chunk // degree, free_Pp)
        after = begun + (count - begun) * (chunk - first) // (degree - first)
        return np.diff(np.where(chunk <= first, before, after))


def regroup(rows: Tensor, sizes: np.ndarray, axes: tuple[int, ...]) -> Tensor:
    """Reorders blocks of sizes[i, j, …] rows, the last index fastest, as `transpose(axes)` reorders an array's entries.

    With sizes [[1, 2], [0, 1]] and axes (1, 0), rows a|bb||c become a||bb|c.
    """
    return rows.index_select(0, block_order(sizes, axes, rows.device))


def block_order(sizes: np.ndarray, axes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the rows of such blocks in that order, [rows] int64; never waits for the device."""
    # Where each block starts, then the same in the new order; a row's source is its block's start plus its place there.
    start = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    start, size = start.reshape(sizes.shape).transpose(axes).reshape(-1), sizes.transpose(axes).reshape(-1)
    offset, rows = np.cumsum(size) - size, int(size.sum())
    first, repeats = torch.from_numpy(np.stack([start - offset, size])).to(device)
    index = torch.arange(rows, device=device)
    return index.add_(torch.repeat_interleave(first, repeats, output_size=rows))
