"""`own_places=True` is checked in the first step: exclusive slots pass unchanged, shared slots are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.graph import GraphBackend
from tests.cluster import Cluster
from tests.graph.models import FreeCopies
from tests.marks import slowly

S, E, C, M = 16, 4, 6, 8
#: Map from expert scores to the dispatch mask and the combine weights.
Gate = Callable[[Tensor], tuple[Tensor, Tensor]]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def switch(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Send each token to its best expert, in slots by a running count; drop tokens beyond the capacity."""
    score_SE = logit_SE.softmax(-1)
    mask_SE = F.one_hot(score_SE.argmax(-1), E).to(logit_SE.dtype)
    place_SE = mask_SE.float().cumsum(0) - 1
    mask_SE = mask_SE * (place_SE < C)
    slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long(), C).to(logit_SE.dtype)
    weight_SEC = (score_SE * mask_SE)[:, :, None] * slot_SC[:, None]
    return (weight_SEC > 0).to(logit_SE.dtype), weight_SEC


def indexed(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """By indices: scatter flags, and gather each token's slot."""
    weight_S1, expert_S1 = logit_SE.softmax(-1).topk(1)
    mask_SE = torch.zeros_like(logit_SE).scatter(1, expert_S1, 1.0)
    place_S1 = (mask_SE.float().cumsum(0).gather(1, expert_S1) - 1).long()
    kept_SEC = mask_SE[:, :, None] * (place_S1 == torch.arange(C)).to(logit_SE.dtype)[:, None]
    return kept_SEC, kept_SEC * weight_S1[:, :, None]


def without_capacity_limit(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens beyond the capacity share the last slot: at least half of the tokens, as experts 2 and 3 get none."""
    mask_SE = F.one_hot(logit_SE[:, :2].argmax(-1), E).to(logit_SE.dtype)
    place_S = ((mask_SE.cumsum(0) - 1) * mask_SE).sum(1).long().clamp(max=C - 1)
    send_SEC = mask_SE[:, :, None] * F.one_hot(place_S, C).to(logit_SE.dtype)[:, None]
    return send_SEC, send_SEC * logit_SE.sigmoid()[:, :, None]


def slots_of_other_half(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens read the slots of tokens in the other half of the batch."""
    send_SEC, weight_SEC = switch(logit_SE)
    return send_SEC, weight_SEC.roll(S // 2, 0)


class Layer(nn.Module):
    """Experts with a bias between two linear layers.

    Args:
        gate: maps scores to dispatch mask and combine weights.
        experts: function of the multiplied rows [E, C, M] and a bias per expert.
    """

    def __init__(self, gate: Gate, experts: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.choose, self.experts = gate, experts
        self.front, self.gate, self.behind = nn.Linear(M, M), nn.Linear(M, E), nn.Linear(M, M)
        self.w_EMM, self.b_E1M = nn.Parameter(torch.randn(E, M, M)), nn.Parameter(1 + torch.rand(E, 1, M))

    def forward(self, x_SM: Tensor) -> Tensor:
        x_SM = self.front(x_SM).tanh()
        send_SEC, weight_SEC = self.choose(self.gate(x_SM))
        rows_ECM = torch.einsum("sec,sm->ecm", send_SEC, x_SM)
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        rows_ECM = self.experts(torch.bmm(rows_ECM, self.w_EMM[: len(rows_ECM)]), self.b_E1M)
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        return self.behind(torch.einsum("sec,ecm->sm", weight_SEC, rows_ECM)) + x_SM


def biased_gelu(rows_ECM: Tensor, b_E1M: Tensor) -> Tensor:
    return F.gelu(rows_ECM + b_E1M)


def compare_steps(gate: Gate, experts: Any, dtype: torch.dtype, tolerance: float, grad: bool = True) -> list[str]:
    """Run three steps, compiled and eager; return the operators of the forward pass."""
    layer = Layer(gate, experts).to(dtype)
    backend = GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(3):
        x_SM = torch.randn(S, M, dtype=dtype)
        results = []
        for run in (compiled, layer):
            if not grad:
                with torch.no_grad():
                    results.append([run(x_SM)])
                continue
            layer.zero_grad()
            y_SM = run(x_SM)
            y_SM.square().mean().backward()
            results.append([y_SM, *(one.grad.clone() for one in layer.parameters())])
        for ours, right in zip(*results, strict=True):
            assert (ours - right).norm() <= tolerance * (1 + right.norm())
    return [*backend.reports[0].order]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "dtype", "tolerance"),
    [
        (switch, torch.bfloat16, 5e-2),
        pytest.param(indexed, torch.float64, 1e-12, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (switch, torch.float64, 1e-12),
                (switch, torch.float32, 1e-5),
                (indexed, torch.float32, 1e-5),
                (indexed, torch.bfloat16, 5e-2),
            )
        ),
    ],
)
def test_exclusive_slots_pass_check_and_equal_eager(
    world: None, gate: Gate, dtype: torch.dtype, tolerance: float
) -> None:
    """Covers the first step, which runs as captured, and the chunked steps."""
    order = compare_steps(gate, biased_gelu, dtype, tolerance)
    assert sum(name.startswith("combine_rows") for name in order) == 2


@pytest.mark.slow
def test_inference_passes_exclusive_slot_check(world: None) -> None:
    assert any("combine_rows" in name for name in compare_steps(switch, biased_gelu, torch.float64, 1e-12, grad=False))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("gate", "said"),
    [
        *slowly(
            (
                without_capacity_limit,
                r"a slot of bmm\S* \(aten\.bmm\.default, node \d+ of \d+, \S*test_own_places\.py:\d+\) has",
            )
        ),
        (
            slots_of_other_half,
            r"in bmm_2 .* a token reads a slot .*; bmm_2 .* computes another row for token \d+, and \d+ in all",
        ),
    ],
)
def test_shared_slots_error_names_operator(world: None, gate: Gate, said: str, dtype: torch.dtype) -> None:
    """Every step is refused while the model stays the same."""
    layer = Layer(gate, biased_gelu).to(dtype)
    compiled = torch.compile(layer, backend=GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True))
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"rank 0: .*{said}.*remove own_places from the GraphBackend"):
            compiled(torch.randn(S, M, dtype=dtype))


class ReadsAllSlots(Layer):
    """Also reads the experts' output by a mean over all slots."""

    def forward(self, x_SM: Tensor) -> Tensor:
        send_SEC, weight_SEC = self.choose(self.gate(x_SM))
        rows_ECM = torch.einsum("sec,sm->ecm", send_SEC, x_SM.tanh())
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        rows_ECM = self.experts(rows_ECM, self.b_E1M)
        rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
        return torch.einsum("sec,ecm->sm", weight_SEC, rows_ECM).sin() + rows_ECM.mean()


@pytest.mark.slow
def test_read_of_nonzero_empty_slots_is_rejected(world: None) -> None:
    x_SM = torch.randn(S, M)
    for experts, right in ((biased_gelu, False), (lambda rows, _: rows.relu(), True)):
        torch._dynamo.reset()
        layer = ReadsAllSlots(switch, experts)
        compiled = torch.compile(layer, backend=GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True))
        if right:
            for _ in range(2):
                torch.testing.assert_close(compiled(x_SM), layer(x_SM))
        else:
            with pytest.raises(ConfigError, match=r"mean.* reads unused slots, in which wait_tensor_1"):
                compiled(x_SM)


def normalized(rows_ECM: Tensor, b_E1M: Tensor) -> Tensor:
    """Divide rows by their norm: an empty slot gives the gradient of 0/0, and the bias avoids that."""
    rows_ECM = rows_ECM + b_E1M
    return rows_ECM / rows_ECM.abs()


def test_gradient_reading_empty_slots_is_rejected(world: None) -> None:
    """The error comes before the second step, whose backward would be wrong; the first step runs as captured."""
    layer = Layer(switch, normalized).double()
    compiled = torch.compile(layer, backend=GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True))
    x_SM = torch.randn(S, M, dtype=torch.float64)
    weights = list(layer.parameters())
    for _ in range(2):
        found, right = (run(x_SM).square().sum() for run in (compiled, layer))
    for one, other in zip(torch.autograd.grad(found, weights), torch.autograd.grad(right, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="of the backward pass depends on unused slots"):
        compiled(x_SM)


def share_slots_on_one_rank(rank: int, world: int) -> list[str]:
    """Share slots on the second rank only, then on neither."""
    torch._dynamo.reset()
    said = []

    def shares_if_told(logit_SE: Tensor) -> tuple[Tensor, Tensor]:
        send_SEC, weight_SEC = switch(logit_SE)
        twice_S = torch.where(logit_SE[:, 0] > 1e3, torch.arange(S) % (S // 2), torch.arange(S))
        return send_SEC[twice_S], weight_SEC[twice_S]

    layer = Layer(shares_if_told, lambda rows, _: rows.relu())
    compiled = torch.compile(
        layer, backend=GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=True, timeout_s=60)
    )
    x_SM = torch.randn(S, M)
    bias_E = layer.gate.bias.detach()
    for shared in (float(rank), 0.0):
        bias_E[0] = 1e4 * shared
        try:
            right = layer(x_SM)
            torch.testing.assert_close(compiled(x_SM), right)
            torch.testing.assert_close(compiled(x_SM), right)
            said.append("")
        except (ConfigError, RankError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.slow
def test_shared_slots_on_one_rank_are_rejected_on_all(cluster: Cluster) -> None:
    for refused, right in cluster.run(2, share_slots_on_one_rank):
        assert refused.startswith("RankError: captured graph, the first run with own_places=True: rank 1: ")
        assert "rank 0:" not in refused and re.search("tokens of two micro-batches share a slot", refused)
        assert not right
