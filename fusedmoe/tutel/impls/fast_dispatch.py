"""Routing and padded dispatch as functions: scores to choices and capacities, tokens to [E, C, D] and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.autograd.checks import require_values
from fusedmoe.autograd.order import order, permute, take_pairs, unpermute
from fusedmoe.errors import ConfigError
from fusedmoe.gates.topk import top_experts
from fusedmoe.kernels import Layout
from fusedmoe.kernels.derivatives import Function
from fusedmoe.layers.input_checks import count_nonfinite
from fusedmoe.layers.load import expert_load
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls.communicate import simple_all_reduce
from fusedmoe.tutel.impls.losses import gshard_loss


@dataclass(frozen=True, eq=False)
class Choice:
    """Expert choices of T tokens.

    Attributes:
        expert_SK, weight_SK: [T, K] int64, and weights in the scores' dtype, differentiable.
        priority_S: [T] order of placement, most confident tokens first; None for token order.
        count_E: [E] tokens that chose each expert, including dropped tokens.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    priority_S: Tensor | None
    count_E: Tensor

    @property
    def experts(self) -> int:
        return len(self.count_E)

    def locations(self) -> Tensor:
        """Return each pair's index at its expert, [T, K], including dropped pairs; first choices come first."""
        layout = order(self.expert_SK, self.experts, None, self.priority_S)
        return layout.row_SK - layout.offsets_E1.long()[self.expert_SK]

    def dispatch_count(self) -> Tensor:
        """Return Tutel's `dispatch_count` [E]: `count_E`, or with priorities a value that differs from it."""
        if self.priority_S is None or not len(self.expert_SK):
            return self.count_E
        # To compare runs with Tutel: tokens with the expert as an earlier choice, plus one, plus the last token's index
        # if that is its last choice.
        result_E = expert_load(self.expert_SK[:, :-1], self.experts)
        last = self.expert_SK[-1, -1]
        result_E[last] = self.locations()[-1, -1]
        return result_E + 1


def experts_of_a_token(k: int, experts: int) -> int:
    """Return `k` as int, capped at the number of experts. Raises `ConfigError` for k < 1."""
    if int(k) < 1:
        raise ConfigError(f"a token cannot get k = {int(k)} experts; choose a number from 1 on")
    return min(int(k), experts)


def choose(scores_SE: Tensor, k: int, *, normalize: bool, prioritised: bool) -> Choice:
    """Choose the k highest scores of each token; ties select the lower expert.

    Weights are the scores; with `normalize` and k > 1 they are divided by their sum (at least eps), including dropped
    choices. With `prioritised` (batch-prioritised routing) a token's priority is its highest score.
    """
    if scores_SE.dim() != 2:
        raise ConfigError(f"routing takes scores [tokens, experts], not {list(scores_SE.shape)}; flatten the tokens")
    k = experts_of_a_token(k, scores_SE.shape[1])
    expert_SK = top_experts(scores_SE, k)
    weight_SK = scores_SE.gather(1, expert_SK)
    if normalize and k > 1:
        # Sums in Tutel's order, for equal rounding.
        total_S = sum(weight_SK.unbind(1), torch.zeros_like(scores_SE[:, 0]))
        divisor_S = total_S.clamp(min=torch.finfo(scores_SE.dtype).eps)
        weight_SK = weight_SK / divisor_S.where(total_S != 0, 1.0)[:, None]
    priority_S = scores_SE.detach().amax(1) if prioritised else None
    return Choice(expert_SK, weight_SK, priority_S, expert_load(expert_SK, scores_SE.shape[1]))


# Tutel rounds alignments beyond this number of rows up to full tiles.
_TILED, _TILE = 256, 128


def capacity_of(
    factor: float, top_k: int, tokens: int, experts: int, most_chosen: Callable[[], int], alignment: int = 1
) -> int:
    """Return the capacity for factor f and T tokens, rounded up to a multiple of `alignment`.

    Before rounding, for f > 0: k·int(f·⌈T/E⌉). For f = 0: `most_chosen()`, the largest number of tokens per expert on
    any rank. For f < 0: the smaller of that number and k·int(−f·⌈T/E⌉).
    """
    require_within("moe_layer", capacity_factor=factor)
    share = -(-tokens // experts)
    if factor > 0:
        capacity = top_k * int(factor * share)
    else:
        capacity = most_chosen()
        if factor < 0:
            capacity = min(capacity, top_k * int(-factor * share))
    return -(-capacity // alignment) * alignment


def alignment_of(shards: int, overlap_degree: int, megablocks_size: int = 0) -> int:
    """Return the number of rows that Tutel's capacity is a multiple of.

    This is shards · degree, rounded up to a multiple of `megablocks_size` (if > 0) and, if the result is above 256, to
    a multiple of 128.
    """
    block = max(megablocks_size, 1)
    alignment = -(-shards * overlap_degree // block) * block
    return -(-alignment // _TILE) * _TILE if alignment > _TILED else alignment


class Critical(NamedTuple):
    """Routing decisions as Tutel's `extract_critical` returns them; lists have one tensor [T] per choice."""

    num_global_experts: int
    indices: list[Tensor]
    locations: list[Tensor]
    gates: list[Tensor]
    capacity: int
    dispatch_count: Tensor


def extract_critical(
    scores: Tensor,
    top_k: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = gshard_loss,
    capacity_factor: float = 1.0,
    batch_prioritized_routing: bool = False,
    normalize_gate: bool = True,
    alignment: int = 1,
    group: dist.ProcessGroup | None = None,
    inequivalent_tokens: bool = False,
) -> tuple[Critical, Tensor | None]:
    """Route [T, E] scores; return the decisions and `loss_fn(scores, top_ids)`, None without `loss_fn`.

    Args:
        capacity_factor, alignment: arguments of `capacity_of`; collective over `group` for factors ≤ 0.
        inequivalent_tokens: compute the capacity from the largest T in the group; collective.
    Raises:
        ConfigError: NaN or infinite scores (on CUDA: a device assertion).
    """
    require_values(
        "extract_critical", count_nonfinite(scores) == 0, "scores are NaN or infinite; check their computation"
    )
    choice = choose(scores, top_k, normalize=normalize_gate, prioritised=batch_prioritized_routing)
    loss = None if loss_fn is None else loss_fn(scores, choice.expert_SK)
    capacity = agreed_capacity(choice, capacity_factor, alignment, group, inequivalent_tokens)
    indices, locations = (list(t.int().unbind(1)) for t in (choice.expert_SK, choice.locations()))
    gates = list(choice.weight_SK.unbind(1))
    return Critical(choice.experts, indices, locations, gates, capacity, choice.dispatch_count()), loss


def agreed_capacity(
    choice: Choice, factor: float, alignment: int, group: dist.ProcessGroup | None, inequivalent_tokens: bool
) -> int:
    """Return the capacity for this rank's choice. Collective for factors ≤ 0 or `inequivalent_tokens`."""

    def most(value: int) -> int:
        return int(simple_all_reduce(choice.count_E.new_tensor(value), group, dist.ReduceOp.MAX))

    tokens, top_k = choice.expert_SK.shape
    tokens = most(tokens) if inequivalent_tokens else tokens
    return capacity_of(factor, top_k, tokens, choice.experts, lambda: most(int(choice.count_E.max())), alignment)


def get_dispatch_count(critial_data: Sequence[Any]) -> Tensor:
    return critial_data[-1]


def get_topk_selection(critial_data: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the chosen experts [T, K] int64, and the number of tokens per expert [E]."""
    return torch.stack(list(critial_data[1]), 1).long(), get_dispatch_count(critial_data)


def get_reversed_sample_ids(critial_data: Sequence[Any], return_id_type: str = "sample_id") -> Tensor:
    """Return [E, C] int32: the token ("sample_id") or its choice ("top_id") in each slot; -1 if empty."""
    if return_id_type not in ("sample_id", "top_id"):
        raise ConfigError(f"return_id_type = {return_id_type!r}; choose sample_id or top_id")
    slots = _PairSlots.of(critial_data[0], critial_data[4], critial_data[1], critial_data[2])
    k = len(critial_data[1])
    ids_N = slots.layout.pair_N // k if return_id_type == "sample_id" else slots.layout.pair_N % k
    empty = ids_N.new_full((slots.experts * slots.capacity,), -1)
    return empty.index_copy(0, slots.slot_N, ids_N).view(slots.experts, slots.capacity).int()


class _Scaled(Function):
    operation, double_backward = "moe_layer: rows times their weights", True

    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, weight_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NM, weight_N)
        return rows_NM.to(weight_N.dtype) * weight_N[:, None]

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, Tensor]:
        rows_NM, weight_N = ctx.saved_tensors
        # A batched dot product per row avoids a temporary of the rows' size.
        dweight_N = torch.bmm(grad_NM[:, None], rows_NM.to(weight_N.dtype)[:, :, None])[:, 0, 0]
        return (grad_NM * weight_N[:, None]).to(rows_NM.dtype), dweight_N


def scaled(rows_NM: Tensor, weight_N: Tensor) -> Tensor:
    """Return weight_N[n] · rows_NM[n] in the dtype of the weights. Saves both for backward."""
    return _Scaled.apply(rows_NM, weight_N)


class _PairSlots(NamedTuple):
    """The (token, k) pairs that have a slot in [E, C], sorted by slot."""

    experts: int
    capacity: int
    layout: Layout
    slot_N: Tensor

    @classmethod
    def of(cls, experts: int, capacity: int, indices: Sequence[Tensor], locations: Sequence[Tensor]) -> _PairSlots:
        expert_SK, slot_SK = torch.stack(list(indices), 1).long(), torch.stack(list(locations), 1).long()
        kept_SK = (expert_SK >= 0) & (slot_SK >= 0) & (slot_SK < capacity)
        pair_N = kept_SK.reshape(-1).nonzero()[:, 0]
        flat_N = (expert_SK * capacity + slot_SK).reshape(-1)[pair_N]
        # Stable, because masked tokens may share a slot.
        flat_N, by = flat_N.sort(stable=True)
        pair_N = pair_N[by]
        rows = torch.arange(len(pair_N), device=pair_N.device)
        row_SK = torch.full_like(expert_SK, -1).view(-1).index_copy(0, pair_N, rows).view(expert_SK.shape)
        counts_E = torch.bincount(flat_N // max(capacity, 1), minlength=experts)
        if len(counts_E) > experts:
            raise ConfigError(f"a token is to go to expert {len(counts_E) - 1}, and there are {experts}")
        offsets_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)).int()
        layout = Layout(counts_E, offsets_E1, pair_N // expert_SK.shape[1], pair_N, row_SK)
        return cls(experts, capacity, layout, flat_N)


class TutelMoeFastDispatcher:
    """Dispatch by given choices: `update(indices, locations, gates)`, `encode` [T, D] -> [E·C, D], `decode` back.

    Pairs with a negative index or a location outside the capacity are dropped; rows with equal index and location are
    added. Results have dtype `dispatch_dtype`; rows are weighted and added in at least float32.
    """

    def __init__(self, num_global_experts: int, capacity: int, model_dim: int, dispatch_dtype: torch.dtype) -> None:
        self.num_global_experts, self.capacity, self.model_dim = int(num_global_experts), int(capacity), int(model_dim)
        self.original_dtype = dispatch_dtype
        self.dtype = torch.promote_types(dispatch_dtype, torch.float32)

    def update(
        self,
        indices_: Sequence[Tensor],
        locations_: Sequence[Tensor],
        gates_: Sequence[Tensor],
        capacity: int | None = None,
        is_postscore: bool = True,
    ) -> None:
        """Set the choices for subsequent calls.

        Args:
            indices_, locations_, gates_: experts, slots and weights per choice, any dtype, [T] or [T, 1].
            capacity: new C; None or 0 keeps the current capacity.
            is_postscore: `decode` applies the weights, otherwise `encode`.
        Raises:
            ConfigError: tensors of unequal numbers or sizes; an expert that does not exist.
        """
        indices, locations = ([t.to(torch.int32).reshape(-1) for t in given] for given in (indices_, locations_))
        gates = self._weights(gates_)
        sizes = [[len(t) for t in given] for given in (indices, locations, gates)]
        if not indices or sizes != [[len(indices[0])] * len(indices)] * 3:
            text = f"a dispatcher's update got indices, locations and gates of {sizes} elements"
            raise ConfigError(f"{text}; give one tensor of each for every choice, all with an element a token")
        capacity = int(capacity or 0) or self.capacity
        self._slots = _PairSlots.of(self.num_global_experts, capacity, indices, locations)
        self.indices_, self.locations_, self.gates_ = indices, locations, gates
        self.sample_size, self.capacity, self.is_postscore = len(indices[0]), capacity, is_postscore

    def encode(self, data: Tensor) -> Tensor:
        """Dispatch [T, D] or […, D] to [E·C, D]. Raise `ConfigError` if it does not have T rows."""
        return self._encode(data, () if self.is_postscore else self.gates_, self.original_dtype)

    def decode(self, data: Tensor) -> Tensor:
        """Combine [E·C, D] or […, D] to [T, D]. Raise `ConfigError` if it does not have E·C rows."""
        return self._decode(data, self.gates_ if self.is_postscore else (), self.original_dtype)

    def _encode(self, data: Tensor, gates: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        rows_NM = permute(_rows(data, self.sample_size, "encode", "tokens"), self._slots.layout)
        if gates:
            rows_NM = self._weighted(rows_NM, gates)
        # Added, because clients assign masked tokens, with weight zero, the slot of another token.
        rows_NM = rows_NM.to(torch.promote_types(rows_NM.dtype, self.dtype))
        blank = rows_NM.new_zeros(self.num_global_experts * self.capacity, rows_NM.shape[1])
        return blank.index_add(0, self._slots.slot_N, rows_NM).to(dtype)

    def _decode(self, data: Tensor, gates: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        rows = _rows(data, self.num_global_experts * self.capacity, "decode", "slots")
        rows_NM = rows.index_select(0, self._slots.slot_N)
        if gates:
            rows_NM = self._weighted(rows_NM, gates)
        return unpermute(rows_NM, self._slots.layout).to(dtype)

    def _weights(self, gates: Sequence[Tensor]) -> list[Tensor]:
        return [gate.to(self.dtype).reshape(-1) for gate in gates]

    def _weighted(self, rows_NM: Tensor, gates: Sequence[Tensor]) -> Tensor:
        return scaled(rows_NM, take_pairs(torch.stack(self._weights(gates), 1), self._slots.layout))


def _rows(data: Tensor, count: int, what: str, of: str) -> Tensor:
    rows = data.flatten(0, -2)
    if len(rows) != count:
        raise ConfigError(f"{what} got {len(rows)} rows, {list(data.shape)}; it takes one for each of {count} {of}")
    return rows


fast_dispatcher = TutelMoeFastDispatcher


class GatingEncoder:
    """Tutel's class: `apply(dispatcher, data, *gates)` returns the rows of `data`, times any gates, in their slots."""

    @staticmethod
    def apply(config: TutelMoeFastDispatcher, reshaped_input: Tensor, *gates_: Tensor) -> Tensor:
        return config._encode(reshaped_input, gates_, reshaped_input.dtype)


class GatingDecoder:
    """Tutel's class: `apply(dispatcher, rows, *gates)` returns the sum of each token's rows, times any gates."""

    @staticmethod
    def apply(config: TutelMoeFastDispatcher, expert_output: Tensor, *gates_: Tensor) -> Tensor:
        return config._decode(expert_output, gates_, expert_output.dtype)


def fast_encode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Dispatch [T, D] to [E, C, D] with zeros in empty slots; rows are weighted unless `is_postscore`."""
    E, C = int(critial_data[0]), int(critial_data[4])
    return _dispatcher(data, critial_data, is_postscore).encode(data).view(E, C, data.shape[-1])


def fast_decode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Combine [E, C, D] to [T, D], the sum of each token's rows, weighted if `is_postscore`."""
    return _dispatcher(data, critial_data, is_postscore).decode(data)


def _dispatcher(data: Tensor, critial_data: Sequence[Any], is_postscore: bool) -> TutelMoeFastDispatcher:
    experts, indices, locations, gates, capacity = critial_data[:5]
    dispatcher = TutelMoeFastDispatcher(experts, capacity, data.shape[-1], data.dtype)
    dispatcher.update(indices, locations, gates, is_postscore=is_postscore)
    return dispatcher
