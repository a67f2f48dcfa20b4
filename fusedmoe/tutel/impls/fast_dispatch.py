"""Routing and padded dispatch as functions: scores to choices and capacities, tokens to [E, C, D] and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.autograd import order, permute, take_pairs, unpermute
from fusedmoe.autograd.checks import require_values
from fusedmoe.errors import ConfigError
from fusedmoe.gates import top_experts
from fusedmoe.kernels import Function, Layout
from fusedmoe.layers.input_checks import not_finite
from fusedmoe.layers.load import expert_load
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls.communicate import simple_all_reduce
from fusedmoe.tutel.impls.losses import gshard_loss


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of experts for T tokens.

    Attributes:
        expert_SK, weight_SK: [T, K] int64, and in the scores' dtype, differentiable.
        priority_S: [T] the surest tokens are placed first; None for token order.
        count_E: [E] tokens that chose each expert, drops included.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    priority_S: Tensor | None
    count_E: Tensor

    @property
    def experts(self) -> int:
        return len(self.count_E)

    def locations(self) -> Tensor:
        """Returns [T, K], each pair's place at its expert, drops included: all tokens' choice k before choice k + 1."""
        layout = order(self.expert_SK, self.experts, None, self.priority_S)
        return layout.row_SK - layout.offsets_E1.long()[self.expert_SK]

    def dispatch_count(self) -> Tensor:
        """Returns [E] as Tutel does: without priorities `count_E`, with them no count."""
        if self.priority_S is None or not len(self.expert_SK):
            return self.count_E
        # Tutel reads it off the last token: the tokens with an expert as an earlier choice, plus one, plus the last
        # token's place where that is its last choice. It is so here as well, since runs are compared by it; capacities
        # rest on `count_E`.
        told_E = expert_load(self.expert_SK[:, :-1], self.experts)
        last = self.expert_SK[-1, -1]
        told_E[last] = self.locations()[-1, -1]
        return told_E + 1


def experts_of_a_token(k: int, experts: int) -> int:
    """Returns `k`, a whole number of Python, NumPy or a tensor, but at most all experts."""
    if int(k) < 1:
        raise ConfigError(f"a token cannot get k = {int(k)} experts; choose a number from 1 on")
    return min(int(k), experts)


def choose(scores_SE: Tensor, k: int, *, normalize: bool, prioritised: bool) -> Choice:
    """Chooses the k highest scores of each token, at most all; between equal scores the lower expert wins.

    Weights are the scores, for k > 1 with `normalize` divided by their sum (at least eps): not renewed after drops.
    """
    if scores_SE.dim() != 2:
        raise ConfigError(f"routing takes scores [tokens, experts], not {list(scores_SE.shape)}; flatten the tokens")
    k = experts_of_a_token(k, scores_SE.shape[1])
    expert_SK = top_experts(scores_SE, k)
    weight_SK = scores_SE.gather(1, expert_SK)
    if normalize and k > 1:
        # Added one by one, as half precision rounds.
        total_S = sum(weight_SK.unbind(1), torch.zeros_like(scores_SE[:, 0]))
        divisor_S = total_S.clamp(min=torch.finfo(scores_SE.dtype).eps)
        weight_SK = weight_SK / divisor_S.where(total_S != 0, 1.0)[:, None]  # zeros keep gradients of usual size
    # Batch-prioritised routing: the surest tokens get their places first.
    priority_S = scores_SE.detach().amax(1) if prioritised else None
    return Choice(expert_SK, weight_SK, priority_S, expert_load(expert_SK, scores_SE.shape[1]))


# Beyond so many rows Tutel rounds up to full tiles.
_TILED, _TILE = 256, 128


def capacity_of(
    factor: float, top_k: int, tokens: int, experts: int, most_chosen: Callable[[], int], alignment: int = 1
) -> int:
    """Returns k·int(f·⌈T/E⌉) for f > 0; the most that any expert needs for f = 0; for f < 0 the smaller of that and
    k·int(−f·⌈T/E⌉). Rounded up to a multiple of `alignment`.

    24 tokens, 4 experts, k = 2, f = 1.25 give 2·int(1.25·6) = 14; with alignment 4, 16.

    Args:
        most_chosen: tells how many tokens of any rank chose the same expert; asked for f ≤ 0 only.
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
    """Returns the number of which Tutel makes the capacity a multiple: shards · degree, and whole sparse blocks."""
    block = max(megablocks_size, 1)
    alignment = -(-shards * overlap_degree // block) * block
    return -(-alignment // _TILE) * _TILE if alignment > _TILED else alignment


class Critical(NamedTuple):
    """The decisions of `extract_critical`, with one tensor [T] for each of the k choices."""

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
    """Routes [T, E] scores; returns (E, experts, places, weights, capacity, counts), and `loss_fn(scores, top_ids)`.

    Args:
        capacity_factor, alignment: see `capacity_of`; with a factor ≤ 0 collective over `group`.
        inequivalent_tokens: the capacity rests on the largest T of the group; collective.
    Raises:
        ConfigError: scores that are NaN or infinite (on CUDA an assertion fails on the device).
    """
    require_values("extract_critical", not_finite(scores) == 0, "scores are NaN or infinite; see what computes them")
    choice = choose(scores, top_k, normalize=normalize_gate, prioritised=batch_prioritized_routing)
    loss = None if loss_fn is None else loss_fn(scores, choice.expert_SK)
    capacity = agreed_capacity(choice, capacity_factor, alignment, group, inequivalent_tokens)
    # Tutel gives int32 lists, one tensor for each choice.
    indices, locations = (list(t.int().unbind(1)) for t in (choice.expert_SK, choice.locations()))
    gates = list(choice.weight_SK.unbind(1))
    return Critical(choice.experts, indices, locations, gates, capacity, choice.dispatch_count()), loss


def agreed_capacity(
    choice: Choice, factor: float, alignment: int, group: dist.ProcessGroup | None, inequivalent_tokens: bool
) -> int:
    """Returns `capacity_of` a rank's choice; collective with a factor ≤ 0 or `inequivalent_tokens`."""

    def most(value: int) -> int:
        """Returns the largest value of any rank."""
        return int(simple_all_reduce(choice.count_E.new_tensor(value), group, dist.ReduceOp.MAX))

    tokens, top_k = choice.expert_SK.shape
    # Ranks with fewer tokens would else compute a smaller capacity, and blocks of another size.
    tokens = most(tokens) if inequivalent_tokens else tokens
    return capacity_of(factor, top_k, tokens, choice.experts, lambda: most(int(choice.count_E.max())), alignment)


def get_dispatch_count(critial_data: Sequence[Any]) -> Tensor:
    return critial_data[-1]


def get_topk_selection(critial_data: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Returns the chosen experts [T, K], int64, and how many tokens chose each, [E]."""
    return torch.stack(list(critial_data[1]), 1).long(), get_dispatch_count(critial_data)


def get_reversed_sample_ids(critial_data: Sequence[Any], return_id_type: str = "sample_id") -> Tensor:
    """Returns [E, C] int32: which token ("sample_id"), or which of its choices ("top_id"), a place holds; -1: none."""
    if return_id_type not in ("sample_id", "top_id"):
        raise ConfigError(f"return_id_type = {return_id_type!r}; choose sample_id or top_id")
    places = _Places.of(critial_data[0], critial_data[4], critial_data[1], critial_data[2])
    k = len(critial_data[1])
    ids_N = places.layout.pair_N // k if return_id_type == "sample_id" else places.layout.pair_N % k
    empty = ids_N.new_full((places.experts * places.capacity,), -1)
    return empty.index_copy(0, places.place_N, ids_N).view(places.experts, places.capacity).int()


class _Scaled(Function):
    operation, twice = "moe_layer: rows times their weights", True

    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, weight_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NM, weight_N)
        return rows_NM.to(weight_N.dtype) * weight_N[:, None]

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, Tensor]:
        rows_NM, weight_N = ctx.saved_tensors
        # One dot product a row in one operation, so that no tensor of the rows' size is made for it.
        dweight_N = torch.bmm(grad_NM[:, None], rows_NM.to(weight_N.dtype)[:, :, None])[:, 0, 0]
        return (grad_NM * weight_N[:, None]).to(rows_NM.dtype), dweight_N


def scaled(rows_NM: Tensor, weight_N: Tensor) -> Tensor:
    """Returns weight_N[n] · rows_NM[n] in the weights' dtype, which is at least as wide. Saves both as they are."""
    return _Scaled.apply(rows_NM, weight_N)


class _Places(NamedTuple):
    """The (token, k) pairs that have a place in [E, C], sorted by it."""

    experts: int
    capacity: int
    layout: Layout
    place_N: Tensor

    @classmethod
    def of(cls, experts: int, capacity: int, indices: Sequence[Tensor], locations: Sequence[Tensor]) -> _Places:
        expert_SK, place_SK = torch.stack(list(indices), 1).long(), torch.stack(list(locations), 1).long()
        # Clients mark dropped pairs by a negative expert or a place beyond the capacity.
        kept_SK = (expert_SK >= 0) & (place_SK >= 0) & (place_SK < capacity)
        pair_N = kept_SK.reshape(-1).nonzero()[:, 0]
        flat_N = (expert_SK * capacity + place_SK).reshape(-1)[pair_N]
        # By place, so that rows of an expert lie together; stable, as masked tokens may share a place.
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
    """Moves rows by given choices: `update(indices, locations, gates)`, `encode` [T, D] -> [E·C, D], `decode` back.

    A negative index, or a location beyond the capacity, is no row; rows with the same index and location add up.
    Results have the dtype `dispatch_dtype`, whatever the data's is; rows are weighted and added in at least float32.
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
        """Sets the choices of the next calls.

        Args:
            indices_, locations_, gates_: for each choice its experts, places and weights, of any dtype; T elements
                each, as [T] or [T, 1].
            capacity: C from now on; None or 0 leaves it.
            is_postscore: `decode` weights rows, else `encode`.
        """
        indices, locations = ([t.to(torch.int32).reshape(-1) for t in given] for given in (indices_, locations_))
        gates = self._weights(gates_)
        sizes = [[len(t) for t in given] for given in (indices, locations, gates)]
        if not indices or sizes != [[len(indices[0])] * len(indices)] * 3:
            text = f"a dispatcher's update got indices, locations and gates of {sizes} elements"
            raise ConfigError(f"{text}; give one tensor of each for every choice, all with an element a token")
        # Tutel takes 0 and None for: as before.
        capacity = int(capacity or 0) or self.capacity
        self._places = _Places.of(self.num_global_experts, capacity, indices, locations)
        self.indices_, self.locations_, self.gates_ = indices, locations, gates
        self.sample_size, self.capacity, self.is_postscore = len(indices[0]), capacity, is_postscore

    def encode(self, data: Tensor) -> Tensor:
        """Moves [T, D] or […, D] to [E·C, D]; raises `ConfigError` where it has not T rows."""
        return self._encode(data, () if self.is_postscore else self.gates_, self.original_dtype)

    def decode(self, data: Tensor) -> Tensor:
        """Moves [E·C, D] or […, D] to [T, D]; raises `ConfigError` where it has not E·C rows."""
        return self._decode(data, self.gates_ if self.is_postscore else (), self.original_dtype)

    def _encode(self, data: Tensor, gates: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        rows_NM = permute(_rows(data, self.sample_size, "encode", "tokens"), self._places.layout)
        if gates:
            rows_NM = self._weighted(rows_NM, gates)
        # Added, not copied: clients give masked tokens, of weight zero, the place of another token.
        rows_NM = rows_NM.to(torch.promote_types(rows_NM.dtype, self.dtype))
        blank = rows_NM.new_zeros(self.num_global_experts * self.capacity, rows_NM.shape[1])
        return blank.index_add(0, self._places.place_N, rows_NM).to(dtype)

    def _decode(self, data: Tensor, gates: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        rows = _rows(data, self.num_global_experts * self.capacity, "decode", "places")
        rows_NM = rows.index_select(0, self._places.place_N)
        if gates:
            rows_NM = self._weighted(rows_NM, gates)
        return unpermute(rows_NM, self._places.layout).to(dtype)

    def _weights(self, gates: Sequence[Tensor]) -> list[Tensor]:
        return [gate.to(self.dtype).reshape(-1) for gate in gates]

    def _weighted(self, rows_NM: Tensor, gates: Sequence[Tensor]) -> Tensor:
        return scaled(rows_NM, take_pairs(torch.stack(self._weights(gates), 1), self._places.layout))


def _rows(data: Tensor, count: int, what: str, of: str) -> Tensor:
    rows = data.flatten(0, -2)
    if len(rows) != count:
        raise ConfigError(f"{what} got {len(rows)} rows, {list(data.shape)}; it takes one for each of {count} {of}")
    return rows


fast_dispatcher = TutelMoeFastDispatcher


class GatingEncoder:
    """`GatingEncoder.apply(dispatcher, data, *gates)` encodes with these weights, or none; keeps the dtype."""

    @staticmethod
    def apply(config: TutelMoeFastDispatcher, reshaped_input: Tensor, *gates_: Tensor) -> Tensor:
        return config._encode(reshaped_input, gates_, reshaped_input.dtype)


class GatingDecoder:
    """`GatingDecoder.apply(dispatcher, rows, *gates)` decodes with these weights, or none; keeps the dtype."""

    @staticmethod
    def apply(config: TutelMoeFastDispatcher, expert_output: Tensor, *gates_: Tensor) -> Tensor:
        return config._decode(expert_output, gates_, expert_output.dtype)


def fast_encode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Moves [T, D] to [E, C, D], places without a token zero; weights rows unless `is_postscore`."""
    E, C = int(critial_data[0]), int(critial_data[4])
    return _dispatcher(data, critial_data, is_postscore).encode(data).view(E, C, data.shape[-1])


def fast_decode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Moves [E, C, D] to [T, D], the sum of each token's rows; weights them if `is_postscore`."""
    return _dispatcher(data, critial_data, is_postscore).decode(data)


def _dispatcher(data: Tensor, critial_data: Sequence[Any], is_postscore: bool) -> TutelMoeFastDispatcher:
    experts, indices, locations, gates, capacity = critial_data[:5]
    dispatcher = TutelMoeFastDispatcher(experts, capacity, data.shape[-1], data.dtype)
    dispatcher.update(indices, locations, gates, is_postscore=is_postscore)
    return dispatcher
