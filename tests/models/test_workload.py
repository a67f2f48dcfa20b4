"""What a block amounts to follows from the gate and the order that a config makes."""

from __future__ import annotations

from typing import Any

import pytest

from fusedmoe.models.config import ModelConfig
from fusedmoe.models.workload import block_workload

TOKENS = 2 * 16


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"k": 2, "capacity_factor": 1.5}, 3 * TOKENS),
        ({"k": 2, "capacity_factor": None}, 2 * TOKENS),
        ({"k": 2, "capacity_factor": 1.5, "order": "dropless"}, 2 * TOKENS),
        ({"gate": "switch", "k": 2, "capacity_factor": 1.0}, TOKENS),
        ({"gate": "expert_choice", "k": 2, "capacity_factor": 0.5}, TOKENS),
        ({"gate": "expert_choice", "k": 2, "capacity_factor": 0.5, "order": "dropless"}, TOKENS),
        ({"gate": "softmoe", "gate_options": {"slots": 3}}, 8 * 3),
    ],
    ids=str,
)
def test_rows(settings: dict[str, Any], rows: int) -> None:
    config = ModelConfig(batch=2, seq_len=16, experts=8, **settings)
    assert block_workload(config, 4, 1, 1, 4).rows == pytest.approx(rows)
    # Twice as many ranks on an expert's shards bring twice as many tokens.
    assert block_workload(config, 4, 2, 1, 4).rows == pytest.approx(2 * rows)
