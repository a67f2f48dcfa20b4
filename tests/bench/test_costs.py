from __future__ import annotations

import torch

from bench.gpu import costs
from fusedmoe.kernels.layout import build_layout
from fusedmoe.kernels.wire import pack_fp8
from tests.kernels.routings import choose


def test_products_by_hand() -> None:
    """R = 10 rows of T = 5 tokens, E = 2 experts, d = 8, n = 3, 2 bytes an element: Rnd = 240, Td = 40, End = 48."""
    of_tokens = dict(rows=10, tokens=5, experts=2, dim=8, hidden=3, element_size=2)
    of_rows = dict(rows=10, experts=2, dim=8, hidden=3, element_size=2)
    assert costs.up(**of_tokens) == (4 * 240, 2 * (40 + 96 + 60 + 30))
    assert costs.down(**of_rows) == (2 * 240, 2 * (30 + 48 + 80))
    assert costs.dhidden(**of_tokens) == (2 * 240, 2 * (40 + 48 + 150))
    assert costs.dw2(**of_tokens) == (2 * 240, 2 * (40 + 30 + 48))
    assert costs.dinput(**of_rows) == (4 * 240, 2 * (60 + 96 + 80))
    assert costs.dw1(**of_tokens) == (4 * 240, 2 * (40 + 60 + 96))

    assert costs.up(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 48 + 30 + 30))
    assert costs.dhidden(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 48 + 90))
    assert costs.dinput(**of_rows, gated=False) == (2 * 240, 2 * (30 + 48 + 80))
    assert costs.dw1(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 30 + 48))


def test_a_pass_of_experts_is_its_products() -> None:
    """7 rows, d = 10, n = 6, gated: three products forward, and twice as much backward."""
    of_tokens = dict(rows=7, tokens=5, experts=2, dim=10, hidden=6, element_size=4)
    of_rows = dict(rows=7, experts=2, dim=10, hidden=6, element_size=4)
    forward = costs.up(**of_tokens).flops + costs.down(**of_rows).flops
    assert forward == 7 * 2 * 3 * 10 * 6
    of_hidden = costs.dhidden(**of_tokens).flops + costs.dinput(**of_rows).flops
    assert of_hidden + costs.dw1(**of_tokens).flops + costs.dw2(**of_tokens).flops == 2 * forward


def test_the_gate_counts_every_operand_once() -> None:
    forward, backward = costs.gate(10, 8, 4, 2, 2), costs.gate(10, 8, 4, 2, 2, backward=True)
    assert forward == (2 * 10 * 8 * 4, 2 * 8 * (10 + 4) + 4 * 10 * 4 + 12 * 10 * 2)
    assert backward == (4 * 10 * 8 * 4, 2 * 2 * 8 * (10 + 4) + 4 * 10 * 4 + 12 * 10 * 2)


def test_the_layout_counts_every_array_once() -> None:
    expert_SK = choose(11, 3, 4)
    layout = build_layout(expert_SK, 4, 7)
    arrays = (expert_SK, layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK)
    assert costs.layout(11, 3, 4, layout.rows) == (
        0,
        sum(a.numel() * a.element_size() for a in arrays if a is not None),
    )


def test_rows_are_moved_once() -> None:
    layout = build_layout(choose(11, 3, 4), 4, 7)
    rows_NM, weight_N = torch.randn(layout.rows, 10), torch.rand(layout.rows)
    read = sum(t.numel() * t.element_size() for t in (rows_NM, weight_N, layout.row_SK))
    assert costs.gather_sum(layout.rows, 11, 3, 10, 4, True) == (layout.rows * 20, read + 11 * 10 * 4)
    assert costs.gather_sum(layout.rows, 11, 3, 10, 2, False) == (
        layout.rows * 10,
        (layout.rows + 11) * 20 + 11 * 3 * 8,
    )
    assert costs.permute(layout.rows, 10, 4) == (0, layout.rows * (2 * 40 + 8))


def test_packing_counts_both_sides() -> None:
    rows_NM = torch.randn(7, 10)
    packed = pack_fp8(rows_NM)
    assert costs.pack(7, 10, 4, 14) == (0, rows_NM.numel() * 4 + packed.numel())
