"""One layer's exchange of rows: an exchange of counts first, then the rows; no padding travels.

Rows leave a rank sorted by expert. Dispatch takes them over the expert-parallel group to the ranks that hold the
experts; the all-gather over the expert-sharding group then gives every shard of an expert all of its rows. They arrive
ordered by (sharding peer, source rank, local expert). Combine and reduce-scatter take results the same way back.

Two ranks, one expert each, top-1. Rank 0 has tokens a, b for expert 0 and c for expert 1; rank 1 has d for expert 0:

    counts_E    rank 0 [2, 1]      rank 1 [1, 0]
    dispatch    rank 0 a b|c  ->  a b d        rank 1 d|  ->  c
    combine     rank 0 A B D  ->  A B|C        rank 1 C   ->  D|
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.collectives import ROOM, all_gather_rows, all_to_all_rows, begin, reduce_scatter_rows
from fusedmoe.comm.failure.blame import other_operation
from fusedmoe.comm.failure.board import BACKWARD
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError

#: The name of the operation in errors about bad input.
CHECK = "the check of the layer's input"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Part:
    """The collectives of some of an exchange's rows: dispatch and all-gather, reduce-scatter and combine.

    Each takes and returns rows [n, ...] of any dtype; every rank calls the same ones in the same order. The ranks have
    compared what they call when they exchanged sizes, for the forward pass; for a backward pass they do so before its
    first rows (`turn`).

    Args:
        algorithm: how rows cross the expert-parallel group.   esp: the expert-sharding group.
        send_PE, come_QPE: rows sent to each peer's experts, and rows received by sharding peer, source rank, local
            expert.
        device: of `counts_RE`.
        call: the name of the exchange, the same on every rank.
        agreed: axes of the groups that have compared; shared by all parts of an exchange. None: all have.
    Attributes:
        counts_RE: [sharding peer · source rank, local expert] rows of this rank after dispatch and all-gather.
        rows, sent, received: how many these are; how many rows a dispatch sends, and how many it receives.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        send_PE: np.ndarray,
        come_QPE: np.ndarray,
        device: torch.device,
        call: str = "an exchange",
        agreed: set[str] | None = None,
    ) -> None:
        self.call = call
        self._agreed = {algorithm.group.axis, esp.axis} if agreed is None else agreed
        self._algorithm, self._esp = algorithm, esp
        self._traffic = algorithm.traffic(send_PE.sum(1).tolist(), come_QPE[esp.index].sum(1).tolist())
        self._back = self._traffic.back()  # once for all combines of the part, forward and backward
        self._gathered = come_QPE.sum((1, 2)).tolist()
        self.counts_RE = torch.from_numpy(come_QPE.reshape(-1, come_QPE.shape[2])).to(device)
        self.rows, self.sent, self.received = sum(self._gathered), int(send_PE.sum()), sum(self._traffic.recv)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Sends rows to the experts' ranks: [N, ...] sorted by expert -> [received, ...] by (source, local expert)."""
        if rows.shape[:1] != (self.sent,) or self._algorithm.group.axis not in self._agreed:
            self._begin(self._algorithm.group, rows, self.sent, "dispatch")
        return self._algorithm.exchange(rows, self._traffic, "dispatch")

    def combine(self, rows: Tensor) -> Tensor:
        """Sends rows back to the tokens' ranks: the inverse of `dispatch`."""
        if rows.shape[:1] != (self.received,) or self._algorithm.group.axis not in self._agreed:
            self._begin(self._algorithm.group, rows, self.received, "combine")
        return self._algorithm.exchange(rows, self._back, "combine")

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gathers the rows for all shards of the experts: [received, ...] -> [R, ...] by (shard, source, expert)."""
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
            self._algorithm.group.refuse(operation, f"{text}. Padding does not travel: Layout.exact() leaves it out")
        self._agreed.add(group.axis)
        begin(group, f"{operation} {BACKWARD}", f"of {self.call}")


class Exchange(Part):
    """An exchange of rows between the ranks: its counts, which making it exchanges, and its collectives.

    Making one is collective over the expert-parallel and the expert-sharding group.

    Args:
        algorithm: how rows cross the expert-parallel group.
        esp: the expert-sharding group.
        counts_E: [E] integers, rows that this rank sends to each of the E experts.
        dtype: of the rows that will travel.
        refusal: why this rank cannot take part, if so. Then nothing is sent, and all ranks end with this reason.
        sizes: carries sizes in place of `esp`, for an exchange that begins while rows of another one are gathered.
        held: how many experts this rank has, where that is not E over the ranks but at most that; the first ones.
        call: the layer's name, the same on every rank; for errors, and to tell layers apart.
    Attributes:
        most_rows: the most rows that any of the ranks sends; the same number on all of them.
        send_PE, come_QPE: as for `Part`, on the host.
    Raises:
        ConfigError, RankError: this or another rank refused, counts that cannot be, or dtypes that differ.
    """

    def __init__(
        self,
        algorithm: AllToAll,
        esp: Group,
        counts_E: Tensor,
        dtype: torch.dtype,
        refusal: str | None = None,
        sizes: Group | None = None,
        held: int | None = None,
        call: str = "a layer",
    ) -> None:
        ep = algorithm.group
        me = ep.job.rank
        if problem := _wrong(counts_E, dtype, ep.size):
            ep.refuse(CHECK, problem)
        # A rank that refuses still takes part in the exchange of counts: its peers hear of it there, and nobody waits.
        if refusal is not None:
            ep.board.refuse(CHECK, refusal, ep.size * esp.size)
        elif ep.job.board is not None:
            ep.job.board.go_on()
        # Two more columns are metadata of each rank: how many rows it sends; its number, whether it refuses, dtype.
        note = (2 * me + (refusal is not None)) * len(_DTYPES) + _DTYPES.index(dtype)
        metadata = [counts_E.sum().expand(ep.size, 1), counts_E.new_full((ep.size, 1), note)]
        sent_PE = torch.cat([counts_E.view(ep.size, -1), *metadata], 1)
        ones, operation = [1] * ep.size, "exchange of counts"
        call = f"call {ep.count_call()} of {call}"
        details = f"of {call} with {len(counts_E)} experts"
        if sent_PE.is_cuda or sent_PE.nbytes > ROOM:
            begin(ep, operation, details)
            received_PE = all_to_all_rows(ep, sent_PE, ones, ones, operation, agreed=True)
        else:  # the envelope carries all that each rank sends, of which this rank's column is picked
            received_PE = sent_PE
            if tables := begin(ep, operation, details, sent_PE.numpy().tobytes()):
                shape, dtype_of_counts = sent_PE.shape, sent_PE.numpy().dtype
                all_WPE = np.stack([np.frombuffer(table, dtype_of_counts).reshape(shape) for table in tables])
                received_PE = torch.from_numpy(all_WPE[:, ep.index].copy())
        # The shards of an expert get the same rows, so each needs the counts of all its sharding peers.
        all_QPE = all_gather_rows(sizes or esp, received_PE[None], [1] * esp.size, operation).cpu().numpy()
        # GPUs compare no envelopes: bytes of another operation show in the metadata, before rows are sized by them.
        if ep.size * esp.size > 1 and (stranger := _stranger(all_QPE, ep, esp)) is not None:
            raise other_operation(ep.board, operation, f"the {ep}", stranger)
        notes = sorted(all_QPE[..., -1].reshape(-1).tolist())
        culprits = [note // len(_DTYPES) // 2 for note in notes if note // len(_DTYPES) % 2]
        # Both are raised on all ranks of the exchange, which go on together: no verdict for the job.
        if refusal is not None:
            raise RankError(f"rank {me}: {refusal}", agreed=True)
        if culprits:
            raise RankError(f"rank {me}: ended because {ep.board.refusal(culprits[0])}", agreed=True)
        dtypes = {note // len(_DTYPES) // 2: _DTYPES[note % len(_DTYPES)] for note in notes}
        if len(set(dtypes.values())) > 1:
            each = ", ".join(f"{dtype} on rank {rank}" for rank, dtype in dtypes.items())
            text = f"rows of different dtypes cannot travel together: {each}"
            ep.board.refuse(CHECK, text, ep.size * esp.size)
            raise RankError(f"rank {me}: {CHECK}: {text}", agreed=True)
        self._device = counts_E.device
        self.send_PE, self.come_QPE = sent_PE[:, :-2].cpu().numpy(), all_QPE[..., :-2][..., :held]
        self.most_rows = int(all_QPE[..., -2].max())
        super().__init__(algorithm, esp, self.send_PE, self.come_QPE, counts_E.device, call)

    def parts(self, degree: int) -> list[Part]:
        """Splits the exchange into `degree` parts, each with its share of every rank's rows for every expert (`share`).

        Collective for two-level algorithms.
        """
        if degree == 1:
            return [self]
        shares = ((share(self.send_PE, i, degree), share(self.come_QPE, i, degree)) for i in range(degree))
        return [self.part(send, come) for send, come in shares]

    def part(self, send_PE: np.ndarray, come_QPE: np.ndarray) -> Part:
        """Makes a part of other rows of the same ranks, in these sizes. Collective for two-level algorithms."""
        return Part(self._algorithm, self._esp, send_PE, come_QPE, self._device, self.call, self._agreed)


def _stranger(all_QPE: np.ndarray, ep: Group, esp: Group) -> int | None:
    """Returns the rank that sent, or passed on, what cannot be counts and metadata of the ranks named in it, if any."""
    counts_QPE, most_QP, rank_QP = all_QPE[..., :-2], all_QPE[..., -2], all_QPE[..., -1] // len(_DTYPES) // 2
    wanted_QP = rank_QP.copy()  # ranks that are in neither group are known to their sharding peer alone
    wanted_QP[:, ep.index], wanted_QP[esp.index] = esp.ranks, ep.ranks
    bad_QP = (rank_QP != wanted_QP) | (rank_QP < 0) | (rank_QP >= dist.get_world_size())
    bad_QP |= (counts_QPE < 0).any(-1) | (counts_QPE.sum(-1, dtype=np.float64) > most_QP)  # integers would wrap around
    if not bad_QP.any():
        return None
    peer, source = np.argwhere(bad_QP)[0]
    return ep.ranks[source] if peer == esp.index else esp.ranks[peer]


def _wrong(counts_E: Tensor, dtype: torch.dtype, ranks: int) -> str:
    """Returns what is wrong with the sizes of an exchange, or ""."""
    if counts_E.dim() != 1 or counts_E.is_floating_point() or counts_E.dtype == torch.bool:
        return f"counts of rows must be integers [E], got {counts_E.dtype} {list(counts_E.shape)}"
    if len(counts_E) == 0 or len(counts_E) % ranks:
        return f"{len(counts_E)} experts cannot be split over {ranks} ranks; choose a multiple of {ranks}"
    # On a GPU looking at counts would wait for the device; there `_stranger` finds them, once they are on the host.
    if not counts_E.is_cuda and bool((counts_E < 0).any()):
        return f"counts of rows must not be negative, got {counts_E.tolist()}"
    if dtype not in _DTYPES:
        return f"rows of {dtype} cannot travel; convert them to one of {', '.join(map(str, _DTYPES))}"
    return ""


def share(counts: np.ndarray, part: int, degree: int) -> np.ndarray:
    """Returns how many of n rows belong to part i of r: those from ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋."""
    return counts * (part + 1) // degree - counts * part // degree
