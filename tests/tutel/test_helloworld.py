"""The example's losses, step by step, are those of Tutel 0.3.3's helloworld; its arguments are Tutel's."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from fusedmoe.tutel.experts.ffn import FusedExpertsNetwork

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tutel_helloworld.py"


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    flags = "--dtype float64 --batch_size 1 --num_tokens 1024 --num_steps 2 --init 0.3 --device cpu"
    losses = main(flags.split())
    assert [f"{loss:.5f}" for loss in losses] == ["27.44839", "16.62704"]
    assert "[Summary] Average synchronized step_time = " in capsys.readouterr().out


def test_runs_on_tutel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    class Tutels(FusedExpertsNetwork):
        def __init__(self, **options: Any) -> None:
            seen.update(options)
            super().__init__(**options)

    monkeypatch.setattr("fusedmoe.tutel.experts.ffn.ExpertModule", Tutels)
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    small = "--batch_size 1 --num_tokens 4 --model_dim 8 --hidden_size 8 --num_steps 1 --device cpu"
    main(small.split())
    ours = {"num_experts_per_device", "hidden_size_per_expert", "model_dim", "sharded_count", "activation_fn"}
    assert seen == ours
