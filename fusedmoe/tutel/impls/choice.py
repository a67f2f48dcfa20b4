"""From a router's scores to each token's experts, their weights and order, and how many rows an expert accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmoe.dispatchers import expert_load
from fusedmoe.errors import ConfigError
from fusedmoe.gates import top_experts
from fusedmoe.ops import order


@dataclass(frozen=True, eq=False)
class Choice:
    """What T tokens chose.

    Attributes:
        expert_SK: [T, K] int64.
        weight_SK: [T, K] in the scores' dtype, differentiable.
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
        """[T, K]: each pair's place at its expert, drops included: choice k of all tokens before choice k + 1."""
        layout = order(self.expert_SK, self.experts, None, self.priority_S)
        return layout.row_SK - layout.offsets_E1.long()[self.expert_SK]

    def dispatch_count(self) -> Tensor:
        """[E], as Tutel tells it: without priorities `count_E`.

        With priorities Tutel reads it off the last token, and it is no count: the tokens with that expert as an earlier
        choice, plus one, plus the last token's place where that is its last choice. Told so all the same, since runs
        are compared by it; capacities rest on `count_E`.
        """
        if self.priority_S is None or not len(self.expert_SK):
            return self.count_E
        told_E = expert_load(self.expert_SK[:, :-1], self.experts)
        last = self.expert_SK[-1, -1]
        told_E[last] = self.locations()[-1, -1]
        return told_E + 1


def experts_of_a_token(k: int, experts: int) -> int:
    """`k`, which may be any whole number that Python or NumPy or a tensor holds, but at most all experts.

    Raises:
        ConfigError: there is no such choice.
    """
    if int(k) < 1:
        raise ConfigError(f"a token cannot get k = {int(k)} experts; choose a number from 1 on")
    return min(int(k), experts)


def choose(scores_SE: Tensor, k: int, *, normalize: bool, prioritised: bool) -> Choice:
    """The k highest scores of each token, at most all; between equal ones the lower expert wins.

    Weights are the scores, for k > 1 with `normalize` divided by their sum (at least eps): not renewed after drops.

    Raises:
        ConfigError: k is below 1, or scores are not [T, E].
    """
    if scores_SE.dim() != 2:
        raise ConfigError(f"routing takes scores [tokens, experts], not {list(scores_SE.shape)}; flatten the tokens")
    k = experts_of_a_token(k, scores_SE.shape[1])
    expert_SK = top_experts(scores_SE, k)
    weight_SK = scores_SE.gather(1, expert_SK)
    if normalize and k > 1:
        # Added one by one, as half precision rounds.
        total_S = sum(weight_SK.unbind(1), torch.zeros_like(scores_SE[:, 0]))
        weight_SK = weight_SK / total_S.clamp(min=torch.finfo(scores_SE.dtype).eps)[:, None]
    priority_S = scores_SE.detach().amax(1) if prioritised else None
    return Choice(expert_SK, weight_SK, priority_S, expert_load(expert_SK, scores_SE.shape[1]))


# Beyond it rows are rounded up to full tiles.
_TILED, _TILE = 256, 128


def capacity_of(
    factor: float, top_k: int, tokens: int, experts: int, most_chosen: Callable[[], int], alignment: int = 1
) -> int:
    """k·int(f·⌈T/E⌉) for f > 0; what is needed for f = 0; the smaller of it and k·int(−f·⌈T/E⌉) for f < 0.

    Worked example: 24 tokens, 4 experts, k = 2, f = 1.25 give 2·int(1.25·6) = 14; with alignment 4, 16.

    Args:
        most_chosen: tells how many tokens of any rank chose the same expert; asked for f ≤ 0 only.
        alignment: the result is rounded up to a multiple.
    """
    share = -(-tokens // experts)
    if factor > 0:
        capacity = top_k * int(factor * share)
    else:
        capacity = most_chosen()
        if factor < 0:
            capacity = min(capacity, top_k * int(-factor * share))
    return -(-capacity // alignment) * alignment


def alignment_of(shards: int, overlap_degree: int, megablocks_size: int = 0) -> int:
    """What Tutel rounds the capacity up to: a multiple of shards · degree, and of a block of its sparse products.

    This admits tokens, and so changes results with the degree. A degree that the scheduler picks counts as 1 here.
    """
    block = max(megablocks_size, 1)
    alignment = -(-shards * overlap_degree // block) * block
    return -(-alignment // _TILE) * _TILE if alignment > _TILED else alignment
