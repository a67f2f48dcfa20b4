"""Numerical parity with Tutel: every captured run, in one process and on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cluster import Cluster
from tests.tutel.cases import captured, cases, make_layer, run_case, run_functions, run_net

RTOL, ATOL = 1e-5, 1e-6


def differences(found: dict[str, Tensor], known: dict[str, np.ndarray]) -> list[str]:
    bad = []
    for key, value in found.items():
        mine, theirs = value.double().numpy(), known[key]
        if mine.shape != theirs.shape or not np.allclose(mine, theirs, rtol=RTOL, atol=ATOL):
            bad.append(f"{key}: {mine.shape} {theirs.shape} {np.abs(mine - theirs).max()}")
    return bad


def run_all(rank: int, world: int) -> tuple[list[str], int, set[str]]:
    """Return the differences, the number of compared arrays, and captured arrays that were not compared."""
    torch.set_num_threads(1)
    known = captured(rank, world)
    found = run_functions()
    for name, case in cases(rank, world).items():
        found |= {f"{name}/{key}": value for key, value in run_case(rank, world, case).items()}
    if world > 1:
        found |= run_net(rank, world)
    return differences(found, known), len(found), set(known) - set(found)


def test_one_process_equals_captured_tutel_runs() -> None:
    bad, compared, left = run_all(0, 1)
    assert bad == [] and left == set() and compared > 200


def test_two_ranks_equal_captured_tutel_runs(cluster: Cluster) -> None:
    for bad, compared, left in cluster.run(2, run_all):
        assert bad == [] and left == set() and compared > 300


@pytest.mark.parametrize("name", ["top2_cf1.25", "top2_cf0.5_drop", "top2_prescore", "gelu", "nobias", "llama_ffn"])
def test_fused_experts_equal_padded_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured runs are so small that they use padded blocks; the library's own operation gives equal results."""
    case = {**cases(0, 1)[name], "dtype": torch.float64}
    assert make_layer(0, 1, case).experts.fused(make_layer(0, 1, case), torch.zeros(1, 16).double(), 48) is None
    blocks = run_case(0, 1, case)
    monkeypatch.setattr("fusedmoe.tutel.experts.ffn.SMALL", 0)
    assert make_layer(0, 1, case).experts.fused(make_layer(0, 1, case), torch.zeros(1, 16).double(), 48) is not None
    fused = run_case(0, 1, case)
    for key in blocks:
        torch.testing.assert_close(fused[key], blocks[key], rtol=1e-12, atol=1e-11)
