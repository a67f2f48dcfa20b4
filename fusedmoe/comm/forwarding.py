"""Tokens that cross to a node once and are forwarded there to each of its ranks that has experts for them.

Two levels of the same thing: a token's destinations are nodes first, and the code beside it says the places in that
node which it goes on to (`kernels/deduplicate.py`, with places for experts). Two nodes of two ranks; rank 0 has tokens
a for ranks 0, 2 and 3, and b for rank 3:

    across     a | a b          a stays, a and b go to rank 2, which has rank 0's place; places 0, 0 1, 1
    inside     a | a b          rank 2 keeps a, and sends a and b to rank 3
    back       rank 2 adds up its own result of a and rank 3's, and one sum crosses

So what arrives at a rank is the same, in the same order, as without levels; a sum is made inside nodes first, in the
order of places. Chunks are shares of the tokens for each node; how many of them a rank gets is told.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import TwoLevel, TwoLevelTraffic, block_order, share
from fusedmoe.comm.collectives import all_gather_rows
from fusedmoe.comm.failure.blame import other_operation
from fusedmoe.comm.group import Group
from fusedmoe.kernels.deduplicate import Sending, decode, pack, unpack, wrong_codes
from fusedmoe.kernels.layout import Layout

_OPERATION = "exchange of places"


class Forwarding:
    """Tokens of an exchange that cross to nodes, and the ranks they go on to there. Making one is collective.

    Args:
        algorithm: two-level.   esp: the expert-sharding group.
        hop: tokens by node, with codes of their places (`sending` of the tokens by rank, over nodes); may be padded.
        tokens_W: tokens of this rank for each rank.
        come_QP: tokens that this rank gets, by sharding peer and source rank.
    Raises:
        RankError: a rank sent codes of other tokens than it had said; nothing is read by them.
    """

    def __init__(self, algorithm: TwoLevel, esp: Group, hop: Sending, tokens_W: Tensor, come_QP: np.ndarray) -> None:
        nodes, places = algorithm.nodes, algorithm.inside.size
        self._algorithm, self._esp, self._come_QP = algorithm, esp, come_QP
        tokens_NP, tokens_N1 = tokens_W.view(nodes, places), hop.tokens.counts_E.view(nodes, 1)
        self._tokens_NP = tokens_NP
        told = algorithm.tell(torch.cat([tokens_NP, tokens_N1], 1), self._come_W)
        self._ranks_npNP, self._nodes_npN = told[..., :places], told[..., places]
        # A token that goes to a node goes to one of its places at least, and to none twice.
        most_npN, least_npN = self._ranks_npNP.sum(3), self._ranks_npNP.max(3)
        self._require(((self._nodes_npN > most_npN) | (self._nodes_npN < least_npN)).any(2).reshape(-1))
        node, place = divmod(algorithm.group.index, places)
        assert hop.code_N is not None
        code_N = hop.code_N[: int(most_npN[node, place].sum())]
        self._own = decode(code_N)
        # A token has no more places than a node has.
        self._k = min(hop.k, places)
        message = pack(code_N, None)
        assert message is not None
        message = algorithm.cross(message, most_npN, _OPERATION)
        self._held_np = slice(None), algorithm.crossed, node
        self._received = None
        if algorithm.across is None:  # the leader forwards
            return
        code_P, _ = unpack(message, code_N.dtype, None)
        held_RP = torch.from_numpy(self._ranks_npNP[self._held_np].reshape(-1, places)).to(code_P.device)
        tokens_R = torch.from_numpy(self._nodes_npN[self._held_np].reshape(-1)).to(code_P.device)
        wrong_R = wrong_codes(code_P, held_RP, tokens_R, places)
        if wrong_R.is_cuda:  # the host does not wait to know: the device ends the process
            torch.ops.aten._assert_async.msg(
                ~wrong_R.any(), "places of other tokens than the ranks had told each other"
            )
        else:
            wrong_W = np.zeros(self._nodes_npN.shape[:2], bool)
            wrong_W[:, algorithm.crossed] = wrong_R.view(nodes, -1).numpy()
            self._require(wrong_W.reshape(-1))
        self._received = decode(code_P)

    @property
    def _come_W(self) -> list[int]:
        return self._come_QP[self._esp.index].tolist()

    def _require(self, wrong_W: np.ndarray) -> None:
        if wrong_W.any():
            group = self._algorithm.group
            raise other_operation(group.board, _OPERATION, f"the {group}", group.ranks[int(wrong_W.nonzero()[0][0])])

    def traffic(self) -> TwoLevelTraffic:
        """Makes the traffic of all tokens."""
        layout = None
        if self._received is not None:
            tokens = int(self._nodes_npN[self._held_np].sum())
            layout, _ = self._received.sort(tokens, self._ranks_npNP.shape[3], self._k)
        node, place = divmod(self._algorithm.group.index, self._ranks_npNP.shape[1])
        send = self._nodes_npN[node, place].tolist()
        return TwoLevelTraffic(send, self._come_W, self._nodes_npN, self._ranks_npNP, layout)

    def chunks(self, degree: int) -> tuple[list[TwoLevelTraffic], np.ndarray]:
        """Splits the tokens into chunks. Collective.

        Returns:
            The traffic of each chunk, and [chunks, Q, W] tokens that come in it by sharding peer and source rank.
        """
        (nodes, places), group = self._nodes_npN.shape[:2], self._algorithm.group
        node, place = divmod(group.index, places)
        nodes_inpN = np.stack([share(self._nodes_npN, i, degree) for i in range(degree)])
        # How many tokens of a chunk go to each place, their rank counts: [chunk, node, place].
        sent_N = torch.from_numpy(nodes_inpN[:, node, place].T.reshape(-1)).to(self._tokens_NP.device)  # by node, chunk
        chunk_T = torch.repeat_interleave(sent_N, output_size=int(nodes_inpN[:, node, place].sum()))
        key_N = chunk_T[self._own.token_P] * places + self._own.expert_P
        counts = key_N.new_zeros(nodes * degree * places).index_add_(0, key_N, torch.ones_like(key_N))
        counts_NC = counts.view(nodes, degree * places)
        told = self._algorithm.tell(torch.cat([self._tokens_NP, counts_NC.to(self._tokens_NP.dtype)], 1), self._come_W)
        ranks_npNiP = told[..., places:].reshape(nodes, places, nodes, degree, places)
        self._require((ranks_npNiP.sum(3) != self._ranks_npNP).any((2, 3)).reshape(-1))
        ranks_inpNP = ranks_npNiP.transpose(3, 0, 1, 2, 4)
        come_iW = np.ascontiguousarray(ranks_inpNP[..., node, place].reshape(degree, -1))
        mine = torch.from_numpy(come_iW)[None].to(self._tokens_NP.device)
        come_QiW = all_gather_rows(self._esp, mine, [1] * self._esp.size, _OPERATION).cpu().numpy()
        layouts: list[Layout | None] = [None] * degree
        if self._received is not None:
            held_iR = nodes_inpN[(slice(None), *self._held_np)].reshape(degree, -1)
            order_R = block_order(held_iR.T, (1, 0), self._tokens_NP.device)
            rows = held_iR.sum(1).tolist()
            _, parts = self._received.in_chunks(order_R, rows)
            layouts = [part.sort(count, places, self._k)[0] for part, count in zip(parts, rows, strict=True)]
        sends = nodes_inpN[:, node, place].tolist()
        made = zip(sends, come_iW.tolist(), nodes_inpN, ranks_inpNP, layouts, strict=True)
        return [TwoLevelTraffic(*of) for of in made], come_QiW.transpose(1, 0, 2)
