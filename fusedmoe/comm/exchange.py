"""One layer's exchange of tokens, once its ranks have exchanged metadata (`comm/metadata.py`). Padding is not sent.

Tokens leave a rank sorted by destination: each once for every rank that has experts for it. Dispatch takes them over
the expert-parallel group; the all-gather over the expert-sharding group then gives every shard of an expert all of its
tokens. They arrive ordered by (sharding peer, source rank). Combine and reduce-scatter take results the same way back.
What is said of a token's (token, k) pairs, codes and router weights, travels likewise, a row for each pair.

Two ranks, two experts each, top-2. Rank 0 has tokens a for experts 0 and 1, b for 1 and 2; rank 1 has c for 0 and 3:

    counts_E    rank 0 [1, 2, 1, 0]      rank 1 [1, 0, 0, 1]      pairs for each expert
    tokens_W    rank 0 [2, 1]            rank 1 [1, 1]            tokens to each rank
    dispatch    rank 0 a b|b  ->  a b c        rank 1 c|c  ->  b c
    combine     rank 0 A B C  ->  A B|B        rank 1 B C  ->  C|C
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedmoe.comm.all_to_all import AllToAll, LastTokens, Traffic, TwoLevel
from fusedmoe.comm.collectives import ROOM, all_gather_rows, all_to_all_rows, begin, reduce_scatter_rows
from fusedmoe.comm.failure.blame import other_operation
from fusedmoe.comm.failure.board import BACKWARD, Verdict
from fusedmoe.comm.forwarding import Forwarding
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import (
    CHECK,
    NUM_DTYPES,
    Agreed,
    ExpertCalls,
    Metadata,
    NonFinite,
    RowForm,
    TokenCounts,
    refuse_forms,
    require_callable_experts,
)
from fusedmoe.errors import RankError
from fusedmoe.kernels.deduplicate import Received, decode, pack, rows_of_counts, unpack, wrong_codes

_OPERATION = "exchange of counts"
# Columns of a message for `Metadata`; of these the last, which the device computes, and the first, a `RowForm`.
_COLUMNS, _ON_DEVICE, _FORM = len(Metadata._fields), 3, len(RowForm._fields)
# Exchanges over each process group so far, the same number on all of its ranks: topologies that share a group need not
# have the same ranks, nor be closed at the same time.
_num_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Part:
    """The collectives of some rows of an exchange: dispatch and all-gather, reduce-scatter and combine.

    Each takes and returns rows [n, ...] of any dtype; every rank calls the same ones in the same order. The metadata
    exchange compares the ranks' calls for the forward pass, the first rows of a backward pass those for it (`turn`).

    Args:
        algorithm: how rows cross the expert-parallel group.   esp: the expert-sharding group.
        traffic: rows sent and received.   come_QP: rows received by sharding peer and source rank.
        call: the name of the exchange, the same on every rank.
        compared: axes of the groups that have compared; shared by all parts of an exchange. None: all have.
    Attributes:
        algorithm: as given.
        rows, sent, received: rows of this rank after dispatch and all-gather; rows that a dispatch sends, and that it
            receives.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        traffic: Traffic,
        come_QP: np.ndarray,
        call: str = "an exchange",
        compared: set[str] | None = None,
    ) -> None:
        self.call = call
        self._compared = {algorithm.group.axis, esp.axis} if compared is None else compared
        self.algorithm, self._esp = algorithm, esp
        self._traffic, self._gathered = traffic, come_QP.sum(1).tolist()
        self.rows, self.sent, self.received = sum(self._gathered), sum(traffic.send), sum(traffic.recv)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Sends rows to the experts' ranks: [sent, ...] by destination -> [received, ...] by source."""
        if rows.shape[:1] != (self.sent,) or self.algorithm.group.axis not in self._compared:
            self._begin(self.algorithm.group, rows, self.sent, "dispatch")
        return self.algorithm.exchange(rows, self._traffic, "dispatch")

    def combine(self, rows: Tensor) -> Tensor:
        """Sends rows back to the tokens' ranks: the inverse of `dispatch`."""
        if rows.shape[:1] != (self.received,) or self.algorithm.group.axis not in self._compared:
            self._begin(self.algorithm.group, rows, self.received, "combine")
        return self.algorithm.bring_back(rows, self._traffic, "combine")

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gathers the rows for all shards of the experts: [received, ...] -> [rows, ...] by (shard, source)."""
        if rows.shape[:1] != (self.received,) or self._esp.axis not in self._compared:
            self._begin(self._esp, rows, self.received, "all-gather of expert shards")
        return all_gather_rows(self._esp, rows, self._gathered, "all-gather of expert shards", agreed=True)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sums the shards' results and returns each peer its own rows: the adjoint of `all_gather`."""
        if rows.shape[:1] != (self.rows,) or self._esp.axis not in self._compared:
            self._begin(self._esp, rows, self.rows, "reduce-scatter of expert shards")
        return reduce_scatter_rows(self._esp, rows, self._gathered, "reduce-scatter of expert shards", agreed=True)

    def turn(self) -> None:
        """Begins a backward pass: this rank may be the only one that has one."""
        # So the ranks compare what they call once more, at the first rows over each group.
        self._compared.clear()

    def _begin(self, group: Group, rows: Tensor, count: int, operation: str) -> None:
        """Refuses rows of another number; compares what the ranks call, before the first rows of a backward pass."""
        if rows.shape[:1] != (count,):
            text = f"the exchange is of {count} rows, but these are {list(rows.shape)}"
            self.algorithm.group.refuse(operation, f"{text}. Padding does not travel: Layout.exact() leaves it out")
        self._compared.add(group.axis)
        begin(group, f"{operation} {BACKWARD}", f"of {self.call}")


class ExchangeSizes(NamedTuple):
    """Numbers that ranks told each other, on the host; p micro-batches, whose rows do not mix, are mostly one.

    Attributes:
        send_PC: [peer, p · local expert + p] pairs that this rank sends for each expert, then tokens.
        come_QPC: pairs and tokens that this rank gets, by sharding peer and source rank.
    """

    send_PC: np.ndarray
    come_QPC: np.ndarray
    micro_batches: int = 1

    @property
    def send_PE(self) -> np.ndarray:
        return self.send_PC[:, : -self.micro_batches]

    @property
    def send_Pp(self) -> np.ndarray:
        return self.send_PC[:, -self.micro_batches :]

    @property
    def come_QPE(self) -> np.ndarray:
        return self.come_QPC[..., : -self.micro_batches]

    @property
    def come_QPp(self) -> np.ndarray:
        return self.come_QPC[..., -self.micro_batches :]


class Cut(NamedTuple):
    """An exchange in chunks.

    Attributes:
        parts: the collectives of each chunk.
        sent_Gi, come_Gi: rows of each segment, as they lie without chunks, in each chunk: those sent, and received.
    """

    parts: list[Part]
    sent_Gi: np.ndarray
    come_Gi: np.ndarray


class Exchange(Part):
    """The exchange of a batch, whose sizes are known: the collectives of its tokens and, as `pairs`, of its pairs.

    `exchange_metadata` returns one.

    Args:
        sizes: numbers of rows, from the metadata exchange.   device: of the rows.
        by_pairs: a row is sent for each pair, so that both are the same.
        ranks_QP: the rank that rows of each sharding peer and source began on, for errors; None: not known.
        forwarding: how tokens go on inside nodes; None: they go to each rank by themselves.
        agreed: its fields become attributes.
    Attributes:
        counts_RE: [sharding peer · source rank, p · local expert] pairs of this rank after dispatch and all-gather.
        last: tokens that are in the last chunks, as `deduplicate.sending` has sorted them; None: tokens go as they lie.
    """

    last: LastTokens | None = None

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        sizes: ExchangeSizes,
        device: torch.device,
        by_pairs: bool = False,
        call: str = "an exchange",
        ranks_QP: np.ndarray | None = None,
        forwarding: Forwarding | None = None,
        agreed: Agreed | None = None,
    ) -> None:
        come_QP = sizes.come_QPp.sum(2)
        if forwarding is None:
            traffic = algorithm.traffic(sizes.send_Pp.sum(1).tolist(), come_QP[esp.index].tolist())
        else:
            traffic = forwarding.traffic()
        super().__init__(algorithm, esp, traffic, come_QP, call)
        self.sizes, self.by_pairs, self._device, self._ranks_QP = sizes, by_pairs, device, ranks_QP
        self._forwarding = forwarding
        self.form, self.most_pairs, self.share, self.as_module, *grads = agreed or Agreed()
        self.tokens_require_grad, self.weights_require_grad = grads

    @cached_property
    def pairs(self) -> Part:
        """The collectives of pairs. The first use is collective for two-level algorithms."""
        sizes = self.sizes
        return self if self.by_pairs else self.part(sizes.send_PE.sum(1), sizes.come_QPE.sum(2))

    @cached_property
    def counts_RE(self) -> Tensor:
        come_QPE = self.sizes.come_QPE
        return torch.from_numpy(np.ascontiguousarray(come_QPE).reshape(-1, come_QPE.shape[2])).to(self._device)

    @cached_property
    def tokens_R(self) -> Tensor:
        """[sharding peer · source rank · micro-batch] tokens of this rank after dispatch and all-gather."""
        return torch.from_numpy(np.ascontiguousarray(self.sizes.come_QPp).reshape(-1)).to(self._device)

    def part(self, send_P: np.ndarray, come_QP: np.ndarray) -> Part:
        """Makes a part of other rows of the same ranks, in these sizes. Collective for two-level algorithms."""
        traffic = self.algorithm.traffic(send_P.tolist(), come_QP[self._esp.index].tolist())
        return Part(self.algorithm, self._esp, traffic, come_QP, self.call, self._compared)

    def cut(self, degree: int) -> Cut:
        """Splits the exchange into `degree` parts, each with its share (`all_to_all.share`) of the tokens of every rank
        for every rank, or for every node that forwards them; of pairs by experts, where a row travels for each.

        Collective for two-level algorithms.
        """
        if self._forwarding is not None:
            traffics, come_iQP = self._forwarding.chunks(degree)
            chunks = zip(traffics, come_iQP, strict=True)
            parts = [Part(self.algorithm, self._esp, *chunk, self.call, self._compared) for chunk in chunks]
            sent_iG = np.array([traffic.send for traffic in traffics])
            return Cut(parts, sent_iG.T, come_iQP.reshape(degree, -1).T)
        send_Pp, come_QPp = self.sizes.send_Pp, self.sizes.come_QPp
        if self.by_pairs:
            send_Pp, come_QPp = self.sizes.send_PE, self.sizes.come_QPE
        if self.last is None:
            # As `share` has it, for all chunks at once.
            ends = np.arange(degree + 1)
            sent_PpI, come_QPpI = (np.diff(of[..., None] * ends // degree) for of in (send_Pp, come_QPp))
        else:
            sent_PpI = self.last.chunks(send_Pp, self.sizes.send_PE, degree)
            come_QPpI = self.last.chunks(come_QPp, self.sizes.come_QPE, degree, self.algorithm.group.index)
        send_PI, come_QPI = sent_PpI.sum(1), come_QPpI.sum(2)
        parts = [self.part(send_PI[:, i], come_QPI[..., i]) for i in range(degree)]
        return Cut(parts, sent_PpI.reshape(-1, degree), come_QPpI.reshape(-1, degree))

    def exchange_pairs(
        self, code_N: Tensor | None, weight_N: Tensor | None, row_N: Tensor | None, k: int
    ) -> tuple[Received, Tensor | None]:
        """Tells the experts' ranks which experts the tokens are for, and with what weight. Collective.

        Args:
            code_N, row_N: code and row of each pair that travels (`Sending`), and padding; None: a row for each pair.
            weight_N: router weight of each row; None: weights of 1.   k: the most pairs of a token.
        Returns:
            The pairs of this rank's experts, and the weight of each.
        Raises:
            RankError: a rank sent codes of other pairs than it had said; nothing is read by them.
        """
        pairs = self.pairs
        if weight_N is not None:
            weight_N = weight_N[: pairs.sent] if row_N is None else weight_N[row_N[: pairs.sent]]
        message = pack(None if code_N is None else code_N[: pairs.sent], weight_N)
        if message is not None:
            message = pairs.all_gather(pairs.dispatch(message))
        code, weight = (None if value_N is None else value_N.dtype for value_N in (code_N, weight_N))
        return self.read_pairs(message, code, weight, k)

    def read_pairs(
        self, message: Tensor | None, code: torch.dtype | None, weight: torch.dtype | None, k: int
    ) -> tuple[Received, Tensor | None]:
        """Reads what `pack` made on other ranks of codes and weights of these dtypes, once it is here."""
        if code is None:
            weight_P = None if message is None else message[:, 0]
            return rows_of_counts(self.counts_RE.view(-1, self.experts), self.rows), weight_P
        assert message is not None
        code_P, weight_P = unpack(message, code, weight)
        self._check_codes(code_P, k)
        return decode(code_P), weight_P

    def return_weights(self, dweight_P: Tensor, row_N: Tensor | None, rows: int) -> Tensor:
        """Brings gradients of received pairs' weights back. Collective.

        Args:
            row_N: of each pair that this rank sent (`Sending`); None: a row travels for each pair.
        Returns:
            [rows] in the order of the experts' layout; zeros for its padding.
        """
        pairs = self.pairs
        back_N = pairs.combine(pairs.reduce_scatter(dweight_P[:, None]))[:, 0]
        if row_N is None:
            return nn.functional.pad(back_N, (0, rows - len(back_N)))
        return back_N.new_zeros(rows).index_copy_(0, row_N[: len(back_N)], back_N)

    @property
    def experts(self) -> int:
        """The number of this rank's experts."""
        return self.counts_RE.shape[1] // self.sizes.micro_batches

    def _check_codes(self, code_P: Tensor, k: int) -> None:
        """Refuses codes that others could have sent by mistake: they are indices of this rank's memory."""
        sources, micro_batches = len(self.counts_RE), self.sizes.micro_batches
        counts_RE = self.counts_RE.view(sources * micro_batches, -1)
        wrong_R = wrong_codes(code_P, counts_RE, self.tokens_R, k)
        if wrong_R.is_cuda:  # the host does not wait to know: the device ends the process
            torch.ops.aten._assert_async.msg(~wrong_R.any(), "codes of other pairs than the ranks had told each other")
        elif bool(wrong_R.any()):
            ep, esp = self.algorithm.group, self._esp
            peer, source = divmod(int(wrong_R.nonzero()[0]) // micro_batches, ep.size)
            # Where another shard has passed them on, the rank that sent them is in neither group of this rank.
            passed_on = ep.ranks[source] if peer == esp.index else esp.ranks[peer]
            culprit = passed_on if self._ranks_QP is None else int(self._ranks_QP[peer, source])
            raise other_operation(ep.board, f"exchange of pairs of {self.call}", f"the {ep}", culprit)


def exchange_metadata(
    algorithm: AllToAll,
    esp: Group,
    counts_E: Tensor,
    form: RowForm,
    refusal: str | NonFinite | None = None,
    *,
    tokens: TokenCounts | None = None,
    shard_counts: Group | None = None,
    held: int | None = None,
    call: str = "a layer",
    **columns: int,
) -> Exchange:
    """Exchange the numbers of rows between the ranks of an expert-parallel and an expert-sharding group. Collective.

    Args:
        algorithm: sends rows over the expert-parallel group.   esp: the expert-sharding group.
        counts_E: [E] integers, pairs of this rank for each of the E experts.
        form: of the rows that will be sent.
        refusal: why this rank cannot take part, if so. Then no rows are sent, and all ranks raise this reason.
            `NonFinite`: the reason holds where the number is not zero.
        tokens: the tokens that are sent; None: a row for each pair.
        shard_counts: gathers the counts in place of `esp`, where rows of another exchange are gathered meanwhile.
        held: the number of this rank's experts, the first ones, where it is less than E over the ranks.
        call: the layer's name, the same on every rank: errors name it, and exchanges of different layers differ by it.
        columns: fields of `Metadata` that this rank knows: `expert_calls`, `tokens_require_grad`, ….
    Raises:
        ConfigError, RankError: this or another rank refused or has non-finite input; impossible counts; different
            forms; a rank that must call its experts as a module, and one that cannot.
    """
    ep = algorithm.group
    if problem := _wrong_counts(counts_E, ep.size) or form.refusal():
        ep.refuse(CHECK, problem)
    nonfinite = refusal if isinstance(refusal, NonFinite) else None
    reason = refusal if isinstance(refusal, str) else None
    # A rank that refuses still sends its message: its peers read the refusal there, and none of them waits.
    if reason is not None:
        ep.board.refuse(CHECK, reason, ep.size * esp.size)
    elif ep.job.board is not None:
        ep.job.board.go_on()
    counts_PE = counts_E.long().view(ep.size, -1)
    tokens_Pp = counts_PE.sum(1, keepdim=True) if tokens is None else tokens.tokens_Wp.long().view(ep.size, -1)
    own = Metadata(*form.columns(), rank=ep.job.rank, is_refused=reason is not None, **columns)
    sent_PC = _message(counts_PE, tokens_Pp, own, nonfinite)
    number = 0
    if ep.handle is not None:
        number = _num_calls[ep.handle] = _num_calls.get(ep.handle, 0) + 1
    call = f"call {number} of {call}"
    send_PC, come_QPC = _exchange(sent_PC, ep, esp, shard_counts or esp, f"of {call} with {len(counts_E)} experts")
    E, p = counts_PE.shape[1], tokens_Pp.shape[1]
    received = Metadata(*come_QPC[..., -_COLUMNS:].transpose(2, 0, 1))
    # On GPUs ranks do not compare what they call: bytes of another operation show in the metadata, before rows are
    # sized by them.
    if ep.size * esp.size > 1 and (sender := _foreign_sender(come_QPC, received, E, ep, esp)) is not None:
        raise other_operation(ep.board, _OPERATION, f"the {ep}", sender)
    most = Metadata(*come_QPC[..., -_COLUMNS:].max((0, 1)).tolist())
    if most.is_refused or most.num_nonfinite:
        _raise_refusals(received, reason, nonfinite, ep, esp)
    if most.expert_calls:
        require_callable_experts(received, ep, esp)
    if (come_QPC[..., -_COLUMNS : _FORM - _COLUMNS] != own[:_FORM]).any():
        refuse_forms(received, ep, esp)
    num_tokens, num_pairs = int(received.num_tokens.sum()), int(received.num_pairs.sum())
    agreed = Agreed(
        form,
        most_pairs=most.num_pairs,
        share=num_tokens / num_pairs if num_pairs else 1.0,
        as_module=most.expert_calls == ExpertCalls.MODULE,
        tokens_require_grad=bool(most.tokens_require_grad),
        weights_require_grad=bool(most.weights_require_grad),
    )
    come_QPC = come_QPC[..., : E + p]
    if held is not None:
        come_QPC = np.concatenate([come_QPC[..., :held], come_QPC[..., -p:]], -1)
    sizes, forwarding = ExchangeSizes(send_PC[:, : E + p], come_QPC, p), None
    if tokens is not None and tokens.hop is not None and isinstance(algorithm, TwoLevel):
        forwarding = Forwarding(algorithm, esp, tokens.hop, tokens.tokens_Wp, sizes.come_QPp.sum(2))
    by_pairs = tokens is None or tokens.by_pairs
    return Exchange(algorithm, esp, sizes, counts_E.device, by_pairs, call, received.rank, forwarding, agreed)


def _wrong_counts(counts_E: Tensor, ranks: int) -> str:
    """Describe what is wrong with the counts of an exchange; "" where nothing is."""
    if counts_E.dim() != 1 or counts_E.is_floating_point() or counts_E.dtype == torch.bool:
        return f"counts of rows must be integers [E], got {counts_E.dtype} {list(counts_E.shape)}"
    if len(counts_E) == 0 or len(counts_E) % ranks:
        return f"{len(counts_E)} experts cannot be split over {ranks} ranks; choose a multiple of {ranks}"
    # On a GPU reading the counts would synchronise; `_foreign_sender` checks them on the host.
    if not counts_E.is_cuda and bool((counts_E < 0).any()):
        return f"counts of rows must not be negative, got {counts_E.tolist()}"
    return ""


def _message(counts_PE: Tensor, tokens_Pp: Tensor, own: Metadata, nonfinite: NonFinite | None) -> Tensor:
    """Return the message to each peer, [P, columns]. The host does not wait for the device."""
    device = counts_PE.device
    # Pinned, or the copy to the device would synchronise.
    from_host = torch.tensor(own[:-_ON_DEVICE], dtype=torch.long, device="cpu", pin_memory=device.type == "cuda")
    number = counts_PE.new_zeros(()) if nonfinite is None else nonfinite.number.to(counts_PE.dtype)
    on_device = torch.stack([tokens_Pp.sum(), counts_PE.sum(), number])
    metadata_C = torch.cat([from_host.to(device, non_blocking=True), on_device])
    columns_PC = torch.cat([counts_PE, tokens_Pp, metadata_C.expand(len(counts_PE), -1)], 1)
    counts = columns_PC.shape[1] - _COLUMNS
    return torch.cat([columns_PC[:, :counts], columns_PC.sum(1, keepdim=True), columns_PC[:, counts:]], 1)


def _exchange(
    sent_PC: Tensor, ep: Group, esp: Group, shard_counts: Group, details: str
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange the messages; return this rank's, and those of [sharding peer, source rank], on the host."""
    ones, data = [1] * ep.size, b""
    if not sent_PC.is_cuda:
        table_PC = sent_PC.numpy()
        # Every peer receives the same metadata.
        data = table_PC[:, :-_COLUMNS].tobytes() + table_PC[0, -_COLUMNS:].tobytes()
    if sent_PC.is_cuda or len(data) > ROOM:
        begin(ep, _OPERATION, details)
        received_PC = all_to_all_rows(ep, sent_PC, ones, ones, _OPERATION, agreed=True)
    else:  # the envelopes of `begin` carry the messages to all peers
        received_PC = sent_PC
        if envelopes := begin(ep, _OPERATION, details, data):
            numbers_WN = np.stack([np.frombuffer(envelope, np.int64) for envelope in envelopes])
            counts_WC = numbers_WN[:, :-_COLUMNS].reshape(ep.size, ep.size, -1)[:, ep.index]
            received_PC = torch.from_numpy(np.concatenate([counts_WC, numbers_WN[:, -_COLUMNS:]], 1))
    all_QPC = received_PC[None]
    # All shards of an expert compute the same tokens, so each needs the counts of its sharding peers.
    if esp.size > 1:
        all_QPC = all_gather_rows(shard_counts, all_QPC, [1] * esp.size, _OPERATION)
    if not sent_PC.is_cuda:
        return sent_PC.numpy(), all_QPC.numpy()
    # The one host synchronisation of a layer: a single copy of all that the host reads.
    both = torch.cat([sent_PC[None], all_QPC]).cpu().numpy()
    return both[0], both[1:]


def _foreign_sender(come_QPC: np.ndarray, received: Metadata, experts: int, ep: Group, esp: Group) -> int | None:
    """Return the rank that sent, or gathered, a message that cannot be the metadata of the rank named in it, if any."""
    counts_QPE, tokens_QPp = come_QPC[..., :experts], come_QPC[..., experts : -_COLUMNS - 1]
    wanted_QP = received.rank.copy()  # ranks that are in neither group are known to their sharding peer alone
    wanted_QP[:, ep.index], wanted_QP[esp.index] = esp.ranks, ep.ranks
    bad_QP = (received.rank != wanted_QP) | (received.rank < 0) | (received.rank >= dist.get_world_size())
    bad_QP |= come_QPC.sum(-1) != 2 * come_QPC[..., -_COLUMNS - 1]
    bad_QP |= (received.dtype < 1) | (received.weights < 0)  # no rank sends rows without a dtype
    bad_QP |= np.maximum(received.dtype, received.weights) >= NUM_DTYPES
    pairs_QP = counts_QPE.sum(-1, dtype=np.float64)  # integers would wrap around
    bad_QP |= (counts_QPE < 0).any(-1) | (pairs_QP > received.num_pairs)
    # Each token has a pair at least, and each pair a token; of every micro-batch by itself.
    pairs_QPp = counts_QPE.reshape(*tokens_QPp.shape, -1).sum(-1, dtype=np.float64)
    bad_QP |= ((tokens_QPp < 0) | (tokens_QPp > pairs_QPp) | ((tokens_QPp == 0) & (pairs_QPp > 0))).any(-1)
    if not bad_QP.any():
        return None
    peer, source = np.argwhere(bad_QP)[0]
    return ep.ranks[source] if peer == esp.index else esp.ranks[peer]


def _raise_refusals(received: Metadata, reason: str | None, nonfinite: NonFinite | None, ep: Group, esp: Group) -> None:
    """Raise the refusal of this or another rank, or non-finite input. All ranks continue together: no verdict."""
    me = ep.job.rank
    if reason is not None:
        raise RankError(f"rank {me}: {reason}", agreed=True)
    if received.is_refused.any():
        culprit = int(received.rank[received.is_refused > 0].min())
        raise RankError(f"rank {me}: ended because {ep.board.refusal(culprit)}", agreed=True)
    if received.num_nonfinite.any():
        text = "numbers are NaN or infinite" if nonfinite is None else nonfinite.text
        if received.num_nonfinite[esp.index, ep.index]:
            ep.board.refuse(CHECK, text, ep.size * esp.size)
            raise RankError(f"rank {me}: {text}", agreed=True)
        verdict = Verdict(int(received.rank[received.num_nonfinite > 0].min()), CHECK, text)
        raise RankError(f"rank {me}: ended because {verdict}", agreed=True)
