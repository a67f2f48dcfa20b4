"""Replicas, physical experts and row splits for dispatchers of other libraries (plain all-to-all, DeepEP, Megatron)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.balance import Balance, balance, quick_balance
from fusedmoe.placement.placement import NodeLayout, Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def balance_experts(
    counts_WE: Tensor | ArrayLike,
    placement: Placement | None = None,
    *,
    replicas: int,
    ranks_per_node: int | None = None,
    exact: bool = False,
    device: torch.device | str = "cpu",
) -> ExpertMap:
    """Choose replicas, and share each expert's rows over its copies, for one batch's counts.

    For another library's layers and dispatcher: all ranks call this with equal counts, send the parameters of new
    replicas, and replace the expert numbers of their tokens by numbers of physical experts (`ExpertMap.assign`). The
    dispatcher then sees `ranks * slots` experts. After the backward pass, add the gradients of replicas to those of
    their owners.

    With at most q owned experts on a rank and no replicas in `placement`, no rank computes more than 1 + q / `replicas`
    times the mean number of rows (rounded up). For 256 experts with popularity 1/rank on 64 ranks, it is within 8% of
    the mean with one replica per rank, and within 1% with four.

    Args:
        counts_WE: [ranks, experts] integers: rows of each rank for each expert (tokens · top-k). A tensor on a GPU is
            copied to the host, which waits for it.
        placement: owners and current replicas, which stay. None: experts in order, as even as possible.
        replicas: maximum number of replicas per rank, including those in `placement`.
        ranks_per_node: consecutive ranks that share a node; rows stay on their rank, then on their node, if possible.
            None: all ranks share one node.
        exact: also move rows along chains of copies, so that no rank exceeds the mean if there is room; several times
            slower, up to tens of milliseconds for 64 ranks and 256 experts.
        device: of the returned tensors.
    Raises:
        ConfigError: the counts are no [ranks, experts] integers of 0 or more, or do not match `placement`; `replicas`
            is negative; `ranks_per_node` does not divide the number of ranks.
    """
    import torch  # plans and simulations import this package without torch

    if isinstance(counts_WE, torch.Tensor):
        counts_WE = counts_WE.detach().cpu().numpy()
    counts_WE = np.asarray(counts_WE)
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise ConfigError(f"balance_experts: replicas = {replicas!r} must be an integer of 0 or more")
    if counts_WE.ndim != 2 or 0 in counts_WE.shape:
        raise ConfigError(f"balance_experts: counts of shape {list(counts_WE.shape)}; give [ranks, experts]")
    ranks, experts = counts_WE.shape
    placement = Placement.even(ranks, experts) if placement is None else placement
    node_layout = NodeLayout(ranks, ranks if ranks_per_node is None else ranks_per_node)
    found = (balance if exact else quick_balance)(placement, counts_WE, node_layout, replicas)
    slots = int(np.bincount(placement.owners, minlength=ranks).max()) + replicas
    return ExpertMap(found, max(slots, int(found.placement.holds_EW.sum(axis=0).max())), torch.device(device))


@dataclass(frozen=True, eq=False)
class ExpertMap:
    """Where each expert's rows are computed. Made by `balance_experts`.

    A *logical* expert is an expert of the model; a *physical* expert is one copy of it, on a slot of a rank: number
    `rank * slots + slot`. On each rank the slots hold its own experts in ascending order, then its replicas. Axes: W
    ranks (V where they compute rows), E logical experts, P = W · slots physical experts, C copies of an expert, S
    tokens, K choices.

    Attributes:
        balance: the placement (`balance.placement`) and rows per expert and rank (`balance.computed_EV`).
        slots: physical experts per rank, equal for all batches with the same owners and `replicas`.
        device: of the tensors below.
    """

    balance: Balance
    slots: int
    device: torch.device

    @cached_property
    def physical_to_logical_P(self) -> Tensor:
        """[P] int64, the expert in each slot; -1: empty."""
        found_P = np.full(self.balance.node_layout.num_ranks * self.slots, -1)
        found_P[self._physical_of_copy] = self._copies[0]
        return self._tensor(found_P)

    @cached_property
    def logical_to_physical_EC(self) -> Tensor:
        """[E, C] int64, the copies of each expert in the order of ranks, padded with -1."""
        return self._tensor(self._by_copy(self._physical_of_copy, -1))

    @cached_property
    def copies_E(self) -> Tensor:
        """[E] int64, number of copies of each expert, including its owner's."""
        return self._tensor(self._num_copies_E)

    @cached_property
    def load_P(self) -> Tensor:
        """[P] int64, rows that each physical expert computes in this batch."""
        found_P = np.zeros(self.balance.node_layout.num_ranks * self.slots, np.int64)
        found_P[self._physical_of_copy] = self.balance.computed_EV[self._copies]
        return self._tensor(found_P)

    def row_splits_EC(self, rank: int) -> Tensor:
        """Return [E, C] int64: rows that `rank` sends to each copy, in the order of `logical_to_physical_EC`."""
        self._require_rank(rank)
        return self._tensor(self._by_copy(self.balance.sent_from(rank)[self._copies], 0))

    def assign(self, expert_SK: Tensor, rank: int) -> Tensor:
        """Return [S, K], the physical expert for each choice of this rank's tokens; -1 stays -1. int32 or int64.

        An expert's first rows (in the order of tokens) go to its first copy, and so on, as `row_splits_EC` counts them.
        Does not synchronize with the device. The choices must be those that were counted: surplus rows go to the last
        copy.

        Args:
            expert_SK: [S, K] integers, the logical experts of each token.
            rank: of these tokens.
        Raises:
            ConfigError: an expert is not one of 0 to E - 1 (on the CPU; a GPU reports an index out of bounds).
        """
        import torch

        device = expert_SK.device
        number_dtype = torch.int32 if expert_SK.dtype == torch.int32 else torch.int64
        ends_EC, physical_EC = self.row_splits_EC(rank).to(device).cumsum(1), self.logical_to_physical_EC.to(device)
        experts = len(physical_EC)
        flat_N = expert_SK.flatten().long()
        if device.type == "cpu" and bool((flat_N >= experts).any()):
            raise ConfigError(f"ExpertMap: expert {int(flat_N.max())} in expert_SK is not one of 0 to {experts - 1}")
        sorted_N, order_N = flat_N.sort(stable=True)
        first_N = torch.searchsorted(sorted_N, sorted_N)
        position_N = torch.empty_like(flat_N)
        position_N[order_N] = torch.arange(len(flat_N), device=device) - first_N
        row_N = flat_N.clamp(min=0)
        last_N = self.copies_E.to(device)[row_N] - 1
        copy_N = torch.minimum((ends_EC[row_N] <= position_N[:, None]).sum(1), last_N)
        return torch.where(flat_N < 0, flat_N, physical_EC[row_N, copy_N]).view_as(expert_SK).to(number_dtype)

    def all_to_all_splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Return `input_split_sizes` and `output_split_sizes` of `rank` for `torch.distributed.all_to_all_single`.

        Rows are sent in ascending order of their physical expert, one row per choice.
        """
        self._require_rank(rank)
        sent_WV = [self.balance.sent_from(source).sum(axis=0) for source in range(self.balance.node_layout.num_ranks)]
        return sent_WV[rank].tolist(), [int(sent_V[rank]) for sent_V in sent_WV]

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.balance.node_layout.num_ranks:
            raise ConfigError(f"ExpertMap: rank {rank} is not one of 0 to {self.balance.node_layout.num_ranks - 1}")

    @cached_property
    def _copies(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Expert and rank of each copy, by expert, then rank."""
        experts, ranks = self.balance.placement.holds_EW.nonzero()
        return experts, ranks

    @cached_property
    def _num_copies_E(self) -> NDArray[np.int64]:
        return np.bincount(self._copies[0], minlength=self.balance.placement.experts)

    @cached_property
    def _physical_of_copy(self) -> NDArray[np.int64]:
        experts, ranks = self._copies
        is_replica = np.asarray(self.balance.placement.owners)[experts] != ranks
        order = np.lexsort((experts, is_replica, ranks))  # per rank: owned experts, then replicas
        held_W = np.bincount(ranks, minlength=self.balance.node_layout.num_ranks)
        slot = np.empty_like(experts)
        slot[order] = np.arange(len(order)) - np.repeat(held_W.cumsum() - held_W, held_W)
        return ranks * self.slots + slot

    def _by_copy(self, value_of_copy: NDArray[np.int64], fill: int) -> NDArray[np.int64]:
        copies_E = self._num_copies_E
        made_EC = np.full((len(copies_E), int(copies_E.max())), fill, np.int64)
        made_EC[np.arange(made_EC.shape[1]) < copies_E[:, None]] = value_of_copy
        return made_EC

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        import torch

        return torch.as_tensor(values, dtype=torch.int64, device=self.device)
