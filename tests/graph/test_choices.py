"""Gates that count second choices after all first choices, or both together: the ranges split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from fusedmoe.errors import ConfigError
from fusedmoe.graph import GraphBackend
from tests.cluster import Cluster
from tests.graph.models import FreeCopies
from tests.marks import slowly

S, E, C, M = 16, 4, 6, 8  # fewer places than choices, to force drops

pytestmark = pytest.mark.usefixtures("nothing_compiled")

#: Map from one-hot expert choices [S, E], one tensor per choice, to each choice's place at all experts.
Count = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def after_all_first_choices(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """GShard and DeepSpeed: offset second choices by the first-choice counts of all tokens."""
    first_SE, second_SE = masks
    places_SE = second_SE.cumsum(0) - 1
    places_SE += first_SE.sum(0, keepdim=True)
    return first_SE.cumsum(0) - 1, places_SE


def choice_by_choice(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tutel, for any number of choices."""
    places, counts_E = [], torch.zeros(E, dtype=masks[0].dtype)
    for mask_SE in masks:
        places.append(mask_SE.cumsum(0) - 1 + counts_E)
        counts_E = counts_E + mask_SE.sum(0)
    return places


def from_the_last_row(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    places, counts_E = [], torch.zeros(E, dtype=masks[0].dtype)
    for mask_SE in masks:
        counted_SE = mask_SE.cumsum(0) + counts_E
        counts_E = counted_SE[-1]
        places.append(counted_SE - 1)
    return places


def concatenated(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    return (torch.cat([*masks]).cumsum(0) - 1).chunk(len(masks))


def stacked(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    return (torch.stack([*masks]).flatten(0, 1).cumsum(0) - 1).view(len(masks), S, E).unbind()


def side_by_side(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    first_SE, second_SE = (torch.cat([*masks], 1).cumsum(0) - 1).split(E, 1)
    return first_SE, second_SE + masks[0].sum(0)


def token_by_token(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Count all choices of a token before the next token's."""
    return (torch.stack([*masks], 1).flatten(0, 1).cumsum(0) - 1).view(S, len(masks), E).unbind(1)


def pair_by_pair(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Count token by token, from two cumulative sums."""
    first_SE, second_SE = masks
    return first_SE.cumsum(0) + second_SE.cumsum(0) - second_SE - 1, first_SE.cumsum(0) + second_SE.cumsum(0) - 1


def exclusive_sums(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Count token by token with exclusive sums: prepend zeros to the counts of all tokens except the last."""
    first_SE, second_SE = masks
    both_SE = first_SE + second_SE
    before_SE = torch.cat([both_SE.new_zeros(1, E), both_SE[:-1]]).cumsum(0)
    return before_SE, before_SE + first_SE


#: Map from token rows [S, M] and each choice's weights per place [S, P] to combined expert outputs, given the experts'
#: function of all places.
Through = Callable[[Tensor, Sequence[Tensor], Callable[[Tensor], Tensor]], Tensor]


def one_product(x_SM: Tensor, weights: Sequence[Tensor], experts: Callable[[Tensor], Tensor]) -> Tensor:
    weight_SP = torch.stack([*weights]).sum(0)
    return weight_SP @ experts((weight_SP > 0).to(x_SM.dtype).t() @ x_SM)


def product_per_choice(x_SM: Tensor, weights: Sequence[Tensor], experts: Callable[[Tensor], Tensor]) -> Tensor:
    y_PM = experts(sum(((one > 0).to(x_SM.dtype).t() @ x_SM for one in weights), torch.zeros(())))
    return sum((one @ y_PM for one in weights), torch.zeros(()))


def repeated_tokens(x_SM: Tensor, weights: Sequence[Tensor], experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Repeat the tokens once per choice, all first choices first."""
    weight_NP = torch.cat([*weights])
    y_PM = experts((weight_NP > 0).to(x_SM.dtype).t() @ x_SM.repeat(len(weights), 1))
    return (weight_NP @ y_PM).view(len(weights), S, M).sum(0)


def concatenated_tokens(x_SM: Tensor, weights: Sequence[Tensor], experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Concatenate the tokens once per choice, and split the result."""
    weight_NP = torch.cat([*weights])
    y_NM = weight_NP @ experts((weight_NP > 0).to(x_SM.dtype).t() @ torch.cat([x_SM] * len(weights)))
    return y_NM[:S] + sum(y_NM[S:].split(S))


class Layer(nn.Module):
    """Experts over all ranks between two linear layers, with k choices; also returns the number of kept choices."""

    def __init__(self, count: Count, through: Through, k: int, noisy: bool = False) -> None:
        super().__init__()
        self.count, self.through, self.k, self.noisy = count, through, k, noisy
        self.front, self.gate, self.behind = nn.Linear(M, M), nn.Linear(M, E), nn.Linear(M, M)
        self.w_eMM = nn.Parameter(torch.randn(E // dist.get_world_size(), M, M))

    def forward(self, x_SM: Tensor) -> tuple[Tensor, Tensor]:
        x_SM = self.front(x_SM).tanh()
        logit_SE = self.gate(x_SM)
        if self.noisy:
            logit_SE = logit_SE * torch.empty_like(logit_SE).uniform_(0.9, 1.1) + torch.randn_like(logit_SE)
        score_SE = logit_SE.softmax(-1)
        chosen_SK = score_SE.topk(self.k, -1).indices
        masks = [F.one_hot(chosen_SK[:, k], E).to(score_SE.dtype) for k in range(self.k)]
        weights, kept = [], []
        for mask_SE, place_SE in zip(masks, self.count(masks), strict=True):
            mask_SE = mask_SE * (place_SE < C)
            slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long(), C).to(score_SE.dtype)
            weights.append(((score_SE * mask_SE)[:, :, None] * slot_SC[:, None]).flatten(1))
            kept.append(mask_SE.sum(1))
        y_SM = self.through(x_SM, weights, self.experts)
        return (self.behind(y_SM) + x_SM).sin(), torch.stack(kept)

    def experts(self, rows_PM: Tensor) -> Tensor:
        ranks, local = dist.get_world_size(), len(self.w_eMM)
        rows_PM = all_to_all_single(rows_PM.reshape(E, C, M), None, None, dist.group.WORLD)
        rows_eRM = rows_PM.reshape(ranks, local, C, M).transpose(0, 1).reshape(local, -1, M)
        rows_eRM = F.gelu(torch.bmm(rows_eRM, self.w_eMM))
        rows_PM = rows_eRM.reshape(local, ranks, C, M).transpose(0, 1).reshape(E, C, M)
        return all_to_all_single(rows_PM, None, None, dist.group.WORLD).reshape(E * C, M)


def split(rank: int, world: int, count: Count, through: Through, k: int, noisy: bool = False) -> tuple[bool, bool]:
    """Check three compiled steps against eager; return whether the layers around the experts were split."""
    torch._dynamo.reset()
    torch.manual_seed(torch.seed() if world == 1 else 3)
    layer = Layer(count, through, k, noisy).double()
    backend = GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True, timeout_s=60)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.manual_seed(torch.seed() + rank)
    for _ in range(3):
        x_SM = torch.randn(S, M, dtype=torch.float64, requires_grad=True)
        results, seed = [], torch.seed()
        for run in (compiled, layer):
            layer.zero_grad()
            x_SM.grad = None
            torch.manual_seed(seed)
            y_SM, kept_KS = run(x_SM)
            y_SM.square().sum().backward()
            assert kept_KS.sum() < k * S
            results.append([y_SM, kept_KS, x_SM.grad, *(one.grad.clone() for one in layer.parameters())])
        for ours, right in zip(*results, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    order = backend.reports[0].order
    products = k if through is product_per_choice else 1
    assert sum(name.startswith("combine_rows") for name in order) == 2 * products
    before, behind = (sum(name.startswith(of) for name in order) == 2 for of in ("tanh", "sin"))
    return before, behind


# Count function, path through the experts, number of choices, and whether the layer before the experts can be split.
ALL_FIRST = (after_all_first_choices, choice_by_choice, from_the_last_row, concatenated, stacked, side_by_side)
CASES = [
    *((count, one_product, 2, False) for count in ALL_FIRST),
    *((count, one_product, 3, False) for count in (choice_by_choice, concatenated)),
    *((count, one_product, 2, True) for count in (token_by_token, pair_by_pair, exclusive_sums)),
    *((concatenated, through, 2, False) for through in (product_per_choice, repeated_tokens, concatenated_tokens)),
    *((token_by_token, through, 2, True) for through in (product_per_choice, repeated_tokens, concatenated_tokens)),
    (choice_by_choice, concatenated_tokens, 3, False),
    (token_by_token, product_per_choice, 4, True),
]


QUICK = [(concatenated, one_product, 2, False), (token_by_token, product_per_choice, 2, True)]


@pytest.mark.parametrize(
    ("count", "through", "k", "before"), [*QUICK, *slowly(*(case for case in CASES if case not in QUICK))]
)
def test_gate_counts_are_split_into_micro_batches(
    world: None, count: Count, through: Through, k: int, before: bool
) -> None:
    assert split(0, 1, count, through, k) == (before, True)


@pytest.mark.slow
def test_gate_noise_is_drawn_for_whole_batch(world: None) -> None:
    """Noise is drawn for the whole batch, and a split does not wait for the scores of all tokens."""
    assert split(0, 1, token_by_token, one_product, 2, noisy=True) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "through", "k", "before"), CASES[::5])
def test_gate_counts_are_split_on_two_ranks(
    cluster: Cluster, count: Count, through: Through, k: int, before: bool
) -> None:
    assert cluster.run(2, split, count, through, k) == [(before, True)] * 2


def conditionally_shared_slots(masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Drop second choices unless the last expert has no tokens; then count them as if there were no first choices."""
    first_SE, second_SE = masks
    told = first_SE[:, -1].sum() == 0
    return first_SE.cumsum(0) - 1, torch.where(told, second_SE.cumsum(0) - 1, C)


def is_slot_shared(layer: Layer, x_SM: Tensor) -> bool:
    """Whether a first choice of one half of the tokens and a second choice of the other half share a slot."""
    chosen_SK = layer.gate(layer.front(x_SM).tanh()).topk(2, -1).indices
    taken: list[list[set[tuple[int, int]]]] = []
    for k in range(2):
        counts, places = [0] * E, [set[tuple[int, int]](), set[tuple[int, int]]()]
        for token, expert in enumerate(chosen_SK[:, k].tolist()):
            if counts[expert] < C:
                places[token >= S // 2].add((expert, counts[expert]))
            counts[expert] += 1
        taken.append(places)
    return bool(taken[0][0] & taken[1][1] or taken[0][1] & taken[1][0])


def test_slot_shared_by_two_choices_is_rejected_in_later_step(world: None) -> None:
    """Each choice alone has exclusive slots, and the first steps have first choices only."""
    layer = Layer(conditionally_shared_slots, product_per_choice, 2).double()
    compiled = torch.compile(
        layer, backend=GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True), fullgraph=True
    )
    bias_E = layer.gate.bias.detach()
    bias_E[-1] = 1e2
    with torch.no_grad():
        for _ in range(2):
            x_SM = torch.randn(S, M, dtype=torch.float64)
            torch.testing.assert_close(compiled(x_SM), layer(x_SM), rtol=1e-12, atol=1e-12)
        bias_E[-1] = -1e2
        while not is_slot_shared(layer, x_SM):
            x_SM = torch.randn(S, M, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"tokens of two micro-batches share a slot .* remove own_places"):
            compiled(x_SM)
