"""Two-level dispatch: a token is sent once to each node and forwarded there to every rank that hosts its experts.

Codes sent with each token list the local ranks that receive it, with the encoding of `kernels/deduplicate.py`: 2·(local
rank), plus 1 for a token's first code. Example, two nodes of two ranks; rank 0 has token a for ranks 0, 2 and 3, and b
for rank 3:

    across     a | a b          a (code 1) stays; a (codes 1, 2) and b (3) are sent to rank 2, with rank 0's local index
    inside     a | a b          rank 2 keeps a, and sends a and b to rank 3
    back       rank 2 adds its own result for a and rank 3's, and sends one sum across

Each rank receives the same tokens in the same order as with `direct`. Results are summed inside nodes first, in
order of local ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import TwoLevelAllToAll, TwoLevelTraffic, block_order, chunk_size
from fusedmoe.comm.collectives import all_gather_rows
from fusedmoe.comm.failure.blame import foreign_data_error
from fusedmoe.comm.group import Group
from fusedmoe.kernels.deduplicate import SentTokens, decode, find_invalid_codes, pack, unpack
from fusedmoe.kernels.layout import Layout

_OPERATION = "exchange of destination ranks"


class Forwarding:
    """Destinations of tokens that are sent to nodes and forwarded inside them. The constructor is collective.

    Args:
        by_node: tokens by destination node, with codes of the local ranks that receive them (`deduplicate_tokens` over
            nodes); may be padded.
        tokens_W: this rank's tokens for each rank.
        recv_QP: tokens that this rank receives, by sharding peer and source rank.
    Raises:
        RankError: a rank sent codes that contradict its announced counts.
    """

    def __init__(
        self, algorithm: TwoLevelAllToAll, esp: Group, by_node: SentTokens, tokens_W: Tensor, recv_QP: np.ndarray
    ) -> None:
        nodes, local_size = algorithm.num_nodes, algorithm.intra_node_group.size
        self._algorithm, self._esp, self._recv_QP = algorithm, esp, recv_QP
        tokens_NP, tokens_N1 = tokens_W.view(nodes, local_size), by_node.tokens.counts_E.view(nodes, 1)
        self._tokens_NP = tokens_NP
        table = algorithm.all_gather_counts(torch.cat([tokens_NP, tokens_N1], 1), self._recv_counts_W)
        self._ranks_npNP, self._nodes_npN = table[..., :local_size], table[..., local_size]
        # A token for a node has at least one destination there, and each rank at most once.
        max_npN, min_npN = self._ranks_npNP.sum(3), self._ranks_npNP.max(3)
        self._raise_for_invalid_senders(((self._nodes_npN > max_npN) | (self._nodes_npN < min_npN)).any(2).reshape(-1))
        node, local_rank = divmod(algorithm.group.index, local_size)
        assert by_node.code_N is not None
        code_N = by_node.code_N[: int(max_npN[node, local_rank].sum())]
        self._sent_pairs = decode(code_N)
        self._max_pairs_per_token = min(by_node.k, local_size)
        message = pack(code_N, None)
        assert message is not None
        message = algorithm.send_across_nodes(message, max_npN, _OPERATION)
        self._inter_node_index = slice(None), algorithm.inter_node_local_ranks, node
        self._received_pairs = None
        if algorithm.inter_node_group is None:  # only the leader forwards
            return
        code_P, _ = unpack(message, code_N.dtype, None)
        counts_RP = torch.from_numpy(self._ranks_npNP[self._inter_node_index].reshape(-1, local_size)).to(code_P.device)
        token_counts_R = torch.from_numpy(self._nodes_npN[self._inter_node_index].reshape(-1)).to(code_P.device)
        wrong_R = find_invalid_codes(code_P, counts_RP, token_counts_R, local_size)
        if wrong_R.is_cuda:  # the device aborts the process, without a host synchronisation
            torch.ops.aten._assert_async.msg(~wrong_R.any(), "forwarding codes contradict the counts that ranks sent")
        else:
            wrong_W = np.zeros(self._nodes_npN.shape[:2], bool)
            wrong_W[:, algorithm.inter_node_local_ranks] = wrong_R.view(nodes, -1).numpy()
            self._raise_for_invalid_senders(wrong_W.reshape(-1))
        self._received_pairs = decode(code_P)

    @property
    def _recv_counts_W(self) -> list[int]:
        return self._recv_QP[self._esp.index].tolist()

    def _raise_for_invalid_senders(self, wrong_W: np.ndarray) -> None:
        if wrong_W.any():
            group = self._algorithm.group
            raise foreign_data_error(group.board, _OPERATION, f"the {group}", group.ranks[int(wrong_W.nonzero()[0][0])])

    def make_traffic(self) -> TwoLevelTraffic:
        layout = None
        if self._received_pairs is not None:
            tokens = int(self._nodes_npN[self._inter_node_index].sum())
            layout, _ = self._received_pairs.sort(tokens, self._ranks_npNP.shape[3], self._max_pairs_per_token)
        node, local_rank = divmod(self._algorithm.group.index, self._ranks_npNP.shape[1])
        send = self._nodes_npN[node, local_rank].tolist()
        return TwoLevelTraffic(send, self._recv_counts_W, self._nodes_npN, self._ranks_npNP, layout)

    def chunks(self, degree: int) -> tuple[list[TwoLevelTraffic], np.ndarray]:
        """Split the tokens for each node into equal chunks. Collective.

        Returns the traffic of each chunk, and [chunks, Q, W] tokens received per chunk, sharding peer and source rank.
        """
        (nodes, local_size), group = self._nodes_npN.shape[:2], self._algorithm.group
        node, local_rank = divmod(group.index, local_size)
        nodes_inpN = np.stack([chunk_size(self._nodes_npN, i, degree) for i in range(degree)])
        # Only the sender can count a chunk's tokens per destination: [chunk, node, local rank].
        sent_iN = nodes_inpN[:, node, local_rank]
        sent_N = torch.from_numpy(sent_iN.T.reshape(-1)).to(self._tokens_NP.device)  # by node, chunk
        chunk_T = torch.repeat_interleave(sent_N, output_size=int(sent_iN.sum()))
        key_N = chunk_T[self._sent_pairs.token_P] * local_size + self._sent_pairs.expert_P
        counts = key_N.new_zeros(nodes * degree * local_size).index_add_(0, key_N, torch.ones_like(key_N))
        counts_NC = counts.view(nodes, degree * local_size)
        table = self._algorithm.all_gather_counts(
            torch.cat([self._tokens_NP, counts_NC.to(self._tokens_NP.dtype)], 1), self._recv_counts_W
        )
        ranks_npNiP = table[..., local_size:].reshape(nodes, local_size, nodes, degree, local_size)
        self._raise_for_invalid_senders((ranks_npNiP.sum(3) != self._ranks_npNP).any((2, 3)).reshape(-1))
        ranks_inpNP = ranks_npNiP.transpose(3, 0, 1, 2, 4)
        recv_iW = np.ascontiguousarray(ranks_inpNP[..., node, local_rank].reshape(degree, -1))
        own_recv = torch.from_numpy(recv_iW)[None].to(self._tokens_NP.device)
        recv_QiW = all_gather_rows(self._esp, own_recv, [1] * self._esp.size, _OPERATION).cpu().numpy()
        layouts: list[Layout | None] = [None] * degree
        if self._received_pairs is not None:
            rows_iR = nodes_inpN[(slice(None), *self._inter_node_index)].reshape(degree, -1)
            order_R = block_order(rows_iR.T, (1, 0), self._tokens_NP.device)
            rows = rows_iR.sum(1).tolist()
            _, parts = self._received_pairs.in_chunks(order_R, rows)
            layouts = [
                part.sort(count, local_size, self._max_pairs_per_token)[0]
                for part, count in zip(parts, rows, strict=True)
            ]
        chunk_fields = zip(sent_iN.tolist(), recv_iW.tolist(), nodes_inpN, ranks_inpNP, layouts, strict=True)
        return [TwoLevelTraffic(*fields) for fields in chunk_fields], recv_QiW.transpose(1, 0, 2)
