"""What the graph proves of places, as gates are written; and what it must not prove."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.fx.experimental.proxy_tensor import make_fx

from fusedmoe.graph.elements import CutVariable, Index, NotKnown, Variable, flat, unflat
from fusedmoe.graph.place_proofs import proven

S, E, C, M = 12, 4, 5, 6
#: From scores of experts to what goes into which place, and with what weight it is read back.
Gate = Callable[[Tensor], tuple[Tensor, Tensor]]
Way = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("world")


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def captured(gate: Gate, there: Way = lambda rows: rows, experts: Way = F.gelu, back: Way = lambda rows: rows) -> int:
    """How many products of a layer with this gate are proven to be of places that are one token's own."""

    def layer(logit_SE: Tensor, x_SM: Tensor, w_EMM: Tensor) -> Tensor:
        send_SEC, weight_SEC = gate(logit_SE)
        rows_ECM = there(torch.einsum("sec,sm->ecm", send_SEC.to(x_SM.dtype), x_SM))
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        out_ECM = all_to_all_single(experts(torch.bmm(rows_ECM, w_EMM)), None, None, dist.group.WORLD)
        return torch.einsum("sec,ecm->sm", weight_SEC.to(x_SM.dtype), back(out_ECM))

    module = make_fx(layer, tracing_mode="fake")(floats(S, E), floats(S, M), floats(E, M, M))
    return len(proven(module.graph, None))


def as_gshard(logit_SE: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and flag of the best expert, and how many came before."""
    score_SE = logit_SE.softmax(-1)
    mask_SE = F.one_hot(score_SE.argmax(-1), E)
    return score_SE, mask_SE, mask_SE.to(dtype).cumsum(0) - 1


def switch(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """As Mesh TensorFlow has it: the place counts from 1, is 0 where it is of another, and one is taken off."""
    weight_S, expert_S = logit_SE.softmax(-1).max(-1)
    mask_SE = F.one_hot(expert_S, E).float()
    place_SE = mask_SE.cumsum(0) * mask_SE
    mask_SE = mask_SE * (place_SE <= C)
    slot_SC = F.one_hot(((place_SE - 1) * mask_SE).sum(-1).long().clamp(min=0), C)
    weight_SEC = weight_S[:, None, None] * mask_SE[:, :, None] * slot_SC[:, None]
    return weight_SEC.bool(), weight_SEC


def deepspeed(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    score_SE, mask_SE, place_SE = as_gshard(logit_SE)
    mask_SE = mask_SE * torch.lt(place_SE, C)
    slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long(), C).double()
    combine_SEC = torch.einsum("se,sc->sec", score_SE * mask_SE, slot_SC)
    return combine_SEC.bool(), combine_SEC


def in_integers(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """By comparisons alone; weights of any sign."""
    expert_S = logit_SE.argmax(-1)
    mask_SE = expert_S[:, None] == torch.arange(E)
    place_SE = mask_SE.long().cumsum(0) - mask_SE.long()  # of those before
    send_SEC = mask_SE[:, :, None] & (place_SE[:, :, None] == torch.arange(C))
    return send_SEC, send_SEC * logit_SE[:, :, None]


def by_a_place_of_each(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """As in `examples/captured.py`: one number for each token, compared with the capacity behind the slots."""
    weight_S, expert_S = logit_SE.softmax(-1).max(-1)
    chosen_SE = F.one_hot(expert_S, E)
    place_S = (chosen_SE.cumsum(0) * chosen_SE).sum(-1) - 1
    slot_SC = F.one_hot(place_S.clamp(max=C - 1), C) * (place_S < C)[:, None]
    send_SEC = (chosen_SE[:, :, None] * slot_SC[:, None, :]).to(logit_SE.dtype)
    return send_SEC, send_SEC * weight_S[:, None, None]


def looked_up(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """By indices: flags are scattered, and each token looks its place up."""
    weight_S1, expert_S1 = logit_SE.softmax(-1).topk(1)
    mask_SE = torch.zeros_like(logit_SE).scatter(1, expert_S1, 1.0)
    place_S1 = mask_SE.cumsum(0).gather(1, expert_S1) - 1
    slot_SC = (place_S1 == torch.arange(C)).double()
    kept_SEC = mask_SE[:, :, None] * slot_SC[:, None]
    return kept_SEC, kept_SEC * weight_S1[:, :, None]


def several(expert_SK: Tensor, weight_SK: Tensor, order: str = "kse") -> tuple[Tensor, Tensor]:
    """First choices before second ones, or all of a token's at once."""
    tokens, k = expert_SK.shape
    mask_SKE = F.one_hot(expert_SK, E).double()
    if order == "kse":
        place_SKE = (mask_SKE.transpose(0, 1).reshape(-1, E).cumsum(0) - 1).view(k, tokens, E).transpose(0, 1)
    else:
        place_SKE = (mask_SKE.view(-1, E).cumsum(0) - 1).view(tokens, k, E)
    kept_SKE = mask_SKE * (place_SKE < C)
    slot_SKC = F.one_hot((place_SKE * mask_SKE).sum(-1).long().clamp(max=C - 1), C).double()
    combine_SEC = torch.einsum("ske,skc,sk->sec", kept_SKE, slot_SKC, weight_SK)
    return combine_SEC > 0, combine_SEC


def gshard_of_two(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    weight_SK, expert_SK = logit_SE.softmax(-1).topk(2)
    return several(expert_SK, weight_SK / weight_SK.sum(-1, keepdim=True).clamp(min=1e-9))


def by_hash(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    expert_SK = (3 * torch.arange(S)[:, None] + torch.arange(2)) % E
    return several(expert_SK, logit_SE.softmax(-1).gather(1, expert_SK), "ske")


def by_chance(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    expert_SK = torch.rand(S, E).topk(1).indices
    return several(expert_SK, logit_SE.sigmoid().gather(1, expert_SK))


GATES = [switch, deepspeed, in_integers, by_a_place_of_each, looked_up, gshard_of_two, by_hash, by_chance]


@pytest.mark.parametrize("gate", GATES)
def test_gates_with_a_capacity_are_proven(gate: Gate) -> None:
    assert captured(gate) == 2
    send_SEC, weight_SEC = gate(floats(S, E))
    assert (send_SEC.double().sum(0) <= 1).all() and not (weight_SEC[send_SEC == 0]).any(), "the test's own gates"


def changed(score: Way = lambda s: s, flag: Way = lambda f: f, count: Way = lambda f: f.cumsum(0) - 1) -> Gate:
    def gate(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
        score_SE = score(logit_SE)
        mask_SE = flag(F.one_hot(score_SE.argmax(-1), E).double())
        place_SE = count(mask_SE)
        mask_SE = mask_SE * (place_SE < C)
        slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long().clamp(0, C - 1), C).double()
        combine_SEC = torch.einsum("se,sc->sec", score_SE * mask_SE, slot_SC)
        return combine_SEC > 0, combine_SEC

    return gate


def test_what_near_misses_are_changed_from_is_proven() -> None:
    assert captured(changed(score=lambda s: s.softmax(-1))) == 2


NEAR: dict[str, Gate] = {
    "a score that may be below 0": changed(),
    "flags of two experts": changed(lambda s: s.softmax(-1), lambda f: f + f.roll(1, 1)),
    "no flags": changed(lambda s: s.softmax(-1), lambda f: f * 0.5),
    "a count of others": changed(lambda s: s.softmax(-1), count=lambda f: f.roll(1, 1).cumsum(0) - 1),
    "a count of other tokens": changed(lambda s: s.softmax(-1), count=lambda f: f.roll(1, 0).cumsum(0) - 1),
    "a count along experts": changed(lambda s: s.softmax(-1), count=lambda f: f.cumsum(1) - 1),
    "a count that starts again": changed(
        lambda s: s.softmax(-1), count=lambda f: f.view(2, -1, E).cumsum(1).view(S, E) - 1
    ),
    "a count modulo the capacity": changed(lambda s: s.softmax(-1), count=lambda f: (f.cumsum(0) - 1) % C),
    "half a count": changed(lambda s: s.softmax(-1), count=lambda f: (f.cumsum(0) * 0.5).floor()),
    "a count and a number of the token's": changed(
        lambda s: s.softmax(-1), count=lambda f: f.cumsum(0) - torch.arange(S)[:, None]
    ),
    "no count": changed(lambda s: s.softmax(-1), count=lambda f: torch.arange(S)[:, None] % C + 0 * f),
    "a count that is rounded": changed(
        lambda s: s.softmax(-1), count=lambda f: torch.cat([f] * 40).bfloat16().cumsum(0)[:S] - 1
    ),
}


def without_a_limit(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """What is beyond the capacity shares the last place."""
    score_SE, mask_SE, place_SE = as_gshard(logit_SE)
    slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long().clamp(max=C - 1), C).double()
    return torch.einsum("se,sc->sec", mask_SE.double(), slot_SC), torch.einsum(
        "se,sc->sec", score_SE * mask_SE, slot_SC
    )


def the_same_twice(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Two tokens with one index."""
    send_SEC, weight_SEC = in_integers(logit_SE)
    twice_S = torch.arange(S) // 2
    return send_SEC[twice_S], weight_SEC[twice_S]


def of_another(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens read the places of others."""
    send_SEC, weight_SEC = deepspeed(logit_SE)
    return send_SEC, weight_SEC.flip(0)


def of_all_experts(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens read the same place of all experts."""
    score_SE, mask_SE, place_SE = as_gshard(logit_SE)
    kept_SE = mask_SE * (place_SE < C)
    slot_SC = F.one_hot((place_SE * kept_SE).sum(1).long(), C).double()
    return torch.einsum("se,sc->sec", kept_SE.double(), slot_SC), torch.einsum("se,sc->sec", score_SE, slot_SC)


NEAR |= {gate.__name__: gate for gate in (without_a_limit, the_same_twice, of_another, of_all_experts)}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_are_not(name: str) -> None:
    assert captured(NEAR[name]) == 0


WAYS: dict[str, tuple[dict[str, Way], int]] = {
    "a bias and a gate": (dict(experts=lambda h: F.silu(h) * (h + torch.ones(M)) @ torch.ones(M, M).double()), 2),
    "the way there turned": (dict(there=lambda r: r.view(E, C, 2, M // 2).transpose(2, 3).reshape(E, C, M)), 2),
    "places come back in another order": (dict(back=lambda r: r.flip(1)), 0),
    "experts come back in another order": (dict(back=lambda r: r[[1, 0, 2, 3]]), 0),
    "places and experts change roles": (dict(back=lambda r: r.reshape(C, E, M).transpose(0, 1)), 0),
    "rows see each other": (dict(experts=lambda h: h.softmax(1)), 0),
    "rows see their mean": (dict(experts=lambda h: h + h.mean(1, keepdim=True)), 0),
    "what divides": (dict(experts=lambda h: h / (1 + h.abs())), 0),
    "rows are somebody else's, too": (dict(back=lambda r: r * 2 + r.sum()), 0),
}


@pytest.mark.parametrize("name", WAYS)
def test_rows_come_back_to_where_they_set_out(name: str) -> None:
    ways, expected = WAYS[name]
    assert captured(deepspeed, **ways) == expected  # type: ignore[arg-type]


def test_rows_that_the_caller_gets_are_not_proven() -> None:
    """The same results are proven where they are only kept for the backward pass."""

    def layer(logit_SE: Tensor, x_SM: Tensor) -> tuple[Tensor, Tensor]:
        send_SEC, weight_SEC = deepspeed(logit_SE)
        rows_ECM = torch.einsum("sec,sm->ecm", send_SEC.double(), x_SM)
        for _ in range(2):
            rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD).relu()
        return torch.einsum("sec,ecm->sm", weight_SEC, rows_ECM), rows_ECM.transpose(0, 1)

    graph = make_fx(layer, tracing_mode="fake")(floats(S, E), floats(S, M)).graph
    assert [len(proven(graph, results)) for results in (None, 2, 1)] == [0, 0, 2]


def test_indices_of_reshapes() -> None:
    a, b = Index(((Variable("a", 4), 1),)), Index(((Variable("b", 6), 1),))
    assert flat((a, b), (4, 6)) == Index(((Variable("a", 4), 6), (Variable("b", 6), 1)))
    assert unflat(flat((a, b), (4, 6)), (4, 1, 6)) == (a, Index(), b)
    with pytest.raises(CutVariable, match="at 2"):
        unflat(a, (2, 2))
    with pytest.raises(NotKnown):
        unflat(b.plus(Index((), 1)), (6,))  # beyond the end
    with pytest.raises(NotKnown):
        unflat(b, (3, 4))  # 6 values in rows of 4
    assert flat((a, b), (4, 6)).counts_all and flat((a, b), (4, 6)).injective
    assert not flat((a, b), (4, 5)).injective and not flat((a, b), (4, 7)).counts_all
