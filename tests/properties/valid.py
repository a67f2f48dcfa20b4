"""Valid input for every public operation of one process, and the expected result: its definition, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fusedmoe
from fusedmoe import autograd
from fusedmoe.autograd.gate import gate_from_logits as gate_of_logits
from fusedmoe.autograd.order import take_pairs as values_of_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import define_experts
from fusedmoe.kernels.gate import GateChoice, GateRule
from fusedmoe.kernels.gather_sum import define_gather_sum, define_permute
from fusedmoe.kernels.layout import Layout, define_layout
from tests.layers.gate_cases import best_first
from tests.layers.gate_cases import make as make_gate
from tests.oracle import dense_forward
from tests.properties.draw import Draw, close, same_gradients


def same_layout(got: Layout, expected: Layout) -> None:
    names = ("counts_E", "offsets_E1", "source_N", "pair_N", "row_SK")
    for name, one, other in zip(names, got.tensors, expected.tensors, strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype, name
        assert torch.equal(one, other), (name, one, other)


def order(draw: Draw) -> None:
    S, K, E = draw.size(), draw.size(1, 4), draw.size(1)
    expert_SK = draw.choices(S, K, E)
    capacity = draw.one_of((None, 0, 1, 2, 5))
    priority_S = torch.randint(0, 3, (S,)).to(torch.float64) if draw.maybe() else None
    got = autograd.order(expert_SK, E, capacity, priority_S)
    same_layout(got, define_layout(expert_SK, E, capacity, priority_S))


def permute(draw: Draw) -> None:
    layout, x_SM = _rows(draw)
    same_gradients(autograd.permute(x_SM, layout), define_permute(x_SM, layout), {"x_SM": x_SM})


def unpermute(draw: Draw) -> None:
    layout, x_SM = _rows(draw)
    rows_NM = draw.floats(layout.rows, x_SM.shape[1])
    with torch.no_grad():
        rows_NM[sum(layout.counts) :] = torch.nan  # padding
    expected = define_gather_sum(rows_NM, layout)
    same_gradients(autograd.unpermute(rows_NM, layout), expected, {"rows_NM": rows_NM})


def take_pairs(draw: Draw) -> None:
    layout, _ = _rows(draw)
    value_SK = draw.floats(*layout.row_SK.shape)
    kept = sum(layout.counts)
    taken = value_SK.reshape(-1)[layout.pair_N[:kept]]
    expected = torch.cat([taken, taken.new_zeros(layout.rows - kept)])
    same_gradients(values_of_pairs(value_SK, layout), expected, {"value_SK": value_SK})


def experts(draw: Draw) -> None:
    S, K, E, M = draw.size(), draw.size(1, 3), draw.size(1, 5), draw.size(1, 6)
    layout, x_SM, activation = draw.layout(S, K, E), draw.floats(S, M), draw.one_of(tuple(ACTIVATIONS))
    weights = draw.weights(E, M, activation, draw.one_of((M, draw.size(1))))
    weight_SK = draw.floats(S, K) if draw.maybe(0.7) else None
    weight_N = None if weight_SK is None else weight_SK.reshape(-1)[layout.pair_N]
    expected = define_experts(x_SM, layout.exact(), weight_N, weights, activation)
    if weight_SK is not None and draw.maybe(0.8):  # else, as with indexing by slots, padding is token 0's
        weight_N = values_of_pairs(weight_SK, layout)
    given = {"x_SM": x_SM, "weight_SK": weight_SK, "w1": weights.w1, "w2": weights.w2, "b1": weights.b1}
    given |= {"b2": weights.b2}
    same_gradients(autograd.experts(x_SM, layout, weight_N, weights, activation), expected, given)


def gate(draw: Draw) -> None:
    S, M, E = draw.size(), draw.size(1, 6), draw.size(1)
    x_SM, weight_EM = draw.floats(S, M), draw.floats(E, M)
    rule, bias_E = _rule(draw, S, E), draw.floats(E, grad=False) if draw.maybe(0.3) else None
    if rule.score == "none":
        x_SM, weight_EM = (t.detach().abs().requires_grad_() for t in (x_SM, weight_EM))
    choice = autograd.gate(x_SM, weight_EM, rule, bias_E)
    _same_choice(choice, x_SM @ weight_EM.t(), rule, bias_E, {"x_SM": x_SM, "weight_EM": weight_EM})


def gate_from_logits(draw: Draw) -> None:
    S, E = draw.size(), draw.size(1)
    logits_SE = draw.floats(S, E)
    rule, bias_E = _rule(draw, S, E), draw.floats(E, grad=False) if draw.maybe(0.3) else None
    if rule.score == "none":
        logits_SE = logits_SE.detach().abs().requires_grad_()
    choice = gate_of_logits(logits_SE, rule, bias_E)
    _same_choice(choice, logits_SE, rule, bias_E, {"logits_SE": logits_SE})


def through_experts(draw: Draw) -> None:
    """In a world of one: sorted rows through the exchange and the experts."""
    S, K, E, M = draw.size(), draw.size(1, 3), draw.size(1, 5), draw.size(1, 6)
    layout, x_SM, activation = draw.layout(S, K, E).exact(), draw.floats(S, M), draw.one_of(tuple(ACTIVATIONS))
    weights, weight_SK = draw.weights(E, M, activation), draw.floats(S, K)
    topology = Topology()
    name = draw.one_of(("direct", "1dh", "2dh"))
    form = RowForm.of(x_SM, layout, weight_SK)
    exchange = exchange_metadata(make_all_to_all(name, topology), topology.esp, layout.counts_E, form)

    def compute(rows: Tensor, here: Layout, factor: Tensor | None) -> Tensor:
        return autograd.experts(rows, here, factor, weights, activation)

    rows_NM, weight_N = autograd.permute(x_SM, layout), values_of_pairs(weight_SK, layout)
    y_SM = autograd.unpermute(autograd.through_experts(rows_NM, weight_N, exchange, compute), layout)
    expected = define_experts(x_SM, layout, weight_SK.reshape(-1)[layout.pair_N], weights, activation)
    same_gradients(y_SM, expected, {"x_SM": x_SM, "weight_SK": weight_SK, "w1": weights.w1, "w2": weights.w2})


def layer(draw: Draw) -> None:
    E, M = draw.size(2), draw.size(1, 6)
    name = draw.one_of(GATES)
    k = 1 if name in ("switch", "softmoe") else draw.size(1, min(3, E))
    gate = make_gate(name, E, k, **({} if name == "softmoe" else {"capacity_factor": _capacity(draw, name)}))
    expert = draw.one_of((fusedmoe.experts.SwiGLU(draw.size(1)), fusedmoe.experts.FeedForward(draw.size(1), "gelu")))
    orders = fusedmoe.orders
    order = draw.one_of((None, orders.Sparse(), orders.Dropless(), orders.Einsum()))
    shared = fusedmoe.experts.FeedForward(2, "relu") if draw.maybe(0.3) else None
    made = fusedmoe.MoELayer(M, gate, expert, order=order, shared=shared, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    made.train(draw.maybe())
    x = draw.floats(*(draw.size(1, 3) for _ in range(draw.size(0, 2))), draw.size(), M)
    seed = draw.random.randrange(2**31)
    torch.manual_seed(seed)
    y = made(x)
    aux = made.aux_loss
    torch.manual_seed(seed)
    dropless = isinstance(order, orders.Dropless) or (order is None and gate.capacity_factor is None)
    expected, expected_aux = dense_forward(made, x.reshape(-1, M), dropless)
    close("aux", aux, expected_aux)
    both = y.reshape(-1, M), expected
    # Sum in the loss, to compare its gradient, too.
    with_aux = [torch.cat([of.reshape(-1), one.reshape(1)]) for of, one in zip(both, (aux, expected_aux), strict=True)]
    same_gradients(*with_aux, {"x": x, **dict(made.named_parameters())})


def _capacity(draw: Draw, name: str) -> float | None:
    factor = draw.one_of((None, 0.5, 1.0, 2.0))
    return 1.0 if factor is None and name == "expert_choice" else factor


def _rows(draw: Draw) -> tuple[Layout, Tensor]:
    S, K, E, M = draw.size(), draw.size(1, 4), draw.size(1), draw.size(1)
    return draw.layout(S, K, E), draw.floats(S, M)


def _rule(draw: Draw, tokens: int, experts: int) -> GateRule:
    divisors = [n for n in range(1, tokens + 1) if tokens % n == 0]
    return GateRule(
        draw.size(1, experts),
        draw.one_of(("softmax", "sigmoid", "none")),
        draw.maybe(),
        draw.one_of((1.0, 2.5)),
        draw.maybe(),
        draw.one_of([None, *divisors]),
        draw.maybe(),
    )


def _same_choice(
    choice: GateChoice,
    logits_SE: Tensor,
    rule: GateRule,
    bias_E: Tensor | None,
    given: dict[str, Tensor | None],
) -> None:
    """The same choice, token by token in loops."""
    S, E = logits_SE.shape
    score = {"softmax": lambda row: row.softmax(0), "sigmoid": torch.sigmoid, "none": lambda row: row}[rule.score]
    experts, parts = [], []
    B = rule.sequences(S)
    sums, counts = logits_SE.new_zeros(B, E), logits_SE.new_zeros(B, E)
    for s in range(S):
        row = score(logits_SE[s])
        by = logits_SE[s] if bias_E is None else row.detach() + bias_E
        chosen = best_first(by.tolist(), rule.k)
        weight = row[chosen] / row[chosen].sum() if rule.normalize else row[chosen]
        experts.append(chosen)
        parts.append(weight * rule.scale)
        share = row / row.sum() if rule.score == "sigmoid" else row
        at = torch.zeros_like(sums)
        at[s // (S // B)] = 1
        sums = sums + at * share
        counts[s // (S // B), chosen] += 1
    assert choice.expert_SK.tolist() == experts
    close("logits", choice.logits_SE, logits_SE)
    weight_SK = torch.stack(parts) if parts else logits_SE.new_zeros(0, rule.k) + 0 * logits_SE.sum()
    same_gradients(choice.weight_SK, weight_SK, given)
    assert (choice.score_BE is not None) == (choice.count_BE is not None) == rule.statistics
    if choice.score_BE is not None and choice.count_BE is not None:
        same_gradients(choice.score_BE, sums, given)
        close("counts", choice.count_BE, counts)
    assert (choice.logsumexp_S is not None) == rule.logsumexp
    if choice.logsumexp_S is not None:
        same_gradients(choice.logsumexp_S, logits_SE.exp().sum(1).log(), given)


GATES = ("topk", "switch", "gshard", "sigmoid", "xmoe", "softmoe", "expert_choice", "batch_prioritised", "hash")
GATES = (*GATES, "random", "deepseek_v3")

PROPERTIES: dict[str, Callable[[Draw], None]] = {
    "order": order,
    "permute": permute,
    "unpermute": unpermute,
    "take_pairs": take_pairs,
    "experts": experts,
    "gate": gate,
    "gate_from_logits": gate_from_logits,
    "through_experts": through_experts,
    "layer": layer,
}
