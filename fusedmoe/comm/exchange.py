"""The token exchange of one layer, created by the metadata exchange (`comm/metadata.py`). Padding is not sent.

Each rank dispatches a token once to every rank that hosts its experts. An all-gather over the expert-sharding group
gives every shard of an expert all of its tokens, ordered by (sharding peer, source rank). Reduce-scatter and combine
return the results. Expert assignments and router weights are sent separately, one row per (token, k) pair.

Two ranks, two experts each, top-2. Rank 0 has token a for experts 0 and 1, b for 1 and 2; rank 1 has c for 0 and 3:

    counts_E    rank 0 [1, 2, 1, 0]      rank 1 [1, 0, 0, 1]      pairs for each expert
    tokens_W    rank 0 [2, 1]            rank 1 [1, 1]            tokens to each rank
    dispatch    rank 0 a b|b  ->  a b c        rank 1 c|c  ->  b c
    combine     rank 0 A B C  ->  A B|B        rank 1 B C  ->  C|C
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedmoe.comm.all_to_all import AllToAll, Traffic, TwoLevelAllToAll
from fusedmoe.comm.collectives import (
    MAX_DATA_BYTES,
    all_gather_rows,
    all_to_all_rows,
    compare_calls,
    reduce_scatter_rows,
)
from fusedmoe.comm.failure.blame import foreign_data_error
from fusedmoe.comm.failure.board import BACKWARD_SUFFIX, Verdict
from fusedmoe.comm.forwarding import Forwarding
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import (
    INPUT_CHECK,
    NUM_DTYPES,
    AgreedMetadata,
    ExpertCalls,
    Metadata,
    NonFiniteCount,
    RowForm,
    TokenCounts,
    require_callable_experts,
    require_equal_row_forms,
)
from fusedmoe.errors import RankError
from fusedmoe.kernels.deduplicate import ReceivedPairs, decode, find_invalid_codes, pack, pairs_from_counts, unpack

_OPERATION = "exchange of counts"
# Numbers of `Metadata` columns: all, the last ones (from the device), and the first ones (from a `RowForm`).
_NUM_COLUMNS, _NUM_DEVICE_COLUMNS, _NUM_FORM_COLUMNS = len(Metadata._fields), 3, len(RowForm._fields)
# Exchanges over each process group, which topologies of different ranks and lifetimes may share.
_num_calls_by_group: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class RowExchange:
    """The collectives for one set of rows [n, ...] of any dtype: dispatch and all-gather, reduce-scatter and combine.

    All ranks call them in the same order. They compare calls in the metadata exchange, and again in the backward pass.
    `num_rows`: rows on this rank after dispatch and all-gather.

    Args:
        recv_QP: rows received per shard of the experts (ESP rank) and source rank (EP rank).
        call: the name of the exchange, the same on every rank.
        compared: axes ("ep", "esp") over which ranks have compared this exchange's call, shared by all chunks. None:
            both.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        traffic: Traffic,
        recv_QP: np.ndarray,
        call: str = "an exchange",
        compared: set[str] | None = None,
    ) -> None:
        self.call = call
        self._checked_axes = {algorithm.group.axis, esp.axis} if compared is None else compared
        self.algorithm, self._esp = algorithm, esp
        self._traffic, self._counts_Q = traffic, recv_QP.sum(1).tolist()
        self.num_rows, self.num_sent, self.num_received = sum(self._counts_Q), sum(traffic.send), sum(traffic.recv)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send [num_sent, ...] rows, by destination, to the experts' ranks; return [num_received, ...], by source."""
        if rows.shape[:1] != (self.num_sent,) or self.algorithm.group.axis not in self._checked_axes:
            self._check_rows(self.algorithm.group, rows, self.num_sent, "dispatch")
        return self.algorithm.exchange(rows, self._traffic, "dispatch")

    def combine(self, rows: Tensor) -> Tensor:
        if rows.shape[:1] != (self.num_received,) or self.algorithm.group.axis not in self._checked_axes:
            self._check_rows(self.algorithm.group, rows, self.num_received, "combine")
        return self.algorithm.exchange_back(rows, self._traffic, "combine")

    def all_gather(self, rows: Tensor) -> Tensor:
        """All-gather [num_received, ...] rows over the experts' shards; return [num_rows, ...] by (shard, source)."""
        if rows.shape[:1] != (self.num_received,) or self._esp.axis not in self._checked_axes:
            self._check_rows(self._esp, rows, self.num_received, "all-gather of expert shards")
        return all_gather_rows(self._esp, rows, self._counts_Q, "all-gather of expert shards", is_compared=True)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sum results over the shards; adjoint of `all_gather`."""
        if rows.shape[:1] != (self.num_rows,) or self._esp.axis not in self._checked_axes:
            self._check_rows(self._esp, rows, self.num_rows, "reduce-scatter of expert shards")
        return reduce_scatter_rows(self._esp, rows, self._counts_Q, "reduce-scatter of expert shards", is_compared=True)

    def begin_backward(self) -> None:
        """Make ranks compare their calls again at the first rows over each group."""
        # This rank may be the only one that runs a backward pass.
        self._checked_axes.clear()

    def _check_rows(self, group: Group, rows: Tensor, count: int, operation: str) -> None:
        if rows.shape[:1] != (count,):
            text = f"the exchange has {count} rows, but the rows have shape {list(rows.shape)}"
            self.algorithm.group.refuse(operation, f"{text}. Padding is not sent: Layout.exact() removes it")
        self._checked_axes.add(group.axis)
        compare_calls(group, f"{operation} {BACKWARD_SUFFIX}", f"of {self.call}")


class ExchangeSizes(NamedTuple):
    """Row counts exchanged between ranks, on the host. There is usually one micro-batch (p = 1).

    Attributes:
        send_PC: [peer, p · local experts + p], pairs that this rank sends for each expert, then tokens.
        recv_QPC: [sharding peer, source rank, …], pairs and tokens received, in the same columns.
    """

    send_PC: np.ndarray
    recv_QPC: np.ndarray
    micro_batches: int = 1

    @property
    def send_PE(self) -> np.ndarray:
        return self.send_PC[:, : -self.micro_batches]

    @property
    def send_Pp(self) -> np.ndarray:
        return self.send_PC[:, -self.micro_batches :]

    @property
    def recv_QPE(self) -> np.ndarray:
        return self.recv_QPC[..., : -self.micro_batches]

    @property
    def recv_QPp(self) -> np.ndarray:
        return self.recv_QPC[..., -self.micro_batches :]


class ChunkedExchange(NamedTuple):
    """An exchange split into chunks.

    `sent_Gi`, `recv_Gi`: rows in chunk i of each contiguous segment G of the unchunked rows. A segment has one
    destination or source, and one micro-batch or expert.
    """

    exchanges: list[RowExchange]
    sent_Gi: np.ndarray
    recv_Gi: np.ndarray


class Exchange(RowExchange):
    """The exchange of a batch with known sizes, created by `exchange_metadata`.

    Args:
        has_row_per_pair: True if a row is sent for each pair; `pair_exchange` is then the exchange itself.
        ranks_QP: global source rank of the rows of each sharding peer and source, for errors; None if unknown.
        forwarding: two-level forwarding inside nodes; None: tokens are sent directly to each rank.
        agreed: its fields become attributes.
    Attributes:
        counts_RE: [sharding peer · source rank, p · local experts], this rank's pairs after all-gather.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        sizes: ExchangeSizes,
        device: torch.device,
        has_row_per_pair: bool = False,
        call: str = "an exchange",
        ranks_QP: np.ndarray | None = None,
        forwarding: Forwarding | None = None,
        agreed: AgreedMetadata | None = None,
    ) -> None:
        recv_QP = sizes.recv_QPp.sum(2)
        if forwarding is None:
            traffic = algorithm.make_traffic(sizes.send_Pp.sum(1).tolist(), recv_QP[esp.index].tolist())
        else:
            traffic = forwarding.make_traffic()
        super().__init__(algorithm, esp, traffic, recv_QP, call)
        self.sizes, self.has_row_per_pair, self._device, self._ranks_QP = sizes, has_row_per_pair, device, ranks_QP
        self._forwarding = forwarding
        self.agreed = agreed = agreed or AgreedMetadata()
        self.form, self.max_pairs, self.tokens_per_pair = agreed.form, agreed.max_pairs, agreed.tokens_per_pair
        self.needs_module_calls = agreed.needs_module_calls
        self.tokens_require_grad, self.weights_require_grad = agreed.tokens_require_grad, agreed.weights_require_grad

    @cached_property
    def pair_exchange(self) -> RowExchange:
        """First use is collective for two-level algorithms."""
        sizes = self.sizes
        return self if self.has_row_per_pair else self.with_row_counts(sizes.send_PE.sum(1), sizes.recv_QPE.sum(2))

    @cached_property
    def counts_RE(self) -> Tensor:
        recv_QPE = self.sizes.recv_QPE
        return torch.from_numpy(np.ascontiguousarray(recv_QPE).reshape(-1, recv_QPE.shape[2])).to(self._device)

    @cached_property
    def token_counts_R(self) -> Tensor:
        """Tokens on this rank after all-gather, [sharding peer · source rank · micro-batch]."""
        return torch.from_numpy(np.ascontiguousarray(self.sizes.recv_QPp).reshape(-1)).to(self._device)

    def with_row_counts(self, send_P: np.ndarray, recv_QP: np.ndarray) -> RowExchange:
        """Return a `RowExchange` for other row counts. Collective for two-level algorithms."""
        traffic = self.algorithm.make_traffic(send_P.tolist(), recv_QP[self._esp.index].tolist())
        return RowExchange(self.algorithm, self._esp, traffic, recv_QP, self.call, self._checked_axes)

    def split_chunks(self, degree: int) -> ChunkedExchange:
        """Split the rows for each destination into `degree` chunks of equal size (`all_to_all.chunk_size`).

        The destination is a rank; with forwarding a node; with `has_row_per_pair` an expert. Collective for two-level
        algorithms.
        """
        if self._forwarding is not None:
            traffics, recv_iQP = self._forwarding.chunks(degree)
            parts = zip(traffics, recv_iQP, strict=True)
            exchanges = [RowExchange(self.algorithm, self._esp, *part, self.call, self._checked_axes) for part in parts]
            sent_iG = np.array([traffic.send for traffic in traffics])
            return ChunkedExchange(exchanges, sent_iG.T, recv_iQP.reshape(degree, -1).T)
        send_Pp, recv_QPp = self.sizes.send_Pp, self.sizes.recv_QPp
        if self.has_row_per_pair:
            send_Pp, recv_QPp = self.sizes.send_PE, self.sizes.recv_QPE
        ends = np.arange(degree + 1)
        sent_PpI, recv_QPpI = (np.diff(counts[..., None] * ends // degree) for counts in (send_Pp, recv_QPp))
        send_PI, recv_QPI = sent_PpI.sum(1), recv_QPpI.sum(2)
        exchanges = [self.with_row_counts(send_PI[:, i], recv_QPI[..., i]) for i in range(degree)]
        return ChunkedExchange(exchanges, sent_PpI.reshape(-1, degree), recv_QPpI.reshape(-1, degree))

    def exchange_pairs(
        self, code_N: Tensor | None, weight_N: Tensor | None, row_N: Tensor | None, k: int
    ) -> tuple[ReceivedPairs, Tensor | None]:
        """Exchange expert assignments and router weights; return those of this rank's experts. Collective.

        Args:
            code_N: packed expert assignment of each sent pair (`SentTokens`); None: each row is one pair.
            weight_N: router weight of each row; None: all 1.
            row_N: index in weight_N of each sent pair's row; None: each row is one pair. May be padded, as code_N.
            k: maximum pairs per token.
        Raises:
            RankError: a rank sent assignments that contradict its announced counts.
        """
        pairs = self.pair_exchange
        if weight_N is not None:
            weight_N = weight_N[: pairs.num_sent] if row_N is None else weight_N[row_N[: pairs.num_sent]]
        message = pack(None if code_N is None else code_N[: pairs.num_sent], weight_N)
        if message is not None:
            message = pairs.all_gather(pairs.dispatch(message))
        code, weight = (None if value_N is None else value_N.dtype for value_N in (code_N, weight_N))
        return self.decode_pairs(message, code, weight, k)

    def decode_pairs(
        self, message: Tensor | None, code: torch.dtype | None, weight: torch.dtype | None, k: int
    ) -> tuple[ReceivedPairs, Tensor | None]:
        """Decode a received message of `pack` into pairs and weights. `code`, `weight`: dtypes that were packed."""
        if code is None:
            weight_P = None if message is None else message[:, 0]
            return pairs_from_counts(self.counts_RE.view(-1, self.num_local_experts), self.num_rows), weight_P
        assert message is not None
        code_P, weight_P = unpack(message, code, weight)
        self._check_expert_assignments(code_P, k)
        return decode(code_P), weight_P

    def match_requires_grad(self, x_SM: Tensor, weight_N: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Make both tensors require gradients if any rank's do, because the backward pass is collective."""
        if torch.is_grad_enabled():
            if self.tokens_require_grad and not x_SM.requires_grad:
                x_SM = x_SM.detach().requires_grad_()
            if self.weights_require_grad and weight_N is not None and not weight_N.requires_grad:
                weight_N = weight_N.detach().requires_grad_()
        return x_SM, weight_N

    def return_weight_grads(self, dweight_P: Tensor, row_N: Tensor | None, rows: int) -> Tensor:
        """Send the gradients of router weights to the ranks of the tokens; return this rank's, [rows]. Collective.

        `row_N`: as for `exchange_pairs`. Padding rows are zero.
        """
        pairs = self.pair_exchange
        back_N = pairs.combine(pairs.reduce_scatter(dweight_P[:, None]))[:, 0]
        if row_N is None:
            return nn.functional.pad(back_N, (0, rows - len(back_N)))
        return back_N.new_zeros(rows).index_copy_(0, row_N[: len(back_N)], back_N)

    @property
    def num_local_experts(self) -> int:
        return self.counts_RE.shape[1] // self.sizes.micro_batches

    def _check_expert_assignments(self, code_P: Tensor, k: int) -> None:
        """Raise `RankError` if received expert assignments contradict the counts that their senders announced.

        Assignments index this rank's memory, so they must be valid. On CUDA a device assertion ends the process
        instead.

        Args:
            code_P: the packed expert assignment of each received pair (`kernels/deduplicate.py`).
            k: maximum number of pairs of a token on this rank.
        """
        sources, micro_batches = len(self.counts_RE), self.sizes.micro_batches
        counts_RE = self.counts_RE.view(sources * micro_batches, -1)
        wrong_R = find_invalid_codes(code_P, counts_RE, self.token_counts_R, k)
        if wrong_R.is_cuda:  # without a host synchronisation: the device aborts the process
            torch.ops.aten._assert_async.msg(~wrong_R.any(), "expert assignments contradict the counts that ranks sent")
        elif bool(wrong_R.any()):
            ep, esp = self.algorithm.group, self._esp
            peer, source = divmod(int(wrong_R.nonzero()[0]) // micro_batches, ep.size)
            # Rows that another shard forwarded may come from a rank in neither group of this rank.
            passed_on = ep.ranks[source] if peer == esp.index else esp.ranks[peer]
            culprit = passed_on if self._ranks_QP is None else int(self._ranks_QP[peer, source])
            raise foreign_data_error(ep.board, f"exchange of pairs of {self.call}", f"the {ep}", culprit)


def exchange_metadata(
    algorithm: AllToAll,
    esp: Group,
    counts_E: Tensor,
    form: RowForm,
    refusal: str | NonFiniteCount | None = None,
    *,
    tokens: TokenCounts | None = None,
    shard_counts: Group | None = None,
    held: int | None = None,
    call: str = "a layer",
    **columns: int,
) -> Exchange:
    """Exchange row counts within an expert-parallel and an expert-sharding group. Collective.

    Args:
        counts_E: [E] integers, this rank's pairs for each of the E experts.
        refusal: reason to send no rows, raised on all ranks; a `NonFiniteCount` counts as a refusal if nonzero.
        tokens: the tokens to be sent; None: one row per pair.
        shard_counts: group that gathers the counts while `esp` is busy with another exchange.
        held: experts on this rank, if fewer than its share of `counts_E`: the columns of the others are ignored.
        call: the layer's name for errors, the same on every rank. columns: further `Metadata` fields.
    Raises:
        ConfigError, RankError: a rank refused or has non-finite input; invalid counts; different forms or expert calls.
    """
    ep = algorithm.group
    if algorithm.wire is not None:
        form = form._replace(wire=str(algorithm.wire))
    if problem := _describe_invalid_counts(counts_E, ep.size) or form.refusal():
        ep.refuse(INPUT_CHECK, problem)
    nonfinite = refusal if isinstance(refusal, NonFiniteCount) else None
    reason = refusal if isinstance(refusal, str) else None
    # Sent despite a refusal: peers wait for the message.
    if reason is not None:
        ep.board.refuse(INPUT_CHECK, reason, ep.size * esp.size)
    elif ep.job.board is not None:
        ep.job.board.clear_refusal()
    counts_PE = counts_E.long().view(ep.size, -1)
    tokens_Pp = counts_PE.sum(1, keepdim=True) if tokens is None else tokens.tokens_Wp.long().view(ep.size, -1)
    own_metadata = Metadata(*form.columns(), rank=ep.job.rank, is_refused=reason is not None, **columns)
    sent_PC = _make_messages(counts_PE, tokens_Pp, own_metadata, nonfinite)
    number = 0
    if ep.handle is not None:
        number = _num_calls_by_group[ep.handle] = _num_calls_by_group.get(ep.handle, 0) + 1
    call = f"call {number} of {call}"
    send_PC, recv_QPC = _send_messages(sent_PC, ep, esp, shard_counts or esp, f"of {call} with {len(counts_E)} experts")
    E, p = counts_PE.shape[1], tokens_Pp.shape[1]
    received = Metadata(*recv_QPC[..., -_NUM_COLUMNS:].transpose(2, 0, 1))
    # Ranks on GPUs do not compare calls, so sizes may be data of another operation.
    if ep.size * esp.size > 1 and (sender := _find_foreign_sender(recv_QPC, received, E, ep, esp)) is not None:
        raise foreign_data_error(ep.board, _OPERATION, f"the {ep}", sender)
    maxima = Metadata(*recv_QPC[..., -_NUM_COLUMNS:].max((0, 1)).tolist())
    if maxima.is_refused or maxima.num_nonfinite:
        _raise_refusals(received, reason, nonfinite, ep, esp)
    if maxima.expert_calls:
        require_callable_experts(received, ep, esp)
    if (recv_QPC[..., -_NUM_COLUMNS : _NUM_FORM_COLUMNS - _NUM_COLUMNS] != own_metadata[:_NUM_FORM_COLUMNS]).any():
        require_equal_row_forms(received, ep, esp)
    num_tokens, num_pairs = int(received.num_tokens.sum()), int(received.num_pairs.sum())
    agreed = AgreedMetadata(
        form,
        max_pairs=maxima.num_pairs,
        tokens_per_pair=num_tokens / num_pairs if num_pairs else 1.0,
        needs_module_calls=maxima.expert_calls == ExpertCalls.MODULE,
        tokens_require_grad=bool(maxima.tokens_require_grad),
        weights_require_grad=bool(maxima.weights_require_grad),
    )
    recv_QPC = recv_QPC[..., : E + p]
    if held is not None:
        recv_QPC = np.concatenate([recv_QPC[..., :held], recv_QPC[..., -p:]], -1)
    sizes, forwarding = ExchangeSizes(send_PC[:, : E + p], recv_QPC, p), None
    if tokens is not None and tokens.by_node is not None and isinstance(algorithm, TwoLevelAllToAll):
        forwarding = Forwarding(algorithm, esp, tokens.by_node, tokens.tokens_Wp, sizes.recv_QPp.sum(2))
    has_row_per_pair = tokens is None or tokens.has_row_per_pair
    return Exchange(algorithm, esp, sizes, counts_E.device, has_row_per_pair, call, received.rank, forwarding, agreed)


def _describe_invalid_counts(counts_E: Tensor, ranks: int) -> str:
    if counts_E.dim() != 1 or counts_E.is_floating_point() or counts_E.dtype == torch.bool:
        return f"counts of rows must be integers [E], got {counts_E.dtype} {list(counts_E.shape)}"
    if len(counts_E) == 0 or len(counts_E) % ranks:
        return f"{len(counts_E)} experts cannot be split over {ranks} ranks; choose a multiple of {ranks}"
    # Reading counts from a GPU would synchronize; `_find_foreign_sender` checks them on the host.
    if not counts_E.is_cuda and bool((counts_E < 0).any()):
        return f"counts of rows must not be negative, got {counts_E.tolist()}"
    return ""


@lru_cache(maxsize=256)
def _cached_host_columns(values: tuple[int, ...], *, is_pinned: bool) -> Tensor:
    # A pageable copy would synchronize. Cached: a layer sends few distinct values.
    return torch.tensor(values, dtype=torch.long, device="cpu", pin_memory=is_pinned)


def _make_messages(counts_PE: Tensor, tokens_Pp: Tensor, own: Metadata, nonfinite: NonFiniteCount | None) -> Tensor:
    """Return the message to each peer, [P, columns]. Does not synchronize with the device."""
    device = counts_PE.device
    from_host = _cached_host_columns(own[:-_NUM_DEVICE_COLUMNS], is_pinned=device.type == "cuda")
    number = counts_PE.new_zeros(()) if nonfinite is None else nonfinite.number.to(counts_PE.dtype)
    on_device = torch.stack([tokens_Pp.sum(), counts_PE.sum(), number])
    metadata_C = torch.cat([from_host.to(device, non_blocking=True), on_device])
    columns_PC = torch.cat([counts_PE, tokens_Pp, metadata_C.expand(len(counts_PE), -1)], 1)
    counts = columns_PC.shape[1] - _NUM_COLUMNS
    return torch.cat([columns_PC[:, :counts], columns_PC.sum(1, keepdim=True), columns_PC[:, counts:]], 1)


def _send_messages(
    sent_PC: Tensor, ep: Group, esp: Group, shard_counts: Group, details: str
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange messages. Returns on the host: sent [peer, …], received [sharding peer, source rank, …]."""
    one_per_rank, data = [1] * ep.size, b""
    if not sent_PC.is_cuda:
        table_PC = sent_PC.numpy()
        data = table_PC[:, :-_NUM_COLUMNS].tobytes() + table_PC[0, -_NUM_COLUMNS:].tobytes()
    if sent_PC.is_cuda or len(data) > MAX_DATA_BYTES:
        compare_calls(ep, _OPERATION, details)
        received_PC = all_to_all_rows(ep, sent_PC, one_per_rank, one_per_rank, _OPERATION, is_compared=True)
    else:  # the envelopes of `compare_calls` carry the messages to all peers
        received_PC = sent_PC
        if envelopes := compare_calls(ep, _OPERATION, details, data):
            numbers_WN = np.stack([np.frombuffer(envelope, np.int64) for envelope in envelopes])
            counts_WC = numbers_WN[:, :-_NUM_COLUMNS].reshape(ep.size, ep.size, -1)[:, ep.index]
            received_PC = torch.from_numpy(np.concatenate([counts_WC, numbers_WN[:, -_NUM_COLUMNS:]], 1))
    all_QPC = received_PC[None]
    if esp.size > 1:
        all_QPC = all_gather_rows(shard_counts, all_QPC, [1] * esp.size, _OPERATION)
    if not sent_PC.is_cuda:
        return sent_PC.numpy(), all_QPC.numpy()
    # The layer's only host synchronisation.
    both = torch.cat([sent_PC[None], all_QPC]).cpu().numpy()
    return both[0], both[1:]


def _find_foreign_sender(recv_QPC: np.ndarray, received: Metadata, experts: int, ep: Group, esp: Group) -> int | None:
    """Return the first rank that sent inconsistent metadata or another rank's number; None if all metadata is valid.

    Args:
        recv_QPC: [sharding peer, source rank, columns]: counts of pairs and of tokens, a checksum, `Metadata`.
        received: the `Metadata` columns, each [sharding peer, source rank].
        experts: number of the columns with counts of pairs.
    """
    counts_QPE, tokens_QPp = recv_QPC[..., :experts], recv_QPC[..., experts : -_NUM_COLUMNS - 1]
    expected_QP = received.rank.copy()  # only the sharding peer knows ranks outside both groups
    expected_QP[:, ep.index], expected_QP[esp.index] = esp.ranks, ep.ranks
    bad_QP = (received.rank != expected_QP) | (received.rank < 0) | (received.rank >= dist.get_world_size())
    bad_QP |= recv_QPC.sum(-1) != 2 * recv_QPC[..., -_NUM_COLUMNS - 1]
    bad_QP |= (received.dtype < 1) | (received.weights < 0)  # rows always have a dtype
    bad_QP |= np.maximum(received.dtype, received.weights) >= NUM_DTYPES
    pairs_QP = counts_QPE.sum(-1, dtype=np.float64)  # int64 would wrap around
    bad_QP |= (counts_QPE < 0).any(-1) | (pairs_QP > received.num_pairs)
    # In each micro-batch every token has at least one pair, and every pair has a token.
    pairs_QPp = counts_QPE.reshape(*tokens_QPp.shape, -1).sum(-1, dtype=np.float64)
    bad_QP |= ((tokens_QPp < 0) | (tokens_QPp > pairs_QPp) | ((tokens_QPp == 0) & (pairs_QPp > 0))).any(-1)
    if not bad_QP.any():
        return None
    peer, source = np.argwhere(bad_QP)[0]
    return ep.ranks[source] if peer == esp.index else esp.ranks[peer]


def _raise_refusals(
    received: Metadata, reason: str | None, nonfinite: NonFiniteCount | None, ep: Group, esp: Group
) -> None:
    me = ep.job.rank
    if reason is not None:
        raise RankError(f"rank {me}: {reason}", agreed=True)
    if received.is_refused.any():
        culprit = int(received.rank[received.is_refused > 0].min())
        raise RankError(f"rank {me}: ended because {ep.board.refusal(culprit)}", agreed=True)
    if received.num_nonfinite.any():
        text = "values are NaN or infinite" if nonfinite is None else nonfinite.text
        if received.num_nonfinite[esp.index, ep.index]:
            ep.board.refuse(INPUT_CHECK, text, ep.size * esp.size)
            raise RankError(f"rank {me}: {text}", agreed=True)
        verdict = Verdict(int(received.rank[received.num_nonfinite > 0].min()), INPUT_CHECK, text)
        raise RankError(f"rank {me}: ended because {verdict}", agreed=True)
