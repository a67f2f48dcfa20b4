"""One layer's exchange of tokens: a meeting of the ranks first, then the tokens; no padding travels.

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
from fusedmoe.comm.metadata import ExpertCalls, calls_conflict
from fusedmoe.comm.row_form import RowForm, differ
from fusedmoe.errors import RankError
from fusedmoe.kernels.deduplicate import Received, Sending, decode, pack, rows_of_counts, unpack, wrong_codes

#: The name of the operation in errors about bad input.
CHECK = "the check of the layer's input"
# Behind the counts of pairs and tokens of its message each rank has six numbers of metadata: how many tokens and how
# many pairs it sends; its number, whether it refuses, and which gradients it needs; the form of its rows
# (`RowForm.packed`); bad numbers; and a sum of all.
_METADATA = 6
# Calls of layers over each process group, the same number on all of its ranks: topologies that share one need not lie
# alike on all ranks, nor end there at the same time.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Part:
    """The collectives of some rows of an exchange: dispatch and all-gather, reduce-scatter and combine.

    Each takes and returns rows [n, ...] of any dtype; every rank calls the same ones in the same order. The ranks have
    compared what they call when they met, for the forward pass; for a backward pass they do so before its first rows
    (`turn`).

    Args:
        algorithm: how rows cross the expert-parallel group.   esp: the expert-sharding group.
        traffic: rows sent and received.   come_QP: rows received by sharding peer and source rank.
        call: the name of the exchange, the same on every rank.
        agreed: axes of the groups that have compared; shared by all parts of an exchange. None: all have.
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
        agreed: set[str] | None = None,
    ) -> None:
        self.call = call
        self._agreed = {algorithm.group.axis, esp.axis} if agreed is None else agreed
        self.algorithm, self._esp = algorithm, esp
        self._traffic, self._gathered = traffic, come_QP.sum(1).tolist()
        self.rows, self.sent, self.received = sum(self._gathered), sum(traffic.send), sum(traffic.recv)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Sends rows to the experts' ranks: [sent, ...] by destination -> [received, ...] by source."""
        if rows.shape[:1] != (self.sent,) or self.algorithm.group.axis not in self._agreed:
            self._begin(self.algorithm.group, rows, self.sent, "dispatch")
        return self.algorithm.exchange(rows, self._traffic, "dispatch")

    def combine(self, rows: Tensor) -> Tensor:
        """Sends rows back to the tokens' ranks: the inverse of `dispatch`."""
        if rows.shape[:1] != (self.received,) or self.algorithm.group.axis not in self._agreed:
            self._begin(self.algorithm.group, rows, self.received, "combine")
        return self.algorithm.bring_back(rows, self._traffic, "combine")

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gathers the rows for all shards of the experts: [received, ...] -> [rows, ...] by (shard, source)."""
        if rows.shape[:1] != (self.received,) or self._esp.axis not in self._agreed:
            self._begin(self._esp, rows, self.received, "all-gather of expert shards")
        return all_gather_rows(self._esp, rows, self._gathered, "all-gather of expert shards", agreed=True)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sums the shards' results and returns each peer its own rows: the adjoint of `all_gather`."""
        if rows.shape[:1] != (self.rows,) or self._esp.axis not in self._agreed:
            self._begin(self._esp, rows, self.rows, "reduce-scatter of expert shards")
        return reduce_scatter_rows(self._esp, rows, self._gathered, "reduce-scatter of expert shards", agreed=True)

    def turn(self) -> None:
        """Begins a backward pass: this rank may be the only one that has one."""
        # So the ranks compare what they call once more, at the first rows over each group.
        self._agreed.clear()

    def _begin(self, group: Group, rows: Tensor, count: int, operation: str) -> None:
        """Refuses rows of another number; compares what the ranks call, before the first rows of a backward pass."""
        if rows.shape[:1] != (count,):
            text = f"the exchange is of {count} rows, but these are {list(rows.shape)}"
            self.algorithm.group.refuse(operation, f"{text}. Padding does not travel: Layout.exact() leaves it out")
        self._agreed.add(group.axis)
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


class Sized(Part):
    """An exchange whose sizes are known: the collectives of its tokens and, as `pairs`, those of its pairs.

    Args:
        sizes: what the ranks told each other.   device: of the rows.
        by_pairs: a row travels for each pair, so that both are the same.
        ranks_QP: the rank that rows of each sharding peer and source began on, for errors; None: not known.
        forwarding: how tokens go on inside nodes; None: they go to each rank by themselves.
    Attributes:
        counts_RE: [sharding peer · source rank, p · local expert] pairs of this rank after dispatch and all-gather.
        tokens_learn, weights_learn: gradients of tokens and of router weights go back: some rank needs them.
        last: tokens that are in the last chunks, as `deduplicate.sending` has sorted them; None: tokens go as they lie.
    """

    tokens_learn = weights_learn = True
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
    ) -> None:
        come_QP = sizes.come_QPp.sum(2)
        if forwarding is None:
            traffic = algorithm.traffic(sizes.send_Pp.sum(1).tolist(), come_QP[esp.index].tolist())
        else:
            traffic = forwarding.traffic()
        super().__init__(algorithm, esp, traffic, come_QP, call)
        self.sizes, self.by_pairs, self._device, self._ranks_QP = sizes, by_pairs, device, ranks_QP
        self._forwarding = forwarding

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
        return Part(self.algorithm, self._esp, traffic, come_QP, self.call, self._agreed)

    def cut(self, degree: int) -> Cut:
        """Splits the exchange into `degree` parts, each with its share (`all_to_all.share`) of the tokens of every rank
        for every rank, or for every node that forwards them; of pairs by experts, where a row travels for each.

        Collective for two-level algorithms.
        """
        if self._forwarding is not None:
            traffics, come_iQP = self._forwarding.chunks(degree)
            chunks = zip(traffics, come_iQP, strict=True)
            parts = [Part(self.algorithm, self._esp, *chunk, self.call, self._agreed) for chunk in chunks]
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


class Bad(NamedTuple):
    """Numbers that should be finite and are not, for the ranks to tell each other without the host's waiting for them.

    Attributes:
        number: their count, an integer scalar on the device of the rows.
        text: what is wrong then, and its cure; the same on all ranks.
    """

    number: Tensor
    text: str


class Exchange(Sized):
    """An exchange between the ranks: their meeting, which making it is, and its collectives.

    Making one is collective over the expert-parallel and the expert-sharding group.

    Args:
        algorithm: how rows cross the expert-parallel group.
        esp: the expert-sharding group.
        counts_E: [E] integers, pairs of this rank for each of the E experts.
        form: of the rows that will travel.
        refusal: why this rank cannot take part, if so. Then nothing is sent, and all ranks end with this reason. `Bad`:
            it cannot where the number is not zero.
        tokens_Wp: [W] or [W, p] integers, tokens that this rank sends to each rank, of each micro-batch; None: as many
            as pairs, `by_pairs`.
        hop: the same tokens by node (`sending` of them over nodes), for a two-level algorithm to forward there; None:
            they go to each rank by themselves.
        by_pairs: a row travels for each pair.
        sizes: carries sizes in place of `esp`, for an exchange that begins while rows of another one are gathered.
        held: how many experts this rank has, where that is not E over the ranks but at most that; the first ones.
        call: the layer's name, the same on every rank; for errors, and to tell layers apart.
        learn: this rank needs gradients of its tokens, and of their router weights.
        calls: how this rank can call its experts.
    Attributes:
        most_pairs: the most pairs that any of the ranks sends.   share: tokens that travel for each pair, over all
            ranks, from 1/K to 1. Both are the same on all of them.
        as_module: some rank calls its experts as a module: no rank may work by a plan.
    Raises:
        ConfigError, RankError: this or another rank refused or has bad numbers; counts that cannot be; forms that
            differ; a rank that must call its experts as a module, and one that cannot.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        counts_E: Tensor,
        form: RowForm,
        refusal: str | Bad | None = None,
        tokens_Wp: Tensor | None = None,
        hop: Sending | None = None,
        by_pairs: bool = False,
        sizes: Group | None = None,
        held: int | None = None,
        call: str = "a layer",
        learn: tuple[bool, bool] = (True, True),
        calls: ExpertCalls = ExpertCalls.EITHER,
    ) -> None:
        ep = algorithm.group
        me = ep.job.rank
        if problem := _wrong(counts_E, form, ep.size):
            ep.refuse(CHECK, problem)
        counts_E = counts_E.long()
        # A rank that refuses still takes part in the meeting: its peers hear of it there, and nobody waits.
        refusal, bad = (None, refusal) if isinstance(refusal, Bad) else (refusal, None)
        if refusal is not None:
            ep.board.refuse(CHECK, refusal, ep.size * esp.size)
        elif ep.job.board is not None:
            ep.job.board.go_on()
        counts_PE = counts_E.view(ep.size, -1)
        tokens_Pp = counts_PE.sum(1, keepdim=True) if tokens_Wp is None else tokens_Wp.view(ep.size, -1)
        note = (2 * me + (refusal is not None)) * 16 + 4 * calls + 2 * learn[0] + learn[1]
        own_form = form.packed()
        known = [counts_E.new_full((), number) for number in (note, own_form, 0)]
        metadata = tokens_Pp.sum(), counts_E.sum(), *known[:2], known[2] if bad is None else bad.number
        metadata_C = torch.stack([number.to(counts_E.dtype) for number in metadata])
        # The one host synchronisation of a layer: all that the host needs to know comes in one copy.
        sent_PC = torch.cat([counts_PE, tokens_Pp.to(counts_E.dtype), metadata_C.expand(ep.size, -1)], 1)
        sent_PC = torch.cat([sent_PC, sent_PC.sum(1, keepdim=True, dtype=sent_PC.dtype)], 1)
        ones, operation = [1] * ep.size, "exchange of counts"
        number = 0
        if ep.handle is not None:
            number = _calls[ep.handle] = _calls.get(ep.handle, 0) + 1
        call = f"call {number} of {call}"
        details = f"of {call} with {len(counts_E)} experts"
        if sent_PC.is_cuda or sent_PC.nbytes > ROOM:
            begin(ep, operation, details)
            received_PC = all_to_all_rows(ep, sent_PC, ones, ones, operation, agreed=True)
        else:  # the envelope carries all that each rank sends, of which this rank's column is picked
            received_PC = sent_PC
            if tables := begin(ep, operation, details, sent_PC.numpy().tobytes()):
                shape, dtype_of_counts = sent_PC.shape, sent_PC.numpy().dtype
                all_WPC = np.stack([np.frombuffer(table, dtype_of_counts).reshape(shape) for table in tables])
                received_PC = torch.from_numpy(all_WPC[:, ep.index].copy())
        # The shards of an expert get the same tokens, so each needs the counts of all its sharding peers.
        gathered_QPC = received_PC[None]
        if esp.size > 1:
            gathered_QPC = all_gather_rows(sizes or esp, gathered_QPC, [1] * esp.size, operation)
        told_PC, all_QPC = _on_host(sent_PC, gathered_QPC)
        E, p = counts_PE.shape[1], tokens_Pp.shape[1]
        # GPUs compare no envelopes: bytes of another operation show in the metadata, before rows are sized by them.
        if ep.size * esp.size > 1 and (stranger := _stranger(all_QPC, E, ep, esp)) is not None:
            raise other_operation(ep.board, operation, f"the {ep}", stranger)
        tokens_QP, pairs_QP, note_QP, form_QP, bad_QP, _ = all_QPC[..., -_METADATA:].transpose(2, 0, 1)
        ranks_QP = note_QP // 32
        culprits = sorted(ranks_QP[note_QP // 16 % 2 > 0].tolist())
        # Both are raised on all ranks of the exchange, which go on together: no verdict for the job.
        if refusal is not None:
            raise RankError(f"rank {me}: {refusal}", agreed=True)
        if culprits:
            raise RankError(f"rank {me}: ended because {ep.board.refusal(culprits[0])}", agreed=True)
        if bad_QP.any():
            text = "numbers are NaN or infinite" if bad is None else bad.text
            if bad_QP[esp.index, ep.index]:
                ep.board.refuse(CHECK, text, ep.size * esp.size)
                raise RankError(f"rank {me}: {text}", agreed=True)
            verdict = Verdict(int(ranks_QP[bad_QP > 0].min()), CHECK, text)
            raise RankError(f"rank {me}: ended because {verdict}", agreed=True)
        calls_QP = note_QP // 4 % 4
        self.as_module = bool((calls_QP == ExpertCalls.MODULE).any())
        if self.as_module and (conflict := calls_conflict(ranks_QP, calls_QP)):
            ep.board.refuse(CHECK, conflict, ep.size * esp.size)
            raise RankError(f"rank {me}: {CHECK}: {conflict}", agreed=True)
        if (form_QP != own_form).any():
            text, odd = differ(dict(zip(ranks_QP.flat, form_QP.flat, strict=True)))
            if odd is None or odd == me:
                ep.board.refuse(CHECK, text, ep.size * esp.size)
                raise RankError(f"rank {me}: {CHECK}: {text}", agreed=True)
            raise RankError(f"rank {me}: ended because {Verdict(odd, CHECK, text)}", agreed=True)
        tokens, pairs = int(tokens_QP.sum()), int(pairs_QP.sum())
        self.most_pairs, self.share = int(pairs_QP.max()), tokens / pairs if pairs else 1.0
        self.tokens_learn, self.weights_learn = bool((note_QP & 2).any()), bool((note_QP & 1).any())
        come_QPC = all_QPC[..., :-_METADATA]
        if held is not None:
            come_QPC = np.concatenate([come_QPC[..., :held], come_QPC[..., -p:]], -1)
        told = ExchangeSizes(told_PC[:, :-_METADATA], come_QPC, p)
        forwarding = None
        if hop is not None and tokens_Wp is not None and isinstance(algorithm, TwoLevel):
            forwarding = Forwarding(algorithm, esp, hop, tokens_Wp, told.come_QPp.sum(2))
        by_pairs = by_pairs or tokens_Wp is None
        super().__init__(algorithm, esp, told, counts_E.device, by_pairs, call, ranks_QP, forwarding)


def _on_host(sent_PC: Tensor, all_QPC: Tensor) -> tuple[np.ndarray, np.ndarray]:
    if not sent_PC.is_cuda:
        return sent_PC.numpy(), all_QPC.numpy()
    both = torch.cat([sent_PC[None], all_QPC]).cpu().numpy()
    return both[0], both[1:]


def _stranger(all_QPC: np.ndarray, experts: int, ep: Group, esp: Group) -> int | None:
    """Returns the rank that sent, or passed on, what cannot be counts and metadata of the ranks named in it, if any."""
    counts_QPE, tokens_QPp = all_QPC[..., :experts], all_QPC[..., experts:-_METADATA]
    most_QP, rank_QP = all_QPC[..., 1 - _METADATA], all_QPC[..., 2 - _METADATA] // 32
    wanted_QP = rank_QP.copy()  # ranks that are in neither group are known to their sharding peer alone
    wanted_QP[:, ep.index], wanted_QP[esp.index] = esp.ranks, ep.ranks
    bad_QP = (rank_QP != wanted_QP) | (rank_QP < 0) | (rank_QP >= dist.get_world_size())
    bad_QP |= all_QPC[..., :-1].sum(-1, dtype=all_QPC.dtype) != all_QPC[..., -1]
    pairs_QP = counts_QPE.sum(-1, dtype=np.float64)  # integers would wrap around
    bad_QP |= (counts_QPE < 0).any(-1) | (pairs_QP > most_QP)
    # Each token has a pair at least, and each pair a token; of every micro-batch by itself.
    pairs_QPp = counts_QPE.reshape(*tokens_QPp.shape, -1).sum(-1, dtype=np.float64)
    bad_QP |= ((tokens_QPp < 0) | (tokens_QPp > pairs_QPp) | ((tokens_QPp == 0) & (pairs_QPp > 0))).any(-1)
    if not bad_QP.any():
        return None
    peer, source = np.argwhere(bad_QP)[0]
    return ep.ranks[source] if peer == esp.index else esp.ranks[peer]


def _wrong(counts_E: Tensor, form: RowForm, ranks: int) -> str:
    """Returns what is wrong with the sizes of an exchange, or ""."""
    if counts_E.dim() != 1 or counts_E.is_floating_point() or counts_E.dtype == torch.bool:
        return f"counts of rows must be integers [E], got {counts_E.dtype} {list(counts_E.shape)}"
    if len(counts_E) == 0 or len(counts_E) % ranks:
        return f"{len(counts_E)} experts cannot be split over {ranks} ranks; choose a multiple of {ranks}"
    # On a GPU looking at counts would wait for the device; there `_stranger` finds them, once they are on the host.
    if not counts_E.is_cuda and bool((counts_E < 0).any()):
        return f"counts of rows must not be negative, got {counts_E.tolist()}"
    return form.refusal()
