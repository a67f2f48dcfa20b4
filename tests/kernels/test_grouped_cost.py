from __future__ import annotations

from fusedmoe.kernels.grouped import cost


def test_costs_by_hand() -> None:
    """R = 10 rows of T = 5 tokens, E = 2 experts, d = 8, n = 3, 2 bytes an element: Rnd = 240, Td = 40, End = 48."""
    of_tokens = dict(rows=10, tokens=5, experts=2, dim=8, hidden=3, element_size=2)
    of_rows = dict(rows=10, experts=2, dim=8, hidden=3, element_size=2)
    assert cost.up(**of_tokens) == (4 * 240, 2 * (40 + 96 + 60 + 30))
    assert cost.down(**of_rows) == (2 * 240, 2 * (30 + 48 + 80))
    assert cost.dhidden(**of_tokens) == (2 * 240, 2 * (40 + 48 + 150))
    assert cost.dw2(**of_tokens) == (2 * 240, 2 * (40 + 30 + 48))
    assert cost.dinput(**of_rows) == (4 * 240, 2 * (60 + 96 + 80))
    assert cost.dw1(**of_tokens) == (4 * 240, 2 * (40 + 60 + 96))

    assert cost.up(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 48 + 30 + 30))
    assert cost.dhidden(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 48 + 90))
    assert cost.dinput(**of_rows, gated=False) == (2 * 240, 2 * (30 + 48 + 80))
    assert cost.dw1(**of_tokens, gated=False) == (2 * 240, 2 * (40 + 30 + 48))
